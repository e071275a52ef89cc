// Weights stored as codes: a part of the matrix, bit by bit what the formats say, and the product with few tokens.
#include <array>
#include <cmath>
#include <cstring>

#include "kinds.h"
#include "../../cuda/decode.cu"

using namespace emulate;

static const float LEVELS[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

static void bytes(Buffer<u8>& to, uint64_t seed) {
    for (size_t i = 0; i < to.n; i++) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        to[i] = (u8)(seed >> 56);
    }
}

static u32 word(float scale, float minimum) {
    return bits_of(scale) >> 16 | (bits_of(minimum) & 0xffff0000u);
}

static float part(u32 bits) {
    return float_of(bits << 16);
}

/// The kernels of one format and type.
template <class W, class T>
struct Kernels {
    void (*decode)(i64, i64, int, int, T*, W);
    void (*decode_all)(const W*, i64, T*);
    using Few = void (*)(i64, const T*, T*, int, int, W);
    Few one_packed, one_single, some_packed, some_single;
};

/// A weight of `n` rows; `at` is the definition of an element.
template <class W, class T, class At>
void weight(const char* name, const Kernels<W, T>& kernels, const W& w, i64 n, uint64_t seed, At at) {
    const i64 columns = w.columns;
    // Rows, columns: some of both, whole rows, a column that nothing divides.
    const i64 half = columns / 2 / 8 * 8;
    const std::array<i64, 4> parts[] = {
        {1, 3, 0, columns}, {0, n, half, columns - half}, {0, n, 0, half}, {2, 1, columns / 3, columns - columns / 3}};
    for (auto [first, count, from, width] : parts) {
        Buffer<T> y(count * width), want(count * width);
        for (i64 i = 0; i < count * width; i++) narrow(at(first + i / width, from + i % width), want[i]);
        launch(kernels.decode, dim3(3), dim3(64), 0, seed, first, count, (int)from, (int)width, y.data, w);
        same(name, y, want);
    }
    Buffer<W> twice(2);
    Buffer<T> both(2 * n * columns), want_both(2 * n * columns);
    for (i64 i = 0; i < 2; i++) twice[i] = w;
    for (i64 i = 0; i < 2 * n * columns; i++) narrow(at(i / columns % n, i % columns), want_both[i]);
    launch(kernels.decode_all, dim3(3, 2), dim3(64), 0, seed, (const W*)twice.data, n, both.data);
    same(name, both, want_both);
    for (int tokens : {1, 2, 5, 8}) {
        Buffer<T> x(tokens * columns), y(tokens * n), before(tokens * n);
        fill(x, seed + 5);
        fill(before, seed + 6);
        for (int add : {0, 1}) {
            std::vector<double> want(tokens * n);
            for (i64 i = 0; i < tokens * n; i++) {
                want[i] = add ? widen(before[i]) : 0.0;
                for (i64 c = 0; c < columns; c++) {
                    T value;
                    narrow(at(i % n, c), value);
                    want[i] += (double)widen(value) * widen(x[i / n * columns + c]);
                }
            }
            for (bool packed : {true, false}) {
                if (packed && columns % W::WIDE != 0) continue;
                const auto run = tokens == 1 ? packed ? kernels.one_packed : kernels.one_single
                                             : packed ? kernels.some_packed : kernels.some_single;
                std::copy(before.data, before.data + before.n, y.data);
                launch(run, dim3((n + 1) / 2), dim3(64), 0, seed, n, (const T*)x.data, y.data, tokens, add, w);
                check(name, y, want, tolerance<T>());
            }
        }
    }
}

/// bf16 numbers: the high half of a float, magnitudes below 2.
template <class T>
void halves(const Kernels<Half, T>& kernels, uint64_t seed) {
    for (int columns : {8, 64, 100, 333, 1152}) {
        const i64 n = 5, stride = (2 * columns + 15) / 16 * 16;
        Buffer<u8> codes(n * stride);
        bytes(codes, seed);
        for (i64 i = 1; i < n * stride; i += 2) codes[i] &= 0xbf;
        weight("half", kernels, Half{codes.data, stride, columns, 0}, n, seed, [&](i64 row, i64 column) {
            const i64 at = row * stride + 2 * column;
            return float_of((u32)codes[at] << 16 | (u32)codes[at + 1] << 24);
        });
    }
}

