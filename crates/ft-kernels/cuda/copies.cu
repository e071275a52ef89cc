// TensorCopies several tensors in one launch.
#include "common.cuh"

constexpr int COPIES = 64;

// Filled by crates/ft-ops/src/cuda/graph.rs: addresses, and bytes of each copy.
struct TensorCopies {
    u64 from[COPIES], to[COPIES], bytes[COPIES];
};

// Copy blockIdx.y of `copies`. Sources and destinations do not overlap.
extern "C" __global__ void copy_tensors(const __grid_constant__ TensorCopies copies) {
    const u64 from = copies.from[blockIdx.y], to = copies.to[blockIdx.y], bytes = copies.bytes[blockIdx.y];
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    // 16 bytes at a time, where both addresses permit it.
    const u64 packs = (from | to) % 16 == 0 ? bytes / 16 : 0;
    for (u64 i = first; i < packs; i += step) ((uint4*)to)[i] = ((const uint4*)from)[i];
    for (u64 i = 16 * packs + first; i < bytes; i += step) ((unsigned char*)to)[i] = ((const unsigned char*)from)[i];
}
