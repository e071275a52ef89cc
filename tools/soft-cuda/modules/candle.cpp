// The kernels of candle that ft launches, as plain loops over the whole grid. Arguments as in candle-kernels: `info` has
// the dimensions, then the strides of each operand; null says contiguous.

#include "types.h"

#include "../kernel.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using namespace soft;
using bf16 = __nv_bfloat16;
using f16 = __half;
using std::size_t;

/// The type in which a sum of T is built.
template <class T>
struct Wide { using Type = T; };
template <>
struct Wide<bf16> { using Type = float; };
template <>
struct Wide<f16> { using Type = float; };

/// Where element `i` of an operand lies.
struct Layout {
    size_t count;
    const size_t *dims, *strides;
    Layout(size_t count, const size_t* info, size_t operand = 0)
        : count(info ? count : 0), dims(info), strides(info + count * (1 + operand)) {}
    size_t operator()(size_t i) const {
        if (!dims) return i;
        size_t place = 0;
        for (size_t d = count; d-- > 0;) {
            place += i % dims[d] * strides[d];
            i /= dims[d];
        }
        return place;
    }
};

// One operand.

template <class T, class F>
void unary(const Launch&, size_t n, size_t dims, const size_t* info, const T* x, T* y) {
    Layout at(dims, info);
    for (size_t i = 0; i < n; i++) y[i] = static_cast<T>(F()(static_cast<typename Wide<T>::Type>(x ? x[at(i)] : y[i])));
}

template <class T>
void copy(const Launch&, size_t n, size_t dims, const size_t* info, const T* x, T* y) {
    Layout at(dims, info);
    for (size_t i = 0; i < n; i++) y[i] = x[at(i)];
}

template <class T>
void power(const Launch&, size_t n, size_t dims, const size_t* info, T exponent, const T* x, T* y) {
    Layout at(dims, info);
    for (size_t i = 0; i < n; i++) y[i] = static_cast<T>(std::pow(double(x ? x[at(i)] : y[i]), double(exponent)));
}

template <class T>
void affine(const Launch&, size_t n, size_t dims, const size_t* info, const T* x, T* y, T factor, T add) {
    Layout at(dims, info);
    for (size_t i = 0; i < n; i++) y[i] = static_cast<T>((x ? x[at(i)] : y[i]) * factor + add);
}

template <class From, class To>
void cast(const Launch&, size_t n, size_t dims, const size_t* info, const From* x, To* y) {
    Layout at(dims, info);
    for (size_t i = 0; i < n; i++) y[i] = static_cast<To>(static_cast<typename Wide<From>::Type>(x[at(i)]));
}

template <class T>
void set(const Launch&, size_t n, size_t dims, const size_t* info, T value, T* y) {
    Layout at(dims, info);
    for (size_t i = 0; i < n; i++) y[at(i)] = value;
}

template <class T>
void fill(const Launch&, T* y, T value, size_t n) {
    std::fill(y, y + n, value);
}

template <class T>
void copy2d(const Launch&, const T* x, T* y, uint32_t rows, uint32_t columns, uint32_t x_step, uint32_t y_step) {
    for (size_t r = 0; r < rows; r++) std::copy_n(x + r * x_step, columns, y + r * y_step);
}

#define UNARY(NAME, VALUE) \
    struct NAME {          \
        template <class T> \
        T operator()(T x) const { return VALUE; } \
    };
UNARY(Neg, -x)
UNARY(Recip, T(1) / x)
UNARY(Exp, std::exp(x))
UNARY(Log, std::log(x))
UNARY(Sin, std::sin(x))
UNARY(Cos, std::cos(x))
UNARY(Tanh, std::tanh(x))
UNARY(Erf, std::erf(x))
UNARY(Abs, std::fabs(x))
UNARY(Sqr, x* x)
UNARY(Sqrt, std::sqrt(x))
UNARY(Relu, x > T(0) ? x : T(0))
UNARY(Silu, x / (T(1) + std::exp(-x)))
UNARY(Sigmoid, T(1) / (T(1) + std::exp(-x)))
UNARY(Floor, std::floor(x))
UNARY(Ceil, std::ceil(x))
UNARY(Round, std::round(x))
UNARY(Sign, T(x > T(0)) - T(x < T(0)))

