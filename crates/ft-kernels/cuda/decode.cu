// Weights stored as codes: decoded to bf16 or f32 for a product that follows, or in registers for the product with a few
// tokens. The values are those of the CPU, bit by bit; the layouts stand in `ops/coded.rs` of ft.
#include "common.cuh"

typedef unsigned char u8;

// Neighbouring columns that a thread decodes for a product that follows.
static constexpr int PACK = 8;

// The 16 levels of NF4.
__device__ __forceinline__ float level(int code) {
    switch (code) {
        case 0: return -1.0f;
        case 1: return -0.6961928009986877f;
        case 2: return -0.5250730514526367f;
        case 3: return -0.39491748809814453f;
        case 4: return -0.28444138169288635f;
        case 5: return -0.18477343022823334f;
        case 6: return -0.09105003625154495f;
        case 7: return 0.0f;
        case 8: return 0.07958029955625534f;
        case 9: return 0.16093020141124725f;
        case 10: return 0.24611230194568634f;
        case 11: return 0.33791524171829224f;
        case 12: return 0.44070982933044434f;
        case 13: return 0.5626170039176941f;
        case 14: return 0.7229568362236023f;
        default: return 1.0f;
    }
}

// Into memory where the lanes of a warp can look up different ones at once.
__device__ __forceinline__ void fill(float* levels) {
    if (threadIdx.x < 16) levels[threadIdx.x] = level(threadIdx.x);
    __syncthreads();
}

// The codes of C half bytes: of one that lies at `place`, or of an even number from an even place on.
template <int C>
__device__ __forceinline__ void nibbles(const u8* codes, i64 place, int (&code)[C]) {
    if (C == 1) {
        const u8 byte = codes[place / 2];
        code[0] = place % 2 == 0 ? byte >> 4 : byte & 15;
        return;
    }
    constexpr int BYTES = C / 2 > 0 ? C / 2 : 1;
    const Pack<u8, BYTES> bytes = *reinterpret_cast<const Pack<u8, BYTES>*>(codes + place / 2);
#pragma unroll
    for (int j = 0; j < C; j++) code[j] = j % 2 == 0 ? bytes.at[j / 2] >> 4 : bytes.at[j / 2] & 15;
}

// A format gives C neighbouring columns of a row, which share a scale, by `pack`. C is 1, or a power of two that
// divides the first column and the number of columns and is at most WIDE, the columns of 16 bytes. The structures are
// filled by crates/ft-ops/src/cuda/quantized.rs.

// Columns that share a scale: 1 << shift, or all of a row.
__device__ __forceinline__ i64 scale_of(i64 row, int column, int columns, int shift) {
    return row * (((columns - 1) >> shift) + 1) + (column >> shift);
}

struct Int8 {
    static constexpr int WIDE = 16;
    const u8* codes;
    const float* scales;
    i64 stride;
    int columns, shift;

    template <int C>
    __device__ __forceinline__ void pack(const float*, i64 row, int column, float (&x)[C]) const {
        const float scale = scales[scale_of(row, column, columns, shift)];
        const Pack<u8, C> bytes = *reinterpret_cast<const Pack<u8, C>*>(codes + row * stride + column);
#pragma unroll
        for (int j = 0; j < C; j++) x[j] = mul((float)(signed char)bytes.at[j], scale);
    }
};

// A bf16 scale in the lower half of a word, a bf16 minimum in the upper.
struct Int4 {
    static constexpr int WIDE = 32;
    const u8* codes;
    const u32* scales;
    i64 stride;
    int columns, shift;

    template <int C>
    __device__ __forceinline__ void pack(const float*, i64 row, int column, float (&x)[C]) const {
        const u32 word = scales[scale_of(row, column, columns, shift)];
        const float scale = float_of(word << 16), minimum = float_of(word & 0xffff0000u);
        int code[C];
        nibbles<C>(codes + row * stride, column, code);
#pragma unroll
        for (int j = 0; j < C; j++) x[j] = plus(mul((float)code[j], scale), minimum);
    }
};

// Blocks of 64 of the flattened weight. `nested` is null where absmax are plain.
struct Nf4 {
    static constexpr int WIDE = 32;
    const u8* codes;
    const float* absmax;
    const u8* nested;
    const float* nested_table;
    const float* nested_absmax;
    float offset;
    int columns;

