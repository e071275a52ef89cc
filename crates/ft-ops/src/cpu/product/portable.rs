//! Products with the `gemm` crate, on every architecture.

use super::super::dequantize::dequantize;
use super::super::math::widen_slice;
use super::super::with_scratch;
use super::grid::{grid, part};
use super::task_gemm::PackedOperand;
use super::{CInit, Matrix, Operand, OperandBlock, ProductJob};
use rayon::prelude::*;

/// Elements of k that are widened at a time.
const PANEL: usize = 512;
/// Elements that are dequantized at a time, for all columns together.
const DEQUANTIZED: usize = 1 << 19;

/// Up to this many results, the `gemm` crate sums in another order if both operands are contiguous in k.
const SMALL: usize = 16 * 16;

/// A matrix in memory: address of its first element, and elements between two rows and between two columns.
#[derive(Clone, Copy)]
pub(super) struct StridedMatrix<P> {
    pub at: P,
    pub row: usize,
    pub column: usize,
}

/// Computes `dst [m, n] = a [m, k] · b [k, n] (+ dst)` on one thread. For k <= 512 the order of the sum does not depend on m
/// and n (except for m or n of 1).
/// # Safety
/// All addresses with their strides must lie inside live slices; `dst` must not be shared.
pub(super) unsafe fn gemm(
    (m, n, k): (usize, usize, usize),
    dst: StridedMatrix<*mut f32>,
    accumulate: bool,
    a: StridedMatrix<*const f32>,
    b: StridedMatrix<*const f32>,
) {
    if a.column == 1 && b.row == 1 && m * n <= SMALL {
        // A transposed copy of A, so that the order of the sum is that of larger results.
        let step = m.max(2);
        return with_scratch(step * k, |turned| {
            for row in 0..m {
                for at in 0..k {
                    // SAFETY: an element of A, inside its slice as the caller promised.
                    turned[at * step + row] = unsafe { *a.at.add(row * a.row + at) };
                }
            }
            let a = StridedMatrix {
                at: turned.as_ptr(),
                row: 1,
                column: step,
            };
            // SAFETY: promised by the caller; A is the copy.
            unsafe { gemm((m, n, k), dst, accumulate, a, b) }
        });
    }
    let keep = if accumulate { 1.0 } else { 0.0 };
    // SAFETY: promised by the caller.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.at,
            dst.column as isize,
            dst.row as isize,
            accumulate,
            a.at,
            a.column as isize,
            a.row as isize,
            b.at,
            b.column as isize,
            b.row as isize,
            keep,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        )
    }
}

/// Returns address, stride of vectors and stride of k of an f32 operand that was not packed.
pub(super) fn unpacked(operand: &PackedOperand) -> (*const f32, usize, usize) {
    let m = &operand.matrix;
    let (vector, step) = if m.k_contiguous { (m.stride, 1) } else { (1, m.stride) };
    let at = match m.values {
        Operand::F32(v) => v.as_ptr(),
        _ => std::ptr::null(),
    };
    (
        at.wrapping_add(operand.first.0 * vector + operand.first.1 * step),
        vector,
        step,
    )
}

pub(super) fn run(job: &ProductJob) {
    let (m, n, k) = job.sizes;
    let (down, across) = grid(m, n, rayon::current_num_threads());
    // Depends on the shape alone, because the cut of k decides the order of the sum.
    let panel = if job.b.is_quantized() {
        (DEQUANTIZED / n).clamp(16, PANEL)
    } else {
        PANEL
    };
    (0..down * across).into_par_iter().with_max_len(1).for_each(|index| {
        let (r0, rows) = part(m, down, index % down, 1);
        let (c0, columns) = part(n, across, index / down, 16);
        if rows == 0 || columns == 0 {
            return;
        }
        if let CInit::Bias(bias) = job.start {
            for row in r0..r0 + rows {
                // SAFETY: a row of the block of this task.
                let part = unsafe { job.c.part(row * n + c0, columns) };
                part.copy_from_slice(&bias[c0..][..columns]);
            }
        }
        for k0 in (0..k).step_by(panel) {
            let steps = panel.min(k - k0);
            let accumulate = k0 > 0 || !matches!(job.start, CInit::Zero);
            let block = |first, count| OperandBlock {
                first,
                count,
                k0,
                k: steps,
            };
            with_operand(&job.a, block(r0, rows), |a, a_stride, a_step| {
                with_operand(&job.b, block(c0, columns), |b, b_stride, b_step| {
                    let c = StridedMatrix {
                        at: job.c.at(r0 * n + c0),
                        row: n,
                        column: 1,
                    };
                    let a = StridedMatrix {
                        at: a,
                        row: a_stride,
                        column: a_step,
                    };
                    let b = StridedMatrix {
                        at: b,
                        row: b_step,
                        column: b_stride,
                    };
                    // SAFETY: the block lies inside C and belongs to this task alone; A and B are inside their slices.
                    unsafe { gemm((rows, columns, steps), c, accumulate, a, b) }
                })
            })
        }
    });
}

/// Calls `f` with a part of an operand as f32, in place or widened: address, stride of vectors, stride of k.
fn with_operand(m: &Matrix, block: OperandBlock, f: impl FnOnce(*const f32, usize, usize)) {
    let OperandBlock { first, count, k0, k } = block;
    let (outer, inner) = if m.k_contiguous { (count, k) } else { (k, count) };
    let at = if m.k_contiguous {
        first * m.stride + k0
    } else {
        k0 * m.stride + first
    };
    let strides = |stride| if m.k_contiguous { (stride, 1) } else { (1, stride) };
    match m.values {
        Operand::F32(v) => {
            let (vector, step) = strides(m.stride);
            f(v[at..].as_ptr(), vector, step)
        }
        Operand::Bf16(v) => with_scratch(outer * inner, |wide| {
            for (i, to) in wide.chunks_exact_mut(inner).enumerate() {
                widen_slice(to, &v[at + i * m.stride..][..inner]);
            }
            let (vector, step) = strides(inner);
            f(wide.as_ptr(), vector, step)
        }),
        Operand::Quantized(view) => with_scratch(outer * inner, |wide| {
            let (row, start) = if m.k_contiguous { (first, k0) } else { (k0, first) };
            for (i, to) in wide.chunks_exact_mut(inner).enumerate() {
                dequantize(None, &view, row + i, start, to);
            }
            let (vector, step) = strides(inner);
            f(wide.as_ptr(), vector, step)
        }),
    }
}
