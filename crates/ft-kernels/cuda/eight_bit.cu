// Products of 8-bit operands on tensor cores (int8 or e4m3): an operand is quantized row by row, W is converted or
// transposed, and the sums are scaled. The products are cuBLAS; crates/ft-ops/src/cuda/eight_bit.rs launches all of it.
// Columns are a multiple of 16 and every address is aligned to 16 bytes.
#include "common.cuh"

typedef unsigned char u8;
typedef float f32;
typedef int s32;

// A type of an operand: its largest value, the code of a number (0 for NaN and infinities), and the code of a weight that
// is stored as int8.
struct Int8 {
    static constexpr float MOST = 127.0f;
    static __device__ __forceinline__ u8 code(float x) {
        return odd(x) ? 0 : (u8)(signed char)(int)rintf(x);
    }
    static __device__ __forceinline__ u8 weight(u8 stored) {
        return stored;
    }
};

// 4 bits of exponent with a bias of 7, 3 bits of mantissa, no infinities. In software: the instruction needs sm_89.
struct E4m3 {
    static constexpr float MOST = 448.0f;
    static __device__ __forceinline__ u8 code(float x) {
        if (odd(x)) return 0;
        const u32 bits = bits_of(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
        // Below 2^-6 the step is 2^-9; the code 8 is 2^-6 itself.
        if (magnitude < 0x3c800000u) return (u8)(sign | (u32)rintf(float_of(magnitude) * 512.0f));
        const u32 code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
        return (u8)(sign | (code < 0x7eu ? code : 0x7eu));
    }
    static __device__ __forceinline__ u8 weight(u8 stored) {
        return code((float)(signed char)stored);
    }
};

// NaN is larger than every number.
__device__ __forceinline__ float larger(float a, float b) {
    return a > b || a != a ? a : b;
}

// The largest over a block of whole warps; every thread gets it.
__device__ __forceinline__ float block_most(float x, float* shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, step));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    float most = 0;
    for (int w = 0; w < (int)blockDim.x / 32; w++) most = larger(most, shared[w]);
    return most;
}

// Row n of x [rows, columns], times `factors` [columns] if given: codes, and the scale of the row. A block takes a row. The
// scale of a row with a NaN or an infinity is not finite, so its results are not either.
template <typename F, typename T>
__device__ __forceinline__ void quantize(const T* x, const float* factors, int columns, u8* codes, float* scales) {
    constexpr int V = Full<T>::V;
    __shared__ float shared[32];
    const i64 start = (i64)blockIdx.x * columns;
    const auto values = [&](int column, float(&p)[V]) {
        load<V>(x + start + column, p);
        if (factors == nullptr) return;
#pragma unroll
        for (int j = 0; j < V; j++) p[j] = mul(p[j], factors[column + j]);
    };
    float most = 0;
    for (int column = threadIdx.x * V; column < columns; column += blockDim.x * V) {
        float p[V];
        values(column, p);
#pragma unroll
        for (int j = 0; j < V; j++) most = larger(most, fabsf(p[j]));
    }
    most = block_most(most, shared);
    // A row of zeros has an infinite factor, and codes of 0.
    const float inverse = quotient(F::MOST, most);
    for (int column = threadIdx.x * V; column < columns; column += blockDim.x * V) {
        float p[V];
        values(column, p);
        Pack<u8, V> pack;
#pragma unroll
        for (int j = 0; j < V; j++) pack.at[j] = F::code(mul(p[j], inverse));
        *reinterpret_cast<Pack<u8, V>*>(codes + start + column) = pack;
    }
    if (threadIdx.x == 0) scales[blockIdx.x] = quotient(most, F::MOST);
}

// `packs` times 16 codes of a weight.
template <typename F>
__device__ __forceinline__ void converted(const u8* codes, i64 packs, u8* to) {
    typedef Pack<u8, 16> Codes;
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += step) {
        Codes pack = reinterpret_cast<const Codes*>(codes)[i];
#pragma unroll
        for (int j = 0; j < 16; j++) pack.at[j] = F::weight(pack.at[j]);
        reinterpret_cast<Codes*>(to)[i] = pack;
    }
}

