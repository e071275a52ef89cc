//! Products of a few rows with an int8 or int4 weight in integers: the rows are rounded to 15 bits, so that a code needs no
//! conversion to f32. For weights that allow it (`QMatrixView::rounds_rows`). A value of a row is off by at most half a unit,
//! `max |x| / 32766`, so a product by about `Σ |w| · max |x| / 2^15`, besides the rounding of sums in f32. A finite result has the
//! same bits on every CPU: sums of integers have no order, and those of f32 have a fixed one.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod portable;
mod rows;
#[cfg(target_arch = "x86_64")]
mod vnni;
#[cfg(test)]
mod tests;

use super::{CpuBackend, VectorIsa};
use crate::quantized::{QData, QMatrixView, scale_and_minimum};
pub(super) use rows::RoundedRows;

/// Bytes of codes in a step.
const STEP: usize = 32;
/// Lanes of the sums. Lane l has the codes in the bytes 4l to 4l + 3 of each step.
const SUM_LANES: usize = 8;
/// Largest rounded value: 15 bits with the sign.
const LARGEST: f32 = 16383.0;
/// Steps whose products fit in the integers of the lanes: 2^8 · 2^2 · 2^7 · 2^14 = 2^31, and no value is 2^14.
const FLUSH: usize = 256;
const _: () = assert!(FLUSH * (STEP / SUM_LANES) * 128 * LARGEST as usize <= i32::MAX as usize);
const _: () = assert!(FLUSH * (STEP / SUM_LANES) * 2 * 15 * LARGEST as usize <= i32::MAX as usize);

/// Most rows of a product with int8, and with int4, whose groups cost more: the most that were measured (docs/benchmarks-cpu.md).
const MOST_ROWS: usize = 64;
const INT4_ROWS: usize = 8;
/// The same with int8 on AMX: with more rows, the dequantized weight on tiles is faster.
const AMX_ROWS: usize = 16;
const _: () = assert!(MOST_ROWS >= AMX_ROWS && AMX_ROWS >= INT4_ROWS);

/// Most rows with any weight.
pub(super) fn most_rows_of_any(backend: CpuBackend) -> usize {
    if backend == CpuBackend::Amx {
        AMX_ROWS
    } else {
        MOST_ROWS
    }
}

/// Most rows for which `backend` computes products with this weight in integers. None: it never does.
pub(super) fn most_rows(view: &QMatrixView<'_>, backend: CpuBackend) -> Option<usize> {
    let (group, step, most) = match view.codes {
        QData::Int8 { group, .. } => (group, Int8::COLUMNS, most_rows_of_any(backend)),
        QData::Int4 { group, .. } => (group, Int4::COLUMNS, INT4_ROWS),
        _ => return None,
    };
    let whole = |n: usize| n > 0 && n.is_multiple_of(step);
    (view.rounds_rows && view.fits() && whole(view.columns) && whole(group.min(view.columns))).then_some(most)
}

/// The dot products of some rows of the weight, from `first` on, with each of the rows: `out` is `[rows of the weight, M]`.
/// The CPU must have the instructions of `isa`. `most_rows` must not be None; more rows are slow and right.
pub(super) fn dots(isa: Option<VectorIsa>, view: &QMatrixView<'_>, first: usize, x: &RoundedRows, out: &mut [f32]) {
    let m = x.units.len();
    assert!(m > 0 && most_rows(view, CpuBackend::Portable).is_some() && x.fits(view));
    assert!(out.len().is_multiple_of(m) && first + out.len() / m <= view.rows);
    let rows = Rows { view, first, x };
    #[cfg(target_arch = "x86_64")]
    match isa {
        // SAFETY: the instructions were detected.
        Some(VectorIsa::Avx512) if vnni::available() => return unsafe { vnni::dots(&rows, out) },
        // SAFETY: both instruction sets contain AVX2, which the caller detected.
        Some(_) => return unsafe { avx2::dots(&rows, out) },
        None => {}
    }
    let _ = isa;
    // SAFETY: plain Rust.
    unsafe { rows.dots::<portable::Portable>(out) };
}

/// How a step holds its codes. It has `PLANES` planes of 16 codes; two codes of each plane belong to a lane, `2l` and `2l + 1`.
/// In a vector of 16 words of 2 bytes, the codes of a plane are at the same bits of each word.
trait Codes {
    /// Planes of a step.
    const PLANES: usize;
    /// Columns of a step.
    const COLUMNS: usize = 16 * Self::PLANES;
    /// The stored scale of a group, with its minimum if there is one.
    type Scale: Copy;
    /// The scale of a group.
    fn scale(of_group: Self::Scale) -> f32;
    /// The code at a place of a plane.
    fn code(step: &[u8; STEP], plane: usize, place: usize) -> i32;
    /// Its column in the step.
    fn column(plane: usize, place: usize) -> usize;
}

