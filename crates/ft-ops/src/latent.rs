//! The heads of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): a part of each query and key is rotated, all
//! heads share the rotated part of the key, and heads of v may have another size than those of q and k.
//!
//! Softmax attention needs one size for all heads: the heads of q, k and v are filled with zeros up to E, the larger of both
//! sizes. Zeros add nothing to a score, and their columns of the output are 0, so the result is the same. The rotated
//! elements of a head come first here, which no score depends on either.
//!
//! Letters: N tokens, H heads, A elements of a query or key that are not rotated, R rotated ones, V elements of a value, E
//! elements of a filled head, L rank of the latent rows. f32, on a GPU also bf16.

mod absorbed;

use super::cpu::storage::{dims2, expect_dims, floats, tensor, unwritten};
use super::rope::{RopeDirection, RopePairing};
use candle_core::Tensor;
use ft_base::{Error, Result};
use rayon::prelude::*;

/// Tokens per task.
const TOKENS: usize = 16;

/// The sizes of the heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentHeads {
    /// H: heads of q, k and v.
    pub heads: usize,
    /// A: elements of a query or key that are not rotated. They come first in the projections.
    pub plain: usize,
    /// R: rotated elements.
    pub rotary: usize,
    /// V: elements of a value.
    pub value: usize,
    /// Which elements are rotated together.
    pub pairing: RopePairing,
}

/// cos and sin of each token, `[N, R/2]`.
pub(super) type Angles<'a> = (&'a Tensor, &'a Tensor);

impl LatentHeads {
    /// E: elements of a filled head.
    pub fn width(&self) -> usize {
        (self.plain + self.rotary).max(self.value)
    }

    /// A + R
    fn query(&self) -> usize {
        self.plain + self.rotary
    }

    /// A + V: elements of a head in the projection of the latent rows, first of its key, then of its value.
    fn key_value(&self) -> usize {
        self.plain + self.value
    }

    fn check(&self, (cos, sin): Angles, tokens: usize) -> Result<()> {
        if self.heads == 0 || self.rotary == 0 || !self.rotary.is_multiple_of(2) || self.value == 0 {
            return Err(Error::shape("the heads of latent attention have impossible sizes")
                .found(format!("{self:?}"))
                .expected("an even number of rotated elements, and no size of 0"));
        }
        for (t, name) in [(cos, "the cosines of a rotation"), (sin, "the sines of a rotation")] {
            expect_dims(t, name, &[tokens, self.rotary / 2])?;
        }
        Ok(())
    }

    /// Rotates the R elements of `x` to `y`.
    fn rotate(&self, x: &[f32], (cos, sin): (&[f32], &[f32]), direction: RopeDirection, y: &mut [f32]) {
        let sign = match direction {
            RopeDirection::Forward => 1.0,
            RopeDirection::Backward => -1.0,
        };
        let half = self.rotary / 2;
        for i in 0..half {
            let (first, second) = match self.pairing {
                RopePairing::Halves => (i, i + half),
                RopePairing::Neighbors => (2 * i, 2 * i + 1),
            };
            let (a, b, s) = (x[first], x[second], sin[i] * sign);
            y[first] = a * cos[i] - b * s;
            y[second] = b * cos[i] + a * s;
        }
    }

