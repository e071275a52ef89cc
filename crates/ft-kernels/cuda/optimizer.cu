// One optimizer step of many parameters in one launch. The arithmetic is that of the CPU, operation by operation.
#include "many.cuh"
#include "weight.cuh"

constexpr int V = 4, GROUPS = 16;

// Filled by `entry` of crates/ft-ops/src/cuda/step.rs.
struct Entry {
    void* weight;
    unsigned short* low;
    const void* gradient;
    // f32, or with scales codes of eight bits.
    void* m;
    void* v;
    float* m_scales;
    float* v_scales;
    u64 key;
    i64 n;
    // Elements of the parameter before these: a rank may have a part of it.
    i64 begin;
    u32 first;
    // as in `weight.cuh`; bit 1: the gradient is bf16, from bit 8 on: the group
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

template <int N>
__device__ __forceinline__ void load_gradient(const Entry& e, i64 at, float (&g)[N]) {
    if (e.form & 2) {
        load<N>((const bf16*)e.gradient + at, g);
    } else {
        load<N>((const float*)e.gradient + at, g);
    }
}

// New values of N weights from `at` on; the moments m and v are changed.
template <typename R, int N>
__device__ __forceinline__ void weights(
    const Entry& e, const Common& common, const float* group, float coefficient, i64 at, float (&m)[N], float (&v)[N]) {
    float g[N];
    load_gradient<N>(e, at, g);
    change<N>(e.weight, e.low, e.key, e.begin, e.form, at, [&](float w, int j) {
        return R::apply(common, group, coefficient, w, g[j], m[j], v[j]);
    });
}

// With f32 moments or none.
template <typename R, int N>
__device__ __forceinline__ void update(
    const Entry& e, const Common& common, const float* group, float coefficient, i64 at) {
    float m[N] = {}, v[N] = {};
    float *const first = (float*)e.m, *const second = (float*)e.v;
    if (first) load<N>(first + at, m);
    if (R::SECOND) load<N>(second + at, v);
    weights<R, N>(e, common, group, coefficient, at, m, v);
    if (first) store<N>(first + at, m);
    if (R::SECOND) store<N>(second + at, v);
}

// Eight-bit moments (ops/cpu/step/code.rs of ft): blocks of CODED elements share their largest magnitude. A code is a
// place in a sorted table of 256 numbers; `middles` lie halfway between neighbors.
constexpr int CODED = 256, EIGHT = 8;

struct Table {
    float values[256], middles[256];
};

// The place nearest to x; ties go down.
__device__ __forceinline__ int nearest(const Table& table, float x) {
    int low = 0, high = 255;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (table.middles[middle] < x) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// Reads `count` of a lane's eight moments.
__device__ __forceinline__ void decode(
    const unsigned char* codes, float scale, const Table& table, int count, float (&x)[EIGHT]) {
#pragma unroll
    for (int j = 0; j < EIGHT; j++) x[j] = j < count ? mul(table.values[codes[j]], scale) : 0.0f;
}

// Writes them back; all lanes of the warp together find the largest magnitude, which is returned.
__device__ __forceinline__ float encode(
    unsigned char* codes, const Table& table, bool has_sign, int count, const float (&x)[EIGHT]) {
    float most = 0;
#pragma unroll
    for (int j = 0; j < EIGHT; j++) {
        if (j < count) most = fmaxf(most, fabsf(x[j]));
    }
    most = lane_max(most);
#pragma unroll
    for (int j = 0; j < EIGHT; j++) {
        if (j >= count) continue;
        int code = most == 0 ? 0 : nearest(table, quotient(x[j], most));
        // The update divides by the root of a second moment: above zero it must not become zero.
        if (!has_sign && code == 0 && x[j] > 0) code = 1;
        codes[j] = (unsigned char)code;
    }
    return most;
}

// The share from `start` on: a warp for each block of codes, eight neighbors for each lane.
template <typename R>
__device__ __forceinline__ void coded(
    const Entry& e, const Common& common, const float* group, float coefficient, i64 start, i64 n, const Table* tables) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    unsigned char *const first = (unsigned char*)e.m, *const second = (unsigned char*)e.v;
    for (i64 block = threadIdx.x / 32; block * CODED < n; block += warps) {
        const i64 own = block * CODED + lane * EIGHT, at = start + own, scale = start / CODED + block;
        const int count = n - own < 0 ? 0 : n - own < EIGHT ? (int)(n - own) : EIGHT;
        float m[EIGHT] = {}, v[EIGHT] = {};
        decode(first + at, e.m_scales[scale], tables[0], count, m);
        if (R::SECOND) decode(second + at, e.v_scales[scale], tables[1], count, v);
        if (count == EIGHT && e.form & ALIGNED) {
            weights<R, EIGHT>(e, common, group, coefficient, at, m, v);
        } else {
            // Unrolled: an array that is indexed by a variable would lie in memory.
#pragma unroll
            for (int j = 0; j < EIGHT; j++) {
                if (j >= count) continue;
                float one[1] = {m[j]}, two[1] = {v[j]};
                weights<R, 1>(e, common, group, coefficient, at + j, one, two);
                m[j] = one[0];
                v[j] = two[0];
            }
        }
        // All lanes have read the scales before one of them writes.
        const float most = encode(first + at, tables[0], true, count, m);
        const float most_v = R::SECOND ? encode(second + at, tables[1], false, count, v) : 0.0f;
        if (lane == 0) {
            e.m_scales[scale] = most;
            if (R::SECOND) e.v_scales[scale] = most_v;
        }
    }
}

// Nothing happens where one of the `numbers` at `finite` is not finite. The factor of the gradient is `coefficient`, times what
// `device_coefficient` holds where that is there.
// All entries of a launch have f32 moments (or none), or all have codes.
template <typename R, bool CODES>
__device__ __forceinline__ void step(
    const Entry* table, int count, const float* device_coefficient, const double* finite, int numbers,
    const Common& common, const Groups& groups, const Table* tables) {
    if (closed(finite, numbers)) return;
    const float coefficient = factor_of(common.coefficient, device_coefficient);
    const Entry e = table[entry_of(table, count, blockIdx.x)];
    const float* group = groups.at[e.form >> 8];
    const i64 start = (i64)(blockIdx.x - e.first) * SHARE;
    const i64 n = e.n - start < SHARE ? e.n - start : SHARE;
    if (CODES) {
        __shared__ Table shared[2];
        const float* from = (const float*)tables;
        for (int i = threadIdx.x; i < 4 * 256; i += blockDim.x) ((float*)shared)[i] = from[i];
        __syncthreads();
        return coded<R>(e, common, group, coefficient, start, n, shared);
    }
    const i64 packs = e.form & ALIGNED ? n / V : 0;
    for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
        update<R, V>(e, common, group, coefficient, start + i * V);
    }
    for (i64 i = packs * V + threadIdx.x; i < n; i += blockDim.x) {
        update<R, 1>(e, common, group, coefficient, start + i);
    }
}

// `tables` (with sign, without) are read for codes.
#define STEP(NAME, R, CODES)                                                                                        \
    extern "C" __global__ void NAME(                                                                                \
        const Entry* table, int count, const float* device_coefficient, const double* finite, int numbers,          \
        const Table* tables, Common common, Groups groups) {                                                        \
        step<R, CODES>(table, count, device_coefficient, finite, numbers, common, groups, tables);                  \
    }

STEP(adamw_step, AdamW, false)
STEP(adamw_step_codes, AdamW, true)
STEP(sgd_step, Sgd, false)
STEP(sgd_step_codes, Sgd, true)
STEP(lion_step, Lion, false)
STEP(lion_step_codes, Lion, true)
STEP(sign_step, Sign, false)
