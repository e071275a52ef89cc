//! Packs operands for AMX: bf16, in steps of 2 KB (32 vectors x 32 elements of k).
//!
//! AMX multiplies pairs: two neighbors along k form one 32-bit word. A step is two blocks of 16 x 16 words:
//! [vector][pair] for A, [pair][vector] for B. A source that is contiguous in k already has the order
//! [vector][pair]. From any other source two rows are joined to [pair][vector]. If the other order is needed, the
//! block is transposed.

use super::super::super::dequantize::{bf16 as to_bf16, dequantize};
use super::super::super::math::{mask16, mask32};
use super::super::{Matrix, Operand, OperandBlock, VectorIsa};
use super::tile_kernels::STEP;
use half::bf16;
use std::arch::x86_64::*;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PackFormat {
    A,
    B,
}

/// Packs a block of at most 32 vectors of `m` into `ceil(k / 32)` steps at `to`, padded with 0. f32 is rounded to the
/// nearest bf16, ties to even; NaN stays NaN.
/// # Safety
/// The CPU must have AVX-512 (F, BW, VL); the vectors must lie inside `m`; `to` is 64-byte aligned, its steps are
/// writable.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn panel(m: &Matrix, block: OperandBlock, format: PackFormat, to: *mut u8) {
    // SAFETY: promised by the caller.
    unsafe {
        match m.values {
            Operand::F32(v) => wide_steps(v.as_ptr(), m, block, format, to),
            Operand::Bf16(v) => steps(v.as_ptr(), m, block, format, to),
            Operand::Quantized(_) => quantized(m, block, format, |_| to),
        }
    }
}

/// As `panels`, for quantized vectors.
/// # Safety
/// As `panel`, for every panel.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn quantized(m: &Matrix, block: OperandBlock, format: PackFormat, to: impl Fn(usize) -> *mut u8) {
    let Operand::Quantized(view) = &m.values else { return };
    // The first column of the weight and how many, and what `dequantized_by` reads later: so many rows and columns ahead.
    let (start, len, ahead) = if m.k_contiguous {
        (block.k0, block.k, (0, MOST_VECTORS))
    } else {
        (block.first, block.count, (ROWS_AHEAD, 0))
    };
    // SAFETY: promised by the caller; `fits` detected AVX512-BF16.
    unsafe {
        if to_bf16::fits(view) && start.is_multiple_of(to_bf16::STEP) && len.is_multiple_of(to_bf16::STEP) {
            dequantized_by(m, block, format, to, |row: usize, start: usize, to: &mut [bf16]| {
                to_bf16::dequantize(view, (row, start), ahead, to)
            })
        } else {
            dequantized_by(m, block, format, to, |row: usize, start: usize, to: &mut [f32]| {
                dequantize(Some(VectorIsa::Avx512), view, row, start, to)
            })
        }
    }
}

/// As `quantized`; `fill` dequantizes a row of the weight from a column on.
/// # Safety
/// As `panel`, for every panel.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn dequantized_by<T: Copy + Default>(
    m: &Matrix,
    block: OperandBlock,
    format: PackFormat,
    to: impl Fn(usize) -> *mut u8,
    fill: impl Fn(usize, usize, &mut [T]),
) where
    for<'a> Operand<'a>: From<&'a [T]>,
{
    let OperandBlock { first, count, k0, k } = block;
    // This many steps of one panel, or one step of all panels: at most 32 KB.
    let mut dequantized = [T::default(); 32 * MOST_VECTORS];
    let parts_of_panels = || (0..count).step_by(32).map(|start| (start, 32.min(count - start)));
    if m.k_contiguous {
        for (panel_index, (start, vectors)) in parts_of_panels().enumerate() {
            for (i, at) in (0..k).step_by(MOST_VECTORS).enumerate() {
                let len = MOST_VECTORS.min(k - at);
                for (vector, row) in dequantized.chunks_exact_mut(MOST_VECTORS).enumerate().take(vectors) {
                    fill(first + start + vector, k0 + at, &mut row[..len]);
                }
                let part = Matrix::k_inner(&dequantized[..], MOST_VECTORS);
                let address = to(panel_index).wrapping_add(i * (MOST_VECTORS / 32) * STEP);
                let block = OperandBlock {
                    first: 0,
                    count: vectors,
                    k0: 0,
                    k: len,
                };
                // SAFETY: promised by the caller; the vectors lie in `dequantized`.
                unsafe { panel(&part, block, format, address) }
            }
        }
        return;
    }
    for (step, at) in (0..k).step_by(32).enumerate() {
        let len = 32.min(k - at);
        for (p, row) in dequantized.chunks_exact_mut(MOST_VECTORS).enumerate().take(len) {
            fill(k0 + at + p, first, &mut row[..count]);
        }
        let part = Matrix::k_outer(&dequantized[..], MOST_VECTORS);
        let address = |i: usize| to(i).wrapping_add(step * STEP);
        let block_of = |first, count| OperandBlock {
            first,
            count,
            k0: 0,
            k: len,
        };
        // SAFETY: as above.
        unsafe {
            match part.values {
                Operand::Bf16(from) if format == PackFormat::B => {
                    interleave(from.as_ptr(), MOST_VECTORS, block_of(0, count), address)
                }
                _ => parts_of_panels()
                    .enumerate()
                    .for_each(|(i, (start, vectors))| panel(&part, block_of(start, vectors), format, address(i))),
            }
        }
    }
}

