//! Reads and in-place updates of tensors: gradients, accumulators, weights. All tensors are contiguous; sums have a
//! fixed order. A tensor must not be changed while a slice of the same storage is held.

use super::Dtype;
use super::cpu::storage::{StoredElements, expect_dims, floats, tensor, values};
use super::cpu::update as cpu;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, InplaceOp2, Layout, Shape, Storage, Tensor};
use ft_base::rng::Rng;
use ft_base::{Error, Result};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::Mutex;

/// Returns zeros. On a GPU whose memory is fragmented, unlike candle's function, this one tries again.
///
/// # Errors
/// Not enough memory on the device.
pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return super::cuda::Gpu::on(device)?.zeros(shape, dtype);
    }
    Ok(Tensor::zeros(shape, dtype, device)?)
}

/// Runs `f` on the f32 elements of `t`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn with_slice<R>(t: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    floats(t, "a tensor that is read", |v| Ok(f(v)))
}

/// Runs `f` on the bf16 elements of `t`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn with_bf16<R>(t: &Tensor, f: impl FnOnce(&[bf16]) -> R) -> Result<R> {
    values(t, "a tensor that is read", |v| match v {
        StoredElements::Bf16(v) => Ok(f(v)),
        StoredElements::F32(_) => Err(Error::shape("a tensor that is read has the wrong element type")
            .found("f32")
            .expected("bf16")),
    })
}

/// Runs `f` on the f16 elements of `t`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn with_f16<R>(t: &Tensor, f: impl FnOnce(&[f16]) -> R) -> Result<R> {
    check_place(t)?;
    let (storage, layout) = t.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F16(v)) => Ok(f(&v[range(layout)?])),
        _ => Err(Error::shape("a tensor that is read has the wrong element type")
            .found(t.dtype().as_str())
            .expected("f16")),
    }
}

/// Runs `f` on the mutable f32 elements of `t`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn with_slice_mut(t: &Tensor, f: impl FnOnce(&mut [f32]) + Send + Sync) -> Result<()> {
    in_place(t, |storage, range| match storage {
        CpuStorage::F32(v) => {
            f(&mut v[range]);
            true
        }
        _ => false,
    })
}

/// Runs `f` on the mutable bf16 elements of `dst`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn store_bf16(dst: &Tensor, f: impl FnOnce(&mut [bf16]) + Send + Sync) -> Result<()> {
    in_place(dst, |storage, range| match storage {
        CpuStorage::BF16(v) => {
            f(&mut v[range]);
            true
        }
        _ => false,
    })
}

/// Runs `f` on the mutable f16 elements of `dst`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn store_f16(dst: &Tensor, f: impl FnOnce(&mut [f16]) + Send + Sync) -> Result<()> {
    in_place(dst, |storage, range| match storage {
        CpuStorage::F16(v) => {
            f(&mut v[range]);
            true
        }
        _ => false,
    })
}

/// Runs `f` on the mutable f32 elements of `dst` and on those of `src`. The two must not share storage.
pub(crate) fn with_slices(dst: &Tensor, src: &Tensor, f: impl FnOnce(&mut [f32], &[f32])) -> Result<()> {
    check_place(dst)?;
    floats(src, "a tensor that is read", |_| Ok(()))?;
    let op = InPlace {
        f: Mutex::new(Some(f)),
        fits: Mutex::new(false),
    };
    dst.inplace_op2(src, &op)?;
    op.done(dst)
}

/// Computes `acc += g`, both f32 (on a GPU each f32, bf16 or f16) of the same shape, not sharing storage.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn add_assign(acc: &Tensor, g: &Tensor) -> Result<()> {
    expect_dims(g, "a tensor that is added", acc.dims())?;
    on_gpu!(acc, super::cuda::elementwise::add_assign(acc, g));
    with_slices(acc, g, cpu::add_assign)
}

