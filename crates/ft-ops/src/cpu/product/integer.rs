//! Products of a few rows with an int8 or int4 weight in integers: the rows are rounded to 15 bits, so that a code needs no
//! conversion to f32. For weights that allow it (`QMatrixView::rounds_rows`). A value of a row is off by at most half a unit,
//! `max |x| / 32766`, so a product by about `Σ |w| · max |x| / 2^15`, besides the rounding of sums in f32. The result has the same
//! bits on every CPU: sums of integers have no order, and those of f32 have a fixed one.

use super::VectorIsa;
use crate::quantized::{QData, QMatrixView, nearest, scale_and_minimum};

/// Lanes of the sums. For int8, lane l has columns 2l and 2l + 1 of each 16. For int4, it has the columns of two of each 16
/// bytes: `column_at`.
const LANES: usize = 8;
/// Largest rounded value: 15 bits with the sign.
const MOST: f32 = 16383.0;
/// Columns whose products fit in the integers of the lanes: 2^12 / 8 · 2^7 · 2^14 < 2^31.
const FLUSH: usize = 4096;
/// Columns of a step.
const STEP: usize = 32;
const _: () = assert!(FLUSH.is_multiple_of(STEP) && FLUSH / LANES * 128 * MOST as usize <= i32::MAX as usize);

/// For int4: the column of a step whose value stands at `place`. First are the 16 in the high halves of the codes' bytes, then
/// those in the low halves; lanes 0 to 3 have the bytes 0 and 2 of each four, the others bytes 1 and 3.
const fn column_at(place: usize) -> usize {
    let (half, place) = (place / 16, place % 16);
    2 * (2 * (place % 8) + place / 8) + half
}

/// Most rows of a product. With more, packing the dequantized weight pays (docs/benchmarks-cpu.md).
pub(super) const MOST_ROWS: usize = 64;
const INT4_ROWS: usize = 8;

/// True if `dots` supports `m` rows with this weight.
pub(super) fn fits(view: &QMatrixView<'_>, m: usize) -> bool {
    let (group, most) = match view.codes {
        QData::Int8 { group, .. } => (group, MOST_ROWS),
        QData::Int4 { group, .. } => (group, INT4_ROWS),
        _ => return false,
    };
    let whole = |n: usize| n > 0 && n.is_multiple_of(STEP);
    view.rounds_rows && m <= most && view.fits() && whole(view.columns) && whole(group)
}

/// Rows `[M, I]`, rounded for the products with a weight.
pub(super) struct RoundedRows {
    /// The integers, `[M, I]`. For int4, those of each step are in the order of `column_at`.
    values: Vec<i16>,
    /// Value of the integer 1, `[M]`.
    units: Vec<f32>,
    /// For int4: the sum of the integers of each group, `[M, groups]`.
    sums: Vec<f32>,
}

impl RoundedRows {
    pub(super) fn new<'a>(view: &QMatrixView<'_>, rows: impl Iterator<Item = &'a [f32]>) -> Self {
        let k = view.columns;
        let int4_group = match view.codes {
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
            if let Some(group) = int4_group {
                let all = &mut values[start..];
                sums.extend(
                    all.chunks(group)
                        .map(|group| group.iter().map(|v| i64::from(*v)).sum::<i64>() as f32),
                );
                for step in all.as_chunks_mut::<STEP>().0 {
                    let from = *step;
                    for (place, to) in step.iter_mut().enumerate() {
                        *to = from[column_at(place)];
                    }
                }
            }
        }
        Self { values, units, sums }
    }
}

