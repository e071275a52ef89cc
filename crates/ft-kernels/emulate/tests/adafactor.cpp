// Two steps of Adafactor of matrices and vectors, the kernels one after the other as they are launched: the means, and
// weights that are f32, bf16 in halves, and bf16 that is rounded by random numbers.
#include <vector>

#include "kinds.h"
#include "../../cuda/adafactor.cu"

using namespace emulate;

static const u64 KEY = 0xfeedull;
enum Kind { WHOLE, HALVES, ROUNDED };

struct Case {
    i64 rows, columns;
    Kind kind;
    bool is_vector, shifted;
    // Rows of a stripe; 0: the columns are summed at once.
    i64 stripe;
};

static void steps(const Case& c, const float* further, const double* finite, int numbers, uint64_t seed) {
    const i64 n = c.rows * c.columns;
    const int s = c.shifted;
    const float coefficient = 0.5f;
    const double factor = coefficient * (further ? *further : 1.0f);
    bool happens = true;
    for (int i = 0; i < numbers; i++) happens = happens && std::isfinite(finite[i]);
    Buffer<float> weight(n + s), g(n + s), row(c.rows), column(c.columns), mean(1), size(1);
    Buffer<bf16> high(n + s);
    Buffer<unsigned short> low(n + s);
    fill(weight, seed + 1);
    row.fill(0);
    column.fill(0);
    std::vector<double> w(n), want_row(c.rows), want_column(c.columns);
    for (i64 i = 0; i < n; i++) {
        high[i + s].bits = upper(weight[i + s]);
        low[i + s] = lower(weight[i + s]);
        w[i] = c.kind == ROUNDED ? widen(high[i + s]) : weight[i + s];
    }
    const auto now = [&](i64 i) -> double {
        if (c.kind == WHOLE) return weight[i + s];
        return c.kind == HALVES ? master(high[i + s].bits, low[i + s]) : widen(high[i + s]);
    };
    for (int t = 1; t <= 2; t++) {
        fill(g, seed + 10 * t);
        const double b2 = 1.0 - std::pow((double)t, -0.8), rate = 0.01, decay = 0.1;
        const float keep = (float)b2, take = (float)(1.0 - b2);
        const float* rows = c.is_vector ? nullptr : row.data;
        if (rows) {
            launch(
                adafactor_rows, dim3(c.rows), dim3(64), 0, seed, (const float*)g.data + s, c.columns, row.data, keep, take,
                finite, numbers, coefficient, further);
        }
        const int blocks = (int)((c.columns + 31) / 32);
        const i64 stripes = c.stripe ? (c.rows + c.stripe - 1) / c.stripe : 1;
        const i64 count = c.stripe ? c.stripe : c.rows;
        Buffer<float> sums(stripes * c.columns);
        launch(
            adafactor_stripes, dim3(blocks, (int)stripes), dim3(32), 0, seed, (const float*)g.data + s, c.rows, c.columns,
            count, sums.data, finite, numbers, coefficient, further);
        launch(
            adafactor_columns, dim3(blocks), dim3(32), 0, seed, (const float*)sums.data, stripes, c.rows, c.columns,
            column.data, keep, take, finite, numbers);
        if (rows) launch(adafactor_mean, dim3(1), dim3(64), 0, seed, rows, c.rows, mean.data);
        const int shares = (int)((c.columns + SHARE - 1) / SHARE);
        Buffer<double> partial(c.rows * shares);
        launch(
            adafactor_squares, dim3(c.rows, shares), dim3(64), 0, seed, (const float*)g.data + s, c.columns, rows,
            (const float*)mean.data, (const float*)column.data, partial.data, finite, numbers, coefficient, further);
        launch(
            adafactor_size, dim3(1), dim3(64), 0, seed, (const double*)partial.data, c.rows * shares, n, rate, size.data,
            finite, numbers, coefficient, further);
        void* place = c.kind == WHOLE ? (void*)(weight.data + s) : (void*)(high.data + s);
        const u32 form = (c.kind != WHOLE ? NARROW : 0) | (c.kind == ROUNDED ? RANDOM : 0) | (s ? 0 : ALIGNED);
        std::vector<double> before(n);
        for (i64 i = 0; i < n; i++) before[i] = now(i);
        launch(
            adafactor_apply, dim3((n + SHARE - 1) / SHARE), dim3(64), 0, seed, place,
            c.kind == HALVES ? low.data + s : nullptr, KEY, (int)form, (const float*)g.data + s, n, c.columns, rows,
            (const float*)mean.data, (const float*)column.data, (float)(1 - rate * decay), (const float*)size.data, finite, numbers);
        if (!happens) {
            for (i64 i = 0; i < n; i++) expect(now(i) == before[i], "a closed gate changes no weight");
            for (i64 r = 0; r < c.rows; r++) expect(row[r] == 0, "nor the rows");
            for (i64 i = 0; i < c.columns; i++) expect(column[i] == 0, "nor the columns");
            continue;
        }
        // The same from the formulas of the paper.
        std::vector<double> row_sums(c.rows), column_sums(c.columns);
        for (i64 i = 0; i < n; i++) {
            const double x = g[i + s] * factor;
            row_sums[i / c.columns] += x * x;
            column_sums[i % c.columns] += x * x;
        }
        double of_rows = 0, squares = 0;
        for (i64 r = 0; r < c.rows; r++) {
            want_row[r] = c.is_vector ? 0 : b2 * want_row[r] + (1 - b2) * (row_sums[r] / c.columns + 1e-30);
            of_rows += want_row[r] / c.rows;
        }
        for (i64 i = 0; i < c.columns; i++) {
            want_column[i] = b2 * want_column[i] + (1 - b2) * (column_sums[i] / c.rows + 1e-30);
        }
        std::vector<double> u(n);
        for (i64 i = 0; i < n; i++) {
            const double by_row = c.is_vector ? 1 : std::sqrt(want_row[i / c.columns] / of_rows);
            u[i] = g[i + s] * factor / by_row / std::sqrt(want_column[i % c.columns]);
            squares += u[i] * u[i];
        }
        const double by = std::max(1.0, std::sqrt(squares / n));
        double largest = 0;
        for (i64 i = 0; i < n; i++) largest = std::max(largest, rate * std::fabs(u[i]) / by);
        for (i64 i = 0; i < n; i++) {
            // Of the weight as it was: what rounding did to it in the step before stays.
            const double want = before[i] - before[i] * rate * decay - rate * u[i] / by;
            // Rounded weights are one of the two nearest values; f32 holds 24 bits.
            const double step = std::ldexp(1.0, std::ilogb(want) - (c.kind == ROUNDED ? 7 : 23));
            const double off = std::fabs(now(i) - want);
            expect(off <= 2 * step + 1e-5 * largest, "weight " + std::to_string(i) + ": off by " + std::to_string(off));
        }
        if (rows) compare("rows", row, want_row, 1e-5);
        compare("columns", column, want_column, 1e-5);
    }
}

int main(int argc, char** argv) {
    const Case cases[] = {
        {1, 1, WHOLE, false, false, 0},       {5, 37, WHOLE, false, true, 2},     {64, 96, HALVES, false, false, 10},
        {33, 50, ROUNDED, false, false, 0},   {7, 3, HALVES, false, false, 3},    {2, SHARE + 9, WHOLE, false, false, 1},
        {1, SHARE + 70, WHOLE, true, false, 0}, {1, 301, HALVES, true, true, 0},  {1, 64, ROUNDED, true, false, 0},
    };
    for (uint64_t seed : seeds(argc, argv)) {
        for (const Case& c : cases) steps(c, nullptr, nullptr, 0, seed);
        const float further = 0.3f;
        const double good[] = {1, -2}, bad[] = {1, INFINITY}, worse[] = {NAN};
        steps(cases[1], &further, good, 2, seed);
        for (int i : {1, 4, 7}) {
            steps(cases[i], &further, bad, 2, seed);
            steps(cases[i], nullptr, worse, 1, seed);
        }
    }
    return verdict();
}
