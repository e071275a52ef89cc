//! Matrix products on slices: `C [m, n] (+)= A [m, k] · B [k, n]`, f32 sums.
//!
//! One shape of work for every instruction set: C is cut into blocks, one a task; a task packs its part of A and
//! of B into the order its micro-kernel reads them, widening bf16 on the way, chunk by chunk of k. Each element of
//! C is summed over k in an order that depends on k alone: the result is bit-equal for any number of threads and
//! any cut into blocks.

#[cfg(target_arch = "x86_64")]
mod blocks;
mod few_rows;
#[cfg(target_arch = "x86_64")]
mod fma;
mod grid;
#[cfg(target_arch = "x86_64")]
mod pack;
mod path;
mod portable;
#[cfg(test)]
mod tests;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod tiles;

pub use path::Path;
pub(crate) use portable::gemm;

use super::Shared;
use super::storage::Values;

/// One operand: vectors (rows of A, columns of B) along the summed dimension k.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub values: Values<'a>,
    /// From one vector to the next if `along_k`, else from one step of k to the next.
    pub stride: usize,
    /// The elements of a vector lie side by side.
    pub along_k: bool,
}

impl<'a> Matrix<'a> {
    /// A from `[m, k]`, B from `[n, k]`.
    pub(crate) fn vectors(values: Values<'a>, k: usize) -> Self {
        Self {
            values,
            stride: k,
            along_k: true,
        }
    }

    /// A from `[k, m]`, B from `[k, n]`.
    pub(crate) fn steps(values: Values<'a>, count: usize) -> Self {
        Self {
            values,
            stride: count,
            along_k: false,
        }
    }

    /// Panics unless `count` vectors of `k` elements lie inside.
    fn check(&self, count: usize, k: usize) {
        let (outer, inner) = if self.along_k { (count, k) } else { (k, count) };
        assert!(
            outer == 0
                || inner == 0
                || (inner <= self.stride && (outer - 1) * self.stride + inner <= self.values.len())
        );
    }
}

/// What C starts from.
#[derive(Clone, Copy)]
pub(crate) enum Start<'a> {
    Zero,
    /// What it holds.
    C,
    /// `[n]`, in every row.
    Bias(&'a [f32]),
}

/// May the product round its f32 operands to bf16?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// No: the model is held in f32.
    Exact,
    /// Yes, where that is faster: the model is held in bf16.
    Bf16,
}

/// `(m, n, k)`.
pub(crate) type Sizes = (usize, usize, usize);

/// One product, ready to be cut into blocks.
#[derive(Clone, Copy)]
struct Job<'a> {
    sizes: Sizes,
    c: Shared,
    start: Start<'a>,
    a: Matrix<'a>,
    b: Matrix<'a>,
}

/// `c [m, n] = start + a · b`.
pub(crate) fn product(sizes: Sizes, c: &mut [f32], start: Start<'_>, a: Matrix<'_>, b: Matrix<'_>, rounding: Rounding) {
    product_on(Path::current(), sizes, c, start, a, b, rounding)
}

fn product_on(
    path: Path,
    sizes: Sizes,
    c: &mut [f32],
    start: Start<'_>,
    a: Matrix<'_>,
    b: Matrix<'_>,
    rounding: Rounding,
) {
    let (m, n, k) = sizes;
    assert!(c.len() == m * n);
    a.check(m, k);
    b.check(n, k);
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        return match start {
            Start::Zero => c.fill(0.0),
            Start::C => {}
            Start::Bias(bias) => c.chunks_exact_mut(n).for_each(|row| row.copy_from_slice(bias)),
        };
    }
    if let Start::Bias(bias) = start {
        assert!(bias.len() == n);
    }
    let job = Job {
        sizes,
        c: Shared::new(c),
        start,
        a,
        b,
    };
    if few_rows::fits(&job) {
        return few_rows::run(&job);
    }
    match path {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        Path::Amx if rounding == Rounding::Bf16 && tiles::pays(&job) => tiles::run(&job),
        #[cfg(target_arch = "x86_64")]
        Path::Amx | Path::Avx512 => blocks::run(&job, blocks::Width::Avx512),
        #[cfg(target_arch = "x86_64")]
        Path::Avx2 => blocks::run(&job, blocks::Width::Avx2),
        _ => portable::run(&job),
    }
    let _ = rounding;
}
