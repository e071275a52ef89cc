// A weight that is changed, however it is stored: f32; or bf16 whose f32 master has its lower 16 bits in `low`; or bf16
// that is rounded by random numbers (ops/master.rs of ft): element e takes bits 16 (e % 4).. of number e / 4 of the
// stream `key`.
#pragma once
#include "common.cuh"
#include "random.cuh"

// Bits of a form: the weight is bf16; all addresses are aligned; rounded by random numbers.
constexpr u32 NARROW = 1, ALIGNED = 4, RANDOM = 8;

// The exact value of a bf16 weight and its lower half, and back: nearest, ties away from zero.
__device__ __forceinline__ float master(unsigned short high, unsigned short low) {
    return float_of((((u32)high << 16) - ((u32)(low >> 15) << 16)) | low);
}

__device__ __forceinline__ unsigned short upper(float x) {
    return (unsigned short)((bits_of(x) + 0x8000u) >> 16);
}

__device__ __forceinline__ unsigned short lower(float x) {
    return (unsigned short)bits_of(x);
}

// N weights from `at` on become f(weight, place among the N).
template <int N, typename F>
__device__ __forceinline__ void change(void* weight, unsigned short* low, u64 key, u32 form, i64 at, F f) {
    typedef Pack<unsigned short, N> Halves;
    if (form & RANDOM) {
        Halves* const highs = reinterpret_cast<Halves*>((unsigned short*)weight + at);
        Halves high = *highs;
        u64 bits = 0;
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (j % 4 == 0) bits = draw(key, (u64)(at + j) / 4);
            const float x = f(float_of((u32)high.at[j] << 16), j);
            // In sign and magnitude the lower 16 bits are the distance from the neighbour nearer to zero.
            const u32 number = (u32)(bits >> 16 * ((at + j) % 4)) & 0xffffu;
            high.at[j] = (unsigned short)((bits_of(x) + number) >> 16);
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
