// Rotary positions: element i of a head turns with element i + half, or (NEIGHBORS) element 2i with 2i + 1; elements from
// 2 half on pass through. x and y [tokens, width] are heads of `head` elements; cos and sin [tokens, half] f32. `sign` -1 is the
// transpose. One block for each token.
#include "common.cuh"

template <typename T, int V, bool NEIGHBORS>
__device__ __forceinline__ void turn(
    const T* x, const float* cos, const float* sin, float sign, int width, int head, int half, T* y) {
    const i64 token = blockIdx.x;
    x += token * width;
    y += token * width;
    cos += token * half;
    sin += token * half;
    const int heads = width / head, parts = half / V;
    for (int work = threadIdx.x; work < heads * parts; work += blockDim.x) {
        const int h = work / parts, i = (work - h * parts) * V;
        float a[V], b[V], c[V], s[V];
        const int first = h * head + (NEIGHBORS ? 2 * i : i), second = first + (NEIGHBORS ? 1 : half);
        load<V>(x + first, a);
        load<V>(x + second, b);
        load<V>(cos + i, c);
        load<V>(sin + i, s);
#pragma unroll
        for (int j = 0; j < V; j++) {
            const float turned = s[j] * sign, before = a[j];
            a[j] = before * c[j] - b[j] * turned;
            b[j] = b[j] * c[j] + before * turned;
        }
        store<V>(y + first, a);
        store<V>(y + second, b);
    }
    const int rest = head - 2 * half;
    for (int work = threadIdx.x; work < heads * rest; work += blockDim.x) {
        const int h = work / rest, i = h * head + 2 * half + (work - h * rest);
        y[i] = x[i];
    }
}

#define ROPE(NAME, T, V, NEIGHBORS)                                                                        \
    extern "C" __global__ void NAME(                                                                       \
        const T* x, const float* cos, const float* sin, float sign, int width, int head, int half, T* y) { \
        turn<T, V, NEIGHBORS>(x, cos, sin, sign, width, head, half, y);                                    \
    }

ROPE(rope_f32_packed, float, 4, false)
ROPE(rope_f32_single, float, 1, false)
ROPE(rope_f32_neighbors, float, 1, true)
ROPE(rope_bf16_packed, bf16, 8, false)
ROPE(rope_bf16_single, bf16, 1, false)
ROPE(rope_bf16_neighbors, bf16, 1, true)
