// Attention sinks: o and lse in place, and the gradient of the sinks.
#include "kinds.h"
#include "../../cuda/attention_sinks.cu"

using namespace emulate;

template <class T, class S>
void sinks(void (*apply)(T*, float*, const S*, i64, int, int),
           void (*gradient)(const T*, const float*, const T*, const S*, float*, i64, int, int), uint64_t seed) {
    for (int tokens : {1, 5, 37}) {
        for (int size : {4, 40}) {
            const int heads = 3, rows = tokens * heads;
            Buffer<T> o(rows * size), dout(rows * size);
            Buffer<float> lse(rows), ds(heads);
            Buffer<S> s(heads);
            fill(o, seed + 1);
            fill(dout, seed + 2);
            fill(lse, seed + 3);
            fill(s, seed + 4);
            std::vector<double> want = values(o), total = values(lse), sink = values(s);
            for (int r = 0; r < rows; r++) {
                const double before = total[r];
                total[r] = std::log(std::exp(before) + std::exp(sink[r % heads]));
                for (int i = 0; i < size; i++) want[r * size + i] *= std::exp(before - total[r]);
            }
            launch(apply, dim3((rows + 1) / 2), dim3(64), 0, seed, o.data, lse.data, (const S*)s.data, (i64)rows, heads, size);
            check("o", o, want, tolerance<T>());
            check("lse", lse, total, 1e-5);
            std::vector<double> given = values(o), slope = values(dout), sum(heads, 0.0);
            for (int r = 0; r < rows; r++) {
                double dot = 0;
                for (int i = 0; i < size; i++) dot += given[r * size + i] * slope[r * size + i];
                sum[r % heads] -= std::exp(sink[r % heads] - total[r]) * dot;
            }
            launch(gradient, dim3(heads), dim3(64), 0, seed, (const T*)o.data, (const float*)lse.data, (const T*)dout.data,
                   (const S*)s.data, ds.data, (i64)rows, heads, size);
            check("ds", ds, sum, 1e-4);
        }
    }
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        sinks(sinks_apply_f32_f32, sinks_gradient_f32_f32, seed);
        sinks(sinks_apply_f32_bf16, sinks_gradient_f32_bf16, seed);
        sinks(sinks_apply_bf16_f32, sinks_gradient_bf16_f32, seed);
        sinks(sinks_apply_bf16_bf16, sinks_gradient_bf16_bf16, seed);
    }
    return verdict();
}
