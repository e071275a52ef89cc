// Keys and values as int8: a signed byte for each number, and one scale (absmax / 127) for each head of a token. A row is
// a head of a token, `size` numbers. The bytes are those of the CPU.
#include "common.cuh"

// A warp for each row. A number that is not finite makes the scale NaN.
template <typename T>
__device__ __forceinline__ void quantize(const T* x, signed char* codes, float* scales, i64 rows, int size) {
    const i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += row * size;
    codes += row * size;
    float most = 0;
    int wrong = 0;
    for (int i = lane; i < size; i += 32) {
        const float v = widen(x[i]);
        wrong |= odd(v);
        most = fmaxf(most, fabsf(v));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    wrong = lane_sum<32>(wrong);
    const float by = most > 0 && !wrong ? quotient(127.0f, most) : 0.0f;
    if (lane == 0) scales[row] = wrong ? NAN : quotient(most, 127.0f);
    // The nearest integer, ties to even: see `ops::quantized::nearest`.
    const float shift = 12582912.0f;
    for (int i = lane; i < size; i += 32) {
        const float v = wrong ? 0.0f : widen(x[i]);
        codes[i] = (signed char)(int)minus(plus(mul(v, by), shift), shift);
    }
}

template <typename T>
__device__ __forceinline__ void dequantize(const signed char* codes, const float* scales, T* y, i64 count, int size) {
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        narrow(mul((float)codes[i], scales[i / size]), y[i]);
    }
}

#define KV_BLOCK(NAME, T)                                                                                            \
    extern "C" __global__ void kv_quantize_##NAME(                                                                   \
        const T* x, signed char* codes, float* scales, i64 rows, int size) {                                         \
        quantize<T>(x, codes, scales, rows, size);                                                                   \
    }                                                                                                                \
    extern "C" __global__ void kv_dequantize_##NAME(                                                                 \
        const signed char* codes, const float* scales, T* y, i64 count, int size) {                                  \
        dequantize<T>(codes, scales, y, count, size);                                                                \
    }

KV_BLOCK(f32, float)
KV_BLOCK(bf16, bf16)
