//! LoHa (Hyeon-Woo et al. 2021, FedPara, arXiv 2108.06098, section 2.2): W' = W + s · (P₁·Q₁) ⊙ (P₂·Q₂): the
//! elementwise product of two low-rank matrices can have rank R².
//!
//! Letters: N tokens, I input features, O output features, R rank; s is `scale`.

use super::adapter::{
    AdapterCost, AdapterMethod, AdapterShape, BackwardInput, BackwardOutput, DropoutKey, Param, ParamGradient,
};
use super::frozen::FrozenLinear;
use super::small;
use crate::base::Result;
use crate::ops::{linear, update};
use candle_core::Tensor;

/// A LoHa adapter: W' = W + s · (P₁·Q₁) ⊙ (P₂·Q₂).
#[derive(Debug, Clone)]
pub struct Loha {
    /// P₁ `[O, R]`, Q₁ `[R, I]`, P₂ `[O, R]`, Q₂ `[R, I]`
    pub factors: [Param; 4],
    /// s
    pub scale: f32,
}

/// PEFT's names of the four factors.
pub const NAMES: [&str; 4] = ["hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"];

impl Loha {
    /// An adapter with PEFT's parameter names; the factors P₁ `[O, R]`, Q₁ `[R, I]`, P₂ `[O, R]`, Q₂ `[R, I]`.
    pub fn new(module: &str, [a, b, c, d]: [Tensor; 4], scale: f32) -> Self {
        let part = |i: usize, t| Param::new(module, NAMES[i], t);
        Self {
            factors: [part(0, a), part(1, b), part(2, c), part(3, d)],
            scale,
        }
    }

    /// As in PEFT: three factors U(-1/√columns, 1/√columns), the last zero.
    ///
    /// # Errors
    /// None for these sizes.
    pub fn fresh(module: &str, shape: AdapterShape, scale: f32, seed: u64, site: u64) -> Result<Self> {
        let AdapterShape { rank: r, input, output } = shape;
        let draw = |dims: (usize, usize), which| small::uniform(dims, 1.0 / (dims.1 as f32).sqrt(), seed, site, which);
        let factors = [
            draw((output, r), 0)?,
            draw((r, input), 1)?,
            draw((output, r), 2)?,
            small::full(&[r, input], 0.0)?,
        ];
        Ok(Self::new(module, factors, scale))
    }

    /// P₁·Q₁ and P₂·Q₂, `[O, I]` each.
    fn halves(&self) -> Result<(Tensor, Tensor)> {
        let [p1, q1, p2, q2] = &self.factors;
        Ok((
            small::product(&p1.tensor, &q1.tensor)?,
            small::product(&p2.tensor, &q2.tensor)?,
        ))
    }

    fn delta(&self) -> Result<Tensor> {
        let (one, two) = self.halves()?;
        let delta = (one * two)?;
        update::scale_assign(&delta, self.scale)?;
        Ok(delta)
    }
}

impl AdapterMethod for Loha {
    fn parts(&self) -> Vec<Param> {
        self.factors.to_vec()
    }

    fn forward(&self, base: &dyn FrozenLinear, x: &Tensor, _: Option<DropoutKey>) -> Result<Tensor> {
        base.forward_plus_product(x, x, &self.delta()?)
    }

    fn backward(&self, b: BackwardInput<'_>) -> Result<BackwardOutput> {
        let dx = b.base.backward(b.dy, b.dx)?;
        if let Some(dx) = &dx {
            linear::backward_input_add(dx, b.dy, &self.delta()?)?;
        }
        let Some(x) = b.x else { return Ok((dx, Vec::new())) };
        let (one, two) = self.halves()?;
        let whole = linear::grad_weight(b.dy, x, one.dtype())?; // [O, I]
        update::scale_assign(&whole, self.scale)?;
        let d_one = (&whole * two)?;
        let d_two = (&whole * one)?;
        drop(whole);
        let mut gradients = Vec::new();
        for (first, d) in [(0, d_one), (2, d_two)] {
            let (p, q) = (&self.factors[first], &self.factors[first + 1]);
            gradients.push(ParamGradient {
                param: p.clone(),
                gradient: linear::forward(&d, &q.tensor, None)?, // d·Qᵀ
            });
            gradients.push(ParamGradient {
                param: q.clone(),
                gradient: linear::grad_weight(&p.tensor, &d, d.dtype())?, // Pᵀ·d
            });
        }
        Ok((dx, gradients))
    }

    fn merged(&self, w: &Tensor) -> Result<Tensor> {
        Ok((w + self.delta()?)?)
    }

    fn cost(&self) -> AdapterCost {
        let dims = |i: usize| self.factors[i].tensor.dims();
        let whole = match (dims(0), dims(1)) {
            ([o, _], [_, i]) => (o * i) as u64,
            _ => 0,
        };
        AdapterCost {
            whole: 5 * whole,
            ..AdapterCost::default()
        }
    }
}
