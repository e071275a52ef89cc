//! Partial results of a group of tokens, accumulated over the pieces of the vocabulary: first the sums of the
//! exponentials of each model, then the sums of the divergence.

use super::stored::StoredTerms;
use super::terms::{self, FORWARD, GradientTerms, MIXTURE, MixLogs, REVERSE, RowScale};
use super::{DivergenceTerms, TokenDivergence};
use crate::cpu::cross_entropy::{BLOCK, TargetLogit, inside, largest};
use crate::distill::TopKSlices;
use rayon::prelude::*;

/// Applies the softcap to the logits of a piece again.
pub(super) fn cap_rows(logits: &mut [f32], width: usize, cap: f32) {
    if cap != 0.0 {
        logits.par_chunks_mut(width).for_each(|row| {
            row.chunks_mut(BLOCK).for_each(|part| {
                largest(part, cap);
            })
        });
    }
}

/// The largest logit of a block, and the sum of `e^((logit - largest) / T)`: NaN if a logit is not finite.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct BlockSum {
    pub max: f32,
    pub sum: f64,
}

/// Merges the blocks of a row.
pub(super) fn scale(blocks: &[BlockSum], inverse: f32) -> RowScale {
    let max = blocks
        .iter()
        .fold(f32::NEG_INFINITY, |m, b| if b.max > m { b.max } else { m });
    let weight = |b: &BlockSum| b.sum * ((b.max - max) as f64 * inverse as f64).exp();
    let sum: f64 = blocks.iter().map(weight).sum();
    RowScale {
        max,
        inverse,
        ln_sum: sum.ln() as f32,
    }
}

impl DivergenceTerms {
    pub(super) fn mode(&self) -> u8 {
        match self.beta {
            0.0 => FORWARD,
            1.0 => REVERSE,
            _ => MIXTURE,
        }
    }

    pub(super) fn mix(&self) -> MixLogs {
        MixLogs {
            own: (1.0 - self.beta).ln(),
            other: self.beta.ln(),
        }
    }

    /// Returns the weights of the sums of `p ln(p/m)` and of `q ln(q/m)`.
    pub(super) fn weights(&self) -> (f32, f32) {
        match self.mode() {
            FORWARD => (1.0, 0.0),
            REVERSE => (0.0, 1.0),
            _ => (self.beta, 1.0 - self.beta),
        }
    }

    pub(super) fn inverse(&self) -> f32 {
        1.0 / self.temperature
    }

    /// Returns the number of blocks of the common ids.
    pub(super) fn blocks(&self) -> usize {
        self.common.div_ceil(BLOCK)
    }
}

/// The student.
pub(super) struct StudentRows<'a> {
    pub terms: DivergenceTerms,
    pub cap: f32,
    targets: Vec<u32>,
    /// For the cross-entropy: at T = 1 over all V, `[tokens, blocks of V]`.
    hard: Vec<BlockSum>,
    /// For the divergence: at T over C, `[tokens, blocks of C]`.
    soft: Vec<BlockSum>,
    hits: Vec<TargetLogit>,
    pub(super) hard_ends: Vec<RowScale>,
    pub(super) ends: Vec<RowScale>,
    pub(super) kept: Option<StoredTerms<'a>>,
}

impl<'a> StudentRows<'a> {
    pub(super) fn new(
        targets: Vec<u32>,
        v: usize,
        cap: f32,
        terms: DivergenceTerms,
        stored: Option<TopKSlices<'a>>,
    ) -> Self {
        let n = targets.len();
        Self {
            terms,
            cap,
            hard: vec![BlockSum::default(); n * v.div_ceil(BLOCK)],
            soft: vec![BlockSum::default(); n * terms.blocks()],
            hits: vec![TargetLogit::UNKNOWN; n],
            hard_ends: Vec::new(),
            ends: Vec::new(),
            kept: stored.map(|top| StoredTerms::new(top, n, terms)),
            targets,
        }
    }

