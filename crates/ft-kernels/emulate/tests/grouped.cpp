// Grouped products of uneven groups, both orientations, new and added, and rows that are added at their tokens.
#include "kinds.h"
#include "../../cuda/grouped.cu"

using namespace emulate;

template <class T>
void products(
    void (*kernel)(const T*, const Tile*, int, int, int, T*), const std::vector<int>& groups, int n, int k, bool back,
    uint64_t seed) {
    int rows = 0;
    for (int group : groups) rows += group;
    const size_t weights = groups.size();
    Buffer<T> x(rows * k), w(weights * n * k), y(rows * n);
    fill(x, seed + 1);
    fill(w, seed + 2);
    fill(y, seed + 3);
    std::vector<double> wide_x = values(x), wide_w = values(w);
    std::vector<Tile> tiles;
    const int most = sizeof(T) == 2 ? ROWS : F32_ROWS;
    int first = 0;
    for (size_t g = 0; g < weights; g++) {
        for (int at = 0; at < groups[g]; at += most) {
            const int left = groups[g] - at;
            tiles.push_back({w.data + g * n * k, u32(first + at), u32(left < most ? left : most)});
        }
        first += groups[g];
    }
    Buffer<Tile> table(tiles.size());
    for (size_t i = 0; i < tiles.size(); i++) table[i] = tiles[i];
    for (int add : {1, 0}) {
        std::vector<double> want = values(y);
        int row = 0;
        for (size_t g = 0; g < weights; g++) {
            for (int end = row + groups[g]; row < end; row++) {
                for (int c = 0; c < n; c++) {
                    double sum = add ? want[row * n + c] : 0;
                    for (int d = 0; d < k; d++)
                        sum += wide_x[row * k + d] * wide_w[g * n * k + (back ? d * n + c : c * k + d)];
                    want[row * n + c] = sum;
                }
            }
        }
        const Tile* at = table.data;
        const size_t shared = sizeof(T) == 2 ? 6 * (ROWS * 40 + (back ? 32 * (COLUMNS + 8) : COLUMNS * 40)) : 0;
        launch(kernel, dim3(tiles.size(), (n + COLUMNS - 1) / COLUMNS), dim3(THREADS), shared, seed, (const T*)x.data, at,
               n, k, add, y.data);
        check("grouped product", y, want, tolerance<T>());
    }
}

template <class T>
void sums(void (*kernel)(const T*, const u32*, int, int, int, i64, i64, T*), int d, i64 packs, uint64_t seed) {
    const int tokens = 5, k = 2, first = 3, count = 4;
    // Rows 3 to 6 are there.
    const u32 rows[tokens * k] = {0, 3, 1, 2, 4, 5, 6, 7, 8, 9};
    Buffer<T> part(count * d), y(tokens * d);
    Buffer<u32> places(tokens * k);
    fill(part, seed + 1);
    fill(y, seed + 2);
    for (int i = 0; i < tokens * k; i++) places[i] = rows[i];
    std::vector<double> want = values(y), from = values(part);
    for (int i = 0; i < tokens * k; i++) {
        const int row = int(rows[i]) - first;
        for (int j = 0; row >= 0 && row < count && j < d; j++) want[i / k * d + j] += from[row * d + j];
    }
    const u32* at = places.data;
    launch(kernel, dim3(tokens), dim3(32), 0, seed, (const T*)part.data, at, k, first, count, i64(d), packs, y.data);
    check("combine", y, want, tolerance<T>());
}

// Two groups of 3 and 2 rows in three tiles.
template <class T>
void biases(
    void (*rows)(const Tile*, const float*, i64, T*), void (*products)(const Tile*, const T*, i64, float*), i64 n,
    uint64_t seed) {
    const int count = 5;
    Buffer<T> bias(2 * n), x(count * n), y(count * n);
    Buffer<float> factors(count), to(count);
    Buffer<Tile> tiles(3);
    fill(bias, seed + 1);
    fill(x, seed + 2);
    fill(factors, seed + 3);
    fill(to, seed + 4);
    tiles[0] = {bias.data, 0, 2};
    tiles[1] = {bias.data, 2, 1};
    tiles[2] = {bias.data + n, 3, 2};
    const std::vector<double> b = values(bias), given = values(x), f = values(factors);
    std::vector<double> want_to = values(to);
    for (bool scaled : {true, false}) {
        std::vector<double> want(count * n);
        for (i64 i = 0; i < count * n; i++) want[i] = (scaled ? f[i / n] : 1.0) * b[(i / n < 3 ? 0 : n) + i % n];
        const float* by = scaled ? factors.data : nullptr;
        launch(rows, dim3(3, (n + 31) / 32), dim3(32), 0, seed, (const Tile*)tiles.data, by, n, y.data);
        check("rows of biases", y, want, tolerance<T>());
    }
    for (i64 i = 0; i < count * n; i++) want_to[i / n] += given[i] * b[(i / n < 3 ? 0 : n) + i % n];
    launch(products, dim3(3), dim3(64), 0, seed, (const Tile*)tiles.data, (const T*)x.data, n, to.data);
    check("products with biases", to, want_to, 1e-5);
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        products(grouped_forward_bf16, {3, 0, 70}, 136, 40, false, seed);
        products(grouped_forward_bf16, {16, 17}, 8, 72, false, seed);
        products(grouped_forward_bf16, {130, 64}, 72, 104, false, seed);
        products(grouped_input_bf16, {3, 0, 70}, 136, 40, true, seed);
        products(grouped_input_bf16, {1, 64}, 24, 8, true, seed);
        products(grouped_input_bf16, {129}, 72, 136, true, seed);
        products(grouped_forward_f32, {3, 0, 65}, 130, 19, false, seed);
        products(grouped_input_f32, {9, 2}, 5, 33, true, seed);
        biases(bias_rows_f32, bias_products_f32, 70, seed);
        biases(bias_rows_bf16, bias_products_bf16, 33, seed);
        sums(combine_f32, 7, 0, seed);
        sums(combine_bf16, 7, 0, seed);
        sums(combine_f32, 8, 2, seed);
        sums(combine_bf16, 16, 2, seed);
    }
    return verdict();
}
