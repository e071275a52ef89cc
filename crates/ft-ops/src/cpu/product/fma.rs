//! Micro-kernels in f32 with fused multiply-add: a micro-tile of C stays in registers during the loop over k.
//!
//! A micro-tile has up to `MR` rows and `VECTORS · LANES` columns. For each k it reads one row of B (vectors) and
//! one column of A (broadcast, element by element), so a packed A and a packed B are both read sequentially.

use super::{CInit, VectorIsa};

/// Arguments of a micro-kernel. Strides are in elements: element (row, k) of A is at `row * a_row + k * a_k`, rows
/// of B are `b_k` apart.
#[derive(Clone, Copy)]
pub(crate) struct MicroTile {
    pub k: usize,
    pub a: *const f32,
    pub a_row: usize,
    pub a_k: usize,
    pub b: *const f32,
    pub b_k: usize,
    pub c: *mut f32,
    pub c_row: usize,
    /// Columns of C that exist. In B all columns of the tile must be readable.
    pub columns: usize,
    pub from: CInit<*const f32>,
}

pub(crate) type MicroKernel = unsafe fn(&MicroTile);

impl VectorIsa {
    /// Rows (MR) and columns (NR) of a micro-tile, elements of a SIMD vector.
    pub(super) fn micro_tile(self) -> (usize, usize, usize) {
        match self {
            VectorIsa::Avx512 => (avx512::MR, 2 * avx512::LANES, avx512::LANES),
            VectorIsa::Avx2 => (avx2::MR, 2 * avx2::LANES, avx2::LANES),
        }
    }

    /// Returns the micro-kernel for `rows` rows and `vectors` vectors (1 or 2).
    pub(super) fn kernel(self, rows: usize, vectors: usize) -> MicroKernel {
        match self {
            VectorIsa::Avx512 => avx512::kernel(rows, vectors),
            VectorIsa::Avx2 => avx2::kernel(rows, vectors),
        }
    }
}

macro_rules! kernels {
    ($module:ident, $features:literal, $vector:ty, $lanes:literal, $rows:literal, [$($row:literal)*], $zero:ident, $broadcast:ident, $load:ident, $store:ident, $fma:ident, $add:ident) => {
        #[cfg(target_arch = "x86_64")]
        pub(crate) mod $module {
            use super::{CInit, Kernel, MicroTile};
            use std::arch::x86_64::*;

            pub(crate) const LANES: usize = $lanes;
            pub(crate) const MR: usize = $rows;
            pub(crate) const VECTORS: usize = 2;
            /// B comes from the L2 cache: its rows are prefetched so many steps ahead, which is 5 % faster on Cascade Lake.
            const AHEAD: usize = 6;

            /// Returns the kernel for `rows` rows (1..=MR) and `vectors` vectors (1 or 2).
            pub(crate) fn kernel(rows: usize, vectors: usize) -> MicroKernel {
                const TILES: [[MicroKernel; MR]; VECTORS] = [[$(tile::<$row, 1>),*], [$(tile::<$row, 2>),*]];
                TILES[vectors - 1][rows - 1]
            }

            #[target_feature(enable = $features)]
            unsafe fn tile<const R: usize, const V: usize>(t: &MicroTile) {
                // SAFETY: the caller promises that every address of the tile may be read or written.
                unsafe {
                    // Prefetches C, which is needed after the loop over k.
                    for r in 0..R {
                        let row = t.c.wrapping_add(r * t.c_row);
                        _mm_prefetch::<_MM_HINT_T0>(row.cast());
                        _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(V * LANES - 1).cast());
                    }
                    let mut sum = [[$zero(); V]; R];
                    let (mut a, mut b) = (t.a, t.b);
                    if t.a_row == 1 {
                        for _ in 0..t.k {
                            ahead::<V>(b.wrapping_add(AHEAD * t.b_k));
                            step::<R, V>(&mut sum, a, 1, b);
                            a = a.add(t.a_k);
                            b = b.add(t.b_k);
                        }
                    } else {
                        for _ in 0..t.k {
                            step::<R, V>(&mut sum, a, t.a_row, b);
                            a = a.add(t.a_k);
                            b = b.add(t.b_k);
                        }
                    }
                    if t.columns == V * LANES {
                        match t.from {
                            CInit::Zero => put::<R, V>(&sum, t.c, t.c_row),
                            CInit::C => {
                                for r in 0..R {
                                    for v in 0..V {
                                        sum[r][v] = $add($load(t.c.add(r * t.c_row + v * LANES)), sum[r][v]);
                                    }
                                }
                                put::<R, V>(&sum, t.c, t.c_row)
                            }
                            CInit::Bias(bias) => {
                                for r in 0..R {
                                    for v in 0..V {
                                        sum[r][v] = $add($load(bias.add(v * LANES)), sum[r][v]);
                                    }
                                }
                                put::<R, V>(&sum, t.c, t.c_row)
                            }
                        }
                        return;
                    }
                    let mut whole = [0f32; MR * VECTORS * LANES];
                    put::<R, V>(&sum, whole.as_mut_ptr(), V * LANES);
                    for (r, row) in whole.chunks_exact(V * LANES).enumerate().take(R) {
                        for (i, x) in row[..t.columns].iter().enumerate() {
                            let c = t.c.add(r * t.c_row + i);
                            *c = match t.from {
                                CInit::Zero => *x,
                                CInit::C => *c + x,
                                CInit::Bias(bias) => *bias.add(i) + x,
                            };
                        }
                    }
                }
            }

            /// Prefetches a row of B; any address is allowed.
            #[inline]
            #[target_feature(enable = $features)]
            fn ahead<const V: usize>(row: *const f32) {
                for line in 0..(V * LANES).div_ceil(16) {
                    _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(16 * line).cast());
                }
            }

            // The loops over `sum` are plain and short so that the compiler unrolls them: an index known only at
            // run time would force the sums into memory, with a store for every product.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn put<const R: usize, const V: usize>(sum: &[[$vector; V]; R], c: *mut f32, c_row: usize) {
                for r in 0..R {
                    for v in 0..V {
                        // SAFETY: as in `tile`.
                        unsafe { $store(c.add(r * c_row + v * LANES), sum[r][v]) };
                    }
                }
            }

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn step<const R: usize, const V: usize>(sum: &mut [[$vector; V]; R], a: *const f32, a_row: usize, b: *const f32) {
                // SAFETY: as in `tile`.
                unsafe {
                    let mut row = [$zero(); V];
                    for (v, row) in row.iter_mut().enumerate() {
                        *row = $load(b.add(v * LANES));
                    }
                    for (r, sum) in sum.iter_mut().enumerate() {
                        let a = $broadcast(*a.add(r * a_row));
                        for (sum, row) in sum.iter_mut().zip(row) {
                            *sum = $fma(a, row, *sum);
                        }
                    }
                }
            }
        }
    };
}

kernels!(
    avx512, "avx512f,fma", __m512, 16, 14, [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
    _mm512_setzero_ps, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_add_ps
);
kernels!(
    avx2, "avx2,fma", __m256, 8, 6, [1 2 3 4 5 6],
    _mm256_setzero_ps, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, _mm256_add_ps
);
