// One optimizer step of many parameters in one launch. The arithmetic is that of the CPU, operation by operation.
//
// A weight is f32; or bf16 whose f32 master has its lower 16 bits in `low`; or bf16 that is rounded by random numbers
// (ops/master.rs of ft): element e takes bits 16 (e % 4).. of number e / 4 of the stream `key`.
#include "many.cuh"
#include "random.cuh"

constexpr int V = 4, GROUPS = 16;

// As `Entry` of src/ops/cuda/optimizer.rs.
struct Entry {
    void* weight;
    unsigned short* low;
    const void* gradient;
    float* m;
    float* v;
    u64 key;
    i64 n;
    u32 first;
    // bit 0: the weight is bf16, bit 1: the gradient is bf16, bit 2: all addresses are aligned, bit 3: rounded by random
    // numbers, from bit 8 on: the group
    u32 form;
};

// Numbers that a group of parameters shares: AdamW's keep, step size and root of the second correction; SGD's rate,
// decay and (as 1 or 0) whether this is the first step; Lion's keep and rate; the rate of descent by sign.
struct Groups {
    float at[GROUPS][3];
};

// Numbers that all parameters share: the betas and eps, SGD's momentum in `b1`; the factor of the gradients.
struct Common {
    float b1, b2, eps, coefficient;
};

struct AdamW {
    static constexpr bool SECOND = true;
    static __device__ __forceinline__ float apply(
        const Common& common, const float* group, float coefficient, float w, float g, float& m, float& v) {
        g = mul(g, coefficient);
        m = plus(m, mul(minus(g, m), minus(1.0f, common.b1)));
        v = plus(mul(v, common.b2), mul(mul(g, g), minus(1.0f, common.b2)));
        const float denominator = plus(quotient(root(v), group[2]), common.eps);
        return minus(mul(w, group[0]), mul(group[1], quotient(m, denominator)));
    }
};

// Without momentum every step is a first one.
struct Sgd {
    static constexpr bool SECOND = false;
    static __device__ __forceinline__ float apply(
        const Common& common, const float* group, float coefficient, float w, float g, float& m, float&) {
        g = plus(mul(g, coefficient), mul(group[1], w));
        m = group[2] != 0.0f ? g : plus(mul(common.b1, m), g);
        return minus(w, mul(group[0], m));
    }
};

__device__ __forceinline__ float sign(float x) {
    return (x > 0 ? 1.0f : 0.0f) - (x < 0 ? 1.0f : 0.0f);
}

struct Lion {
    static constexpr bool SECOND = false;
    static __device__ __forceinline__ float apply(
        const Common& common, const float* group, float coefficient, float w, float g, float& m, float&) {
        g = mul(g, coefficient);
        const float direction = sign(plus(mul(m, common.b1), mul(g, minus(1.0f, common.b1))));
        m = plus(mul(m, common.b2), mul(g, minus(1.0f, common.b2)));
        return minus(mul(w, group[0]), mul(group[1], direction));
    }
};

// Against the sign of the gradient.
struct Sign {
    static constexpr bool SECOND = false;
    static __device__ __forceinline__ float apply(
        const Common&, const float* group, float, float w, float g, float&, float&) {
        return minus(w, mul(group[0], sign(g)));
    }
};

// The exact value of a bf16 weight and its lower half, and back: nearest, ties away from zero.
__device__ __forceinline__ float master(unsigned short high, unsigned short low) {
    return float_of((((u32)high << 16) - ((u32)(low >> 15) << 16)) | low);
}

__device__ __forceinline__ unsigned short upper(float x) {
    return (unsigned short)((bits_of(x) + 0x8000u) >> 16);
}

__device__ __forceinline__ unsigned short lower(float x) {
    return (unsigned short)bits_of(x);
}

template <int N>
__device__ __forceinline__ void load_gradient(const Entry& e, i64 at, float (&g)[N]) {
    if (e.form & 2) {
        load<N>((const bf16*)e.gradient + at, g);
    } else {
        load<N>((const float*)e.gradient + at, g);
    }
}