/// Adds `row [C]` (f32, bf16 or f16) to every row of `t [N, C]`, f32, on a GPU also bf16 or f16. The two must not share storage.
///
/// # Errors
/// Shapes that do not fit.
pub fn add_rows(t: &Tensor, row: &Tensor) -> Result<()> {
    expect_dims(
        row,
        "a row that is added",
        &t.dims()[t.dims().len().saturating_sub(1)..],
    )?;
    on_gpu!(t, super::cuda::elementwise::add_rows(t, row));
    let row = to_f32_vec(row)?;
    with_slice_mut(t, |t| cpu::add_rows(t, &row))
}

/// Computes `t *= factor`, f32, on a GPU also bf16 or f16.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn scale_assign(t: &Tensor, factor: f32) -> Result<()> {
    on_gpu!(t, super::cuda::elementwise::scale_assign(t, factor));
    with_slice_mut(t, |t| cpu::scale(t, factor))
}

/// Moves each value of `average` by `part` of its distance to that of `now`, as `torch.lerp`. Both have the same length.
pub fn lerp(average: &mut [f32], now: &[f32], part: f32) {
    cpu::lerp(average, now, part)
}

/// Returns the sum of the squares of what is lost if the values `after` are stored as `dtype`, and the sum of the squares of
/// `after - before`. Both have the same length.
pub fn squares_of_rounding(before: &[f32], after: &[f32], dtype: Dtype) -> [f64; 2] {
    cpu::squares_of_rounding(before, after, dtype)
}

/// Computes `a + b`, both f32 (on a GPU each f32, bf16 or f16) of the same shape; the result has the type of a.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    expect_dims(b, "a tensor that is added", a.dims())?;
    on_gpu!(a, super::cuda::elementwise::add(a, b));
    let sum = floats(a, "a tensor that is added", |a| {
        floats(b, "a tensor that is added", |b| Ok(cpu::add(a, b)))
    })?;
    tensor(sum, a.shape())
}

/// Returns the sum of the squares of an f32 tensor (on a GPU also bf16 or f16; synchronizes); not finite if an element is not.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn sum_squares(t: &Tensor) -> Result<f64> {
    on_gpu!(t, super::cuda::reduce::sum_squares(t));
    with_slice(t, cpu::sum_squares)
}

/// Returns the sums of the squares of runs of 16,384 elements of an f32 tensor on the CPU, from which `sum_of_chunks`
/// makes the bits of `sum_squares`: each rank of a job has some of the runs.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn squares_of_chunks(t: &Tensor) -> Result<Vec<f32>> {
    with_slice(t, cpu::squares_of_chunks)
}

/// As `sum_squares`, from the sums of all runs in their order.
pub fn sum_of_chunks(chunks: &[f32]) -> f64 {
    cpu::sum_chunks(chunks)
}

/// True if no element is infinite or NaN.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn all_finite(t: &Tensor) -> Result<bool> {
    on_gpu!(t, super::cuda::reduce::all_finite(t));
    with_slice(t, cpu::all_finite)
}

/// Returns the elements of an f32, bf16 or f16 tensor, widened.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn to_f32_vec(t: &Tensor) -> Result<Vec<f32>> {
    on_gpu!(t, super::cuda::memory::to_f32_vec(t));
    if t.dtype() == DType::F16 {
        return with_f16(t, |v| v.iter().map(|x| x.to_f32()).collect());
    }
    values(t, "a tensor that is read", |v| Ok(cpu::to_f32_vec(v)))
}

/// Returns the elements of a u8 tensor.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn to_bytes(t: &Tensor) -> Result<Vec<u8>> {
    on_gpu!(t, super::cuda::memory::read(t, "a tensor that is read", DType::U8));
    Ok(t.flatten_all()?.to_vec1()?)
}

