// Divergences between the next-token distributions of a student and a teacher, from rows of f32 logits that come whole or
// in parts of the vocabulary, one after the other. `cross_entropy_survey` collects what the cross-entropy needs.
//
// One block for each row. Rows start every `stride` elements (a multiple of 8). Probabilities are over the ids that both
// models have, at the temperature 1 / `inverse`: q of the student, p of the teacher, m = (1 - beta) q + beta p.
#include "cross_entropy.cuh"

// The largest logit of a row so far, and the sum of e^((logit - max) inverse).
struct Soft {
    float max, sum;
};

// The numbers of a row that a log-probability needs.
struct Scale {
    float max, inverse, log_sum;

    __device__ __forceinline__ Scale(Soft soft, float inverse)
        : max(soft.max), inverse(inverse), log_sum(logf(soft.sum)) {}

    __device__ __forceinline__ float log(float logit) const { return (logit - max) * inverse - log_sum; }
};

// The divergence: KL(p|q) for beta 0, KL(q|p) for beta 1, a mixture between.
struct Terms {
    // ln (1 - beta), ln beta
    float own, other, inverse, beta;

    // ln m
    __device__ __forceinline__ float mixture(float lq, float lp) const {
        const float a = lq + own, b = lp + other, high = a > b ? a : b, low = a > b ? b : a;
        return high + log1pf(expf(low - high));
    }
    // p ln(p/m) and q ln(q/m) of one id; an id without probability has none of them.
    __device__ __forceinline__ void parts(float lq, float lp, float& a, float& b) const {
        const float q = expf(lq), p = expf(lp);
        a = b = 0;
        if (beta == 0) {
            if (p != 0) a = p * (lp - lq);
        } else if (beta == 1) {
            if (q != 0) b = q * (lq - lp);
        } else {
            const float lm = mixture(lq, lp);
            if (p != 0) a = p * (lp - lm);
            if (q != 0) b = q * (lq - lm);
        }
    }
    // The slope with respect to logit / T, where k is the sum of q ln(q/m).
    __device__ __forceinline__ float slope(float lq, float lp, float k) const {
        const float q = expf(lq);
        if (beta == 0) return q - expf(lp);
        if (beta == 1) return q * ((lq - lp) - k);
        return q * ((lq - mixture(lq, lp)) - k);
    }
    // The slope of an id outside of the stored ones: q times that of "any other" divided by its q. For beta 0 `other` is ln(p/q)
    // of "any other": q (1 - p/q), where p/q may be too large for f32.
    __device__ __forceinline__ float rest(float lq, float other) const {
        if (beta != 0) return expf(lq) * other;
        return other > 0 ? expf(lq + other) * expm1f(-other) : expf(lq) * -expm1f(other);
    }
};

// The number of `ids` (ascending) below `id`.
__device__ __forceinline__ int place(const u32* ids, int k, u32 id) {
    int low = 0, high = k;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (ids[middle] < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

__device__ __forceinline__ float block_max(float x, float* shared) {
    x = lane_max(x);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    for (int w = 0; w < (int)blockDim.x / 32; w++) x = fmaxf(x, shared[w]);
    __syncthreads();
    return x;
}

// Part `first .. first + width` of the ids that both models have. Stored `ids` [rows, k] (ascending) are left out of
// `soft`: their logits go to `picked` [rows, k].
extern "C" __global__ void distill_survey(
    const float* logits, Soft* soft, int width, i64 stride, i64 first, float cap, float inverse, const u32* ids, int k,
    float* picked) {
    __shared__ float shared[MOST_WARPS];
    const float* row = logits + (i64)blockIdx.x * stride;
    if (k > 0) {
        ids += (i64)blockIdx.x * k;
        picked += (i64)blockIdx.x * k;
    }
    // The stored ids of this part.
    const int from = place(ids, k, (u32)first), count = place(ids, k, (u32)(first + width)) - from;
    for (int i = threadIdx.x; i < count; i += blockDim.x) picked[from + i] = capped(row[ids[from + i] - first], cap);
    const auto stored = [&](int at) {
        if (count == 0) return false;
        const int i = place(ids + from, count, (u32)(first + at));
        return i < count && ids[from + i] == (u32)(first + at);
    };
    float top = -INFINITY;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float x = capped(row[i], cap);
        if (x > top && !stored(i)) top = x;
    }
    top = block_max(top, shared);
    Soft known = {-INFINITY, 0};
    if (first > 0) known = soft[blockIdx.x];
    const float max = fmaxf(top, known.max);
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        if (!stored(i)) sum += expf((capped(row[i], cap) - max) * inverse);
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x != 0) return;
    // 0: everything was stored so far. NaN: a logit was not finite.
    if (known.sum != 0) sum += known.sum * expf((known.max - max) * inverse);
    soft[blockIdx.x] = {max, sum};
}

// Adds a part of both models to sums[row]: of p ln(p/m) and of q ln(q/m).
extern "C" __global__ void distill_measure(
    const float* ours, const float* theirs, const Soft* own, const Soft* other, double* sums, int width, i64 stride,
    i64 their_stride, i64 first, float cap, float their_cap, Terms terms) {
    __shared__ double shared[MOST_WARPS];
    ours += (i64)blockIdx.x * stride;
    theirs += (i64)blockIdx.x * their_stride;
    const Scale q(own[blockIdx.x], terms.inverse), p(other[blockIdx.x], terms.inverse);
    float a = 0, b = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float s, t;
        terms.parts(q.log(capped(ours[i], cap)), p.log(capped(theirs[i], their_cap)), s, t);
        a += s;
        b += t;
    }
    const double all_a = block_sum((double)a, shared), all_b = block_sum((double)b, shared);
    if (threadIdx.x != 0) return;
    double* to = sums + 2 * (i64)blockIdx.x;
    to[0] = (first > 0 ? to[0] : 0) + all_a;
    to[1] = (first > 0 ? to[1] : 0) + all_b;
}

