// Causal depthwise convolution over the last K tokens of a document: u_t = sum over k of w_k x_{t-K+1+k}; y = u, or with
// `silu` u sigmoid(u); forward, and backward to x and to w. x, y [N, C], w [C, 1, K] with K <= TAPS.
//
// `places` [N]: the index of each token in its document.
#include "common.cuh"

constexpr int TAPS = 8;

struct Sizes {
    i64 tokens;
    int channels, kernel, silu;
};

template <typename T, typename W>
__device__ __forceinline__ float sum_at(const T* x, const W* w, i64 t, int place, int channel, const Sizes& s) {
    float sum = 0;
    const int absent = s.kernel - 1 - place;
    for (int k = absent > 0 ? absent : 0; k < s.kernel; k++)
        sum += widen(w[(i64)channel * s.kernel + k]) * widen(x[(t - s.kernel + 1 + k) * s.channels + channel]);
    return sum;
}

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

__device__ __forceinline__ float silu_slope(float u) {
    const float s = sigmoid(u);
    return s + u * s * sigmoid(-u);
}

template <typename T, typename W>
__device__ __forceinline__ void forward(const T* x, const W* w, const u32* places, T* y, const Sizes& s) {
    const i64 n = s.tokens * s.channels;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
        const i64 t = i / s.channels;
        const float u = sum_at(x, w, t, places[t], i % s.channels, s);
        narrow(s.silu ? u * sigmoid(u) : u, y[i]);
    }
}

// Tokens of a thread of `backward`.
constexpr int RUN = 16;

// A thread goes through RUN tokens of a channel, and K - 1 more to whose sums these go. It has the last K elements of x
// and the unfinished gradients of the last K tokens in registers. `w` has K taps, the first ones 0 if there are fewer.
template <int K, typename T>
__device__ __forceinline__ void backward_run(
    const T* __restrict__ x, const float (&w)[K], const T* __restrict__ dy, const u32* __restrict__ places,
    T* __restrict__ dx, i64 start, int channel, const Sizes& s) {
    const i64 end = start + RUN < s.tokens ? start + RUN : s.tokens;
    float window[K] = {}, sum[K] = {};
#pragma unroll
    for (int k = 0; k < K - 1; k++) {
        const i64 t = start - (K - 1) + k;
        if (t >= 0) window[k + 1] = widen(x[t * s.channels + channel]);
    }
#pragma unroll 4
    for (i64 t = start; t < end + K - 1; t++) {
        float du = 0;
        int place = 0;
#pragma unroll
        for (int k = 0; k < K - 1; k++) window[k] = window[k + 1];
#pragma unroll
        for (int k = K - 1; k > 0; k--) sum[k] = sum[k - 1];
        sum[0] = 0;
        if (t < s.tokens) {
            const i64 at = t * s.channels + channel;
            place = places[t];
            window[K - 1] = widen(x[at]);
            float u = 0;
#pragma unroll
            for (int k = 0; k < K; k++)
                if (K - 1 - k <= place) u += w[k] * window[k];
            du = widen(dy[at]) * (s.silu ? silu_slope(u) : 1.0f);
        }
#pragma unroll
        for (int earlier = 0; earlier < K; earlier++)
            if (earlier <= place) sum[earlier] += w[K - 1 - earlier] * du;
        const i64 done = t - (K - 1);
        if (done >= start && done < end) narrow(sum[K - 1], dx[done * s.channels + channel]);
    }
}

template <int K, typename T, typename W>
__device__ __forceinline__ void backward_runs(
    const T* x, const W* w, const T* dy, const u32* places, T* dx, const Sizes& s) {
    const i64 n = (s.tokens + RUN - 1) / RUN * s.channels;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
        const int channel = i % s.channels;
        float taps[K];
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int from = k - (K - s.kernel);
            taps[k] = from >= 0 ? widen(w[(i64)channel * s.kernel + from]) : 0.0f;
        }
        backward_run<K>(x, taps, dy, places, dx, i / s.channels * RUN, channel, s);
    }
}

template <typename T, typename W>
__device__ __forceinline__ void backward(
    const T* x, const W* w, const T* dy, const u32* places, T* dx, const Sizes& s) {
    if (s.kernel <= 4) backward_runs<4>(x, w, dy, places, dx, s);
    else backward_runs<TAPS>(x, w, dy, places, dx, s);
}

// partial[part][c][k] = the gradient of w over the `part` tokens of blockIdx.y; a thread has a channel.
template <typename T, typename W>
__device__ __forceinline__ void weight(
    const T* x, const W* w, const T* dy, const u32* places, float* partial, const Sizes& s, i64 part) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= s.channels) return;
    const i64 start = (i64)blockIdx.y * part, end = start + part < s.tokens ? start + part : s.tokens;
    float sum[TAPS] = {};
    for (i64 t = start; t < end; t++) {
        const int place = places[t];
        const float slope = s.silu ? silu_slope(sum_at(x, w, t, place, channel, s)) : 1.0f;
        const float du = widen(dy[t * s.channels + channel]) * slope;
#pragma unroll
        for (int earlier = 0; earlier < TAPS; earlier++)
            if (earlier < s.kernel && earlier <= place) sum[earlier] += du * widen(x[(t - earlier) * s.channels + channel]);
    }
#pragma unroll
    for (int earlier = 0; earlier < TAPS; earlier++)
        if (earlier < s.kernel)
            partial[((i64)blockIdx.y * s.channels + channel) * s.kernel + s.kernel - 1 - earlier] = sum[earlier];
}

#define SHORT_CONV(NAME, T, W)                                                                                    \
    extern "C" __global__ void short_conv_forward_##NAME(                                                         \
        const T* x, const W* w, const u32* places, T* y, i64 tokens, int channels, int kernel, int silu) {        \
        forward<T, W>(x, w, places, y, {tokens, channels, kernel, silu});                                         \
    }                                                                                                             \
    extern "C" __global__ void short_conv_backward_##NAME(                                                        \
        const T* x, const W* w, const T* dy, const u32* places, T* dx, i64 tokens, int channels, int kernel,      \
        int silu) {                                                                                               \
        backward<T, W>(x, w, dy, places, dx, {tokens, channels, kernel, silu});                                   \
    }                                                                                                             \
    extern "C" __global__ void short_conv_weight_##NAME(                                                          \
        const T* x, const W* w, const T* dy, const u32* places, float* partial, i64 tokens, int channels,         \
        int kernel, int silu, i64 part) {                                                                         \
        weight<T, W>(x, w, dy, places, partial, {tokens, channels, kernel, silu}, part);                          \
    }

SHORT_CONV(f32_f32, float, float)
SHORT_CONV(f32_bf16, float, bf16)
SHORT_CONV(bf16_f32, bf16, float)
SHORT_CONV(bf16_bf16, bf16, bf16)
