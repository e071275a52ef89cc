//! Products with a bf16 weight that is read where it lies, with dot products of bf16 pairs (AVX512-BF16): only the activations
//! are packed.
//!
//! x·Wᵀ: lanes are tokens, and a pair of a row of W is broadcast. dy·W: lanes are columns of W, of which two rows are interleaved
//! in registers, and a pair of dy is broadcast. An element of C is summed in the order of the packed products: chunk by chunk of
//! k, in a chunk pair by pair. So the results are bit-equal to theirs.

use super::super::super::math::{mask16, mask32};
use super::super::grid::{part, parts_of_rows};
use super::super::{CInit, Matrix, Operand, OperandBlock, ProductJob, SharedSlice};
use super::avx512_bf16::words;
use super::buffer::with_buffers;
use super::pack::{PackFormat, transpose};
use super::tile_kernels::STEP;
use super::{Depth, PACKED, PackedView, pack_extra, pack_operand};
use half::bf16;
use rayon::prelude::*;
use std::arch::x86_64::*;

/// Rows of W of a task of x·Wᵀ, and tokens that are computed at a time.
const ROWS: usize = 48;
const TOKENS: usize = 64;
/// Columns of W of a task of dy·W, and of a tile.
const COLUMNS: usize = 64;
const TILE_COLUMNS: usize = 32;
/// Largest number of tokens of a tile of dy·W.
const TILE_TOKENS: usize = 11;
/// Pairs by which rows of W are prefetched in dy·W.
const AHEAD: usize = 8;
/// Pairs of a step.
const PAIRS: usize = 16;

/// Rows of bf16: of x·Wᵀ a row is a vector of B, of dy·W an index of k.
#[derive(Clone, Copy)]
struct Bf16Rows<'a> {
    values: &'a [bf16],
    stride: usize,
}

/// A LoRA matrix, rounded to bf16; its rank is padded to an even number.
struct LoraRows {
    values: Vec<bf16>,
    stride: usize,
}

impl LoraRows {
    /// `k_contiguous`: a row is a vector, and k is padded.
    fn new(m: &Matrix, (vectors, k): (usize, usize), k_contiguous: bool) -> Self {
        let even = k.next_multiple_of(2);
        let (rows, stride) = if k_contiguous { (vectors, even) } else { (even, vectors) };
        let mut values = vec![bf16::ZERO; rows * stride];
        let len = if k_contiguous { k } else { vectors };
        let there = if k_contiguous { vectors } else { k };
        for (row, to) in values.chunks_exact_mut(stride.max(1)).enumerate().take(there) {
            match m.values {
                Operand::F32(v) if m.k_contiguous == k_contiguous => {
                    // SAFETY: this path is taken only if the CPU has AVX512-BF16.
                    unsafe { round(&v[row * m.stride..][..len], to) }
                }
                Operand::Bf16(v) if m.k_contiguous == k_contiguous => {
                    to[..len].copy_from_slice(&v[row * m.stride..][..len])
                }
                Operand::F32(v) => (0..len).for_each(|i| to[i] = bf16::from_f32(v[i * m.stride + row])),
                Operand::Bf16(v) => (0..len).for_each(|i| to[i] = v[i * m.stride + row]),
                Operand::Quantized(_) => {}
            }
        }
        Self { values, stride }
    }

    fn rows(&self) -> Bf16Rows<'_> {
        Bf16Rows {
            values: &self.values,
            stride: self.stride,
        }
    }
}

/// Rounds to the nearest bf16. Numbers too small to be normal become 0, as they are in dot products.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn round(from: &[f32], to: &mut [bf16]) {
    for (from, to) in from.chunks(16).zip(to.chunks_mut(16)) {
        let mask = mask16(from.len());
        // SAFETY: the masked elements lie inside both slices.
        unsafe {
            let narrow = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from.as_ptr()));
            _mm256_mask_storeu_epi16(
                to.as_mut_ptr().cast(),
                mask,
                std::mem::transmute::<__m256bh, __m256i>(narrow),
            );
        }
    }
}

