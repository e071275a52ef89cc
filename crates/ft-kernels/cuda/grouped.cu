// Products of uneven groups of rows with a matrix for each group, in one launch: the experts of a mixture.
//
// y [rows, n] = x [rows, k] · Wᵀ with W [n, k] (forward), or x · W with W [k, n] (BACK, the gradient of the input), added to y
// if `add`. A tile is up to ROWS rows of one group, and COLUMNS columns; block (b, c) owns tile b, columns c. Sums are f32, over
// k in ascending order.
#include "common.cuh"

#include "mma.cuh"

constexpr int ROWS = 64, COLUMNS = 128, THREADS = 128;

// Rows first .. first + rows - 1 of x and y are multiplied with this matrix.
struct Tile {
    const void* weight;
    u32 first, rows;
};

// bf16 on tensor cores, with 4 (X + W) bytes of shared memory. k and n are multiples of 8, addresses of 16 bytes. A warp computes 16 rows. The rows of the tiles in
// shared memory have 8 elements more, so that the 8 rows of a matrix are in different banks.
template <bool BACK>
struct Narrow {
    static constexpr int DEPTH = 32, STEP = DEPTH + 8, WIDE = COLUMNS + 8;
    static constexpr int X = ROWS * STEP, W = BACK ? DEPTH * WIDE : COLUMNS * STEP;

    static __device__ __forceinline__ void load(
        const bf16* x, const bf16* w, int rows, int column, int at, int n, int k, uint32_t sx, uint32_t sw) {
        for (int i = threadIdx.x; i < ROWS * DEPTH / 8; i += THREADS) {
            const int row = i / (DEPTH / 8), chunk = i % (DEPTH / 8) * 8;
            const bool given = row < rows && at + chunk < k;
            ptx::copy16(sx + 2 * (row * STEP + chunk), given ? x + (i64)row * k + at + chunk : x, given);
        }
        for (int i = threadIdx.x; i < COLUMNS * DEPTH / 8; i += THREADS) {
            if (BACK) {
                const int row = i / (COLUMNS / 8), chunk = i % (COLUMNS / 8) * 8;
                const bool given = at + row < k && column + chunk < n;
                ptx::copy16(sw + 2 * (row * WIDE + chunk), given ? w + (i64)(at + row) * n + column + chunk : w, given);
            } else {
                const int row = i / (DEPTH / 8), chunk = i % (DEPTH / 8) * 8;
                const bool given = column + row < n && at + chunk < k;
                ptx::copy16(sw + 2 * (row * STEP + chunk), given ? w + (i64)(column + row) * k + at + chunk : w, given);
            }
        }
        ptx::commit();
    }

    static __device__ __forceinline__ void run(const bf16* x, const Tile& tile, int n, int k, int add, bf16* y) {
        DYNAMIC_SHARED(memory);
        bf16* shared[2] = {reinterpret_cast<bf16*>(memory), reinterpret_cast<bf16*>(memory) + X + W};
        const bf16* w = static_cast<const bf16*>(tile.weight);
        const int column = blockIdx.y * COLUMNS, rows = tile.rows;
        const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
        x += (i64)tile.first * k;
        y += (i64)tile.first * n;
        float sums[COLUMNS / 8][4] = {};
        auto start = [&](int at, int side) {
            load(x, w, rows, column, at, n, k, ptx::address(shared[side]), ptx::address(shared[side] + X));
        };
        start(0, 0);
        int side = 0;
        for (int at = 0; at < k; at += DEPTH, side ^= 1) {
            if (at + DEPTH < k) {
                start(at + DEPTH, side ^ 1);
                ptx::wait<1>();
            } else {
                ptx::wait<0>();
            }
            __syncthreads();
            const uint32_t sx = ptx::address(shared[side]), sw = ptx::address(shared[side] + X);
            for (int step = 0; step < DEPTH && first < rows; step += 16) {
                uint32_t a[4];
                ptx::ldmatrix(a, sx + 2 * ((first + lane % 16) * STEP + step + lane / 16 * 8));
#pragma unroll
                for (int j = 0; j < COLUMNS / 16; j++) {
                    uint32_t b[4];
                    if (BACK) {
                        ptx::ldmatrix_trans(b, sw + 2 * ((step + lane % 16) * WIDE + j * 16 + lane / 16 * 8));
                    } else {
                        const int row = j * 16 + lane / 16 * 8 + lane % 8;
                        ptx::ldmatrix(b, sw + 2 * (row * STEP + step + lane / 8 % 2 * 8));
                    }
                    ptx::mma(sums[2 * j], a, b[0], b[1]);
                    ptx::mma(sums[2 * j + 1], a, b[2], b[3]);
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int row = first + lane / 4 + c / 2 * 8, to = column + j * 8 + lane % 4 * 2 + c % 2;
                if (row >= rows || to >= n) continue;
                bf16& place = y[(i64)row * n + to];
                narrow(add ? widen(place) + sums[j][c] : sums[j][c], place);
            }
        }
    }
};

// f32: a thread computes 8 rows of 8 columns that are 16 apart.
template <bool BACK>
struct Wide {
    static constexpr int DEPTH = 16;

