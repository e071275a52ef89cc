// Gated units: values, and slopes by their formulas in f64.
#include "kinds.h"
#include "../../cuda/glu.cu"

using namespace emulate;

struct Exact {
    double (*value)(double);
    double (*slope)(double);
};

static double logistic(double x) { return 1 / (1 + std::exp(-x)); }
static double inner(double x) { return std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }

static const Exact SILU = {
    [](double x) { return x * logistic(x); },
    [](double x) { return logistic(x) * (1 + x * (1 - logistic(x))); },
};
static const Exact GELU_TANH = {
    [](double x) { return 0.5 * x * (1 + std::tanh(inner(x))); },
    [](double x) {
        const double t = std::tanh(inner(x));
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
    },
};
static const Exact GELU = {
    [](double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); },
    [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)) + x * std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI); },
};

static const Exact SIGMOID = {
    logistic,
    [](double x) { return logistic(x) * logistic(-x); },
};

static const Exact IDENTITY = {
    [](double x) { return x; },
    [](double) { return 1.0; },
};

static const Exact RELU2 = {
    [](double x) { return x < 0 ? 0 : x * x; },
    [](double x) { return x < 0 ? 0 : 2 * x; },
};

template <class T>
void alone(
    void (*forward)(const T*, T*, i64, i64), void (*backward)(const T*, const T*, T*, i64, i64), const Exact& exact, uint64_t seed) {
    for (int n : {3, 64, 2053}) {
        for (bool packed : {false, true}) {
            Buffer<T> x(n), dy(n), y(n), dx(n);
            fill(x, seed + 1, 3.0f);
            fill(dy, seed + 3);
            std::vector<double> p = values(x), d = values(dy), want(n), want_dx(n);
            for (int i = 0; i < n; i++) {
                want[i] = exact.value(p[i]);
                want_dx[i] = d[i] * exact.slope(p[i]);
            }
            const i64 packs = packed ? n / Full<T>::V : 0;
            const T *px = x.data, *pd = dy.data;
            launch(forward, dim3(2), dim3(64), 0, seed, px, y.data, (i64)n, packs);
            launch(backward, dim3(2), dim3(64), 0, seed, px, pd, dx.data, (i64)n, packs);
            check("y alone", y, want, tolerance<T>());
            check("dx alone", dx, want_dx, tolerance<T>());
        }
    }
}

template <class T>
void both(
    void (*forward)(const T*, const T*, T*, i64, i64), void (*backward)(const T*, const T*, const T*, T*, T*, i64, i64),
    const Exact& exact, uint64_t seed) {
    for (int n : {3, 64, 2053}) {
        for (bool packed : {false, true}) {
            Buffer<T> gate(n), up(n), dy(n), y(n), dgate(n), dup(n);
            fill(gate, seed + 1, 3.0f);
            fill(up, seed + 2);
            fill(dy, seed + 3);
            std::vector<double> g = values(gate), u = values(up), d = values(dy), want(n), want_gate(n), want_up(n);
            for (int i = 0; i < n; i++) {
                want[i] = exact.value(g[i]) * u[i];
                want_gate[i] = d[i] * u[i] * exact.slope(g[i]);
                want_up[i] = d[i] * exact.value(g[i]);
            }
            const i64 packs = packed ? n / Full<T>::V : 0;
            const T *pg = gate.data, *pu = up.data, *pd = dy.data;
            launch(forward, dim3(2), dim3(64), 0, seed, pg, pu, y.data, (i64)n, packs);
            launch(backward, dim3(2), dim3(64), 0, seed, pg, pu, pd, dgate.data, dup.data, (i64)n, packs);
            check("y", y, want, tolerance<T>());
            check("dgate", dgate, want_gate, tolerance<T>());
            check("dup", dup, want_up, tolerance<T>());
        }
    }
}

/// Far values stay finite; NaN passes.
static void far(
    void (*forward)(const float*, const float*, float*, i64, i64),
    void (*backward)(const float*, const float*, const float*, float*, float*, i64, i64), uint64_t seed) {
    const float gates[4] = {-200, 200, -1e30f, NAN};
    Buffer<float> gate(4), one(4), y(4), dgate(4), dup(4);
    for (int i = 0; i < 4; i++) gate[i] = gates[i];
    one.fill(1);
    const float *pg = gate.data, *po = one.data;
    launch(forward, dim3(1), dim3(32), 0, seed, pg, po, y.data, (i64)4, (i64)1);
    launch(backward, dim3(1), dim3(32), 0, seed, pg, po, po, dgate.data, dup.data, (i64)4, (i64)1);
    expect(y[0] == 0 && y[1] == 200 && y[2] == 0 && y[3] != y[3], "far values");
    expect(dgate[0] == 0 && dgate[1] == 1 && dgate[2] == 0 && dgate[3] != dgate[3], "far slopes");
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        both(silu_forward_f32, silu_backward_f32, SILU, seed);
        both(silu_forward_bf16, silu_backward_bf16, SILU, seed);
        both(gelu_tanh_forward_f32, gelu_tanh_backward_f32, GELU_TANH, seed);
        both(gelu_tanh_forward_bf16, gelu_tanh_backward_bf16, GELU_TANH, seed);
        both(gelu_forward_f32, gelu_backward_f32, GELU, seed);
        both(gelu_forward_bf16, gelu_backward_bf16, GELU, seed);
        both(sigmoid_forward_f32, sigmoid_backward_f32, SIGMOID, seed);
        both(sigmoid_forward_bf16, sigmoid_backward_bf16, SIGMOID, seed);
        both(identity_forward_f32, identity_backward_f32, IDENTITY, seed);
        both(identity_forward_bf16, identity_backward_bf16, IDENTITY, seed);
        both(relu2_forward_f32, relu2_backward_f32, RELU2, seed);
        both(relu2_forward_bf16, relu2_backward_bf16, RELU2, seed);
        alone(silu_alone_forward_f32, silu_alone_backward_f32, SILU, seed);
        alone(gelu_tanh_alone_forward_bf16, gelu_tanh_alone_backward_bf16, GELU_TANH, seed);
        alone(gelu_alone_forward_f32, gelu_alone_backward_f32, GELU, seed);
        alone(relu2_alone_forward_bf16, relu2_alone_backward_bf16, RELU2, seed);
        far(silu_forward_f32, silu_backward_f32, seed);
        far(gelu_tanh_forward_f32, gelu_tanh_backward_f32, seed);
        far(gelu_forward_f32, gelu_backward_f32, seed);
    }
    return verdict();
}
