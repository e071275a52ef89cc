// The streams of AltUp, and the sparse gates of Gemma 3n; formulas in ops/altup and ops/sparse_gate. h has A streams of d
// elements for each token, c [A, A] coefficients, f [A] factors. One block for each token; sums over threads have a fixed order.
#include "common.cuh"

// Most streams.
constexpr int MOST = 8;

// The predictions of the streams first .. first + count - 1.
template <typename T>
__device__ __forceinline__ void predict(const T* h, const T* c, int streams, int first, int count, int d, T* y) {
    const i64 token = blockIdx.x;
    h += token * streams * d;
    c += token * streams * streams;
    y += token * count * d;
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
        for (int i = 0; i < count; i++) {
            float sum = widen(h[(i64)(first + i) * d + j]);
            for (int p = 0; p < streams; p++) sum += widen(c[(first + i) * streams + p]) * widen(h[(i64)p * d + j]);
            narrow(sum, y[(i64)i * d + j]);
        }
    }
}

// dy becomes the gradient of h; dc is that of c.
template <typename T>
__device__ __forceinline__ void predict_backward(const T* h, const T* c, int streams, int d, T* dy, T* dc) {
    __shared__ float shared[32];
    const i64 token = blockIdx.x;
    h += token * streams * d;
    c += token * streams * streams;
    dy += token * streams * d;
    dc += token * streams * streams;
    for (int i = 0; i < streams; i++) {
        for (int p = 0; p < streams; p++) {
            float sum = 0.0f;
            for (int j = threadIdx.x; j < d; j += blockDim.x) sum += widen(dy[(i64)i * d + j]) * widen(h[(i64)p * d + j]);
            sum = block_sum(sum, shared);
            if (threadIdx.x == 0) narrow(sum, dc[i * streams + p]);
        }
    }
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
        float before[MOST];
        for (int i = 0; i < streams; i++) before[i] = widen(dy[(i64)i * d + j]);
        for (int p = 0; p < streams; p++) {
            float sum = before[p];
            for (int i = 0; i < streams; i++) sum += widen(c[i * streams + p]) * before[i];
            narrow(sum, dy[(i64)p * d + j]);
        }
    }
}

// h_i += f_i (y - h_active).
template <typename T>
__device__ __forceinline__ void correct(T* h, const T* y, const T* f, int streams, int active, int d) {
    const i64 token = blockIdx.x;
    h += token * streams * d;
    y += token * d;
    f += token * streams;
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
        const float found = widen(y[j]) - widen(h[(i64)active * d + j]);
        for (int i = 0; i < streams; i++) {
            T& to = h[(i64)i * d + j];
            narrow(widen(to) + widen(f[i]) * found, to);
        }
    }
}

// p + f_active (y - p).
template <typename T>
__device__ __forceinline__ void corrected(const T* p, const T* y, const T* f, int streams, int active, int d, T* out) {
    const i64 token = blockIdx.x;
    const float factor = widen(f[token * streams + active]);
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
        const float own = widen(p[token * d + j]);
        narrow(own + factor * (widen(y[token * d + j]) - own), out[token * d + j]);
    }
}

// dy becomes the gradient of the predictions; dx is that of y, df that of f.
template <typename T>
__device__ __forceinline__ void correct_backward(
    T* dy, const T* p, const T* y, const T* f, int streams, int active, int d, T* dx, T* df) {
    __shared__ float shared[32];
    const i64 token = blockIdx.x;
    dy += token * streams * d;
    p += token * d;
    y += token * d;
    f += token * streams;
    dx += token * d;
    float sums[MOST] = {};
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
        const float found = widen(y[j]) - widen(p[j]);
        float all = 0.0f;
        for (int i = 0; i < streams; i++) {
            const float own = widen(dy[(i64)i * d + j]);
            sums[i] += own * found;
            all += widen(f[i]) * own;
        }
        T& to = dy[(i64)active * d + j];
        narrow(widen(to) - all, to);
        narrow(all, dx[j]);
    }
    for (int i = 0; i < streams; i++) {
        const float sum = block_sum(sums[i], shared);
        if (threadIdx.x == 0) narrow(sum, df[token * streams + i]);
    }
}

