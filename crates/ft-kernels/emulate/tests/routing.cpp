// A router: scores, choices, rows of the experts, totals, and the gradient of the logits, against a plain computation.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kinds.h"
#include "../../cuda/routing.cu"

using namespace emulate;

// The K best of `values` for which `open` is true.
static std::vector<int> best(const std::vector<float>& values, int count, const std::vector<bool>& open) {
    std::vector<int> order;
    for (size_t i = 0; i < values.size(); i++)
        if (open[i]) order.push_back((int)i);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[a] > values[b]; });
    order.resize(count);
    return order;
}

static void router(const Rule& rule, int tokens, bool corrected, bool balanced, uint64_t seed) {
    const int E = rule.experts, K = rule.top_k, parts = (tokens + TOKENS - 1) / TOKENS;
    const float z = balanced ? 0.02f : 0.0f;
    Buffer<float> logits(tokens * E), correction(E), weights(tokens * K), log_sums(tokens), numbers(tokens * NUMBERS);
    Buffer<float> row_weights(tokens * K), d_weights(tokens * K), dz(tokens * E), balance(E);
    Buffer<u32> chosen(tokens * K), finite(1), counts(parts * E), row_tokens(tokens * K), rows(tokens * K), places(tokens * K);
    Buffer<double> sums(parts * E), number_sums(parts * NUMBERS), totals(2 * E + 2 + NUMBERS);
    fill(logits, seed + 1);
    fill(correction, seed + 2);
    fill(d_weights, seed + 3);
    fill(balance, seed + 4);
    // Ties.
    logits[0] = logits[1] = 3.0f;
    finite[0] = 1;
    std::vector<double> given = values(logits);
    const dim3 warps((tokens + WARPS - 1) / WARPS), threads(THREADS);
    const float* by = corrected ? correction.data : nullptr;
    launch(route_choose, warps, threads, 0, seed, logits.data, by, i64(tokens), chosen.data, weights.data, log_sums.data,
           numbers.data, finite.data, rule);
    launch(route_count, dim3(parts), threads, 0, seed, (const float*)logits.data, (const u32*)chosen.data,
           (const float*)numbers.data, i64(tokens), E, K, counts.data, sums.data, number_sums.data);
    launch(route_starts, dim3(1), threads, 0, seed, counts.data, (const double*)sums.data, (const double*)number_sums.data,
           (const u32*)finite.data, parts, E, totals.data);
    launch(route_rows, dim3(parts), threads, 0, seed, (const u32*)chosen.data, (const float*)weights.data,
           (const u32*)counts.data, i64(tokens), E, K, row_tokens.data, row_weights.data, rows.data, places.data);
    launch(route_backward, warps, threads, 0, seed, (const float*)d_weights.data, (const u32*)rows.data,
           (const u32*)chosen.data, (const float*)logits.data, (const float*)log_sums.data,
           balanced ? (const float*)balance.data : nullptr, z, i64(tokens), dz.data, rule);

    std::vector<double> want_scores(tokens * E), want_weights, want_totals(2 * E + 2 + NUMBERS), want_dz(tokens * E);
    std::vector<int> choice(tokens * K);
    for (int t = 0; t < tokens; t++) {
        double highest = -1e30, sum = 0, entropy = 0, log_sum = 0, total = 0;
        for (int e = 0; e < E; e++) highest = std::max(highest, given[t * E + e]);
        for (int e = 0; e < E; e++) sum += std::exp(given[t * E + e] - highest);
        for (int e = 0; e < E; e++) {
            const double x = given[t * E + e];
            want_scores[t * E + e] = rule.sigmoid ? 1 / (1 + std::exp(-x)) : std::exp(x - highest) / sum;
            total += want_scores[t * E + e];
        }
        if (!rule.sigmoid) log_sum = highest + std::log(sum);
        for (int e = 0; e < E; e++) {
            const double p = want_scores[t * E + e] / total;
            entropy -= p * std::log(p);
            want_totals[E + 1 + e] += want_scores[t * E + e];
        }
        // The choice is that of the scores as they are: a rounding may turn two of them round.
        std::vector<float> rated(E);
        std::vector<bool> open(E, true);
        for (int e = 0; e < E; e++) rated[e] = corrected ? logits[t * E + e] + correction[e] : logits[t * E + e];
        std::vector<int> visited;
        const int size = rule.groups > 0 ? E / rule.groups : E;
        if (rule.groups > 0) {
            std::vector<float> groups;
            for (int g = 0; g < rule.groups; g++) {
                std::vector<float> in(rated.begin() + g * size, rated.begin() + (g + 1) * size);
                if (rule.rating < 2) {
                    std::sort(in.rbegin(), in.rend());
                    groups.push_back(rule.rating == 1 && size > 1 ? in[0] + in[1] : in[0]);
                } else {
                    groups.push_back(std::accumulate(in.begin(), in.end(), 0.0f));
                }
            }
            open.assign(E, false);
            for (int g : best(groups, rule.chosen, std::vector<bool>(rule.groups, true)))
                std::fill(open.begin() + g * size, open.begin() + (g + 1) * size, true);
        }
        const std::vector<int> own = best(rated, K, open);
        double by = 0;
        for (int k = 0; k < K; k++) {
            choice[t * K + k] = own[k];
            by += want_scores[t * E + own[k]];
            if (std::find(visited.begin(), visited.end(), own[k] / size) == visited.end()) visited.push_back(own[k] / size);
        }
        if (!rule.renormalize) by = 1;
        for (int k = 0; k < K; k++) want_weights.push_back(want_scores[t * E + own[k]] / by * rule.scale);
        want_totals[2 * E + 1] += log_sum * log_sum;
        want_totals[2 * E + 2] += entropy;
        want_totals[2 * E + 3] += rule.groups > 0 ? (double)visited.size() : 0.0;
    }
    // The rows: in the order of the experts, then of the tokens.
    want_totals[2 * E + 1 + NUMBERS] = 1;
    std::vector<double> want_tokens, want_row_weights, want_places(tokens * K), want_rows(tokens * K), want_choice;
    std::vector<int> filled(tokens, 0);
    for (int e = 0; e < E; e++) {
        want_totals[e] = want_tokens.size();
        for (int i = 0; i < tokens * K; i++) {
            if (choice[i] != e) continue;
            const int t = i / K;
            want_places[t * K + filled[t]++] = want_tokens.size();
            want_rows[i] = want_tokens.size();
            want_tokens.push_back(t);
            want_row_weights.push_back(want_weights[i]);
        }
    }
    want_totals[E] = want_tokens.size();
    for (int i : choice) want_choice.push_back(i);
    for (int t = 0; t < tokens; t++) {
        const double* p = &want_scores[t * E];
        double by = 0, shared = 0, mean = 0;
        for (int k = 0; k < K; k++) by += p[choice[t * K + k]];
        if (!rule.renormalize) by = 1;
        for (int k = 0; rule.renormalize && k < K; k++)
            shared += d_weights[(int)want_rows[t * K + k]] * p[choice[t * K + k]] / by * rule.scale / by;
        std::vector<double> d(E, 0.0);
        for (int k = 0; k < K; k++) d[choice[t * K + k]] = d_weights[(int)want_rows[t * K + k]] * rule.scale / by - shared;
        double log_sum = 0;
        for (int e = 0; e < E; e++) log_sum += std::exp(given[t * E + e]);
        log_sum = std::log(log_sum);
        for (int e = 0; e < E; e++) {
            if (!rule.sigmoid && balanced) d[e] += balance[e];
            mean += d[e] * p[e];
        }
        for (int e = 0; e < E; e++)
            want_dz[t * E + e] = rule.sigmoid ? d[e] * p[e] * (1 - p[e]) : p[e] * (d[e] - mean + z * log_sum);
    }
    check("scores", logits, want_scores, 1e-5);
    check("choice", chosen, want_choice, 0);
    check("weights", weights, want_weights, 1e-5);
    check("totals", totals, want_totals, 1e-5);
    check("tokens of rows", row_tokens, want_tokens, 0);
    check("weights of rows", row_weights, want_row_weights, 1e-5);
    check("rows of choices", rows, want_rows, 0);
    check("places", places, want_places, 0);
    check("gradient of the logits", dz, want_dz, 1e-4);
}

