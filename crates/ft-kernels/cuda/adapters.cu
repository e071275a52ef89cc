// Adapters: factors of features, row norms of DoRA, skew-symmetric blocks of OFT.
#include "common.cuh"

// y = x v + bias, with v and bias (may be null) for each of the `columns` of a row; n elements in total. A pack does not
// cross rows.
template <typename X, typename Y>
__device__ __forceinline__ void scale_columns(
    const X* x, const float* v, const float* bias, Y* y, i64 n, i64 columns, i64 packs) {
    constexpr int V = 8;
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < packs; i += step) {
        const i64 column = i * V % columns;
        float p[V], q[V];
        load<V>(x + i * V, p);
        load<V>(v + column, q);
#pragma unroll
        for (int j = 0; j < V; j++) p[j] *= q[j];
        if (bias) {
            load<V>(bias + column, q);
#pragma unroll
            for (int j = 0; j < V; j++) p[j] += q[j];
        }
        store<V>(y + i * V, p);
    }
    for (i64 i = packs * V + first; i < n; i += step) {
        const i64 column = i % columns;
        narrow(widen(x[i]) * v[column] + (bias ? bias[column] : 0.0f), y[i]);
    }
}

#define SCALE_COLUMNS(X, Y)                                                                      \
    extern "C" __global__ void scale_columns_##X##_##Y(                                          \
        const X* x, const float* v, const float* bias, Y* y, i64 n, i64 columns, i64 packs) {    \
        scale_columns<X, Y>(x, v, bias, y, n, columns, packs);                                   \
    }

typedef float f32;
SCALE_COLUMNS(f32, f32)
SCALE_COLUMNS(f32, bf16)
SCALE_COLUMNS(bf16, bf16)

// DoRA: factors[o] = m[o] / |V row o| with |V|² = |W|² + sum over r of (2 s W·A[r] + s² (B·A·A')[r]) B[r]; `across` is
// A·W' [rank, outputs], `own` B·A·A' [outputs, rank], `squares` |W|².
extern "C" __global__ void dora_factors(
    const float* across, const float* own, const float* b, const float* squares, const float* m, float* factors,
    i64 outputs, int rank, float s) {
    const i64 o = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (o >= outputs) return;
    float sum = squares[o];
    for (int r = 0; r < rank; r++) {
        sum += s * (2.0f * across[r * outputs + o] + s * own[o * rank + r]) * b[o * rank + r];
    }
    factors[o] = m[o] / sqrtf(fmaxf(sum, 0.0f));
}

// The element above the diagonal of a block of `size` in row r and column c, counted row by row.
__device__ __forceinline__ i64 above(i64 r, i64 c, i64 size) {
    return r * (2 * size - r - 1) / 2 + c - r - 1;
}

// q[k] is skew-symmetric with the triangle k above its diagonal; n elements of q.
extern "C" __global__ void skew(const float* triangles, float* q, i64 n, int size) {
    const i64 step = (i64)gridDim.x * blockDim.x, inside = (i64)size * size, triangle = (i64)size * (size - 1) / 2;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const i64 k = i / inside, r = i % inside / size, c = i % size;
        const float* from = triangles + k * triangle;
        q[i] = r == c ? 0.0f : r < c ? from[above(r, c, size)] : -from[above(c, r, size)];
    }
}

// The gradient of the triangles from that of q: dq[r][c] - dq[c][r]; n elements of dq.
extern "C" __global__ void skew_gradient(const float* dq, float* triangles, i64 n, int size) {
    const i64 step = (i64)gridDim.x * blockDim.x, inside = (i64)size * size, triangle = (i64)size * (size - 1) / 2;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const i64 k = i / inside, r = i % inside / size, c = i % size;
        if (r < c) triangles[k * triangle + above(r, c, size)] = dq[i] - dq[k * inside + c * size + r];
    }
}

// The inverse of I + q[blockIdx.x] for a skew-symmetric q, `size` × `size`: Gauss-Jordan elimination in the place of `work`, in f64.
// It needs no pivoting: each pivot is at least 1, because the symmetric part of the matrix is I.
extern "C" __global__ void inverse_of_sum(const float* q, double* work, float* inverse, int size) {
    const i64 inside = (i64)size * size, first = (i64)blockIdx.x * inside;
    double* a = work + first;
    for (i64 i = threadIdx.x; i < inside; i += blockDim.x) a[i] = (double)q[first + i] + (i % (size + 1) == 0 ? 1.0 : 0.0);
    for (i64 k = 0; k < size; k++) {
        __syncthreads();
        const double pivot = a[k * size + k];
        __syncthreads();
        for (i64 c = threadIdx.x; c < size; c += blockDim.x) a[k * size + c] = (c == k ? 1.0 : a[k * size + c]) / pivot;
        __syncthreads();
        for (i64 i = threadIdx.x; i < inside; i += blockDim.x) {
            const i64 r = i / size, c = i % size;
            if (r != k && c != k) a[i] -= a[r * size + k] * a[k * size + c];
        }
        __syncthreads();
        for (i64 r = threadIdx.x; r < size; r += blockDim.x) {
            if (r != k) a[r * size + k] *= -a[k * size + k];
        }
    }
    __syncthreads();
    for (i64 i = threadIdx.x; i < inside; i += blockDim.x) inverse[first + i] = (float)a[i];
}
