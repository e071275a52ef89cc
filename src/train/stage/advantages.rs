//! Computes the inputs of the RL loss from scored answers: log-probabilities, advantages, returns, loss factors.
//!
//! Letters: N tokens of a batch, D hidden size, T tokens of an answer.

use super::rollout_buffer::{self, Trajectory};
use crate::base::{Result, progress};
use crate::data::Batch;
use crate::model::{Head, Network, Objective};
use crate::recipe::{self, GrpoLoss, Recipe, RolloutCorrection, RolloutWeights};
use crate::rlhf::advantage::{self, KlControl, KlEstimator, moments};
use crate::rlhf::correction::RatioCorrection;
use crate::rlhf::grpo::{self, Grpo};
use crate::rlhf::policy::{self, PolicyHead};
use crate::rlhf::ppo::{self, Ppo, ValueHead};
use crate::setup::prompts::steps_of_rollout;
use candle_core::{Device, Tensor};

/// The reference model: the model at the start of the run.
pub enum ReferenceModel {
    /// The current weights with adapters disabled.
    WithoutAdapters,
    /// A network with adapters of its own, or also with weights of its own.
    Copy(Box<Network>),
}

/// The objective of an RL stage; `width` is D.
pub fn objective(recipe: &Recipe, width: usize, device: &Device) -> Result<Box<dyn Objective>> {
    let policy = PolicyHead {
        temperature: recipe.rl.temperature,
    };
    if recipe.train.stage == recipe::Stage::Grpo {
        return Ok(Box::new(Grpo::new(grpo_settings(recipe), policy)));
    }
    Ok(Box::new(Ppo::new(
        ppo_settings(recipe),
        policy,
        ValueHead::new(width, device)?,
    )))
}

fn ppo_settings(recipe: &Recipe) -> ppo::PpoSettings {
    let ppo = &recipe.rl.ppo;
    ppo::PpoSettings {
        cliprange: ppo.cliprange,
        cliprange_value: ppo.cliprange_value,
        vf_coef: ppo.vf_coef,
    }
}

fn grpo_settings(recipe: &Recipe) -> grpo::GrpoSettings {
    let g = &recipe.rl.grpo;
    grpo::GrpoSettings {
        loss_type: g.loss_type,
        level: g.importance_sampling_level,
        epsilon: g.epsilon,
        epsilon_high: if g.epsilon_high > 0.0 {
            g.epsilon_high
        } else {
            g.epsilon
        },
        delta: (g.delta > 0.0).then_some(g.delta),
        beta: g.beta,
        kl_weighted: g.use_bias_correction_kl,
        max_completion_length: recipe.rl.max_completion_length,
    }
}

/// Runs a forward pass over some answers and calls `f` with the hidden states `[N, D]` and the head.
fn over(network: &Network, batch: &Batch, f: impl FnOnce(&Tensor, &Head) -> Result<()>) -> Result<()> {
    let ctx = network.context(&batch.positions, &batch.documents, None)?;
    let h = network.hidden_states(&batch.ids, &ctx)?;
    f(&h, &network.head()?)
}

/// Computes advantages from rewards, one rollout at a time.
pub struct AdvantageComputer<'a> {
    recipe: &'a Recipe,
    policy: PolicyHead,
    pub kl: KlControl,
    /// Metrics since the last read.
    pub metrics: Vec<(&'static str, f64)>,
}

impl<'a> AdvantageComputer<'a> {
    pub fn new(recipe: &'a Recipe) -> Self {
        let rlhf = &recipe.rl;
        let is_ppo = recipe.train.stage == recipe::Stage::Ppo;
        Self {
            recipe,
            policy: PolicyHead {
                temperature: rlhf.temperature,
            },
            kl: KlControl {
                coefficient: if is_ppo { rlhf.ppo.kl_coef } else { rlhf.grpo.beta },
                target: (is_ppo && rlhf.ppo.kl_target > 0.0).then_some((rlhf.ppo.kl_target, rlhf.ppo.kl_horizon)),
            },
            metrics: Vec::new(),
        }
    }

    pub fn is_ppo(&self) -> bool {
        self.recipe.train.stage == recipe::Stage::Ppo
    }

    fn is_rloo(&self) -> bool {
        !self.is_ppo() && self.recipe.rl.grpo.loss_type == GrpoLoss::Rloo
    }

    fn quantized(&self) -> bool {
        self.recipe.rl.rollout_weights != RolloutWeights::Exact
    }

    /// True if each answer is used once, in the step after its generation.
    fn on_policy(&self) -> bool {
        steps_of_rollout(self.recipe) == 1
    }

