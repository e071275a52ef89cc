// Attention forward in bf16 against plain loops: whole, and on a KV cache in pieces with packed heads.
#include "attention.h"
#include "../../cuda/attention_forward.cu"

using bf16 = __nv_bfloat16;

struct Kernel {
    int size, rows, keys, split_keys;
    void (*run)(const bf16*, const bf16*, const bf16*, bf16*, float*, const Tile*, Form);
    /// On bf16 and on int8.
    void (*cached[2])(const bf16*, float*, float*, const KvBlock*, const Tile*, int, Form);
};
// As in crates/ft-ops/src/cuda/attention.rs.
const Kernel KERNELS[] = {
    {64, 128, 64, 64, attention_forward_64, {attention_cached_bf16_64, attention_cached_int8_64}},
    {96, 128, 32, 64, attention_forward_96, {attention_cached_bf16_96, attention_cached_int8_96}},
    {128, 128, 32, 64, attention_forward_128, {attention_cached_bf16_128, attention_cached_int8_128}},
    {256, 64, 32, 32, attention_forward_256, {attention_cached_bf16_256, attention_cached_int8_256}},
};

const Kernel& kernel_for(int size) {
    for (const Kernel& k : KERNELS)
        if (size <= k.size) return k;
    std::abort();
}

void whole(const Case& c, uint64_t seed) {
    Problem<bf16> p(c);
    const Kernel& kernel = kernel_for(c.size);
    auto tiles = query_tiles(c, kernel.rows, 1);
    emulate::Buffer<Tile> work(tiles.size());
    copy_into(work, tiles);
    emulate::Buffer<bf16> o(p.o.size());
    emulate::Buffer<float> lse(p.lse.size());
    size_t shared = 2 * kernel.size * (kernel.rows + 2 * kernel.keys);
    emulate::launch(kernel.run, dim3(static_cast<unsigned>(tiles.size()) * c.heads), dim3(128), shared, seed,
                    p.q.data, p.k.data, p.v.data, o.data, lse.data, work.data, c.form());
    check(c, "o", o, p.o, 1e-2);
    check(c, "lse", lse, p.lse, 2e-5);
}

/// Blocks of `room` tokens, pieces of at most `keys` keys.
template <class S>
void cached(const Case& c, int room, int keys, uint64_t seed) {
    const Kernel& kernel = kernel_for(c.size);
    const int pack = c.heads / c.kv_heads;
    Cached<bf16, S> cache(c, room, 64, pack, keys);
    bool values = false;
    Problem<bf16> p(c, [&](emulate::Buffer<bf16>& t) {
        values ? cache.put(c, t, cache.v, cache.v_scales) : cache.put(c, t, cache.k, cache.k_scales);
        values = true;
    });
    emulate::Buffer<bf16> o(p.o.size());
    emulate::Buffer<float> lse(p.lse.size());
    const size_t shared = 2 * kernel.size * (64 + 2 * kernel.split_keys);
    cache.run(c, p, kernel.cached[sizeof(S) == 1], attention_join, 128, shared, pack, seed, o, lse);
    const std::string name = std::string(sizeof(S) == 1 ? "int8 " : "bf16 ") + std::to_string(room) + "/" + std::to_string(keys);
    check(c, (name + " o").c_str(), o, p.o, 1e-2);
    check(c, (name + " lse").c_str(), lse, p.lse, 2e-5);
}

int main(int argc, char** argv) {
    for (uint64_t seed : emulate::seeds(argc, argv)) {
        for (const Case& c : training_cases()) whole(c, seed);
        for (const Case& c : cached_cases()) {
            whole(c, seed);
            cached<bf16>(c, 1000, 64, seed);
        }
        for (const Case& c : decoding_cases()) {
            cached<bf16>(c, 33, 64, seed);
            cached<signed char>(c, 64, 32, seed);
        }
        // The window leaves a row without any key in some of the splits.
        Case lonely = {"lonely", 4, 2, 64, {1, 40}, {190, 190}, 0.125f, 0, 45};
        cached<bf16>(lonely, 1000, 32, seed);
        // Large scores stay finite.
        Case large = {"large", 1, 1, 64, {70}, {70}, 60.0f, 0, 0};
        whole(large, seed);
    }
    emulate::expect(emulate::worst_conflict == 1, "ldmatrix has bank conflicts");
    return emulate::verdict();
}
