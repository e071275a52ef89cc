//! Fused LoRA: `C (+)= A · B + u · up` with `u = scale · A · down`.
//!
//! `down` is packed as one more panel of B, and the rank is appended to the end of k: A is packed once for both
//! products, and C is not read and written again. Falls back to two more products if fusion is not possible
//! (the backend `Portable`, or a large rank).

use super::super::SharedSlice;
use super::{CInit, CpuBackend, GemmSizes, Matrix, Operand, ProductJob, Rounding, gemv, product_on, run};

/// A larger rank would evict the packed A from the cache.
pub(super) const MAX_RANK: usize = 64;

/// The LoRA matrices. The summed dimension of `down` is that of the product, the summed dimension of `up` is the rank.
pub(crate) struct FusedLora<'a> {
    pub rank: usize,
    pub down: Matrix<'a>,
    pub up: Matrix<'a>,
    pub scale: f32,
    /// u `[m, rank]`; output.
    pub u: &'a mut [f32],
}

/// A fused LoRA product whose output u is shared by all tasks.
#[derive(Clone, Copy)]
pub(super) struct FusedLoraShared<'a> {
    pub rank: usize,
    pub down: Matrix<'a>,
    pub up: Matrix<'a>,
    scale: f32,
    u: SharedSlice,
}

impl<'a> FusedLoraShared<'a> {
    /// Returns the product that computes u, without its scale.
    pub(super) fn job(&self, of: &ProductJob<'a>) -> ProductJob<'a> {
        let (m, _, k) = of.sizes;
        ProductJob {
            sizes: (m, self.rank, k),
            c: self.u,
            start: CInit::Zero,
            a: of.a,
            b: self.down,
            fused_lora: None,
        }
    }

    /// Scales u and returns it as an operand, after the sums of all its `m` rows are complete.
    /// # Safety
    /// No task may be using u.
    pub(super) unsafe fn scaled(&self, m: usize) -> Matrix<'a> {
        // SAFETY: u has `m · rank` elements; the caller promises that no other task uses it.
        let u = unsafe { self.u.part(0, m * self.rank) };
        self.scale(u);
        Matrix::k_inner(Operand::F32(u), self.rank)
    }

    pub(super) fn scale(&self, u: &mut [f32]) {
        u.iter_mut().for_each(|x| *x *= self.scale);
    }

    /// Writes the rows of u from `first` on.
    pub(super) fn write_rows(&self, first: usize, u: &[f32]) {
        // SAFETY: rows of the block of this task; only one task writes them.
        unsafe { self.u.part(first * self.rank, u.len()) }.copy_from_slice(u);
    }
}

/// Computes `c [m, n] = start + a · b + u · up`.
pub(crate) fn product_with(
    backend: CpuBackend,
    sizes: GemmSizes,
    c: &mut [f32],
    start: CInit<&[f32]>,
    (a, b): (Matrix<'_>, Matrix<'_>),
    rounding: Rounding,
    fused_lora: FusedLora<'_>,
) {
    let (m, n, k) = sizes;
    let FusedLora {
        rank,
        down,
        up,
        scale,
        u,
    } = fused_lora;
    assert!(c.len() == m * n && u.len() == m * rank);
    a.check(m, k);
    b.check(n, k);
    down.check(rank, k);
    up.check(n, rank);
    if let CInit::Bias(bias) = start {
        assert!(bias.len() == n);
    }
    let job = ProductJob {
        sizes,
        c: SharedSlice::new(c),
        start,
        a,
        b,
        fused_lora: Some(FusedLoraShared {
            rank,
            down,
            up,
            scale,
            u: SharedSlice::new(u),
        }),
    };
    let empty = m == 0 || n == 0 || k == 0 || rank == 0;
    let few = gemv::fits(&job, backend.for_rounding(rounding));
    if backend != CpuBackend::Portable && !empty && rank <= MAX_RANK && !few {
        return run(backend, &job, rounding);
    }
    // Rounded as in the fused product: a row gives the same result among few rows and among many, except with weights
    // that allow rounded rows.
    product_on(backend, (m, rank, k), u, CInit::Zero, a, down, rounding);
    u.iter_mut().for_each(|x| *x *= scale);
    product_on(backend, sizes, c, start, a, b, rounding);
    let u = Matrix::k_inner(Operand::F32(u), rank);
    product_on(backend, (m, n, rank), c, CInit::C, u, up, rounding);
}
