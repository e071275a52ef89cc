// Causal depthwise convolution over the last K tokens of a document: u_t = sum over k of w_k x_{t-K+1+k}; y = u, or with
// `silu` u sigmoid(u); forward, and backward to x and to w. x, y [N, C], w [C, 1, K] with K <= TAPS.
//
// `places` [2, N]: the index of each token in its document, and the tokens from it to the end of the document.
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

// The gradients of the sums are computed again for each of the K tokens that x_t goes into.
template <typename T, typename W>
__device__ __forceinline__ void backward(
    const T* x, const W* w, const T* dy, const u32* places, T* dx, const Sizes& s) {
    const i64 n = s.tokens * s.channels;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
        const i64 t = i / s.channels;
        const int channel = i % s.channels, place = places[t];
        const int left = places[s.tokens + t], reach = left < s.kernel ? left : s.kernel;
        float sum = 0;
        for (int later = 0; later < reach; later++) {
            const float slope = s.silu ? silu_slope(sum_at(x, w, t + later, place + later, channel, s)) : 1.0f;
            const float du = widen(dy[i + (i64)later * s.channels]) * slope;
            sum += widen(w[(i64)channel * s.kernel + s.kernel - 1 - later]) * du;
        }
        narrow(sum, dx[i]);
    }
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
