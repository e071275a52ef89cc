// Attention forward in bf16 against plain loops: whole, and split over keys with packed heads.
#include "attention.h"
#include "../../cuda/attention_forward.cu"

using bf16 = __nv_bfloat16;
using attention::Join;

struct Kernel {
    int size, rows, keys, split_keys;
    void (*run)(const bf16*, const bf16*, const bf16*, bf16*, float*, const Tile*, Form);
    void (*split)(const bf16*, const bf16*, const bf16*, float*, float*, const Tile*, int, Form);
};
// As in crates/ft-ops/src/cuda/attention.rs.
const Kernel KERNELS[] = {
    {64, 128, 64, 64, attention_forward_64, attention_split_64},
    {96, 128, 32, 64, attention_forward_96, attention_split_96},
    {128, 128, 32, 64, attention_forward_128, attention_split_128},
    {256, 64, 32, 32, attention_forward_256, attention_split_256},
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

/// Splits of at most `keys` keys.
void split(const Case& c, int keys, uint64_t seed) {
    Problem<bf16> p(c);
    const Kernel& kernel = kernel_for(c.size);
    const int pack = c.heads / c.kv_heads;
    std::vector<Tile> tiles;
    std::vector<Join> joins;
    int slots = 0;
    for (Tile tile : query_tiles(c, 64, pack)) {
        Join join = {tile.token, tile.rows, slots, 0};
        for (int low = tile.low; low < tile.high; low += keys) {
            Tile part = tile;
            part.low = low;
            part.high = std::min(tile.high, low + keys);
            part.slot = slots;
            tiles.push_back(part);
            slots += tile.rows;
            join.splits++;
        }
        joins.push_back(join);
    }
    emulate::Buffer<Tile> work(tiles.size());
    copy_into(work, tiles);
    emulate::Buffer<Join> list(joins.size());
    copy_into(list, joins);
    emulate::Buffer<bf16> o(p.o.size());
    emulate::Buffer<float> lse(p.lse.size());
    emulate::Buffer<float> partial(static_cast<size_t>(slots) * c.kv_heads * c.size), partial_lse(static_cast<size_t>(slots) * c.kv_heads);
    size_t shared = 2 * kernel.size * (64 + 2 * kernel.split_keys);
    emulate::launch(kernel.split, dim3(static_cast<unsigned>(tiles.size()) * c.kv_heads), dim3(128), shared, seed,
                    p.q.data, p.k.data, p.v.data, partial.data, partial_lse.data, work.data, slots, c.form(pack));
    emulate::launch(attention_join, dim3(static_cast<unsigned>(joins.size()) * c.kv_heads), dim3(128), 0, seed, o.data,
                    lse.data, partial.data, partial_lse.data, list.data, slots, c.form(pack));
    check(c, "split o", o, p.o, 1e-2);
    check(c, "split lse", lse, p.lse, 2e-5);
}

int main(int argc, char** argv) {
    for (uint64_t seed : emulate::seeds(argc, argv)) {
        for (const Case& c : training_cases()) whole(c, seed);
        for (const Case& c : cached_cases()) {
            whole(c, seed);
            split(c, 64, seed);
        }
        // The window leaves a row without any key in some of the splits.
        Case lonely = {"lonely", 4, 2, 64, {1, 40}, {190, 190}, 0.125f, 0, 45};
        split(lonely, 32, seed);
        // Large scores stay finite.
        Case large = {"large", 1, 1, 64, {70}, {70}, 60.0f, 0, 0};
        whole(large, seed);
    }
    emulate::expect(emulate::worst_conflict == 1, "ldmatrix meets bank conflicts");
    return emulate::verdict();
}
