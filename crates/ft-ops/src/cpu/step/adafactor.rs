//! Adafactor (Shazeer & Stern 2018, arXiv 1804.04235, algorithms 4 and 5): the second moment of a matrix `[R, C]`
//! is stored as its row means `[R]` and column means `[C]`. Follows the arithmetic of transformers' `Adafactor`
//! with `scale_parameter = False, relative_step = False`, no first moment, decay rate -0.8, clipping at 1.

use super::super::math::{dot, vectorized};
use rayon::prelude::*;

/// Added to the square of each gradient.
const EPS: f32 = 1e-30;
/// Upper bound of the root mean square of an update.
const THRESHOLD: f64 = 1.0;
/// Columns summed by one task.
const STRIPE: usize = 256;
const CHUNK: usize = 1 << 14;

/// The update, after the second moment is known: `w = w·keep - u·size`, element by element.
pub(crate) struct AdafactorUpdate {
    pub(crate) keep: f32,
    pub(crate) size: f32,
    /// `u = g · rows[r] · columns[c]`; a vector has a single row.
    pub(crate) rows: Vec<f32>,
    pub(crate) columns: Vec<f32>,
}

fn beta2(step: u64) -> f64 {
    1.0 - (step as f64).powf(-0.8)
}

fn direction(
    lr: f64,
    decay: f64,
    coefficient: f32,
    squares: f64,
    n: usize,
    rows: Vec<f32>,
    columns: Vec<f32>,
) -> AdafactorUpdate {
    let rms = (squares / n.max(1) as f64).sqrt();
    let size = lr / (rms / THRESHOLD).max(1.0);
    AdafactorUpdate {
        keep: (1.0 - decay * lr) as f32,
        size: (size * coefficient as f64) as f32,
        rows,
        columns,
    }
}

/// Updates `row` `[R]` and `column` `[C]` with the gradient `g` `[R, C]`.
pub(crate) fn matrix(
    g: &[f32],
    row: &mut [f32],
    column: &mut [f32],
    lr: f64,
    decay: f64,
    step: u64,
    coefficient: f32,
) -> AdafactorUpdate {
    let (r, c) = (row.len(), column.len());
    let b2 = beta2(step);
    let (keep, take) = (b2 as f32, (1.0 - b2) as f32);
    row.par_iter_mut().zip(g.par_chunks(c)).for_each(|(mean, g)| {
        let now = squares(g, coefficient) / c as f32 + EPS;
        *mean = *mean * keep + now * take;
    });
    column.par_chunks_mut(STRIPE).enumerate().for_each(|(i, means)| {
        let mut sums = [0f32; STRIPE];
        let width = means.len();
        for g in g.chunks_exact(c) {
            add_squares(&mut sums[..width], &g[i * STRIPE..][..width], coefficient);
        }
        for (mean, sum) in means.iter_mut().zip(sums) {
            *mean = *mean * keep + (sum / r as f32 + EPS) * take;
        }
    });
    let mean = row.iter().map(|x| *x as f64).sum::<f64>() / r as f64;
    let rows: Vec<f32> = row.iter().map(|x| 1.0 / (x / mean as f32).sqrt()).collect();
    let columns: Vec<f32> = column.iter().map(|x| 1.0 / x.sqrt()).collect();
    let parts: Vec<f32> = g
        .par_chunks(c)
        .zip(&rows)
        .map(|(g, row)| scaled_squares(g, &columns, row * coefficient))
        .collect();
    let total = parts.iter().map(|x| *x as f64).sum();
    direction(lr, decay, coefficient, total, g.len(), rows, columns)
}

/// Updates the full second moment `v` of a vector.
pub(crate) fn vector(g: &[f32], v: &mut [f32], lr: f64, decay: f64, step: u64, coefficient: f32) -> AdafactorUpdate {
    let b2 = beta2(step);
    let (keep, take) = (b2 as f32, (1.0 - b2) as f32);
    let parts: Vec<f32> = v
        .par_chunks_mut(CHUNK)
        .zip(g.par_chunks(CHUNK))
        .map(|(v, g)| {
            let mut sum = 0.0;
            for (v, g) in v.iter_mut().zip(g) {
                let g = g * coefficient;
                *v = *v * keep + (g * g + EPS) * take;
                sum += g * g / *v;
            }
            sum
        })
        .collect();
    let total = parts.iter().map(|x| *x as f64).sum();
    let columns = v.iter().map(|x| 1.0 / x.sqrt()).collect();
    direction(lr, decay, coefficient, total, g.len(), vec![1.0], columns)
}

/// Applies a direction to the elements of `w`, whose first has index `first` in the parameter.
pub(crate) fn apply(d: &AdafactorUpdate, first: usize, w: &mut [f32], g: &[f32]) {
    let c = d.columns.len();
    let mut at = 0;
    while at < w.len() {
        let (r, from) = ((first + at) / c, (first + at) % c);
        let n = (c - from).min(w.len() - at);
        part(
            d.keep,
            d.size,
            d.rows[r],
            &d.columns[from..from + n],
            &mut w[at..at + n],
            &g[at..at + n],
        );
        at += n;
    }
}

#[inline(always)]
fn part_body<const FMA: bool>(keep: f32, size: f32, row: f32, columns: &[f32], w: &mut [f32], g: &[f32]) {
    for ((w, g), column) in w.iter_mut().zip(g).zip(columns) {
        *w = *w * keep - (row * column) * g * size;
    }
}
vectorized!(fn part(keep: f32, size: f32, row: f32, columns: &[f32], w: &mut [f32], g: &[f32]) = part_body);

#[inline(always)]
fn squares_body<const FMA: bool>(g: &[f32], factor: f32) -> f32 {
    dot::<FMA>(g, g) * (factor * factor)
}
vectorized!(fn squares(g: &[f32], factor: f32) -> f32 = squares_body);

#[inline(always)]
fn add_squares_body<const FMA: bool>(sums: &mut [f32], g: &[f32], factor: f32) {
    for (sum, g) in sums.iter_mut().zip(g) {
        let g = g * factor;
        *sum += g * g;
    }
}
vectorized!(fn add_squares(sums: &mut [f32], g: &[f32], factor: f32) = add_squares_body);

#[inline(always)]
fn scaled_squares_body<const FMA: bool>(g: &[f32], columns: &[f32], row: f32) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0f32; LANES];
    for (g, c) in g.chunks(LANES).zip(columns.chunks(LANES)) {
        for (lane, (g, c)) in lanes.iter_mut().zip(g.iter().zip(c)) {
            let u = g * c;
            *lane += u * u;
        }
    }
    lanes.iter().sum::<f32>() * (row * row)
}
vectorized!(fn scaled_squares(g: &[f32], columns: &[f32], row: f32) -> f32 = scaled_squares_body);
