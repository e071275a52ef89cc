// RMSNorm: y = x r w with r = 1 / sqrt(mean(x²) + eps), over rows of `size` elements; `one` is added to w (Gemma).
//
// A row is read twice; the second time it is still in the cache.
#include "norm.cuh"

template <typename T, typename W, int V, bool WIDE>
__device__ __forceinline__ void forward(const T* x, const W* w, T* y, i64 rows, int size, float eps, float one) {
    __shared__ float shared[32];
    typedef Team<WIDE> team;
    // Teams beyond the last row compute it again: all lanes of a warp take part in the sums.
    const bool mine = team::row() < rows;
    const i64 at = (mine ? team::row() : rows - 1) * size;
    x += at;
    y += at;
    const int first = team::lane() * V, step = team::count() * V;
    float squares = 0;
    for (int i = first; i < size; i += step) {
        float p[V];
        load<V>(x + i, p);
#pragma unroll
        for (int j = 0; j < V; j++) squares += p[j] * p[j];
    }
    const float r = 1.0f / sqrtf(team::sum(squares, shared) / size + eps);
    if (!mine) return;
    for (int i = first; i < size; i += step) {
        float p[V], q[V];
        load<V>(x + i, p);
        load<V>(w + i, q);
#pragma unroll
        for (int j = 0; j < V; j++) p[j] = p[j] * r * (q[j] + one);
        store<V>(y + i, p);
    }
}

// dx = dy w r - x r³ sum(dy w x) / size; r of each row goes to `inverse` if that is there.
template <typename T, typename W, int V, bool WIDE>
__device__ __forceinline__ void backward(
    const T* x, const W* w, const T* dy, T* dx, float* inverse, i64 rows, int size, float eps, float one) {
    __shared__ float shared[32];
    typedef Team<WIDE> team;
    const bool mine = team::row() < rows;
    const i64 row = mine ? team::row() : rows - 1;
    x += row * size;
    dy += row * size;
    dx += row * size;
    const int first = team::lane() * V, step = team::count() * V;
    float squares = 0, dot = 0;
    for (int i = first; i < size; i += step) {
        float p[V], q[V], d[V];
        load<V>(x + i, p);
        load<V>(w + i, q);
        load<V>(dy + i, d);
#pragma unroll
        for (int j = 0; j < V; j++) {
            squares += p[j] * p[j];
            dot += d[j] * (q[j] + one) * p[j];
        }
    }
    const float r = 1.0f / sqrtf(team::sum(squares, shared) / size + eps);
    const float pull = team::sum(dot, shared) / size * r * r * r;
    if (!mine) return;
    if (inverse && team::lane() == 0) inverse[row] = r;
    for (int i = first; i < size; i += step) {
        float p[V], q[V], d[V];
        load<V>(x + i, p);
        load<V>(w + i, q);
        load<V>(dy + i, d);
#pragma unroll
        for (int j = 0; j < V; j++) d[j] = d[j] * (q[j] + one) * r - p[j] * pull;
        store<V>(dx + i, d);
    }
}

#define NORM(NAME, T, W, V, WIDE)                                                                                  \
    extern "C" __global__ void rms_norm_forward_##NAME(                                                            \
        const T* x, const W* w, T* y, i64 rows, int size, float eps, float one) {                                  \
        forward<T, W, V, WIDE>(x, w, y, rows, size, eps, one);                                                     \
    }                                                                                                              \
    extern "C" __global__ void rms_norm_backward_##NAME(                                                           \
        const T* x, const W* w, const T* dy, T* dx, float* inverse, i64 rows, int size, float eps, float one) {    \
        backward<T, W, V, WIDE>(x, w, dy, dx, inverse, rows, size, eps, one);                                      \
    }

NORMS(f32, f32, 4)
NORMS(f32, bf16, 4)
NORMS(bf16, f32, 8)
NORMS(bf16, bf16, 8)
