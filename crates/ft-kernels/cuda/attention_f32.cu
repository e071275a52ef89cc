// Attention in f32 without tensor cores, forward and backward: for models in f32.
//
// A block owns T rows (queries; in `keys` keys) of one head and walks over tiles of T rows of the other side. Eight
// lanes share an own row: lane `part` makes the scores of the other rows part, part + 8, .. and keeps of every result
// row the columns 4 part + 32 i + {0..3}. E: head size as compiled; `size` is the real one, any up to E.

#include "attention.cuh"

namespace attention {

template <int E, int T>
struct Plain {
    static constexpr int LANES = 8, BLOCK = LANES * T, STRIDE = E + 4, COLUMNS = E / 32, SHARE = T / LANES;

    /// Copies `given` rows of `size` elements; the rest is zero.
    static __device__ __forceinline__ void load(float* tile, const float* from, size_t stride, int given, int size) {
        for (int at = threadIdx.x; at < T * E; at += BLOCK) {
            const int row = at / E, column = at % E;
            tile[row * STRIDE + column] = row < given && column < size ? from[row * stride + column] : 0.0f;
        }
    }

    /// Copies `given` rows of `size` elements, which `at(row, column)` gives; the rest is zero.
    template <class F>
    static __device__ __forceinline__ void load(float* tile, int given, int size, F at) {
        for (int i = threadIdx.x; i < T * E; i += BLOCK) {
            const int row = i / E, column = i % E;
            tile[row * STRIDE + column] = row < given && column < size ? at(row, column) : 0.0f;
        }
    }

    /// Products of an own row with the other rows part, part + 8, ..
    static __device__ __forceinline__ void dots(float (&out)[SHARE], const float* own, const float* other) {
        const int part = threadIdx.x % LANES;
#pragma unroll
        for (int i = 0; i < SHARE; i++) out[i] = 0.0f;
#pragma unroll 4
        for (int at = 0; at < E; at += 4) {
            const float4 a = *reinterpret_cast<const float4*>(own + at);
#pragma unroll
            for (int i = 0; i < SHARE; i++) {
                const float4 b = *reinterpret_cast<const float4*>(other + (part + i * LANES) * STRIDE + at);
                out[i] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
            }
        }
    }

    /// acc += sum over the other rows of weight times row.
    static __device__ __forceinline__ void add(float4 (&acc)[COLUMNS], const float* weights, const float* other) {
        const int part = threadIdx.x % LANES;
#pragma unroll 4
        for (int row = 0; row < T; row++) {
            const float weight = weights[row];
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                const float4 b = *reinterpret_cast<const float4*>(other + row * STRIDE + part * 4 + i * 32);
                acc[i].x += weight * b.x;
                acc[i].y += weight * b.y;
                acc[i].z += weight * b.z;
                acc[i].w += weight * b.w;
            }
        }
    }

    static __device__ __forceinline__ void store(float* to, const float4 (&acc)[COLUMNS], float factor, int size) {
        const int part = threadIdx.x % LANES;
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            const int column = part * 4 + i * 32;
            if (column < size) to[column] = acc[i].x * factor;
            if (column + 1 < size) to[column + 1] = acc[i].y * factor;
            if (column + 2 < size) to[column + 2] = acc[i].z * factor;
            if (column + 3 < size) to[column + 3] = acc[i].w * factor;
        }
    }
};

/// The score times log2 e, exactly; `slope` as in `Scores`.
struct ExactScores {
    float scale, cap;
    __device__ __forceinline__ explicit ExactScores(const Form& form) : scale(form.scale), cap(form.cap) {}
    __device__ __forceinline__ float operator()(float x) const {
        return (cap == 0.0f ? x * scale : cap * tanhf(x * scale / cap)) * LOG2E;
    }
    __device__ __forceinline__ float slope(float score) const {
        if (cap == 0.0f) return 1.0f;
        const float t = score * LN2 / cap;
        return 1.0f - t * t;
    }
};

/// Over the eight lanes of an own row.
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
    for (int with = 1; with < 8; with *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, with));
    return x;
}
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int with = 1; with < 8; with *= 2) x += __shfl_xor_sync(0xffffffffu, x, with);
    return x;
}