/// The dot products of some rows of the weight, from `first` on, with each of the rows: `out` is `[rows of the weight, M]`.
/// The CPU must have the instructions of `isa`.
pub(super) fn dots(isa: Option<VectorIsa>, view: &QMatrixView<'_>, first: usize, x: &RoundedRows, out: &mut [f32]) {
    let m = x.units.len();
    assert!(fits(view, m) && x.values.len() == m * view.columns);
    assert!(!matches!(view.codes, QData::Int4 { group, .. } if x.sums.len() != m * view.columns.div_ceil(group)));
    assert!(m > 0 && out.len().is_multiple_of(m) && first + out.len() / m <= view.rows);
    let rows = Rows { view, first, x };
    #[cfg(target_arch = "x86_64")]
    if isa.is_some() {
        // SAFETY: both instruction sets contain AVX2, which the caller detected.
        return unsafe { avx2::dots(&rows, out) };
    }
    let _ = isa;
    rows.dots::<Portable>(out);
}

/// Rows of the weight from `first` on, and the rows for the products with them.
struct Rows<'a> {
    view: &'a QMatrixView<'a>,
    first: usize,
    x: &'a RoundedRows,
}

/// The scales of a row's groups.
#[derive(Clone, Copy)]
struct Groups<'a, T> {
    scales: &'a [T],
    size: usize,
}

impl<'a, T: Copy> Groups<'a, T> {
    /// Those of row `row` of a weight with `k` columns.
    #[inline(always)]
    fn new(scales: &'a [T], size: usize, row: usize, k: usize) -> Self {
        let count = k.div_ceil(size);
        Self {
            scales: &scales[row * count..][..count],
            size,
        }
    }

    /// Columns of group `index` of a row of `k`: the first one and the end.
    #[inline(always)]
    fn columns(self, index: usize, k: usize) -> (usize, usize) {
        (index * self.size, k.min((index + 1) * self.size))
    }
}

/// Dot products of a row of codes with `M` rows of integers, in lanes. The integers of a part are summed exactly; its sum times
/// its scale is added with two roundings, on every CPU.
trait IntegerKernel {
    /// Signed bytes.
    fn bytes<const M: usize>(codes: &[u8], groups: Groups<'_, f32>, values: &[i16]) -> [[f32; LANES]; M];
    /// Codes of four bits, two in a byte, without the minima of the groups.
    fn nibbles<const M: usize>(codes: &[u8], groups: Groups<'_, u32>, values: &[i16]) -> [[f32; LANES]; M];
}

impl Rows<'_> {
    #[inline(always)]
    fn dots<K: IntegerKernel>(&self, out: &mut [f32]) {
        let m = self.x.units.len();
        // Four rows stay in the L1 cache for all rows of the weight.
        for first in (0..m).step_by(4) {
            for (row, out) in (self.first..).zip(out.chunks_exact_mut(m)) {
                let out = &mut out[first..m.min(first + 4)];
                match out.len() {
                    1 => self.row_products::<K, 1>(row, first, out),
                    2 => self.row_products::<K, 2>(row, first, out),
                    3 => self.row_products::<K, 3>(row, first, out),
                    _ => self.row_products::<K, 4>(row, first, out),
                }
            }
        }
    }

    /// Row `row` of the weight with `M` rows of `x` from `first` on.
    #[inline(always)]
    fn row_products<K: IntegerKernel, const M: usize>(&self, row: usize, first: usize, out: &mut [f32]) {
        let Self { view, x, .. } = *self;
        let k = view.columns;
        let values = &x.values[first * k..][..M * k];
        let mut minima = [0f32; M];
        let sums = match view.codes {
            QData::Int8 {
                codes,
                stride,
                group,
                scales,
            } => {
                let groups = Groups::new(scales, group, row, k);
                K::bytes::<M>(&codes[row * stride..][..k], groups, values)
            }
            QData::Int4 {
                codes,
                stride,
                group,
                scales,
            } => {
                let groups = Groups::new(scales, group, row, k);
                let count = groups.scales.len();
                for (sum, x) in minima.iter_mut().zip(x.sums[first * count..].chunks_exact(count)) {
                    for (word, x) in groups.scales.iter().zip(x) {
                        *sum += scale_and_minimum(*word).1 * x;
                    }
                }
                K::nibbles::<M>(&codes[row * stride..][..k / 2], groups, values)
            }
            // Refused by `fits`.
            _ => [[0.0; LANES]; M],
        };
        for (r, (out, l)) in out.iter_mut().zip(sums).enumerate() {
            let sum = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
            *out = (sum + minima[r]) * x.units[first + r];
        }
    }
}

struct Portable;

impl Portable {
    /// `product` returns the product of the code and the value at a place of a step.
    #[inline(always)]
    fn sums<T: Copy, const M: usize, const BYTES: usize>(
        codes: &[u8],
        groups: Groups<'_, T>,
        scale: impl Fn(T) -> f32,
        values: &[i16],
        product: impl Fn(&[u8; BYTES], &[i16; STEP], usize) -> i32,
    ) -> [[f32; LANES]; M] {
        let mut sums = [[0f32; LANES]; M];
        let k = values.len() / M;
        let codes = codes.as_chunks::<BYTES>().0;
        for (group, of_group) in groups.scales.iter().enumerate() {
            let (start, end) = groups.columns(group, k);
            for start in (start..end).step_by(FLUSH) {
                for (r, sums) in sums.iter_mut().enumerate() {
                    let mut integers = [0i32; LANES];
                    let values = &values[r * k + start..r * k + end.min(start + FLUSH)];
                    for (codes, values) in codes[start / STEP..].iter().zip(values.as_chunks::<STEP>().0) {
                        for place in 0..STEP {
                            integers[place % 16 / 2] += product(codes, values, place);
                        }
                    }
                    for (sum, integer) in sums.iter_mut().zip(integers) {
                        *sum += integer as f32 * scale(*of_group);
                    }
                }
            }
        }
        sums
    }
}

impl IntegerKernel for Portable {
    #[inline(always)]
    fn bytes<const M: usize>(codes: &[u8], groups: Groups<'_, f32>, values: &[i16]) -> [[f32; LANES]; M] {
        let product = |codes: &[u8; STEP], values: &[i16; STEP], place: usize| {
            i32::from(codes[place] as i8) * i32::from(values[place])
        };
        Self::sums(codes, groups, |scale| scale, values, product)
    }

