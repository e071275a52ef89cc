// Sums over the rows of a matrix, for gradients of biases and of norms, in two stages with a fixed order.
#include "common.cuh"

constexpr int ACROSS = 32, DOWN = 8;

// partial[part][c] = sum over the rows r of the part of a[r][c], or of a[r][c] b[r][c] factor[r] (1 if `factor` is null).
// A block is ACROSS x DOWN threads; blockIdx.x counts ACROSS V columns, blockIdx.y the parts, each of `part` rows.
template <typename T, int V, bool PRODUCT>
__device__ __forceinline__ void partial_sums(
    const T* a, const T* b, const float* factor, float* partial, i64 rows, i64 columns, i64 part) {
    __shared__ float shared[DOWN][ACROSS * V];
    const int across = threadIdx.x, down = threadIdx.y;
    const i64 column = ((i64)blockIdx.x * ACROSS + across) * V;
    float sum[V] = {};
    if (column < columns) {
        const i64 start = (i64)blockIdx.y * part, end = start + part < rows ? start + part : rows;
        for (i64 row = start + down; row < end; row += DOWN) {
            float p[V];
            load<V>(a + row * columns + column, p);
            if (PRODUCT) {
                float q[V];
                load<V>(b + row * columns + column, q);
                const float f = factor ? factor[row] : 1.0f;
#pragma unroll
                for (int j = 0; j < V; j++) p[j] *= q[j] * f;
            }
#pragma unroll
            for (int j = 0; j < V; j++) sum[j] += p[j];
        }
    }
#pragma unroll
    for (int j = 0; j < V; j++) shared[down][across * V + j] = sum[j];
    __syncthreads();
    if (down != 0 || column >= columns) return;
#pragma unroll
    for (int j = 0; j < V; j++) {
        float total = 0;
        for (int k = 0; k < DOWN; k++) total += shared[k][across * V + j];
        partial[(i64)blockIdx.y * columns + column + j] = total;
    }
}

#define COLUMNS(NAME, T, V)                                                                                        \
    extern "C" __global__ void column_sums_##NAME(                                                                 \
        const T* a, const T* b, const float* factor, float* partial, i64 rows, i64 columns, i64 part) { \
        partial_sums<T, V, false>(a, b, factor, partial, rows, columns, part);                                     \
    }                                                                                                              \
    extern "C" __global__ void column_products_##NAME(                                                             \
        const T* a, const T* b, const float* factor, float* partial, i64 rows, i64 columns, i64 part) { \
        partial_sums<T, V, true>(a, b, factor, partial, rows, columns, part);                                      \
    }

COLUMNS(f32_packed, float, 4)
COLUMNS(f32_single, float, 1)
COLUMNS(bf16_packed, bf16, 4)
COLUMNS(bf16_single, bf16, 1)

// sum[c] = the parts of column c, added in order.
extern "C" __global__ void column_totals(const float* partial, float* sum, i64 parts, i64 columns) {
    const i64 column = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float total = 0;
    for (i64 part = 0; part < parts; part++) total += partial[part * columns + column];
    sum[column] = total;
}