/// SPLIT: as in attention_forward.cu; o and lse are partial results then.
template <int E, int T, bool SPLIT, class S>
__device__ __forceinline__ void plain_forward(const float* q, const Source<S>& keys, const Source<S>& values, float* o,
                                              float* lse, const Tile& tile, int block_head, int slots, const Form& form) {
    using P = Plain<E, T>;
    DYNAMIC_SHARED(memory);
    float* sq = reinterpret_cast<float*>(memory);
    float *sk = sq + T * P::STRIDE, *sv = sk + T * P::STRIDE, *weights = sv + T * P::STRIDE;
    const int row = threadIdx.x / 8, part = threadIdx.x % 8, pack = SPLIT ? form.pack : 1;
    // The head of a row among all rows of q, and among those of the results.
    auto own = [&](int r) {
        return static_cast<size_t>(tile.token + r / pack) * form.heads + block_head * pack + r % pack;
    };
    P::load(sq, tile.rows, form.size, [&](int r, int column) { return q[own(r) * form.size + column]; });
    float* mine = weights + row * (T + 1);
    const int at = tile.place + row / pack;
    const ExactScores scores(form);
    float top = -INFINITY, sum = 0.0f;
    float4 acc[P::COLUMNS] = {};
    for (int key = tile.low; key < tile.high; key += T) {
        __syncthreads();
        P::load(sk, tile.high - key, form.size, [&](int r, int column) { return keys.value(key + r, column); });
        P::load(sv, tile.high - key, form.size, [&](int r, int column) { return values.value(key + r, column); });
        __syncthreads();
        float s[P::SHARE], highest = top;
        P::dots(s, sq + row * P::STRIDE, sk);
#pragma unroll
        for (int i = 0; i < P::SHARE; i++) {
            const int j = key + part + 8 * i;
            s[i] = j > at || j >= tile.high || at - j >= form.window ? -INFINITY : scores(s[i]);
            highest = fmaxf(highest, s[i]);
        }
        highest = lanes_max(highest);
        const float base = highest == -INFINITY ? 0.0f : highest, shrink = exp2f(top - base);
        top = highest;
        sum *= shrink;
#pragma unroll
        for (int i = 0; i < P::COLUMNS; i++)
            acc[i] = make_float4(acc[i].x * shrink, acc[i].y * shrink, acc[i].z * shrink, acc[i].w * shrink);
#pragma unroll
        for (int i = 0; i < P::SHARE; i++) {
            const float weight = exp2f(s[i] - base);
            sum += weight;
            mine[part + 8 * i] = weight;
        }
        __syncwarp();
        P::add(acc, mine, sv);
    }
    sum = lanes_sum(sum);
    if (row >= tile.rows) return;
    const size_t to = SPLIT ? static_cast<size_t>(block_head) * slots + tile.slot + row : own(row);
    // Only a part of the keys can hold none that a row sees.
    P::store(o + to * form.size, acc, sum == 0.0f ? 0.0f : 1.0f / sum, form.size);
    if (part == 0) lse[to] = (top + log2f(sum)) * LN2;
}

template <int E, int T>
__device__ __forceinline__ void plain_queries(const float* q, const float* k, const float* v, const float* dout,
                                              const float* lse, const float* delta, float* dq, const Tile* tiles,
                                              const Form& form) {
    using P = Plain<E, T>;
    DYNAMIC_SHARED(memory);
    float* sq = reinterpret_cast<float*>(memory);
    float *sd = sq + T * P::STRIDE, *sk = sd + T * P::STRIDE, *sv = sk + T * P::STRIDE, *slopes = sv + T * P::STRIDE;
    const int row = threadIdx.x / 8, part = threadIdx.x % 8;
    const int head = static_cast<int>(blockIdx.x) % form.heads, kv_head = head / (form.heads / form.kv_heads);
    const Tile tile = tiles[blockIdx.x / form.heads];
    const size_t q_stride = static_cast<size_t>(form.heads) * form.size;
    const size_t k_stride = static_cast<size_t>(form.kv_heads) * form.size;
    const size_t own = tile.token * q_stride + static_cast<size_t>(head) * form.size;
    const size_t others = tile.other * k_stride + static_cast<size_t>(kv_head) * form.size;
    P::load(sq, q + own, q_stride, tile.rows, form.size);
    P::load(sd, dout + own, q_stride, tile.rows, form.size);
    float* mine = slopes + row * (T + 1);
    const int at = tile.place + row;
    const size_t stat = (static_cast<size_t>(tile.token) + row) * form.heads + head;
    const float own_lse = row < tile.rows ? lse[stat] * LOG2E : 0.0f, own_delta = row < tile.rows ? delta[stat] : 0.0f;
    const ExactScores scores(form);
    float4 acc[P::COLUMNS] = {};
    for (int key = tile.low; key < tile.high; key += T) {
        __syncthreads();
        P::load(sk, k + others + key * k_stride, k_stride, tile.high - key, form.size);
        P::load(sv, v + others + key * k_stride, k_stride, tile.high - key, form.size);
        __syncthreads();
        float s[P::SHARE], ds[P::SHARE];
        P::dots(s, sq + row * P::STRIDE, sk);
        P::dots(ds, sd + row * P::STRIDE, sv);
#pragma unroll
        for (int i = 0; i < P::SHARE; i++) {
            const int j = key + part + 8 * i;
            const float score = scores(s[i]);
            const float slope = exp2f(score - own_lse) * (ds[i] - own_delta) * scores.slope(score);
            mine[part + 8 * i] = j > at || j >= tile.high || at - j >= form.window ? 0.0f : slope;
        }
        __syncwarp();
        P::add(acc, mine, sk);
    }
    if (row < tile.rows) P::store(dq + own + row * q_stride, acc, form.scale, form.size);
}