/// Sets an f32, bf16 or f16 tensor to `values`, rounded to nearest.
///
/// # Errors
/// Another number of values (`Shape`); a tensor of another type.
pub fn set(t: &Tensor, values: &[f32]) -> Result<()> {
    if t.elem_count() != values.len() {
        return Err(Error::shape("a tensor and its values differ in size")
            .found(values.len())
            .expected(t.elem_count()));
    }
    let narrow = |v: &f32| bf16::from_f32(*v);
    let halves = |v: &f32| f16::from_f32(*v);
    on_gpu!(t, {
        const NAME: &str = "a tensor that is set";
        match t.dtype() {
            DType::BF16 => {
                let values: Vec<bf16> = values.iter().map(narrow).collect();
                super::cuda::memory::write(t, NAME, DType::BF16, &values)
            }
            DType::F16 => {
                let values: Vec<f16> = values.iter().map(halves).collect();
                super::cuda::memory::write(t, NAME, DType::F16, &values)
            }
            _ => super::cuda::memory::write(t, NAME, DType::F32, values),
        }
    });
    match t.dtype() {
        DType::BF16 => store_bf16(t, |t| t.iter_mut().zip(values).for_each(|(t, v)| *t = narrow(v))),
        DType::F16 => store_f16(t, |t| t.iter_mut().zip(values).for_each(|(t, v)| *t = halves(v))),
        _ => with_slice_mut(t, |t| t.copy_from_slice(values)),
    }
}

/// Dropout: zeroes each element whose random number (of `rng`, by index) is below `p`, and scales the others by
/// `1 / (1 - p)`. The random numbers are the same on every device. t f32, on a GPU also bf16 or f16.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn dropout_assign(t: &Tensor, rng: Rng, p: f32) -> Result<()> {
    let keep = 1.0 / (1.0 - p);
    on_gpu!(t, super::cuda::elementwise::dropout_assign(t, rng.key(), p, keep));
    with_slice_mut(t, move |t| cpu::dropout(t, rng, p, keep))
}

/// Computes `min(1, max / (√squares + 1e-6))` (`torch.nn.utils.clip_grad_norm_`) on the device of the sum of
/// squares: `squares` f64 `[1]`, the result f32 `[1]`. On a GPU without synchronization.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn clip_coefficient(squares: &Tensor, max: f64) -> Result<Tensor> {
    expect_dims(squares, "a sum of squares", &[1])?;
    on_gpu!(squares, super::cuda::reduce::clip_coefficient(squares, max));
    let norm = squares.to_vec1::<f64>()?.iter().sum::<f64>().sqrt();
    let coefficient = (max / (norm + 1e-6)).min(1.0) as f32;
    Ok(Tensor::new(&[coefficient], squares.device())?)
}

/// Element types of tensors that support in-place updates.
pub(crate) trait WeightElement: Sized {
    fn of(storage: &mut CpuStorage) -> Option<&mut Vec<Self>>;
    fn read(storage: &CpuStorage) -> Option<&[Self]>;
}

macro_rules! stored {
    ($($type:ty, $variant:ident);+) => {
        $(impl WeightElement for $type {
            fn of(storage: &mut CpuStorage) -> Option<&mut Vec<Self>> {
                match storage {
                    CpuStorage::$variant(v) => Some(v),
                    _ => None,
                }
            }
            fn read(storage: &CpuStorage) -> Option<&[Self]> {
                match storage {
                    CpuStorage::$variant(v) => Some(v),
                    _ => None,
                }
            }
        })+
    };
}
stored!(f32, F32; bf16, BF16; f16, F16; u8, U8; i16, I16);

/// Runs `f` on the mutable elements of `t`, and returns its result.
pub(crate) fn with_mut<T: WeightElement, R>(t: &Tensor, f: impl FnOnce(&mut [T]) -> R) -> Result<R> {
    let mut result = None;
    in_place(t, |storage, range| match T::of(storage) {
        Some(v) => {
            result = Some(f(&mut v[range]));
            true
        }
        None => false,
    })?;
    result.ok_or_else(|| Error::internal("the update of a tensor has no result"))
}

/// Takes the write lock of `t`. `f` gets the storage and the range of `t` in it, and returns whether its type fits.
fn in_place<F>(t: &Tensor, f: F) -> Result<()>
where
    F: FnOnce(&mut CpuStorage, Range<usize>) -> bool,
{
    check_place(t)?;
    // candle has strides of 0 for a tensor without elements, and refuses to write to it.
    let held;
    let t = match t.elem_count() {
        0 => {
            held = Tensor::zeros(1, t.dtype(), t.device())?.narrow(0, 0, 0)?;
            &held
        }
        _ => t,
    };
    let op = InPlace {
        f: Mutex::new(Some(f)),
        fits: Mutex::new(false),
    };
    t.inplace_op1(&op)?;
    op.done(t)
}

