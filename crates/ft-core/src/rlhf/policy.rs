//! Shared code of the reinforcement learning objectives: a policy at a temperature, and the answers of a batch.
//!
//! Letters: N tokens of a batch, D hidden size, T tokens of an answer.

use crate::base::Result;
use crate::data::{Batch, IGNORE};
use crate::model::{Head, LossGradients, ObjectiveNeeds};
use candle_core::Tensor;
use std::ops::Range;

/// Names of the columns that the rollout passes to its objective.
pub mod columns {
    /// Token column: log-probabilities with the weights of the rollout.
    pub const OLD: &str = "old_log_probs";
    /// Token column: log-probabilities with the weights of the reference.
    pub const REFERENCE: &str = "reference_log_probs";
    /// Token column: importance ratios.
    pub const RATIOS: &str = "ratios";
    /// A document column for GRPO, a token column for PPO.
    pub const ADVANTAGES: &str = "advantages";
    /// Token column of PPO: the values in the rollout.
    pub const VALUES: &str = "old_values";
    /// Token column of PPO: the targets of the values.
    pub const RETURNS: &str = "returns";
    /// Document column: a factor of the answer's loss; 0 if the answer is excluded.
    pub const FACTOR: &str = "factor";
    /// Document column: 0 if the answer does not count in the divisor of the loss; else 1.
    pub const COUNTS: &str = "counts";
}

/// The next-token distribution at a temperature: logits are divided by it after the soft cap.
#[derive(Debug, Clone, Copy)]
pub struct PolicyHead {
    /// Divides the logits; positive.
    pub temperature: f64,
}

impl PolicyHead {
    /// cap tanh(x / cap) / t = c tanh((x / t) / c) with c = cap / t, so hidden states and cap are divided instead.
    fn scaled<'a>(&self, h: &Tensor, head: &Head<'a>) -> Result<(Tensor, Head<'a>)> {
        let head = Head {
            name: head.name.clone(),
            weight: head.weight.clone(),
            softcap: head.softcap.map(|cap| cap / self.temperature as f32),
        };
        Ok((h.affine(1.0 / self.temperature, 0.0)?, head))
    }

    /// Log-probability of each target, `[N]`; `h` `[N, D]`.
    ///
    /// # Errors
    /// A target outside the vocabulary (`Argument`).
    pub fn log_probs(&self, h: &Tensor, head: &Head, targets: &[u32]) -> Result<Vec<f32>> {
        if self.temperature == 1.0 {
            return head.log_probs(h, targets);
        }
        let (h, head) = self.scaled(h, head)?;
        head.log_probs(&h, targets)
    }

    /// Entropy in nats at each target, `[N]`.
    ///
    /// # Errors
    /// A target outside the vocabulary (`Argument`).
    pub fn entropies(&self, h: &Tensor, head: &Head, targets: &[u32]) -> Result<Vec<f32>> {
        if self.temperature == 1.0 {
            return head.entropies(h, targets);
        }
        let (h, head) = self.scaled(h, head)?;
        head.entropies(&h, targets)
    }

    /// As `gradients` (h `[N, D]`, targets and slopes `[N]`), for the log-probabilities at this temperature.
    ///
    /// # Errors
    /// A target outside the vocabulary (`Argument`).
    pub fn gradients(
        &self,
        h: &Tensor,
        head: &Head,
        targets: &[u32],
        slopes: &[f32],
        need: ObjectiveNeeds,
    ) -> Result<LossGradients> {
        if self.temperature == 1.0 {
            return gradients(h, head, targets, slopes, need);
        }
        let (h, head) = self.scaled(h, head)?;
        let mut out = gradients(&h, &head, targets, slopes, need)?;
        out.dh = out.dh.map(|dh| dh.affine(1.0 / self.temperature, 0.0)).transpose()?;
        Ok(out)
    }
}

/// Gradients of a loss whose derivatives with respect to the log-probabilities are `slopes` `[N]`, times `need.scale`.
/// Tokens with derivative 0 are skipped: whole groups of GRPO can have no gradient.
pub(super) fn gradients(
    h: &Tensor,
    head: &Head,
    targets: &[u32],
    slopes: &[f32],
    need: ObjectiveNeeds,
) -> Result<LossGradients> {
    // `Head::weighted` uses weights of -log p.
    let weights: Vec<f32> = slopes.iter().map(|s| -s).collect();
    let target = |(&target, &slope): (&u32, &f32)| if slope == 0.0 { IGNORE } else { target };
    let targets: Vec<u32> = targets.iter().zip(slopes).map(target).collect();
    head.weighted(h, &targets, &weights, need)
}

/// The trained positions of each document; they are consecutive, because they are one answer.
pub fn answers(batch: &Batch) -> Vec<Range<usize>> {
    let answer = |w: &[usize]| {
        let trained = |n: &usize| batch.targets[*n] != IGNORE;
        let first = (w[0]..w[1]).find(trained).unwrap_or(w[0]);
        first..first + (w[0]..w[1]).filter(trained).count()
    };
    batch.documents.windows(2).map(answer).collect()
}

/// A slice of a token column, if the batch has that column.
pub fn part<'a>(batch: &'a Batch, name: &str, range: &Range<usize>) -> Option<&'a [f32]> {
    batch.columns.tokens.get(name).map(|c| &c[range.clone()])
}

/// The value of a document; `other` if the batch has no such column.
pub fn of_document(batch: &Batch, name: &str, document: usize, other: f32) -> f32 {
    let column = batch.columns.documents.get(name);
    column.map_or(other, |c| c[document])
}