template <int E, int T>
__device__ __forceinline__ void plain_keys(const float* q, const float* k, const float* v, const float* dout,
                                           const float* lse, const float* delta, float* dk, float* dv,
                                           const Tile* tiles, const Form& form) {
    using P = Plain<E, T>;
    DYNAMIC_SHARED(memory);
    float* sk = reinterpret_cast<float*>(memory);
    float *sv = sk + T * P::STRIDE, *sq = sv + T * P::STRIDE, *sd = sq + T * P::STRIDE;
    float *weights = sd + T * P::STRIDE, *slopes = weights + T * (T + 1);
    const int row = threadIdx.x / 8, part = threadIdx.x % 8;
    const int group = form.heads / form.kv_heads, kv_head = static_cast<int>(blockIdx.x) % form.kv_heads;
    const Tile tile = tiles[blockIdx.x / form.kv_heads];
    const size_t q_stride = static_cast<size_t>(form.heads) * form.size;
    const size_t k_stride = static_cast<size_t>(form.kv_heads) * form.size;
    const size_t own = tile.token * k_stride + static_cast<size_t>(kv_head) * form.size;
    P::load(sk, k + own, k_stride, tile.rows, form.size);
    P::load(sv, v + own, k_stride, tile.rows, form.size);
    float *my_weights = weights + row * (T + 1), *my_slopes = slopes + row * (T + 1);
    const int j = tile.place + row;
    const ExactScores scores(form);
    float4 acc_k[P::COLUMNS] = {}, acc_v[P::COLUMNS] = {};
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int query = tile.low; query < tile.high; query += T) {
            const size_t first = static_cast<size_t>(tile.other) + query;
            __syncthreads();
            P::load(sq, q + first * q_stride + static_cast<size_t>(head) * form.size, q_stride, tile.high - query, form.size);
            P::load(sd, dout + first * q_stride + static_cast<size_t>(head) * form.size, q_stride, tile.high - query, form.size);
            __syncthreads();
            float s[P::SHARE], ds[P::SHARE];
            P::dots(s, sk + row * P::STRIDE, sq);
            P::dots(ds, sv + row * P::STRIDE, sd);
#pragma unroll
            for (int n = 0; n < P::SHARE; n++) {
                const int column = part + 8 * n, i = query + column;
                float weight = 0.0f, slope = 0.0f;
                if (j <= i && i < tile.high && i - j < form.window) {
                    const size_t stat = (first + column) * form.heads + head;
                    const float score = scores(s[n]);
                    weight = exp2f(score - lse[stat] * LOG2E);
                    slope = weight * (ds[n] - delta[stat]) * scores.slope(score);
                }
                my_weights[column] = weight;
                my_slopes[column] = slope;
            }
            __syncwarp();
            P::add(acc_v, my_weights, sd);
            P::add(acc_k, my_slopes, sq);
        }
    }
    if (row >= tile.rows) return;
    P::store(dk + own + row * k_stride, acc_k, form.scale, form.size);
    P::store(dv + own + row * k_stride, acc_v, 1.0f, form.size);
}

