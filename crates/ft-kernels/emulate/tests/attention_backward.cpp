// Attention backward in bf16 against plain loops, with one and with several parts of a group.
#include "attention.h"
#include "../../cuda/attention_backward.cu"

using bf16 = __nv_bfloat16;

struct Kernel {
    int size, out, query_rows, key_stages, key_rows, query_stages;
    /// Bytes of own rows beside the staged ones: 0 if they stay in registers.
    int own;
    void (*keys)(const bf16*, const bf16*, const bf16*, const bf16*, const float*, const float*, bf16*, bf16*, float*,
                 float*, int, const Tile*, Form);
    void (*queries)(const bf16*, const bf16*, const bf16*, const bf16*, const float*, const float*, bf16*, const Tile*, Form);
};
// As in crates/ft-ops/src/cuda/attention.rs.
const Kernel KERNELS[] = {
    {64, 64, 32, 2, 32, 2, 0, attention_keys_64, attention_queries_64},
    {96, 96, 32, 2, 32, 2, 0, attention_keys_96, attention_queries_96},
    {128, 128, 16, 4, 32, 2, 0, attention_keys_128, attention_queries_128},
    {256, 128, 32, 1, 32, 1, 256 * 256, attention_keys_256, attention_queries_256},
};

const Kernel& kernel_for(int size) {
    for (const Kernel& k : KERNELS)
        if (size <= k.size) return k;
    std::abort();
}

void backward(const Case& c, int parts, uint64_t seed) {
    Problem<bf16> p(c);
    const Kernel& kernel = kernel_for(c.size);
    emulate::Buffer<bf16> o(p.o.size()), dq(p.dq.size()), dk(p.dk.size()), dv(p.dv.size());
    emulate::Buffer<float> lse(p.lse.size()), delta(p.lse.size());
    for (size_t i = 0; i < o.n; i++) o[i] = bf16(static_cast<float>(p.o[i]));
    for (size_t i = 0; i < lse.n; i++) lse[i] = static_cast<float>(p.lse[i]);
    long long rows = static_cast<long long>(lse.n);
    emulate::launch(attention_delta, dim3(static_cast<unsigned>((rows + 3) / 4)), dim3(128), 0, seed, delta.data, o.data,
                    p.dout.data, rows, c.size);

    auto tiles = query_tiles(c, 64, 1);
    emulate::Buffer<Tile> work(tiles.size());
    copy_into(work, tiles);
    emulate::launch(kernel.queries, dim3(static_cast<unsigned>(tiles.size()) * c.heads), dim3(128),
                    kernel.own + 4 * kernel.size * kernel.query_stages * kernel.key_rows, seed, p.q.data, p.k.data,
                    p.v.data, p.dout.data, lse.data, delta.data, dq.data, work.data, c.form());

    auto own = key_tiles(c, 64);
    emulate::Buffer<Tile> list(own.size());
    copy_into(list, own);
    emulate::Buffer<float> partial_dk(parts > 1 ? dk.n * parts : 0), partial_dv(partial_dk.n);
    int stages = kernel.key_stages * kernel.query_rows;
    emulate::launch(kernel.keys, dim3(static_cast<unsigned>(own.size()) * c.kv_heads * parts * (kernel.size / kernel.out)),
                    dim3(128), kernel.own + 4 * kernel.size * stages + 8 * stages, seed, p.q.data, p.k.data, p.v.data,
                    p.dout.data, lse.data, delta.data, dk.data, dv.data, partial_dk.data, partial_dv.data, c.nk(),
                    list.data, c.form(1, parts));
    if (parts > 1) {
        long long n = static_cast<long long>(dk.n);
        dim3 grid(static_cast<unsigned>((n + 255) / 256));
        emulate::launch(attention_sum_parts, grid, dim3(256), 0, seed, dk.data, partial_dk.data, n, parts);
        emulate::launch(attention_sum_parts, grid, dim3(256), 0, seed, dv.data, partial_dv.data, n, parts);
    }
    std::string part = parts > 1 ? " in parts" : "";
    // With one key a probability is 1 whatever q and k are; only rounding is left on either side.
    if (c.nq() > 1 && c.window != 1) {
        check(c, ("dq" + part).c_str(), dq, p.dq, 1e-2);
        check(c, ("dk" + part).c_str(), dk, p.dk, 1e-2);
    }
    check(c, ("dv" + part).c_str(), dv, p.dv, 1e-2);
}

int main(int argc, char** argv) {
    for (uint64_t seed : emulate::seeds(argc, argv)) {
        for (const Case& c : training_cases()) {
            backward(c, 1, seed);
            if (c.heads > c.kv_heads) backward(c, c.heads / c.kv_heads, seed);
        }
    }
    emulate::expect(emulate::worst_conflict == 1, "ldmatrix has bank conflicts");
    return emulate::verdict();
}
