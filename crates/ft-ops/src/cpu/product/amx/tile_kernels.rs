//! AMX with bf16: 8 registers of 16 rows x 64 bytes. Stable Rust offers it only as inline assembly.
//!
//! One call multiplies a panel of A (32 rows) with a panel of B (32 columns): 4 registers hold sums, 2 hold A, 2
//! hold B. A step of 32 along k is 4 loads and 4 products. Measurements of such kernels on Sapphire Rapids show:
//! - the panel of a weight comes from the L2 cache and must not evict the rows from the L1 cache: it is loaded with the hint
//!   `t1` (+20 %). The last 16 steps of the rows (32 KB) stay in the L1 cache, the others are loaded with `t1` too;
//! - writing a finished tile of C costs a fifth of the time unless it is interleaved with the products of the next
//!   tile.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::mem::offset_of;
use std::sync::OnceLock;

/// Bytes of one step of a panel: 32 vectors of 32 bf16.
pub(super) const STEP: usize = 2048;
/// Number of f32 of a tile of C.
pub(super) const TILE: usize = 32 * 32;
/// Steps in which a finished tile is written: 2 of its 32 rows in each, or a transposed block of 16 x 16 in four.
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
#[repr(C)]
pub(super) struct TileCall {
    pub a: *const u8,
    pub b: *const u8,
    /// Output of the sums: 4 blocks of 16 x 16 f32, 64-byte aligned.
    pub sums: *mut f32,
    /// Steps with both operands from the L2 cache.
    pub far: usize,
    /// Steps after them, with one operand from the L1 cache: not 0, and `WRITING` if there is a finished tile.
    pub near: usize,
    /// A finished tile to write during the computation, or null.
    pub finished: *const f32,
    /// The position of the finished tile in C, and the bytes from one row of C to the next.
    pub c: *mut f32,
    pub c_row: usize,
    /// Rows of the panel of A that exist: dot products skip the padding.
    pub rows: usize,
}

/// One step, with text for four places of it.
macro_rules! step {
    ($load_a:literal, $load_b:literal, $write0:expr, $write1:expr, $write2:expr, $write3:expr) => {
        concat!(
            $load_b,
            " tmm6, [{b} + {row}]\n",
            $load_a,
            " tmm4, [{a} + {row}]\n",
            $write0,
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            $load_b,
            " tmm7, [{b} + {row} + 1024]\n",
            $write1,
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            $load_a,
            " tmm5, [{a} + {row} + 1024]\n",
            $write2,
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            $write3,
            "tdpbf16ps tmm3, tmm5, tmm7\n",
            "add {a}, 2048\n",
            "add {b}, 2048\n",
        )
    };
}

/// Steps in a loop of `{steps}` turns.
macro_rules! turns {
    ($label:literal, $($text:expr),+) => {
        concat!(".p2align 5\n", $label, ":\n", $($text,)+ "dec {steps:e}\n", "jnz ", $label, "b\n")
    };
}