static void not_finite(uint64_t seed) {
    const Rule rule{8, 2, 0, 1, 1.0f, 0, 0, 0};
    Buffer<float> logits(3 * 8), weights(6), log_sums(3), numbers(3 * NUMBERS);
    Buffer<u32> chosen(6), finite(1);
    fill(logits, seed);
    logits[11] = NAN;
    finite[0] = 1;
    launch(route_choose, dim3(1), dim3(THREADS), 0, seed, logits.data, (const float*)nullptr, i64(3), chosen.data,
           weights.data, log_sums.data, numbers.data, finite.data, rule);
    check("finite", finite, std::vector<double>{0}, 0);
    for (u32 e : std::vector<u32>(chosen.data, chosen.data + 6)) if (e >= 8) check("an expert", chosen, {}, 0);
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        router({8, 2, 0, 1, 1.5f, 0, 0, 0}, 70, false, true, seed);
        router({40, 3, 0, 0, 1.0f, 0, 0, 0}, 33, false, false, seed);
        router({64, 6, 1, 1, 2.5f, 8, 3, 1}, 130, true, false, seed);
        router({16, 4, 0, 0, 1.0f, 4, 2, 0}, 5, false, true, seed);
        router({12, 2, 0, 1, 1.0f, 3, 1, 2}, 65, true, false, seed);
        not_finite(seed);
    }
    return verdict();
}
