// Shared by the kernels of the gated delta rule: the unit keys and the decays of a chunk, products of a block in
// registers, and what `prepare` keeps of a chunk. Formulas: crates/ft-ops/src/cpu/delta_rule.rs; here a chunk has fewer
// tokens.
//
// Letters: H key heads, V value heads (value head j uses key head j / (V / H)), P elements of a key, Q of a value, C
// tokens of a chunk. qkv [N, 2·H·P + V·Q], a and b [N, V]. Columns of a state [P, Q] depend on each other only through
// sums over them; so a block of the two scans has SLICE columns.
#pragma once
#include "common.cuh"
#include "mma.cuh"

namespace delta {

constexpr int C = 32, THREADS = 256, LANES = THREADS / C, SLICE = 32;
// Elements of a key, at most.
constexpr int KEY = 128;
// Distances of rows of KEY and of C elements that are read by four: see `Cell`.
constexpr int WIDE = KEY + 4, NARROW = C + 8;
// Numbers of shared memory of a scan, and of `prepare`.
constexpr int SCAN = 4 * C * WIDE + 6 * C * NARROW, PREPARE = 2 * C * WIDE + C * NARROW;
constexpr float EPS = 1e-6f;

struct Heads {
    int key_heads, value_heads, key_dim, value_dim;
    __device__ __forceinline__ int group() const { return value_heads / key_heads; }
    __device__ __forceinline__ i64 width() const { return 2 * (i64)key_heads * key_dim + (i64)value_heads * value_dim; }
    // The first column of q, k or v of a head in qkv.
    __device__ __forceinline__ i64 q_at(int head) const { return (i64)(head / group()) * key_dim; }
    __device__ __forceinline__ i64 k_at(int head) const { return (i64)key_heads * key_dim + q_at(head); }
    __device__ __forceinline__ i64 v_at(int head) const { return 2 * (i64)key_heads * key_dim + (i64)head * value_dim; }
};

template <typename T>
struct Inputs {
    const T *qkv, *a, *b;
    const float *a_log, *dt_bias;
};

// Row and place in it of a thread, if LANES neighbors share a row of a chunk.
__device__ __forceinline__ int own_row() {
    return threadIdx.x / LANES;
}
__device__ __forceinline__ int own_lane() {
    return threadIdx.x % LANES;
}

__device__ __forceinline__ float softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

// The decays of a value head in a chunk; tokens that are not there do not decay and have β = 0.
struct Decays {
    // Sums of g up to each token. Their differences need more bits than f32 has.
    double sums[C];
    float beta[C];
    // e^sums, and e^(last sum - sums)
    float from_start[C], to_end[C];
    float whole;

    // For the whole block; ends with a barrier.
    template <typename T>
    __device__ __forceinline__ void fill(const Inputs<T>& x, int value_heads, int head, i64 first, int n) {
        const int i = threadIdx.x;
        if (i < C) {
            float g = 0, step = 0;
            if (i < n) {
                const i64 at = (first + i) * value_heads + head;
                const float sum = widen(x.a[at]) + x.dt_bias[head];
                g = -expf(x.a_log[head]) * softplus(sum);
                step = 1.0f / (1.0f + expf(-widen(x.b[at])));
            }
            double sum = g;
#pragma unroll
            for (int by = 1; by < C; by *= 2) {
                const double earlier = __shfl_up_sync(0xffffffffu, sum, by);
                if (i >= by) sum += earlier;
            }
            const double last = __shfl_sync(0xffffffffu, sum, C - 1);
            sums[i] = sum;
            beta[i] = step;
            from_start[i] = expf((float)sum);
            to_end[i] = expf((float)(last - sum));
            if (i == 0) whole = expf((float)last);
        }
        __syncthreads();
    }

    __device__ __forceinline__ float between(int later, int earlier) const {
        return expf((float)(sums[later] - sums[earlier]));
    }
};

// The results of `prepare` for a chunk and a value head, f32: T = (I + A)^-1 and P [C, C]; for each token β and three
// factors with the inverse length of the row: of q and of k in products with the state before the chunk, and of k in the
// product that is added to the state after it; the decay of the chunk.
constexpr int SOLUTION = 0, LOWER = C * C, BETA = 2 * C * C, OF_Q = BETA + C, OF_K = OF_Q + C, END_K = OF_K + C;
constexpr int DECAY = END_K + C, PREPARED = DECAY + 4;

// Four elements as they are in memory: an operation on them would wait for their load.
template <typename T>
struct Four {
    u32 word[sizeof(T)];

    __device__ __forceinline__ float at(int i) const {
        if constexpr (sizeof(T) == 4) {
            return float_of(word[i]);
        } else {
            T x;
            x.bits = (unsigned short)(word[i / 2] >> 16 * (i % 2));
            return widen(x);
        }
    }

