// Tokens that are sampled from rows of logits, with all tokens kept.
#include "kinds.h"
#include "../../cuda/sample.cu"

using namespace emulate;

/// The token and its log-probability, with all sums in double.
template <class T>
static std::pair<u32, double> wanted(const T* logits, i64 vocab, float cap, float temperature, const double* uniform) {
    std::vector<double> x(vocab);
    double highest = -INFINITY, total = 0;
    for (i64 t = 0; t < vocab; t++) {
        x[t] = widen(logits[t]);
        if (cap > 0) x[t] = cap * std::tanh(x[t] / cap);
        highest = std::max(highest, x[t]);
    }
    for (double& value : x) total += std::exp((value - highest) / temperature);
    u32 id = 0;
    if (!uniform) {
        while (x[id] != highest) id++;
    } else {
        double left = *uniform * total;
        for (;; id++) {
            left -= std::exp((x[id] - highest) / temperature);
            if (left < 0) break;
        }
    }
    return {id, (x[id] - highest) / temperature - std::log(total)};
}

template <class T>
static void rows(
    void (*kernel)(const T*, i64, float, float, const double*, u32*, float*), i64 vocab, float cap, float temperature,
    bool greedy, uint64_t seed) {
    const int count = 3;
    Buffer<T> logits(count * vocab);
    fill(logits, seed + vocab);
    Buffer<double> uniform(count);
    for (int r = 0; r < count; r++) uniform[r] = r == 2 ? 0.0 : std::fmod(0.37 + 0.21 * r + 0.13 * double(seed), 1.0);
    // Equals: the lower one is the most likely.
    logits[vocab - 1] = logits[vocab / 2];
    Buffer<u32> ids(count);
    Buffer<float> log_probs(count);
    const double* at = greedy ? nullptr : uniform.data;
    launch(kernel, dim3(count), dim3(sample::THREADS), 8 * ((vocab + sample::TILE - 1) / sample::TILE), seed,
           (const T*)logits.data, vocab, cap, temperature, at, ids.data, log_probs.data);
    for (int r = 0; r < count; r++) {
        const auto [id, log_prob] = wanted(logits.data + r * vocab, vocab, cap, temperature, at ? at + r : nullptr);
        expect(ids[r] == id, "the token");
        expect(std::fabs(log_probs[r] - log_prob) < 1e-5 * (1 + std::fabs(log_prob)), "its log-probability");
    }
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        for (i64 vocab : {5, 1024, 2500}) {
            rows(sample_f32, vocab, 0, 1, false, seed);
            rows(sample_f32, vocab, 3, 0.5, false, seed);
            rows(sample_f32, vocab, 0, 1, true, seed);
            rows(sample_bf16, vocab, 0, 2, false, seed);
        }
        // A row of which one token can be drawn, and rows that are not numbers.
        const i64 vocab = 1500;
        Buffer<float> logits(4 * vocab);
        for (i64 i = 0; i < 4 * vocab; i++) logits[i] = -INFINITY;
        logits[1200] = 2;
        logits[vocab + 7] = INFINITY;
        for (i64 i = 2 * vocab; i < 3 * vocab; i++) logits[i] = 1;
        logits[2 * vocab + 1400] = NAN;
        Buffer<double> uniform(4);
        for (int r = 0; r < 4; r++) uniform[r] = 0.999;
        Buffer<u32> ids(4);
        Buffer<float> log_probs(4);
        launch(sample_f32, dim3(4), dim3(sample::THREADS), 16, seed, (const float*)logits.data, vocab, 0.0f, 1.0f,
               (const double*)uniform.data, ids.data, log_probs.data);
        expect(ids[0] == 1200 && log_probs[0] == 0, "the only token");
        for (int r = 1; r < 4; r++) expect(ids[r] == sample::NONE, "not a number");
    }
    return verdict();
}
