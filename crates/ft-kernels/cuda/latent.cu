// The heads of latent attention: a part of each query and key is rotated, all heads share the rotated part of the key, and
// heads are filled with zeros to one width. Rotated elements come first in a filled head. One block for each token.
#include "common.cuh"

// Sizes of a head: elements that are not rotated, rotated ones, those of a value; the width of a filled head. Element i turns
// with i + rotary / 2, or (neighbors) 2i with 2i + 1.
struct Heads {
    int heads, plain, rotary, value, width, neighbors;
};

// Element i of the rotation of the elements that `at` gives.
template <typename F>
__device__ __forceinline__ float turned(const Heads& h, int i, const float* cos, const float* sin, float sign, F at) {
    const int half = h.rotary / 2;
    const int pair = h.neighbors ? i / 2 : i < half ? i : i - half;
    const int first = h.neighbors ? 2 * pair : pair, second = h.neighbors ? first + 1 : pair + half;
    const float a = at(first), b = at(second), c = cos[pair], s = sin[pair] * sign;
    return i == first ? a * c - b * s : b * c + a * s;
}

// x [heads (plain + rotary)] to y [heads width].
template <typename T>
__device__ __forceinline__ void queries(const T* x, const float* cos, const float* sin, Heads h, T* y) {
    const i64 token = blockIdx.x;
    const int from = h.plain + h.rotary;
    cos += token * (h.rotary / 2);
    sin += token * (h.rotary / 2);
    x += token * h.heads * from;
    y += token * h.heads * h.width;
    for (int e = threadIdx.x; e < h.heads * h.width; e += blockDim.x) {
        const int i = e % h.width;
        const T* own = x + e / h.width * from;
        float value = 0.0f;
        if (i < h.rotary) {
            value = turned(h, i, cos, sin, 1.0f, [&](int j) { return widen(own[h.plain + j]); });
        } else if (i < from) {
            value = widen(own[i - h.rotary]);
        }
        narrow(value, y[e]);
    }
}

template <typename T>
__device__ __forceinline__ void queries_backward(const T* dq, const float* cos, const float* sin, Heads h, T* dx) {
    const i64 token = blockIdx.x;
    const int to = h.plain + h.rotary;
    cos += token * (h.rotary / 2);
    sin += token * (h.rotary / 2);
    dq += token * h.heads * h.width;
    dx += token * h.heads * to;
    for (int e = threadIdx.x; e < h.heads * to; e += blockDim.x) {
        const int i = e % to;
        const T* own = dq + e / to * h.width;
        const float value = i < h.plain ? widen(own[h.rotary + i])
                                        : turned(h, i - h.plain, cos, sin, -1.0f, [&](int j) { return widen(own[j]); });
        narrow(value, dx[e]);
    }
}

// kv [heads (plain + value)] and the last `rotary` elements of low [wide] to k and v [heads width].
template <typename T>
__device__ __forceinline__ void keys_values(
    const T* kv, const T* low, const float* cos, const float* sin, Heads h, int wide, T* k, T* v) {
    const i64 token = blockIdx.x;
    const int from = h.plain + h.value;
    cos += token * (h.rotary / 2);
    sin += token * (h.rotary / 2);
    kv += token * h.heads * from;
    low += (token + 1) * wide - h.rotary;
    k += token * h.heads * h.width;
    v += token * h.heads * h.width;
    for (int e = threadIdx.x; e < h.heads * h.width; e += blockDim.x) {
        const int i = e % h.width;
        const T* own = kv + e / h.width * from;
        float key = 0.0f;
        if (i < h.rotary) {
            key = turned(h, i, cos, sin, 1.0f, [&](int j) { return widen(low[j]); });
        } else if (i < h.rotary + h.plain) {
            key = widen(own[i - h.rotary]);
        }
        narrow(key, k[e]);
        narrow(i < h.value ? widen(own[h.plain + i]) : 0.0f, v[e]);
    }
}

// Also the sum over the heads of the gradient of the rotated part, d_rotary [rotary].
template <typename T>
__device__ __forceinline__ void keys_values_backward(
    const T* dk, const T* dv, const float* cos, const float* sin, Heads h, T* d_kv, T* d_rotary) {
    const i64 token = blockIdx.x;
    const int to = h.plain + h.value;
    cos += token * (h.rotary / 2);
    sin += token * (h.rotary / 2);
    dk += token * h.heads * h.width;
    dv += token * h.heads * h.width;
    d_kv += token * h.heads * to;
    d_rotary += token * h.rotary;
    for (int e = threadIdx.x; e < h.heads * to; e += blockDim.x) {
        const int i = e % to;
        const i64 first = (i64)(e / to) * h.width;
        d_kv[e] = i < h.plain ? dk[first + h.rotary + i] : dv[first + i - h.plain];
    }
    for (int i = threadIdx.x; i < h.rotary; i += blockDim.x) {
        const float value = turned(h, i, cos, sin, -1.0f, [&](int j) {
            float sum = 0.0f;
            for (int head = 0; head < h.heads; head++) sum += widen(dk[(i64)head * h.width + j]);
            return sum;
        });
        narrow(value, d_rotary[i]);
    }
}

// Heads of `from` elements to heads of `to`, cut or filled with zeros.
template <typename T>
__device__ __forceinline__ void resize(const T* x, int heads, int from, int to, T* y) {
    x += (i64)blockIdx.x * heads * from;
    y += (i64)blockIdx.x * heads * to;
    for (int e = threadIdx.x; e < heads * to; e += blockDim.x) {
        const int i = e % to;
        narrow(i < from ? widen(x[e / to * from + i]) : 0.0f, y[e]);
    }
}

#define LATENT(T)                                                                                                      \
    extern "C" __global__ void latent_queries_##T(                                                                     \
        const T* x, const float* cos, const float* sin, int heads, int plain, int rotary, int value, int width,        \
        int neighbors, T* y) {                                                                                         \
        queries<T>(x, cos, sin, {heads, plain, rotary, value, width, neighbors}, y);                                   \
    }                                                                                                                  \
    extern "C" __global__ void latent_queries_backward_##T(                                                            \
        const T* dq, const float* cos, const float* sin, int heads, int plain, int rotary, int value, int width,       \
        int neighbors, T* dx) {                                                                                        \
        queries_backward<T>(dq, cos, sin, {heads, plain, rotary, value, width, neighbors}, dx);                        \
    }                                                                                                                  \
    extern "C" __global__ void latent_keys_values_##T(                                                                 \
        const T* kv, const T* low, const float* cos, const float* sin, int heads, int plain, int rotary, int value,    \
        int width, int neighbors, int wide, T* k, T* v) {                                                              \
        keys_values<T>(kv, low, cos, sin, {heads, plain, rotary, value, width, neighbors}, wide, k, v);                \
    }                                                                                                                  \
    extern "C" __global__ void latent_keys_values_backward_##T(                                                        \
        const T* dk, const T* dv, const float* cos, const float* sin, int heads, int plain, int rotary, int value,     \
        int width, int neighbors, T* d_kv, T* d_rotary) {                                                              \
        keys_values_backward<T>(dk, dv, cos, sin, {heads, plain, rotary, value, width, neighbors}, d_kv, d_rotary);    \
    }                                                                                                                  \
    extern "C" __global__ void latent_resize_##T(const T* x, int heads, int from, int to, T* y) {                      \
        resize<T>(x, heads, from, to, y);                                                                              \
    }

typedef float f32;
LATENT(f32)
LATENT(bf16)