    // To four f32.
    __device__ __forceinline__ void write(float* to) const {
        const float x[4] = {at(0), at(1), at(2), at(3)};
        store<4>(to, x);
    }
};

__device__ __forceinline__ u32 raw(float x) {
    return bits_of(x);
}
__device__ __forceinline__ u32 raw(bf16 x) {
    return x.bits;
}

// Four elements of which `count` are there, the others 0. `whole`: they are aligned, and all there or none.
template <typename T>
__device__ __forceinline__ Four<T> fetch(const T* from, int count, bool whole) {
    constexpr int WORDS = sizeof(T);
    Four<T> x = {};
    if (whole) {
        if (count > 0) {
            const Pack<u32, WORDS> pack = *reinterpret_cast<const Pack<u32, WORDS>*>(from);
#pragma unroll
            for (int i = 0; i < WORDS; i++) x.word[i] = pack.at[i];
        }
        return x;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < count) x.word[i * WORDS / 4] |= raw(from[i]) << (WORDS == 4 ? 0 : 16 * (i % 2));
    return x;
}

__device__ __forceinline__ void put_four(float* to, const float (&x)[4]) {
    __stcg(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
}
__device__ __forceinline__ void put_four(bf16* to, const float (&x)[4]) {
    bf16 short_x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) narrow(x[i], short_x[i]);
    const uint2 words =
        make_uint2(raw(short_x[0]) | raw(short_x[1]) << 16, raw(short_x[2]) | raw(short_x[3]) << 16);
    __stcg(reinterpret_cast<uint2*>(to), words);
}

// Writes `count` of four elements, past the L1 cache: the compiler joins ordinary stores of one branch only sometimes.
template <typename T>
__device__ __forceinline__ void put(T* to, const float (&x)[4], int count, bool whole) {
    if (whole) {
        if (count > 0) put_four(to, x);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < count) narrow(x[i], to[i]);
}

// True if rows of qkv, of o and of states can be moved by four elements.
template <typename T>
__device__ __forceinline__ bool in_fours(const Heads& h, const T* qkv, const void* o, const void* states) {
    const u64 places = reinterpret_cast<u64>(o) | reinterpret_cast<u64>(qkv);
    return (h.key_dim | h.value_dim) % 4 == 0 && places % (4 * sizeof(T)) == 0 && reinterpret_cast<u64>(states) % 16 == 0;
}

// The own part of a row of q or k, of `size` elements.
template <typename T>
struct Keys {
    static constexpr int PARTS = KEY / (4 * LANES);
    Four<T> part[PARTS];

    __device__ __forceinline__ void fetch_row(const T* row, bool there, int size, bool whole) {
#pragma unroll
        for (int r = 0; r < PARTS; r++) {
            const int e = 4 * (own_lane() + r * LANES);
            part[r] = fetch(row + e, there ? size - e : 0, whole);
        }
    }

    // To rows WIDE apart, with zeros up to KEY.
    __device__ __forceinline__ void write(float factor, float* to) const {
#pragma unroll
        for (int r = 0; r < PARTS; r++) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = part[r].at(i) * factor;
            store<4>(to + own_row() * WIDE + 4 * (own_lane() + r * LANES), x);
        }
    }

    __device__ __forceinline__ float inverse_length() const {
        float squares = 0;
#pragma unroll
        for (int r = 0; r < PARTS; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) squares += part[r].at(i) * part[r].at(i);
        return 1.0f / sqrtf(lane_sum<LANES>(squares) + EPS);
    }
};

// The part that a thread has of a product [C, SLICE]: 4 rows and 4 columns over a quarter of the inner dimension; after
// `gather`, 4 columns of one row. Lanes 1 apart read the same places of the left operand, lanes 2 apart those of the right
// one, and the places of half a warp are in different banks.
struct Cell {
    int rows, columns, quarter;
    __device__ __forceinline__ Cell() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        rows = 4 * ((lane >> 1 & 1) + 2 * (warp & 3));
        columns = 4 * ((lane & 1) + 2 * (lane >> 4) + 4 * (warp >> 2));
        quarter = lane >> 2 & 3;
    }
    __device__ __forceinline__ int row() const { return rows + quarter; }

    // The sums over the quarters, of the own row.
    __device__ __forceinline__ void gather(const float (&sum)[4][4], float (&to)[4]) const {
        const bool late = quarter & 2, second = quarter & 1;
        float half[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float mine = late ? sum[i + 2][j] : sum[i][j], other = late ? sum[i][j] : sum[i + 2][j];
                half[i][j] = mine + __shfl_xor_sync(0xffffffffu, other, 8);
            }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float mine = second ? half[1][j] : half[0][j], other = second ? half[0][j] : half[1][j];
            to[j] = mine + __shfl_xor_sync(0xffffffffu, other, 4);
        }
    }

    // Row by row products of `a` and, if there is one, `other` with `b`: rows WIDE apart, zeros after `size` elements.
    template <bool TWO>
    __device__ __forceinline__ void along(
        const float* a, const float* other, const float* b, int size, float (&sum)[4][4], float (&sum_other)[4][4]) const {
#pragma unroll 2
        for (int start = 0; start < size; start += 16) {
            const int e = start + 4 * quarter;
            float right[4][4];
#pragma unroll
            for (int j = 0; j < 4; j++) load<4>(b + (columns + j) * WIDE + e, right[j]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float left[4];
                load<4>(a + (rows + i) * WIDE + e, left);
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int x = 0; x < 4; x++) sum[i][j] += left[x] * right[j][x];
                if (TWO) {
                    load<4>(other + (rows + i) * WIDE + e, left);
#pragma unroll
                    for (int j = 0; j < 4; j++)
#pragma unroll
                        for (int x = 0; x < 4; x++) sum_other[i][j] += left[x] * right[j][x];
                }
            }
        }
    }

    // The own row of aᵀ b, both [C, ·] with rows NARROW apart.
    __device__ __forceinline__ void across(const float* a, const float* b, float (&to)[4]) const {
        float sum[4][4] = {};
#pragma unroll
        for (int t = 0; t < C; t += 4) {
            float left[4], right[4];
            load<4>(a + (t + quarter) * NARROW + rows, left);
            load<4>(b + (t + quarter) * NARROW + columns, right);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] += left[i] * right[j];
        }
        gather(sum, to);
    }

    __device__ __forceinline__ void write(const float (&x)[4], float factor, float* to) const {
        float scaled[4];
#pragma unroll
        for (int j = 0; j < 4; j++) scaled[j] = x[j] * factor;
        store<4>(to + row() * NARROW + columns, scaled);
    }
};

