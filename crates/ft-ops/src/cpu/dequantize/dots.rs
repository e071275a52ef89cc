//! Dot products of a few vectors with a quantized row, dequantized in registers (AVX-512 here, AVX2 in `dots_avx2`): a token
//! costs little more than reading the quantized row. The sums are bit-equal to those of `math::dot_lanes` over the dequantized
//! values.

use super::super::math::{LANES, prefetch};
use super::super::product::VectorIsa;
use super::dots_avx2;
use crate::quantized::{BLOCK, QData, QMatrixView, scale_and_minimum};
use std::arch::x86_64::*;

/// Largest number of vectors.
pub(crate) const MOST: usize = 8;

/// True if `dots` supports this weight: a row is a whole number of steps of `BLOCK` columns, and all columns of a
/// step share one scale.
pub(crate) fn fits(view: &QMatrixView<'_>) -> bool {
    let groups = match view.codes {
        QData::Int8 { group, .. } | QData::Int4 { group, .. } => group % BLOCK == 0,
        QData::Nf4 { .. } => true,
        QData::Scaled(_) | QData::Bf16 { .. } => false,
    };
    view.columns > 0 && view.columns.is_multiple_of(BLOCK) && groups
}

/// Copies a vector into the order that `dots` reads.
pub(crate) fn arrange(isa: VectorIsa, view: &QMatrixView<'_>, from: &[f32], to: &mut [f32]) {
    let order = match isa {
        VectorIsa::Avx512 => order(view),
        VectorIsa::Avx2 => dots_avx2::order(view),
    };
    for (from, to) in from.as_chunks::<LANES>().0.iter().zip(to.as_chunks_mut::<LANES>().0) {
        for (to, place) in to.iter_mut().zip(order) {
            *to = from[place];
        }
    }
}

/// The place in 32 elements of each sum: if a byte holds two 4-bit values, the ones with an even index come first, then the
/// others.
fn order(view: &QMatrixView<'_>) -> [usize; LANES] {
    let is_byte = matches!(view.codes, QData::Int8 { .. });
    std::array::from_fn(|i| {
        if is_byte {
            i
        } else {
            i % (LANES / 2) * 2 + i / (LANES / 2)
        }
    })
}

