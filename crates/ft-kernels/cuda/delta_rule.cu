// Gated delta rule, forward: a block goes through the chunks of a document for one value head and SLICE columns of its
// state, which stays in shared memory. See delta_rule.cuh.
#include "delta_rule.cuh"

namespace delta {

// `spans` [documents, 3]: start and end of a document, and its first chunk counted over all documents. `heads` value heads from
// `first_head` on are computed; blockIdx.x counts documents and these heads. Each of these pointers may be null:
// `before` and `after` [documents, V, P, Q]: the states before the first and after the last token of each document.
// o [N, V·Q]. `states` [chunks, heads, P, Q]: the states before the chunks; `deltas` [N, heads, Q].
template <typename T>
__device__ __forceinline__ void scan(
    const Inputs<T>& x, const u32* spans, const float* before, float* after, T* o, float* states, float* deltas,
    const Heads& h, int first_head, int heads) {
    DYNAMIC_SHARED(memory);
    __shared__ Decays d;
    const int size = h.key_dim, pitch = size + 1;
    float* q = reinterpret_cast<float*>(memory);
    float *k = q + C * pitch, *state = k + C * pitch, *a = state + size * PITCH, *p = a + C * PITCH, *delta = p + C * PITCH;
    const int document = blockIdx.x / heads, local = blockIdx.x % heads, head = first_head + local;
    const u32* span = spans + 3 * document;
    const i64 start = span[0], end = span[1], width = h.width(), per_head = (i64)size * h.value_dim;
    const Slice slice(h.value_dim);
    const i64 own = ((i64)document * h.value_heads + head) * per_head;
    const float factor = 1.0f / sqrtf((float)size);
    slice.load(state, before ? before + own : nullptr, size, h.value_dim);
    i64 chunk = span[2];
    for (i64 first = start; first < end; first += C, chunk++) {
        const int n = end - first < C ? end - first : C, i = own_row();
        const T* rows = x.qkv + first * width;
        unit_rows(rows + h.q_at(head), width, n, size, factor, q);
        unit_rows(rows + h.k_at(head), width, n, size, 1.0f, k);
        d.fill(x, h.value_heads, head, first, n);
        if (states) slice.store(state, states + (chunk * heads + local) * per_head, size, h.value_dim);
        triangles(q, k, size, d, a, p);
        float out[SHARE] = {}, read[SHARE] = {};
        for (int e = 0; e < size; e++) {
            const float from_q = q[i * pitch + e], from_k = k[i * pitch + e];
#pragma unroll
            for (int s = 0; s < SHARE; s++) {
                const float held = state[e * PITCH + own_lane() + s * LANES];
                out[s] += from_q * held;
                read[s] += from_k * held;
            }
        }
#pragma unroll
        for (int s = 0; s < SHARE; s++) {
            const int j = own_lane() + s * LANES;
            float v = 0;
            if (i < n && j < slice.count) v = widen(rows[i * width + h.v_at(head) + slice.first + j]);
            delta[i * PITCH + j] = d.beta[i] * (v - d.from_start[i] * read[s]);
            out[s] *= d.from_start[i];
        }
        __syncthreads();
        // (I + A) D = what is there; a thread has a column.
        if (threadIdx.x < SLICE) {
            float* column = delta + threadIdx.x;
            for (int t = 1; t < n; t++) {
                float sum = 0;
                for (int l = 0; l < t; l++) sum += a[t * PITCH + l] * column[l * PITCH];
                column[t * PITCH] -= d.beta[t] * sum;
            }
        }
        __syncthreads();
        if (o) {
            for (int l = 0; l <= i; l++) {
                const float weight = p[i * PITCH + l];
#pragma unroll
                for (int s = 0; s < SHARE; s++) out[s] += weight * delta[l * PITCH + own_lane() + s * LANES];
            }
        }
#pragma unroll
        for (int s = 0; s < SHARE; s++) {
            const int j = own_lane() + s * LANES;
            if (i >= n || j >= slice.count) continue;
            if (o) narrow(out[s], o[((first + i) * h.value_heads + head) * h.value_dim + slice.first + j]);
            if (deltas) deltas[((first + i) * heads + local) * h.value_dim + slice.first + j] = delta[i * PITCH + j];
        }
        add_outer(
            state, size, d.whole, [&](int t, int e) { return d.to_end[t] * k[t * pitch + e]; },
            [&](int t, int j) { return delta[t * PITCH + j]; });
        __syncthreads();
    }
    if (after) slice.store(state, after + own, size, h.value_dim);
}

}  // namespace delta

#define DELTA_RULE(NAME, T)                                                                                         \
    extern "C" __global__ void __launch_bounds__(delta::THREADS) delta_rule_forward_##NAME(                        \
        const T* qkv, const T* a, const T* b, const float* a_log, const float* dt_bias, const u32* spans,           \
        const float* before, float* after, T* o, float* states, float* deltas, int key_heads, int value_heads,      \
        int key_dim, int value_dim, int first_head, int heads) {                                                    \
        delta::scan<T>({qkv, a, b, a_log, dt_bias}, spans, before, after, o, states, deltas,                        \
            {key_heads, value_heads, key_dim, value_dim}, first_head, heads);                                       \
    }

DELTA_RULE(f32, float)
DELTA_RULE(bf16, bf16)
