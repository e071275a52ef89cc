// Rows by number: embedding lookup with noise, the sum of its gradients, and putting rows back.
#include "random.cuh"

// y[n] = scale table[ids[n]], rows of d elements; one block for each n.
template <typename T>
__device__ __forceinline__ void gather(const T* table, const u32* ids, float scale, i64 d, i64 packs, T* y) {
    constexpr int V = Full<T>::V;
    const T* row = table + (i64)ids[blockIdx.x] * d;
    y += (i64)blockIdx.x * d;
    for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
        float x[V];
        load<V>(row + i * V, x);
#pragma unroll
        for (int j = 0; j < V; j++) x[j] *= scale;
        store<V>(y + i * V, x);
    }
    for (i64 i = packs * V + threadIdx.x; i < d; i += blockDim.x) narrow(widen(row[i]) * scale, y[i]);
}

extern "C" __global__ void gather_f32(const float* table, const u32* ids, float scale, i64 d, i64 packs, float* y) {
    gather(table, ids, scale, d, packs, y);
}

extern "C" __global__ void gather_bf16(const bf16* table, const u32* ids, float scale, i64 d, i64 packs, bf16* y) {
    gather(table, ids, scale, d, packs, y);
}

// y[rows[n]] = x[n], rows of d elements; one block for each n. No row comes twice.
template <typename T>
__device__ __forceinline__ void put(const T* x, const u32* rows, i64 d, i64 packs, T* y) {
    constexpr int V = Full<T>::V;
    x += (i64)blockIdx.x * d;
    y += (i64)rows[blockIdx.x] * d;
    for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
        *reinterpret_cast<Pack<T, V>*>(y + i * V) = *reinterpret_cast<const Pack<T, V>*>(x + i * V);
    }
    for (i64 i = packs * V + threadIdx.x; i < d; i += blockDim.x) y[i] = x[i];
}

extern "C" __global__ void put_rows_f32(const float* x, const u32* rows, i64 d, i64 packs, float* y) {
    put(x, rows, d, packs, y);
}

extern "C" __global__ void put_rows_bf16(const bf16* x, const u32* rows, i64 d, i64 packs, bf16* y) {
    put(x, rows, d, packs, y);
}

// dw[id] += scale dx[n] for every n whose id this is, in the order of n, as the CPU adds them. `order` holds the n
// sorted by id; block (b, ·) owns the ids[b] and the places starts[b]..starts[b + 1] of `order`; blockIdx.y counts
// groups of blockDim.x packs of columns.
template <typename T, int V>
__device__ __forceinline__ void scatter(
    float* dw, const u32* ids, const u32* starts, const u32* order, const T* dx, float scale, i64 d) {
    const i64 column = ((i64)blockIdx.y * blockDim.x + threadIdx.x) * V;
    if (column >= d) return;
    float* to = dw + (i64)ids[blockIdx.x] * d + column;
    float sum[V];
    load<V>(to, sum);
    const u32 end = starts[blockIdx.x + 1];
    for (u32 place = starts[blockIdx.x]; place < end; place++) {
        float x[V];
        load<V>(dx + (i64)order[place] * d + column, x);
#pragma unroll
        for (int j = 0; j < V; j++) sum[j] = plus(sum[j], mul(scale, x[j]));
    }
    store<V>(to, sum);
}

#define SCATTER(NAME, T, V)                                                                                          \
    extern "C" __global__ void NAME(                                                                                 \
        float* dw, const u32* ids, const u32* starts, const u32* order, const T* dx, float scale, i64 d) { \
        scatter<T, V>(dw, ids, starts, order, dx, scale, d);                                                         \
    }

SCATTER(scatter_add_f32_packed, float, 4)
SCATTER(scatter_add_f32_single, float, 1)
SCATTER(scatter_add_bf16_packed, bf16, 4)
SCATTER(scatter_add_bf16_single, bf16, 1)

// x[n, i] += m (2 u - 1), with number p d + i of a stream of random numbers as u; one block for each n. `rows` has for each
// n the low and the high half of the key of the stream, p, and the bits of m. As on the CPU, product and sum are rounded.
template <typename T>
__device__ __forceinline__ void noise(T* x, const u32* rows, i64 d) {
    const u32* row = rows + (i64)blockIdx.x * 4;
    const u64 key = (u64)row[1] << 32 | row[0], first = (u64)row[2] * (u64)d;
    const float m = __uint_as_float(row[3]);
    x += (i64)blockIdx.x * d;
    for (i64 i = threadIdx.x; i < d; i += blockDim.x) {
        narrow(plus(widen(x[i]), mul(m, 2.0f * uniform(key, first + i) - 1.0f)), x[i]);
    }
}

extern "C" __global__ void noise_f32(float* x, const u32* rows, i64 d) { noise(x, rows, d); }

extern "C" __global__ void noise_bf16(bf16* x, const u32* rows, i64 d) { noise(x, rows, d); }
