// The types of CUDA: vectors, dim3, bf16, f16.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define EMULATE_VECTOR(type, name)                                                     \
    struct name##1 { type x; };                                                        \
    struct alignas(2 * sizeof(type)) name##2 { type x, y; };                           \
    struct name##3 { type x, y, z; };                                                  \
    struct alignas(4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type)) name##4 { type x, y, z, w; }; \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                   \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }        \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

EMULATE_VECTOR(float, float)
EMULATE_VECTOR(int, int)
EMULATE_VECTOR(unsigned int, uint)
EMULATE_VECTOR(short, short)
EMULATE_VECTOR(unsigned short, ushort)
EMULATE_VECTOR(signed char, char)
EMULATE_VECTOR(unsigned char, uchar)
EMULATE_VECTOR(double, double)
EMULATE_VECTOR(long long, longlong)
EMULATE_VECTOR(unsigned long long, ulonglong)
#undef EMULATE_VECTOR

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulate {
template <class To, class From>
To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

/// To the nearest, ties to even; NaN stays NaN.
inline uint16_t round_bf16(float f) {
    uint32_t u = bits<uint32_t>(f);
    if (f != f) return 0x7fff;
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
}  // namespace emulate

struct __nv_bfloat16 {
    uint16_t raw;
    __nv_bfloat16() = default;
    __nv_bfloat16(float f) : raw(emulate::round_bf16(f)) {}
    operator float() const { return emulate::bits<float>(static_cast<uint32_t>(raw) << 16); }
};
using nv_bfloat16 = __nv_bfloat16;

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
using nv_bfloat162 = __nv_bfloat162;

struct __half {
    uint16_t raw;
    __half() = default;
    __half(float f) : raw(emulate::bits<uint16_t>(static_cast<_Float16>(f))) {}
    operator float() const { return static_cast<float>(emulate::bits<_Float16>(raw)); }
};

struct alignas(4) __half2 {
    __half x, y;
};

inline float __half2float(__half v) { return static_cast<float>(v); }
inline __half __float2half_rn(float f) { return __half(f); }
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
inline float2 __half22float2(__half2 v) { return {static_cast<float>(v.x), static_cast<float>(v.y)}; }

inline float __bfloat162float(__nv_bfloat16 v) { return static_cast<float>(v); }
inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
inline __nv_bfloat162 __float2bfloat162_rn(float f) { return __floats2bfloat162_rn(f, f); }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {static_cast<float>(v.x), static_cast<float>(v.y)}; }
inline float __low2float(__nv_bfloat162 v) { return static_cast<float>(v.x); }
inline float __high2float(__nv_bfloat162 v) { return static_cast<float>(v.y); }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.raw; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { return emulate::bits<__nv_bfloat16>(u); }
