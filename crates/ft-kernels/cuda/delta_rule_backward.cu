// Gated delta rule, backward, in three launches after the forward scan has kept states and deltas: `scan` goes back
// through the chunks of a document (gradients of the states, of the right sides of the triangular systems and of v),
// `chunk` computes the other gradients for each chunk and key head, `gates` those of a, A_log and dt_bias. See
// delta_rule.cuh; crates/ft-ops/src/cpu/delta_rule_backward.rs has the same terms.
#include "delta_rule.cuh"

namespace delta {

// `d_states` [chunks, heads, P, Q]: the gradients of the states after the chunks. `d_right` [N, heads, Q]: of the right
// sides, before β. `prepared`, spans, heads and blocks as in delta_rule.cu.
template <typename T>
__device__ __forceinline__ void scan(
    const T* qkv, const u32* spans, const float* prepared, const T* d_o, float* d_states, float* d_right, T* d_qkv,
    const Heads& h, int first_head, int heads) {
    DYNAMIC_SHARED(memory);
    // Two of the second: one of this chunk, one of the next.
    float* q = reinterpret_cast<float*>(memory);
    float *k = q + C * WIDE, *copy = k + 2 * C * WIDE, *solution = copy + C * WIDE, *p = solution + C * NARROW;
    float *out = p + C * NARROW, *of_out = out + C * NARROW, *right = of_out + C * NARROW, *of_right = right + C * NARROW;
    const int document = blockIdx.x / heads, local = blockIdx.x % heads, head = first_head + local;
    const u32* span = spans + 3 * document;
    const i64 start = span[0], end = span[1], width = h.width(), per_head = (i64)h.key_dim * h.value_dim;
    const i64 outputs = (i64)h.value_heads * h.value_dim, chunks = (end - start + C - 1) / C;
    const bool whole = in_fours(h, qkv, d_o, nullptr) && in_fours(h, qkv, d_qkv, nullptr);
    const Slice slice(h.value_dim);
    const Cell cell;
    const int row = own_row(), column = 4 * own_lane();
    const i64 q_at = h.q_at(head), k_at = h.k_at(head), v_at = h.v_at(head) + slice.first, first_chunk = span[2];
    const i64 o_at = (i64)head * h.value_dim + slice.first;
    Ahead<T> next;
    const auto fetch_next = [&](i64 c) {
        const i64 first = start + c * C;
        const int n = end - first < C ? end - first : C;
        next.fetch_chunk(qkv + (first + own_row()) * width, q_at, k_at, d_o + first * outputs + o_at, outputs,
            prepared + ((first_chunk + c) * heads + local) * PREPARED, n, slice.count, h.key_dim, cell, row, column, whole);
    };
    const auto write_next = [&](int side) {
        next.q.write(1.0f, q);
        next.k.write(1.0f, k + side * C * WIDE);
        next.solution.write(solution + row * NARROW + column);
        next.lower.write(p + row * NARROW + column);
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = next.row.at(j);
        cell.write(x, 1.0f, out);
        cell.write(x, next.of_q, of_out);
    };
    State state;
    if (chunks > 0) {
        fetch_next(chunks - 1);
        state.write(copy);
        write_next(0);
    }
    __syncthreads();
    int side = 0;
    for (i64 c = chunks - 1; c >= 0; c--, side ^= 1) {
        const i64 token = start + c * C + cell.row();
        const int there = token < end ? slice.count - cell.columns : 0;
        const float beta = next.beta, of_k = next.of_k, end_k = next.end_k, decay = next.decay;
        if (c > 0) fetch_next(c - 1);
        state.put_to(d_states + ((first_chunk + c) * heads + local) * per_head, slice, h, whole);
        float sum[4][4] = {}, read[4], x[4];
        cell.along<false>(k + side * C * WIDE, nullptr, copy, h.key_dim, sum, sum);
        cell.gather(sum, read);
        cell.across(p, out, x);
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] += end_k * read[j];
        cell.write(x, 1.0f, right);
        state.decay(decay);
        state.add(q, of_out);
        __syncthreads();
        // (I + A)ᵀ X = what is there.
        cell.across(solution, right, x);
        cell.write(x, -beta * of_k, of_right);
        put(d_right + (token * heads + local) * h.value_dim + slice.first + cell.columns, x, there, whole);
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] *= beta;
        put(d_qkv + token * width + v_at + cell.columns, x, there, whole);
        __syncthreads();
        state.add(k + side * C * WIDE, of_right);
        state.write(copy);
        if (c > 0) write_next(side ^ 1);
        __syncthreads();
    }
}

