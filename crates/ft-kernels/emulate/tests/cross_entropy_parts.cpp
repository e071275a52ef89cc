// Loss, hits, entropies and gradient of rows of logits whose parts come one after the other, twice.
#include "kinds.h"
#include "../../cuda/cross_entropy_parts.cu"

using namespace emulate;

using Turn = void (*)(float*, const u32*, const Seen*, int, i64, i64, float, float, float, int, const float*);

struct Case {
    int rows, vocabulary, width, threads;
    float cap, smoothing;
};

/// One part of the logits, as a product leaves it: rows of `stride` elements, and what it gives of the gradient.
struct Parts {
    const Case& c;
    i64 stride;
    Buffer<float> logits, whole;
    Buffer<u32> targets;

    Parts(const Case& c, uint64_t seed)
        : c(c), stride((c.width + 7) / 8 * 8), logits(c.rows * stride), whole(c.rows * (size_t)c.vocabulary),
          targets(c.rows) {
        for (int r = 0; r < c.rows; r++) {
            Random random(seed * 100 + r);
            for (int i = 0; i < c.vocabulary; i++) whole[(size_t)r * c.vocabulary + i] = 4 * random.normal();
            targets[r] = (r * 7 + c.vocabulary / 2) % c.vocabulary;
        }
    }

    int bring(int first) {
        const int width = std::min(c.width, c.vocabulary - first);
        for (int r = 0; r < c.rows; r++) {
            for (int i = 0; i < width; i++) logits[r * stride + i] = whole[(size_t)r * c.vocabulary + first + i];
        }
        return width;
    }
};

static void rows(Turn turn, bool half, const Case& c, uint64_t seed) {
    const float scale = 0.25f;
    Parts p(c, seed);
    // Row 0: the target is the first of two largest, in two parts; row 1: the second of them.
    if (c.rows > 1 && c.vocabulary > c.width) {
        const int last = c.vocabulary - 1;
        p.whole[0] = p.whole[last] = p.whole[c.vocabulary + 0] = p.whole[c.vocabulary + last] = 30;
        p.targets[0] = 0;
        p.targets[1] = last;
    }
    Buffer<Seen> seen(c.rows);
    Buffer<float> weights(c.rows), entropies(2 * c.rows);
    Buffer<double> loss(c.rows);
    Buffer<u32> correct(c.rows), places(c.rows);
    fill(weights, seed + 1);
    entropies.fill(0);
    for (int r = 0; r < c.rows; r++) places[r] = 2 * r + 1;
    for (int first = 0; first < c.vocabulary; first += c.width) {
        const int width = p.bring(first);
        launch(
            cross_entropy_survey, dim3(c.rows), dim3(c.threads), 0, seed, (const float*)p.logits.data,
            (const u32*)p.targets.data, seen.data, width, p.stride, (i64)first, c.cap, c.smoothing);
    }
    for (float* to : {(float*)nullptr, entropies.data}) {
        launch(
            cross_entropy_finish, dim3((c.rows + 31) / 32), dim3(32), 0, seed, (const Seen*)seen.data,
            (const u32*)p.targets.data, c.rows, c.smoothing, c.vocabulary, loss.data, correct.data, (const u32*)places.data, to);
    }
    const double share = 1 - c.smoothing, even = c.smoothing / c.vocabulary;
    std::vector<double> maxima(c.rows), sums(c.rows);
    const auto capped = [&](int r, int i) {
        const double x = p.whole[(size_t)r * c.vocabulary + i];
        return c.cap > 0 ? c.cap * std::tanh(x / c.cap) : x;
    };
    for (int r = 0; r < c.rows; r++) {
        const float* row = &p.whole[(size_t)r * c.vocabulary];
        const int target = p.targets[r];
        double max = -INFINITY, sum = 0, mean = 0, total = 0;
        int first = 0;
        for (int i = 0; i < c.vocabulary; i++) {
            if (row[i] > row[first]) first = i;
            max = std::max(max, capped(r, i));
        }
        for (int i = 0; i < c.vocabulary; i++) {
            const double e = std::exp(capped(r, i) - max);
            sum += e;
            total += capped(r, i);
            mean += e * (capped(r, i) - max);
        }
        maxima[r] = max, sums[r] = sum;
        const double want = max - share * capped(r, target) - even * total + std::log(sum);
        expect(std::fabs(loss[r] - want) <= 3e-6 * std::max(1.0, want), "loss of row " + std::to_string(r));
        if (c.cap == 0) expect((correct[r] != 0) == (first == target), "hit of row " + std::to_string(r));
        const double entropy = std::log(sum) - mean / sum;
        expect(std::fabs(entropies[2 * r + 1] - entropy) <= 1e-5 * std::max(1.0, entropy), "entropy");
        expect(entropies[2 * r] == 0, "what has no target stays");
    }
    for (int first = 0; first < c.vocabulary; first += c.width) {
        const int width = p.bring(first);
        launch(
            turn, dim3(c.rows), dim3(c.threads), 0, seed, p.logits.data, (const u32*)p.targets.data,
            (const Seen*)seen.data, width, p.stride, (i64)first, c.cap, scale, c.smoothing,
            c.vocabulary, (const float*)weights.data);
        for (int r = 0; r < c.rows; r++) {
            std::vector<double> got(width), wanted(width);
            for (int i = 0; i < width; i++) {
                const double x = capped(r, first + i), slope = c.cap > 0 ? 1 - x * x / c.cap / c.cap : 1;
                const float* at = p.logits.data + r * p.stride;
                got[i] = half ? widen(reinterpret_cast<const bf16*>(at)[i]) : at[i];
                const bool hit = first + i == (int)p.targets[r];
                wanted[i] = scale * weights[r] * (std::exp(x - maxima[r]) / sums[r] - even - share * hit) * slope;
            }
            compare("gradient", got.data(), wanted.data(), got.size(), half ? 4e-3 : 8e-6);
        }
    }
}

