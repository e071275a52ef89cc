//! Packs a part of a matrix into panels in the order that a micro-kernel reads, `[k][width]`, widened to f32.

use super::super::dequantize::dequantize;
use super::{Matrix, Operand, VectorIsa};
use crate::quantized::QMatrixView;
use half::bf16;
use std::arch::x86_64::*;

/// One panel: vectors `start..start + count` of the part, in rows of `width`.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    pub start: usize,
    pub count: usize,
    pub width: usize,
}

/// The layout of a panel buffer: elements of k per panel, and the index of k at which packing begins. So several
/// operands can share one panel.
#[derive(Clone, Copy)]
pub(super) struct PanelLayout {
    pub steps: usize,
    pub at: usize,
}

impl PanelLayout {
    /// A layout for `steps` elements of k of one operand.
    pub(super) fn of(steps: usize) -> Self {
        Self { steps, at: 0 }
    }

    /// Returns the position of index `p` of k of a panel.
    #[inline(always)]
    pub(super) fn place(self, panel: Panel, p: usize) -> usize {
        panel.start * self.steps + (self.at + p) * panel.width
    }
}

/// A part of an operand: vectors from `first` on, elements `k0..k0 + k` of each.
#[derive(Clone, Copy)]
pub(super) struct OperandPart {
    pub first: usize,
    pub k0: usize,
    pub k: usize,
}

/// Packs a part panel by panel: element (i, p) of a panel goes to `to[layout.place(panel, p) + i]`. Positions beyond `count` get arbitrary values. The panels follow each other.
/// A quantized operand that is contiguous in k needs memory for one panel in `scratch`.
pub(super) fn panels(
    m: &Matrix,
    part: OperandPart,
    panels: impl Iterator<Item = Panel> + Clone,
    isa: VectorIsa,
    layout: PanelLayout,
    to: &mut [f32],
    scratch: &mut [f32],
) {
    let OperandPart { first, k0, k } = part;
    let Some(last) = panels.clone().last() else { return };
    assert!(to.len() >= layout.place(last, k) && layout.at + k <= layout.steps);
    m.check(first + last.start + last.count, k0 + k);
    // SAFETY: the CPU features were detected; the ranges were checked.
    unsafe {
        match (m.values, isa) {
            (Operand::F32(v), VectorIsa::Avx512) => wide::run(v, m, part, panels, layout, to),
            (Operand::Bf16(v), VectorIsa::Avx512) => wide::run(v, m, part, panels, layout, to),
            (Operand::F32(v), VectorIsa::Avx2) => narrow::run(v, m, part, panels, layout, to),
            (Operand::Bf16(v), VectorIsa::Avx2) => narrow::run(v, m, part, panels, layout, to),
            (Operand::Quantized(view), _) if m.k_contiguous => {
                quantized_k_inner(&view, part, panels, isa, layout, to, scratch)
            }
            (Operand::Quantized(view), _) => quantized_k_outer(&view, part, panels, isa, layout, to),
        }
    }
}

/// Prefetch distance in indices of k: weights come from main memory, in runs too short for the hardware prefetcher.
const AHEAD: usize = 16;
/// Indices of k that are copied for one panel, before the next panel.
const ROWS: usize = 16;

/// Packs a quantized operand whose rows are vectors: a panel is dequantized row by row, then transposed.
fn quantized_k_inner(
    view: &QMatrixView<'_>,
    OperandPart { first, k0, k }: OperandPart,
    all: impl Iterator<Item = Panel>,
    isa: VectorIsa,
    layout: PanelLayout,
    to: &mut [f32],
    scratch: &mut [f32],
) {
    for panel in all {
        let dequantized = &mut scratch[..panel.count * k];
        for (i, row) in dequantized.chunks_exact_mut(k).enumerate() {
            dequantize(Some(isa), view, first + panel.start + i, k0, row);
        }
        let alone = std::iter::once(Panel { start: 0, ..panel });
        let dequantized = Matrix::k_inner(Operand::F32(dequantized), k);
        let to = &mut to[panel.start * layout.steps..];
        let part = OperandPart { first: 0, k0: 0, k };
        panels(&dequantized, part, alone, isa, layout, to, &mut []);
    }
}

