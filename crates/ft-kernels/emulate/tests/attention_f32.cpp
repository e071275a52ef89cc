// Attention in f32 against plain loops, forward and backward.
#include "attention.h"
#include "../../cuda/attention_f32.cu"

struct Kernel {
    int size, rows;
    void (*forward)(const float*, const float*, const float*, float*, float*, const Tile*, Form);
    void (*queries)(const float*, const float*, const float*, const float*, const float*, const float*, float*, const Tile*, Form);
    void (*keys)(const float*, const float*, const float*, const float*, const float*, const float*, float*, float*, const Tile*, Form);
};
// As in crates/ft-ops/src/cuda/attention.rs.
const Kernel KERNELS[] = {
    {64, 32, attention_f32_forward_64, attention_f32_queries_64, attention_f32_keys_64},
    {128, 32, attention_f32_forward_128, attention_f32_queries_128, attention_f32_keys_128},
    {256, 16, attention_f32_forward_256, attention_f32_queries_256, attention_f32_keys_256},
    {512, 8, attention_f32_forward_512, attention_f32_queries_512, attention_f32_keys_512},
};

void run(const Case& c, bool backward, uint64_t seed) {
    Problem<float> p(c);
    const Kernel* kernel = KERNELS;
    while (kernel->size < c.size) kernel++;
    const int rows = kernel->rows, stride = kernel->size + 4;
    auto tiles = query_tiles(c, rows, 1);
    emulate::Buffer<Tile> work(tiles.size());
    copy_into(work, tiles);
    emulate::Buffer<float> o(p.o.size()), lse(p.lse.size()), delta(p.lse.size());
    const dim3 grid(static_cast<unsigned>(tiles.size()) * c.heads), threads(8 * rows);
    emulate::launch(kernel->forward, grid, threads, 4 * rows * (3 * stride + rows + 1), seed, p.q.data, p.k.data, p.v.data,
                    o.data, lse.data, work.data, c.form());
    check(c, "o", o, p.o, 2e-6);
    check(c, "lse", lse, p.lse, 2e-6);
    if (!backward) return;

    emulate::Buffer<float> dq(p.dq.size()), dk(p.dk.size()), dv(p.dv.size());
    long long count = static_cast<long long>(lse.n);
    emulate::launch(attention_f32_delta, dim3(static_cast<unsigned>((count + 3) / 4)), dim3(128), 0, seed, delta.data, o.data,
                    p.dout.data, count, c.size);
    const size_t shared = 4 * rows * (4 * stride + 2 * (rows + 1));
    emulate::launch(kernel->queries, grid, threads, shared, seed, p.q.data, p.k.data, p.v.data, p.dout.data, lse.data,
                    delta.data, dq.data, work.data, c.form());
    auto own = key_tiles(c, rows);
    emulate::Buffer<Tile> list(own.size());
    copy_into(list, own);
    emulate::launch(kernel->keys, dim3(static_cast<unsigned>(own.size()) * c.kv_heads), threads, shared, seed, p.q.data, p.k.data,
                    p.v.data, p.dout.data, lse.data, delta.data, dk.data, dv.data, list.data, c.form());
    // With one key a probability is 1 whatever q and k are; only rounding is left on either side.
    if (c.nq() > 1 && c.window != 1) {
        check(c, "dq", dq, p.dq, 1e-5);
        check(c, "dk", dk, p.dk, 1e-5);
    }
    check(c, "dv", dv, p.dv, 1e-5);
}

int main(int argc, char** argv) {
    for (uint64_t seed : emulate::seeds(argc, argv)) {
        for (const Case& c : training_cases()) run(c, true, seed);
        for (const Case& c : cached_cases()) run(c, false, seed);
        Case odd = {"size 7", 3, 1, 7, {5, 33}, {5, 33}, 0.4f, 0, 9};
        run(odd, true, seed);
        Case large = {"size 512", 2, 1, 512, {5, 21}, {5, 21}, 0.05f, 0, 9};
        run(large, true, seed);
    }
    return emulate::verdict();
}
