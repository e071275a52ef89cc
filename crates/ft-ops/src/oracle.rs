//! Helpers for the tests of the operations: seeded tensors, comparison, and equality on any number of threads.

use super::cpu::product::{CpuBackend, Rounding};
use super::paged::KvDtype;
use candle_core::{DType, Device, Shape, Tensor};
use ft_base::Result;
use half::bf16;

/// Returns seeded values, roughly normal.
pub fn random(shape: impl Into<Shape>, seed: u64) -> Tensor {
    let shape = shape.into();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let data: Vec<f32> = (0..shape.elem_count())
        .map(|_| (uniform() + uniform() + uniform() + uniform()) * 1.7)
        .collect();
    Tensor::from_vec(data, shape, &Device::Cpu).unwrap()
}

/// Returns seeded bf16 values, and the same values in f32.
pub fn bf16_pair(shape: impl Into<Shape>, seed: u64) -> (Tensor, Tensor) {
    let narrow = random(shape, seed).to_dtype(DType::BF16).unwrap();
    let wide = narrow.to_dtype(DType::F32).unwrap();
    (narrow, wide)
}

/// Rounds f32 values as the products of a bf16 model do on the current path: to the nearest bf16 if the path
/// rounds, else not at all. With such operands, products of few rows, of many rows and of f32 weights differ only
/// by the order of f32 sums, on every path.
pub fn as_operand(t: &Tensor) -> Tensor {
    if CpuBackend::current().rounds(Rounding::Bf16) {
        t.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap()
    } else {
        t.clone()
    }
}

pub fn flat(t: &Tensor) -> Vec<f32> {
    t.flatten_all().unwrap().to_vec1::<f32>().unwrap()
}

/// Asserts that the largest difference is at most `tolerance` times the largest expected magnitude.
#[track_caller]
pub fn assert_close(got: &Tensor, want: &Tensor, tolerance: f32) {
    assert_eq!(got.dims(), want.dims());
    let (got, want) = (flat(got), flat(want));
    let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        assert!(
            (g - w).abs() <= tolerance * largest,
            "element {i}: got {g}, want {w}, largest {largest}"
        );
    }
}

fn on_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(f)
}

/// Asserts that the results with 1, 2 and 5 threads are bit-equal.
#[track_caller]
pub fn assert_same_on_any_threads(f: impl Fn() -> Vec<Tensor> + Sync) {
    let bits = |threads| -> Vec<Vec<u32>> {
        on_threads(threads, || {
            f().iter()
                .map(|t| flat(t).iter().map(|v| v.to_bits()).collect())
                .collect()
        })
    };
    let one = bits(1);
    assert!(!one.is_empty());
    assert!(one == bits(2), "1 and 2 threads differ");
    assert!(one == bits(5), "1 and 5 threads differ");
}

/// Returns the derivative of `f` along each element of `x`, by central differences of step `h`.
pub fn differences(x: &Tensor, h: f32, f: impl Fn(&Tensor) -> Result<f64>) -> Tensor {
    let data = flat(x);
    let at = |i: usize, step: f32| {
        let mut moved = data.clone();
        moved[i] += step;
        let t = Tensor::from_vec(moved, x.shape(), &Device::Cpu).unwrap();
        f(&t).unwrap()
    };
    let slopes: Vec<f32> = (0..data.len())
        .map(|i| ((at(i, h) - at(i, -h)) / (2.0 * h as f64)) as f32)
        .collect();
    Tensor::from_vec(slopes, x.shape(), &Device::Cpu).unwrap()
}

/// Rows `[n, K·E]` as a KV cache of this type returns them, by the definition of the type.
pub fn read_back(rows: &Tensor, head_dim: usize, stored: KvDtype) -> Tensor {
    let mut all = flat(rows);
    for head in all.chunks_exact_mut(head_dim) {
        let absmax = head.iter().fold(0f32, |m, x| m.max(x.abs()));
        for x in head {
            let exact = *x;
            *x = match stored {
                KvDtype::F32 => exact,
                KvDtype::Bf16 => bf16::from_f32(exact).to_f32(),
                KvDtype::Int8 => (exact * (127.0 / absmax)).round_ties_even() * (absmax / 127.0),
            };
            let most = match stored {
                KvDtype::F32 => 0.0,
                KvDtype::Bf16 => exact.abs() / 256.0,
                KvDtype::Int8 => absmax / 253.0,
            };
            assert!((*x - exact).abs() <= most);
        }
    }
    Tensor::from_vec(all, rows.dims(), &candle_core::Device::Cpu).unwrap()
}
