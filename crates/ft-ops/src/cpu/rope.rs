//! Rotary position embeddings on slices.

use super::math::{fma, vectorized};
use crate::rope::RopePairing;
use rayon::prelude::*;

/// Tokens per task.
const TOKENS: usize = 32;

/// Elements of a row of x.
#[derive(Clone, Copy)]
pub(crate) struct RotationSizes {
    /// All heads.
    pub width: usize,
    /// One head.
    pub head: usize,
    /// Half of the elements of a head that are rotated.
    pub half: usize,
}

/// Rotates x to y, both `[N, width]`, heads of `head` elements; cos and sin `[N, half]`. `sign` -1 applies the
/// transpose.
pub(crate) fn apply(
    x: &[f32],
    cos: &[f32],
    sin: &[f32],
    sign: f32,
    sizes: RotationSizes,
    pairing: RopePairing,
    y: &mut [f32],
) {
    let RotationSizes { width, head, half } = sizes;
    if y.is_empty() {
        return;
    }
    if half == 0 {
        return y.copy_from_slice(x);
    }
    y.par_chunks_mut(TOKENS * width)
        .zip(x.par_chunks(TOKENS * width))
        .zip(cos.par_chunks(TOKENS * half).zip(sin.par_chunks(TOKENS * half)))
        .for_each(|((y, x), (cos, sin))| {
            let tokens = y.chunks_exact_mut(width).zip(x.chunks_exact(width));
            let angles = cos.chunks_exact(half).zip(sin.chunks_exact(half));
            for ((y, x), (cos, sin)) in tokens.zip(angles) {
                match pairing {
                    RopePairing::Halves => rotate(x, cos, sin, sign, head, y),
                    RopePairing::Neighbors => rotate_neighbors(x, cos, sin, sign, head, y),
                }
            }
        });
}

#[inline(always)]
fn rotate_body<const FMA: bool>(x: &[f32], cos: &[f32], sin: &[f32], sign: f32, head: usize, y: &mut [f32]) {
    let half = cos.len();
    for (y, x) in y.chunks_exact_mut(head).zip(x.chunks_exact(head)) {
        let (a, rest) = x.split_at(half);
        let (b, rest) = rest.split_at(half);
        let (ya, y) = y.split_at_mut(half);
        let (yb, y) = y.split_at_mut(half);
        for i in 0..half {
            let s = sin[i] * sign;
            ya[i] = fma::<FMA>(-b[i], s, a[i] * cos[i]);
            yb[i] = fma::<FMA>(a[i], s, b[i] * cos[i]);
        }
        y.copy_from_slice(rest);
    }
}
vectorized!(
    fn rotate(x: &[f32], cos: &[f32], sin: &[f32], sign: f32, head: usize, y: &mut [f32]) = rotate_body
);

#[inline(always)]
fn rotate_neighbors_body<const FMA: bool>(x: &[f32], cos: &[f32], sin: &[f32], sign: f32, head: usize, y: &mut [f32]) {
    for (y, x) in y.chunks_exact_mut(head).zip(x.chunks_exact(head)) {
        let (x, rest) = x.split_at(2 * cos.len());
        let (y, copied) = y.split_at_mut(2 * cos.len());
        let pairs = y.as_chunks_mut::<2>().0.iter_mut().zip(x.as_chunks::<2>().0);
        for ((y, [a, b]), (cos, sin)) in pairs.zip(cos.iter().zip(sin)) {
            let s = sin * sign;
            *y = [fma::<FMA>(-b, s, a * cos), fma::<FMA>(*a, s, b * cos)];
        }
        copied.copy_from_slice(rest);
    }
}
vectorized!(
    fn rotate_neighbors(x: &[f32], cos: &[f32], sin: &[f32], sign: f32, head: usize, y: &mut [f32]) = rotate_neighbors_body
);
