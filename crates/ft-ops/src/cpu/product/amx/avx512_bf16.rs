//! The AMX kernels with dot products of bf16 pairs (AVX512-BF16), on operands packed for AMX.
//!
//! A core of an AMD processor, from Zen 4 on, does as many of these instructions per second as fused multiply-adds,
//! each with twice the numbers (iree-org/iree, pull request 15089: 2 times f32). A core of an Intel processor does
//! a quarter as many (measured on Sapphire and Emerald Rapids: half the operations of f32). The vendor name
//! decides, not a measurement: two runs on one machine must take the same path, and a measurement at the start of a
//! program was wrong once in fifty times on a busy machine.

use super::TileOfC;
use super::tile_kernels::{STEP, TILE, TileCall};
use std::arch::x86_64::*;

/// Rows of C that are summed at a time.
const ROWS: usize = 8;

pub(in crate::cpu::product) fn available() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")
}

/// True if these products are faster on this CPU than those in f32.
pub(in crate::cpu::product) fn is_fast() -> bool {
    let maker = __cpuid(0);
    let name = [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes);
    available() && name.as_flattened() == b"AuthenticAMD"
}

/// Reinterprets 16 words as pairs of bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn words(x: __m512i) -> __m512bh {
    // SAFETY: the same bits, read as another type.
    unsafe { std::mem::transmute(x) }
}

/// As `tile_kernels::multiply_and_set` and `multiply_and_add`.
/// # Safety
/// The CPU must have AVX512-BF16; the other conditions are those of these two functions.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn multiply(call: &TileCall, add: bool) {
    // SAFETY: promised by the caller.
    unsafe {
        let steps = call.near + call.far;
        if !call.finished.is_null() {
            for row in 0..32 {
                let c = call.c.wrapping_byte_add(row * call.c_row);
                for half in 0..2 {
                    let from = call.finished.add((row / 16 * 2 + half) * TILE / 4 + row % 16 * 16);
                    let mut sums = _mm512_load_ps(from);
                    if add {
                        sums = _mm512_add_ps(_mm512_loadu_ps(c.add(16 * half)), sums);
                    }
                    _mm512_storeu_ps(c.add(16 * half), sums);
                }
            }
        }
        for row in (0..call.rows).step_by(ROWS) {
            let sums = rows(call.a, call.b, row, steps, [[_mm512_setzero_ps(); 2]; ROWS]);
            for (i, sums) in sums.into_iter().enumerate() {
                for (half, sums) in sums.into_iter().enumerate() {
                    let row = row + i;
                    let to = call.sums.add((row / 16 * 2 + half) * TILE / 4 + row % 16 * 16);
                    _mm512_store_ps(to, sums);
                }
            }
        }
    }
}

/// As `tile_kernels::multiply_in_place`, for the first `there` rows.
/// # Safety
/// The CPU must have AVX512-BF16; the other conditions are those of that function.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn multiply_in_place(a: *const u8, b: *const u8, steps: usize, to: TileOfC, there: usize, add: bool) {
    let TileOfC { c, row: c_row } = to;
    // SAFETY: promised by the caller.
    unsafe {
        for row in (0..there).step_by(ROWS) {
            let mut from = [[_mm512_setzero_ps(); 2]; ROWS];
            let c = c.add(row * c_row);
            if add {
                for (i, from) in from.iter_mut().enumerate() {
                    for (half, from) in from.iter_mut().enumerate() {
                        *from = _mm512_loadu_ps(c.add(i * c_row + 16 * half));
                    }
                }
            }
            let sums = rows(a, b, row, steps, from);
            for (i, sums) in sums.into_iter().enumerate() {
                for (half, sums) in sums.into_iter().enumerate() {
                    _mm512_storeu_ps(c.add(i * c_row + 16 * half), sums);
                }
            }
        }
    }
}

/// Multiplies `ROWS` rows of a panel of A, from `first` on, with a panel of B and adds the products to `sums`.
/// # Safety
/// The CPU must have AVX512-BF16; both panels hold `steps` steps.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows(
    a: *const u8,
    b: *const u8,
    first: usize,
    steps: usize,
    mut sums: [[__m512; 2]; ROWS],
) -> [[__m512; 2]; ROWS] {
    // SAFETY: promised by the caller: a step is 2 blocks of 16 x 16 words on both sides.
    unsafe {
        let mut a = a.add(first * 64).cast::<i32>();
        let mut b = b.cast::<i32>();
        for _ in 0..steps {
            for pair in 0..16 {
                let left = words(_mm512_load_si512(b.add(pair * 16).cast()));
                let right = words(_mm512_load_si512(b.add(256 + pair * 16).cast()));
                for (i, sums) in sums.iter_mut().enumerate() {
                    let x = words(_mm512_set1_epi32(*a.add(i * 16 + pair)));
                    sums[0] = _mm512_dpbf16_ps(sums[0], x, left);
                    sums[1] = _mm512_dpbf16_ps(sums[1], x, right);
                }
            }
            a = a.add(STEP / 4);
            b = b.add(STEP / 4);
        }
    }
    sums
}
