//! Cross-entropy on slices. The vocabulary is cut into pieces, both for a head that is in memory as a whole and for
//! a streamed head: both compute the same products and the same sums, so their results are bit-equal.
//!
//! The sum of the exponentials of a row is computed block by block, each with its own maximum, and merged at the end, in a fixed order.

mod entropies;
mod kernels;
mod losses;
mod pass;

pub(crate) use entropies::EntropySums;
pub(super) use kernels::largest;
pub(crate) use losses::TokenLoss;
pub(crate) use pass::{PassSettings, VocabularyPass};

use super::product::{CInit, Matrix, WeightRows, product};
use super::storage::{StoredElements, unwritten};

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
    /// See `CrossEntropyOptions::smoothing`.
    pub smoothing: f32,
}

/// The output gradients, initially zero.
pub(crate) struct CrossEntropyGradients {
    pub scale: f32,
    pub dh: Option<Vec<f32>>,
    pub dw: Option<Vec<f32>>,
}

/// Returns the position of a target in a piece; None if it is in another piece.
pub(super) fn inside(target: u32, first: usize, width: usize) -> Option<usize> {
    (target as usize).checked_sub(first).filter(|at| *at < width)
}

/// Returns the first row and the number of rows of each piece.
pub(super) fn pieces(v: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..v).step_by(PIECE).map(move |first| (first, PIECE.min(v - first)))
}

/// Returns the rows `tokens` of `h` `[N, D]`.
pub(super) fn gather(h: &[f32], tokens: &[usize], d: usize) -> Vec<f32> {
    let mut gathered = unwritten(tokens.len() * d);
    for (row, n) in gathered.chunks_exact_mut(d.max(1)).zip(tokens) {
        row.copy_from_slice(&h[n * d..][..d]);
    }
    gathered
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
    let needs = |f: fn(&CrossEntropyGradients) -> bool| gradients.as_deref().is_some_and(f);
    let settings = PassSettings {
        d,
        v,
        cap: job.cap,
        smoothing: job.smoothing,
        chunk,
        weights: job.weights,
        need_dh: needs(|g| g.dh.is_some()),
        need_dw: needs(|g| g.dw.is_some()),
    };
    for tokens in trained.chunks(chunk.max(1)) {
        let mut pass = VocabularyPass::new(job.h, job.targets, tokens, &settings);
        pass.add(job.head, 0);
        let scale = gradients.as_deref().map_or(0.0, |g| g.scale);
        let dw = gradients.as_deref_mut().and_then(|g| g.dw.as_deref_mut());
        let (rows, dh) = pass.finish(scale, dw.map(|dw| (dw, job.head.rounding())));
        for (n, row) in tokens.iter().zip(&rows) {
            each(*n, row);
        }
        if let Some(to) = gradients.as_deref_mut().and_then(|g| g.dh.as_mut()) {
            for (row, n) in dh.chunks_exact(d.max(1)).zip(tokens) {
                to[n * d..][..d].copy_from_slice(row);
            }
        }
    }
}
