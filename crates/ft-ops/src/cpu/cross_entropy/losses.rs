//! The loss of each token, from the logits of one piece of the vocabulary after the other.

use super::kernels::{self, largest, replace_by_exp, sum_exp, sum_of};
use super::{BLOCK, inside};
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
pub(super) struct TargetLogit {
    pub logit: f32,
    /// True if an equal logit precedes it in its block.
    second: bool,
}

/// Maximum of a row and the sum of its exponentials.
#[derive(Clone, Copy)]
pub(super) struct RowExpSum {
    pub max: f32,
    pub sum: f64,
}

/// Partial results of a group of tokens, accumulated over the pieces.
pub(super) struct GroupLosses {
    /// `[tokens, blocks of the vocabulary]`
    blocks: Vec<BlockSum>,
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
        let hit = TargetLogit {
            logit: f32::NAN,
            second: false,
        };
        Self {
            blocks: vec![block; targets.len() * vocab.div_ceil(BLOCK)],
            hits: vec![hit; targets.len()],
            targets,
            cap,
            smoothing,
            vocab,
        }
    }

    fn blocks_of_token(&self) -> usize {
        self.vocab.div_ceil(BLOCK).max(1)
    }

    /// Returns the largest logit of a token in the vocabulary before id `end`, which begins a block or ends the vocabulary.
    pub(super) fn largest_before(&self, token: usize, end: usize) -> f32 {
        let per = self.blocks_of_token();
        largest_of(&self.blocks[token * per..][..end.div_ceil(BLOCK)])
    }

    /// Updates the partial results with the logits of a piece, `[count, width]`: tokens from `start` on, vocabulary
    /// from `first` on.
    pub(super) fn add(&mut self, start: usize, logits: &mut [f32], (first, width): (usize, usize)) {
        self.each_row(start, logits, &mut [], (first, width), |row, blocks, _, _| {
            for (part, block) in row.chunks(BLOCK).zip(&mut blocks[first / BLOCK..]) {
                block.sum += sum_exp(part, block.max);
            }
        });
    }

    /// As `add`, and replaces each logit by `e^(logit - largest)` times the slope of the cap. `largest` is the largest logit of the token
    /// up to the end of the piece. The logit of the target is replaced by 0. Writes the slopes to `slopes` `[count, width]`, unless it is
    /// empty.
    pub(super) fn add_and_replace(
        &mut self,
        start: usize,
        logits: &mut [f32],
        slopes: &mut [f32],
        (first, width): (usize, usize),
    ) {
        let cap = self.cap;
        self.each_row(start, logits, slopes, (first, width), |row, blocks, slopes, target| {
            kernels::slopes(slopes, row, cap);
            let max = largest_of(blocks);
            for (part, block) in row.chunks_mut(BLOCK).zip(&mut blocks[first / BLOCK..]) {
                let factor = ((block.max - max) as f64).exp() as f32;
                block.sum += replace_by_exp(part, block.max, factor, cap);
            }
            if let Some(at) = target {
                row[at] = 0.0;
            }
        });
    }

    /// Sets the maxima of the blocks and the logits of the targets, and caps the logits. Calls `then` for each token: with its logits,
    /// its blocks up to the end of the piece, its row of `slopes` (empty if all of it is), and the position of its target in the piece.
    fn each_row(
        &mut self,
        start: usize,
        logits: &mut [f32],
        slopes: &mut [f32],
        (first, width): (usize, usize),
        then: impl Fn(&mut [f32], &mut [BlockSum], &mut [f32], Option<usize>) + Sync,
    ) {
        let count = logits.len() / width.max(1);
        let per = self.blocks_of_token();
        let (cap, smooths) = (self.cap, self.smoothing != 0.0);
        let (place, end) = (first / BLOCK, (first + width).div_ceil(BLOCK));
        let blocks = &mut self.blocks[start * per..][..count * per];
        let hits = &mut self.hits[start..][..count];
        let mut rows_of_slopes: Vec<&mut [f32]> = slopes.chunks_mut(width.max(1)).collect();
        rows_of_slopes.resize_with(count, Default::default);
        logits
            .par_chunks_mut(width)
            .zip(blocks.par_chunks_mut(per))
            .zip(rows_of_slopes)
            .zip(hits.par_iter_mut().zip(&self.targets[start..][..count]))
            .for_each(|(((row, blocks), slopes), (hit, target))| {
                for (part, block) in row.chunks_mut(BLOCK).zip(&mut blocks[place..]) {
                    let (max, all_finite) = largest(part, cap);
                    *block = BlockSum {
                        max,
                        sum: if all_finite { 0.0 } else { f64::NAN },
                        total: if smooths { sum_of(part) } else { 0.0 },
                    };
                }
                let target = inside(*target, first, width);
                if let Some(at) = target {
                    let logit = row[at];
                    let second = row[at / BLOCK * BLOCK..at].contains(&logit);
                    *hit = TargetLogit { logit, second };
                }
                then(row, &mut blocks[..end], slopes, target);
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

fn largest_of(blocks: &[BlockSum]) -> f32 {
    blocks
        .iter()
        .fold(f32::NEG_INFINITY, |m, b| if b.max > m { b.max } else { m })
}

/// Merges the blocks of a row.
fn row(blocks: &[BlockSum], hit: TargetLogit, target: usize) -> (TokenLoss, RowExpSum) {
    let max = largest_of(blocks);
    let sum: f64 = blocks.iter().map(|b| b.sum * ((b.max - max) as f64).exp()).sum();
    let before = &blocks[..target / BLOCK];
    let correct = hit.logit == max && !hit.second && before.iter().all(|b| b.max < max);
    let loss = (max as f64 - hit.logit as f64) + sum.ln();
    (TokenLoss { loss, correct }, RowExpSum { max, sum })
}
