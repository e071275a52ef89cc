//! AMX with bf16: 8 registers of 16 rows x 64 bytes. Stable Rust offers it only as inline assembly.
//!
//! One call multiplies a panel of A (32 rows) with a panel of B (32 columns): 4 registers hold sums, 2 hold A, 2
//! hold B. A step of 32 along k is 4 loads and 4 products. Measurements of such kernels on Sapphire Rapids show:
//! - B streams from the L2 cache and must not evict A from the L1 cache: it is loaded with the hint `t1` (+20 %).
//!   The first 16 steps of A (32 KB) stay in the L1 cache, the rest is loaded with `t1` too;
//! - writing a finished tile of C costs a fifth of the time unless it is interleaved with the products of the next
//!   tile.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

/// Bytes of one step of a panel: 32 vectors of 32 bf16.
pub(super) const STEP: usize = 2048;
/// Number of f32 of a tile of C.
pub(super) const TILE: usize = 32 * 32;
/// Steps in which a finished tile is written: 2 of its 32 rows per step.
pub(super) const WRITING: usize = 16;

/// True if the CPU has AMX for bf16 and this process may use it.
pub(in crate::cpu::product) fn available() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let leaves = __cpuid(0).eax;
        let features = if leaves >= 7 { __cpuid_count(7, 0).edx } else { 0 };
        let (bf16, tile) = (features >> 22 & 1, features >> 24 & 1);
        bf16 == 1 && tile == 1 && permitted()
    })
}

/// Requests permission for the tile state from the kernel, once per process.
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    // SAFETY: a system call without addresses.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[repr(C, align(64))]
struct Shapes([u8; 64]);

/// Configures all registers to 16 rows of 64 bytes. `release` undoes it, on the same thread.
/// # Safety
/// AMX must be available.
#[inline]
pub(super) unsafe fn configure() {
    let mut shapes = Shapes([0; 64]);
    shapes.0[0] = 1;
    for i in 0..8 {
        shapes.0[16 + 2 * i] = 64;
        shapes.0[48 + i] = 16;
    }
    // SAFETY: promised by the caller; the instruction reads 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &shapes, options(nostack, readonly)) }
}

/// # Safety
/// AMX must be available.
#[inline]
pub(super) unsafe fn release() {
    // SAFETY: promised by the caller. The upper halves of the vector registers are cleared for the following code.
    unsafe { asm!("tilerelease", "vzeroupper", out("xmm0") _, out("xmm1") _, options(nostack, nomem)) }
}

/// Arguments of one tile computation.
#[derive(Clone, Copy)]
pub(super) struct TileCall {
    pub a: *const u8,
    pub b: *const u8,
    /// Output of the sums: 4 blocks of 16 x 16 f32, 64-byte aligned.
    pub sums: *mut f32,
    /// Steps with A from the L1 cache, after the `WRITING` steps if there is a finished tile.
    pub near: usize,
    /// Steps with A from the L2 cache.
    pub far: usize,
    /// Prefetch address: 256 bytes per step from here on are prefetched into the L2 cache.
    pub ahead: *const u8,
    /// A finished tile to write during the computation, or null.
    pub finished: *const f32,
    /// The position of the finished tile in C, and the bytes from one row of C to the next.
    pub c: *mut f32,
    pub c_row: usize,
    /// Rows of the panel of A that exist: dot products skip the padding.
    pub rows: usize,
}

macro_rules! step {
    ($load_a:literal, $label:literal, $write0:literal, $write1:literal, $write2:literal, $write3:literal) => {
        concat!(
            ".p2align 5\n",
            $label,
            ":\n",
            "tileloaddt1 tmm6, [{b} + {row}]\n",
            $load_a,
            " tmm4, [{a} + {row}]\n",
            $write0,
            "prefetcht1 [{ahead}]\n",
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            "tileloaddt1 tmm7, [{b} + {row} + 1024]\n",
            $write1,
            "prefetcht1 [{ahead} + 64]\n",
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            $load_a,
            " tmm5, [{a} + {row} + 1024]\n",
            $write2,
            "prefetcht1 [{ahead} + 128]\n",
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            $write3,
            "prefetcht1 [{ahead} + 192]\n",
            "tdpbf16ps tmm3, tmm5, tmm7\n",
            "add {a}, 2048\n",
            "add {b}, 2048\n",
            "add {ahead}, 256\n",
            "dec {steps}\n",
            "jnz ",
            $label,
            "b\n",
        )
    };
}

