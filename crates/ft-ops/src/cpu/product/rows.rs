//! Rows of a weight as operands of products.

use super::super::math::widen_slice;
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

    /// Writes row `row` to `to` `[columns]`, as f32.
    pub(crate) fn copy_row(&self, row: usize, to: &mut [f32]) {
        let from = row * self.columns;
        match self.values {
            Operand::F32(v) => to.copy_from_slice(&v[from..][..self.columns]),
            Operand::Bf16(v) => widen_slice(to, &v[from..][..self.columns]),
            Operand::Quantized(view) => view.dequantize(row, 0, to),
        }
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
