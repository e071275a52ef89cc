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
    Ahead<T> next;
    const auto fetch_next = [&](i64 c) {
        const i64 first = start + c * C;
        const int n = end - first < C ? end - first : C;
        next.fetch_chunk(qkv + first * width, d_o + first * outputs + head * h.value_dim + slice.first, outputs,
            prepared + ((span[2] + c) * heads + local) * PREPARED, n, slice.count, head, h, cell, row, column, whole);
    };
    const auto write_next = [&](int side) {
        next.q.write(1.0f, q);
        next.k.write(1.0f, k + side * C * WIDE);
        *reinterpret_cast<Pack<float, 4>*>(solution + row * NARROW + column) = next.solution;
        *reinterpret_cast<Pack<float, 4>*>(p + row * NARROW + column) = next.lower;
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = widen(next.row.at[j]);
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
        state.put_to(d_states + ((span[2] + c) * heads + local) * per_head, slice, h, whole);
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
        put(d_qkv + token * width + h.v_at(head) + slice.first + cell.columns, x, there, whole);
        __syncthreads();
        state.add(k + side * C * WIDE, of_right);
        state.write(copy);
        if (c > 0) write_next(side ^ 1);
        __syncthreads();
    }
}

// Columns of a state that a block of `chunk` has at once, and the distance of the rows of such a tile.
constexpr int TILE = 16, NEXT = TILE + 1;
// Elements of a key that a thread has.
constexpr int OWN = KEY / LANES;

// Writes the gradient of a row before its length was set; `gradient` is that of the unit row, `unit`.
template <typename T>
__device__ __forceinline__ void through_length(
    const float (&gradient)[OWN], const float* unit, float inverse, float factor, int size, bool mine, T* to) {
    float dot = 0;
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        const int e = own_lane() + r * LANES;
        if (e < size) dot += gradient[r] * unit[e];
    }
    dot = lane_sum<LANES>(dot) / (factor * factor);
    if (!mine) return;
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        const int e = own_lane() + r * LANES;
        if (e < size) narrow((gradient[r] - dot * unit[e]) * inverse * factor, to[e]);
    }
}

