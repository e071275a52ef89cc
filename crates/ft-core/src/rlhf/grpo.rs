//! Clipped losses of GRPO, its variants, and RLOO: loss and gradient from the log-probabilities of completions.
//!
//! Letters: T tokens of a completion. All arithmetic is f64 on the host; a completion has a few thousand values.
//!
//! Sources: GRPO, Shao et al. 2024, arXiv 2402.03300; DAPO, Yu et al. 2025, arXiv 2503.14476; Dr. GRPO, Liu et al.
//! 2025, arXiv 2503.20783; GSPO, Zheng et al. 2025, arXiv 2507.18071; RLOO, Ahmadian et al. 2024, arXiv 2402.14740. The
//! conventions (type of mean, order of clipping) are those of TRL 1.16.

use super::advantage::KlEstimator;
use super::policy::{self, PolicyHead, columns};
use crate::base::Result;
use crate::base::means::NamedMeans;
use crate::data::Batch;
use crate::model::{Head, LossGradients, Objective, ObjectiveNeeds};
use crate::ops::step_stats::{StepStats, StepSums};
use candle_core::Tensor;
use ft_base::named;
use std::ops::Range;

named!(
    /// Normalization of the loss.
    GrpoLoss {
        /// Mean over the tokens of a completion, then over completions.
        Grpo = "grpo",
        /// Mean over all tokens of the rollout.
        Dapo = "dapo",
        /// Mean over completions, each divided by the maximum completion length.
        DrGrpo = "dr_grpo",
        /// Mean over all tokens of the window.
        Bnpo = "bnpo",
        /// Mean over completions, with one ratio per completion; the KL is a part of the reward.
        Rloo = "rloo",
    }
);
named!(
    /// Level of the clipped probability ratio.
    ImportanceLevel {
        /// One ratio per token.
        Token = "token",
        /// Geometric mean over the completion (GSPO).
        Sequence = "sequence",
    }
);

/// The numbers of the loss, named as in TRL.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GrpoSettings {
    /// How tokens and completions are averaged.
    pub loss_type: GrpoLoss,
    /// The level of the ratio.
    pub level: ImportanceLevel,
    /// The ratio is clipped to [1 - `epsilon`, 1 + `epsilon_high`].
    pub epsilon: f64,
    /// Distance of the upper bound from 1.
    pub epsilon_high: f64,
    /// Upper bound of the ratio on the side without clipping.
    pub delta: Option<f64>,
    /// Coefficient of the KL term in the loss.
    pub beta: f64,
    /// Multiplies the KL term by the ratio as an importance weight.
    pub kl_weighted: bool,
    /// Maximum completion length in tokens, for `DrGrpo`.
    pub max_completion_length: usize,
}

/// The defaults of TRL, but for `max_completion_length`, which is 512 there.
impl Default for GrpoSettings {
    fn default() -> Self {
        Self {
            loss_type: GrpoLoss::Dapo,
            level: ImportanceLevel::Token,
            epsilon: 0.2,
            epsilon_high: 0.2,
            delta: None,
            beta: 0.0,
            kl_weighted: true,
            max_completion_length: 256,
        }
    }
}

/// Inputs of one completion, each `[T]`.
#[derive(Debug, Clone, Copy)]
pub struct GrpoCompletion<'a> {
    /// With the current weights.
    pub log_probs: &'a [f32],
    /// With the weights of the rollout; `None`: equal to the current ones.
    pub old: Option<&'a [f32]>,
    /// With the weights of the reference, if the KL term is used.
    pub reference: Option<&'a [f32]>,
    /// Importance ratios for rollouts sampled with other weights.
    pub ratios: Option<&'a [f32]>,
    /// The advantage of the completion.
    pub advantage: f64,
}

/// Contribution of one completion to the loss of a window, before the division by the window's weight.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CompletionLoss {
    /// The loss.
    pub loss: f64,
    /// `[T]`: gradient with respect to the log-probabilities.
    pub gradient: Vec<f64>,
    /// Sum over tokens of the KL to the reference.
    pub kl: f64,
    /// Number of ratios.
    pub ratios: f64,
    /// Number of ratios clipped at the lower bound.
    pub clipped_low: f64,
    /// Number of ratios clipped at the upper bound.
    pub clipped_high: f64,
}

