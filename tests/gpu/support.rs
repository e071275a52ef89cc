//! The GPU of the tests, random tensors on both devices, comparisons.

use candle_core::{DType, Device, Shape, Tensor};
use std::sync::{Mutex, MutexGuard, OnceLock};

/// The GPU, locked for one test at a time.
pub struct Gpu {
    pub device: Device,
    _alone: MutexGuard<'static, ()>,
}

/// Returns `None` and prints a message if there is no GPU.
pub fn gpu() -> Option<Gpu> {
    static ALONE: Mutex<()> = Mutex::new(());
    static DEVICE: OnceLock<Result<Device, String>> = OnceLock::new();
    // A failed test may have poisoned the lock.
    let alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let open = || match ft::ops::device::open("cuda:0") {
        Ok(opened) => Ok(opened.device),
        Err(e) => Err(e.to_string()),
    };
    match DEVICE.get_or_init(open) {
        Ok(device) => Some(Gpu {
            device: device.clone(),
            _alone: alone,
        }),
        Err(e) => {
            let required = std::env::var("FT_REQUIRE_GPU").is_ok_and(|v| v == "1");
            assert!(!required, "FT_REQUIRE_GPU=1, but there is no GPU: {e}");
            eprintln!("skipped: no GPU: {e}");
            None
        }
    }
}

/// True for a slow device (`FT_GPU_SHORT=1`): tests with many sizes or steps leave some out.
pub fn short() -> bool {
    std::env::var("FT_GPU_SHORT").is_ok_and(|v| v == "1")
}

/// Element types of activations, with the tolerance of the comparison.
pub const KINDS: [(DType, f32); 2] = [(DType::F32, 1e-4), (DType::BF16, 1e-2)];

/// One tensor on both devices with the same values: f32 on the CPU, the requested type on the GPU.
pub struct Pair {
    pub cpu: Tensor,
    pub gpu: Tensor,
}

impl Gpu {
    /// Random values from a seed, roughly normal.
    pub fn random(&self, shape: impl Into<Shape>, dtype: DType, seed: u64) -> Pair {
        self.pair(&ft::ops::oracle::random(shape, seed), dtype)
    }

    /// `t` (f32, on the CPU) rounded to `dtype` on both devices.
    pub fn pair(&self, t: &Tensor, dtype: DType) -> Pair {
        let stored = t.to_dtype(dtype).unwrap();
        Pair {
            gpu: stored.to_device(&self.device).unwrap(),
            cpu: stored.to_dtype(DType::F32).unwrap(),
        }
    }
}

impl Pair {
    /// The CPU tensor in the type of the GPU tensor, for use as a weight.
    pub fn weight(&self) -> Tensor {
        self.cpu.to_dtype(self.gpu.dtype()).unwrap()
    }

    /// A range of rows of both; the view does not start at the beginning of the memory.
    pub fn rows(&self, start: usize, len: usize) -> Self {
        Self {
            cpu: self.cpu.narrow(0, start, len).unwrap(),
            gpu: self.gpu.narrow(0, start, len).unwrap(),
        }
    }
}

pub fn flat(t: &Tensor) -> Vec<f32> {
    t.to_device(&Device::Cpu)
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// Asserts that the largest difference is at most `tolerance` times the largest expected magnitude.
#[track_caller]
pub fn assert_close(got: &Tensor, want: &Tensor, tolerance: f32) {
    assert_eq!(got.dims(), want.dims());
    assert!(got.device().is_cuda() && want.device().is_cpu());
    let (got, want) = (flat(got), flat(want));
    let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        assert!(
            (g - w).abs() <= tolerance * largest,
            "element {i}: got {g}, want {w}, largest {largest}"
        );
    }
}

#[track_caller]
pub fn assert_same_bits(a: &Tensor, b: &Tensor) {
    assert_eq!((a.dims(), a.dtype()), (b.dims(), b.dtype()));
    assert!(flat(a).iter().all(|x| !x.is_nan()), "NaN");
    let bits = |t: &Tensor| flat(t).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(a) == bits(b), "not the same bits");
}
