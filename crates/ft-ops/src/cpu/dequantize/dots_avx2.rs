//! `dots` with AVX2: half as wide, and at most three vectors at a time, because their sums fill the registers.

use super::super::math::{LANES, prefetch};
use crate::quantized::{BLOCK, QData, QMatrixView, scale_and_minimum};
use std::arch::x86_64::*;

/// Elements of a SIMD vector.
const WIDTH: usize = 8;
/// SIMD vectors of the sums of one dot product.
const SUMS: usize = LANES / WIDTH;

/// Sums of `M` dot products.
type Sums<const M: usize> = [[__m256; SUMS]; M];

/// 16 levels: those of the codes below 8, and the others.
type Table = [__m256; 2];

/// Which of 32 elements each lane of the four SIMD vectors has.
pub(super) fn order(view: &QMatrixView<'_>) -> [usize; LANES] {
    let is_short = view.bf16;
    let is_byte = matches!(view.codes, QData::Int8 { .. });
    std::array::from_fn(|i| {
        let (part, lane) = (i / WIDTH, i % WIDTH);
        match (is_byte, is_short) {
            (true, _) => i,
            // Four elements with an even index, and the four with the next odd ones.
            (false, true) => 2 * (WIDTH / 2 * part + lane % 4) + lane / 4,
            // All with an even index, then the others.
            (false, false) => i % (LANES / 2) * 2 + part / 2,
        }
    })
}

/// As `dots::dots`, whose conditions were checked.
/// # Safety
/// The CPU must have AVX2 and FMA; the view `fits` and has this row; `x` has `sums.len()` arranged vectors.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn dots(view: &QMatrixView<'_>, row: usize, x: &[f32], sums: &mut [[f32; LANES]]) {
    for (x, sums) in x.chunks(3 * view.columns).zip(sums.chunks_mut(3)) {
        // SAFETY: promised by the caller.
        unsafe {
            match sums.len() {
                1 => some::<1>(view, row, x, sums),
                2 => some::<2>(view, row, x, sums),
                _ => some::<3>(view, row, x, sums),
            }
        }
    }
}

/// # Safety
/// As `dots`; the row is inside.
#[target_feature(enable = "avx2,fma")]
unsafe fn some<const M: usize>(view: &QMatrixView<'_>, row: usize, x: &[f32], sums: &mut [[f32; LANES]]) {
    assert!(sums.len() == M && x.len() == M * view.columns);
    let k = view.columns;
    let mut acc = [[_mm256_setzero_ps(); SUMS]; M];
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
                let codes = codes.as_ptr().add(row * stride);
                for (first, scale) in (0..k).step_by(group).zip(&scales[row * k.div_ceil(group)..]) {
                    let scale = _mm256_set1_ps(*scale);
                    for j in (first..k.min(first + group)).step_by(LANES) {
                        prefetch(codes.add(j));
                        for part in 0..SUMS {
                            let j = j + WIDTH * part;
                            add::<M>(&mut acc, part, bytes(codes.add(j), scale, view.bf16), x.add(j), k);
                        }
                    }
                }
            }
            QData::Int4 {
                codes,
                stride,
                group,
                scales,
            } => {
                let codes = codes.as_ptr().add(row * stride);
                let steps = [
                    _mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
                    _mm256_setr_ps(8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0),
                ];
                for (first, word) in (0..k).step_by(group).zip(&scales[row * k.div_ceil(group)..]) {
                    let (scale, minimum) = scale_and_minimum(*word);
                    let (scale, minimum) = (_mm256_set1_ps(scale), _mm256_set1_ps(minimum));
                    let table = [
                        _mm256_add_ps(_mm256_mul_ps(steps[0], scale), minimum),
                        _mm256_add_ps(_mm256_mul_ps(steps[1], scale), minimum),
                    ];
                    let columns = (first, k.min(first + group));
                    halves::<M>(&mut acc, view.bf16, codes, table, x, columns, k);
                }
            }
            QData::Nf4 { codes, levels, absmax } => {
                let codes = codes.as_ptr().add(row * k / 2);
                let levels = [
                    _mm256_loadu_ps(levels.as_ptr()),
                    _mm256_loadu_ps(levels.as_ptr().add(WIDTH)),
                ];
                for j in (0..k).step_by(BLOCK) {
                    let scale = _mm256_set1_ps(absmax.get((row * k + j) / BLOCK));
                    let table = [_mm256_mul_ps(levels[0], scale), _mm256_mul_ps(levels[1], scale)];
                    halves::<M>(&mut acc, view.bf16, codes, table, x, (j, j + BLOCK), k);
                }
            }
            // Refused by `fits`.
            QData::Scaled(_) | QData::Bf16 { .. } => {}
        }
        let order = order(view);
        for (sums, acc) in sums.iter_mut().zip(acc) {
            let mut lanes = [0f32; LANES];
            for (part, sum) in acc.into_iter().enumerate() {
                _mm256_storeu_ps(lanes.as_mut_ptr().add(WIDTH * part), sum);
            }
            for (place, lane) in order.into_iter().zip(lanes) {
                sums[place] = lane;
            }
        }
    }
}

