//! OFT (Qiu et al. 2023, arXiv 2306.07280, section 3): y = (x·R)·Wᵀ + b with R block-diagonal and orthogonal, from
//! skew-symmetric Q by Cayley's formula: R = (I - Q)·(I + Q)⁻¹, or by its Neumann series, which needs no inverse
//! (Qiu et al. 2025, OFTv2, arXiv 2506.19847, section 4.2): R = I + 2Q + 2Q² + ... + Qᵖ.
//!
//! Letters: N tokens, I = K·S input features in K blocks of S, O output features.

use super::adapter::{AdapterCost, AdapterMethod, BackwardInput, BackwardOutput, DropoutKey, Param, ParamGradient};
use super::frozen::{Dx, FrozenLinear};
use super::small;
use crate::base::Result;
use crate::ops::{adapters, update};
use candle_core::{DType, Tensor};

/// How R is computed from Q.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Cayley {
    /// With an inverse.
    Exact,
    /// PEFT's number of terms.
    Neumann(usize),
}

impl Cayley {
    /// The highest power of Q in the series.
    fn power(terms: usize) -> usize {
        match terms {
            0 | 1 => 0,
            2 => 1,
            _ => (terms - 1).max(3),
        }
    }
}

/// An OFT adapter.
#[derive(Debug, Clone)]
pub struct Oft {
    /// The upper triangles of Q, row by row: `[K, S·(S-1)/2]`.
    pub triangles: Param,
    /// S
    pub block: usize,
    /// How R is computed.
    pub cayley: Cayley,
}

impl Oft {
    /// An adapter with PEFT's parameter name; `triangles` `[K, S·(S-1)/2]` with S = `block`.
    pub fn new(module: &str, triangles: Tensor, block: usize, cayley: Cayley) -> Self {
        Self {
            triangles: Param::new(module, "oft_R.weight", triangles),
            block,
            cayley,
        }
    }

    /// Initializes R = I, so that the model is unchanged.
    ///
    /// # Errors
    /// None for these sizes.
    pub fn fresh(module: &str, input: usize, block: usize, cayley: Cayley) -> Result<Self> {
        let dims = [input / block.max(1), Self::elements(block)];
        Ok(Self::new(module, small::full(&dims, 0.0)?, block, cayley))
    }

    /// The size of the blocks for `input` features: `block`, or the divisor of `input` next to it (the smaller of two), as in
    /// PEFT.
    pub fn fitting(block: usize, input: usize) -> usize {
        if block >= input {
            return input;
        }
        let divides = |s: &usize| input.is_multiple_of(*s);
        let lower = (1..=block).rev().find(divides).unwrap_or(1);
        let higher = (block..=input).find(divides).unwrap_or(input);
        if block - lower <= higher - block { lower } else { higher }
    }

    /// Number of elements above the diagonal of a block.
    pub fn elements(block: usize) -> usize {
        block * block.saturating_sub(1) / 2
    }

    fn blocks(&self) -> usize {
        self.triangles.tensor.dims().first().copied().unwrap_or(0)
    }

    /// Q, `[K, S, S]`.
    fn skew(&self) -> Result<Tensor> {
        adapters::skew(&self.triangles.tensor, self.block)
    }

    /// The identity in every block.
    fn identity(&self) -> Result<Tensor> {
        let (k, s) = (self.blocks(), self.block);
        let one = Tensor::eye(s, DType::F32, self.triangles.tensor.device())?;
        Ok(one.unsqueeze(0)?.repeat((k, 1, 1))?)
    }

    /// R `[K, S, S]`, and the values that its gradient needs: the powers of Q, or (I + Q)⁻¹.
    fn rotation(&self) -> Result<(Tensor, Vec<Tensor>)> {
        let q = self.skew()?;
        match self.cayley {
            Cayley::Neumann(terms) => self.series(q, terms, self.identity()?),
            Cayley::Exact => {
                let inverse = adapters::inverse_of_sum(&q)?;
                let r = (self.identity()? - q)?.matmul(&inverse)?;
                Ok((r, vec![inverse]))
            }
        }
    }

    /// As `rotation`, with R - I in place of R, for a GPU.
    fn rotation_change(&self) -> Result<(Tensor, Vec<Tensor>)> {
        match self.cayley {
            Cayley::Neumann(terms) => {
                let q = self.skew()?;
                let zero = q.zeros_like()?;
                self.series(q, terms, zero)
            }
            Cayley::Exact => {
                let (r, intermediates) = self.rotation()?;
                Ok(((r - self.identity()?)?, intermediates))
            }
        }
    }

    /// Adds the terms of the series to `r`; also returns the powers of Q.
    fn series(&self, q: Tensor, terms: usize, mut r: Tensor) -> Result<(Tensor, Vec<Tensor>)> {
        let highest = Cayley::power(terms);
        let mut powers = Vec::new();
        for p in 1..=highest {
            let next = match powers.last() {
                None => q.clone(),
                Some(last) => q.matmul(last)?,
            };
            r = (r + (&next * factor(p, highest))?)?;
            powers.push(next);
        }
        Ok((r, powers))
    }

