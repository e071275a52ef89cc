// Shared by the attention kernels: the form of an attention, the tiles of work, rows in shared memory, products.
//
// Letters: H query heads, K key heads, E head size as compiled (64, 96, 128 or 256; `size` is the real one, the rest
// of a row is zero), q and o [Nq, H size], k and v [Nk, K size], lse and delta [Nq, H].
// Scores are kept times log2 e, so that every exponential is one ex2.
#pragma once

#include "kv.cuh"
#include "mma.cuh"

namespace attention {

using bf16 = ptx::Short;

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
/// Threads of a block of the bf16 kernels.
constexpr int THREADS = 128;

/// As `Form` of crates/ft-ops/src/cuda/attention.rs.
struct Form {
    int heads, kv_heads, size;
    /// Query i sees the keys j with i - window < j <= i.
    int window;
    float scale;
    /// 0: none.
    float cap;
    /// Query heads that share the rows of a tile (on a KV cache; else 1).
    int pack;
    /// Parts into which the query heads of a key head are shared out (backward, keys).
    int parts;
};

/// Rows of a document that one block owns, and what it visits. Places count from the first key of the document.
struct __align__(16) Tile {
    /// First own token in the whole batch, and number of own rows (tokens times `pack`).
    int token, rows;
    /// Place of the first own token.
    int place;
    /// The token of the other side that stands at place 0. Of a KV cache the number of the block: places count from
    /// its first token.
    int other;
    /// Places of the other side to visit, `high` excluded.
    int low, high;
    /// First row in the partial results (split over keys only).
    int slot;
    int unused;
};

/// Where chunk `chunk` (8 elements, 16 bytes) of row `row` stands in a tile of rows of E elements, in elements. Eight
/// rows of the same chunk fall on eight different groups of banks. Tiles are aligned to 128 bytes.
template <int E>
__device__ __forceinline__ int spot(int row, int chunk) {
    const int turn = E % 64 == 0 ? row & 7 : (row >> 1) & 3;
    return row * E + (chunk ^ turn) * 8;
}

/// Addresses of `spot` for a fixed row and chunk, moved on by constants: a multiple of 8 rows and an even chunk.
template <int E>
struct Cursor {
    uint32_t start;
    __device__ __forceinline__ Cursor(const bf16* tile, int row, int chunk)
        : start(ptx::address(tile) + 2 * spot<E>(row, chunk)) {}
    __device__ __forceinline__ uint32_t at(int rows, int chunks) const {
        constexpr int TURNED = E % 64 == 0 ? 7 : 3;
        return (start ^ (chunks & TURNED) * 16) + (chunks & ~TURNED) * 16 + rows * E * 2;
    }
};

/// Which chunks a thread copies: `chunk` of the rows `row`, `row + PASS` and so on.
template <int E>
struct Copier {
    // Rows of one pass; with 12 chunks a row a quarter of the threads is idle, so that all passes are alike.
    static constexpr int CHUNKS = E / 8, PASS = E == 96 ? 8 : THREADS / CHUNKS;
    int row, chunk;
    __device__ __forceinline__ Copier()
        : row(static_cast<int>(threadIdx.x) / CHUNKS), chunk(static_cast<int>(threadIdx.x) % CHUNKS) {}

    /// Starts the copies to a tile of ROWS rows, of which `given` exist; the rest is zero. `at`: the first own chunk,
    /// `stride`: elements between rows. Rows that do not exist are not read.
    template <int ROWS>
    __device__ __forceinline__ void copy(bf16* tile, const bf16* at, size_t stride, int given, int size) const {
        static_assert(ROWS % PASS == 0, "whole passes");
        if (PASS * CHUNKS < THREADS && row >= PASS) return;
        const uint32_t to = ptx::address(tile + spot<E>(row, chunk));
        const int last = chunk * 8 < size ? given - row : 0;
#pragma unroll
        for (int first = 0; first < ROWS; first += PASS) {
            // `spot` repeats after 8 rows.
            const uint32_t place =
                PASS % 8 == 0 ? to + 2 * E * first : ptx::address(tile + spot<E>(first + row, chunk));
            ptx::copy16(place, at, first < last);
            at += PASS * stride;
        }
    }
};

/// Starts copying ROWS rows, `stride` elements apart, of which `given` exist; the rest is zero.
template <int E, int ROWS>
__device__ __forceinline__ void load_rows(bf16* tile, const bf16* from, size_t stride, int given, int size) {
    const Copier<E> own;
    own.template copy<ROWS>(tile, from + own.row * stride + own.chunk * 8, stride, given, size);
}

/// acc[m] += rows `row + 16 m`.. of `a` times the transpose of the first 8 NT rows of `b`.
template <int E, int MT, int NT>
__device__ __forceinline__ void rows_by_rows(float (&acc)[MT][NT][4], const bf16* a, int row, const bf16* b) {
    const int lane = threadIdx.x % 32;
    const Cursor<E> left(a, row + (lane & 15), lane >> 4);
    const Cursor<E> right(b, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
#pragma unroll
    for (int k = 0; k < E / 16; k++) {
        uint32_t fa[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) ptx::ldmatrix(fa[m], left.at(m * 16, 2 * k));
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            uint32_t fb[4];
            ptx::ldmatrix(fb, right.at(n * 16, 2 * k));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                ptx::mma(acc[m][2 * n], fa[m], fb[0], fb[1]);
                ptx::mma(acc[m][2 * n + 1], fa[m], fb[2], fb[3]);
            }
        }
    }
}

