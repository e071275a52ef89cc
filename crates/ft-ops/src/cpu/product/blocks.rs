//! GEMM in f32 with fused multiply-add (AVX-512 or AVX2).
//!
//! A task owns a block of C. For each chunk of k it packs its rows of A. Then it packs B in parts that fit in the
//! L2 cache, and multiplies each panel of A (in the L1 cache) with all panels of the part, so that C is written row
//! by row.

use super::super::with_scratch;
use super::fma::{self, AccumulateFrom, Kernel, MicroTile};
use super::grid::{CHUNK, PART, grid, part};
use super::pack::{self, Panel, PanelLayout};
use super::{CInit, Job, Matrix, Operand, skinny};
use rayon::prelude::*;

/// With at most this many columns an f32 A is read in place: packing costs more than it saves.
const FEW_COLUMNS: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    Avx512,
    Avx2,
}

impl Width {
    /// Rows and columns of a micro-tile, elements of a SIMD vector.
    pub(crate) fn tile(self) -> (usize, usize, usize) {
        match self {
            Width::Avx512 => (fma::avx512::ROWS, 2 * fma::avx512::LANES, fma::avx512::LANES),
            Width::Avx2 => (fma::avx2::ROWS, 2 * fma::avx2::LANES, fma::avx2::LANES),
        }
    }

    pub(crate) fn is_wide(self) -> bool {
        matches!(self, Width::Avx512)
    }

    pub(crate) fn kernel(self, rows: usize, vectors: usize) -> Kernel {
        match self {
            Width::Avx512 => fma::avx512::kernel(rows, vectors),
            Width::Avx2 => fma::avx2::kernel(rows, vectors),
        }
    }
}

