// New tokens go into the KV cache: keys and values as f32, bf16, or int8 (a signed byte for each number, and one scale,
// absmax / 127, for each head of a token: the bytes are those of the CPU). A row is a head of a token, `size` numbers.
#include "common.cuh"
#include "kv.cuh"

// By a warp. A number that is not finite makes the scale NaN.
template <typename T>
__device__ __forceinline__ void put_row(const T* x, signed char* codes, float* scales, i64 row, int size) {
    const int lane = threadIdx.x % 32;
    codes += row * size;
    float most = 0;
    int wrong = 0;
    for (int i = lane; i < size; i += 32) {
        const float v = widen(x[i]);
        wrong |= odd(v);
        most = fmaxf(most, fabsf(v));
    }
    most = lane_max(most);
    wrong = lane_sum<32>(wrong);
    const float by = most > 0 && !wrong ? quotient(127.0f, most) : 0.0f;
    if (lane == 0) scales[row] = wrong ? NAN : quotient(most, 127.0f);
    // The nearest integer, ties to even: see `ops::quantized::nearest`.
    const float shift = 12582912.0f;
    for (int i = lane; i < size; i += 32) {
        const float v = wrong ? 0.0f : widen(x[i]);
        codes[i] = (signed char)(int)minus(plus(mul(v, by), shift), shift);
    }
}

// f32 and bf16.
template <typename T, typename S>
__device__ __forceinline__ void put_row(const T* x, S* numbers, float*, i64 row, int size) {
    numbers += row * size;
    for (int i = threadIdx.x % 32; i < size; i += 32) narrow(widen(x[i]), numbers[i]);
}

// k and v: `rows` rows each, `heads` of a token side by side.
template <typename T, typename S>
__device__ __forceinline__ void put(
    const T* k, const T* v, const KvBlock* blocks, const KvPlace* tokens, i64 rows, int heads, int size) {
    const i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= 2 * rows) return;
    const i64 own = row % rows;
    const KvPlace place = tokens[own / heads];
    const KvBlock& block = blocks[place.block];
    const i64 to = (i64)place.token * heads + own % heads;
    if (row < rows) {
        put_row(k + own * size, static_cast<S*>(block.keys), block.key_scales, to, size);
    } else {
        put_row(v + own * size, static_cast<S*>(block.values), block.value_scales, to, size);
    }
}

#define PUT(NAME, T, STORED, S)                                                                                      \
    extern "C" __global__ void kv_put_##NAME##_##STORED(                                                             \
        const T* k, const T* v, const KvBlock* blocks, const KvPlace* tokens, i64 rows, int heads, int size) {       \
        put<T, S>(k, v, blocks, tokens, rows, heads, size);                                                          \
    }

PUT(f32, float, f32, float)
PUT(f32, float, bf16, bf16)
PUT(f32, float, int8, signed char)
PUT(bf16, bf16, bf16, bf16)
PUT(bf16, bf16, int8, signed char)
