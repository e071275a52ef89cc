// Shared by the tests of the gated delta rule: inputs, launches, and the recurrence token by token with its adjoint, in
// double.
#pragma once

#include "kinds.h"
#include "../../cuda/delta_rule.cu"

using namespace emulate;

struct Shape {
    int key_heads, value_heads, key_dim, value_dim;
    std::vector<int> documents;
    int tokens() const { return documents.back(); }
    int width() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
    int outputs() const { return value_heads * value_dim; }
    int state() const { return value_heads * key_dim * value_dim; }
    int count() const { return (int)documents.size() - 1; }
    int slices() const { return (value_dim + delta::SLICE - 1) / delta::SLICE; }
    std::vector<u32> spans() const {
        std::vector<u32> spans;
        u32 chunk = 0;
        for (int i = 0; i < count(); i++) {
            spans.insert(spans.end(), {(u32)documents[i], (u32)documents[i + 1], chunk});
            chunk += (documents[i + 1] - documents[i] + delta::C - 1) / delta::C;
        }
        return spans;
    }
    std::vector<u32> pieces() const {
        std::vector<u32> pieces;
        for (int i = 0; i < count(); i++)
            for (int t = documents[i]; t < documents[i + 1]; t += delta::C)
                pieces.insert(pieces.end(), {(u32)t, (u32)std::min(delta::C, documents[i + 1] - t)});
        return pieces;
    }
};

template <class T>
struct Problem {
    Shape shape;
    Buffer<T> qkv, a, b;
    Buffer<float> a_log, dt_bias, before;
    Buffer<u32> spans;
    Problem(const Shape& shape, uint64_t seed)
        : shape(shape), qkv((size_t)shape.tokens() * shape.width()), a(shape.tokens() * shape.value_heads),
          b(shape.tokens() * shape.value_heads), a_log(shape.value_heads), dt_bias(shape.value_heads),
          before((size_t)shape.count() * shape.state()), spans(shape.spans().size()) {
        fill(qkv, seed + 1);
        fill(a, seed + 2);
        fill(b, seed + 3);
        a_log.fill_normal(seed + 4);
        dt_bias.fill_normal(seed + 5);
        before.fill_normal(seed + 6, 0.2f);
        const std::vector<u32> all = shape.spans();
        std::copy(all.begin(), all.end(), spans.data);
    }
};

/// Results of the recurrence, and its gradients; the shapes are those of the tensors.
struct Wanted {
    std::vector<double> o, after, qkv, a, b, a_log, dt_bias;
};

