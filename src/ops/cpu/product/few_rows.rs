//! A few rows times a weight, e.g. one decoded token: every element of the weight is read once, nothing is packed.

use super::super::Shared;
use super::super::math::{dot, dot_bf16, vectorized};
use super::super::storage::Values;
use super::{Job, Start};
use half::bf16;
use rayon::prelude::*;

const ROWS: usize = 4;
/// Columns of a task.
const BLOCK: usize = 32;

pub(super) fn fits(job: &Job) -> bool {
    let f32_rows = job.a.along_k && matches!(job.a.values, Values::F32(_));
    job.sizes.0 <= ROWS && f32_rows && job.b.along_k && !matches!(job.start, Start::C)
}

pub(super) fn run(job: &Job) {
    let (m, n, k) = job.sizes;
    let Values::F32(a) = job.a.values else { return };
    let c: Shared = job.c;
    (0..n.div_ceil(BLOCK)).into_par_iter().for_each(|block| {
        let first = block * BLOCK;
        for row in 0..m {
            let a = &a[row * job.a.stride..][..k];
            // SAFETY: this row's part of this task's own columns.
            let out = unsafe { c.part(row * n + first, BLOCK.min(n - first)) };
            match job.b.values {
                Values::F32(b) => dots(out, a, &b[first * job.b.stride..], job.b.stride),
                Values::Bf16(b) => dots_bf16(out, a, &b[first * job.b.stride..], job.b.stride),
            }
            if let Start::Bias(bias) = job.start {
                out.iter_mut().zip(&bias[first..]).for_each(|(o, b)| *o += b);
            }
        }
    });
}

#[inline(always)]
fn dots_body<const FMA: bool>(out: &mut [f32], a: &[f32], b: &[f32], stride: usize) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = dot::<FMA>(a, &b[i * stride..][..a.len()]);
    }
}
vectorized!(fn dots(out: &mut [f32], a: &[f32], b: &[f32], stride: usize) = dots_body);

#[inline(always)]
fn dots_bf16_body<const FMA: bool>(out: &mut [f32], a: &[f32], b: &[bf16], stride: usize) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = dot_bf16::<FMA>(a, &b[i * stride..][..a.len()]);
    }
}
vectorized!(fn dots_bf16(out: &mut [f32], a: &[f32], b: &[bf16], stride: usize) = dots_bf16_body);