    #[inline(always)]
    fn nibbles<const M: usize>(codes: &[u8], groups: Groups<'_, u32>, values: &[i16]) -> [[f32; LANES]; M] {
        let product = |codes: &[u8; STEP / 2], values: &[i16; STEP], place: usize| {
            let column = column_at(place);
            let byte = codes[column / 2];
            let code = if column.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
            i32::from(code) * i32::from(values[place])
        };
        Self::sums(codes, groups, |word| scale_and_minimum(word).0, values, product)
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{FLUSH, Groups, IntegerKernel, LANES, Rows, STEP, scale_and_minimum};
    use std::arch::x86_64::*;

    /// # Safety
    /// The CPU must have AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn dots(rows: &Rows<'_>, out: &mut [f32]) {
        rows.dots::<Avx2>(out);
    }

    /// Only for `dots`, into which everything is inlined.
    struct Avx2;

    /// Adds the products of a step with `M` rows that are `k` apart.
    ///
    /// # Safety
    /// The CPU must have AVX2. 32 codes and 32 values of each row must be readable.
    #[inline(always)]
    unsafe fn add_bytes<const M: usize>(integers: &mut [__m256i; M], codes: *const u8, values: *const i16, k: usize) {
        // SAFETY: promised by the caller.
        unsafe {
            let first = _mm256_cvtepi8_epi16(_mm_loadu_si128(codes.cast()));
            let second = _mm256_cvtepi8_epi16(_mm_loadu_si128(codes.add(STEP / 2).cast()));
            add_products(integers, first, second, values, k);
        }
    }

