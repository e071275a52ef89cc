//! Attention over latent rows, for decoding: a cache needs one row for each token in the place of the keys and values of all
//! heads. The projection W from a latent row c to keys and values is applied to the queries and to the outputs instead
//! (DeepSeek-V2, arXiv 2405.04434, section 2.1.2):
//!
//! ```text
//! q_h · (K_h c) = (K_hᵀ q_h) · c        Σ p (V_h c) = V_h (Σ p c)        with W = [K_1; V_1; K_2; V_2; ...]
//! ```
//!
//! A cached row is the rotated part of the key, then the latent row: `[R+L]`. It is key and value of one head that all query heads
//! read. Letters as in `latent`; W `[H·(A+V), L]`.

use super::{Angles, LatentHeads, each_token, row, with_table};
use crate::cpu::storage::{dims2, expect_dims, floats, tensor, unwritten};
use crate::linear;
use crate::rope::RopeDirection;
use candle_core::Tensor;
use ft_base::{Error, Result};

impl LatentHeads {
    /// The rows of a cache, `[N, R+L]`. `c [N, L]`: the latent rows after their norm; `low [N, L+R]`: as for `keys_values`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn cached_rows(&self, c: &Tensor, low: &Tensor, angles: Angles) -> Result<Tensor> {
        let (n, wide) = dims2(low, "the latent rows")?;
        self.check(angles, n)?;
        let rank = wide.checked_sub(self.rotary).ok_or_else(|| {
            Error::shape("latent rows have no rotated part")
                .found(wide)
                .expected(format!("at least {}", self.rotary))
        })?;
        expect_dims(c, "the latent rows after their norm", &[n, rank])?;
        let mut y = unwritten(n * wide);
        floats(c, "the latent rows after their norm", |c| {
            floats(low, "the latent rows", |low| {
                with_table(angles, self.rotary / 2, |table| {
                    each_token(&mut y, wide, |t, y| {
                        let (turned, rest) = y.split_at_mut(self.rotary);
                        let rotary = &row(low, t, wide)[rank..];
                        self.rotate(rotary, table.of(t), RopeDirection::Forward, turned);
                        rest.copy_from_slice(row(c, t, rank));
                    });
                })
            })
        })?;
        tensor(y, (n, wide))
    }

    /// L, and W's rows of a head.
    fn rank_of(&self, w: &Tensor) -> Result<usize> {
        let rank = dims2(w, "the projection of the latent rows")?.1;
        let rows = self.heads * self.key_value();
        expect_dims(w, "the projection of the latent rows", &[rows, rank])?;
        Ok(rank)
    }

    /// Queries for cached rows, `[N, H·(R+L)]`, from those of `queries`, `q [N, H·E]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn absorbed_queries(&self, q: &Tensor, w: &Tensor) -> Result<Tensor> {
        let (n, from, rank) = (dims2(q, "the queries")?.0, self.width(), self.rank_of(w)?);
        expect_dims(q, "the queries", &[n, self.heads * from])?;
        let to = self.rotary + rank;
        let mut y = unwritten(n * self.heads * to);
        for head in 0..self.heads {
            let plain = q.narrow(1, head * from + self.rotary, self.plain)?.contiguous()?;
            let keys = w.narrow(0, head * self.key_value(), self.plain)?;
            let part = linear::backward_input(&plain, &keys)?;
            floats(&part, "the queries of a head", |part| {
                floats(q, "the queries", |q| {
                    each_token(&mut y, self.heads * to, |t, y| {
                        let y = &mut y[head * to..][..to];
                        let q = &row(q, t, self.heads * from)[head * from..];
                        y[..self.rotary].copy_from_slice(&q[..self.rotary]);
                        y[self.rotary..].copy_from_slice(row(part, t, rank));
                    });
                    Ok(())
                })
            })?;
        }
        tensor(y, (n, self.heads * to))
    }

    /// The outputs of all heads, `[N, H·V]`, from those over cached rows, `o [N, H·(R+L)]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn absorbed_values(&self, o: &Tensor, w: &Tensor) -> Result<Tensor> {
        let (n, rank) = (dims2(o, "the output of attention")?.0, self.rank_of(w)?);
        let from = self.rotary + rank;
        expect_dims(o, "the output of attention", &[n, self.heads * from])?;
        let mut y = unwritten(n * self.heads * self.value);
        for head in 0..self.heads {
            let sums = o.narrow(1, head * from + self.rotary, rank)?.contiguous()?;
            let values = w.narrow(0, head * self.key_value() + self.plain, self.value)?;
            let part = linear::forward(&sums, &values, None)?;
            floats(&part, "the output of a head", |part| {
                each_token(&mut y, self.heads * self.value, |t, y| {
                    y[head * self.value..][..self.value].copy_from_slice(row(part, t, self.value));
                });
                Ok(())
            })?;
        }
        tensor(y, (n, self.heads * self.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention;
    use crate::rope::RopePairing;
    use candle_core::Device;

    fn numbers(seed: usize, shape: (usize, usize)) -> Tensor {
        let n = shape.0 * shape.1;
        let values = (0..n).map(|i| (((i + 7 * seed) * 7919 % 1009) as f32 / 1009.0 - 0.5) * 0.8);
        Tensor::from_vec(values.collect::<Vec<f32>>(), shape, &Device::Cpu).unwrap()
    }

    /// Attention over cached rows has the outputs of attention over the keys and values of all heads.
    #[test]
    fn cached_rows_are_the_keys_and_values_of_all_heads() {
        let (n, rank) = (9, 12);
        for (plain, rotary, value) in [(6, 4, 10), (8, 2, 3)] {
            let heads = LatentHeads {
                heads: 3,
                plain,
                rotary,
                value,
                pairing: RopePairing::Neighbors,
            };
            let angles = |f: fn(f32) -> f32| {
                let values = (0..n * rotary / 2).map(|i| f(0.3 * i as f32));
                Tensor::from_vec(values.collect::<Vec<f32>>(), (n, rotary / 2), &Device::Cpu).unwrap()
            };
            let (cos, sin) = (angles(f32::cos), angles(f32::sin));
            let (c, low) = (numbers(1, (n, rank)), numbers(2, (n, rank + rotary)));
            let w = numbers(3, (3 * (plain + value), rank));
            let q = heads
                .queries(&numbers(4, (n, 3 * (plain + rotary))), (&cos, &sin))
                .unwrap();
            let spec = attention::AttentionSpec {
                heads: 3,
                kv_heads: 3,
                head_dim: heads.width(),
                scale: 0.4,
                softcap: None,
                window: None,
                bf16: false,
            };
            let documents = [0, 4, n];
            let kv = linear::forward(&c, &w, None).unwrap();
            let (k, v) = heads.keys_values(&kv, &low, (&cos, &sin)).unwrap();
            let (o, want_lse) = attention::forward(&q, &k, &v, &spec, &documents, &documents).unwrap();
            let want = heads.cut(&o).unwrap();

            let rows = heads.cached_rows(&c, &low, (&cos, &sin)).unwrap();
            assert_eq!(rows.dims(), [n, rotary + rank]);
            let one = attention::AttentionSpec {
                kv_heads: 1,
                head_dim: rotary + rank,
                ..spec
            };
            let q = heads.absorbed_queries(&q, &w).unwrap();
            let (o, lse) = attention::forward(&q, &rows, &rows, &one, &documents, &documents).unwrap();
            let got = heads.absorbed_values(&o, &w).unwrap();
            for (got, want) in [(got, want), (lse, want_lse)] {
                let [got, want] = [got, want].map(|t| t.flatten_all().unwrap().to_vec1::<f32>().unwrap());
                assert_eq!(got.len(), want.len());
                for (a, b) in got.iter().zip(&want) {
                    assert!((a - b).abs() < 2e-6, "{a} {b}");
                }
            }
        }
    }
}
