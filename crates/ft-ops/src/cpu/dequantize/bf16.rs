//! Dequantization of a part of a row to bf16, for the packed operands of bf16 products: 32 elements at a time, with AVX-512. The
//! values are those of `dequantize`, rounded to the nearest bf16 as the processor rounds them (f32 numbers below 2^-126 become 0).

use crate::quantized::{BLOCK, QData, QMatrixView, scale_and_minimum};
use half::bf16;
use std::arch::x86_64::*;

/// Elements that are dequantized at a time.
pub(crate) const STEP: usize = 32;

/// True if `dequantize` supports this weight, and the CPU if it has AVX-512 (F, BW, VL): no step of `STEP` columns has two scales.
pub(crate) fn fits(view: &QMatrixView<'_>) -> bool {
    let whole = match view.codes {
        QData::Int8 { group, .. } | QData::Int4 { group, .. } => group >= view.columns || group.is_multiple_of(STEP),
        QData::Nf4 { .. } => true,
        QData::Scaled(_) | QData::Bf16 { .. } => false,
    };
    whole && view.columns.is_multiple_of(STEP) && is_x86_feature_detected!("avx512bf16")
}

/// Dequantizes columns `start..start + to.len()` of row `row`, and prefetches the codes that are `ahead` rows and columns after
/// them. For a weight that `fits`. Panics outside the weight, and unless both ends are multiples of `STEP`.
/// # Safety
/// The CPU must have AVX-512 (F, BW, VL, BF16).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn dequantize(
    view: &QMatrixView<'_>,
    (row, start): (usize, usize),
    ahead: (usize, usize),
    to: &mut [bf16],
) {
    debug_assert!(view.fits() && fits(view));
    assert!(row < view.rows && start <= view.columns && to.len() <= view.columns - start);
    let (to, rest) = to.as_chunks_mut::<STEP>();
    assert!(rest.is_empty() && start.is_multiple_of(STEP));
    match view.codes {
        QData::Int8 {
            codes,
            stride,
            group,
            scales,
        } => {
            let codes = codes[row * stride + start..].as_chunks::<STEP>().0;
            let groups = view.columns.div_ceil(group);
            let steps = codes.iter().zip(to);
            in_groups(group, start, &scales[row * groups..][..groups], steps, |scale| {
                let scale = _mm512_set1_ps(*scale);
                move |codes: &[u8; STEP]| {
                    prefetch(codes, ahead.0 * stride + ahead.1);
                    int8(codes, scale)
                }
            });
        }
        QData::Int4 {
            codes,
            stride,
            group,
            scales,
        } => {
            let codes = codes[row * stride + start / 2..].as_chunks::<{ STEP / 2 }>().0;
            let groups = view.columns.div_ceil(group);
            let steps = codes.iter().zip(to);
            let numbers: [f32; 16] = std::array::from_fn(|code| code as f32);
            let numbers = load(&numbers);
            in_groups(group, start, &scales[row * groups..][..groups], steps, |word| {
                let (scale, minimum) = scale_and_minimum(*word);
                // The product of 4 and 8 bits is exact: with or without FMA, the sum is the same.
                let values = _mm512_add_ps(_mm512_mul_ps(numbers, _mm512_set1_ps(scale)), _mm512_set1_ps(minimum));
                let table = rounded_twice(values);
                move |codes: &[u8; STEP / 2]| {
                    prefetch(codes, ahead.0 * stride + ahead.1 / 2);
                    look_up(codes, table)
                }
            });
        }
        QData::Nf4 { codes, levels, absmax } => {
            let first = row * view.columns + start;
            let codes = codes[first / 2..].as_chunks::<{ STEP / 2 }>().0;
            let levels = load(levels);
            let mut table = _mm512_setzero_si512();
            for (i, (codes, to)) in codes.iter().zip(to).enumerate() {
                let at = first + i * STEP;
                if i == 0 || at.is_multiple_of(BLOCK) {
                    table = rounded_twice(_mm512_mul_ps(levels, _mm512_set1_ps(absmax.get(at / BLOCK))));
                }
                prefetch(codes, (ahead.0 * view.columns + ahead.1) / 2);
                store(to, look_up(codes, table));
            }
        }
        // Refused by `fits`.
        QData::Scaled(_) | QData::Bf16 { .. } => {}
    }
}

/// Dequantizes steps of a row from column `start` on. `values` returns, for the scale of a group, how to dequantize its steps.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn in_groups<'a, S, C: 'a, F: Fn(&C) -> __m512i>(
    group: usize,
    start: usize,
    scales: &[S],
    mut steps: impl Iterator<Item = (&'a C, &'a mut [bf16; STEP])>,
    values: impl Fn(&S) -> F,
) {
    let mut count = (group - start % group).div_ceil(STEP);
    for scale in &scales[start / group..] {
        let dequantized = values(scale);
        for _ in 0..count {
            let Some((codes, to)) = steps.next() else { return };
            store(to, dequantized(codes));
        }
        count = group.div_ceil(STEP);
    }
}

/// Prefetches what is `bytes` after `codes`; that may be outside the weight.
#[inline(always)]
fn prefetch<const N: usize>(codes: &[u8; N], bytes: usize) {
    // SAFETY: a prefetch may have any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(codes.as_ptr().wrapping_add(bytes).cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(values: &[f32; 16]) -> __m512 {
    // SAFETY: 16 floats are read.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn store(to: &mut [bf16; STEP], values: __m512i) {
    // SAFETY: 32 numbers of two bytes are written.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), values) }
}

/// Signed bytes times a scale.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn int8(codes: &[u8; STEP], scale: __m512) -> __m512i {
    // SAFETY: 32 bytes are read.
    let codes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
    let half = |codes| _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)), scale);
    let (low, high) = (
        half(_mm256_castsi256_si128(codes)),
        half(_mm256_extracti128_si256::<1>(codes)),
    );
    // SAFETY: both types are 512 bits.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// Rounds a table of 16, and repeats it: so bit 4 of an index does not count.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn rounded_twice(table: __m512) -> __m512i {
    // SAFETY: both types are 512 bits.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(table, table)) }
}

/// Looks up two codes of each byte, the first in its high half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn look_up(codes: &[u8; STEP / 2], table: __m512i) -> __m512i {
    // SAFETY: 16 bytes are read.
    let codes = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(codes.as_ptr().cast()) });
    let index = _mm512_or_si512(_mm512_srli_epi32::<4>(codes), _mm512_slli_epi32::<16>(codes));
    _mm512_permutexvar_epi16(index, table)
}
