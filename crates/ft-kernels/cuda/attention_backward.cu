// Attention backward in bf16: dq, dk, dv from q, k, v, lse, dout and delta = rowsum(dout o).
// The probabilities are computed again from lse (FlashAttention-2, Dao 2023, arXiv 2307.08691, section 3.1.2), by two
// kernels that each own what they write: no atomics, every sum in one order, so the result is the same every time.
//
// `keys`: a block owns 64 keys and walks over the queries that see them, head after head of its part of the group.
// It makes S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are at once the left factors of dV += P^T dO and
// dK += dS^T Q. With several parts each leaves unrounded sums, which `attention_sum_parts` adds in their order.
// `queries`: a block owns 64 queries and walks over the keys they see: dQ += dS K.
// IN_REGISTERS: each warp keeps its 16 own rows (K and V, or Q and dO) in registers, and their shared memory becomes
// that of the staged rows. By count, a fifth to a quarter fewer bytes go through shared memory, and the shared memory of
// an SM suffices for two blocks on any GPU. Heads of 256 have no registers left for it.

#include "attention.cuh"

namespace attention {

struct Backward {
    const bf16 *q, *k, *v, *dout;
    const float *lse, *delta;
};

/// EO: columns of dk and dv that a block makes (the rest is another block's: registers are full at 128).
/// BM: queries of a stage.
template <int E, int EO, int BM, int STAGES, bool IN_REGISTERS>
__device__ __forceinline__ void keys(const Backward& p, bf16* dk, bf16* dv, float* partial_dk, float* partial_dv,
                                     int tokens, const Tile* tiles, const Form& form) {
    constexpr int BN = 64, NT = BM / 8, KT = BM / 16, OT = EO / 8, COLUMNS = E / EO;
    DYNAMIC_SHARED(memory);
    bf16* sk = reinterpret_cast<bf16*>(memory);
    bf16* sv = sk + BN * E;
    bf16* sq = IN_REGISTERS ? sk : sv + BN * E;
    bf16* sd = sq + STAGES * BM * E;
    float* stats = reinterpret_cast<float*>(sd + STAGES * BM * E);
    static_assert(!IN_REGISTERS || STAGES * BM >= BN, "own rows and staged rows take turns");

    const int lane = threadIdx.x % 32, own_row = static_cast<int>(threadIdx.x / 32) * 16;
    int at = blockIdx.x;
    const int chunk = at % COLUMNS * OT;
    at /= COLUMNS;
    const int part = at % form.parts;
    at /= form.parts;
    const int kv_head = at % form.kv_heads;
    const Tile tile = tiles[at / form.kv_heads];
    const int size = form.size, group = form.heads / form.kv_heads, heads = group / form.parts;
    const int first_head = kv_head * group + part * heads;
    const size_t q_stride = static_cast<size_t>(form.heads) * size;
    const size_t k_stride = static_cast<size_t>(form.kv_heads) * size;

    const int steps = (tile.high - tile.low + BM - 1) / BM, all_steps = steps * heads;
    // The next copy: its query, and that row of lse and delta (the host checks that their size fits in 32 bits).
    const Copier<E> copier;
    int next = tile.low;
    uint32_t row = (tile.other + tile.low) * form.heads + first_head;
    auto load = [&](int step) {
        const int stage = step % STAGES, given = tile.high - next;
        const size_t from = static_cast<size_t>(row + copier.row * form.heads) * size + copier.chunk * 8;
        copier.template copy<BM>(sq + stage * BM * E, p.q + from, q_stride, given, size);
        copier.template copy<BM>(sd + stage * BM * E, p.dout + from, q_stride, given, size);
        if (threadIdx.x < 2 * BM) {
            const int stat_row = static_cast<int>(threadIdx.x) % BM;
            ptx::copy4(ptx::address(stats + stage * 2 * BM + threadIdx.x),
                       (threadIdx.x < BM ? p.lse : p.delta) + (row + stat_row * form.heads), stat_row < given);
        }
        next += BM;
        row += BM * form.heads;
        if (next >= tile.high) {
            // The first query of the next head.
            next = tile.low;
            row += 1 - steps * BM * form.heads;
        }
    };
    const size_t own = tile.token * k_stride + static_cast<size_t>(kv_head) * size;
    load_rows<E, BN>(sk, p.k + own, k_stride, tile.rows, size);
    load_rows<E, BN>(sv, p.v + own, k_stride, tile.rows, size);

    uint32_t k_fragments[IN_REGISTERS ? E / 16 : 1][4], v_fragments[IN_REGISTERS ? E / 16 : 1][4];
    if constexpr (IN_REGISTERS) {
        ptx::commit();
        ptx::wait<0>();
        __syncthreads();
        load_fragments<E>(k_fragments, sk, own_row);
        load_fragments<E>(v_fragments, sv, own_row);
        __syncthreads();
    }
    float acc_k[1][OT][4] = {}, acc_v[1][OT][4] = {};
    const Scores scores(form);
    const float rest = scores.rest();
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < all_steps) load(step);
        ptx::commit();
    }
    for (int step = 0, query = tile.low; step < all_steps; step++) {
        if (STAGES == 1) {
            __syncthreads();
            load(step);
            ptx::commit();
        }
        ptx::wait<(STAGES > 1 ? STAGES - 2 : 0)>();
        // The copies of every thread are complete, and no thread reads the previous stage, which is filled next.
        __syncthreads();
        if (STAGES > 1) {
            if (step + STAGES - 1 < all_steps) load(step + STAGES - 1);
            ptx::commit();
        }
        const int stage = step % STAGES;
        const bf16 *tq = sq + stage * BM * E, *td = sd + stage * BM * E;
        const float* stat = stats + stage * 2 * BM;
        uint32_t wp[1][KT][4], ws[1][KT][4];
        {
            // dP - delta: the sum begins with -delta.
            float s[1][NT][4] = {}, ds[1][NT][4];
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int c = 0; c < 4; c++) ds[0][n][c] = -stat[BM + n * 8 + lane % 4 * 2 + c % 2];
            }
            if constexpr (IN_REGISTERS) {
                fragments_by_rows<E, NT>(s[0], k_fragments, tq);
                fragments_by_rows<E, NT>(ds[0], v_fragments, td);
            } else {
                rows_by_rows<E, 1, NT>(s, sk, own_row, tq);
                rows_by_rows<E, 1, NT>(ds, sv, own_row, td);
            }
            const int key = tile.place + own_row + lane / 4;
            const bool masked = query < tile.place + own_row + 15 || query + BM > tile.high ||
                                query + BM - 1 >= tile.place + own_row + form.window;
            scores.apply_cap(s[0]);
            scores.slopes(ds[0], s[0]);
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    s[0][n][c] = ptx::exp2(s[0][n][c] * rest - stat[n * 8 + lane % 4 * 2 + c % 2] * LOG2E);
                    ds[0][n][c] *= s[0][n][c];
                }
            }
            if (masked) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const int i = query + n * 8 + lane % 4 * 2 + c % 2, j = key + c / 2 * 8;
                        if (j > i || i >= tile.high || i - j >= form.window) s[0][n][c] = ds[0][n][c] = 0.0f;
                    }
                }
            }
            pack_weights<KT>(wp[0], s[0]);
            pack_weights<KT>(ws[0], ds[0]);
        }
        weights_by_rows<E, 1, KT, OT>(acc_v, wp, td, chunk);
        weights_by_rows<E, 1, KT, OT>(acc_k, ws, tq, chunk);
        query += BM;
        if (query >= tile.high) query = tile.low;
    }
    // Other warps may still read the rows that this one overwrites.
    ptx::wait<0>();
    __syncthreads();

    if (form.parts > 1) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = own_row + lane / 4 + half * 8;
            if (row >= tile.rows) continue;
            const size_t to = (static_cast<size_t>(part) * tokens + tile.token + row) * k_stride +
                              static_cast<size_t>(kv_head) * size + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < OT; n++) {
                if ((chunk + n) * 8 >= size) continue;
                *reinterpret_cast<float2*>(partial_dk + to + (chunk + n) * 8) =
                    make_float2(acc_k[0][n][2 * half] * form.scale, acc_k[0][n][2 * half + 1] * form.scale);
                *reinterpret_cast<float2*>(partial_dv + to + (chunk + n) * 8) =
                    make_float2(acc_v[0][n][2 * half], acc_v[0][n][2 * half + 1]);
            }
        }
        return;
    }
    // Through this warp's own rows of k and v, so that memory is written in whole chunks.
    put_rows<E, OT>(sk, own_row, chunk, acc_k[0], form.scale, form.scale);
    put_rows<E, OT>(sv, own_row, chunk, acc_v[0], 1.0f, 1.0f);
    __syncwarp();
    for (int i = lane; i < 16 * OT; i += 32) {
        const int row = own_row + i / OT, c = chunk + i % OT;
        if (row >= tile.rows || c * 8 >= size) continue;
        const size_t to = own + row * k_stride + c * 8;
        *reinterpret_cast<uint4*>(dk + to) = *reinterpret_cast<const uint4*>(sk + spot<E>(row, c));
        *reinterpret_cast<uint4*>(dv + to) = *reinterpret_cast<const uint4*>(sv + spot<E>(row, c));
    }
}

