//! Matrix products (GEMM) on slices: `C [m, n] (+)= A [m, k] · B [k, n]`, f32 sums.
//!
//! The structure is the same for every instruction set. C is cut into blocks; a block is a task. For each chunk of
//! k a task packs its part of A and of B into the order that the micro-kernel reads, and widens bf16 to f32. Each
//! element of C is summed over k in an order that depends on k alone: the result is bit-equal for any number of
//! threads and any cut into blocks. A quantized operand is dequantized while it is packed: the product is bit-equal
//! to that of the dequantized values, and only a bounded part of them is in memory at a time.

// Packed forms are read by the kernels for x86-64 only; elsewhere products go to the `gemm` crate, which has NEON kernels.
#![cfg_attr(
    not(all(target_arch = "x86_64", target_os = "linux")),
    allow(dead_code, unused_variables)
)]

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
mod backend;
#[cfg(target_arch = "x86_64")]
mod blocks;
#[cfg(target_arch = "x86_64")]
mod few_rows;
#[cfg(target_arch = "x86_64")]
mod fma;
mod fused_lora;
mod gemv;
mod grid;
mod integer;
pub(crate) mod memory;
#[cfg(target_arch = "x86_64")]
mod pack;
mod portable;
mod rows;
#[cfg(target_arch = "x86_64")]
mod skinny;
pub(crate) mod task_gemm;
#[cfg(test)]
mod few_rows_tests;
#[cfg(test)]
mod quantized_tests;
#[cfg(test)]
mod task_gemm_tests;
#[cfg(test)]
mod tests;

pub use backend::CpuBackend;
pub(crate) use backend::VectorIsa;
pub(crate) use fused_lora::{FusedLora, product_with};
pub use gemv::{MANY_ROWS, many_rounded_rows};
pub(crate) use rows::WeightRows;

use super::SharedSlice;
use super::storage::StoredElements;
use crate::quantized::QMatrixView;
use half::bf16;

/// Elements of an operand in their storage type.
#[derive(Clone, Copy)]
pub(crate) enum Operand<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    /// Row-major `[rows, columns]`; a row is a vector, or one index of k.
    Quantized(QMatrixView<'a>),
}

impl<'a> From<StoredElements<'a>> for Operand<'a> {
    fn from(values: StoredElements<'a>) -> Self {
        match values {
            StoredElements::F32(v) => Operand::F32(v),
            StoredElements::Bf16(v) => Operand::Bf16(v),
        }
    }
}

impl<'a> From<&'a [f32]> for Operand<'a> {
    fn from(values: &'a [f32]) -> Self {
        Operand::F32(values)
    }
}

impl<'a> From<&'a [bf16]> for Operand<'a> {
    fn from(values: &'a [bf16]) -> Self {
        Operand::Bf16(values)
    }
}

impl Operand<'_> {
    fn len(&self) -> usize {
        match self {
            Operand::F32(v) => v.len(),
            Operand::Bf16(v) => v.len(),
            Operand::Quantized(view) => view.rows * view.columns,
        }
    }
}

/// One operand: a set of vectors (rows of A, columns of B) along the summed dimension k.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub values: Operand<'a>,
    /// Distance from one vector to the next if `k_contiguous`, else from one index of k to the next.
    pub stride: usize,
    /// True if the elements of a vector are contiguous.
    pub k_contiguous: bool,
}

impl<'a> Matrix<'a> {
    /// Operand A from `[m, k]`, or operand B from `[n, k]`.
    pub(crate) fn k_inner(values: impl Into<Operand<'a>>, k: usize) -> Self {
        Self {
            values: values.into(),
            stride: k,
            k_contiguous: true,
        }
    }

    /// Operand A from `[k, m]`, or operand B from `[k, n]`.
    pub(crate) fn k_outer(values: impl Into<Operand<'a>>, count: usize) -> Self {
        Self {
            values: values.into(),
            stride: count,
            k_contiguous: false,
        }
    }

