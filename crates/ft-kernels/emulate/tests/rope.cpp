// Rotary positions: both directions, parts of a head that pass through, packed and not.
#include "kinds.h"
#include "../../cuda/rope.cu"

using namespace emulate;

template <class T>
void turns(
    void (*kernel)(const T*, const float*, const float*, float, int, int, int, T*), int heads, int head, int half,
    uint64_t seed, bool neighbors = false) {
    const int tokens = 5, width = heads * head;
    Buffer<T> x(tokens * width), y(tokens * width);
    Buffer<float> cos(tokens * half), sin(tokens * half);
    fill(x, seed + 1);
    fill(cos, seed + 2);
    fill(sin, seed + 3);
    for (float sign : {1.0f, -1.0f}) {
        std::vector<double> from = values(x), want = from;
        for (int t = 0; t < tokens; t++) {
            for (int h = 0; h < heads; h++) {
                for (int i = 0; i < half; i++) {
                    const int a = t * width + h * head + (neighbors ? 2 * i : i), b = a + (neighbors ? 1 : half);
                    const double c = cos[t * half + i], s = sin[t * half + i] * sign;
                    want[a] = from[a] * c - from[b] * s;
                    want[b] = from[b] * c + from[a] * s;
                }
            }
        }
        const float *pc = cos.data, *ps = sin.data;
        launch(kernel, dim3(tokens), dim3(64), 0, seed, (const T*)x.data, pc, ps, sign, width, head, half, y.data);
        check("rope", y, want, tolerance<T>());
    }
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        turns(rope_f32_packed, 3, 8, 4, seed);
        turns(rope_f32_packed, 9, 64, 32, seed);
        turns(rope_f32_packed, 2, 20, 4, seed);
        turns(rope_f32_single, 2, 10, 3, seed);
        turns(rope_f32_single, 1, 6, 0, seed);
        turns(rope_bf16_packed, 5, 64, 32, seed);
        turns(rope_bf16_packed, 2, 24, 8, seed);
        turns(rope_bf16_single, 7, 12, 6, seed);
        turns(rope_bf16_single, 2, 11, 3, seed);
        turns(rope_f32_neighbors, 3, 16, 8, seed, true);
        turns(rope_f32_neighbors, 2, 11, 3, seed, true);
        turns(rope_bf16_neighbors, 5, 64, 16, seed, true);
    }
    return verdict();
}
