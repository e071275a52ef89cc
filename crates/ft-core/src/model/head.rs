//! The output projection (LM head): whole, or streamed in pieces.

use super::contracts::{LossGradients, ObjectiveNeeds, Param};
use crate::base::{Error, Result};
use crate::ops::cross_entropy::{self, OutputPieces};
use crate::ops::linear;
use crate::ops::step_stats::StepStats;
use crate::quant::Weight;
use crate::source::{GroupWeights, StreamedMatrix};
use candle_core::{DType, Tensor};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// The output projection, as objectives use it.
pub struct Head<'a> {
    /// Name of the matrix `[V, D]`; if tied, that of the embedding.
    pub name: Arc<str>,
    /// The matrix.
    pub weight: HeadWeight<'a>,
    /// Logits z become cap · tanh(z / cap).
    pub softcap: Option<f32>,
}

/// The matrix of an output projection.
#[derive(Clone)]
pub enum HeadWeight<'a> {
    /// `[V, D]`, dense.
    Whole(Weight),
    /// A matrix that is read from disk in pieces.
    Streamed(Rc<StreamedHead<'a>>),
}

/// An output projection that its source streams in pieces.
pub struct StreamedHead<'a> {
    matrix: Box<dyn StreamedMatrix + 'a>,
    name: Arc<str>,
    /// V, D, and the number of rows of a piece.
    pub rows: usize,
    /// D
    pub width: usize,
    /// Rows of a piece.
    pub piece_rows: usize,
    /// Handle of the current piece; it is kept until the next call.
    lease: RefCell<Option<Arc<GroupWeights>>>,
}

impl<'a> StreamedHead<'a> {
    /// `matrix` is the parameter `name` `[rows, width]`.
    pub fn new(matrix: Box<dyn StreamedMatrix + 'a>, name: Arc<str>, rows: usize, width: usize) -> Self {
        Self {
            piece_rows: matrix.piece_rows(),
            matrix,
            name,
            rows,
            width,
            lease: RefCell::new(None),
        }
    }

    /// Returns the piece that starts at row `first`, `[rows of the piece, width]`; valid until the next call.
    ///
    /// # Errors
    /// A failed read of the weights.
    pub fn piece(&self, first: usize) -> Result<Tensor> {
        // The source reuses this memory for the following piece.
        self.lease.replace(None);
        let piece = self.matrix.piece(first)?;
        let tensor = piece.get(&self.name)?.1;
        self.lease.replace(Some(piece));
        Ok(tensor)
    }
}

impl Head<'_> {
    /// The whole matrix.
    ///
    /// # Errors
    /// It is streamed in pieces.
    pub fn param(&self) -> Result<Param> {
        match &self.weight {
            HeadWeight::Whole(w) => Ok(Param {
                name: self.name.clone(),
                tensor: w.dense()?.clone(),
            }),
            HeadWeight::Streamed(_) => Err(Error::unsupported(
                "the output head is read in parts: the full matrix is not in memory",
            )
            .at(&*self.name)),
        }
    }

    /// Logits `[N, V]` of hidden states `[N, D]`, before the soft cap.
    ///
    /// # Errors
    /// A failed read of the weights; `h` has another width (`Shape`); not enough memory for all logits.
    pub fn logits(&self, h: &Tensor) -> Result<Tensor> {
        match &self.weight {
            HeadWeight::Whole(w) => w.forward(h, None),
            HeadWeight::Streamed(head) => {
                let mut columns = Vec::new();
                for first in (0..head.rows).step_by(head.piece_rows) {
                    columns.push(linear::forward(h, &head.piece(first)?, None)?);
                }
                Ok(Tensor::cat(&columns, 1)?.contiguous()?)
            }
        }
    }
}

