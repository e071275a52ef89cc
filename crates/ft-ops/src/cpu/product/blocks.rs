//! GEMM in f32 with fused multiply-add (AVX-512 or AVX2).
//!
//! A task owns a block of C. For each chunk of k it packs its rows of A. Then it packs B in parts that fit in the
//! L2 cache, and multiplies each panel of A (in the L1 cache) with all panels of the part, so that C is written row
//! by row.

use super::super::with_scratch;
use super::fma::MicroTile;
use super::grid::{KC, NC_KC, grid, part};
use super::pack::{self, OperandPart, Panel, PanelLayout};
use super::{CInit, Matrix, Operand, ProductJob, VectorIsa, skinny};
use rayon::prelude::*;

/// With at most this many columns an f32 A is read in place: packing costs more than it saves.
const FEW_COLUMNS: usize = 64;

pub(super) fn run(job: &ProductJob, isa: VectorIsa) {
    if skinny::run(job, isa) {
        return;
    }
    let (m, n, _) = job.sizes;
    let (down, across) = grid(m, n, rayon::current_num_threads());
    (0..down * across).into_par_iter().with_max_len(1).for_each(|index| {
        let rows = part(m, down, index % down, 1);
        let columns = part(n, across, index / down, isa.micro_tile().1);
        if rows.1 > 0 && columns.1 > 0 {
            block(job, isa, rows, columns);
        }
    });
}

fn block(job: &ProductJob, isa: VectorIsa, (r0, rows): (usize, usize), (c0, columns): (usize, usize)) {
    let (_, n, k) = job.sizes;
    let (mr, nr, lanes) = isa.micro_tile();
    let rank = job.fused_lora.as_ref().map_or(0, |r| r.rank);
    let chunks = k.div_ceil(KC);
    let longest = (k.div_ceil(chunks) + 8).min(k) + rank;
    let part_columns = (NC_KC / longest / nr * nr).clamp(nr, columns.next_multiple_of(nr));
    let direct = columns <= FEW_COLUMNS && rank == 0 && matches!(job.a.values, Operand::F32(_));
    let packed_a = if direct {
        0
    } else {
        (rows * longest).next_multiple_of(16)
    };
    let row_panels = rows.div_ceil(mr);
    let panels_of_rows = (0..row_panels).map(|p| {
        let (start, count) = part(rows, row_panels, p, 1);
        Panel {
            start,
            count,
            width: count,
        }
    });
    let panels_of = |columns: usize| {
        (0..columns).step_by(nr).map(move |start| {
            let count = nr.min(columns - start);
            Panel {
                start,
                count,
                width: count.next_multiple_of(lanes),
            }
        })
    };
    let packed_b = part_columns.max(rank.next_multiple_of(lanes)) * longest;
    // Quantized B is dequantized one panel at a time.
    let dequantized = if job.b.is_quantized() { nr * longest } else { 0 };
    with_scratch(packed_a + packed_b + dequantized + rows * rank, |scratch| {
        let (a, rest) = scratch.split_at_mut(packed_a);
        let (b, rest) = rest.split_at_mut(packed_b);
        let (dequantized, u) = rest.split_at_mut(dequantized);
        for chunk in 0..chunks {
            let steps = part(k, chunks, chunk, 8);
            let (k0, k) = steps;
            let own = |first| OperandPart { first, k0, k };
            let of_rank = |first| OperandPart { first, k0: 0, k: rank };
            // The LoRA rank is appended to the end of k, in the last chunk.
            let fused = job.fused_lora.as_ref().filter(|_| chunk + 1 == chunks);
            let layout = PanelLayout::of(steps.1 + fused.map_or(0, |r| r.rank));
            if !direct {
                pack::panels(&job.a, own(r0), panels_of_rows.clone(), isa, layout, a, &mut []);
            }
            if let Some(fused_lora) = &job.fused_lora {
                let alone = PanelLayout::of(steps.1);
                pack::panels(&fused_lora.down, own(0), panels_of(rank), isa, alone, b, &mut []);
                let from = if chunk == 0 { CInit::Zero } else { CInit::C };
                let to = u.as_mut_ptr();
                let a_panel = |p: Panel| (a[p.start * layout.steps..].as_ptr(), 1, p.count);
                let down = PackedColumns {
                    panels: b,
                    columns: rank,
                    k,
                };
                macro_kernel(isa, panels_of_rows.clone(), a_panel, down, to, rank, |_| from);
            }
            if let Some(fused_lora) = fused {
                // These rows of u are the same for all columns: the leftmost block writes them.
                fused_lora.scale(u);
                if c0 == 0 {
                    fused_lora.write_rows(r0, u);
                }
                let at = PanelLayout { at: steps.1, ..layout };
                let u = Matrix::k_inner(Operand::F32(u), rank);
                let rows = panels_of_rows.clone();
                pack::panels(&u, of_rank(0), rows, isa, at, a, &mut []);
            }
            for c in (0..columns).step_by(part_columns) {
                let (first, columns) = (c0 + c, part_columns.min(columns - c));
                let columns_here = panels_of(columns);
                pack::panels(&job.b, own(first), columns_here.clone(), isa, layout, b, dequantized);
                if let Some(fused_lora) = fused {
                    let at = PanelLayout { at: steps.1, ..layout };
                    pack::panels(&fused_lora.up, of_rank(first), columns_here, isa, at, b, &mut []);
                }
                let to = job.c.at(r0 * n + first);
                let from = |column: usize| match job.start {
                    _ if chunk > 0 => CInit::C,
                    CInit::Zero => CInit::Zero,
                    CInit::C => CInit::C,
                    CInit::Bias(bias) => CInit::Bias(bias[first + column..].as_ptr()),
                };
                let a_panel = |p: Panel| match job.a.values {
                    Operand::F32(v) if direct && job.a.k_contiguous => {
                        (v[(r0 + p.start) * job.a.stride + steps.0..].as_ptr(), job.a.stride, 1)
                    }
                    Operand::F32(v) if direct => (v[steps.0 * job.a.stride + r0 + p.start..].as_ptr(), 1, job.a.stride),
                    _ => (a[p.start * layout.steps..].as_ptr(), 1, p.count),
                };
                let packed = PackedColumns {
                    panels: b,
                    columns,
                    k: layout.steps,
                };
                macro_kernel(isa, panels_of_rows.clone(), a_panel, packed, to, n, from);
            }
        }
    });
}

/// Packed columns of B, each of `k` elements.
#[derive(Clone, Copy)]
struct PackedColumns<'a> {
    panels: &'a [f32],
    columns: usize,
    k: usize,
}

/// The macro-kernel: multiplies every panel of rows with every panel of `b`. `a_panel` returns the address of a panel of A
/// and its strides of rows and of k. `to`: address of the first element of C, with rows `c_row` apart. `from` returns the
/// start value of a column.
fn macro_kernel(
    isa: VectorIsa,
    rows: impl Iterator<Item = Panel>,
    a_panel: impl Fn(Panel) -> (*const f32, usize, usize),
    b: PackedColumns<'_>,
    to: *mut f32,
    c_row: usize,
    from: impl Fn(usize) -> CInit<*const f32>,
) {
    let PackedColumns { panels: b, columns, k } = b;
    let (_, nr, lanes) = isa.micro_tile();
    for panel in rows {
        let (a, a_row, a_k) = a_panel(panel);
        for c in (0..columns).step_by(nr) {
            let columns = nr.min(columns - c);
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
            unsafe { isa.kernel(panel.count, vectors)(&tile) }
        }
    }
}
