//! Dequantization with AVX-512 and AVX2. A table of 16 is one register of AVX-512 and two of AVX2.

use super::{DequantizeKernel, PortableKernel, runs};
use crate::quantized::QMatrixView;
use std::arch::x86_64::*;

/// # Safety
/// The CPU must have AVX-512 (F, BW, DQ, VL).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn wide(view: &QMatrixView<'_>, row: usize, start: usize, to: &mut [f32]) {
    runs::<Avx512Kernel>(view, row, start, to)
}

/// # Safety
/// The CPU must have AVX2.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn narrow(view: &QMatrixView<'_>, row: usize, start: usize, to: &mut [f32]) {
    runs::<Avx2Kernel>(view, row, start, to)
}

struct Avx512Kernel;
struct Avx2Kernel;

// `#[target_feature]` is not allowed on trait methods: the methods only call functions that have it.
impl DequantizeKernel for Avx512Kernel {
    #[inline(always)]
    unsafe fn int8(codes: &[u8], scale: f32, bf16: bool, to: &mut [f32]) {
        // SAFETY: promised by the caller.
        unsafe {
            if bf16 {
                int8_wide::<true>(codes, scale, to)
            } else {
                int8_wide::<false>(codes, scale, to)
            }
        }
    }

    #[inline(always)]
    unsafe fn nibbles(codes: &[u8], table: &[f32; 16], to: &mut [f32]) {
        // SAFETY: promised by the caller.
        unsafe { nibbles_wide(codes, table, to) }
    }
}

impl DequantizeKernel for Avx2Kernel {
    #[inline(always)]
    unsafe fn int8(codes: &[u8], scale: f32, bf16: bool, to: &mut [f32]) {
        // SAFETY: promised by the caller.
        unsafe {
            if bf16 {
                int8_narrow::<true>(codes, scale, to)
            } else {
                int8_narrow::<false>(codes, scale, to)
            }
        }
    }

    #[inline(always)]
    unsafe fn nibbles(codes: &[u8], table: &[f32; 16], to: &mut [f32]) {
        // SAFETY: promised by the caller.
        unsafe { nibbles_narrow(codes, table, to) }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn int8_wide<const BF16: bool>(codes: &[u8], scale: f32, to: &mut [f32]) {
    let (blocks, rest) = codes.as_chunks::<16>();
    let (to_blocks, to_rest) = to.as_chunks_mut::<16>();
    let (by, one, half) = (_mm512_set1_ps(scale), _mm512_set1_epi32(1), _mm512_set1_epi32(0x7FFF));
    let upper = _mm512_set1_epi32(0xFFFF_0000_u32 as i32);
    for (codes, to) in blocks.iter().zip(to_blocks) {
        // SAFETY: 16 bytes are read, 16 floats written.
        unsafe {
            let codes = _mm512_cvtepi8_epi32(_mm_loadu_si128(codes.as_ptr().cast()));
            let mut values = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), by);
            if BF16 {
                let bits = _mm512_castps_si512(values);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), one);
                let sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, half));
                values = _mm512_castsi512_ps(_mm512_and_si512(sum, upper));
            }
            _mm512_storeu_ps(to.as_mut_ptr(), values);
        }
    }
    // SAFETY: `PortableKernel` needs no CPU feature.
    unsafe { PortableKernel::int8(rest, scale, BF16, to_rest) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn int8_narrow<const BF16: bool>(codes: &[u8], scale: f32, to: &mut [f32]) {
    let (blocks, rest) = codes.as_chunks::<8>();
    let (to_blocks, to_rest) = to.as_chunks_mut::<8>();
    let (by, one, half) = (_mm256_set1_ps(scale), _mm256_set1_epi32(1), _mm256_set1_epi32(0x7FFF));
    let upper = _mm256_set1_epi32(0xFFFF_0000_u32 as i32);
    for (codes, to) in blocks.iter().zip(to_blocks) {
        // SAFETY: 8 bytes are read, 8 floats written.
        unsafe {
            let codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(codes.as_ptr().cast()));
            let mut values = _mm256_mul_ps(_mm256_cvtepi32_ps(codes), by);
            if BF16 {
                let bits = _mm256_castps_si256(values);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), one);
                let sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, half));
                values = _mm256_castsi256_ps(_mm256_and_si256(sum, upper));
            }
            _mm256_storeu_ps(to.as_mut_ptr(), values);
        }
    }
    // SAFETY: `PortableKernel` needs no CPU feature.
    unsafe { PortableKernel::int8(rest, scale, BF16, to_rest) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn nibbles_wide(codes: &[u8], table: &[f32; 16], to: &mut [f32]) {
    let (blocks, rest) = codes.as_chunks::<16>();
    let (to_blocks, to_rest) = to.as_chunks_mut::<32>();
    // SAFETY: 16 floats are read; in the loop 16 bytes are read and 32 floats written.
    unsafe {
        let table = _mm512_loadu_ps(table.as_ptr());
        for (codes, to) in blocks.iter().zip(to_blocks) {
            let low = _mm_loadu_si128(codes.as_ptr().cast());
            // The permutation uses only the low four bits of an index: the bits above need no masking.
            let high = _mm_srli_epi16::<4>(low);
            let first = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(high, low));
            let second = _mm512_cvtepu8_epi32(_mm_unpackhi_epi8(high, low));
            _mm512_storeu_ps(to.as_mut_ptr(), _mm512_permutexvar_ps(first, table));
            _mm512_storeu_ps(to.as_mut_ptr().add(16), _mm512_permutexvar_ps(second, table));
        }
    }
    // SAFETY: `PortableKernel` needs no CPU feature.
    unsafe { PortableKernel::nibbles(rest, table, to_rest) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn nibbles_narrow(codes: &[u8], table: &[f32; 16], to: &mut [f32]) {
    let (blocks, rest) = codes.as_chunks::<4>();
    let (to_blocks, to_rest) = to.as_chunks_mut::<8>();
    // SAFETY: 16 floats are read; in the loop 4 bytes are read and 8 floats written.
    unsafe {
        let (lower, upper) = (_mm256_loadu_ps(table.as_ptr()), _mm256_loadu_ps(table.as_ptr().add(8)));
        for (codes, to) in blocks.iter().zip(to_blocks) {
            let low = _mm_cvtsi32_si128(i32::from_le_bytes(*codes));
            let high = _mm_srli_epi16::<4>(low);
            let index = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(high, low));
            // Bits 0 to 2 select inside a half of the table, bit 3 selects the half.
            let half = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index));
            let (a, b) = (
                _mm256_permutevar8x32_ps(lower, index),
                _mm256_permutevar8x32_ps(upper, index),
            );
            _mm256_storeu_ps(to.as_mut_ptr(), _mm256_blendv_ps(a, b, half));
        }
    }
    // SAFETY: `PortableKernel` needs no CPU feature.
    unsafe { PortableKernel::nibbles(rest, table, to_rest) }
}
