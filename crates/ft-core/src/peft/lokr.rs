//! LoKr (Yeh et al. 2023, LyCORIS, arXiv 2309.14859, section 3.3): W' = W + s · U ⊗ V, a Kronecker product whose
//! factors may be low-rank products. Training never builds the Kronecker product: x·(U ⊗ V)ᵀ is two thin products on a
//! reshaped x.
//!
//! Letters: N tokens, I = C·D input features, O = A·B output features, U `[A, C]`, V `[B, D]`, R rank.

use super::adapter::{
    AdapterCost, AdapterMethod, AdapterShape, BackwardInput, BackwardOutput, DropoutKey, Param, ParamGradient,
};
use super::frozen::FrozenLinear;
use super::small;
use crate::base::Result;
use crate::ops::{linear, update};
use candle_core::Tensor;

/// One factor: a full matrix, or a low-rank product.
#[derive(Debug, Clone)]
pub enum Factor {
    /// A full matrix.
    Whole(Param),
    /// A product of two thin matrices.
    Product(Param, Param),
}

impl Factor {
    /// `name` is `lokr_w1` or `lokr_w2`; `t` `[rows, columns]`.
    pub fn whole(module: &str, name: &str, t: Tensor) -> Self {
        Self::Whole(Param::new(module, name, t))
    }

    /// `name` is `lokr_w1` or `lokr_w2`; `a` `[rows, R]`, `b` `[R, columns]`.
    pub fn product(module: &str, name: &str, a: Tensor, b: Tensor) -> Self {
        Self::Product(
            Param::new(module, &format!("{name}_a"), a),
            Param::new(module, &format!("{name}_b"), b),
        )
    }

    /// Rows and columns.
    pub fn dims(&self) -> (usize, usize) {
        match self {
            Self::Whole(p) => (dim(p, 0), dim(p, 1)),
            Self::Product(a, b) => (dim(a, 0), dim(b, 1)),
        }
    }

    fn matrix(&self) -> Result<Tensor> {
        match self {
            Self::Whole(p) => Ok(p.tensor.clone()),
            Self::Product(a, b) => small::product(&a.tensor, &b.tensor),
        }
    }

    fn parts(&self) -> Vec<Param> {
        match self {
            Self::Whole(p) => vec![p.clone()],
            Self::Product(a, b) => vec![a.clone(), b.clone()],
        }
    }

    pub(super) fn parts_mut(&mut self) -> Vec<&mut Param> {
        match self {
            Self::Whole(p) => vec![p],
            Self::Product(a, b) => vec![a, b],
        }
    }

    /// Converts the gradient of the full factor to gradients of its parts.
    fn gradients(&self, d: Tensor, out: &mut Vec<ParamGradient>) -> Result<()> {
        let mut add = |part: &Param, gradient| {
            let part = part.clone();
            out.push(ParamGradient { param: part, gradient });
        };
        match self {
            Self::Whole(p) => add(p, d),
            Self::Product(a, b) => {
                add(a, linear::forward(&d, &b.tensor, None)?);
                add(b, linear::grad_weight(&a.tensor, &d, d.dtype())?);
            }
        }
        Ok(())
    }
}

fn dim(p: &Param, i: usize) -> usize {
    p.tensor.dims().get(i).copied().unwrap_or(0)
}

/// A LoKr adapter.
#[derive(Debug, Clone)]
pub struct Lokr {
    /// U
    pub first: Factor,
    /// V
    pub second: Factor,
    /// s
    pub scale: f32,
}

/// Splits `n` into two factors, the first not larger: `factor` and the quotient if it divides `n`; else as close to √n
/// as a first factor up to `factor` allows (-1: any).
pub(crate) fn split(n: usize, factor: i64) -> (usize, usize) {
    let limit = usize::try_from(factor).unwrap_or(n);
    if factor > 0 && n.is_multiple_of(limit) {
        return (limit, n / limit);
    }
    let (mut m, mut rest) = (1, n);
    while m < rest {
        let Some(next) = (m + 1..=n).find(|d| n.is_multiple_of(*d)) else {
            break;
        };
        if next + n / next > m + rest || next > limit {
            break;
        }
        (m, rest) = (next, n / next);
    }
    (m.min(rest), m.max(rest))
}

