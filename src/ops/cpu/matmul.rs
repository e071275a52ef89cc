//! Matrix products on slices: `C [m, n] (+)= A [m, k] · B [k, n]`, cut into tiles of C that depend on the
//! shape alone. A tile of a bf16 B is widened into a small scratch just before it is used.

use super::math::{dot, dot_bf16, vectorized, widen_slice};
use super::storage::Values;
use super::{Shared, math, with_scratch};
use half::bf16;
use rayon::prelude::*;

/// Elements of k that are widened at a time.
const PANEL: usize = 512;
/// Largest tile of C.
const TILE_ROWS: usize = 512;
const TILE_COLUMNS: usize = 240;
/// Tiles are halved until there are this many, so that many cores find work.
const ENOUGH_TILES: usize = 32;
/// With so few rows the product reads B once and is bound by memory: plain dot products.
const FEW_ROWS: usize = 4;

/// How B `[k, n]` lies in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// `[k, n]`
    Plain,
    /// `[n, k]`
    Transposed,
}

/// `dst [m, n] = alpha · a [m, k] · b [k, n] (+ dst)` on one thread; strides are (row, column).
/// # Safety
/// All addresses with their strides must lie inside live slices; `dst` must not be shared.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn gemm(
    (m, n, k): (usize, usize, usize),
    dst: *mut f32,
    (dst_rs, dst_cs): (usize, usize),
    accumulate: bool,
    a: *const f32,
    (a_rs, a_cs): (usize, usize),
    b: *const f32,
    (b_rs, b_cs): (usize, usize),
    alpha: f32,
) {
    let keep = if accumulate { 1.0 } else { 0.0 };
    // SAFETY: promised by the caller.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst,
            dst_cs as isize,
            dst_rs as isize,
            accumulate,
            a,
            a_cs as isize,
            a_rs as isize,
            b,
            b_cs as isize,
            b_rs as isize,
            keep,
            alpha,
            false,
            false,
            false,
            gemm::Parallelism::None,
        )
    }
}

/// Rows and columns of a tile of C.
fn tile(m: usize, n: usize) -> (usize, usize) {
    let (mut rows, mut columns) = (TILE_ROWS.min(m), TILE_COLUMNS.min(n));
    while m.div_ceil(rows) * n.div_ceil(columns) < ENOUGH_TILES && (rows > 64 || columns > 96) {
        if rows > 64 && rows * 2 > columns {
            rows = (rows / 2).next_multiple_of(8);
        } else if columns > 96 {
            columns = (columns / 2).next_multiple_of(48);
        } else {
            rows = (rows / 2).next_multiple_of(8);
        }
    }
    (rows, columns)
}

/// `c [m, n] = a [m, k] · b (+ bias [n])`, or with `accumulate` added to what `c` holds.
#[allow(clippy::too_many_arguments)]
pub(crate) fn product(
    (m, n, k): (usize, usize, usize),
    c: &mut [f32],
    accumulate: bool,
    a: &[f32],
    b: Values<'_>,
    order: Order,
    bias: Option<&[f32]>,
) {
    assert!(c.len() == m * n && a.len() == m * k && b.len() == k * n);
    assert!(bias.is_none_or(|bias| bias.len() == n));
    if m == 0 || n == 0 {
        return;
    }
    if m <= FEW_ROWS && order == Order::Transposed && !accumulate && k > 0 {
        return few_rows((m, n, k), c, a, b, bias);
    }
    let (rows, columns) = tile(m, n);
    let (down, across) = (m.div_ceil(rows), n.div_ceil(columns));
    let c = Shared::new(c);
    (0..down * across).into_par_iter().with_max_len(1).for_each(|index| {
        // Neighbours share the columns of B.
        let (r0, c0) = ((index % down) * rows, (index / down) * columns);
        let (mm, nn) = (rows.min(m - r0), columns.min(n - c0));
        let dst = c.at(r0 * n + c0);
        match b {
            Values::F32(b) => {
                let (start, strides) = match order {
                    Order::Plain => (c0, (n, 1)),
                    Order::Transposed => (c0 * k, (1, k)),
                };
                // SAFETY: the tile lies inside C and is this task's alone; A and B are inside their slices.
                unsafe {
                    gemm(
                        (mm, nn, k),
                        dst,
                        (n, 1),
                        accumulate,
                        a[r0 * k..].as_ptr(),
                        (k, 1),
                        b[start..].as_ptr(),
                        strides,
                        1.0,
                    )
                }
            }
            Values::Bf16(b) => with_scratch(columns * PANEL.min(k), |scratch| {
                let mut k0 = 0;
                while k0 == 0 || k0 < k {
                    let kk = PANEL.min(k - k0);
                    let strides = widen_tile(scratch, b, order, (n, k), (k0, kk), (c0, nn));
                    // SAFETY: as above; the scratch holds kk * nn elements.
                    unsafe {
                        gemm(
                            (mm, nn, kk),
                            dst,
                            (n, 1),
                            accumulate || k0 > 0,
                            a[r0 * k + k0..].as_ptr(),
                            (k, 1),
                            scratch.as_ptr(),
                            strides,
                            1.0,
                        )
                    }
                    k0 += kk.max(1);
                }
            }),
        }
        if let Some(bias) = bias {
            for row in r0..r0 + mm {
                // SAFETY: a row of this task's own tile.
                let part = unsafe { c.part(row * n + c0, nn) };
                for (c, b) in part.iter_mut().zip(&bias[c0..]) {
                    *c += b;
                }
            }
        }
    });
}

