// The rules over a list of parameters: bit-equal to the plain arithmetic; f32 weights, bf16 weights in halves, bf16
// weights that are rounded by random numbers.
#include <algorithm>

#include "kinds.h"
#include "../../cuda/optimizer.cu"

using namespace emulate;

static const u64 KEY = 0xfeedull;

struct Parameter {
    i64 n;
    bool half, half_gradient, shifted;
    u32 group;
    bool random;
    // Elements of the whole parameter before these.
    i64 begin;
};

/// One parameter with everything that belongs to it, and its exact values.
struct Held {
    Parameter p;
    Buffer<float> weight, gradient, m, v;
    Buffer<bf16> upper_half, half_gradient;
    Buffer<unsigned short> low;
    std::vector<float> w, g, want_m, want_v;
    Held(const Parameter& p, uint64_t seed)
        : p(p), weight(p.n + 1), gradient(p.n + 1), m(p.n + 1), v(p.n + 1), upper_half(p.n + 1), half_gradient(p.n + 1),
          low(p.n + 1), w(p.n), g(p.n), want_m(p.n), want_v(p.n) {
        fill(weight, seed + 1);
        fill(gradient, seed + 2);
        fill(half_gradient, seed + 2);
        fill(m, seed + 3, 0.1f);
        fill(v, seed + 4, 0.1f);
        for (i64 i = 0; i <= p.n; i++) {
            v[i] = std::fabs(v[i]);
            upper_half[i].bits = upper(weight[i]);
            low[i] = lower(weight[i]);
        }
        for (i64 i = 0; i < p.n; i++) {
            w[i] = p.random ? widen(upper_half[i + p.shifted]) : weight[i + p.shifted];
            g[i] = p.half_gradient ? widen(half_gradient[i + p.shifted]) : gradient[i + p.shifted];
            want_m[i] = m[i + p.shifted];
            want_v[i] = v[i + p.shifted];
        }
    }
    Entry entry(u32 first, bool moments, bool second) {
        const int s = p.shifted;
        Entry e = {};
        e.weight = p.half ? (void*)(upper_half.data + s) : (void*)(weight.data + s);
        e.low = p.half && !p.random ? low.data + s : nullptr;
        e.key = KEY;
        e.gradient = p.half_gradient ? (const void*)(half_gradient.data + s) : (const void*)(gradient.data + s);
        e.m = moments ? m.data + s : nullptr;
        e.v = second ? v.data + s : nullptr;
        e.m_scales = e.v_scales = nullptr;
        e.n = p.n;
        e.begin = p.begin;
        e.first = first;
        e.form = (p.half ? 1 : 0) | (p.half_gradient ? 2 : 0) | (p.shifted ? 0 : 4) | (p.random ? 8 : 0) | p.group << 8;
        return e;
    }
    float now(i64 i) const {
        const int s = p.shifted;
        if (p.random) return widen(upper_half[i + s]);
        return p.half ? master(upper_half[i + s].bits, low[i + s]) : weight[i + s];
    }
};

enum Rule { ADAMW, SGD, PLAIN_SGD, LION, SIGN };

static float sign_of(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f; }

/// As `round` of ops/master.rs, by the number that element i of the whole parameter takes.
static float rounded(float x, i64 i) {
    const u64 number = draw(KEY, i / 4) >> (16 * (i % 4)) & 0xffff;
    return float_of((bits_of(x) + static_cast<u32>(number)) & 0xffff0000u);
}

