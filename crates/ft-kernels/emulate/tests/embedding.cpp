// Rows by number: lookup, noise, putting back, and the sum of gradients in the order of the tokens.
#include "kinds.h"
#include "../../cuda/embedding.cu"

using namespace emulate;

static const std::vector<u32> IDS = {3, 0, 3, 6, 3, 1, 0};

static void ids_to(Buffer<u32>& buffer, const std::vector<u32>& ids) {
    for (size_t i = 0; i < ids.size(); i++) buffer[i] = ids[i];
}

template <class T>
void rows(
    void (*gather)(const T*, const u32*, float, i64, i64, T*), void (*put)(const T*, const u32*, i64, i64, T*),
    uint64_t seed) {
    for (int d : {1, 9, 64, 1096}) {
        const int n = IDS.size(), v = 7;
        const i64 packs = d % Full<T>::V == 0 ? d / Full<T>::V : 0;
        Buffer<T> table(v * d), y(n * d), back(v * d);
        Buffer<u32> ids(n);
        ids_to(ids, IDS);
        fill(table, seed);
        std::vector<double> from = values(table), want(n * d);
        for (int i = 0; i < n * d; i++) want[i] = 1.5f * from[IDS[i / d] * d + i % d];
        launch(gather, dim3(n), dim3(64), 0, seed, (const T*)table.data, (const u32*)ids.data, 1.5f, (i64)d, packs, y.data);
        check("gather", y, want, tolerance<T>());

        // Rows 4, 1 and 6 come from the first three.
        const std::vector<u32> places = {4, 1, 6};
        Buffer<u32> three(3);
        ids_to(three, places);
        std::memset(back.data, 0, back.n * sizeof(T));
        launch(put, dim3(3), dim3(64), 0, seed, (const T*)table.data, (const u32*)three.data, (i64)d, packs, back.data);
        std::vector<double> wanted(v * d, 0.0);
        for (int i = 0; i < 3 * d; i++) wanted[places[i / d] * d + i % d] = from[i];
        check("put", back, wanted, 0);
    }
}

template <class T, int V>
void sums(void (*scatter)(float*, const u32*, const u32*, const u32*, const T*, float, i64), int d, uint64_t seed) {
    const int n = IDS.size(), v = 7;
    Buffer<float> dw(v * d), want(v * d);
    Buffer<T> dx(n * d);
    fill(dw, seed + 1);
    fill(dx, seed + 2);
    std::memcpy(want.data, dw.data, dw.n * sizeof(float));
    for (int i = 0; i < n; i++)
        for (int c = 0; c < d; c++) {
            const float part = 0.3f * widen(dx[i * d + c]);
            want[IDS[i] * d + c] += part;
        }
    // By id: 0 at 1 and 6, 1 at 5, 3 at 0, 2, 4, and 6 at 3.
    Buffer<u32> distinct(4), starts(5), order(n);
    ids_to(distinct, {0, 1, 3, 6});
    ids_to(starts, {0, 2, 3, 6, 7});
    ids_to(order, {1, 6, 5, 0, 2, 4, 3});
    const int threads = 32;
    launch(
        scatter, dim3(4, (d + threads * V - 1) / (threads * V)), dim3(threads), 0, seed, dw.data,
        (const u32*)distinct.data, (const u32*)starts.data, (const u32*)order.data, (const T*)dx.data, 0.3f, (i64)d);
    same("scatter", dw, want);
}

template <class T>
void noisy(void (*noise)(T*, const u32*, i64), uint64_t seed) {
    for (int d : {1, 9, 300}) {
        const int n = 3;
        Buffer<T> x(n * d);
        Buffer<u32> rows(n * 4);
        fill(x, seed);
        std::vector<double> want = values(x);
        for (int r = 0; r < n; r++) {
            const u64 key = 0x123456789abcdefull * (r + 1);
            const float m = 0.25f * r;
            rows[r * 4] = (u32)key, rows[r * 4 + 1] = (u32)(key >> 32), rows[r * 4 + 2] = 5 + r;
            std::memcpy(&rows[r * 4 + 3], &m, 4);
            for (int i = 0; i < d; i++) want[r * d + i] += m * (2.0 * uniform(key, (5 + r) * d + i) - 1.0);
        }
        launch(noise, dim3(n), dim3(64), 0, seed, x.data, (const u32*)rows.data, (i64)d);
        check("noise", x, want, tolerance<T>());
    }
}

int main(int argc, char** argv) {
    for (uint64_t seed : seeds(argc, argv)) {
        rows(gather_f32, put_rows_f32, seed);
        rows(gather_bf16, put_rows_bf16, seed);
        noisy(noise_f32, seed);
        noisy(noise_bf16, seed);
        sums<float, 4>(scatter_add_f32_packed, 300, seed);
        sums<float, 1>(scatter_add_f32_single, 67, seed);
        sums<bf16, 4>(scatter_add_bf16_packed, 132, seed);
        sums<bf16, 1>(scatter_add_bf16_single, 7, seed);
    }
    return verdict();
}