    template <int C>
    __device__ __forceinline__ void pack(const float* levels, i64 row, int column, float (&x)[C]) const {
        const i64 place = row * columns + column;
        const i64 block = place / 64;
        const float scale = nested == nullptr
            ? absmax[block]
            : plus(mul(nested_table[nested[block]], nested_absmax[block / 256]), offset);
        int code[C];
        nibbles<C>(codes, place, code);
#pragma unroll
        for (int j = 0; j < C; j++) x[j] = mul(levels[code[j]], scale);
    }
};

// `count` rows from `first` on, `width` columns from `from` on, to `to` [count, width]. C divides `from`, `width` and
// the columns of the weight.
template <int C, typename W, typename T>
__device__ __forceinline__ void decode_packs(
    const W& w, const float* levels, i64 first, i64 count, int from, int width, T* to) {
    const int packs = width / C;
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count * packs; i += step) {
        const i64 row = i / packs;
        const int column = (int)(i % packs) * C;
        float x[C];
        w.template pack<C>(levels, first + row, from + column, x);
        store<C>(to + row * width + column, x);
    }
}

template <typename W, typename T>
__device__ __forceinline__ void decode(const W& w, i64 first, i64 count, int from, int width, T* to) {
    __shared__ float levels[16];
    fill(levels);
    if ((w.columns | from | width) % PACK == 0) {
        decode_packs<PACK>(w, levels, first, count, from, width, to);
    } else {
        decode_packs<1>(w, levels, first, count, from, width, to);
    }
}

// y [count, outputs] = x [count, columns] · Wᵀ, added to what is there if `add`; count <= N. A warp takes a row of W.
// Every lane decodes C columns at a time and uses them for all tokens.
template <typename W, typename T, int N, int C>
__device__ __forceinline__ void few(const W& w, i64 outputs, const T* x, T* y, int count, int add) {
    __shared__ float levels[16];
    fill(levels);
    const i64 row = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= outputs) return;
    // Elements of x that are read at a time.
    constexpr int V = C < PACK ? C : PACK;
    float sums[N] = {};
    for (int column = lane * C; column < w.columns; column += 32 * C) {
        float values[C];
        w.template pack<C>(levels, row, column, values);
#pragma unroll
        for (int j = 0; j < C; j++) {
            T stored;
            narrow(values[j], stored);
            values[j] = widen(stored);
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (n >= count) break;
            const T* from = x + (i64)n * w.columns + column;
#pragma unroll
            for (int k = 0; k < C; k += V) {
                float p[V];
                load<V>(from + k, p);
#pragma unroll
                for (int j = 0; j < V; j++) sums[n] += p[j] * values[k + j];
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float sum = lane_sum<32>(sums[n]);
        if (lane == 0 && n < count) {
            T& place = y[n * outputs + row];
            narrow(add ? widen(place) + sum : sum, place);
        }
    }
}

#define DECODE(NAME, W, T)                                                                                               \
    extern "C" __global__ void decode_##NAME##_##T(i64 first, i64 count, int from, int width, T* to, W weight) {         \
        decode(weight, first, count, from, width, to);                                                                   \
    }
#define FEW(NAME, W, T, N, FORM, C)                                                                                      \
    extern "C" __global__ void few_##NAME##_##T##_##N##_##FORM(                                                          \
        i64 outputs, const T* x, T* y, int count, int add, W weight) {                                                   \
        few<W, T, N, C>(weight, outputs, x, y, count, add);                                                              \
    }
#define KINDS(NAME, W, T)                \
    DECODE(NAME, W, T)                   \
    FEW(NAME, W, T, 1, packed, W::WIDE)  \
    FEW(NAME, W, T, 1, single, 1)        \
    FEW(NAME, W, T, 8, packed, W::WIDE)  \
    FEW(NAME, W, T, 8, single, 1)

typedef float f32;
KINDS(int8, Int8, f32)
KINDS(int8, Int8, bf16)
KINDS(int4, Int4, f32)
KINDS(int4, Int4, bf16)
KINDS(nf4, Nf4, f32)
KINDS(nf4, Nf4, bf16)
