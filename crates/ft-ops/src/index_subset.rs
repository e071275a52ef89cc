//! Gather and scatter of a subset of a tensor, for masks inside a matrix.

use super::update::{WeightElement, with_mut};
use candle_core::{DType, Device, Storage, Tensor};
use ft_base::rng::Permutation;
use ft_base::{Error, Result};
use half::{bf16, f16};
use rayon::prelude::*;

const CHUNK: usize = 1 << 12;

/// A subset of `len` indices of a tensor of `n` elements: the positions `start, start + 1, ..` modulo n, optionally
/// mapped to indices by a permutation.
#[derive(Debug, Clone, Copy)]
pub struct IndexSubset {
    /// First position, before the permutation.
    pub start: usize,
    /// Number of indices.
    pub len: usize,
    /// Elements of the tensor.
    pub n: usize,
    /// Maps positions to indices; `None`: a position is its index.
    pub scattered: Option<Permutation>,
}

impl IndexSubset {
    /// Returns the index in the tensor of element `i` < len of the subset.
    #[inline]
    pub fn at(&self, i: usize) -> usize {
        let position = (self.start + i) % self.n;
        match &self.scattered {
            Some(permutation) => permutation.at(position as u64) as usize,
            None => position,
        }
    }
}

/// Gathers the elements of `t` (f32, bf16 or i16, contiguous) at `subset`, `[len]`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn gather(t: &Tensor, subset: &IndexSubset) -> Result<Tensor> {
    check(t, subset)?;
    check_type(t)?;
    on_gpu!(t, super::cuda::index_subset::gather(t, subset));
    match t.dtype() {
        DType::F32 => gathered::<f32>(t, subset),
        DType::BF16 => gathered::<bf16>(t, subset),
        DType::F16 => gathered::<f16>(t, subset),
        _ => gathered::<i16>(t, subset),
    }
}

/// Scatters `part` `[len]` back into `t`, of the same type.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn scatter(t: &Tensor, part: &Tensor, subset: &IndexSubset) -> Result<()> {
    check(t, subset)?;
    if part.elem_count() != subset.len || part.dtype() != t.dtype() {
        return Err(Error::shape("an index subset does not match the size of its tensor"));
    }
    check_type(t)?;
    on_gpu!(t, super::cuda::index_subset::put(part, t, subset));
    match t.dtype() {
        DType::F32 => scattered::<f32>(t, part, subset),
        DType::BF16 => scattered::<bf16>(t, part, subset),
        DType::F16 => scattered::<f16>(t, part, subset),
        _ => scattered::<i16>(t, part, subset),
    }
}

fn check_type(t: &Tensor) -> Result<()> {
    match t.dtype() {
        DType::F32 | DType::BF16 | DType::F16 | DType::I16 => Ok(()),
        other => Err(Error::unsupported("index subsets are not supported for this dtype").found(other.as_str())),
    }
}

fn check(t: &Tensor, subset: &IndexSubset) -> Result<()> {
    if t.elem_count() != subset.n || subset.len > subset.n || !t.is_contiguous() {
        return Err(Error::shape("the indices belong to a tensor of another size")
            .found(format!("{:?}", t.dims()))
            .expected(format!("{} elements", subset.n)));
    }
    Ok(())
}

fn with<T: WeightElement, R>(t: &Tensor, f: impl FnOnce(&[T]) -> R) -> Result<R> {
    let (storage, layout) = t.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(Error::unsupported("index subsets are not supported on this device"));
    };
    match (T::read(storage), layout.contiguous_offsets()) {
        (Some(all), Some((start, end))) => Ok(f(&all[start..end])),
        _ => Err(Error::shape("a tensor has the wrong type or is not contiguous")),
    }
}

fn gathered<T: WeightElement + candle_core::WithDType>(t: &Tensor, subset: &IndexSubset) -> Result<Tensor> {
    let part: Vec<T> = with(t, |all: &[T]| {
        (0..subset.len)
            .into_par_iter()
            .with_min_len(CHUNK)
            .map(|i| all[subset.at(i)])
            .collect()
    })?;
    Ok(Tensor::from_vec(part, subset.len, &Device::Cpu)?)
}

fn scattered<T: WeightElement + candle_core::WithDType>(t: &Tensor, part: &Tensor, subset: &IndexSubset) -> Result<()> {
    with(part, |part: &[T]| {
        with_mut(t, |all: &mut [T]| {
            for (i, x) in part.iter().enumerate() {
                all[subset.at(i)] = *x;
            }
        })
    })?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{flat, random};
    use ft_base::rng::{Rng, Stream};

    #[test]
    fn a_subset_is_gathered_and_scattered() {
        for (start, len) in [(0, 5), (17, 12), (20, 21), (0, 21)] {
            for scattered in [false, true] {
                let t = random((3, 7), 1);
                let permutation = Permutation::new(Rng::new(1, Stream::Mask, &[]), 21);
                let subset = IndexSubset {
                    start,
                    len,
                    n: 21,
                    scattered: scattered.then_some(permutation),
                };
                let part = gather(&t, &subset).unwrap();
                let mut want = flat(&t);
                for (i, x) in flat(&part).iter().enumerate() {
                    assert_eq!(*x, want[subset.at(i)]);
                    want[subset.at(i)] = x + 1.0;
                }
                let moved = part.affine(1.0, 1.0).unwrap();
                scatter(&t, &moved, &subset).unwrap();
                assert_eq!(flat(&t), want);
                assert!(gather(&random((4, 7), 1), &subset).is_err());
            }
        }
    }
}