// `pieces` [chunks, 2]: first token and tokens of a chunk; blockIdx.x counts them, blockIdx.y the key heads of
// the `heads` value heads from `first_head` on. Writes q and k of `d_qkv`, the gradients of g [N, V] and of b.
template <typename T>
__device__ __forceinline__ void chunk(
    const Inputs<T>& x, const u32* pieces, const T* d_o, const float* states, const float* d_states,
    const float* deltas, const float* d_right, T* d_qkv, float* d_g, T* d_b, const Heads& h, int first_head, int heads) {
    DYNAMIC_SHARED(memory);
    __shared__ Decays d;
    __shared__ double shared[32], d_sums[C];
    __shared__ float along_q[C], along_k[C], along_read[C], along_v[C];
    const int size = h.key_dim, pitch = size + 1, i = own_row();
    float* q = reinterpret_cast<float*>(memory);
    float* k = q + C * pitch;
    // A tile of states and rows; after the tiles, triangles in the same place.
    float* tile = k + C * pitch;
    float *state = tile, *d_state = state + size * NEXT, *out = d_state + size * NEXT;
    float *delta = out + C * NEXT, *right = delta + C * NEXT;
    float *sum_p = tile, *sum_a = sum_p + C * PITCH, *d_p = sum_a + C * PITCH, *d_a = d_p + C * PITCH;
    const i64 first = pieces[2 * blockIdx.x], width = h.width(), per_head = (i64)size * h.value_dim;
    const int n = pieces[2 * blockIdx.x + 1], key_head = first_head / h.group() + blockIdx.y;
    const T* rows = x.qkv + first * width;
    const float factor = 1.0f / sqrtf((float)size);
    const i64 q_at = h.q_at(key_head * h.group()), k_at = h.k_at(key_head * h.group());
    const float inverse_q = unit_rows(rows + q_at, width, n, size, factor, q);
    const float inverse_k = unit_rows(rows + k_at, width, n, size, 1.0f, k);
    __syncthreads();
    float kk[SHARE] = {}, qk[SHARE] = {};
    for (int e = 0; e < size; e++) {
#pragma unroll
        for (int s = 0; s < SHARE; s++) {
            const float other = k[(own_lane() + s * LANES) * pitch + e];
            kk[s] += k[i * pitch + e] * other;
            qk[s] += q[i * pitch + e] * other;
        }
    }
    float total_q[OWN] = {}, total_k[OWN] = {};
    for (int head = key_head * h.group(); head < (key_head + 1) * h.group(); head++) {
        const int local = head - first_head;
        const i64 own = ((i64)blockIdx.x * heads + local) * per_head;
        d.fill(x, h.value_heads, head, first, n);
        // Sums over the columns: dO Sᵀ, D dS'ᵀ and dR Sᵀ [C, P], dO Dᵀ and dR Dᵀ [C, C].
        float by_o[OWN] = {}, by_delta[OWN] = {}, by_right[OWN] = {}, x_p[SHARE] = {}, x_a[SHARE] = {}, dot_v = 0;
        double dot_states = 0;
        for (int start = 0; start < h.value_dim; start += TILE) {
            const int count = h.value_dim - start < TILE ? h.value_dim - start : TILE;
            for (int at = threadIdx.x; at < size * TILE; at += THREADS) {
                const int e = at / TILE, j = at % TILE;
                const i64 from = own + (i64)e * h.value_dim + start + j;
                const float s = j < count ? states[from] : 0.0f, g = j < count ? d_states[from] : 0.0f;
                state[e * NEXT + j] = s;
                d_state[e * NEXT + j] = g;
                dot_states += (double)(s * g);
            }
            for (int j = own_lane(); j < TILE; j += LANES) {
                const bool there = i < n && j < count;
                const i64 token = first + i;
                const i64 kept = (token * heads + local) * h.value_dim + start + j;
                const float r = there ? d_right[kept] : 0.0f;
                out[i * NEXT + j] = there ? widen(d_o[(token * h.value_heads + head) * h.value_dim + start + j]) : 0.0f;
                delta[i * NEXT + j] = there ? deltas[kept] : 0.0f;
                right[i * NEXT + j] = r;
                if (there) dot_v += r * widen(rows[i * width + h.v_at(head) + start + j]);
            }
            __syncthreads();
            for (int j = 0; j < TILE; j++) {
                const float from_o = out[i * NEXT + j], from_delta = delta[i * NEXT + j], from_right = right[i * NEXT + j];
#pragma unroll
                for (int r = 0; r < OWN; r++) {
                    const int e = own_lane() + r * LANES;
                    if (e >= size) break;
                    const float s = state[e * NEXT + j];
                    by_o[r] += from_o * s;
                    by_delta[r] += from_delta * d_state[e * NEXT + j];
                    by_right[r] += from_right * s;
                }
#pragma unroll
                for (int s = 0; s < SHARE; s++) {
                    const float other = delta[(own_lane() + s * LANES) * NEXT + j];
                    x_p[s] += from_o * other;
                    x_a[s] += from_right * other;
                }
            }
            __syncthreads();
        }
        float dot_q = 0, dot_k = 0, dot_read = 0;
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            const int e = own_lane() + r * LANES;
            if (e >= size) break;
            dot_q += q[i * pitch + e] * by_o[r];
            dot_k += k[i * pitch + e] * by_delta[r];
            dot_read += k[i * pitch + e] * by_right[r];
        }
        dot_q = lane_sum<LANES>(dot_q);
        dot_k = lane_sum<LANES>(dot_k);
        dot_read = lane_sum<LANES>(dot_read);
        dot_v = lane_sum<LANES>(dot_v);
        if (own_lane() == 0) {
            along_q[i] = dot_q;
            along_k[i] = dot_k;
            along_read[i] = dot_read;
            along_v[i] = dot_v;
        }
#pragma unroll
        for (int s = 0; s < SHARE; s++) {
            const int l = own_lane() + s * LANES, at = i * PITCH + l;
            const float decay = l <= i ? d.between(i, l) : 0.0f, strict = l < i ? decay : 0.0f;
            sum_p[at] = x_p[s] * (qk[s] * decay);
            sum_a[at] = x_a[s] * (kk[s] * strict);
            d_p[at] = x_p[s] * decay;
            d_a[at] = -d.beta[i] * x_a[s] * strict;
        }
        // Has a barrier after the writes above.
        dot_states = block_sum(dot_states, shared);
        if (threadIdx.x < C) {
            const int t = threadIdx.x;
            const double beta = d.beta[t], start = d.from_start[t];
            double sum = start * along_q[t] - (double)d.to_end[t] * along_k[t] - beta * start * along_read[t];
            double step = along_v[t] - start * along_read[t];
            for (int l = 0; l < t; l++) {
                sum += sum_p[t * PITCH + l] - beta * sum_a[t * PITCH + l];
                step -= sum_a[t * PITCH + l];
            }
            for (int later = t + 1; later < C; later++)
                sum += (double)d.beta[later] * sum_a[later * PITCH + t] - sum_p[later * PITCH + t];
            d_sums[t] = sum;
            if (t < n) narrow((float)(step * beta * (1.0 - beta)), d_b[(first + t) * h.value_heads + head]);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            double sum = d.whole * dot_states;
            for (int t = 0; t < n; t++) sum += (double)d.to_end[t] * along_k[t];
            for (int t = n - 1; t >= 0; t--) {
                sum += d_sums[t];
                d_g[(first + t) * h.value_heads + head] = (float)sum;
            }
        }
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            const int e = own_lane() + r * LANES;
            if (e >= size) break;
            float of_q = d.from_start[i] * by_o[r];
            float of_k = d.to_end[i] * by_delta[r] - d.beta[i] * d.from_start[i] * by_right[r];
            for (int l = 0; l < C; l++) {
                const float other = k[l * pitch + e];
                of_q += d_p[i * PITCH + l] * other;
                of_k += d_p[l * PITCH + i] * q[l * pitch + e] + (d_a[i * PITCH + l] + d_a[l * PITCH + i]) * other;
            }
            total_q[r] += of_q;
            total_k[r] += of_k;
        }
        __syncthreads();
    }
    T* to = d_qkv + (first + i) * width;
    through_length(total_q, q + i * pitch, inverse_q, factor, size, i < n, to + q_at);
    through_length(total_k, k + i * pitch, inverse_k, 1.0f, size, i < n, to + k_at);
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
    extern "C" __global__ void __launch_bounds__(delta::THREADS) delta_rule_scan_back_##NAME(                      \
        const T* qkv, const u32* spans, const float* prepared, const T* d_o, float* d_states, float* d_right,       \
        T* d_qkv, int key_heads, int value_heads, int key_dim, int value_dim, int first_head, int heads) {          \
        delta::scan<T>(qkv, spans, prepared, d_o, d_states, d_right, d_qkv,                                         \
            {key_heads, value_heads, key_dim, value_dim}, first_head, heads);                                       \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(delta::THREADS) delta_rule_chunk_back_##NAME(                     \
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
