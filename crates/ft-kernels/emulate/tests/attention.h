// Attention by plain loops in f64, and the tiles of work as crates/ft-ops/src/cuda/attention.rs makes them.
#pragma once

#include "test.h"
#include "../../cuda/attention.cuh"

using attention::Form;
using attention::Tile;

struct Case {
    const char* name;
    int heads, kv_heads, size;
    /// Tokens of each document.
    std::vector<int> queries, keys;
    float scale, cap;
    /// 0: none.
    int window;
    /// The first tokens of every document are the same.
    int shared = 0;

    Form form(int pack = 1, int parts = 1) const {
        return {heads, kv_heads, size, window ? window : 1 << 30, scale, cap, pack, parts};
    }
    int nq() const { return sum(queries); }
    int nk() const { return sum(keys); }
    static int sum(const std::vector<int>& v) {
        int total = 0;
        for (int n : v) total += n;
        return total;
    }
    bool sees(int i, int j) const { return j <= i && (window == 0 || i - j < window); }
};

/// Calls f(first query, first key, queries, keys) for each document.
template <class F>
void each_document(const Case& c, F f) {
    int q = 0, k = 0;
    for (size_t d = 0; d < c.queries.size(); d++) {
        f(q, k, c.queries[d], c.keys[d]);
        q += c.queries[d];
        k += c.keys[d];
    }
}

/// Tiles of queries, heaviest first, for the forward pass and for dq.
inline std::vector<Tile> query_tiles(const Case& c, int rows, int pack) {
    std::vector<Tile> tiles;
    each_document(c, [&](int q0, int k0, int queries, int keys) {
        int step = rows / pack;
        for (int first = 0; first < queries; first += step) {
            int n = std::min(step, queries - first), place = keys - queries + first;
            int low = c.window ? std::max(0, place + 1 - c.window) : 0;
            tiles.push_back({q0 + first, n * pack, place, k0, low, place + n, 0, 0});
        }
    });
    std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.high - a.low > b.high - b.low; });
    return tiles;
}

/// Tiles of keys for dk and dv; queries and keys are the same tokens.
inline std::vector<Tile> key_tiles(const Case& c, int rows) {
    std::vector<Tile> tiles;
    each_document(c, [&](int q0, int, int tokens, int) {
        for (int first = 0; first < tokens; first += rows) {
            int n = std::min(rows, tokens - first);
            int high = c.window ? std::min(tokens, first + n - 1 + c.window) : tokens;
            tiles.push_back({q0 + first, n, first, q0, first, high, 0, 0});
        }
    });
    std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.high - a.low > b.high - b.low; });
    return tiles;
}

template <class T>
emulate::Buffer<T>& copy_into(emulate::Buffer<T>& buffer, const std::vector<T>& from) {
    std::copy(from.begin(), from.end(), buffer.data);
    return buffer;
}

/// The inputs of the kernels, and the expected outputs.
template <class T>
struct Problem {
    const Case& c;
    emulate::Buffer<T> q, k, v, dout;
    std::vector<double> o, lse, dq, dk, dv;

    /// `store(tensor)` rounds keys or values as a cache stores them.
    template <class F>
    explicit Problem(const Case& c, F store)
        : c(c),
          q(static_cast<size_t>(c.nq()) * c.heads * c.size),
          k(static_cast<size_t>(c.nk()) * c.kv_heads * c.size),
          v(k.n),
          dout(q.n),
          o(q.n),
          lse(static_cast<size_t>(c.nq()) * c.heads),
          dq(q.n),
          dk(k.n),
          dv(k.n) {
        q.fill_normal(1);
        k.fill_normal(2);
        v.fill_normal(3);
        dout.fill_normal(4);
        const size_t width = static_cast<size_t>(c.kv_heads) * c.size;
        each_document(c, [&](int, int k0, int, int) {
            for (auto* t : {&k, &v}) std::copy(t->data, t->data + c.shared * width, t->data + k0 * width);
        });
        store(k), store(v);
        each_document(c, [&](int q0, int k0, int queries, int keys) {
            for (int head = 0; head < c.heads; head++)
                for (int i = 0; i < queries; i++) row(q0 + i, head, k0, keys - queries + i);
        });
    }

    explicit Problem(const Case& c) : Problem(c, [](emulate::Buffer<T>&) {}) {}

    size_t at_q(int token, int head) const { return (static_cast<size_t>(token) * c.heads + head) * c.size; }
    size_t at_k(int token, int head) const { return (static_cast<size_t>(token) * c.kv_heads + head) * c.size; }

    template <class A, class B>
    double dot(const A& a, size_t at_a, const B& b, size_t at_b) const {
        double sum = 0;
        for (int e = 0; e < c.size; e++) sum += static_cast<double>(a[at_a + e]) * static_cast<double>(b[at_b + e]);
        return sum;
    }

