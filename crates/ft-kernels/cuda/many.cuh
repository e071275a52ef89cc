// Several tensors in one launch: a table says where each lies and which blocks work on it.
#pragma once
#include "common.cuh"

// Elements of a block's share; shares do not cross tensors.
constexpr i64 SHARE = 16384;

// The entry whose shares contain this block; `first` of an entry is the number of its first share.
template <typename E>
__device__ __forceinline__ int entry_of(const E* table, int count, u32 block) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table[middle].first <= block) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}
