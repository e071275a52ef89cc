// Attention forward in bf16: o and lse. After FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3).
//
// A block owns 64 MT rows of queries of one head, a warp 16 MT of them. It walks over the keys in tiles of BN; scores and probabilities stay in registers.
// The next keys load while the probabilities are made, the next values while the next scores are. With SPLIT
// (queries on a KV cache) a block walks over a part of a block of the cache, for all heads of a key head at once (row r
// is head r % pack of query r / pack), and leaves an unrounded o and its lse; `attention_join` puts the parts of a query
// together in their order. Queries of several texts share a tile if all of them see all of its keys.

#include "attention.cuh"

namespace attention {

struct Pointers {
    const bf16* q;
    bf16* o;
    float* lse;
    /// SPLIT: [H / pack, slots, size] and [H / pack, slots].
    float *partial, *partial_lse;
    int slots;
};

template <int E, int MT, int BN, bool SPLIT, class S>
__device__ __forceinline__ void forward(const Pointers& p, const Source<S>& keys, const Source<S>& values,
                                        const Tile& tile, int block_head, const Form& form) {
    constexpr int BM = 64 * MT, NT = BN / 8, KT = BN / 16, OT = E / 8;
    DYNAMIC_SHARED(memory);
    bf16* sq = reinterpret_cast<bf16*>(memory);
    bf16* sk = sq + BM * E;
    bf16* sv = sk + BN * E;

    const int lane = threadIdx.x % 32, first_row = static_cast<int>(threadIdx.x / 32) * 16 * MT;
    const int pack = SPLIT ? form.pack : 1, size = form.size;
    const size_t q_stride = static_cast<size_t>(form.heads) * size;
    // Element of q and o at which row r of the tile starts.
    auto row_start = [&](int r) {
        return (tile.token + r / pack) * q_stride + static_cast<size_t>(block_head * pack + r % pack) * size;
    };

#pragma unroll
    for (int i = 0; i < BM * OT / THREADS; i++) {
        const int at = i * THREADS + static_cast<int>(threadIdx.x), row = at / OT, chunk = at % OT;
        const bool there = row < tile.rows && chunk * 8 < size;
        ptx::copy16(ptx::address(sq) + 2 * spot<E>(row, chunk), there ? p.q + row_start(row) + chunk * 8 : p.q, there);
    }
    auto load = [&](bf16* to, const Source<S>& from, int key) {
        from.template load<E, BN>(to, key, tile.high - key, size);
    };
    load(sk, keys, tile.low);
    ptx::commit();
    load(sv, values, tile.low);
    ptx::commit();

    // Running maximum and sum of the 2 MT rows that this thread has a share in.
    float top[MT][2], sum[MT][2];
    float acc[MT][OT][4] = {};
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            top[m][half] = -INFINITY;
            sum[m][half] = 0.0f;
        }
    }
    // The keys that every row of this warp sees.
    const int all_from = tile.place + (first_row + 16 * MT - 1) / pack - form.window + 1;
    const int all_to = min(tile.place + first_row / pack, tile.high - 1);
    const bool working = first_row < tile.rows;
    const Scores scores(form);

    for (int key = tile.low; key < tile.high; key += BN) {
        ptx::wait<1>();
        __syncthreads();
        float s[MT][NT][4] = {};
        if (working) rows_by_rows<E, MT, NT>(s, sq, first_row, sk);
        __syncthreads();
        if (key + BN < tile.high) load(sk, keys, key + BN);
        ptx::commit();

        uint32_t w[MT][KT][4];
        if (working) {
            const bool masked = key < all_from || key + BN - 1 > all_to;
#pragma unroll
            for (int m = 0; m < MT; m++) {
                scores.apply(s[m]);
                if (masked) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int query = tile.place + (first_row + m * 16 + lane / 4 + half * 8) / pack;
#pragma unroll
                        for (int n = 0; n < NT; n++) {
#pragma unroll
                            for (int c = 0; c < 2; c++) {
                                const int at = key + n * 8 + lane % 4 * 2 + c;
                                if (at > query || at >= tile.high || query - at >= form.window)
                                    s[m][n][half * 2 + c] = -INFINITY;
                            }
                        }
                    }
                }
                float highest[2] = {top[m][0], top[m][1]};
#pragma unroll
                for (int n = 0; n < NT; n++) {
#pragma unroll
                    for (int c = 0; c < 4; c++) highest[c / 2] = fmaxf(highest[c / 2], s[m][n][c]);
                }
                float base[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    highest[half] = quad_max(highest[half]);
                    // A row that has seen no key yet: any finite number will do.
                    base[half] = highest[half] == -INFINITY ? 0.0f : highest[half];
                    const float shrink = ptx::exp2(top[m][half] - base[half]);
                    top[m][half] = highest[half];
                    sum[m][half] *= shrink;
#pragma unroll
                    for (int n = 0; n < OT; n++) {
                        acc[m][n][2 * half] *= shrink;
                        acc[m][n][2 * half + 1] *= shrink;
                    }
                }
#pragma unroll
                for (int n = 0; n < NT; n++) {
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        s[m][n][c] = ptx::exp2(s[m][n][c] - base[c / 2]);
                        sum[m][c / 2] += s[m][n][c];
                    }
                }
                pack_weights<KT>(w[m], s[m]);
            }
        }
        ptx::wait<1>();
        __syncthreads();
        if (working) weights_by_rows<E, MT, KT, OT>(acc, w, sv, 0);
        __syncthreads();
        if (key + BN < tile.high) load(sv, values, key + BN);
        ptx::commit();
    }
    ptx::wait<0>();
    if (!working) return;