/// Signed bytes. The planes are the even and the odd bytes.
struct Int8;
/// Two codes in a byte, the first in the high half. The planes are the low and the high halves of the even bytes, then those
/// of the odd ones.
struct Int4;

impl Codes for Int8 {
    const PLANES: usize = 2;
    type Scale = f32;

    #[inline(always)]
    fn scale(of_group: f32) -> f32 {
        of_group
    }

    #[inline(always)]
    fn code(step: &[u8; STEP], plane: usize, place: usize) -> i32 {
        i32::from(step[Self::column(plane, place)] as i8)
    }

    #[inline(always)]
    fn column(plane: usize, place: usize) -> usize {
        2 * place + plane
    }
}

impl Codes for Int4 {
    const PLANES: usize = 4;
    type Scale = u32;

    #[inline(always)]
    fn scale(of_group: u32) -> f32 {
        scale_and_minimum(of_group).0
    }

    #[inline(always)]
    fn code(step: &[u8; STEP], plane: usize, place: usize) -> i32 {
        i32::from(step[2 * place + plane / 2] >> (4 * (plane % 2)) & 15)
    }

    #[inline(always)]
    fn column(plane: usize, place: usize) -> usize {
        2 * (2 * place + plane / 2) + 1 - plane % 2
    }
}

/// Where plane 0 of a step has its values in a row: two steps are side by side, as in a vector of 64 bytes.
#[inline(always)]
fn values_of<C: Codes>(step: usize) -> usize {
    step / 2 * 2 * C::COLUMNS + step % 2 * 16
}

/// From a plane of a step to the next one, in values.
const PLANE: usize = 32;

/// Rows of codes, and the rows of values for the products with them, all of whole steps.
struct RowBlock<'a, C: Codes> {
    /// The first row begins here, and each other one `stride` bytes after the one before it.
    codes: &'a [u8],
    stride: usize,
    /// Steps of a row.
    steps: usize,
    /// Scales of all rows, `groups` of each.
    scales: &'a [C::Scale],
    groups: usize,
    /// Steps of a group.
    group_steps: usize,
    /// `width` of each row.
    values: &'a [i16],
    width: usize,
}

impl<'a, C: Codes> RowBlock<'a, C> {
    /// Panics unless all codes, scales and values that a kernel reads for `n` rows of codes and `m` rows of values are there.
    #[inline(always)]
    fn check(&self, n: usize, m: usize) {
        assert!(n > 0 && self.codes.len() >= (n - 1) * self.stride + self.steps * STEP);
        assert!(
            self.group_steps > 0
                && self.groups == self.steps.div_ceil(self.group_steps)
                && self.scales.len() == n * self.groups
        );
        assert!(self.width == width::<C>(self.steps) && self.values.len() == m * self.width);
    }

    /// The first step of a group and the end.
    #[inline(always)]
    fn steps_of(&self, index: usize) -> (usize, usize) {
        (index * self.group_steps, self.steps.min((index + 1) * self.group_steps))
    }
}

/// Values of a row with `steps` steps. With an odd number of steps, the half of the missing one is zeros.
#[inline(always)]
fn width<C: Codes>(steps: usize) -> usize {
    steps.div_ceil(2) * 2 * C::COLUMNS
}

/// Dot products of `N` rows of codes with `M` rows of integers, in lanes, without the minima of the groups. The integers of at
/// most `FLUSH` steps of a group are summed exactly; the sum times the scale is added with two roundings, on every CPU.
trait IntegerKernel {
    /// True if the integers of 4 x 4 products stay in registers, else those of 8.
    const FOUR_BY_FOUR: bool;

    /// # Safety
    /// The CPU must have the instructions of the kernel.
    unsafe fn sums<C: Codes, const N: usize, const M: usize>(block: &RowBlock<'_, C>) -> [[[f32; SUM_LANES]; M]; N];
}

/// Rows of the weight from `first` on, and the rows for the products with them.
struct Rows<'a> {
    view: &'a QMatrixView<'a>,
    first: usize,
    x: &'a RoundedRows,
}