// Adds x to the streams first .. first + count - 1.
template <typename T>
__device__ __forceinline__ void add_to(T* h, const T* x, int streams, int first, int count, int d) {
    const i64 token = blockIdx.x;
    h += (token * streams + first) * d;
    x += token * d;
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
        for (int i = 0; i < count; i++) {
            T& to = h[(i64)i * d + j];
            narrow(widen(to) + widen(x[j]), to);
        }
    }
}

// The sum of the streams first .. first + count - 1, times `factor`.
template <typename T>
__device__ __forceinline__ void total(const T* h, int streams, int first, int count, int d, float factor, T* y) {
    const i64 token = blockIdx.x;
    h += (token * streams + first) * d;
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
        float sum = 0.0f;
        for (int i = 0; i < count; i++) sum += factor * widen(h[(i64)i * d + j]);
        narrow(sum, y[token * d + j]);
    }
}

template <typename T>
__device__ __forceinline__ float products(const T* a, const T* b, int d, float* shared) {
    float sum = 0.0f;
    for (int j = threadIdx.x; j < d; j += blockDim.x) sum += widen(a[j]) * widen(b[j]);
    return block_sum(sum, shared);
}

// Smallest mean square of what is divided.
constexpr float SMALLEST = 1e-5f;

// p with the root mean square of `like`.
template <typename T>
__device__ __forceinline__ void matched(const T* p, const T* like, int d, T* y) {
    __shared__ float shared[32];
    const i64 first = (i64)blockIdx.x * d;
    const float target = products(like + first, like + first, d, shared) / d;
    const float own = products(p + first, p + first, d, shared) / d;
    const float factor = sqrtf(target) / sqrtf(fmaxf(own, SMALLEST));
    for (int j = threadIdx.x; j < d; j += blockDim.x) narrow(factor * widen(p[first + j]), y[first + j]);
}

// The gradient of `like` is added to d_like.
template <typename T>
__device__ __forceinline__ void matched_backward(const T* p, const T* like, const T* dy, int d, T* dp, T* d_like) {
    __shared__ float shared[32];
    const i64 first = (i64)blockIdx.x * d;
    const float target = sqrtf(products(like + first, like + first, d, shared) / d);
    const float own = products(p + first, p + first, d, shared) / d;
    const float along = products(dy + first, p + first, d, shared);
    const float root = sqrtf(fmaxf(own, SMALLEST));
    const float down = own >= SMALLEST ? along * target / (root * root * root * d) : 0.0f;
    const float up = target > 0.0f ? along / (root * target * d) : 0.0f;
    for (i64 i = first + threadIdx.x; i < first + d; i += blockDim.x) {
        narrow(target / root * widen(dy[i]) - down * widen(p[i]), dp[i]);
        narrow(widen(d_like[i]) + up * widen(like[i]), d_like[i]);
    }
}

// Mean and standard deviation of a row.
template <typename T>
__device__ __forceinline__ void moments(const T* u, int d, float* shared, float& mean, float& deviation) {
    float sum = 0.0f;
    for (int j = threadIdx.x; j < d; j += blockDim.x) sum += widen(u[j]);
    mean = block_sum(sum, shared) / d;
    sum = 0.0f;
    for (int j = threadIdx.x; j < d; j += blockDim.x) sum += (widen(u[j]) - mean) * (widen(u[j]) - mean);
    deviation = sqrtf(block_sum(sum, shared) / d);
}

