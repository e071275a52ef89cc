// Softmax, loss and gradient of rows of logits in one kernel, the gradient in the place of the logits.
//
// A row has `vocabulary` f32 logits and starts every `stride` elements (a multiple of 8). With a cap, a logit becomes
// cap tanh(logit / cap) first. One block for each row.
#include "common.cuh"

constexpr int V = 4, MOST_WARPS = 32;

// The largest logit, the first place where it stands, and the sum of e^(logit - max).
struct Peak {
    float max, sum;
    int at;
};

// The larger of two; of equals the earlier.
__device__ __forceinline__ void join(float& max, int& at, float other, int place) {
    if (other > max || (other == max && place < at)) {
        max = other;
        at = place;
    }
}

__device__ __forceinline__ float capped(float x, float cap) {
    return cap > 0 ? cap * tanhf(x / cap) : x;
}

// `bad` becomes true where a logit is infinite or NaN.
__device__ __forceinline__ Peak peak_of(const float* row, int vocabulary, float cap, bool& bad) {
    __shared__ float maxima[MOST_WARPS], sums[MOST_WARPS];
    __shared__ int places[MOST_WARPS];
    float max = -INFINITY, sum = 0;
    int at = 0x7fffffff;
    bool wrong = false;
    for (int i = threadIdx.x * V; i < vocabulary; i += blockDim.x * V) {
        float x[V];
        load<V>(row + i, x);
        float top = max;
#pragma unroll
        for (int j = 0; j < V; j++) {
            if (i + j < vocabulary) {
                wrong |= odd(x[j]);
                x[j] = capped(x[j], cap);
                if (x[j] > top) {
                    top = x[j];
                    at = i + j;
                }
            } else {
                x[j] = -INFINITY;
            }
        }
        if (top > max) {
            sum *= expf(max - top);
            max = top;
        }
#pragma unroll
        for (int j = 0; j < V; j++) sum += expf(x[j] - max);
    }
    // The largest of all, then the sums relative to it.
    float top = max;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, top, step);
        const int place = __shfl_xor_sync(0xffffffffu, at, step);
        join(top, at, other, place);
    }
    const int warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) {
        maxima[threadIdx.x / 32] = top;
        places[threadIdx.x / 32] = at;
    }
    bad = __syncthreads_or(wrong);
    for (int w = 0; w < warps; w++) join(top, at, maxima[w], places[w]);
    // A thread that saw nothing has the sum 0 and the largest -infinity.
    sum = block_sum(max == -INFINITY ? 0.0f : sum * expf(max - top), sums);
    return {top, sum, at};
}

// loss[row] (NaN where a logit is not finite) and correct[row]: is the target the first of the largest? With gradients
// the row becomes scale (softmax - target) times the slope of the cap, of type G, from its first byte on.
template <typename G, bool GRADIENT>
__device__ __forceinline__ void cross_entropy(
    float* logits, const u32* targets, double* loss, u32* correct, int vocabulary, i64 stride, float cap, float scale,
    const float* weights) {
    float* row = logits + (i64)blockIdx.x * stride;
    const int target = (int)targets[blockIdx.x];
    // Read before anything is written.
    const float wanted = capped(row[target], cap);
    bool bad;
    const Peak peak = peak_of(row, vocabulary, cap, bad);
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = bad ? (double)NAN : ((double)peak.max - (double)wanted) + log((double)peak.sum);
        correct[blockIdx.x] = peak.at == target;
    }
    if (!GRADIENT) return;
    // Every token has a weight of its own, where there are any.
    if (weights) scale *= weights[blockIdx.x];
    const float factor = scale / peak.sum;
    G* gradient = reinterpret_cast<G*>(row);
    // bf16 gradients are half as wide: a tile is read by all before it is written, and what is written of it lies in
    // places that were read already.
    for (int start = 0; start < vocabulary; start += blockDim.x * V) {
        const int i = start + threadIdx.x * V;
        float x[V];
        if (i < vocabulary) {
            load<V>(row + i, x);
#pragma unroll
            for (int j = 0; j < V; j++) {
                const float c = capped(x[j], cap);
                const float slope = cap > 0 ? 1.0f - (c / cap) * (c / cap) : 1.0f;
                x[j] = factor * expf(c - peak.max) * slope;
                if (i + j == target) x[j] -= scale * slope;
            }
        }
        if (sizeof(G) != sizeof(float)) __syncthreads();
        // The last pack may reach into the gap between the rows: it belongs to this row.
        if (i < vocabulary) store<V>(gradient + i, x);
    }
}

extern "C" __global__ void cross_entropy_loss(
    float* logits, const u32* targets, double* loss, u32* correct, int vocabulary, i64 stride, float cap, float scale,
    const float* weights) {
    cross_entropy<float, false>(logits, targets, loss, correct, vocabulary, stride, cap, scale, weights);
}

extern "C" __global__ void cross_entropy_f32(
    float* logits, const u32* targets, double* loss, u32* correct, int vocabulary, i64 stride, float cap, float scale,
    const float* weights) {
    cross_entropy<float, true>(logits, targets, loss, correct, vocabulary, stride, cap, scale, weights);
}

extern "C" __global__ void cross_entropy_bf16(
    float* logits, const u32* targets, double* loss, u32* correct, int vocabulary, i64 stride, float cap, float scale,
    const float* weights) {
    cross_entropy<bf16, true>(logits, targets, loss, correct, vocabulary, stride, cap, scale, weights);
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
