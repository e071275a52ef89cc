// Used by every kernel here: bf16 as bits, packed loads and stores, exact single operations, sums over threads.
//
// With FT_F16 a file becomes the module NAME_f16: the same kernels under the same names, with f16 in the place of bf16.
// Arithmetic is f32; bf16 and f16 are storage types. Sums have an order that depends on the sizes alone: results are the same
// from run to run. Where the compiler is not a device compiler, plain C++ stands in for the few instructions used.
#pragma once

#ifndef __CUDA_ARCH__
#include <math.h>
#include <string.h>
#endif

typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ float float_of(u32 bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, 4);
    return x;
#endif
}

__device__ __forceinline__ u32 bits_of(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
#endif
}

__device__ __forceinline__ float widen(float x) {
    return x;
}

__device__ __forceinline__ float widen(bf16 x) {
    return float_of((u32)x.bits << 16);
}

// Rounds to nearest, ties to even.
__device__ __forceinline__ void narrow(float x, bf16& y) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    u32 bits = bits_of(x);
    y.bits = x != x ? 0x7fff : (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

__device__ __forceinline__ void narrow(float x, float& y) {
    y = x;
}

__device__ __forceinline__ float round_bf16(float x) {
    bf16 y;
    narrow(x, y);
    return widen(y);
}

#ifdef FT_F16
struct f16 {
    unsigned short bits;
};

__device__ __forceinline__ float widen(f16 x) {
    float y;
#ifdef __CUDA_ARCH__
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
#else
    const u32 magnitude = (u32)(x.bits & 0x7fff) << 13;
    // The bias of the exponent is 15, not 127; infinity and NaN keep theirs.
    y = (x.bits & 0x7c00) == 0x7c00 ? float_of(magnitude | 0x70000000u) : float_of(magnitude) * float_of(0x77800000u);
    y = float_of(bits_of(y) | (u32)(x.bits & 0x8000) << 16);
#endif
    return y;
}

// Rounds to nearest, ties to even; from 65520 on to infinity.
__device__ __forceinline__ void narrow(float x, f16& y) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    const u32 sign = bits_of(x) >> 16 & 0x8000u, size = bits_of(x) & 0x7fffffffu;
    u32 to;
    if (size > 0x7f800000u) to = 0x7e00;
    else if (size >= 0x477ff000u) to = 0x7c00;
    else if (size >= 0x38800000u) to = (size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13;
    // Below 2^-14 numbers are 2^-24 apart, as f32 from 0.5 on.
    else to = bits_of(float_of(size) + 0.5f) - 0x3f000000u;
    y.bits = (unsigned short)(sign | to);
#endif
}

#define bf16 f16
#endif

// Operations that the compiler must not fuse: bit-equal to the CPU.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float minus(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float quotient(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }
#else
// Built with `-ffp-contract=off`.
__device__ __forceinline__ float mul(float a, float b) { return a * b; }
__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ float minus(float a, float b) { return a - b; }
__device__ __forceinline__ float quotient(float a, float b) { return a / b; }
__device__ __forceinline__ float root(float a) { return sqrtf(a); }
#endif

// Exponent bits all ones: infinite or NaN.
__device__ __forceinline__ bool odd(float x) {
    return (bits_of(x) & 0x7f800000u) == 0x7f800000u;
}

// V neighboring elements, moved by as few instructions as 16 bytes at a time allow.
template <typename T, int V>
struct alignas(sizeof(T) * V > 16 ? 16 : sizeof(T) * V) Pack {
    T at[V];
};

// Elements of 16 bytes.
template <typename T>
struct Full {
    static constexpr int V = 16 / sizeof(T);
};

template <int V, typename T>
__device__ __forceinline__ void load(const T* from, float (&x)[V]) {
    const Pack<T, V> pack = *reinterpret_cast<const Pack<T, V>*>(from);
#pragma unroll
    for (int i = 0; i < V; i++) x[i] = widen(pack.at[i]);
}

template <int V, typename T>
__device__ __forceinline__ void store(T* to, const float (&x)[V]) {
    Pack<T, V> pack;
#pragma unroll
    for (int i = 0; i < V; i++) narrow(x[i], pack.at[i]);
    *reinterpret_cast<Pack<T, V>*>(to) = pack;
}

// Sum over the G neighboring lanes of a warp (G a power of two), the same bits in each of them.
template <int G, typename S>
__device__ __forceinline__ S lane_sum(S x) {
#pragma unroll
    for (int step = G / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// The largest over a warp, in each lane.
__device__ __forceinline__ float lane_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// Sum over a block of whole warps, at most 32 of them; every thread gets it. `shared` has 32 places and may be used
// again at once.
template <typename S>
__device__ __forceinline__ S block_sum(S x, S* shared) {
    x = lane_sum<32>(x);
    const int warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    S sum = 0;
    for (int w = 0; w < warps; w++) sum += shared[w];
    __syncthreads();
    return sum;
}
