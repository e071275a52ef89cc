//! A model of a distillation on a GPU: hidden states of some tokens, the output projection whole or in parts, and logits.

use super::elementwise::cast;
use super::embedding::{RowNumbers, gather_rows};
use super::gemm::{self, gemm};
use super::{FloatType, Gpu, address};
use crate::cross_entropy::PIECE;
use crate::distill::{DistillSide, HeadMatrix};
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

/// One model with the hidden states of a group of tokens.
pub(super) struct DistillModel<'a> {
    matrix: HeadMatrix<'a>,
    pub kind: FloatType,
    pub d: usize,
    /// The rows `[tokens, D]`.
    hidden: Tensor,
    /// f32 `[step, stride]`
    logits: Tensor,
    pub stride: usize,
    /// Tokens whose logits exist at a time.
    pub step: usize,
    /// Rows of the head in the type of the hidden states, from this row on.
    rows: Option<(usize, Tensor)>,
    parts: bool,
}

impl<'a> DistillModel<'a> {
    /// `ids`: V or C. `parts`: logits exist for one piece of the vocabulary.
    pub(super) fn new(
        gpu: &Gpu,
        side: &DistillSide<'a>,
        tokens: &[usize],
        ids: usize,
        step: usize,
        parts: bool,
    ) -> Result<Self> {
        const NAME: &str = "the hidden states";
        let (kind, d) = (FloatType::of(side.h, NAME)?, side.h.dims2()?.1);
        let hidden = if tokens.len() == side.h.dims2()?.0 {
            side.h.clone()
        } else {
            let numbers = gpu.upload_u32(&tokens.iter().map(|n| *n as u32).collect::<Vec<_>>())?;
            let to = gpu.empty((tokens.len(), d), kind.dtype())?;
            let rows = RowNumbers {
                address: address(&numbers, "trained tokens")?,
                count: tokens.len(),
            };
            // SAFETY: the rows lie in h, the copy has space for all of them.
            unsafe { gather_rows(gpu, kind, address(side.h, NAME)?, rows, 1.0, d, address(&to, NAME)?)? };
            to
        };
        // Rows of logits are aligned to 32 bytes.
        let stride = if parts { PIECE.min(ids) } else { ids }.next_multiple_of(8);
        Ok(Self {
            matrix: side.head,
            kind,
            d,
            hidden,
            logits: gpu.empty(step * stride, DType::F32)?,
            stride,
            step,
            rows: None,
            parts,
        })
    }

    /// The pieces of `ids` ids: first id and width.
    pub(super) fn pieces(&self, ids: usize) -> Vec<(usize, usize)> {
        let size = if self.parts { PIECE } else { ids.max(1) };
        (0..ids)
            .step_by(size)
            .map(|first| (first, size.min(ids - first)))
            .collect()
    }

    pub(super) fn hidden(&self, start: usize) -> Result<gemm::GpuMatrix> {
        let offset = (start * self.d * self.kind.bytes()) as u64;
        let from = address(&self.hidden, "the hidden states")?;
        Ok(gemm::GpuMatrix::new(from + offset, self.kind, self.d))
    }

    /// The head from row `first` on, inside one piece. Memory of a part is freed on this stream, after the work on it.
    pub(super) fn head(&mut self, first: usize) -> Result<gemm::GpuMatrix> {
        let start = match self.matrix {
            HeadMatrix::Whole(_) => 0,
            HeadMatrix::Parts(parts) => first / parts.rows_of_part * parts.rows_of_part,
        };
        if self.rows.as_ref().is_none_or(|(known, _)| *known != start) {
            self.rows = None;
            let rows = match self.matrix {
                HeadMatrix::Whole(head) => cast(head, self.kind)?,
                HeadMatrix::Parts(parts) => cast(&parts.checked(start)?, self.kind)?,
            };
            self.rows = Some((start, rows));
        }
        let (_, rows) = self
            .rows
            .as_ref()
            .ok_or_else(|| Error::internal("a part of the output head is missing"))?;
        let offset = ((first - start) * self.d * self.kind.bytes()) as u64;
        Ok(gemm::GpuMatrix::new(
            address(rows, "the head")? + offset,
            self.kind,
            self.d,
        ))
    }

    pub(super) fn product_into(
        &mut self,
        gpu: &Gpu,
        (start, count): (usize, usize),
        (first, width): (usize, usize),
        to: u64,
        stride: usize,
    ) -> Result<()> {
        let (hidden, head) = (self.hidden(start)?, self.head(first)?.t());
        let logits = gemm::GpuMatrix::new(to, FloatType::F32, stride);
        // SAFETY: [count, D] · [D, width] into rows of `stride` elements.
        unsafe { gemm(gpu, (count, width, self.d), hidden, head, logits, false) }
    }

    /// Computes the logits of some tokens for a piece, unless they are still there; returns their address.
    pub(super) fn product(
        &mut self,
        gpu: &Gpu,
        tokens: (usize, usize),
        piece: (usize, usize),
        again: bool,
    ) -> Result<u64> {
        let to = address(&self.logits, "logits")?;
        if !again || self.parts {
            self.product_into(gpu, tokens, piece, to, self.stride)?;
        }
        Ok(to)
    }
}