impl Lokr {
    /// As in PEFT: U zero (its first part if it is a product), V uniform; a factor is a product if that is smaller.
    /// `factor` limits the sizes of U; U is a product only if `both`.
    ///
    /// # Errors
    /// None for these sizes.
    pub fn fresh(
        module: &str,
        shape: AdapterShape,
        factor: i64,
        both: bool,
        scale: f32,
        seed: u64,
        site: u64,
    ) -> Result<Self> {
        let AdapterShape { rank: r, input, output } = shape;
        let ((a, b), (c, d)) = (split(output, factor), split(input, factor));
        let draw = |dims: (usize, usize), which| small::uniform(dims, 1.0 / (dims.1 as f32).sqrt(), seed, site, which);
        let first = if both && 2 * r < a.max(c) {
            Factor::product(module, "lokr_w1", small::full(&[a, r], 0.0)?, draw((r, c), 0)?)
        } else {
            Factor::whole(module, "lokr_w1", small::full(&[a, c], 0.0)?)
        };
        let second = if 2 * r < b.max(d) {
            Factor::product(module, "lokr_w2", draw((b, r), 1)?, draw((r, d), 2)?)
        } else {
            Factor::whole(module, "lokr_w2", draw((b, d), 1)?)
        };
        Ok(Self { first, second, scale })
    }

    /// Transposes each row of `[N, P·Q]`, read as a P×Q matrix: returns `[N·Q, P]`.
    fn turned(x: &Tensor, n: usize, p: usize, q: usize) -> Result<Tensor> {
        Ok(x.reshape((n, p, q))?
            .transpose(1, 2)?
            .contiguous()?
            .reshape((n * q, p))?)
    }

    /// x·Vᵀ for x `[N, C·D]`, transposed to `[N·B, C]`.
    fn middle(&self, x: &Tensor, v: &Tensor) -> Result<Tensor> {
        let n = x.dim(0)?;
        let ((_, c), (b, d)) = (self.first.dims(), self.second.dims());
        let t = linear::forward(&x.reshape((n * c, d))?, v, None)?; // [N·C, B]
        Self::turned(&t, n, c, b)
    }
}

impl AdapterMethod for Lokr {
    fn parts(&self) -> Vec<Param> {
        let mut all = self.first.parts();
        all.extend(self.second.parts());
        all
    }

    fn forward(&self, base: &dyn FrozenLinear, x: &Tensor, _: Option<DropoutKey>) -> Result<Tensor> {
        let (n, a, b) = (x.dim(0)?, self.first.dims().0, self.second.dims().0);
        let q = linear::forward(&self.middle(x, &self.second.matrix()?)?, &self.first.matrix()?, None)?; // [N·B, A]
        let change = Self::turned(&q, n, b, a)?.reshape((n, a * b))?;
        update::scale_assign(&change, self.scale)?;
        base.forward_plus(x, change)
    }

    fn backward(&self, back: BackwardInput<'_>) -> Result<BackwardOutput> {
        let dx = back.base.backward(back.dy, back.dx)?;
        if back.x.is_none() && dx.is_none() {
            return Ok((None, Vec::new()));
        }
        let (n, (a, c), (b, d)) = (back.dy.dim(0)?, self.first.dims(), self.second.dims());
        let (u, v) = (self.first.matrix()?, self.second.matrix()?);
        let dq = Self::turned(back.dy, n, a, b)?; // [N·B, A]
        update::scale_assign(&dq, self.scale)?;
        let dt = Self::turned(&linear::backward_input(&dq, &u)?, n, b, c)?; // [N·C, B]
        let mut gradients = Vec::new();
        if let Some(x) = back.x {
            let du = linear::grad_weight(&dq, &self.middle(x, &v)?, u.dtype())?;
            self.first.gradients(du, &mut gradients)?;
            let dv = linear::grad_weight(&dt, &x.reshape((n * c, d))?, v.dtype())?;
            self.second.gradients(dv, &mut gradients)?;
        }
        if let Some(dx) = &dx {
            let through = linear::backward_input(&dt, &v)?.reshape((n, c * d))?;
            update::add_assign(dx, &through)?;
        }
        Ok((dx, gradients))
    }

    fn merged(&self, w: &Tensor) -> Result<Tensor> {
        let ((a, c), (b, d)) = (self.first.dims(), self.second.dims());
        let u = self.first.matrix()?.reshape((a, 1, c, 1))?;
        let v = self.second.matrix()?.reshape((1, b, 1, d))?;
        let delta = u.broadcast_mul(&v)?.reshape((a * b, c * d))?.contiguous()?;
        update::scale_assign(&delta, self.scale)?;
        Ok((w + delta)?)
    }

    fn cost(&self) -> AdapterCost {
        let ((a, c), (b, d)) = (self.first.dims(), self.second.dims());
        let per_token = 2 * (a * b) + 2 * (b * c) + c * d;
        AdapterCost {
            per_token: per_token as u64,
            whole: 2 * (a * c + b * d) as u64,
            ..AdapterCost::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_split_as_in_lycoris() {
        for (n, factor, want) in [
            (256, -1, (16, 16)),
            (128, -1, (8, 16)),
            (127, -1, (1, 127)),
            (128, 4, (4, 32)),
            (360, -1, (18, 20)),
            (360, 7, (6, 60)),
        ] {
            assert_eq!(split(n, factor), want, "{n} {factor}");
        }
    }
}
