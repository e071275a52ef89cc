//! The objective of `pretrain` and `sft`: mean cross-entropy of the next token over the trained positions.
//! Depends on hidden states and targets. Independent of layers and optimizers.

use crate::base::Result;
use crate::data::Batch;
use crate::model::head::{HeadWeight, with_pieces};
use crate::model::{Head, LossGradients, Objective, ObjectiveNeeds};
use crate::ops::cross_entropy;
use crate::ops::step_stats::StepStats;
use candle_core::Tensor;

/// Cross-entropy through the output projection; computes the logits of one chunk of tokens at a time.
pub struct CausalLm {
    vocab: usize,
    label_smoothing: f32,
}

impl CausalLm {
    /// The objective for a model with `vocab` output ids.
    pub fn new(vocab: usize) -> Self {
        Self {
            vocab,
            label_smoothing: 0.0,
        }
    }

    /// With label smoothing, as `torch.nn.CrossEntropyLoss` and `LabelSmoother` of transformers: a part `factor` of the
    /// target distribution is spread evenly over all ids. Evaluations have it too, as there.
    pub fn with_label_smoothing(self, factor: f64) -> Self {
        Self {
            label_smoothing: factor as f32,
            ..self
        }
    }
}

impl Objective for CausalLm {
    fn evaluate(
        &self,
        h: &Tensor,
        head: &Head,
        batch: &Batch,
        need: ObjectiveNeeds,
        step_stats: &StepStats,
    ) -> Result<LossGradients> {
        let options = cross_entropy::CrossEntropyOptions {
            softcap: head.softcap,
            chunk: cross_entropy::chunk_for_loss(self.vocab, head.trained_type(need.dw), h.device().is_cuda()),
            scale: need.scale,
            need_dh: need.dh,
            need_dw: need.dw,
            weights: None,
            smoothing: self.label_smoothing,
        };
        let out = match &head.weight {
            HeadWeight::Streamed(head) => with_pieces(head, |pieces| {
                cross_entropy::streamed(h, pieces, &batch.targets, &options, step_stats)
            })?,
            HeadWeight::Whole(w) => {
                cross_entropy::forward_backward(h, w.dense()?, &batch.targets, &options, step_stats)?
            }
        };
        Ok(LossGradients {
            dh: out.dh,
            dw: out.dw,
            objective_params: Vec::new(),
        })
    }
}
