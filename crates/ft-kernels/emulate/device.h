// What CUDA C++ gives to a kernel, on top of `block.h`: qualifiers, indices, barriers, shuffles, atomics, mathematics.
#pragma once

#define EMULATE 1

#include "block.h"

#include <algorithm>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::emulate::current->index)
#define blockIdx (::emulate::block_index)
#define blockDim (::emulate::block_size)
#define gridDim (::emulate::grid_size)
#define warpSize 32

#define __syncthreads() ((void)::emulate::barrier(0, __FILE__, __LINE__))
#define __syncthreads_count(p) (::emulate::barrier((p) ? 1 : 0, __FILE__, __LINE__))
#define __syncthreads_or(p) (::emulate::barrier((p) ? 1 : 0, __FILE__, __LINE__) != 0)
#define __syncthreads_and(p) (::emulate::barrier((p) ? 0 : 1, __FILE__, __LINE__) == 0)

namespace emulate {

template <class T>
struct Exchange {
    T value;
    int from;
};

/// Every lane of the mask gets the value of the lane it names; of a lane that is not there, garbage.
template <class T>
T exchange(const char* what, unsigned mask, T value, int from) {
    Exchange<T> mine{value, from};
    meet(what, mask, &mine, [](void** lanes, unsigned there) {
        T results[32];
        for (int lane = 0; lane < 32; lane++) {
            if (!(there >> lane & 1)) continue;
            int source = static_cast<Exchange<T>*>(lanes[lane])->from;
            std::memset(&results[lane], 0xff, sizeof(T));
            if (source >= 0 && source < 32 && (there >> source & 1))
                results[lane] = static_cast<Exchange<T>*>(lanes[source])->value;
        }
        for (int lane = 0; lane < 32; lane++)
            if (there >> lane & 1) static_cast<Exchange<T>*>(lanes[lane])->value = results[lane];
    });
    return mine.value;
}

inline int lane() { return static_cast<int>(current->number % 32); }

struct Vote {
    bool yes;
    unsigned result;
};

/// Bits of the lanes that say yes.
inline unsigned vote(const char* what, unsigned mask, bool yes) {
    Vote mine{yes, 0};
    meet(what, mask, &mine, [](void** lanes, unsigned there) {
        unsigned result = 0;
        for (int lane = 0; lane < 32; lane++)
            if ((there >> lane & 1) && static_cast<Vote*>(lanes[lane])->yes) result |= 1u << lane;
        for (int lane = 0; lane < 32; lane++)
            if (there >> lane & 1) static_cast<Vote*>(lanes[lane])->result = result;
    });
    return mine.result;
}

}  // namespace emulate

// Within segments of `width` lanes, as the hardware does; a lane that reaches over its segment keeps its own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    int lane = emulate::lane();
    return emulate::exchange("__shfl_sync", mask, value, (lane & ~(width - 1)) | (from & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32) {
    int lane = emulate::lane(), from = lane ^ with;
    bool inside = from < (lane & ~(width - 1)) + width;
    return emulate::exchange("__shfl_xor_sync", mask, value, inside ? from : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    int lane = emulate::lane(), from = lane + static_cast<int>(by);
    bool inside = from < (lane & ~(width - 1)) + width;
    return emulate::exchange("__shfl_down_sync", mask, value, inside ? from : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    int lane = emulate::lane(), from = lane - static_cast<int>(by);
    bool inside = from >= (lane & ~(width - 1));
    return emulate::exchange("__shfl_up_sync", mask, value, inside ? from : lane);
}
inline unsigned __ballot_sync(unsigned mask, int p) { return emulate::vote("__ballot_sync", mask, p != 0); }
inline int __any_sync(unsigned mask, int p) { return emulate::vote("__any_sync", mask, p != 0) != 0; }
inline int __all_sync(unsigned mask, int p) { return emulate::vote("__all_sync", mask, p == 0) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulate::vote("__syncwarp", mask, false); }

// One fiber runs at a time: plain code is atomic.
template <class T, class U>
T atomicAdd(T* at, U by) { T old = *at; *at = static_cast<T>(old + static_cast<T>(by)); return old; }
template <class T, class U>
T atomicMax(T* at, U by) { T old = *at; *at = std::max(old, static_cast<T>(by)); return old; }
template <class T, class U>
T atomicMin(T* at, U by) { T old = *at; *at = std::min(old, static_cast<T>(by)); return old; }
template <class T, class U>
T atomicOr(T* at, U by) { T old = *at; *at = static_cast<T>(old | by); return old; }
template <class T, class U>
T atomicExch(T* at, U by) { T old = *at; *at = static_cast<T>(by); return old; }
template <class T, class U, class V>
T atomicCAS(T* at, U expected, V by) { T old = *at; if (old == static_cast<T>(expected)) *at = static_cast<T>(by); return old; }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
#define __trap() ::emulate::fail("__trap at %s:%d", __FILE__, __LINE__)

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcs(T* p, T v) { *p = v; }
template <class T> void __stcg(T* p, T v) { *p = v; }

inline unsigned __float_as_uint(float f) { return emulate::bits<unsigned>(f); }
inline float __uint_as_float(unsigned u) { return emulate::bits<float>(u); }
inline int __float_as_int(float f) { return emulate::bits<int>(f); }
inline float __int_as_float(int i) { return emulate::bits<float>(i); }
inline int __popc(unsigned u) { return __builtin_popcount(u); }
inline int __popcll(unsigned long long u) { return __builtin_popcountll(u); }
inline int __clz(int i) { return i == 0 ? 32 : __builtin_clz(static_cast<unsigned>(i)); }
inline int __clzll(long long i) { return i == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(i)); }
inline int __ffs(int i) { return __builtin_ffs(i); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
// The C library has functions of these names, or will.
#define rsqrtf(x) (1.0f / sqrtf(x))
#define rsqrt(x) (1.0 / sqrt(x))
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __sincosf(x, s, c) sincosf(x, s, c)

#include "ptx.h"
