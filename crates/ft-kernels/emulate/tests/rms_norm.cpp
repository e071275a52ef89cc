// RMSNorm: whole rows and heads, packed and not, the root of each row, Gemma's 1 + w, what passes by the norm.
#include "kinds.h"
#include "../../cuda/rms_norm.cu"

using namespace emulate;

template <class T, class W>
using Forward = void (*)(const T*, const W*, const T*, T*, i64, int, float, float);
template <class T, class W>
using Backward = void (*)(const T*, const W*, const T*, const T*, T*, float*, i64, int, float, float);

template <class T, class W>
void norms(Forward<T, W> forward, Backward<T, W> backward, bool wide, int rows, int size, uint64_t seed) {
    for (float one : {0.0f, 1.0f}) {
        const float eps = 1e-3f;
        const int n = rows * size;
        Buffer<T> x(n), dy(n), past(n), y(n), dx(n);
        Buffer<W> w(size);
        Buffer<float> inverse(rows);
        fill(x, seed + 1);
        fill(w, seed + 2);
        fill(dy, seed + 3);
        fill(past, seed + 4);
        std::vector<double> p = values(x), q = values(w), d = values(dy), want(n), want_dx(n), want_inverse(rows);
        for (int r = 0; r < rows; r++) {
            double squares = 0, dot = 0;
            for (int i = 0; i < size; i++) {
                squares += p[r * size + i] * p[r * size + i];
                dot += d[r * size + i] * (q[i] + one) * p[r * size + i];
            }
            const double root = 1 / std::sqrt(squares / size + eps);
            want_inverse[r] = root;
            for (int i = r * size; i < (r + 1) * size; i++) {
                const double scale = q[i % size] + one;
                want[i] = p[i] * root * scale;
                want_dx[i] = d[i] * scale * root - p[i] * dot / size * root * root * root;
            }
        }
        const int threads = wide ? 64 : 128;
        const dim3 grid(wide ? rows : (rows + threads / LANES - 1) / (threads / LANES));
        const T *px = x.data, *pd = dy.data, *none = nullptr, *by = past.data;
        const W* pw = w.data;
        launch(forward, grid, dim3(threads), 0, seed, px, pw, none, y.data, (i64)rows, size, eps, one);
        check("y", y, want, tolerance<T>());
        launch(backward, grid, dim3(threads), 0, seed, px, pw, pd, none, dx.data, inverse.data, (i64)rows, size, eps, one);
        check("dx", dx, want_dx, sizeof(T) == 4 ? 5e-6 : 4e-3);
        check("1 / rms", inverse, want_inverse, 1e-6);
        Buffer<T> again(n);
        launch(backward, grid, dim3(threads), 0, seed, px, pw, pd, none, again.data, (float*)nullptr, (i64)rows, size, eps, one);
        same("dx without the roots", again, dx);
        for (int i = 0; i < n; i++) {
            want[i] += widen(past[i]);
            want_dx[i] += widen(past[i]);
        }
        launch(forward, grid, dim3(threads), 0, seed, px, pw, by, y.data, (i64)rows, size, eps, one);
        check("y and what passes by", y, want, tolerance<T>());
        launch(backward, grid, dim3(threads), 0, seed, px, pw, pd, by, dx.data, inverse.data, (i64)rows, size, eps, one);
        check("dx and what passes by", dx, want_dx, sizeof(T) == 4 ? 5e-6 : 4e-3);
    }
}

#define BOTH(NAME) rms_norm_forward_##NAME, rms_norm_backward_##NAME

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        norms<float, float>(BOTH(wide_f32_f32_packed), true, 3, 1000, seed);
        norms<float, float>(BOTH(narrow_f32_f32_packed), false, 37, 24, seed);
        norms<float, float>(BOTH(wide_f32_f32_single), true, 2, 301, seed);
        norms<float, float>(BOTH(narrow_f32_f32_single), false, 5, 37, seed);
        norms<float, bf16>(BOTH(wide_f32_bf16_packed), true, 2, 264, seed);
        norms<float, bf16>(BOTH(narrow_f32_bf16_single), false, 9, 3, seed);
        norms<bf16, float>(BOTH(wide_bf16_f32_packed), true, 3, 520, seed);
        norms<bf16, float>(BOTH(narrow_bf16_f32_packed), false, 17, 128, seed);
        norms<bf16, bf16>(BOTH(wide_bf16_bf16_packed), true, 2, 1600, seed);
        norms<bf16, bf16>(BOTH(narrow_bf16_bf16_packed), false, 16, 64, seed);
        norms<bf16, bf16>(BOTH(wide_bf16_bf16_single), true, 2, 91, seed);
        norms<bf16, bf16>(BOTH(narrow_bf16_bf16_single), false, 3, 1, seed);
    }
    return verdict();
}
