// The router of a mixture of experts: scores, choice, the rows of the experts, and the gradient of the logits.
//
// Letters: N tokens, E experts, K experts of a token, S = N·K rows in the order of the experts, then of the tokens, P parts of
// TOKENS tokens. Each sum has a fixed order.
#include "common.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32, TOKENS = 64, MOST_CHOSEN = 32, MOST_GROUPS = 32;
// Numbers of a token for the totals: squared log of the sum of exponentials, entropy of the scores, groups of its experts.
constexpr int NUMBERS = 3;

// The rule of a router, as crates/ft-ops/src/cuda/routing.rs fills it.
struct Rule {
    int experts, top_k, sigmoid, renormalize;
    float scale;
    // Groups of experts of one size; 0: none. How many are chosen, and how a group is rated: by its largest score, by its two
    // largest, by the sum of all.
    int groups, chosen, rating;
};

// A number and its place: larger numbers first, then lower places.
struct Best {
    float value;
    int place;
};

__device__ __forceinline__ bool before(float value, int place, const Best& other) {
    return value > other.value || (value == other.value && place < other.place);
}

__device__ __forceinline__ Best best_of_lanes(Best best) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float value = __shfl_xor_sync(0xffffffffu, best.value, step);
        const int place = __shfl_xor_sync(0xffffffffu, best.place, step);
        if (before(value, place, best)) best = {value, place};
    }
    return best;
}

__device__ __forceinline__ float rating(const float* scores, const float* correction, int first, int size, int kind) {
    float largest = -INFINITY, second = -INFINITY, sum = 0.0f;
    for (int e = first; e < first + size; e++) {
        const float value = correction == nullptr ? scores[e] : scores[e] + correction[e];
        sum += value;
        if (value > largest) {
            second = largest;
            largest = value;
        } else if (value > second) {
            second = value;
        }
    }
    if (kind == 0) return largest;
    return kind == 1 && size > 1 ? largest + second : kind == 1 ? largest : sum;
}

// The divisor of the weights of a token.
__device__ __forceinline__ float divisor(const Rule& rule, const float* scores, const u32* chosen) {
    if (!rule.renormalize) return 1.0f;
    float sum = 0.0f;
    for (int k = 0; k < rule.top_k; k++) sum += scores[chosen[k]];
    // All sigmoids can be 0.
    return rule.sigmoid ? sum + 1e-20f : sum;
}

