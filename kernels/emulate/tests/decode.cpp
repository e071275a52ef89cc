// Weights stored as codes: a range of rows, bit by bit what the formats say.
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

// Rows 1 to 3 of 5 columns of `columns`; `decode` runs the kernel, `at` is the definition.
template <class T, class Run, class At>
void rows(const char* name, i64 columns, Run run, At at) {
    const i64 first = 1, count = 3;
    Buffer<T> y(count * columns), want(count * columns);
    run(first, count, y.data);
    for (i64 i = 0; i < count * columns; i++) narrow(at(first + i / columns, i % columns), want[i]);
    same(name, y, want);
}

template <class T, class K8, class K4, class KN>
void formats(K8 int8, K4 int4, KN nf4, uint64_t seed) {
    for (i64 columns : {8, 64, 100, 333, 1000}) {
        const i64 n = 5, stride = (columns + 15) / 16 * 16, blocks = (n * columns + 63) / 64;
        Buffer<u8> codes(n * stride), nested(blocks);
        bytes(codes, seed);
        bytes(nested, seed + 1);
        for (i64 group : {(i64)64, (i64)128, columns}) {
            const i64 groups = (columns + group - 1) / group;
            Buffer<float> scales(n * groups);
            Buffer<u32> words(n * groups);
            for (i64 i = 0; i < n * groups; i++) {
                scales[i] = 0.01f + 0.003f * i;
                words[i] = word(scales[i], -0.3f + 0.07f * i);
            }
            rows<T>("int8", columns, [&](i64 first, i64 count, T* y) {
                launch(int8, dim3(3), dim3(64), 0, seed, (const u8*)codes.data, (const float*)scales.data, columns,
                       stride, group, first, count, y);
            }, [&](i64 row, i64 column) {
                volatile float x = (float)(signed char)codes[row * stride + column] * scales[row * groups + column / group];
                return (float)x;
            });
            if (group == columns) continue;
            rows<T>("int4", columns, [&](i64 first, i64 count, T* y) {
                launch(int4, dim3(3), dim3(64), 0, seed, (const u8*)codes.data, (const u32*)words.data, columns, stride,
                       group, first, count, y);
            }, [&](i64 row, i64 column) {
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
            rows<T>("nf4", columns, [&](i64 first, i64 count, T* y) {
                launch(nf4, dim3(3), dim3(64), 0, seed, (const u8*)codes.data, (const float*)absmax.data,
                       twice ? (const u8*)nested.data : (const u8*)nullptr, (const float*)table.data,
                       (const float*)outer.data, 0.05f, columns, first, count, y);
            }, [&](i64 row, i64 column) {
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

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        formats<float>(decode_int8_f32, decode_int4_f32, decode_nf4_f32, seed);
        formats<bf16>(decode_int8_bf16, decode_int4_bf16, decode_nf4_bf16, seed);
    }
    return verdict();
}
