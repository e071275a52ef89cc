//! Cross-entropy on slices. The vocabulary is cut into pieces, both for a head that is in memory as a whole and for
//! a streamed head: both compute the same products and the same sums, so their results are bit-equal.
//!
//! The sum of the exponentials of a row is computed block by block, each with its own maximum, and merged at the end, in a fixed order.

mod entropies;
mod head_gradient;
mod kernels;
mod losses;
mod pass;

pub(crate) use entropies::EntropySums;
pub(crate) use head_gradient::HeadGradient;
pub(super) use kernels::largest;
pub(super) use losses::TargetLogit;
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

/// The output gradients.
pub(crate) struct CrossEntropyGradients {
    pub scale: f32,
    /// `[N, D]`, initially zero.
    pub dh: Option<Vec<f32>>,
    /// `[V, D]`, with arbitrary initial contents.
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
    gradients: Option<&mut CrossEntropyGradients>,
    each: &mut impl FnMut(usize, &TokenLoss),
) {
    let (d, v) = job.sizes;
    let (scale, mut dh, dw) = match gradients {
        Some(g) => (g.scale, g.dh.as_deref_mut(), g.dw.as_deref_mut()),
        None => (0.0, None, None),
    };
    let mut dw = dw.map(|dw| HeadGradient {
        dw,
        d,
        rounding: job.head.rounding(),
        initialized: false,
    });
    let settings = PassSettings {
        d,
        v,
        cap: job.cap,
        smoothing: job.smoothing,
        chunk,
        scale,
        weights: job.weights,
        need_dh: dh.is_some(),
        trained_head: dw.as_ref().map(|dw| dw.rounding),
    };
    for tokens in trained.chunks(chunk.max(1)) {
        let mut pass = VocabularyPass::new(job.h, job.targets, tokens, &settings);
        pass.add(job.head, 0, dw.as_mut());
        let (rows, of_tokens) = pass.finish(dw.as_mut());
        for (n, row) in tokens.iter().zip(&rows) {
            each(*n, row);
        }
        if let Some(to) = &mut dh {
            for (row, n) in of_tokens.chunks_exact(d.max(1)).zip(tokens) {
                to[n * d..][..d].copy_from_slice(row);
            }
        }
    }
    if let Some(HeadGradient {
        dw, initialized: false, ..
    }) = dw
    {
        dw.fill(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The memory of the gradient has arbitrary contents: none of them may be left.
    #[test]
    fn the_gradient_of_the_head_is_overwritten_as_a_whole() {
        let (n, d, v) = (5, 3, PIECE + 7);
        let h: Vec<f32> = (0..n * d).map(|i| (i as f32 * 0.7).sin()).collect();
        let head: Vec<f32> = (0..v * d).map(|i| (i as f32 * 0.3).cos()).collect();
        let targets = [0, 9, PIECE as u32 + 2, 9, 1];
        for (cap, smoothing) in [(0.0, 0.0), (0.0, 0.1), (4.0, 0.0), (4.0, 0.1)] {
            for (trained, chunk) in [(0, 8), (5, 8), (5, 2)] {
                let trained: Vec<usize> = (0..trained).collect();
                let job = CrossEntropyJob {
                    h: &h,
                    head: WeightRows::new(&head[..], d),
                    targets: &targets,
                    weights: None,
                    sizes: (d, v),
                    cap,
                    smoothing,
                };
                let gradient = |start: f32| {
                    let mut gradients = CrossEntropyGradients {
                        scale: 1.0,
                        dh: None,
                        dw: Some(vec![start; v * d]),
                    };
                    run(&job, &trained, chunk, Some(&mut gradients), &mut |_, _| {});
                    gradients.dw.unwrap()
                };
                let found = gradient(f32::NAN);
                assert!(found.iter().all(|x| x.is_finite()), "{cap} {smoothing} {chunk}");
                assert_eq!(found, gradient(0.0));
            }
        }
    }
}