// Logits [N, E] become scores in place; the choice [N, K], the largest score first, its weights [N, K], and the logarithm of
// the sum of exponentials [N] (softmax). `finite` stays 1 unless a logit is not finite. A warp takes a token.
extern "C" __global__ void __launch_bounds__(THREADS) route_choose(
    float* logits, const float* correction, i64 tokens, u32* chosen, float* weights, float* log_sums, float* numbers, u32* finite,
    Rule rule) {
    const i64 token = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (token >= tokens) return;
    const int lane = threadIdx.x % 32, count = rule.experts;
    float* scores = logits + token * count;
    chosen += token * rule.top_k;
    float highest = -INFINITY;
    bool good = true;
    for (int e = lane; e < count; e += 32) {
        good = good && isfinite(scores[e]);
        highest = fmaxf(highest, scores[e]);
    }
    if (!good) *finite = 0;
    float log_sum = 0.0f;
    if (rule.sigmoid) {
        for (int e = lane; e < count; e += 32) scores[e] = 1.0f / (1.0f + expf(-scores[e]));
    } else {
        highest = lane_max(highest);
        float sum = 0.0f;
        for (int e = lane; e < count; e += 32) {
            scores[e] = expf(scores[e] - highest);
            sum += scores[e];
        }
        sum = lane_sum<32>(sum);
        log_sum = highest + logf(sum);
        for (int e = lane; e < count; e += 32) scores[e] /= sum;
    }
    float total = 0.0f, entropy = 0.0f;
    for (int e = lane; e < count; e += 32) total += scores[e];
    total = lane_sum<32>(total);
    for (int e = lane; e < count; e += 32) {
        const float p = scores[e] / total;
        if (p > 0.0f) entropy -= p * logf(p);
    }
    entropy = lane_sum<32>(entropy);
    // Scores that other lanes wrote are read from here on.
    __syncwarp();
    const int size = rule.groups > 0 ? count / rule.groups : count;
    u32 open = 0xffffffffu;
    if (rule.groups > 0) {
        const bool mine = lane < rule.groups;
        const float rated = mine ? rating(scores, correction, lane * size, size, rule.rating) : -INFINITY;
        open = 0;
        Best last = {INFINITY, -1};
        for (int i = 0; i < rule.chosen; i++) {
            Best best = {-INFINITY, 1 << 30};
            if (mine && before(last.value, last.place, {rated, lane})) best = {rated, lane};
            last = best_of_lanes(best);
            open |= 1u << (last.place & 31);
        }
    }
    u32 visited = 0;
    Best last = {INFINITY, -1};
    for (int k = 0; k < rule.top_k; k++) {
        Best best = {-INFINITY, 1 << 30};
        for (int e = lane; e < count; e += 32) {
            if (rule.groups > 0 && !(open >> (e / size) & 1)) continue;
            const float value = correction == nullptr ? scores[e] : scores[e] + correction[e];
            if (before(last.value, last.place, {value, e}) && before(value, e, best)) best = {value, e};
        }
        last = best_of_lanes(best);
        // Logits that are not finite: any expert that exists.
        if (last.place >= count) last.place = 0;
        if (lane == 0) chosen[k] = last.place;
        if (rule.groups > 0) visited |= 1u << (last.place / size);
    }
    __syncwarp();
    const float by = divisor(rule, scores, chosen);
    for (int k = lane; k < rule.top_k; k += 32) weights[token * rule.top_k + k] = scores[chosen[k]] / by * rule.scale;
    if (lane != 0) return;
    log_sums[token] = log_sum;
    numbers[token * NUMBERS] = log_sum * log_sum;
    numbers[token * NUMBERS + 1] = entropy;
    numbers[token * NUMBERS + 2] = (float)__popc(visited);
}

// Of each part: the rows of each expert, counts [P, E], and the sums of scores [P, E] and numbers [P, NUMBERS]. A block takes a
// part.
extern "C" __global__ void __launch_bounds__(THREADS) route_count(
    const float* scores, const u32* chosen, const float* numbers, i64 tokens, int experts, int top_k, u32* counts, double* sums,
    double* number_sums) {
    __shared__ u32 here[TOKENS * MOST_CHOSEN];
    const i64 first = (i64)blockIdx.x * TOKENS;
    const int own = (int)(tokens - first < TOKENS ? tokens - first : TOKENS);
    for (int i = threadIdx.x; i < own * top_k; i += THREADS) here[i] = chosen[first * top_k + i];
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        u32 count = 0;
        for (int i = 0; i < own * top_k; i++) count += here[i] == (u32)e;
        double sum = 0.0;
        for (int t = 0; t < own; t++) sum += scores[(first + t) * experts + e];
        counts[(i64)blockIdx.x * experts + e] = count;
        sums[(i64)blockIdx.x * experts + e] = sum;
    }
    for (int i = threadIdx.x; i < NUMBERS; i += THREADS) {
        double sum = 0.0;
        for (int t = 0; t < own; t++) sum += numbers[(first + t) * NUMBERS + i];
        number_sums[(i64)blockIdx.x * NUMBERS + i] = sum;
    }
}

