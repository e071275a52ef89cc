//! Rows of a weight as operands of products.

use super::{Matrix, Operand, Rounding};

/// Rows of a weight, row-major.
#[derive(Clone, Copy)]
pub(crate) struct WeightRows<'a> {
    values: Operand<'a>,
    columns: usize,
}

impl<'a> WeightRows<'a> {
    pub(crate) fn new(values: impl Into<Operand<'a>>, columns: usize) -> Self {
        Self {
            values: values.into(),
            columns,
        }
    }

    /// Returns `count` rows from row `first` on. Not for quantized weights.
    pub(crate) fn part(self, first: usize, count: usize) -> Self {
        let (from, len) = (first * self.columns, count * self.columns);
        let values = match self.values {
            Operand::F32(v) => Operand::F32(&v[from..][..len]),
            Operand::Bf16(v) => Operand::Bf16(&v[from..][..len]),
            Operand::Quantized(view) => Operand::Quantized(view),
        };
        Self { values, ..self }
    }

    /// Returns the number of rows in `values`.
    pub(crate) fn count(&self) -> usize {
        self.values.len() / self.columns.max(1)
    }

    /// Returns W as operand of `x·Wᵀ`.
    pub(crate) fn forward(self) -> Matrix<'a> {
        Matrix::k_inner(self.values, self.columns)
    }

    /// Returns W as operand of `dy·W`.
    pub(crate) fn backward(self) -> Matrix<'a> {
        Matrix::k_outer(self.values, self.columns)
    }

    /// Returns the rounding of products with this weight.
    pub(crate) fn rounding(&self) -> Rounding {
        self.forward().rounding()
    }
}
