// cuBLAS on the software driver: matrix products by plain loops. Matrices are column-major.

#include "driver.h"
#include "faults.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

using namespace soft;

namespace {

enum { BLAS_SUCCESS = 0, BLAS_INVALID_VALUE = 7, BLAS_EXECUTION_FAILED = 13, BLAS_NOT_SUPPORTED = 15 };
enum Type { F32 = 0, F64 = 1, F16 = 2, BF16 = 14 };
enum { COMPUTE_32F = 68, COMPUTE_32F_FAST_TF32 = 77 };

struct Handle {
    void* stream = nullptr;
    int math_mode = 0;
};

size_t bytes_of(int type) { return type == F64 ? 8 : type == F32 ? 4 : 2; }

float widen(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct Matrix {
    uint64_t address;
    int type;
    size_t rows, columns, stride;
    bool transposed;

    /// Bytes from the first element to the last.
    size_t extent() const {
        size_t in_memory = transposed ? columns : rows, lines = transposed ? rows : columns;
        return in_memory && lines ? ((lines - 1) * stride + in_memory) * bytes_of(type) : 0;
    }
    Matrix at(size_t elements) const {
        Matrix other = *this;
        other.address += elements * bytes_of(type);
        return other;
    }
    /// Line `i` in memory: a column, or a row if it is transposed.
    template <class T>
    T* line(size_t i) const { return reinterpret_cast<T*>(address) + i * stride; }
};

// Elements as they are stored, and their values.
struct Bf16 {
    uint16_t bits;
};
inline float value(Bf16 x) { return widen(x.bits); }
inline float value(float x) { return x; }
inline double value(double x) { return x; }
inline void store(Bf16& to, float x) { to.bits = narrow(x); }
using Half = _Float16;
inline float value(Half x) { return x; }
inline void store(Half& to, float x) { to = static_cast<Half>(x); }
inline void store(float& to, float x) { to = x; }
inline void store(double& to, double x) { to = x; }

#define FAST __attribute__((target_clones("default", "avx2", "avx512f")))

template <class T, class S>
FAST void add_scaled(S* sum, const T* a, S b, size_t n) {
    for (size_t i = 0; i < n; i++) sum[i] += value(a[i]) * b;
}

template <class T, class S>
FAST S dot(const T* a, const S* b, size_t n) {
    constexpr size_t LANES = 16;
    S lanes[LANES] = {}, sum = 0;
    size_t whole = n / LANES * LANES;
    for (size_t i = 0; i < whole; i += LANES)
        for (size_t l = 0; l < LANES; l++) lanes[l] += value(a[i + l]) * b[i + l];
    for (size_t i = whole; i < n; i++) sum += value(a[i]) * b[i];
    for (S lane : lanes) sum += lane;
    return sum;
}

/// C = alpha A B + beta C: elements of type T, sums and factors of type S, results of type R.
template <class T, class S, class R>
void product(const Matrix& a, const Matrix& b, const Matrix& c, S alpha, S beta) {
    size_t m = c.rows, n = c.columns, k = a.columns;
    // f16 is widened once: every column of C takes all of A, and widening takes longer than a multiplication.
    using V = std::conditional_t<std::is_same_v<T, Half>, S, T>;
    const V* values = reinterpret_cast<const V*>(a.address);
    size_t stride = a.stride;
    std::vector<V> widened;
    if constexpr (std::is_same_v<T, Half>) {
        size_t lines = a.transposed ? m : k, length = a.transposed ? k : m;
        widened.resize(lines * length);
        for (size_t i = 0; i < lines; i++)
            for (size_t p = 0; p < length; p++) widened[i * length + p] = value(a.line<T>(i)[p]);
        values = widened.data();
        stride = length;
    }
    std::vector<S> column(k), sum(m);
    for (size_t j = 0; j < n; j++) {
        for (size_t p = 0; p < k; p++) column[p] = value(b.transposed ? b.line<T>(p)[j] : b.line<T>(j)[p]);
        if (a.transposed) {
            for (size_t i = 0; i < m; i++) sum[i] = dot(values + i * stride, column.data(), k);
        } else {
            std::fill(sum.begin(), sum.end(), S(0));
            for (size_t p = 0; p < k; p++) add_scaled(sum.data(), values + p * stride, column[p], m);
        }
        R* out = c.line<R>(j);
        for (size_t i = 0; i < m; i++) {
            // C is not read if beta is 0. As cuBLAS 13.1 on an H100: the product is rounded to the type of C before it is
            // added to C, and the sum is rounded again.
            R product;
            store(product, alpha * sum[i]);
            if (beta == S(0)) {
                out[i] = product;
            } else {
                store(out[i], value(product) + beta * value(out[i]));
            }
        }
    }
}

template <class S>
void any_product(const Matrix& a, const Matrix& b, const Matrix& c, S alpha, S beta) {
    if constexpr (sizeof(S) == 8) {
        product<double, double, double>(a, b, c, alpha, beta);
    } else if (a.type == F32) {
        product<float, float, float>(a, b, c, alpha, beta);
    } else if (a.type == F16 && c.type == F32) {
        product<Half, float, float>(a, b, c, alpha, beta);
    } else if (a.type == F16) {
        product<Half, float, Half>(a, b, c, alpha, beta);
    } else if (c.type == F32) {
        product<Bf16, float, float>(a, b, c, alpha, beta);
    } else {
        product<Bf16, float, Bf16>(a, b, c, alpha, beta);
    }
}

struct Batch {
    size_t count;
    int64_t a, b, c;  // elements from one matrix to the next, also to one in another allocation
};

template <class S>
int gemm(Handle& handle, const Matrix& a, const Matrix& b, const Matrix& c, S alpha, S beta, Batch batch) {
    const char* name = "cuBLAS: a matrix product";
    auto fits = [](const Matrix& x) { return x.stride >= (x.transposed ? x.columns : x.rows); };
    if (!fits(a) || !fits(b) || !fits(c)) return refuse(BLAS_INVALID_VALUE, "%s: a leading dimension is too small", name);
    if (c.rows == 0 || c.columns == 0 || batch.count == 0) return BLAS_SUCCESS;
    Stream* stream = stream_of(handle.stream);
    if (!stream) stop("%s: the stream was destroyed", name);
    if (unusable(*stream, name)) return BLAS_EXECUTION_FAILED;
    Operation operation{name, {}, {}};
    struct Range {
        uint64_t from, to;
    };
    // The part of each allocation that the inputs use, and that the results use.
    std::map<const void*, Range> used[2];
    auto at = [](const Matrix& x, size_t i, int64_t step) {
        return x.at(static_cast<size_t>(static_cast<int64_t>(i) * step));
    };
    auto use = [&](const Matrix& first, int64_t step, bool writes) {
        for (size_t i = 0; i < batch.count; i++) {
            Matrix x = at(first, i, step);
            if (x.extent() == 0) continue;
            Range own{x.address, x.address + x.extent()};
            auto memory = device_memory(own.from, x.extent(), *stream);
            if (!memory || x.address % bytes_of(x.type) != 0)
                stop("%s: a matrix of %zu bytes is outside of every allocation, freed, or not aligned", name, x.extent());
            auto [place, added] = used[writes].try_emplace(memory.get(), own);
            Range& all = place->second;
            all = {std::min(all.from, own.from), std::max(all.to, own.to)};
            if (added) operation.uses.push_back({memory, writes});
        }
    };
    use(a, batch.a, false);
    use(b, batch.b, false);
    use(c, batch.c, true);
    for (auto& [memory, out] : used[true]) {
        auto in = used[false].find(memory);
        if (in != used[false].end() && in->second.from < out.to && out.from < in->second.to)
            stop("%s: the result overlaps an operand", name);
    }
    operation.run = [=] {
        for (size_t i = 0; i < batch.count; i++)
            any_product<S>(at(a, i, batch.a), at(b, i, batch.b), at(c, i, batch.c), alpha, beta);
    };
    stream->computes = true;
    const char* type = c.type == BF16   ? "bf16"
                       : c.type == F16  ? "f16"
                       : a.type == BF16 ? "bf16 to f32"
                       : a.type == F16  ? "f16 to f32"
                       : a.type == F32  ? "f32"
                                        : "f64";
    count(*stream, "product (operations)", type, 2 * batch.count * c.rows * c.columns * a.columns);
    size_t moved = a.extent() + b.extent() + (beta == S(0) ? 1 : 2) * c.extent();
    count(*stream, "product (bytes of operands)", type, batch.count * moved);
    enqueue(*stream, std::move(operation));
    return BLAS_SUCCESS;
}

bool known(int type) { return type == F32 || type == BF16 || type == F16; }

Matrix matrix(const void* address, int type, int rows, int columns, int stride, int operation) {
    return {reinterpret_cast<uint64_t>(address), type, size_t(rows), size_t(columns), size_t(stride), operation != 0};
}

}  // namespace

extern "C" {

int cublasCreate_v2(void** handle) {
    *handle = new Handle;
    return BLAS_SUCCESS;
}

int cublasDestroy_v2(void* handle) {
    delete static_cast<Handle*>(handle);
    return BLAS_SUCCESS;
}

int cublasSetStream_v2(void* handle, void* stream) {
    static_cast<Handle*>(handle)->stream = stream;
    return BLAS_SUCCESS;
}

int cublasSetMathMode(void* handle, int mode) {
    static_cast<Handle*>(handle)->math_mode = mode;
    return BLAS_SUCCESS;
}

int cublasGetVersion_v2(void*, int* version) {
    *version = 130000;
    return BLAS_SUCCESS;
}

int cublasGemmStridedBatchedEx(void* handle, int on_a, int on_b, int m, int n, int k, const void* alpha, const void* a,
                               int a_type, int lda, long long a_step, const void* b, int b_type, int ldb,
                               long long b_step, const void* beta, void* c, int c_type, int ldc, long long c_step,
                               int count, int compute, int) {
    SOFT_CALL;
    if (m < 0 || n < 0 || k < 0 || count < 0) return refuse(BLAS_INVALID_VALUE, "cuBLAS: a negative size");
    // cuBLAS does not document what these do.
    if (a_step < 0 || b_step < 0 || c_step < 0) return refuse(BLAS_INVALID_VALUE, "cuBLAS: a negative step");
    if (skipped("product")) return BLAS_SUCCESS;
    if (flipped("a")) on_a = !on_a;
    if (flipped("b")) on_b = !on_b;
    // Inputs of one type, f32 sums; the result has that type or f32.
    if (!known(a_type) || a_type != b_type || (c_type != a_type && c_type != F32) ||
        (compute != COMPUTE_32F && compute != COMPUTE_32F_FAST_TF32))
        return refuse(BLAS_NOT_SUPPORTED, "cuBLAS: types %d, %d to %d with compute type %d are not implemented", a_type,
                      b_type, c_type, compute);
    // The factors are on the host, and read now.
    float factors[2] = {*static_cast<const float*>(alpha), *static_cast<const float*>(beta)};
    return gemm<float>(*static_cast<Handle*>(handle), matrix(a, a_type, m, k, lda, on_a), matrix(b, b_type, k, n, ldb, on_b),
                       matrix(c, c_type, m, n, ldc, 0), factors[0], factors[1],
                       {size_t(count), a_step, b_step, c_step});
}

int cublasGemmEx(void* handle, int on_a, int on_b, int m, int n, int k, const void* alpha, const void* a, int a_type,
                 int lda, const void* b, int b_type, int ldb, const void* beta, void* c, int c_type, int ldc, int compute,
                 int algorithm) {
    return cublasGemmStridedBatchedEx(handle, on_a, on_b, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c,
                                      c_type, ldc, 0, 1, compute, algorithm);
}

int cublasDgemmStridedBatched(void* handle, int on_a, int on_b, int m, int n, int k, const double* alpha, const double* a,
                              int lda, long long a_step, const double* b, int ldb, long long b_step, const double* beta,
                              double* c, int ldc, long long c_step, int count) {
    SOFT_CALL;
    if (m < 0 || n < 0 || k < 0 || count < 0) return refuse(BLAS_INVALID_VALUE, "cuBLAS: a negative size");
    return gemm<double>(*static_cast<Handle*>(handle), matrix(a, F64, m, k, lda, on_a), matrix(b, F64, k, n, ldb, on_b),
                        matrix(c, F64, m, n, ldc, 0), *alpha, *beta,
                        {size_t(count), a_step, b_step, c_step});
}

}  // extern "C"
