//! Dot products of a bf16 weight with a few rows of activations: up to four of these with three rows of the weight at a time
//! (AVX2: three with one). The bits are those of `dot_bf16`, except for NaN: lane l of the sums has the columns l, l + 32, and
//! so on, and the lanes are added as in `sum_lanes`.
//!
//! A vector of bf16 pairs is widened without a shuffle: a shift gives the even columns, a mask the odd ones. So the activations
//! are put in that order before (`arrange`).

use super::super::math::{LANES, prefetch};
use super::VectorIsa;
use half::bf16;
use std::arch::x86_64::*;

/// Most rows of activations that are computed together.
const ROWS: usize = 4;

/// Elements of an arranged row of `k`: whole blocks of `LANES`.
pub(super) fn width(k: usize) -> usize {
    k.next_multiple_of(LANES)
}

/// The even columns of each `LANES`, then the odd ones. `to` is `width(x.len())` zeros.
pub(super) fn arrange(x: &[f32], to: &mut [f32]) {
    for (x, to) in x.chunks(LANES).zip(to.chunks_exact_mut(LANES)) {
        let (even, odd) = to.split_at_mut(LANES / 2);
        for (pair, (even, odd)) in x.chunks(2).zip(even.iter_mut().zip(odd)) {
            *even = pair[0];
            *odd = pair.get(1).copied().unwrap_or(0.0);
        }
    }
}

/// Rows of a weight, `stride` apart, of `k` columns.
#[derive(Clone, Copy)]
pub(super) struct Bf16Block<'a> {
    pub values: &'a [bf16],
    pub stride: usize,
    pub k: usize,
}

/// Writes the dot products of the first `count` rows of the weight with the arranged rows `x`: `put(row of x, row of the weight,
/// sum)`.
///
/// # Safety
/// The CPU must have the instructions of `isa`.
pub(super) unsafe fn dots(
    isa: VectorIsa,
    weight: Bf16Block<'_>,
    count: usize,
    x: &[f32],
    mut put: impl FnMut(usize, usize, f32),
) {
    let (k, width) = (weight.k, width(weight.k));
    assert!(x.len().is_multiple_of(width));
    let before_last = count.saturating_sub(1).checked_mul(weight.stride);
    let inside = before_last.is_some_and(|n| n <= weight.values.len() && k <= weight.values.len() - n);
    assert!(count == 0 || k <= weight.stride && inside);
    let mut row = 0;
    while row < count {
        // As many sums as fit in the registers.
        let n = (count - row).min(match isa {
            VectorIsa::Avx512 => 3,
            VectorIsa::Avx2 => 1,
        });
        let at = Bf16Block {
            values: &weight.values[row * weight.stride..],
            ..weight
        };
        // As many rows of activations as there are registers for.
        let most = match isa {
            VectorIsa::Avx512 => ROWS,
            VectorIsa::Avx2 => 3,
        };
        for (group, x) in x.chunks(most * width).enumerate() {
            let mut sums = [[0f32; ROWS]; 3];
            let m = x.len() / width;
            // SAFETY: the instructions were detected; `n` rows of the weight and `m` of `x` were checked above.
            unsafe {
                match isa {
                    VectorIsa::Avx512 => avx512::block(n, m, at, x, &mut sums),
                    VectorIsa::Avx2 => avx2::block(n, m, at, x, &mut sums),
                }
            }
            for (i, sums) in sums[..n].iter().enumerate() {
                for (r, sum) in sums[..m].iter().enumerate() {
                    put(group * most + r, row + i, *sum);
                }
            }
        }
        row += n;
    }
}