/// Building blocks of other objectives: log-probabilities, then the gradient of any function of them.
impl Head<'_> {
    /// V.
    ///
    /// # Errors
    /// The output head is quantized (`Unsupported`).
    pub fn vocab(&self) -> Result<usize> {
        match &self.weight {
            HeadWeight::Whole(w) => Ok(w.dense()?.dims2()?.0),
            HeadWeight::Streamed(head) => Ok(head.rows),
        }
    }

    /// The type of the projection if its gradient is computed.
    pub(crate) fn trained_type(&self, need_dw: bool) -> Option<DType> {
        match &self.weight {
            HeadWeight::Whole(w) if need_dw => Some(w.model_type()),
            _ => None,
        }
    }

    /// Tokens per chunk of a loss of these hidden states; `need_dw`: with the gradient of the projection.
    fn chunk(&self, h: &Tensor, need_dw: bool) -> Result<usize> {
        Ok(cross_entropy::chunk_for_loss(
            self.vocab()?,
            self.trained_type(need_dw),
            h.device().is_cuda(),
        ))
    }

    /// Log-probability of each target, `[N]`; 0 where the target is `IGNORE`. `h` `[N, D]`.
    ///
    /// # Errors
    /// A target outside the vocabulary (`Argument`).
    pub fn log_probs(&self, h: &Tensor, targets: &[u32]) -> Result<Vec<f32>> {
        let chunk = self.chunk(h, false)?;
        match &self.weight {
            HeadWeight::Whole(w) => cross_entropy::token_log_probs(h, w.dense()?, targets, self.softcap, chunk),
            HeadWeight::Streamed(head) => with_pieces(head, |pieces| {
                cross_entropy::streamed_log_probs(h, pieces, targets, self.softcap, chunk)
            }),
        }
    }

    /// The gradients of `Σ weights[n] · -log p(targets[n])`, times `need.scale`; `weights` `[N]`, of any sign.
    ///
    /// # Errors
    /// A target outside the vocabulary (`Argument`); the gradient of a head that is read in pieces (`Unsupported`).
    pub fn weighted(
        &self,
        h: &Tensor,
        targets: &[u32],
        weights: &[f32],
        need: ObjectiveNeeds,
    ) -> Result<LossGradients> {
        if !need.dh && !need.dw {
            return Ok(LossGradients::default());
        }
        let options = cross_entropy::CrossEntropyOptions {
            smoothing: 0.0,
            softcap: self.softcap,
            chunk: self.chunk(h, need.dw)?,
            scale: need.scale,
            need_dh: need.dh,
            need_dw: need.dw,
            weights: Some(weights),
        };
        // The caller computes the loss.
        let unused = StepStats::new(h.device())?;
        let out = match &self.weight {
            HeadWeight::Whole(w) => cross_entropy::forward_backward(h, w.dense()?, targets, &options, &unused)?,
            HeadWeight::Streamed(head) => with_pieces(head, |pieces| {
                cross_entropy::streamed(h, pieces, targets, &options, &unused)
            })?,
        };
        Ok(LossGradients {
            dh: out.dh,
            dw: out.dw,
            objective_params: Vec::new(),
        })
    }

    /// Entropy of the next-token distribution in nats, `[N]`; 0 where the target is `IGNORE`. For metrics: costs an
    /// extra product with the head.
    ///
    /// # Errors
    /// A target outside the vocabulary (`Argument`).
    pub fn entropies(&self, h: &Tensor, targets: &[u32]) -> Result<Vec<f32>> {
        let chunk = self.chunk(h, false)?;
        match &self.weight {
            HeadWeight::Whole(w) => cross_entropy::token_entropies(h, w.dense()?, targets, self.softcap, chunk),
            HeadWeight::Streamed(head) => with_pieces(head, |pieces| {
                cross_entropy::streamed_entropies(h, pieces, targets, self.softcap, chunk)
            }),
        }
    }
}

/// Calls `f` with the pieces in the form that the loss functions expect.
pub fn with_pieces<R>(head: &StreamedHead, f: impl FnOnce(&OutputPieces) -> R) -> R {
    let piece = |first| head.piece(first);
    f(&OutputPieces {
        rows: head.rows,
        width: head.width,
        rows_of_part: head.piece_rows,
        part: &piece,
    })
}
