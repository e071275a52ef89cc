//! DoRA (Liu et al. 2024, arXiv 2402.09353, section 4): W' = m ⊙ V / ‖V‖ with V = W + s·B·A, norms over the rows
//! of V. As in its section 4.3 the backward pass treats the norm as a constant.
//!
//! V is never built: ‖V‖² = ‖W‖² + 2s·Σ B ⊙ (A·Wᵀ)ᵀ + s²·Σ (B·A·Aᵀ) ⊙ B, row by row, so W can have any storage type.
//!
//! Letters: N tokens, I input features, O output features, R rank.

use super::adapter::{AdapterCost, AdapterMethod, BackwardInput, BackwardOutput, DropoutKey, Param, ParamGradient};
use super::frozen::{Dx, FrozenLinear};
use super::lora::Lora;
use super::small;
use crate::base::Result;
use crate::ops::adapters::DoraNorm;
use crate::ops::{adapters, linear, update};
use candle_core::Tensor;
use std::sync::{Arc, OnceLock};

/// Rows of W that are dequantized at a time.
const ROWS: usize = 256;

/// A DoRA adapter: y = m · x·(W + s·B·A)ᵀ / ‖W + s·B·A‖, with the norm of each row.
#[derive(Debug, Clone)]
pub struct Dora {
    /// The low-rank pair.
    pub lora: Lora,
    /// m, `[O]`
    pub magnitude: Tensor,
    /// Name of the magnitude.
    pub name: Arc<str>,
    /// ‖W‖² of each row, `[O]`: computed at the first use and cached; W does not change.
    squares: OnceLock<Tensor>,
}

impl Dora {
    /// An adapter with PEFT's parameter names. `magnitude` `[O]`.
    pub fn new(module: &str, lora: Lora, magnitude: Tensor) -> Self {
        Self {
            lora,
            magnitude,
            name: format!("{module}.lora_magnitude_vector").into(),
            squares: OnceLock::new(),
        }
    }

    /// Initializes m with the norm, so that the model is unchanged.
    ///
    /// # Errors
    /// A base of another size (`Shape`); not enough memory.
    pub fn begin(&self, base: &dyn FrozenLinear) -> Result<()> {
        small::fill(&self.magnitude, &update::to_f32_vec(&self.norm(base)?)?)
    }

    fn squares(&self, base: &dyn FrozenLinear) -> Result<Tensor> {
        if let Some(found) = self.squares.get() {
            return Ok(found.clone());
        }
        let (outputs, inputs) = base.dims();
        let mut sums = Vec::with_capacity(outputs);
        for first in (0..outputs).step_by(ROWS) {
            let rows = base.rows(first, ROWS.min(outputs - first))?;
            sums.extend(
                rows.chunks_exact(inputs)
                    .map(|row| row.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>() as f32),
            );
        }
        let sums = Tensor::from_vec(sums, outputs, self.magnitude.device())?;
        Ok(self.squares.get_or_init(|| sums).clone())
    }

    /// ‖V‖ of each row, `[O]`.
    fn norm(&self, base: &dyn FrozenLinear) -> Result<Tensor> {
        let (a, b, s) = (&self.lora.a, &self.lora.b, f64::from(self.lora.scale));
        let across = small::transposed(&base.product(a)?)?; // [O, R]
        let gram = linear::forward(a, a, None)?; // [R, R]
        let own = linear::forward(b, &gram, None)?; // [O, R]
        let cross = ((across * b)?.sum(1)? * (2.0 * s))?;
        let own = ((own * b)?.sum(1)? * (s * s))?;
        Ok(((self.squares(base)? + cross)? + own)?.maximum(0f32)?.sqrt()?)
    }

    /// On a GPU: m / ‖V‖ of each row, `[O]`, from A·Wᵀ `[R, O]` f32.
    ///
    /// # Errors
    /// `across` of another shape (`Shape`); not on a GPU (`Unsupported`).
    pub fn factors(&self, base: &dyn FrozenLinear, across: &Tensor) -> Result<Tensor> {
        let Lora { a, b, scale, .. } = &self.lora;
        let norm = DoraNorm {
            across,
            own: &linear::forward(b, &linear::forward(a, a, None)?, None)?,
            b,
            squares: &self.squares(base)?,
            scale: *scale,
        };
        norm.factors(&self.magnitude)
    }

