// Products of 8-bit operands: codes and scales of rows, parts of W for them, scaled sums.
#include <type_traits>

#include "kinds.h"
#include "../../cuda/eight_bit.cu"

using namespace emulate;

/// The value of an e4m3 code.
static double e4m3(u8 code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double value = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return code & 0x80 ? -value : value;
}

static double int8(u8 code) {
    return (signed char)code;
}

/// The code is the nearest of all 256, the one with an even mantissa on a tie.
static void rounding() {
    for (int code = 0; code < 0x7e; code++) {
        const double low = e4m3((u8)code), high = e4m3((u8)(code + 1)), middle = (low + high) / 2;
        for (float sign : {1.0f, -1.0f}) {
            const u8 bit = sign < 0 ? 0x80 : 0;
            expect(E4m3::code(sign * (float)low) == (code | bit), "a value of e4m3 is its own code");
            expect(E4m3::code(sign * std::nextafterf((float)middle, 0.0f)) == (code | bit), "e4m3 rounds down");
            expect(E4m3::code(sign * std::nextafterf((float)middle, 1e9f)) == ((code + 1) | bit), "e4m3 rounds up");
            expect(E4m3::code(sign * (float)middle) == ((code + (code & 1)) | bit), "e4m3 rounds ties to even");
        }
    }
    expect(E4m3::code(448.00003f) == 0x7e && E4m3::code(NAN) == 0 && E4m3::code(INFINITY) == 0, "e4m3 ends at 448");
    expect(Int8::code(-126.6f) == (u8)-127 && Int8::code(2.5f) == 2 && Int8::code(NAN) == 0, "int8");
}

struct Matrix {
    Buffer<u8> codes;
    Buffer<float> scales;
    Matrix(i64 rows, i64 columns) : codes(rows * columns), scales(rows) {}
};

template <class F, class T>
void quantized(void (*kernel)(const T*, const float*, int, u8*, float*), double (*value)(u8), uint64_t seed) {
    for (int columns : {16, 48, 1024, 2064}) {
        const i64 rows = 5;
        Buffer<T> x(rows * columns);
        fill(x, seed);
        Buffer<float> factors(columns);
        fill(factors, seed + 1);
        for (int c = 0; c < columns; c++) narrow(0.0f, x[columns + c]);
        for (const float* given : {(const float*)nullptr, (const float*)factors.data}) {
            Matrix to(rows, columns);
            launch(kernel, dim3(rows), dim3(64), 0, seed, (const T*)x.data, given, columns, to.codes.data, to.scales.data);
            for (i64 row = 0; row < rows; row++) {
                float most = 0;
                const auto at = [&](i64 c) { return widen(x[row * columns + c]) * (given ? given[c] : 1.0f); };
                for (i64 c = 0; c < columns; c++) most = std::max(most, std::fabs(at(c)));
                expect(to.scales[row] == most / F::MOST, "the scale of a row");
                for (i64 c = 0; c < columns; c++) {
                    const u8 code = to.codes[row * columns + c];
                    expect(code == (most > 0 ? F::code(at(c) * (F::MOST / most)) : 0), "a code");
                    // Half a step: of the whole range, or of the exponent.
                    const double size = std::fabs(at(c));
                    const double step = std::is_same<F, Int8>::value ? most / 254 : std::max(size / 16, most * 2.2e-6);
                    expect(std::fabs(value(code) * to.scales[row] - at(c)) <= step * 1.0001, "the error of a code");
                }
            }
        }
        // A row with a number that is not finite has no finite scale.
        narrow(NAN, x[3]);
        narrow(INFINITY, x[2 * columns + 5]);
        Matrix to(rows, columns);
        launch(kernel, dim3(rows), dim3(64), 0, seed, (const T*)x.data, (const float*)nullptr, columns, to.codes.data,
               to.scales.data);
        for (i64 row = 0; row < rows; row++)
            expect(std::isfinite(to.scales[row]) == (row != 0 && row != 2), "what is not finite stays so");
    }
}

static void bytes(Buffer<u8>& to, uint64_t seed) {
    Random random(seed);
    for (size_t i = 0; i < to.n; i++) to[i] = Int8::code(std::fmax(-127.0f, std::fmin(127.0f, 50 * (float)random.normal())));
}

template <class F>
void weights(void (*kernel)(const u8*, i64, int, int, int, u8*), uint64_t seed) {
    for (i64 rows : {16, 80, 144}) {
        const int columns = 208;
        Buffer<u8> w(rows * columns);
        bytes(w, seed);
        for (auto [from, width] : {std::pair<int, int>{0, 208}, {16, 64}, {128, 80}}) {
            Buffer<u8> to(width * rows), want(width * rows);
            for (i64 i = 0; i < width * rows; i++) want[i] = F::weight(w[i % rows * columns + from + i / rows]);
            launch(kernel, dim3((width + 63) / 64, (unsigned)(rows + 63) / 64), dim3(16, 16), 0, seed, (const u8*)w.data, rows,
                   columns, from, width, to.data);
            same("a transposed part", to, want);
        }
    }
    Buffer<u8> w(1600), to(1600);
    bytes(w, seed);
    launch(converted_e4m3, dim3(2), dim3(32), 0, seed, (const u8*)w.data, (i64)100, to.data);
    for (size_t i = 0; i < w.n; i++) expect(to[i] == E4m3::weight(w[i]), "a converted code");
}

template <class S, class T>
void sums(void (*kernel)(const S*, const float*, const float*, i64, int, T*, i64, int), uint64_t seed) {
    const i64 rows = 7, columns = 48, stride = 64;
    Buffer<S> from(rows * columns);
    Buffer<float> down(rows), across(columns);
    Buffer<T> before(rows * stride), y(rows * stride), want(rows * stride);
    Random random(seed);
    for (size_t i = 0; i < from.n; i++) from[i] = (S)(1e5f * (float)random.normal());
    fill(down, seed + 1);
    fill(across, seed + 2);
    fill(before, seed + 3, 1e5f);
    for (bool scaled : {false, true}) {
        for (int add : {0, 1}) {
            std::copy(before.data, before.data + before.n, y.data);
            std::copy(before.data, before.data + before.n, want.data);
            for (i64 i = 0; i < rows * columns; i++) {
                float x = (float)from[i] * down[i / columns];
                if (scaled) x = x * across[i % columns];
                T& place = want[i / columns * stride + i % columns];
                narrow(add ? widen(place) + x : x, place);
            }
            launch(kernel, dim3(2), dim3(64), 0, seed, (const S*)from.data, (const float*)down.data,
                   scaled ? (const float*)across.data : nullptr, rows, (int)columns, y.data, stride, add);
            same("scaled sums", y, want);
        }
    }
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        rounding();
        quantized<Int8>(quantize_int8_f32, int8, seed);
        quantized<Int8>(quantize_int8_bf16, int8, seed);
        quantized<E4m3>(quantize_e4m3_f32, e4m3, seed);
        quantized<E4m3>(quantize_e4m3_bf16, e4m3, seed);
        weights<Int8>(transposed_int8, seed);
        weights<E4m3>(transposed_e4m3, seed);
        sums(scaled_s32_f32, seed);
        sums(scaled_s32_bf16, seed);
        sums(scaled_f32_f32, seed);
        sums(scaled_f32_bf16, seed);
    }
    return verdict();
}
