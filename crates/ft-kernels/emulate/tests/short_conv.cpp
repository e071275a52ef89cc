// Short convolution, with SiLU after it or not: y, dx and dw are those of plain loops over the documents.
#include "kinds.h"
#include "../../cuda/short_conv.cu"

using namespace emulate;

template <class T, class W>
static void convolution(
    void (*forward)(const T*, const W*, const u32*, T*, i64, int, int, int),
    void (*backward)(const T*, const W*, const T*, const u32*, T*, i64, int, int, int),
    void (*weight)(const T*, const W*, const T*, const u32*, float*, i64, int, int, int, i64),
    const std::vector<int>& documents, int channels, int kernel, int silu, int part, uint64_t seed) {
    const int tokens = documents.back(), n = tokens * channels;
    Buffer<T> x(n), dy(n), y(n), dx(n);
    Buffer<W> w(channels * kernel);
    Buffer<u32> places(tokens);
    fill(x, seed + 1);
    fill(dy, seed + 2);
    fill(w, seed + 3);
    std::vector<double> want(n), want_dx(n, 0.0), want_dw(channels * kernel, 0.0), largest(1, 0.0);
    for (size_t d = 0; d + 1 < documents.size(); d++)
        for (int t = documents[d]; t < documents[d + 1]; t++) {
            places[t] = t - documents[d];
            for (int c = 0; c < channels; c++) {
                double u = 0;
                auto each = [&](auto f) {
                    for (int k = 0; k < kernel; k++)
                        if (t - kernel + 1 + k >= documents[d]) f(k, (t - kernel + 1 + k) * channels + c);
                };
                each([&](int k, int from) { u += (double)widen(w[c * kernel + k]) * widen(x[from]); });
                const double s = 1 / (1 + std::exp(-u)), slope = silu ? s + u * s * (1 - s) : 1;
                const double du = widen(dy[t * channels + c]) * slope;
                want[t * channels + c] = silu ? u * s : u;
                each([&](int k, int from) {
                    want_dx[from] += widen(w[c * kernel + k]) * du;
                    want_dw[c * kernel + k] += du * widen(x[from]);
                });
            }
        }
    const T *px = x.data, *pd = dy.data;
    const W* pw = w.data;
    const u32* pp = places.data;
    launch(forward, dim3(3), dim3(64), 0, seed, px, pw, pp, y.data, (i64)tokens, channels, kernel, silu);
    check("y", y, want, tolerance<T>());
    launch(backward, dim3(3), dim3(64), 0, seed, px, pw, pd, pp, dx.data, (i64)tokens, channels, kernel, silu);
    check("dx", dx, want_dx, tolerance<T>());
    const int parts = (tokens + part - 1) / part;
    Buffer<float> partial(parts * channels * kernel), dw(channels * kernel);
    launch(weight, dim3((channels + 63) / 64, parts), dim3(64), 0, seed, px, pw, pd, pp, partial.data, (i64)tokens, channels,
           kernel, silu, (i64)part);
    dw.fill(0);
    for (size_t i = 0; i < partial.n; i++) dw[i % dw.n] += partial[i];
    compare("dw", dw, want_dw, 1e-5);
}

#define ALL(NAME) short_conv_forward_##NAME, short_conv_backward_##NAME, short_conv_weight_##NAME

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        convolution<float, float>(ALL(f32_f32), {0, 1, 1, 3, 40, 61}, 70, 4, 1, 7, seed);
        convolution<float, float>(ALL(f32_f32), {0, 1, 1, 3, 40, 61}, 70, 3, 0, 7, seed);
        convolution<float, bf16>(ALL(f32_bf16), {0, 5}, 3, 1, 1, 5, seed);
        convolution<bf16, float>(ALL(bf16_f32), {0, 2, 20}, 65, 8, 1, 16, seed);
        convolution<bf16, bf16>(ALL(bf16_bf16), {0, 9, 30}, 128, 4, 1, 30, seed);
        convolution<bf16, bf16>(ALL(bf16_bf16), {0, 9, 30}, 65, 3, 0, 30, seed);
    }
    return verdict();
}