    /// Everything that one query of one head contributes.
    void row(int token, int head, int k0, int place) {
        int kv = head / (c.heads / c.kv_heads);
        size_t own = at_q(token, head);
        std::vector<double> p(place + 1), slope(place + 1, 1.0);
        double top = -INFINITY, sum = 0, delta = 0;
        for (int j = 0; j <= place; j++) {
            double s = dot(q, own, k, at_k(k0 + j, kv)) * c.scale;
            if (c.cap != 0) {
                double t = std::tanh(s / c.cap);
                s = c.cap * t;
                slope[j] = 1 - t * t;
            }
            p[j] = c.sees(place, j) ? s : -INFINITY;
            top = std::max(top, p[j]);
        }
        for (double& s : p) sum += s = std::exp(s - top);
        for (double& s : p) s /= sum;
        lse[static_cast<size_t>(token) * c.heads + head] = top + std::log(sum);
        for (int j = 0; j <= place; j++)
            for (int e = 0; e < c.size; e++) o[own + e] += p[j] * static_cast<double>(v[at_k(k0 + j, kv) + e]);
        delta = dot(o, own, dout, own);
        for (int j = 0; j <= place; j++) {
            size_t key = at_k(k0 + j, kv);
            double ds = p[j] * (dot(v, key, dout, own) - delta) * slope[j] * c.scale;
            for (int e = 0; e < c.size; e++) {
                dv[key + e] += p[j] * static_cast<double>(dout[own + e]);
                dk[key + e] += ds * static_cast<double>(q[own + e]);
                dq[own + e] += ds * static_cast<double>(k[key + e]);
            }
        }
    }
};

/// The first result of each name is kept; later seeds must give the same bits.
inline void same_bits(const std::string& name, const void* data, size_t bytes) {
    static std::vector<std::pair<std::string, std::string>> kept;
    std::string now(static_cast<const char*>(data), bytes);
    for (auto& [known, bits] : kept) {
        if (known != name) continue;
        emulate::expect(bits == now, name + ": other bits than with the first seed");
        return;
    }
    kept.emplace_back(name, now);
}

template <class T>
void check(const Case& c, const char* what, const emulate::Buffer<T>& got, const std::vector<double>& want, double tolerance) {
    std::string name = std::string(c.name) + ": " + what;
    emulate::compare(name, got, want, tolerance);
    same_bits(name, got.data, got.n * sizeof(T));
}

/// Every head size, grouped queries, odd documents, windows, soft caps. Queries and keys are the same tokens.
inline std::vector<Case> training_cases() {
    auto same = [](const char* name, int heads, int kv_heads, int size, std::vector<int> documents, float scale, float cap,
                   int window) { return Case{name, heads, kv_heads, size, documents, documents, scale, cap, window}; };
    return {
        same("64 grouped", 4, 2, 64, {1, 7, 65, 130}, 0.125f, 0, 0),
        same("64 one token", 1, 1, 64, {1}, 0.125f, 0, 0),
        same("96 window", 2, 2, 96, {65, 130}, 0.102f, 0, 20),
        same("128 capped", 4, 1, 128, {130, 7, 65}, 0.0884f, 1.5f, 0),
        same("128 wide window", 2, 2, 128, {200, 1}, 0.0884f, 0, 70),
        same("256 both", 2, 1, 256, {65, 130}, 0.0625f, 2.0f, 33),
        same("40 padded, large scores", 2, 1, 40, {7, 130}, 0.7f, 0, 0),
        same("80 padded, window 1", 3, 3, 80, {65, 1, 1}, 0.11f, 0, 1),
        same("112 padded", 2, 2, 112, {64, 128, 2}, 0.0945f, 0, 0),
        same("200 padded", 2, 2, 200, {70}, 0.07f, 0, 0),
    };
}

/// More keys than queries.
inline std::vector<Case> cached_cases() {
    return {
        {"cached 128", 4, 2, 128, {1, 70, 0, 10}, {90, 100, 10, 10}, 0.0884f, 0, 0},
        {"cached 64 window", 6, 3, 64, {1, 70, 0, 10}, {90, 100, 10, 10}, 0.125f, 0, 20},
        {"cached 96 capped", 2, 1, 96, {3, 130}, {3, 200}, 0.1f, 1.0f, 0},
        {"cached 256", 2, 1, 256, {1, 5}, {150, 66}, 0.0625f, 0, 0},
    };
}

/// Keys and values in blocks of a KV cache, and the work on them as crates/ft-ops/src/cached_schedule.rs makes it.
template <class T, class S>
struct Cached {
    emulate::Buffer<S> k, v;
    emulate::Buffer<float> k_scales, v_scales;
    std::vector<KvBlock> blocks;
    std::vector<Tile> tiles;
    std::vector<std::vector<int>> parts;
    int slots = 0;

    static float narrowed(float x, float) { return x; }
    static __nv_bfloat16 narrowed(float x, __nv_bfloat16) { return __float2bfloat16(x); }