    /// Computes the log-probabilities under the exact weights and the reference, and the values, if the loss needs
    /// them.
    pub fn read(&self, kept: &mut [Trajectory], network: &Network, start: Option<&ReferenceModel>) -> Result<()> {
        let values = self
            .is_ppo()
            .then(|| ValueHead::of(&network.objective_params))
            .transpose()?;
        let old = !self.on_policy() || self.quantized() || self.is_ppo() || self.is_rloo();
        let phase = progress::phase("reading answers", kept.len(), "answers");
        for kept in kept.chunks_mut(self.recipe.train.batch_size) {
            phase.advance(kept.len() as u64)?;
            let batch = rollout_buffer::batch(&kept.iter().collect::<Vec<_>>(), false);
            let ranges = policy::answers(&batch);
            let mut put = |column: Vec<f32>, of: fn(&mut Trajectory) -> &mut Vec<f32>| {
                for (kept, range) in kept.iter_mut().zip(&ranges) {
                    *of(kept) = column[range.clone()].to_vec();
                }
            };
            if old {
                over(network, &batch, |h, head| {
                    put(self.policy.log_probs(h, head, &batch.targets)?, |k| &mut k.old);
                    if let Some(values) = &values {
                        put(values.values(h)?, |k| &mut k.values);
                    }
                    Ok(())
                })?;
            }
            let mut reference = |network: &Network| {
                over(network, &batch, |h, head| {
                    put(self.policy.log_probs(h, head, &batch.targets)?, |k| &mut k.reference);
                    Ok(())
                })
            };
            match start {
                Some(ReferenceModel::WithoutAdapters) => network.with_adapters_disabled(|| reference(network))?,
                Some(ReferenceModel::Copy(copy)) => reference(copy)?,
                None => {}
            }
        }
        Ok(())
    }

    /// Completes `kept` after `read`: importance ratios to the sampling log-probabilities `[T]` (if the sampling
    /// weights were quantized), advantages from the rewards, returns. `finished`: the answer ended with a stop token.
    pub fn teach(&mut self, kept: &mut [Trajectory], totals: &[f64], finished: &[bool], sampling: &[&[f32]]) {
        if self.quantized() {
            self.correct(kept, sampling);
        }
        if self.is_ppo() {
            self.ppo_advantages(kept, totals, finished);
        } else {
            self.grpo_advantages(kept, totals, finished);
        }
        if self.on_policy() {
            // The only step on these answers starts from the same weights, so the ratio is 1.
            kept.iter_mut().for_each(|k| k.old.clear());
        }
    }

    /// Computes importance ratios of answers that were sampled under other weights.
    fn correct(&mut self, kept: &mut [Trajectory], sampling: &[&[f32]]) {
        let rlhf = &self.recipe.rl;
        if rlhf.rollout_correction == RolloutCorrection::None {
            return;
        }
        let correction = RatioCorrection {
            mode: rlhf.rollout_correction,
            min: (rlhf.rollout_clip_min > 0.0).then_some(rlhf.rollout_clip_min),
            max: Some(rlhf.rollout_clip_max),
        };
        let (mut ratios, mut apart) = (Vec::new(), Vec::new());
        for (kept, sampling) in kept.iter_mut().zip(sampling) {
            kept.ratios = correction.ratios(&kept.old, sampling);
            ratios.extend(kept.ratios.iter().map(|r| *r as f64));
            let both = kept.old.iter().zip(*sampling);
            apart.extend(both.map(|(e, s)| (*e as f64 - *s as f64).abs()));
        }
        self.metrics.push(("rollout_ratio", moments(&ratios).0));
        self.metrics.push(("rollout_log_prob_difference", moments(&apart).0));
    }

    fn grpo_advantages(&mut self, kept: &mut [Trajectory], totals: &[f64], finished: &[bool]) {
        let grpo = &self.recipe.rl.grpo;
        let group = self.recipe.rl.num_generations;
        let advantages = if self.is_rloo() {
            let mut rewards = totals.to_vec();
            if kept.iter().any(|k| !k.reference.is_empty()) {
                let (mut sum, mut tokens) = (0.0, 0.0);
                for ((reward, k), finished) in rewards.iter_mut().zip(kept.iter()).zip(finished) {
                    if grpo.mask_truncated_completions && !finished {
                        continue;
                    }
                    let both = k.old.iter().zip(&k.reference);
                    let kl: f64 = both.map(|(o, r)| KlEstimator::K1.of(*o as f64, *r as f64)).sum();
                    *reward -= grpo.beta * kl;
                    (sum, tokens) = (sum + kl, tokens + k.tokens() as f64);
                }
                if tokens > 0.0 {
                    self.metrics.push(("kl", sum / tokens));
                }
            }
            advantage::leave_one_out(&rewards, group, grpo.normalize_advantages)
        } else {
            advantage::grouped(totals, group, grpo.scale_rewards)
        };
        self.metrics.push(("frac_reward_zero_std", advantages.zero_std));
        for ((kept, advantage), finished) in kept.iter_mut().zip(advantages.values).zip(finished) {
            kept.advantages = vec![advantage as f32];
            if grpo.mask_truncated_completions && !finished {
                (kept.factor, kept.counts) = (0.0, 0.0);
            }
            if self.is_rloo() {
                kept.reference.clear();
            }
        }
    }