/// Block: a tile of queries on a part of block `tile.other` of the cache, for the heads of one key head.
template <int E, int T, class S>
__device__ __forceinline__ void plain_cached(const float* q, float* partial, float* partial_lse, const KvBlock* blocks,
                                             const Tile* tiles, int slots, const Form& form) {
    const int heads = form.heads / form.pack, block_head = static_cast<int>(blockIdx.x) % heads;
    const int kv_head = block_head * form.pack / (form.heads / form.kv_heads);
    const Tile tile = tiles[blockIdx.x / heads];
    const KvBlock& block = blocks[tile.other];
    const Source<S> keys(block.keys, block.key_scales, kv_head, form);
    const Source<S> values(block.values, block.value_scales, kv_head, form);
    plain_forward<E, T, true>(q, keys, values, partial, partial_lse, tile, block_head, slots, form);
}

}  // namespace attention

// 8 T threads, two blocks at a time at least: left to itself the compiler saves registers for more, and spills.
// Shared memory in floats: T (3 (E + 4) + T + 1), backward T (4 (E + 4) + 2 (T + 1)).
// Grids: tiles x H, tiles x H, tiles x K; cached: tiles x (H / pack).
#define PLAIN(E, T)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(8 * T, 2) attention_f32_forward_##E(                               \
        const float* q, const float* k, const float* v, float* o, float* lse, const attention::Tile* tiles,         \
        attention::Form form) {                                                                                     \
        using namespace attention;                                                                                  \
        const int head = static_cast<int>(blockIdx.x) % form.heads, kv_head = head / (form.heads / form.kv_heads);  \
        const Tile tile = tiles[blockIdx.x / form.heads];                                                           \
        const Source<float> keys(k, static_cast<size_t>(tile.other), kv_head, form);                                \
        const Source<float> values(v, static_cast<size_t>(tile.other), kv_head, form);                              \
        plain_forward<E, T, false>(q, keys, values, o, lse, tile, head, 0, form);                                   \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(8 * T, 2) attention_f32_queries_##E(                               \
        const float* q, const float* k, const float* v, const float* dout, const float* lse, const float* delta,    \
        float* dq, const attention::Tile* tiles, attention::Form form) {                                            \
        attention::plain_queries<E, T>(q, k, v, dout, lse, delta, dq, tiles, form);                                 \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(8 * T, 2) attention_f32_keys_##E(                                  \
        const float* q, const float* k, const float* v, const float* dout, const float* lse, const float* delta,    \
        float* dk, float* dv, const attention::Tile* tiles, attention::Form form) {                                 \
        attention::plain_keys<E, T>(q, k, v, dout, lse, delta, dk, dv, tiles, form);                                \
    }

#define CACHED(E, T, STORED, S)                                                                                     \
    extern "C" __global__ void __launch_bounds__(8 * T, 2) attention_f32_cached_##STORED##_##E(                     \
        const float* q, float* partial, float* partial_lse, const KvBlock* blocks, const attention::Tile* tiles,    \
        int slots, attention::Form form) {                                                                          \
        attention::plain_cached<E, T, S>(q, partial, partial_lse, blocks, tiles, slots, form);                      \
    }
#define ALL_CACHED(E, T)             \
    CACHED(E, T, f32, float)         \
    CACHED(E, T, bf16, ptx::Short) \
    CACHED(E, T, int8, signed char)

ALL_CACHED(64, 32)
ALL_CACHED(128, 32)
ALL_CACHED(256, 16)
ALL_CACHED(512, 8)

// Grid: tokens x (H / pack), 128 threads.
extern "C" __global__ void __launch_bounds__(128)
    attention_f32_join(float* o, float* lse, const float* partial, const float* partial_lse,
                       const attention::Join* joins, const int* starts, int slots, attention::Form form) {
    attention::join_parts(o, lse, partial, partial_lse, joins, starts, slots, form);
}

PLAIN(64, 32)
PLAIN(128, 32)
PLAIN(256, 16)
PLAIN(512, 8)

// delta [N, H] = sum over a head of dout o; a warp for a row of `size` elements, `rows` = N H. 128 threads.
extern "C" __global__ void __launch_bounds__(128)
    attention_f32_delta(float* delta, const float* o, const float* dout, long long rows, int size) {
    const long long row = static_cast<long long>(blockIdx.x) * 4 + threadIdx.x / 32;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int at = threadIdx.x % 32; at < size; at += 32) sum += o[row * size + at] * dout[row * size + at];
    for (int with = 16; with > 0; with /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, with);
    if (threadIdx.x % 32 == 0) delta[row] = sum;
}