static void steps(Rule rule, const float* device_factor, const double* finite, int checked, uint64_t seed) {
    const Parameter list[] = {
        {5, false, false, false, 0, false, 0}, {SHARE + 7, true, false, false, 1, false, 4}, {300, true, true, true, 0, false, 0},
        {1, false, true, false, 1, false, 0},  {1000, false, false, true, 1, false, 8},       {64, true, false, false, 0, false, 0},
        {517, true, false, false, 1, true, 0}, {SHARE + 11, true, true, true, 0, true, 8 * SHARE + 4},
    };
    std::vector<std::unique_ptr<Held>> all;
    std::vector<Entry> table;
    u32 shares = 0;
    for (const Parameter& p : list) {
        all.push_back(std::make_unique<Held>(p, seed * 100 + table.size() * 10));
        table.push_back(all.back()->entry(shares, rule != PLAIN_SGD && rule != SIGN, rule == ADAMW));
        shares += static_cast<u32>((p.n + SHARE - 1) / SHARE);
    }
    Buffer<Entry> entries(table.size());
    std::copy(table.begin(), table.end(), entries.data);
    const Common common{0.9f, 0.999f, 1e-8f, 0.5f};
    Groups groups = {};
    const float numbers[2][3] = {{0.999f, 0.01f, 0.05f}, {1.0f, 0.02f, 0.1f}};
    for (int g = 0; g < 2; g++)
        for (int i = 0; i < 3; i++) groups.at[g][i] = numbers[g][i];
    if (rule == SGD || rule == PLAIN_SGD) groups.at[0][2] = 1, groups.at[1][2] = rule == PLAIN_SGD ? 1 : 0;
    launch(
        rule == ADAMW ? adamw_step : rule == LION ? lion_step : rule == SIGN ? sign_step : sgd_step, dim3(shares), dim3(64), 0, seed, (const Entry*)entries.data,
        (int)entries.n, device_factor, finite, checked, (const Table*)nullptr, common, groups);
    const bool happens = std::all_of(finite, finite + checked, [](double x) { return std::isfinite(x); });
    const float coefficient = common.coefficient * (device_factor ? *device_factor : 1.0f);
    for (const auto& held : all) {
        const float* k = groups.at[held->p.group];
        bool good = true;
        for (i64 i = 0; i < held->p.n; i++) {
            float &w = held->w[i], &m = held->want_m[i], &v = held->want_v[i];
            float g = held->g[i] * coefficient;
            if (happens && rule == ADAMW) {
                m += (g - m) * (1.0f - common.b1);
                v = v * common.b2 + g * g * (1.0f - common.b2);
                const float denominator = std::sqrt(v) / k[2] + common.eps;
                w = w * k[0] - k[1] * (m / denominator);
            } else if (happens && rule == LION) {
                const float direction = sign_of(m * common.b1 + g * (1.0f - common.b1));
                m = m * common.b2 + g * (1.0f - common.b2);
                w = w * k[0] - k[1] * direction;
            } else if (happens && rule == SIGN) {
                w = w - k[0] * sign_of(g);
            } else if (happens) {
                g = g + k[1] * w;
                const float direction = k[2] != 0 ? g : common.b1 * m + g;
                if (rule == SGD) m = direction;
                w = w - k[0] * direction;
            }
            if (happens && held->p.random) w = rounded(w, held->p.begin + i);
            good &= bits_of(held->now(i)) == bits_of(w);
            good &= bits_of(held->m[i + held->p.shifted]) == bits_of(m);
            good &= bits_of(held->v[i + held->p.shifted]) == bits_of(v);
            if (held->p.half && !held->p.random) {
                const float high = widen(held->upper_half[i + held->p.shifted]);
                good &= std::fabs(high - w) <= std::fabs(w) / 256 + 1e-38f;
            }
        }
        expect(good, "rule " + std::to_string(rule) + ": a parameter of " + std::to_string(held->p.n) + " is not bit-equal");
    }
}

/// A sorted table of 256 numbers up to 1, dense near 0; with sign as many below 0.
static void make(Table& table, bool has_sign) {
    for (int i = 0; i < 256; i++) {
        const double x = has_sign ? (i - 127) / 128.0 : i / 255.0;
        table.values[i] = static_cast<float>(x * x * x);
    }
    for (int i = 0; i < 256; i++) table.middles[i] = i < 255 ? (table.values[i] + table.values[i + 1]) / 2 : INFINITY;
}

static int searched(const Table& table, float x) {
    int code = 0;
    while (code < 255 && table.middles[code] < x) code++;
    return code;
}

/// Codes and scale of a block, one after another.
static void encoded(const Table& table, bool has_sign, const float* x, i64 n, unsigned char* codes, float* scale) {
    float most = 0;
    for (i64 i = 0; i < n; i++) most = std::fmax(most, std::fabs(x[i]));
    for (i64 i = 0; i < n; i++) {
        int code = most == 0 ? 0 : searched(table, x[i] / most);
        if (!has_sign && code == 0 && x[i] > 0) code = 1;
        codes[i] = static_cast<unsigned char>(code);
    }
    *scale = most;
}

