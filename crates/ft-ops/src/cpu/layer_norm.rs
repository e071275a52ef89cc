//! LayerNorm on slices.

use super::math::{dot, fma, sum, vectorized};
use rayon::prelude::*;

/// Approximate number of elements of one task in the forward pass.
const ELEMENTS: usize = 1 << 14;
/// The gradients of weight and bias are summed in at most this many parts.
const PARTS: usize = 64;

/// The parameters of a norm, widened: row r of `size` elements uses the elements of row `r % (scale.len() / size)`.
pub(crate) struct NormParams {
    pub(crate) size: usize,
    pub(crate) scale: Vec<f32>,
    pub(crate) shift: Vec<f32>,
    pub(crate) eps: f32,
}

/// x and y are rows of `scale.len()` elements.
pub(crate) fn forward(x: &[f32], norm: &NormParams, y: &mut [f32]) {
    let width = norm.scale.len();
    let chunk = (ELEMENTS / width).max(1) * width;
    y.par_chunks_mut(chunk)
        .zip(x.par_chunks(chunk))
        .for_each(|(y, x)| forward_rows(x, norm, y));
}

/// Writes (x - mean) / sqrt(variance + eps) to `out`; returns the factor.
#[inline(always)]
fn normalize<const FMA: bool>(x: &[f32], eps: f32, out: &mut [f32]) -> f32 {
    let mean = sum::<FMA>(x) / x.len() as f32;
    for (out, x) in out.iter_mut().zip(x) {
        *out = x - mean;
    }
    let r = 1.0 / (dot::<FMA>(out, out) / x.len() as f32 + eps).sqrt();
    out.iter_mut().for_each(|out| *out *= r);
    r
}

#[inline(always)]
fn forward_body<const FMA: bool>(x: &[f32], norm: &NormParams, y: &mut [f32]) {
    let rows = y.chunks_exact_mut(norm.size).zip(x.chunks_exact(norm.size));
    let affine = norm
        .scale
        .chunks_exact(norm.size)
        .zip(norm.shift.chunks_exact(norm.size));
    for ((y, x), (scale, shift)) in rows.zip(affine.cycle()) {
        normalize::<FMA>(x, norm.eps, y);
        for ((y, w), b) in y.iter_mut().zip(scale).zip(shift) {
            *y = fma::<FMA>(*y, *w, *b);
        }
    }
}
vectorized!(fn forward_rows(x: &[f32], norm: &NormParams, y: &mut [f32]) = forward_body);

/// Fills dx. Returns dw and db if needed, summed over fixed parts of the rows, then over the parts in order.
pub(crate) fn backward(
    x: &[f32],
    norm: &NormParams,
    dy: &[f32],
    need: [bool; 2],
    dx: &mut [f32],
) -> [Option<Vec<f32>>; 2] {
    let width = norm.scale.len();
    let rows = x.len() / width;
    let chunk = rows.div_ceil(PARTS).max((ELEMENTS / width).max(1)) * width;
    let empty = |need: bool| vec![0f32; if need { width } else { 0 }];
    let parts: Vec<[Vec<f32>; 2]> = dx
        .par_chunks_mut(chunk)
        .zip(x.par_chunks(chunk))
        .zip(dy.par_chunks(chunk))
        .map(|((dx, x), dy)| {
            let [mut dw, mut db] = need.map(empty);
            backward_rows(x, norm, dy, dx, &mut dw, &mut db);
            [dw, db]
        })
        .collect();
    [0, 1].map(|which| {
        need[which].then(|| {
            let mut total = vec![0f32; width];
            for part in &parts {
                super::math::add_slice(&mut total, &part[which]);
            }
            total
        })
    })
}

/// With n the normalized x and g = dy ⊙ w: dx = r (g - mean(g) - n mean(g ⊙ n)).
#[inline(always)]
fn backward_body<const FMA: bool>(
    x: &[f32],
    norm: &NormParams,
    dy: &[f32],
    dx: &mut [f32],
    dw: &mut [f32],
    db: &mut [f32],
) {
    let (size, width) = (norm.size, norm.scale.len());
    let mut normalized = vec![0f32; size];
    let rows = dx
        .chunks_exact_mut(size)
        .zip(x.chunks_exact(size))
        .zip(dy.chunks_exact(size));
    for (row, ((dx, x), dy)) in rows.enumerate() {
        let at = row * size % width;
        let r = normalize::<FMA>(x, norm.eps, &mut normalized);
        for ((dx, dy), w) in dx.iter_mut().zip(dy).zip(&norm.scale[at..at + size]) {
            *dx = dy * w;
        }
        let mean = sum::<FMA>(dx) / size as f32;
        let pull = dot::<FMA>(dx, &normalized) / size as f32;
        for (dx, n) in dx.iter_mut().zip(&normalized) {
            *dx = r * fma::<FMA>(-n, pull, *dx - mean);
        }
        if !dw.is_empty() {
            for ((dw, n), dy) in dw[at..at + size].iter_mut().zip(&normalized).zip(dy) {
                *dw = fma::<FMA>(*dy, *n, *dw);
            }
        }
        if !db.is_empty() {
            for (db, dy) in db[at..at + size].iter_mut().zip(dy) {
                *db += dy;
            }
        }
    }
}
vectorized!(
    fn backward_rows(
        x: &[f32],
        norm: &NormParams,
        dy: &[f32],
        dx: &mut [f32],
        dw: &mut [f32],
        db: &mut [f32],
    ) = backward_body
);
