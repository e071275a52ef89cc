// Factors of columns, row norms of DoRA, skew-symmetric blocks.
#include "kinds.h"
#include "../../cuda/adapters.cu"

using namespace emulate;

template <class X, class Y>
void columns(void (*kernel)(const X*, const float*, const float*, Y*, i64, i64, i64), uint64_t seed) {
    for (int across : {7, 48}) {
        for (bool with_bias : {false, true}) {
            const int n = 9 * across;
            Buffer<X> x(n);
            Buffer<Y> y(n);
            Buffer<float> v(across), bias(across);
            fill(x, seed + 1);
            fill(v, seed + 2);
            fill(bias, seed + 3);
            std::vector<double> want = values(x), one = values(v), more = values(bias);
            for (int i = 0; i < n; i++) want[i] = want[i] * one[i % across] + (with_bias ? more[i % across] : 0);
            const float* given = with_bias ? bias.data : nullptr;
            const i64 packs = across % 8 == 0 ? n / 8 : 0;
            launch(kernel, dim3(2), dim3(32), 0, seed, (const X*)x.data, (const float*)v.data, given, y.data, (i64)n,
                   (i64)across, packs);
            check("columns", y, want, tolerance<Y>());
        }
    }
}

static void norms(uint64_t seed) {
    const int outputs = 45, inputs = 20, rank = 3;
    const double s = 0.7;
    Buffer<float> across(rank * outputs), own(outputs * rank), b(outputs * rank), squares(outputs), m(outputs), g(outputs);
    Buffer<float> w(outputs * inputs), a(rank * inputs);
    fill(w, seed + 1);
    fill(a, seed + 2);
    fill(b, seed + 3);
    fill(m, seed + 4);
    std::vector<double> W = values(w), A = values(a), B = values(b), M = values(m), want(outputs);
    for (int o = 0; o < outputs; o++) {
        double whole = 0, plain = 0;
        for (int i = 0; i < inputs; i++) {
            double v = W[o * inputs + i];
            plain += v * v;
            for (int r = 0; r < rank; r++) v += s * B[o * rank + r] * A[r * inputs + i];
            whole += v * v;
        }
        squares[o] = plain;
        want[o] = M[o] / std::sqrt(whole);
        for (int r = 0; r < rank; r++) {
            double sum = 0, gram = 0;
            for (int i = 0; i < inputs; i++) sum += A[r * inputs + i] * W[o * inputs + i];
            for (int q = 0; q < rank; q++)
                for (int i = 0; i < inputs; i++) gram += B[o * rank + q] * A[q * inputs + i] * A[r * inputs + i];
            across[r * outputs + o] = sum;
            own[o * rank + r] = gram;
        }
    }
    launch(dora_factors, dim3(2), dim3(32), 0, seed, (const float*)across.data, (const float*)own.data,
           (const float*)b.data, (const float*)squares.data, (const float*)m.data, g.data, (i64)outputs, rank, (float)s);
    check("factors of DoRA", g, want, 1e-5);
}

static void blocks(uint64_t seed) {
    for (int size : {1, 2, 5}) {
        const int count = 3, triangle = size * (size - 1) / 2, n = count * size * size;
        Buffer<float> triangles(count * triangle), q(n), back(count * triangle);
        fill(triangles, seed);
        std::vector<double> want(n, 0.0), from = values(triangles);
        for (int k = 0, at = 0; k < count; k++)
            for (int r = 0; r < size; r++)
                for (int c = r + 1; c < size; c++, at++) {
                    want[(k * size + r) * size + c] = from[at];
                    want[(k * size + c) * size + r] = -from[at];
                }
        launch(skew, dim3(2), dim3(32), 0, seed, (const float*)triangles.data, q.data, (i64)n, size);
        check("skew", q, want, 0);
        launch(skew_gradient, dim3(2), dim3(32), 0, seed, (const float*)q.data, back.data, (i64)n, size);
        for (double& x : from) x *= 2;
        check("the gradient of skew", back, from, 0);
    }
}

static void inverses(uint64_t seed) {
    for (int size : {1, 2, 5, 33}) {
        const int count = 2, inside = size * size;
        Buffer<float> q(count * inside), inverse(count * inside);
        Buffer<double> work(count * inside);
        fill(q, seed);
        for (int k = 0; k < count; k++)
            for (int r = 0; r < size; r++)
                for (int c = 0; c <= r; c++) q[k * inside + r * size + c] = r == c ? 0 : -q[k * inside + c * size + r];
        launch(inverse_of_sum, dim3(count), dim3(32), 0, seed, (const float*)q.data, work.data, inverse.data, size);
        // The product with I + q is I.
        std::vector<double> from = values(q), found = values(inverse), product(count * inside), want(count * inside);
        for (int k = 0; k < count; k++)
            for (int r = 0; r < size; r++)
                for (int c = 0; c < size; c++) {
                    double sum = found[k * inside + r * size + c];
                    for (int i = 0; i < size; i++) sum += from[k * inside + r * size + i] * found[k * inside + i * size + c];
                    product[k * inside + r * size + c] = sum;
                    want[k * inside + r * size + c] = r == c;
                }
        Buffer<float> got(count * inside);
        for (int i = 0; i < count * inside; i++) got[i] = static_cast<float>(product[i]);
        check("the inverse of I + q", got, want, 1e-5);
    }
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        columns(scale_columns_f32_f32, seed);
        columns(scale_columns_f32_bf16, seed);
        columns(scale_columns_bf16_bf16, seed);
        norms(seed);
        blocks(seed);
        inverses(seed);
    }
    return verdict();
}
