//! Products of a few rows with an int8 or int4 weight in integers: the rows are rounded to 15 bits, so that a code needs no
//! conversion to f32. For weights that allow it (`QMatrixView::rounds_rows`). The result is within
//! `Σ |w| · max |x| / 2^15` of the exact product, and has the same bits on every CPU: sums of integers have no order, and those
//! of f32 have a fixed one.

use super::VectorIsa;
use crate::quantized::{QData, QMatrixView, nearest};

/// Lanes of the sums: lane l has columns 2l and 2l + 1 of each 16 (int8), or 4l to 4l + 3 of each 32 (int4).
const LANES: usize = 8;
/// Largest rounded value.
const MOST: f32 = 16383.0;
/// Columns whose products fit in the integers of the lanes: 2^12 / 8 · 2^7 · 2^14 < 2^31.
const FLUSH: usize = 4096;
/// Columns of a step.
const STEP: usize = 32;

/// True if `dots` supports this weight.
pub(super) fn fits(view: &QMatrixView<'_>) -> bool {
    let group = match view.codes {
        QData::Int8 { group, .. } | QData::Int4 { group, .. } => group,
        _ => return false,
    };
    let whole = |n: usize| n > 0 && n.is_multiple_of(STEP);
    view.rounds_rows && view.fits() && whole(view.columns) && whole(group)
}

/// Rows `[M, I]`, rounded for the products with a weight.
pub(super) struct RoundedRows {
    /// The integers, `[M, I]`. For int4, the even ones of each 32 come before the odd ones, as the codes in their bytes.
    values: Vec<i16>,
    /// Value of the integer 1, `[M]`.
    units: Vec<f32>,
    /// For int4: the sum of the integers of each group, `[M, groups]`.
    sums: Vec<f32>,
}

impl RoundedRows {
    pub(super) fn new<'a>(view: &QMatrixView<'_>, rows: impl Iterator<Item = &'a [f32]>) -> Self {
        let k = view.columns;
        let half_bytes = match view.codes {
            QData::Int4 { group, .. } => Some(group),
            _ => None,
        };
        let (mut values, mut units, mut sums) = (Vec::new(), Vec::new(), Vec::new());
        for row in rows {
            let largest = row.iter().fold(0f32, |most, x| most.max(x.abs()));
            // A row that is not finite gives results that are not.
            let unit = if row.iter().all(|x| x.is_finite()) {
                largest / MOST
            } else {
                f32::NAN
            };
            let scale = if unit >= f32::MIN_POSITIVE { MOST / largest } else { 0.0 };
            let start = values.len();
            values.extend(row[..k].iter().map(|x| nearest(x * scale) as i16));
            units.push(unit);
            if let Some(group) = half_bytes {
                let all = &mut values[start..];
                sums.extend(
                    all.chunks(group)
                        .map(|group| group.iter().map(|v| i32::from(*v)).sum::<i32>() as f32),
                );
                for step in all.as_chunks_mut::<STEP>().0 {
                    let from = *step;
                    for (i, pair) in from.as_chunks::<2>().0.iter().enumerate() {
                        (step[i], step[STEP / 2 + i]) = (pair[0], pair[1]);
                    }
                }
            }
        }
        Self { values, units, sums }
    }
}

/// The dot product of row `row` of the weight with each of the rows. The CPU must have the instructions of `isa`.
pub(super) fn dots(isa: Option<VectorIsa>, view: &QMatrixView<'_>, row: usize, x: &RoundedRows, out: &mut [f32]) {
    assert!(row < view.rows && fits(view) && x.values.len() == out.len() * view.columns && x.units.len() == out.len());
    for (first, out) in (0..).step_by(4).zip(out.chunks_mut(4)) {
        let place = Place { view, row, x, first };
        #[cfg(target_arch = "x86_64")]
        if isa.is_some() {
            // SAFETY: both instruction sets contain AVX2, which the caller detected.
            unsafe { avx2::some(&place, out) };
            continue;
        }
        let _ = isa;
        place.each::<Portable>(out);
    }
}

