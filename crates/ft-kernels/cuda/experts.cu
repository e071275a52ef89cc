// Rows of the experts of a mixture: factors of rows, products of rows, rows added at their tokens; the gate of a shared
// expert; and the gated unit of gpt-oss, y = (u + 1) g sigmoid(alpha g) with g = min(gate, limit), u = clamp(up, limit).
// Rows have d elements, of which the first `packs` packs are moved 16 bytes at a time; one block for each row.
#include "common.cuh"

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

// x[r] *= factors[r].
template <typename T>
__device__ __forceinline__ void scale(T* x, const float* factors, i64 d, i64 packs) {
    constexpr int V = Full<T>::V;
    const float factor = factors[blockIdx.x];
    x += (i64)blockIdx.x * d;
    for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
        float a[V];
        load<V>(x + i * V, a);
#pragma unroll
        for (int j = 0; j < V; j++) a[j] *= factor;
        store<V>(x + i * V, a);
    }
    for (i64 i = packs * V + threadIdx.x; i < d; i += blockDim.x) narrow(widen(x[i]) * factor, x[i]);
}

// y[r] = a[r] · b[r], added to y[r] if `add`; b_step 0: all rows of b are the first.
template <typename T, typename B>
__device__ __forceinline__ void products(const T* a, const B* b, i64 b_step, i64 d, int add, float* y) {
    __shared__ float shared[32];
    a += (i64)blockIdx.x * d;
    b += (i64)blockIdx.x * b_step;
    float sum = 0;
    for (i64 i = threadIdx.x; i < d; i += blockDim.x) sum += widen(a[i]) * widen(b[i]);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) y[blockIdx.x] = add ? y[blockIdx.x] + sum : sum;
}

// y[tokens[r]] += part[r]; no token comes twice.
template <typename T>
__device__ __forceinline__ void add_at(const T* part, const u32* tokens, i64 d, i64 packs, T* y) {
    constexpr int V = Full<T>::V;
    part += (i64)blockIdx.x * d;
    y += (i64)tokens[blockIdx.x] * d;
    for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
        float a[V], b[V];
        load<V>(y + i * V, a);
        load<V>(part + i * V, b);
#pragma unroll
        for (int j = 0; j < V; j++) a[j] += b[j];
        store<V>(y + i * V, a);
    }
    for (i64 i = packs * V + threadIdx.x; i < d; i += blockDim.x) narrow(widen(y[i]) + widen(part[i]), y[i]);
}

// g = sigmoid(z), n of them.
template <typename T>
__device__ __forceinline__ void gates(const T* z, float* g, i64 n) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) g[i] = sigmoid(widen(z[i]));
}

// d g (1 - g), the gradient of z, in d.
extern "C" __global__ void gates_backward(const float* g, float* d, i64 n) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) d[i] = d[i] * g[i] * (1.0f - g[i]);
}

// As PyTorch: NaN passes, a value at its limit has a gradient.
__device__ __forceinline__ float at_most(float x, float limit) {
    return x > limit ? limit : x;
}

template <typename T>
__device__ __forceinline__ void clamped(const T* gate, const T* up, T* y, float alpha, float limit, i64 n) {
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const float g = at_most(widen(gate[i]), limit), u = -at_most(-at_most(widen(up[i]), limit), limit);
        narrow((u + 1.0f) * g * sigmoid(alpha * g), y[i]);
    }
}

// The gradients take the place of gate and up.
template <typename T>
__device__ __forceinline__ void clamped_backward(T* gate, T* up, const T* dy, float alpha, float limit, i64 n) {
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const float x = widen(gate[i]), v = widen(up[i]), d = widen(dy[i]);
        const float g = at_most(x, limit), u = -at_most(-at_most(v, limit), limit);
        const float s = sigmoid(alpha * g), rest = sigmoid(-alpha * g);
        narrow(x > limit ? 0.0f : d * (u + 1.0f) * (s + alpha * g * s * rest), gate[i]);
        narrow(fabsf(v) > limit ? 0.0f : d * g * s, up[i]);
    }
}

#define EXPERTS(T)                                                                                               \
    extern "C" __global__ void scale_rows_##T(T* x, const float* factors, i64 d, i64 packs) {                    \
        scale<T>(x, factors, d, packs);                                                                          \
    }                                                                                                            \
    extern "C" __global__ void add_at_##T(const T* part, const u32* tokens, i64 d, i64 packs, T* y) {            \
        add_at<T>(part, tokens, d, packs, y);                                                                    \
    }                                                                                                            \
    extern "C" __global__ void gates_##T(const T* z, float* g, i64 n) { gates<T>(z, g, n); }                     \
    extern "C" __global__ void clamped_forward_##T(                                                              \
        const T* gate, const T* up, T* y, float alpha, float limit, i64 n) {                                     \
        clamped<T>(gate, up, y, alpha, limit, n);                                                                \
    }                                                                                                            \
    extern "C" __global__ void clamped_backward_##T(                                                             \
        T* gate, T* up, const T* dy, float alpha, float limit, i64 n) {                                          \
        clamped_backward<T>(gate, up, dy, alpha, limit, n);                                                      \
    }

#define PRODUCTS(T, B)                                                                                           \
    extern "C" __global__ void row_products_##T##_##B(                                                           \
        const T* a, const B* b, i64 b_step, i64 d, int add, float* y) {                                          \
        products<T, B>(a, b, b_step, d, add, y);                                                                 \
    }

typedef float f32;
EXPERTS(f32)
EXPERTS(bf16)
PRODUCTS(f32, f32)
PRODUCTS(f32, bf16)
PRODUCTS(bf16, f32)
PRODUCTS(bf16, bf16)