// The sums of a stored teacher, one row for each thread: its ids, and one more outcome for all others together, whose
// slope goes to `slopes` as `Terms::rest` takes it. `soft` becomes that of all ids.
extern "C" __global__ void distill_stored(
    Soft* soft, const float* picked, const float* log_probs, const float* rest, int k, int count, double* sums,
    float* slopes, Terms terms) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= count) return;
    picked += (i64)n * k;
    log_probs += (i64)n * k;
    const Soft others = soft[n];
    Soft all = others;
    for (int i = 0; i < k; i++) all.max = fmaxf(all.max, picked[i]);
    all.sum = others.sum == 0 ? 0 : others.sum * expf((others.max - all.max) * terms.inverse);
    for (int i = 0; i < k; i++) all.sum += expf((picked[i] - all.max) * terms.inverse);
    soft[n] = all;
    const Scale q(all, terms.inverse);
    double a = 0, b = 0, slope = 0;
    float s, t;
    for (int i = 0; i < k; i++) {
        terms.parts(q.log(picked[i]), log_probs[i], s, t);
        a += s;
        b += t;
    }
    if (others.sum != 0) {
        const float lq = q.log(others.max) + logf(others.sum), lp = rest[n];
        terms.parts(lq, lp, s, t);
        a += s;
        b += t;
        if (terms.beta == 0) {
            slope = lp - lq;
        } else {
            slope = lq - (terms.beta == 1 ? lp : terms.mixture(lq, lp));
        }
    }
    if (terms.beta != 0) slope -= b;
    sums[2 * (i64)n] = a;
    sums[2 * (i64)n + 1] = b;
    slopes[n] = (float)slope;
}

// Of each row: the divergence, the cross-entropy (NaN where a logit is not finite), and 1 where the target has the largest
// logit: [3, count].
extern "C" __global__ void distill_finish(
    const Seen* seen, const u32* targets, const double* sums, int count, float first, float second, float* out) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= count) return;
    const Seen known = seen[n];
    out[n] = known.bad ? NAN : (float)(first * sums[2 * (i64)n] + second * sums[2 * (i64)n + 1]);
    const double loss = ((double)known.max - (double)known.wanted) + log((double)known.sum);
    out[count + n] = known.bad ? NAN : (float)loss;
    out[2 * count + n] = known.at == (int)targets[n];
}

// The teacher of a gradient: a row of logits, or stored ids with their log-probabilities.
struct Other {
    const float* logits;
    const Soft* soft;
    const u32* ids;
    const float* log_probs;
    const float* slopes;
    i64 stride;
    int k;
    float cap;
};

// A part of the logits of the student becomes the gradient, of type G, from the first byte of the row on. The first
// `common` columns are ids that both models have.
template <typename G>
__device__ __forceinline__ void turn(
    float* logits, const u32* targets, const Seen* seen, const Soft* own, const double* sums, int width, int common,
    i64 stride, i64 first, float cap, float soft_factor, float hard_factor, Terms terms, Other other) {
    const i64 n = blockIdx.x;
    float* row = logits + n * stride;
    const Seen known = seen[n];
    const Scale q(own[n], terms.inverse);
    const bool live = other.logits != nullptr;
    const Scale p(live ? other.soft[n] : own[n], terms.inverse);
    const float* theirs = live ? other.logits + n * other.stride : nullptr;
    const u32* ids = live ? nullptr : other.ids + n * other.k;
    const float k = (float)sums[2 * n + 1];
    const float hard = hard_factor / known.sum;
    const i64 target = (i64)targets[n] - first;
    G* gradient = reinterpret_cast<G*>(row);
    // As in `gradient_of`: a tile is read by all before bf16 is written over it.
    for (int start = 0; start < width; start += blockDim.x) {
        const int i = start + threadIdx.x;
        float g = 0;
        if (i < width) {
            const float x = capped(row[i], cap), lq = q.log(x);
            if (i < common && live) {
                g = soft_factor * terms.slope(lq, p.log(capped(theirs[i], other.cap)), k);
            } else if (i < common) {
                const int at = place(ids, other.k, (u32)(first + i));
                const bool stored = at < other.k && ids[at] == (u32)(first + i);
                const float slope = stored ? terms.slope(lq, other.log_probs[n * other.k + at], k)
                                           : terms.rest(lq, other.slopes[n]);
                g = soft_factor * slope;
            }
            g += hard * expf(x - known.max);
            if (i == target) g -= hard_factor;
            if (cap > 0) g *= 1.0f - (x / cap) * (x / cap);
        }
        if (sizeof(G) != sizeof(float)) __syncthreads();
        if (i < width) narrow(g, gradient[i]);
    }
}

#define TURN(NAME, G)                                                                                                  \
    extern "C" __global__ void distill_turn_##NAME(                                                                    \
        float* logits, const u32* targets, const Seen* seen, const Soft* own, const double* sums, int width,           \
        int common, i64 stride, i64 first, float cap, float soft_factor, float hard_factor, Terms terms,               \
        const float* their_logits, const Soft* their_soft, const u32* ids, const float* log_probs,                     \
        const float* slopes, i64 their_stride, int k, float their_cap) {                                               \
        const Other other = {their_logits, their_soft, ids, log_probs, slopes, their_stride, k, their_cap};            \
        turn<G>(logits, targets, seen, own, sums, width, common, stride, first, cap, soft_factor, hard_factor, terms,  \
                other);                                                                                                \
    }

TURN(f32, float)
TURN(bf16, bf16)