/// 16 rows of `a` from `row` on, as left factors that stay in registers: each step reads only the right ones.
template <int E>
__device__ __forceinline__ void load_fragments(uint32_t (&fragments)[E / 16][4], const bf16* a, int row) {
    const int lane = threadIdx.x % 32;
    const Cursor<E> left(a, row + (lane & 15), lane >> 4);
#pragma unroll
    for (int k = 0; k < E / 16; k++) ptx::ldmatrix(fragments[k], left.at(0, 2 * k));
}

/// acc += the rows of `load_fragments` times the transpose of the first 8 NT rows of `b`.
template <int E, int NT>
__device__ __forceinline__ void fragments_by_rows(float (&acc)[NT][4], const uint32_t (&fragments)[E / 16][4], const bf16* b) {
    const int lane = threadIdx.x % 32;
    const Cursor<E> right(b, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
#pragma unroll
    for (int k = 0; k < E / 16; k++) {
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            uint32_t fb[4];
            ptx::ldmatrix(fb, right.at(n * 16, 2 * k));
            ptx::mma(acc[2 * n], fragments[k], fb[0], fb[1]);
            ptx::mma(acc[2 * n + 1], fragments[k], fb[2], fb[3]);
        }
    }
}

/// acc[m] += w[m] (16 x 16 KT) times 16 KT rows of `b`, of which the columns from chunk `chunk` on, 8 NT of them.
template <int E, int MT, int KT, int NT>
__device__ __forceinline__ void weights_by_rows(float (&acc)[MT][NT][4], const uint32_t (&w)[MT][KT][4], const bf16* b,
                                                int chunk) {
    const int lane = threadIdx.x % 32;
    const Cursor<E> right(b, lane & 15, chunk + (lane >> 4));
#pragma unroll
    for (int k = 0; k < KT; k++) {
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            uint32_t fb[4];
            ptx::ldmatrix_trans(fb, right.at(k * 16, 2 * n));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                ptx::mma(acc[m][2 * n], w[m][k], fb[0], fb[1]);
                ptx::mma(acc[m][2 * n + 1], w[m][k], fb[2], fb[3]);
            }
        }
    }
}

/// An accumulator (16 x 16 KT) as the left factor of the next product: the fragments already stand right.
template <int KT>
__device__ __forceinline__ void pack_weights(uint32_t (&w)[KT][4], const float (&acc)[2 * KT][4]) {
#pragma unroll
    for (int k = 0; k < KT; k++) {
        w[k][0] = ptx::pack(acc[2 * k][0], acc[2 * k][1]);
        w[k][1] = ptx::pack(acc[2 * k][2], acc[2 * k][3]);
        w[k][2] = ptx::pack(acc[2 * k + 1][0], acc[2 * k + 1][1]);
        w[k][3] = ptx::pack(acc[2 * k + 1][2], acc[2 * k + 1][3]);
    }
}

/// Puts an accumulator of 16 rows, times `first` (rows 0 to 7) and `second` (8 to 15), into a tile from chunk `chunk`.
template <int E, int NT>
__device__ __forceinline__ void put_rows(bf16* tile, int row, int chunk, const float (&acc)[NT][4], float first,
                                         float second) {
    const int lane = threadIdx.x % 32, own = row + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const uint32_t upper = ptx::pack(acc[n][0] * first, acc[n][1] * first);
        const uint32_t lower = ptx::pack(acc[n][2] * second, acc[n][3] * second);
        *reinterpret_cast<uint32_t*>(tile + spot<E>(own, chunk + n) + column) = upper;
        *reinterpret_cast<uint32_t*>(tile + spot<E>(own + 8, chunk + n) + column) = lower;
    }
}

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(bf16 x) { return ptx::widened(x); }
__device__ __forceinline__ float widened(signed char x) { return static_cast<float>(x); }

/// Keys or values of one key head as f32, bf16 or int8: rows `stride` elements apart.
template <class S>
struct Source {
    const S* rows;
    size_t stride;
    /// int8: the scale of row r is `scales[r * heads + head]`.
    const float* scales;
    int heads, head;

    /// Of the block of a KV cache.
    __device__ __forceinline__ Source(const void* numbers, const float* scales, int head, const Form& form)
        : Source(static_cast<const S*>(numbers), 0, head, form) {
        this->scales = scales;
    }
    /// Of a tensor, from row `first` on.
    __device__ __forceinline__ Source(const S* numbers, size_t first, int head, const Form& form)
        : stride(static_cast<size_t>(form.kv_heads) * form.size), scales(nullptr), heads(form.kv_heads), head(head) {
        rows = numbers + first * stride + static_cast<size_t>(head) * form.size;
    }