/// True if this path can compute `job`: B is a bf16 weight, and k is even.
pub(super) fn fits(job: &ProductJob) -> bool {
    let readable = |m: &Matrix| !m.is_quantized();
    let lora = job.fused_lora.as_ref();
    matches!(job.b.values, Operand::Bf16(_))
        && job.sizes.2.is_multiple_of(2)
        && lora.is_none_or(|l| readable(&l.down) && readable(&l.up))
}

/// Computes a job that fits.
pub(super) fn run(job: &ProductJob) {
    let (m, n, k) = job.sizes;
    let Operand::Bf16(values) = job.b.values else { return };
    let k_contiguous = job.b.k_contiguous;
    let format = if k_contiguous { PackFormat::B } else { PackFormat::A };
    let w = Bf16Rows {
        values,
        stride: job.b.stride,
    };
    let rank = job.fused_lora.map_or(0, |l| l.rank);
    let lora = job.fused_lora.as_ref().map(|l| {
        let down = LoraRows::new(&l.down, (rank, k), k_contiguous);
        (l, down, LoraRows::new(&l.up, (n, rank), k_contiguous))
    });
    let depth = Depth {
        steps: k.div_ceil(32),
        extra: rank.div_ceil(32),
    };
    let most = (PACKED / STEP / (depth.steps + depth.extra)).max(2) / 2 * 64;
    with_buffers(|packed, _| {
        for first in (0..m).step_by(most) {
            let tokens = most.min(m - first);
            let block = OperandBlock {
                first,
                count: tokens,
                k0: 0,
                k,
            };
            let x = pack_operand(&job.a, block, depth, format, packed);
            let mut product = UnpackedProduct {
                c: job.c,
                first,
                tokens,
                n,
                k,
                start: job.start,
                x,
                depth,
                w,
                up: None,
                rank: 0,
            };
            if let Some((lora, down, up)) = &lora {
                let u = lora.job(job).c;
                UnpackedProduct {
                    c: u,
                    n: rank,
                    start: CInit::Zero,
                    w: down.rows(),
                    ..product
                }
                .run(k_contiguous);
                // SAFETY: the tasks that wrote these rows of u are complete.
                let u = unsafe { u.part(first * rank, tokens * rank) };
                lora.scale(u);
                pack_extra(
                    &Matrix::k_inner(Operand::F32(u), rank),
                    (0, tokens),
                    rank,
                    depth,
                    format,
                    x,
                );
                (product.up, product.rank) = (Some(up.rows()), rank);
            }
            product.run(k_contiguous);
        }
    });
}

/// `C [tokens, n] = start + x · W (+ u · up)`, from token `first` of C on.
#[derive(Clone, Copy)]
struct UnpackedProduct<'a> {
    c: SharedSlice,
    first: usize,
    tokens: usize,
    n: usize,
    k: usize,
    start: CInit<&'a [f32]>,
    x: PackedView,
    depth: Depth,
    w: Bf16Rows<'a>,
    up: Option<Bf16Rows<'a>>,
    rank: usize,
}

#[repr(C, align(64))]
struct TransposeBlock([[f32; TOKENS]; ROWS]);