/// f32 that the processor itself rounds (AVX512-BF16): f32 numbers too small to be normal become 0, as bf16 numbers that small are
/// in products, and the bits of a NaN can be others.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct NativeF32(#[allow(dead_code)] f32);

/// Packs f32.
/// # Safety
/// As `panel`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn wide_steps(from: *const f32, m: &Matrix, block: OperandBlock, format: PackFormat, to: *mut u8) {
    // SAFETY: promised by the caller; the feature was detected.
    unsafe {
        if is_x86_feature_detected!("avx512bf16") {
            native_steps(from.cast(), m, block, format, to)
        } else {
            steps(from, m, block, format, to)
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn native_steps(from: *const NativeF32, m: &Matrix, block: OperandBlock, format: PackFormat, to: *mut u8) {
    // SAFETY: promised by the caller.
    unsafe { steps(from, m, block, format, to) }
}

/// Vectors that `panels` packs at a time.
pub(super) const MOST_VECTORS: usize = 256;

/// As `panel`, for a block of at most `MOST_VECTORS` vectors: panel i is written to `to(i)`.
/// # Safety
/// As `panel`, for every panel.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn panels(m: &Matrix, block: OperandBlock, format: PackFormat, to: impl Fn(usize) -> *mut u8) {
    // SAFETY: promised by the caller.
    unsafe {
        match m.values {
            Operand::Quantized(_) => return quantized(m, block, format, to),
            Operand::Bf16(from) if !m.k_contiguous && format == PackFormat::B && block.count.is_multiple_of(32) => {
                return interleave(from.as_ptr(), m.stride, block, to);
            }
            _ => {}
        }
        for start in (0..block.count).step_by(32) {
            let part = OperandBlock {
                first: block.first + start,
                count: 32.min(block.count - start),
                ..block
            };
            panel(m, part, format, to(start / 32));
        }
    }
}

/// Rows by which a weight is prefetched while two of its rows are interleaved.
const ROWS_AHEAD: usize = 16;

/// Packs whole panels of an operand that is not contiguous in k: two rows, of all panels, at a time.
/// # Safety
/// As `panels`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn interleave(from: *const bf16, stride: usize, block: OperandBlock, to: impl Fn(usize) -> *mut u8) {
    let OperandBlock { first, count, k0, k } = block;
    let index = |start: i16| -> [i16; 32] { std::array::from_fn(|i| start + (i / 2) as i16 + 32 * (i % 2) as i16) };
    // SAFETY: promised by the caller; a prefetch may have any address.
    unsafe {
        let (low, high) = (
            _mm512_loadu_epi16(index(0).as_ptr()),
            _mm512_loadu_epi16(index(16).as_ptr()),
        );
        for q in 0..k.next_multiple_of(32) / 2 {
            let row = from.wrapping_add((k0 + 2 * q) * stride + first);
            for panel in 0..count / 32 {
                let from = row.wrapping_add(panel * 32);
                let load = |i: usize| {
                    if 2 * q + i < k {
                        let ahead = from.wrapping_add((i + ROWS_AHEAD) * stride);
                        _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                        _mm512_loadu_epi16(from.wrapping_add(i * stride).cast())
                    } else {
                        _mm512_setzero_si512()
                    }
                };
                let (even, odd) = (load(0), load(1));
                let to = to(panel).add(q / 16 * STEP + q % 16 * 64);
                _mm512_store_si512(to.cast(), _mm512_permutex2var_epi16(even, low, odd));
                _mm512_store_si512(to.add(1024).cast(), _mm512_permutex2var_epi16(even, high, odd));
            }
        }
    }
}