    /// Stores every head of `t`, and replaces it by what was stored.
    void put(const Case& c, emulate::Buffer<T>& t, emulate::Buffer<S>& to, emulate::Buffer<float>& scales) {
        for (size_t row = 0; row < t.n / c.size; row++) {
            float most = 0;
            for (int e = 0; e < c.size; e++) most = std::max(most, std::fabs(static_cast<float>(t[row * c.size + e])));
            scales[row] = most / 127.0f;
            for (int e = 0; e < c.size; e++) {
                const size_t at = row * c.size + e;
                const float x = static_cast<float>(t[at]);
                if constexpr (sizeof(S) == 1) {
                    to[at] = static_cast<S>(std::nearbyint(x * (127.0f / most)));
                    t[at] = narrowed(to[at] * scales[row], T());
                } else {
                    to[at] = narrowed(x, S());
                    t[at] = narrowed(static_cast<float>(to[at]), T());
                }
            }
        }
    }

    void piece(Tile tile, int keys, int pack) {
        for (const int high = tile.high; tile.low < high; tile.low += keys) {
            tile.high = std::min(high, tile.low + keys);
            tile.slot = slots;
            tiles.push_back(tile);
            for (int t = 0; t < tile.rows / pack; t++) parts[tile.token + t].push_back(slots + t * pack);
            slots += tile.rows;
        }
    }

    /// Blocks of `room` tokens, tiles of `rows` rows, pieces of `keys` keys.
    Cached(const Case& c, int room, int rows, int pack, int keys)
        : k(static_cast<size_t>(c.nk()) * c.kv_heads * c.size),
          v(k.n),
          k_scales(static_cast<size_t>(c.nk()) * c.kv_heads),
          v_scales(k_scales.n),
          parts(c.nq()) {
        const int step = rows / pack;
        auto block = [&](int token) {
            const size_t row = static_cast<size_t>(token) * c.kv_heads;
            blocks.push_back({k.data + row * c.size, v.data + row * c.size, k_scales.data + row, v_scales.data + row});
            return static_cast<int>(blocks.size()) - 1;
        };
        if (c.shared) {
            const int first = block(0);
            for (int token = 0; token < c.nq(); token += step)
                piece({token, std::min(step, c.nq() - token) * pack, c.shared, first, 0, c.shared, 0, 0}, keys, pack);
        }
        each_document(c, [&](int q0, int k0, int queries, int all) {
            for (int start = c.shared; start < all; start += room) {
                const int own = block(k0 + start), len = std::min(room, all - start);
                for (int first = std::max(0, start - (all - queries)); first < queries; first += step) {
                    const int n = std::min(step, queries - first), place = all - queries + first - start;
                    const int low = c.window ? std::max(0, place + 1 - c.window) : 0, high = std::min(len, place + n);
                    if (low < high) piece({q0 + first, n * pack, place, own, low, high, 0, 0}, keys, pack);
                }
            }
        });
    }

    /// `kernel`, then `join`: o and lse.
    template <class K, class J>
    void run(const Case& c, Problem<T>& p, K kernel, J join, int threads, size_t shared, int pack, uint64_t seed,
             emulate::Buffer<T>& o, emulate::Buffer<float>& lse) {
        emulate::Buffer<Tile> work(tiles.size());
        copy_into(work, tiles);
        emulate::Buffer<KvBlock> table(blocks.size());
        copy_into(table, blocks);
        std::vector<attention::Join> joins;
        std::vector<int> starts;
        for (auto& own : parts) {
            joins.push_back({static_cast<int>(starts.size()), static_cast<int>(own.size())});
            starts.insert(starts.end(), own.begin(), own.end());
        }
        emulate::Buffer<attention::Join> list(joins.size());
        copy_into(list, joins);
        emulate::Buffer<int> places(starts.size());
        copy_into(places, starts);
        const unsigned heads = c.heads / pack;
        emulate::Buffer<float> partial(static_cast<size_t>(slots) * heads * c.size);
        emulate::Buffer<float> partial_lse(static_cast<size_t>(slots) * heads);
        emulate::launch(kernel, dim3(static_cast<unsigned>(tiles.size()) * heads), dim3(threads), shared, seed, p.q.data,
                        partial.data, partial_lse.data, table.data, work.data, slots, c.form(pack));
        emulate::launch(join, dim3(static_cast<unsigned>(c.nq()) * heads), dim3(128), 0, seed, o.data, lse.data, partial.data,
                        partial_lse.data, list.data, places.data, slots, c.form(pack));
    }
};

/// Decoding: single queries and short prompts after long texts, one of them behind a common prefix.
inline std::vector<Case> decoding_cases() {
    return {
        {"rows 128", 8, 2, 128, {1, 1, 3}, {90, 150, 3}, 0.0884f, 0, 0},
        {"rows 64 window", 6, 3, 64, {1, 20, 1}, {90, 100, 7}, 0.125f, 0, 20},
        {"rows 256 capped", 2, 1, 256, {1, 5}, {150, 66}, 0.0625f, 2.0f, 0},
        {"rows 96 shared", 4, 1, 96, {1, 1, 2, 1}, {100, 81, 85, 90}, 0.1f, 0, 0, 77},
    };
}
