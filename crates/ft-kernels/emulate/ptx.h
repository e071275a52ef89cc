// The PTX instructions of `cuda/mma.cuh`, as the PTX ISA describes them.
#pragma once

#include "device.h"

namespace emulate {

/// Shared memory the launch asked for.
inline void* dynamic_shared() { return block::shared; }

/// An address inside it as a number and back.
inline uint32_t shared_offset(const void* p) {
    uintptr_t offset = reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(block::shared);
    if (offset > block::shared_size) fail("an address outside of dynamic shared memory");
    return static_cast<uint32_t>(offset);
}
inline void* shared_at(uint32_t offset) {
    if (offset >= block::shared_size) fail("offset %u in %zu bytes of shared memory", offset, block::shared_size);
    return block::shared + offset;
}

/// Worst number of rows of an 8x8 matrix that fell on the same banks, over all calls of ldmatrix.
inline unsigned worst_conflict = 1;

struct Mma {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
};

inline float half_of(uint32_t pair, int which) {
#ifdef FT_F16
    return static_cast<float>(bits<_Float16>(static_cast<uint16_t>(pair >> (16 * which))));
#else
    return bits<float>((pair >> (16 * which)) << 16);
#endif
}

/// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 (with FT_F16 .f16.f16), the accumulator in place.
inline void mma_m16n8k16(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
    Mma mine{d, a, {b0, b1}};
    meet("mma", 0xffffffffu, &mine, [](void** lanes, unsigned there) {
        if (there != 0xffffffffu) fail("mma without all lanes of the warp: %08x", there);
        float a[16][16], b[16][8];
        for (int lane = 0; lane < 32; lane++) {
            const Mma& m = *static_cast<Mma*>(lanes[lane]);
            int group = lane >> 2, pair = (lane & 3) * 2;
            for (int i = 0; i < 8; i++) {
                int row = group + ((i >> 1) & 1) * 8, column = pair + (i & 1) + (i >> 2) * 8;
                a[row][column] = half_of(m.a[i >> 1], i & 1);
            }
            for (int i = 0; i < 4; i++) b[pair + (i & 1) + (i >> 1) * 8][group] = half_of(m.b[i >> 1], i & 1);
        }
        auto for_each_sum = [&](auto visit) {
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 4; i++)
                    visit(static_cast<Mma*>(lanes[lane])->d[i], (lane >> 2) + (i >> 1) * 8, (lane & 3) * 2 + (i & 1));
        };
        // Eight columns at a time; each sum is in the order of k.
        typedef float Columns __attribute__((vector_size(32)));
        Columns sums[16], rows[16];
        std::memcpy(rows, b, sizeof(rows));
        for_each_sum([&](float d, int row, int column) { sums[row][column] = d; });
        for (int row = 0; row < 16; row++) {
            Columns sum = sums[row];
            for (int k = 0; k < 16; k++) sum += a[row][k] * rows[k];
            sums[row] = sum;
        }
        for_each_sum([&](float& d, int row, int column) { d = sums[row][column]; });
    });
}

struct Ldmatrix {
    uint32_t* result;
    const void* row;
};

inline void load_matrices(void** lanes, bool transposed) {
    uint16_t matrix[4][8][8];
    for (int j = 0; j < 4; j++) {
        unsigned on_bank[8] = {};
        for (int row = 0; row < 8; row++) {
            const void* address = static_cast<Ldmatrix*>(lanes[j * 8 + row])->row;
            if (reinterpret_cast<uintptr_t>(address) % 16 != 0) fail("ldmatrix: a row is not aligned to 16 bytes");
            std::memcpy(matrix[j][row], address, 16);
            // Two lanes that read the same row cost nothing.
            bool seen = false;
            for (int other = 0; other < row; other++)
                seen |= static_cast<Ldmatrix*>(lanes[j * 8 + other])->row == address;
            if (!seen) worst_conflict = std::max(worst_conflict, ++on_bank[reinterpret_cast<uintptr_t>(address) / 16 % 8]);
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        uint32_t* result = static_cast<Ldmatrix*>(lanes[lane])->result;
        int group = lane >> 2, pair = (lane & 3) * 2;
        for (int j = 0; j < 4; j++) {
            uint32_t low = transposed ? matrix[j][pair][group] : matrix[j][group][pair];
            uint32_t high = transposed ? matrix[j][pair + 1][group] : matrix[j][group][pair + 1];
            result[j] = low | high << 16;
        }
    }
}

/// ldmatrix.sync.aligned.m8n8.x4.shared.b16
inline void ldmatrix_x4(uint32_t* result, const void* row) {
    Ldmatrix mine{result, row};
    meet("ldmatrix", 0xffffffffu, &mine, [](void** lanes, unsigned there) {
        if (there != 0xffffffffu) fail("ldmatrix without all lanes of the warp: %08x", there);
        load_matrices(lanes, false);
    });
}

/// ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16
inline void ldmatrix_x4_trans(uint32_t* result, const void* row) {
    Ldmatrix mine{result, row};
    meet("ldmatrix.trans", 0xffffffffu, &mine, [](void** lanes, unsigned there) {
        if (there != 0xffffffffu) fail("ldmatrix.trans without all lanes of the warp: %08x", there);
        load_matrices(lanes, true);
    });
}

/// cp.async of `bytes`, of which `given` come from memory and the rest are zero. The bytes land when the thread
/// waits for their group; until then the place holds garbage.
inline void cp_async(void* to, const void* from, unsigned bytes, unsigned given) {
    if (reinterpret_cast<uintptr_t>(to) % bytes != 0) fail("cp.async: the destination is not aligned to %u", bytes);
    if (given && reinterpret_cast<uintptr_t>(from) % bytes != 0) fail("cp.async: the source is not aligned to %u", bytes);
    Copy copy{to, bytes, {}};
    if (given) std::memcpy(copy.data, from, given);
    std::memset(to, 0xff, bytes);
    current->copies.push_back(copy);
}

inline void cp_async_commit() { current->groups.push_back(current->copies.size()); }

/// Waits until at most `pending` of the newest groups have not landed.
inline void cp_async_wait(unsigned pending) {
    auto& groups = current->groups;
    auto& copies = current->copies;
    if (groups.size() <= pending) return;
    size_t done = groups.size() - pending, landed = groups[done - 1];
    for (size_t i = 0; i < landed; i++) std::memcpy(copies[i].to, copies[i].data, copies[i].bytes);
    copies.erase(copies.begin(), copies.begin() + static_cast<long>(landed));
    groups.erase(groups.begin(), groups.begin() + static_cast<long>(done));
    for (size_t& end : groups) end -= landed;
}

}  // namespace emulate
