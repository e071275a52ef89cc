//! Cross-entropy on slices, a chunk of trained tokens at a time.

use super::math::{LANES, exp, fma, sum_lanes, tanh, vectorized};
use super::product::{Matrix, Start, product};
use super::storage::{Values, unwritten};
use rayon::prelude::*;

/// What is read. `sizes` are (D, V); `cap` 0 means none.
pub(crate) struct Job<'a> {
    pub h: &'a [f32],
    pub head: Values<'a>,
    pub targets: &'a [u32],
    pub sizes: (usize, usize),
    pub cap: f32,
}

/// Where gradients go; zero at first.
pub(crate) struct Gradients {
    pub scale: f32,
    pub dh: Option<Vec<f32>>,
    pub dw: Option<Vec<f32>>,
}

/// The result of one token.
pub(crate) struct Row {
    pub loss: f64,
    pub correct: bool,
}

/// `trained` are the rows of h that have a target; `each` gets them in order.
pub(crate) fn run(
    job: &Job<'_>,
    trained: &[usize],
    chunk: usize,
    mut gradients: Option<&mut Gradients>,
    each: &mut impl FnMut(usize, &Row),
) {
    let (d, v) = job.sizes;
    let chunk = chunk.min(trained.len());
    if chunk == 0 {
        return;
    }
    let mut logits = unwritten(chunk * v);
    let mut gathered = unwritten(chunk * d);
    let scale = gradients.as_ref().map(|g| g.scale);
    for tokens in trained.chunks(chunk) {
        let count = tokens.len();
        let (logits, gathered) = (&mut logits[..count * v], &mut gathered[..count * d]);
        for (row, n) in gathered.chunks_exact_mut(d).zip(tokens) {
            row.copy_from_slice(&job.h[n * d..][..d]);
        }
        let rounding = job.head.rounding();
        product(
            (count, v, d),
            logits,
            Start::Zero,
            Matrix::vectors(Values::F32(gathered), d),
            Matrix::vectors(job.head, d),
            rounding,
        );
        let rows: Vec<Row> = logits
            .par_chunks_mut(v)
            .zip(tokens)
            .map(|(logits, n)| row(logits, job.targets[*n] as usize, job.cap, scale))
            .collect();
        for (n, row) in tokens.iter().zip(&rows) {
            each(*n, row);
        }
        let Some(gradients) = gradients.as_deref_mut() else {
            continue;
        };
        if let Some(dw) = &mut gradients.dw {
            let (dlogits, h) = (Values::F32(logits), Values::F32(gathered));
            product(
                (v, d, count),
                dw,
                Start::C,
                Matrix::steps(dlogits, v),
                Matrix::steps(h, d),
                rounding,
            );
        }
        if let Some(dh) = &mut gradients.dh {
            // The gathered rows are not needed any more.
            let dlogits = Matrix::vectors(Values::F32(logits), v);
            product(
                (count, d, v),
                gathered,
                Start::Zero,
                dlogits,
                Matrix::steps(job.head, d),
                rounding,
            );
            for (row, n) in gathered.chunks_exact(d).zip(tokens) {
                dh[n * d..][..d].copy_from_slice(row);
            }
        }
    }
}

/// Loss of one row; with a scale the logits become their gradients.
fn row(logits: &mut [f32], target: usize, cap: f32, scale: Option<f32>) -> Row {
    let (max, all_finite) = largest(logits, cap);
    let sum = sum_exp(logits, max);
    let loss = if all_finite {
        (max as f64 - logits[target] as f64) + sum.ln()
    } else {
        f64::NAN
    };
    let correct = logits[target] == max && !logits[..target].contains(&max);
    if let Some(scale) = scale {
        let slope = if cap == 0.0 {
            1.0
        } else {
            1.0 - (logits[target] / cap) * (logits[target] / cap)
        };
        gradient(logits, max, scale / sum as f32, cap);
        logits[target] -= scale * slope;
    }
    Row { loss, correct }
}

/// Caps the logits if `cap` is not 0; gives the largest, and whether all were finite before.
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
    (max, sum_lanes(odd) == 0.0)
}
vectorized!(fn largest(row: &mut [f32], cap: f32) -> (f32, bool) = largest_body);

/// Sum of `e^(x - max)`: f32 within blocks, f64 over the blocks.
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
        sum += sum_lanes(lanes) as f64;
    }
    sum
}
vectorized!(fn sum_exp(row: &[f32], max: f32) -> f64 = sum_exp_body);

/// Logits become `factor e^(x - max)`, times the slope of the cap.
#[inline(always)]
fn gradient_body<const FMA: bool>(row: &mut [f32], max: f32, factor: f32, cap: f32) {
    if cap == 0.0 {
        for x in row {
            *x = factor * exp::<FMA>(*x - max);
        }
    } else {
        for x in row {
            let t = *x / cap;
            *x = factor * exp::<FMA>(*x - max) * (1.0 - t * t);
        }
    }
}
vectorized!(fn gradient(row: &mut [f32], max: f32, factor: f32, cap: f32) = gradient_body);
