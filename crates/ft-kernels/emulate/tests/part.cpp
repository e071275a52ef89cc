// A part of a tensor: every place once, there and back.
#include "kinds.h"
#include "../../cuda/part.cu"

#include <set>

using namespace emulate;

template <class T>
void there_and_back(
    void (*gather)(const T*, T*, Places), void (*put)(const T*, T*, Places), Places places, uint64_t seed) {
    Buffer<T> whole(places.n), part(places.len), again(places.n);
    for (i64 i = 0; i < places.n; i++) {
        whole[i] = static_cast<T>(i + 1);
        again[i] = 0;
    }
    launch(gather, dim3(2), dim3(32), 0, seed, (const T*)whole.data, part.data, places);
    launch(put, dim3(2), dim3(32), 0, seed, (const T*)part.data, again.data, places);
    std::set<T> seen(part.data, part.data + places.len);
    expect(static_cast<i64>(seen.size()) == places.len && seen.count(0) == 0, "every place once");
    i64 in_order = 0;
    for (i64 i = 0; i < places.len; i++) {
        in_order += part[i] == static_cast<T>((places.start + i) % places.n + 1);
        expect(again[part[i] - 1] == part[i], "back at its place");
    }
    expect(places.half == 0 ? in_order == places.len : in_order <= places.len / 10 + 3, "in order or scattered");
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        for (u64 half : {0, 5}) {
            for (Places places : {Places{0, 5, 1000, 0, 0}, {990, 40, 1000, 0, 0}, {17, 1000, 1000, 0, 0}}) {
                places.half = half;
                places.key = 0xabcdefull + seed;
                there_and_back(part_gather_2, part_put_2, places, seed);
                there_and_back(part_gather_4, part_put_4, places, seed);
            }
        }
    }
    return verdict();
}
