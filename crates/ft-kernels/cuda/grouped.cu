// Products of uneven groups of rows with a matrix for each group, in one launch: the experts of a mixture.
//
// y [rows, n] = x [rows, k] · Wᵀ with W [n, k] (forward), or x · W with W [k, n] (BACK, the gradient of the input), added to y
// if `add`. A tile is up to ROWS rows (f32: F32_ROWS) of one group, and COLUMNS columns; block (b, c) owns tile b, columns c.
// Sums are f32, over k in ascending order.
#include "common.cuh"

#include "mma.cuh"

constexpr int ROWS = 128, F32_ROWS = 64, COLUMNS = 128, THREADS = 128;

// Rows first .. first + rows - 1 of x and y are multiplied with this matrix, or belong to this bias.
struct Tile {
    const void* weight;
    u32 first, rows;
};

// bf16 on tensor cores, with 2 STAGES (X + W) bytes of shared memory. k and n are multiples of 8, addresses of 16 bytes. A
// warp computes 64 rows of 64 columns. The rows of the tiles in shared memory have 8 elements more, so that the 8 rows of a
// matrix are in different banks.
template <bool BACK>
struct Narrow {
    static constexpr int DEPTH = 32, STEP = DEPTH + 8, WIDE = COLUMNS + 8, STAGES = 3, WARP = 64;
    static constexpr int X = ROWS * STEP, W = BACK ? DEPTH * WIDE : COLUMNS * STEP;

    static __device__ __forceinline__ void load(
        const bf16* x, const bf16* w, int rows, int column, int at, int n, int k, uint32_t sx, uint32_t sw) {
#pragma unroll
        for (int i = threadIdx.x; i < ROWS * DEPTH / 8; i += THREADS) {
            const int row = i / (DEPTH / 8), chunk = i % (DEPTH / 8) * 8;
            const bool given = row < rows && at + chunk < k;
            ptx::copy16(sx + 2 * (row * STEP + chunk), given ? x + (i64)row * k + at + chunk : x, given);
        }
#pragma unroll
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
    }

    static __device__ __forceinline__ void run(const bf16* x, const Tile& tile, int n, int k, int add, bf16* y) {
        DYNAMIC_SHARED(memory);
        const uint32_t shared = ptx::address(memory);
        const bf16* w = static_cast<const bf16*>(tile.weight);
        const int column = blockIdx.y * COLUMNS, rows = tile.rows;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        // The rows and columns of the tile that this warp computes.
        const int first = warp / 2 * WARP, across = warp % 2 * WARP;
        x += (i64)tile.first * k;
        y += (i64)tile.first * n;
        float sums[WARP / 16][WARP / 8][4] = {};
        // Copies the columns `at` of x and W to a stage. Each step ends a group of copies, also an empty one.
        auto start = [&](int at, int stage) {
            const uint32_t to = shared + 2 * stage * (X + W);
            if (at < k) load(x, w, rows, column, at, n, k, to, to + 2 * X);
            ptx::commit();
        };
        for (int stage = 0; stage < STAGES - 1; stage++) start(stage * DEPTH, stage);
        int stage = 0;
        for (int at = 0; at < k; at += DEPTH) {
            ptx::wait<STAGES - 2>();
            // The memory that the step before read is free after this barrier.
            __syncthreads();
            start(at + (STAGES - 1) * DEPTH, (stage + STAGES - 1) % STAGES);
            const uint32_t sx = shared + 2 * stage * (X + W), sw = sx + 2 * X;
#pragma unroll
            for (int step = 0; step < DEPTH; step += 16) {
                if (first >= rows) break;
                uint32_t a[WARP / 16][4];
#pragma unroll
                for (int i = 0; i < WARP / 16; i++)
                    ptx::ldmatrix(a[i], sx + 2 * ((first + i * 16 + lane % 16) * STEP + step + lane / 16 * 8));
#pragma unroll
                for (int j = 0; j < WARP / 16; j++) {
                    uint32_t b[4];
                    if (BACK) {
                        const int from = across + j * 16 + lane / 16 * 8;
                        ptx::ldmatrix_trans(b, sw + 2 * ((step + lane % 16) * WIDE + from));
                    } else {
                        const int row = across + j * 16 + lane / 16 * 8 + lane % 8;
                        ptx::ldmatrix(b, sw + 2 * (row * STEP + step + lane / 8 % 2 * 8));
                    }
#pragma unroll
                    for (int i = 0; i < WARP / 16; i++) {
                        ptx::mma(sums[i][2 * j], a[i], b[0], b[1]);
                        ptx::mma(sums[i][2 * j + 1], a[i], b[2], b[3]);
                    }
                }
            }
            stage = (stage + 1) % STAGES;
        }
#pragma unroll
        for (int i = 0; i < WARP / 16; i++) {
#pragma unroll
            for (int j = 0; j < WARP / 8; j++) {
#pragma unroll
                for (int c = 0; c < 4; c += 2) {
                    const int row = first + i * 16 + lane / 4 + c / 2 * 8, to = column + across + j * 8 + lane % 4 * 2;
                    if (row >= rows || to >= n) continue;
                    bf16* place = y + (i64)row * n + to;
                    float pair[2] = {};
                    if (add) ::load<2>(place, pair);
                    pair[0] += sums[i][j][c];
                    pair[1] += sums[i][j][c + 1];
                    store<2>(place, pair);
                }
            }
        }
    }
};

