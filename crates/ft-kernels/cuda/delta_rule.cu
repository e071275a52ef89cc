// Gated delta rule, forward: `prepare` computes for each chunk what does not depend on the state, then a block of the scan
// goes through the chunks of a document for one value head and SLICE columns of its state, which stays in registers, with
// a copy in shared memory. See delta_rule.cuh.
#include "delta_rule.cuh"

namespace delta {

// `pieces` [chunks, 2]: first token and tokens of a chunk; blockIdx.x counts them, blockIdx.y the value heads from
// `first_head` on. `prepared` [chunks, heads, PREPARED].
template <typename T>
__device__ __forceinline__ void prepare(
    const Inputs<T>& x, const u32* pieces, float* prepared, const Heads& h, int first_head, int heads) {
    DYNAMIC_SHARED(memory);
    __shared__ Decays d;
    __shared__ float inverse_q[C], inverse_k[C];
    float* q = reinterpret_cast<float*>(memory);
    float *k = q + C * WIDE, *a = k + C * WIDE;
    const i64 first = pieces[2 * blockIdx.x];
    const int n = pieces[2 * blockIdx.x + 1], head = first_head + blockIdx.y;
    const bool whole = in_fours(h, x.qkv, nullptr, nullptr);
    const float factor = 1.0f / sqrtf((float)h.key_dim);
    float* to = prepared + ((i64)blockIdx.x * heads + blockIdx.y) * PREPARED;
    Keys<T> of_q, of_k;
    const T* own = x.qkv + (first + own_row()) * h.width();
    of_q.fetch_row(own + h.q_at(head), own_row() < n, h.key_dim, whole);
    of_k.fetch_row(own + h.k_at(head), own_row() < n, h.key_dim, whole);
    const float length_q = of_q.inverse_length(), length_k = of_k.inverse_length();
    of_q.write(length_q * factor, q);
    of_k.write(length_k, k);
    if (own_lane() == 0) {
        inverse_q[own_row()] = length_q * factor;
        inverse_k[own_row()] = length_k;
    }
    d.fill(x, h.value_heads, head, first, n);
    const Cell cell;
    float products[4][4] = {}, squares[4][4] = {}, qk[4], kk[4], p[4];
    cell.along<true>(q, k, k, h.key_dim, products, squares);
    cell.gather(products, qk);
    cell.gather(squares, kk);
    const int i = cell.row();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int l = cell.columns + j;
        const float decay = l <= i ? d.between(i, l) : 0.0f;
        p[j] = qk[j] * decay;
        kk[j] *= l < i ? d.beta[i] * decay : 0.0f;
    }
    store<4>(to + LOWER + i * C + cell.columns, p);
    cell.write(kk, 1.0f, a);
    __syncthreads();
    const int t = threadIdx.x % C;
    if (threadIdx.x < C) {
        // (I + A) T = I; a thread has a column.
        float column[C];
#pragma unroll
        for (int row = 0; row < C; row++) {
            float sum = row == t ? 1.0f : 0.0f;
#pragma unroll
            for (int l = 0; l < row; l += 4) {
                float left[4];
                load<4>(a + row * NARROW + l, left);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (l + e < row) sum -= left[e] * column[l + e];
            }
            column[row] = sum;
            to[SOLUTION + row * C + t] = sum;
        }
    } else if (threadIdx.x < 2 * C) {
        to[BETA + t] = d.beta[t];
        to[OF_Q + t] = d.from_start[t] * inverse_q[t];
        to[OF_K + t] = d.from_start[t] * inverse_k[t];
        to[END_K + t] = d.to_end[t] * inverse_k[t];
        if (t == 0) to[DECAY] = d.whole;
    }
}

