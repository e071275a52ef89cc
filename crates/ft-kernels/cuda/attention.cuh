// What the attention kernels share: the form of an attention, the tiles of work, rows in shared memory, products.
//
// Letters: H query heads, K key heads, E head size as compiled (64, 96, 128 or 256; `size` is the real one, the rest
// of a row is zero), q and o [Nq, H size], k and v [Nk, K size], lse and delta [Nq, H].
// Scores are kept times log2 e, so that every exponential is one ex2.
#pragma once

#include "mma.cuh"

namespace attention {

using bf16 = __nv_bfloat16;

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
/// Threads of a block of the bf16 kernels.
constexpr int THREADS = 128;

/// As `Form` of crates/ft-ops/src/cuda/attention.rs.
struct Form {
    int heads, kv_heads, size;
    /// Query i sees the keys j with i - window < j <= i.
    int window;
    float scale;
    /// 0: none.
    float cap;
    /// Query heads that share the rows of a tile (split forward pass; else 1).
    int pack;
    /// Parts into which the query heads of a key head are shared out (backward, keys).
    int parts;
};

/// Rows of a document that one block owns, and what it visits. Places count from the first key of the document.
struct __align__(16) Tile {
    /// First own token in the whole batch, and number of own rows (tokens times `pack`).
    int token, rows;
    /// Place of the first own token.
    int place;
    /// The token of the other side that stands at place 0.
    int other;
    /// Places of the other side to visit, `high` excluded.
    int low, high;
    /// First row in the partial results (split over keys only).
    int slot;
    int unused;
};

/// Where chunk `chunk` (8 elements, 16 bytes) of row `row` stands in a tile of rows of E elements, in elements. Eight
/// rows of the same chunk fall on eight different groups of banks. Tiles are aligned to 128 bytes.
template <int E>
__device__ __forceinline__ int spot(int row, int chunk) {
    const int turn = E % 64 == 0 ? row & 7 : (row >> 1) & 3;
    return row * E + (chunk ^ turn) * 8;
}

/// Addresses of `spot` for a fixed row and chunk, moved on by constants: a multiple of 8 rows and an even chunk.
template <int E>
struct Cursor {
    uint32_t start;
    __device__ __forceinline__ Cursor(const bf16* tile, int row, int chunk)
        : start(ptx::address(tile) + 2 * spot<E>(row, chunk)) {}
    __device__ __forceinline__ uint32_t at(int rows, int chunks) const {
        constexpr int TURNED = E % 64 == 0 ? 7 : 3;
        return (start ^ (chunks & TURNED) * 16) + (chunks & ~TURNED) * 16 + rows * E * 2;
    }
};

/// Which chunks a thread copies: `chunk` of the rows `row`, `row + PASS` and so on.
template <int E>
struct Copier {
    // Rows of one pass; with 12 chunks a row a quarter of the threads rests, so that passes stay alike.
    static constexpr int CHUNKS = E / 8, PASS = E == 96 ? 8 : THREADS / CHUNKS;
    int row, chunk;
    __device__ __forceinline__ Copier()
        : row(static_cast<int>(threadIdx.x) / CHUNKS), chunk(static_cast<int>(threadIdx.x) % CHUNKS) {}

    /// Starts the copies to a tile of ROWS rows, of which `given` exist; the rest is zero. `at`: the first own chunk,
    /// `stride`: elements between rows. Rows that do not exist are not read.
    template <int ROWS>
    __device__ __forceinline__ void copy(bf16* tile, const bf16* at, size_t stride, int given, int size) const {
        static_assert(ROWS % PASS == 0, "whole passes");
        if (PASS * CHUNKS < THREADS && row >= PASS) return;
        const uint32_t to = ptx::address(tile + spot<E>(row, chunk));
        const int last = chunk * 8 < size ? given - row : 0;
#pragma unroll
        for (int first = 0; first < ROWS; first += PASS) {
            // `spot` repeats after 8 rows.
            const uint32_t place =
                PASS % 8 == 0 ? to + 2 * E * first : ptx::address(tile + spot<E>(first + row, chunk));
            ptx::copy16(place, at, first < last);
            at += PASS * stride;
        }
    }
};

/// Starts copying ROWS rows, `stride` elements apart, of which `given` exist; the rest is zero.
template <int E, int ROWS>
__device__ __forceinline__ void load_rows(bf16* tile, const bf16* from, size_t stride, int given, int size) {
    const Copier<E> own;
    own.template copy<ROWS>(tile, from + own.row * stride + own.chunk * 8, stride, given, size);
}

/// acc[m] += rows `row + 16 m`.. of `a` times the transpose of the first 8 NT rows of `b`.
template <int E, int MT, int NT>
__device__ __forceinline__ void rows_by_rows(float (&acc)[MT][NT][4], const bf16* a, int row, const bf16* b) {
    const int lane = threadIdx.x % 32;
    const Cursor<E> left(a, row + (lane & 15), lane >> 4);
    const Cursor<E> right(b, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
#pragma unroll
    for (int k = 0; k < E / 16; k++) {
        uint32_t fa[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) ptx::ldmatrix(fa[m], left.at(m * 16, 2 * k));
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            uint32_t fb[4];
            ptx::ldmatrix(fb, right.at(n * 16, 2 * k));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                ptx::mma(acc[m][2 * n], fa[m], fb[0], fb[1]);
                ptx::mma(acc[m][2 * n + 1], fa[m], fb[2], fb[3]);
            }
        }
    }
}