template <int E, int BN, int STAGES, bool IN_REGISTERS>
__device__ __forceinline__ void queries(const Backward& p, bf16* dq, const Tile* tiles, const Form& form) {
    constexpr int BM = 64, NT = BN / 8, KT = BN / 16, OT = E / 8;
    DYNAMIC_SHARED(memory);
    bf16* sq = reinterpret_cast<bf16*>(memory);
    bf16* sd = sq + BM * E;
    bf16* sk = IN_REGISTERS ? sq : sd + BM * E;
    bf16* sv = sk + STAGES * BN * E;
    static_assert(!IN_REGISTERS || STAGES * BN >= BM, "own rows and staged rows take turns");

    const int lane = threadIdx.x % 32, own_row = static_cast<int>(threadIdx.x / 32) * 16;
    const int head = static_cast<int>(blockIdx.x) % form.heads, kv_head = head / (form.heads / form.kv_heads);
    const Tile tile = tiles[blockIdx.x / form.heads];
    const int size = form.size;
    const size_t q_stride = static_cast<size_t>(form.heads) * size;
    const size_t k_stride = static_cast<size_t>(form.kv_heads) * size;
    const size_t own = tile.token * q_stride + static_cast<size_t>(head) * size;
    const size_t others = tile.other * k_stride + static_cast<size_t>(kv_head) * size;
    auto load = [&](int step) {
        const int stage = step % STAGES, key = tile.low + step * BN;
        load_rows<E, BN>(sk + stage * BN * E, p.k + others + key * k_stride, k_stride, tile.high - key, size);
        load_rows<E, BN>(sv + stage * BN * E, p.v + others + key * k_stride, k_stride, tile.high - key, size);
    };
    load_rows<E, BM>(sq, p.q + own, q_stride, tile.rows, size);
    load_rows<E, BM>(sd, p.dout + own, q_stride, tile.rows, size);

    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = own_row + lane / 4 + half * 8;
        const size_t from = (static_cast<size_t>(tile.token) + row) * form.heads + head;
        lse[half] = row < tile.rows ? p.lse[from] * LOG2E : 0.0f;
        delta[half] = row < tile.rows ? p.delta[from] : 0.0f;
    }
    uint32_t q_fragments[IN_REGISTERS ? E / 16 : 1][4], d_fragments[IN_REGISTERS ? E / 16 : 1][4];
    if constexpr (IN_REGISTERS) {
        ptx::commit();
        ptx::wait<0>();
        __syncthreads();
        load_fragments<E>(q_fragments, sq, own_row);
        load_fragments<E>(d_fragments, sd, own_row);
        __syncthreads();
    }
    float acc[1][OT][4] = {};
    const Scores scores(form);
    const float rest = scores.rest();
    const int steps = (tile.high - tile.low + BN - 1) / BN;
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) load(step);
        ptx::commit();
    }
    for (int step = 0; step < steps; step++) {
        if (STAGES == 1) {
            __syncthreads();
            load(step);
            ptx::commit();
        }
        ptx::wait<(STAGES > 1 ? STAGES - 2 : 0)>();
        // As in `keys`.
        __syncthreads();
        if (STAGES > 1) {
            if (step + STAGES - 1 < steps) load(step + STAGES - 1);
            ptx::commit();
        }
        const int key = tile.low + step * BN;
        const bf16 *tk = sk + step % STAGES * BN * E, *tv = sv + step % STAGES * BN * E;
        uint32_t w[1][KT][4];
        if (own_row < tile.rows) {
            float s[1][NT][4] = {}, ds[1][NT][4];
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int c = 0; c < 4; c++) ds[0][n][c] = -delta[c / 2];
            }
            if constexpr (IN_REGISTERS) {
                fragments_by_rows<E, NT>(s[0], q_fragments, tk);
                fragments_by_rows<E, NT>(ds[0], d_fragments, tv);
            } else {
                rows_by_rows<E, 1, NT>(s, sq, own_row, tk);
                rows_by_rows<E, 1, NT>(ds, sd, own_row, tv);
            }
            const int query = tile.place + own_row + lane / 4;
            const bool masked = key + BN - 1 > tile.place + own_row || key + BN > tile.high ||
                                tile.place + own_row + 15 - key >= form.window;
            scores.apply_cap(s[0]);
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int c = 0; c < 4; c++) ds[0][n][c] *= ptx::exp2(s[0][n][c] * rest - lse[c / 2]);
            }
            scores.slopes(ds[0], s[0]);
            if (masked) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const int j = key + n * 8 + lane % 4 * 2 + c % 2, i = query + c / 2 * 8;
                        if (j > i || j >= tile.high || i - j >= form.window) ds[0][n][c] = 0.0f;
                    }
                }
            }
            pack_weights<KT>(w[0], ds[0]);
            weights_by_rows<E, 1, KT, OT>(acc, w, tk, 0);
        }
    }
    ptx::wait<0>();
    __syncthreads();

    put_rows<E, OT>(sq, own_row, 0, acc[0], form.scale, form.scale);
    __syncwarp();
    for (int i = lane; i < 16 * OT; i += 32) {
        const int row = own_row + i / OT, c = i % OT;
        if (row < tile.rows && c * 8 < size)
            *reinterpret_cast<uint4*>(dq + own + row * q_stride + c * 8) =
                *reinterpret_cast<const uint4*>(sq + spot<E>(row, c));
    }
}

}  // namespace attention

