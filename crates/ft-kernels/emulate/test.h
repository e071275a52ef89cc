// Shared by the tests of the kernels: device memory of exact size, seeded values, comparison, seeds.
// A test's main: for each seed of `seeds(argc, argv)` fill buffers, launch, compare with plain loops; return `verdict()`.
#pragma once

#include "device.h"

namespace emulate {

/// Memory as a launch sees it: exactly `n` elements, full of NaN (of -1 for integers) at first.
template <class T>
struct Buffer {
    T* data;
    size_t n;
    explicit Buffer(size_t n) : n(n) {
        size_t bytes = std::max<size_t>(n * sizeof(T), 1);
        void* memory = nullptr;
        if (posix_memalign(&memory, 256, bytes) != 0) fail("no memory for %zu bytes", bytes);
        std::memset(memory, 0xff, bytes);
        data = static_cast<T*>(memory);
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data); }
    T& operator[](size_t i) { return data[i]; }
    const T& operator[](size_t i) const { return data[i]; }
    void fill_normal(uint64_t seed, float factor = 1.0f) {
        Random random(seed);
        for (size_t i = 0; i < n; i++) data[i] = static_cast<T>(factor * random.normal());
    }
    void fill(T value) {
        for (size_t i = 0; i < n; i++) data[i] = value;
    }
};

inline int faults = 0;

/// Largest difference at most `tolerance` times the largest wanted magnitude; NaN is a fault.
template <class T, class W>
bool compare(const std::string& name, const T* got, const W* want, size_t n, double tolerance) {
    double largest = 0, worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < n; i++) largest = std::max(largest, std::fabs(static_cast<double>(want[i])));
    for (size_t i = 0; i < n; i++) {
        double difference = std::fabs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
        if (!(difference <= worst)) {
            worst = difference;
            at = i;
            if (difference != difference) break;
        }
    }
    bool good = worst <= tolerance * largest || worst == 0;
    if (!good) {
        faults++;
        std::fprintf(stderr, "seed %llu: %s: element %zu of %zu: got %g, want %g, largest %g, tolerance %g\n",
                     static_cast<unsigned long long>(block::seed), name.c_str(), at, n,
                     static_cast<double>(got[at]), static_cast<double>(want[at]), largest, tolerance);
    }
    return good;
}

template <class T>
bool compare(const std::string& name, const Buffer<T>& got, const std::vector<double>& want, double tolerance) {
    if (got.n != want.size()) fail("%s: %zu and %zu elements", name.c_str(), got.n, want.size());
    return compare(name, got.data, want.data(), got.n, tolerance);
}

inline void expect(bool holds, const std::string& what) {
    if (holds) return;
    faults++;
    std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(block::seed), what.c_str());
}

/// Seeds from the command line, else 0 to 3.
inline std::vector<uint64_t> seeds(int argc, char** argv) {
    std::vector<uint64_t> list;
    for (int i = 1; i < argc; i++) list.push_back(std::strtoull(argv[i], nullptr, 10));
    if (list.empty()) list = {0, 1, 2, 3};
    return list;
}

inline int verdict() {
    if (faults) std::fprintf(stderr, "%d faults\n", faults);
    return faults ? 1 : 0;
}

}  // namespace emulate
