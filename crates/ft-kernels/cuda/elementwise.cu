// Element by element: sums, scaling, change of type, dropout, rows of a bias.
//
// `packs` groups of V neighbors are moved 16 bytes at a time, the elements from `packs * V` to `n` one by one; where an
// address is not aligned `packs` is 0.
#include "random.cuh"

// y = a + b; y may be a.
template <typename A, typename B>
__device__ __forceinline__ void add(const A* a, const B* b, A* y, i64 n, i64 packs) {
    constexpr int V = sizeof(A) > sizeof(B) ? Full<B>::V : Full<A>::V;
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < packs; i += step) {
        float p[V], q[V];
        load<V>(a + i * V, p);
        load<V>(b + i * V, q);
#pragma unroll
        for (int j = 0; j < V; j++) p[j] += q[j];
        store<V>(y + i * V, p);
    }
    for (i64 i = packs * V + first; i < n; i += step) narrow(widen(a[i]) + widen(b[i]), y[i]);
}

#define ADD(A, B)                                                                                            \
    extern "C" __global__ void add_##A##_##B(const A* a, const B* b, A* y, i64 n, i64 packs) { \
        add<A, B>(a, b, y, n, packs);                                                                        \
    }

typedef float f32;
ADD(f32, f32)
ADD(f32, bf16)
ADD(bf16, f32)
ADD(bf16, bf16)

template <typename T>
__device__ __forceinline__ void scale(T* t, float factor, i64 n, i64 packs) {
    constexpr int V = Full<T>::V;
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < packs; i += step) {
        float p[V];
        load<V>(t + i * V, p);
#pragma unroll
        for (int j = 0; j < V; j++) p[j] *= factor;
        store<V>(t + i * V, p);
    }
    for (i64 i = packs * V + first; i < n; i += step) narrow(widen(t[i]) * factor, t[i]);
}

extern "C" __global__ void scale_f32(float* t, float factor, i64 n, i64 packs) {
    scale(t, factor, n, packs);
}

extern "C" __global__ void scale_bf16(bf16* t, float factor, i64 n, i64 packs) {
    scale(t, factor, n, packs);
}

// y = x in another type.
template <typename X, typename Y>
__device__ __forceinline__ void cast(const X* x, Y* y, i64 n, i64 packs) {
    constexpr int V = 8;
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < packs; i += step) {
        float p[V];
        load<V>(x + i * V, p);
        store<V>(y + i * V, p);
    }
    for (i64 i = packs * V + first; i < n; i += step) narrow(widen(x[i]), y[i]);
}

extern "C" __global__ void cast_f32_bf16(const float* x, bf16* y, i64 n, i64 packs) {
    cast(x, y, n, packs);
}

extern "C" __global__ void cast_bf16_f32(const bf16* x, float* y, i64 n, i64 packs) {
    cast(x, y, n, packs);
}

// Each row of y [rows, columns] becomes the bias; blockIdx.y counts rows.
template <typename T, typename B>
__device__ __forceinline__ void rows_of(const B* bias, T* y, i64 rows, i64 columns) {
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < columns; i += (i64)gridDim.x * blockDim.x) {
            narrow(widen(bias[i]), y[row * columns + i]);
        }
    }
}

#define ROWS(T, B)                                                                                         \
    extern "C" __global__ void rows_##T##_##B(const B* bias, T* y, i64 rows, i64 columns) { \
        rows_of<T, B>(bias, y, rows, columns);                                                             \
    }

ROWS(f32, f32)
ROWS(f32, bf16)
ROWS(bf16, f32)
ROWS(bf16, bf16)

// Each row of y [rows, columns], n elements in total, gets the bias added. A pack does not cross rows.
template <typename T, typename B>
__device__ __forceinline__ void add_rows(const B* bias, T* y, i64 n, i64 columns, i64 packs) {
    constexpr int V = sizeof(T) > sizeof(B) ? Full<B>::V : Full<T>::V;
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < packs; i += step) {
        float p[V], q[V];
        load<V>(y + i * V, p);
        load<V>(bias + i * V % columns, q);
#pragma unroll
        for (int j = 0; j < V; j++) p[j] += q[j];
        store<V>(y + i * V, p);
    }
    for (i64 i = packs * V + first; i < n; i += step) narrow(widen(y[i]) + widen(bias[i % columns]), y[i]);
}

#define ADD_ROWS(T, B)                                                                                       \
    extern "C" __global__ void add_rows_##T##_##B(const B* bias, T* y, i64 n, i64 columns, i64 packs) { \
        add_rows<T, B>(bias, y, n, columns, packs);                                                          \
    }

ADD_ROWS(f32, f32)
ADD_ROWS(f32, bf16)
ADD_ROWS(bf16, f32)
ADD_ROWS(bf16, bf16)

// y = x / (1 - p) where the number of the element is at least p, else 0; `keep` is 1 / (1 - p). y may be x.
template <typename T>
__device__ __forceinline__ void dropout(const T* x, T* y, u64 key, float p, float keep, i64 n, i64 packs) {
    constexpr int V = Full<T>::V;
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < packs; i += step) {
        float q[V];
        load<V>(x + i * V, q);
#pragma unroll
        for (int j = 0; j < V; j++) q[j] = uniform(key, (u64)(i * V + j)) < p ? 0.0f : q[j] * keep;
        store<V>(y + i * V, q);
    }
    for (i64 i = packs * V + first; i < n; i += step) {
        narrow(uniform(key, (u64)i) < p ? 0.0f : widen(x[i]) * keep, y[i]);
    }
}

extern "C" __global__ void dropout_f32(const float* x, float* y, u64 key, float p, float keep, i64 n, i64 packs) {
    dropout(x, y, key, p, keep, n, packs);
}

extern "C" __global__ void dropout_bf16(const bf16* x, bf16* y, u64 key, float p, float keep, i64 n, i64 packs) {
    dropout(x, y, key, p, keep, n, packs);
}