// delta [N, H] = sum over a head of dout o; a warp for a row of `size` elements, `rows` = N H. 128 threads.
extern "C" __global__ void __launch_bounds__(128)
    attention_delta(float* delta, const ptx::Short* o, const ptx::Short* dout, long long rows, int size) {
    const long long row = static_cast<long long>(blockIdx.x) * 4 + threadIdx.x / 32;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int at = threadIdx.x % 32 * 2; at < size; at += 64) {
        const float2 a = ptx::widened(*reinterpret_cast<const ptx::Short2*>(o + row * size + at));
        const float2 b = ptx::widened(*reinterpret_cast<const ptx::Short2*>(dout + row * size + at));
        sum += a.x * b.x + a.y * b.y;
    }
    for (int with = 16; with > 0; with /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, with);
    if (threadIdx.x % 32 == 0) delta[row] = sum;
}

// Grid: tiles x K x parts x (E / EO). Shared memory: 4 E STAGES BM + 8 STAGES BM bytes, and 256 E if not IN_REGISTERS.
// BLOCKS: at least this many blocks fit on an SM.
#define KEYS(E, EO, BM, STAGES, IN_REGISTERS, BLOCKS)                                                              \
    extern "C" __global__ void __launch_bounds__(128, BLOCKS) attention_keys_##E(                                  \
        const ptx::Short* q, const ptx::Short* k, const ptx::Short* v, const ptx::Short* dout,         \
        const float* lse, const float* delta, ptx::Short* dk, ptx::Short* dv, float* partial_dk,             \
        float* partial_dv, int tokens, const attention::Tile* tiles, attention::Form form) {                       \
        const attention::Backward p = {q, k, v, dout, lse, delta};                                                 \
        attention::keys<E, EO, BM, STAGES, IN_REGISTERS>(p, dk, dv, partial_dk, partial_dv, tokens, tiles, form);  \
    }