/// Computes the lanes of the dot products of row `row` with each of the `sums.len()` arranged vectors `x`.
/// # Safety
/// The CPU must have the instructions of `isa` (AVX-512: F, BW, DQ, VL); the view `fits`.
pub(crate) unsafe fn dots(isa: VectorIsa, view: &QMatrixView<'_>, row: usize, x: &[f32], sums: &mut [[f32; LANES]]) {
    assert!(row < view.rows && x.len() == sums.len() * view.columns && fits(view) && view.fits());
    // SAFETY: promised by the caller; all ranges that are read were checked.
    unsafe {
        if isa == VectorIsa::Avx2 {
            return dots_avx2::dots(view, row, x, sums);
        }
        match sums.len() {
            1 => wide::<1>(view, row, x, sums),
            2 => wide::<2>(view, row, x, sums),
            3 => wide::<3>(view, row, x, sums),
            4 => wide::<4>(view, row, x, sums),
            5 => wide::<5>(view, row, x, sums),
            6 => wide::<6>(view, row, x, sums),
            7 => wide::<7>(view, row, x, sums),
            _ => wide::<MOST>(view, row, x, sums),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn wide<const M: usize>(view: &QMatrixView<'_>, row: usize, x: &[f32], sums: &mut [[f32; LANES]]) {
    assert!(sums.len() == M);
    let k = view.columns;
    let mut acc = [[_mm512_setzero_ps(); 2]; M];
    let x = x.as_ptr();
    // SAFETY: columns `j..j + 64` of the row and of the vectors are inside: the view fits, k is a multiple of 64.
    unsafe {
        match view.codes {
            QData::Int8 {
                codes,
                stride,
                group,
                scales,
            } => {
                let (codes, scales) = (codes.as_ptr().add(row * stride), &scales[row * k.div_ceil(group)..]);
                for j in (0..k).step_by(BLOCK) {
                    prefetch(codes.add(j));
                    let scale = _mm512_set1_ps(scales[j / group]);
                    for j in [j, j + LANES] {
                        let w = [
                            bytes(codes.add(j), scale, view.bf16),
                            bytes(codes.add(j + 16), scale, view.bf16),
                        ];
                        add::<M>(&mut acc, w, x.add(j), k);
                    }
                }
            }
            QData::Int4 {
                codes,
                stride,
                group,
                scales,
            } => {
                let (codes, scales) = (codes.as_ptr().add(row * stride), &scales[row * k.div_ceil(group)..]);
                let steps = _mm512_setr_ps(
                    0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
                );
                for j in (0..k).step_by(BLOCK) {
                    prefetch(codes.add(j / 2));
                    let (scale, minimum) = scale_and_minimum(scales[j / group]);
                    let (scale, minimum) = (_mm512_set1_ps(scale), _mm512_set1_ps(minimum));
                    let table = _mm512_add_ps(_mm512_mul_ps(steps, scale), minimum);
                    halves::<M>(&mut acc, codes.add(j / 2), finish(table, view.bf16), x.add(j), k);
                }
            }
            QData::Nf4 { codes, levels, absmax } => {
                let codes = codes.as_ptr().add(row * k / 2);
                let levels = _mm512_loadu_ps(levels.as_ptr());
                for j in (0..k).step_by(BLOCK) {
                    prefetch(codes.add(j / 2));
                    let scale = absmax.get((row * k + j) / BLOCK);
                    let table = _mm512_mul_ps(levels, _mm512_set1_ps(scale));
                    halves::<M>(&mut acc, codes.add(j / 2), finish(table, view.bf16), x.add(j), k);
                }
            }
            // Refused by `fits`.
            QData::Scaled(_) | QData::Bf16 { .. } => {}
        }
        let order = order(view);
        for (sums, acc) in sums.iter_mut().zip(acc) {
            let mut lanes = [0f32; LANES];
            _mm512_storeu_ps(lanes.as_mut_ptr(), acc[0]);
            _mm512_storeu_ps(lanes.as_mut_ptr().add(16), acc[1]);
            for (place, lane) in order.into_iter().zip(lanes) {
                sums[place] = lane;
            }
        }
    }
}

/// Adds the products of 64 columns of 4-bit values. The element with the even index is in the high half of its byte.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn halves<const M: usize>(
    acc: &mut [[__m512; 2]; M],
    codes: *const u8,
    table: __m512,
    x: *const f32,
    stride: usize,
) {
    for half in 0..2 {
        // SAFETY: promised by the caller: 32 bytes, 64 elements of each vector.
        unsafe {
            // The permutation uses only the low four bits of an index.
            let pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.add(16 * half).cast()));
            let even = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(pairs), table);
            let other = _mm512_permutexvar_ps(pairs, table);
            add::<M>(acc, [even, other], x.add(LANES * half), stride);
        }
    }
}

/// Dequantizes 16 signed bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn bytes(codes: *const u8, scale: __m512, bf16: bool) -> __m512 {
    // SAFETY: promised by the caller.
    let codes = unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(codes.cast())) };
    finish(_mm512_mul_ps(_mm512_cvtepi32_ps(codes), scale), bf16)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn add<const M: usize>(acc: &mut [[__m512; 2]; M], w: [__m512; 2], x: *const f32, stride: usize) {
    for (r, acc) in acc.iter_mut().enumerate() {
        // SAFETY: promised by the caller: 32 elements of each vector.
        unsafe {
            acc[0] = _mm512_fmadd_ps(_mm512_loadu_ps(x.add(r * stride)), w[0], acc[0]);
            acc[1] = _mm512_fmadd_ps(_mm512_loadu_ps(x.add(r * stride + 16)), w[1], acc[1]);
        }
    }
}

/// Rounds to the nearest bf16 if `bf16`, ties to even.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn finish(values: __m512, bf16: bool) -> __m512 {
    if !bf16 {
        return values;
    }
    let bits = _mm512_castps_si512(values);
    let odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x1_0000));
    let sum = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
    let sum = _mm512_mask_add_epi32(sum, odd, sum, _mm512_set1_epi32(1));
    _mm512_castsi512_ps(_mm512_and_si512(sum, _mm512_set1_epi32(0xFFFF_0000_u32 as i32)))
}
