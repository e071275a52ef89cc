// TensorCopies of several tensors: every byte of the destinations, and none beside them; aligned addresses and others.
#include "kinds.h"
#include "../../cuda/copies.cu"

using namespace emulate;

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        // The sizes in bytes of the copies, and how far source and destination are from an aligned address.
        const u64 sizes[] = {0, 1, 15, 16, 17, 4096, 5000, 70000};
        const u64 shifts[][2] = {{0, 0}, {16, 32}, {2, 2}, {4, 0}, {0, 1}};
        const int count = 8 * 5;
        std::vector<std::unique_ptr<Buffer<unsigned char>>> from, to;
        TensorCopies copies = {};
        for (int i = 0; i < count; i++) {
            const u64 bytes = sizes[i / 5], *shift = shifts[i % 5];
            from.push_back(std::make_unique<Buffer<unsigned char>>(bytes + shift[0]));
            to.push_back(std::make_unique<Buffer<unsigned char>>(bytes + shift[1] + 16));
            for (u64 at = 0; at < from[i]->n; at++) (*from[i])[at] = static_cast<unsigned char>(1 + (at * 7 + i) % 250);
            copies.from[i] = reinterpret_cast<u64>(from[i]->data + shift[0]);
            copies.to[i] = reinterpret_cast<u64>(to[i]->data + shift[1]);
            copies.bytes[i] = bytes;
        }
        launch(copy_tensors, dim3(3, count), dim3(64), 0, seed, copies);
        for (int i = 0; i < count; i++) {
            const u64 bytes = sizes[i / 5], *shift = shifts[i % 5];
            bool same = true, beside = true;
            for (u64 at = 0; at < to[i]->n; at++) {
                const bool inside = at >= shift[1] && at < shift[1] + bytes;
                const unsigned char got = (*to[i])[at];
                if (inside) same = same && got == (*from[i])[at - shift[1] + shift[0]];
                else beside = beside && got == 0xff;
            }
            expect(same, "copy " + std::to_string(i));
            expect(beside, "bytes beside copy " + std::to_string(i));
        }
    }
    return verdict();
}
