// Gated delta rule forward: outputs and states are those of the recurrence, from zero states and from given ones.
#include "delta_rule.h"

template <class T>
static void forward(const Forward<T>& kernels, const Shape& shape, uint64_t seed) {
    const Problem<T> x(shape, seed);
    const Prepared<T> prepared(kernels, x, 0, shape.value_heads, seed);
    const double tight = sizeof(T) == 4 ? 2e-5 : 4e-3;
    float* none = nullptr;
    Buffer<T> o((size_t)shape.tokens() * shape.outputs());
    Buffer<float> after(x.before.n);
    for (bool given : {false, true}) {
        const Wanted want = recurrence(x, given, {});
        scan<T>(kernels, x, prepared, given ? x.before.data : none, after.data, o.data, none, none, 0, shape.value_heads, seed);
        check("o", o, want.o, tight);
        compare("states after", after, want.after, 2e-5);
    }
    // A part of the heads, and only what the backward pass keeps: the same results in other places.
    const int group = shape.value_heads / shape.key_heads, first = shape.value_heads - group;
    const int chunks = (int)shape.pieces().size() / 2, per_head = shape.key_dim * shape.value_dim;
    Buffer<float> states((size_t)chunks * shape.value_heads * per_head), some((size_t)chunks * group * per_head);
    Buffer<float> deltas((size_t)shape.tokens() * shape.outputs()), few((size_t)shape.tokens() * group * shape.value_dim);
    T* no_o = nullptr;
    scan<T>(kernels, x, prepared, none, none, no_o, states.data, deltas.data, 0, shape.value_heads, seed);
    const Prepared<T> part(kernels, x, first, group, seed);
    scan<T>(kernels, x, part, none, none, no_o, some.data, few.data, first, group, seed);
    for (int chunk = 0; chunk < chunks; chunk++)
        for (int i = 0; i < group * per_head; i++)
            if (states[((size_t)chunk * shape.value_heads + first) * per_head + i] != some[(size_t)chunk * group * per_head + i])
                return expect(false, "states of a part of the heads");
    for (int t = 0; t < shape.tokens(); t++)
        for (int i = 0; i < group * shape.value_dim; i++)
            if (deltas[((size_t)t * shape.value_heads + first) * shape.value_dim + i] != few[(size_t)t * group * shape.value_dim + i])
                return expect(false, "deltas of a part of the heads");
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        forward<float>(FORWARD(f32), {1, 1, 4, 3, {0, 5}}, seed);
        forward<float>(FORWARD(f32), {2, 4, 12, 40, {0, 1, 1, 34, 101}}, seed);
        forward<float>(FORWARD(f32), {2, 2, 128, 17, {0, 70}}, seed);
        forward<float>(FORWARD(f32), {1, 1, 128, 36, {0, 70}}, seed);
        forward<bf16>(FORWARD(bf16), {1, 3, 33, 32, {0, 64, 67}}, seed);
        forward<bf16>(FORWARD(bf16), {2, 4, 16, 20, {0, 37}}, seed);
    }
    return verdict();
}