template <class T>
Wanted recurrence(const Problem<T>& x, bool given, const std::vector<double>& d_o) {
    const Shape& s = x.shape;
    const int P = s.key_dim, Q = s.value_dim, V = s.value_heads, width = s.width(), tokens = s.tokens();
    Wanted w;
    w.o.assign((size_t)tokens * V * Q, 0);
    w.after.assign((size_t)s.count() * s.state(), 0);
    w.qkv.assign((size_t)tokens * width, 0);
    w.a.assign((size_t)tokens * V, 0);
    w.b = w.a;
    w.a_log.assign(V, 0);
    w.dt_bias.assign(V, 0);
    const std::vector<double> qkv = values(x.qkv), a = values(x.a), b = values(x.b);
    for (int document = 0; document < s.count(); document++)
        for (int head = 0; head < V; head++) {
            const int start = s.documents[document], n = s.documents[document + 1] - start;
            const int key = head / (V / s.key_heads);
            const int q_at = key * P, k_at = (s.key_heads + key) * P, v_at = 2 * s.key_heads * P + head * Q;
            // Unit keys, lengths, gates, and the state before each token.
            std::vector<double> q((size_t)n * P), k(q), lq(n), lk(n), g(n), beta(n);
            std::vector<std::vector<double>> states(n + 1, std::vector<double>(P * Q, 0.0));
            if (given)
                for (int e = 0; e < P * Q; e++) states[0][e] = x.before[((size_t)document * V + head) * P * Q + e];
            std::vector<double> delta((size_t)n * Q), read(delta);
            const double rate = -std::exp((double)x.a_log[head]), factor = 1 / std::sqrt((double)P);
            for (int t = 0; t < n; t++) {
                const double* row = &qkv[(size_t)(start + t) * width];
                double qq = 1e-6, kk = 1e-6;
                for (int p = 0; p < P; p++) {
                    qq += row[q_at + p] * row[q_at + p];
                    kk += row[k_at + p] * row[k_at + p];
                }
                lq[t] = std::sqrt(qq);
                lk[t] = std::sqrt(kk);
                for (int p = 0; p < P; p++) {
                    q[t * P + p] = row[q_at + p] / lq[t] * factor;
                    k[t * P + p] = row[k_at + p] / lk[t];
                }
                const size_t at = (size_t)(start + t) * V + head;
                g[t] = rate * std::log1p(std::exp(a[at] + x.dt_bias[head]));
                beta[t] = 1 / (1 + std::exp(-b[at]));
                std::vector<double>& next = states[t + 1];
                for (int e = 0; e < P * Q; e++) next[e] = std::exp(g[t]) * states[t][e];
                for (int j = 0; j < Q; j++) {
                    for (int p = 0; p < P; p++) read[t * Q + j] += next[p * Q + j] * k[t * P + p];
                    delta[t * Q + j] = beta[t] * (row[v_at + j] - read[t * Q + j]);
                    double out = 0;
                    for (int p = 0; p < P; p++) {
                        next[p * Q + j] += k[t * P + p] * delta[t * Q + j];
                        out += next[p * Q + j] * q[t * P + p];
                    }
                    w.o[((size_t)(start + t) * V + head) * Q + j] = out;
                }
            }
            for (int e = 0; e < P * Q; e++) w.after[((size_t)document * V + head) * P * Q + e] = states[n][e];
            if (d_o.empty()) continue;
            std::vector<double> ds(P * Q, 0.0);
            for (int t = n - 1; t >= 0; t--) {
                const double* row = &qkv[(size_t)(start + t) * width];
                const double* out = &d_o[((size_t)(start + t) * V + head) * Q];
                double* to = &w.qkv[(size_t)(start + t) * width];
                std::vector<double> dq(P, 0.0), dk(P, 0.0), dr(Q, 0.0);
                double d_beta = 0, d_g = 0;
                for (int j = 0; j < Q; j++) {
                    double d_delta = 0;
                    for (int p = 0; p < P; p++) {
                        dq[p] += states[t + 1][p * Q + j] * out[j];
                        ds[p * Q + j] += q[t * P + p] * out[j];
                        dk[p] += ds[p * Q + j] * delta[t * Q + j];
                        d_delta += ds[p * Q + j] * k[t * P + p];
                    }
                    d_beta += d_delta * (row[v_at + j] - read[t * Q + j]);
                    to[v_at + j] = beta[t] * d_delta;
                    dr[j] = -beta[t] * d_delta;
                }
                for (int j = 0; j < Q; j++)
                    for (int p = 0; p < P; p++) {
                        double& d = ds[p * Q + j];
                        const double decayed = std::exp(g[t]) * states[t][p * Q + j];
                        d += k[t * P + p] * dr[j];
                        dk[p] += decayed * dr[j];
                        d_g += d * decayed;
                        d *= std::exp(g[t]);
                    }
                double along_q = 0, along_k = 0;
                for (int p = 0; p < P; p++) {
                    along_q += dq[p] * row[q_at + p] / lq[t];
                    along_k += dk[p] * row[k_at + p] / lk[t];
                }
                for (int p = 0; p < P; p++) {
                    to[q_at + p] += (dq[p] - along_q * row[q_at + p] / lq[t]) / lq[t] * factor;
                    to[k_at + p] += (dk[p] - along_k * row[k_at + p] / lk[t]) / lk[t];
                }
                const size_t at = (size_t)(start + t) * V + head;
                w.b[at] = d_beta * beta[t] * (1 - beta[t]);
                w.a[at] = d_g * rate / (1 + std::exp(-a[at] - x.dt_bias[head]));
                w.a_log[head] += d_g * g[t];
                w.dt_bias[head] += w.a[at];
            }
        }
    return w;
}

template <class T>
struct Forward {
    void (*prepare)(const T*, const T*, const T*, const float*, const float*, const u32*, float*, int, int, int, int, int,
                    int);
    void (*scan)(const T*, const u32*, const float*, const float*, float*, T*, float*, float*, int, int, int, int, int, int);
};

#define FORWARD(NAME) {delta_rule_prepare_##NAME, delta_rule_forward_##NAME}

/// Bytes of shared memory, as crates/ft-ops/src/cuda/delta_rule.rs.
constexpr size_t SCAN_BYTES = 4 * delta::SCAN, PREPARE_BYTES = 4 * delta::PREPARE;

/// The results of `prepare` for the heads from `first` on.
template <class T>
struct Prepared {
    Buffer<float> kept;
    Prepared(const Forward<T>& kernels, const Problem<T>& x, int first, int heads, uint64_t seed)
        : kept(x.shape.pieces().size() / 2 * heads * delta::PREPARED) {
        const Shape& s = x.shape;
        const std::vector<u32> all = s.pieces();
        Buffer<u32> pieces(all.size());
        std::copy(all.begin(), all.end(), pieces.data);
        const T *qkv = x.qkv.data, *a = x.a.data, *b = x.b.data;
        const float *a_log = x.a_log.data, *dt_bias = x.dt_bias.data;
        const u32* list = pieces.data;
        launch(kernels.prepare, dim3(all.size() / 2, heads), dim3(delta::THREADS), PREPARE_BYTES, seed, qkv, a, b, a_log,
               dt_bias, list, kept.data, s.key_heads, s.value_heads, s.key_dim, s.value_dim, first, heads);
    }
};

/// The heads from `first` on.
template <class T>
void scan(const Forward<T>& kernels, const Problem<T>& x, const Prepared<T>& prepared, const float* before, float* after,
          T* o, float* states, float* deltas, int first, int heads, uint64_t seed) {
    const Shape& s = x.shape;
    const T* qkv = x.qkv.data;
    const u32* spans = x.spans.data;
    const float* kept = prepared.kept.data;
    launch(kernels.scan, dim3(s.count() * heads, s.slices()), dim3(delta::THREADS), SCAN_BYTES, seed, qkv, spans, kept,
           before, after, o, states, deltas, s.key_heads, s.value_heads, s.key_dim, s.value_dim, first, heads);
}
