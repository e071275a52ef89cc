// One step of Adafactor of one parameter: see src/ops/cpu/step/adafactor.rs of ft. Of a matrix `[R, C]` the means of the
// squared gradient are kept for each row and each column, of a vector (R = 1, no rows) for each element. The gradient is f32,
// the weight f32 or bf16 (`weight.cuh`).
//
// Each kernel of a step finds the same gate: where a number at `finite` is not finite none of them changes anything.
#include "many.cuh"
#include "weight.cuh"

constexpr int V = 4;
// Added to the square of each gradient.
constexpr float EPS = 1e-30f;

#define GATE const double *finite, int numbers
#define FACTOR float coefficient, const float *further

__device__ __forceinline__ float mean_of(float mean, float now, float keep, float take) {
    return plus(mul(mean, keep), mul(plus(now, EPS), take));
}

__device__ __forceinline__ float inverse_root(float x) {
    return quotient(1.0f, root(x));
}

// The number by whose root the gradients of a row are divided; 1 without rows.
__device__ __forceinline__ float factor_of_row(const float* row, const float* mean, i64 r) {
    return row ? inverse_root(quotient(row[r], *mean)) : 1.0f;
}

// The means of the rows, a block for each.
extern "C" __global__ void adafactor_rows(const float* g, i64 columns, float* row, float keep, float take, GATE, FACTOR) {
    __shared__ double shared[32];
    if (closed(finite, numbers)) return;
    const float factor = factor_of(coefficient, further);
    const float* own = g + (i64)blockIdx.x * columns;
    float sum = 0;
    for (i64 c = threadIdx.x; c < columns; c += blockDim.x) {
        const float x = own[c] * factor;
        sum += x * x;
    }
    const double total = block_sum((double)sum, shared);
    if (threadIdx.x == 0) row[blockIdx.x] = mean_of(row[blockIdx.x], (float)(total / (double)columns), keep, take);
}

// partial[y][c]: the squares of column c over `count` rows from row y · count on; a thread for each column.
extern "C" __global__ void adafactor_stripes(const float* g, i64 rows, i64 columns, i64 count, float* partial, GATE, FACTOR) {
    const i64 c = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= columns || closed(finite, numbers)) return;
    const float factor = factor_of(coefficient, further);
    const i64 first = (i64)blockIdx.y * count, last = first + count < rows ? first + count : rows;
    float sum = 0;
    for (i64 r = first; r < last; r++) {
        const float x = g[r * columns + c] * factor;
        sum += x * x;
    }
    partial[(i64)blockIdx.y * columns + c] = sum;
}

// The means of the columns from `stripes` such sums over all `rows`.
extern "C" __global__ void adafactor_columns(
    const float* partial, i64 stripes, i64 rows, i64 columns, float* column, float keep, float take, GATE) {
    const i64 c = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= columns || closed(finite, numbers)) return;
    double sum = 0;
    for (i64 s = 0; s < stripes; s++) sum += partial[s * columns + c];
    column[c] = mean_of(column[c], (float)(sum / (double)rows), keep, take);
}

// The mean of the means of the rows; one block.
extern "C" __global__ void adafactor_mean(const float* row, i64 rows, float* mean) {
    __shared__ double shared[32];
    double sum = 0;
    for (i64 r = threadIdx.x; r < rows; r += blockDim.x) sum += row[r];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *mean = (float)(sum / (double)rows);
}

// partial[r][y]: the squares of the update of row r in share y of its columns, before its size is known.
extern "C" __global__ void adafactor_squares(
    const float* g, i64 columns, const float* row, const float* mean, const float* column, double* partial, GATE, FACTOR) {
    __shared__ double shared[32];
    if (closed(finite, numbers)) return;
    const i64 r = blockIdx.x, first = (i64)blockIdx.y * SHARE;
    const i64 last = first + SHARE < columns ? first + SHARE : columns;
    const float factor = factor_of(coefficient, further) * factor_of_row(row, mean, r);
    float sum = 0;
    for (i64 c = first + threadIdx.x; c < last; c += blockDim.x) {
        const float u = g[r * columns + c] * inverse_root(column[c]) * factor;
        sum += u * u;
    }
    const double total = block_sum((double)sum, shared);
    if (threadIdx.x == 0) partial[r * gridDim.y + blockIdx.y] = total;
}

// The size of the step: the root mean square of an update of n elements is at most 1. One block.
extern "C" __global__ void adafactor_size(const double* partial, i64 parts, i64 n, double rate, float* size, GATE, FACTOR) {
    __shared__ double shared[32];
    if (closed(finite, numbers)) return;
    double sum = 0;
    for (i64 i = threadIdx.x; i < parts; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum, shared);
    const double rms = sqrt(sum / (double)n);
    // A number that is not finite stays so: it must not look like a small update.
    if (threadIdx.x == 0) *size = (float)(rate / (rms <= 1.0 ? 1.0 : rms) * (double)factor_of(coefficient, further));
}

// N elements from `at` on: w = keep · w - size · row · column · g.
template <int N>
__device__ __forceinline__ void descend(
    void* weight, unsigned short* low, u64 key, u32 form, const float* g, i64 columns, const float* row,
    const float* mean, const float* column, float keep, float size, i64 at) {
    float x[N];
    load<N>(g + at, x);
    i64 r = at / columns, c = at - r * columns;
    float own = factor_of_row(row, mean, r);
#pragma unroll
    for (int j = 0; j < N; j++) {
        x[j] = mul(mul(mul(own, inverse_root(column[c])), x[j]), size);
        // No row lies behind the last element.
        if (++c == columns && j + 1 < N) {
            c = 0;
            own = factor_of_row(row, mean, ++r);
        }
    }
    change<N>(weight, low, key, 0, form, at, [&](float w, int j) { return minus(mul(w, keep), x[j]); });
}

extern "C" __global__ void adafactor_apply(
    void* weight, unsigned short* low, u64 key, int form, const float* g, i64 n, i64 columns, const float* row,
    const float* mean, const float* column, float keep, const float* size, GATE) {
    if (closed(finite, numbers)) return;
    const i64 start = (i64)blockIdx.x * SHARE, left = n - start < SHARE ? n - start : SHARE;
    const i64 packs = form & ALIGNED ? left / V : 0;
    for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
        descend<V>(weight, low, key, form, g, columns, row, mean, column, keep, *size, start + i * V);
    }
    for (i64 i = packs * V + threadIdx.x; i < left; i += blockDim.x) {
        descend<1>(weight, low, key, form, g, columns, row, mean, column, keep, *size, start + i);
    }
}