// max(u - cut, 0) with cut = mean + m deviation.
template <typename T>
__device__ __forceinline__ void sparse(const T* u, float m, int d, T* s) {
    __shared__ float shared[32];
    u += (i64)blockIdx.x * d;
    s += (i64)blockIdx.x * d;
    float mean, deviation;
    moments(u, d, shared, mean, deviation);
    const float cut = mean + deviation * m;
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
        // fmaxf would hide NaN.
        const float x = widen(u[j]) - cut;
        narrow(x < 0.0f ? 0.0f : x, s[j]);
    }
}

// dy becomes the gradient of u.
template <typename T>
__device__ __forceinline__ void sparse_backward(const T* u, float m, int d, T* dy) {
    __shared__ float shared[32];
    u += (i64)blockIdx.x * d;
    dy += (i64)blockIdx.x * d;
    float mean, deviation;
    moments(u, d, shared, mean, deviation);
    const float cut = mean + deviation * m;
    float all = 0.0f;
    for (int j = threadIdx.x; j < d; j += blockDim.x) all += widen(u[j]) > cut ? widen(dy[j]) : 0.0f;
    all = block_sum(all, shared);
    const float slope = deviation > 0.0f ? m * all / (d * deviation) : 0.0f;
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
        const float x = widen(u[j]), own = x > cut ? widen(dy[j]) : 0.0f;
        narrow(own - (all / d + slope * (x - mean)), dy[j]);
    }
}

#define ALTUP(T)                                                                                                     \
    extern "C" __global__ void altup_predict_##T(                                                                    \
        const T* h, const T* c, int streams, int first, int count, int d, T* y) {                                    \
        predict<T>(h, c, streams, first, count, d, y);                                                               \
    }                                                                                                                \
    extern "C" __global__ void altup_predict_backward_##T(                                                           \
        const T* h, const T* c, int streams, int d, T* dy, T* dc) {                                                  \
        predict_backward<T>(h, c, streams, d, dy, dc);                                                               \
    }                                                                                                                \
    extern "C" __global__ void altup_correct_##T(T* h, const T* y, const T* f, int streams, int active, int d) {     \
        correct<T>(h, y, f, streams, active, d);                                                                     \
    }                                                                                                                \
    extern "C" __global__ void altup_corrected_##T(                                                                  \
        const T* p, const T* y, const T* f, int streams, int active, int d, T* out) {                                \
        corrected<T>(p, y, f, streams, active, d, out);                                                              \
    }                                                                                                                \
    extern "C" __global__ void altup_correct_backward_##T(                                                           \
        T* dy, const T* p, const T* y, const T* f, int streams, int active, int d, T* dx, T* df) {                   \
        correct_backward<T>(dy, p, y, f, streams, active, d, dx, df);                                                \
    }                                                                                                                \
    extern "C" __global__ void altup_add_##T(T* h, const T* x, int streams, int first, int count, int d) {           \
        add_to<T>(h, x, streams, first, count, d);                                                                   \
    }                                                                                                                \
    extern "C" __global__ void altup_sum_##T(                                                                        \
        const T* h, int streams, int first, int count, int d, float factor, T* y) {                                  \
        total<T>(h, streams, first, count, d, factor, y);                                                            \
    }                                                                                                                \
    extern "C" __global__ void altup_matched_##T(const T* p, const T* like, int d, T* y) {                           \
        matched<T>(p, like, d, y);                                                                                   \
    }                                                                                                                \
    extern "C" __global__ void altup_matched_backward_##T(                                                           \
        const T* p, const T* like, const T* dy, int d, T* dp, T* d_like) {                                           \
        matched_backward<T>(p, like, dy, d, dp, d_like);                                                             \
    }                                                                                                                \
    extern "C" __global__ void sparse_gate_##T(const T* u, float m, int d, T* s) { sparse<T>(u, m, d, s); }          \
    extern "C" __global__ void sparse_gate_backward_##T(const T* u, float m, int d, T* dy) {                         \
        sparse_backward<T>(u, m, d, dy);                                                                             \
    }

typedef float f32;
ALTUP(f32)
ALTUP(bf16)
