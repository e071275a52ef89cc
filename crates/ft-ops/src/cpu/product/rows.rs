//! Rows of a weight as operands of products: their elements, and optionally a prepacked copy of the whole weight.

use super::fused_lora::MAX_RANK;
use super::{CpuBackend, Matrix, Operand, Rounding};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::amx::panels::{Panels, bytes};

/// Stands for the prepacked panels, which exist only on x86-64 Linux.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
#[derive(Debug)]
enum Panels {}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn bytes(_vectors: usize, _k: usize, _rank: usize) -> usize {
    0
}

/// A weight `[O, I]`, prepacked in the orders that the AMX code reads.
#[derive(Debug)]
pub(crate) struct PrepackedWeight {
    /// For `x·Wᵀ`: O vectors of I.
    forward: Panels,
    /// For `dy·W`: I vectors of O.
    backward: Option<Panels>,
}

impl PrepackedWeight {
    /// Packs `w` for `x·Wᵀ`, and for `dy·W` if `backward`, with space for a fused LoRA rank of `rank`. None if no
    /// product would read it: the weight is not bf16, or the CPU has no AVX-512.
    pub(crate) fn new(w: WeightRows, (outputs, inputs): (usize, usize), backward: bool, rank: usize) -> Option<Self> {
        let pays = CpuBackend::Avx512.available() && w.rounding() == Rounding::Bf16 && outputs > 0 && inputs > 0;
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if pays {
            let rank = fused_rank(rank);
            return Some(Self {
                forward: Panels::new(&w.forward(), (outputs, inputs), rank),
                backward: backward.then(|| Panels::new(&w.backward(), (inputs, outputs), rank)),
            });
        }
        let _ = (pays, backward, rank);
        None
    }

    /// Returns the bytes that `new` allocates.
    pub(crate) fn bytes((outputs, inputs): (usize, usize), backward: bool, rank: usize) -> usize {
        let rank = fused_rank(rank);
        let backward = if backward { bytes(inputs, outputs, rank) } else { 0 };
        bytes(outputs, inputs, rank) + backward
    }
}

/// Returns the rank that is fused: 0 if `rank` is too large.
fn fused_rank(rank: usize) -> usize {
    if rank <= MAX_RANK { rank } else { 0 }
}

/// A prepacked operand, from a given vector and element of k on.
#[derive(Clone, Copy)]
pub(crate) struct PrepackedPart<'a> {
    panels: &'a Panels,
    first: usize,
    k0: usize,
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
impl<'a> PrepackedPart<'a> {
    /// Returns the panels for a product with `vectors` of `k` elements and `fused_steps` steps of a fused LoRA rank.
    /// None if the product cannot use them.
    pub(super) fn lock(
        self,
        (vectors, k): (usize, usize),
        fused_steps: usize,
    ) -> Option<super::amx::panels::LockedPanels<'a>> {
        self.panels.lock((self.first, vectors), (self.k0, k), fused_steps)
    }
}

/// Rows of a weight, row-major.
#[derive(Clone, Copy)]
pub(crate) struct WeightRows<'a> {
    values: Operand<'a>,
    columns: usize,
    /// The row of the weight at which `values` begins.
    first: usize,
    packed: Option<&'a PrepackedWeight>,
}

impl<'a> WeightRows<'a> {
    pub(crate) fn new(values: impl Into<Operand<'a>>, columns: usize) -> Self {
        Self {
            values: values.into(),
            columns,
            first: 0,
            packed: None,
        }
    }

    /// Adds the prepacked copy of the same weight.
    pub(crate) fn with(self, packed: Option<&'a PrepackedWeight>) -> Self {
        Self { packed, ..self }
    }

    /// Returns `count` rows from row `first` on. Not for quantized weights.
    pub(crate) fn part(self, first: usize, count: usize) -> Self {
        let (from, len) = (first * self.columns, count * self.columns);
        let values = match self.values {
            Operand::F32(v) => Operand::F32(&v[from..][..len]),
            Operand::Bf16(v) => Operand::Bf16(&v[from..][..len]),
            Operand::Quantized(view) => Operand::Quantized(view),
        };
        Self {
            values,
            first: self.first + first,
            ..self
        }
    }

    /// Returns the number of rows in `values`.
    pub(crate) fn count(&self) -> usize {
        self.values.len() / self.columns.max(1)
    }

    /// Returns W as operand of `x·Wᵀ`.
    pub(crate) fn forward(self) -> Matrix<'a> {
        let panels = self.packed.map(|p| &p.forward);
        Matrix {
            values: self.values,
            stride: self.columns,
            k_contiguous: true,
            prepacked: panels.map(|panels| PrepackedPart {
                panels,
                first: self.first,
                k0: 0,
            }),
        }
    }

    /// Returns W as operand of `dy·W`.
    pub(crate) fn backward(self) -> Matrix<'a> {
        let panels = self.packed.and_then(|p| p.backward.as_ref());
        Matrix {
            values: self.values,
            stride: self.columns,
            k_contiguous: false,
            prepacked: panels.map(|panels| PrepackedPart {
                panels,
                first: 0,
                k0: self.first,
            }),
        }
    }

    /// Returns the rounding of products with this weight.
    pub(crate) fn rounding(&self) -> Rounding {
        self.forward().rounding()
    }
}