// Two and three operands.

template <class T, class To, class F>
void binary(const Launch&, size_t n, size_t dims, const size_t* info, const T* x, const T* y, To* z) {
    Layout at_x(dims, info, 0), at_y(dims, info, 1);
    using W = typename Wide<T>::Type;
    for (size_t i = 0; i < n; i++) z[i] = static_cast<To>(F()(static_cast<W>(x[at_x(i)]), static_cast<W>(y[at_y(i)])));
}

#define BINARY(NAME, VALUE) \
    struct NAME {           \
        template <class T>  \
        auto operator()(T x, T y) const { return VALUE; } \
    };
BINARY(Add, x + y)
BINARY(Sub, x - y)
BINARY(Mul, x* y)
BINARY(Div, x / y)
BINARY(Maximum, x != x || y != y ? T(x + y) : std::max(x, y))
BINARY(Minimum, x != x || y != y ? T(x + y) : std::min(x, y))
BINARY(Eq, uint8_t(x == y))
BINARY(Ne, uint8_t(x != y))
BINARY(Lt, uint8_t(x < y))
BINARY(Le, uint8_t(x <= y))
BINARY(Gt, uint8_t(x > y))
BINARY(Ge, uint8_t(x >= y))

template <class T, class I>
void where(const Launch&, size_t n, size_t dims, const size_t* info, const I* ids, const T* yes, const T* no, T* y) {
    Layout at(dims, info, 0), at_yes(dims, info, 1), at_no(dims, info, 2);
    for (size_t i = 0; i < n; i++) y[i] = ids[at(i)] ? yes[at_yes(i)] : no[at_no(i)];
}

// Reductions of the last dimensions: each result has `each` elements.

template <class T>
void sum(size_t results, size_t each, size_t dims, const size_t* info, const T* x, T* y) {
    Layout at(dims, info);
    for (size_t r = 0; r < results; r++) {
        typename Wide<T>::Type total = 0;
        for (size_t i = r * each; i < (r + 1) * each; i++) total += x[at(i)];
        y[r] = static_cast<T>(total);
    }
}

template <class T>
void fast_sum(const Launch& launch, size_t, size_t each, size_t dims, const size_t* info, const T* x, T* y) {
    sum(launch.grid[0], each, dims, info, x, y);
}

template <class T>
void fast_sum_small(const Launch&, size_t results, size_t each, size_t dims, const size_t* info, const T* x, T* y) {
    sum(results, each, dims, info, x, y);
}

/// Place of the first element of result `r` that `Better` prefers.
template <class T, class Better>
size_t best(size_t r, size_t each, const Layout& at, const T* x) {
    size_t found = 0;
    for (size_t i = 1; i < each; i++)
        if (Better()(x[at(r * each + i)], x[at(r * each + found)])) found = i;
    return found;
}

template <class T, class Better>
void best_value(const Launch& launch, size_t, size_t each, size_t dims, const size_t* info, const T* x, T* y) {
    Layout at(dims, info);
    for (size_t r = 0; r < launch.grid[0]; r++) y[r] = x[at(r * each + best<T, Better>(r, each, at, x))];
}

template <class T, class Better>
void best_place(const Launch& launch, size_t, size_t each, size_t dims, const size_t* info, const T* x, uint32_t* y) {
    Layout at(dims, info);
    for (size_t r = 0; r < launch.grid[0]; r++) y[r] = static_cast<uint32_t>(best<T, Better>(r, each, at, x));
}

// By index. An index of all ones stands for nothing.

template <class I>
constexpr I NOTHING = std::numeric_limits<I>::max();

