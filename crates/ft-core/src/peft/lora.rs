//! LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1): y = x·Wᵀ + s · (x·Aᵀ)·Bᵀ, with s = alpha / r, or
//! alpha / √r with rsLoRA (Kalajdzievski 2023, arXiv 2312.03732).
//!
//! Inits that move a part of W into the pair (PiSSA, OLoRA, CorDA, LoRA-GA) subtract it again with a second, fixed
//! pair: y = x·Wᵀ + s·x·(B·A - B₀·A₀)ᵀ. W stays as it is stored, so nothing is rounded, W can have any storage type,
//! and the difference is a plain LoRA of rank 2R on the original weights.
//!
//! Letters: N tokens, I input features, O output features, R rank.

use super::adapter::{AdapterCost, AdapterMethod, BackwardInput, BackwardOutput, DropoutKey, Param, ParamGradient};
use super::frozen::FrozenLinear;
use super::small::{self, DropoutMask};
use crate::base::Result;
use crate::base::rng::{Rng, Stream};
use crate::ops::lora_pairs::LoraPair;
use crate::ops::low_rank::LowRank;
use crate::ops::{linear, update};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;
use std::sync::Arc;

/// The LoRA pair of one linear.
#[derive(Debug, Clone)]
pub struct Lora {
    /// `[R, I]`, f32
    pub a: Tensor,
    /// `[O, R]`, f32
    pub b: Tensor,
    /// Name of A in a checkpoint.
    pub a_name: Arc<str>,
    /// Name of B in a checkpoint.
    pub b_name: Arc<str>,
    /// s
    pub scale: f32,
    /// Dropout on the input of A.
    pub mask: DropoutMask,
    /// A₀ and B₀, subtracted; not trained.
    pub start: Option<(Tensor, Tensor)>,
}

/// Gradients of A `[R, I]` and B `[O, R]`.
pub struct LoraGrads {
    /// `[R, I]`
    pub a: Tensor,
    /// `[O, R]`
    pub b: Tensor,
}

/// s = alpha / r, or alpha / √r.
pub fn scaling(alpha: f64, r: usize, rslora: bool) -> f32 {
    (if rslora {
        alpha / (r as f64).sqrt()
    } else {
        alpha / r as f64
    }) as f32
}

/// A new pair A `[R, I]` and B `[O, R]`, f32: A Kaiming-uniform with a = √5, which is U(-1/√I, 1/√I), as in PEFT; or
/// normal with standard deviation 1/r (`gaussian`). B is zero, so the model is unchanged at first.
///
/// # Errors
/// None for these sizes.
pub fn fresh(r: usize, input: usize, output: usize, gaussian: bool, seed: u64, site: u64) -> Result<(Tensor, Tensor)> {
    let rng = Rng::new(seed, Stream::Init, &[u64::MAX, site]);
    let bound = 1.0 / (input as f32).sqrt();
    let a: Vec<f32> = (0..(r * input) as u64)
        .into_par_iter()
        .map(|i| {
            if gaussian {
                rng.normal(i) / r as f32
            } else {
                (2.0 * rng.uniform(i) - 1.0) * bound
            }
        })
        .collect();
    let a = Tensor::from_vec(a, (r, input), &Device::Cpu)?;
    let b = Tensor::from_vec(vec![0f32; output * r], (output, r), &Device::Cpu)?;
    Ok((a, b))
}

/// A pair of the shapes of `fresh` without memory of its own: every element is the same zero. For plans.
///
/// # Errors
/// None for these sizes.
pub fn shapes(r: usize, input: usize, output: usize) -> Result<(Tensor, Tensor)> {
    let zero = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
    Ok((zero.broadcast_as((r, input))?, zero.broadcast_as((output, r))?))
}

impl Lora {
    /// A pair A `[R, I]` and B `[O, R]` with PEFT's parameter names.
    pub fn new(module: &str, (a, b): (Tensor, Tensor), scale: f32, mask: DropoutMask) -> Self {
        Self {
            a,
            b,
            a_name: format!("{module}.lora_A.weight").into(),
            b_name: format!("{module}.lora_B.weight").into(),
            scale,
            mask,
            start: None,
        }
    }

    /// R
    pub fn rank(&self) -> usize {
        self.a.dims().first().copied().unwrap_or(0)
    }

