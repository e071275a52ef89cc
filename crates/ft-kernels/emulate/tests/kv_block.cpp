// Keys and values as int8: the codes and scales of the definition, and back.
#include "kinds.h"
#include "../../cuda/kv_block.cu"

using namespace emulate;

template <class T>
void round_trip(
    void (*quantize)(const T*, signed char*, float*, i64, int),
    void (*dequantize)(const signed char*, const float*, T*, i64, int), int rows, int size, uint64_t seed) {
    Buffer<T> x((size_t)rows * size), y((size_t)rows * size);
    Buffer<signed char> codes((size_t)rows * size);
    Buffer<float> scales(rows);
    fill(x, seed + 1);
    // A row of zeros, and a row with a number that is not finite.
    for (int i = 0; i < size; i++) narrow(0.0f, x[i]);
    if (rows > 1) narrow(seed % 2 ? INFINITY : NAN, x[size + size / 2]);
    launch(quantize, dim3((rows + 3) / 4), dim3(128), 0, seed, (const T*)x.data, codes.data, scales.data, (i64)rows, size);
    launch(
        dequantize, dim3(3), dim3(64), 0, seed, (const signed char*)codes.data, (const float*)scales.data, y.data,
        (i64)rows * size, size);
    for (int r = 0; r < rows; r++) {
        float most = 0;
        bool wrong = false;
        for (int i = 0; i < size; i++) {
            const float v = widen(x[r * size + i]);
            most = std::fmax(most, std::fabs(v));
            wrong |= !std::isfinite(v);
        }
        expect(wrong ? std::isnan(scales[r]) : scales[r] == most / 127.0f, "scale");
        for (int i = 0; i < size; i++) {
            if (wrong) {
                expect(std::isnan(widen(y[r * size + i])), "a row that is not finite stays so");
                continue;
            }
            const float by = most > 0 ? 127.0f / most : 0.0f;
            const int want = (int)std::nearbyint(widen(x[r * size + i]) * by);
            expect(codes[r * size + i] == want, "code");
            T back;
            narrow(want * (most / 127.0f), back);
            expect(widen(back) == widen(y[r * size + i]), "value");
        }
    }
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        for (int size : {1, 16, 33, 128}) {
            round_trip(kv_quantize_f32, kv_dequantize_f32, 9, size, seed);
            round_trip(kv_quantize_bf16, kv_dequantize_bf16, 6, size, seed);
            round_trip(kv_quantize_f32, kv_dequantize_f32, 1, size, seed);
        }
    }
    return verdict();
}