template <typename R, int N>
__device__ __forceinline__ void update(
    const Entry& e, const Common& common, const float* group, float coefficient, i64 at) {
    float w[N], g[N], m[N] = {}, v[N] = {};
    load_gradient<N>(e, at, g);
    if (e.m) load<N>(e.m + at, m);
    if (R::SECOND) load<N>(e.v + at, v);
    if (e.form & 8) {
        typedef Pack<unsigned short, N> Halves;
        Halves* const highs = reinterpret_cast<Halves*>((unsigned short*)e.weight + at);
        Halves high = *highs;
        const u64 bits = draw(e.key, (u64)at / 4);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float x = R::apply(common, group, coefficient, float_of((u32)high.at[j] << 16), g[j], m[j], v[j]);
            // In sign and magnitude the lower 16 bits are the distance from the neighbour nearer to zero.
            const u32 number = (u32)(bits >> 16 * ((at + j) % 4)) & 0xffffu;
            high.at[j] = (unsigned short)((bits_of(x) + number) >> 16);
        }
        *highs = high;
    } else if (e.form & 1) {
        typedef Pack<unsigned short, N> Halves;
        Halves* const highs = reinterpret_cast<Halves*>((unsigned short*)e.weight + at);
        Halves* const lows = reinterpret_cast<Halves*>(e.low + at);
        Halves high = *highs, low = *lows;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float x = R::apply(common, group, coefficient, master(high.at[j], low.at[j]), g[j], m[j], v[j]);
            high.at[j] = upper(x);
            low.at[j] = lower(x);
        }
        *highs = high;
        *lows = low;
    } else {
        float* const weight = (float*)e.weight + at;
        load<N>(weight, w);
#pragma unroll
        for (int j = 0; j < N; j++) w[j] = R::apply(common, group, coefficient, w[j], g[j], m[j], v[j]);
        store<N>(weight, w);
    }
    if (e.m) store<N>(e.m + at, m);
    if (R::SECOND) store<N>(e.v + at, v);
}

// Nothing happens where `finite` is there and not finite. The factor of the gradient is `coefficient`, times what
// `device_coefficient` holds where that is there.
template <typename R>
__device__ __forceinline__ void step(
    const Entry* table, int count, const float* device_coefficient, const double* finite, const Common& common,
    const Groups& groups) {
    if (finite && !(*finite - *finite == 0.0)) return;
    const float coefficient =
        device_coefficient ? mul(common.coefficient, *device_coefficient) : common.coefficient;
    const Entry e = table[entry_of(table, count, blockIdx.x)];
    const float* group = groups.at[e.form >> 8];
    const i64 start = (i64)(blockIdx.x - e.first) * SHARE;
    const i64 n = e.n - start < SHARE ? e.n - start : SHARE;
    const i64 packs = e.form & 4 ? n / V : 0;
    for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
        update<R, V>(e, common, group, coefficient, start + i * V);
    }
    for (i64 i = packs * V + threadIdx.x; i < n; i += blockDim.x) {
        update<R, 1>(e, common, group, coefficient, start + i);
    }
}

extern "C" __global__ void adamw_step(
    const Entry* table, int count, const float* device_coefficient, const double* finite, Common common, Groups groups) {
    step<AdamW>(table, count, device_coefficient, finite, common, groups);
}

extern "C" __global__ void sgd_step(
    const Entry* table, int count, const float* device_coefficient, const double* finite, Common common, Groups groups) {
    step<Sgd>(table, count, device_coefficient, finite, common, groups);
}

extern "C" __global__ void lion_step(
    const Entry* table, int count, const float* device_coefficient, const double* finite, Common common, Groups groups) {
    step<Lion>(table, count, device_coefficient, finite, common, groups);
}

extern "C" __global__ void sign_step(
    const Entry* table, int count, const float* device_coefficient, const double* finite, Common common, Groups groups) {
    step<Sign>(table, count, device_coefficient, finite, common, groups);
}