// Columns of a state that a block of `chunk` has at once, the distance of the rows of such a tile, and that of the rows of
// its triangles.
constexpr int TILE = 16, NEXT = TILE + 4, PITCH = C + 4;
// Numbers of shared memory of `chunk`.
constexpr int CHUNK = 2 * C * WIDE + (2 * KEY + 3 * C) * NEXT;

// The part that a thread has of a tile, on its way from global to shared memory: of two rows of the states, and of a row
// of do and the deltas (threads of the first half) or of v and the right sides.
template <typename T>
struct Tile {
    static constexpr int ROWS = 4 * KEY / THREADS;
    Four<float> state[ROWS], d_state[ROWS], kept;
    Four<T> given;

    __device__ __forceinline__ static int column() { return 4 * (threadIdx.x % 4); }
    __device__ __forceinline__ static int token() { return threadIdx.x % (THREADS / 2) / 4; }
    __device__ __forceinline__ static bool second() { return threadIdx.x >= THREADS / 2; }
};

// The part that a thread has of a product [C, P]: 4 tokens and 4 elements of a key, as in `State`.
struct Patch {
    int token, first;
    __device__ __forceinline__ Patch() {
        const State place;
        token = place.columns;
        first = place.first;
    }

    // Writes the sums over the elements to `to` [4, C], in four parts.
    __device__ __forceinline__ void dots(const float (&x)[4][4], const float* rows, float* to) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float row[4], dot = 0;
            load<4>(rows + (token + i) * WIDE + first, row);
#pragma unroll
            for (int e = 0; e < 4; e++) dot += x[i][e] * row[e];
#pragma unroll
            for (int step = 2; step <= 8; step *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
            if ((lane & 14) == 0) to[threadIdx.x / 32 % 4 * C + token + i] = dot;
        }
    }
};

__device__ __forceinline__ float of_parts(const float* parts, int i) {
    return (parts[i] + parts[C + i]) + (parts[2 * C + i] + parts[3 * C + i]);
}

