//! Cross-entropy on slices. The vocabulary is cut into pieces, both for a head that is in memory as a whole and for
//! a streamed head: both compute the same products and the same sums, so their results are bit-equal.
//!
//! The sum of the exponentials of a row is computed block by block, each with its own maximum, and merged at the
//! end (as in the online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867, but in a fixed order).

use super::math::{LANES, exp, fma, sum_lanes, tanh, vectorized};
use super::product::{CInit, Matrix, WeightRows, product};
use super::storage::{StoredElements, unwritten};
use rayon::prelude::*;

/// Rows of the head per product.
pub(crate) const PIECE: usize = 4096;
/// Logits that share a maximum; a piece is cut into whole blocks.
pub(crate) const BLOCK: usize = 2048;

/// The inputs. `sizes` are (D, V); `cap` 0 means no softcap.
pub(crate) struct CrossEntropyJob<'a> {
    pub h: &'a [f32],
    pub head: WeightRows<'a>,
    pub targets: &'a [u32],
    /// `[N]`: factors of the gradients of the tokens.
    pub weights: Option<&'a [f32]>,
    pub sizes: (usize, usize),
    pub cap: f32,
    /// See `Options::smoothing`.
    pub smoothing: f32,
}

/// The output gradients, initially zero.
pub(crate) struct CrossEntropyGradients {
    pub scale: f32,
    pub dh: Option<Vec<f32>>,
    pub dw: Option<Vec<f32>>,
}

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
struct TargetLogit {
    logit: f32,
    /// True if an equal logit precedes it in its block.
    second: bool,
}

/// Maximum of a row and the sum of its exponentials.
#[derive(Clone, Copy)]
struct RowExpSum {
    max: f32,
    sum: f64,
}

/// Partial results of a group of tokens, accumulated over the pieces.
struct TokenGroup {
    /// `[tokens, blocks of the vocabulary]`
    blocks: Vec<BlockSum>,
    hits: Vec<TargetLogit>,
    ends: Vec<RowExpSum>,
    targets: Vec<u32>,
    /// Factor of each token's gradient; empty: 1.
    weights: Vec<f32>,
    cap: f32,
    smoothing: f32,
    vocab: usize,
}

impl TokenGroup {
    fn new(targets: Vec<u32>, v: usize, cap: f32, smoothing: f32) -> Self {
        let block = BlockSum {
            max: 0.0,
            sum: 0.0,
            total: 0.0,
        };
        let hit = TargetLogit {
            logit: f32::NAN,
            second: false,
        };
        Self {
            blocks: vec![block; targets.len() * v.div_ceil(BLOCK)],
            hits: vec![hit; targets.len()],
            ends: Vec::new(),
            targets,
            weights: Vec::new(),
            cap,
            smoothing,
            vocab: v,
        }
    }

    /// Updates the partial results with the logits of a piece, `[count, width]`: tokens from `start` on, vocabulary
    /// from `first` on.
    fn survey(&mut self, start: usize, logits: &mut [f32], first: usize, width: usize) {
        let count = logits.len() / width.max(1);
        let per = self.blocks.len() / self.hits.len().max(1);
        let (cap, place, smooths) = (self.cap, first / BLOCK, self.smoothing != 0.0);
        let blocks = &mut self.blocks[start * per..][..count * per];
        let hits = &mut self.hits[start..][..count];
        logits
            .par_chunks_mut(width)
            .zip(blocks.par_chunks_mut(per))
            .zip(hits.par_iter_mut().zip(&self.targets[start..][..count]))
            .for_each(|((row, blocks), (hit, target))| {
                for (part, block) in row.chunks_mut(BLOCK).zip(&mut blocks[place..]) {
                    let (max, all_finite) = largest(part, cap);
                    let sum = if all_finite { sum_exp(part, max) } else { f64::NAN };
                    let total = if smooths { sum_of(part) } else { 0.0 };
                    *block = BlockSum { max, sum, total };
                }
                if let Some(at) = inside(*target, first, width) {
                    let logit = row[at];
                    let second = row[at / BLOCK * BLOCK..at].contains(&logit);
                    *hit = TargetLogit { logit, second };
                }
            });
    }

    /// Returns the result of every token, after all pieces were processed.
    fn finish(&mut self) -> Vec<TokenLoss> {
        let per = (self.blocks.len() / self.hits.len().max(1)).max(1);
        let rows: Vec<(TokenLoss, RowExpSum)> = self
            .blocks
            .par_chunks(per)
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
        let (rows, ends) = rows.into_iter().unzip();
        self.ends = ends;
        rows
    }