template <class T, class I>
void index_select(const Launch&, size_t n, size_t dims, const size_t* info, const I* ids, const T* x, T* y, size_t,
                  size_t rows, size_t count, size_t right) {
    // candle passes the layout of the ids, and its kernel reads x by it unless it is contiguous.
    Layout at(dims, info);
    bool contiguous = true;
    size_t step = 1;
    for (size_t d = dims; d-- > 0; step *= info[d]) contiguous = contiguous && (info[d] <= 1 || info[dims + d] == step);
    for (size_t i = 0; i < n; i++) {
        I id = ids[i / right % count];
        size_t from = (i / (count * right) * rows + size_t(id)) * right + i % right;
        y[i] = id == NOTHING<I> ? T(0) : x[contiguous ? from : at(from)];
    }
}

template <class T, class I>
void gather(const Launch&, size_t n, const I* ids, const T* x, T* y, size_t, size_t rows, size_t count, size_t right) {
    for (size_t i = 0; i < n; i++) {
        size_t from = (i / (right * count) * rows + size_t(ids[i])) * right + i % right;
        y[i] = ids[i] == NOTHING<I> ? T(0) : x[from];
    }
}

template <class T, class I>
void index_add(const Launch&, const I* ids, size_t count, const T* x, T* y, size_t left, size_t, size_t rows, size_t right) {
    for (size_t l = 0; l < left; l++)
        for (size_t j = 0; j < count; j++)
            for (size_t r = 0; ids[j] != NOTHING<I> && r < right; r++) {
                T& to = y[(l * rows + size_t(ids[j])) * right + r];
                to = static_cast<T>(to + x[(l * count + j) * right + r]);
            }
}

template <class T, class I, bool ADD>
void scatter(const Launch&, const I* ids, const T* x, T* y, size_t left, size_t count, size_t rows, size_t right) {
    for (size_t l = 0; l < left; l++)
        for (size_t j = 0; j < count; j++)
            for (size_t r = 0; r < right; r++) {
                size_t from = (l * count + j) * right + r;
                if (ids[from] == NOTHING<I>) continue;
                T& to = y[(l * rows + size_t(ids[from])) * right + r];
                to = ADD ? static_cast<T>(to + x[from]) : x[from];
            }
}

template <class T, class Better>
void sort(const Launch& launch, const T* x, uint32_t* y, int columns, int) {
    for (size_t r = 0; r < launch.grid[0]; r++) {
        const T* row = x + r * size_t(columns);
        uint32_t* order = y + r * size_t(columns);
        std::iota(order, order + columns, 0u);
        std::stable_sort(order, order + columns, [&](uint32_t a, uint32_t b) { return Better()(row[a], row[b]); });
    }
}

struct Less {
    template <class T>
    bool operator()(T a, T b) const { return a < b; }
};
struct Greater {
    template <class T>
    bool operator()(T a, T b) const { return b < a; }
};

// The table.

template <class... P, size_t... I>
void call(void (*kernel)(const Launch&, P...), const Launch& launch, void* const* values, std::index_sequence<I...>) {
    kernel(launch, *static_cast<P*>(values[I])...);
}

template <class... P>
void run(const Kernel& kernel, const Launch& launch, void* const* values) {
    auto function = reinterpret_cast<void (*)(const Launch&, P...)>(kernel.function);
    call(function, launch, values, std::index_sequence_for<P...>());
}

template <class... P>
Kernel plain(const char* name, void (*kernel)(const Launch&, P...)) {
    return {name, Descriptions<P...>::list, sizeof...(P), 0, run<P...>, reinterpret_cast<void (*)()>(kernel)};
}

#define REAL_TYPES(X) X(f32, float) X(f64, double) X(bf16, bf16) X(f16, f16)
#define TYPES(X) REAL_TYPES(X) X(u8, uint8_t) X(u32, uint32_t) X(i64, int64_t)
#define ALL_TYPES(X) TYPES(X) X(i16, int16_t) X(i32, int32_t)

