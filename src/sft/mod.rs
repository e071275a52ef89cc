//! The objective of `pretrain` and `sft`: mean cross-entropy of the next token over the trained positions.
//! Knows hidden states and targets. Knows no layers, no optimizers.

use crate::base::Result;
use crate::data::Batch;
use crate::model::head::{HeadWeight, with_pieces};
use crate::model::{Head, LossGradients, Need, Objective};
use crate::ops::cross_entropy;
use crate::ops::tally::Tally;
use candle_core::Tensor;

/// Cross-entropy through the output projection, `chunk` tokens of logits at a time.
pub struct CausalLm {
    pub chunk: usize,
}

/// Bytes of f32 logits that exist at once.
const LOGITS_BYTES: usize = 32 << 20;

impl CausalLm {
    /// Tokens a chunk for a vocabulary of `vocab` rows.
    pub fn chunk_for(vocab: usize) -> usize {
        (LOGITS_BYTES / (4 * vocab.max(1))).clamp(16, 512)
    }

    pub fn new(vocab: usize) -> Self {
        Self {
            chunk: Self::chunk_for(vocab),
        }
    }
}

impl Objective for CausalLm {
    fn evaluate(&self, h: &Tensor, head: &Head, batch: &Batch, need: Need, tally: &Tally) -> Result<LossGradients> {
        let options = cross_entropy::Options {
            softcap: head.softcap,
            chunk: self.chunk,
            scale: need.scale,
            need_dh: need.dh,
            need_dw: need.dw,
        };
        let out = match &head.weight {
            HeadWeight::Parts(parts) => with_pieces(parts, |pieces| {
                cross_entropy::streamed(h, pieces, &batch.targets, &options, tally)
            })?,
            HeadWeight::Whole(w) if need.dh || need.dw => {
                cross_entropy::forward_backward(h, w, &batch.targets, &options, tally)?
            }
            HeadWeight::Whole(w) => {
                cross_entropy::forward_only(h, w, &batch.targets, head.softcap, self.chunk, tally)?;
                return Ok(LossGradients::default());
            }
        };
        Ok(LossGradients { dh: out.dh, dw: out.dw })
    }
}
