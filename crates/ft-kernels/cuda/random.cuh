// Random numbers that depend on a key and a place only, as base/rng.rs of ft has them: the same bits on every device.
#pragma once
#include "common.cuh"

// SplitMix64 (Steele, Lea, Flood 2014, section 4).
__device__ __forceinline__ u64 mix(u64 z) {
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// The 64 bits at place `index` of the stream `key`.
__device__ __forceinline__ u64 draw(u64 key, u64 index) {
    return mix(mix(key ^ index * 0xD1342543DE82EF95ull));
}

// The number at place `index`, in [0, 1), 24 bits.
__device__ __forceinline__ float uniform(u64 key, u64 index) {
    return (float)(u32)(draw(key, index) >> 40) * (1.0f / 16777216.0f);
}