    __device__ __forceinline__ float scale(int row) const { return scales[static_cast<size_t>(row) * heads + head]; }
    __device__ __forceinline__ float value(int row, int column) const {
        const float x = widened(rows[row * stride + column]);
        return sizeof(S) == 1 ? x * scale(row) : x;
    }

    /// Starts copying ROWS rows from row `first` on, of which `given` exist, to a tile of rows of E elements.
    template <int E, int ROWS>
    __device__ __forceinline__ void load(bf16* tile, int first, int given, int size) const {
        if constexpr (sizeof(S) == 2) {
            load_rows<E, ROWS>(tile, rows + first * stride, stride, given, size);
        } else {
            struct __align__(8) Eight {
                S at[8];
            };
            for (int i = threadIdx.x; i < ROWS * (E / 8); i += THREADS) {
                const int row = i / (E / 8), chunk = i % (E / 8);
                uint4 to = make_uint4(0, 0, 0, 0);
                if (row < given && chunk * 8 < size) {
                    const Eight codes = *reinterpret_cast<const Eight*>(rows + (first + row) * stride + chunk * 8);
                    const float by = scale(first + row);
                    auto two = [&](int c) { return ptx::pack(widened(codes.at[c]) * by, widened(codes.at[c + 1]) * by); };
                    to = make_uint4(two(0), two(2), two(4), two(6));
                }
                *reinterpret_cast<uint4*>(tile + spot<E>(row, chunk)) = to;
            }
        }
    }
};

/// Where the partial results of a token stand: row r of its rows in slot `starts[first + s] + r`, for each split s.
struct Join {
    int first, splits;
};

__device__ __forceinline__ void put_number(float x, float& to) { to = x; }
__device__ __forceinline__ void put_number(float x, bf16& to) { to = ptx::narrowed(x); }

/// Puts the parts of each query together. A warp for a row, a block for the `pack` heads of a token.
template <class T>
__device__ __forceinline__ void join_parts(T* o, float* lse, const float* partial, const float* partial_lse,
                                           const Join* joins, const int* starts, int slots, const Form& form) {
    const int heads = form.heads / form.pack, size = form.size, pack = form.pack;
    const size_t token = blockIdx.x / heads;
    const int block_head = static_cast<int>(blockIdx.x) % heads, lane = threadIdx.x % 32;
    const Join join = joins[token];
    for (int row = threadIdx.x / 32; row < pack; row += THREADS / 32) {
        auto slot = [&](int s) { return static_cast<size_t>(block_head) * slots + starts[join.first + s] + row; };
        float top = -INFINITY;
        for (int s = 0; s < join.splits; s++) top = fmaxf(top, partial_lse[slot(s)]);
        float sum = 0.0f;
        for (int s = 0; s < join.splits; s++) sum += ptx::exp2((partial_lse[slot(s)] - top) * LOG2E);
        const size_t to = token * form.heads + block_head * pack + row;
        if (lane == 0) lse[to] = top + log2f(sum) * LN2;
        for (int column = lane; column < size; column += 32) {
            float acc = 0.0f;
            for (int s = 0; s < join.splits; s++) {
                const size_t at = slot(s);
                acc += ptx::exp2((partial_lse[at] - top) * LOG2E) * partial[at * size + column];
            }
            put_number(acc / sum, o[to * size + column]);
        }
    }
}

/// From q·k to scores times log2 e, and back down for the gradient.
struct Scores {
    float factor, cap, to_tanh, from_tanh;
    __device__ __forceinline__ float rest() const { return cap == 0.0f ? factor : 1.0f; }
    __device__ __forceinline__ explicit Scores(const Form& form)
        : factor(form.scale * LOG2E),
          cap(form.cap * LOG2E),
          to_tanh(form.cap == 0.0f ? 0.0f : form.scale / form.cap * 2.0f * LOG2E),
          from_tanh(form.cap == 0.0f ? 0.0f : 1.0f / (form.cap * LOG2E)) {}

    template <int NT>
    __device__ __forceinline__ void apply(float (&s)[NT][4]) const {
        if (cap == 0.0f) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int c = 0; c < 4; c++) s[n][c] *= factor;
            }
        } else {
            apply_cap(s);
        }
    }

    /// As `apply`, without the factor if there is no cap: then the scores still have to be multiplied by `rest()`.
    template <int NT>
    __device__ __forceinline__ void apply_cap(float (&s)[NT][4]) const {
        if (cap != 0.0f) {
            // cap tanh(x). The absolute error of the tanh is about 1e-7, and differences of scores are what counts.
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float y = s[n][c] * to_tanh;
                    y = y > 40.0f ? 40.0f : y;
                    s[n][c] = cap * (1.0f - __fdividef(2.0f, ptx::exp2(y) + 1.0f));
                }
            }
        }
    }

    /// Multiplies ds by the derivative of the cap at the scores s that `apply` gave.
    template <int NT>
    __device__ __forceinline__ void slopes(float (&ds)[NT][4], const float (&s)[NT][4]) const {
        if (cap == 0.0f) return;
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float t = s[n][c] * from_tanh;
                ds[n][c] *= 1.0f - t * t;
            }
        }
    }
};

/// Sum or maximum over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace attention
