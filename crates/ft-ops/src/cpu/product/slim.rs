//! A slim result, `Aᵀ·B` of two f32 operands that lie step by step, as the gradients of LoRA's matrices are: few rows or few
//! columns. Each element of the wide operand meets so few others that packing it would cost more than the product:
//! both are read where they lie, a few steps at a time along their rows.

use super::super::with_scratch;
use super::blocks::Width;
use super::fma::{From, Tile};
use super::grid::part;
use super::{Job, Operand, Start};
use rayon::prelude::*;

/// Vectors of the slim operand at most.
const FEW: usize = 32;
/// Steps of k at a time: their rows are as many streams as a core follows.
const STEPS: usize = 32;
/// Columns of a task at most: its sums stay in the second-level cache.
const COLUMNS: usize = 2048;
/// Columns that are brought to C at a time.
const PIECE: usize = 16;

/// Elements `[k, count]`.
#[derive(Clone, Copy)]
struct Rows<'a> {
    values: &'a [f32],
    stride: usize,
    count: usize,
}

/// The slim operand, the wide one, and whether the slim one is B.
fn operands<'a>(job: &Job<'a>) -> Option<(Rows<'a>, Rows<'a>, bool)> {
    let (m, n, _) = job.sizes;
    let (Operand::F32(a), Operand::F32(b)) = (job.a.values, job.b.values) else {
        return None;
    };
    if job.a.along_k || job.b.along_k || m.min(n) > FEW {
        return None;
    }
    let rows = |values, stride, count| Rows { values, stride, count };
    let (a, b) = (rows(a, job.a.stride, m), rows(b, job.b.stride, n));
    Some(if m <= n { (a, b, false) } else { (b, a, true) })
}

/// Does the job, if it is of this kind.
pub(super) fn run(job: &Job, width: Width) -> bool {
    let Some((slim, wide, turned)) = operands(job) else {
        return false;
    };
    let tasks = rayon::current_num_threads().max(wide.count.div_ceil(COLUMNS));
    (0..tasks).into_par_iter().with_max_len(1).for_each(|index| {
        let (first, columns) = part(wide.count, tasks, index, width.tile().1);
        with_scratch(slim.count * columns + STEPS * width.tile().1, |scratch| {
            let (sums, tail) = scratch.split_at_mut(slim.count * columns);
            add_up(width, job.sizes.2, slim, wide, first, sums, tail);
            // Turned in pieces: the lines of C and of the sums stay in the first-level cache.
            for piece in (0..columns).step_by(PIECE) {
                for (row, sums) in sums.chunks_exact(columns).enumerate() {
                    let sums = &sums[piece..(piece + PIECE).min(columns)];
                    for (column, sum) in (first + piece..).zip(sums) {
                        let (i, j) = if turned { (column, row) } else { (row, column) };
                        // SAFETY: inside C; these columns of the wide operand are this task's alone.
                        let c = unsafe { &mut *job.c.at(i * job.sizes.1 + j) };
                        *c = match job.start {
                            Start::Zero => *sum,
                            Start::C => *c + sum,
                            Start::Bias(bias) => bias[j] + sum,
                        };
                    }
                }
            }
        })
    });
    true
}

/// Sums over k of the products of every slim vector with the wide ones from `first` on: `[slim.count, columns]`. `tail` has room
/// for the steps of one tile.
fn add_up(width: Width, k: usize, slim: Rows, wide: Rows, first: usize, sums: &mut [f32], tail: &mut [f32]) {
    let (tile_rows, tile_columns, lanes) = width.tile();
    let columns = sums.len() / slim.count.max(1);
    for k0 in (0..k).step_by(STEPS) {
        let steps = STEPS.min(k - k0);
        for c in (0..columns).step_by(tile_columns) {
            let count = tile_columns.min(columns - c);
            let vectors = count.div_ceil(lanes);
            let at = |p: usize| (k0 + p) * wide.stride + first + c;
            let (b, b_k) = if count == vectors * lanes {
                (wide.values[at(0)..].as_ptr(), wide.stride)
            } else {
                // A kernel reads whole vectors, and there may be nothing behind the last one.
                for p in 0..steps {
                    tail[p * tile_columns..][..count].copy_from_slice(&wide.values[at(p)..][..count]);
                }
                (tail.as_ptr(), tile_columns)
            };
            let panels = slim.count.div_ceil(tile_rows);
            for (row, rows) in (0..panels).map(|p| part(slim.count, panels, p, 1)) {
                let tile = Tile {
                    k: steps,
                    a: slim.values[k0 * slim.stride + row..].as_ptr(),
                    a_row: 1,
                    a_k: slim.stride,
                    b,
                    b_k,
                    c: sums[row * columns + c..].as_mut_ptr(),
                    c_row: columns,
                    columns: count,
                    from: if k0 == 0 { From::Zero } else { From::C },
                };
                // SAFETY: the tile lies in `sums`; both operands hold `steps` rows of these vectors; the instructions
                // were found.
                unsafe { width.kernel(rows, vectors)(&tile) }
            }
        }
    }
}