// Counts [P, E] become the first row of each expert in each part. Totals: where each expert begins [E + 1], its sum of scores
// [E], the sums of numbers, and `finite`. One block.
extern "C" __global__ void __launch_bounds__(THREADS) route_starts(
    u32* counts, const double* sums, const double* number_sums, const u32* finite, int parts, int experts, double* totals) {
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        u32 count = 0;
        double sum = 0.0;
        for (int p = 0; p < parts; p++) {
            count += counts[(i64)p * experts + e];
            sum += sums[(i64)p * experts + e];
        }
        totals[e + 1] = count;
        totals[experts + 1 + e] = sum;
    }
    for (int i = threadIdx.x; i < NUMBERS; i += THREADS) {
        double sum = 0.0;
        for (int p = 0; p < parts; p++) sum += number_sums[(i64)p * NUMBERS + i];
        totals[2 * experts + 1 + i] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        totals[0] = 0.0;
        for (int e = 0; e < experts; e++) totals[e + 1] += totals[e];
        totals[2 * experts + 1 + NUMBERS] = *finite;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        u32 next = (u32)totals[e];
        for (int p = 0; p < parts; p++) {
            u32& place = counts[(i64)p * experts + e];
            const u32 count = place;
            place = next;
            next += count;
        }
    }
}

// The token and the weight of each row [S]; the row of each choice [N, K], and the rows of a token in ascending order [N, K].
// `first`: of each part and expert the first row. A block takes a part.
extern "C" __global__ void __launch_bounds__(THREADS) route_rows(
    const u32* chosen, const float* weights, const u32* first, i64 tokens, int experts, int top_k, u32* row_tokens,
    float* row_weights, u32* rows, u32* places) {
    __shared__ u32 here[TOKENS * MOST_CHOSEN], to[TOKENS * MOST_CHOSEN];
    const i64 start = (i64)blockIdx.x * TOKENS;
    const int own = (int)(tokens - start < TOKENS ? tokens - start : TOKENS);
    for (int i = threadIdx.x; i < own * top_k; i += THREADS) here[i] = chosen[start * top_k + i];
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        u32 next = first[(i64)blockIdx.x * experts + e];
        for (int i = 0; i < own * top_k; i++) {
            if (here[i] != (u32)e) continue;
            row_tokens[next] = (u32)(start + i / top_k);
            row_weights[next] = weights[start * top_k + i];
            to[i] = next++;
        }
    }
    __syncthreads();
    for (int t = threadIdx.x; t < own; t += THREADS) {
        u32* sorted = places + (start + t) * top_k;
        for (int k = 0; k < top_k; k++) {
            const u32 row = to[t * top_k + k];
            rows[(start + t) * top_k + k] = row;
            int at = k;
            for (; at > 0 && sorted[at - 1] > row; at--) sorted[at] = sorted[at - 1];
            sorted[at] = row;
        }
    }
}

// From the gradient of the weights of the rows [S] to that of the logits, dz [N, E]. `balance` [E]: what is added to the gradient
// of the scores of each token, or null; `z`: twice the factor of the squared logarithm. A warp takes a token.
extern "C" __global__ void __launch_bounds__(THREADS) route_backward(
    const float* d_weights, const u32* rows, const u32* chosen, const float* scores, const float* log_sums, const float* balance,
    float z, i64 tokens, float* dz, Rule rule) {
    const i64 token = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (token >= tokens) return;
    const int lane = threadIdx.x % 32, count = rule.experts, top_k = rule.top_k;
    scores += token * count;
    dz += token * count;
    chosen += token * top_k;
    rows += token * top_k;
    const float by = divisor(rule, scores, chosen);
    float shared = 0.0f;
    if (rule.renormalize) {
        for (int k = 0; k < top_k; k++) shared += d_weights[rows[k]] * (scores[chosen[k]] / by * rule.scale);
        shared /= by;
    }
    float mean = 0.0f;
    for (int e = lane; e < count; e += 32) {
        float d = 0.0f;
        for (int k = 0; k < top_k; k++)
            if (chosen[k] == (u32)e) d = d_weights[rows[k]] * rule.scale / by - shared;
        if (!rule.sigmoid && balance != nullptr) d += balance[e];
        dz[e] = d;
        mean += d * scores[e];
    }
    mean = lane_sum<32>(mean);
    const float more = rule.sigmoid ? 0.0f : z * log_sums[token];
    for (int e = lane; e < count; e += 32) {
        const float p = scores[e];
        dz[e] = rule.sigmoid ? dz[e] * (p * (1.0f - p)) : p * (dz[e] - mean + more);
    }
}
