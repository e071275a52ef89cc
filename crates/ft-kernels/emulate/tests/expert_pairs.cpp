// Gradients of the pairs of uneven groups: one without rows, ranks that do and do not fill the registers, padded columns.
#include "kinds.h"
#include "../../cuda/expert_pairs.cu"

using namespace emulate;

template <class T>
void gradients(
    void (*kernel)(const T*, const T*, const Group*, int, int, int), bool a, const std::vector<int>& groups, int width,
    int rank, int stride, uint64_t seed) {
    int rows = 0;
    for (int group : groups) rows += group;
    Buffer<T> wide(rows * width), low(rows * stride);
    Buffer<float> to(groups.size() * width * rank);
    fill(wide, seed + 1);
    fill(low, seed + 2);
    fill(to, seed + 3);
    std::vector<double> want = values(to), x = values(wide), u = values(low);
    std::vector<Group> table;
    int first = 0;
    for (size_t g = 0; g < groups.size(); g++) {
        const size_t at = g * width * rank;
        if (groups[g] > 0) table.push_back({to.data + at, u32(first), u32(groups[g])});
        for (int row = first; row < first + groups[g]; row++) {
            for (int c = 0; c < width; c++) {
                for (int r = 0; r < rank; r++)
                    want[at + (a ? r * width + c : c * rank + r)] += x[row * width + c] * u[row * stride + r];
            }
        }
        first += groups[g];
    }
    Buffer<Group> there(table.size());
    for (size_t i = 0; i < table.size(); i++) there[i] = table[i];
    const int blocks = (width + WIDTH - 1) / WIDTH * ((rank + RANKS - 1) / RANKS);
    launch(kernel, dim3(table.size(), blocks), dim3(THREADS), 0, seed, (const T*)wide.data, (const T*)low.data,
           (const Group*)there.data, width, rank, stride);
    check("gradient of a pair", to, want, 1e-5);
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        gradients(expert_gradient_a_f32, true, {3, 0, 40}, 300, 1, 1, seed);
        gradients(expert_gradient_a_bf16, true, {33, 2}, 136, 4, 8, seed);
        gradients(expert_gradient_a_bf16, true, {1, 0, 0, 64}, 520, 20, 24, seed);
        gradients(expert_gradient_b_f32, false, {70, 0, 5}, 130, 12, 12, seed);
        gradients(expert_gradient_b_bf16, false, {0, 31, 9}, 264, 8, 8, seed);
        gradients(expert_gradient_b_bf16, false, {12}, 24, 33, 40, seed);
    }
    return verdict();
}
