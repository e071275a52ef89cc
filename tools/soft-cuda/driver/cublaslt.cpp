// cuBLASLt on the software driver: products of 8-bit operands, D = Aᵀ B by plain loops. Matrices are column-major.

#include "driver.h"
#include "faults.h"

#include <algorithm>
#include <cmath>
#include <cstring>

using namespace soft;

namespace {

enum { BLAS_SUCCESS = 0, BLAS_INVALID_VALUE = 7, BLAS_EXECUTION_FAILED = 13, BLAS_NOT_SUPPORTED = 15 };
enum Type { F32 = 0, S8 = 3, S32 = 10, E4M3 = 28 };
enum { COMPUTE_32F = 68, COMPUTE_32I = 72 };
enum { TRANSA = 3 };

struct Product {
    int compute, scale;
    bool transposed;
};

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t stride;

    size_t extent() const { return rows && columns ? ((columns - 1) * stride + rows) * (type == S8 || type == E4M3 ? 1 : 4) : 0; }
};

float e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
    return code & 0x80 ? -size : size;
}

template <class S, class F>
void product(uint64_t a, uint64_t b, uint64_t d, const Layout& in_a, const Layout& in_b, const Layout& out, F value) {
    const size_t m = out.rows, n = out.columns, k = in_a.rows;
    S values[256];
    for (int code = 0; code < 256; code++) values[code] = value(uint8_t(code));
    // Aᵀ by rows of k: the inner loop runs over results, so each sum keeps its order.
    std::vector<S> rows(m * k), sums(m);
    for (size_t i = 0; i < m; i++)
        for (size_t p = 0; p < k; p++) rows[p * m + i] = values[reinterpret_cast<const uint8_t*>(a)[i * in_a.stride + p]];
    for (size_t j = 0; j < n; j++) {
        std::fill(sums.begin(), sums.end(), S(0));
        for (size_t p = 0; p < k; p++) {
            const S factor = values[reinterpret_cast<const uint8_t*>(b)[j * in_b.stride + p]];
            const S* row = &rows[p * m];
            for (size_t i = 0; i < m; i++) sums[i] += row[i] * factor;
        }
        std::copy(sums.begin(), sums.end(), reinterpret_cast<S*>(d) + j * out.stride);
    }
}

}  // namespace

extern "C" {

int cublasLtCreate(void** handle) {
    *handle = new int(0);
    return BLAS_SUCCESS;
}

int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    *layout = new Layout{type, rows, columns, stride};
    return BLAS_SUCCESS;
}

int cublasLtMatrixLayoutDestroy(void* layout) {
    delete static_cast<Layout*>(layout);
    return BLAS_SUCCESS;
}

int cublasLtMatmulDescCreate(void** description, int compute, int scale) {
    *description = new Product{compute, scale, false};
    return BLAS_SUCCESS;
}

int cublasLtMatmulDescSetAttribute(void* description, int attribute, const void* value, size_t bytes) {
    int32_t number = 0;
    if (attribute != TRANSA || bytes != sizeof(number))
        return refuse(BLAS_INVALID_VALUE, "cuBLASLt: attribute %d of a product is not implemented", attribute);
    std::memcpy(&number, value, sizeof(number));
    static_cast<Product*>(description)->transposed = number == 1;
    return BLAS_SUCCESS;
}

int cublasLtMatmulDescDestroy(void* description) {
    delete static_cast<Product*>(description);
    return BLAS_SUCCESS;
}

int cublasLtMatmul(void*, void* description, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout,
                   const void* beta, const void*, void*, void* d, void* d_layout, const void*, void*, size_t, void* stream) {
    SOFT_CALL;
    if (skipped("product")) return BLAS_SUCCESS;
    Product how = *static_cast<Product*>(description);
    if (flipped("a")) how.transposed = !how.transposed;
    if (flipped("b")) return refuse(BLAS_NOT_SUPPORTED, "cuBLASLt: 8-bit operands must be Aᵀ B");
    const Layout in[2] = {*static_cast<Layout*>(a_layout), *static_cast<Layout*>(b_layout)};
    const Layout out = *static_cast<Layout*>(d_layout);
    const bool whole = in[0].type == S8 && in[1].type == S8 && out.type == S32 && how.compute == COMPUTE_32I && how.scale == S32;
    const bool real = in[0].type == E4M3 && in[1].type == E4M3 && out.type == F32 && how.compute == COMPUTE_32F && how.scale == F32;
    if (!whole && !real)
        return refuse(BLAS_NOT_SUPPORTED, "cuBLASLt: types %d, %d to %d with compute type %d are not implemented", in[0].type,
                      in[1].type, out.type, how.compute);
    // As the tensor cores: A transposed, rows and addresses aligned to 16 bytes.
    const uint64_t at[3] = {uint64_t(a), uint64_t(b), uint64_t(d)};
    bool aligned = how.transposed && out.rows % 16 == 0;
    for (int i = 0; i < 2; i++) aligned = aligned && in[i].rows % 16 == 0 && in[i].stride % 16 == 0 && at[i] % 16 == 0;
    if (!aligned || at[2] % 16 != 0)
        return refuse(BLAS_NOT_SUPPORTED, "cuBLASLt: 8-bit operands must be Aᵀ B, with rows of a multiple of 16 bytes");
    if (in[0].rows != in[1].rows || in[0].columns != out.rows || in[1].columns != out.columns ||
        in[0].stride < int64_t(in[0].rows) || in[1].stride < int64_t(in[1].rows) || out.stride < int64_t(out.rows))
        return refuse(BLAS_INVALID_VALUE, "cuBLASLt: the sizes of a product do not match");
    int32_t factors[2];
    std::memcpy(&factors[0], alpha, 4);
    std::memcpy(&factors[1], beta, 4);
    if (factors[0] != (whole ? 1 : 0x3f800000) || factors[1] != 0)
        return refuse(BLAS_NOT_SUPPORTED, "cuBLASLt: other factors than 1 and 0 are not implemented");
    Stream* running = stream_of(stream);
    if (!running) stop("cuBLASLt: the stream was destroyed");
    if (unusable(*running, "cuBLASLt")) return BLAS_EXECUTION_FAILED;
    Operation operation{"cuBLASLt: a product of 8-bit operands", {}, {}};
    const Layout* layouts[3] = {&in[0], &in[1], &out};
    for (int i = 0; i < 3; i++) {
        auto memory = device_memory(at[i], layouts[i]->extent(), *running);
        if (!memory) stop("cuBLASLt: a matrix is outside of every allocation, or freed");
        operation.uses.push_back({memory, i == 2});
    }
    const uint64_t first = at[0], second = at[1], to = at[2];
    const Layout left = in[0], right = in[1];
    operation.run = [=] {
        if (whole)
            product<int32_t>(first, second, to, left, right, out, [](uint8_t code) { return int32_t(int8_t(code)); });
        else
            product<float>(first, second, to, left, right, out, e4m3);
    };
    running->computes = true;
    count(*running, "product (operations)", whole ? "int8" : "e4m3", 2 * out.rows * out.columns * in[0].rows);
    enqueue(*running, std::move(operation));
    return BLAS_SUCCESS;
}

}  // extern "C"
