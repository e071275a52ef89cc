// cuBLAS on the software driver: matrix products by plain loops. Matrices are column-major.

#include "driver.h"

#include <cstring>

using namespace soft;

namespace {

enum { BLAS_SUCCESS = 0, BLAS_INVALID_VALUE = 7, BLAS_NOT_SUPPORTED = 15 };
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
    template <class S>
    S get(size_t row, size_t column) const {
        size_t at = transposed ? row * stride + column : column * stride + row;
        switch (type) {
            case F64: return static_cast<S>(reinterpret_cast<const double*>(address)[at]);
            case F32: return static_cast<S>(reinterpret_cast<const float*>(address)[at]);
            default: return static_cast<S>(widen(reinterpret_cast<const uint16_t*>(address)[at]));
        }
    }
    template <class S>
    void put(size_t row, size_t column, S value) const {
        size_t at = column * stride + row;
        switch (type) {
            case F64: reinterpret_cast<double*>(address)[at] = static_cast<double>(value); break;
            case F32: reinterpret_cast<float*>(address)[at] = static_cast<float>(value); break;
            default: reinterpret_cast<uint16_t*>(address)[at] = narrow(static_cast<float>(value));
        }
    }
    Matrix at(size_t elements) const {
        Matrix other = *this;
        other.address += elements * bytes_of(type);
        return other;
    }
};

template <class S>
__attribute__((target_clones("default", "avx2", "avx512f"))) void add_scaled(S* sum, const S* a, S b, size_t n) {
    for (size_t i = 0; i < n; i++) sum[i] += a[i] * b;
}

/// C = alpha A B + beta C, in the type S.
template <class S>
void product(const Matrix& a, const Matrix& b, const Matrix& c, S alpha, S beta) {
    size_t m = c.rows, n = c.columns, k = a.columns;
    std::vector<S> packed(m * k), sum(m);
    for (size_t p = 0; p < k; p++)
        for (size_t i = 0; i < m; i++) packed[p * m + i] = a.get<S>(i, p);
    for (size_t j = 0; j < n; j++) {
        std::fill(sum.begin(), sum.end(), S(0));
        for (size_t p = 0; p < k; p++) add_scaled(sum.data(), &packed[p * m], b.get<S>(p, j), m);
        // C is not read if beta is 0.
        for (size_t i = 0; i < m; i++)
            c.put<S>(i, j, beta == S(0) ? alpha * sum[i] : alpha * sum[i] + beta * c.get<S>(i, j));
    }
}

struct Batch {
    size_t count;
    size_t a, b, c;  // elements from one matrix to the next
};

template <class S>
int gemm(Handle& handle, const Matrix& a, const Matrix& b, const Matrix& c, S alpha, S beta, Batch batch) {
    const char* name = "cuBLAS: a matrix product";
    auto fits = [](const Matrix& x) { return x.stride >= (x.transposed ? x.columns : x.rows); };
    if (!fits(a) || !fits(b) || !fits(c)) return refuse(BLAS_INVALID_VALUE, "%s: a leading dimension is too small", name);
    if (c.rows == 0 || c.columns == 0 || batch.count == 0) return BLAS_SUCCESS;
    Operation operation{name, {}, {}};
    struct Range {
        uint64_t from, to;
    };
    auto use = [&](const Matrix& x, size_t step, bool writes) {
        Range range{x.address, x.address + (batch.count - 1) * step * bytes_of(x.type) + x.extent()};
        if (range.to == range.from) return range;
        auto memory = device_memory(x.address, range.to - range.from);
        if (!memory || x.address % bytes_of(x.type) != 0)
            stop("%s: a matrix of %zu bytes is outside of every allocation, freed, or not aligned", name,
                 size_t(range.to - range.from));
        operation.uses.push_back({memory, writes});
        return range;
    };
    Range in[2] = {use(a, batch.a, false), use(b, batch.b, false)}, out = use(c, batch.c, true);
    for (Range range : in)
        if (range.from < out.to && out.from < range.to) stop("%s: the result overlaps an operand", name);
    operation.run = [=] {
        for (size_t i = 0; i < batch.count; i++)
            product<S>(a.at(i * batch.a), b.at(i * batch.b), c.at(i * batch.c), alpha, beta);
    };
    Stream* stream = stream_of(handle.stream);
    if (!stream) stop("%s: the stream was destroyed", name);
    stream->computes = true;
    enqueue(*stream, std::move(operation));
    return BLAS_SUCCESS;
}

bool known(int type) { return type == F32 || type == BF16; }

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
    // Inputs of one type, f32 sums; the result has that type or f32.
    if (!known(a_type) || a_type != b_type || (c_type != a_type && c_type != F32) ||
        (compute != COMPUTE_32F && compute != COMPUTE_32F_FAST_TF32))
        return refuse(BLAS_NOT_SUPPORTED, "cuBLAS: types %d, %d to %d with compute type %d are not implemented", a_type,
                      b_type, c_type, compute);
    // The factors are on the host, and read now.
    float factors[2] = {*static_cast<const float*>(alpha), *static_cast<const float*>(beta)};
    return gemm<float>(*static_cast<Handle*>(handle), matrix(a, a_type, m, k, lda, on_a), matrix(b, b_type, k, n, ldb, on_b),
                       matrix(c, c_type, m, n, ldc, 0), factors[0], factors[1],
                       {size_t(count), size_t(a_step), size_t(b_step), size_t(c_step)});
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
                        {size_t(count), size_t(a_step), size_t(b_step), size_t(c_step)});
}

}  // extern "C"
