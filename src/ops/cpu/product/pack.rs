//! Copies a part of a matrix into the order in which a micro-kernel reads it: `[k][width]`, widened to f32.

use super::super::storage::Values;
use super::Matrix;
use half::bf16;
use std::arch::x86_64::*;

/// Elements that may be written behind the end of a panel.
pub(crate) const SLACK: usize = 16;

/// Packs vectors `first..first + count` of `m`, elements `k0..k0 + k` of each: element (i, p) goes to
/// `to[p * width + i]`. Places for `count..width` get 0 or what comes next; up to `SLACK` elements behind are changed.
pub(crate) fn panel(m: &Matrix, (first, count): (usize, usize), (k0, k): (usize, usize), width: usize, to: &mut [f32]) {
    assert!(count <= width && to.len() >= k * width + SLACK);
    m.check(first + count, k0 + k);
    // SAFETY: this path is taken only where AVX2 was found; the ranges were checked.
    unsafe {
        match m.values {
            Values::F32(v) => run(v, m, (first, count), (k0, k), width, to),
            Values::Bf16(v) => run(v, m, (first, count), (k0, k), width, to),
        }
    }
}

#[target_feature(enable = "avx2")]
unsafe fn run<T: Element>(
    from: &[T],
    m: &Matrix,
    (first, count): (usize, usize),
    (k0, k): (usize, usize),
    width: usize,
    to: &mut [f32],
) {
    // SAFETY: see `panel`.
    unsafe {
        if m.along_k {
            transposed(from.as_ptr().add(first * m.stride + k0), m.stride, count, k, width, to)
        } else {
            rows(&from[k0 * m.stride + first..], m.stride, count, k, width, to)
        }
    }
}

/// Vectors lie side by side: each step of k is a short copy.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn rows<T: Element>(from: &[T], stride: usize, count: usize, k: usize, width: usize, to: &mut [f32]) {
    let whole = count.next_multiple_of(8);
    // Reading whole vectors may pass the end of the last rows: those element by element.
    let wide = if from.len() < whole {
        0
    } else {
        ((from.len() - whole) / stride + 1).min(k)
    };
    // SAFETY: reads end inside `from` by the choice of `wide`; writes pass the end of a row by less than 8.
    unsafe {
        for p in 0..wide {
            let (from, to) = (from.as_ptr().add(p * stride), to.as_mut_ptr().add(p * width));
            for i in (0..count).step_by(8) {
                _mm256_storeu_ps(to.add(i), T::load8(from.add(i)));
            }
        }
    }
    for p in wide..k {
        for i in 0..count {
            to[p * width + i] = from[p * stride + i].get();
        }
    }
    // The wide stores fill up to 7 places with neighbours, which only reach columns that do not exist.
}

/// Elements of k lie side by side: 8 x 8 blocks are transposed in registers.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn transposed<T: Element>(from: *const T, stride: usize, count: usize, k: usize, width: usize, to: &mut [f32]) {
    let blocks = k / 8;
    // SAFETY: reads are inside (count, k); writes pass the end of a row by less than 8, and later rows come later.
    unsafe {
        for block in 0..blocks {
            // From the right: what a store writes behind its row is written again.
            for i in (0..count).step_by(8).rev() {
                let mut rows = [_mm256_setzero_ps(); 8];
                for (r, row) in rows.iter_mut().enumerate().take(count - i) {
                    *row = T::load8(from.add((i + r) * stride + block * 8));
                }
                for (r, row) in transpose(rows).into_iter().enumerate() {
                    _mm256_storeu_ps(to.as_mut_ptr().add((block * 8 + r) * width + i), row);
                }
            }
        }
        for p in blocks * 8..k {
            for i in 0..count {
                to[p * width + i] = (*from.add(i * stride + p)).get();
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn transpose(r: [__m256; 8]) -> [__m256; 8] {
    let mut t = r;
    for i in 0..4 {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    let mut s = t;
    for i in 0..2 {
        let q = 4 * i;
        s[q] = _mm256_shuffle_ps::<0x44>(t[q], t[q + 2]);
        s[q + 1] = _mm256_shuffle_ps::<0xEE>(t[q], t[q + 2]);
        s[q + 2] = _mm256_shuffle_ps::<0x44>(t[q + 1], t[q + 3]);
        s[q + 3] = _mm256_shuffle_ps::<0xEE>(t[q + 1], t[q + 3]);
    }
    let mut out = s;
    for i in 0..4 {
        out[i] = _mm256_permute2f128_ps::<0x20>(s[i], s[i + 4]);
        out[i + 4] = _mm256_permute2f128_ps::<0x31>(s[i], s[i + 4]);
    }
    out
}

trait Element: Copy {
    /// # Safety
    /// Eight elements must be readable.
    unsafe fn load8(from: *const Self) -> __m256;
    fn get(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load8(from: *const f32) -> __m256 {
        // SAFETY: promised by the caller.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    fn get(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load8(from: *const bf16) -> __m256 {
        // SAFETY: promised by the caller.
        unsafe { widen8(from) }
    }
    #[inline(always)]
    fn get(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn widen8(from: *const bf16) -> __m256 {
    // SAFETY: promised by the caller.
    let narrow = unsafe { _mm_loadu_si128(from.cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(narrow)))
}