impl Rows<'_> {
    /// # Safety
    /// The CPU must have the instructions of the kernel.
    #[inline(always)]
    unsafe fn dots<K: IntegerKernel>(&self, out: &mut [f32]) {
        let m = self.x.units.len();
        // Four rows stay in the cache for all rows of the weight.
        for first in (0..m).step_by(4) {
            // SAFETY: promised by the caller.
            unsafe {
                match m - first {
                    1 => self.with_rows::<K, 1>(first, out),
                    2 => self.with_rows::<K, 2>(first, out),
                    3 => self.with_rows::<K, 3>(first, out),
                    _ => self.with_rows::<K, 4>(first, out),
                }
            }
        }
    }

    /// All rows of the weight with `M` rows of `x` from `first` on.
    ///
    /// # Safety
    /// As for `dots`.
    #[inline(always)]
    unsafe fn with_rows<K: IntegerKernel, const M: usize>(&self, first: usize, out: &mut [f32]) {
        let count = out.len() / self.x.units.len();
        let mut row = 0;
        while row < count {
            // SAFETY: promised by the caller.
            row += unsafe {
                match count - row {
                    4.. if K::FOUR_BY_FOUR || M <= 2 => self.block::<K, 4, M>(row, first, out),
                    2.. => self.block::<K, 2, M>(row, first, out),
                    _ => self.block::<K, 1, M>(row, first, out),
                }
            };
        }
    }

    /// `N` rows of the weight from `row` on, as counted in `out`, with `M` rows of `x` from `first` on. Returns `N`.
    ///
    /// # Safety
    /// As for `dots`.
    #[inline(always)]
    unsafe fn block<K: IntegerKernel, const N: usize, const M: usize>(
        &self,
        row: usize,
        first: usize,
        out: &mut [f32],
    ) -> usize {
        let Self { view, x, .. } = *self;
        let of_weight = self.first + row;
        // SAFETY: promised by the caller.
        let sums = unsafe {
            match view.codes {
                QData::Int8 {
                    codes,
                    stride,
                    group,
                    scales,
                } => {
                    self.sums::<K, Int8, N, M>((of_weight, first), &codes[of_weight * stride..], stride, group, scales)
                }
                QData::Int4 {
                    codes,
                    stride,
                    group,
                    scales,
                } => {
                    let codes = &codes[of_weight * stride..];
                    let mut sums = self.sums::<K, Int4, N, M>((of_weight, first), codes, stride, group, scales);
                    let groups = view.columns.div_ceil(group);
                    let scales = scales[of_weight * groups..].chunks_exact(groups);
                    for (sums, scales) in sums.iter_mut().zip(scales) {
                        for (sums, x) in sums.iter_mut().zip(x.sums[first * groups..].chunks_exact(groups)) {
                            add_minima(sums, scales, x);
                        }
                    }
                    sums
                }
                // Refused by `fits`.
                _ => [[[0.0; SUM_LANES]; M]; N],
            }
        };
        let m = x.units.len();
        for (out, sums) in out[row * m..].chunks_exact_mut(m).zip(sums) {
            for ((out, l), unit) in out[first..].iter_mut().zip(sums).zip(&x.units[first..]) {
                *out = (((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))) * unit;
            }
        }
        N
    }

    /// The sums of `N` rows of the weight with `M` rows of `x`, the first ones of which are in `rows`. `codes` begins with the first
    /// row of the weight, `group` is in columns.
    ///
    /// # Safety
    /// As for `dots`.
    #[inline(always)]
    unsafe fn sums<K: IntegerKernel, C: Codes, const N: usize, const M: usize>(
        &self,
        rows: (usize, usize),
        codes: &[u8],
        stride: usize,
        group: usize,
        scales: &[C::Scale],
    ) -> [[[f32; SUM_LANES]; M]; N] {
        let Self { view, x, .. } = *self;
        let groups = view.columns.div_ceil(group);
        let block = RowBlock {
            codes,
            stride,
            steps: view.columns / C::COLUMNS,
            scales: &scales[rows.0 * groups..][..N * groups],
            groups,
            group_steps: group.div_ceil(C::COLUMNS),
            values: &x.values[rows.1 * x.width..][..M * x.width],
            width: x.width,
        };
        // SAFETY: promised by the caller.
        unsafe { K::sums::<C, N, M>(&block) }
    }
}

/// Adds the minimum of each group times the sum of its values.
#[inline(always)]
fn add_minima(sums: &mut [f32; SUM_LANES], scales: &[u32], x: &[f32]) {
    let ((scales, scales_end), (x, x_end)) = (scales.as_chunks::<SUM_LANES>(), x.as_chunks::<SUM_LANES>());
    for (words, x) in scales.iter().zip(x) {
        for lane in 0..SUM_LANES {
            sums[lane] += scale_and_minimum(words[lane]).1 * x[lane];
        }
    }
    for ((sum, word), x) in sums.iter_mut().zip(scales_end).zip(x_end) {
        *sum += scale_and_minimum(*word).1 * x;
    }
}
