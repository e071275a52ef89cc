// Quantized weights: dequantized to bf16 or f32 for a product that follows, or in registers for the product with a few
// tokens. The values are those of the CPU, bit by bit; `ops/quantized` of ft describes the layouts.
#include "common.cuh"

typedef unsigned char u8;

// Neighboring columns that a thread decodes for a product that follows.
static constexpr int PACK = 8;

// The 16 levels of NF4.
__device__ __forceinline__ float nf4_level(int code) {
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

// The 16 levels of FP4 of bitsandbytes.
__device__ __forceinline__ float fp4_level(int code) {
    float x;
    switch (code & 7) {
        case 0: x = 0.0f; break;
        case 1: x = 0.0052083334885537624f; break;
        case 2: x = 0.6666666865348816f; break;
        case 3: x = 1.0f; break;
        case 4: x = 0.3333333432674408f; break;
        case 5: x = 0.5f; break;
        case 6: x = 0.1666666716337204f; break;
        default: x = 0.25f;
    }
    return code < 8 ? x : -x;
}

// The levels of a format, into memory where the lanes of a warp can look up different ones at once.
template <typename W>
__device__ __forceinline__ void fill(float* levels) {
    if (threadIdx.x < 16) levels[threadIdx.x] = W::level(threadIdx.x);
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

// `pack` of a format dequantizes C neighboring columns of a row, which share a scale. C is 1, or a power of two that
// divides the first column and the number of columns. C is at most WIDE, the number of columns in 16 bytes.
// crates/ft-ops/src/cuda/quantized.rs fills the structures.

// Columns that share a scale: 1 << shift, or all of a row.
__device__ __forceinline__ i64 scale_of(i64 row, int column, int columns, int shift) {
    return row * (((columns - 1) >> shift) + 1) + (column >> shift);
}

// bf16 numbers of a weight of an f32 model.
struct Half {
    static constexpr int WIDE = 8;
    __device__ __forceinline__ static float level(int) { return 0.0f; }
    const u8* codes;
    i64 stride;
    int columns, unused;

    template <int C>
    __device__ __forceinline__ void pack(const float*, i64 row, int column, float (&x)[C]) const {
        const Pack<u8, 2 * C> bytes = *reinterpret_cast<const Pack<u8, 2 * C>*>(codes + row * stride + 2 * (i64)column);
#pragma unroll
        for (int j = 0; j < C; j++) x[j] = float_of(((u32)bytes.at[2 * j] | (u32)bytes.at[2 * j + 1] << 8) << 16);
    }
};

struct Int8 {
    static constexpr int WIDE = 16;
    __device__ __forceinline__ static float level(int) { return 0.0f; }
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
    __device__ __forceinline__ static float level(int) { return 0.0f; }
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

// Blocks of 64 of the flattened weight: NF4, or the 4-bit floats of bitsandbytes. `nested` is null where absmax are plain.
template <bool FLOATS>
struct FourBits {
    static constexpr int WIDE = 32;
    __device__ __forceinline__ static float level(int code) { return FLOATS ? fp4_level(code) : nf4_level(code); }
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
typedef FourBits<false> Nf4;
typedef FourBits<true> Fp4;

// Codes and scales of other tools: (level - zero) * scale, rounded as the tool rounds it. `zeros` and `order` may be
// null; `order` has the group of each column. Scale types: f32, f16, bf16, power of two. Roundings: f32, f16, bf16, twice.
enum Codes { U4, E2M1, U8, I8, E4M3 };

// For numbers that f16 can hold.
__device__ __forceinline__ float round_f16(float x) {
    const u32 bits = bits_of(x);
    if ((bits & 0x7fffffffu) < 0x38800000u) {
        // Below 2^-14 the distance of two numbers is 2^-24, as that of f32 above 0.5.
        const float small = plus(plus(float_of(bits & 0x7fffffffu), 0.5f), -0.5f);
        return float_of(bits_of(small) | (bits & 0x80000000u));
    }
    return float_of((bits + (0x0fffu + (bits >> 13 & 1))) & 0xffffe000u);
}

__device__ __forceinline__ float half_bits(u32 bits) {
    const u32 magnitude = (bits & 0x7fffu) << 13;
    return float_of(bits_of(mul(float_of(magnitude), float_of(0x77800000u))) | (bits & 0x8000u) << 16);
}

__device__ __forceinline__ float e4m3(int code) {
    const u32 exponent = code >> 3 & 15, mantissa = code & 7;
    const float x = exponent == 0 ? mul((float)mantissa, 0.001953125f) : float_of((exponent + 120) << 23 | mantissa << 20);
    return code < 128 ? x : -x;
}

template <int CODES>
struct Scaled {
    static constexpr int WIDE = 8;
    static constexpr bool NIBBLE = CODES == U4 || CODES == E2M1;
    const u8* codes;
    const u8* scales;
    const u8* zeros;
    const u32* order;
    i64 stride;
    int columns, shift;
    int scale_type, product;
    int middle, unused;

    // The values of E2M1.
    __device__ __forceinline__ static float level(int code) {
        const int e = code >> 1 & 3, m = code & 1;
        const float x = e == 0 ? 0.5f * m : (1.0f + 0.5f * m) * (float)(1 << (e - 1));
        return code < 8 ? x : -x;
    }

    __device__ __forceinline__ float scale(i64 at) const {
        switch (scale_type) {
            case 0: return reinterpret_cast<const float*>(scales)[at];
            case 1: return half_bits(scales[2 * at] | (u32)scales[2 * at + 1] << 8);
            case 2: return float_of(((u32)scales[2 * at] | (u32)scales[2 * at + 1] << 8) << 16);
            default: return float_of(scales[at] == 0 ? 0x00400000u : (u32)scales[at] << 23);
        }
    }

    __device__ __forceinline__ float value(const float* levels, int code, float zero, float scale) const {
        float x;
        if (CODES == E2M1) x = levels[code];
        else if (CODES == I8) x = (float)(signed char)code;
        else if (CODES == E4M3) x = e4m3(code);
        else x = (float)code - zero;
        x = mul(x, scale);
        switch (product) {
            case 1: return round_f16(x);
            case 2: return round_bf16(x);
            case 3: return mul(x, 7.874015718698502e-3f);
            default: return x;
        }
    }

    template <int C>
    __device__ __forceinline__ void pack(const float* levels, i64 row, int column, float (&x)[C]) const {
        int code[C];
        if (NIBBLE) {
            nibbles<C>(codes + row * stride, column, code);
        } else {
            const Pack<u8, C> bytes = *reinterpret_cast<const Pack<u8, C>*>(codes + row * stride + column);
#pragma unroll
            for (int j = 0; j < C; j++) code[j] = bytes.at[j];
        }
        const i64 first = row * (((columns - 1) >> shift) + 1);
        i64 at = first + (column >> shift);
        float by = 0.0f, zero = (float)middle;
#pragma unroll
        for (int j = 0; j < C; j++) {
            if (order != nullptr) at = first + order[column + j];
            if (j == 0 || order != nullptr) {
                by = scale(at);
                if (zeros != nullptr) zero = (float)zeros[at];
            }
            x[j] = value(levels, code[j], zero, by);
        }
    }
};
typedef Scaled<U4> ScaledU4;
typedef Scaled<E2M1> ScaledE2m1;
typedef Scaled<U8> ScaledU8;
typedef Scaled<I8> ScaledI8;
typedef Scaled<E4M3> ScaledE4m3;

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
    fill<W>(levels);
    if ((w.columns | from | width) % PACK == 0) {
        decode_packs<PACK>(w, levels, first, count, from, width, to);
    } else {
        decode_packs<1>(w, levels, first, count, from, width, to);
    }
}

// Whole weights of the same shape, one after the other: `to` [weights, rows, columns]. Row y of blocks takes weight y.
template <typename W, typename T>
__device__ __forceinline__ void decode_all(const W* weights, i64 rows, T* to) {
    const W w = weights[blockIdx.y];
    decode(w, 0, rows, 0, w.columns, to + (i64)blockIdx.y * rows * w.columns);
}

// y [count, outputs] = x [count, columns] · Wᵀ, added to what is there if `add`; count <= N. A warp takes a row of W.
// Every lane decodes C columns at a time and uses them for all tokens.
template <typename W, typename T, int N, int C>
__device__ __forceinline__ void few(const W& w, i64 outputs, const T* x, T* y, int count, int add) {
    __shared__ float levels[16];
    fill<W>(levels);
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

// NAME has the type too: as an argument of an inner macro the type alone would be replaced in f16.
#define DECODE(NAME, W, T)                                                                                               \
    extern "C" __global__ void decode_##NAME(i64 first, i64 count, int from, int width, T* to, W weight) {               \
        decode(weight, first, count, from, width, to);                                                                   \
    }
#define DECODE_ALL(NAME, W, T)                                                                                           \
    extern "C" __global__ void decode_all_##NAME(const W* weights, i64 rows, T* to) {                                    \
        decode_all(weights, rows, to);                                                                                   \
    }
#define FEW(NAME, W, T, N, FORM, C)                                                                                      \
    extern "C" __global__ void few_##NAME##_##N##_##FORM(                                                                \
        i64 outputs, const T* x, T* y, int count, int add, W weight) {                                                   \
        few<W, T, N, C>(weight, outputs, x, y, count, add);                                                              \
    }
#define KINDS(NAME, W, T)                \
    DECODE(NAME, W, T)                   \
    DECODE_ALL(NAME, W, T)               \
    FEW(NAME, W, T, 1, packed, W::WIDE)  \
    FEW(NAME, W, T, 1, single, 1)        \
    FEW(NAME, W, T, 8, packed, W::WIDE)  \
    FEW(NAME, W, T, 8, single, 1)

typedef float f32;
KINDS(half_f32, Half, f32)
KINDS(half_bf16, Half, bf16)
KINDS(int8_f32, Int8, f32)
KINDS(int8_bf16, Int8, bf16)
KINDS(int4_f32, Int4, f32)
KINDS(int4_bf16, Int4, bf16)
KINDS(nf4_f32, Nf4, f32)
KINDS(nf4_bf16, Nf4, bf16)
KINDS(fp4_f32, Fp4, f32)
KINDS(fp4_bf16, Fp4, bf16)
KINDS(u4_f32, ScaledU4, f32)
KINDS(u4_bf16, ScaledU4, bf16)
KINDS(e2m1_f32, ScaledE2m1, f32)
KINDS(e2m1_bf16, ScaledE2m1, bf16)
KINDS(u8_f32, ScaledU8, f32)
KINDS(u8_bf16, ScaledU8, bf16)
KINDS(i8_f32, ScaledI8, f32)
KINDS(i8_bf16, ScaledI8, bf16)
KINDS(e4m3_f32, ScaledE4m3, f32)
KINDS(e4m3_bf16, ScaledE4m3, bf16)
