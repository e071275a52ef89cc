// Divergences of rows of logits that come in parts: against their definition in double, with a network and with stored ids
// as the teacher, and gradients against differences of the loss.
#include "kinds.h"
#include "../../cuda/distill.cu"

using namespace emulate;

struct Case {
    int rows, vocabulary, common, width, threads, k;
    float beta, alpha, cap, their_cap, inverse;
    /// Added to the student's logits of the stored ids.
    float apart = 0;
};

/// Logits of both models, and stored ids with their log-probabilities.
struct World {
    const Case& c;
    std::vector<double> ours, theirs;
    std::vector<u32> targets, ids;
    std::vector<double> log_probs, rest;

    World(const Case& c, uint64_t seed) : c(c) {
        for (int r = 0; r < c.rows; r++) {
            Random random(seed * 100 + r);
            for (int i = 0; i < c.vocabulary; i++) ours.push_back((float)(2 * random.normal()));
            for (int i = 0; i < c.common; i++) theirs.push_back((float)(2 * random.normal()));
            targets.push_back((r * 7 + c.vocabulary / 2) % c.vocabulary);
            // Ids in steps, the first and the last ones too.
            const std::vector<double> p = log_softmax(&theirs[(size_t)r * c.common], c.their_cap);
            double left = 0;
            for (int i = 0, at = 0; i < c.common; i++) {
                const bool stored = at < c.k && i == (at * (c.common - 1)) / std::max(1, c.k - 1);
                if (stored) {
                    double& own = ours[(size_t)r * c.vocabulary + i];
                    own = (float)(own + c.apart);
                    ids.push_back(i);
                    log_probs.push_back((float)p[i]);
                    at++;
                } else {
                    left += std::exp(p[i]);
                }
            }
            rest.push_back((float)std::log(left));
        }
    }

    static double capped(double x, double cap) { return cap > 0 ? cap * std::tanh(x / cap) : x; }

    std::vector<double> log_softmax(const double* row, double cap) const {
        std::vector<double> p(c.common);
        double sum = 0, max = -INFINITY;
        for (int i = 0; i < c.common; i++) {
            p[i] = capped(row[i], cap) * c.inverse;
            max = std::max(max, p[i]);
        }
        for (double x : p) sum += std::exp(x - max);
        for (double& x : p) x -= max + std::log(sum);
        return p;
    }

    /// One outcome of the divergence.
    double part(double lq, double lp) const {
        const double q = std::exp(lq), p = std::exp(lp), b = c.beta;
        if (b == 0) return p == 0 ? 0 : p * (lp - lq);
        if (b == 1) return q == 0 ? 0 : q * (lq - lp);
        const double lm = std::log((1 - b) * q + b * p);
        return (p == 0 ? 0 : b * p * (lp - lm)) + (q == 0 ? 0 : (1 - b) * q * (lq - lm));
    }

    double divergence(int r, const double* row) const {
        const std::vector<double> q = log_softmax(row, c.cap);
        double sum = 0;
        if (c.k == 0) {
            const std::vector<double> p = log_softmax(&theirs[(size_t)r * c.common], c.their_cap);
            for (int i = 0; i < c.common; i++) sum += part(q[i], p[i]);
            return sum;
        }
        double left = 0;
        int at = 0;
        for (int i = 0; i < c.common; i++) {
            if (at < c.k && (int)ids[(size_t)r * c.k + at] == i) {
                sum += part(q[i], log_probs[(size_t)r * c.k + at++]);
            } else {
                left += std::exp(q[i]);
            }
        }
        return c.k < c.common ? sum + part(std::log(left), rest[r]) : sum;
    }

    double cross_entropy(int r, const double* row) const {
        double sum = 0;
        for (int i = 0; i < c.vocabulary; i++) sum += std::exp(capped(row[i], c.cap));
        return std::log(sum) - capped(row[targets[r]], c.cap);
    }

