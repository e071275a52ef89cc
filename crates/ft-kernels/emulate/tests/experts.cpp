// Rows of experts: factors, products, rows added at tokens, gates, and the gated unit of gpt-oss.
#include "kinds.h"
#include "../../cuda/experts.cu"

using namespace emulate;

template <class T>
struct Kernels {
    void (*scale)(T*, const float*, i64, i64);
    void (*add_at)(const T*, const u32*, i64, i64, T*);
    void (*products)(const T*, const T*, i64, i64, int, float*);
    void (*gates)(const T*, float*, i64);
    void (*clamped)(const T*, const T*, T*, float, float, i64);
    void (*clamped_backward)(T*, T*, const T*, float, float, i64);
};

template <class T>
void rows(const Kernels<T>& kernels, int n, int d, bool packed, uint64_t seed) {
    Buffer<T> x(n * d), b(n * d), y(2 * n * d);
    Buffer<float> factors(n), out(n);
    Buffer<u32> tokens(n);
    fill(x, seed + 1);
    fill(b, seed + 2);
    fill(y, seed + 3);
    fill(factors, seed + 4);
    fill(out, seed + 5);
    for (int i = 0; i < n; i++) tokens[i] = 2 * i + 1;
    const i64 packs = packed ? d / Full<T>::V : 0;
    for (int add : {1, 0}) {
        // All rows of b, or the first for all rows.
        const i64 step = add ? 0 : d;
        std::vector<double> want(n), wide = values(x), other = values(b);
        for (int r = 0; r < n; r++) {
            want[r] = add ? out[r] : 0;
            for (int j = 0; j < d; j++) want[r] += wide[r * d + j] * other[r * step + j];
        }
        launch(kernels.products, dim3(n), dim3(64), 0, seed, (const T*)x.data, (const T*)b.data, step, i64(d), add, out.data);
        check("products of rows", out, want, 1e-5);
    }
    std::vector<double> want = values(x), sum = values(y);
    for (int i = 0; i < n * d; i++) want[i] *= factors[i / d];
    const float* by = factors.data;
    launch(kernels.scale, dim3(n), dim3(32), 0, seed, x.data, by, i64(d), packs);
    check("scaled rows", x, want, tolerance<T>());
    want = values(x);
    for (int i = 0; i < n * d; i++) sum[(2 * (i / d) + 1) * d + i % d] += want[i];
    const u32* at = tokens.data;
    launch(kernels.add_at, dim3(n), dim3(32), 0, seed, (const T*)x.data, at, i64(d), packs, y.data);
    check("rows added at tokens", y, sum, tolerance<T>());
}

template <class T>
void units(const Kernels<T>& kernels, int n, uint64_t seed) {
    const double alpha = 1.702, limit = 0.75;
    Buffer<T> gate(n), up(n), dy(n), y(n);
    Buffer<float> g(n), d(n);
    fill(gate, seed + 1);
    fill(up, seed + 2);
    fill(dy, seed + 3);
    fill(d, seed + 4);
    auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
    std::vector<double> x = values(gate), v = values(up), from = values(dy), back = values(d);
    std::vector<double> gates(n), value(n), d_gate(n), d_up(n);
    for (int i = 0; i < n; i++) {
        const double a = std::min(x[i], limit), b = std::max(std::min(v[i], limit), -limit), s = sigmoid(alpha * a);
        gates[i] = sigmoid(x[i]);
        back[i] *= gates[i] * (1 - gates[i]);
        value[i] = (b + 1) * a * s;
        d_gate[i] = x[i] > limit ? 0 : from[i] * (b + 1) * (s + alpha * a * s * (1 - s));
        d_up[i] = std::fabs(v[i]) > limit ? 0 : from[i] * a * s;
    }
    const dim3 blocks((n + 63) / 64), threads(64);
    launch(kernels.gates, blocks, threads, 0, seed, (const T*)gate.data, g.data, i64(n));
    check("gates", g, gates, 1e-6);
    const float* of = g.data;
    launch(gates_backward, blocks, threads, 0, seed, of, d.data, i64(n));
    check("gradient of gates", d, back, 1e-6);
    launch(kernels.clamped, dim3(2), threads, 0, seed, (const T*)gate.data, (const T*)up.data, y.data, float(alpha),
           float(limit), i64(n));
    check("clamped unit", y, value, tolerance<T>());
    launch(kernels.clamped_backward, dim3(2), threads, 0, seed, gate.data, up.data, (const T*)dy.data, float(alpha),
           float(limit), i64(n));
    check("gradient of the gate", gate, d_gate, tolerance<T>());
    check("gradient of up", up, d_up, tolerance<T>());
}

int main(int argc, char** argv) {
    const Kernels<float> wide = {scale_rows_f32, add_at_f32, row_products_f32_f32, gates_f32, clamped_forward_f32,
                                 clamped_backward_f32};
    const Kernels<bf16> narrow = {scale_rows_bf16, add_at_bf16, row_products_bf16_bf16, gates_bf16, clamped_forward_bf16,
                                  clamped_backward_bf16};
    for (uint64_t seed : seeds(argc, argv)) {
        rows(wide, 3, 40, true, seed);
        rows(wide, 5, 7, false, seed);
        rows(narrow, 4, 72, true, seed);
        rows(narrow, 2, 33, false, seed);
        units(wide, 200, seed);
        units(narrow, 200, seed);
    }
    return verdict();
}