    /// Applies the softcap to the logits `[count, width]` of a piece, of the tokens from `start` on, and updates
    /// the sums.
    pub(super) fn survey(&mut self, start: usize, logits: &mut [f32], first: usize, width: usize) {
        let count = logits.len() / width.max(1);
        let n = self.targets.len().max(1);
        let (per, soft_per) = (self.hard.len() / n, self.soft.len() / n);
        let (cap, common, inverse) = (self.cap, self.terms.common, self.terms.inverse());
        let place = first / BLOCK;
        let hard = &mut self.hard[start * per..][..count * per];
        let soft = &mut self.soft[start * soft_per..][..count * soft_per];
        let hits = &mut self.hits[start..][..count];
        logits
            .par_chunks_mut(width)
            .zip(hard.par_chunks_mut(per).zip(soft.par_chunks_mut(soft_per)))
            .zip(hits.par_iter_mut().zip(&self.targets[start..][..count]))
            .for_each(|((row, (hard, soft)), (hit, target))| {
                for (i, part) in row.chunks_mut(BLOCK).enumerate() {
                    let (max, finite) = largest(part, cap);
                    let sum = if finite {
                        terms::sum_exp(part, max, 1.0)
                    } else {
                        f64::NAN
                    };
                    let all = BlockSum { max, sum };
                    hard[place + i] = all;
                    let known = common.saturating_sub(first + i * BLOCK).min(part.len());
                    if known == 0 {
                        continue;
                    }
                    soft[place + i] = if known == part.len() && inverse == 1.0 {
                        all
                    } else {
                        soft_block(&mut part[..known], inverse, finite)
                    };
                }
                if let Some(at) = inside(*target, first, width) {
                    *hit = TargetLogit::of(row, at);
                }
            });
        if let Some(kept) = &mut self.kept {
            kept.survey(start, logits, (first, width), &mut self.soft, inverse);
        }
    }

    /// Merges the blocks, after all pieces were processed.
    pub(super) fn finish(&mut self) {
        let n = self.targets.len().max(1);
        let ends = |blocks: &[BlockSum], inverse: f32| -> Vec<RowScale> {
            let per = (blocks.len() / n).max(1);
            blocks.par_chunks(per).map(|row| scale(row, inverse)).collect()
        };
        self.hard_ends = ends(&self.hard, 1.0);
        self.ends = ends(&self.soft, self.terms.inverse());
    }

    /// Returns the result of token `i` from its divergence.
    pub(super) fn row(&self, i: usize, divergence: f64) -> TokenDivergence {
        let per = self.hard.len() / self.targets.len().max(1);
        let (blocks, hit) = (&self.hard[i * per..][..per], self.hits[i]);
        let end = self.hard_ends[i];
        let before = &blocks[..self.targets[i] as usize / BLOCK];
        TokenDivergence {
            divergence,
            cross_entropy: (end.max as f64 - hit.logit as f64) + end.ln_sum as f64,
            correct: hit.logit == end.max && !hit.second && before.iter().all(|b| b.max < end.max),
        }
    }

    /// Returns the parameters that turn the logits of token `i` into gradients; `k` is the sum of q ln(q/m).
    pub(super) fn turn(&self, i: usize, k: f64, scale: f32) -> GradientTerms {
        let terms = &self.terms;
        let share = match terms.mode() {
            MIXTURE => 1.0 - terms.beta,
            _ => 1.0,
        };
        let hard = self.hard_ends[i];
        GradientTerms {
            q: self.ends[i],
            mix: terms.mix(),
            mode: terms.mode(),
            k: k as f32,
            factor: scale * (1.0 - terms.alpha) * share * terms.inverse(),
            hard_max: hard.max,
            hard: scale * terms.alpha / hard.ln_sum.exp(),
            cap: self.cap,
        }
    }

    /// Subtracts the target's part of the cross-entropy from the gradients of a row.
    pub(super) fn subtract_target(&self, i: usize, row: &mut [f32], first: usize, turn: &GradientTerms, scale: f32) {
        if self.terms.alpha != 0.0
            && let Some(at) = inside(self.targets[i], first, row.len())
        {
            row[at] -= scale * self.terms.alpha * turn.cap_slope(self.hits[i].logit);
        }
    }
}

/// Computes a block at a temperature, from logits with the softcap applied.
pub(super) fn soft_block(part: &mut [f32], inverse: f32, finite: bool) -> BlockSum {
    let (max, _) = largest(part, 0.0);
    let sum = if finite {
        terms::sum_exp(part, max, inverse)
    } else {
        f64::NAN
    };
    BlockSum { max, sum }
}

/// Some tokens of a group and one piece of the vocabulary.
#[derive(Clone, Copy)]
pub(super) struct LogitsTile {
    /// First token in the group.
    pub start: usize,
    /// Tokens.
    pub count: usize,
    /// First id of the piece.
    pub first: usize,
    /// Ids in the student's piece, which may contain ids beyond the common ones.
    pub wide: usize,
    /// Ids in the teacher's piece: the first ones of the student's.
    pub width: usize,
}

