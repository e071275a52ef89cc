//! A few rows times a weight, e.g. one generated token (GEMV): reads every element of the weight once and packs
//! nothing. Quantized weights are dequantized once for all rows, a piece at a time, into the L1 cache.

use super::super::SharedSlice;
use super::super::dequantize::dequantize;
#[cfg(target_arch = "x86_64")]
use super::super::dequantize::dots;
use super::super::math::{LANES, dot, dot_bf16, dot_lanes, round_to_bf16, sum_lanes, vectorized};
#[cfg(target_arch = "x86_64")]
use super::few_rows;
use super::integer::{self, RoundedRows};
use super::{CInit, CpuBackend, Matrix, Operand, ProductJob, VectorIsa};
use crate::quantized::QMatrixView;
use half::bf16;
use rayon::prelude::*;

/// Most rows of A for which this path is used.
const ROWS: usize = 4;
/// The same for bf16 weights with f32 products in AVX-512 (`few_rows`).
const BF16_ROWS: usize = 8;
/// The same for quantized weights: more, because packing them costs more.
const QUANTIZED_ROWS: usize = 8;
/// A product with at least so many rows never takes this path, unless the weight allows rounded rows.
pub const MANY_ROWS: usize = QUANTIZED_ROWS + 1;
const _: () = assert!(BF16_ROWS <= QUANTIZED_ROWS);
/// Columns of C per task.
const BLOCK: usize = 32;
/// Elements that are dequantized at a time: a multiple of `LANES`.
const PIECE: usize = 512;

/// As `MANY_ROWS`, with the backend in use, for bf16 weights whose copies allow rounded rows.
pub fn many_rounded_rows() -> usize {
    integer::most_rows_of_any(CpuBackend::current()) + 1
}

/// True if this path can compute `job` and is the fastest one. If `backend` rounds operands to bf16, the few rows of A are rounded in
/// advance; an f32 B is rounded only where it is packed, so it does not fit.
pub(super) fn fits(job: &ProductJob, backend: CpuBackend) -> bool {
    let (isa, rounds) = (backend.vector_isa(), backend.packs_bf16());
    if rounds && matches!(job.b.values, Operand::F32(_)) {
        return false;
    }
    let f32_rows = job.a.k_contiguous && matches!(job.a.values, Operand::F32(_));
    let m = job.sizes.0;
    let (few, start) = match &job.b.values {
        Operand::Quantized(view) => {
            let most = integer::most_rows(view, backend);
            (m <= most.unwrap_or(QUANTIZED_ROWS), true)
        }
        values => {
            let most = if matches!(values, Operand::Bf16(_)) && isa == Some(VectorIsa::Avx512) && !rounds {
                BF16_ROWS
            } else {
                ROWS
            };
            (m <= most, !matches!(job.start, CInit::C))
        }
    };
    few && f32_rows && job.b.k_contiguous && start
}

pub(super) fn run(job: &ProductJob, backend: CpuBackend) {
    let (m, _, k) = job.sizes;
    let isa = backend.vector_isa();
    let Operand::F32(a) = job.a.values else { return };
    if let Operand::Quantized(view) = &job.b.values
        && integer::most_rows(view, backend).is_some_and(|most| m <= most)
    {
        return in_integers(job, isa, a, view);
    }
    if backend.packs_bf16() {
        let mut rows = vec![0f32; m * k];
        for (i, to) in rows.chunks_exact_mut(k).enumerate() {
            round_to_bf16(to, &a[i * job.a.stride..][..k]);
        }
        let a = Matrix::k_inner(Operand::F32(&rows), k);
        return in_f32(&ProductJob { a, ..*job }, isa);
    }
    in_f32(job, isa);
}

/// As `run`, with products of f32.
fn in_f32(job: &ProductJob, isa: Option<VectorIsa>) {
    let (m, n, k) = job.sizes;
    let Operand::F32(a) = job.a.values else { return };
    #[cfg(target_arch = "x86_64")]
    if let (Operand::Bf16(weight), Some(isa), 2..) = (job.b.values, isa, m) {
        return few_rows(job, isa, a, weight);
    }
    let c: SharedSlice = job.c;
    let arranged = arranged(job, isa, a);
    (0..n.div_ceil(BLOCK)).into_par_iter().for_each(|block| {
        let first = block * BLOCK;
        let count = BLOCK.min(n - first);
        if let Operand::Quantized(view) = &job.b.values {
            return quantized(job, isa, a, arranged.as_deref(), view, (first, count));
        }
        for row in 0..m {
            let a = &a[row * job.a.stride..][..k];
            // SAFETY: the part of this row that belongs to the columns of this task.
            let out = unsafe { c.part(row * n + first, count) };
            match job.b.values {
                Operand::F32(b) => dots(out, a, &b[first * job.b.stride..], job.b.stride),
                Operand::Bf16(b) => dots_bf16(out, a, &b[first * job.b.stride..], job.b.stride),
                Operand::Quantized(_) => {}
            }
            if let CInit::Bias(bias) = job.start {
                out.iter_mut().zip(&bias[first..]).for_each(|(o, b)| *o += b);
            }
        }
    });
}

