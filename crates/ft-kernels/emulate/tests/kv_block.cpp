// New tokens go into the blocks of a KV cache: as they are, rounded to bf16, or as codes and scales.
#include "kinds.h"
#include "../../cuda/kv_block.cu"

using namespace emulate;

template <class T, class S>
struct Side {
    Buffer<T> x;
    Buffer<S> numbers;
    Buffer<float> scales;

    Side(int tokens, int room, int heads, int size, uint64_t seed)
        : x((size_t)tokens * heads * size), numbers((size_t)room * heads * size), scales((size_t)room * heads) {
        fill(x, seed);
        // A row of zeros, and a row with a number that is not finite.
        for (int i = 0; i < size; i++) narrow(0.0f, x[i]);
        if (x.n > (size_t)size) narrow(seed % 2 ? INFINITY : NAN, x[size + size / 2]);
    }

    /// Row `from` of x was stored as row `to`.
    void check(size_t from, size_t to, int size) {
        const T* own = x.data + from * size;
        float most = 0;
        bool wrong = false;
        for (int i = 0; i < size; i++) {
            most = std::fmax(most, std::fabs(widen(own[i])));
            wrong |= !std::isfinite(widen(own[i]));
        }
        if (sizeof(S) == 1) expect(wrong ? std::isnan(scales[to]) : scales[to] == most / 127.0f, "scale");
        for (int i = 0; i < size; i++) {
            const S got = numbers[to * size + i];
            if constexpr (sizeof(S) == 1) {
                const float by = most > 0 ? 127.0f / most : 0.0f;
                expect(wrong || got == (int)std::nearbyint(widen(own[i]) * by), "code");
            } else {
                S want;
                narrow(widen(own[i]), want);
                expect(std::memcmp(&got, &want, sizeof(S)) == 0, "number");
            }
        }
    }
};

/// Tokens in turn to two blocks, from the end of each.
template <class T, class S>
void run(void (*kernel)(const T*, const T*, const KvBlock*, const KvPlace*, i64, int, int), int tokens, int heads, int size,
         uint64_t seed) {
    const int room = tokens + 2;
    Side<T, S> k(tokens, 2 * room, heads, size, seed + 1), v(tokens, 2 * room, heads, size, seed + 2);
    Buffer<KvBlock> blocks(2);
    Buffer<KvPlace> places(tokens);
    auto row = [&](const KvPlace& place) { return (size_t)(place.block * room + place.token) * heads; };
    for (int b = 0; b < 2; b++) {
        const size_t at = row({b, 0});
        blocks[b] = {k.numbers.data + at * size, v.numbers.data + at * size, k.scales.data + at, v.scales.data + at};
    }
    for (int t = 0; t < tokens; t++) places[t] = {t % 2, room - 1 - t / 2};
    const i64 rows = (i64)tokens * heads;
    launch(kernel, dim3((unsigned)(2 * rows + 3) / 4), dim3(128), 0, seed, (const T*)k.x.data, (const T*)v.x.data,
           (const KvBlock*)blocks.data, (const KvPlace*)places.data, rows, heads, size);
    for (int t = 0; t < tokens; t++) {
        for (int h = 0; h < heads; h++) {
            k.check((size_t)t * heads + h, row(places[t]) + h, size);
            v.check((size_t)t * heads + h, row(places[t]) + h, size);
        }
    }
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        for (int size : {1, 16, 33, 128}) {
            run<float, float>(kv_put_f32_f32, 3, 2, size, seed);
            run<float, bf16>(kv_put_f32_bf16, 1, 3, size, seed);
            run<float, signed char>(kv_put_f32_int8, 9, 1, size, seed);
            run<bf16, bf16>(kv_put_bf16_bf16, 2, 4, size, seed);
            run<bf16, signed char>(kv_put_bf16_int8, 5, 2, size, seed);
        }
    }
    return verdict();
}
