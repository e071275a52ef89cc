//! (IA)³ (Liu et al. 2022, arXiv 2205.05638, section 3.3): one learned factor for each output feature of a
//! linear, or, for the feed-forward ones, for each input feature.
//!
//! Letters: N tokens, I input features, O output features.

use super::adapter::{AdapterCost, AdapterMethod, BackwardInput, BackwardOutput, DropoutKey, Param, ParamGradient};
use super::frozen::{Dx, FrozenLinear};
use super::small;
use crate::base::Result;
use crate::ops::{adapters, update};
use candle_core::Tensor;

/// An (IA)³ adapter: factors of the output, or of the input.
#[derive(Debug, Clone)]
pub struct Ia3 {
    /// `[O, 1]`; `[1, I]` if it scales the input.
    pub factors: Param,
    /// True if it scales the input.
    pub feedforward: bool,
}

impl Ia3 {
    /// An adapter with PEFT's parameter name; `factors` `[O, 1]`, or `[1, I]` with `feedforward`.
    pub fn new(module: &str, factors: Tensor, feedforward: bool) -> Self {
        Self {
            factors: Param::new(module, "ia3_l", factors),
            feedforward,
        }
    }

    /// Initializes all factors with 1, so that the model is unchanged.
    ///
    /// # Errors
    /// None for these sizes.
    pub fn fresh(module: &str, input: usize, output: usize, feedforward: bool) -> Result<Self> {
        let dims = if feedforward { [1, input] } else { [output, 1] };
        Ok(Self::new(module, small::full(&dims, 1.0)?, feedforward))
    }

    fn gradient(&self, sums: Tensor) -> Result<ParamGradient> {
        Ok(ParamGradient {
            param: self.factors.clone(),
            gradient: sums.reshape(self.factors.tensor.shape())?,
        })
    }
}

impl AdapterMethod for Ia3 {
    fn parts(&self) -> Vec<Param> {
        vec![self.factors.clone()]
    }

    fn forward(&self, base: &dyn FrozenLinear, x: &Tensor, _: Option<DropoutKey>) -> Result<Tensor> {
        if self.feedforward {
            base.forward(&adapters::scale_columns(x, &self.factors.tensor)?)
        } else {
            adapters::scale_columns(&base.forward(x)?, &self.factors.tensor)
        }
    }

    fn backward(&self, b: BackwardInput<'_>) -> Result<BackwardOutput> {
        let factors = &self.factors.tensor;
        if !self.feedforward {
            let dx = match b.dx {
                Dx::NotNeeded => None,
                dx => b.base.backward(&adapters::scale_columns(b.dy, factors)?, dx)?,
            };
            let gradient = match b.x {
                Some(x) => vec![self.gradient(adapters::sum_products(b.dy, &b.base.forward(x)?)?)?],
                None => Vec::new(),
            };
            return Ok((dx, gradient));
        }
        if b.x.is_none() && !b.dx.needed() {
            return Ok((None, Vec::new()));
        }
        let Some(scaled) = b.base.backward(b.dy, Dx::New)? else {
            return Ok((None, Vec::new()));
        };
        let gradient = match b.x {
            Some(x) => vec![self.gradient(adapters::sum_products(&scaled, x)?)?],
            None => Vec::new(),
        };
        let dx = match b.dx {
            Dx::NotNeeded => None,
            Dx::New => Some(adapters::scale_columns(&scaled, factors)?),
            Dx::AddTo(sum) => {
                update::add_assign(sum, &adapters::scale_columns(&scaled, factors)?)?;
                Some(sum.clone())
            }
        };
        Ok((dx, gradient))
    }

    fn merged(&self, w: &Tensor) -> Result<Tensor> {
        if self.feedforward {
            adapters::scale_columns(w, &self.factors.tensor)
        } else {
            small::scale_rows(w, &self.factors.tensor)
        }
    }

    fn merged_bias(&self, bias: &Tensor) -> Result<Tensor> {
        if self.feedforward {
            Ok(bias.clone())
        } else {
            Ok((bias * self.factors.tensor.flatten_all()?)?)
        }
    }

    fn cost(&self) -> AdapterCost {
        AdapterCost {
            per_token: 2 * self.factors.tensor.elem_count() as u64,
            ..AdapterCost::default()
        }
    }
}