template <class T>
void formats(const Kernels<Int8, T>& int8, const Kernels<Int4, T>& int4, const Kernels<Nf4, T>& nf4, uint64_t seed) {
    for (int columns : {8, 64, 100, 333, 1152}) {
        const i64 n = 5, stride = (columns + 15) / 16 * 16, blocks = (n * columns + 63) / 64;
        Buffer<u8> codes(n * stride), nested(blocks);
        bytes(codes, seed);
        bytes(nested, seed + 1);
        for (int shift : {6, 7, 31}) {
            const i64 groups = shift == 31 ? 1 : (columns + (1 << shift) - 1) / (1 << shift);
            const i64 group = shift == 31 ? columns : 1 << shift;
            Buffer<float> scales(n * groups);
            Buffer<u32> words(n * groups);
            for (i64 i = 0; i < n * groups; i++) {
                scales[i] = 0.01f + 0.003f * i;
                words[i] = word(scales[i], -0.3f + 0.07f * i);
            }
            weight("int8", int8, Int8{codes.data, scales.data, stride, columns, shift}, n, seed, [&](i64 row, i64 column) {
                volatile float x = (float)(signed char)codes[row * stride + column] * scales[row * groups + column / group];
                return (float)x;
            });
            weight("int4", int4, Int4{codes.data, words.data, stride, columns, shift}, n, seed, [&](i64 row, i64 column) {
                const u32 w = words[row * groups + column / group];
                const int byte = codes[row * stride + column / 2], code = column % 2 ? byte % 16 : byte / 16;
                return (float)((double)code * part(w & 0xffff) + (double)part(w >> 16));
            });
        }
        Buffer<float> absmax(blocks), table(256), outer((blocks + 255) / 256);
        for (i64 i = 0; i < blocks; i++) absmax[i] = 0.02f + 0.001f * i;
        for (int i = 0; i < 256; i++) table[i] = (i - 128) / 128.0f;
        for (size_t i = 0; i < outer.n; i++) outer[i] = 0.01f * (i + 1);
        for (bool twice : {false, true}) {
            const Nf4 w{codes.data, absmax.data, twice ? nested.data : nullptr, table.data, outer.data, 0.05f, columns};
            weight("nf4", nf4, w, n, seed, [&](i64 row, i64 column) {
                const i64 place = row * columns + column, block = place / 64;
                const int byte = codes[place / 2], code = place % 2 ? byte % 16 : byte / 16;
                volatile float scale = absmax[block];
                if (twice) {
                    scale = table[nested[block]] * outer[block / 256];
                    scale = scale + 0.05f;
                }
                volatile float x = LEVELS[code] * scale;
                return (float)x;
            });
        }
    }
}

static float e4m3_value(int code) {
    const int e = code >> 3 & 15, m = code & 7;
    return (code < 128 ? 1.0f : -1.0f) * (e == 0 ? std::ldexp((float)m, -9) : std::ldexp(1.0f + m / 8.0f, e - 7));
}