#pragma unroll
    for (int m = 0; m < MT; m++) {
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float total = quad_sum(sum[m][half]);
            // Only a part of the keys can hold none that a row sees.
            inverse[half] = total == 0.0f ? 0.0f : 1.0f / total;
            const int row = first_row + m * 16 + lane / 4 + half * 8;
            if (lane % 4 == 0 && row < tile.rows) {
                const float lse = (top[m][half] + log2f(total)) * LN2;
                if (SPLIT)
                    p.partial_lse[static_cast<size_t>(block_head) * p.slots + tile.slot + row] = lse;
                else
                    p.lse[static_cast<size_t>(tile.token + row / pack) * form.heads + block_head * pack + row % pack] = lse;
            }
            if (SPLIT && row < tile.rows) {
                float* to = p.partial + (static_cast<size_t>(block_head) * p.slots + tile.slot + row) * size;
#pragma unroll
                for (int n = 0; n < OT; n++) {
                    if (n * 8 < size)
                        *reinterpret_cast<float2*>(to + n * 8 + lane % 4 * 2) =
                            make_float2(acc[m][n][2 * half] * inverse[half], acc[m][n][2 * half + 1] * inverse[half]);
                }
            }
        }
        if (!SPLIT) put_rows<E, OT>(sq, first_row + m * 16, 0, acc[m], inverse[0], inverse[1]);
    }
    if (SPLIT) return;
    // Through this warp's own rows of q, so that memory is written in whole chunks.
    __syncwarp();
    for (int i = lane; i < 16 * MT * OT; i += 32) {
        const int row = first_row + i / OT, chunk = i % OT;
        if (row < tile.rows && chunk * 8 < size)
            *reinterpret_cast<uint4*>(p.o + row_start(row) + chunk * 8) =
                *reinterpret_cast<const uint4*>(sq + spot<E>(row, chunk));
    }
}

/// Block: a tile of queries on a part of block `tile.other` of the cache, for the heads of one key head.
template <int E, int BN, class S>
__device__ __forceinline__ void cached(const bf16* q, float* partial, float* partial_lse, const KvBlock* blocks,
                                       const Tile* tiles, int slots, const Form& form) {
    const int heads = form.heads / form.pack, block_head = static_cast<int>(blockIdx.x) % heads;
    const int kv_head = block_head * form.pack / (form.heads / form.kv_heads);
    const Tile tile = tiles[blockIdx.x / heads];
    const KvBlock& block = blocks[tile.other];
    const Pointers p = {q, nullptr, nullptr, partial, partial_lse, slots};
    const Source<S> keys(block.keys, block.key_scales, kv_head, form);
    const Source<S> values(block.values, block.value_scales, kv_head, form);
    forward<E, 1, BN, true>(p, keys, values, tile, block_head, form);
}

}  // namespace attention

// Grid: tiles x H (cached: tiles x H / pack), the heads of a tile side by side. Shared memory: 2 E (64 MT + 2 BN) bytes.
#define FORWARD(E, MT, BN)                                                                                            \
    extern "C" __global__ void __launch_bounds__(128) attention_forward_##E(                                          \
        const ptx::Short* q, const ptx::Short* k, const ptx::Short* v, ptx::Short* o, float* lse,         \
        const attention::Tile* tiles, attention::Form form) {                                                        \
        using namespace attention;                                                                                    \
        const int head = static_cast<int>(blockIdx.x) % form.heads, kv_head = head / (form.heads / form.kv_heads);    \
        const Tile tile = tiles[blockIdx.x / form.heads];                                                             \
        const Pointers p = {q, o, lse, nullptr, nullptr, 0};                                                          \
        const Source<bf16> keys(k, static_cast<size_t>(tile.other), kv_head, form);                                   \
        const Source<bf16> values(v, static_cast<size_t>(tile.other), kv_head, form);                                 \
        forward<E, MT, BN, false>(p, keys, values, tile, head, form);                                                 \
    }

#define CACHED(E, BN, STORED, S)                                                                                      \
    extern "C" __global__ void __launch_bounds__(128) attention_cached_##STORED##_##E(                                \
        const ptx::Short* q, float* partial, float* partial_lse, const KvBlock* blocks,                            \
        const attention::Tile* tiles, int slots, attention::Form form) {                                             \
        attention::cached<E, BN, S>(q, partial, partial_lse, blocks, tiles, slots, form);                             \
    }

FORWARD(64, 2, 64)
FORWARD(96, 2, 32)
FORWARD(128, 2, 32)
FORWARD(256, 1, 32)
CACHED(64, 64, bf16, ptx::Short)
CACHED(96, 64, bf16, ptx::Short)
CACHED(128, 64, bf16, ptx::Short)
CACHED(256, 32, bf16, ptx::Short)
CACHED(64, 64, int8, signed char)
CACHED(96, 64, int8, signed char)
CACHED(128, 64, int8, signed char)
CACHED(256, 32, int8, signed char)

// Grid: tokens x (H / pack), 128 threads.
extern "C" __global__ void __launch_bounds__(128)
    attention_join(ptx::Short* o, float* lse, const float* partial, const float* partial_lse,
                   const attention::Join* joins, const int* starts, int slots, attention::Form form) {
    attention::join_parts(o, lse, partial, partial_lse, joins, starts, slots, form);
}
