//! Products of a few rows with a bf16 weight on AMX, as in generation. Tiles are loaded from where the weight lies: with so few rows
//! memory is the limit, and packing a weight takes longer than the products. The sums have the bits of the packed product.

use super::super::{Matrix, Operand};
use super::tile_kernels::{STEP, TILE};
use half::bf16;
use std::arch::asm;
use std::mem::offset_of;

/// Most rows of C. Packing a weight, into tiles that are contiguous, pays from about 128 to 256 rows on.
const MOST_ROWS: usize = 128;
/// Bytes of a row of a tile.
const LINE: usize = 64;

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
    /// The weight: 32 rows, `row` bytes apart, of which `steps` steps are read here.
    pub weight: *const u8,
    pub row: usize,
    pub steps: usize,
    /// The steps after them, packed as operand A.
    pub packed: *const u8,
    pub packed_steps: usize,
    /// The rows of C, packed as operand B.
    pub rows: *const u8,
    /// Output of the sums, as those of `TileCall`: 4 blocks of 16 x 16 f32, 64-byte aligned.
    pub sums: *mut f32,
}

/// One step. `$a`: the rows of the weight, `$upper` its second 16 rows, both with rows `$row` bytes apart. `$load`, `$lower_product`,
/// `$upper_product`: text for the second 16 rows of C.
macro_rules! step {
    ($a:literal, $upper:literal, $row:literal, $load:literal, $lower_product:literal, $upper_product:literal) => {
        concat!(
            "tileloadd tmm6, [{rows} + {line}]\n",
            "tileloaddt1 tmm4, [",
            $a,
            " + ",
            $row,
            "]\n",
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            $load,
            $lower_product,
            "tileloaddt1 tmm5, [",
            $upper,
            " + ",
            $row,
            "]\n",
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            $upper_product,
            "add {rows}, 2048\n",
        )
    };
}

macro_rules! kernel {
    ($(#[$doc:meta])* $name:ident, $load:literal, $lower:literal, $upper:literal, $zero:literal, $store:literal) => {
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
                    step!("{weight}", "{upper}", "{row}", $load, $lower, $upper),
                    "add {weight}, 64",
                    "add {upper}, 64",
                    "dec {steps}",
                    "jnz 2b",
                    "3:",
                    "mov {steps}, [{call} + {packed_steps_at}]",
                    "test {steps}, {steps}",
                    "jz 5f",
                    "mov {weight}, [{call} + {packed_at}]",
                    "4:",
                    step!("{weight}", "{weight} + 1024", "{line}", $load, $lower, $upper),
                    "add {weight}, 2048",
                    "dec {steps}",
                    "jnz 4b",
                    "5:",
                    "tilestored [{sums} + {line}], tmm0",
                    "tilestored [{sums} + {line} + 2048], tmm2",
                    $store,
                    steps_at = const offset_of!(UnpackedTileCall, steps),
                    packed_at = const offset_of!(UnpackedTileCall, packed),
                    packed_steps_at = const offset_of!(UnpackedTileCall, packed_steps),
                    call = in(reg) call,
                    line = in(reg) LINE,
                    row = in(reg) call.row,
                    weight = inout(reg) call.weight => _,
                    upper = inout(reg) call.weight.wrapping_add(16 * call.row) => _,
                    rows = inout(reg) call.rows => _,
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
    "tileloadd tmm7, [{rows} + {line} + 1024]\n",
    "tdpbf16ps tmm1, tmm4, tmm7\n",
    "tdpbf16ps tmm3, tmm5, tmm7\n",
    "tilezero tmm1\ntilezero tmm3",
    "tilestored [{sums} + {line} + 1024], tmm1\ntilestored [{sums} + {line} + 3072], tmm3"
);

const _: () = assert!(STEP == 32 * LINE && TILE * 4 == 2 * STEP);