fn check_place(t: &Tensor) -> Result<()> {
    if !t.device().is_cpu() {
        return Err(Error::shape("an in-place update needs a tensor on the CPU"));
    }
    if !t.is_contiguous() {
        return Err(Error::shape("an in-place update needs a contiguous tensor"));
    }
    Ok(())
}

/// Wraps a closure for candle's in-place operations, which pass `&self`; the closure can run only once.
struct InPlace<F> {
    f: Mutex<Option<F>>,
    fits: Mutex<bool>,
}

impl<F> InPlace<F> {
    /// Runs `call` on the closure and records whether the element type fits.
    fn run(&self, call: impl FnOnce(F) -> bool) -> candle_core::Result<()> {
        let poisoned = |_| candle_core::Error::msg("an earlier in-place operation panicked");
        let f = self.f.lock().map_err(|_| poisoned(()))?.take();
        if let Some(f) = f {
            let fits = call(f);
            *self.fits.lock().map_err(|_| poisoned(()))? = fits;
        }
        Ok(())
    }

    fn done(self, t: &Tensor) -> Result<()> {
        match self.fits.into_inner() {
            Ok(true) => Ok(()),
            _ => Err(Error::shape("an in-place update does not support this element type").found(t.dtype().as_str())),
        }
    }
}

fn range(layout: &Layout) -> candle_core::Result<Range<usize>> {
    let (start, end) = layout
        .contiguous_offsets()
        .ok_or_else(|| candle_core::Error::msg("a tensor is not contiguous"))?;
    Ok(start..end)
}

impl<F: FnOnce(&mut CpuStorage, Range<usize>) -> bool> InplaceOp1 for InPlace<F> {
    fn name(&self) -> &'static str {
        "in-place"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let range = range(layout)?;
        self.run(|f| f(storage, range))
    }
}

