//! A product of low rank that rides along with another: `C (+)= A · B + u · up` with `u = scale · A · down`.
//!
//! What LoRA adds to a linear. `down` is one more panel beside those of B, and the rank is a few more steps at the end of
//! k: A is packed once for both, and C is not read and written again. Where nothing can ride (another way through the
//! product, a large rank), it is two more products.

use super::super::Shared;
use super::{Job, Matrix, Operand, Path, Rounding, Sizes, Start, few_rows, product_on, run};

/// A larger rank would crowd a packed A out of the cache (`plan` counts with it).
pub(super) const LARGEST: usize = 64;

/// What rides. The summed dimension of `down` is that of the product, that of `up` the rank.
pub(crate) struct Rider<'a> {
    pub rank: usize,
    pub down: Matrix<'a>,
    pub up: Matrix<'a>,
    pub scale: f32,
    /// u `[m, rank]`; written.
    pub u: &'a mut [f32],
}

/// On board.
#[derive(Clone, Copy)]
pub(super) struct Aboard<'a> {
    pub rank: usize,
    pub down: Matrix<'a>,
    pub up: Matrix<'a>,
    scale: f32,
    u: Shared,
}

impl<'a> Aboard<'a> {
    /// The product that gives u, without its scale.
    pub fn job(&self, of: &Job<'a>) -> Job<'a> {
        let (m, _, k) = of.sizes;
        Job {
            sizes: (m, self.rank, k),
            c: self.u,
            start: Start::Zero,
            a: of.a,
            b: self.down,
            rider: None,
        }
    }

    /// u as an operand, when all its `m` rows are summed up.
    /// # Safety
    /// No task may be using u.
    pub unsafe fn scaled(&self, m: usize) -> Matrix<'a> {
        // SAFETY: u has `m · rank` elements; that it is nobody else's is promised by the caller.
        let u = unsafe { self.u.part(0, m * self.rank) };
        self.scale(u);
        Matrix::vectors(Operand::F32(u), self.rank)
    }

    pub fn scale(&self, u: &mut [f32]) {
        u.iter_mut().for_each(|x| *x *= self.scale);
    }

    /// Keeps the rows of u from `first` on.
    pub fn keep(&self, first: usize, u: &[f32]) {
        // SAFETY: rows of this task's own block, which one task hands over.
        unsafe { self.u.part(first * self.rank, u.len()) }.copy_from_slice(u);
    }
}

/// `c [m, n] = start + a · b + u · up`.
pub(crate) fn product_with(
    path: Path,
    sizes: Sizes,
    c: &mut [f32],
    start: Start<'_>,
    (a, b): (Matrix<'_>, Matrix<'_>),
    rounding: Rounding,
    rider: Rider<'_>,
) {
    let (m, n, k) = sizes;
    let Rider {
        rank,
        down,
        up,
        scale,
        u,
    } = rider;
    assert!(c.len() == m * n && u.len() == m * rank);
    a.check(m, k);
    b.check(n, k);
    down.check(rank, k);
    up.check(n, rank);
    if let Start::Bias(bias) = start {
        assert!(bias.len() == n);
    }
    let job = Job {
        sizes,
        c: Shared::new(c),
        start,
        a,
        b,
        rider: Some(Aboard {
            rank,
            down,
            up,
            scale,
            u: Shared::new(u),
        }),
    };
    let empty = m == 0 || n == 0 || k == 0 || rank == 0;
    let few = few_rows::fits(&job, path.rounds(rounding));
    if path != Path::Portable && !empty && rank <= LARGEST && !few {
        return run(path, &job, rounding);
    }
    // Rounded as what rides is: a row means the same among few rows and among many.
    product_on(path, (m, rank, k), u, Start::Zero, a, down, rounding);
    u.iter_mut().for_each(|x| *x *= scale);
    product_on(path, sizes, c, start, a, b, rounding);
    let u = Matrix::vectors(Operand::F32(u), rank);
    product_on(path, (m, n, rank), c, Start::C, u, up, rounding);
}