// Grid: tiles x H. Shared memory: 4 E STAGES BN bytes, and 256 E if not IN_REGISTERS.
#define QUERIES(E, BN, STAGES, IN_REGISTERS, BLOCKS)                                                               \
    extern "C" __global__ void __launch_bounds__(128, BLOCKS) attention_queries_##E(                               \
        const ptx::Short* q, const ptx::Short* k, const ptx::Short* v, const ptx::Short* dout,         \
        const float* lse, const float* delta, ptx::Short* dq, const attention::Tile* tiles,                     \
        attention::Form form) {                                                                                    \
        const attention::Backward p = {q, k, v, dout, lse, delta};                                                 \
        attention::queries<E, BN, STAGES, IN_REGISTERS>(p, dq, tiles, form);                                       \
    }

KEYS(64, 64, 32, 2, true, 2)
KEYS(96, 96, 32, 2, true, 2)
KEYS(128, 128, 16, 4, true, 2)
KEYS(256, 128, 32, 1, false, 1)
QUERIES(64, 32, 2, true, 3)
QUERIES(96, 32, 2, true, 2)
QUERIES(128, 32, 2, true, 2)
QUERIES(256, 32, 1, false, 1)


// to[i] = sum over the parts of partial[part n + i], in their order.
extern "C" __global__ void __launch_bounds__(256)
    attention_sum_parts(ptx::Short* to, const float* partial, long long n, int parts) {
    const long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (i >= n) return;
    float sum = 0.0f;
    for (int part = 0; part < parts; part++) sum += partial[part * n + i];
    to[i] = ptx::narrowed(sum);
}
