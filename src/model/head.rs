//! The output projection (LM head): whole, or streamed in parts.

use super::contracts::{LossGradients, Need, Param};
use crate::base::{Error, Result};
use crate::ops::cross_entropy::{self, Pieces};
use crate::ops::linear;
use crate::ops::step_stats::StepStats;
use crate::quant::Weight;
use crate::source::{GroupWeights, LayerSource};
use candle_core::Tensor;
use std::cell::RefCell;
use std::sync::Arc;

/// The output projection, as objectives use it.
pub struct Head<'a> {
    /// Name of the matrix `[V, D]`; if tied, that of the embedding.
    pub name: Arc<str>,
    pub weight: HeadWeight<'a>,
    pub softcap: Option<f32>,
}

pub enum HeadWeight<'a> {
    /// `[V, D]`, dense.
    Whole(Weight),
    Parts(Parts<'a>),
}

/// A matrix that its source streams in parts.
pub struct Parts<'a> {
    pub source: &'a dyn LayerSource,
    pub name: Arc<str>,
    /// V, D, and the number of rows of a part.
    pub rows: usize,
    pub width: usize,
    pub rows_of_part: usize,
    /// Handle of the current part; it is kept until the next call.
    lease: RefCell<Option<Arc<GroupWeights>>>,
}

impl<'a> Parts<'a> {
    pub fn new(source: &'a dyn LayerSource, name: Arc<str>, shape: (usize, usize), rows_of_part: usize) -> Self {
        Self {
            source,
            name,
            rows: shape.0,
            width: shape.1,
            rows_of_part,
            lease: RefCell::new(None),
        }
    }

    /// Returns the part that starts at row `first`; valid until the next call.
    pub fn part(&self, first: usize) -> Result<Tensor> {
        // The source reuses this memory for the following part.
        self.lease.replace(None);
        let part = self.source.piece(&self.name, first)?;
        let tensor = part.get(&self.name)?.1;
        self.lease.replace(Some(part));
        Ok(tensor)
    }
}

impl Head<'_> {
    /// The whole matrix. Errors: it is streamed in parts.
    pub fn param(&self) -> Result<Param> {
        match &self.weight {
            HeadWeight::Whole(w) => Ok(Param {
                name: self.name.clone(),
                tensor: w.dense()?.clone(),
            }),
            HeadWeight::Parts(_) => Err(Error::unsupported(
                "the output head is read in parts: the full matrix is not in memory",
            )
            .at(&*self.name)),
        }
    }

    /// Logits `[N, V]` of hidden states `[N, D]`, before the soft cap.
    pub fn logits(&self, h: &Tensor) -> Result<Tensor> {
        match &self.weight {
            HeadWeight::Whole(w) => w.forward(h, None),
            HeadWeight::Parts(parts) => {
                let mut columns = Vec::new();
                for first in (0..parts.rows).step_by(parts.rows_of_part) {
                    columns.push(linear::forward(h, &parts.part(first)?, None)?);
                }
                Ok(Tensor::cat(&columns, 1)?.contiguous()?)
            }
        }
    }
}

/// Building blocks of other objectives: log-probabilities, then the gradient of any function of them.
impl Head<'_> {
    /// V.
    pub fn vocab(&self) -> Result<usize> {
        match &self.weight {
            HeadWeight::Whole(w) => Ok(w.dense()?.dims2()?.0),
            HeadWeight::Parts(parts) => Ok(parts.rows),
        }
    }

    /// Log-probability of each target, `[N]`; 0 where the target is `IGNORE`. `h` `[N, D]`.
    pub fn log_probs(&self, h: &Tensor, targets: &[u32]) -> Result<Vec<f32>> {
        let chunk = cross_entropy::chunk_for(self.vocab()?, false);
        match &self.weight {
            HeadWeight::Whole(w) => cross_entropy::token_log_probs(h, w.as_dense()?, targets, self.softcap, chunk),
            HeadWeight::Parts(parts) => with_pieces(parts, |pieces| {
                cross_entropy::streamed_log_probs(h, pieces, targets, self.softcap, chunk)
            }),
        }
    }

    /// The gradients of `Σ weights[n] · -log p(targets[n])`, times `need.scale`; `weights` `[N]`, of any sign.
    pub fn weighted(&self, h: &Tensor, targets: &[u32], weights: &[f32], need: Need) -> Result<LossGradients> {
        if !need.dh && !need.dw {
            return Ok(LossGradients::default());
        }
        let options = cross_entropy::Options {
            softcap: self.softcap,
            chunk: cross_entropy::chunk_for(self.vocab()?, need.dw),
            scale: need.scale,
            need_dh: need.dh,
            need_dw: need.dw,
            weights: Some(weights),
        };
        // The caller computes the loss.
        let unused = StepStats::new(h.device())?;
        let out = match &self.weight {
            HeadWeight::Whole(w) => cross_entropy::forward_backward(h, w.as_dense()?, targets, &options, &unused)?,
            HeadWeight::Parts(parts) => with_pieces(parts, |pieces| {
                cross_entropy::streamed(h, pieces, targets, &options, &unused)
            })?,
        };
        Ok(LossGradients {
            dh: out.dh,
            dw: out.dw,
            own: Vec::new(),
        })
    }

    /// Entropy of the next-token distribution in nats, `[N]`; 0 where the target is `IGNORE`. For metrics: costs an
    /// extra product with the head.
    pub fn entropies(&self, h: &Tensor, targets: &[u32]) -> Result<Vec<f32>> {
        let chunk = cross_entropy::chunk_for(self.vocab()?, false);
        match &self.weight {
            HeadWeight::Whole(w) => cross_entropy::token_entropies(h, w.dense()?, targets, self.softcap, chunk),
            HeadWeight::Parts(parts) => with_pieces(parts, |pieces| {
                cross_entropy::streamed_entropies(h, pieces, targets, self.softcap, chunk)
            }),
        }
    }
}

/// Calls `f` with the parts in the form that the loss functions expect.
pub fn with_pieces<R>(parts: &Parts, f: impl FnOnce(&Pieces) -> R) -> R {
    let part = |first| parts.part(first);
    f(&Pieces {
        rows: parts.rows,
        width: parts.width,
        rows_of_part: parts.rows_of_part,
        part: &part,
    })
}