/// AdamW (or Lion, which has one moment) with eight-bit moments, three steps from zero.
static void coded_steps(Rule rule, i64 n, bool half, bool shifted, uint64_t seed) {
    Buffer<Table> tables(2);
    make(tables[0], true);
    make(tables[1], false);
    const i64 blocks = (n + CODED - 1) / CODED;
    const int s = shifted;
    Buffer<float> weight(n + 1), gradient(n + 1), m_scales(blocks), v_scales(blocks);
    Buffer<bf16> high(n + 1);
    Buffer<unsigned short> low(n + 1);
    Buffer<unsigned char> m(n), v(n);
    fill(weight, seed + 1);
    std::vector<float> w(weight.data + s, weight.data + s + n), scales[2];
    std::vector<unsigned char> codes[2];
    for (int k = 0; k < 2; k++) {
        scales[k].assign(blocks, 0.0f);
        codes[k].assign(n, 0);
    }
    m_scales.fill(0), v_scales.fill(0), m.fill(0), v.fill(0);
    for (i64 i = 0; i <= n; i++) high[i].bits = upper(weight[i]), low[i] = lower(weight[i]);
    Buffer<Entry> entries(1);
    Entry& e = entries[0];
    e.weight = half ? (void*)(high.data + s) : (void*)(weight.data + s);
    e.low = half ? low.data + s : nullptr;
    e.gradient = gradient.data + s;
    e.m = m.data;
    e.v = rule == ADAMW ? v.data : nullptr;
    e.m_scales = m_scales.data;
    e.v_scales = rule == ADAMW ? v_scales.data : nullptr;
    e.key = 0, e.n = n, e.begin = 0, e.first = 0;
    e.form = (half ? 1 : 0) | (shifted ? 0 : 4);
    const Common common{0.9f, 0.999f, 1e-8f, 0.5f};
    Groups groups = {};
    groups.at[0][0] = 0.999f, groups.at[0][1] = 0.01f, groups.at[0][2] = 0.05f;
    const float* k = groups.at[0];
    for (int t = 0; t < 3; t++) {
        fill(gradient, seed * 10 + t);
        if (t == 0) gradient[s] = 0;
        launch(
            rule == ADAMW ? adamw_step_codes : lion_step_codes, dim3((n + SHARE - 1) / SHARE), dim3(64), 0, seed,
            (const Entry*)entries.data, 1, (const float*)nullptr, (const double*)nullptr, 0, (const Table*)tables.data,
            common, groups);
        for (i64 b = 0; b < blocks; b++) {
            const i64 from = b * CODED, count = std::min<i64>(CODED, n - from);
            float x[CODED], y[CODED];
            for (i64 i = 0; i < count; i++) {
                x[i] = tables[0].values[codes[0][from + i]] * scales[0][b];
                y[i] = tables[1].values[codes[1][from + i]] * scales[1][b];
                float& weight_now = w[from + i];
                const float g = gradient[s + from + i] * common.coefficient;
                if (rule == ADAMW) {
                    x[i] += (g - x[i]) * (1.0f - common.b1);
                    y[i] = y[i] * common.b2 + g * g * (1.0f - common.b2);
                    weight_now = weight_now * k[0] - k[1] * (x[i] / (std::sqrt(y[i]) / k[2] + common.eps));
                } else {
                    const float direction = sign_of(x[i] * common.b1 + g * (1.0f - common.b1));
                    x[i] = x[i] * common.b2 + g * (1.0f - common.b2);
                    weight_now = weight_now * k[0] - k[1] * direction;
                }
            }
            encoded(tables[0], true, x, count, &codes[0][from], &scales[0][b]);
            if (rule == ADAMW) encoded(tables[1], false, y, count, &codes[1][from], &scales[1][b]);
        }
        bool good = true;
        for (i64 i = 0; i < n; i++) {
            const float now = half ? master(high[s + i].bits, low[s + i]) : weight[s + i];
            good &= bits_of(now) == bits_of(w[i]) && m[i] == codes[0][i] && v[i] == codes[1][i];
        }
        for (i64 b = 0; b < blocks; b++) good &= m_scales[b] == scales[0][b] && v_scales[b] == scales[1][b];
        expect(good, "eight-bit moments of " + std::to_string(n) + " elements are not bit-equal");
    }
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        Buffer<float> factor(1);
        Buffer<double> sums(3);
        factor[0] = 0.3f;
        for (Rule rule : {ADAMW, SGD, PLAIN_SGD, LION, SIGN}) {
            steps(rule, nullptr, nullptr, 0, seed);
            sums[0] = 3, sums[1] = 0, sums[2] = -1e300;
            steps(rule, factor.data, sums.data, 3, seed);
            for (double bad : {(double)INFINITY, -(double)INFINITY, (double)NAN}) {
                for (int at : {0, 2}) {
                    sums[0] = sums[2] = 1;
                    sums[at] = bad;
                    steps(rule, nullptr, sums.data, 3, seed);
                    // Only the first is asked for.
                    steps(rule, nullptr, sums.data, 1, seed);
                }
            }
        }
        for (Rule rule : {ADAMW, LION}) {
            coded_steps(rule, 4096, false, false, seed);
            coded_steps(rule, SHARE + 300, true, false, seed);
            coded_steps(rule, 5003, true, true, seed);
            coded_steps(rule, 1, false, false, seed);
        }
    }
    return verdict();
}
