// Sums, scaling, change of type, rows of a bias, dropout.
#include "kinds.h"
#include "../../cuda/elementwise.cu"

using namespace emulate;

template <class A, class B>
void sums(void (*kernel)(const A*, const B*, A*, i64, i64), uint64_t seed, const char* name) {
    constexpr int V = sizeof(A) == 4 && sizeof(B) == 4 ? 4 : 8;
    for (int n : {1, 7, 8, 1000, 4099}) {
        for (bool packed : {false, true}) {
            Buffer<A> a(n), y(n);
            Buffer<B> b(n);
            fill(a, seed + 1);
            fill(b, seed + 2);
            std::vector<double> want = values(a), more = values(b);
            for (int i = 0; i < n; i++) want[i] += more[i];
            const i64 packs = packed ? n / V : 0;
            launch(kernel, dim3(2), dim3(64), 0, seed, (const A*)a.data, (const B*)b.data, y.data, (i64)n, packs);
            check(name, y, want, tolerance<A>());
            // In place.
            launch(kernel, dim3(2), dim3(64), 0, seed, (const A*)a.data, (const B*)b.data, a.data, (i64)n, packs);
            same(name, a, y);
        }
    }
}

template <class T>
void scaling(void (*kernel)(T*, float, i64, i64), uint64_t seed) {
    for (int n : {5, 1003}) {
        Buffer<T> t(n);
        fill(t, seed);
        std::vector<double> want = values(t);
        for (double& x : want) x *= 0.37;
        launch(kernel, dim3(3), dim3(32), 0, seed, t.data, 0.37f, (i64)n, (i64)(n / Full<T>::V));
        check("scale", t, want, tolerance<T>());
    }
}

template <class T, class B>
void bias_rows(void (*kernel)(const B*, T*, i64, i64), uint64_t seed) {
    const int rows = 7, columns = 70;
    Buffer<B> bias(columns);
    Buffer<T> y(rows * columns);
    fill(bias, seed);
    std::vector<double> one = values(bias), want;
    for (int r = 0; r < rows; r++) want.insert(want.end(), one.begin(), one.end());
    launch(kernel, dim3(2, 3), dim3(32), 0, seed, (const B*)bias.data, y.data, (i64)rows, (i64)columns);
    check("rows", y, want, sizeof(T) == 2 ? 4e-3 : 0);
}

template <class T, class B>
void added_rows(void (*kernel)(const B*, T*, i64, i64, i64), uint64_t seed) {
    constexpr int V = sizeof(T) == 4 && sizeof(B) == 4 ? 4 : 8;
    for (int columns : {5, 48}) {
        const int rows = 7, n = rows * columns;
        Buffer<B> bias(columns);
        Buffer<T> y(n);
        fill(bias, seed);
        fill(y, seed + 1);
        std::vector<double> one = values(bias), want = values(y);
        for (int i = 0; i < n; i++) want[i] += one[i % columns];
        const i64 packs = columns % V == 0 ? n / V : 0;
        launch(kernel, dim3(2), dim3(32), 0, seed, (const B*)bias.data, y.data, (i64)n, (i64)columns, packs);
        check("added rows", y, want, tolerance<T>());
    }
}

/// The numbers of `base/rng.rs` for the key 0x0123456789abcdef, made by ft itself.
static uint64_t number(uint64_t key, uint64_t index) {
    auto mixed = [](uint64_t z) {
        z += 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    };
    return mixed(mixed(key ^ index * 0xD1342543DE82EF95ull));
}

template <class T>
void drops(void (*kernel)(const T*, T*, u64, float, float, i64, i64), uint64_t seed) {
    const int n = 5003;
    const u64 key = 0x0123456789abcdefull + seed;
    Buffer<T> x(n), y(n);
    fill(x, seed);
    std::vector<double> want = values(x);
    int dropped = 0;
    for (int i = 0; i < n; i++) {
        const bool drop = static_cast<float>(number(key, i) >> 40) * (1.0f / 16777216.0f) < 0.3f;
        dropped += drop;
        want[i] = drop ? 0 : want[i] / 0.7;
    }
    expect(dropped > n / 4 && dropped < n * 7 / 20, "three in ten are dropped");
    launch(kernel, dim3(2), dim3(96), 0, seed, (const T*)x.data, y.data, key, 0.3f, 1.0f / 0.7f, (i64)n, (i64)(n / Full<T>::V));
    check("dropout", y, want, tolerance<T>());
    launch(kernel, dim3(2), dim3(96), 0, seed, (const T*)x.data, x.data, key, 0.3f, 1.0f / 0.7f, (i64)n, (i64)0);
    same("dropout in place, one by one", x, y);
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        sums(add_f32_f32, seed, "f32 + f32");
        sums(add_f32_bf16, seed, "f32 + bf16");
        sums(add_bf16_f32, seed, "bf16 + f32");
        sums(add_bf16_bf16, seed, "bf16 + bf16");
        scaling(scale_f32, seed);
        scaling(scale_bf16, seed);
        bias_rows(rows_f32_f32, seed);
        bias_rows(rows_f32_bf16, seed);
        bias_rows(rows_bf16_f32, seed);
        bias_rows(rows_bf16_bf16, seed);
        added_rows(add_rows_f32_f32, seed);
        added_rows(add_rows_f32_bf16, seed);
        added_rows(add_rows_bf16_f32, seed);
        added_rows(add_rows_bf16_bf16, seed);
        drops(dropout_f32, seed);
        drops(dropout_bf16, seed);

        const int n = 1005;
        Buffer<float> wide(n), again(n);
        Buffer<bf16> half(n);
        fill(wide, seed);
        wide[3] = 1.00390625f;  // halfway: to even, down
        wide[4] = 1.01171875f;  // halfway: to even, up
        launch(cast_f32_bf16, dim3(2), dim3(64), 0, seed, (const float*)wide.data, half.data, (i64)n, (i64)(n / 8));
        check("to bf16", half, values(wide), 4e-3);
        expect(half[3].bits == 0x3f80 && half[4].bits == 0x3f82, "ties go to even");
        launch(cast_bf16_f32, dim3(2), dim3(64), 0, seed, (const bf16*)half.data, again.data, (i64)n, (i64)(n / 8));
        check("to f32", again, values(half), 0);
    }
    return verdict();
}
