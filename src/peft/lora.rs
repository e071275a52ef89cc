//! LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1): y = x·Wᵀ + s · (x·Aᵀ)·Bᵀ, with s = alpha / r, or
//! alpha / √r with rsLoRA (Kalajdzievski 2023, arXiv 2312.03732).
//!
//! Letters: N tokens, I input features, O output features, R rank.

use crate::base::Result;
use crate::base::rng::{Rng, Stream};
use crate::ops::{linear, update};
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// The low-rank delta of one linear.
#[derive(Debug, Clone)]
pub struct Lora {
    /// `[R, I]`, f32
    pub a: Tensor,
    /// `[O, R]`, f32
    pub b: Tensor,
    pub a_name: Arc<str>,
    pub b_name: Arc<str>,
    pub scale: f32,
    /// Probability that an input feature is dropped before A.
    pub dropout: f32,
    /// Which adapter of the model this is: keeps the dropout masks of two sites apart.
    pub site: u64,
}

/// What the dropout masks of one micro-batch depend on.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    pub seed: u64,
    pub step: u64,
    pub micro: u64,
}

/// Gradients of A `[R, I]` and B `[O, R]`.
pub struct LoraGrads {
    pub a: Tensor,
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

/// A fresh pair: A Kaiming-uniform with a = √5, which is U(-1/√I, 1/√I), as in PEFT; or normal with
/// deviation 1/r (`gaussian`). B is zero, so the model is unchanged at the start.
pub fn fresh(r: usize, input: usize, output: usize, gaussian: bool, seed: u64, site: u64) -> Result<(Tensor, Tensor)> {
    let rng = Rng::new(seed, Stream::Init, &[u64::MAX, site]);
    let bound = 1.0 / (input as f32).sqrt();
    let a: Vec<f32> = (0..(r * input) as u64)
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

impl Lora {
    /// Adds the delta to `y` `[N, O]` in place; `x` is `[N, I]`.
    pub fn add_to(&self, y: &Tensor, x: &Tensor, dropout: Option<Dropout>) -> Result<()> {
        let x = self.dropped(x, dropout)?;
        let u = linear::forward(&x, &self.a, None)?; // [N, R]
        update::scale_assign(&u, self.scale)?;
        linear::forward_add(y, &u, &self.b)
    }

    /// Adds `∂x` of the delta to `dx` `[N, I]` in place (where given) and returns the gradients of A and B
    /// (where the input `x` is given). `dy` is `[N, O]`; u = x·Aᵀ is recomputed.
    pub fn backward(
        &self,
        x: Option<&Tensor>,
        dy: &Tensor,
        dx: Option<&Tensor>,
        dropout: Option<Dropout>,
    ) -> Result<Option<LoraGrads>> {
        let du = linear::backward_input(dy, &self.b)?; // [N, R]
        update::scale_assign(&du, self.scale)?;
        let grads = match x {
            Some(x) => {
                let x = self.dropped(x, dropout)?;
                let u = linear::forward(&x, &self.a, None)?;
                update::scale_assign(&u, self.scale)?;
                Some(LoraGrads {
                    a: linear::grad_weight(&du, &x, self.a.dtype())?,
                    b: linear::grad_weight(dy, &u, self.b.dtype())?,
                })
            }
            None => None,
        };
        if let Some(dx) = dx {
            if self.drops(dropout) {
                let through = linear::backward_input(&du, &self.a)?; // [N, I]
                self.mask_assign(&through, dropout)?;
                update::add_assign(dx, &through)?;
            } else {
                linear::backward_input_add(dx, &du, &self.a)?;
            }
        }
        Ok(grads)
    }

    /// s · B·A, `[O, I]`: what merging adds to the weight.
    pub fn delta(&self) -> Result<Tensor> {
        let a_t = self.a.t()?.contiguous()?; // [I, R]
        let delta = linear::forward(&self.b, &a_t, None)?;
        update::scale_assign(&delta, self.scale)?;
        Ok(delta)
    }

    fn dropped(&self, x: &Tensor, dropout: Option<Dropout>) -> Result<Tensor> {
        if !self.drops(dropout) {
            return Ok(x.clone());
        }
        let copy = x.copy()?;
        self.mask_assign(&copy, dropout)?;
        Ok(copy)
    }

    fn drops(&self, dropout: Option<Dropout>) -> bool {
        dropout.is_some() && self.dropout > 0.0
    }

    /// Zeroes dropped elements and scales the kept ones by 1 / (1 - p); the mask depends on the key only.
    fn mask_assign(&self, t: &Tensor, dropout: Option<Dropout>) -> Result<()> {
        let Some(key) = dropout.filter(|_| self.dropout > 0.0) else {
            return Ok(());
        };
        let rng = Rng::new(key.seed, Stream::Dropout, &[key.step, key.micro, self.site]);
        update::dropout_assign(t, rng, self.dropout)
    }
}
