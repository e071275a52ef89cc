//! A stored teacher: the top-k ids of each token, and the probability of all others together. Both distributions
//! are compared over those ids and one more outcome, "any other". The result is never more than the full
//! divergence, and equal to it if no id is left out.

use super::rows::{BlockSum, StudentRows};
use super::terms::{self, FORWARD, MIXTURE, REVERSE, RowScale, ln_mixture};
use super::{DivergenceTerms, TokenDivergence};
use crate::cpu::cross_entropy::{BLOCK, largest};
use crate::distill::TopKSlices;
use rayon::prelude::*;

/// The student's data for the stored ids.
pub(super) struct StoredTerms<'a> {
    top: TopKSlices<'a>,
    terms: DivergenceTerms,
    /// `[tokens, k]`: the student's capped logits.
    logits: Vec<f32>,
    /// `[tokens, blocks of C]`: sums of the exponentials of all other ids.
    rest: Vec<BlockSum>,
    /// Of each token: sum of q ln(q/m), and the slope of "any other" as `terms::turn_rest` takes it.
    ends: Vec<(f64, f32)>,
}

impl<'a> StoredTerms<'a> {
    pub(super) fn new(top: TopKSlices<'a>, tokens: usize, terms: DivergenceTerms) -> Self {
        Self {
            top,
            terms,
            logits: vec![0.0; tokens * top.k],
            rest: vec![BlockSum::default(); tokens * terms.blocks()],
            ends: Vec::new(),
        }
    }

    /// Saves the logits of the stored ids in a piece. Computes the sums of the blocks of `soft` from two parts, the
    /// stored ids and the others: a difference of two sums would lose a small rest to cancellation.
    pub(super) fn survey(
        &mut self,
        start: usize,
        logits: &mut [f32],
        (first, width): (usize, usize),
        soft: &mut [BlockSum],
        inverse: f32,
    ) {
        let (k, per, common) = (self.top.k, self.terms.blocks(), self.terms.common);
        if first >= common {
            return;
        }
        let count = logits.len() / width.max(1);
        let soft = &mut soft[start * per..][..count * per];
        let rest = &mut self.rest[start * per..][..count * per];
        let kept = &mut self.logits[start * k..][..count * k];
        let ids = &self.top.ids[start * k..][..count * k];
        logits
            .par_chunks_mut(width)
            .zip(soft.par_chunks_mut(per).zip(rest.par_chunks_mut(per)))
            .zip(kept.par_chunks_mut(k).zip(ids.par_chunks(k)))
            .for_each(|((row, (soft, rest)), (kept, ids))| {
                let known = common.saturating_sub(first).min(width);
                for (i, part) in row[..known].chunks_mut(BLOCK).enumerate() {
                    let from = first + i * BLOCK;
                    let (a, b) = (place(ids, from), place(ids, from + part.len()));
                    let block = &mut soft[first / BLOCK + i];
                    let finite = block.sum.is_finite();
                    for (id, kept) in ids[a..b].iter().zip(&mut kept[a..b]) {
                        *kept = std::mem::replace(&mut part[*id as usize - from], f32::NEG_INFINITY);
                    }
                    let (max, _) = largest(part, 0.0);
                    let others = if max == f32::NEG_INFINITY {
                        BlockSum {
                            max: block.max,
                            sum: 0.0,
                        }
                    } else {
                        BlockSum {
                            max,
                            sum: terms::sum_exp(part, max, inverse),
                        }
                    };
                    for (id, kept) in ids[a..b].iter().zip(&kept[a..b]) {
                        part[*id as usize - from] = *kept;
                    }
                    let weight = |x: f32| ((x - block.max) as f64 * inverse as f64).exp();
                    let stored: f64 = kept[a..b].iter().map(|x| weight(*x)).sum();
                    rest[first / BLOCK + i] = others;
                    if finite {
                        block.sum = stored + others.sum * weight(others.max);
                    }
                }
            });
    }
}

/// Returns the number of ascending `ids` that are below `id`.
fn place(ids: &[u32], id: usize) -> usize {
    ids.partition_point(|x| (*x as usize) < id)
}