macro_rules! kernel {
    ($(#[$doc:meta])* $name:ident, $write0:literal, $write1:literal, $write2:literal, $write3:literal) => {
        $(#[$doc])*
        /// # Safety
        /// AMX must be available and configured; every address of the call must be readable or writable as its
        /// field requires; `near + far` (plus `WRITING` with a finished tile) must not be 0.
        pub(super) unsafe fn $name(call: &TileCall) {
            // SAFETY: promised by the caller.
            unsafe {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "test {finished}, {finished}",
                    "jz 5f",
                    "mov {steps:e}, 16",
                    step!("tileloadd", "2", $write0, $write1, $write2, $write3),
                    "5:",
                    "mov {steps}, {near}",
                    "test {steps}, {steps}",
                    "jz 8f",
                    step!("tileloadd", "6", "", "", "", ""),
                    "8:",
                    "mov {steps}, {far}",
                    "test {steps}, {steps}",
                    "jz 9f",
                    step!("tileloaddt1", "7", "", "", "", ""),
                    "9:",
                    "tilestored [{sums} + {row}], tmm0",
                    "tilestored [{sums} + {row} + 1024], tmm1",
                    "tilestored [{sums} + {row} + 2048], tmm2",
                    "tilestored [{sums} + {row} + 3072], tmm3",
                    sums = in(reg) call.sums,
                    near = in(reg) call.near,
                    far = in(reg) call.far,
                    c_row = in(reg) call.c_row,
                    row = in(reg) 64usize,
                    a = inout(reg) call.a => _,
                    b = inout(reg) call.b => _,
                    ahead = inout(reg) call.ahead => _,
                    finished = inout(reg) call.finished => _,
                    c = inout(reg) call.c => _,
                    lower = inout(reg) call.c.wrapping_byte_add(16 * call.c_row) => _,
                    steps = out(reg) _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    out("xmm0") _, out("xmm1") _,
                    options(nostack)
                );
            }
        }
    };
}

kernel!(
    /// Computes the sums of a tile; the finished tile replaces the values in C.
    multiply_and_set,
    "vmovaps zmm0, [{finished}]\nvmovaps zmm1, [{finished} + 1024]\n",
    "vmovups [{c}], zmm0\nvmovups [{c} + 64], zmm1\nadd {c}, {c_row}\n",
    "vmovaps zmm0, [{finished} + 2048]\nvmovaps zmm1, [{finished} + 3072]\nadd {finished}, 64\n",
    "vmovups [{lower}], zmm0\nvmovups [{lower} + 64], zmm1\nadd {lower}, {c_row}\n"
);
kernel!(
    /// Computes the sums of a tile; the finished tile is added to the values in C.
    multiply_and_add,
    "vmovups zmm0, [{c}]\nvmovups zmm1, [{c} + 64]\nvaddps zmm0, zmm0, [{finished}]\nvaddps zmm1, zmm1, [{finished} + 1024]\n",
    "vmovups [{c}], zmm0\nvmovups [{c} + 64], zmm1\nadd {c}, {c_row}\n",
    "vmovups zmm0, [{lower}]\nvmovups zmm1, [{lower} + 64]\nvaddps zmm0, zmm0, [{finished} + 2048]\nvaddps zmm1, zmm1, [{finished} + 3072]\n",
    "add {finished}, 64\nvmovups [{lower}], zmm0\nvmovups [{lower} + 64], zmm1\nadd {lower}, {c_row}\n"
);

macro_rules! in_place {
    ($before:literal) => {
        concat!(
            $before,
            "2:\n",
            "tileloadd tmm6, [{b} + {row}]\n",
            "tileloadd tmm4, [{a} + {row}]\n",
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            "tileloadd tmm7, [{b} + {row} + 1024]\n",
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            "tileloadd tmm5, [{a} + {row} + 1024]\n",
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            "tdpbf16ps tmm3, tmm5, tmm7\n",
            "add {a}, 2048\n",
            "add {b}, 2048\n",
            "dec {steps}\n",
            "jnz 2b\n",
            "tilestored [{c} + {c_row}], tmm0\n",
            "tilestored [{c} + {c_row} + 64], tmm1\n",
            "tilestored [{lower} + {c_row}], tmm2\n",
            "tilestored [{lower} + {c_row} + 64], tmm3\n",
        )
    };
}

/// Computes a whole tile in C itself, rows `c_row` floats apart: the sum over `steps` steps, added to the values in
/// C if `add`.
/// # Safety
/// AMX must be available and configured; panels must hold `steps` steps, which must not be 0; all rows of the tile
/// of C must be writable.
pub(super) unsafe fn multiply_in_place(a: *const u8, b: *const u8, steps: usize, c: *mut f32, c_row: usize, add: bool) {
    macro_rules! call {
        ($code:expr) => {
            asm!(
                $code,
                a = inout(reg) a => _,
                b = inout(reg) b => _,
                steps = inout(reg) steps => _,
                row = in(reg) 64usize,
                c = in(reg) c,
                lower = in(reg) c.wrapping_add(16 * c_row),
                c_row = in(reg) 4 * c_row,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            )
        };
    }
    // SAFETY: promised by the caller.
    unsafe {
        if add {
            call!(in_place!(
                "tileloadd tmm0, [{c} + {c_row}]\ntileloadd tmm1, [{c} + {c_row} + 64]\n\
                 tileloadd tmm2, [{lower} + {c_row}]\ntileloadd tmm3, [{lower} + {c_row} + 64]\n"
            ))
        } else {
            call!(in_place!(
                "tilezero tmm0\ntilezero tmm1\ntilezero tmm2\ntilezero tmm3\n"
            ))
        }
    }
}
