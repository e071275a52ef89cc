//! x·Wᵀ for a few rows x and a bf16 weight on AMX, as in generation. Tiles are loaded from where the weight lies: with so few rows
//! memory is the limit, and packing a weight takes longer than the products. The sums have the bits of the packed product.
//! (`unpacked.rs` does the same with dot products.)
//!
//! Tiles of the weight are loaded without the hint `t1`, which does not keep lines in the L1 cache. A weight in a file rarely begins
//! on a cache line, so two neighboring tiles share each line, and with `t1` it would be fetched twice.

use super::super::{Matrix, Operand};
use super::tile_kernels::{STEP, TILE};
use half::bf16;
use std::arch::asm;
use std::mem::offset_of;

/// Most rows of C. With 96 rows and more, packing a weight first takes no longer.
pub(super) const MOST_ROWS: usize = 64;
/// Bytes of a row of a tile.
const TILE_ROW: usize = 64;

/// Returns the elements of a weight if its tiles are loaded from where it lies, in a product with `rows` rows of C.
pub(super) fn elements<'a>(weight: &Matrix<'a>, rows: usize) -> Option<&'a [bf16]> {
    match weight.values {
        Operand::Bf16(elements) if weight.k_contiguous && rows <= MOST_ROWS => Some(elements),
        _ => None,
    }
}

/// Arguments of the product of 32 rows of a weight (32 columns of C) with a panel of rows of C.
#[repr(C)]
pub(super) struct UnpackedTileCall {
    /// The weight: 32 rows, `weight_row` bytes apart, of which `steps` steps are read here.
    pub weight: *const u8,
    pub weight_row: usize,
    pub steps: usize,
    /// The steps after them, packed as operand A.
    pub packed_weight: *const u8,
    pub packed_steps: usize,
    /// The activations, packed as operand B.
    pub activations: *const u8,
    /// Output of the sums, as those of `TileCall`: 4 blocks of 16 x 16 f32, 64-byte aligned.
    pub sums: *mut f32,
}

/// One step. `$first` and `$second`: the first and the second 16 rows of the weight, `$row` bytes apart. `$load`, `$first_product`,
/// `$second_product`: text that loads the second 16 rows of the activations and multiplies the two halves of the weight with them.
macro_rules! step {
    ($first:literal, $second:literal, $row:literal, $load:literal, $first_product:literal, $second_product:literal) => {
        concat!(
            "tileloadd tmm6, [{activations} + {tile_row}]\n",
            "tileloadd tmm4, [",
            $first,
            " + ",
            $row,
            "]\n",
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            $load,
            $first_product,
            "tileloadd tmm5, [",
            $second,
            " + ",
            $row,
            "]\n",
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            $second_product,
            "add {activations}, 2048\n",
        )
    };
}

/// `$zero`, `$store`: text that clears and stores the sums of the second 16 rows of C. The others: see `step`.
macro_rules! kernel {
    ($(#[$doc:meta])* $name:ident, $load:literal, $first_product:literal, $second_product:literal, $zero:literal, $store:literal) => {
        $(#[$doc])*
        /// # Safety
        /// AMX must be available and configured; every address of the call must be readable or writable as its field
        /// requires.
        pub(super) unsafe fn $name(call: &UnpackedTileCall) {
            // SAFETY: promised by the caller.
            unsafe {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm2",
                    $zero,
                    "mov {steps}, [{call} + {steps_at}]",
                    "test {steps}, {steps}",
                    "jz 3f",
                    ".p2align 5",
                    "2:",
                    step!("{weight}", "{second}", "{weight_row}", $load, $first_product, $second_product),
                    "add {weight}, 64",
                    "add {second}, 64",
                    "dec {steps}",
                    "jnz 2b",
                    "3:",
                    "mov {steps}, [{call} + {packed_steps_at}]",
                    "test {steps}, {steps}",
                    "jz 5f",
                    "mov {weight}, [{call} + {packed_at}]",
                    "4:",
                    step!("{weight}", "{weight} + 1024", "{tile_row}", $load, $first_product, $second_product),
                    "add {weight}, 2048",
                    "dec {steps}",
                    "jnz 4b",
                    "5:",
                    "tilestored [{sums} + {tile_row}], tmm0",
                    "tilestored [{sums} + {tile_row} + 2048], tmm2",
                    $store,
                    steps_at = const offset_of!(UnpackedTileCall, steps),
                    packed_at = const offset_of!(UnpackedTileCall, packed_weight),
                    packed_steps_at = const offset_of!(UnpackedTileCall, packed_steps),
                    call = in(reg) call,
                    tile_row = in(reg) TILE_ROW,
                    weight_row = in(reg) call.weight_row,
                    weight = inout(reg) call.weight => _,
                    second = inout(reg) call.weight.wrapping_add(16 * call.weight_row) => _,
                    activations = inout(reg) call.activations => _,
                    sums = in(reg) call.sums,
                    steps = out(reg) _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                );
            }
        }
    };
}

kernel!(
    /// Computes the sums of at most 16 rows of C: blocks 0 and 2.
    multiply_16,
    "",
    "",
    "",
    "",
    ""
);
kernel!(
    /// Computes the sums of at most 32 rows of C.
    multiply_32,
    "tileloadd tmm7, [{activations} + {tile_row} + 1024]\n",
    "tdpbf16ps tmm1, tmm4, tmm7\n",
    "tdpbf16ps tmm3, tmm5, tmm7\n",
    "tilezero tmm1\ntilezero tmm3",
    "tilestored [{sums} + {tile_row} + 1024], tmm1\ntilestored [{sums} + {tile_row} + 3072], tmm3"
);

const _: () = assert!(STEP == 32 * TILE_ROW && TILE * 4 == 2 * STEP);