pub(super) fn run(job: &Job, width: Width) {
    if skinny::run(job, width) {
        return;
    }
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
    let (_, n, k) = job.sizes;
    let (tile_rows, tile_columns, lanes) = width.tile();
    let rank = job.fused_lora.as_ref().map_or(0, |r| r.rank);
    let chunks = k.div_ceil(CHUNK);
    let longest = (k.div_ceil(chunks) + 8).min(k) + rank;
    let part_columns =
        (PART / longest / tile_columns * tile_columns).clamp(tile_columns, columns.next_multiple_of(tile_columns));
    let direct = columns <= FEW_COLUMNS && rank == 0 && matches!(job.a.values, Operand::F32(_));
    let packed_a = if direct {
        0
    } else {
        (rows * longest).next_multiple_of(16)
    };
    let row_panels = rows.div_ceil(tile_rows);
    let panels_of_rows = (0..row_panels).map(|p| {
        let (start, count) = part(rows, row_panels, p, 1);
        Panel {
            start,
            count,
            width: count,
        }
    });
    let panels_of = |columns: usize| {
        (0..columns).step_by(tile_columns).map(move |start| {
            let count = tile_columns.min(columns - start);
            Panel {
                start,
                count,
                width: count.next_multiple_of(lanes),
            }
        })
    };
    let packed_b = part_columns.max(rank.next_multiple_of(lanes)) * longest;
    // Quantized B is dequantized one panel at a time.
    let spare = if job.b.is_quantized() {
        tile_columns * longest
    } else {
        0
    };
    with_scratch(packed_a + packed_b + spare + rows * rank, |scratch| {
        let (a, rest) = scratch.split_at_mut(packed_a);
        let (b, rest) = rest.split_at_mut(packed_b);
        let (spare, u) = rest.split_at_mut(spare);
        for chunk in 0..chunks {
            let steps = part(k, chunks, chunk, 8);
            // The LoRA rank is appended to the end of k, in the last chunk.
            let ride = job.fused_lora.as_ref().filter(|_| chunk + 1 == chunks);
            let room = PanelLayout::of(steps.1 + ride.map_or(0, |r| r.rank));
            if !direct {
                pack::panels(
                    &job.a,
                    r0,
                    steps,
                    panels_of_rows.clone(),
                    width.is_wide(),
                    room,
                    a,
                    &mut [],
                );
            }
            if let Some(fused_lora) = &job.fused_lora {
                let own = PanelLayout::of(steps.1);
                pack::panels(
                    &fused_lora.down,
                    0,
                    steps,
                    panels_of(rank),
                    width.is_wide(),
                    own,
                    b,
                    &mut [],
                );
                let from = if chunk == 0 {
                    AccumulateFrom::Zero
                } else {
                    AccumulateFrom::C
                };
                let to = (u.as_mut_ptr(), rank);
                let laid = |p: Panel| (a[p.start * room.steps..].as_ptr(), 1, p.count);
                macro_kernel(width, panels_of_rows.clone(), rank, steps.1, laid, b, to, |_| from);
            }
            if let Some(fused_lora) = ride {
                // These rows of u are the same for all columns: the leftmost block writes them.
                fused_lora.scale(u);
                if c0 == 0 {
                    fused_lora.keep(r0, u);
                }
                let at = PanelLayout { at: steps.1, ..room };
                let u = Matrix::vectors(Operand::F32(u), rank);
                let rows = panels_of_rows.clone();
                pack::panels(&u, 0, (0, rank), rows, width.is_wide(), at, a, &mut []);
            }
            for c in (0..columns).step_by(part_columns) {
                let (first, columns) = (c0 + c, part_columns.min(columns - c));
                let columns_here = panels_of(columns);
                pack::panels(
                    &job.b,
                    first,
                    steps,
                    columns_here.clone(),
                    width.is_wide(),
                    room,
                    b,
                    spare,
                );
                if let Some(fused_lora) = ride {
                    let at = PanelLayout { at: steps.1, ..room };
                    pack::panels(
                        &fused_lora.up,
                        first,
                        (0, rank),
                        columns_here,
                        width.is_wide(),
                        at,
                        b,
                        &mut [],
                    );
                }
                let to = (job.c.at(r0 * n + first), n);
                let from = |column: usize| match job.start {
                    _ if chunk > 0 => AccumulateFrom::C,
                    CInit::Zero => AccumulateFrom::Zero,
                    CInit::C => AccumulateFrom::C,
                    CInit::Bias(bias) => AccumulateFrom::Bias(bias[first + column..].as_ptr()),
                };
                let laid = |p: Panel| match job.a.values {
                    Operand::F32(v) if direct && job.a.k_contiguous => {
                        (v[(r0 + p.start) * job.a.stride + steps.0..].as_ptr(), job.a.stride, 1)
                    }
                    Operand::F32(v) if direct => (v[steps.0 * job.a.stride + r0 + p.start..].as_ptr(), 1, job.a.stride),
                    _ => (a[p.start * room.steps..].as_ptr(), 1, p.count),
                };
                macro_kernel(width, panels_of_rows.clone(), columns, room.steps, laid, b, to, from);
            }
        }
    });
}

/// The macro-kernel: multiplies every panel of rows with every panel of `b`, `columns` in all, over `k`. `laid`
/// returns the address of a panel of A and its strides of rows and of k. `to`: address of the first element of C,
/// and its row stride. `from` returns the start value of a column.
#[allow(clippy::too_many_arguments)]
fn macro_kernel(
    width: Width,
    rows: impl Iterator<Item = Panel>,
    columns: usize,
    k: usize,
    laid: impl Fn(Panel) -> (*const f32, usize, usize),
    b: &[f32],
    (to, c_row): (*mut f32, usize),
    from: impl Fn(usize) -> AccumulateFrom,
) {
    let (_, tile_columns, lanes) = width.tile();
    for panel in rows {
        let (a, a_row, a_k) = laid(panel);
        for c in (0..columns).step_by(tile_columns) {
            let columns = tile_columns.min(columns - c);
            let vectors = columns.div_ceil(lanes);
            let tile = MicroTile {
                k,
                a,
                a_row,
                a_k,
                b: b[c * k..].as_ptr(),
                b_k: vectors * lanes,
                c: to.wrapping_add(panel.start * c_row + c),
                c_row,
                columns,
                from: from(c),
            };
            // SAFETY: the tile lies inside the block of this task; the panels hold `k` elements per vector; the CPU
            // features were detected.
            unsafe { width.kernel(panel.count, vectors)(&tile) }
        }
    }
}