    fn ppo_advantages(&mut self, kept: &mut [Trajectory], totals: &[f64], finished: &[bool]) {
        let ppo = &self.recipe.rl.ppo;
        let (mut all_kl, mut penalties) = (0.0, 0.0);
        let referred = kept.iter().any(|k| !k.reference.is_empty());
        let mut rewards: Vec<Vec<f64>> = Vec::with_capacity(kept.len());
        for ((k, score), finished) in kept.iter_mut().zip(scores_or_mean(totals)).zip(finished) {
            let mut row = vec![0.0; k.tokens()];
            for (t, reference) in k.reference.iter().enumerate() {
                let (log_prob, reference) = (k.old[t] as f64, *reference as f64);
                row[t] = -self.kl.coefficient * ppo.kl_estimator.of(log_prob, reference);
                penalties += row[t];
                all_kl += KlEstimator::K1.of(log_prob, reference);
            }
            let open = if *finished { 0.0 } else { ppo.missing_eos_penalty };
            if let Some(last) = row.last_mut() {
                *last += score - open;
            }
            // Only the KL penalty needs the reference.
            k.reference.clear();
            rewards.push(row);
        }
        if ppo.whiten_rewards {
            advantage::whiten(&mut rewards, true);
        }
        let mut advantages = Vec::with_capacity(kept.len());
        for (k, rewards) in kept.iter_mut().zip(&rewards) {
            let values: Vec<f64> = k.values.iter().map(|v| *v as f64).collect();
            let (advantage, returns) = advantage::gae(rewards, &values, ppo.gamma, ppo.lam);
            k.returns = returns.iter().map(|r| *r as f32).collect();
            advantages.push(advantage);
        }
        advantage::whiten(&mut advantages, false);
        for (k, advantage) in kept.iter_mut().zip(advantages) {
            k.advantages = advantage.iter().map(|a| *a as f32).collect();
        }
        if referred {
            let n = kept.len() as f64;
            self.metrics.push(("kl", all_kl / n));
            self.metrics.push(("kl_coef", self.kl.coefficient));
            self.metrics.push(("kl_reward", penalties / n));
            self.kl.update(all_kl / n, kept.len());
        }
    }

    /// Scales the factors so that the mean over the tokens of a window becomes one over the tokens of the whole
    /// rollout.
    pub fn weigh(&self, kept: &mut [Trajectory]) {
        let windows = self.recipe.rl.num_mini_batches;
        let dapo = !self.is_ppo() && self.recipe.rl.grpo.loss_type == GrpoLoss::Dapo;
        let count = |kept: &[Trajectory]| -> f64 { kept.iter().map(|k| k.counts as f64 * k.tokens() as f64).sum() };
        let all = count(kept);
        for window in kept.chunks_mut(kept.len().div_ceil(windows.max(1)).max(1)) {
            let tokens = count(window);
            if dapo && windows > 1 && all > 0.0 {
                let factor = (tokens * windows as f64 / all) as f32;
                window.iter_mut().for_each(|k| k.factor *= factor);
            }
            if tokens == 0.0 {
                // No answer counts: the step has a zero gradient but still takes place.
                window.iter_mut().for_each(|k| k.counts = 1.0);
            }
        }
    }
}

/// The scores of answers; those that are not known (NaN) are the mean of the others, or 0: 0 could be better than all others.
fn scores_or_mean(scores: &[f64]) -> Vec<f64> {
    let known: Vec<f64> = scores.iter().copied().filter(|score| !score.is_nan()).collect();
    let mean = known.iter().sum::<f64>() / known.len().max(1) as f64;
    let or_mean = |score: &f64| if score.is_nan() { mean } else { *score };
    scores.iter().map(or_mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_without_a_score_is_not_better_than_the_others() {
        assert_eq!(scores_or_mean(&[-3.0, f64::NAN, -1.0]), [-3.0, -2.0, -1.0]);
        assert_eq!(scores_or_mean(&[f64::NAN; 2]), [0.0; 2]);
    }

    /// A Rust user who writes `Default::default()` gets what a recipe without these keys gets.
    #[test]
    fn defaults_of_the_library_are_those_of_a_recipe() {
        let text = "[model]\npath = \"m\"\n[data]\ntrain = \"t\"\n";
        let recipe = recipe::parse(text, "r.toml", &[]).unwrap().recipe;
        assert_eq!(grpo_settings(&recipe), grpo::GrpoSettings::default());
        assert_eq!(ppo_settings(&recipe), ppo::PpoSettings::default());
    }
}