macro_rules! kernels {
    ($module:ident, $features:literal, $vector:ty, $lanes:literal, $zero:ident, $load:ident, $load_bits:ident, $cast:ident, $shift:ident, $and:ident,
     $mask:ident, $fma:ident, |$parts:ident| $halves:expr) => {
        mod $module {
            use super::*;

            /// Vectors of one parity in a block of `LANES` columns.
            const PARTS: usize = LANES / 2 / $lanes;

            /// # Safety
            /// `n` rows of `k` columns must be there, `stride` apart, and `m` rows of `width(k)` values; the CPU must have the instructions.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn block(
                n: usize,
                m: usize,
                weight: Bf16Block<'_>,
                x: &[f32],
                sums: &mut [[f32; ROWS]; 3],
            ) {
                // SAFETY: promised by the caller.
                unsafe {
                    match (n, m) {
                        (1, 1) => sized::<1, 1>(weight, x, sums),
                        (1, 2) => sized::<1, 2>(weight, x, sums),
                        (1, 3) => sized::<1, 3>(weight, x, sums),
                        (1, _) => sized::<1, 4>(weight, x, sums),
                        (2, 1) => sized::<2, 1>(weight, x, sums),
                        (2, 2) => sized::<2, 2>(weight, x, sums),
                        (2, 3) => sized::<2, 3>(weight, x, sums),
                        (2, _) => sized::<2, 4>(weight, x, sums),
                        (_, 1) => sized::<3, 1>(weight, x, sums),
                        (_, 2) => sized::<3, 2>(weight, x, sums),
                        (_, 3) => sized::<3, 3>(weight, x, sums),
                        _ => sized::<3, 4>(weight, x, sums),
                    }
                }
            }

            /// # Safety
            /// As for `block`, with `N` and `M` rows.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn sized<const N: usize, const M: usize>(
                weight: Bf16Block<'_>,
                x: &[f32],
                out: &mut [[f32; ROWS]; 3],
            ) {
                let Bf16Block { values, stride, k } = weight;
                let (width, whole) = (super::width(k), k / LANES * LANES);
                let mut sums = [[[[$zero(); PARTS]; 2]; M]; N];
                // SAFETY: `N` rows of `k` columns and `M` rows of `width` values are there, as the caller promises.
                unsafe {
                    let (w, x) = (values.as_ptr(), x.as_ptr());
                    for j in (0..whole).step_by(LANES) {
                        for (i, sums) in sums.iter_mut().enumerate() {
                            let at = w.add(i * stride + j);
                            prefetch(at);
                            add::<M>(sums, at, x.add(j), width);
                        }
                    }
                    if whole < k {
                        for (i, sums) in sums.iter_mut().enumerate() {
                            let mut last = [bf16::ZERO; LANES];
                            last[..k - whole].copy_from_slice(&values[i * stride + whole..][..k - whole]);
                            add::<M>(sums, last.as_ptr(), x.add(whole), width);
                        }
                    }
                }
                for (out, sums) in out.iter_mut().zip(sums) {
                    for (out, [even, odd]) in out.iter_mut().zip(sums) {
                        let halves = |$parts: [$vector; PARTS]| $halves;
                        *out = total(halves(even), halves(odd));
                    }
                }
            }

            /// Adds the products of a block of columns with `M` rows.
            ///
            /// # Safety
            /// A block must be readable at `w` and in each of `M` rows of `x`, `width` apart; the CPU must have the instructions.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn add<const M: usize>(
                sums: &mut [[[$vector; PARTS]; 2]; M],
                w: *const bf16,
                x: *const f32,
                width: usize,
            ) {
                for part in 0..PARTS {
                    // SAFETY: promised by the caller.
                    unsafe {
                        let pairs = $load_bits(w.add(2 * part * $lanes).cast());
                        let even = $cast($shift::<16>(pairs));
                        let odd = $cast($and(pairs, $mask(0xFFFF_0000u32 as i32)));
                        for r in 0..M {
                            let x = x.add(r * width + part * $lanes);
                            sums[r][0][part] = $fma(even, $load(x), sums[r][0][part]);
                            sums[r][1][part] = $fma(odd, $load(x.add(LANES / 2)), sums[r][1][part]);
                        }
                    }
                }
            }
        }
    };
}

kernels!(
    avx512,
    "avx512f,avx512dq,avx2,fma",
    __m512,
    16,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_loadu_si512,
    _mm512_castsi512_ps,
    _mm512_slli_epi32,
    _mm512_and_si512,
    _mm512_set1_epi32,
    _mm512_fmadd_ps,
    |parts| _mm256_add_ps(_mm512_castps512_ps256(parts[0]), _mm512_extractf32x8_ps::<1>(parts[0]))
);
kernels!(
    avx2,
    "avx2,fma",
    __m256,
    8,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_loadu_si256,
    _mm256_castsi256_ps,
    _mm256_slli_epi32,
    _mm256_and_si256,
    _mm256_set1_epi32,
    _mm256_fmadd_ps,
    |parts| _mm256_add_ps(parts[0], parts[1])
);

/// The sum of the lanes of the even and of the odd columns, in the order of `sum_lanes`.
#[inline]
#[target_feature(enable = "avx2")]
fn total(even: __m256, odd: __m256) -> f32 {
    let quarter = |v: __m256| _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let (even, odd) = (quarter(even), quarter(odd));
    let pairs = _mm_add_ps(_mm_unpacklo_ps(even, odd), _mm_unpackhi_ps(even, odd));
    let both = _mm_add_ps(pairs, _mm_movehl_ps(pairs, pairs));
    _mm_cvtss_f32(_mm_add_ss(both, _mm_movehdup_ps(both)))
}
