//! Token-level losses of PPO: clipped policy loss, clipped value loss.
//!
//! Letters: T tokens of a completion. Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7 and 9; for language models
//! as in Ziegler et al. 2019, arXiv 1909.08593: a value head reads the value from the policy's hidden state before each
//! token.

use super::policy::{self, PolicyHead, columns};
use crate::base::means::NamedMeans;
use crate::base::{Error, Result};
use crate::data::Batch;
use crate::model::{Head, LossGradients, Objective, ObjectiveNeeds, Param, ParamGradient};
use crate::ops::step_stats::{StepStats, StepSums};
use crate::ops::update;
use candle_core::{DType, Device, Tensor};

/// The numbers of the loss, named as in TRL.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PpoSettings {
    /// The ratio is clipped to 1 ± this.
    pub cliprange: f64,
    /// Largest change of a value from that of the rollout.
    pub cliprange_value: f64,
    /// Weight of the value loss.
    pub vf_coef: f64,
}

/// The defaults of TRL.
impl Default for PpoSettings {
    fn default() -> Self {
        Self {
            cliprange: 0.2,
            cliprange_value: 0.2,
            vf_coef: 0.1,
        }
    }
}

/// Inputs of one completion, each `[T]`.
#[derive(Debug, Clone, Copy)]
pub struct PpoCompletion<'a> {
    /// With the current weights.
    pub log_probs: &'a [f32],
    /// The values of the value head.
    pub values: &'a [f32],
    /// With the weights of the rollout; `None`: equal to the current ones.
    pub old: Option<&'a [f32]>,
    /// The values in the rollout.
    pub old_values: &'a [f32],
    /// The advantages of the tokens.
    pub advantages: &'a [f32],
    /// The targets of the values.
    pub returns: &'a [f32],
    /// Importance ratios for rollouts sampled with other weights.
    pub ratios: Option<&'a [f32]>,
}

/// Sums over the tokens of one completion, before the division by the tokens of the window.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CompletionSums {
    /// The loss of the policy.
    pub policy_loss: f64,
    /// Without the factor `vf_coef`.
    pub value_loss: f64,
    /// `[T]`: gradients of `policy_loss + vf_coef value_loss`.
    pub by_log_prob: Vec<f64>,
    /// `[T]`: gradients with respect to the values.
    pub by_value: Vec<f64>,
    /// Number of tokens whose ratio is clipped.
    pub clipped: f64,
    /// Number of clipped values.
    pub clipped_values: f64,
}

impl PpoSettings {
    /// The sums of this completion.
    pub fn part(&self, c: &PpoCompletion) -> CompletionSums {
        let mut part = CompletionSums::default();
        for t in 0..c.log_probs.len() {
            let log_prob = c.log_probs[t] as f64;
            let old = c.old.map_or(log_prob, |old| old[t] as f64);
            let factor = c.ratios.map_or(1.0, |r| r[t] as f64);
            let (ratio, advantage) = ((log_prob - old).exp(), c.advantages[t] as f64);
            let clipped = ratio.clamp(1.0 - self.cliprange, 1.0 + self.cliprange);
            let (free, bound) = (-advantage * ratio, -advantage * clipped);
            let outside = bound > free;
            part.policy_loss += factor * free.max(bound);
            part.by_log_prob.push(if outside { 0.0 } else { factor * free });
            part.clipped += f64::from(outside);

            let (value, old_value, target) = (c.values[t] as f64, c.old_values[t] as f64, c.returns[t] as f64);
            let near = value.clamp(old_value - self.cliprange_value, old_value + self.cliprange_value);
            let (free, bound) = ((value - target).powi(2), (near - target).powi(2));
            let outside = bound > free;
            part.value_loss += 0.5 * free.max(bound);
            // Only a value that has changed can be outside the bounds.
            let slope = if outside { 0.0 } else { value - target };
            part.by_value.push(self.vf_coef * slope);
            part.clipped_values += f64::from(outside);
        }
        part
    }
}

/// Value head: maps each hidden state to a value with a row `[1, D]` and a bias `[1]`. Initialized to 0.
#[derive(Debug, Clone)]
pub struct ValueHead {
    /// `[1, D]`
    pub weight: Param,
    /// `[1]`
    pub bias: Param,
}