/// Widens `b[k0.., c0..]` into `scratch`; gives its strides (k, n).
fn widen_tile(
    scratch: &mut [f32],
    b: &[bf16],
    order: Order,
    (n, k): (usize, usize),
    (k0, kk): (usize, usize),
    (c0, nn): (usize, usize),
) -> (usize, usize) {
    match order {
        Order::Plain => {
            for (i, to) in scratch.chunks_mut(nn).take(kk).enumerate() {
                widen_slice(to, &b[(k0 + i) * n + c0..][..nn]);
            }
            (nn, 1)
        }
        Order::Transposed => {
            for (i, to) in scratch.chunks_mut(kk.max(1)).take(nn).enumerate() {
                widen_slice(to, &b[(c0 + i) * k + k0..][..kk]);
            }
            (1, kk)
        }
    }
}

/// `a · bᵀ + bias` for a few rows of a, e.g. one decoded token.
fn few_rows((m, n, k): (usize, usize, usize), c: &mut [f32], a: &[f32], b: Values<'_>, bias: Option<&[f32]>) {
    const BLOCK: usize = 32;
    let c = Shared::new(c);
    (0..n.div_ceil(BLOCK)).into_par_iter().for_each(|block| {
        let first = block * BLOCK;
        for (row, a) in a.chunks_exact(k).enumerate().take(m) {
            // SAFETY: this row's part of this task's own columns.
            let out = unsafe { c.part(row * n + first, BLOCK.min(n - first)) };
            match b {
                Values::F32(b) => dots(out, a, &b[first * k..]),
                Values::Bf16(b) => dots_bf16(out, a, &b[first * k..]),
            }
            if let Some(bias) = bias {
                out.iter_mut().zip(&bias[first..]).for_each(|(o, b)| *o += b);
            }
        }
    });
}

#[inline(always)]
fn dots_body<const FMA: bool>(out: &mut [f32], a: &[f32], b: &[f32]) {
    for (out, b) in out.iter_mut().zip(b.chunks_exact(a.len())) {
        *out = dot::<FMA>(a, b);
    }
}
vectorized!(fn dots(out: &mut [f32], a: &[f32], b: &[f32]) = dots_body);

#[inline(always)]
fn dots_bf16_body<const FMA: bool>(out: &mut [f32], a: &[f32], b: &[bf16]) {
    for (out, b) in out.iter_mut().zip(b.chunks_exact(a.len())) {
        *out = dot_bf16::<FMA>(a, b);
    }
}
vectorized!(fn dots_bf16(out: &mut [f32], a: &[f32], b: &[bf16]) = dots_bf16_body);

/// `c [m, n] = aᵀ · b` with a `[k, m]` and b `[k, n]`, or added to what `c` holds.
pub(crate) fn transposed_product(
    (m, n, k): (usize, usize, usize),
    c: &mut [f32],
    accumulate: bool,
    a: &[f32],
    b: &[f32],
) {
    assert!(c.len() == m * n && a.len() == m * k && b.len() == k * n);
    if m == 0 || n == 0 || (k == 0 && accumulate) {
        return;
    }
    if k == 0 {
        return c.fill(0.0);
    }
    let (rows, columns) = tile(m, n);
    let (down, across) = (m.div_ceil(rows), n.div_ceil(columns));
    let c = Shared::new(c);
    (0..down * across).into_par_iter().with_max_len(1).for_each(|index| {
        let (r0, c0) = ((index / across) * rows, (index % across) * columns);
        let (mm, nn) = (rows.min(m - r0), columns.min(n - c0));
        // SAFETY: the tile lies inside C and is this task's alone; A and B are inside their slices.
        unsafe {
            gemm(
                (mm, nn, k),
                c.at(r0 * n + c0),
                (n, 1),
                accumulate,
                a[r0..].as_ptr(),
                (1, m),
                b[c0..].as_ptr(),
                (n, 1),
                1.0,
            )
        }
    });
}

/// Sum over the rows of `a [k, n]`, added in the order of the rows.
pub(crate) fn sum_rows(a: &[f32], n: usize) -> Vec<f32> {
    const COLUMNS: usize = 256;
    let mut sum = vec![0f32; n];
    sum.par_chunks_mut(COLUMNS).enumerate().for_each(|(i, sum)| {
        for row in a.chunks_exact(n) {
            math::add_slice(sum, &row[i * COLUMNS..][..sum.len()]);
        }
    });
    sum
}
