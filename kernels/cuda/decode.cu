// Weights stored as codes: a range of rows to bf16 or f32, for a product that follows. The values are those of the
// CPU, bit by bit. A thread decodes 8 neighbouring columns; the layouts stand in `ops/coded.rs` of ft.
#include "common.cuh"

typedef unsigned char u8;

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

// Elements of one row with one scale after the other.
struct Int8 {
    const u8* codes;
    const float* scales;
    i64 columns, stride, group;

    __device__ __forceinline__ float at(i64 row, i64 column) const {
        const i64 groups = (columns + group - 1) / group;
        const float code = (float)(signed char)codes[row * stride + column];
        return mul(code, scales[row * groups + column / group]);
    }
};

// A bf16 scale in the lower half of a word, a bf16 minimum in the upper.
struct Int4 {
    const u8* codes;
    const u32* scales;
    i64 columns, stride, group;

    __device__ __forceinline__ float at(i64 row, i64 column) const {
        const i64 groups = (columns + group - 1) / group;
        const u32 word = scales[row * groups + column / group];
        const u8 byte = codes[row * stride + column / 2];
        const float code = (float)(column % 2 == 0 ? byte >> 4 : byte & 15);
        return plus(mul(code, float_of(word << 16)), float_of(word & 0xffff0000u));
    }
};

// Blocks of 64 of the flattened weight. `nested` is null where absmax are plain.
struct Nf4 {
    const u8* codes;
    const float* absmax;
    const u8* nested;
    const float* nested_table;
    const float* nested_absmax;
    float offset;
    i64 columns;

    __device__ __forceinline__ float at(i64 row, i64 column) const {
        const i64 place = row * columns + column;
        const i64 block = place / 64;
        const float scale = nested == nullptr
            ? absmax[block]
            : plus(mul(nested_table[nested[block]], nested_absmax[block / 256]), offset);
        const u8 byte = codes[place / 2];
        return mul(level(place % 2 == 0 ? byte >> 4 : byte & 15), scale);
    }
};

// Rows first .. first + count to `to` [count, columns].
template <typename W, typename T>
__device__ __forceinline__ void decode(const W& w, i64 first, i64 count, T* to) {
    const i64 packs = (w.columns + PACK - 1) / PACK;
    const bool whole = w.columns % PACK == 0;
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count * packs; i += step) {
        const i64 row = i / packs, column = i % packs * PACK;
        T* place = to + row * w.columns + column;
        if (whole) {
            float x[PACK];
#pragma unroll
            for (int j = 0; j < PACK; j++) x[j] = w.at(first + row, column + j);
            store<PACK>(place, x);
        } else {
            for (int j = 0; j < PACK && column + j < w.columns; j++) narrow(w.at(first + row, column + j), place[j]);
        }
    }
}

#define DECODE(T)                                                                                                     \
    extern "C" __global__ void decode_int8_##T(const u8* codes, const float* scales, i64 columns, i64 stride,         \
                                               i64 group, i64 first, i64 count, T* to) {                              \
        decode(Int8{codes, scales, columns, stride, group}, first, count, to);                                        \
    }                                                                                                                 \
    extern "C" __global__ void decode_int4_##T(const u8* codes, const u32* scales, i64 columns, i64 stride,           \
                                               i64 group, i64 first, i64 count, T* to) {                              \
        decode(Int4{codes, scales, columns, stride, group}, first, count, to);                                        \
    }                                                                                                                 \
    extern "C" __global__ void decode_nf4_##T(const u8* codes, const float* absmax, const u8* nested,                 \
                                              const float* nested_table, const float* nested_absmax, float offset,    \
                                              i64 columns, i64 first, i64 count, T* to) {                             \
        decode(Nf4{codes, absmax, nested, nested_table, nested_absmax, offset, columns}, first, count, to);           \
    }

typedef float f32;
DECODE(f32)
DECODE(bf16)