    /// The matrices, for the products of `ops::lora_pairs`.
    pub fn matrices(&self) -> LoraPair<'_> {
        LoraPair {
            matrices: (&self.a, &self.b),
            start: self.start.as_ref().map(|(a, b)| (a, b)),
            scale: self.scale,
        }
    }

    /// Adds the LoRA output to `y` `[N, O]` in place; `x` is `[N, I]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn add_to(&self, y: &Tensor, x: &Tensor, dropout: Option<DropoutKey>) -> Result<()> {
        let low = self.low();
        let u = low.down(&self.mask.dropped(x, dropout)?)?;
        low.up_add(y, &u)?;
        if let Some(start) = self.start_low() {
            start.up_add(y, &start.down(x)?)?;
        }
        Ok(())
    }

    fn low(&self) -> LowRank<'_> {
        LowRank {
            a: &self.a,
            b: &self.b,
            scale: self.scale,
        }
    }

    /// The first pair (A₀, B₀), whose product is subtracted.
    fn start_low(&self) -> Option<LowRank<'_>> {
        let (a, b) = self.start.as_ref()?;
        let scale = -self.scale;
        Some(LowRank { a, b, scale })
    }

    /// True if the LoRA product can be fused with the base product: no dropout, and no first product to subtract.
    fn fuses(&self, dropout: Option<DropoutKey>) -> bool {
        self.start.is_none() && !self.mask.drops(dropout)
    }

    /// Adds `∂x` of the LoRA pair to `dx` `[N, I]` in place (if given) and returns the gradients of A and B (if the
    /// input `x` is given). `dy` is `[N, O]`; u = x·Aᵀ is recomputed.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn gradients(
        &self,
        x: Option<&Tensor>,
        dy: &Tensor,
        dx: Option<&Tensor>,
        dropout: Option<DropoutKey>,
    ) -> Result<Option<LoraGrads>> {
        let low = self.low();
        let du = low.up_backward(dy)?;
        let grads = x.map(|x| self.of_pair(x, dy, &du, dropout)).transpose()?;
        let Some(dx) = dx else { return Ok(grads) };
        if self.mask.drops(dropout) {
            let through = linear::backward_input(&du, &self.a)?; // [N, I]
            self.mask.assign(&through, dropout)?;
            update::add_assign(dx, &through)?;
        } else {
            low.down_backward_add(dx, &du)?;
        }
        if let Some(start) = self.start_low() {
            start.down_backward_add(dx, &start.up_backward(dy)?)?;
        }
        Ok(grads)
    }

    /// Gradients of A and B: from `x` `[N, I]`, `dy` `[N, O]` and `du` = s · dy·B `[N, R]`.
    fn of_pair(&self, x: &Tensor, dy: &Tensor, du: &Tensor, dropout: Option<DropoutKey>) -> Result<LoraGrads> {
        let x = self.mask.dropped(x, dropout)?;
        let u = self.low().down(&x)?;
        Ok(LoraGrads {
            a: linear::grad_weight(du, &x, self.a.dtype())?,
            b: linear::grad_weight(dy, &u, self.b.dtype())?,
        })
    }

    /// s · (B·A - B₀·A₀), `[O, I]`: the change of the weight by merging.
    ///
    /// # Errors
    /// A and B that do not fit (`Shape`); not enough memory on the device.
    pub fn delta(&self) -> Result<Tensor> {
        let (a, b) = self.plain()?;
        let delta = linear::forward(&b, &small::transposed(&a)?, None)?;
        update::scale_assign(&delta, self.scale)?;
        Ok(delta)
    }

    /// The equivalent pair that subtracts nothing: A `[R, I]` and B `[O, R]`, or [A; A₀] and [B, -B₀] of twice the
    /// rank. The scale is unchanged.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn plain(&self) -> Result<(Tensor, Tensor)> {
        match &self.start {
            None => Ok((self.a.clone(), self.b.clone())),
            Some((a, b)) => Ok((
                Tensor::cat(&[&self.a, a], 0)?.contiguous()?,
                Tensor::cat(&[&self.b, &b.neg()?], 1)?.contiguous()?,
            )),
        }
    }

    /// A₀ and B₀ with their parameter names.
    pub fn start_parts(&self) -> Vec<Param> {
        let Some((a, b)) = &self.start else { return Vec::new() };
        let name = |of: &Arc<str>| format!("{}.start", of.trim_end_matches(".weight")).into();
        vec![
            Param {
                name: name(&self.a_name),
                tensor: a.clone(),
            },
            Param {
                name: name(&self.b_name),
                tensor: b.clone(),
            },
        ]
    }

    pub(super) fn gradient_parts(&self, grads: LoraGrads) -> Vec<ParamGradient> {
        let [a, b] = self.pair();
        vec![
            ParamGradient {
                param: a,
                gradient: grads.a,
            },
            ParamGradient {
                param: b,
                gradient: grads.b,
            },
        ]
    }

    /// A and B with their parameter names.
    pub fn pair(&self) -> [Param; 2] {
        [
            Param {
                name: self.a_name.clone(),
                tensor: self.a.clone(),
            },
            Param {
                name: self.b_name.clone(),
                tensor: self.b.clone(),
            },
        ]
    }
}

impl AdapterMethod for Lora {
    fn parts(&self) -> Vec<Param> {
        self.pair().to_vec()
    }

    fn forward(&self, base: &dyn FrozenLinear, x: &Tensor, dropout: Option<DropoutKey>) -> Result<Tensor> {
        if self.fuses(dropout) {
            return base.forward_with(x, self.low());
        }
        let y = base.forward(x)?;
        self.add_to(&y, x, dropout)?;
        Ok(y)
    }

    fn backward(&self, b: BackwardInput<'_>) -> Result<BackwardOutput> {
        let (dx, grads) = if b.dx.needed() && self.fuses(b.dropout) {
            let (dx, du) = b.base.backward_with(b.dy, b.dx, self.low())?;
            let of_pair = |x| self.of_pair(x, b.dy, &du, b.dropout);
            (Some(dx), b.x.map(of_pair).transpose()?)
        } else {
            let dx = b.base.backward(b.dy, b.dx)?;
            if b.x.is_none() && dx.is_none() {
                return Ok((None, Vec::new()));
            }
            let grads = self.gradients(b.x, b.dy, dx.as_ref(), b.dropout)?;
            (dx, grads)
        };
        Ok((dx, grads.map(|g| self.gradient_parts(g)).unwrap_or_default()))
    }

    fn merged(&self, w: &Tensor) -> Result<Tensor> {
        let sum = w.copy()?;
        update::add_assign(&sum, &self.delta()?)?;
        Ok(sum)
    }

    fn cost(&self) -> AdapterCost {
        let start = self.start_parts();
        let fixed = start.iter().map(|p| p.tensor.elem_count() as u64).sum();
        AdapterCost {
            fixed,
            rank: self.rank(),
            ..AdapterCost::default()
        }
    }
}
