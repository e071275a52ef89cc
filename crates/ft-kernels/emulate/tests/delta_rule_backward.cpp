// Gated delta rule backward: every gradient is that of the recurrence, with all heads at once and in parts.
#include "delta_rule.h"
#include "../../cuda/delta_rule_backward.cu"

template <class T>
struct Kernels {
    Forward<T> forward;
    void (*back)(const T*, const u32*, const float*, const T*, float*, float*, T*, int, int, int, int, int, int);
    void (*chunk)(const T*, const T*, const T*, const float*, const float*, const u32*, const T*, const float*,
                  const float*, const float*, const float*, T*, float*, T*, int, int, int, int, int, int);
    void (*gates)(const T*, const float*, const float*, const float*, T*, float*, float*, i64, int);
};

#define ALL(NAME) \
    {FORWARD(NAME), delta_rule_scan_back_##NAME, delta_rule_chunk_back_##NAME, delta_rule_gates_back_##NAME}

template <class T>
static void backward(const Kernels<T>& kernels, const Shape& s, int heads, uint64_t seed) {
    const Problem<T> x(s, seed);
    Buffer<T> d_o((size_t)s.tokens() * s.outputs());
    fill(d_o, seed + 7);
    const Wanted want = recurrence(x, false, values(d_o));
    const std::vector<u32> all = s.pieces();
    Buffer<u32> pieces(all.size());
    std::copy(all.begin(), all.end(), pieces.data);
    const int chunks = (int)all.size() / 2;
    Buffer<T> d_qkv(x.qkv.n), d_a(x.a.n), d_b(x.b.n);
    Buffer<float> d_g(x.a.n), d_a_log(s.value_heads), d_dt_bias(s.value_heads);
    const T *qkv = x.qkv.data, *a = x.a.data, *b = x.b.data, *out = d_o.data;
    const float *a_log = x.a_log.data, *dt_bias = x.dt_bias.data, *none = nullptr;
    const u32 *spans = x.spans.data, *list = pieces.data;
    for (int first = 0; first < s.value_heads; first += heads) {
        const size_t kept = (size_t)chunks * heads * s.key_dim * s.value_dim, rows = (size_t)s.tokens() * heads * s.value_dim;
        Buffer<float> states(kept), d_states(kept), deltas(rows), right(rows);
        const Prepared<T> prepared(kernels.forward, x, first, heads, seed);
        scan<T>(kernels.forward, x, prepared, none, nullptr, nullptr, states.data, deltas.data, first, heads, seed);
        const float* kept_before = prepared.kept.data;
        launch(kernels.back, dim3(s.count() * heads, s.slices()), dim3(delta::THREADS), SCAN_BYTES, seed, qkv, spans,
               kept_before, out, d_states.data, right.data, d_qkv.data, s.key_heads, s.value_heads, s.key_dim, s.value_dim,
               first, heads);
        const float *ps = states.data, *pd = d_states.data, *pr = right.data, *pe = deltas.data;
        launch(kernels.chunk, dim3(chunks, heads * s.key_heads / s.value_heads), dim3(delta::THREADS),
               4 * delta::CHUNK, seed, qkv, a, b, a_log, dt_bias, list, out,
               ps, pd, pe, pr, d_qkv.data, d_g.data, d_b.data, s.key_heads, s.value_heads, s.key_dim, s.value_dim, first,
               heads);
    }
    const float* g = d_g.data;
    launch(kernels.gates, dim3(s.value_heads), dim3(64), 0, seed, a, a_log, dt_bias, g, d_a.data, d_a_log.data,
           d_dt_bias.data, (i64)s.tokens(), s.value_heads);
    const double tight = sizeof(T) == 4 ? 5e-5 : 4e-3;
    check("d qkv", d_qkv, want.qkv, tight);
    check("d a", d_a, want.a, tight);
    check("d b", d_b, want.b, tight);
    compare("d A_log", d_a_log, want.a_log, 5e-5);
    compare("d dt_bias", d_dt_bias, want.dt_bias, 5e-5);
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        backward<float>(ALL(f32), {1, 1, 4, 3, {0, 5}}, 1, seed);
        backward<float>(ALL(f32), {2, 4, 12, 40, {0, 1, 1, 34, 101}}, 2, seed);
        backward<float>(ALL(f32), {1, 1, 128, 17, {0, 70}}, 1, seed);
        backward<float>(ALL(f32), {1, 1, 128, 36, {0, 70}}, 1, seed);
        backward<bf16>(ALL(bf16), {1, 3, 33, 32, {0, 64, 67}}, 3, seed);
        backward<bf16>(ALL(bf16), {2, 4, 16, 20, {0, 37}}, 2, seed);
    }
    return verdict();
}
