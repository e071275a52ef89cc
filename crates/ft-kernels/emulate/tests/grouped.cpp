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
        sums(combine_f32, 7, 0, seed);
        sums(combine_bf16, 7, 0, seed);
        sums(combine_f32, 8, 2, seed);
        sums(combine_bf16, 16, 2, seed);
    }
    return verdict();
}