impl UnpackedProduct<'_> {
    fn run(&self, k_contiguous: bool) {
        let (width, height) = if k_contiguous {
            (ROWS, TOKENS)
        } else {
            (COLUMNS, TILE_COLUMNS)
        };
        let across = self.n.div_ceil(width);
        // Few columns, as of a LoRA rank, or many threads: the tokens are divided too.
        let blocks = self.tokens.div_ceil(height);
        let down = parts_of_rows(across, blocks, rayon::current_num_threads());
        (0..across * down).into_par_iter().with_max_len(1).for_each(|task| {
            let columns = (task / down * width, width.min(self.n - task / down * width));
            let (start, count) = part(self.tokens, down, task % down, height);
            // SAFETY: the job was checked, and the CPU has AVX512-BF16; each task writes its own block of C.
            unsafe {
                if k_contiguous {
                    self.rows_of_w(columns, (start, count))
                } else {
                    self.columns_of_w(columns, (start, count))
                }
            }
        });
    }

    /// Pairs of chunk `chunk`, without the rank.
    fn pairs(&self, chunk: usize) -> usize {
        let chunk = self.depth.chunk(chunk);
        (chunk.own * 32).min(self.k - chunk.first * 32) / 2
    }

    /// The matrix of the rank, if it follows chunk `chunk`.
    fn up(&self, chunk: usize) -> Option<Bf16Rows<'_>> {
        self.up.filter(|_| chunk + 1 == self.depth.count())
    }

    /// Computes columns `n0..n0 + count` of C (rows of W) for some tokens.
    /// # Safety
    /// The CPU must have AVX512-BF16; no other task may use these elements of C.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn rows_of_w(&self, (n0, count): (usize, usize), (start, tokens): (usize, usize)) {
        let mut block = TransposeBlock([[0.0; TOKENS]; ROWS]);
        for token in (start..start + tokens).step_by(TOKENS) {
            let here = TOKENS.min(start + tokens - token);
            let filled = self.fill(&mut block, (n0, count), (token, here));
            // SAFETY: promised by the caller.
            unsafe {
                match here.div_ceil(16) {
                    1 => self.block::<1, 12>(&mut block, (n0, count), token, filled),
                    2 => self.block::<2, 8>(&mut block, (n0, count), token, filled),
                    3 => self.block::<3, 8>(&mut block, (n0, count), token, filled),
                    _ => self.block::<4, 6>(&mut block, (n0, count), token, filled),
                }
                for half in 0..here.div_ceil(16) {
                    for row in (0..count).step_by(16) {
                        let mut words = [_mm512_setzero_si512(); 16];
                        for (i, words) in words.iter_mut().enumerate() {
                            *words = _mm512_load_si512(block.0[row + i][16 * half..].as_ptr().cast());
                        }
                        let mask = mask16(count - row);
                        let left = (here - 16 * half).min(16);
                        for (i, words) in transpose(words).into_iter().enumerate().take(left) {
                            let at = (self.first + token + 16 * half + i) * self.n + n0 + row;
                            _mm512_mask_storeu_epi32(self.c.at(at).cast(), mask, words);
                        }
                    }
                }
            }
        }
    }

    /// Sets the start values of a block of C; returns false if there are none.
    fn fill(&self, block: &mut TransposeBlock, (n0, count): (usize, usize), (token, tokens): (usize, usize)) -> bool {
        for (i, row) in block.0.iter_mut().enumerate().take(count) {
            match self.start {
                CInit::Zero => return false,
                CInit::Bias(bias) => row.fill(bias[n0 + i]),
                CInit::C => {
                    for (t, x) in row.iter_mut().enumerate().take(tokens) {
                        // SAFETY: an element of the block of this task.
                        *x = unsafe { *self.c.at((self.first + token + t) * self.n + n0 + i) };
                    }
                }
            }
        }
        true
    }

    /// Adds the products of `T` halves of a panel of tokens to the block; `N` rows of W at a time.
    /// # Safety
    /// As `rows_of_w`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn block<const T: usize, const N: usize>(
        &self,
        block: &mut TransposeBlock,
        (n0, count): (usize, usize),
        token: usize,
        filled: bool,
    ) {
        for chunk in 0..self.depth.count() {
            let mut x = [std::ptr::null::<u8>(); T];
            for (half, x) in x.iter_mut().enumerate() {
                *x = self.x.at(token / 32 + half / 2, chunk).wrapping_add(half % 2 * 1024);
            }
            let (k0, own) = (self.depth.chunk(chunk).first * 32, self.depth.chunk(chunk).own);
            let up = self.up(chunk);
            for row in (0..count).step_by(N) {
                // Rows beyond the last one are computed as the last one, and not used.
                let at = |rows: &Bf16Rows, i: usize, k: usize| -> *const u8 {
                    let row = n0 + (row + i).min(count - 1);
                    rows.values[row * rows.stride + k..].as_ptr().cast()
                };
                let (mut w, mut v) = ([std::ptr::null(); N], [std::ptr::null(); N]);
                for i in 0..N {
                    w[i] = at(&self.w, i, k0);
                    v[i] = up.map_or(std::ptr::null(), |up| at(&up, i, 0));
                }
                // SAFETY: rows and panels hold this many pairs.
                unsafe {
                    let ahead = 2 * N * self.w.stride;
                    let zero = [[_mm512_setzero_ps(); T]; N];
                    let mut sums = add_pairs::<T, N>(x, w, self.pairs(chunk), ahead, zero);
                    if up.is_some() {
                        let x = x.map(|x| x.wrapping_add(own * STEP));
                        sums = add_pairs::<T, N>(x, v, self.rank.div_ceil(2), 0, sums);
                    }
                    for (i, sums) in sums.into_iter().enumerate().take((count - row).min(N)) {
                        for (half, mut sum) in sums.into_iter().enumerate() {
                            let to = block.0[row + i][16 * half..].as_mut_ptr();
                            if filled || chunk > 0 {
                                sum = _mm512_add_ps(_mm512_load_ps(to), sum);
                            }
                            _mm512_store_ps(to, sum);
                        }
                    }
                }
            }
        }
    }

    /// Computes columns `n0..n0 + count` of C (columns of W) for some tokens.
    /// # Safety
    /// As `rows_of_w`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn columns_of_w(&self, (n0, count): (usize, usize), (start, tokens): (usize, usize)) {
        for chunk in 0..self.depth.count() {
            for panel in (start..start + tokens).step_by(32) {
                let here = 32.min(start + tokens - panel);
                let tiles = here.div_ceil(TILE_TOKENS);
                for tile in 0..tiles {
                    let (row, rows) = part(here, tiles, tile, 1);
                    for column in (0..count).step_by(TILE_COLUMNS) {
                        let columns = (n0 + column, TILE_COLUMNS.min(count - column));
                        // SAFETY: promised by the caller.
                        unsafe {
                            match rows {
                                1 => self.tile::<1>(chunk, columns, panel + row),
                                2 => self.tile::<2>(chunk, columns, panel + row),
                                3 => self.tile::<3>(chunk, columns, panel + row),
                                4 => self.tile::<4>(chunk, columns, panel + row),
                                5 => self.tile::<5>(chunk, columns, panel + row),
                                6 => self.tile::<6>(chunk, columns, panel + row),
                                7 => self.tile::<7>(chunk, columns, panel + row),
                                8 => self.tile::<8>(chunk, columns, panel + row),
                                9 => self.tile::<9>(chunk, columns, panel + row),
                                10 => self.tile::<10>(chunk, columns, panel + row),
                                _ => self.tile::<TILE_TOKENS>(chunk, columns, panel + row),
                            }
                        }
                    }
                }
            }
        }
    }

    /// # Safety
    /// As `rows_of_w`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn tile<const T: usize>(&self, chunk: usize, (n0, count): (usize, usize), token: usize) {
        let x = self.x.at(token / 32, chunk).wrapping_add(token % 32 * 64);
        let here = self.depth.chunk(chunk);
        let mask = mask32(count);
        // SAFETY: promised by the caller; the mask keeps reads and writes inside W and C.
        unsafe {
            let w = self
                .w
                .values
                .as_ptr()
                .wrapping_add(here.first * 32 * self.w.stride + n0);
            let zero = [[_mm512_setzero_ps(); 2]; T];
            let mut sums = add_joined::<T>(x, w, self.w.stride, mask, self.pairs(chunk), zero);
            if let Some(up) = self.up(chunk) {
                let x = x.wrapping_add(here.own * STEP);
                let v = up.values.as_ptr().wrapping_add(n0);
                sums = add_joined::<T>(x, v, up.stride, mask, self.rank.div_ceil(2), sums);
            }
            // Two rows were interleaved within 128-bit lanes.
            let (left, right) = (
                _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15),
            );
            for (i, [low, high]) in sums.into_iter().enumerate() {
                let (low, high) = (_mm512_castps_pd(low), _mm512_castps_pd(high));
                let to = self.c.at((self.first + token + i) * self.n + n0);
                for (half, order) in [left, right].into_iter().enumerate() {
                    let mask = mask16(count.saturating_sub(16 * half));
                    let to = to.wrapping_add(16 * half);
                    let mut sum = _mm512_castpd_ps(_mm512_permutex2var_pd(low, order, high));
                    let from = match self.start {
                        _ if chunk > 0 => Some(to.cast_const()),
                        CInit::Zero => None,
                        CInit::C => Some(to.cast_const()),
                        CInit::Bias(bias) => Some(bias.as_ptr().wrapping_add(n0 + 16 * half)),
                    };
                    if let Some(from) = from {
                        sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, from), sum);
                    }
                    _mm512_mask_storeu_ps(to, mask, sum);
                }
            }
        }
    }
}