/// Inlined in functions that have the features of `T`.
#[inline(always)]
unsafe fn steps<T: Element>(from: *const T, m: &Matrix, block: OperandBlock, format: PackFormat, to: *mut u8) {
    let OperandBlock { first, count, k0, k } = block;
    let transposes = m.k_contiguous != (format == PackFormat::A);
    // SAFETY: promised by the caller; the masks keep reads inside (count, k).
    unsafe {
        for step in 0..k.div_ceil(32) {
            let left = (k - step * 32).min(32);
            for half in 0..2 {
                let there = count.saturating_sub(half * 16).min(16);
                let to = to.add(step * STEP + half * 1024);
                let words = |i: usize| {
                    if m.k_contiguous {
                        let at = (first + half * 16 + i) * m.stride + k0 + step * 32;
                        let mask = if i < there { mask32(left) } else { 0 };
                        return T::pairs(from.wrapping_add(at), mask);
                    }
                    let at = (k0 + step * 32 + 2 * i) * m.stride + first + half * 16;
                    let mask = |is: bool| if is { mask16(there) } else { 0 };
                    T::joined(
                        from.wrapping_add(at),
                        mask(2 * i < left),
                        from.wrapping_add(at + m.stride),
                        mask(2 * i + 1 < left),
                    )
                };
                if !transposes {
                    for i in 0..16 {
                        _mm512_store_si512(to.add(i * 64).cast(), words(i));
                    }
                    continue;
                }
                let mut block = [_mm512_setzero_si512(); 16];
                for (i, row) in block.iter_mut().enumerate() {
                    *row = words(i);
                }
                let block = transpose(block);
                for (i, row) in block.iter().enumerate() {
                    _mm512_store_si512(to.add(i * 64).cast(), *row);
                }
            }
        }
    }
}

trait Element: Copy {
    /// Loads 32 neighbors as 16 words.
    unsafe fn pairs(from: *const Self, mask: u32) -> __m512i;
    /// Loads 16 elements of two rows as 16 words, the first row in the low 16 bits.
    unsafe fn joined(even: *const Self, even_mask: u16, odd: *const Self, odd_mask: u16) -> __m512i;
}

// `#[target_feature]` is not allowed on trait methods: the methods only call functions that have it.
impl Element for bf16 {
    #[inline(always)]
    unsafe fn pairs(from: *const bf16, mask: u32) -> __m512i {
        // SAFETY: promised by the caller.
        unsafe { narrow_pairs(from, mask) }
    }
    #[inline(always)]
    unsafe fn joined(even: *const bf16, even_mask: u16, odd: *const bf16, odd_mask: u16) -> __m512i {
        // SAFETY: promised by the caller.
        unsafe { narrow_joined(even, even_mask, odd, odd_mask) }
    }
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn pairs(from: *const f32, mask: u32) -> __m512i {
        // SAFETY: promised by the caller.
        unsafe { wide_pairs(from, mask) }
    }
    #[inline(always)]
    unsafe fn joined(even: *const f32, even_mask: u16, odd: *const f32, odd_mask: u16) -> __m512i {
        // SAFETY: promised by the caller.
        unsafe { wide_joined(even, even_mask, odd, odd_mask) }
    }
}

