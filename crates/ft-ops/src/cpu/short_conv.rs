//! The short convolution on slices. `taps` is the weight as `[K, C]`; rows are `[C]`.

use super::math::{fma, sigmoid, vectorized};
use rayon::prelude::*;

/// Tokens, and channels of a weight gradient, of one task.
const TOKENS: usize = 32;
const CHANNELS: usize = 64;

/// For each token its index in its document.
fn places(documents: &[usize]) -> Vec<usize> {
    documents.windows(2).flat_map(|d| 0..d[1] - d[0]).collect()
}

#[inline(always)]
fn add_product_body<const FMA: bool>(sum: &mut [f32], a: &[f32], b: &[f32]) {
    for ((sum, a), b) in sum.iter_mut().zip(a).zip(b) {
        *sum = fma::<FMA>(*a, *b, *sum);
    }
}
vectorized!(fn add_product(sum: &mut [f32], a: &[f32], b: &[f32]) = add_product_body);

#[inline(always)]
fn silu_body<const FMA: bool>(x: &mut [f32]) {
    for x in x {
        *x *= sigmoid::<FMA>(*x);
    }
}
vectorized!(fn silu(x: &mut [f32]) = silu_body);

/// Replaces u by `dy · silu'(u)`.
#[inline(always)]
fn silu_backward_body<const FMA: bool>(u: &mut [f32], dy: &[f32]) {
    for (u, dy) in u.iter_mut().zip(dy) {
        let (s, rest) = (sigmoid::<FMA>(*u), sigmoid::<FMA>(-*u));
        *u = dy * (s + *u * s * rest);
    }
}
vectorized!(fn silu_backward(u: &mut [f32], dy: &[f32]) = silu_backward_body);

/// A token.
#[derive(Clone, Copy)]
struct PlacedToken {
    /// Index in the batch.
    t: usize,
    /// Index in its document.
    place: usize,
}

/// The sum of a token.
fn sum(x: &[f32], taps: &[f32], channels: usize, token: PlacedToken, to: &mut [f32]) {
    let PlacedToken { t, place } = token;
    let kernel = taps.len() / channels;
    to.fill(0.0);
    for (k, w) in taps
        .chunks_exact(channels)
        .enumerate()
        .skip((kernel - 1).saturating_sub(place))
    {
        let from = t + k + 1 - kernel;
        add_product(to, &x[from * channels..][..channels], w);
    }
}

/// Runs `f` with the token and its row of `to`.
fn rows(to: &mut [f32], channels: usize, documents: &[usize], f: impl Fn(PlacedToken, &mut [f32]) + Sync) {
    let places = places(documents);
    to.par_chunks_mut((TOKENS * channels).max(1))
        .enumerate()
        .for_each(|(chunk, rows)| {
            for (i, row) in rows.chunks_exact_mut(channels).enumerate() {
                let t = chunk * TOKENS + i;
                f(PlacedToken { t, place: places[t] }, row);
            }
        });
}

pub(crate) fn forward(x: &[f32], taps: &[f32], channels: usize, documents: &[usize], with_silu: bool, y: &mut [f32]) {
    rows(y, channels, documents, |token, row| {
        sum(x, taps, channels, token, row);
        if with_silu {
            silu(row);
        }
    });
}

/// The gradient of the sums before SiLU.
pub(crate) fn before_silu(x: &[f32], taps: &[f32], channels: usize, documents: &[usize], dy: &[f32], du: &mut [f32]) {
    rows(du, channels, documents, |token, row| {
        sum(x, taps, channels, token, row);
        silu_backward(row, &dy[token.t * channels..][..channels]);
    });
}

pub(crate) fn backward(du: &[f32], taps: &[f32], channels: usize, documents: &[usize], dx: &mut [f32]) {
    let kernel = taps.len() / channels.max(1);
    let ends: Vec<usize> = documents.windows(2).flat_map(|d| (d[0]..d[1]).map(|_| d[1])).collect();
    rows(dx, channels, documents, |PlacedToken { t, .. }, row| {
        row.fill(0.0);
        for later in 0..kernel.min(ends[t] - t) {
            let w = &taps[(kernel - 1 - later) * channels..][..channels];
            add_product(row, &du[(t + later) * channels..][..channels], w);
        }
    });
}

/// Returns `[C, K]`. A task sums over all tokens for its channels.
pub(crate) fn weight_gradient(x: &[f32], du: &[f32], channels: usize, kernel: usize, documents: &[usize]) -> Vec<f32> {
    let places = places(documents);
    let parts: Vec<Vec<f32>> = (0..channels.div_ceil(CHANNELS))
        .into_par_iter()
        .map(|part| {
            let first = part * CHANNELS;
            let count = CHANNELS.min(channels - first);
            let mut sums = vec![0f32; kernel * count];
            for (t, &place) in places.iter().enumerate() {
                for earlier in 0..kernel.min(place + 1) {
                    let sum = &mut sums[(kernel - 1 - earlier) * count..][..count];
                    let x = &x[(t - earlier) * channels + first..][..count];
                    add_product(sum, &du[t * channels + first..][..count], x);
                }
            }
            (0..count)
                .flat_map(|c| (0..kernel).map(move |k| (k, c)))
                .map(|(k, c)| sums[k * count + c])
                .collect()
        })
        .collect();
    parts.concat()
}
