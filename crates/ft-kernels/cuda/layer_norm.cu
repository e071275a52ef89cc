// LayerNorm: y = (x - mean) r w + b with r = 1 / sqrt(variance + eps), over rows of `size` elements; `one` is added to w
// (Nemotron). w and b have `heads` rows, of which row i of x uses i % heads; w and b may be null.
//
// Teams of threads as in rms_norm.cu. A row is read three times; after the first time it is in the cache.
#include "norm.cuh"

// Mean of the row, and r.
struct Moments {
    float mean, r;
};

template <typename T, int V, bool WIDE>
__device__ __forceinline__ Moments moments(const T* x, int size, float eps, float* shared) {
    typedef Team<WIDE> team;
    const int first = team::lane() * V, step = team::count() * V;
    float sum = 0;
    for (int i = first; i < size; i += step) {
        float p[V];
        load<V>(x + i, p);
#pragma unroll
        for (int j = 0; j < V; j++) sum += p[j];
    }
    const float mean = team::sum(sum, shared) / size;
    float squares = 0;
    for (int i = first; i < size; i += step) {
        float p[V];
        load<V>(x + i, p);
#pragma unroll
        for (int j = 0; j < V; j++) squares += (p[j] - mean) * (p[j] - mean);
    }
    return {mean, 1.0f / sqrtf(team::sum(squares, shared) / size + eps)};
}

// The factors of a pack: 1 without a weight.
template <typename W, int V>
__device__ __forceinline__ void factors(const W* w, int i, float one, float (&q)[V]) {
    if (w) {
        load<V>(w + i, q);
#pragma unroll
        for (int j = 0; j < V; j++) q[j] += one;
    } else {
#pragma unroll
        for (int j = 0; j < V; j++) q[j] = 1.0f;
    }
}

template <typename T, typename W, int V, bool WIDE>
__device__ __forceinline__ void forward(
    const T* x, const W* w, const W* b, T* y, i64 rows, int size, int heads, float eps, float one) {
    __shared__ float shared[32];
    typedef Team<WIDE> team;
    const bool mine = team::row() < rows;
    const i64 row = mine ? team::row() : rows - 1;
    x += row * size;
    y += row * size;
    const i64 at = row % heads * size;
    if (w) w += at;
    if (b) b += at;
    const int first = team::lane() * V, step = team::count() * V;
    const Moments m = moments<T, V, WIDE>(x, size, eps, shared);
    if (!mine) return;
    for (int i = first; i < size; i += step) {
        float p[V], q[V];
        load<V>(x + i, p);
        factors<W, V>(w, i, one, q);
#pragma unroll
        for (int j = 0; j < V; j++) p[j] = (p[j] - m.mean) * m.r * q[j];
        if (b) {
            load<V>(b + i, q);
#pragma unroll
            for (int j = 0; j < V; j++) p[j] += q[j];
        }
        store<V>(y + i, p);
    }
}

// With n the normalized x and g = dy w: dx = r (g - mean(g) - n mean(g n)).
template <typename T, typename W, int V, bool WIDE>
__device__ __forceinline__ void backward(
    const T* x, const W* w, const T* dy, T* dx, i64 rows, int size, int heads, float eps, float one) {
    __shared__ float shared[32];
    typedef Team<WIDE> team;
    const bool mine = team::row() < rows;
    const i64 row = mine ? team::row() : rows - 1;
    x += row * size;
    dy += row * size;
    dx += row * size;
    if (w) w += row % heads * size;
    const int first = team::lane() * V, step = team::count() * V;
    const Moments m = moments<T, V, WIDE>(x, size, eps, shared);
    float sum = 0, dot = 0;
    for (int i = first; i < size; i += step) {
        float p[V], q[V], d[V];
        load<V>(x + i, p);
        factors<W, V>(w, i, one, q);
        load<V>(dy + i, d);
#pragma unroll
        for (int j = 0; j < V; j++) {
            sum += d[j] * q[j];
            dot += d[j] * q[j] * ((p[j] - m.mean) * m.r);
        }
    }
    const float mean = team::sum(sum, shared) / size, pull = team::sum(dot, shared) / size;
    if (!mine) return;
    for (int i = first; i < size; i += step) {
        float p[V], q[V], d[V];
        load<V>(x + i, p);
        factors<W, V>(w, i, one, q);
        load<V>(dy + i, d);
#pragma unroll
        for (int j = 0; j < V; j++) d[j] = m.r * (d[j] * q[j] - mean - (p[j] - m.mean) * m.r * pull);
        store<V>(dx + i, d);
    }
}

#define NORM(NAME, T, W, V, WIDE)                                                                                    \
    extern "C" __global__ void layer_norm_forward_##NAME(                                                            \
        const T* x, const W* w, const W* b, T* y, i64 rows, int size, int heads, float eps, float one) {             \
        forward<T, W, V, WIDE>(x, w, b, y, rows, size, heads, eps, one);                                             \
    }                                                                                                                \
    extern "C" __global__ void layer_norm_backward_##NAME(                                                           \
        const T* x, const W* w, const T* dy, T* dx, i64 rows, int size, int heads, float eps, float one) {           \
        backward<T, W, V, WIDE>(x, w, dy, dx, rows, size, heads, eps, one);                                          \
    }

NORMS(f32, f32, 4)
NORMS(f32, bf16, 4)
NORMS(bf16, f32, 8)
NORMS(bf16, bf16, 8)