static float e2m1_value(int code) {
    static const float values[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return code < 8 ? values[code] : -values[code & 7];
}

/// To a multiple of the distance of f16 numbers of this size.
static float to_f16(float x) {
    if (x == 0.0f) return x;
    int e;
    std::frexp(x, &e);
    const double unit = std::ldexp(1.0, std::max(e, -13) - 11);
    return std::copysign((float)(std::nearbyint(std::fabs(x) / unit) * unit), x);
}

/// Codes of other tools, with scales of `scale_type` (0 f32, 1 f16, 2 bf16, 3 power of two).
template <int CODES, class T>
void scaled(const char* name, const Kernels<Scaled<CODES>, T>& kernels, int scale_type, int product, uint64_t seed) {
    constexpr bool NIBBLE = Scaled<CODES>::NIBBLE;
    for (int columns : {8, 100, 333, 1152}) {
        const i64 n = 5, stride = (columns + 15) / 16 * 16;
        Buffer<u8> codes(n * stride);
        bytes(codes, seed);
        for (size_t i = 0; i < codes.n; i++) {
            if (CODES == E4M3 && (codes[i] & 127) == 127) codes[i] ^= 1;
        }
        for (int shift : {5, 7, 31}) {
            const i64 groups = shift == 31 ? 1 : (columns + (1 << shift) - 1) / (1 << shift);
            const i64 group = shift == 31 ? columns : 1 << shift;
            Buffer<u8> scales(4 * n * groups), zeros(n * groups);
            Buffer<u32> order(columns);
            std::vector<float> values(n * groups);
            for (i64 i = 0; i < n * groups; i++) {
                const float x = 0.003f + 0.0007f * i;
                if (scale_type == 0) {
                    values[i] = x;
                    memcpy(&scales[4 * i], &x, 4);
                } else if (scale_type == 1) {
                    // Also numbers below the smallest normal one.
                    const u32 bits = i % 3 == 0 ? 0x0123 + i : 0x1c00 + 37 * i;
                    scales[2 * i] = bits & 255, scales[2 * i + 1] = bits >> 8;
                    const int e = bits >> 10, m = bits & 1023;
                    values[i] = e == 0 ? std::ldexp((float)m, -24) : std::ldexp(1.0f + m / 1024.0f, e - 15);
                } else if (scale_type == 2) {
                    values[i] = float_of(bits_of(x) & 0xffff0000u);
                    scales[2 * i] = bits_of(x) >> 16 & 255, scales[2 * i + 1] = bits_of(x) >> 24;
                } else {
                    scales[i] = 120 + i % 9;
                    values[i] = std::ldexp(1.0f, (int)scales[i] - 127);
                }
                zeros[i] = i * 7 % 16;
            }
            for (int c = 0; c < columns; c++) order[c] = (c * 5) % groups;
            for (bool stored : {false, true}) {
                const int middle = CODES == U4 ? 8 : CODES == U8 ? 128 : 0;
                const bool has_zeros = stored && (CODES == U4 || CODES == U8);
                const Scaled<CODES> w{codes.data, scales.data, has_zeros ? zeros.data : nullptr,
                                      stored ? order.data : nullptr, stride, columns, shift, scale_type, product, middle, 0};
                weight(name, kernels, w, n, seed, [&](i64 row, i64 column) {
                    const int byte = codes[row * stride + (NIBBLE ? column / 2 : column)];
                    const int code = !NIBBLE ? byte : column % 2 ? byte % 16 : byte / 16;
                    const i64 at = row * groups + (stored ? order[column] : column / group);
                    const float zero = has_zeros ? zeros[at] : middle;
                    const float x = CODES == E4M3   ? e4m3_value(code)
                                    : CODES == E2M1 ? e2m1_value(code)
                                    : CODES == I8   ? (float)(signed char)code
                                                    : code - zero;
                    volatile float y = x * values[at];
                    if (product == 1) y = to_f16(y);
                    if (product == 2) {
                        bf16 rounded;
                        narrow((float)y, rounded);
                        y = widen(rounded);
                    }
                    if (product == 3) y = y * 7.874015718698502e-3f;
                    return (float)y;
                });
            }
        }
    }
}

template <class T>
void float_levels(const Kernels<Fp4, T>& kernels, uint64_t seed) {
    static const float twelfths[8] = {0.0f, 0.0625f, 8.0f, 12.0f, 4.0f, 6.0f, 2.0f, 3.0f};
    const i64 n = 5;
    const int columns = 100;
    Buffer<u8> codes(n * columns / 2);
    Buffer<float> absmax((n * columns + 63) / 64);
    bytes(codes, seed);
    for (size_t i = 0; i < absmax.n; i++) absmax[i] = 0.02f + 0.001f * i;
    weight("fp4", kernels, Fp4{codes.data, absmax.data, nullptr, nullptr, nullptr, 0.0f, columns}, n, seed, [&](i64 row, i64 column) {
        const i64 place = row * columns + column;
        const int code = place % 2 ? codes[place / 2] % 16 : codes[place / 2] / 16;
        volatile float x = twelfths[code & 7] / 12.0f;
        x = (code < 8 ? x : -x) * absmax[place / 64];
        return (float)x;
    });
}

#define KERNELS(NAME, T)                                                                                        \
    {decode_##NAME##_##T, decode_all_##NAME##_##T, few_##NAME##_##T##_1_packed, few_##NAME##_##T##_1_single,     \
     few_##NAME##_##T##_8_packed, few_##NAME##_##T##_8_single}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        halves<float>(KERNELS(half, f32), seed);
        halves<bf16>(KERNELS(half, bf16), seed);
        float_levels<float>(KERNELS(fp4, f32), seed);
        float_levels<bf16>(KERNELS(fp4, bf16), seed);
        scaled<U4, float>("u4", KERNELS(u4, f32), 1, 1, seed);
        scaled<U4, bf16>("u4", KERNELS(u4, bf16), 2, 2, seed);
        scaled<E2M1, float>("e2m1", KERNELS(e2m1, f32), 3, 0, seed);
        scaled<E2M1, bf16>("e2m1", KERNELS(e2m1, bf16), 3, 0, seed);
        scaled<U8, float>("u8", KERNELS(u8, f32), 1, 1, seed);
        scaled<U8, bf16>("u8", KERNELS(u8, bf16), 0, 0, seed);
        scaled<I8, float>("i8", KERNELS(i8, f32), 0, 3, seed);
        scaled<I8, bf16>("i8", KERNELS(i8, bf16), 2, 2, seed);
        scaled<E4M3, float>("e4m3", KERNELS(e4m3, f32), 0, 0, seed);
        scaled<E4M3, bf16>("e4m3", KERNELS(e4m3, bf16), 2, 2, seed);
        formats<float>(KERNELS(int8, f32), KERNELS(int4, f32), KERNELS(nf4, f32), seed);
        formats<bf16>(KERNELS(int8, bf16), KERNELS(int4, bf16), KERNELS(nf4, bf16), seed);
    }
    return verdict();
}
