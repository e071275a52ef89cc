//! The loss of each token, from the logits of one piece of the vocabulary after the other.

use super::kernels::{self, largest, replace_by_exp, sum_exp, sum_of};
use super::{BLOCK, PIECE, inside};
use crate::cpu::math::to_bf16_slice;
use half::bf16;
use rayon::prelude::*;

/// The result of one token.
pub(crate) struct TokenLoss {
    pub loss: f64,
    pub correct: bool,
}

/// The largest logit of a block, the sum of `e^(logit - largest)` (NaN if a logit is not finite), and with label
/// smoothing the sum of the logits.
#[derive(Clone, Copy)]
struct BlockSum {
    max: f32,
    sum: f64,
    total: f32,
}

/// The logit of the target of a token; NaN until its piece was processed.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct TargetLogit {
    pub logit: f32,
    /// True if an equal logit precedes it in its block.
    pub second: bool,
}

impl TargetLogit {
    pub(in crate::cpu) const UNKNOWN: Self = Self {
        logit: f32::NAN,
        second: false,
    };

    /// The logit at `at` of a piece of a row.
    pub(in crate::cpu) fn of(row: &[f32], at: usize) -> Self {
        let logit = row[at];
        let second = row[at / BLOCK * BLOCK..at].contains(&logit);
        Self { logit, second }
    }
}

/// Maximum of a row and the sum of its exponentials.
#[derive(Clone, Copy)]
pub(super) struct RowExpSum {
    pub max: f32,
    pub sum: f64,
}

/// Rows to write beside the logits of a token; empty: not wanted.
#[derive(Default)]
pub(super) struct RowOutputs<'a> {
    /// The slopes of the cap at the logits.
    pub slopes: &'a mut [f32],
    /// What replaces the logits, in bf16.
    pub in_bf16: &'a mut [bf16],
}

/// What is known of a token after the maxima of a piece.
struct RowState<'a> {
    /// The largest logit up to the end of the piece.
    largest: f32,
    /// The position of the target in the piece.
    target: Option<usize>,
    outputs: RowOutputs<'a>,
}

/// Partial results of a group of tokens, accumulated over the pieces.
pub(super) struct GroupLosses {
    /// `[tokens, blocks of the vocabulary]`
    blocks: Vec<BlockSum>,
    /// `[tokens, pieces of the vocabulary]`: the largest logit up to the end of each piece.
    maxima: Vec<f32>,
    pub hits: Vec<TargetLogit>,
    pub targets: Vec<u32>,
    pub cap: f32,
    pub smoothing: f32,
    pub vocab: usize,
}

impl GroupLosses {
    pub(super) fn new(targets: Vec<u32>, vocab: usize, cap: f32, smoothing: f32) -> Self {
        let block = BlockSum {
            max: f32::NEG_INFINITY,
            sum: 0.0,
            total: 0.0,
        };
        Self {
            blocks: vec![block; targets.len() * vocab.div_ceil(BLOCK)],
            maxima: vec![f32::NEG_INFINITY; targets.len() * vocab.div_ceil(PIECE)],
            hits: vec![TargetLogit::UNKNOWN; targets.len()],
            targets,
            cap,
            smoothing,
            vocab,
        }
    }

    fn blocks_of_token(&self) -> usize {
        self.vocab.div_ceil(BLOCK).max(1)
    }

    fn pieces_of_token(&self) -> usize {
        self.vocab.div_ceil(PIECE).max(1)
    }

    /// Returns the largest logit of a token in the pieces before id `end`, which begins a piece or ends the vocabulary, and is not 0.
    pub(super) fn largest_before(&self, token: usize, end: usize) -> f32 {
        self.maxima[token * self.pieces_of_token() + end.div_ceil(PIECE) - 1]
    }

    /// Updates the partial results with the logits of a piece, `[count, width]`: tokens from `start` on, vocabulary
    /// from `first` on.
    pub(super) fn add(&mut self, start: usize, logits: &mut [f32], (first, width): (usize, usize)) {
        self.each_row(start, logits, Vec::new(), (first, width), |row, blocks, _| {
            for (part, block) in row.chunks(BLOCK).zip(blocks) {
                block.sum += sum_exp(part, block.max);
            }
        });
    }