// `spans` [documents, 3]: start and end of a document, and its first chunk counted over all documents. `prepared` [chunks,
// heads, PREPARED]. `heads` value heads from `first_head` on are computed; blockIdx.x counts documents and these heads.
// Each of these pointers may be null:
// `before` and `after` [documents, V, P, Q]: the states before the first and after the last token of each document.
// o [N, V·Q]. `states` [chunks, heads, P, Q]: the states before the chunks; `deltas` [N, heads, Q].
template <typename T>
__device__ __forceinline__ void scan(
    const T* qkv, const u32* spans, const float* prepared, const float* before, float* after, T* o, float* states,
    float* deltas, const Heads& h, int first_head, int heads) {
    DYNAMIC_SHARED(memory);
    // Two of the last two: one of this chunk, one of the next.
    float* q = reinterpret_cast<float*>(memory);
    float *copy = q + C * WIDE, *k = copy + C * WIDE, *solution = k + 2 * C * WIDE, *right = solution + C * NARROW;
    float *delta = right + C * NARROW, *to_end = delta + C * NARROW, *p = to_end + C * NARROW;
    const int document = blockIdx.x / heads, local = blockIdx.x % heads, head = first_head + local;
    const u32* span = spans + 3 * document;
    const i64 start = span[0], end = span[1], width = h.width(), per_head = (i64)h.key_dim * h.value_dim;
    const bool whole = in_fours(h, qkv, o, before) && in_fours(h, qkv, nullptr, after);
    const Slice slice(h.value_dim);
    const Cell cell;
    const i64 own = ((i64)document * h.value_heads + head) * per_head;
    // T and P are transposed on their way to shared memory: lanes have neighboring rows.
    const int row = threadIdx.x % C, column = 4 * (threadIdx.x / C);
    const i64 q_at = h.q_at(head), k_at = h.k_at(head), v_at = h.v_at(head) + slice.first;
    Ahead<T> next;
    const auto fetch_next = [&](i64 first, i64 chunk) {
        const T* rows = qkv + first * width;
        const int n = end - first < C ? end - first : C;
        next.fetch_chunk(rows + own_row() * width, q_at, k_at, rows + v_at, width,
            prepared + (chunk * heads + local) * PREPARED, n, slice.count, h.key_dim, cell, row, column, whole);
    };
    const auto write_next = [&](int side) {
        next.q.write(1.0f, q);
        next.k.write(1.0f, k + side * C * WIDE);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            solution[(column + e) * NARROW + row] = next.solution.at(e);
            p[(side * C + column + e) * NARROW + row] = next.lower.at(e);
        }
    };
    State state;
    if (before) state.fetch_from(before + own, slice, h, whole);
    i64 chunk = span[2];
    if (start < end) {
        fetch_next(start, chunk);
        state.write(copy);
        write_next(0);
    }
    __syncthreads();
    int side = 0;
    for (i64 first = start; first < end; first += C, chunk++, side ^= 1) {
        const int i = cell.row(), there = first + i < end ? slice.count - cell.columns : 0;
        const bool more = first + C < end;
        const Four<T> v = next.row;
        const float beta = next.beta, of_q = next.of_q, of_k = next.of_k, end_k = next.end_k, decay = next.decay;
        if (more) fetch_next(first + C, chunk + 1);
        if (states) state.put_to(states + (chunk * heads + local) * per_head, slice, h, whole);
        float sum_q[4][4] = {}, sum_k[4][4] = {}, out[4], x[4], read[4];
        cell.along<true>(q, k + side * C * WIDE, copy, h.key_dim, sum_q, sum_k);
        cell.gather(sum_q, out);
        cell.gather(sum_k, read);
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = v.at(j) - of_k * read[j];
        cell.write(x, beta, right);
        __syncthreads();
        // (I + A) D = what is there.
        cell.across(solution, right, x);
        cell.write(x, 1.0f, delta);
        cell.write(x, end_k, to_end);
        if (deltas)
            put(deltas + ((first + i) * heads + local) * h.value_dim + slice.first + cell.columns, x, there, whole);
        __syncthreads();
        state.decay(decay);
        state.add(k + side * C * WIDE, to_end);
        state.write(copy);
        if (more) write_next(side ^ 1);
        if (o) {
            cell.across(p + side * C * NARROW, delta, x);
#pragma unroll
            for (int j = 0; j < 4; j++) x[j] += of_q * out[j];
            put(o + ((first + i) * h.value_heads + head) * h.value_dim + slice.first + cell.columns, x, there, whole);
        }
        __syncthreads();
    }
    if (after) state.put_to(after + own, slice, h, whole);
}

}  // namespace delta

#define DELTA_RULE(NAME, T)                                                                                         \
    extern "C" __global__ void __launch_bounds__(delta::THREADS, 2) delta_rule_prepare_##NAME(                        \
        const T* qkv, const T* a, const T* b, const float* a_log, const float* dt_bias, const u32* pieces,          \
        float* prepared, int key_heads, int value_heads, int key_dim, int value_dim, int first_head, int heads) {   \
        delta::prepare<T>({qkv, a, b, a_log, dt_bias}, pieces, prepared,                                            \
            {key_heads, value_heads, key_dim, value_dim}, first_head, heads);                                       \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(delta::THREADS, 1) delta_rule_forward_##NAME(                        \
        const T* qkv, const u32* spans, const float* prepared, const float* before, float* after, T* o,             \
        float* states, float* deltas, int key_heads, int value_heads, int key_dim, int value_dim, int first_head,   \
        int heads) {                                                                                                \
        delta::scan<T>(qkv, spans, prepared, before, after, o, states, deltas,                                      \
            {key_heads, value_heads, key_dim, value_dim}, first_head, heads);                                       \
    }

DELTA_RULE(f32, float)
DELTA_RULE(bf16, bf16)
