//! The linear under an adapter, as an adapter sees it: however its weight is stored.
//!
//! Letters: N tokens, I input features, O output features.

use crate::base::Result;
use crate::ops::low_rank::LowRank;
use candle_core::Tensor;

/// What becomes of `∂x`.
#[derive(Clone, Copy)]
pub enum Dx<'a> {
    NotNeeded,
    New,
    /// Added to this, which is returned: several linears read one input.
    AddTo(&'a Tensor),
}

impl Dx<'_> {
    pub fn new(needed: bool) -> Self {
        if needed { Dx::New } else { Dx::NotNeeded }
    }

    pub fn needed(&self) -> bool {
        !matches!(self, Dx::NotNeeded)
    }
}

/// A linear whose weight is not trained.
pub trait Frozen {
    /// O and I.
    fn dims(&self) -> (usize, usize);

    /// `x` `[N, I]` to `x·Wᵀ + b` `[N, O]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;

    /// `x` `[N, I]` to `x·Wᵀ` `[N, O]`.
    fn product(&self, x: &Tensor) -> Result<Tensor>;

    /// `dy` `[N, O]` to `dy·W` `[N, I]`, where it is needed.
    fn backward(&self, dy: &Tensor, dx: Dx<'_>) -> Result<Option<Tensor>>;

    /// As `forward`, with a delta of low rank.
    fn forward_with(&self, x: &Tensor, low: LowRank<'_>) -> Result<Tensor>;

    /// ∂x with a delta of low rank, `[N, I]`, and its `∂u` `[N, R]`. `dx` is needed.
    fn backward_with(&self, dy: &Tensor, dx: Dx<'_>, low: LowRank<'_>) -> Result<(Tensor, Tensor)>;

    /// Rows `first..first + n` of W in f32, `[n, I]`.
    fn rows(&self, first: usize, n: usize) -> Result<Vec<f32>>;
}