// f32: a thread computes 8 rows of 8 columns that are 16 apart.
template <bool BACK>
struct Wide {
    static constexpr int DEPTH = 16;

    static __device__ __forceinline__ void run(const float* x, const Tile& tile, int n, int k, int add, float* y) {
        __shared__ float sx[DEPTH][F32_ROWS + 1], sw[DEPTH][COLUMNS + 1];
        const float* w = static_cast<const float*>(tile.weight);
        const int column = blockIdx.y * COLUMNS, rows = tile.rows;
        const int across = threadIdx.x % 16, down = threadIdx.x / 16 * 8;
        x += (i64)tile.first * k;
        y += (i64)tile.first * n;
        float sums[8][8] = {};
        for (int at = 0; at < k; at += DEPTH) {
            for (int i = threadIdx.x; i < F32_ROWS * DEPTH; i += THREADS) {
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
// [tokens, k]: the rows of a token, ascending. One block for each token; the first `packs` packs of a row are moved 16 bytes
// at a time.
template <typename T>
__device__ __forceinline__ void combine(
    const T* part, const u32* places, int k, int first, int count, i64 d, i64 packs, T* y) {
    constexpr int V = Full<T>::V;
    y += (i64)blockIdx.x * d;
    places += (i64)blockIdx.x * k;
    // The rows that are there follow each other.
    int from = 0, to = 0;
    for (int i = 0; i < k; i++) {
        const int row = (int)places[i] - first;
        if (row < 0) from = i + 1;
        if (row < count) to = i + 1;
    }
    if (from >= to) return;
    for (i64 j = threadIdx.x; j < packs; j += blockDim.x) {
        float sum[V], x[V];
        load<V>(y + j * V, sum);
        for (int i = from; i < to; i++) {
            load<V>(part + ((i64)places[i] - first) * d + j * V, x);
#pragma unroll
            for (int e = 0; e < V; e++) sum[e] += x[e];
        }
        store<V>(y + j * V, sum);
    }
    for (i64 j = packs * V + threadIdx.x; j < d; j += blockDim.x) {
        float sum = widen(y[j]);
        for (int i = from; i < to; i++) sum += widen(part[((i64)places[i] - first) * d + j]);
        narrow(sum, y[j]);
    }
}

#define COMBINE(T)                                                                                                  \
    extern "C" __global__ void combine_##T(                                                                      \
        const T* part, const u32* places, int k, int first, int count, i64 d, i64 packs, T* y) {                    \
        combine<T>(part, places, k, first, count, d, packs, y);                                                     \
    }

// Each row of y [rows, n] is the bias of its group, times its factor if `factors` is not null. Block (b, c) owns tile b,
// columns c.
template <typename T>
__device__ __forceinline__ void bias_rows(const Tile* tiles, const float* factors, i64 n, T* y) {
    const Tile tile = tiles[blockIdx.x];
    const i64 column = (i64)blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= n) return;
    const float bias = widen(static_cast<const T*>(tile.weight)[column]);
    for (u32 row = tile.first; row < tile.first + tile.rows; row++)
        narrow(factors == nullptr ? bias : factors[row] * bias, y[row * n + column]);
}

// to[row] += the product of the row of x [rows, n] with the bias of its group. A warp takes a row of the tile of its block.
template <typename T>
__device__ __forceinline__ void bias_products(const Tile* tiles, const T* x, i64 n, float* to) {
    const Tile tile = tiles[blockIdx.x];
    const T* bias = static_cast<const T*>(tile.weight);
    const int lane = threadIdx.x % 32;
    for (u32 i = threadIdx.x / 32; i < tile.rows; i += blockDim.x / 32) {
        const i64 row = tile.first + i;
        float sum = 0.0f;
        for (i64 j = lane; j < n; j += 32) sum += widen(x[row * n + j]) * widen(bias[j]);
        sum = lane_sum<32>(sum);
        if (lane == 0) to[row] += sum;
    }
}

#define BIASES(T)                                                                                                   \
    extern "C" __global__ void bias_rows_##T(const Tile* tiles, const float* factors, i64 n, T* y) {               \
        bias_rows<T>(tiles, factors, n, y);                                                                         \
    }                                                                                                               \
    extern "C" __global__ void bias_products_##T(const Tile* tiles, const T* x, i64 n, float* to) {                 \
        bias_products<T>(tiles, x, n, to);                                                                          \
    }

typedef float f32;
GROUPED(grouped_forward, Narrow, bf16, false)
GROUPED(grouped_input, Narrow, bf16, true)
GROUPED(grouped_forward, Wide, f32, false)
GROUPED(grouped_input, Wide, f32, true)
COMBINE(f32)
COMBINE(bf16)
BIASES(f32)
BIASES(bf16)