/// Adds the products of `T` halves of packed tokens with `N` rows, pair by pair. `ahead`: distance in bytes of what is prefetched.
/// # Safety
/// The CPU must have AVX512-BF16; rows and panels hold `pairs` pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn add_pairs<const T: usize, const N: usize>(
    mut x: [*const u8; T],
    mut w: [*const u8; N],
    pairs: usize,
    ahead: usize,
    mut sums: [[__m512; T]; N],
) -> [[__m512; T]; N] {
    let mut left = pairs;
    while left > 0 {
        let count = left.min(PAIRS);
        // SAFETY: promised by the caller; a prefetch may have any address.
        unsafe {
            for w in &w {
                _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(ahead).cast());
            }
            for pair in 0..count {
                let mut tokens = [words(_mm512_setzero_si512()); T];
                for (tokens, x) in tokens.iter_mut().zip(&x) {
                    *tokens = words(_mm512_load_si512(x.add(64 * pair).cast()));
                }
                for (sums, w) in sums.iter_mut().zip(&w) {
                    let w = words(_mm512_set1_epi32(w.add(4 * pair).cast::<i32>().read_unaligned()));
                    for (sum, tokens) in sums.iter_mut().zip(&tokens) {
                        *sum = _mm512_dpbf16_ps(*sum, *tokens, w);
                    }
                }
            }
        }
        x.iter_mut().for_each(|x| *x = x.wrapping_add(STEP));
        w.iter_mut().for_each(|w| *w = w.wrapping_add(4 * PAIRS));
        left -= count;
    }
    sums
}