// `pieces` [chunks, 2]: first token and tokens of a chunk; blockIdx.x counts them, blockIdx.y the key heads of
// the `heads` value heads from `first_head` on. Writes q and k of `d_qkv`, the gradients of g [N, V] and of b.
template <typename T>
__device__ __forceinline__ void chunk(
    const Inputs<T>& x, const u32* pieces, const T* d_o, const float* states, const float* d_states,
    const float* deltas, const float* d_right, T* d_qkv, float* d_g, T* d_b, const Heads& h, int first_head, int heads) {
    DYNAMIC_SHARED(memory);
    __shared__ Decays d;
    __shared__ double shared[32];
    __shared__ float inverse_q[C], inverse_k[C], along_v[C];
    // Sums over elements of a key in four parts, over the columns of triangles in two, over their rows in four.
    __shared__ float along_q[4 * C], along_k[4 * C], along_read[4 * C], by_row[2 * C], steps[2 * C], by_column[4 * C];
    float* q = reinterpret_cast<float*>(memory);
    float* k = q + C * WIDE;
    // A tile of states and rows; after the tiles, triangles in the same place. The rows of the states are ordered so that
    // those of half a warp are in different banks.
    float* tile = k + C * WIDE;
    float *state = tile, *d_state = state + KEY * NEXT, *out = d_state + KEY * NEXT;
    float *delta = out + C * NEXT, *right = delta + C * NEXT;
    float *p_right = tile, *p_left = p_right + C * PITCH, *a_both = p_left + C * PITCH;
    const int size = h.key_dim;
    const i64 first = pieces[2 * blockIdx.x], width = h.width(), per_head = (i64)size * h.value_dim;
    const int n = pieces[2 * blockIdx.x + 1], key_head = first_head / h.group() + blockIdx.y;
    const bool whole = in_fours(h, x.qkv, d_o, states) && in_fours(h, x.qkv, d_qkv, d_states) &&
        in_fours(h, x.qkv, nullptr, deltas) && in_fours(h, x.qkv, nullptr, d_right);
    const T* rows = x.qkv + first * width;
    const float factor = 1.0f / sqrtf((float)size);
    const i64 q_at = h.q_at(key_head * h.group()), k_at = h.k_at(key_head * h.group());
    const Cell cell;
    const Patch patch;
    const int i = cell.row(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    {
        Keys<T> of_q, of_k;
        const T* own = rows + own_row() * width;
        of_q.fetch_row(own + q_at, own_row() < n, size, whole);
        of_k.fetch_row(own + k_at, own_row() < n, size, whole);
        const float length_q = of_q.inverse_length(), length_k = of_k.inverse_length();
        of_q.write(length_q * factor, q);
        of_k.write(length_k, k);
        if (own_lane() == 0) {
            inverse_q[own_row()] = length_q;
            inverse_k[own_row()] = length_k;
        }
    }
    __syncthreads();
    float kk[4], qk[4];
    {
        float products[4][4] = {}, squares[4][4] = {};
        cell.along<true>(q, k, k, size, products, squares);
        cell.gather(products, qk);
        cell.gather(squares, kk);
    }
    float total_q[4][4] = {}, total_k[4][4] = {};
    for (int head = key_head * h.group(); head < (key_head + 1) * h.group(); head++) {
        const int local = head - first_head;
        const i64 own = ((i64)blockIdx.x * heads + local) * per_head;
        Tile<T> next;
        const auto fetch_tile = [&](int start) {
            const int column = start + Tile<T>::column(), token = Tile<T>::token();
#pragma unroll
            for (int r = 0; r < Tile<T>::ROWS; r++) {
                const int e = threadIdx.x / 4 + r * (THREADS / 4), there = e < size ? h.value_dim - column : 0;
                const i64 from = own + (i64)e * h.value_dim + column;
                next.state[r] = fetch(states + from, there, whole);
                next.d_state[r] = fetch(d_states + from, there, whole);
            }
            const int there = token < n ? h.value_dim - column : 0;
            const i64 kept = ((first + token) * heads + local) * h.value_dim + column;
            next.kept = fetch((Tile<T>::second() ? d_right : deltas) + kept, there, whole);
            next.given = fetch(
                Tile<T>::second() ? rows + token * width + h.v_at(head) + column
                                  : d_o + ((first + token) * h.value_heads + head) * h.value_dim + column,
                there, whole);
        };
        fetch_tile(0);
        d.fill(x, h.value_heads, head, first, n);
        // Sums over the columns: dO Sᵀ, D dS'ᵀ and dR Sᵀ [C, P], dO Dᵀ and dR Dᵀ [C, C].
        float by_o[4][4] = {}, by_delta[4][4] = {}, by_right[4][4] = {}, x_p[4] = {}, x_a[4] = {}, dot_v = 0;
        double dot_states = 0;
        for (int start = 0; start < h.value_dim; start += TILE) {
#pragma unroll
            for (int r = 0; r < Tile<T>::ROWS; r++) {
                const int e = threadIdx.x / 4 + r * (THREADS / 4), at = (e % 4 * 32 + e / 4) * NEXT + Tile<T>::column();
                next.state[r].write(state + at);
                next.d_state[r].write(d_state + at);
                float dot = 0;
#pragma unroll
                for (int j = 0; j < 4; j++) dot += next.state[r].at(j) * next.d_state[r].at(j);
                dot_states += dot;
            }
            const int at = Tile<T>::token() * NEXT + Tile<T>::column();
            if (Tile<T>::second()) {
                next.kept.write(right + at);
#pragma unroll
                for (int j = 0; j < 4; j++) dot_v += next.kept.at(j) * next.given.at(j);
            } else {
                next.kept.write(delta + at);
                next.given.write(out + at);
            }
            __syncthreads();
            if (start + TILE < h.value_dim) fetch_tile(start + TILE);
#pragma unroll 1
            for (int j = 0; j < TILE; j += 4) {
                float wide[4][4], row[4], other[4];
#pragma unroll
                for (int e = 0; e < 4; e++) load<4>(state + (e * 32 + patch.first / 4) * NEXT + j, wide[e]);
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    load<4>(out + (patch.token + t) * NEXT + j, row);
                    load<4>(right + (patch.token + t) * NEXT + j, other);
#pragma unroll
                    for (int e = 0; e < 4; e++)
#pragma unroll
                        for (int y = 0; y < 4; y++) {
                            by_o[t][e] += row[y] * wide[e][y];
                            by_right[t][e] += other[y] * wide[e][y];
                        }
                }
#pragma unroll
                for (int e = 0; e < 4; e++) load<4>(d_state + (e * 32 + patch.first / 4) * NEXT + j, wide[e]);
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    load<4>(delta + (patch.token + t) * NEXT + j, row);
#pragma unroll
                    for (int e = 0; e < 4; e++)
#pragma unroll
                        for (int y = 0; y < 4; y++) by_delta[t][e] += row[y] * wide[e][y];
                }
                load<4>(out + i * NEXT + j, row);
                load<4>(right + i * NEXT + j, other);
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    load<4>(delta + (cell.columns + l) * NEXT + j, wide[l]);
#pragma unroll
                    for (int y = 0; y < 4; y++) {
                        x_p[l] += row[y] * wide[l][y];
                        x_a[l] += other[y] * wide[l][y];
                    }
                }
            }
            __syncthreads();
        }
        patch.dots(by_o, q, along_q);
        patch.dots(by_delta, k, along_k);
        patch.dots(by_right, k, along_read);
        dot_v = lane_sum<4>(dot_v);
        if (Tile<T>::second() && threadIdx.x % 4 == 0) along_v[Tile<T>::token()] = dot_v;
        float row_sum = 0, row_step = 0, column_sum[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int l = cell.columns + j;
            const float decay = l <= i ? d.between(i, l) : 0.0f, strict = l < i ? decay : 0.0f;
            const float sum_p = x_p[j] * (qk[j] * strict), sum_a = x_a[j] * (kk[j] * strict);
            row_sum += sum_p - d.beta[i] * sum_a;
            row_step += sum_a;
            column_sum[j] = d.beta[i] * sum_a - sum_p;
            const float of_p = x_p[j] * decay, of_a = -d.beta[i] * x_a[j] * strict;
            p_right[l * PITCH + i] = of_p;
            p_left[i * PITCH + l] = of_p;
            if (l <= i) {
                a_both[i * PITCH + l] = of_a;
                a_both[l * PITCH + i] = of_a;
            }
#pragma unroll
            for (int step = 2; step <= 8; step *= 2) column_sum[j] += __shfl_xor_sync(0xffffffffu, column_sum[j], step);
            if ((lane & 14) == 0) by_column[warp % 4 * C + l] = column_sum[j];
        }
