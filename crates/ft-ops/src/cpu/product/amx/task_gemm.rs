//! Products inside one task, on operands that the task itself packed.

use super::super::task_gemm::{OperandSide, OutputTile, PackedOperand};
use super::super::{CpuBackend, GemmSizes, Matrix, OperandBlock};
use super::pack::{self, PackFormat};
use super::tile_kernels::STEP;
use super::{TileOfC, configure, multiply_tile_in_place, release};

/// Number of f32 in a step of a panel.
const STEP_FLOATS: usize = STEP / 4;

/// Returns the number of f32 that hold `vectors` packed vectors of `k` elements.
pub(crate) fn packed_len(vectors: usize, k: usize) -> usize {
    vectors.div_ceil(32) * k.div_ceil(32) * STEP_FLOATS
}

/// Packs as [panel of 32][step]. `to` begins on a cache line and has at least `packed_len` elements.
pub(crate) fn pack_operand(side: OperandSide, m: &Matrix, (vectors, k): (usize, usize), to: &mut [f32]) {
    let format = if side == OperandSide::B {
        PackFormat::B
    } else {
        PackFormat::A
    };
    m.check(vectors, k);
    assert!(!m.is_quantized() && to.len() >= packed_len(vectors, k) && to.as_ptr().addr().is_multiple_of(64));
    for (panel, to) in to.chunks_exact_mut((k.div_ceil(32) * STEP_FLOATS).max(1)).enumerate() {
        let first = panel * 32;
        if first < vectors {
            let block = OperandBlock {
                first,
                count: 32.min(vectors - first),
                k0: 0,
                k,
            };
            // SAFETY: AVX-512 is always present with AMX; the ranges of vectors and k were checked.
            unsafe { pack::panel(m, block, format, to.as_mut_ptr().cast()) }
        }
    }
}

#[repr(C, align(64))]
struct Edge([f32; 32 * 32]);

/// # Safety
/// `backend` is `Amx` or `Avx512Bf16`, and available, `to` must belong to this task alone, and all elements that the operands describe
/// must be in bounds.
pub(crate) unsafe fn multiply(
    backend: CpuBackend,
    (m, n, k): GemmSizes,
    to: OutputTile,
    a: &PackedOperand,
    b: &PackedOperand,
) {
    let steps = k.div_ceil(32);
    let panel = |operand: &PackedOperand, vector: usize| {
        let step = (operand.first.0 + vector) / 32 * operand.whole.1.div_ceil(32) + operand.first.1 / 32;
        operand.packed[step * STEP_FLOATS..][..steps * STEP_FLOATS]
            .as_ptr()
            .cast::<u8>()
    };
    let mut edge = Edge([0.0; 32 * 32]);
    // SAFETY: promised by the caller: panels hold `steps` steps, whole tiles lie in C.
    unsafe {
        configure(backend);
        for column in (0..n).step_by(32) {
            let b = panel(b, column);
            for row in (0..m).step_by(32) {
                let a = panel(a, row);
                let at = to.at + row * to.stride + column;
                let (rows, columns) = (32.min(m - row), 32.min(n - column));
                if (rows, columns) == (32, 32) {
                    let tile = TileOfC {
                        c: to.c.at(at),
                        row: to.stride,
                    };
                    multiply_tile_in_place(backend, a, b, steps, tile, rows, to.add);
                    continue;
                }
                // The sums begin with C, as those of whole tiles do.
                let rows_of_c = || (0..rows).map(|i| to.c.part(at + i * to.stride, columns));
                if to.add {
                    for (c, sums) in rows_of_c().zip(edge.0.chunks_exact_mut(32)) {
                        sums[..columns].copy_from_slice(c);
                    }
                }
                let tile = TileOfC {
                    c: edge.0.as_mut_ptr(),
                    row: 32,
                };
                multiply_tile_in_place(backend, a, b, steps, tile, rows, to.add);
                for (c, sums) in rows_of_c().zip(edge.0.chunks_exact(32)) {
                    c.copy_from_slice(&sums[..columns]);
                }
            }
        }
        release(backend);
    }
}