/// A number that is not finite in any part shows in the loss of its row alone.
static void not_finite(uint64_t seed) {
    const Case c = {2, 70, 24, 32, 0, 0.1f};
    for (float bad : {(float)NAN, (float)INFINITY, -(float)INFINITY}) {
        for (int at : {0, 30, 69}) {
            Parts p(c, seed);
            p.whole[at] = bad;
            Buffer<Seen> seen(c.rows);
            Buffer<float> entropies(c.rows);
            Buffer<double> loss(c.rows);
            Buffer<u32> correct(c.rows), places(c.rows);
            places[0] = 0, places[1] = 1;
            for (int first = 0; first < c.vocabulary; first += c.width) {
                const int width = p.bring(first);
                launch(
                    cross_entropy_survey, dim3(c.rows), dim3(c.threads), 0, seed, (const float*)p.logits.data,
                    (const u32*)p.targets.data, seen.data, width, p.stride, (i64)first, c.cap, c.smoothing);
            }
            launch(
                cross_entropy_finish, dim3(1), dim3(32), 0, seed, (const Seen*)seen.data, (const u32*)p.targets.data,
                c.rows, c.smoothing, c.vocabulary, loss.data, correct.data, (const u32*)places.data, entropies.data);
            expect(loss[0] != loss[0] && loss[1] == loss[1], "NaN where a logit is not finite");
            expect(entropies[0] != entropies[0] && entropies[1] == entropies[1], "no entropy either");
        }
    }
}

int main(int argc, char** argv) {
    const Case cases[] = {
        {1, 5, 5, 32, 0, 0},         {3, 37, 16, 32, 2.5f, 0},  {3, 37, 16, 32, 2.5f, 0.3f},
        {2, 300, 128, 64, 0, 0.1f}, {2, 1029, 512, 64, 30, 0}, {2, 4000, 2048, 512, 0, 0}};
    for (uint64_t seed : seeds(argc, argv)) {
        for (const Case& c : cases) {
            rows(cross_entropy_turn_f32, false, c, seed);
            rows(cross_entropy_turn_bf16, true, c, seed);
        }
        not_finite(seed);
    }
    return verdict();
}