    double loss(int r, const double* row) const {
        return c.alpha * cross_entropy(r, row) + (1 - c.alpha) * divergence(r, row);
    }
};

using Turn = void (*)(
    float*, const u32*, const Seen*, const Soft*, const double*, int, int, i64, i64, float, float, float, Terms,
    const float*, const Soft*, const u32*, const float*, const float*, i64, int, float);

template <class G>
void check(Turn turn, const Case& c, uint64_t seed) {
    const World world(c, seed);
    const i64 stride = (c.width + 7) / 8 * 8;
    Buffer<float> ours(c.rows * stride), theirs(c.rows * stride);
    Buffer<u32> targets(c.rows), ids(std::max<size_t>(world.ids.size(), 1));
    Buffer<float> log_probs(ids.n), rest(c.rows), picked(ids.n), slopes(c.rows), out(3 * c.rows);
    Buffer<Seen> seen(c.rows);
    Buffer<Soft> own(c.rows), other(c.rows);
    Buffer<double> sums(2 * c.rows);
    for (int r = 0; r < c.rows; r++) {
        targets[r] = world.targets[r];
        rest[r] = world.rest[r];
    }
    for (size_t i = 0; i < world.ids.size(); i++) {
        ids[i] = world.ids[i];
        log_probs[i] = world.log_probs[i];
    }
    const auto bring = [&](Buffer<float>& to, const std::vector<double>& from, int all, int first) {
        const int width = std::max(0, std::min(c.width, all - first));
        for (int r = 0; r < c.rows; r++) {
            for (int i = 0; i < width; i++) to[r * stride + i] = from[(size_t)r * all + first + i];
        }
        return width;
    };
    const Terms terms = {std::log(1 - c.beta), std::log(c.beta), c.inverse, c.beta};
    const dim3 grid(c.rows), block(c.threads);
    for (int first = 0; first < c.vocabulary; first += c.width) {
        const int width = bring(ours, world.ours, c.vocabulary, first);
        // The work of `cross_entropy_survey`.
        for (int r = 0; r < c.rows; r++) {
            Seen known = first > 0 ? seen[r] : Seen{-INFINITY, 0, 0, 0x7fffffff, NAN, 0, 0};
            for (int i = 0; i < width; i++) {
                const float x = World::capped(ours[r * stride + i], c.cap);
                if (x > known.max) {
                    known.sum = known.sum * std::exp(known.max - x);
                    known.max = x;
                    known.at = first + i;
                }
                known.sum += std::exp(x - known.max);
                if (first + i == (int)targets[r]) known.wanted = x;
            }
            seen[r] = known;
        }
        const int both = std::min(width, c.common - first);
        if (both <= 0) continue;
        launch(
            distill_survey, grid, block, 0, seed, (const float*)ours.data, own.data, both, stride, (i64)first, c.cap,
            c.inverse, (const u32*)ids.data, c.k, picked.data);
    }
    if (c.k > 0) {
        launch(
            distill_stored, dim3((c.rows + 31) / 32), dim3(32), 0, seed, own.data, (const float*)picked.data,
            (const float*)log_probs.data, (const float*)rest.data, c.k, c.rows, sums.data, slopes.data, terms);
    } else {
        for (int pass = 0; pass < 2; pass++) {
            for (int first = 0; first < c.common; first += c.width) {
                bring(ours, world.ours, c.vocabulary, first);
                const int width = bring(theirs, world.theirs, c.common, first);
                if (pass == 0) {
                    launch(
                        distill_survey, grid, block, 0, seed, (const float*)theirs.data, other.data, width, stride,
                        (i64)first, c.their_cap, c.inverse, (const u32*)nullptr, 0, (float*)nullptr);
                } else {
                    launch(
                        distill_measure, grid, block, 0, seed, (const float*)ours.data, (const float*)theirs.data,
                        (const Soft*)own.data, (const Soft*)other.data, sums.data, width, stride, stride, (i64)first,
                        c.cap, c.their_cap, terms);
                }
            }
        }
    }
    const float first_weight = c.beta == 0 ? 1 : c.beta == 1 ? 0 : c.beta;
    const float second_weight = c.beta == 0 ? 0 : c.beta == 1 ? 1 : 1 - c.beta;
    launch(
        distill_finish, dim3((c.rows + 31) / 32), dim3(32), 0, seed, (const Seen*)seen.data,
        (const u32*)targets.data, (const double*)sums.data, c.rows, first_weight, second_weight, out.data);
    std::vector<double> want(3 * c.rows);
    for (int r = 0; r < c.rows; r++) {
        const double* row = &world.ours[(size_t)r * c.vocabulary];
        want[r] = world.divergence(r, row);
        want[c.rows + r] = world.cross_entropy(r, row);
        int best = 0;
        for (int i = 0; i < c.vocabulary; i++) best = row[i] > row[best] ? i : best;
        want[2 * c.rows + r] = best == (int)targets[r];
    }
    emulate::check("divergence", out, want, 2e-5);

    const float scale = 0.25f, share = c.beta == 0 || c.beta == 1 ? 1 : 1 - c.beta;
    for (int first = 0; first < c.vocabulary; first += c.width) {
        const int width = bring(ours, world.ours, c.vocabulary, first);
        const int both = std::max(0, std::min(width, c.common - first));
        if (c.k == 0) bring(theirs, world.theirs, c.common, first);
        const float* logits = c.k == 0 && both > 0 ? theirs.data : nullptr;
        launch(
            turn, grid, block, 0, seed, ours.data, (const u32*)targets.data, (const Seen*)seen.data,
            (const Soft*)own.data, (const double*)sums.data, width, both, stride, (i64)first, c.cap,
            scale * (1 - c.alpha) * share * c.inverse, scale * c.alpha, terms, logits, (const Soft*)other.data,
            (const u32*)ids.data, (const float*)log_probs.data, (const float*)slopes.data, stride, c.k, c.their_cap);
        std::vector<double> got, wanted;
        for (int r = 0; r < c.rows; r++) {
            const G* gradient = reinterpret_cast<const G*>(&ours[r * stride]);
            std::vector<double> row(&world.ours[(size_t)r * c.vocabulary], &world.ours[(size_t)(r + 1) * c.vocabulary]);
            for (int i = 0; i < width; i++) {
                const double x = row[first + i], h = 1e-4;
                row[first + i] = x + h;
                const double up = world.loss(r, row.data());
                row[first + i] = x - h;
                const double down = world.loss(r, row.data());
                row[first + i] = x;
                got.push_back(widen(gradient[i]));
                wanted.push_back(scale * (up - down) / (2 * h));
            }
        }
        compare("gradient", got.data(), wanted.data(), got.size(), 5 * tolerance<G>() + 1e-4);
    }
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        for (float beta : {0.0f, 1.0f, 0.3f}) {
            const Case cases[] = {
                {3, 37, 37, 64, 32, 0, beta, 0.3f, 0, 0, 1.0f},
                {5, 100, 90, 32, 64, 0, beta, 0.0f, 3.0f, 5.0f, 0.5f},
                {4, 70, 66, 16, 32, 5, beta, 0.5f, 0, 0, 1.5f},
                {2, 24, 24, 24, 32, 24, beta, 0.2f, 4.0f, 0, 0.7f},
                {3, 130, 40, 24, 96, 1, beta, 0.4f, 2.5f, 3.0f, 1.0f},
                // The ratio of both probabilities of the other ids is too large for f32.
                {3, 40, 37, 16, 32, 4, beta, 0.25f, 0, 0, 1.0f, 120.0f},
            };
            for (const Case& c : cases) {
                check<float>(distill_turn_f32, c, seed);
                check<bf16>(distill_turn_bf16, c, seed);
            }
        }
    }
    return verdict();
}
