// Shared by rms_norm.cu and layer_norm.cu: the threads of a row, and the names of the kernels.
//
// "narrow" gives a row (a head) to 16 neighboring lanes, "wide" gives it to a block.
#pragma once
#include "common.cuh"

constexpr int LANES = 16;

// The threads that share a row.
template <bool WIDE>
struct Team {
    static __device__ __forceinline__ int lane() { return WIDE ? threadIdx.x : threadIdx.x % LANES; }
    static __device__ __forceinline__ int count() { return WIDE ? blockDim.x : LANES; }
    static __device__ __forceinline__ i64 row() {
        return WIDE ? (i64)blockIdx.x : ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    }
    static __device__ __forceinline__ float sum(float x, float* shared) {
        return WIDE ? block_sum(x, shared) : lane_sum<LANES>(x);
    }
};

// NORM is defined by the source: the kernels of one name.
#define NORMS(T, W, V)                              \
    NORM(wide_##T##_##W##_packed, T, W, V, true)    \
    NORM(narrow_##T##_##W##_packed, T, W, V, false) \
    NORM(wide_##T##_##W##_single, T, W, 1, true)    \
    NORM(narrow_##T##_##W##_single, T, W, 1, false)

typedef float f32;
