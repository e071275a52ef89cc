// Heads of latent attention: a head is filled, turned and cut as a plain loop does it; backward passes are transposes.
#include "kinds.h"
#include "../../cuda/latent.cu"

using namespace emulate;

template <class T>
struct Kernels {
    void (*queries)(const T*, const float*, const float*, int, int, int, int, int, int, T*);
    void (*queries_backward)(const T*, const float*, const float*, int, int, int, int, int, int, T*);
    void (*keys)(const T*, const T*, const float*, const float*, int, int, int, int, int, int, int, T*, T*);
    void (*keys_backward)(const T*, const T*, const float*, const float*, int, int, int, int, int, int, T*, T*);
    void (*resize)(const T*, int, int, int, T*);
};

// <a, b>
static double dot(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) sum += a[i] * b[i];
    return sum;
}

static void near(const char* name, double a, double b, double tolerance) {
    expect(std::fabs(a - b) <= tolerance * (std::fabs(a) + 10), name);
}

template <class T>
void heads(const Kernels<T>& kernels, int heads, int plain, int rotary, int value, bool neighbors, uint64_t seed) {
    const int n = 3, wide = 5 + rotary, half = rotary / 2, width = std::max(plain + rotary, value);
    Buffer<T> x(n * heads * (plain + rotary)), kv(n * heads * (plain + value)), low(n * wide);
    Buffer<T> q(n * heads * width), k(n * heads * width), v(n * heads * width), dk(n * heads * width), dv(n * heads * width);
    Buffer<T> dx(x.n), d_kv(kv.n), d_rotary(n * rotary), cut(n * heads * value);
    Buffer<float> cos(n * half), sin(n * half);
    fill(x, seed + 1);
    fill(kv, seed + 2);
    fill(low, seed + 3);
    fill(dk, seed + 4);
    fill(dv, seed + 5);
    fill(cos, seed + 6);
    fill(sin, seed + 7);
    const float *c = cos.data, *s = sin.data;
    auto turned = [&](const std::vector<double>& from, size_t first, int token, int i) {
        const int pair = neighbors ? i / 2 : i % half;
        const int a = neighbors ? 2 * pair : pair, b = neighbors ? a + 1 : pair + half;
        const double cosine = c[token * half + pair], sine = s[token * half + pair];
        return i == a ? from[first + a] * cosine - from[first + b] * sine : from[first + b] * cosine + from[first + a] * sine;
    };
    std::vector<double> wide_x = values(x), wide_kv = values(kv), wide_low = values(low);
    std::vector<double> want_q(q.n), want_k(q.n), want_v(q.n), want_cut(cut.n);
    for (int i = 0; i < n * heads * width; i++) {
        const int at = i % width, head = i / width, token = head / heads;
        const size_t of_x = size_t(head) * (plain + rotary), of_kv = size_t(head) * (plain + value);
        if (at < rotary) {
            want_q[i] = turned(wide_x, of_x + plain, token, at);
            want_k[i] = turned(wide_low, (token + 1) * wide - rotary, token, at);
        } else if (at < rotary + plain) {
            want_q[i] = wide_x[of_x + at - rotary];
            want_k[i] = wide_kv[of_kv + at - rotary];
        }
        if (at < value) want_v[i] = wide_kv[of_kv + plain + at];
    }
    const dim3 blocks(n), threads(64);
    const int flag = neighbors;
    launch(kernels.queries, blocks, threads, 0, seed, (const T*)x.data, c, s, heads, plain, rotary, value, width, flag, q.data);
    check("queries", q, want_q, tolerance<T>());
    launch(kernels.keys, blocks, threads, 0, seed, (const T*)kv.data, (const T*)low.data, c, s, heads, plain, rotary, value,
           width, flag, wide, k.data, v.data);
    check("keys", k, want_k, tolerance<T>());
    check("values", v, want_v, 0);
    // <dk, queries(x)> = <transpose(dk), x>, and the same for keys and values together.
    launch(kernels.queries_backward, blocks, threads, 0, seed, (const T*)dk.data, c, s, heads, plain, rotary, value, width,
           flag, dx.data);
    near("gradient of queries", dot(values(dk), want_q), dot(values(dx), wide_x), 4 * tolerance<T>());
    launch(kernels.keys_backward, blocks, threads, 0, seed, (const T*)dk.data, (const T*)dv.data, c, s, heads, plain, rotary,
           value, width, flag, d_kv.data, d_rotary.data);
    std::vector<double> back = values(d_rotary);
    double sum = dot(values(d_kv), wide_kv);
    for (int i = 0; i < n * rotary; i++) sum += back[i] * wide_low[(i / rotary + 1) * wide - rotary + i % rotary];
    near("gradient of keys and values", dot(values(dk), want_k) + dot(values(dv), want_v), sum, 4 * tolerance<T>());
    launch(kernels.resize, blocks, threads, 0, seed, (const T*)v.data, heads, width, value, cut.data);
    for (int i = 0; i < n * heads * value; i++) want_cut[i] = want_v[i / value * width + i % value];
    check("cut", cut, want_cut, 0);
    launch(kernels.resize, blocks, threads, 0, seed, (const T*)cut.data, heads, value, width, q.data);
    check("filled", q, want_v, 0);
}

int main(int argc, char** argv) {
    const Kernels<float> wide = {latent_queries_f32, latent_queries_backward_f32, latent_keys_values_f32,
                                 latent_keys_values_backward_f32, latent_resize_f32};
    const Kernels<bf16> narrow = {latent_queries_bf16, latent_queries_backward_bf16, latent_keys_values_bf16,
                                  latent_keys_values_backward_bf16, latent_resize_bf16};
    for (uint64_t seed : seeds(argc, argv)) {
        heads(wide, 3, 8, 4, 6, false, seed);
        heads(wide, 2, 4, 6, 16, true, seed);
        heads(narrow, 3, 8, 4, 6, true, seed);
        heads(narrow, 1, 2, 2, 9, false, seed);
    }
    return verdict();
}
