//! Rows of a weight as products take them: their elements, and the whole weight packed before, where it is kept so.

use super::rider::LARGEST;
use super::{Matrix, Operand, Path, Rounding};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::tiles::panels::{Panels, bytes};

/// What only a tile unit reads.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
#[derive(Debug)]
enum Panels {}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn bytes(_vectors: usize, _k: usize, _rank: usize) -> usize {
    0
}

/// A weight `[O, I]` in the orders in which the tile unit reads it.
#[derive(Debug)]
pub(crate) struct Packed {
    /// For `x·Wᵀ`: O vectors of I.
    forward: Panels,
    /// For `dy·W`: I vectors of O.
    backward: Option<Panels>,
}

impl Packed {
    /// Packs `w` for `x·Wᵀ`, and for `dy·W` where `backward` says so, with room for `rank` that ride. None where no product
    /// would read it: the weight is not bf16, the CPU has no AVX-512.
    pub fn new(w: WeightRows, (outputs, inputs): (usize, usize), backward: bool, rank: usize) -> Option<Self> {
        let pays = Path::Avx512.available() && w.rounding() == Rounding::Bf16 && outputs > 0 && inputs > 0;
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if pays {
            let rank = riding(rank);
            return Some(Self {
                forward: Panels::new(&w.forward(), (outputs, inputs), rank),
                backward: backward.then(|| Panels::new(&w.backward(), (inputs, outputs), rank)),
            });
        }
        let _ = (pays, backward, rank);
        None
    }

    /// What `new` takes in memory.
    pub fn bytes((outputs, inputs): (usize, usize), backward: bool, rank: usize) -> usize {
        let rank = riding(rank);
        let backward = if backward { bytes(inputs, outputs, rank) } else { 0 };
        bytes(outputs, inputs, rank) + backward
    }
}

/// A larger rank does not ride.
fn riding(rank: usize) -> usize {
    if rank <= LARGEST { rank } else { 0 }
}

/// An operand that was packed before, from a vector and an element of them on.
#[derive(Clone, Copy)]
pub(crate) struct Kept<'a> {
    panels: &'a Panels,
    first: usize,
    k0: usize,
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
impl<'a> Kept<'a> {
    /// For a product with `vectors` of `k` elements, and `riding` steps of a rider. None: it cannot use them.
    pub(super) fn hold(self, (vectors, k): (usize, usize), riding: usize) -> Option<super::tiles::panels::Held<'a>> {
        self.panels.hold((self.first, vectors), (self.k0, k), riding)
    }
}

/// Rows of a weight, row-major.
#[derive(Clone, Copy)]
pub(crate) struct WeightRows<'a> {
    values: Operand<'a>,
    columns: usize,
    /// The row of the weight with which `values` begins.
    first: usize,
    packed: Option<&'a Packed>,
}

impl<'a> WeightRows<'a> {
    pub fn new(values: impl Into<Operand<'a>>, columns: usize) -> Self {
        Self {
            values: values.into(),
            columns,
            first: 0,
            packed: None,
        }
    }

    /// With what was packed of the same weight.
    pub fn with(self, packed: Option<&'a Packed>) -> Self {
        Self { packed, ..self }
    }

    /// `count` rows from row `first` on. Not of codes.
    pub fn part(self, first: usize, count: usize) -> Self {
        let (from, len) = (first * self.columns, count * self.columns);
        let values = match self.values {
            Operand::F32(v) => Operand::F32(&v[from..][..len]),
            Operand::Bf16(v) => Operand::Bf16(&v[from..][..len]),
            Operand::Coded(view) => Operand::Coded(view),
        };
        Self {
            values,
            first: self.first + first,
            ..self
        }
    }

    /// Rows that are here.
    pub fn count(&self) -> usize {
        self.values.len() / self.columns.max(1)
    }

    /// W of `x·Wᵀ`.
    pub fn forward(self) -> Matrix<'a> {
        let panels = self.packed.map(|p| &p.forward);
        Matrix {
            values: self.values,
            stride: self.columns,
            along_k: true,
            kept: panels.map(|panels| Kept {
                panels,
                first: self.first,
                k0: 0,
            }),
        }
    }

    /// W of `dy·W`.
    pub fn backward(self) -> Matrix<'a> {
        let panels = self.packed.and_then(|p| p.backward.as_ref());
        Matrix {
            values: self.values,
            stride: self.columns,
            along_k: false,
            kept: panels.map(|panels| Kept {
                panels,
                first: 0,
                k0: self.first,
            }),
        }
    }

    /// How exact products with this weight are.
    pub fn rounding(&self) -> Rounding {
        self.forward().rounding()
    }
}
