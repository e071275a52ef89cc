// LayerNorm: whole rows and heads with parameters of their own, packed and not, without weight or bias, 1 + w.
#include "kinds.h"
#include "../../cuda/layer_norm.cu"

using namespace emulate;

template <class T, class W>
using Forward = void (*)(const T*, const W*, const W*, T*, i64, int, int, float, float);
template <class T, class W>
using Backward = void (*)(const T*, const W*, const T*, T*, i64, int, int, float, float);

template <class T, class W>
void norms(Forward<T, W> forward, Backward<T, W> backward, bool wide, int rows, int size, int heads, uint64_t seed) {
    // 0: w and b, 1: w alone and 1 + w, 2: neither.
    for (int kind : {0, 1, 2}) {
        const float eps = 1e-3f, one = kind == 1 ? 1.0f : 0.0f;
        const int n = rows * size;
        Buffer<T> x(n), dy(n), y(n), dx(n);
        Buffer<W> w(size * heads), b(size * heads);
        fill(x, seed + 1);
        fill(w, seed + 2);
        fill(dy, seed + 3);
        fill(b, seed + 4);
        std::vector<double> p = values(x), q = values(w), s = values(b), d = values(dy), want(n), want_dx(n);
        for (int r = 0; r < rows; r++) {
            const int at = r * size, own = r % heads * size;
            double mean = 0, squares = 0, sum = 0, dot = 0;
            for (int i = 0; i < size; i++) mean += p[at + i] / size;
            for (int i = 0; i < size; i++) squares += (p[at + i] - mean) * (p[at + i] - mean);
            const double root = 1 / std::sqrt(squares / size + eps);
            auto scale = [&](int i) { return kind == 2 ? 1.0 : q[own + i] + one; };
            for (int i = 0; i < size; i++) {
                sum += d[at + i] * scale(i);
                dot += d[at + i] * scale(i) * (p[at + i] - mean) * root;
            }
            for (int i = 0; i < size; i++) {
                const double normal = (p[at + i] - mean) * root;
                want[at + i] = normal * scale(i) + (kind == 0 ? s[own + i] : 0);
                want_dx[at + i] = root * (d[at + i] * scale(i) - sum / size - normal * dot / size);
            }
        }
        const int threads = wide ? 64 : 128;
        const dim3 grid(wide ? rows : (rows + threads / LANES - 1) / (threads / LANES));
        const T *px = x.data, *pd = dy.data;
        const W *pw = kind == 2 ? nullptr : w.data, *pb = kind == 0 ? b.data : nullptr;
        launch(forward, grid, dim3(threads), 0, seed, px, pw, pb, y.data, (i64)rows, size, heads, eps, one);
        check("y", y, want, sizeof(T) == 4 ? 5e-6 : 4e-3);
        launch(backward, grid, dim3(threads), 0, seed, px, pw, pd, dx.data, (i64)rows, size, heads, eps, one);
        check("dx", dx, want_dx, sizeof(T) == 4 ? 1e-5 : 4e-3);
    }
}

#define BOTH(NAME) layer_norm_forward_##NAME, layer_norm_backward_##NAME

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        norms<float, float>(BOTH(wide_f32_f32_packed), true, 3, 1000, 1, seed);
        norms<float, float>(BOTH(narrow_f32_f32_packed), false, 36, 24, 4, seed);
        norms<float, float>(BOTH(wide_f32_f32_single), true, 2, 301, 1, seed);
        norms<float, float>(BOTH(narrow_f32_f32_single), false, 6, 37, 3, seed);
        norms<float, bf16>(BOTH(wide_f32_bf16_packed), true, 2, 264, 2, seed);
        norms<float, bf16>(BOTH(narrow_f32_bf16_single), false, 9, 5, 1, seed);
        norms<bf16, float>(BOTH(wide_bf16_f32_packed), true, 3, 520, 1, seed);
        norms<bf16, float>(BOTH(narrow_bf16_f32_packed), false, 18, 128, 6, seed);
        norms<bf16, bf16>(BOTH(wide_bf16_bf16_packed), true, 2, 1600, 1, seed);
        norms<bf16, bf16>(BOTH(narrow_bf16_bf16_packed), false, 16, 64, 8, seed);
        norms<bf16, bf16>(BOTH(wide_bf16_bf16_single), true, 2, 91, 1, seed);
        norms<bf16, bf16>(BOTH(narrow_bf16_bf16_single), false, 3, 7, 1, seed);
    }
    return verdict();
}
