//! The products with AVX512-VNNI: two steps are a vector.

use super::avx2::{Avx2, add_scaled, add_step, arrays};
use super::{Codes, FLUSH, IntegerKernel, PLANE, RowBlock, Rows, STEP, SUM_LANES, values_of};
use std::arch::x86_64::*;

/// True if a machine with AVX-512 has the instructions.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx512vnni")
}

/// # Safety
/// The CPU must have AVX2, AVX-512 F, BW, DQ and VL, and AVX512-VNNI.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn dots(rows: &Rows<'_>, out: &mut [f32]) {
    // SAFETY: as promised.
    unsafe { rows.dots::<Vnni>(out) };
}

struct Vnni;

/// The codes of the planes of two steps, as 16-bit integers.
///
/// # Safety
/// As for `dots`.
#[inline(always)]
unsafe fn planes_of_two<C: Codes>(steps: __m512i) -> [__m512i; 4] {
    // SAFETY: promised by the caller.
    unsafe {
        if C::PLANES == 2 {
            let even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(steps));
            return [even, _mm512_srai_epi16::<8>(steps), even, even];
        }
        let low = _mm512_set1_epi16(15);
        [
            _mm512_and_si512(steps, low),
            _mm512_and_si512(_mm512_srli_epi16::<4>(steps), low),
            _mm512_and_si512(_mm512_srli_epi16::<8>(steps), low),
            _mm512_srli_epi16::<12>(steps),
        ]
    }
}

/// The values of two steps of each row, by plane. The first step is even.
///
/// # Safety
/// As for `dots`; the block was checked and has both steps.
#[inline(always)]
unsafe fn values_of_two<C: Codes, const M: usize>(block: &RowBlock<'_, C>, step: usize) -> [[__m512i; 4]; M] {
    // SAFETY: promised by the caller; `check` compared the lengths.
    unsafe {
        let mut values = [[_mm512_setzero_si512(); 4]; M];
        for (r, values) in values.iter_mut().enumerate() {
            for (plane, values) in values.iter_mut().take(C::PLANES).enumerate() {
                let from = r * block.width + values_of::<C>(step) + plane * PLANE;
                *values = _mm512_loadu_si512(block.values.as_ptr().add(from).cast());
            }
        }
        values
    }
}

/// The codes of two steps of a row, by plane.
///
/// # Safety
/// As for `values_of_two`.
#[inline(always)]
unsafe fn codes_of_two<C: Codes, const N: usize>(block: &RowBlock<'_, C>, row: usize, step: usize) -> [__m512i; 4] {
    // SAFETY: promised by the caller; `check` compared the lengths.
    unsafe {
        let codes = block.codes.as_ptr().add(row * block.stride + step * STEP);
        // The rows of the block after the next.
        _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(2 * N * block.stride).cast());
        planes_of_two::<C>(_mm512_loadu_si512(codes.cast()))
    }
}

/// The scales of two groups, each in half of the vector.
///
/// # Safety
/// As for `dots`.
#[inline(always)]
unsafe fn two_scales<C: Codes>(scales: &[C::Scale; 2]) -> __m512 {
    const { assert!(size_of::<C::Scale>() == 4) };
    // SAFETY: promised by the caller; the two are 8 bytes.
    unsafe {
        let both = _mm512_castsi128_si512(_mm_loadl_epi64(scales.as_ptr().cast()));
        let halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        let words = _mm512_permutexvar_epi32(halves, both);
        // `scale_and_minimum`
        _mm512_castsi512_ps(if C::PLANES == 4 {
            _mm512_slli_epi32::<16>(words)
        } else {
            words
        })
    }
}

/// Groups of a single step: a vector has two of them.
///
/// # Safety
/// As for `dots`; the block was checked.
#[inline(always)]
unsafe fn single_steps<C: Codes, const N: usize, const M: usize>(block: &RowBlock<'_, C>, sums: &mut [[__m256; M]; N]) {
    // SAFETY: promised by the caller; a row has as many steps as scales.
    unsafe {
        let mut step = 0;
        while step + 1 < block.steps {
            let values = values_of_two::<C, M>(block, step);
            for (row, sums) in sums.iter_mut().enumerate() {
                let codes = codes_of_two::<C, N>(block, row, step);
                let scales = &*block.scales.as_ptr().add(row * block.groups + step).cast();
                let scales = two_scales::<C>(scales);
                for (sum, values) in sums.iter_mut().zip(&values) {
                    let mut integers = _mm512_setzero_si512();
                    for plane in 0..C::PLANES {
                        integers = _mm512_dpwssd_epi32(integers, codes[plane], values[plane]);
                    }
                    let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(integers), scales);
                    *sum = _mm256_add_ps(*sum, _mm512_castps512_ps256(scaled));
                    *sum = _mm256_add_ps(*sum, _mm512_extractf32x8_ps::<1>(scaled));
                }
            }
            step += 2;
        }
        if step < block.steps {
            let mut integers = [[_mm256_setzero_si256(); M]; N];
            add_step(&mut integers, block, step);
            add_scaled(sums, &integers, block, step);
        }
    }
}

/// Groups that begin at even steps.
///
/// # Safety
/// As for `dots`; the block was checked.
#[inline(always)]
unsafe fn whole_groups<C: Codes, const N: usize, const M: usize>(block: &RowBlock<'_, C>, sums: &mut [[__m256; M]; N]) {
    const { assert!(FLUSH.is_multiple_of(2)) };
    // SAFETY: promised by the caller; groups end with the last step.
    unsafe {
        for group in 0..block.groups {
            let (mut step, end) = block.steps_of(group);
            while step < end {
                let stop = end.min(step + FLUSH);
                let mut integers = [[_mm512_setzero_si512(); M]; N];
                while step + 1 < stop {
                    let values = values_of_two::<C, M>(block, step);
                    for (row, integers) in integers.iter_mut().enumerate() {
                        let codes = codes_of_two::<C, N>(block, row, step);
                        for plane in 0..C::PLANES {
                            for (integers, values) in integers.iter_mut().zip(&values) {
                                *integers = _mm512_dpwssd_epi32(*integers, codes[plane], values[plane]);
                            }
                        }
                    }
                    step += 2;
                }
                let mut halves = [[_mm256_setzero_si256(); M]; N];
                for (half, integers) in halves.as_flattened_mut().iter_mut().zip(integers.as_flattened()) {
                    let (low, high) = (
                        _mm512_castsi512_si256(*integers),
                        _mm512_extracti64x4_epi64::<1>(*integers),
                    );
                    *half = _mm256_add_epi32(low, high);
                }
                if step < stop {
                    add_step(&mut halves, block, step);
                    step += 1;
                }
                add_scaled(sums, &halves, block, group);
            }
        }
    }
}

impl IntegerKernel for Vnni {
    const FOUR_BY_FOUR: bool = true;

    #[inline(always)]
    unsafe fn sums<C: Codes, const N: usize, const M: usize>(block: &RowBlock<'_, C>) -> [[[f32; SUM_LANES]; M]; N] {
        block.check(N, M);
        // SAFETY: the instructions were promised to `dots`, and the block was checked.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); M]; N];
            match block.group_steps {
                1 => single_steps(block, &mut sums),
                steps if steps.is_multiple_of(2) || block.groups == 1 => whole_groups(block, &mut sums),
                _ => return Avx2::sums::<C, N, M>(block),
            }
            arrays(sums)
        }
    }
}
