//! Products inside one task, on operands that the task itself packed.

use super::super::inside::{OutputTile, PackedOperand, Side};
use super::super::{Matrix, Sizes};
use super::Unit;
use super::pack::{self, Format};
use super::unit::STEP;

/// Number of f32 in a step of a panel.
const STEP_FLOATS: usize = STEP / 4;

/// Returns the number of f32 that hold `vectors` packed vectors of `k` elements.
pub(crate) fn room(vectors: usize, k: usize) -> usize {
    vectors.div_ceil(32) * k.div_ceil(32) * STEP_FLOATS
}

/// Packs as [panel of 32][step]. `to` begins on a cache line and has at least `room` elements.
pub(crate) fn pack_operand(side: Side, m: &Matrix, (vectors, k): (usize, usize), to: &mut [f32]) {
    let format = if side == Side::B { Format::B } else { Format::A };
    m.check(vectors, k);
    assert!(!m.is_quantized() && to.len() >= room(vectors, k) && to.as_ptr().addr().is_multiple_of(64));
    for (panel, to) in to.chunks_exact_mut((k.div_ceil(32) * STEP_FLOATS).max(1)).enumerate() {
        let first = panel * 32;
        if first < vectors {
            // SAFETY: AVX-512 is always present with AMX; the ranges of vectors and k were checked.
            unsafe {
                pack::panel(
                    m,
                    (first, 32.min(vectors - first)),
                    (0, k),
                    format,
                    to.as_mut_ptr().cast(),
                )
            }
        }
    }
}

#[repr(C, align(64))]
struct Edge([f32; 32 * 32]);

/// # Safety
/// The unit must be available, `to` must belong to this task alone, and all elements that the operands describe
/// must be in bounds.
pub(crate) unsafe fn multiply(unit: Unit, (m, n, k): Sizes, to: OutputTile, a: &PackedOperand, b: &PackedOperand) {
    let steps = k.div_ceil(32);
    let panel = |laid: &PackedOperand, vector: usize| {
        let step = (laid.first.0 + vector) / 32 * laid.whole.1.div_ceil(32) + laid.first.1 / 32;
        laid.packed[step * STEP_FLOATS..][..steps * STEP_FLOATS]
            .as_ptr()
            .cast::<u8>()
    };
    let mut edge = Edge([0.0; 32 * 32]);
    // SAFETY: promised by the caller: panels hold `steps` steps, whole tiles lie in C.
    unsafe {
        unit.configure();
        for column in (0..n).step_by(32) {
            let b = panel(b, column);
            for row in (0..m).step_by(32) {
                let a = panel(a, row);
                let at = to.at + row * to.stride + column;
                let (rows, columns) = (32.min(m - row), 32.min(n - column));
                if (rows, columns) == (32, 32) {
                    unit.multiply_in_place(a, b, steps, (to.c.at(at), to.stride), rows, to.add);
                    continue;
                }
                unit.multiply_in_place(a, b, steps, (edge.0.as_mut_ptr(), 32), rows, false);
                for (i, sums) in edge.0.chunks_exact(32).enumerate().take(rows) {
                    let c = to.c.part(at + i * to.stride, columns);
                    for (c, sum) in c.iter_mut().zip(sums) {
                        *c = if to.add { *c + sum } else { *sum };
                    }
                }
            }
        }
        unit.release();
    }
}