    /// On a GPU, without dropout: the gradient of m, from `dy` and the output `y` of the linear, `[N, O]` each. The
    /// direction of a row is (y - b)·‖V‖ / m.
    ///
    /// # Errors
    /// Tensors of other shapes (`Shape`); not enough memory on the device.
    pub fn magnitude_gradient(&self, dy: &Tensor, y: &Tensor, bias: Option<&Tensor>) -> Result<ParamGradient> {
        let mut sum = adapters::sum_products(dy, y)?;
        if let Some(bias) = bias {
            let share = (bias.to_dtype(sum.dtype())? * linear::grad_bias(dy)?)?;
            sum = (sum - share)?;
        }
        Ok(ParamGradient {
            param: Param {
                name: self.name.clone(),
                tensor: self.magnitude.clone(),
            },
            gradient: (sum / &self.magnitude)?,
        })
    }

    /// x·Wᵀ + s·(x·Aᵀ)·Bᵀ without dropout or bias, `[N, O]`.
    fn direction(&self, base: &dyn FrozenLinear, x: &Tensor) -> Result<Tensor> {
        let z = base.product(x)?;
        self.lora.add_to(&z, x, None)?;
        Ok(z)
    }
}

impl AdapterMethod for Dora {
    fn parts(&self) -> Vec<Param> {
        let mut parts = self.lora.parts();
        parts.push(Param {
            name: self.name.clone(),
            tensor: self.magnitude.clone(),
        });
        parts
    }

    fn forward(&self, base: &dyn FrozenLinear, x: &Tensor, dropout: Option<DropoutKey>) -> Result<Tensor> {
        let g = (&self.magnitude / self.norm(base)?)?; // [O]
        let y = base.forward(x)?;
        // y = base + (g - 1) ⊙ x̃·Wᵀ + g ⊙ s·lora(x̃); with dropout x̃ differs from x.
        let dropped = self.lora.mask.dropped(x, dropout)?;
        let plain = base.product(&dropped)?;
        let with = plain.copy()?;
        self.lora.add_to(&with, &dropped, None)?;
        let change = (adapters::scale_columns(&with, &g)? - plain)?;
        update::add_assign(&y, &change)?;
        Ok(y)
    }

    fn backward(&self, b: BackwardInput<'_>) -> Result<BackwardOutput> {
        let norm = self.norm(b.base)?;
        let g = (&self.magnitude / &norm)?;
        let scaled = adapters::scale_columns(b.dy, &g)?; // gradient with respect to the direction
        let drops = self.lora.mask.drops(b.dropout);
        let dropped = match b.x {
            Some(x) => Some(self.lora.mask.dropped(x, b.dropout)?),
            None => None,
        };
        let (dx, grads) = if drops {
            let dx = b.base.backward(b.dy, b.dx)?;
            let through = match &dx {
                Some(_) => b.base.backward(&(&scaled - b.dy)?, Dx::New)?,
                None => None,
            };
            let grads = self.lora.gradients(dropped.as_ref(), &scaled, through.as_ref(), None)?;
            if let Some(through) = &through {
                self.lora.mask.add_back(dx.as_ref(), through, b.dropout)?;
            }
            (dx, grads)
        } else {
            let dx = b.base.backward(&scaled, b.dx)?;
            let grads = if dropped.is_some() || dx.is_some() {
                self.lora.gradients(dropped.as_ref(), &scaled, dx.as_ref(), None)?
            } else {
                None
            };
            (dx, grads)
        };
        let mut out = grads.map(|g| self.lora.gradient_parts(g)).unwrap_or_default();
        if let Some(x) = &dropped {
            let sum = adapters::sum_products(b.dy, &self.direction(b.base, x)?)?;
            out.push(ParamGradient {
                param: Param {
                    name: self.name.clone(),
                    tensor: self.magnitude.clone(),
                },
                gradient: (sum / norm)?,
            });
        }
        Ok((dx, out))
    }

    fn merged(&self, w: &Tensor) -> Result<Tensor> {
        let v = self.lora.merged(w)?;
        let norm = v.sqr()?.sum(1)?.sqrt()?;
        small::scale_rows(&v, &(&self.magnitude / norm)?)
    }

    fn cost(&self) -> AdapterCost {
        let (r, i) = (self.lora.rank() as u64, self.lora.a.elem_count() as u64);
        let o = self.magnitude.elem_count() as u64;
        let inputs = i / r.max(1);
        AdapterCost {
            fixed: o,
            rank: self.lora.rank(),
            per_token: 4 * o + inputs,
            whole: 4 * o * r + ROWS as u64 * inputs,
            widens: true,
            ..AdapterCost::default()
        }
    }
}
