// The emulator itself: indices, barriers, shuffles, copies that land late, fragments, and that faults are seen.
#include "test.h"
#include "../../cuda/mma.cuh"

/// Sum of each block's elements through shuffles and static shared memory.
extern "C" __global__ void block_sums(float* __restrict__ sums, const float* __restrict__ x, int n) {
    __shared__ float partial[32];
    int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    float sum = at < n ? x[at] : 0.0f;
    for (int by = 16; by > 0; by /= 2) sum += __shfl_down_sync(0xffffffffu, sum, by);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < (blockDim.x + 31) / 32 ? partial[threadIdx.x] : 0.0f;
        for (int with = 16; with > 0; with /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, with);
        if (threadIdx.x == 0) sums[blockIdx.x] = sum;
    }
}

/// Reverses 128 numbers through shared memory; each barrier or wait can be left out.
template <bool BARRIER, bool WAIT>
__global__ void reverse(float* y, const float* x) {
    DYNAMIC_SHARED(raw);
    float* tile = reinterpret_cast<float*>(raw);
    ptx::copy4(ptx::address(tile + threadIdx.x), x + threadIdx.x, true);
    ptx::commit();
    if (WAIT) ptx::wait<0>();
    if (BARRIER) __syncthreads();
    y[threadIdx.x] = tile[127 - threadIdx.x];
    ptx::wait<0>();
}

/// c[16][16] = a[16][32] b[32][16] with a and b row after row: every load form that attention uses.
__global__ void product(float* c, const __nv_bfloat16* a, const __nv_bfloat16* b, const __nv_bfloat16* b_turned) {
    DYNAMIC_SHARED(raw);
    auto* sa = reinterpret_cast<__nv_bfloat16*>(raw);
    auto *sb = sa + 16 * 40, *st = sb + 32 * 24;
    int lane = static_cast<int>(threadIdx.x);
    for (int i = lane; i < 16 * 4; i += 32) ptx::copy16(ptx::address(sa + i / 4 * 40 + i % 4 * 8), a + i * 8, true);
    for (int i = lane; i < 32 * 2; i += 32) ptx::copy16(ptx::address(sb + i / 2 * 24 + i % 2 * 8), b + i * 8, true);
    for (int i = lane; i < 16 * 4; i += 32) ptx::copy16(ptx::address(st + i / 4 * 40 + i % 4 * 8), b_turned + i * 8, true);
    ptx::commit();
    ptx::wait<0>();
    __syncwarp();
    float acc[2][2][4] = {};
    for (int k = 0; k < 2; k++) {
        uint32_t fa[4], fb[4], ft[4];
        ptx::ldmatrix(fa, ptx::address(sa + (lane & 15) * 40 + k * 16 + (lane >> 4) * 8));
        ptx::ldmatrix_trans(fb, ptx::address(sb + (k * 16 + (lane & 15)) * 24 + (lane >> 4) * 8));
        ptx::ldmatrix(ft, ptx::address(st + ((lane & 7) + (lane >> 4) * 8) * 40 + k * 16 + ((lane >> 3) & 1) * 8));
        for (int n = 0; n < 2; n++) {
            ptx::mma(acc[0][n], fa, fb[2 * n], fb[2 * n + 1]);
            ptx::mma(acc[1][n], fa, ft[2 * n], ft[2 * n + 1]);
        }
    }
    for (int which = 0; which < 2; which++)
        for (int n = 0; n < 2; n++)
            for (int i = 0; i < 4; i++) {
                int row = lane / 4 + i / 2 * 8, column = n * 8 + lane % 4 * 2 + i % 2;
                c[which * 256 + row * 16 + column] = acc[which][n][i];
            }
}

static bool reversed(void (*kernel)(float*, const float*), uint64_t seed) {
    emulate::Buffer<float> x(128), y(128);
    x.fill_normal(seed + 1);
    emulate::launch(kernel, dim3(1), dim3(128), 128 * sizeof(float), seed, y.data, x.data);
    for (int i = 0; i < 128; i++)
        if (!(y[i] == x[127 - i])) return false;
    return true;
}

int main(int argc, char** argv) {
    int without_barrier = 0, without_wait = 0, runs = 0;
    for (uint64_t seed : emulate::seeds(argc, argv)) {
        const int n = 1000;
        emulate::Buffer<float> x(n), sums(5);
        x.fill_normal(seed);
        std::vector<double> want(5);
        for (int i = 0; i < n; i++) want[i / 224] += x[i];
        emulate::launch(block_sums, dim3(5), dim3(224), 0, seed, sums.data, x.data, n);
        emulate::compare("sums", sums, want, 1e-6);

        emulate::expect(reversed(reverse<true, true>, seed), "reverse is wrong");
        without_barrier += reversed(reverse<false, true>, seed);
        without_wait += reversed(reverse<true, false>, seed);
        runs++;

        emulate::Buffer<__nv_bfloat16> a(16 * 32), b(32 * 16), turned(16 * 32);
        a.fill_normal(seed + 2);
        b.fill_normal(seed + 3);
        std::vector<double> c(512);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 16; j++)
                for (int k = 0; k < 32; k++) {
                    turned[j * 32 + k] = b[k * 16 + j];
                    double term = static_cast<double>(a[i * 32 + k]) * static_cast<double>(b[k * 16 + j]);
                    c[i * 16 + j] += term;
                    c[256 + i * 16 + j] += term;
                }
        emulate::Buffer<float> got(512);
        emulate::launch(product, dim3(1), dim3(32), (16 * 40 * 2 + 32 * 24) * 2, seed, got.data, a.data, b.data, turned.data);
        emulate::compare("product", got, c, 1e-6);
    }
    emulate::expect(without_barrier == 0, "a missing barrier did not show");
    emulate::expect(without_wait == 0, "a missing wait did not show");
    return emulate::verdict();
}