/// 16 rows of `a` from `row` on, as left factors that stay in registers: each step reads only the right ones.
template <int E>
__device__ __forceinline__ void load_fragments(uint32_t (&fragments)[E / 16][4], const bf16* a, int row) {
    const int lane = threadIdx.x % 32;
    const Cursor<E> left(a, row + (lane & 15), lane >> 4);
#pragma unroll
    for (int k = 0; k < E / 16; k++) ptx::ldmatrix(fragments[k], left.at(0, 2 * k));
}

/// acc += the rows of `load_fragments` times the transpose of the first 8 NT rows of `b`.
template <int E, int NT>
__device__ __forceinline__ void fragments_by_rows(float (&acc)[NT][4], const uint32_t (&fragments)[E / 16][4], const bf16* b) {
    const int lane = threadIdx.x % 32;
    const Cursor<E> right(b, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
#pragma unroll
    for (int k = 0; k < E / 16; k++) {
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            uint32_t fb[4];
            ptx::ldmatrix(fb, right.at(n * 16, 2 * k));
            ptx::mma(acc[2 * n], fragments[k], fb[0], fb[1]);
            ptx::mma(acc[2 * n + 1], fragments[k], fb[2], fb[3]);
        }
    }
}

/// acc[m] += w[m] (16 x 16 KT) times 16 KT rows of `b`, of which the columns from chunk `chunk` on, 8 NT of them.
template <int E, int MT, int KT, int NT>
__device__ __forceinline__ void weights_by_rows(float (&acc)[MT][NT][4], const uint32_t (&w)[MT][KT][4], const bf16* b,
                                                int chunk) {
    const int lane = threadIdx.x % 32;
    const Cursor<E> right(b, lane & 15, chunk + (lane >> 4));
#pragma unroll
    for (int k = 0; k < KT; k++) {
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            uint32_t fb[4];
            ptx::ldmatrix_trans(fb, right.at(k * 16, 2 * n));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                ptx::mma(acc[m][2 * n], w[m][k], fb[0], fb[1]);
                ptx::mma(acc[m][2 * n + 1], w[m][k], fb[2], fb[3]);
            }
        }
    }
}

/// An accumulator (16 x 16 KT) as the left factor of the next product: the fragments already stand right.
template <int KT>
__device__ __forceinline__ void pack_weights(uint32_t (&w)[KT][4], const float (&acc)[2 * KT][4]) {
#pragma unroll
    for (int k = 0; k < KT; k++) {
        w[k][0] = ptx::pack(acc[2 * k][0], acc[2 * k][1]);
        w[k][1] = ptx::pack(acc[2 * k][2], acc[2 * k][3]);
        w[k][2] = ptx::pack(acc[2 * k + 1][0], acc[2 * k + 1][1]);
        w[k][3] = ptx::pack(acc[2 * k + 1][2], acc[2 * k + 1][3]);
    }
}

/// Puts an accumulator of 16 rows, times `first` (rows 0 to 7) and `second` (8 to 15), into a tile from chunk `chunk`.
template <int E, int NT>
__device__ __forceinline__ void put_rows(bf16* tile, int row, int chunk, const float (&acc)[NT][4], float first,
                                         float second) {
    const int lane = threadIdx.x % 32, own = row + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const uint32_t upper = ptx::pack(acc[n][0] * first, acc[n][1] * first);
        const uint32_t lower = ptx::pack(acc[n][2] * second, acc[n][3] * second);
        *reinterpret_cast<uint32_t*>(tile + spot<E>(own, chunk + n) + column) = upper;
        *reinterpret_cast<uint32_t*>(tile + spot<E>(own + 8, chunk + n) + column) = lower;
    }
}

/// From q·k to scores times log2 e, and back down for the gradient.
struct Scores {
    float factor, cap, to_tanh, from_tanh;
    __device__ __forceinline__ float rest() const { return cap == 0.0f ? factor : 1.0f; }
    __device__ __forceinline__ explicit Scores(const Form& form)
        : factor(form.scale * LOG2E),
          cap(form.cap * LOG2E),
          to_tanh(form.cap == 0.0f ? 0.0f : form.scale / form.cap * 2.0f * LOG2E),
          from_tanh(form.cap == 0.0f ? 0.0f : 1.0f / (form.cap * LOG2E)) {}

    template <int NT>
    __device__ __forceinline__ void apply(float (&s)[NT][4]) const {
        if (cap == 0.0f) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int c = 0; c < 4; c++) s[n][c] *= factor;
            }
        } else {
            apply_cap(s);
        }
    }

    /// As `apply`, without the factor if there is no cap: then the scores still have to be multiplied by `rest()`.
    template <int NT>
    __device__ __forceinline__ void apply_cap(float (&s)[NT][4]) const {
        if (cap != 0.0f) {
            // cap tanh(x). The absolute error of the tanh is about 1e-7, and differences of scores are what counts.
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float y = s[n][c] * to_tanh;
                    y = y > 40.0f ? 40.0f : y;
                    s[n][c] = cap * (1.0f - __fdividef(2.0f, ptx::exp2(y) + 1.0f));
                }
            }
        }
    }

    /// Multiplies ds by the derivative of the cap at the scores s that `apply` gave.
    template <int NT>
    __device__ __forceinline__ void slopes(float (&ds)[NT][4], const float (&s)[NT][4]) const {
        if (cap == 0.0f) return;
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float t = s[n][c] * from_tanh;
                ds[n][c] *= 1.0f - t * t;
            }
        }
    }
};

/// Sum or maximum over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace attention
