// Attention sinks: a logit of each head in the denominator of the softmax, applied to o and lse of attention without it.
// o and dout [rows, size] with a row for each query and head, lse [rows], sinks [heads]; row r has head r % heads.
#include "common.cuh"

// o and lse in place; a warp for each row.
template <typename T, typename S>
__device__ __forceinline__ void apply(T* o, float* lse, const S* sinks, i64 rows, int heads, int size) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const i64 row = (i64)blockIdx.x * warps + threadIdx.x / 32;
    const bool real = row < rows;
    const float before = real ? lse[row] : 0.0f, sink = real ? widen(sinks[row % heads]) : 0.0f;
    const float most = fmaxf(before, sink);
    const float total = most + logf(expf(before - most) + expf(sink - most));
    const float factor = expf(before - total);
    // Every lane has read lse before one of them writes it.
    __syncthreads();
    if (!real) return;
    for (int i = lane; i < size; i += 32) narrow(widen(o[row * size + i]) * factor, o[row * size + i]);
    if (lane == 0) lse[row] = total;
}

// ds [heads] f32; a block for each head. The order of the sums depends on the number of threads only.
template <typename T, typename S>
__device__ __forceinline__ void gradient(const T* o, const float* lse, const T* dout, const S* sinks, float* ds, i64 rows,
                                         int heads, int size) {
    __shared__ double shared[32];
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32, head = blockIdx.x;
    const float sink = widen(sinks[head]);
    double sum = 0;
    for (i64 row = (i64)(threadIdx.x / 32) * heads + head; row < rows; row += (i64)warps * heads) {
        float dot = 0;
        for (int i = lane; i < size; i += 32) dot += widen(o[row * size + i]) * widen(dout[row * size + i]);
        sum -= (double)expf(sink - lse[row]) * dot;
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) ds[head] = (float)sum;
}

#define SINKS(T, S)                                                                                                    \
    extern "C" __global__ void sinks_apply_##T##_##S(T* o, float* lse, const S* sinks, i64 rows, int heads, int size) { \
        apply(o, lse, sinks, rows, heads, size);                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void sinks_gradient_##T##_##S(const T* o, const float* lse, const T* dout, const S* sinks,   \
                                                        float* ds, i64 rows, int heads, int size) {                    \
        gradient(o, lse, dout, sinks, ds, rows, heads, size);                                                          \
    }

typedef float f32;
SINKS(f32, f32)
SINKS(f32, bf16)
SINKS(bf16, f32)
SINKS(bf16, bf16)
