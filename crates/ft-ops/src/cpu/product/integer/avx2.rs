//! The products with AVX2: a step is a vector.

use super::{Codes, FLUSH, IntegerKernel, PLANE, RowBlock, Rows, STEP, SUM_LANES, values_of};
use std::arch::x86_64::*;

/// # Safety
/// The CPU must have AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn dots(rows: &Rows<'_>, out: &mut [f32]) {
    // SAFETY: as promised.
    unsafe { rows.dots::<Avx2>(out) };
}

pub(super) struct Avx2;

/// The codes of the planes of a step, as 16-bit integers.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn planes<C: Codes>(step: __m256i) -> [__m256i; 4] {
    // SAFETY: promised by the caller.
    unsafe {
        if C::PLANES == 2 {
            let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(step));
            return [even, _mm256_srai_epi16::<8>(step), even, even];
        }
        let low = _mm256_set1_epi16(15);
        [
            _mm256_and_si256(step, low),
            _mm256_and_si256(_mm256_srli_epi16::<4>(step), low),
            _mm256_and_si256(_mm256_srli_epi16::<8>(step), low),
            _mm256_srli_epi16::<12>(step),
        ]
    }
}

/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
pub(super) unsafe fn arrays<const N: usize, const M: usize>(sums: [[__m256; M]; N]) -> [[[f32; SUM_LANES]; M]; N] {
    let mut out = [[[0.0; SUM_LANES]; M]; N];
    for (out, sums) in out.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
        // SAFETY: promised by the caller; there is room for eight values.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), *sums) };
    }
    out
}

/// Adds the products of a step.
///
/// # Safety
/// The CPU must have AVX2, the block was checked, and it has this step.
#[inline(always)]
pub(super) unsafe fn add_step<C: Codes, const N: usize, const M: usize>(
    integers: &mut [[__m256i; M]; N],
    block: &RowBlock<'_, C>,
    step: usize,
) {
    // SAFETY: promised by the caller; `check` compared the lengths.
    unsafe {
        let values = block.values.as_ptr().add(values_of::<C>(step));
        for (row, integers) in integers.iter_mut().enumerate() {
            let codes = block.codes.as_ptr().add(row * block.stride + step * STEP);
            // The rows of the block after the next.
            _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(2 * N * block.stride).cast());
            let planes = planes::<C>(_mm256_loadu_si256(codes.cast()));
            for (r, integers) in integers.iter_mut().enumerate() {
                for (plane, codes) in planes.into_iter().take(C::PLANES).enumerate() {
                    let x = _mm256_loadu_si256(values.add(r * block.width + plane * PLANE).cast());
                    *integers = _mm256_add_epi32(*integers, _mm256_madd_epi16(codes, x));
                }
            }
        }
    }
}

impl IntegerKernel for Avx2 {
    const FOUR_BY_FOUR: bool = false;

    #[inline(always)]
    unsafe fn sums<C: Codes, const N: usize, const M: usize>(block: &RowBlock<'_, C>) -> [[[f32; SUM_LANES]; M]; N] {
        block.check(N, M);
        // SAFETY: AVX2 was promised to `dots`. The block was checked, and groups end with its last step.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); M]; N];
            for group in 0..block.groups {
                let (mut step, end) = block.steps_of(group);
                while step < end {
                    let stop = end.min(step + FLUSH);
                    let mut integers = [[_mm256_setzero_si256(); M]; N];
                    while step < stop {
                        add_step(&mut integers, block, step);
                        step += 1;
                    }
                    add_scaled(&mut sums, &integers, block, group);
                }
            }
            arrays(sums)
        }
    }
}

/// Adds the integers of a group times its scales.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
pub(super) unsafe fn add_scaled<C: Codes, const N: usize, const M: usize>(
    sums: &mut [[__m256; M]; N],
    integers: &[[__m256i; M]; N],
    block: &RowBlock<'_, C>,
    group: usize,
) {
    for (row, (sums, integers)) in sums.iter_mut().zip(integers).enumerate() {
        let scale = C::scale(block.scales[row * block.groups + group]);
        for (sum, integers) in sums.iter_mut().zip(integers) {
            // SAFETY: promised by the caller.
            unsafe {
                let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(*integers), _mm256_set1_ps(scale));
                *sum = _mm256_add_ps(*sum, scaled);
            }
        }
    }
}