impl GrpoSettings {
    /// Contribution of a completion of `tokens` tokens to the divisor of the window's loss.
    pub fn weight(&self, tokens: usize) -> usize {
        match self.loss_type {
            GrpoLoss::Dapo | GrpoLoss::Bnpo => tokens,
            GrpoLoss::Grpo | GrpoLoss::DrGrpo | GrpoLoss::Rloo => 1,
        }
    }

    /// The contribution of this completion.
    pub fn part(&self, c: &GrpoCompletion) -> CompletionLoss {
        let tokens = c.log_probs.len();
        if tokens == 0 {
            return CompletionLoss::default();
        }
        let at = |values: Option<&[f32]>, t: usize, other: f64| values.map_or(other, |v| v[t] as f64);
        let log_prob = |t: usize| c.log_probs[t] as f64;
        let log_ratio = |t: usize| log_prob(t) - at(c.old, t, log_prob(t));
        let per_token = match self.loss_type {
            GrpoLoss::Grpo => 1.0 / tokens as f64,
            GrpoLoss::DrGrpo => 1.0 / self.max_completion_length.max(1) as f64,
            GrpoLoss::Dapo | GrpoLoss::Bnpo | GrpoLoss::Rloo => 1.0,
        };
        let whole: f64 = (0..tokens).map(log_ratio).sum();
        let mut part = CompletionLoss {
            gradient: vec![0.0; tokens],
            ..CompletionLoss::default()
        };
        if self.loss_type == GrpoLoss::Rloo {
            // One ratio, one loss, one correction for the whole completion: token-level corrections are averaged.
            let surrogate = self.surrogate(whole.exp(), c.advantage);
            let factor = (0..tokens).map(|t| at(c.ratios, t, 1.0)).sum::<f64>() / tokens as f64;
            part.loss = factor * surrogate.loss;
            part.gradient.fill(factor * surrogate.slope);
            (part.ratios, part.clipped_low, part.clipped_high) = (1.0, surrogate.low, surrogate.high);
            return part;
        }
        // Derivative with respect to the completion's ratio, summed over its tokens: each token contributes 1/T of it.
        let mut shared = 0.0;
        for t in 0..tokens {
            let log_weight = match self.level {
                ImportanceLevel::Token => log_ratio(t),
                ImportanceLevel::Sequence => whole / tokens as f64,
            };
            let ratio = log_weight.exp();
            let surrogate = self.surrogate(ratio, c.advantage);
            let factor = per_token * at(c.ratios, t, 1.0);
            part.loss += factor * surrogate.loss;
            // A sequence-level ratio counts once per completion.
            let of_ratio = if self.level == ImportanceLevel::Token {
                1.0
            } else {
                1.0 / tokens as f64
            };
            part.ratios += of_ratio;
            part.clipped_low += of_ratio * surrogate.low;
            part.clipped_high += of_ratio * surrogate.high;
            let mut slope = factor * surrogate.slope;
            if let Some(reference) = c.reference {
                let reference = reference[t] as f64;
                let kl = KlEstimator::K3.of(log_prob(t), reference);
                let kl_slope = 1.0 - (reference - log_prob(t)).exp();
                let (weight, weight_slope) = if self.kl_weighted { (ratio, ratio) } else { (1.0, 0.0) };
                part.kl += kl * weight;
                part.loss += per_token * self.beta * kl * weight;
                part.gradient[t] += per_token * self.beta * kl_slope * weight;
                slope += per_token * self.beta * kl * weight_slope;
            }
            match self.level {
                ImportanceLevel::Token => part.gradient[t] += slope,
                ImportanceLevel::Sequence => shared += slope,
            }
        }
        part.gradient.iter_mut().for_each(|g| *g += shared / tokens as f64);
        part
    }

