// Sums of squares and counts of what is not finite over a list of tensors; the clipping factor.
#include "kinds.h"
#include "../../cuda/reduce.cu"

using namespace emulate;

/// Lists tensors as crates/ft-ops/src/cuda/reduce.rs does.
struct List {
    std::vector<Part> parts;
    u32 shares = 0;
    template <class T>
    void add(const T* data, i64 n) {
        const bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
        parts.push_back({data, n, shares, (sizeof(T) == 2 ? 1u : 0u) | (aligned ? 2u : 0u)});
        shares += static_cast<u32>((n + SHARE - 1) / SHARE);
    }
};

static double run(void (*kernel)(const Part*, int, double*), const List& list, double* total, int add, uint64_t seed) {
    Buffer<Part> parts(list.parts.size());
    std::copy(list.parts.begin(), list.parts.end(), parts.data);
    Buffer<double> partial(list.shares);
    launch(kernel, dim3(list.shares), dim3(64), 0, seed, (const Part*)parts.data, (int)parts.n, partial.data);
    launch(reduce_totals, dim3(1), dim3(64), 0, seed, (const double*)partial.data, (i64)partial.n, total, add);
    return *total;
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        Buffer<float> a(3), b(SHARE + 5), c(2 * SHARE);
        Buffer<bf16> d(1001), e(SHARE);
        fill(a, seed + 1);
        fill(b, seed + 2);
        fill(c, seed + 3);
        fill(d, seed + 4);
        fill(e, seed + 5);
        List list;
        list.add(a.data, 3);
        list.add(b.data + 1, SHARE + 4);  // not aligned
        list.add(c.data, 2 * SHARE);
        list.add(d.data, 1001);
        list.add(e.data + 3, SHARE - 3);
        double want = 0;
        for (double x : values(a)) want += x * x;
        for (int i = 1; i < SHARE + 5; i++) want += (double)b[i] * b[i];
        for (double x : values(c)) want += x * x;
        for (double x : values(d)) want += x * x;
        for (int i = 3; i < SHARE; i++) want += (double)widen(e[i]) * widen(e[i]);
        Buffer<double> total(1);
        const double sum = run(sum_squares, list, total.data, 0, seed);
        expect(std::fabs(sum - want) < 1e-6 * want, "sum of squares");
        total[0] = 5;
        expect(run(sum_squares, list, total.data, 1, seed) == 5 + sum, "added to what was there");
        expect(run(count_odd, list, total.data, 0, seed) == 0, "all finite");
        c[SHARE + 17] = INFINITY;
        d[1000].bits = 0x7fc1;
        expect(run(count_odd, list, total.data, 0, seed) == 2, "two are not finite");
        expect(!std::isfinite(run(sum_squares, list, total.data, 0, seed)), "seen in the sum");
        c[SHARE + 17] = 1e30f;
        d[1000].bits = 0;
        expect(run(count_odd, list, total.data, 0, seed) == 0, "large is finite");

        Buffer<float> factor(1);
        for (double squares : {0.0, 0.25, 400.0}) {
            total[0] = squares;
            launch(clip_coefficient, dim3(1), dim3(1), 0, seed, (const double*)total.data, 2.0, factor.data);
            expect(factor[0] == (float)std::min(1.0, 2.0 / (std::sqrt(squares) + 1e-6)), "clipping factor");
        }
    }
    return verdict();
}
