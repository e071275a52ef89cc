//! Quantization of a block of moments with AVX-512: 16 look-ups in the tables at a time, with the bits of the plain code.
//!
//! AdamW has a kernel of its own, with fewer passes over a block: 18 % less time than the loops apart (docs/lab-book.md).

use super::super::math::mask16;
use super::code::{BLOCK, BUCKETS, CUT, INSIDE, LOWEST, QuantizationTable};
use super::rules::Adamw;
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
    for at in (0..n).step_by(VECTOR) {
        store_codes(&mut codes[at..], nearest(table, load(at), most));
    }
    most
}

/// Returns the codes of 16 values of a block with the absmax `most`, which is not 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn nearest(table: &QuantizationTable, x: __m512, most: f32) -> __m512i {
    let (lowest, last) = (_mm512_set1_epi32(LOWEST as i32), _mm512_set1_epi32(BUCKETS as i32 - 1));
    let negative = _mm512_set1_epi32(BUCKETS as i32);
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
    let code = _mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(1));
    if table.signed {
        return code;
    }
    // What is not zero never becomes zero.
    let positive = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, _mm512_setzero_ps());
    _mm512_mask_max_epi32(code, positive, code, _mm512_set1_epi32(1))
}

/// Writes the first codes, as many as `to` holds, 16 at most.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn store_codes(to: &mut [u8], code: __m512i) {
    // SAFETY: the mask keeps to the slice.
    unsafe { _mm512_mask_cvtepi32_storeu_epi8(to.as_mut_ptr().cast(), mask16(to.len()), code) }
}

/// As `QuantizationTable::dequantize`.
/// # Safety
/// The CPU must have AVX-512 (F, BW, DQ, VL); `values` has the length of `codes`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn dequantize(table: &QuantizationTable, codes: &[u8], most: f32, values: &mut [f32]) {
    for (codes, values) in codes.chunks(VECTOR).zip(values.chunks_mut(VECTOR)) {
        let value = values_of(table, codes, most);
        // SAFETY: the mask keeps to the values.
        unsafe { _mm512_mask_storeu_ps(values.as_mut_ptr(), mask16(codes.len()), value) }
    }
}

/// Returns the values of the first codes, 16 at most.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn values_of(table: &QuantizationTable, codes: &[u8], most: f32) -> __m512 {
    // SAFETY: the mask keeps to the codes; a code is below 256.
    let value = unsafe {
        let code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask16(codes.len()), codes.as_ptr().cast()));
        _mm512_i32gather_ps::<4>(code, table.values.as_ptr())
    };
    _mm512_mul_ps(value, _mm512_set1_ps(most))
}

/// A block of a moment: its codes, its absmax and the table.
pub(super) struct QuantizedBlock<'a> {
    pub codes: &'a mut [u8],
    pub absmax: &'a mut f32,
    pub table: &'a QuantizationTable,
}

/// As `rules::adamw` between `dequantize` and `quantize` of both moments.
/// # Safety
/// The CPU must have AVX-512 (F, BW, DQ, VL); all slices have the same length, `BLOCK` at most.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn adamw(s: &Adamw, w: &mut [f32], g: &[f32], [mut m, mut v]: [QuantizedBlock<'_>; 2]) {
    let n = g.len();
    let all = |x: f32| _mm512_set1_ps(x);
    let mut moments = [[0f32; BLOCK]; 2];
    let (mut most_m, mut most_v) = (_mm512_setzero_ps(), _mm512_setzero_ps());
    for at in (0..n).step_by(VECTOR) {
        let mask = mask16(n - at);
        let here = at..n.min(at + VECTOR);
        let (old_m, old_v) = (
            values_of(m.table, &m.codes[here.clone()], *m.absmax),
            values_of(v.table, &v.codes[here.clone()], *v.absmax),
        );
        // SAFETY: the mask keeps to the slices.
        let (weight, gradient) = unsafe {
            (
                _mm512_maskz_loadu_ps(mask, w[here.clone()].as_ptr()),
                _mm512_maskz_loadu_ps(mask, g[here.clone()].as_ptr()),
            )
        };
        // The operations of `rules::adamw` in their order: the same bits.
        let gradient = _mm512_mul_ps(gradient, all(s.coefficient));
        let change = _mm512_mul_ps(_mm512_sub_ps(gradient, old_m), all(1.0 - s.b1));
        let new_m = _mm512_add_ps(old_m, change);
        let square = _mm512_mul_ps(_mm512_mul_ps(gradient, gradient), all(1.0 - s.b2));
        let new_v = _mm512_add_ps(_mm512_mul_ps(old_v, all(s.b2)), square);
        let root = _mm512_div_ps(_mm512_sqrt_ps(new_v), all(s.correction2_sqrt));
        let ratio = _mm512_div_ps(new_m, _mm512_add_ps(root, all(s.eps)));
        let kept = _mm512_mul_ps(weight, all(s.keep));
        let weight = _mm512_sub_ps(kept, _mm512_mul_ps(all(s.step_size), ratio));
        most_m = _mm512_mask_max_ps(most_m, mask, _mm512_abs_ps(new_m), most_m);
        most_v = _mm512_mask_max_ps(most_v, mask, _mm512_abs_ps(new_v), most_v);
        // SAFETY: the mask keeps to the weights; the arrays hold whole vectors.
        unsafe {
            _mm512_mask_storeu_ps(w[here].as_mut_ptr(), mask, weight);
            _mm512_storeu_ps(moments[0][at..][..VECTOR].as_mut_ptr(), new_m);
            _mm512_storeu_ps(moments[1][at..][..VECTOR].as_mut_ptr(), new_v);
        }
    }
    *m.absmax = _mm512_reduce_max_ps(most_m);
    *v.absmax = _mm512_reduce_max_ps(most_v);
    for at in (0..n).step_by(VECTOR) {
        let here = at..n.min(at + VECTOR);
        for (moment, values) in [(&mut m, &moments[0]), (&mut v, &moments[1])] {
            // SAFETY: an array holds whole vectors.
            let x = unsafe { _mm512_loadu_ps(values[at..][..VECTOR].as_ptr()) };
            let code = match *moment.absmax {
                0.0 => _mm512_setzero_si512(),
                absmax => nearest(moment.table, x, absmax),
            };
            store_codes(&mut moment.codes[here.clone()], code);
        }
    }
}
