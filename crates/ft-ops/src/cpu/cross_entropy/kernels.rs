//! Passes over the logits of a block.

use crate::cpu::math::{LANES, exp, fma, sum, sum_lanes, tanh, vectorized};

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
vectorized!(pub(in crate::cpu) fn largest(row: &mut [f32], cap: f32) -> (f32, bool) = largest_body);

/// Computes the sum of `e^(x - max)` over a block.
#[inline(always)]
fn sum_exp_body<const FMA: bool>(row: &[f32], max: f32) -> f64 {
    let mut lanes = [0f32; LANES];
    let (blocks, rest) = row.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            lanes[i] += exp::<FMA>(block[i] - max);
        }
    }
    for (i, x) in rest.iter().enumerate() {
        lanes[i] += exp::<FMA>(*x - max);
    }
    sum_lanes(&lanes) as f64
}
vectorized!(pub(super) fn sum_exp(row: &[f32], max: f32) -> f64 = sum_exp_body);

/// Computes the sums of `e^(x - max)` and of `(x - max) e^(x - max)`.
#[inline(always)]
fn entropy_sums_body<const FMA: bool>(row: &[f32], max: f32) -> (f64, f64) {
    let (mut sums, mut products) = ([0f32; LANES], [0f32; LANES]);
    let mut visit = |block: &[f32]| {
        for (i, x) in block.iter().enumerate() {
            let x = *x - max;
            let e = exp::<FMA>(x);
            sums[i] += e;
            products[i] = fma::<FMA>(x, e, products[i]);
        }
    };
    let (blocks, rest) = row.as_chunks::<LANES>();
    for block in blocks {
        visit(block);
    }
    visit(rest);
    (sum_lanes(&sums) as f64, sum_lanes(&products) as f64)
}
vectorized!(pub(super) fn entropy_sums(row: &[f32], max: f32) -> (f64, f64) = entropy_sums_body);

vectorized!(pub(super) fn sum_of(row: &[f32]) -> f32 = sum);

/// As `sum_exp`, and replaces the logits by `factor e^(x - max)`, times the slope of the cap.
#[inline(always)]
fn replace_by_exp_body<const FMA: bool>(row: &mut [f32], max: f32, factor: f32, cap: f32) -> f64 {
    let mut lanes = [0f32; LANES];
    let mut visit = |block: &mut [f32]| {
        for (i, x) in block.iter_mut().enumerate() {
            let e = exp::<FMA>(*x - max);
            lanes[i] += e;
            *x = if cap == 0.0 {
                factor * e
            } else {
                factor * e * slope(*x, cap)
            };
        }
    };
    let (blocks, rest) = row.as_chunks_mut::<LANES>();
    for block in blocks {
        visit(block);
    }
    visit(rest);
    sum_lanes(&lanes) as f64
}
vectorized!(pub(super) fn replace_by_exp(row: &mut [f32], max: f32, factor: f32, cap: f32) -> f64 = replace_by_exp_body);

/// The derivative of the cap at the capped logit `x`; `cap` is not 0.
#[inline(always)]
pub(super) fn slope(x: f32, cap: f32) -> f32 {
    let t = x / cap;
    1.0 - t * t
}

/// Writes the slope of the cap at each capped logit.
#[inline(always)]
fn slopes_body<const FMA: bool>(to: &mut [f32], row: &[f32], cap: f32) {
    for (to, x) in to.iter_mut().zip(row) {
        *to = slope(*x, cap);
    }
}
vectorized!(pub(super) fn slopes(to: &mut [f32], row: &[f32], cap: f32) = slopes_body);
