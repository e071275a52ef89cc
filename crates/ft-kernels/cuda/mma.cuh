// Thin names for the PTX instructions our kernels use, all of sm_80: ldmatrix, mma.sync, cp.async, ex2.
//
// With EMULATE defined the same names run on a processor (`crates/ft-kernels/emulate`).
// Fragments (PTX ISA, "Matrix Fragments for mma.m16n8k16"), lane l, g = l / 4, t = l % 4:
//   A 16x16  a[0] (g, 2t..) a[1] (g+8, 2t..) a[2] (g, 2t+8..) a[3] (g+8, 2t+8..)   two of bf16 or f16 each
//   B 16x8   b0 (2t.., g)   b1 (2t+8.., g)                                         two each, along k
//   C 16x8   c[0], c[1] (g, 2t..)   c[2], c[3] (g+8, 2t..)                         f32
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef EMULATE
/// The shared memory that the launch asked for.
#define DYNAMIC_SHARED(name) unsigned char* name = static_cast<unsigned char*>(emulate::dynamic_shared())
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

namespace ptx {

// The type of the operands: bf16, and f16 in the modules that are compiled with FT_F16.
#ifdef FT_F16
#define MMA_TYPE "f16"
using Short = __half;
using Short2 = __half2;
__device__ __forceinline__ float widened(Short x) { return __half2float(x); }
__device__ __forceinline__ float2 widened(Short2 x) { return __half22float2(x); }
__device__ __forceinline__ Short narrowed(float x) { return __float2half_rn(x); }
__device__ __forceinline__ Short2 narrowed(float low, float high) { return __floats2half2_rn(low, high); }
#else
#define MMA_TYPE "bf16"
using Short = __nv_bfloat16;
using Short2 = __nv_bfloat162;
__device__ __forceinline__ float widened(Short x) { return __bfloat162float(x); }
__device__ __forceinline__ float2 widened(Short2 x) { return __bfloat1622float2(x); }
__device__ __forceinline__ Short narrowed(float x) { return __float2bfloat16(x); }
__device__ __forceinline__ Short2 narrowed(float low, float high) { return __floats2bfloat162_rn(low, high); }
#endif

/// The address of dynamic shared memory that the instructions below want. Arithmetic on it is in 32 bits.
__device__ __forceinline__ uint32_t address(const void* p) {
#ifdef EMULATE
    return emulate::shared_offset(p);
#else
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
#endif
}

/// d += a b.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef EMULATE
    emulate::mma_m16n8k16(d, a, b0, b1);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/// Four 8x8 matrices; lanes 8j to 8j + 7 give the rows of matrix j, which becomes r[j].
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t row) {
#ifdef EMULATE
    emulate::ldmatrix_x4(r, emulate::shared_at(row));
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
#endif
}

/// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[4], uint32_t row) {
#ifdef EMULATE
    emulate::ldmatrix_x4_trans(r, emulate::shared_at(row));
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
#endif
}

/// Starts a copy of 16 bytes to shared memory; zeros if not `given`: then `from` is not read.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool given) {
#ifdef EMULATE
    emulate::cp_async(emulate::shared_at(to), from, 16, given ? 16 : 0);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
                 "r"(given ? 16 : 0)
                 : "memory");
#endif
}

/// The same for 4 bytes.
__device__ __forceinline__ void copy4(uint32_t to, const void* from, bool given) {
#ifdef EMULATE
    emulate::cp_async(emulate::shared_at(to), from, 4, given ? 4 : 0);
#else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from),
                 "r"(given ? 4 : 0)
                 : "memory");
#endif
}

/// Ends a group of copies of this thread.
__device__ __forceinline__ void commit() {
#ifdef EMULATE
    emulate::cp_async_commit();
#else
    asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

/// Waits until at most N of this thread's newest groups are on their way. A barrier must follow before other
/// threads read what has landed.
template <int N>
__device__ __forceinline__ void wait() {
#ifdef EMULATE
    emulate::cp_async_wait(N);
#else
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
#endif
}

/// 2^x to about 2 units in the last place; 2^-inf is 0.
__device__ __forceinline__ float exp2(float x) {
#ifdef EMULATE
    return ::exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
#endif
}

/// Two numbers in a register, `low` in the low half.
__device__ __forceinline__ uint32_t pack(float low, float high) {
    Short2 pair = narrowed(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
}

}  // namespace ptx