/// Returns the logarithm of the sum of the blocks, as a fraction of the whole.
fn ln_part(blocks: &[BlockSum], q: RowScale) -> f32 {
    let weight = |b: &BlockSum| b.sum * ((b.max - q.max) as f64 * q.inverse as f64).exp();
    let sum: f64 = blocks.iter().map(weight).sum();
    (sum.ln() - q.ln_sum as f64) as f32
}

/// Returns p ln(p/m), q ln(q/m), and the slope divided by q, of one outcome; for FORWARD ln(p/q) instead of the slope, which
/// may be too large for f32. `k` is subtracted later.
fn outcome(lq: f32, lp: f32, terms: &DivergenceTerms) -> (f64, f64, f64) {
    let (q, p) = ((lq as f64).exp(), (lp as f64).exp());
    let times = |p: f64, difference: f32| if p == 0.0 { 0.0 } else { p * difference as f64 };
    match terms.mode() {
        FORWARD => (times(p, lp - lq), 0.0, (lp - lq) as f64),
        REVERSE => (0.0, times(q, lq - lp), (lq - lp) as f64),
        _ => {
            let lm = ln_mixture::<false>(lq, lp, terms.mix());
            (times(p, lp - lm), times(q, lq - lm), (lq - lm) as f64)
        }
    }
}

impl StudentRows<'_> {
    /// Returns the result of every token, after all pieces were processed.
    pub(super) fn stored_rows(&mut self) -> Vec<TokenDivergence> {
        let Some(mut kept) = self.kept.take() else {
            return Vec::new();
        };
        let (k, per) = (kept.top.k, kept.terms.blocks());
        let (wa, wb) = self.terms.weights();
        let found: Vec<(TokenDivergence, (f64, f32))> = (0..self.ends.len())
            .into_par_iter()
            .map(|i| {
                let q = self.ends[i];
                let (mut a, mut b) = (0.0, 0.0);
                for (x, lp) in kept.logits[i * k..][..k].iter().zip(&kept.top.log_probs[i * k..][..k]) {
                    let (s, t, _) = outcome(q.log(*x), *lp, &self.terms);
                    (a, b) = (a + s, b + t);
                }
                let mut other = 0.0;
                let lq = ln_part(&kept.rest[i * per..][..per], q);
                if lq > f32::NEG_INFINITY || lq.is_nan() {
                    let (s, t, slope) = outcome(lq, kept.top.rest[i], &self.terms);
                    (a, b, other) = (a + s, b + t, slope);
                }
                if self.terms.mode() != FORWARD {
                    other -= b;
                }
                (self.row(i, wa as f64 * a + wb as f64 * b), (b, other as f32))
            })
            .collect();
        let (rows, ends) = found.into_iter().unzip();
        kept.ends = ends;
        self.kept = Some(kept);
        rows
    }

    /// Replaces the logits of a piece by their gradients times `scale`.
    pub(super) fn turn_stored(&self, start: usize, logits: &mut [f32], first: usize, width: usize, scale: f32) {
        let Some(kept) = &self.kept else { return };
        let (k, common) = (kept.top.k, self.terms.common);
        logits.par_chunks_mut(width).enumerate().for_each(|(i, row)| {
            let at = start + i;
            let (sum, rest) = kept.ends[at];
            let turn = self.turn(at, sum, scale);
            let known = common.saturating_sub(first).min(width);
            let ids = &kept.top.ids[at * k..][..k];
            let (a, b) = (place(ids, first), place(ids, first + known));
            let (both, own) = row.split_at_mut(known);
            terms::turn_rest(both, rest, &turn);
            terms::turn_rest(own, 0.0, &turn);
            for j in a..b {
                let (logit, lp) = (kept.logits[at * k + j], kept.top.log_probs[at * k + j]);
                let slope = match turn.mode {
                    FORWARD => terms::slope::<false, FORWARD>(turn.q.log(logit), lp, turn.k, turn.mix),
                    REVERSE => terms::slope::<false, REVERSE>(turn.q.log(logit), lp, turn.k, turn.mix),
                    _ => terms::slope::<false, MIXTURE>(turn.q.log(logit), lp, turn.k, turn.mix),
                };
                let hard = turn.hard * (logit - turn.hard_max).exp();
                both[ids[j] as usize - first] = (turn.factor * slope + hard) * turn.cap_slope(logit);
            }
            self.subtract_target(at, row, first, &turn, scale);
        });
    }
}
