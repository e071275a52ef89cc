//! VeRA (Kopiczko et al. 2023, arXiv 2310.11454, section 3): y = x·Wᵀ + b ⊙ ((d ⊙ (x·Aᵀ))·Bᵀ), with one random pair
//! A, B that all linears share and that is never trained, and two learned vectors per linear.
//!
//! Letters: N tokens, I input features, O output features, R rank.

use super::adapter::{AdapterCost, AdapterMethod, BackwardInput, BackwardOutput, DropoutKey, Param, ParamGradient};
use super::frozen::FrozenLinear;
use super::small::{self, DropoutMask};
use crate::base::Result;
use crate::ops::{adapters, linear};
use candle_core::Tensor;

/// The shared random pair of a model.
#[derive(Debug, Clone)]
pub struct VeraProjections {
    /// `[R, largest I]`
    pub a: Tensor,
    /// `[largest O, R]`
    pub b: Tensor,
}

impl VeraProjections {
    /// Kaiming-uniform: U(-√(6/fan), √(6/fan)), with fan the columns.
    ///
    /// # Errors
    /// None for these sizes.
    pub fn fresh(r: usize, inputs: usize, outputs: usize, seed: u64) -> Result<Self> {
        let bound = |fan: usize| (6.0 / fan as f32).sqrt();
        Ok(Self {
            a: small::uniform((r, inputs), bound(inputs), seed, u64::MAX, 0)?,
            b: small::uniform((outputs, r), bound(r), seed, u64::MAX, 1)?,
        })
    }
}

/// A VeRA adapter.
#[derive(Debug, Clone)]
pub struct Vera {
    /// The random pair.
    pub shared: VeraProjections,
    /// `[O]`
    pub lambda_b: Param,
    /// `[R]`
    pub lambda_d: Param,
    /// I: input features of the linear.
    pub inputs: usize,
    /// Dropout on the input of A.
    pub mask: DropoutMask,
}

impl Vera {
    /// An adapter with PEFT's parameter names; `b` `[O]`, `d` `[R]`.
    pub fn new(module: &str, shared: VeraProjections, b: Tensor, d: Tensor, inputs: usize, mask: DropoutMask) -> Self {
        Self {
            shared,
            lambda_b: Param::new(module, "vera_lambda_b", b),
            lambda_d: Param::new(module, "vera_lambda_d", d),
            inputs,
            mask,
        }
    }

    /// The slices of the shared pair that this linear uses: A `[R, I]`, B `[O, R]`.
    fn pair(&self) -> Result<(Tensor, Tensor)> {
        let outputs = self.lambda_b.tensor.elem_count();
        Ok((
            self.shared.a.narrow(1, 0, self.inputs)?.contiguous()?,
            self.shared.b.narrow(0, 0, outputs)?.contiguous()?,
        ))
    }

    /// b ⊙ ((d ⊙ (x·Aᵀ))·Bᵀ), `[N, O]`.
    fn change(&self, x: &Tensor) -> Result<Tensor> {
        let (a, b) = self.pair()?;
        let h = adapters::scale_columns(&linear::forward(x, &a, None)?, &self.lambda_d.tensor)?;
        adapters::scale_columns(&linear::forward(&h, &b, None)?, &self.lambda_b.tensor)
    }
}

impl AdapterMethod for Vera {
    fn parts(&self) -> Vec<Param> {
        vec![self.lambda_b.clone(), self.lambda_d.clone()]
    }

    fn forward(&self, base: &dyn FrozenLinear, x: &Tensor, dropout: Option<DropoutKey>) -> Result<Tensor> {
        base.forward_plus(x, self.change(&self.mask.dropped(x, dropout)?)?)
    }

    fn backward(&self, back: BackwardInput<'_>) -> Result<BackwardOutput> {
        let dx = back.base.backward(back.dy, back.dx)?;
        if back.x.is_none() && dx.is_none() {
            return Ok((None, Vec::new()));
        }
        let (a, b) = self.pair()?;
        let d = &self.lambda_d.tensor;
        let dh = linear::backward_input(&adapters::scale_columns(back.dy, &self.lambda_b.tensor)?, &b)?; // [N, R]
        let mut gradients = Vec::new();
        if let Some(x) = back.x {
            let u = linear::forward(&self.mask.dropped(x, back.dropout)?, &a, None)?;
            let out = linear::forward(&adapters::scale_columns(&u, d)?, &b, None)?; // [N, O]
            for (part, gradient) in [
                (&self.lambda_b, adapters::sum_products(back.dy, &out)?),
                (&self.lambda_d, adapters::sum_products(&dh, &u)?),
            ] {
                gradients.push(ParamGradient {
                    param: part.clone(),
                    gradient,
                });
            }
        }
        if dx.is_some() {
            let through = linear::backward_input(&adapters::scale_columns(&dh, d)?, &a)?;
            self.mask.add_back(dx.as_ref(), &through, back.dropout)?;
        }
        Ok((dx, gradients))
    }

    fn merged(&self, w: &Tensor) -> Result<Tensor> {
        let (a, b) = self.pair()?;
        let b = small::scale_rows(&b, &self.lambda_b.tensor)?;
        let a = small::scale_rows(&a, &self.lambda_d.tensor)?;
        Ok((w + small::product(&b, &a)?)?)
    }

    fn cost(&self) -> AdapterCost {
        let r = self.lambda_d.tensor.elem_count() as u64;
        let (i, o) = (self.inputs as u64, self.lambda_b.tensor.elem_count() as u64);
        AdapterCost {
            per_token: 2 * o + i + 3 * r,
            whole: r * i,
            ..AdapterCost::default()
        }
    }
}
