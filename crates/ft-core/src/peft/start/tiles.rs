//! Products and a Q·R decomposition in f64 whose parts are computed by several threads. The parts depend on the sizes
//! alone, so the bits do not depend on the number of threads.
//!
//! Letters: M rows, N columns.

use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::householder::{
    apply_block_householder_sequence_on_the_left_in_place_scratch,
    apply_block_householder_sequence_on_the_left_in_place_with_conj as apply,
    apply_block_householder_sequence_transpose_on_the_left_in_place_scratch,
    apply_block_householder_sequence_transpose_on_the_left_in_place_with_conj as apply_transposed,
};
use faer::linalg::matmul::matmul;
use faer::linalg::qr::no_pivoting::factor;
use faer::linalg::triangular_solve::{solve_lower_triangular_in_place, solve_upper_triangular_in_place};
use faer::prelude::{Reborrow, ReborrowMut};
use faer::{Accum, Conj, Mat, MatMut, MatRef, Par};

/// Rows of a part of a product. Each part packs the right matrix again, so a wide one has larger parts.
const ROWS: usize = 128;
const ROWS_OF_WIDE: usize = 512;
const WIDE: usize = 1024;
/// Columns of a panel of the QR decomposition.
const PANEL: usize = 64;
/// Columns of the trailing matrix that one task updates.
const COLUMNS: usize = 256;

/// A·B.
pub(crate) fn product(a: MatRef<'_, f64>, b: MatRef<'_, f64>) -> Mat<f64> {
    let mut out = Mat::zeros(a.nrows(), b.ncols());
    multiply(out.as_mut(), a, b, if b.ncols() > WIDE { ROWS_OF_WIDE } else { ROWS });
    out
}

fn multiply(mut to: MatMut<'_, f64>, a: MatRef<'_, f64>, b: MatRef<'_, f64>, most: usize) {
    let rows = a.nrows();
    if rows <= most {
        matmul(to.rb_mut(), Accum::Replace, a, b, 1.0, Par::Seq);
        return;
    }
    let half = (rows / 2).next_multiple_of(most);
    let half = if half < rows { half } else { most };
    let (upper, lower) = to.split_at_row_mut(half);
    let (a_upper, a_lower) = a.split_at_row(half);
    rayon::join(
        || multiply(upper, a_upper, b, most),
        || multiply(lower, a_lower, b, most),
    );
}

/// U⁻¹·X for an upper triangular U.
pub(crate) fn solve_upper(u: MatRef<'_, f64>, x: MatRef<'_, f64>) -> Mat<f64> {
    let mut out = x.to_owned();
    solve_upper_triangular_in_place(u, out.as_mut(), Par::Seq);
    out
}

/// L⁻¹·X for a lower triangular L.
pub(crate) fn solve_lower(l: MatRef<'_, f64>, x: MatRef<'_, f64>) -> Mat<f64> {
    let mut out = x.to_owned();
    solve_lower_triangular_in_place(l, out.as_mut(), Par::Seq);
    out
}

/// Q·R of a matrix `[M, N]` with M >= N, by panels of Householder reflections.
pub(crate) struct Qr {
    /// R above, the reflections below the diagonal.
    packed: Mat<f64>,
    factors: Vec<Mat<f64>>,
}

impl Qr {
    /// Decomposes `m`, in its memory.
    pub(crate) fn new(mut m: Mat<f64>) -> Self {
        let n = m.ncols();
        let mut factors = Vec::new();
        for first in (0..n).step_by(PANEL) {
            let width = PANEL.min(n - first);
            let (mut panel, rest) = m.get_mut(first.., first..).split_at_col_mut(width);
            let mut factor = Mat::zeros(width, width);
            let rows = panel.nrows();
            let need = factor::qr_in_place_scratch::<f64>(rows, width, width, Par::Seq, Default::default());
            let mut memory = MemBuffer::new(need);
            let stack = MemStack::new(&mut memory);
            factor::qr_in_place(panel.rb_mut(), factor.as_mut(), Par::Seq, stack, Default::default());
            reflect(panel.rb(), factor.as_ref(), rest);
            factors.push(factor);
        }
        Self { packed: m, factors }
    }

    /// R `[N, N]`; below the diagonal are other values.
    pub(crate) fn upper(&self) -> MatRef<'_, f64> {
        self.packed.get(..self.packed.ncols(), ..)
    }

    /// Q·X `[M, B]` for X `[N, B]`.
    pub(crate) fn times(&self, x: MatRef<'_, f64>) -> Mat<f64> {
        let mut out = Mat::zeros(self.packed.nrows(), x.ncols());
        out.get_mut(..x.nrows(), ..).copy_from(x);
        for (panel, factor) in self.factors.iter().enumerate().rev() {
            let first = panel * PANEL;
            let basis = self.packed.get(first.., first..first + factor.ncols());
            let need = apply_block_householder_sequence_on_the_left_in_place_scratch::<f64>(
                basis.nrows(),
                factor.nrows(),
                out.ncols(),
            );
            let mut memory = MemBuffer::new(need);
            let stack = MemStack::new(&mut memory);
            apply(
                basis,
                factor.as_ref(),
                Conj::No,
                out.get_mut(first.., ..),
                Par::Seq,
                stack,
            );
        }
        out
    }
}

/// Applies the transposed reflections of a panel to the columns right of it.
fn reflect(panel: MatRef<'_, f64>, factor: MatRef<'_, f64>, rest: MatMut<'_, f64>) {
    if rest.ncols() > COLUMNS {
        let half = (rest.ncols() / 2).next_multiple_of(COLUMNS);
        let half = if half < rest.ncols() { half } else { COLUMNS };
        let (left, right) = rest.split_at_col_mut(half);
        rayon::join(|| reflect(panel, factor, left), || reflect(panel, factor, right));
    } else if rest.ncols() > 0 {
        let need = apply_block_householder_sequence_transpose_on_the_left_in_place_scratch::<f64>(
            panel.nrows(),
            factor.nrows(),
            rest.ncols(),
        );
        let mut memory = MemBuffer::new(need);
        let stack = MemStack::new(&mut memory);
        apply_transposed(panel, factor, Conj::No, rest, Par::Seq, stack);
    }
}