#pragma unroll
        for (int step = 1; step <= 16; step *= 16) {
            row_sum += __shfl_xor_sync(0xffffffffu, row_sum, step);
            row_step += __shfl_xor_sync(0xffffffffu, row_step, step);
        }
        if ((lane & 17) == 0) {
            by_row[warp / 4 * C + i] = row_sum;
            steps[warp / 4 * C + i] = row_step;
        }
        // Has a barrier after the writes above.
        dot_states = block_sum(dot_states, shared);
        if (threadIdx.x < C) {
            const int t = threadIdx.x;
            const double beta = d.beta[t], start = d.from_start[t], of_end = (double)d.to_end[t] * of_parts(along_k, t);
            const double read = start * of_parts(along_read, t);
            double sum = start * of_parts(along_q, t) - of_end - beta * read;
            sum += (double)by_row[t] + by_row[C + t] + of_parts(by_column, t);
            const double step = along_v[t] - read - steps[t] - steps[C + t];
            // From the last token on.
            if (t >= n) sum = 0;
#pragma unroll
            for (int by = 1; by < C; by *= 2) {
                const double later = __shfl_down_sync(0xffffffffu, sum, by);
                if (t + by < C) sum += later;
            }
            sum += d.whole * dot_states + lane_sum<32>(t < n ? of_end : 0.0);
            if (t < n) {
                const i64 at = (first + t) * h.value_heads + head;
                narrow((float)(step * beta * (1.0 - beta)), d_b[at]);
                d_g[at] = (float)sum;
            }
        }
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const int token = patch.token + t;
            const float of_read = -d.beta[token] * d.from_start[token];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                total_q[t][e] += d.from_start[token] * by_o[t][e];
                total_k[t][e] += d.to_end[token] * by_delta[t][e] + of_read * by_right[t][e];
            }
        }