impl Element for NativeF32 {
    #[inline(always)]
    unsafe fn pairs(from: *const NativeF32, mask: u32) -> __m512i {
        // SAFETY: promised by the caller.
        unsafe { native_pairs(from.cast(), mask) }
    }
    #[inline(always)]
    unsafe fn joined(even: *const NativeF32, even_mask: u16, odd: *const NativeF32, odd_mask: u16) -> __m512i {
        // SAFETY: promised by the caller.
        unsafe { native_joined(even.cast(), even_mask, odd.cast(), odd_mask) }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn native_pairs(from: *const f32, mask: u32) -> __m512i {
    // SAFETY: promised by the caller: the masked elements are readable.
    unsafe {
        let low = _mm512_maskz_loadu_ps(mask as u16, from);
        let high = _mm512_maskz_loadu_ps((mask >> 16) as u16, from.wrapping_add(16));
        std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn native_joined(even: *const f32, even_mask: u16, odd: *const f32, odd_mask: u16) -> __m512i {
    // SAFETY: as above.
    unsafe {
        let even = _mm512_maskz_loadu_ps(even_mask, even);
        let odd = _mm512_maskz_loadu_ps(odd_mask, odd);
        let words = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
        // The first 16 are even, the last 16 odd.
        let order: [i16; 32] = std::array::from_fn(|i| (i / 2 + 16 * (i % 2)) as i16);
        _mm512_permutexvar_epi16(_mm512_loadu_epi16(order.as_ptr()), words)
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn narrow_pairs(from: *const bf16, mask: u32) -> __m512i {
    // SAFETY: promised by the caller: the masked elements are readable.
    unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn narrow_joined(even: *const bf16, even_mask: u16, odd: *const bf16, odd_mask: u16) -> __m512i {
    // SAFETY: as above.
    let (even, odd) = unsafe {
        (
            _mm256_maskz_loadu_epi16(even_mask, even.cast()),
            _mm256_maskz_loadu_epi16(odd_mask, odd.cast()),
        )
    };
    _mm512_or_si512(
        _mm512_cvtepu16_epi32(even),
        _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(odd)),
    )
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn wide_pairs(from: *const f32, mask: u32) -> __m512i {
    // SAFETY: as above.
    let (low, high) = unsafe {
        (
            _mm512_maskz_loadu_ps(mask as u16, from),
            _mm512_maskz_loadu_ps((mask >> 16) as u16, from.wrapping_add(16)),
        )
    };
    let narrow = |x| _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded(x)));
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(narrow(low)), narrow(high))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn wide_joined(even: *const f32, even_mask: u16, odd: *const f32, odd_mask: u16) -> __m512i {
    // SAFETY: as above.
    let (even, odd) = unsafe {
        (
            _mm512_maskz_loadu_ps(even_mask, even),
            _mm512_maskz_loadu_ps(odd_mask, odd),
        )
    };
    let upper = _mm512_set1_epi32(0xFFFF_0000_u32 as i32);
    _mm512_or_si512(
        _mm512_srli_epi32::<16>(rounded(even)),
        _mm512_and_si512(rounded(odd), upper),
    )
}

/// Rounds to the nearest bf16, ties to even, in the high 16 bits; the low 16 bits are arbitrary.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn rounded(x: __m512) -> __m512i {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    // Rounding the payload of a NaN could make it infinite.
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    _mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(0x7FC0_0000))
}

/// Transposes 16 x 16 words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    let mut t = r;
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    let mut s = t;
    for i in (0..16).step_by(4) {
        s[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        s[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        s[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        s[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for i in 0..4 {
        t[i] = _mm512_shuffle_i32x4::<0x88>(s[i], s[i + 4]);
        t[i + 4] = _mm512_shuffle_i32x4::<0xDD>(s[i], s[i + 4]);
        t[i + 8] = _mm512_shuffle_i32x4::<0x88>(s[i + 8], s[i + 12]);
        t[i + 12] = _mm512_shuffle_i32x4::<0xDD>(s[i + 8], s[i + 12]);
    }
    for i in 0..4 {
        s[i] = _mm512_shuffle_i32x4::<0x88>(t[i], t[i + 8]);
        s[i + 4] = _mm512_shuffle_i32x4::<0x88>(t[i + 4], t[i + 12]);
        s[i + 8] = _mm512_shuffle_i32x4::<0xDD>(t[i], t[i + 8]);
        s[i + 12] = _mm512_shuffle_i32x4::<0xDD>(t[i + 4], t[i + 12]);
    }
    s
}