    /// Replaces the logits of a piece by their gradients times `scale`.
    fn turn(&self, start: usize, logits: &mut [f32], first: usize, width: usize, scale: f32) {
        let (cap, weights, smoothing, vocab) = (self.cap, &self.weights, self.smoothing, self.vocab);
        let tokens = self.hits[start..]
            .par_iter()
            .zip(&self.ends[start..])
            .zip(&self.targets[start..]);
        logits
            .par_chunks_mut(width)
            .zip(tokens)
            .enumerate()
            .for_each(|(i, (row, ((hit, end), target)))| {
                let scale = weights.get(start + i).map_or(scale, |w| scale * w);
                let even = scale * smoothing / vocab as f32;
                gradient(row, end.max, scale / end.sum as f32, even, cap);
                if let Some(at) = inside(*target, first, width) {
                    let slope = if cap == 0.0 {
                        1.0
                    } else {
                        1.0 - (hit.logit / cap) * (hit.logit / cap)
                    };
                    row[at] -= scale * (1.0 - smoothing) * slope;
                }
            });
    }
}

/// Returns the position of a target in a piece; None if it is in another piece.
pub(super) fn inside(target: u32, first: usize, width: usize) -> Option<usize> {
    (target as usize).checked_sub(first).filter(|at| *at < width)
}

/// Returns the weights of these tokens.
fn weights_of(weights: Option<&[f32]>, tokens: &[usize]) -> Vec<f32> {
    weights.map_or_else(Vec::new, |w| tokens.iter().map(|n| w[*n]).collect())
}

/// Returns the first row and the number of rows of each piece.
pub(super) fn pieces(v: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..v).step_by(PIECE).map(move |first| (first, PIECE.min(v - first)))
}

/// Sizes of the logits of some tokens for one piece of the vocabulary.
#[derive(Clone, Copy)]
pub(super) struct LogitsSizes {
    /// Tokens.
    pub count: usize,
    /// Ids of the piece.
    pub width: usize,
    /// D: elements of a hidden state.
    pub d: usize,
}

/// Computes `logits [count, width] = h [count, D] · headᵀ`.
pub(super) fn multiply(h: &[f32], head: WeightRows<'_>, sizes: LogitsSizes, logits: &mut [f32]) {
    let LogitsSizes { count, width, d } = sizes;
    product(
        (count, width, d),
        logits,
        CInit::Zero,
        Matrix::k_inner(StoredElements::F32(h), d),
        head.forward(),
        head.rounding(),
    );
}

/// Computes `dh [count, D] (+)= dlogits [count, width] · head [width, D]`, from zero with the first piece.
pub(super) fn back(dlogits: &[f32], head: WeightRows<'_>, sizes: LogitsSizes, first: usize, dh: &mut [f32]) {
    let LogitsSizes { count, width, d } = sizes;
    product(
        (count, d, width),
        dh,
        if first == 0 { CInit::Zero } else { CInit::C },
        Matrix::k_inner(StoredElements::F32(dlogits), width),
        head.backward(),
        head.rounding(),
    );
}

/// Runs with a head that is in memory as a whole. `trained` are the rows of h that have a target; `each` is called
/// with them in order.
pub(crate) fn run(
    job: &CrossEntropyJob<'_>,
    trained: &[usize],
    chunk: usize,
    mut gradients: Option<&mut CrossEntropyGradients>,
    each: &mut impl FnMut(usize, &TokenLoss),
) {
    let (d, v) = job.sizes;
    let chunk = chunk.min(trained.len());
    if chunk == 0 {
        return;
    }
    let mut logits = unwritten(chunk * v);
    let mut gathered = unwritten(chunk * d);
    for tokens in trained.chunks(chunk) {
        let count = tokens.len();
        let gathered = &mut gathered[..count * d];
        for (row, n) in gathered.chunks_exact_mut(d).zip(tokens) {
            row.copy_from_slice(&job.h[n * d..][..d]);
        }
        let targets = tokens.iter().map(|n| job.targets[*n]).collect();
        let mut rows = TokenGroup::new(targets, v, job.cap, job.smoothing);
        rows.weights = weights_of(job.weights, tokens);
        for (first, width) in pieces(v) {
            let logits = &mut logits[count * first..][..count * width];
            let head = job.head.part(first, width);
            multiply(gathered, head, LogitsSizes { count, width, d }, logits);
            rows.survey(0, logits, first, width);
        }
        for (n, row) in tokens.iter().zip(&rows.finish()) {
            each(*n, row);
        }
        let Some(gradients) = gradients.as_deref_mut() else {
            continue;
        };
        for (first, width) in pieces(v) {
            let logits = &mut logits[count * first..][..count * width];
            rows.turn(0, logits, first, width, gradients.scale);
            if let Some(dw) = &mut gradients.dw {
                product(
                    (width, d, count),
                    &mut dw[first * d..][..width * d],
                    CInit::C,
                    Matrix::k_outer(StoredElements::F32(logits), width),
                    Matrix::k_outer(StoredElements::F32(gathered), d),
                    job.head.rounding(),
                );
            }
        }
        if let Some(dh) = &mut gradients.dh {
            // The gathered rows are no longer needed: dh overwrites them.
            for (first, width) in pieces(v) {
                let logits = &logits[count * first..][..count * width];
                let head = job.head.part(first, width);
                back(logits, head, LogitsSizes { count, width, d }, first, gathered);
            }
            for (row, n) in gathered.chunks_exact(d).zip(tokens) {
                dh[n * d..][..d].copy_from_slice(row);
            }
        }
    }
}