#pragma unroll 2
        for (int l = 0; l < C; l++) {
            float of_p[4], from_p[4], of_a[4], of_k[4], of_q[4];
            load<4>(p_right + l * PITCH + patch.token, of_p);
            load<4>(p_left + l * PITCH + patch.token, from_p);
            load<4>(a_both + l * PITCH + patch.token, of_a);
            load<4>(k + l * WIDE + patch.first, of_k);
            load<4>(q + l * WIDE + patch.first, of_q);
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    total_q[t][e] += of_p[t] * of_k[e];
                    total_k[t][e] += from_p[t] * of_q[e] + of_a[t] * of_k[e];
                }
        }
        __syncthreads();
    }
    // The gradients of the rows before their lengths were set.
    patch.dots(total_q, q, along_q);
    patch.dots(total_k, k, along_k);
    __syncthreads();
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const int token = patch.token + t, there = token < n ? size - patch.first : 0;
        float unit[4], gradient[4];
        T* to = d_qkv + (first + token) * width + patch.first;
        load<4>(q + token * WIDE + patch.first, unit);
        const float dot_q = of_parts(along_q, token) / (factor * factor), dot_k = of_parts(along_k, token);
#pragma unroll
        for (int e = 0; e < 4; e++) gradient[e] = (total_q[t][e] - dot_q * unit[e]) * inverse_q[token] * factor;
        put(to + q_at, gradient, there, whole);
        load<4>(k + token * WIDE + patch.first, unit);
#pragma unroll
        for (int e = 0; e < 4; e++) gradient[e] = (total_k[t][e] - dot_k * unit[e]) * inverse_k[token];
        put(to + k_at, gradient, there, whole);
    }
}

// da [N, V] from the gradients of g; a block has a head.
template <typename T>
__device__ __forceinline__ void gates(
    const T* a, const float* a_log, const float* dt_bias, const float* d_g, T* d_a, float* d_a_log, float* d_dt_bias,
    i64 tokens, int value_heads) {
    __shared__ double shared[32];
    const int head = blockIdx.x;
    const float rate = -expf(a_log[head]);
    double of_rate = 0, of_bias = 0;
    for (i64 t = threadIdx.x; t < tokens; t += blockDim.x) {
        const i64 at = t * value_heads + head;
        const float sum = widen(a[at]) + dt_bias[head], g = rate * softplus(sum);
        const float d = d_g[at] * rate / (1.0f + expf(-sum));
        of_rate += d_g[at] * g;
        of_bias += d;
        narrow(d, d_a[at]);
    }
    of_rate = block_sum(of_rate, shared);
    of_bias = block_sum(of_bias, shared);
    if (threadIdx.x != 0) return;
    d_a_log[head] = (float)of_rate;
    d_dt_bias[head] = (float)of_bias;
}

}  // namespace delta

#define DELTA_RULE_BACK(NAME, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(delta::THREADS, 1) delta_rule_scan_back_##NAME(                      \
        const T* qkv, const u32* spans, const float* prepared, const T* d_o, float* d_states, float* d_right,       \
        T* d_qkv, int key_heads, int value_heads, int key_dim, int value_dim, int first_head, int heads) {          \
        delta::scan<T>(qkv, spans, prepared, d_o, d_states, d_right, d_qkv,                                         \
            {key_heads, value_heads, key_dim, value_dim}, first_head, heads);                                       \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(delta::THREADS, 1) delta_rule_chunk_back_##NAME(                     \
        const T* qkv, const T* a, const T* b, const float* a_log, const float* dt_bias, const u32* pieces,          \
        const T* d_o, const float* states, const float* d_states, const float* deltas, const float* d_right,        \
        T* d_qkv, float* d_g, T* d_b, int key_heads, int value_heads, int key_dim, int value_dim, int first_head,   \
        int heads) {                                                                                                \
        delta::chunk<T>({qkv, a, b, a_log, dt_bias}, pieces, d_o, states, d_states, deltas, d_right, d_qkv, d_g,    \
            d_b, {key_heads, value_heads, key_dim, value_dim}, first_head, heads);                                  \
    }                                                                                                               \
    extern "C" __global__ void delta_rule_gates_back_##NAME(                                                        \
        const T* a, const float* a_log, const float* dt_bias, const float* d_g, T* d_a, float* d_a_log,             \
        float* d_dt_bias, i64 tokens, int value_heads) {                                                            \
        delta::gates<T>(a, a_log, dt_bias, d_g, d_a, d_a_log, d_dt_bias, tokens, value_heads);                      \
    }

DELTA_RULE_BACK(f32, float)
DELTA_RULE_BACK(bf16, bf16)
