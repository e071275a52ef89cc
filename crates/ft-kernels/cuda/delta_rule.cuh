// What the kernels of the gated delta rule share: the unit keys and the decays of a chunk, its triangles, the solution
// of its triangular system. Formulas: crates/ft-ops/src/cpu/delta_rule.rs; here a chunk has fewer tokens.
//
// Letters: H key heads, V value heads (value head j uses key head j / (V / H)), P elements of a key, Q of a value, C
// tokens of a chunk. qkv [N, 2·H·P + V·Q], a and b [N, V]. Columns of a state [P, Q] depend on each other only through
// sums over them; so a block of the two scans has SLICE columns.
#pragma once
#include "common.cuh"
#include "mma.cuh"

namespace delta {

constexpr int C = 32, THREADS = 256, LANES = THREADS / C, SLICE = 32, SHARE = SLICE / LANES;
// Elements of a key, at most.
constexpr int KEY = 128, ROWS = KEY / C;
// Distance of the rows of a triangle and of a slice in shared memory.
constexpr int PITCH = C + 1;
constexpr float EPS = 1e-6f;

struct Heads {
    int key_heads, value_heads, key_dim, value_dim;
    __device__ __forceinline__ int group() const { return value_heads / key_heads; }
    __device__ __forceinline__ i64 width() const { return 2 * (i64)key_heads * key_dim + (i64)value_heads * value_dim; }
    // The first column of q, k or v of a head in qkv.
    __device__ __forceinline__ i64 q_at(int head) const { return (i64)head / group() * key_dim; }
    __device__ __forceinline__ i64 k_at(int head) const { return (i64)key_heads * key_dim + q_at(head); }
    __device__ __forceinline__ i64 v_at(int head) const { return 2 * (i64)key_heads * key_dim + (i64)head * value_dim; }
};

template <typename T>
struct Inputs {
    const T *qkv, *a, *b;
    const float *a_log, *dt_bias;
};

// Row and place in it of a thread, if LANES neighbors share a row of a chunk.
__device__ __forceinline__ int own_row() {
    return threadIdx.x / LANES;
}
__device__ __forceinline__ int own_lane() {
    return threadIdx.x % LANES;
}

__device__ __forceinline__ float softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

// Copies n rows of `size` elements, with length `factor`, to rows `size + 1` apart; the other rows of the chunk are 0.
// Returns the inverse length of the own row.
template <typename T>
__device__ __forceinline__ float unit_rows(const T* from, i64 stride, int n, int size, float factor, float* to) {
    const int row = own_row();
    float squares = 0;
    if (row < n) {
        for (int p = own_lane(); p < size; p += LANES) {
            const float x = widen(from[row * stride + p]);
            squares += x * x;
        }
    }
    const float inverse = 1.0f / sqrtf(lane_sum<LANES>(squares) + EPS);
    for (int p = own_lane(); p < size; p += LANES)
        to[row * (size + 1) + p] = row < n ? widen(from[row * stride + p]) * inverse * factor : 0.0f;
    return inverse;
}

// The decays of a value head in a chunk; tokens that are not there do not decay and have β = 0.
struct Decays {
    // Sums of g up to each token. Their differences need more bits than f32 has.
    double sums[C];
    float beta[C];
    // e^sums, and e^(last sum - sums)
    float from_start[C], to_end[C];
    float whole;

    // For the whole block; ends with a barrier.
    template <typename T>
    __device__ __forceinline__ void fill(const Inputs<T>& x, int value_heads, int head, i64 first, int n) {
        const int i = threadIdx.x;
        if (i < C) {
            float g = 0, step = 0;
            if (i < n) {
                const i64 at = (first + i) * value_heads + head;
                const float sum = widen(x.a[at]) + x.dt_bias[head];
                g = -expf(x.a_log[head]) * softplus(sum);
                step = 1.0f / (1.0f + expf(-widen(x.b[at])));
            }
            sums[i] = g;
            beta[i] = step;
        }
        __syncthreads();
        if (i == 0) {
            for (int t = 1; t < C; t++) sums[t] += sums[t - 1];
            whole = expf((float)sums[C - 1]);
        }
        __syncthreads();
        if (i < C) {
            from_start[i] = expf((float)sums[i]);
            to_end[i] = expf((float)(sums[C - 1] - sums[i]));
        }
        __syncthreads();
    }

    __device__ __forceinline__ float between(int later, int earlier) const {
        return expf((float)(sums[later] - sums[earlier]));
    }
};

// a_il = (K Kᵀ)_il e^(γ_i - γ_l), l < i, and p_il = (Q Kᵀ)_il e^(γ_i - γ_l), l <= i; the rest is 0.
__device__ __forceinline__ void triangles(
    const float* q, const float* k, int size, const Decays& d, float* a, float* p) {
    const int i = own_row(), pitch = size + 1;
    for (int l = own_lane(); l < C; l += LANES) {
        float kk = 0, qk = 0;
        if (l <= i) {
            for (int e = 0; e < size; e++) {
                const float other = k[l * pitch + e];
                kk += k[i * pitch + e] * other;
                qk += q[i * pitch + e] * other;
            }
            const float decay = d.between(i, l);
            kk *= l < i ? decay : 0.0f;
            qk *= decay;
        }
        a[i * PITCH + l] = kk;
        p[i * PITCH + l] = qk;
    }
}

// state (+)= the sum over the tokens of the products of `left(token, p)` and `right(token, column)`, after it was
// multiplied by `decay`. The state is [P, SLICE], its rows PITCH apart.
template <typename L, typename R>
__device__ __forceinline__ void add_outer(float* state, int size, float decay, L left, R right) {
    float sum[ROWS][SHARE] = {};
    for (int i = 0; i < C; i++) {
        float r[SHARE];
#pragma unroll
        for (int s = 0; s < SHARE; s++) r[s] = right(i, own_lane() + s * LANES);
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const int p = own_row() + row * C;
            if (p >= size) break;
            const float l = left(i, p);
#pragma unroll
            for (int s = 0; s < SHARE; s++) sum[row][s] += l * r[s];
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const int p = own_row() + row * C;
        if (p >= size) break;
#pragma unroll
        for (int s = 0; s < SHARE; s++) {
            float& to = state[p * PITCH + own_lane() + s * LANES];
            to = decay * to + sum[row][s];
        }
    }
}

// The columns of a block, and where it reads and writes states of the columns.
struct Slice {
    int first, count;
    __device__ __forceinline__ explicit Slice(int value_dim)
        : first(blockIdx.y * SLICE), count(value_dim - first < SLICE ? value_dim - first : SLICE) {}

    // Columns that are not there are 0; `from` may be null: all 0.
    __device__ __forceinline__ void load(float* state, const float* from, int key_dim, int value_dim) const {
        for (int at = threadIdx.x; at < key_dim * SLICE; at += THREADS) {
            const int p = at / SLICE, j = at % SLICE;
            state[p * PITCH + j] = from && j < count ? from[(i64)p * value_dim + first + j] : 0.0f;
        }
    }

    __device__ __forceinline__ void store(const float* state, float* to, int key_dim, int value_dim) const {
        for (int at = threadIdx.x; at < key_dim * SLICE; at += THREADS) {
            const int p = at / SLICE, j = at % SLICE;
            if (j < count) to[(i64)p * value_dim + first + j] = state[p * PITCH + j];
        }
    }
};

}  // namespace delta