/// Cross-entropy with a streamed head, which arrives twice in parts of whole pieces: first `survey` of all parts in
/// order, then `finish`, then (only for the gradient) `turn` of all parts in order.
pub(crate) struct StreamedCrossEntropy {
    /// `[trained, D]`
    h: Vec<f32>,
    /// `[trained, D]`
    dh: Vec<f32>,
    rows: TokenGroup,
    logits: Vec<f32>,
    chunk: usize,
    d: usize,
}

/// The settings of `StreamedCrossEntropy`.
pub(crate) struct StreamedSettings {
    /// D: elements of a hidden state.
    pub d: usize,
    /// V: rows of the head.
    pub v: usize,
    /// 0: no softcap.
    pub cap: f32,
    /// See `Options::smoothing`.
    pub smoothing: f32,
    /// Tokens whose logits are computed at a time.
    pub chunk: usize,
}

impl StreamedCrossEntropy {
    /// Takes the tokens `trained` of `h` `[N, D]`; `targets` `[N]`.
    pub(crate) fn new(h: &[f32], targets: &[u32], trained: &[usize], settings: &StreamedSettings) -> Self {
        let StreamedSettings {
            d,
            v,
            cap,
            smoothing,
            chunk,
        } = *settings;
        let chunk = chunk.min(trained.len()).max(1);
        let mut gathered = unwritten(trained.len() * d);
        for (row, n) in gathered.chunks_exact_mut(d.max(1)).zip(trained) {
            row.copy_from_slice(&h[n * d..][..d]);
        }
        let targets = trained.iter().map(|n| targets[*n]).collect();
        Self {
            h: gathered,
            dh: Vec::new(),
            rows: TokenGroup::new(targets, v, cap, smoothing),
            logits: unwritten(chunk * PIECE.min(v)),
            chunk,
            d,
        }
    }

    /// Sets a factor for the gradient of each token: `weights` `[N]`.
    pub(crate) fn weigh(&mut self, weights: Option<&[f32]>, trained: &[usize]) {
        self.rows.weights = weights_of(weights, trained);
    }

    /// Processes the rows `head` of the head from row `first` on.
    pub(crate) fn survey(&mut self, head: WeightRows<'_>, first: usize) {
        let (d, all) = (self.d, self.rows.hits.len());
        for (at, width) in pieces(head.count()) {
            let head = head.part(at, width);
            for start in (0..all).step_by(self.chunk) {
                let count = self.chunk.min(all - start);
                let logits = &mut self.logits[..count * width];
                let sizes = LogitsSizes { count, width, d };
                multiply(&self.h[start * d..][..count * d], head, sizes, logits);
                self.rows.survey(start, logits, first + at, width);
            }
        }
    }

    /// Returns the result of every trained token.
    pub(crate) fn finish(&mut self) -> Vec<TokenLoss> {
        self.rows.finish()
    }

