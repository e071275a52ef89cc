//! Small tensor operations that several kinds share, for any device; all results are contiguous. On a GPU activations
//! may be bf16: products with adapter parameters are computed in f32.

use crate::base::Result;
use crate::base::rng::{Rng, Stream};
use crate::ops::{linear, update};
use candle_core::{Device, Tensor};

use super::adapter::DropoutKey;

/// Scales the rows of `x` `[N, C]` by `v` (N elements).
pub(crate) fn scale_rows(x: &Tensor, v: &Tensor) -> Result<Tensor> {
    Ok(x.broadcast_mul(&v.flatten_all()?.unsqueeze(1)?)?)
}

/// `a·b` for `[M, K]` and `[K, C]`.
pub(crate) fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    linear::backward_input(a, b)
}

/// `aᵀ`, contiguous.
pub(crate) fn transposed(a: &Tensor) -> Result<Tensor> {
    Ok(a.t()?.contiguous()?)
}

/// U(-bound, bound) of these dimensions; `site` and `which` select independent random streams.
pub(crate) fn uniform(dims: (usize, usize), bound: f32, seed: u64, site: u64, which: u64) -> Result<Tensor> {
    let rng = Rng::new(seed, Stream::Init, &[u64::MAX, site, which]);
    let values: Vec<f32> = (0..(dims.0 * dims.1) as u64)
        .map(|i| (2.0 * rng.uniform(i) - 1.0) * bound)
        .collect();
    Ok(Tensor::from_vec(values, dims, &Device::Cpu)?)
}

/// Normal with standard deviation `std`; otherwise as `uniform`.
pub(crate) fn normal(dims: (usize, usize), std: f32, seed: u64, site: u64, which: u64) -> Result<Tensor> {
    let rng = Rng::new(seed, Stream::Init, &[u64::MAX, site, which]);
    let values: Vec<f32> = (0..(dims.0 * dims.1) as u64).map(|i| rng.normal(i) * std).collect();
    Ok(Tensor::from_vec(values, dims, &Device::Cpu)?)
}

/// All elements are `value`.
///
/// # Errors
/// None for these sizes.
pub fn full(dims: &[usize], value: f32) -> Result<Tensor> {
    Ok(Tensor::from_vec(
        vec![value; dims.iter().product()],
        dims,
        &Device::Cpu,
    )?)
}

/// Sets an f32 tensor to these values.
///
/// # Errors
/// Another number of values.
pub fn fill(t: &Tensor, values: &[f32]) -> Result<()> {
    Ok(t.slice_set(&Tensor::from_slice(values, t.shape(), t.device())?, 0, 0)?)
}

/// Dropout of an adapter's input: the mask depends only on the key.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DropoutMask {
    /// Dropout probability.
    pub p: f32,
    /// Index of the adapter in the model: gives each site its own masks.
    pub site: u64,
}

impl DropoutMask {
    /// True if this micro-batch has dropout.
    pub fn drops(&self, key: Option<DropoutKey>) -> bool {
        key.is_some() && self.p > 0.0
    }

    /// A copy of `x` `[N, I]` with dropout; `x` itself outside training.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn dropped(&self, x: &Tensor, key: Option<DropoutKey>) -> Result<Tensor> {
        if !self.drops(key) {
            return Ok(x.clone());
        }
        let copy = x.copy()?;
        self.assign(&copy, key)?;
        Ok(copy)
    }

    /// Zeroes dropped elements and scales the kept ones by 1 / (1 - p).
    ///
    /// # Errors
    /// A tensor of another type (`Shape`).
    pub fn assign(&self, t: &Tensor, key: Option<DropoutKey>) -> Result<()> {
        let Some(key) = key.filter(|_| self.p > 0.0) else {
            return Ok(());
        };
        let rng = Rng::new(key.seed, Stream::Dropout, &[key.step, key.micro, self.site]);
        update::dropout_assign(t, rng, self.p)
    }

    /// Adds `through` `[N, I]`, the gradient with respect to the dropped-out input, to `dx` if it is needed.
    ///
    /// # Errors
    /// Tensors of different shapes (`Shape`).
    pub fn add_back(&self, dx: Option<&Tensor>, through: &Tensor, key: Option<DropoutKey>) -> Result<()> {
        let Some(dx) = dx else { return Ok(()) };
        self.assign(through, key)?;
        update::add_assign(dx, through)
    }
}