/// Up to four rows of `x` from `first` on, and a row of the weight.
struct Place<'a> {
    view: &'a QMatrixView<'a>,
    row: usize,
    x: &'a RoundedRows,
    first: usize,
}

/// Sums of the products of codes with `M` rows of integers that are `stride` apart. The codes are a whole number of steps.
trait IntegerKernel {
    /// Signed bytes.
    fn bytes<const M: usize>(codes: &[u8], values: &[i16], stride: usize) -> [[i32; LANES]; M];
    /// Codes of four bits, two in a byte.
    fn halves<const M: usize>(codes: &[u8], values: &[i16], stride: usize) -> [[i32; LANES]; M];
}

impl Place<'_> {
    #[inline(always)]
    fn each<K: IntegerKernel>(&self, out: &mut [f32]) {
        match out.len() {
            1 => self.some::<K, 1>(out),
            2 => self.some::<K, 2>(out),
            3 => self.some::<K, 3>(out),
            _ => self.some::<K, 4>(out),
        }
    }

    #[inline(always)]
    fn some<K: IntegerKernel, const M: usize>(&self, out: &mut [f32]) {
        let Self { view, row, x, first } = *self;
        let k = view.columns;
        let values = &x.values[first * k..][..M * k];
        let mut lanes = [[0f32; LANES]; M];
        let mut minima = [0f32; M];
        match view.codes {
            QData::Int8 {
                codes,
                stride,
                group,
                scales,
            } => {
                let codes = &codes[row * stride..][..k];
                for (start, scale) in (0..k).step_by(group).zip(&scales[row * k.div_ceil(group)..]) {
                    let end = k.min(start + group);
                    for start in (start..end).step_by(FLUSH) {
                        let sums = K::bytes::<M>(&codes[start..end.min(start + FLUSH)], &values[start..], k);
                        add_scaled(&mut lanes, &sums, *scale);
                    }
                }
            }
            QData::Int4 {
                codes,
                stride,
                group,
                scales,
            } => {
                let codes = &codes[row * stride..][..k / 2];
                let groups = k.div_ceil(group);
                for (n, word) in scales[row * groups..][..groups].iter().enumerate() {
                    let (scale, minimum) = (f32::from_bits(word << 16), f32::from_bits(word & 0xFFFF_0000));
                    let end = k.min((n + 1) * group);
                    for start in (n * group..end).step_by(FLUSH) {
                        let end = end.min(start + FLUSH);
                        let sums = K::halves::<M>(&codes[start / 2..end / 2], &values[start..], k);
                        add_scaled(&mut lanes, &sums, scale);
                    }
                    for (r, sum) in minima.iter_mut().enumerate() {
                        *sum += minimum * x.sums[(first + r) * groups + n];
                    }
                }
            }
            // Refused by `fits`.
            _ => {}
        }
        for (r, out) in out.iter_mut().enumerate() {
            let l = &lanes[r];
            let sum = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
            *out = (sum + minima[r]) * x.units[first + r];
        }
    }
}

/// `lanes += sums · scale`, with two roundings on every CPU.
#[inline(always)]
fn add_scaled<const M: usize>(lanes: &mut [[f32; LANES]; M], sums: &[[i32; LANES]; M], scale: f32) {
    for (lanes, sums) in lanes.iter_mut().zip(sums) {
        for (lane, sum) in lanes.iter_mut().zip(sums) {
            *lane += *sum as f32 * scale;
        }
    }
}

struct Portable;

impl IntegerKernel for Portable {
    #[inline(always)]
    fn bytes<const M: usize>(codes: &[u8], values: &[i16], stride: usize) -> [[i32; LANES]; M] {
        let mut sums = [[0i32; LANES]; M];
        for (r, sums) in sums.iter_mut().enumerate() {
            let x = values[r * stride..].as_chunks::<16>().0;
            for (codes, x) in codes.as_chunks::<16>().0.iter().zip(x) {
                for (l, sum) in sums.iter_mut().enumerate() {
                    let product = |i: usize| i32::from(codes[i] as i8) * i32::from(x[i]);
                    *sum += product(2 * l) + product(2 * l + 1);
                }
            }
        }
        sums
    }

