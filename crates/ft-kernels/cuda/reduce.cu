// Sum of squares, and count of what is not finite, over many tensors, in two stages with a fixed order.
#include "many.cuh"

// As `Part` of crates/ft-ops/src/cuda/reduce.rs.
struct Part {
    const void* data;
    i64 n;
    u32 first;
    // bit 0: bf16, bit 1: aligned to 16 bytes
    u32 form;
};

struct Squares {
    static __device__ __forceinline__ float of(float x) { return x * x; }
};

struct Odd {
    static __device__ __forceinline__ float of(float x) { return odd(x) ? 1.0f : 0.0f; }
};

// f32 within a thread (64 elements at most), f64 over the threads.
template <typename F, typename T>
__device__ __forceinline__ float share_of(const T* x, i64 n, bool packed) {
    constexpr int V = Full<T>::V;
    const i64 packs = packed ? n / V : 0;
    float sum = 0;
    for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
        float p[V];
        load<V>(x + i * V, p);
#pragma unroll
        for (int j = 0; j < V; j++) sum += F::of(p[j]);
    }
    for (i64 i = packs * V + threadIdx.x; i < n; i += blockDim.x) sum += F::of(widen(x[i]));
    return sum;
}

template <typename F>
__device__ __forceinline__ void reduce(const Part* parts, int count, double* partial) {
    __shared__ double shared[32];
    const Part part = parts[entry_of(parts, count, blockIdx.x)];
    const i64 start = (i64)(blockIdx.x - part.first) * SHARE;
    const i64 n = part.n - start < SHARE ? part.n - start : SHARE;
    const bool packed = part.form & 2;
    const double sum = part.form & 1 ? share_of<F>((const bf16*)part.data + start, n, packed)
                                     : share_of<F>((const float*)part.data + start, n, packed);
    const double total = block_sum(sum, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

extern "C" __global__ void sum_squares(const Part* parts, int count, double* partial) {
    reduce<Squares>(parts, count, partial);
}

extern "C" __global__ void count_odd(const Part* parts, int count, double* partial) {
    reduce<Odd>(parts, count, partial);
}

// *total = (add ? *total : 0) + the shares in a fixed order; one block.
extern "C" __global__ void reduce_totals(const double* partial, i64 shares, double* total, int add) {
    __shared__ double shared[32];
    double sum = 0;
    for (i64 i = threadIdx.x; i < shares; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *total = (add ? *total : 0.0) + sum;
}

// *coefficient = min(1, max / (sqrt(*squares) + 1e-6)), as torch.nn.utils.clip_grad_norm_.
extern "C" __global__ void clip_coefficient(const double* squares, double max, float* coefficient) {
    const double ratio = max / (sqrt(*squares) + 1e-6);
    *coefficient = (float)(ratio < 1.0 ? ratio : 1.0);
}
