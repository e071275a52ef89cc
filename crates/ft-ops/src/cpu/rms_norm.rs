//! RMSNorm on slices.

use super::math::{LANES, dot, fma, padded, sum_lanes, vectorized};
use rayon::prelude::*;

/// Approximate number of elements of one task in the forward pass.
const ELEMENTS: usize = 1 << 14;
/// The weight gradient is summed in at most this many parts.
const PARTS: usize = 64;

/// x and y are rows of `scale.len()` elements.
pub(crate) fn forward(x: &[f32], scale: &[f32], eps: f32, y: &mut [f32]) {
    let size = scale.len();
    let chunk = (ELEMENTS / size).max(1) * size;
    y.par_chunks_mut(chunk)
        .zip(x.par_chunks(chunk))
        .for_each(|(y, x)| forward_rows(x, scale, eps, y));
}

#[inline(always)]
fn inverse_rms<const FMA: bool>(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot::<FMA>(x, x) / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
fn forward_body<const FMA: bool>(x: &[f32], scale: &[f32], eps: f32, y: &mut [f32]) {
    let size = scale.len();
    for (y, x) in y.chunks_exact_mut(size).zip(x.chunks_exact(size)) {
        let r = inverse_rms::<FMA>(x, eps);
        for ((y, x), w) in y.iter_mut().zip(x).zip(scale) {
            *y = x * r * w;
        }
    }
}
vectorized!(fn forward_rows(x: &[f32], scale: &[f32], eps: f32, y: &mut [f32]) = forward_body);

/// Fills dx. Returns dw if needed, summed over fixed parts of the rows, then over the parts in order.
pub(crate) fn backward(
    x: &[f32],
    scale: &[f32],
    dy: &[f32],
    eps: f32,
    need_dw: bool,
    dx: &mut [f32],
) -> Option<Vec<f32>> {
    let size = scale.len();
    let rows = x.len() / size;
    let chunk = rows.div_ceil(PARTS).max((ELEMENTS / size).max(1)) * size;
    let parts: Vec<Vec<f32>> = dx
        .par_chunks_mut(chunk)
        .zip(x.par_chunks(chunk))
        .zip(dy.par_chunks(chunk))
        .map(|((dx, x), dy)| {
            let mut dw = vec![0f32; if need_dw { size } else { 0 }];
            backward_rows(x, scale, dy, eps, dx, &mut dw);
            dw
        })
        .collect();
    need_dw.then(|| {
        let mut dw = vec![0f32; size];
        for part in &parts {
            super::math::add_slice(&mut dw, part);
        }
        dw
    })
}

#[inline(always)]
fn dot3<const FMA: bool>(a: &[f32], b: &[f32], c: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    let (c_blocks, c_rest) = c.as_chunks::<LANES>();
    for ((a, b), c) in a_blocks.iter().zip(b_blocks).zip(c_blocks) {
        for i in 0..LANES {
            lanes[i] = fma::<FMA>(a[i] * b[i], c[i], lanes[i]);
        }
    }
    if !a_rest.is_empty() {
        let (a, b, c) = (padded(a_rest), padded(b_rest), padded(c_rest));
        for i in 0..LANES {
            lanes[i] = fma::<FMA>(a[i] * b[i], c[i], lanes[i]);
        }
    }
    sum_lanes(&lanes)
}

#[inline(always)]
fn backward_body<const FMA: bool>(x: &[f32], scale: &[f32], dy: &[f32], eps: f32, dx: &mut [f32], dw: &mut [f32]) {
    let size = scale.len();
    let rows = dx
        .chunks_exact_mut(size)
        .zip(x.chunks_exact(size))
        .zip(dy.chunks_exact(size));
    for ((dx, x), dy) in rows {
        let r = inverse_rms::<FMA>(x, eps);
        let pull = dot3::<FMA>(dy, scale, x) / size as f32 * r * r * r;
        for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(scale) {
            *dx = dy * w * r - x * pull;
        }
        // Empty if dw is not needed.
        for ((dw, x), dy) in dw.iter_mut().zip(x).zip(dy) {
            *dw = fma::<FMA>(*dy, x * r, *dw);
        }
    }
}
vectorized!(
    fn backward_rows(
        x: &[f32],
        scale: &[f32],
        dy: &[f32],
        eps: f32,
        dx: &mut [f32],
        dw: &mut [f32],
    ) = backward_body
);