    /// The queries of the projection `x [N, H·(A+R)]`: rotated and filled, `[N, H·E]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn queries(&self, x: &Tensor, angles: Angles) -> Result<Tensor> {
        let (n, from, to) = (dims2(x, "the queries")?.0, self.query(), self.width());
        expect_dims(x, "the queries", &[n, self.heads * from])?;
        self.check(angles, n)?;
        on_gpu!(x, super::cuda::latent::queries(self, x, angles, false));
        let mut y = unwritten(n * self.heads * to);
        floats(x, "the queries", |x| {
            with_table(angles, self.rotary / 2, |table| {
                each_token(&mut y, self.heads * to, |t, y| {
                    let x = row(x, t, self.heads * from);
                    for (x, y) in x.chunks_exact(from).zip(y.chunks_exact_mut(to)) {
                        let (plain, rotary) = x.split_at(self.plain);
                        let (turned, rest) = y.split_at_mut(self.rotary);
                        self.rotate(rotary, table.of(t), RopeDirection::Forward, turned);
                        rest[..self.plain].copy_from_slice(plain);
                        rest[self.plain..].fill(0.0);
                    }
                });
            })
        })?;
        tensor(y, (n, self.heads * to))
    }

    /// The gradient of the projection `[N, H·(A+R)]` from that of `queries`, `dq [N, H·E]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn queries_backward(&self, dq: &Tensor, angles: Angles) -> Result<Tensor> {
        let (n, from, to) = (dims2(dq, "the gradient of the queries")?.0, self.width(), self.query());
        expect_dims(dq, "the gradient of the queries", &[n, self.heads * from])?;
        self.check(angles, n)?;
        on_gpu!(dq, super::cuda::latent::queries(self, dq, angles, true));
        let mut dx = unwritten(n * self.heads * to);
        floats(dq, "the gradient of the queries", |dq| {
            with_table(angles, self.rotary / 2, |table| {
                each_token(&mut dx, self.heads * to, |t, dx| {
                    let dq = row(dq, t, self.heads * from);
                    for (dq, dx) in dq.chunks_exact(from).zip(dx.chunks_exact_mut(to)) {
                        let (plain, rotary) = dx.split_at_mut(self.plain);
                        self.rotate(&dq[..self.rotary], table.of(t), RopeDirection::Backward, rotary);
                        plain.copy_from_slice(&dq[self.rotary..][..self.plain]);
                    }
                });
            })
        })?;
        tensor(dx, (n, self.heads * to))
    }

    /// Filled keys and values, `[N, H·E]` each. `kv [N, H·(A+V)]`: of each head the part of its key that is not rotated, then
    /// its value; `low [N, L+R]`: the latent rows, and beside them the part of the keys that is rotated here.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn keys_values(&self, kv: &Tensor, low: &Tensor, angles: Angles) -> Result<(Tensor, Tensor)> {
        let ((n, wide), from, to) = (dims2(low, "the latent rows")?, self.key_value(), self.width());
        expect_dims(kv, "the keys and values", &[n, self.heads * from])?;
        self.check(angles, n)?;
        if wide < self.rotary {
            return Err(Error::shape("latent rows have no rotated part")
                .found(wide)
                .expected(format!("at least {}", self.rotary)));
        }
        on_gpu!(kv, super::cuda::latent::keys_values(self, kv, low, angles));
        let (mut k, mut v) = (unwritten(n * self.heads * to), unwritten(n * self.heads * to));
        floats(kv, "the keys and values", |kv| {
            floats(low, "the latent rows", |low| {
                with_table(angles, self.rotary / 2, |table| {
                    let of = |t: usize| row(kv, t, self.heads * from).chunks_exact(from);
                    each_token(&mut k, self.heads * to, |t, k| {
                        let rotary = &low[(t + 1) * wide - self.rotary..][..self.rotary];
                        let (first, others) = k.split_at_mut(to);
                        self.rotate(rotary, table.of(t), RopeDirection::Forward, &mut first[..self.rotary]);
                        for k in others.chunks_exact_mut(to) {
                            k[..self.rotary].copy_from_slice(&first[..self.rotary]);
                        }
                        for (k, kv) in k.chunks_exact_mut(to).zip(of(t)) {
                            let rest = &mut k[self.rotary..];
                            rest[..self.plain].copy_from_slice(&kv[..self.plain]);
                            rest[self.plain..].fill(0.0);
                        }
                    });
                    each_token(&mut v, self.heads * to, |t, v| {
                        for (v, kv) in v.chunks_exact_mut(to).zip(of(t)) {
                            v[..self.value].copy_from_slice(&kv[self.plain..]);
                            v[self.value..].fill(0.0);
                        }
                    });
                })
            })
        })?;
        let shape = (n, self.heads * to);
        Ok((tensor(k, shape)?, tensor(v, shape)?))
    }

    /// The gradients of `kv` `[N, H·(A+V)]` and of the rotated part of `low` `[N, R]`, from those of the keys and values,
    /// `[N, H·E]` each.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn keys_values_backward(&self, dk: &Tensor, dv: &Tensor, angles: Angles) -> Result<(Tensor, Tensor)> {
        let (n, from, to) = (dims2(dk, "the gradient of the keys")?.0, self.width(), self.key_value());
        for (t, name) in [(dk, "the gradient of the keys"), (dv, "the gradient of the values")] {
            expect_dims(t, name, &[n, self.heads * from])?;
        }
        self.check(angles, n)?;
        on_gpu!(dk, super::cuda::latent::keys_values_backward(self, dk, dv, angles));
        let (mut d_kv, mut d_rotary) = (unwritten(n * self.heads * to), unwritten(n * self.rotary));
        floats(dk, "the gradient of the keys", |dk| {
            floats(dv, "the gradient of the values", |dv| {
                with_table(angles, self.rotary / 2, |table| {
                    let wide = self.heads * from;
                    each_token(&mut d_kv, self.heads * to, |t, d_kv| {
                        let keys = row(dk, t, wide).chunks_exact(from);
                        let both = keys.zip(row(dv, t, wide).chunks_exact(from));
                        for (d_kv, (dk, dv)) in d_kv.chunks_exact_mut(to).zip(both) {
                            let (plain, value) = d_kv.split_at_mut(self.plain);
                            plain.copy_from_slice(&dk[self.rotary..][..self.plain]);
                            value.copy_from_slice(&dv[..self.value]);
                        }
                    });
                    each_token(&mut d_rotary, self.rotary, |t, d_rotary| {
                        let mut sum = vec![0f32; self.rotary];
                        for dk in row(dk, t, wide).chunks_exact(from) {
                            sum.iter_mut().zip(dk).for_each(|(sum, d)| *sum += d);
                        }
                        self.rotate(&sum, table.of(t), RopeDirection::Backward, d_rotary);
                    });
                })
            })
        })?;
        Ok((tensor(d_kv, (n, self.heads * to))?, tensor(d_rotary, (n, self.rotary))?))
    }

    /// The output of attention without the filling: `o [N, H·E]` to `[N, H·V]`. The same tensor if the sizes are equal.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn cut(&self, o: &Tensor) -> Result<Tensor> {
        self.resize(o, self.width(), self.value)
    }

    /// The inverse of `cut`, for gradients: `[N, H·V]` to `[N, H·E]`, filled with zeros.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn fill(&self, d: &Tensor) -> Result<Tensor> {
        self.resize(d, self.value, self.width())
    }

    fn resize(&self, x: &Tensor, from: usize, to: usize) -> Result<Tensor> {
        let (n, _) = dims2(x, "the output of attention")?;
        expect_dims(x, "the output of attention", &[n, self.heads * from])?;
        if from == to {
            return Ok(x.clone());
        }
        on_gpu!(x, super::cuda::latent::resize(x, self.heads, from, to));
        let mut y = unwritten(n * self.heads * to);
        let common = from.min(to);
        floats(x, "the output of attention", |x| {
            each_token(&mut y, self.heads * to, |t, y| {
                let x = row(x, t, self.heads * from);
                for (x, y) in x.chunks_exact(from).zip(y.chunks_exact_mut(to)) {
                    y[..common].copy_from_slice(&x[..common]);
                    y[common..].fill(0.0);
                }
            });
            Ok(())
        })?;
        tensor(y, (n, self.heads * to))
    }
}

/// cos and sin of all tokens as slices.
struct AngleSlices<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    half: usize,
}

impl AngleSlices<'_> {
    /// cos and sin of a token, `[R/2]` each.
    fn of(&self, token: usize) -> (&[f32], &[f32]) {
        let row = token * self.half..(token + 1) * self.half;
        (&self.cos[row.clone()], &self.sin[row])
    }
}

fn with_table((cos, sin): Angles, half: usize, f: impl FnOnce(AngleSlices)) -> Result<()> {
    floats(cos, "the cosines of a rotation", |cos| {
        floats(sin, "the sines of a rotation", |sin| {
            f(AngleSlices { cos, sin, half });
            Ok(())
        })
    })
}

/// Row `token` of `x`, whose rows have `width` elements.
fn row(x: &[f32], token: usize, width: usize) -> &[f32] {
    &x[token * width..][..width]
}

/// Runs `f` on each token of `y [N, width]`, in parallel.
fn each_token(y: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    y.par_chunks_mut(TOKENS * width.max(1))
        .enumerate()
        .for_each(|(block, rows)| {
            for (i, row) in rows.chunks_exact_mut(width.max(1)).enumerate() {
                f(block * TOKENS + i, row);
            }
        });
}

#[cfg(test)]
mod tests;