    #[inline(always)]
    fn halves<const M: usize>(codes: &[u8], values: &[i16], stride: usize) -> [[i32; LANES]; M] {
        let mut sums = [[0i32; LANES]; M];
        for (r, sums) in sums.iter_mut().enumerate() {
            let x = values[r * stride..].as_chunks::<STEP>().0;
            for (codes, x) in codes.as_chunks::<16>().0.iter().zip(x) {
                for (l, sum) in sums.iter_mut().enumerate() {
                    for i in [2 * l, 2 * l + 1] {
                        let (even, odd) = (i32::from(codes[i] >> 4), i32::from(codes[i] & 15));
                        *sum += even * i32::from(x[i]) + odd * i32::from(x[16 + i]);
                    }
                }
            }
        }
        sums
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{IntegerKernel, LANES, Place, STEP};
    use std::arch::x86_64::*;

    /// # Safety
    /// The CPU must have AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn some(place: &Place<'_>, out: &mut [f32]) {
        place.each::<Avx2>(out);
    }

    /// Only for `some`, into which everything is inlined.
    struct Avx2;

    impl IntegerKernel for Avx2 {
        #[inline(always)]
        fn bytes<const M: usize>(codes: &[u8], values: &[i16], stride: usize) -> [[i32; LANES]; M] {
            assert!(codes.len().is_multiple_of(STEP) && values.len() >= (M - 1) * stride + codes.len());
            // SAFETY: AVX2 was promised to `some`; 16 codes and 16 values of each row are inside at each place.
            unsafe {
                let mut sums = [[_mm256_setzero_si256(); 2]; M];
                for j in (0..codes.len()).step_by(STEP) {
                    for part in 0..2 {
                        let j = j + STEP / 2 * part;
                        let codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(codes.as_ptr().add(j).cast()));
                        for (r, sums) in sums.iter_mut().enumerate() {
                            let x = _mm256_loadu_si256(values.as_ptr().add(r * stride + j).cast());
                            sums[part] = _mm256_add_epi32(sums[part], _mm256_madd_epi16(codes, x));
                        }
                    }
                }
                let mut out = [[0; LANES]; M];
                for (out, [first, second]) in out.iter_mut().zip(sums) {
                    _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm256_add_epi32(first, second));
                }
                out
            }
        }

        #[inline(always)]
        fn halves<const M: usize>(codes: &[u8], values: &[i16], stride: usize) -> [[i32; LANES]; M] {
            assert!(codes.len().is_multiple_of(STEP / 2) && values.len() >= (M - 1) * stride + 2 * codes.len());
            // SAFETY: as in `bytes`: 16 bytes of codes and 32 values of each row.
            unsafe {
                let mut sums = [_mm256_setzero_si256(); M];
                for j in (0..2 * codes.len()).step_by(STEP) {
                    let pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128(codes.as_ptr().add(j / 2).cast()));
                    let even = _mm256_srli_epi16::<4>(pairs);
                    let odd = _mm256_and_si256(pairs, _mm256_set1_epi16(15));
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let x = values.as_ptr().add(r * stride + j);
                        let first = _mm256_madd_epi16(even, _mm256_loadu_si256(x.cast()));
                        let second = _mm256_madd_epi16(odd, _mm256_loadu_si256(x.add(STEP / 2).cast()));
                        *sums = _mm256_add_epi32(*sums, _mm256_add_epi32(first, second));
                    }
                }
                let mut out = [[0; LANES]; M];
                for (out, sum) in out.iter_mut().zip(sums) {
                    _mm256_storeu_si256(out.as_mut_ptr().cast(), sum);
                }
                out
            }
        }
    }
}
