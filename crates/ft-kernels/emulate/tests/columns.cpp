// Sums over rows in two stages, plain and as products.
#include "kinds.h"
#include "../../cuda/columns.cu"

using namespace emulate;

template <class T>
using Kernel = void (*)(const T*, const T*, const float*, float*, i64, i64, i64);

template <class T, int V>
void sums(Kernel<T> plain, Kernel<T> products, int rows, int columns, int part, uint64_t seed) {
    Buffer<T> a(rows * columns), b(rows * columns);
    Buffer<float> factor(rows);
    fill(a, seed + 1);
    fill(b, seed + 2);
    fill(factor, seed + 3);
    const std::vector<double> p = values(a), q = values(b), f = values(factor);
    const int across = (columns + ACROSS * V - 1) / (ACROSS * V), parts = (rows + part - 1) / part;
    for (bool product : {false, true}) {
        std::vector<double> want(columns, 0.0);
        for (int i = 0; i < rows * columns; i++) want[i % columns] += product ? p[i] * q[i] * f[i / columns] : p[i];
        Buffer<float> partial(parts * columns), sum(columns);
        launch(
            product ? products : plain, dim3(across, parts), dim3(ACROSS, DOWN), 0, seed, (const T*)a.data,
            (const T*)b.data, (const float*)factor.data, partial.data, (i64)rows, (i64)columns, (i64)part);
        launch(
            column_totals, dim3((columns + 31) / 32), dim3(32), 0, seed, (const float*)partial.data, sum.data,
            (i64)parts, (i64)columns);
        check("column sums", sum, want, 2e-6);
    }
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        sums<float, 4>(column_sums_f32_packed, column_products_f32_packed, 37, 260, 10, seed);
        sums<float, 1>(column_sums_f32_single, column_products_f32_single, 9, 33, 9, seed);
        sums<bf16, 4>(column_sums_bf16_packed, column_products_bf16_packed, 100, 64, 33, seed);
        sums<bf16, 1>(column_sums_bf16_single, column_products_bf16_single, 1, 7, 1, seed);
    }
    return verdict();
}
