//! Skinny GEMM: `Aᵀ·B` of two row-major f32 operands `[k, ..]` with few rows or few columns in the result, such as
//! the gradients of LoRA matrices. Each element of the wide operand is used so few times that packing would cost
//! more than the product: both operands are read in place, a few rows of k at a time.

use super::super::with_scratch;
use super::fma::MicroTile;
use super::grid::part;
use super::{CInit, Operand, ProductJob, VectorIsa};
use rayon::prelude::*;

/// Largest number of vectors of the skinny operand.
const FEW: usize = 32;
/// Rows of k at a time: as many memory streams as a core can prefetch.
const STEPS: usize = 32;
/// Largest number of columns of a task: its sums stay in the L2 cache.
const COLUMNS: usize = 2048;
/// Columns that are written to C at a time.
const PIECE: usize = 16;

/// A row-major operand `[k, count]`.
#[derive(Clone, Copy)]
struct RowMajor<'a> {
    values: &'a [f32],
    stride: usize,
    count: usize,
}

/// Returns the skinny operand, the wide one, and whether the skinny one is B. None if the job is of another kind.
fn operands<'a>(job: &ProductJob<'a>) -> Option<(RowMajor<'a>, RowMajor<'a>, bool)> {
    let (m, n, _) = job.sizes;
    let (Operand::F32(a), Operand::F32(b)) = (job.a.values, job.b.values) else {
        return None;
    };
    if job.a.k_contiguous || job.b.k_contiguous || m.min(n) > FEW {
        return None;
    }
    let rows = |values, stride, count| RowMajor { values, stride, count };
    let (a, b) = (rows(a, job.a.stride, m), rows(b, job.b.stride, n));
    Some(if m <= n { (a, b, false) } else { (b, a, true) })
}

/// Runs the job and returns true if it is skinny; else returns false.
pub(super) fn run(job: &ProductJob, isa: VectorIsa) -> bool {
    let Some((skinny, wide, skinny_is_b)) = operands(job) else {
        return false;
    };
    let tasks = rayon::current_num_threads().max(wide.count.div_ceil(COLUMNS));
    (0..tasks).into_par_iter().with_max_len(1).for_each(|index| {
        let (first, columns) = part(wide.count, tasks, index, isa.micro_tile().1);
        with_scratch(skinny.count * columns + STEPS * isa.micro_tile().1, |scratch| {
            let (sums, tail) = scratch.split_at_mut(skinny.count * columns);
            add_products(isa, job.sizes.2, skinny, wide, first, sums, tail);
            // Transposed in pieces: the cache lines of C and of the sums stay in the L1 cache.
            for piece in (0..columns).step_by(PIECE) {
                for (row, sums) in sums.chunks_exact(columns).enumerate() {
                    let sums = &sums[piece..(piece + PIECE).min(columns)];
                    for (column, sum) in (first + piece..).zip(sums) {
                        let (i, j) = if skinny_is_b { (column, row) } else { (row, column) };
                        // SAFETY: inside C; these columns of the wide operand belong to this task alone.
                        let c = unsafe { &mut *job.c.at(i * job.sizes.1 + j) };
                        *c = match job.start {
                            CInit::Zero => *sum,
                            CInit::C => *c + sum,
                            CInit::Bias(bias) => bias[j] + sum,
                        };
                    }
                }
            }
        })
    });
    true
}

/// Computes the products of every skinny vector with the wide ones from `first` on, summed over k:
/// `[skinny.count, columns]`. `tail` has space for one tile of `STEPS` rows.
fn add_products(
    isa: VectorIsa,
    k: usize,
    skinny: RowMajor,
    wide: RowMajor,
    first: usize,
    sums: &mut [f32],
    tail: &mut [f32],
) {
    let (mr, nr, lanes) = isa.micro_tile();
    let columns = sums.len() / skinny.count.max(1);
    for k0 in (0..k).step_by(STEPS) {
        let steps = STEPS.min(k - k0);
        for c in (0..columns).step_by(nr) {
            let count = nr.min(columns - c);
            let vectors = count.div_ceil(lanes);
            let at = |p: usize| (k0 + p) * wide.stride + first + c;
            let (b, b_k) = if count == vectors * lanes {
                (wide.values[at(0)..].as_ptr(), wide.stride)
            } else {
                // A kernel reads whole vectors, and the memory after the last one may not be readable.
                for p in 0..steps {
                    tail[p * nr..][..count].copy_from_slice(&wide.values[at(p)..][..count]);
                }
                (tail.as_ptr(), nr)
            };
            let panels = skinny.count.div_ceil(mr);
            for (row, rows) in (0..panels).map(|p| part(skinny.count, panels, p, 1)) {
                let tile = MicroTile {
                    k: steps,
                    a: skinny.values[k0 * skinny.stride + row..].as_ptr(),
                    a_row: 1,
                    a_k: skinny.stride,
                    b,
                    b_k,
                    c: sums[row * columns + c..].as_mut_ptr(),
                    c_row: columns,
                    columns: count,
                    from: if k0 == 0 { CInit::Zero } else { CInit::C },
                };
                // SAFETY: the tile lies in `sums`; both operands hold `steps` rows of these vectors; the CPU
                // features were detected.
                unsafe { isa.kernel(rows, vectors)(&tile) }
            }
        }
    }
}