/// A teacher with logits in memory.
pub(super) struct LogitsTeacher {
    terms: DivergenceTerms,
    cap: f32,
    tokens: usize,
    blocks: Vec<BlockSum>,
    ends: Vec<RowScale>,
    /// `[tokens, blocks of C]`: sums of p ln(p/m) and of q ln(q/m).
    sums: Vec<(f64, f64)>,
    /// The sum of q ln(q/m) of each token.
    k: Vec<f64>,
}

impl LogitsTeacher {
    pub(super) fn new(tokens: usize, terms: DivergenceTerms, cap: f32) -> Self {
        let blocks = tokens * terms.blocks();
        Self {
            terms,
            cap,
            tokens,
            blocks: vec![BlockSum::default(); blocks],
            ends: Vec::new(),
            sums: vec![(0.0, 0.0); blocks],
            k: Vec::new(),
        }
    }

    /// Applies the softcap to the logits `[count, width]` of a piece of the common ids, and updates the sums.
    pub(super) fn survey(&mut self, start: usize, logits: &mut [f32], first: usize, width: usize) {
        let (per, cap, inverse) = (self.terms.blocks(), self.cap, self.terms.inverse());
        let count = logits.len() / width.max(1);
        let blocks = &mut self.blocks[start * per..][..count * per];
        logits
            .par_chunks_mut(width)
            .zip(blocks.par_chunks_mut(per))
            .for_each(|(row, blocks)| {
                for (part, block) in row.chunks_mut(BLOCK).zip(&mut blocks[first / BLOCK..]) {
                    let (max, finite) = largest(part, cap);
                    let sum = if finite {
                        terms::sum_exp(part, max, inverse)
                    } else {
                        f64::NAN
                    };
                    *block = BlockSum { max, sum };
                }
            });
    }

    pub(super) fn finish(&mut self) {
        let inverse = self.terms.inverse();
        let rows = self.blocks.par_chunks(self.terms.blocks().max(1));
        self.ends = rows.map(|row| scale(row, inverse)).collect();
    }

    /// Adds a piece to the divergence: the logits `ours` `[count, wide]` of the student, and `theirs` `[count, width]`.
    pub(super) fn measure(&mut self, student: &StudentRows<'_>, tile: LogitsTile, ours: &[f32], theirs: &[f32]) {
        let LogitsTile {
            start,
            count,
            first,
            wide,
            width,
        } = tile;
        let (per, place) = (self.terms.blocks(), first / BLOCK);
        let (mix, mode) = (self.terms.mix(), self.terms.mode());
        let sums = &mut self.sums[start * per..][..count * per];
        sums.par_chunks_mut(per)
            .zip(ours.par_chunks(wide).zip(theirs.par_chunks(width)))
            .zip(student.ends[start..].par_iter().zip(&self.ends[start..]))
            .for_each(|((sums, (ours, theirs)), (q, p))| {
                let blocks = ours[..width].chunks(BLOCK).zip(theirs.chunks(BLOCK));
                for ((x, y), sum) in blocks.zip(&mut sums[place..]) {
                    *sum = terms::sums(x, y, *q, *p, mix, mode);
                }
            });
    }

    /// Returns the result of every token.
    pub(super) fn rows(&mut self, student: &StudentRows<'_>) -> Vec<TokenDivergence> {
        let (wa, wb) = self.terms.weights();
        let per = self.terms.blocks().max(1);
        self.k.clear();
        let mut rows = Vec::with_capacity(self.tokens);
        for (i, sums) in self.sums.chunks(per).enumerate() {
            let (a, b) = sums.iter().fold((0.0, 0.0), |(a, b), s| (a + s.0, b + s.1));
            self.k.push(b);
            rows.push(student.row(i, wa as f64 * a + wb as f64 * b));
        }
        rows
    }

    /// Replaces the student's logits `ours` `[count, wide]` of a piece by their gradients times `scale`; `theirs`
    /// `[count, width]`.
    pub(super) fn turn(
        &self,
        student: &StudentRows<'_>,
        tile: LogitsTile,
        ours: &mut [f32],
        theirs: &[f32],
        scale: f32,
    ) {
        let LogitsTile {
            start,
            count,
            first,
            wide,
            width,
        } = tile;
        ours.par_chunks_mut(wide).take(count).enumerate().for_each(|(i, row)| {
            let at = start + i;
            let turn = student.turn(at, self.k[at], scale);
            let (known, own) = row.split_at_mut(width);
            terms::turn(known, &theirs[i * width..][..width], self.ends[at], &turn);
            terms::turn_rest(own, 0.0, &turn);
            student.subtract_target(at, row, first, &turn, scale);
        });
    }
}
