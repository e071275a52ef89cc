// A weight that is changed, however it is stored: f32; or bf16 (or f16) whose f32 master has its lower 16 bits in `low`; or bf16
// that is rounded by random numbers (ops/master.rs of ft): element e takes bits 16 (e % 4).. of number e / 4 of the
// stream `key`.
#pragma once
#include "common.cuh"
#include "random.cuh"

// Bits of a form: the weight is bf16; all addresses are aligned; rounded by random numbers.
constexpr u32 NARROW = 1, ALIGNED = 4, RANDOM = 8;

// A number as sign and magnitude, whose upper half is the weight: the bits of an f32, or those of an f16 with 16 more
// bits of the mantissa (`ops::master::f16`).
#ifdef FT_F16
__device__ __forceinline__ u32 wide_of(float x) {
    const u32 sign = bits_of(x) & 0x80000000u, size = bits_of(x) & 0x7fffffffu;
    if (size > 0x7f800000u) return sign | 0x7e000000u;
    // The largest number that is rounded to a finite one.
    if (size >= 0x477ff000u) return sign | 0x7bff7fffu;
    if (size >= 0x38800000u) return sign | (size - 0x38000000u) << 3;
    return sign | (u32)rintf(float_of(size) * 1099511627776.0f);
}

__device__ __forceinline__ float of_wide(u32 bits) {
    const u32 sign = bits & 0x80000000u, size = bits & 0x7fffffffu;
    if (size >= 0x7c000000u) return float_of(sign | 0x7fc00000u);
    const float x = size < 0x04000000u ? (float)size * 9.094947017729282e-13f : float_of((size >> 3) + 0x38000000u);
    return float_of(sign | bits_of(x));
}
#else
__device__ __forceinline__ u32 wide_of(float x) {
    return bits_of(x);
}

__device__ __forceinline__ float of_wide(u32 bits) {
    return float_of(bits);
}
#endif

// The exact value of a weight and its lower half, and back: nearest, ties away from zero.
__device__ __forceinline__ float master(unsigned short high, unsigned short low) {
    return of_wide((((u32)high << 16) - ((u32)(low >> 15) << 16)) | low);
}

__device__ __forceinline__ unsigned short upper(float x) {
    return (unsigned short)((wide_of(x) + 0x8000u) >> 16);
}

__device__ __forceinline__ unsigned short lower(float x) {
    return (unsigned short)wide_of(x);
}

// N weights from `at` on become f(weight, place among the N). `begin`: elements of the parameter before these tensors, a
// multiple of four.
template <int N, typename F>
__device__ __forceinline__ void change(void* weight, unsigned short* low, u64 key, i64 begin, u32 form, i64 at, F f) {
    typedef Pack<unsigned short, N> Halves;
    if (form & RANDOM) {
        Halves* const highs = reinterpret_cast<Halves*>((unsigned short*)weight + at);
        Halves high = *highs;
        u64 bits = 0;
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (j % 4 == 0) bits = draw(key, (u64)(begin + at + j) / 4);
            const float x = f(of_wide((u32)high.at[j] << 16), j);
            // In sign and magnitude the lower 16 bits are the distance from the neighbor nearer to zero.
            const u32 number = (u32)(bits >> 16 * ((at + j) % 4)) & 0xffffu;
            high.at[j] = (unsigned short)((wide_of(x) + number) >> 16);
        }
        *highs = high;
    } else if (form & NARROW) {
        Halves* const highs = reinterpret_cast<Halves*>((unsigned short*)weight + at);
        Halves* const lows = reinterpret_cast<Halves*>(low + at);
        Halves high = *highs, lower_halves = *lows;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float x = f(master(high.at[j], lower_halves.at[j]), j);
            high.at[j] = upper(x);
            lower_halves.at[j] = lower(x);
        }
        *highs = high;
        *lows = lower_halves;
    } else {
        float* const place = (float*)weight + at;
        float w[N];
        load<N>(place, w);
#pragma unroll
        for (int j = 0; j < N; j++) w[j] = f(w[j], j);
        store<N>(place, w);
    }
}

// Is one of the numbers not finite? Then nothing happens.
__device__ __forceinline__ bool closed(const double* finite, int numbers) {
    for (int i = 0; i < numbers; i++) {
        if (!(finite[i] - finite[i] == 0.0)) return true;
    }
    return false;
}

// The factor of a gradient: `coefficient`, times what `further` holds where that is there.
__device__ __forceinline__ float factor_of(float coefficient, const float* further) {
    return further ? mul(coefficient, *further) : coefficient;
}
