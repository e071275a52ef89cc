//! AdaLoRA (Zhang et al. 2023, arXiv 2303.10512, section 3.1): y = x·Wᵀ + c · ((e ⊙ (x·Aᵀ))·Bᵀ): a LoRA pair with
//! learned singular values; the least important ones are set to zero during training.
//!
//! Letters: N tokens, I input features, O output features, R rank; c is `scale`.

use super::adapter::{
    AdapterCost, AdapterMethod, AdapterShape, BackwardInput, BackwardOutput, DropoutKey, Param, ParamGradient,
};
use super::frozen::FrozenLinear;
use super::small::{self, DropoutMask};
use crate::base::{Error, Result};
use crate::ops::{adapters, linear, update};
use candle_core::{Device, Tensor};

/// An AdaLoRA adapter: A, B and a vector of singular values.
#[derive(Debug, Clone)]
pub struct Adalora {
    /// `[R, I]`
    pub a: Param,
    /// `[O, R]`
    pub b: Param,
    /// Singular values, `[R, 1]`.
    pub e: Param,
    /// alpha / (rank + 1e-5), as in PEFT: with the initial rank of the adapter.
    pub scale: f32,
    /// Dropout on the input of A.
    pub mask: DropoutMask,
}

impl Adalora {
    /// An adapter with PEFT's parameter names. `a` `[R, I]`, `b` `[O, R]`, `e` `[R, 1]`.
    pub fn new(module: &str, a: Tensor, b: Tensor, e: Tensor, scale: f32, mask: DropoutMask) -> Self {
        Self {
            a: Param::new(module, "lora_A", a),
            b: Param::new(module, "lora_B", b),
            e: Param::new(module, "lora_E", e),
            scale,
            mask,
        }
    }

    /// Initializes A and B normal with standard deviation 0.02, singular values zero.
    ///
    /// # Errors
    /// None for these sizes.
    pub fn fresh(module: &str, shape: AdapterShape, scale: f32, seed: u64, mask: DropoutMask) -> Result<Self> {
        let AdapterShape { rank: r, input, output } = shape;
        let a = small::normal((r, input), 0.02, seed, mask.site, 0)?;
        let b = small::normal((output, r), 0.02, seed, mask.site, 1)?;
        Ok(Self::new(module, a, b, small::full(&[r, 1], 0.0)?, scale, mask))
    }
}

impl Adalora {
    /// R; 0 if all singular values were removed.
    pub fn rank(&self) -> usize {
        self.e.tensor.elem_count()
    }

    /// A copy without the singular values that are false in `kept`.
    ///
    /// # Errors
    /// `kept` does not have R flags.
    pub fn without(&self, module: &str, kept: &[bool]) -> Result<Self> {
        let (r, inputs) = self.a.tensor.dims2()?;
        let outputs = self.b.tensor.dim(0)?;
        if kept.len() != r {
            return Err(Error::shape("the number of flags differs from the number of singular values").at(module));
        }
        let left: Vec<usize> = (0..r).filter(|&k| kept[k]).collect();
        let (a, b) = (update::to_f32_vec(&self.a.tensor)?, update::to_f32_vec(&self.b.tensor)?);
        let e = update::to_f32_vec(&self.e.tensor)?;
        let rows: Vec<f32> = left
            .iter()
            .flat_map(|&k| a[k * inputs..(k + 1) * inputs].to_vec())
            .collect();
        let columns: Vec<f32> = (0..outputs)
            .flat_map(|o| left.iter().map(|&k| b[o * r + k]).collect::<Vec<_>>())
            .collect();
        let n = left.len();
        let on = |values: Vec<f32>, dims: (usize, usize)| Tensor::from_vec(values, dims, &Device::Cpu);
        Ok(Self::new(
            module,
            on(rows, (n, inputs))?,
            on(columns, (outputs, n))?,
            on(left.iter().map(|&k| e[k]).collect(), (n, 1))?,
            self.scale,
            self.mask,
        ))
    }
}

/// alpha / (r + 1e-5).
pub fn scaling(alpha: f64, r: usize) -> f32 {
    (alpha / (r as f64 + 1e-5)) as f32
}

impl AdapterMethod for Adalora {
    fn parts(&self) -> Vec<Param> {
        vec![self.a.clone(), self.b.clone(), self.e.clone()]
    }

    fn forward(&self, base: &dyn FrozenLinear, x: &Tensor, dropout: Option<DropoutKey>) -> Result<Tensor> {
        if self.rank() == 0 {
            return base.forward(x);
        }
        let u = linear::forward(&self.mask.dropped(x, dropout)?, &self.a.tensor, None)?;
        let h = adapters::scale_columns(&u, &self.e.tensor)?;
        update::scale_assign(&h, self.scale)?;
        base.forward_plus_product(x, &h, &self.b.tensor)
    }

    fn backward(&self, back: BackwardInput<'_>) -> Result<BackwardOutput> {
        let dx = back.base.backward(back.dy, back.dx)?;
        if (back.x.is_none() && dx.is_none()) || self.rank() == 0 {
            return Ok((dx, Vec::new()));
        }
        let dh = linear::backward_input(back.dy, &self.b.tensor)?; // [N, R]
        update::scale_assign(&dh, self.scale)?;
        let du = adapters::scale_columns(&dh, &self.e.tensor)?;
        let mut gradients = Vec::new();
        if let Some(x) = back.x {
            let x = self.mask.dropped(x, back.dropout)?;
            let u = linear::forward(&x, &self.a.tensor, None)?;
            let h = adapters::scale_columns(&u, &self.e.tensor)?;
            update::scale_assign(&h, self.scale)?;
            let dtype = self.a.tensor.dtype();
            let e = adapters::sum_products(&dh, &u)?.reshape(self.e.tensor.shape())?;
            for (part, gradient) in [
                (&self.a, linear::grad_weight(&du, &x, dtype)?),
                (&self.b, linear::grad_weight(back.dy, &h, dtype)?),
                (&self.e, e),
            ] {
                gradients.push(ParamGradient {
                    param: part.clone(),
                    gradient,
                });
            }
        }
        if dx.is_some() {
            let through = linear::backward_input(&du, &self.a.tensor)?;
            self.mask.add_back(dx.as_ref(), &through, back.dropout)?;
        }
        Ok((dx, gradients))
    }

    fn merged(&self, w: &Tensor) -> Result<Tensor> {
        if self.rank() == 0 {
            return Ok(w.clone());
        }
        let a = small::scale_rows(&self.a.tensor, &self.e.tensor)?;
        let delta = small::product(&self.b.tensor, &a)?;
        update::scale_assign(&delta, self.scale)?;
        Ok((w + delta)?)
    }

    fn cost(&self) -> AdapterCost {
        let r = self.rank() as u64;
        let i = self.a.tensor.elem_count() as u64 / r.max(1);
        // Importance and uncertainty of every element (`rank_allocation`).
        let parts = [&self.a, &self.b, &self.e];
        let scored: usize = parts.iter().map(|p| 2 * p.tensor.elem_count()).sum();
        AdapterCost {
            fixed: scored as u64,
            per_token: i + 4 * r,
            ..AdapterCost::default()
        }
    }
}
