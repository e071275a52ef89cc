// The loss of rows of logits that are never there whole: parts of the vocabulary come one after the other, from the first
// on, and come once more for the gradient. The numbers of a row are in a `Seen` meanwhile.
#include "cross_entropy.cuh"

// Part `first .. first + width` of the vocabulary of each row. Nothing is known before the first part.
extern "C" __global__ void cross_entropy_survey(
    const float* logits, const u32* targets, Seen* seen, int width, i64 stride, i64 first, float cap,
    float smoothing) {
    const float* row = logits + (i64)blockIdx.x * stride;
    bool bad;
    Peak part = peak_of<true>(row, width, cap, bad);
    float total = smoothing > 0 ? total_of(row, width, cap) : 0.0f;
    if (threadIdx.x != 0) return;
    Seen& known = seen[blockIdx.x];
    Peak all = {-INFINITY, 0, 0, 0x7fffffff};
    float wanted = NAN;
    u32 wrong = bad;
    if (first > 0) {
        all = {known.max, known.sum, known.mean, known.at};
        wanted = known.wanted;
        wrong |= known.bad;
        total += known.total;
    }
    float top = all.max;
    int at = all.at;
    join(top, at, part.max, part.at < width ? (int)first + part.at : part.at);
    lift<true>(all, top);
    lift<true>(part, top);
    const i64 target = (i64)targets[blockIdx.x] - first;
    if (target >= 0 && target < width) wanted = capped(row[target], cap);
    known = {top, all.sum + part.sum, all.mean + part.mean, at, wanted, wrong, total};
}

// After the last part: loss[row] (NaN where a logit is not finite) and correct[row]; where `entropies` is there, the
// entropy in nats goes to its place rows[row].
extern "C" __global__ void cross_entropy_finish(
    const Seen* seen, const u32* targets, int count, float smoothing, int vocabulary, double* loss, u32* correct, const u32* rows, float* entropies) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= count) return;
    const Seen known = seen[n];
    const double log_sum = log((double)known.sum);
    loss[n] = known.bad ? (double)NAN : ((double)known.max - (double)known.wanted) + log_sum +
                                               smoothed(smoothing, known.wanted, known.total, vocabulary);
    correct[n] = known.at == (int)targets[n];
    if (entropies) entropies[rows[n]] = known.bad ? NAN : (float)(log_sum - (double)known.mean / (double)known.sum);
}

// The gradient of the same part of the logits, in their place: see `gradient_of`.
template <typename G>
__device__ __forceinline__ void turn(
    float* logits, const u32* targets, const Seen* seen, int width, i64 stride, i64 first, float cap, float scale,
    float smoothing, int vocabulary, const float* weights) {
    const Seen known = seen[blockIdx.x];
    const i64 target = (i64)targets[blockIdx.x] - first;
    if (weights) scale *= weights[blockIdx.x];
    const int inside = target >= 0 && target < width ? (int)target : -1;
    gradient_of<G>(logits + (i64)blockIdx.x * stride, width, cap, scale, smoothing, vocabulary, known.max, known.sum, inside);
}

extern "C" __global__ void cross_entropy_turn_f32(
    float* logits, const u32* targets, const Seen* seen, int width, i64 stride, i64 first, float cap, float scale,
    float smoothing, int vocabulary, const float* weights) {
    turn<float>(logits, targets, seen, width, stride, first, cap, scale, smoothing, vocabulary, weights);
}

extern "C" __global__ void cross_entropy_turn_bf16(
    float* logits, const u32* targets, const Seen* seen, int width, i64 stride, i64 first, float cap, float scale,
    float smoothing, int vocabulary, const float* weights) {
    turn<bf16>(logits, targets, seen, width, stride, first, cap, scale, smoothing, vocabulary, weights);
}