macro_rules! kernel {
    ($(#[$doc:meta])* $name:ident($call:ident), $near_a:literal, $near_b:literal, $turns:literal, $writing:expr, $($operand:tt)*) => {
        $(#[$doc])*
        /// # Safety
        /// AMX and AVX-512 must be available, and AMX configured; every address of the call must be readable or writable
        /// as its field requires.
        #[target_feature(enable = "avx512f")]
        pub(super) unsafe fn $name($call: &TileCall) {
            // SAFETY: promised by the caller.
            unsafe {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "mov {steps}, [{call} + {far}]",
                    "test {steps}, {steps}",
                    "jz 5f",
                    turns!("3", step!("tileloaddt1", "tileloaddt1", "", "", "", "")),
                    "5:",
                    "test {finished}, {finished}",
                    "jz 8f",
                    concat!("mov {steps:e}, ", $turns),
                    $writing,
                    "jmp 9f",
                    "8:",
                    "mov {steps}, [{call} + {near}]",
                    turns!("6", step!($near_a, $near_b, "", "", "", "")),
                    "9:",
                    "mov {steps}, [{call} + {sums}]",
                    "tilestored [{steps} + {row}], tmm0",
                    "tilestored [{steps} + {row} + 1024], tmm1",
                    "tilestored [{steps} + {row} + 2048], tmm2",
                    "tilestored [{steps} + {row} + 3072], tmm3",
                    near = const offset_of!(TileCall, near),
                    far = const offset_of!(TileCall, far),
                    sums = const offset_of!(TileCall, sums),
                    call = in(reg) $call,
                    row = in(reg) 64usize,
                    a = inout(reg) $call.a => _,
                    b = inout(reg) $call.b => _,
                    finished = inout(reg) $call.finished => _,
                    c = inout(reg) $call.c => _,
                    c_row = in(reg) $call.c_row,
                    $($operand)*
                    steps = out(reg) _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                    out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                    out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm16") _, out("zmm17") _,
                    out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
                    out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _, out("zmm29") _,
                    out("zmm30") _, out("zmm31") _,
                    options(nostack)
                );
            }
        }
    };
}

/// Writes two of the 32 rows of the finished tile in each of 16 steps. `$load0`, `$load1`: text that loads a row of its upper and of
/// its lower half, and adds the values in C if they stay.
macro_rules! rows_of_tile {
    ($load0:literal, $load1:literal) => {
        turns!(
            "2",
            step!(
                "tileloadd",
                "tileloaddt1",
                $load0,
                "vmovups [{c}], zmm0\nvmovups [{c} + 64], zmm1\nadd {c}, {c_row}\n",
                $load1,
                "add {finished}, 64\nvmovups [{lower}], zmm0\nvmovups [{lower} + 64], zmm1\nadd {lower}, {c_row}\n"
            )
        )
    };
}

kernel!(
    /// Computes the sums of a tile, with A as the operand in the L1 cache; the finished tile replaces the values in C.
    multiply_and_set(call), "tileloadd", "tileloaddt1", "16",
    rows_of_tile!(
        "vmovaps zmm0, [{finished}]\nvmovaps zmm1, [{finished} + 1024]\n",
        "vmovaps zmm0, [{finished} + 2048]\nvmovaps zmm1, [{finished} + 3072]\n"
    ),
    lower = inout(reg) call.c.wrapping_byte_add(16 * call.c_row) => _,
);
kernel!(
    /// As `multiply_and_set`, but the finished tile is added to the values in C.
    multiply_and_add(call), "tileloadd", "tileloaddt1", "16",
    rows_of_tile!(
        "vmovups zmm0, [{c}]\nvmovups zmm1, [{c} + 64]\nvaddps zmm0, zmm0, [{finished}]\nvaddps zmm1, zmm1, [{finished} + 1024]\n",
        "vmovups zmm0, [{lower}]\nvmovups zmm1, [{lower} + 64]\nvaddps zmm0, zmm0, [{finished} + 2048]\nvaddps zmm1, zmm1, [{finished} + 3072]\n"
    ),
    lower = inout(reg) call.c.wrapping_byte_add(16 * call.c_row) => _,
);

/// Transposes the four blocks of 16 x 16 of a finished tile and writes them: a block in four steps, as `pack::transpose` does.
macro_rules! transposed_tile {
    ($store:ident) => {
        turns!(
            "2",
            step!(
                "tileloaddt1",
                "tileloadd",
                pairs!("0", "1", "2", "3", "16", "17", "18", "19", "0", "64", "128", "192"),
                pairs!("4", "5", "6", "7", "20", "21", "22", "23", "256", "320", "384", "448"),
                pairs!("8", "9", "10", "11", "24", "25", "26", "27", "512", "576", "640", "704"),
                concat!(
                    pairs!(
                        "12", "13", "14", "15", "28", "29", "30", "31", "768", "832", "896", "960"
                    ),
                    "add {finished}, 1024\n"
                )
            ),
            step!(
                "tileloaddt1",
                "tileloadd",
                fours!("16", "17", "18", "19", "0", "1", "2", "3"),
                fours!("20", "21", "22", "23", "4", "5", "6", "7"),
                fours!("24", "25", "26", "27", "8", "9", "10", "11"),
                fours!("28", "29", "30", "31", "12", "13", "14", "15")
            ),
            step!(
                "tileloaddt1",
                "tileloadd",
                eights!("0", "4", "8", "12", "16", "20", "24", "28"),
                eights!("1", "5", "9", "13", "17", "21", "25", "29"),
                eights!("2", "6", "10", "14", "18", "22", "26", "30"),
                eights!("3", "7", "11", "15", "19", "23", "27", "31")
            ),
            step!(
                "tileloaddt1",
                "tileloadd",
                $store!("16", "20", "24", "28", "0", "4", "8", "12"),
                $store!("17", "21", "25", "29", "1", "5", "9", "13"),
                $store!("18", "22", "26", "30", "2", "6", "10", "14"),
                concat!(
                    $store!("19", "23", "27", "31", "3", "7", "11", "15"),
                    "lea {c}, [{c} + 2 * {four_rows}]\nadd {c}, {four_rows}\n",
                    // After two blocks: the second 16 columns of C.
                    "cmp {steps:e}, 3\ncmove {c}, {right}\n"
                )
            )
        )
    };
}

/// Loads four rows and interleaves the words of two.
macro_rules! pairs {
    ($r0:literal, $r1:literal, $r2:literal, $r3:literal, $t0:literal, $t1:literal, $t2:literal, $t3:literal,
     $o0:literal, $o1:literal, $o2:literal, $o3:literal) => {
        concat!(
            "vmovaps zmm",
            $r0,
            ", [{finished} + ",
            $o0,
            "]\nvmovaps zmm",
            $r1,
            ", [{finished} + ",
            $o1,
            "]\n",
            "vmovaps zmm",
            $r2,
            ", [{finished} + ",
            $o2,
            "]\nvmovaps zmm",
            $r3,
            ", [{finished} + ",
            $o3,
            "]\n",
            "vunpcklps zmm",
            $t0,
            ", zmm",
            $r0,
            ", zmm",
            $r1,
            "\nvunpckhps zmm",
            $t1,
            ", zmm",
            $r0,
            ", zmm",
            $r1,
            "\n",
            "vunpcklps zmm",
            $t2,
            ", zmm",
            $r2,
            ", zmm",
            $r3,
            "\nvunpckhps zmm",
            $t3,
            ", zmm",
            $r2,
            ", zmm",
            $r3,
            "\n",
        )
    };
}

/// Interleaves pairs of words.
macro_rules! fours {
    ($t0:literal, $t1:literal, $t2:literal, $t3:literal, $s0:literal, $s1:literal, $s2:literal, $s3:literal) => {
        concat!(
            "vunpcklpd zmm",
            $s0,
            ", zmm",
            $t0,
            ", zmm",
            $t2,
            "\nvunpckhpd zmm",
            $s1,
            ", zmm",
            $t0,
            ", zmm",
            $t2,
            "\n",
            "vunpcklpd zmm",
            $s2,
            ", zmm",
            $t1,
            ", zmm",
            $t3,
            "\nvunpckhpd zmm",
            $s3,
            ", zmm",
            $t1,
            ", zmm",
            $t3,
            "\n",
        )
    };
}

/// Joins the lanes of 128 bits of two registers, twice.
macro_rules! eights {
    ($s0:literal, $s1:literal, $s2:literal, $s3:literal, $t0:literal, $t1:literal, $t2:literal, $t3:literal) => {
        concat!(
            "vshuff32x4 zmm",
            $t0,
            ", zmm",
            $s0,
            ", zmm",
            $s1,
            ", 0x88\nvshuff32x4 zmm",
            $t1,
            ", zmm",
            $s0,
            ", zmm",
            $s1,
            ", 0xDD\n",
            "vshuff32x4 zmm",
            $t2,
            ", zmm",
            $s2,
            ", zmm",
            $s3,
            ", 0x88\nvshuff32x4 zmm",
            $t3,
            ", zmm",
            $s2,
            ", zmm",
            $s3,
            ", 0xDD\n",
        )
    };
}

/// The last shuffles of rows i, i + 4, i + 8 and i + 12 of C.
macro_rules! sixteens {
    ($t0:literal, $t1:literal, $t2:literal, $t3:literal, $s0:literal, $s1:literal, $s2:literal, $s3:literal) => {
        concat!(
            "vshuff32x4 zmm",
            $s0,
            ", zmm",
            $t0,
            ", zmm",
            $t2,
            ", 0x88\nvshuff32x4 zmm",
            $s1,
            ", zmm",
            $t1,
            ", zmm",
            $t3,
            ", 0x88\n",
            "vshuff32x4 zmm",
            $s2,
            ", zmm",
            $t0,
            ", zmm",
            $t2,
            ", 0xDD\nvshuff32x4 zmm",
            $s3,
            ", zmm",
            $t1,
            ", zmm",
            $t3,
            ", 0xDD\n",
        )
    };
}

/// Stores four rows of C.
macro_rules! set_rows {
    ($t0:literal, $t1:literal, $t2:literal, $t3:literal, $s0:literal, $s1:literal, $s2:literal, $s3:literal) => {
        concat!(
            sixteens!($t0, $t1, $t2, $t3, $s0, $s1, $s2, $s3),
            "vmovups [{c}], zmm",
            $s0,
            "\nvmovups [{c} + {four_rows}], zmm",
            $s1,
            "\n",
            "vmovups [{c} + 2 * {four_rows}], zmm",
            $s2,
            "\nadd {c}, {four_rows}\n",
            "vmovups [{c} + 2 * {four_rows}], zmm",
            $s3,
            "\nsub {c}, {four_rows}\nadd {c}, {c_row}\n",
        )
    };
}

/// Adds four rows to C.
macro_rules! add_rows {
    ($t0:literal, $t1:literal, $t2:literal, $t3:literal, $s0:literal, $s1:literal, $s2:literal, $s3:literal) => {
        concat!(
            sixteens!($t0, $t1, $t2, $t3, $s0, $s1, $s2, $s3),
            "vaddps zmm",
            $s0,
            ", zmm",
            $s0,
            ", [{c}]\nvaddps zmm",
            $s1,
            ", zmm",
            $s1,
            ", [{c} + {four_rows}]\n",
            "vaddps zmm",
            $s2,
            ", zmm",
            $s2,
            ", [{c} + 2 * {four_rows}]\n",
            "vmovups [{c}], zmm",
            $s0,
            "\nvmovups [{c} + {four_rows}], zmm",
            $s1,
            "\n",
            "vmovups [{c} + 2 * {four_rows}], zmm",
            $s2,
            "\nadd {c}, {four_rows}\n",
            "vaddps zmm",
            $s3,
            ", zmm",
            $s3,
            ", [{c} + 2 * {four_rows}]\n",
            "vmovups [{c} + 2 * {four_rows}], zmm",
            $s3,
            "\nsub {c}, {four_rows}\nadd {c}, {c_row}\n",
        )
    };
}

kernel!(
    /// Computes the sums of a tile, with B as the operand in the L1 cache; the transposed finished tile replaces the values in C.
    multiply_and_set_transposed(call), "tileloaddt1", "tileloadd", "4",
    transposed_tile!(set_rows),
    right = in(reg) call.c.wrapping_byte_add(64),
    four_rows = in(reg) 4 * call.c_row,
);
kernel!(
    /// As `multiply_and_set_transposed`, but the finished tile is added to the values in C.
    multiply_and_add_transposed(call), "tileloaddt1", "tileloadd", "4",
    transposed_tile!(add_rows),
    right = in(reg) call.c.wrapping_byte_add(64),
    four_rows = in(reg) 4 * call.c_row,
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