impl<F: FnOnce(&mut [f32], &[f32])> InplaceOp2 for InPlace<F> {
    fn name(&self) -> &'static str {
        "in-place"
    }

    fn cpu_fwd(
        &self,
        dst: &mut CpuStorage,
        dst_layout: &Layout,
        src: &CpuStorage,
        src_layout: &Layout,
    ) -> candle_core::Result<()> {
        let (to, from) = (range(dst_layout)?, range(src_layout)?);
        self.run(|f| match (dst, src) {
            (CpuStorage::F32(dst), CpuStorage::F32(src)) => {
                f(&mut dst[to], &src[from]);
                true
            }
            _ => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{assert_close, assert_same_on_any_threads, bf16_pair, flat, random};
    use candle_core::{DType, Device};

    #[test]
    fn a_mean_is_that_of_torch() {
        // torch.lerp(tensor([1., -2.]), tensor([3., 6.]), weight)
        for (part, want) in [(0.25f32, [1.5f32, 0.0]), (0.75, [2.5, 4.0]), (1.0, [3.0, 6.0])] {
            let mut average = [1.0, -2.0];
            lerp(&mut average, &[3.0, 6.0], part);
            assert_eq!(average, want);
        }
    }

    /// AdaLoRA may leave a module without ranks.
    #[test]
    fn a_tensor_without_elements_can_be_set() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let empty = Tensor::zeros((3, 0), dtype, &Device::Cpu).unwrap();
            set(&empty, &[]).unwrap();
            assert!(set(&empty, &[1.0]).is_err());
        }
    }

    #[test]
    fn what_rounding_loses_is_measured() {
        let before: Vec<f32> = flat(&random((3, 9001), 5));
        let after: Vec<f32> = before.iter().map(|x| 1.01 * x + 0.001).collect();
        let half = |x: f32| bf16::from_f32(x).to_f32();
        let short = |x: f32| f16::from_f32(x).to_f32();
        for (dtype, stored) in [
            (Dtype::F32, (|x| x) as fn(f32) -> f32),
            (Dtype::Bf16, half),
            (Dtype::F16, short),
        ] {
            let squares = |f: &dyn Fn(f32, f32) -> f32| {
                let pairs = before.iter().zip(&after);
                pairs.map(|(b, a)| f64::from(f(*b, *a)).powi(2)).sum::<f64>()
            };
            let want = [squares(&|_, a| stored(a) - a), squares(&|b, a| a - b)];
            for (got, want) in squares_of_rounding(&before, &after, dtype).into_iter().zip(want) {
                assert!((got - want).abs() <= 1e-12 * want, "{dtype:?} {got} {want}");
            }
        }
    }

    #[test]
    fn adds_and_scales() {
        let (a, b) = (random((7, 9000), 1), random((7, 9000), 2));
        let want = (&a + &b).unwrap();
        assert_close(&add(&a, &b).unwrap(), &want, 0.0);
        let acc = a.copy().unwrap();
        add_assign(&acc, &b).unwrap();
        assert_close(&acc, &want, 0.0);
        scale_assign(&acc, 0.5).unwrap();
        assert_close(&acc, &(want * 0.5).unwrap(), 0.0);
        assert!(add_assign(&acc, &acc).is_err());
        assert!(add(&a, &random((9000, 7), 1)).is_err());
        assert_close(&add(&a, &a).unwrap(), &(&a * 2.0).unwrap(), 0.0);
    }

    #[test]
    fn changes_only_the_part_that_a_view_covers() {
        let whole = random((6, 4), 1);
        let before = flat(&whole);
        let part = whole.narrow(0, 2, 3).unwrap();
        with_slice_mut(&part, |v| v.fill(7.0)).unwrap();
        let after = flat(&whole);
        assert_eq!(after[..8], before[..8]);
        assert_eq!(after[8..20], [7.0; 12]);
        assert_eq!(after[20..], before[20..]);
        assert_eq!(with_slice(&part, |v| v.to_vec()).unwrap(), [7.0; 12]);
        assert!(with_slice_mut(&whole.t().unwrap(), |_| ()).is_err());
    }

    #[test]
    fn element_types_are_checked() {
        let (narrow, wide) = bf16_pair((3, 5), 1);
        assert_eq!(to_f32_vec(&narrow).unwrap(), flat(&wide));
        assert_eq!(to_f32_vec(&wide).unwrap(), flat(&wide));
        assert!(with_slice(&narrow, |_| ()).is_err());
        assert!(with_slice_mut(&narrow, |_| ()).is_err());
        assert!(store_bf16(&wide, |_| ()).is_err());
        store_bf16(&narrow, |v| v.fill(bf16::from_f32(1.5))).unwrap();
        assert_eq!(to_f32_vec(&narrow).unwrap(), [1.5; 15]);
        assert!(to_f32_vec(&narrow.to_dtype(DType::F64).unwrap()).is_err());
    }

    #[test]
    fn sums_squares_and_finds_what_is_not_finite() {
        let t = random(100_001, 1);
        let want: f64 = flat(&t).iter().map(|x| *x as f64 * *x as f64).sum();
        assert!((sum_squares(&t).unwrap() - want).abs() < 1e-6 * want);
        assert!(all_finite(&t).unwrap());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 70_001, 100_000] {
                let mut v = flat(&t);
                v[at] = bad;
                let t = Tensor::from_vec(v, 100_001, &Device::Cpu).unwrap();
                assert!(!sum_squares(&t).unwrap().is_finite());
                assert!(!all_finite(&t).unwrap());
            }
        }
        assert_same_on_any_threads(|| {
            let sum = sum_squares(&t).unwrap();
            let halves = [(sum.to_bits() >> 32) as u32, sum.to_bits() as u32].map(f32::from_bits);
            vec![Tensor::new(&halves, &Device::Cpu).unwrap()]
        });
    }
}