    /// The same with 16 bytes of two codes each.
    ///
    /// # Safety
    /// As for `add_bytes`.
    #[inline(always)]
    unsafe fn add_nibbles<const M: usize>(integers: &mut [__m256i; M], codes: *const u8, values: *const i16, k: usize) {
        // SAFETY: promised by the caller.
        unsafe {
            // Of each four bytes, the lower lanes use 0 and 2, the upper ones 1 and 3.
            let bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(codes.cast()));
            let bytes = _mm256_srlv_epi32(bytes, _mm256_setr_epi32(0, 0, 0, 0, 8, 8, 8, 8));
            let low = _mm256_set1_epi16(15);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low);
            add_products(integers, high, _mm256_and_si256(bytes, low), values, k);
        }
    }

    /// # Safety
    /// As for `add_bytes`.
    #[inline(always)]
    unsafe fn add_products<const M: usize>(
        integers: &mut [__m256i; M],
        first: __m256i,
        second: __m256i,
        values: *const i16,
        k: usize,
    ) {
        for (r, integers) in integers.iter_mut().enumerate() {
            // SAFETY: promised by the caller.
            unsafe {
                let x = values.add(r * k);
                let first = _mm256_madd_epi16(first, _mm256_loadu_si256(x.cast()));
                let second = _mm256_madd_epi16(second, _mm256_loadu_si256(x.add(STEP / 2).cast()));
                *integers = _mm256_add_epi32(*integers, _mm256_add_epi32(first, second));
            }
        }
    }

    /// Adds integers times `scale` to the sums of each row.
    ///
    /// # Safety
    /// The CPU must have AVX2.
    #[inline(always)]
    unsafe fn add_scaled<const M: usize>(sums: &mut [__m256; M], integers: [__m256i; M], scale: f32) {
        for (sum, integers) in sums.iter_mut().zip(integers) {
            // SAFETY: promised by the caller.
            unsafe {
                let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(integers), _mm256_set1_ps(scale));
                *sum = _mm256_add_ps(*sum, scaled);
            }
        }
    }

    /// # Safety
    /// The CPU must have AVX2.
    #[inline(always)]
    unsafe fn arrays<const M: usize>(sums: [__m256; M]) -> [[f32; LANES]; M] {
        let mut out = [[0.0; LANES]; M];
        for (out, sums) in out.iter_mut().zip(sums) {
            // SAFETY: promised by the caller; there is room for eight values.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sums) };
        }
        out
    }

    /// The loops over the groups of a row, their parts of at most `FLUSH` columns, and the steps. (A closure would not be inlined
    /// before the compiler needs the instructions of AVX2.)
    macro_rules! row {
        ($codes:ident, $codes_per_byte:literal, $groups:ident, $values:ident, $add:ident, |$scale:ident| $to_f32:expr) => {{
            let k = $codes_per_byte * $codes.len();
            assert!(k.is_multiple_of(STEP) && $groups.size.is_multiple_of(STEP) && $values.len() >= M * k);
            // SAFETY: AVX2 was promised to `dots`. Groups end at `k` and have whole steps, whose codes and values are inside.
            unsafe {
                let mut sums = [_mm256_setzero_ps(); M];
                for (group, $scale) in $groups.scales.iter().enumerate() {
                    let (mut j, end) = $groups.columns(group, k);
                    while j < end {
                        let stop = end.min(j + FLUSH);
                        let mut integers = [_mm256_setzero_si256(); M];
                        while j < stop {
                            let codes = $codes.as_ptr().add(j / $codes_per_byte);
                            $add(&mut integers, codes, $values.as_ptr().add(j), k);
                            j += STEP;
                        }
                        add_scaled(&mut sums, integers, $to_f32);
                    }
                }
                arrays(sums)
            }
        }};
    }

    impl IntegerKernel for Avx2 {
        #[inline(always)]
        fn bytes<const M: usize>(codes: &[u8], groups: Groups<'_, f32>, values: &[i16]) -> [[f32; LANES]; M] {
            row!(codes, 1, groups, values, add_bytes, |scale| *scale)
        }

        #[inline(always)]
        fn nibbles<const M: usize>(codes: &[u8], groups: Groups<'_, u32>, values: &[i16]) -> [[f32; LANES]; M] {
            row!(codes, 2, groups, values, add_nibbles, |word| scale_and_minimum(*word).0)
        }
    }
}
