//! AMX emulator for machines without AMX. The AMX instructions raise SIGILL; the signal handler executes them and
//! continues after them. So the real assembly and its encoding are tested on every machine: the products by the
//! unit tests, whole models with `FT_CPU=amx-emulated`.
//!
//! Semantics and encodings: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, and the
//! Architecture Instruction Set Extensions reference, chapter on AMX.

use std::cell::RefCell;
use std::sync::OnceLock;

/// 16 rows x 16 words.
type Tile = [[u32; 16]; 16];
/// 8 tile registers.
type Registers = [Tile; 8];

thread_local! {
    static REGISTERS: RefCell<Registers> = const { RefCell::new([[[0; 16]; 16]; 8]) };
}

/// Installs the emulator for this process. Returns false if the system refuses.
pub(super) fn install() -> bool {
    static DONE: OnceLock<bool> = OnceLock::new();
    *DONE.get_or_init(|| {
        if super::tile_kernels::available() {
            return true;
        }
        // SAFETY: a zeroed `sigaction` is valid; the handler only accesses the context argument and a thread local.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()) == 0
        }
    })
}

extern "C" fn handler(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid context; the bytes at its instruction pointer were just executed, and more code
    // follows them.
    unsafe {
        let gregs = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let next = |gregs: &[i64]| std::slice::from_raw_parts(gregs[libc::REG_RIP as usize] as *const u8, 12);
        let start = gregs[libc::REG_RIP as usize];
        // The AMX instructions behind it too: a signal takes longer than most of them.
        while let Some(length) = execute(next(gregs), gregs) {
            gregs[libc::REG_RIP as usize] += length as i64;
        }
        if gregs[libc::REG_RIP as usize] == start {
            libc::signal(libc::SIGILL, libc::SIG_DFL);
        }
    }
}

/// Executes one instruction. Returns its length, or None if it is not an AMX instruction.
unsafe fn execute(code: &[u8], gregs: &[i64]) -> Option<usize> {
    // VEX with three bytes, opcode map 0F38, W 0, L 0.
    let [0xC4, first, second, opcode, modrm, ..] = *code else {
        return None;
    };
    if first & 0x1F != 2 || second & 0x84 != 0 {
        return None;
    }
    let (prefix, register) = (second & 3, (modrm >> 3 & 7) as usize);
    let memory = modrm >> 6 != 3;
    REGISTERS.with_borrow_mut(|tiles| match (opcode, prefix, memory) {
        (0x49, 0, true) => Some(address(code, gregs)?.length), // ldtilecfg
        (0x49, 0, false) => Some(5),                           // tilerelease
        (0x49, 3, false) => {
            tiles[register] = [[0; 16]; 16];
            Some(5)
        }
        // tileloadd, tileloaddt1, tilestored
        (0x4B, 1..=3, true) => {
            let at = address(code, gregs)?;
            for (i, row) in tiles[register].iter_mut().enumerate() {
                let place = (at.base as *mut [u32; 16]).wrapping_byte_offset(i as isize * at.index as isize);
                // SAFETY: the memory that the instruction itself would access.
                unsafe {
                    if prefix == 2 {
                        place.write_unaligned(*row)
                    } else {
                        *row = place.read_unaligned()
                    }
                }
            }
            Some(at.length)
        }
        (0x5C, 2, false) => {
            let (a, b) = (tiles[(modrm & 7) as usize], tiles[(!(second >> 3) & 7) as usize]);
            // SAFETY: only kernels for CPUs with AVX-512 contain the instruction.
            unsafe { multiply(&mut tiles[register], &a, &b) };
            Some(5)
        }
        _ => None,
    })
}

/// Adds the product of two tiles of bf16 pairs to `sums`.
#[target_feature(enable = "avx512f")]
fn multiply(sums: &mut Tile, a: &Tile, b: &Tile) {
    let wide = |half: u32| f32::from_bits(half << 16);
    for (sums, a) in sums.iter_mut().zip(a) {
        for (a, b) in a.iter().zip(b) {
            for (sum, b) in sums.iter_mut().zip(b) {
                let products = wide(*a) * wide(*b) + wide(a >> 16) * wide(b >> 16);
                *sum = (f32::from_bits(*sum) + products).to_bits();
            }
        }
    }
}

struct Address {
    base: i64,
    /// Scaled index: the distance between two rows.
    index: i64,
    /// Bytes of the whole instruction.
    length: usize,
}

/// Decodes ModRM, SIB and displacement. The VEX bits that extend registers are stored inverted.
fn address(code: &[u8], gregs: &[i64]) -> Option<Address> {
    let (extend_index, extend_base) = (!code[1] >> 6 & 1, !code[1] >> 5 & 1);
    let (mode, rm) = (code[4] >> 6, code[4] & 7);
    let (mut length, mut base, mut index) = (5, rm | extend_base << 3, None);
    if rm == 4 {
        let sib = code[5];
        base = sib & 7 | extend_base << 3;
        let number = sib >> 3 & 7 | extend_index << 3;
        index = (number != 4).then_some((number, sib >> 6));
        length = 6;
    }
    let displacement = match mode {
        0 if base & 7 == 5 => return None,
        0 => 0,
        1 => code[length] as i8 as i64,
        _ => i32::from_le_bytes(code[length..length + 4].try_into().ok()?) as i64,
    };
    length += [0, 1, 4][mode as usize];
    Some(Address {
        base: general(gregs, base) + displacement,
        index: index.map_or(0, |(number, scale)| general(gregs, number) << scale),
        length,
    })
}

fn general(gregs: &[i64], number: u8) -> i64 {
    use libc::*;
    let order = [
        REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8, REG_R9, REG_R10, REG_R11,
        REG_R12, REG_R13, REG_R14, REG_R15,
    ];
    gregs[order[number as usize] as usize]
}
