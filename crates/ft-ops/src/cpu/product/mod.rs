//! Matrix products on slices: `C [m, n] (+)= A [m, k] · B [k, n]`, f32 sums.
//!
//! One shape of work for every instruction set: C is cut into blocks, one a task; a task packs its part of A and
//! of B into the order its micro-kernel reads them, widening bf16 on the way, chunk by chunk of k. Each element of
//! C is summed over k in an order that depends on k alone: the result is bit-equal for any number of threads and
//! any cut into blocks. An operand that is stored as codes is decoded while it is packed: the bits of the product are
//! those with the decoded values, and never more than a bounded part of them exists.

#[cfg(target_arch = "x86_64")]
mod blocks;
#[cfg(test)]
mod coded_tests;
mod few_rows;
#[cfg(target_arch = "x86_64")]
mod fma;
mod grid;
pub(crate) mod inside;
#[cfg(test)]
mod inside_tests;
#[cfg(target_arch = "x86_64")]
mod pack;
mod path;
mod portable;
mod rider;
mod rows;
#[cfg(target_arch = "x86_64")]
mod slim;
#[cfg(test)]
mod tests;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod tiles;

pub use path::Path;
pub(crate) use rider::{Rider, product_with};
pub(crate) use rows::{Kept, Packed, WeightRows};

use super::Shared;
use super::decode::Isa;
use super::storage::Values;
use crate::coded::View;
use half::bf16;

/// Elements of an operand in the type in which they are stored.
#[derive(Clone, Copy)]
pub(crate) enum Operand<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    /// Row-major `[rows, columns]`; a row is a vector, or a step of k.
    Coded(View<'a>),
}

impl<'a> From<Values<'a>> for Operand<'a> {
    fn from(values: Values<'a>) -> Self {
        match values {
            Values::F32(v) => Operand::F32(v),
            Values::Bf16(v) => Operand::Bf16(v),
        }
    }
}

impl<'a> From<&'a [f32]> for Operand<'a> {
    fn from(values: &'a [f32]) -> Self {
        Operand::F32(values)
    }
}

impl Operand<'_> {
    fn len(&self) -> usize {
        match self {
            Operand::F32(v) => v.len(),
            Operand::Bf16(v) => v.len(),
            Operand::Coded(view) => view.rows * view.columns,
        }
    }
}

/// One operand: vectors (rows of A, columns of B) along the summed dimension k.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub values: Operand<'a>,
    /// From one vector to the next if `along_k`, else from one step of k to the next.
    pub stride: usize,
    /// The elements of a vector lie side by side.
    pub along_k: bool,
    /// The same, packed before.
    pub kept: Option<Kept<'a>>,
}

impl<'a> Matrix<'a> {
    /// A from `[m, k]`, B from `[n, k]`.
    pub(crate) fn vectors(values: impl Into<Operand<'a>>, k: usize) -> Self {
        Self {
            values: values.into(),
            stride: k,
            along_k: true,
            kept: None,
        }
    }

    /// A from `[k, m]`, B from `[k, n]`.
    pub(crate) fn steps(values: impl Into<Operand<'a>>, count: usize) -> Self {
        Self {
            values: values.into(),
            stride: count,
            along_k: false,
            kept: None,
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
        if let Operand::Coded(view) = &self.values {
            assert!(view.columns == self.stride && view.fits());
        }
    }

    /// How exact products with this weight are.
    pub(crate) fn rounding(&self) -> Rounding {
        match &self.values {
            Operand::F32(_) => Rounding::Exact,
            Operand::Bf16(_) => Rounding::Bf16,
            Operand::Coded(view) if view.bf16 => Rounding::Bf16,
            Operand::Coded(_) => Rounding::Exact,
        }
    }

    /// Is it decoded while it is packed?
    fn is_coded(&self) -> bool {
        matches!(self.values, Operand::Coded(_))
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

/// Are the f32 operands of a product rounded to bf16? Sums are f32 either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// No: the model is held in f32.
    Exact,
    /// The model is held in bf16: every operand of every size is rounded on a path with a unit for bf16, none on the others
    /// (`Path::rounds`).
    Bf16,
}

/// The paths that can be tested here: where there is no tile unit, one is played.
#[cfg(test)]
pub(crate) fn testable() -> Vec<Path> {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    let played = Path::Avx512.available() && tiles::emulate();
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    let played = false;
    let runs = |p: &Path| p.available() || (played && *p == Path::Amx);
    Path::ALL.into_iter().filter(runs).collect()
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
    rider: Option<rider::Aboard<'a>>,
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
        rider: None,
    };
    run(path, &job, rounding)
}

/// A job whose operands were checked, none of its sizes 0.
fn run(path: Path, job: &Job, rounding: Rounding) {
    let rounds = path.rounds(rounding);
    if few_rows::fits(job, rounds) {
        return few_rows::run(job, Isa::of(path), rounds);
    }
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if rounds && let Some(unit) = path.unit() {
        return tiles::run(job, unit);
    }
    match path {
        #[cfg(target_arch = "x86_64")]
        Path::Amx | Path::Dots | Path::Avx512 => blocks::run(job, blocks::Width::Avx512),
        #[cfg(target_arch = "x86_64")]
        Path::Avx2 => blocks::run(job, blocks::Width::Avx2),
        _ => portable::run(job),
    }
}
