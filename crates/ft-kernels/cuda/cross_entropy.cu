// Softmax, loss and gradient of rows of logits in one kernel, the gradient in the place of the logits.
//
// A row has `vocabulary` f32 logits and starts every `stride` elements (a multiple of 8). With a cap, a logit becomes
// cap tanh(logit / cap) first. One block for each row.
#include "cross_entropy.cuh"

// loss[row] (NaN where a logit is not finite) and correct[row]: is the target the first of the largest? With gradients
// the row becomes scale (softmax - smoothed target) times the slope of the cap, of type G, from its first byte on.
template <typename G, bool GRADIENT>
__device__ __forceinline__ void cross_entropy(
    float* logits, const u32* targets, double* loss, u32* correct, int vocabulary, i64 stride, float cap, float scale,
    float smoothing, const float* weights) {
    float* row = logits + (i64)blockIdx.x * stride;
    const int target = (int)targets[blockIdx.x];
    // Read before anything is written.
    const float wanted = capped(row[target], cap);
    bool bad;
    const Peak peak = peak_of<false>(row, vocabulary, cap, bad);
    const float total = smoothing > 0 ? total_of(row, vocabulary, cap) : 0.0f;
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = bad ? (double)NAN
                               : ((double)peak.max - (double)wanted) + log((double)peak.sum) +
                                     smoothed(smoothing, wanted, total, vocabulary);
        correct[blockIdx.x] = peak.at == target;
    }
    if (!GRADIENT) return;
    // Every token has a weight of its own, where there are any.
    if (weights) scale *= weights[blockIdx.x];
    gradient_of<G>(row, vocabulary, cap, scale, smoothing, vocabulary, peak.max, peak.sum, target);
}

extern "C" __global__ void cross_entropy_loss(
    float* logits, const u32* targets, double* loss, u32* correct, int vocabulary, i64 stride, float cap, float scale,
    float smoothing, const float* weights) {
    cross_entropy<float, false>(logits, targets, loss, correct, vocabulary, stride, cap, scale, smoothing, weights);
}

extern "C" __global__ void cross_entropy_f32(
    float* logits, const u32* targets, double* loss, u32* correct, int vocabulary, i64 stride, float cap, float scale,
    float smoothing, const float* weights) {
    cross_entropy<float, true>(logits, targets, loss, correct, vocabulary, stride, cap, scale, smoothing, weights);
}

extern "C" __global__ void cross_entropy_bf16(
    float* logits, const u32* targets, double* loss, u32* correct, int vocabulary, i64 stride, float cap, float scale,
    float smoothing, const float* weights) {
    cross_entropy<bf16, true>(logits, targets, loss, correct, vocabulary, stride, cap, scale, smoothing, weights);
}

// totals[0] += the losses, totals[1] += the hits, in a fixed order; one block. Where `each` is there, it gets the
// log-probabilities, at the places `rows`.
extern "C" __global__ void cross_entropy_totals(
    const double* loss, const u32* correct, int count, double* totals, const u32* rows, float* each) {
    __shared__ double shared[32];
    double sum = 0, hits = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        sum += loss[i];
        hits += correct[i];
        if (each) each[rows[i]] = (float)-loss[i];
    }
    sum = block_sum(sum, shared);
    hits = block_sum(hits, shared);
    if (threadIdx.x == 0) {
        totals[0] += sum;
        totals[1] += hits;
    }
}