/// Packs a quantized operand whose rows are indices of k: a row is dequantized in pieces, which are copied to the
/// panels.
fn quantized_k_outer(
    view: &QMatrixView<'_>,
    OperandPart { first, k0, k }: OperandPart,
    all: impl Iterator<Item = Panel> + Clone,
    isa: VectorIsa,
    layout: PanelLayout,
    to: &mut [f32],
) {
    const PIECE: usize = 512;
    let mut piece = [0f32; PIECE];
    let columns = all.clone().last().map_or(0, |p| p.start + p.count);
    for p in 0..k {
        // Columns `from..until` of the part are dequantized.
        let (mut from, mut until) = (0, 0);
        for panel in all.clone() {
            let end = panel.start + panel.count;
            if end > until {
                (from, until) = (panel.start, (panel.start + PIECE).min(columns));
                dequantize(Some(isa), view, k0 + p, first + from, &mut piece[..until - from]);
            }
            let values = &piece[panel.start - from..][..panel.count];
            to[layout.place(panel, p)..][..panel.count].copy_from_slice(values);
        }
    }
}

macro_rules! packing {
    ($module:ident, $features:literal, $vector:ty, $lanes:literal, $load:ident, $zero:ident, $store:ident) => {
        mod $module {
            use super::*;

            #[target_feature(enable = $features)]
            pub(super) unsafe fn run<T: Element>(
                from: &[T],
                m: &Matrix,
                part: OperandPart,
                panels: impl Iterator<Item = Panel> + Clone,
                layout: PanelLayout,
                to: &mut [f32],
            ) {
                let OperandPart { first, k0, k } = part;
                // SAFETY: see `panels`.
                unsafe {
                    if m.k_contiguous {
                        for p in panels {
                            let from = from.as_ptr().add((first + p.start) * m.stride + k0);
                            transposed(from, m.stride, p, k, to[layout.place(p, 0)..].as_mut_ptr());
                        }
                    } else {
                        strided(from, m.stride, part, panels, layout, to)
                    }
                }
            }

            /// Packs vectors that are contiguous across vectors: `ROWS` indices of k at a time are read from left to right,
            /// for all panels.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn strided<T: Element>(
                from: &[T],
                stride: usize,
                OperandPart { first, k0, k }: OperandPart,
                panels: impl Iterator<Item = Panel> + Clone,
                layout: PanelLayout,
                to: &mut [f32],
            ) {
                for p in (0..k).step_by(ROWS) {
                    let rows = ROWS.min(k - p);
                    let start = (k0 + p) * stride + first;
                    for panel in panels.clone() {
                        let place = layout.place(panel, p);
                        let at = start + panel.start;
                        let whole = panel.count.next_multiple_of($lanes);
                        if at + (rows - 1) * stride + whole > from.len() {
                            for r in 0..rows {
                                for i in 0..panel.count {
                                    to[place + r * panel.width + i] = from[at + r * stride + i].get();
                                }
                            }
                            continue;
                        }
                        // SAFETY: inside `from` by the check above, inside the rows of the panel; a prefetch may use any
                        // address.
                        unsafe {
                            let (from, to) = (from.as_ptr().add(at), to.as_mut_ptr().add(place));
                            for r in 0..rows {
                                let (from, to) = (from.add(r * stride), to.add(r * panel.width));
                                for i in (0..panel.count).step_by($lanes) {
                                    let at = from.add(i);
                                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD * stride).cast());
                                    let values = T::$load(at);
                                    match panel.width - i {
                                        $lanes.. => $store(to.add(i), values),
                                        less => store_part(to.add(i), less, values),
                                    }
                                }
                            }
                        }
                    }
                }
            }

            /// Packs vectors that are contiguous in k: square blocks are transposed in registers.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn transposed<T: Element>(from: *const T, stride: usize, panel: Panel, k: usize, to: *mut f32) {
                let Panel { count, width, .. } = panel;
                let blocks = k / $lanes;
                // SAFETY: reads are inside (count, k), stores inside the rows of the panel.
                unsafe {
                    for i in (0..count).step_by($lanes) {
                        let there = $lanes.min(count - i);
                        // Beyond the last vector it is read again: with a fixed number of rows they stay in registers.
                        let starts: [*const T; $lanes] =
                            std::array::from_fn(|r| from.add((i + r.min(there - 1)) * stride));
                        for block in 0..blocks {
                            let mut rows = [$zero(); $lanes];
                            for (row, start) in rows.iter_mut().zip(starts) {
                                let at = start.add(block * $lanes);
                                // Prefetches the same position of the next vectors.
                                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add($lanes * stride).cast());
                                *row = T::$load(at);
                            }
                            let to = to.add(block * $lanes * width + i);
                            let rows = transpose(rows);
                            if width - i >= $lanes {
                                for (r, row) in rows.into_iter().enumerate() {
                                    $store(to.add(r * width), row);
                                }
                            } else {
                                for (r, row) in rows.into_iter().enumerate() {
                                    store_part(to.add(r * width), width - i, row);
                                }
                            }
                        }
                        for p in blocks * $lanes..k {
                            for r in 0..there {
                                *to.add(p * width + i + r) = (*from.add((i + r) * stride + p)).get();
                            }
                        }
                    }
                }
            }

            use super::store_part::$module as store_part;
            use super::transpose::$module as transpose;
        }
    };
}

