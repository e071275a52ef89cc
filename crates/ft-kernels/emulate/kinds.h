// Tests over f32 and bf16 alike: seeded contents, elements as double, comparison. Needs `cuda/common.cuh`.
#pragma once

#include "test.h"
#include "../cuda/common.cuh"

namespace emulate {

template <class T>
void fill(Buffer<T>& buffer, uint64_t seed, float factor = 1.0f) {
    Random random(seed);
    for (size_t i = 0; i < buffer.n; i++) narrow(factor * random.normal(), buffer[i]);
}

template <class T>
std::vector<double> values(const Buffer<T>& buffer) {
    std::vector<double> wide(buffer.n);
    for (size_t i = 0; i < buffer.n; i++) wide[i] = widen(buffer[i]);
    return wide;
}

/// f32 results are off by rounding in another order, bf16 ones by one rounding of the result more.
template <class T>
constexpr double tolerance() {
    return sizeof(T) == 4 ? 2e-6 : 4e-3;
}

template <class T>
void check(const std::string& name, const Buffer<T>& got, const std::vector<double>& want, double tolerance) {
    if (got.n != want.size()) fail("%s: %zu and %zu elements", name.c_str(), got.n, want.size());
    compare(name, values(got).data(), want.data(), got.n, tolerance);
}

template <class T>
void same(const std::string& name, const Buffer<T>& got, const Buffer<T>& want) {
    expect(got.n == want.n && std::memcmp(got.data, want.data, got.n * sizeof(T)) == 0, name + ": not the same bits");
}

}  // namespace emulate
