// Samples a token from each row of logits [rows, vocab], without top-k and top-p: the arithmetic of
// crates/ft-core/src/generate/sampler.rs, with sums of f64 over tiles of TILE tokens. One block for each row.
#include "common.cuh"

#include "mma.cuh"

namespace sample {

constexpr int TILE = 1024, THREADS = 512, WARPS = THREADS / 32;
// The id of a row whose logits are NaN, or the largest of which is infinite.
constexpr u32 NONE = 0xffffffffu;

// The logits of a row after the cap of the model (0: none), relative to the highest one and divided by the temperature.
template <typename T>
struct Row {
    const T* logits;
    i64 vocab;
    float cap, highest, temperature;

    __device__ __forceinline__ float at(i64 token) const {
        const float x = widen(logits[token]);
        return cap > 0 ? cap * tanhf(x / cap) : x;
    }
    __device__ __forceinline__ float weight(i64 token) const {
        return token < vocab ? expf((at(token) - highest) / temperature) : 0.0f;
    }
};

// Dynamic shared memory: a f64 for each tile. `uniform` [rows] in [0, 1): the random number of a row; null: the most likely
// token, the lowest of equals.
template <typename T>
__device__ __forceinline__ void draw(
    const T* logits, i64 vocab, float cap, float temperature, const double* uniform, u32* ids, float* log_probs) {
    DYNAMIC_SHARED(memory);
    double* tiles = reinterpret_cast<double*>(memory);
    __shared__ float tops[WARPS];
    __shared__ double total, left;
    __shared__ int start, odd_rows, found;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = (int)((vocab + TILE - 1) / TILE);
    Row<T> row = {logits + blockIdx.x * vocab, vocab, cap, 0.0f, temperature};
    if (threadIdx.x == 0) {
        odd_rows = 0;
        found = 0x7fffffff;
    }
    __syncthreads();
    float highest = -INFINITY;
    bool nan = false;
    for (i64 token = threadIdx.x; token < vocab; token += THREADS) {
        const float x = row.at(token);
        nan |= x != x;
        highest = fmaxf(highest, x);
    }
    highest = lane_max(highest);
    if (lane == 0) tops[warp] = highest;
    if (nan) odd_rows = 1;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, tops[w]);
    if (odd_rows || odd(highest)) {
        if (threadIdx.x == 0) ids[blockIdx.x] = NONE;
        return;
    }
    row.highest = highest;
    for (int tile = warp; tile < count; tile += WARPS) {
        double sum = 0;
        for (int r = 0; r < TILE; r += 32) sum += row.weight((i64)tile * TILE + r + lane);
        sum = lane_sum<32>(sum);
        if (lane == 0) tiles[tile] = sum;
    }
    if (!uniform) {
        for (i64 token = threadIdx.x; token < vocab; token += THREADS) {
            if (row.at(token) == highest) {
                atomicMin(&found, (int)token);
                break;
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        total = 0;
        for (int tile = 0; tile < count; tile++) total += tiles[tile];
        left = uniform ? uniform[blockIdx.x] * total : 0;
        start = 0;
        while (uniform && start + 1 < count && tiles[start] < left) left -= tiles[start++];
    }
    __syncthreads();
    if (warp > 0) return;
    i64 id = found;
    if (uniform) {
        id = -1;
        // The first token with which the sum exceeds what is left; rounding may move it behind the tile.
        double rest = left;
        for (i64 at = (i64)start * TILE; at < vocab && id < 0; at += 32) {
            double sum = row.weight(at + lane);
#pragma unroll
            for (int by = 1; by < 32; by *= 2) {
                const double before = __shfl_up_sync(0xffffffffu, sum, by);
                if (lane >= by) sum += before;
            }
            const u32 over = __ballot_sync(0xffffffffu, rest - sum < 0);
            if (over) id = at + __ffs(over) - 1;
            rest -= __shfl_sync(0xffffffffu, sum, 31);
        }
        // Rounding left nothing: the last token that can be drawn.
        for (i64 at = vocab - 1; id < 0 && at >= 0; at--) {
            if (row.weight(at) > 0) id = at;
        }
    }
    if (lane != 0) return;
    if (id < 0) {
        ids[blockIdx.x] = NONE;
        return;
    }
    ids[blockIdx.x] = (u32)id;
    log_probs[blockIdx.x] = (row.at(id) - highest) / temperature - (float)log(total);
}

}  // namespace sample

#define SAMPLE(T)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(sample::THREADS) sample_##T(                                         \
        const T* logits, i64 vocab, float cap, float temperature, const double* uniform, u32* ids, float* log_probs) { \
        sample::draw<T>(logits, vocab, cap, temperature, uniform, ids, log_probs);                                     \
    }

typedef float f32;
SAMPLE(f32)
SAMPLE(bf16)