packing!(
    wide,
    "avx512f,avx512bw,avx512vl",
    __m512,
    16,
    load16,
    _mm512_setzero_ps,
    _mm512_storeu_ps
);
packing!(narrow, "avx2", __m256, 8, load8, _mm256_setzero_ps, _mm256_storeu_ps);

/// Stores the first `n` lanes.
mod store_part {
    use std::arch::x86_64::*;

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn wide(to: *mut f32, n: usize, values: __m512) {
        // SAFETY: the caller promises that `n` elements may be written.
        unsafe { _mm512_mask_storeu_ps(to, ((1u32 << n) - 1) as u16, values) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn narrow(to: *mut f32, n: usize, values: __m256) {
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        // SAFETY: as above.
        unsafe { _mm256_maskstore_ps(to, _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lanes), values) }
    }
}

mod transpose {
    use std::arch::x86_64::*;

    /// 8 x 8
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn narrow(r: [__m256; 8]) -> [__m256; 8] {
        let mut t = r;
        for i in 0..4 {
            t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        let mut s = t;
        for q in [0, 4] {
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

    /// 16 x 16
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn wide(r: [__m512; 16]) -> [__m512; 16] {
        let mut t = r;
        for i in 0..8 {
            t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        let mut s = t;
        for q in [0, 4, 8, 12] {
            s[q] = _mm512_shuffle_ps::<0x44>(t[q], t[q + 2]);
            s[q + 1] = _mm512_shuffle_ps::<0xEE>(t[q], t[q + 2]);
            s[q + 2] = _mm512_shuffle_ps::<0x44>(t[q + 1], t[q + 3]);
            s[q + 3] = _mm512_shuffle_ps::<0xEE>(t[q + 1], t[q + 3]);
        }
        for i in 0..4 {
            t[i] = _mm512_shuffle_f32x4::<0x88>(s[i], s[i + 4]);
            t[i + 4] = _mm512_shuffle_f32x4::<0xDD>(s[i], s[i + 4]);
            t[i + 8] = _mm512_shuffle_f32x4::<0x88>(s[i + 8], s[i + 12]);
            t[i + 12] = _mm512_shuffle_f32x4::<0xDD>(s[i + 8], s[i + 12]);
        }
        for i in 0..4 {
            s[i] = _mm512_shuffle_f32x4::<0x88>(t[i], t[i + 8]);
            s[i + 4] = _mm512_shuffle_f32x4::<0x88>(t[i + 4], t[i + 12]);
            s[i + 8] = _mm512_shuffle_f32x4::<0xDD>(t[i], t[i + 8]);
            s[i + 12] = _mm512_shuffle_f32x4::<0xDD>(t[i + 4], t[i + 12]);
        }
        s
    }
}

// `#[target_feature]` is not allowed on trait methods: the methods only call functions that have it.
trait Element: Copy {
    /// # Safety
    /// Eight elements must be readable.
    unsafe fn load8(from: *const Self) -> __m256;
    /// # Safety
    /// Sixteen elements must be readable.
    unsafe fn load16(from: *const Self) -> __m512;
    fn get(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load8(from: *const f32) -> __m256 {
        // SAFETY: promised by the caller.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load16(from: *const f32) -> __m512 {
        // SAFETY: promised by the caller.
        unsafe { _mm512_loadu_ps(from) }
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
    unsafe fn load16(from: *const bf16) -> __m512 {
        // SAFETY: promised by the caller.
        unsafe { widen16(from) }
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

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn widen16(from: *const bf16) -> __m512 {
    // SAFETY: promised by the caller.
    let narrow = unsafe { _mm256_loadu_si256(from.cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow)))
}
