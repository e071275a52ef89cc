//! Products on f32 with fused multiply-add (AVX-512 or AVX2).
//!
//! A task owns a block of C. For each chunk of k it packs its rows of A, then goes over B in parts that stay in the
//! second-level cache: a panel of A (in the first-level cache) meets every panel of the part, so that C is written
//! along its rows.

use super::super::with_scratch;
use super::fma::{self, From, Kernel, Tile};
use super::grid::{grid, part};
use super::pack::{self, Panel};
use super::{Job, Operand, Start};
use rayon::prelude::*;

/// Steps of k in a chunk at most: a panel of A stays in the first-level cache.
const CHUNK: usize = 256;
/// Elements of a packed part of B at most.
const PART: usize = 66_000;
/// With so few columns an f32 A is read where it lies: packing would cost more than it saves.
const FEW_COLUMNS: usize = 64;

#[derive(Clone, Copy)]
pub(super) enum Width {
    Avx512,
    Avx2,
}

impl Width {
    /// Rows and columns of a tile, elements of a vector.
    fn tile(self) -> (usize, usize, usize) {
        match self {
            Width::Avx512 => (fma::avx512::ROWS, 2 * fma::avx512::LANES, fma::avx512::LANES),
            Width::Avx2 => (fma::avx2::ROWS, 2 * fma::avx2::LANES, fma::avx2::LANES),
        }
    }

    fn is_wide(self) -> bool {
        matches!(self, Width::Avx512)
    }

    fn kernel(self, rows: usize, vectors: usize) -> Kernel {
        match self {
            Width::Avx512 => fma::avx512::kernel(rows, vectors),
            Width::Avx2 => fma::avx2::kernel(rows, vectors),
        }
    }
}

pub(super) fn run(job: &Job, width: Width) {
    let (m, n, _) = job.sizes;
    let (down, across) = grid(m, n, rayon::current_num_threads());
    (0..down * across).into_par_iter().with_max_len(1).for_each(|index| {
        let rows = part(m, down, index % down, 1);
        let columns = part(n, across, index / down, width.tile().1);
        if rows.1 > 0 && columns.1 > 0 {
            block(job, width, rows, columns);
        }
    });
}

fn block(job: &Job, width: Width, (r0, rows): (usize, usize), (c0, columns): (usize, usize)) {
    let k = job.sizes.2;
    let (tile_rows, tile_columns, _) = width.tile();
    let chunks = k.div_ceil(CHUNK);
    let longest = (k.div_ceil(chunks) + 8).min(k);
    let part_columns =
        (PART / longest / tile_columns * tile_columns).clamp(tile_columns, columns.next_multiple_of(tile_columns));
    let direct = columns <= FEW_COLUMNS && matches!(job.a.values, Operand::F32(_));
    let packed_a = if direct {
        0
    } else {
        (rows * longest).next_multiple_of(16)
    };
    let panels = rows.div_ceil(tile_rows);
    let packed_b = part_columns * longest;
    // One panel of codes is decoded at a time.
    let spare = if job.b.is_coded() { tile_columns * longest } else { 0 };
    with_scratch(packed_a + packed_b + spare, |scratch| {
        let (a, rest) = scratch.split_at_mut(packed_a);
        let (b, spare) = rest.split_at_mut(packed_b);
        for chunk in 0..chunks {
            let steps = part(k, chunks, chunk, 8);
            if !direct {
                let rows = (0..panels).map(|p| {
                    let (start, count) = part(rows, panels, p, 1);
                    Panel {
                        start,
                        count,
                        width: count,
                    }
                });
                pack::panels(&job.a, r0, steps, rows, width.is_wide(), a, &mut []);
            }
            for c in (0..columns).step_by(part_columns) {
                let columns = (c0 + c, part_columns.min(columns - c));
                sweep(
                    job,
                    width,
                    (r0, rows),
                    columns,
                    steps,
                    (!direct).then_some(&*a),
                    b,
                    spare,
                );
            }
        }
    });
}

/// Packs a part of B and meets it with all rows of the block; `a` is packed, or A is read where it lies; `spare` takes
/// decoded codes.
#[allow(clippy::too_many_arguments)]
fn sweep(
    job: &Job,
    width: Width,
    (r0, rows): (usize, usize),
    (c0, columns): (usize, usize),
    (k0, k): (usize, usize),
    a: Option<&[f32]>,
    b: &mut [f32],
    spare: &mut [f32],
) {
    let n = job.sizes.1;
    let (tile_rows, tile_columns, lanes) = width.tile();
    let parts = (0..columns).step_by(tile_columns).map(|start| {
        let count = tile_columns.min(columns - start);
        Panel {
            start,
            count,
            width: count.next_multiple_of(lanes),
        }
    });
    pack::panels(&job.b, c0, (k0, k), parts, width.is_wide(), b, spare);
    let panels = rows.div_ceil(tile_rows);
    for p in 0..panels {
        let (r, count) = part(rows, panels, p, 1);
        let (a, a_row, a_k) = match (a, job.a.values) {
            (Some(a), _) => (a[r * k..].as_ptr(), 1, count),
            (None, Operand::F32(v)) if job.a.along_k => (v[(r0 + r) * job.a.stride + k0..].as_ptr(), job.a.stride, 1),
            (None, Operand::F32(v)) => (v[k0 * job.a.stride + r0 + r..].as_ptr(), 1, job.a.stride),
            (None, _) => unreachable!("only an f32 operand is not packed"),
        };
        for c in (0..columns).step_by(tile_columns) {
            let columns = tile_columns.min(columns - c);
            let vectors = columns.div_ceil(lanes);
            let tile = Tile {
                k,
                a,
                a_row,
                a_k,
                b: b[c * k..].as_ptr(),
                b_k: vectors * lanes,
                c: job.c.at((r0 + r) * n + c0 + c),
                c_row: n,
                columns,
                from: match job.start {
                    _ if k0 > 0 => From::C,
                    Start::Zero => From::Zero,
                    Start::C => From::C,
                    Start::Bias(bias) => From::Bias(bias[c0 + c..].as_ptr()),
                },
            };
            // SAFETY: the tile lies inside this task's block; the panels hold `k` steps; the instructions were found.
            unsafe { width.kernel(count, vectors)(&tile) }
        }
    }
}
