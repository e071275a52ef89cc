// Streams of AltUp and sparse gates against plain loops.
#include "kinds.h"
#include "../../cuda/altup.cu"

using namespace emulate;

template <class T>
struct Kernels {
    void (*predict)(const T*, const T*, int, int, int, int, T*);
    void (*predict_backward)(const T*, const T*, int, int, T*, T*);
    void (*correct)(T*, const T*, const T*, int, int, int);
    void (*corrected)(const T*, const T*, const T*, int, int, int, T*);
    void (*correct_backward)(T*, const T*, const T*, const T*, int, int, int, T*, T*);
    void (*add)(T*, const T*, int, int, int, int);
    void (*sum)(const T*, int, int, int, int, float, T*);
    void (*matched)(const T*, const T*, int, T*);
    void (*matched_backward)(const T*, const T*, const T*, int, T*, T*);
    void (*sparse)(const T*, float, int, T*);
    void (*sparse_backward)(const T*, float, int, T*);
};

template <class T>
void streams(const Kernels<T>& kernels, int streams, int d, int active, uint64_t seed) {
    const int n = 3, all = n * streams * d;
    Buffer<T> h(all), c(n * streams * streams), dy(all), f(n * streams), y(n * d), p(n * d), out(n * d), df(n * streams);
    Buffer<T> predicted(all), dc(c.n);
    int next = 1;
    for (Buffer<T>* b : {&h, &c, &dy, &f, &y, &p}) fill(*b, seed + next++);
    const dim3 blocks(n), threads(64);
    const double close = 2 * tolerance<T>();
    std::vector<double> wh = values(h), wc = values(c), wd = values(dy), wf = values(f), wy = values(y), wp = values(p);
    auto at = [&](int t, int i, int j) { return (t * streams + i) * d + j; };

    std::vector<double> want = wh, dh = wd, want_dc(c.n);
    for (int t = 0; t < n; t++)
        for (int i = 0; i < streams; i++)
            for (int q = 0; q < streams; q++)
                for (int j = 0; j < d; j++) {
                    const int place = (t * streams + i) * streams + q;
                    want[at(t, i, j)] += wc[place] * wh[at(t, q, j)];
                    dh[at(t, q, j)] += wc[place] * wd[at(t, i, j)];
                    want_dc[place] += wd[at(t, i, j)] * wh[at(t, q, j)];
                }
    launch(kernels.predict, blocks, threads, 0, seed, (const T*)h.data, (const T*)c.data, streams, 0, streams, d, predicted.data);
    check("predictions", predicted, want, close);
    launch(kernels.predict, blocks, threads, 0, seed, (const T*)h.data, (const T*)c.data, streams, active, 1, d, out.data);
    for (int t = 0; t < n; t++)
        for (int j = 0; j < d; j++) expect(widen(out[t * d + j]) == widen(predicted[at(t, active, j)]), "one prediction");
    launch(kernels.predict_backward, blocks, threads, 0, seed, (const T*)h.data, (const T*)c.data, streams, d, dy.data, dc.data);
    check("gradient of the streams", dy, dh, close);
    check("gradient of the coefficients", dc, want_dc, close);

    want = values(predicted);
    std::vector<double> one(n * d);
    for (int t = 0; t < n; t++)
        for (int j = 0; j < d; j++) {
            const double found = wy[t * d + j] - want[at(t, active, j)];
            for (int i = 0; i < streams; i++) want[at(t, i, j)] += wf[t * streams + i] * found;
            one[t * d + j] = wp[t * d + j] + wf[t * streams + active] * (wy[t * d + j] - wp[t * d + j]);
        }
    launch(kernels.correct, blocks, threads, 0, seed, predicted.data, (const T*)y.data, (const T*)f.data, streams, active, d);
    check("corrections", predicted, want, close);
    launch(kernels.corrected, blocks, threads, 0, seed, (const T*)p.data, (const T*)y.data, (const T*)f.data, streams, active, d,
           out.data);
    check("corrected stream", out, one, close);

    wd = values(dy);
    std::vector<double> dx(n * d), want_df(df.n);
    want = wd;
    for (int t = 0; t < n; t++)
        for (int j = 0; j < d; j++) {
            for (int i = 0; i < streams; i++) {
                dx[t * d + j] += wf[t * streams + i] * wd[at(t, i, j)];
                want_df[t * streams + i] += wd[at(t, i, j)] * (wy[t * d + j] - wp[t * d + j]);
            }
            want[at(t, active, j)] -= dx[t * d + j];
        }
    launch(kernels.correct_backward, blocks, threads, 0, seed, dy.data, (const T*)p.data, (const T*)y.data, (const T*)f.data,
           streams, active, d, out.data, df.data);
    check("gradient of the predictions", dy, want, close);
    check("gradient of the output", out, dx, close);
    check("gradient of the factors", df, want_df, close);

    want = wh;
    std::vector<double> total(n * d);
    for (int t = 0; t < n; t++)
        for (int i = 1; i < streams; i++)
            for (int j = 0; j < d; j++) {
                total[t * d + j] += 0.5 * wh[at(t, i, j)];
                want[at(t, i, j)] += wy[t * d + j];
            }
    launch(kernels.sum, blocks, threads, 0, seed, (const T*)h.data, streams, 1, streams - 1, d, 0.5f, out.data);
    check("sum of streams", out, total, close);
    launch(kernels.add, blocks, threads, 0, seed, h.data, (const T*)y.data, streams, 1, streams - 1, d);
    check("streams with an addition", h, want, close);
}

