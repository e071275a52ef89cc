// AdamW and SGD over a list of parameters: bit-equal to the plain arithmetic, f32 weights and bf16 weights in halves.
#include "kinds.h"
#include "../../cuda/optimizer.cu"

using namespace emulate;

struct Parameter {
    i64 n;
    bool half, half_gradient, shifted;
    u32 group;
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
            w[i] = weight[i + p.shifted];
            g[i] = p.half_gradient ? widen(half_gradient[i + p.shifted]) : gradient[i + p.shifted];
            want_m[i] = m[i + p.shifted];
            want_v[i] = v[i + p.shifted];
        }
    }
    Entry entry(u32 first, bool moments, bool second) {
        const int s = p.shifted;
        Entry e;
        e.weight = p.half ? (void*)(upper_half.data + s) : (void*)(weight.data + s);
        e.low = p.half ? low.data + s : nullptr;
        e.gradient = p.half_gradient ? (const void*)(half_gradient.data + s) : (const void*)(gradient.data + s);
        e.m = moments ? m.data + s : nullptr;
        e.v = second ? v.data + s : nullptr;
        e.n = p.n;
        e.first = first;
        e.form = (p.half ? 1 : 0) | (p.half_gradient ? 2 : 0) | (p.shifted ? 0 : 4) | p.group << 8;
        return e;
    }
    float now(i64 i) const {
        const int s = p.shifted;
        return p.half ? master(upper_half[i + s].bits, low[i + s]) : weight[i + s];
    }
};

enum Rule { ADAMW, SGD, PLAIN_SGD };

static void steps(Rule rule, const float* device_factor, const double* finite, uint64_t seed) {
    const Parameter list[] = {
        {5, false, false, false, 0}, {SHARE + 7, true, false, false, 1}, {300, true, true, true, 0},
        {1, false, true, false, 1}, {1000, false, false, true, 1},       {64, true, false, false, 0},
    };
    std::vector<std::unique_ptr<Held>> all;
    std::vector<Entry> table;
    u32 shares = 0;
    for (const Parameter& p : list) {
        all.push_back(std::make_unique<Held>(p, seed * 100 + table.size() * 10));
        table.push_back(all.back()->entry(shares, rule != PLAIN_SGD, rule == ADAMW));
        shares += static_cast<u32>((p.n + SHARE - 1) / SHARE);
    }
    Buffer<Entry> entries(table.size());
    std::copy(table.begin(), table.end(), entries.data);
    const Common common = rule == ADAMW ? Common{0.9f, 0.999f, 1e-8f, 0.5f} : Common{0.9f, 0, 0, 0.5f};
    Groups groups = {};
    const float numbers[2][3] = {{0.999f, 0.01f, 0.05f}, {1.0f, 0.02f, 0.1f}};
    for (int g = 0; g < 2; g++)
        for (int i = 0; i < 3; i++) groups.at[g][i] = numbers[g][i];
    if (rule != ADAMW) groups.at[0][2] = 1, groups.at[1][2] = rule == PLAIN_SGD ? 1 : 0;
    launch(
        rule == ADAMW ? adamw_step : sgd_step, dim3(shares), dim3(64), 0, seed, (const Entry*)entries.data,
        (int)entries.n, device_factor, finite, common, groups);
    const bool happens = !finite || std::isfinite(*finite);
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
            } else if (happens) {
                g = g + k[1] * w;
                const float direction = k[2] != 0 ? g : common.b1 * m + g;
                if (rule == SGD) m = direction;
                w = w - k[0] * direction;
            }
            good &= bits_of(held->now(i)) == bits_of(w);
            good &= bits_of(held->m[i + held->p.shifted]) == bits_of(m);
            good &= bits_of(held->v[i + held->p.shifted]) == bits_of(v);
            if (held->p.half) {
                const float high = widen(held->upper_half[i + held->p.shifted]);
                good &= std::fabs(high - w) <= std::fabs(w) / 256 + 1e-38f;
            }
        }
        expect(good, "rule " + std::to_string(rule) + ": a parameter of " + std::to_string(held->p.n) + " is not bit-equal");
    }
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        Buffer<float> factor(1);
        Buffer<double> squares(1);
        factor[0] = 0.3f;
        for (Rule rule : {ADAMW, SGD, PLAIN_SGD}) {
            steps(rule, nullptr, nullptr, seed);
            squares[0] = 3;
            steps(rule, factor.data, squares.data, seed);
            for (double bad : {(double)INFINITY, (double)NAN}) {
                squares[0] = bad;
                steps(rule, nullptr, squares.data, seed);
            }
        }
    }
    return verdict();
}