/// Adds the products of `T` packed tokens with up to 32 columns of `2 * pairs` rows, `stride` elements apart. The columns of the
/// two sums are interleaved.
/// # Safety
/// The CPU must have AVX512-BF16; the masked columns of the rows are readable, and the panel holds `pairs` pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn add_joined<const T: usize>(
    mut x: *const u8,
    mut w: *const bf16,
    stride: usize,
    mask: u32,
    pairs: usize,
    from: [[__m512; 2]; T],
) -> [[__m512; 2]; T] {
    // Two arrays: with one the compiler writes the sums to memory after each product.
    let (mut lows, mut highs) = (from.map(|sums| sums[0]), from.map(|sums| sums[1]));
    let mut left = pairs;
    while left > 0 {
        let count = left.min(PAIRS);
        for pair in 0..count {
            // SAFETY: promised by the caller; a prefetch may have any address.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(2 * AHEAD * stride).cast());
                _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add((2 * AHEAD + 1) * stride).cast());
                let even = _mm512_maskz_loadu_epi16(mask, w.cast());
                let odd = _mm512_maskz_loadu_epi16(mask, w.add(stride).cast());
                let low = words(_mm512_unpacklo_epi16(even, odd));
                let high = words(_mm512_unpackhi_epi16(even, odd));
                for (i, (low_sum, high_sum)) in lows.iter_mut().zip(&mut highs).enumerate() {
                    let token = words(_mm512_set1_epi32(*x.add(64 * i + 4 * pair).cast::<i32>()));
                    *low_sum = _mm512_dpbf16_ps(*low_sum, token, low);
                    *high_sum = _mm512_dpbf16_ps(*high_sum, token, high);
                }
                w = w.wrapping_add(2 * stride);
            }
        }
        x = x.wrapping_add(STEP);
        left -= count;
    }
    let mut sums = from;
    for (i, sums) in sums.iter_mut().enumerate() {
        *sums = [lows[i], highs[i]];
    }
    sums
}
