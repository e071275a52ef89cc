//! The frozen linear under an adapter, with any storage type of its weight.
//!
//! Letters: N tokens, I input features, O output features, R rank.

use crate::base::Result;
use crate::ops::low_rank::LowRank;
use crate::ops::{linear, update};
use candle_core::Tensor;

/// Destination of `∂x`.
#[derive(Clone, Copy)]
pub enum Dx<'a> {
    /// It is not computed.
    NotNeeded,
    /// It is a new tensor.
    New,
    /// Added to this tensor, which is returned: for several linears with the same input.
    AddTo(&'a Tensor),
}

impl Dx<'_> {
    /// `New` or `NotNeeded`.
    pub fn new(needed: bool) -> Self {
        if needed { Dx::New } else { Dx::NotNeeded }
    }

    /// True if it is computed.
    pub fn needed(&self) -> bool {
        !matches!(self, Dx::NotNeeded)
    }
}

/// A linear whose weight is not trained.
pub trait FrozenLinear {
    /// O and I.
    fn dims(&self) -> (usize, usize);

    /// `x` `[N, I]` to `x·Wᵀ + b` `[N, O]`.
    ///
    /// # Errors
    /// `x` has another width, type or device (`Shape`); not enough memory (`OutOfMemory`).
    fn forward(&self, x: &Tensor) -> Result<Tensor>;

    /// `x` `[N, I]` to `x·Wᵀ` `[N, O]`.
    ///
    /// # Errors
    /// As `forward`.
    fn product(&self, x: &Tensor) -> Result<Tensor>;

    /// `y` `[N, O]` += `x·Wᵀ + b`.
    ///
    /// # Errors
    /// As `forward`; `y` has another shape (`Shape`).
    fn forward_add(&self, y: &Tensor, x: &Tensor) -> Result<()>;

    /// As `forward`, plus `change` `[N, O]`, the product of an adapter. On a GPU W and the bias are added to `change`: it
    /// is small, and bf16 would round most of it away beside a result.
    ///
    /// # Errors
    /// As `forward`; `change` has another shape (`Shape`).
    fn forward_plus(&self, x: &Tensor, change: Tensor) -> Result<Tensor> {
        if x.device().is_cuda() {
            self.forward_add(&change, x)?;
            return Ok(change);
        }
        let y = self.forward(x)?;
        update::add_assign(&y, &change)?;
        Ok(y)
    }

    /// As `forward_plus` with `u·Bᵀ`, for `u` `[N, R]` and `b` `[O, R]`.
    ///
    /// # Errors
    /// As `forward`; `u` or `b` has another shape (`Shape`).
    fn forward_plus_product(&self, x: &Tensor, u: &Tensor, b: &Tensor) -> Result<Tensor> {
        if x.device().is_cuda() {
            return self.forward_plus(x, linear::forward(u, b, None)?);
        }
        let y = self.forward(x)?;
        linear::forward_add(&y, u, b)?;
        Ok(y)
    }

    /// `dy` `[N, O]` to `dy·W` `[N, I]`, if it is needed.
    ///
    /// # Errors
    /// `dy` or the tensor in `dx` has another shape, type or device (`Shape`); not enough memory (`OutOfMemory`).
    fn backward(&self, dy: &Tensor, dx: Dx<'_>) -> Result<Option<Tensor>>;

    /// As `forward`, plus a LoRA update.
    ///
    /// # Errors
    /// As `forward`; the matrices of the update have another shape (`Shape`).
    fn forward_with(&self, x: &Tensor, low: LowRank<'_>) -> Result<Tensor>;

    /// `∂x` including a LoRA update, `[N, I]`, and its `∂u` `[N, R]`. `dx` must be needed.
    ///
    /// # Errors
    /// As `backward`; the matrices of the update have another shape (`Shape`).
    fn backward_with(&self, dy: &Tensor, dx: Dx<'_>, low: LowRank<'_>) -> Result<(Tensor, Tensor)>;

    /// Rows `first..first + n` of W in f32, `[n, I]`.
    ///
    /// # Errors
    /// The rows are outside of the weight (`Shape`).
    fn rows(&self, first: usize, n: usize) -> Result<Vec<f32>>;
}
