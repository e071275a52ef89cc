//! The top-k ids of each token, selected piece by piece, and the logarithm of the probability of all others.

use super::rows::{BlockSum, cap_rows, scale};
use super::terms;
use crate::cpu::cross_entropy::{BLOCK, largest};
use crate::distill::TopK;
use rayon::prelude::*;

/// The top-k of one token so far.
#[derive(Clone)]
struct RunningTopK {
    /// Logit and id; at most k.
    kept: Vec<(f32, u32)>,
    /// Sum over logits that were in the top-k at first and were displaced later.
    lost: BlockSum,
    odd: bool,
}

pub(crate) struct Selection {
    k: usize,
    cap: f32,
    inverse: f32,
    per: usize,
    rows: Vec<RunningTopK>,
    /// `[tokens, blocks]`: sums over the logits outside the top-k at the time of the block.
    blocks: Vec<BlockSum>,
}

/// Orders larger logits first; of equal ones the smaller id.
fn order(a: &(f32, u32), b: &(f32, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

impl Selection {
    pub(crate) fn new(tokens: usize, common: usize, k: usize, temperature: f32, cap: f32) -> Self {
        let (per, best) = (
            common.div_ceil(BLOCK),
            RunningTopK {
                kept: Vec::new(),
                lost: BlockSum::default(),
                odd: false,
            },
        );
        Self {
            k: k.min(common),
            cap,
            inverse: 1.0 / temperature,
            per,
            rows: vec![best; tokens],
            blocks: vec![BlockSum::default(); tokens * per],
        }
    }

    /// Updates the top-k with the logits `[count, width]` of a piece.
    pub(crate) fn survey(&mut self, start: usize, logits: &mut [f32], first: usize, width: usize) {
        let (k, cap, inverse, per) = (self.k, self.cap, self.inverse, self.per);
        let count = logits.len() / width.max(1);
        let odd: Vec<bool> = logits
            .par_chunks(width)
            .map(|row| row.iter().any(|x| !x.is_finite()))
            .collect();
        cap_rows(logits, width, cap);
        let blocks = &mut self.blocks[start * per..][..count * per];
        logits
            .par_chunks_mut(width)
            .zip(blocks.par_chunks_mut(per))
            .zip(self.rows[start..][..count].par_iter_mut().zip(&odd))
            .for_each(|((row, blocks), (best, odd))| {
                best.odd |= odd;
                if best.odd {
                    return;
                }
                // Only a logit above the smallest of the top-k can enter it.
                let least = if best.kept.len() < k {
                    f32::NEG_INFINITY
                } else {
                    best.kept.iter().fold(f32::INFINITY, |m, x| m.min(x.0))
                };
                let seen = row.iter().zip(first as u32..);
                let mut all = best.kept.clone();
                all.extend(seen.filter(|(x, _)| **x > least).map(|(x, id)| (*x, id)));
                if all.len() > k {
                    all.select_nth_unstable_by(k - 1, order);
                    for (x, id) in all.drain(k..) {
                        if (id as usize) < first {
                            best.lose(x, inverse);
                        }
                    }
                }
                all.sort_unstable_by_key(|x| x.1);
                best.kept = all;
                for (_, id) in best.kept.iter().filter(|x| x.1 as usize >= first) {
                    row[*id as usize - first] = f32::NEG_INFINITY;
                }
                for (part, block) in row.chunks_mut(BLOCK).zip(&mut blocks[first / BLOCK..]) {
                    let (max, _) = largest(part, 0.0);
                    if max > f32::NEG_INFINITY {
                        let sum = terms::sum_exp(part, max, inverse);
                        *block = BlockSum { max, sum };
                    }
                }
            });
    }

    /// Returns the results of all tokens; NaN if a logit was not finite.
    pub(crate) fn finish(self) -> TopK {
        let mut out: TopK = TopK {
            k: self.k,
            ..TopK::default()
        };
        for (best, blocks) in self.rows.iter().zip(self.blocks.chunks(self.per.max(1))) {
            let present: Vec<BlockSum> = blocks
                .iter()
                .chain([&best.lost])
                .filter(|b| b.sum > 0.0)
                .copied()
                .collect();
            let mut all = present.clone();
            all.extend(best.kept.iter().map(|(x, _)| BlockSum { max: *x, sum: 1.0 }));
            let whole = scale(&all, self.inverse);
            let rest = if present.is_empty() {
                f32::NEG_INFINITY
            } else {
                let part = scale(&present, self.inverse);
                (part.max - whole.max) * self.inverse + part.ln_sum - whole.ln_sum
            };
            if best.odd {
                out.ids.extend(0..self.k as u32);
                out.log_probs.extend(std::iter::repeat_n(f32::NAN, self.k));
                out.rest.push(f32::NAN);
                continue;
            }
            out.ids.extend(best.kept.iter().map(|x| x.1));
            out.log_probs.extend(best.kept.iter().map(|x| whole.log(x.0)));
            out.rest.push(rest);
        }
        out
    }
}

impl RunningTopK {
    fn lose(&mut self, logit: f32, inverse: f32) {
        let BlockSum { max, sum } = self.lost;
        if sum == 0.0 || logit > max {
            let old = sum * ((max - logit) as f64 * inverse as f64).exp();
            self.lost = BlockSum {
                max: logit,
                sum: if sum == 0.0 { 1.0 } else { old + 1.0 },
            };
        } else {
            self.lost.sum += ((logit - max) as f64 * inverse as f64).exp();
        }
    }
}
