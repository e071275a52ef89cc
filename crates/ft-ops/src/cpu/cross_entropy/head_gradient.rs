//! The gradient of a head that trains.
//!
//! For each row v of the head it is `Σ (p(v) - [v is the target]) h` over the tokens. The exponentials of a pass are kept in the type of
//! the head until the sums of the softmax are known. Then each token's factor is applied to its hidden state, which is shorter. The
//! target is left out of the exponentials and added in f32.

use super::losses::GroupLosses;
use super::pass::TokenFactors;
use super::pieces;
use crate::cpu::math::{add_scaled, add_slice, write_scaled};
use crate::cpu::product::{CInit, Matrix, Operand, Rounding, product};
use crate::cpu::storage::unwritten;
use half::bf16;
use rayon::prelude::*;

/// `e^(logit - m)` times the slope of the cap, of all tokens and pieces: one piece after the other, `[tokens, ids]` each. m is the
/// largest logit up to the end of the piece.
pub(super) enum KeptExponentials {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl KeptExponentials {
    pub(super) fn new(len: usize, rounding: Rounding) -> Self {
        match rounding {
            Rounding::Exact => Self::F32(unwritten(len)),
            Rounding::Bf16 => Self::Bf16(unwritten(len)),
        }
    }

    fn part(&self, first: usize, len: usize) -> Operand<'_> {
        match self {
            Self::F32(v) => Operand::F32(&v[first..][..len]),
            Self::Bf16(v) => Operand::Bf16(&v[first..][..len]),
        }
    }
}

/// The gradient of the head, `[V, D]`.
pub(crate) struct HeadGradient<'a> {
    pub dw: &'a mut [f32],
    /// D
    pub d: usize,
    /// That of products with the head.
    pub rounding: Rounding,
    /// False: `dw` has arbitrary contents, and the next group of tokens overwrites it.
    pub initialized: bool,
}

impl HeadGradient<'_> {
    /// Adds `Σ rows(v) factor h` of a piece of the vocabulary to `dw`, or overwrites it: `rows` `[tokens, ids]`, `h` `[tokens, D]`,
    /// `factor` of each token.
    pub(super) fn add_product(
        &mut self,
        rows: Operand<'_>,
        h: &[f32],
        factor: impl Fn(usize) -> f32 + Sync,
        (first, width): (usize, usize),
        overwrite: bool,
    ) {
        let d = self.d;
        let mut scaled = unwritten(h.len());
        let of_tokens = scaled.par_chunks_mut(d.max(1)).zip(h.par_chunks(d.max(1)));
        of_tokens
            .enumerate()
            .for_each(|(token, (to, h))| write_scaled(to, factor(token), h));
        product(
            (width, d, h.len() / d.max(1)),
            &mut self.dw[first * d..][..width * d],
            if overwrite { CInit::Zero } else { CInit::C },
            Matrix::k_outer(rows, width),
            Matrix::k_outer(&scaled[..], d),
            self.rounding,
        );
    }

    /// Adds the gradient of a group of tokens, after all pieces: `h` `[tokens, D]`. `uniform`: label smoothing adds the same to every row
    /// of the head. `overwrite`: `dw` has arbitrary contents.
    pub(super) fn finish(
        &mut self,
        kept: &KeptExponentials,
        h: &[f32],
        losses: &GroupLosses,
        factors: &[TokenFactors],
        (uniform, overwrite): (bool, bool),
    ) {
        let (count, d) = (factors.len(), self.d);
        let mut uniform_row = vec![0f32; if uniform { d } else { 0 }];
        if uniform {
            for (h, factors) in h.chunks_exact(d.max(1)).zip(factors) {
                add_scaled(&mut uniform_row, -factors.uniform, h);
            }
        }
        for (first, width) in pieces(losses.vocab) {
            let factor = |token: usize| {
                let TokenFactors { max, exp, .. } = factors[token];
                exp * ((losses.largest_before(token, first + width) - max) as f64).exp() as f32
            };
            let rows = kept.part(count * first, count * width);
            self.add_product(rows, h, factor, (first, width), overwrite);
            if uniform {
                let dw = self.dw[first * d..][..width * d].par_chunks_mut(d.max(1));
                dw.for_each(|row| add_slice(row, &uniform_row));
            }
        }
        for ((target, h), factors) in losses.targets.iter().zip(h.chunks_exact(d.max(1))).zip(factors) {
            add_scaled(&mut self.dw[*target as usize * d..][..d], factors.target, h);
        }
        self.initialized = true;
    }
}