    /// As `survey`: adds the contribution of these rows to the gradient of the hidden states.
    pub(crate) fn turn(&mut self, head: WeightRows<'_>, first: usize, scale: f32) {
        let (d, all) = (self.d, self.rows.hits.len());
        if self.dh.is_empty() {
            self.dh = unwritten(all * d);
        }
        for (at, width) in pieces(head.count()) {
            let head = head.part(at, width);
            for start in (0..all).step_by(self.chunk) {
                let count = self.chunk.min(all - start);
                let logits = &mut self.logits[..count * width];
                let sizes = LogitsSizes { count, width, d };
                multiply(&self.h[start * d..][..count * d], head, sizes, logits);
                // The softcap is applied again, as in `survey`.
                if self.rows.cap != 0.0 {
                    logits.par_chunks_mut(width).for_each(|row| {
                        row.chunks_mut(BLOCK).for_each(|part| {
                            largest(part, self.rows.cap);
                        })
                    });
                }
                self.rows.turn(start, logits, first + at, width, scale);
                let dh = &mut self.dh[start * d..][..count * d];
                back(logits, head, sizes, first + at, dh);
            }
        }
    }

    /// The gradient of the hidden states, `[trained, D]`, after `turn`.
    pub(crate) fn gradient(&self) -> &[f32] {
        &self.dh
    }
}

/// Merges the blocks of a row.
fn row(blocks: &[BlockSum], hit: TargetLogit, target: usize) -> (TokenLoss, RowExpSum) {
    let max = blocks
        .iter()
        .fold(f32::NEG_INFINITY, |m, b| if b.max > m { b.max } else { m });
    let sum: f64 = blocks.iter().map(|b| b.sum * ((b.max - max) as f64).exp()).sum();
    let before = &blocks[..target / BLOCK];
    let correct = hit.logit == max && !hit.second && before.iter().all(|b| b.max < max);
    let loss = (max as f64 - hit.logit as f64) + sum.ln();
    (TokenLoss { loss, correct }, RowExpSum { max, sum })
}

/// Caps the logits if `cap` is not 0. Returns the largest, and whether all were finite before.
#[inline(always)]
fn largest_body<const FMA: bool>(row: &mut [f32], cap: f32) -> (f32, bool) {
    // 0 x is 0 for finite x, else NaN.
    let mut odd = [0f32; LANES];
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut visit = |block: &mut [f32]| {
        for (i, x) in block.iter_mut().enumerate() {
            odd[i] = fma::<FMA>(*x, 0.0, odd[i]);
            if cap != 0.0 {
                *x = cap * tanh::<FMA>(*x / cap);
            }
            max[i] = if *x > max[i] { *x } else { max[i] };
        }
    };
    let (blocks, rest) = row.as_chunks_mut::<LANES>();
    for block in blocks {
        visit(block);
    }
    visit(rest);
    let max = max.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
    (max, sum_lanes(&odd) == 0.0)
}
vectorized!(pub(super) fn largest(row: &mut [f32], cap: f32) -> (f32, bool) = largest_body);

/// Computes the sum of `e^(x - max)`: f32 within blocks, f64 over the blocks.
#[inline(always)]
fn sum_exp_body<const FMA: bool>(row: &[f32], max: f32) -> f64 {
    let mut sum = 0f64;
    for part in row.chunks(2048) {
        let mut lanes = [0f32; LANES];
        let (blocks, rest) = part.as_chunks::<LANES>();
        for block in blocks {
            for i in 0..LANES {
                lanes[i] += exp::<FMA>(block[i] - max);
            }
        }
        for (i, x) in rest.iter().enumerate() {
            lanes[i] += exp::<FMA>(*x - max);
        }
        sum += sum_lanes(&lanes) as f64;
    }
    sum
}
vectorized!(fn sum_exp(row: &[f32], max: f32) -> f64 = sum_exp_body);

/// The sum of the logits of a block.
#[inline(always)]
fn sum_of_body<const FMA: bool>(row: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (blocks, rest) = row.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            lanes[i] += block[i];
        }
    }
    for (i, x) in rest.iter().enumerate() {
        lanes[i] += x;
    }
    sum_lanes(&lanes)
}
vectorized!(fn sum_of(row: &[f32]) -> f32 = sum_of_body);

/// Replaces logits by `factor e^(x - max) - even`, times the slope of the cap.
#[inline(always)]
fn gradient_body<const FMA: bool>(row: &mut [f32], max: f32, factor: f32, even: f32, cap: f32) {
    if cap == 0.0 {
        for x in row {
            *x = factor * exp::<FMA>(*x - max) - even;
        }
    } else {
        for x in row {
            let t = *x / cap;
            *x = (factor * exp::<FMA>(*x - max) - even) * (1.0 - t * t);
        }
    }
}
vectorized!(fn gradient(row: &mut [f32], max: f32, factor: f32, even: f32, cap: f32) = gradient_body);
