// Loss, hits and gradient of rows of logits; the gradient in place, in f32 and bf16; totals.
#include "kinds.h"
#include "../../cuda/cross_entropy.cu"

using namespace emulate;

using Kernel = void (*)(float*, const u32*, double*, u32*, int, i64, float, float, float, const float*);

struct Case {
    int rows, vocabulary, threads;
    float cap, smoothing;
};

/// bf16 gradients fill the first half of each row.
static double gradient(const Buffer<float>& logits, i64 at, int i, bool half) {
    if (!half) return logits[at + i];
    return widen(reinterpret_cast<const bf16*>(logits.data + at)[i]);
}

static void rows(Kernel kernel, bool with_gradient, bool half, const Case& c, uint64_t seed) {
    const i64 stride = (c.vocabulary + 7) / 8 * 8;
    const float scale = 0.25f;
    Buffer<float> logits(c.rows * stride), before(c.rows * stride);
    Buffer<u32> targets(c.rows), correct(c.rows);
    Buffer<double> loss(c.rows);
    Buffer<float> weights(c.rows);
    fill(weights, seed + 1);
    for (int r = 0; r < c.rows; r++) {
        Random random(seed * 100 + r);
        for (int i = 0; i < c.vocabulary; i++) logits[r * stride + i] = 4 * random.normal();
        targets[r] = r * 7 % c.vocabulary;
    }
    // Row 0: the target is the first of two largest; row 1: the second of them.
    if (c.rows > 1 && c.vocabulary > 9) {
        logits[0 * stride + 0] = logits[0 * stride + 9] = 30;
        logits[1 * stride + 2] = logits[1 * stride + 7] = 30;
    }
    std::memcpy(before.data, logits.data, logits.n * sizeof(float));
    launch(
        kernel, dim3(c.rows), dim3(c.threads), 0, seed, logits.data, (const u32*)targets.data, loss.data, correct.data,
        c.vocabulary, stride, c.cap, scale, c.smoothing, (const float*)weights.data);
    for (int r = 0; r < c.rows; r++) {
        const auto capped = [&](int i) {
            const double x = before[r * stride + i];
            return c.cap > 0 ? c.cap * std::tanh(x / c.cap) : x;
        };
        const int target = targets[r];
        double max = -INFINITY, sum = 0, total = 0;
        int first = 0;
        for (int i = 0; i < c.vocabulary; i++) {
            if (before[r * stride + i] > before[r * stride + first]) first = i;
            max = std::max(max, capped(i));
        }
        for (int i = 0; i < c.vocabulary; i++) sum += std::exp(capped(i) - max), total += capped(i);
        const double share = 1 - c.smoothing, even = c.smoothing / c.vocabulary;
        const double want = max - share * capped(target) - even * total + std::log(sum);
        expect(std::fabs(loss[r] - want) <= 2e-6 * std::max(1.0, want), "loss of row " + std::to_string(r));
        // With a cap large logits become equal: only which is first is left.
        if (c.cap == 0) expect((correct[r] != 0) == (first == target), "hit of row " + std::to_string(r));
        if (!with_gradient) {
            expect(std::memcmp(&logits[r * stride], &before[r * stride], 4 * c.vocabulary) == 0, "logits stay");
            continue;
        }
        std::vector<double> got(c.vocabulary), wanted(c.vocabulary);
        for (int i = 0; i < c.vocabulary; i++) {
            const double slope = c.cap > 0 ? 1 - capped(i) * capped(i) / c.cap / c.cap : 1;
            got[i] = gradient(logits, r * stride, i, half);
            wanted[i] = scale * weights[r] * (std::exp(capped(i) - max) / sum - even - share * (i == target)) * slope;
        }
        compare("gradient", got.data(), wanted.data(), got.size(), half ? 4e-3 : 5e-6);
    }
}

/// A number that is not finite shows in the loss of its row alone.
static void not_finite(Kernel kernel, float smoothing, uint64_t seed) {
    for (float bad : {(float)NAN, (float)INFINITY, -(float)INFINITY}) {
        Buffer<float> logits(2 * 40);
        Buffer<u32> targets(2), correct(2);
        Buffer<double> loss(2);
        fill(logits, seed);
        logits[37] = bad;
        targets[0] = targets[1] = 3;
        launch(
            kernel, dim3(2), dim3(32), 0, seed, logits.data, (const u32*)targets.data, loss.data, correct.data, 39,
            (i64)40, 0.0f, 1.0f, smoothing, (const float*)nullptr);
        expect(loss[0] != loss[0] && loss[1] == loss[1], "NaN where a logit is not finite");
    }
}

static void totals(uint64_t seed) {
    const int n = 100;
    Buffer<double> loss(n), sums(2);
    Buffer<u32> correct(n), places(n);
    Buffer<float> each(2 * n);
    each.fill(0);
    sums[0] = 1, sums[1] = 2;
    double want = 1;
    for (int i = 0; i < n; i++) {
        loss[i] = 0.5 * i;
        correct[i] = i % 3 == 0;
        places[i] = 2 * i + 1;
        want += loss[i];
    }
    for (float* to : {(float*)nullptr, each.data}) {
        launch(
            cross_entropy_totals, dim3(1), dim3(64), 0, seed, (const double*)loss.data, (const u32*)correct.data, n,
            sums.data, (const u32*)places.data, to);
    }
    expect(sums[0] == 2 * want - 1 && sums[1] == 2 + 2 * 34, "totals");
    for (int i = 0; i < n; i++) expect(each[2 * i + 1] == -0.5f * i && each[2 * i] == 0, "log-probabilities");
}

int main(int argc, char** argv) {
    const Case cases[] = {{1, 5, 32, 0, 0},      {3, 37, 32, 2.5f, 0}, {3, 37, 32, 2.5f, 0.3f}, {2, 300, 64, 0, 0.1f},
                          {2, 1029, 64, 30, 0}, {2, 4000, 512, 0, 0}};
    for (uint64_t seed : seeds(argc, argv)) {
        for (const Case& c : cases) {
            rows(cross_entropy_loss, false, false, c, seed);
            rows(cross_entropy_f32, true, false, c, seed);
            rows(cross_entropy_bf16, true, true, c, seed);
        }
        not_finite(cross_entropy_loss, 0, seed);
        not_finite(cross_entropy_f32, 0.1f, seed);
        not_finite(cross_entropy_bf16, 0, seed);
        totals(seed);
    }
    return verdict();
}
