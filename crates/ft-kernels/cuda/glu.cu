// Gated linear units: y = act(gate) up, and dgate = dy up act'(gate), dup = dy act(gate); the function alone: y = act(x),
// and dx = dy act'(x).
// Packs as in elementwise.cu.
#include "common.cuh"

// Value and slope of the function on the gate.
struct Curve {
    float value, slope;
};

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

struct Silu {
    static __device__ __forceinline__ float value(float x) { return x * sigmoid(x); }
    static __device__ __forceinline__ Curve curve(float x) {
        // 1 - sigmoid(x) is sigmoid(-x), without cancellation.
        const float s = sigmoid(x), rest = sigmoid(-x);
        return {x * s, s + x * s * rest};
    }
};

// x (1 + tanh z) / 2, which is x sigmoid(2 z): that way small values keep their digits.
struct GeluTanh {
    // sqrt(2 / pi) and the cubic coefficient.
    static constexpr float SCALE = 0.7978845608028654f, CUBIC = 0.044715f;
    static __device__ __forceinline__ float value(float x) {
        return x * sigmoid(2.0f * SCALE * (x + CUBIC * x * x * x));
    }
    static __device__ __forceinline__ Curve curve(float x) {
        const float square = CUBIC * x * x;
        const float z = 2.0f * SCALE * (x + x * square);
        const float gate = sigmoid(z), rise = gate * sigmoid(-z);
        // Where the curve is flat the slope is 0, also where `square` overflows.
        const float bend = rise == 0.0f ? 0.0f : rise * (2.0f * SCALE * x * (1.0f + 3.0f * square));
        return {x * gate, gate + bend};
    }
};

struct Gelu {
    static __device__ __forceinline__ float value(float x) { return x * (0.5f * erfcf(-0.70710678118654752f * x)); }
    static __device__ __forceinline__ Curve curve(float x) {
        const float gate = 0.5f * erfcf(-0.70710678118654752f * x);
        const float density = 0.3989422804014327f * expf(-0.5f * x * x);
        return {x * gate, gate + x * density};
    }
};

struct Sigmoid {
    static __device__ __forceinline__ float value(float x) { return sigmoid(x); }
    static __device__ __forceinline__ Curve curve(float x) {
        const float s = sigmoid(x);
        return {s, s * sigmoid(-x)};
    }
};

struct Identity {
    static __device__ __forceinline__ float value(float x) { return x; }
    static __device__ __forceinline__ Curve curve(float x) { return {x, 1.0f}; }
};

struct Relu2 {
    static __device__ __forceinline__ float value(float x) { return x < 0.0f ? 0.0f : x * x; }
    static __device__ __forceinline__ Curve curve(float x) {
        return x < 0.0f ? Curve{0.0f, 0.0f} : Curve{x * x, 2.0f * x};
    }
};

template <typename F, typename T>
__device__ __forceinline__ void forward(const T* gate, const T* up, T* y, i64 n, i64 packs) {
    constexpr int V = Full<T>::V;
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < packs; i += step) {
        float g[V], u[V];
        load<V>(gate + i * V, g);
        load<V>(up + i * V, u);
#pragma unroll
        for (int j = 0; j < V; j++) g[j] = F::value(g[j]) * u[j];
        store<V>(y + i * V, g);
    }
    for (i64 i = packs * V + first; i < n; i += step) narrow(F::value(widen(gate[i])) * widen(up[i]), y[i]);
}

template <typename F, typename T>
__device__ __forceinline__ void backward(const T* gate, const T* up, const T* dy, T* dgate, T* dup, i64 n, i64 packs) {
    constexpr int V = Full<T>::V;
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < packs; i += step) {
        float g[V], u[V], d[V];
        load<V>(gate + i * V, g);
        load<V>(up + i * V, u);
        load<V>(dy + i * V, d);
#pragma unroll
        for (int j = 0; j < V; j++) {
            const Curve curve = F::curve(g[j]);
            g[j] = d[j] * u[j] * curve.slope;
            d[j] = d[j] * curve.value;
        }
        store<V>(dgate + i * V, g);
        store<V>(dup + i * V, d);
    }
    for (i64 i = packs * V + first; i < n; i += step) {
        const Curve curve = F::curve(widen(gate[i]));
        const float d = widen(dy[i]);
        narrow(d * widen(up[i]) * curve.slope, dgate[i]);
        narrow(d * curve.value, dup[i]);
    }
}

template <typename F, typename T>
__device__ __forceinline__ void alone(const T* x, T* y, i64 n, i64 packs) {
    constexpr int V = Full<T>::V;
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < packs; i += step) {
        float p[V];
        load<V>(x + i * V, p);
#pragma unroll
        for (int j = 0; j < V; j++) p[j] = F::value(p[j]);
        store<V>(y + i * V, p);
    }
    for (i64 i = packs * V + first; i < n; i += step) narrow(F::value(widen(x[i])), y[i]);
}

template <typename F, typename T>
__device__ __forceinline__ void alone_backward(const T* x, const T* dy, T* dx, i64 n, i64 packs) {
    constexpr int V = Full<T>::V;
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < packs; i += step) {
        float p[V], d[V];
        load<V>(x + i * V, p);
        load<V>(dy + i * V, d);
#pragma unroll
        for (int j = 0; j < V; j++) p[j] = d[j] * F::curve(p[j]).slope;
        store<V>(dx + i * V, p);
    }
    for (i64 i = packs * V + first; i < n; i += step) narrow(widen(dy[i]) * F::curve(widen(x[i])).slope, dx[i]);
}

#define GLU(NAME, F, T)                                                                                             \
    extern "C" __global__ void NAME##_forward_##T(const T* gate, const T* up, T* y, i64 n, i64 packs) { \
        forward<F, T>(gate, up, y, n, packs);                                                                       \
    }                                                                                                               \
    extern "C" __global__ void NAME##_backward_##T(                                                                 \
        const T* gate, const T* up, const T* dy, T* dgate, T* dup, i64 n, i64 packs) {                              \
        backward<F, T>(gate, up, dy, dgate, dup, n, packs);                                                         \
    }                                                                                                               \
    extern "C" __global__ void NAME##_alone_forward_##T(const T* x, T* y, i64 n, i64 packs) {                       \
        alone<F, T>(x, y, n, packs);                                                                                \
    }                                                                                                               \
    extern "C" __global__ void NAME##_alone_backward_##T(const T* x, const T* dy, T* dx, i64 n, i64 packs) {        \
        alone_backward<F, T>(x, dy, dx, n, packs);                                                                  \
    }

typedef float f32;
GLU(silu, Silu, f32)
GLU(silu, Silu, bf16)
GLU(gelu_tanh, GeluTanh, f32)
GLU(gelu_tanh, GeluTanh, bf16)
GLU(gelu, Gelu, f32)
GLU(gelu, Gelu, bf16)
GLU(sigmoid, Sigmoid, f32)
GLU(sigmoid, Sigmoid, bf16)
GLU(identity, Identity, f32)
GLU(identity, Identity, bf16)
GLU(relu2, Relu2, f32)
GLU(relu2, Relu2, bf16)
