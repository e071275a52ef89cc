//! The GPU of the tests, random tensors on both devices, comparisons.

use candle_core::{DType, Device, Shape, Tensor};
use ft::ops::Dtype;
use ft::ops::quantized::{CodeType, ProductType, ScaleType, ScaledKind};
use ft::quant::{Format, QMatrix, ScaledFormat, quantize};
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

/// The formats that ft quantizes to, and one of each kind that it reads from files of other tools: MXFP4, GPTQ with the group of each
/// column, AWQ, 8 bits with zero points, FP8 with scales of blocks and of rows, LLM.int8(), FP4.
pub fn formats() -> Vec<Format> {
    let scaled = |code, scale, product, group, zeros, ordered| {
        let kind = ScaledKind { code, scale, product };
        Format::Scaled(ScaledFormat {
            kind,
            group,
            zeros,
            ordered,
        })
    };
    let others = [
        scaled(CodeType::E2m1, ScaleType::E8m0, ProductType::Bf16, 32, false, false),
        scaled(CodeType::U4, ScaleType::F16, ProductType::F16, 64, true, true),
        scaled(CodeType::U4, ScaleType::F16, ProductType::F16, 128, true, false),
        scaled(CodeType::U8, ScaleType::Bf16, ProductType::Bf16, 32, true, false),
        scaled(CodeType::E4m3, ScaleType::F32, ProductType::F32, 128, false, false),
        scaled(CodeType::E4m3, ScaleType::Bf16, ProductType::Bf16, 0, false, false),
        scaled(CodeType::I8, ScaleType::F32, ProductType::Absmax127, 0, false, false),
        Format::Fp4 { double: false },
    ];
    [&Format::ALL[..], &others].concat()
}

/// A weight `[O, I]` of a format, dequantized to the type of the activations. Codes and scales of other tools are random.
pub fn quantized((o, i): (usize, usize), format: Format, activations: DType, seed: u64) -> QMatrix {
    let dequantized_dtype = match activations {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::Bf16,
        _ => Dtype::F32,
    };
    let numbers = |count: usize, seed: u64| -> Vec<f32> {
        let all = ft::ops::oracle::random(count, seed);
        all.to_vec1().unwrap()
    };
    if !format.is_read_only() {
        return quantize(&numbers(o * i, seed), (o, i), format, dequantized_dtype).unwrap();
    }
    let sizes = format.parts(o, i);
    let part = |name: &str| {
        let size = sizes.iter().find(|(part, _)| *part == name).unwrap().1;
        // A hash of the bits: every code is as likely.
        let bytes: Vec<u8> = (numbers(size, seed + 100).iter())
            .map(|x| (x.to_bits().wrapping_mul(0x9E37_79B1) >> 24) as u8)
            .collect();
        let Format::Scaled(scaled) = format else {
            return match name {
                "absmax" => (bytes.chunks(4).map(|b| 0.01 + f32::from(b[0]) / 1e4))
                    .flat_map(f32::to_le_bytes)
                    .collect(),
                _ => bytes,
            };
        };
        let code = scaled.kind.code;
        match (name, scaled.kind.scale) {
            // Not the two codes that are no numbers.
            ("codes", _) if code == CodeType::E4m3 => {
                bytes.iter().map(|b| if b & 0x7F == 0x7F { 0 } else { *b }).collect()
            }
            ("codes", _) => bytes,
            ("zeros", _) if code.is_nibble() => bytes.iter().map(|b| b % 16).collect(),
            ("zeros", _) => bytes,
            ("order", _) => (bytes
                .chunks(4)
                .map(|b| u32::from(b[0]) % i.div_ceil(scaled.group) as u32))
            .flat_map(u32::to_le_bytes)
            .collect(),
            (_, ScaleType::E8m0) => bytes.iter().map(|b| 118 + b % 6).collect(),
            (_, scale) => (bytes.chunks(scale.bytes()))
                .flat_map(|b| {
                    let value = (0.01 + f32::from(b[0]) / 1e4) / if code == CodeType::E4m3 { 50.0 } else { 1.0 };
                    match scale {
                        ScaleType::F32 => value.to_le_bytes().to_vec(),
                        ScaleType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
                        _ => half::bf16::from_f32(value).to_le_bytes().to_vec(),
                    }
                })
                .collect(),
        }
    };
    QMatrix::from_parts(format, (o, i), dequantized_dtype, |name| Ok(part(name))).unwrap()
}

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
