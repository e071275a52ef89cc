// Shared by the loss of whole rows of logits and that of parts of them. A row starts every `stride` elements (a multiple
// of 8); with a cap, a logit becomes cap tanh(logit / cap) first. One block for each row.
#pragma once
#include "common.cuh"

constexpr int V = 4, MOST_WARPS = 32;

// The largest logit, the first place where it stands, the sum of e^(logit - max), and that of
// (logit - max) e^(logit - max).
struct Peak {
    float max, sum, mean;
    int at;
};

// Of the logits of a row so far: as in `Peak`, with the place in the whole vocabulary, and the target's logit.
struct Seen {
    float max, sum, mean;
    int at;
    float wanted;
    u32 bad;
    // The sum of the logits; 0 without label smoothing.
    float total;
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

// The sums of a peak relative to a larger `top`. Nothing was seen where the largest is -infinity.
template <bool MEAN>
__device__ __forceinline__ void lift(Peak& peak, float top) {
    if (peak.max == -INFINITY) {
        peak.sum = peak.mean = 0;
    } else {
        const float down = peak.max - top, factor = expf(down);
        if (MEAN) peak.mean = factor * (peak.mean + down * peak.sum);
        peak.sum *= factor;
    }
    peak.max = top;
}

// Of `width` logits, known to all threads. `bad` becomes true where a logit is infinite or NaN. Without MEAN the last sum
// stays 0.
template <bool MEAN>
__device__ __forceinline__ Peak peak_of(const float* row, int width, float cap, bool& bad) {
    __shared__ float maxima[MOST_WARPS], sums[MOST_WARPS];
    __shared__ int places[MOST_WARPS];
    Peak own = {-INFINITY, 0, 0, 0x7fffffff};
    bool wrong = false;
    for (int i = threadIdx.x * V; i < width; i += blockDim.x * V) {
        float x[V];
        load<V>(row + i, x);
        float top = own.max;
#pragma unroll
        for (int j = 0; j < V; j++) {
            if (i + j < width) {
                wrong |= odd(x[j]);
                x[j] = capped(x[j], cap);
                if (x[j] > top) {
                    top = x[j];
                    own.at = i + j;
                }
            } else {
                x[j] = -INFINITY;
            }
        }
        if (top > own.max) lift<MEAN>(own, top);
#pragma unroll
        for (int j = 0; j < V; j++) {
            const float e = expf(x[j] - own.max);
            own.sum += e;
            if (MEAN && i + j < width) own.mean += e * (x[j] - own.max);
        }
    }
    // The largest of all, then the sums relative to it.
    float top = own.max;
    int at = own.at;
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
    lift<MEAN>(own, top);
    own.sum = block_sum(own.sum, sums);
    if (MEAN) own.mean = block_sum(own.mean, sums);
    own.at = at;
    return own;
}

// The sum of `width` logits, known to all threads.
__device__ __forceinline__ float total_of(const float* row, int width, float cap) {
    __shared__ float sums[MOST_WARPS];
    float sum = 0;
    for (int i = threadIdx.x * V; i < width; i += blockDim.x * V) {
        float x[V];
        load<V>(row + i, x);
#pragma unroll
        for (int j = 0; j < V; j++) {
            if (i + j < width) sum += capped(x[j], cap);
        }
    }
    return block_sum(sum, sums);
}

// The part of the loss that label smoothing adds, from the target's logit and the sum of all.
__device__ __forceinline__ double smoothed(float smoothing, float wanted, float total, int vocabulary) {
    return smoothing > 0 ? (double)smoothing * ((double)wanted - (double)total / vocabulary) : 0.0;
}

// The row becomes scale (softmax - even - (1 - smoothing) target) times the slope of the cap, of type G, from its first
// byte on; even: smoothing / vocabulary. `max` and `sum` are those of the whole vocabulary; `target` is a place in this
// row, or lies outside of it.
template <typename G>
__device__ __forceinline__ void gradient_of(
    float* row, int width, float cap, float scale, float smoothing, int vocabulary, float max, float sum, int target) {
    const float factor = scale / sum, even = scale * smoothing / vocabulary, own = scale * (1.0f - smoothing);
    G* gradient = reinterpret_cast<G*>(row);
    // bf16 gradients are half as wide: a tile is read by all before it is written, and what is written of it lies in
    // places that were read already.
    for (int start = 0; start < width; start += blockDim.x * V) {
        const int i = start + threadIdx.x * V;
        float x[V];
        if (i < width) {
            load<V>(row + i, x);
#pragma unroll
            for (int j = 0; j < V; j++) {
                const float c = capped(x[j], cap);
                const float slope = cap > 0 ? 1.0f - (c / cap) * (c / cap) : 1.0f;
                x[j] = (factor * expf(c - max) - even) * slope;
                if (i + j == target) x[j] -= own * slope;
            }
        }
        if (sizeof(G) != sizeof(float)) __syncthreads();
        // The last pack may reach into the gap between the rows: it belongs to this row.
        if (i < width) store<V>(gradient + i, x);
    }
}