    /// Converts the gradient of R `[K, S, S]` to that of the triangles.
    fn gradient(&self, r: &Tensor, intermediates: &[Tensor], dr: &Tensor) -> Result<ParamGradient> {
        let dq = match self.cayley {
            Cayley::Neumann(terms) => {
                // Backward through P₁ = Q and Pₙ = Q·Pₙ₋₁, in reverse order.
                let highest = Cayley::power(terms);
                let mut dq = dr.zeros_like()?;
                let mut dp = dr.zeros_like()?;
                for p in (1..=highest).rev() {
                    dp = (dp + (dr * factor(p, highest))?)?;
                    if p == 1 {
                        dq = (dq + &dp)?;
                    } else {
                        let before = intermediates[p - 2].transpose(1, 2)?.contiguous()?;
                        dq = (dq + dp.matmul(&before)?)?;
                        dp = intermediates[0].transpose(1, 2)?.contiguous()?.matmul(&dp)?;
                    }
                }
                dq
            }
            Cayley::Exact => {
                let left = (self.identity()? + r)?.transpose(1, 2)?.contiguous()?;
                let right = intermediates[0].transpose(1, 2)?.contiguous()?;
                left.matmul(dr)?.matmul(&right)?.neg()?
            }
        };
        Ok(ParamGradient {
            param: self.triangles.clone(),
            gradient: adapters::skew_gradient(&dq)?,
        })
    }

    /// Reshapes x `[N, K·S]` into blocks, `[K, N, S]`, f32.
    fn by_block(&self, x: &Tensor) -> Result<Tensor> {
        let (n, x) = (x.dim(0)?, x.to_dtype(DType::F32)?);
        Ok(x.reshape((n, self.blocks(), self.block))?
            .transpose(0, 1)?
            .contiguous()?)
    }

    /// x·R `[N, I]` for R `[K, S, S]`, in the type of x.
    fn rotate(&self, x: &Tensor, r: &Tensor) -> Result<Tensor> {
        let rotated = self.by_block(x)?.matmul(r)?; // [K, N, S]
        let rotated = rotated.transpose(0, 1)?.contiguous()?.reshape(x.shape())?;
        Ok(rotated.to_dtype(x.dtype())?)
    }

    /// `d_rotated` is `∂y·W`, `[N, I]`. The products with R - I add to copies: a small rotation is not rounded away within R.
    fn backward_on_gpu(&self, b: BackwardInput<'_>, d_rotated: Tensor) -> Result<BackwardOutput> {
        let (d, intermediates) = self.rotation_change()?;
        let gradients = match b.x {
            Some(x) => {
                let dr = adapters::blocks_gradient(x, &d_rotated, self.block)?;
                let r = match self.cayley {
                    Cayley::Exact => (&d + self.identity()?)?,
                    Cayley::Neumann(_) => d.clone(), // not used
                };
                vec![self.gradient(&r, &intermediates, &dr)?]
            }
            None => Vec::new(),
        };
        let dx = match b.dx {
            Dx::NotNeeded => return Ok((None, gradients)),
            Dx::New => d_rotated.copy()?,
            Dx::AddTo(sum) => {
                update::add_assign(sum, &d_rotated)?;
                sum.clone()
            }
        };
        adapters::add_blocks(&dx, &d_rotated, &d, true)?;
        Ok((Some(dx), gradients))
    }
}

/// The factor of Qᵖ in the series.
fn factor(p: usize, highest: usize) -> f64 {
    if p == highest && highest > 1 { 1.0 } else { 2.0 }
}

impl AdapterMethod for Oft {
    fn parts(&self) -> Vec<Param> {
        vec![self.triangles.clone()]
    }

    fn forward(&self, base: &dyn FrozenLinear, x: &Tensor, _: Option<DropoutKey>) -> Result<Tensor> {
        if x.device().is_cuda() {
            let y = x.copy()?;
            adapters::add_blocks(&y, x, &self.rotation_change()?.0, false)?;
            return base.forward(&y);
        }
        base.forward(&self.rotate(x, &self.rotation()?.0)?)
    }

    fn backward(&self, b: BackwardInput<'_>) -> Result<BackwardOutput> {
        if b.x.is_none() && !b.dx.needed() {
            return Ok((None, Vec::new()));
        }
        let Some(d_rotated) = b.base.backward(b.dy, Dx::New)? else {
            return Ok((None, Vec::new()));
        };
        if d_rotated.device().is_cuda() {
            return self.backward_on_gpu(b, d_rotated);
        }
        let (r, intermediates) = self.rotation()?;
        let gradients = match b.x {
            Some(x) => {
                let dr = self
                    .by_block(x)?
                    .transpose(1, 2)?
                    .contiguous()?
                    .matmul(&self.by_block(&d_rotated)?)?; // [K, S, S]
                vec![self.gradient(&r, &intermediates, &dr)?]
            }
            None => Vec::new(),
        };
        let back = r.transpose(1, 2)?.contiguous()?;
        let dx = match b.dx {
            Dx::NotNeeded => None,
            Dx::New => Some(self.rotate(&d_rotated, &back)?),
            Dx::AddTo(sum) => {
                update::add_assign(sum, &self.rotate(&d_rotated, &back)?)?;
                Some(sum.clone())
            }
        };
        Ok((dx, gradients))
    }

    fn merged(&self, w: &Tensor) -> Result<Tensor> {
        // (x·R)·Wᵀ = x·(W·Rᵀ)ᵀ
        let back = self.rotation()?.0.transpose(1, 2)?.contiguous()?;
        self.rotate(w, &back)
    }

    fn cost(&self) -> AdapterCost {
        let (k, s) = (self.blocks() as u64, self.block as u64);
        AdapterCost {
            per_token: 4 * k * s,
            whole: 8 * k * s * s,
            ..AdapterCost::default()
        }
    }
}