// The columns of a block of a scan.
struct Slice {
    int first, count;
    __device__ __forceinline__ explicit Slice(int value_dim)
        : first(blockIdx.y * SLICE), count(value_dim - first < SLICE ? value_dim - first : SLICE) {}
};

// The part of a slice of a state [P, Q] that a thread has: 4 columns of 4 elements of a key.
struct State {
    float at[4][4];
    int columns, first;
    __device__ __forceinline__ State() : at{} {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        columns = 4 * ((lane & 1) + 2 * (lane >> 4) + 4 * (warp >> 2));
        first = 4 * ((lane >> 1 & 7) + 8 * (warp & 3));
    }

    __device__ __forceinline__ void fetch_from(const float* from, const Slice& slice, const Heads& h, bool whole) {
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const int there = first + x < h.key_dim ? slice.count - columns : 0;
            const Four<float> row =
                fetch(from + (i64)(first + x) * h.value_dim + slice.first + columns, there, whole);
#pragma unroll
            for (int j = 0; j < 4; j++) at[j][x] = row.at(j);
        }
    }

    __device__ __forceinline__ void put_to(float* to, const Slice& slice, const Heads& h, bool whole) const {
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const float row[4] = {at[0][x], at[1][x], at[2][x], at[3][x]};
            const int there = first + x < h.key_dim ? slice.count - columns : 0;
            put(to + (i64)(first + x) * h.value_dim + slice.first + columns, row, there, whole);
        }
    }

    // Transposed, to rows WIDE apart in shared memory.
    __device__ __forceinline__ void write(float* to) const {
#pragma unroll
        for (int j = 0; j < 4; j++) store<4>(to + (columns + j) * WIDE + first, at[j]);
    }

    __device__ __forceinline__ void decay(float by) {
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int x = 0; x < 4; x++) at[j][x] *= by;
    }

    // Adds keysᵀ rows: [C, P] with rows WIDE apart, and [C, SLICE] with rows NARROW apart.
    __device__ __forceinline__ void add(const float* keys, const float* rows) {
#pragma unroll 8
        for (int t = 0; t < C; t++) {
            float left[4], right[4];
            load<4>(rows + t * NARROW + columns, left);
            load<4>(keys + t * WIDE + first, right);
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int x = 0; x < 4; x++) at[j][x] += left[j] * right[x];
        }
    }
};

// The part that a thread has of the next chunk of a scan, on its way from global to shared memory.
template <typename T>
struct Ahead {
    Keys<T> q, k;
    Four<float> solution, lower;
    // Of the own row of a `Cell`: four elements of v or do, and its factors.
    Four<T> row;
    float beta, of_q, of_k, end_k, decay;

    // `own`: the own row of qkv, `q_at` and `k_at` its columns; `values`: of v or do, rows `apart` apart, from the first
    // column on; `at_row` and `at_column`: of T and P, the four elements that the thread moves.
    __device__ __forceinline__ void fetch_chunk(
        const T* own, i64 q_at, i64 k_at, const T* values, i64 apart, const float* prepared, int n, int count, int size,
        const Cell& cell, int at_row, int at_column, bool whole) {
        q.fetch_row(own + q_at, own_row() < n, size, whole);
        k.fetch_row(own + k_at, own_row() < n, size, whole);
        const float* square = prepared + at_row * C + at_column;
        solution = fetch(square + SOLUTION, 4, true);
        lower = fetch(square + LOWER, 4, true);
        const int i = cell.row();
        row = fetch(values + i * apart + cell.columns, i < n ? count - cell.columns : 0, whole);
        beta = prepared[BETA + i];
        of_q = prepared[OF_Q + i];
        of_k = prepared[OF_K + i];
        end_k = prepared[END_K + i];
        decay = prepared[DECAY];
    }
};

}  // namespace delta
