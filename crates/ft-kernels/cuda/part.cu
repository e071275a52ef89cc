// A part of a tensor, gathered and put back: places in a row (around the end), or scattered by a computed permutation.
#include "random.cuh"

// Filled by crates/ft-ops/src/cuda/index_subset.rs. `start` < `n`; `half` is half the bits of a scattered place, 0
// where places lie in a row.
struct Places {
    i64 start, len, n;
    u64 key, half;
};

// Where element `i` < len of the part lies. The permutation is that of base/rng.rs of ft: four rounds of a Feistel
// network, again while the result lies outside.
__device__ __forceinline__ i64 place_of(const Places& places, i64 i) {
    i64 number = places.start + i;
    if (number >= places.n) number -= places.n;
    if (places.half == 0) return number;
    const u64 mask = (1ull << places.half) - 1;
    u64 x = (u64)number;
    do {
        u64 left = x >> places.half, right = x & mask;
        for (u64 round = 0; round < 4; round++) {
            const u64 next = left ^ (draw(places.key, right << 2 | round) & mask);
            left = right;
            right = next;
        }
        x = left << places.half | right;
    } while (x >= (u64)places.n);
    return (i64)x;
}

template <typename T>
__device__ __forceinline__ void gather(const T* whole, T* part, const Places& places) {
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < places.len; i += step) {
        part[i] = whole[place_of(places, i)];
    }
}

template <typename T>
__device__ __forceinline__ void put(const T* part, T* whole, const Places& places) {
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < places.len; i += step) {
        whole[place_of(places, i)] = part[i];
    }
}

#define PART(BYTES, T)                                                                                          \
    extern "C" __global__ void part_gather_##BYTES(const T* whole, T* part, Places places) { \
        gather(whole, part, places);                                                                            \
    }                                                                                                           \
    extern "C" __global__ void part_put_##BYTES(const T* part, T* whole, Places places) {    \
        put(part, whole, places);                                                                               \
    }

PART(2, unsigned short)
PART(4, u32)
