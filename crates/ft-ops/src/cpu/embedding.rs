//! Embedding rows on slices.

use super::SharedSlice;
use super::math::widen;
use super::storage::StoredElements;
use crate::embedding::NoiseRow;
use rayon::prelude::*;

pub(crate) fn gather(table: StoredElements<'_>, ids: &[u32], scale: f32, d: usize, y: &mut [f32]) {
    if d == 0 {
        return;
    }
    y.par_chunks_mut(d).with_min_len(16).zip(ids).for_each(|(y, id)| {
        let at = *id as usize * d;
        match table {
            StoredElements::F32(t) => y.iter_mut().zip(&t[at..][..d]).for_each(|(y, t)| *y = t * scale),
            StoredElements::Bf16(t) => y
                .iter_mut()
                .zip(&t[at..][..d])
                .for_each(|(y, t)| *y = widen(*t) * scale),
        }
    });
}

/// A task owns columns, not rows: an id may occur twice, and its rows are added in the order of the tokens.
pub(crate) fn scatter_add(dw: &mut [f32], ids: &[u32], dx: &[f32], scale: f32, d: usize) {
    const COLUMNS: usize = 128;
    let dw = SharedSlice::new(dw);
    (0..d.div_ceil(COLUMNS)).into_par_iter().for_each(|block| {
        let first = block * COLUMNS;
        let count = COLUMNS.min(d - first);
        for (id, dx) in ids.iter().zip(dx.chunks_exact(d)) {
            // SAFETY: the columns of this task in a row; the slice before it is no longer used.
            let row = unsafe { dw.part(*id as usize * d + first, count) };
            row.iter_mut().zip(&dx[first..]).for_each(|(w, x)| *w += scale * x);
        }
    });
}

pub(crate) fn add_noise(x: &mut [f32], rows: &[NoiseRow], d: usize) {
    if d == 0 {
        return;
    }
    x.par_chunks_mut(d).with_min_len(16).zip(rows).for_each(|(x, row)| {
        let first = row.position as u64 * d as u64;
        for (index, x) in (first..).zip(x) {
            // A product and a sum, each rounded, as on a GPU.
            *x += row.magnitude * (2.0 * row.rng.uniform(index) - 1.0);
        }
    });
}
