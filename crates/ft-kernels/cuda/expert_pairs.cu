// Gradients of the LoRA pairs of experts that are computed together: for each group of successive rows, the product of a wide
// matrix and a low one with few columns, summed over its rows.
//
// A block owns WIDTH columns of `wide` and RANKS columns of `low` of one group. Sums are f32, over the rows in ascending order.
#include "common.cuh"

constexpr int THREADS = 128, COLUMNS = 2, WIDTH = COLUMNS * THREADS, RANKS = 16, DEPTH = 32;

// Rows first .. first + rows - 1 belong to the expert whose gradient is `to`.
struct Group {
    float* to;
    u32 first, rows;
};

// Of A: to [rank, width] += lowᵀ · wide, with low = ∂u and wide = x. Of B: to [width, rank] += wideᵀ · low, with wide = ∂y and
// low = u. wide [rows, width], low [rows, stride], of which the first `rank` columns count.
template <bool A, typename T>
__device__ __forceinline__ void gradient(
    const T* wide, const T* low, const Group* groups, int width, int rank, int stride) {
    __shared__ Pack<float, 4> shared[DEPTH][RANKS / 4];
    const Group group = groups[blockIdx.x];
    const int parts = (width + WIDTH - 1) / WIDTH, from = blockIdx.y / parts * RANKS;
    const int column = blockIdx.y % parts * WIDTH + threadIdx.x;
    const int ranks = rank - from < RANKS ? rank - from : RANKS;
    wide += (i64)group.first * width + column;
    low += (i64)group.first * stride + from;
    float sums[COLUMNS][RANKS] = {};
    for (u32 at = 0; at < group.rows; at += DEPTH) {
        const int depth = group.rows - at < DEPTH ? group.rows - at : DEPTH;
        for (int i = threadIdx.x; i < DEPTH * RANKS; i += THREADS) {
            const int row = i / RANKS, r = i % RANKS;
            shared[row][r / 4].at[r % 4] = row < depth && r < ranks ? widen(low[(i64)(at + row) * stride + r]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 4
        for (int row = 0; row < depth; row++) {
            float x[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                x[c] = column + c * THREADS < width ? widen(wide[(i64)(at + row) * width + c * THREADS]) : 0.0f;
#pragma unroll
            for (int r = 0; r < RANKS; r += 4) {
                if (r >= ranks) break;
                const Pack<float, 4> u = shared[row][r / 4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) sums[c][r + i] += x[c] * u.at[i];
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        const i64 to = column + c * THREADS;
        if (to >= width) break;
#pragma unroll
        for (int r = 0; r < RANKS; r++) {
            if (r >= ranks) break;
            group.to[A ? (from + r) * (i64)width + to : to * rank + from + r] += sums[c][r];
        }
    }
}

#define GRADIENT(NAME, A, T)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME##_##T(                              \
        const T* wide, const T* low, const Group* groups, int width, int rank, int stride) {       \
        gradient<A>(wide, low, groups, width, rank, stride);                                       \
    }

typedef float f32;
GRADIENT(expert_gradient_a, true, f32)
GRADIENT(expert_gradient_a, true, bf16)
GRADIENT(expert_gradient_b, false, f32)
GRADIENT(expert_gradient_b, false, bf16)
