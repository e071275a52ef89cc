//! Elementwise updates and reductions on slices.

use super::math::{LANES, add_slice, dot, fma, round_to_bf16, sum_lanes, vectorized, widen_slice};
use super::storage::{StoredElements, unwritten};
use crate::Dtype;
use ft_base::rng::Rng;
use half::f16;
use rayon::prelude::*;

const CHUNK: usize = 1 << 14;

pub(crate) fn add_assign(to: &mut [f32], from: &[f32]) {
    to.par_chunks_mut(CHUNK)
        .zip(from.par_chunks(CHUNK))
        .for_each(|(to, from)| add_slice(to, from));
}

pub(crate) fn scale(t: &mut [f32], factor: f32) {
    t.par_chunks_mut(CHUNK)
        .for_each(|t| t.iter_mut().for_each(|x| *x *= factor));
}

pub(crate) fn lerp(average: &mut [f32], now: &[f32], part: f32) {
    assert!(average.len() == now.len());
    average
        .par_chunks_mut(CHUNK)
        .zip(now.par_chunks(CHUNK))
        .for_each(|(average, now)| move_to(average, now, part));
}

#[inline(always)]
fn move_to_body<const FMA: bool>(average: &mut [f32], now: &[f32], part: f32) {
    for (average, now) in average.iter_mut().zip(now) {
        let away = now - *average;
        *average = if part < 0.5 {
            *average + part * away
        } else {
            now - away * (1.0 - part)
        };
    }
}
vectorized!(fn move_to(average: &mut [f32], now: &[f32], part: f32) = move_to_body);

/// Sums of squares of `stored - after` and of `after - before`, where `stored` is `after` rounded to `dtype`.
pub(crate) fn squares_of_rounding(before: &[f32], after: &[f32], dtype: Dtype) -> [f64; 2] {
    assert!(before.len() == after.len());
    let pieces = before.par_chunks(CHUNK).zip(after.par_chunks(CHUNK));
    let sums = pieces.map(|(before, after)| match dtype {
        Dtype::F32 => differences(before, after, after),
        Dtype::Bf16 => {
            let mut stored = vec![0f32; after.len()];
            round_to_bf16(&mut stored, after);
            differences(before, after, &stored)
        }
        Dtype::F16 => {
            let stored: Vec<f32> = after.iter().map(|x| f16::from_f32(*x).to_f32()).collect();
            differences(before, after, &stored)
        }
    });
    let sums: Vec<[f64; 2]> = sums.collect();
    sums.into_iter().fold([0.0; 2], |[a, b], [x, y]| [a + x, b + y])
}

#[inline(always)]
fn differences_body<const FMA: bool>(before: &[f32], after: &[f32], stored: &[f32]) -> [f64; 2] {
    const SIDE: usize = 16;
    let (mut lost, mut change) = ([0f64; SIDE], [0f64; SIDE]);
    for ((before, after), stored) in before.chunks(SIDE).zip(after.chunks(SIDE)).zip(stored.chunks(SIDE)) {
        for (((lost, change), (b, a)), s) in lost
            .iter_mut()
            .zip(&mut change)
            .zip(before.iter().zip(after))
            .zip(stored)
        {
            let (l, c) = (f64::from(s - a), f64::from(a - b));
            *lost += l * l;
            *change += c * c;
        }
    }
    [lost.iter().sum(), change.iter().sum()]
}
vectorized!(fn differences(before: &[f32], after: &[f32], stored: &[f32]) -> [f64; 2] = differences_body);

/// Rows of `row.len()` elements.
pub(crate) fn add_rows(t: &mut [f32], row: &[f32]) {
    t.par_chunks_mut(row.len().max(1)).for_each(|t| add_slice(t, row));
}

pub(crate) fn add(a: &[f32], b: &[f32]) -> Vec<f32> {
    let mut sum = unwritten(a.len());
    sum.par_chunks_mut(CHUNK)
        .zip(a.par_chunks(CHUNK).zip(b.par_chunks(CHUNK)))
        .for_each(|(sum, (a, b))| {
            for ((sum, a), b) in sum.iter_mut().zip(a).zip(b) {
                *sum = a + b;
            }
        });
    sum
}

/// Sums the squares: f32 within chunks, f64 over the chunks, in order.
pub(crate) fn sum_squares(t: &[f32]) -> f64 {
    sum_chunks(&squares_of_chunks(t))
}

/// The sums of squares of the chunks.
pub(crate) fn squares_of_chunks(t: &[f32]) -> Vec<f32> {
    t.par_chunks(CHUNK).map(squares).collect()
}

pub(crate) fn sum_chunks(chunks: &[f32]) -> f64 {
    chunks.iter().map(|x| *x as f64).sum()
}

#[inline(always)]
fn squares_body<const FMA: bool>(t: &[f32]) -> f32 {
    dot::<FMA>(t, t)
}
vectorized!(fn squares(t: &[f32]) -> f32 = squares_body);

pub(crate) fn all_finite(t: &[f32]) -> bool {
    t.par_chunks(CHUNK).all(finite)
}

#[inline(always)]
fn finite_body<const FMA: bool>(t: &[f32]) -> bool {
    // 0 x is 0 for finite x, else NaN.
    let mut odd = [0f32; LANES];
    let (blocks, rest) = t.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            odd[i] = fma::<FMA>(block[i], 0.0, odd[i]);
        }
    }
    for (i, x) in rest.iter().enumerate() {
        odd[i] = fma::<FMA>(*x, 0.0, odd[i]);
    }
    sum_lanes(&odd) == 0.0
}
vectorized!(fn finite(t: &[f32]) -> bool = finite_body);

/// Sets an element to zero if its random number is below p, else multiplies it by `keep`.
pub(crate) fn dropout(t: &mut [f32], rng: Rng, p: f32, keep: f32) {
    t.par_chunks_mut(CHUNK).enumerate().for_each(|(c, chunk)| {
        for (i, v) in chunk.iter_mut().enumerate() {
            *v = if rng.uniform((c * CHUNK + i) as u64) < p {
                0.0
            } else {
                *v * keep
            };
        }
    });
}

pub(crate) fn to_f32_vec(v: StoredElements<'_>) -> Vec<f32> {
    match v {
        StoredElements::F32(v) => v.to_vec(),
        StoredElements::Bf16(v) => {
            let mut wide = unwritten(v.len());
            wide.par_chunks_mut(CHUNK)
                .zip(v.par_chunks(CHUNK))
                .for_each(|(wide, v)| widen_slice(wide, v));
            wide
        }
    }
}

/// Sums the rows of `a [k, n]`, in the order of the rows.
pub(crate) fn sum_rows(a: &[f32], n: usize) -> Vec<f32> {
    const COLUMNS: usize = 256;
    let mut sum = vec![0f32; n];
    sum.par_chunks_mut(COLUMNS).enumerate().for_each(|(i, sum)| {
        for row in a.chunks_exact(n) {
            add_slice(sum, &row[i * COLUMNS..][..sum.len()]);
        }
    });
    sum
}
