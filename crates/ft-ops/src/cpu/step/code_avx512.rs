//! Quantization of a block of moments with AVX-512: 16 look-ups in the tables at a time, with the bits of the plain code.

use super::super::math::mask16;
use super::code::{BUCKETS, CUT, INSIDE, LOWEST, QuantizationTable};
use std::arch::x86_64::*;

/// Number of f32 in a vector register.
const VECTOR: usize = 16;

/// As `QuantizationTable::quantize`.
/// # Safety
/// The CPU must have AVX-512 (F, BW, DQ, VL); `codes` has the length of `values`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn quantize(table: &QuantizationTable, values: &[f32], codes: &mut [u8]) -> f32 {
    let n = values.len();
    let load = |at: usize| {
        // SAFETY: the mask keeps to the values.
        unsafe { _mm512_maskz_loadu_ps(mask16(n - at), values[at..].as_ptr()) }
    };
    let mut most = _mm512_setzero_ps();
    for at in (0..n).step_by(VECTOR) {
        // `max` returns its second operand if one is NaN: NaN is left out, as in the plain code.
        most = _mm512_max_ps(_mm512_abs_ps(load(at)), most);
    }
    let most = _mm512_reduce_max_ps(most);
    if most == 0.0 {
        codes.fill(0);
        return 0.0;
    }
    let (lowest, last) = (_mm512_set1_epi32(LOWEST as i32), _mm512_set1_epi32(BUCKETS as i32 - 1));
    let negative = _mm512_set1_epi32(BUCKETS as i32);
    for at in (0..n).step_by(VECTOR) {
        let x = load(at);
        let part = _mm512_div_ps(x, _mm512_set1_ps(most));
        let bits = _mm512_castps_si512(part);
        let size = _mm512_srli_epi32::<CUT>(_mm512_and_si512(bits, _mm512_set1_epi32(0x7FFF_FFFF)));
        // As `saturating_sub`: never negative.
        let bucket = _mm512_min_epu32(_mm512_sub_epi32(_mm512_max_epu32(size, lowest), lowest), last);
        let bucket = _mm512_mask_add_epi32(bucket, _mm512_movepi32_mask(bits), bucket, negative);
        // SAFETY: the index is below `2 * BUCKETS`.
        let word = unsafe { _mm512_i32gather_epi32::<4>(bucket, table.buckets.as_ptr().cast()) };
        let place = _mm512_xor_si512(bits, _mm512_srai_epi32::<31>(bits));
        let place = _mm512_and_si512(place, _mm512_set1_epi32(INSIDE as i32));
        let above = _mm512_cmpgt_epi32_mask(place, _mm512_srli_epi32::<8>(word));
        let code = _mm512_and_si512(word, _mm512_set1_epi32(0xFF));
        let mut code = _mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(1));
        if !table.signed {
            // What is not zero never becomes zero.
            let positive = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, _mm512_setzero_ps());
            code = _mm512_mask_max_epi32(code, positive, code, _mm512_set1_epi32(1));
        }
        // SAFETY: the mask keeps to the codes.
        unsafe { _mm512_mask_cvtepi32_storeu_epi8(codes[at..].as_mut_ptr().cast(), mask16(n - at), code) }
    }
    most
}

/// As `QuantizationTable::dequantize`.
/// # Safety
/// The CPU must have AVX-512 (F, BW, DQ, VL); `values` has the length of `codes`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn dequantize(table: &QuantizationTable, codes: &[u8], most: f32, values: &mut [f32]) {
    let n = codes.len();
    for at in (0..n).step_by(VECTOR) {
        let mask = mask16(n - at);
        // SAFETY: the mask keeps to codes and values; a code is below 256.
        unsafe {
            let code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, codes[at..].as_ptr().cast()));
            let value = _mm512_i32gather_ps::<4>(code, table.values.as_ptr());
            let value = _mm512_mul_ps(value, _mm512_set1_ps(most));
            _mm512_mask_storeu_ps(values[at..].as_mut_ptr(), mask, value);
        }
    }
}