std::vector<Kernel> kernels() {
    std::vector<Kernel> all;
    auto add = [&](const char* name, auto kernel) { all.push_back(plain(name, kernel)); };

#define X(N, T) add("ucopy_" #N, copy<T>);
    ALL_TYPES(X)
#undef X
#define U(NAME, F, N, T) add(#NAME "_" #N, unary<T, F>);
#define X(N, T)                                                                                                        \
    U(uneg, Neg, N, T) U(urecip, Recip, N, T) U(uexp, Exp, N, T) U(ulog, Log, N, T) U(usin, Sin, N, T)                 \
    U(ucos, Cos, N, T) U(utanh, Tanh, N, T) U(uerf, Erf, N, T) U(uabs, Abs, N, T) U(usqr, Sqr, N, T)                   \
    U(usqrt, Sqrt, N, T) U(urelu, Relu, N, T) U(usilu, Silu, N, T) U(usigmoid, Sigmoid, N, T) U(ufloor, Floor, N, T)   \
    U(uceil, Ceil, N, T) U(uround, Round, N, T) U(usign, Sign, N, T)                                                   \
    add("upowf_" #N, power<T>);
    REAL_TYPES(X)
#undef X
#define B(NAME, F, N, T) add(#NAME "_" #N, binary<T, T, F>);
#define C(NAME, F, N, T) add(#NAME "_" #N, binary<T, uint8_t, F>);
#define X(N, T)                                                                                                        \
    B(badd, Add, N, T) B(bsub, Sub, N, T) B(bmul, Mul, N, T) B(bdiv, Div, N, T) B(bmaximum, Maximum, N, T)             \
    B(bminimum, Minimum, N, T) C(eq, Eq, N, T) C(ne, Ne, N, T) C(lt, Lt, N, T) C(le, Le, N, T) C(gt, Gt, N, T)         \
    C(ge, Ge, N, T)                                                                                                    \
    add("affine_" #N, affine<T>);                                                                                      \
    add("const_set_" #N, set<T>);                                                                                      \
    add("fill_" #N, fill<T>);                                                                                          \
    add("copy2d_" #N, copy2d<T>);                                                                                      \
    add("cast_" #N "_f32", cast<T, float>);                                                                            \
    add("cast_" #N "_f64", cast<T, double>);                                                                           \
    add("cast_" #N "_bf16", cast<T, bf16>);                                                                            \
    add("cast_" #N "_f16", cast<T, f16>);                                                                              \
    add("cast_" #N "_u8", cast<T, uint8_t>);                                                                           \
    add("cast_" #N "_u32", cast<T, uint32_t>);                                                                         \
    add("cast_" #N "_i64", cast<T, int64_t>);                                                                          \
    add("where_u8_" #N, where<T, uint8_t>);                                                                            \
    add("fast_sum_" #N, fast_sum<T>);                                                                                  \
    add("fast_sum_small_" #N, fast_sum_small<T>);                                                                      \
    add("fast_min_" #N, best_value<T, Less>);                                                                          \
    add("fast_max_" #N, best_value<T, Greater>);                                                                       \
    add("fast_argmin_" #N, best_place<T, Less>);                                                                       \
    add("fast_argmax_" #N, best_place<T, Greater>);                                                                    \
    add("asort_asc_" #N, sort<T, Less>);                                                                               \
    add("asort_desc_" #N, sort<T, Greater>);                                                                           \
    BY(N, T, u8, uint8_t) BY(N, T, u32, uint32_t) BY(N, T, i64, int64_t)
#define BY(N, T, IN, I)                                                                                                \
    add("is_" #IN "_" #N, index_select<T, I>);                                                                         \
    add("gather_" #IN "_" #N, gather<T, I>);                                                                           \
    add("ia_" #IN "_" #N, index_add<T, I>);                                                                            \
    add("s_" #IN "_" #N, scatter<T, I, false>);                                                                        \
    add("sa_" #IN "_" #N, scatter<T, I, true>);
    TYPES(X)
    return all;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) Module soft_cuda_module(void (*)()) {
    static const std::vector<Kernel> all = kernels();
    return {all.data(), all.size()};
}