/// As `run`, for a bf16 weight and several rows of A.
#[cfg(target_arch = "x86_64")]
fn few_rows(job: &ProductJob, isa: VectorIsa, a: &[f32], weight: &[bf16]) {
    let (m, n, k) = job.sizes;
    let width = few_rows::width(k);
    let mut rows = vec![0f32; m * width];
    for (row, to) in rows.chunks_exact_mut(width).enumerate() {
        few_rows::arrange(&a[row * job.a.stride..][..k], to);
    }
    (0..n.div_ceil(BLOCK)).into_par_iter().for_each(|block| {
        let first = block * BLOCK;
        let block = few_rows::Bf16Block {
            values: &weight[first * job.b.stride..],
            stride: job.b.stride,
            k,
        };
        let put = |row, column, sum| {
            // SAFETY: the columns of a task are its own.
            unsafe { put(job, row, first + column, sum) }
        };
        // SAFETY: the backend of the job was detected.
        unsafe { few_rows::dots(isa, block, BLOCK.min(n - first), &rows, put) };
    });
}

/// As `run`, for a weight that allows rounded rows.
fn in_integers(job: &ProductJob, isa: Option<VectorIsa>, a: &[f32], view: &QMatrixView<'_>) {
    let (m, n, _) = job.sizes;
    let rows = RoundedRows::new(view, m, a, job.a.stride);
    (0..n.div_ceil(BLOCK)).into_par_iter().for_each(|block| {
        let first = block * BLOCK;
        let count = BLOCK.min(n - first);
        let mut sums = vec![0f32; count * m];
        integer::dots(isa, view, first, &rows, &mut sums);
        for (column, sums) in (first..).zip(sums.chunks_exact(m)) {
            for (row, sum) in sums.iter().enumerate() {
                // SAFETY: the columns of a task are its own.
                unsafe { put(job, row, column, *sum) };
            }
        }
    });
}

/// Writes an element of C.
///
/// # Safety
/// No other task writes this element at the same time.
unsafe fn put(job: &ProductJob, row: usize, column: usize, sum: f32) {
    // SAFETY: promised by the caller.
    let out = unsafe { job.c.part(row * job.sizes.1 + column, 1) };
    out[0] = match job.start {
        CInit::Zero => sum,
        CInit::C => out[0] + sum,
        CInit::Bias(bias) => sum + bias[column],
    };
}

/// The rows of A in the order that `dots` reads (dequantization in registers). None if `dots` cannot be used.
fn arranged(job: &ProductJob, isa: Option<VectorIsa>, a: &[f32]) -> Option<Vec<f32>> {
    #[cfg(target_arch = "x86_64")]
    if let Operand::Quantized(view) = &job.b.values
        && let Some(isa) = isa
        && dots::fits(view)
    {
        let (m, _, k) = job.sizes;
        let mut all = vec![0f32; m * k];
        for (row, to) in all.chunks_exact_mut(k).enumerate() {
            dots::arrange(isa, view, &a[row * job.a.stride..][..k], to);
        }
        return Some(all);
    }
    let _ = (job, isa, a);
    None
}

/// Computes the sums of row `row` of the weight with dequantization in registers. Returns false if there are no
/// arranged rows of A.
fn dot_in_registers(
    isa: Option<VectorIsa>,
    arranged: Option<&[f32]>,
    view: &QMatrixView<'_>,
    row: usize,
    sums: &mut [[f32; LANES]],
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if let (Some(x), Some(isa)) = (arranged, isa) {
        // SAFETY: rows are arranged only with instructions that were detected, and for a weight that fits.
        unsafe { dots::dots(isa, view, row, x, sums) };
        return true;
    }
    let _ = (isa, arranged, view, row, sums);
    false
}

/// Computes columns `first..first + count` of C for all rows.
fn quantized(
    job: &ProductJob,
    isa: Option<VectorIsa>,
    a: &[f32],
    arranged: Option<&[f32]>,
    view: &QMatrixView<'_>,
    (first, count): (usize, usize),
) {
    let (m, _, k) = job.sizes;
    let mut piece = [0f32; PIECE];
    let mut sums = [[0f32; LANES]; QUANTIZED_ROWS];
    for column in first..first + count {
        sums[..m].fill([0.0; LANES]);
        let pieces = if dot_in_registers(isa, arranged, view, column, &mut sums[..m]) {
            0
        } else {
            k
        };
        for start in (0..pieces).step_by(PIECE) {
            let piece = &mut piece[..PIECE.min(k - start)];
            dequantize(isa, view, column, start, piece);
            add_dots(&mut sums[..m], &a[start..], job.a.stride, piece);
        }
        for (row, sums) in sums[..m].iter().enumerate() {
            // SAFETY: an element in the columns of this task.
            unsafe { put(job, row, column, sum_lanes(sums)) };
        }
    }
}

#[inline(always)]
fn add_dots_body<const FMA: bool>(sums: &mut [[f32; LANES]], a: &[f32], stride: usize, b: &[f32]) {
    for (row, sums) in sums.iter_mut().enumerate() {
        *sums = dot_lanes::<FMA>(*sums, &a[row * stride..][..b.len()], b);
    }
}
vectorized!(fn add_dots(sums: &mut [[f32; LANES]], a: &[f32], stride: usize, b: &[f32]) = add_dots_body);

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