// Rows and columns of the part of W that a block of 16 x 16 threads transposes.
static constexpr int TILE = 64;

// Columns from .. from + width of W [rows, columns], as the rows of `to` [width, rows].
template <typename F>
__device__ __forceinline__ void transposed(const u8* codes, i64 rows, int columns, int from, int width, u8* to) {
    typedef Pack<u8, 4> Codes;
    __align__(4) __shared__ u8 tile[TILE][TILE + 4];
    const i64 first = (i64)blockIdx.y * TILE;
    const int start = blockIdx.x * TILE, across = 4 * threadIdx.x;
    for (int down = threadIdx.y; down < TILE; down += 16) {
        if (first + down >= rows || start + across >= width) continue;
        const Codes pack = *reinterpret_cast<const Codes*>(codes + (first + down) * columns + from + start + across);
#pragma unroll
        for (int j = 0; j < 4; j++) tile[across + j][down] = F::weight(pack.at[j]);
    }
    __syncthreads();
    for (int down = threadIdx.y; down < TILE; down += 16) {
        if (start + down >= width || first + across >= rows) continue;
        *reinterpret_cast<Codes*>(to + (start + down) * rows + first + across) =
            *reinterpret_cast<const Codes*>(&tile[down][across]);
    }
}

// y [rows, columns] = sums · the scale of the row · the scale of the column (1 if `across` is null), added to what is there
// if `add`. Rows of y are `stride` elements apart.
template <typename S, typename T>
__device__ __forceinline__ void scaled(
    const S* sums, const float* down, const float* across, i64 rows, int columns, T* y, i64 stride, int add) {
    constexpr int V = Full<T>::V;
    const int packs = columns / V;
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < rows * packs; i += step) {
        const i64 row = i / packs;
        const int column = (int)(i % packs) * V;
        T* const place = y + row * stride + column;
        float p[V];
        if (add) load<V>(place, p);
#pragma unroll
        for (int j = 0; j < V; j++) {
            float x = mul((float)sums[row * columns + column + j], down[row]);
            if (across) x = mul(x, across[column + j]);
            p[j] = add ? plus(p[j], x) : x;
        }
        store<V>(place, p);
    }
}

#define QUANTIZE(NAME, F, T)                                                          \
    extern "C" __global__ void quantize_##NAME##_##T(                                 \
        const T* x, const float* factors, int columns, u8* codes, float* scales) {    \
        quantize<F>(x, factors, columns, codes, scales);                              \
    }
#define SCALED(S, T)                                                                                                     \
    extern "C" __global__ void scaled_##S##_##T(                                                                         \
        const S* sums, const float* down, const float* across, i64 rows, int columns, T* y, i64 stride, int add) {       \
        scaled(sums, down, across, rows, columns, y, stride, add);                                                       \
    }
#define TRANSPOSED(NAME, F)                                                                                              \
    extern "C" __global__ void transposed_##NAME(                                                                        \
        const u8* codes, i64 rows, int columns, int from, int width, u8* to) {                                           \
        transposed<F>(codes, rows, columns, from, width, to);                                                            \
    }

QUANTIZE(int8, Int8, f32)
QUANTIZE(int8, Int8, bf16)
QUANTIZE(e4m3, E4m3, f32)
QUANTIZE(e4m3, E4m3, bf16)
SCALED(s32, f32)
SCALED(s32, bf16)
SCALED(f32, f32)
SCALED(f32, bf16)
TRANSPOSED(int8, Int8)
TRANSPOSED(e4m3, E4m3)

extern "C" __global__ void converted_e4m3(const u8* codes, i64 packs, u8* to) {
    converted<E4m3>(codes, packs, to);
}