    static __device__ __forceinline__ void run(const float* x, const Tile& tile, int n, int k, int add, float* y) {
        __shared__ float sx[DEPTH][ROWS + 1], sw[DEPTH][COLUMNS + 1];
        const float* w = static_cast<const float*>(tile.weight);
        const int column = blockIdx.y * COLUMNS, rows = tile.rows;
        const int across = threadIdx.x % 16, down = threadIdx.x / 16 * 8;
        x += (i64)tile.first * k;
        y += (i64)tile.first * n;
        float sums[8][8] = {};
        for (int at = 0; at < k; at += DEPTH) {
            for (int i = threadIdx.x; i < ROWS * DEPTH; i += THREADS) {
                const int row = i / DEPTH, d = i % DEPTH;
                sx[d][row] = row < rows && at + d < k ? x[(i64)row * k + at + d] : 0.0f;
            }
            for (int i = threadIdx.x; i < COLUMNS * DEPTH; i += THREADS) {
                const int c = BACK ? i % COLUMNS : i / DEPTH, d = BACK ? i / COLUMNS : i % DEPTH;
                const i64 place = BACK ? (i64)(at + d) * n + column + c : (i64)(column + c) * k + at + d;
                sw[d][c] = column + c < n && at + d < k ? w[place] : 0.0f;
            }
            __syncthreads();
            for (int d = 0; d < DEPTH && down < rows; d++) {
#pragma unroll
                for (int r = 0; r < 8; r++) {
#pragma unroll
                    for (int c = 0; c < 8; c++) sums[r][c] += sx[d][down + r] * sw[d][across + 16 * c];
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (int r = 0; r < 8; r++) {
#pragma unroll
            for (int c = 0; c < 8; c++) {
                const int to = column + across + 16 * c;
                if (down + r >= rows || to >= n) continue;
                float& place = y[(i64)(down + r) * n + to];
                place = add ? place + sums[r][c] : sums[r][c];
            }
        }
    }
};

#define GROUPED(NAME, FORM, T, BACK)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME##_##T(                                    \
        const T* x, const Tile* tiles, int n, int k, int add, T* y) {                                    \
        FORM<BACK>::run(x, tiles[blockIdx.x], n, k, add, y);                                             \
    }

// y[token] += the rows of part that belong to it: rows first .. first + count - 1 of the assignment are there. `places`
// [tokens, k]: the rows of a token, ascending. One block for each token.
template <typename T>
__device__ __forceinline__ void combine(const T* part, const u32* places, int k, int first, int count, i64 d, T* y) {
    y += (i64)blockIdx.x * d;
    places += (i64)blockIdx.x * k;
    for (i64 j = threadIdx.x; j < d; j += blockDim.x) {
        float sum = widen(y[j]);
        for (int i = 0; i < k; i++) {
            const int row = (int)places[i] - first;
            if (row >= 0 && row < count) sum += widen(part[(i64)row * d + j]);
        }
        narrow(sum, y[j]);
    }
}

#define COMBINE(T)                                                                                                  \
    extern "C" __global__ void combine_##T(const T* part, const u32* places, int k, int first, int count, i64 d, T* y) { \
        combine<T>(part, places, k, first, count, d, y);                                                            \
    }

typedef float f32;
GROUPED(grouped_forward, Narrow, bf16, false)
GROUPED(grouped_input, Narrow, bf16, true)
GROUPED(grouped_forward, Wide, f32, false)
GROUPED(grouped_input, Wide, f32, true)
COMBINE(f32)
COMBINE(bf16)