    /// As `add`, and replaces each logit by `e^(logit - largest)` times the slope of the cap. `largest` is the largest logit of the token
    /// up to the end of the piece. The logit of the target is replaced by 0. `outputs`: those of each token.
    pub(super) fn add_and_replace(
        &mut self,
        start: usize,
        logits: &mut [f32],
        outputs: Vec<RowOutputs<'_>>,
        (first, width): (usize, usize),
    ) {
        let cap = self.cap;
        self.each_row(start, logits, outputs, (first, width), |row, blocks, of_row| {
            kernels::slopes(of_row.outputs.slopes, row, cap);
            for (part, block) in row.chunks_mut(BLOCK).zip(blocks) {
                let factor = ((block.max - of_row.largest) as f64).exp() as f32;
                block.sum += replace_by_exp(part, block.max, factor, cap);
            }
            if let Some(at) = of_row.target {
                row[at] = 0.0;
            }
            to_bf16_slice(of_row.outputs.in_bf16, row);
        });
    }

    /// Sets the maxima and the logits of the targets, and caps the logits. Calls `then` for each token with its logits and with its
    /// blocks of the piece.
    fn each_row(
        &mut self,
        start: usize,
        logits: &mut [f32],
        mut outputs: Vec<RowOutputs<'_>>,
        (first, width): (usize, usize),
        then: impl Fn(&mut [f32], &mut [BlockSum], RowState<'_>) + Sync,
    ) {
        let count = logits.len() / width.max(1);
        let (per, pieces) = (self.blocks_of_token(), self.pieces_of_token());
        let (cap, smooths) = (self.cap, self.smoothing != 0.0);
        let (place, end) = (first / BLOCK, (first + width).div_ceil(BLOCK));
        let piece = first / PIECE;
        let blocks = &mut self.blocks[start * per..][..count * per];
        let maxima = &mut self.maxima[start * pieces..][..count * pieces];
        let hits = &mut self.hits[start..][..count];
        outputs.resize_with(count, Default::default);
        logits
            .par_chunks_mut(width)
            .zip(blocks.par_chunks_mut(per).zip(maxima.par_chunks_mut(pieces)))
            .zip(outputs)
            .zip(hits.par_iter_mut().zip(&self.targets[start..][..count]))
            .for_each(|(((row, (blocks, maxima)), outputs), (hit, target))| {
                let blocks = &mut blocks[place..end];
                for (part, block) in row.chunks_mut(BLOCK).zip(blocks.iter_mut()) {
                    let (max, all_finite) = largest(part, cap);
                    *block = BlockSum {
                        max,
                        sum: if all_finite { 0.0 } else { f64::NAN },
                        total: if smooths { sum_of(part) } else { 0.0 },
                    };
                }
                let before = if piece == 0 {
                    f32::NEG_INFINITY
                } else {
                    maxima[piece - 1]
                };
                let largest = largest_of(before, blocks);
                maxima[piece] = largest;
                let target = inside(*target, first, width);
                if let Some(at) = target {
                    *hit = TargetLogit::of(row, at);
                }
                let state = RowState {
                    largest,
                    target,
                    outputs,
                };
                then(row, blocks, state);
            });
    }

    /// Returns the result of every token, after all pieces were processed.
    pub(super) fn finish(&self) -> (Vec<TokenLoss>, Vec<RowExpSum>) {
        let rows: Vec<(TokenLoss, RowExpSum)> = self
            .blocks
            .par_chunks(self.blocks_of_token())
            .zip(self.hits.par_iter().zip(&self.targets))
            .map(|(blocks, (hit, target))| {
                let (mut row, end) = row(blocks, *hit, *target as usize);
                if self.smoothing != 0.0 {
                    let mean = blocks.iter().map(|b| b.total as f64).sum::<f64>() / self.vocab as f64;
                    row.loss += self.smoothing as f64 * (hit.logit as f64 - mean);
                }
                (row, end)
            })
            .collect();
        rows.into_iter().unzip()
    }
}

/// Returns the largest of `before` and the maxima of the blocks.
fn largest_of(before: f32, blocks: &[BlockSum]) -> f32 {
    blocks.iter().fold(before, |m, b| if b.max > m { b.max } else { m })
}

/// Merges the blocks of a row.
fn row(blocks: &[BlockSum], hit: TargetLogit, target: usize) -> (TokenLoss, RowExpSum) {
    let max = largest_of(f32::NEG_INFINITY, blocks);
    let sum: f64 = blocks.iter().map(|b| b.sum * ((b.max - max) as f64).exp()).sum();
    let before = &blocks[..target / BLOCK];
    let correct = hit.logit == max && !hit.second && before.iter().all(|b| b.max < max);
    let loss = (max as f64 - hit.logit as f64) + sum.ln();
    (TokenLoss { loss, correct }, RowExpSum { max, sum })
}