    /// The clipped surrogate loss of one ratio.
    fn surrogate(&self, ratio: f64, advantage: f64) -> Surrogate {
        let open = self.delta.map_or(ratio, |delta| ratio.min(delta));
        let clipped = ratio.clamp(1.0 - self.epsilon, 1.0 + self.epsilon_high);
        let (first, second) = (open * advantage, clipped * advantage);
        // If both are equal, the ratio is inside the bounds: both have the same derivative.
        let smaller = if first <= second { open } else { clipped };
        let slope = if smaller == ratio { ratio } else { 0.0 };
        Surrogate {
            loss: -first.min(second),
            slope: -advantage * slope,
            low: f64::from(open < 1.0 - self.epsilon && advantage < 0.0),
            high: f64::from(open > 1.0 + self.epsilon_high && advantage > 0.0),
        }
    }
}

struct Surrogate {
    loss: f64,
    /// Derivative with respect to the logarithm of the ratio.
    slope: f64,
    low: f64,
    high: f64,
}

/// The objective of the stage `grpo`. A document of a batch is a prompt and an answer (the targets).
pub struct Grpo {
    /// The numbers of the loss.
    pub settings: GrpoSettings,
    /// Computes log-probabilities from hidden states.
    pub policy: PolicyHead,
    means: NamedMeans,
}

impl Grpo {
    /// The objective with these settings.
    pub fn new(settings: GrpoSettings, policy: PolicyHead) -> Self {
        Self {
            settings,
            policy,
            means: NamedMeans::default(),
        }
    }
}

impl Objective for Grpo {
    fn weight(&self, batch: &Batch) -> usize {
        let answers = policy::answers(batch);
        let weight = |(d, answer): (usize, &Range<usize>)| match policy::of_document(batch, columns::COUNTS, d, 1.0) {
            0.0 if self.settings.weight(2) == 2 => 0,
            _ => self.settings.weight(answer.len()),
        };
        answers.iter().enumerate().map(weight).sum()
    }

    fn evaluate(
        &self,
        h: &Tensor,
        head: &Head,
        batch: &Batch,
        need: ObjectiveNeeds,
        step_stats: &StepStats,
    ) -> Result<LossGradients> {
        let log_probs = self.policy.log_probs(h, head, &batch.targets)?;
        let mut slopes = vec![0f32; batch.len()];
        let mut loss = 0.0;
        let entropies = self.policy.entropies(h, head, &batch.targets)?;
        for (d, answer) in policy::answers(batch).iter().enumerate() {
            let column = |name| policy::part(batch, name, answer);
            let part = self.settings.part(&GrpoCompletion {
                log_probs: &log_probs[answer.clone()],
                old: column(columns::OLD),
                reference: column(columns::REFERENCE),
                ratios: column(columns::RATIOS),
                advantage: policy::of_document(batch, columns::ADVANTAGES, d, 0.0) as f64,
            });
            let factor = policy::of_document(batch, columns::FACTOR, d, 1.0) as f64;
            loss += factor * part.loss;
            for (slope, gradient) in slopes[answer.clone()].iter_mut().zip(&part.gradient) {
                *slope = (factor * gradient) as f32;
            }
            if policy::of_document(batch, columns::COUNTS, d, 1.0) == 0.0 {
                continue;
            }
            let tokens = answer.len() as f64;
            if column(columns::REFERENCE).is_some() {
                self.means.add("kl", part.kl, tokens);
            }
            self.means.add("clip_ratio_low", part.clipped_low, part.ratios);
            self.means.add("clip_ratio_high", part.clipped_high, part.ratios);
            let entropy = entropies[answer.clone()].iter().map(|e| *e as f64).sum();
            self.means.add("entropy", entropy, tokens);
        }
        step_stats.add(StepSums {
            loss,
            ..StepSums::default()
        });
        self.policy.gradients(h, head, &batch.targets, &slopes, need)
    }

    fn means(&self) -> Option<&NamedMeans> {
        Some(&self.means)
    }

    fn metrics(&self) -> Vec<(&'static str, f64)> {
        self.means.take()
    }
}

#[cfg(test)]
mod tests;