impl ValueHead {
    /// A head of zeros for hidden states of this width.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn new(width: usize, device: &Device) -> Result<Self> {
        let param = |name: &str, tensor| Param {
            name: format!("objective.value.{name}").into(),
            tensor,
        };
        Ok(Self {
            weight: param("weight", Tensor::zeros((1, width), DType::F32, device)?),
            bias: param("bias", Tensor::zeros(1, DType::F32, device)?),
        })
    }

    /// The value head among an objective's parameters.
    ///
    /// # Errors
    /// They contain none.
    pub fn of(params: &[Param]) -> Result<Self> {
        let find = |name: &str| {
            let found = params.iter().find(|p| &*p.name == name).cloned();
            found.ok_or_else(|| Error::internal("the value head is missing").at(name))
        };
        Ok(Self {
            weight: find("objective.value.weight")?,
            bias: find("objective.value.bias")?,
        })
    }

    /// Maps `h` `[N, D]` to values `[N]`.
    ///
    /// # Errors
    /// `h` has another width than the head (`Shape`).
    pub fn values(&self, h: &Tensor) -> Result<Vec<f32>> {
        let h = h.to_dtype(DType::F32)?;
        let values = h.broadcast_mul(&self.weight.tensor)?.sum(1)?;
        update::to_f32_vec(&values.broadcast_add(&self.bias.tensor)?)
    }

    /// Adds the gradients of hidden states and head to `out`, from the scaled derivatives `slopes` `[N]` of the values.
    fn backward(&self, h: &Tensor, slopes: &[f32], out: &mut LossGradients) -> Result<()> {
        let slopes = Tensor::from_slice(slopes, (slopes.len(), 1), h.device())?;
        let dw = h.to_dtype(DType::F32)?.broadcast_mul(&slopes)?.sum_keepdim(0)?;
        for (param, gradient) in [(&self.weight, dw), (&self.bias, slopes.sum(0)?)] {
            let param = param.clone();
            out.objective_params.push(ParamGradient { param, gradient });
        }
        if let Some(dh) = out.dh.take() {
            let own = slopes.broadcast_mul(&self.weight.tensor)?.to_dtype(dh.dtype())?;
            out.dh = Some((dh + own)?);
        }
        Ok(())
    }
}

/// The objective of the stage `ppo`. A document of a batch is a prompt and an answer (the targets).
pub struct Ppo {
    /// The numbers of the loss.
    pub settings: PpoSettings,
    /// Computes log-probabilities from hidden states.
    pub policy: PolicyHead,
    /// Computes values from hidden states.
    pub head: ValueHead,
    means: NamedMeans,
}

impl Ppo {
    /// The objective with these settings.
    pub fn new(settings: PpoSettings, policy: PolicyHead, head: ValueHead) -> Self {
        Self {
            settings,
            policy,
            head,
            means: NamedMeans::default(),
        }
    }
}

impl Objective for Ppo {
    fn evaluate(
        &self,
        h: &Tensor,
        head: &Head,
        batch: &Batch,
        need: ObjectiveNeeds,
        step_stats: &StepStats,
    ) -> Result<LossGradients> {
        let log_probs = self.policy.log_probs(h, head, &batch.targets)?;
        let values = self.head.values(h)?;
        let (mut by_log_prob, mut by_value) = (vec![0f32; batch.len()], vec![0f32; batch.len()]);
        let (mut policy_loss, mut value_loss, mut clipped, mut clipped_values) = (0.0, 0.0, 0.0, 0.0);
        for answer in policy::answers(batch) {
            let column = |name: &'static str| batch.columns.token(name).map(|c| &c[answer.clone()]);
            let part = self.settings.part(&PpoCompletion {
                log_probs: &log_probs[answer.clone()],
                values: &values[answer.clone()],
                old: policy::part(batch, columns::OLD, &answer),
                old_values: column(columns::VALUES)?,
                advantages: column(columns::ADVANTAGES)?,
                returns: column(columns::RETURNS)?,
                ratios: policy::part(batch, columns::RATIOS, &answer),
            });
            for (t, n) in answer.enumerate() {
                by_log_prob[n] = part.by_log_prob[t] as f32;
                by_value[n] = (part.by_value[t] * need.scale) as f32;
            }
            policy_loss += part.policy_loss;
            value_loss += part.value_loss;
            clipped += part.clipped;
            clipped_values += part.clipped_values;
        }
        step_stats.add(StepSums {
            loss: policy_loss + self.settings.vf_coef * value_loss,
            ..StepSums::default()
        });
        let tokens = batch.trained() as f64;
        self.means.add("policy_loss", policy_loss, tokens);
        self.means.add("value_loss", value_loss, tokens);
        self.means.add("clip_ratio", clipped, tokens);
        self.means.add("value_clip_ratio", clipped_values, tokens);
        let entropies = self.policy.entropies(h, head, &batch.targets)?;
        self.means
            .add("entropy", entropies.iter().map(|e| *e as f64).sum(), tokens);
        let mut out = self.policy.gradients(h, head, &batch.targets, &by_log_prob, need)?;
        self.head.backward(h, &by_value, &mut out)?;
        Ok(out)
    }

    fn params(&self) -> Vec<Param> {
        vec![self.head.weight.clone(), self.head.bias.clone()]
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