/// Adds the products of 4-bit values of the columns from `first` to `end`, which share the levels of `table`. The element with
/// the even index is in the high half of its byte.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn halves<const M: usize>(
    acc: &mut Sums<M>,
    bf16: bool,
    codes: *const u8,
    table: Table,
    x: *const f32,
    (first, end): (usize, usize),
    stride: usize,
) {
    // SAFETY: promised by the caller: these columns are inside, a multiple of 64.
    unsafe {
        if bf16 {
            let table = byte_tables([finish(table[0], true), finish(table[1], true)]);
            for j in (first..end).step_by(LANES) {
                prefetch(codes.add(j / 2));
                for (part, w) in short_levels(codes.add(j / 2), table).into_iter().enumerate() {
                    add::<M>(acc, part, w, x.add(j + WIDTH * part), stride);
                }
            }
            return;
        }
        for j in (first..end).step_by(LANES) {
            prefetch(codes.add(j / 2));
            for part in 0..2 {
                let pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64(codes.add(j / 2 + 8 * part).cast()));
                let even = level(_mm256_srli_epi32::<4>(pairs), table);
                add::<M>(acc, part, even, x.add(j + WIDTH * part), stride);
                add::<M>(
                    acc,
                    2 + part,
                    level(pairs, table),
                    x.add(j + WIDTH * (2 + part)),
                    stride,
                );
            }
        }
    }
}

/// The low and the high byte of 16 levels that are bf16 numbers, in each half of a SIMD vector.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn byte_tables([low, high]: Table) -> [__m256i; 2] {
    let upper = |levels| _mm256_srli_epi32::<16>(_mm256_castps_si256(levels));
    // Packing works in each half of its own: the middle quarters are in the wrong order.
    let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(upper(low), upper(high)));
    let bytes = [
        _mm256_and_si256(words, _mm256_set1_epi16(0xFF)),
        _mm256_srli_epi16::<8>(words),
    ];
    let bytes = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi16(bytes[0], bytes[1]));
    [
        _mm256_permute4x64_epi64::<0b01_00_01_00>(bytes),
        _mm256_permute4x64_epi64::<0b11_10_11_10>(bytes),
    ]
}

/// The levels of 32 codes, in the order of `order` for bf16.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn short_levels(codes: *const u8, [low, high]: [__m256i; 2]) -> [__m256; SUMS] {
    // SAFETY: promised by the caller: 16 bytes.
    let pairs = unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(codes.cast())) };
    // Elements with an even index in the lower half, the others in the upper one.
    let shifted = _mm256_srlv_epi32(pairs, _mm256_setr_epi32(4, 4, 4, 4, 0, 0, 0, 0));
    let index = _mm256_and_si256(shifted, _mm256_set1_epi8(15));
    let (low, high) = (_mm256_shuffle_epi8(low, index), _mm256_shuffle_epi8(high, index));
    let (first, second) = (_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high));
    let zero = _mm256_setzero_si256();
    [
        _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, first)),
        _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, first)),
        _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, second)),
        _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, second)),
    ]
}

/// The levels of the low four bits of each index.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn level(index: __m256i, [low, high]: Table) -> __m256 {
    // A permutation uses the low three bits of an index; the fourth, as a sign, chooses between the two.
    let of = |levels| _mm256_permutevar8x32_ps(levels, index);
    let above = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index));
    _mm256_blendv_ps(of(low), of(high), above)
}

/// Dequantizes 8 signed bytes.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn bytes(codes: *const u8, scale: __m256, bf16: bool) -> __m256 {
    // SAFETY: promised by the caller.
    let codes = unsafe { _mm256_cvtepi8_epi32(_mm_loadl_epi64(codes.cast())) };
    finish(_mm256_mul_ps(_mm256_cvtepi32_ps(codes), scale), bf16)
}

/// Adds the products of 8 elements of each vector with `w` to the sums of this part.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add<const M: usize>(acc: &mut Sums<M>, part: usize, w: __m256, x: *const f32, stride: usize) {
    for (r, acc) in acc.iter_mut().enumerate() {
        // SAFETY: promised by the caller: 8 elements of each vector.
        acc[part] = unsafe { _mm256_fmadd_ps(_mm256_loadu_ps(x.add(r * stride)), w, acc[part]) };
    }
}

/// Rounds to the nearest bf16 if `bf16`, ties to even.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn finish(values: __m256, bf16: bool) -> __m256 {
    if !bf16 {
        return values;
    }
    let bits = _mm256_castps_si256(values);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    _mm256_castsi256_ps(_mm256_and_si256(sum, _mm256_set1_epi32(0xFFFF_0000_u32 as i32)))
}