    /// Panics unless `count` vectors of `k` elements lie inside.
    fn check(&self, count: usize, k: usize) {
        let (outer, inner) = if self.k_contiguous { (count, k) } else { (k, count) };
        assert!(
            outer == 0
                || inner == 0
                || (inner <= self.stride && (outer - 1) * self.stride + inner <= self.values.len())
        );
        if let Operand::Quantized(view) = &self.values {
            assert!(view.columns == self.stride && view.fits());
        }
    }

    /// Returns the rounding of products with this weight.
    pub(crate) fn rounding(&self) -> Rounding {
        match &self.values {
            Operand::F32(_) => Rounding::Exact,
            Operand::Bf16(_) => Rounding::Bf16,
            Operand::Quantized(view) if view.bf16 => Rounding::Bf16,
            Operand::Quantized(_) => Rounding::Exact,
        }
    }

    /// True if the operand is dequantized while it is packed.
    fn is_quantized(&self) -> bool {
        matches!(self.values, Operand::Quantized(_))
    }
}

/// The start value of C, or of a micro-tile of it. B: `&[f32]`, or the address of the first column of a tile.
#[derive(Clone, Copy)]
pub(crate) enum CInit<B> {
    Zero,
    /// The values in C.
    C,
    /// `[n]`, in every row.
    Bias(B),
}

/// Whether the f32 operands of a product are rounded to bf16. Sums are f32 in both cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// Not rounded: the model is held in f32.
    Exact,
    /// The model is held in bf16: a backend with bf16 instructions rounds every operand of every size, other
    /// backends none (`CpuBackend::rounds`). Only the exponentials that the loss keeps for the gradient of a head are always bf16.
    Bf16,
}

/// Returns the backends that can be tested on this machine. AMX is emulated where it is missing.
#[cfg(test)]
pub(crate) fn testable() -> Vec<CpuBackend> {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    let emulated = CpuBackend::Avx512.available() && amx::emulate();
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    let emulated = false;
    let runs = |p: &CpuBackend| p.available() || (emulated && *p == CpuBackend::Amx);
    CpuBackend::ALL.into_iter().filter(runs).collect()
}

/// `(m, n, k)`.
pub(crate) type GemmSizes = (usize, usize, usize);

/// A part of an operand: `count` vectors from `first` on, elements `k0..k0 + k` of each.
#[derive(Clone, Copy)]
struct OperandBlock {
    first: usize,
    count: usize,
    k0: usize,
    k: usize,
}

/// One product, before it is cut into blocks.
#[derive(Clone, Copy)]
struct ProductJob<'a> {
    sizes: GemmSizes,
    c: SharedSlice,
    start: CInit<&'a [f32]>,
    a: Matrix<'a>,
    b: Matrix<'a>,
    fused_lora: Option<fused_lora::FusedLoraShared<'a>>,
}

/// Computes `c [m, n] = start + a · b`.
pub(crate) fn product(
    sizes: GemmSizes,
    c: &mut [f32],
    start: CInit<&[f32]>,
    a: Matrix<'_>,
    b: Matrix<'_>,
    rounding: Rounding,
) {
    product_on(CpuBackend::current(), sizes, c, start, a, b, rounding)
}

fn product_on(
    backend: CpuBackend,
    sizes: GemmSizes,
    c: &mut [f32],
    start: CInit<&[f32]>,
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
            CInit::Zero => c.fill(0.0),
            CInit::C => {}
            CInit::Bias(bias) => c.chunks_exact_mut(n).for_each(|row| row.copy_from_slice(bias)),
        };
    }
    if let CInit::Bias(bias) = start {
        assert!(bias.len() == n);
    }
    let job = ProductJob {
        sizes,
        c: SharedSlice::new(c),
        start,
        a,
        b,
        fused_lora: None,
    };
    run(backend, &job, rounding)
}

/// Runs a job whose operands were checked; none of its sizes is 0.
fn run(backend: CpuBackend, job: &ProductJob, rounding: Rounding) {
    let backend = backend.for_rounding(rounding);
    if gemv::fits(job, backend) {
        return gemv::run(job, backend);
    }
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if backend.packs_bf16() {
        return amx::run(job, backend);
    }
    match backend.vector_isa() {
        #[cfg(target_arch = "x86_64")]
        Some(isa) => blocks::run(job, isa),
        _ => portable::run(job),
    }
}
