// Copies of the matrices of adapters for products: many of them in one launch.
#include "common.cuh"

// to[r * stride + c] = from[r][c] - minus[r][c]; `minus` may be null. `packed`: columns, stride and addresses permit
// vectors of 4 elements.
struct Copy {
    const float* from;
    const float* minus;
    void* to;
    i64 rows;
    u32 columns, stride;
    i64 packed;
};

constexpr int MOST_COPIES = 32;

struct Copies {
    Copy at[MOST_COPIES];
};

template <typename T, int V>
__device__ __forceinline__ void copy(const Copy& job) {
    const i64 across = job.columns / V, n = job.rows * across;
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < n; i += step) {
        float p[V];
        load<V>(job.from + i * V, p);
        if (job.minus) {
            float q[V];
            load<V>(job.minus + i * V, q);
#pragma unroll
            for (int j = 0; j < V; j++) p[j] -= q[j];
        }
        store<V>((T*)job.to + i / across * job.stride + i % across * V, p);
    }
}

// blockIdx.y counts the copies.
template <typename T>
__device__ __forceinline__ void copy_each(const Copies& all) {
    const Copy& job = all.at[blockIdx.y];
    if (job.packed) {
        copy<T, 4>(job);
    } else {
        copy<T, 1>(job);
    }
}

extern "C" __global__ void copy_pairs_f32(Copies all) {
    copy_each<float>(all);
}

extern "C" __global__ void copy_pairs_bf16(Copies all) {
    copy_each<bf16>(all);
}
