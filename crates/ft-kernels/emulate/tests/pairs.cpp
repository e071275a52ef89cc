// Copies of many matrices in one launch: into columns of a wider matrix, with and without a difference.
#include "kinds.h"
#include "../../cuda/pairs.cu"

using namespace emulate;

template <class T>
void copies(void (*kernel)(Copies), uint64_t seed) {
    struct Size {
        int rows, columns, stride, first;
    };
    for (bool packed : {true, false}) {
        for (const Size& size : {Size{5, 16, 16, 0}, Size{33, 8, 24, 8}, Size{1, 4, 8, 4}, Size{7, 3, 9, 5}}) {
            if (packed && (size.columns % 4 || size.stride % 4)) continue;
            const int n = size.rows * size.columns;
            Buffer<float> from(n), minus(n);
            Buffer<T> plain(size.rows * size.stride), other(size.rows * size.stride);
            fill(from, seed + 1);
            fill(minus, seed + 2);
            std::memset(plain.data, 0, plain.n * sizeof(T));
            std::memset(other.data, 0, other.n * sizeof(T));
            Copies all = {};
            const u32 columns = size.columns, stride = size.stride;
            all.at[0] = {from.data, nullptr, plain.data + size.first, size.rows, columns, stride, packed};
            all.at[1] = {from.data, minus.data, other.data + size.first, size.rows, columns, stride, packed};
            launch(kernel, dim3(2, 2), dim3(32), 0, seed, all);
            std::vector<double> a = values(from), b = values(minus), want(plain.n, 0.0), difference(plain.n, 0.0);
            for (int i = 0; i < n; i++) {
                const int at = i / size.columns * size.stride + size.first + i % size.columns;
                want[at] = a[i];
                difference[at] = a[i] - b[i];
            }
            check("copy", plain, want, sizeof(T) == 2 ? 4e-3 : 0);
            check("difference", other, difference, tolerance<T>());
        }
    }
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        copies<float>(copy_pairs_f32, seed);
        copies<bf16>(copy_pairs_bf16, seed);
    }
    return verdict();
}