template <class T>
void rows(const Kernels<T>& kernels, int d, uint64_t seed) {
    const int n = 3;
    const double m = 0.4, close = 2 * tolerance<T>();
    Buffer<T> p(n * d), like(n * d), dy(n * d), y(n * d), dp(n * d), d_like(n * d);
    int next = 1;
    for (Buffer<T>* b : {&p, &like, &dy, &d_like}) fill(*b, seed + next++);
    std::vector<double> wp = values(p), wl = values(like), wd = values(dy);
    std::vector<double> want(n * d), want_dp(n * d), want_like = values(d_like), cut(n * d), du(n * d);
    for (int t = 0; t < n; t++) {
        const double *a = &wp[t * d], *b = &wl[t * d], *g = &wd[t * d];
        double own = 0, target = 0, along = 0, mean = 0, variance = 0, sum = 0;
        for (int j = 0; j < d; j++) {
            own += a[j] * a[j] / d;
            target += b[j] * b[j] / d;
            along += g[j] * a[j];
            mean += a[j] / d;
        }
        for (int j = 0; j < d; j++) variance += (a[j] - mean) * (a[j] - mean) / d;
        const double ratio = std::sqrt(target / own), limit = mean + m * std::sqrt(variance);
        for (int j = 0; j < d; j++) {
            want[t * d + j] = ratio * a[j];
            want_dp[t * d + j] = ratio * g[j] - along * ratio / (own * d) * a[j];
            want_like[t * d + j] += along * b[j] / (std::sqrt(own * target) * d);
            cut[t * d + j] = std::max(a[j] - limit, 0.0);
            sum += a[j] > limit ? g[j] : 0;
        }
        for (int j = 0; j < d; j++)
            du[t * d + j] = (a[j] > limit ? g[j] : 0) - sum / d - m * sum / (d * std::sqrt(variance)) * (a[j] - mean);
    }
    const dim3 blocks(n), threads(64);
    launch(kernels.matched, blocks, threads, 0, seed, (const T*)p.data, (const T*)like.data, d, y.data);
    check("matched", y, want, close);
    launch(kernels.matched_backward, blocks, threads, 0, seed, (const T*)p.data, (const T*)like.data, (const T*)dy.data, d,
           dp.data, d_like.data);
    check("gradient of what is matched", dp, want_dp, close);
    check("gradient of what it is like", d_like, want_like, close);
    launch(kernels.sparse, blocks, threads, 0, seed, (const T*)p.data, float(m), d, y.data);
    check("sparse gate", y, cut, close);
    launch(kernels.sparse_backward, blocks, threads, 0, seed, (const T*)p.data, float(m), d, dy.data);
    check("gradient of a sparse gate", dy, du, close);
}

#define KERNELS(T)                                                                                            \
    {altup_predict_##T, altup_predict_backward_##T, altup_correct_##T, altup_corrected_##T,                   \
     altup_correct_backward_##T, altup_add_##T, altup_sum_##T, altup_matched_##T, altup_matched_backward_##T, \
     sparse_gate_##T, sparse_gate_backward_##T}

int main(int argc, char** argv) {
    const Kernels<float> wide = KERNELS(f32);
    const Kernels<bf16> narrow = KERNELS(bf16);
    for (uint64_t seed : seeds(argc, argv)) {
        streams(wide, 4, 7, 0, seed);
        streams(wide, 2, 70, 1, seed);
        streams(narrow, 8, 9, 3, seed);
        rows(wide, 33, seed);
        rows(narrow, 100, seed);
    }
    return verdict();
}
