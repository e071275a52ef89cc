//! `grpo` and `ppo`: the model answers prompts, rewards judge the answers, and the answers become batches.
//!
//! A rollout is answered under the weights as they stand, whole, before it is learned from: `num_iterations` times, in
//! `num_mini_batches` optimizer steps each time. What it holds follows from (seed, its number, weights); a checkpoint in
//! the middle of it keeps what is left to learn from.
//!
//! Letters: A answers of a rollout, G answers to one prompt, T tokens of an answer.

use super::replay::{self, Kept, Replay};
use super::{Feed, Setting, Stage};
use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};
use crate::data::Batch;
use crate::data::prompts::Prompt;
use crate::engine::Engine;
use crate::generate::{self, Answer, Request};
use crate::model::{Head, Network};
use crate::recipe::{
    self, GrpoLoss, ImportanceLevel, Method, ModelInit, Recipe, RolloutCorrection, RolloutWeights, ScaleRewards,
};
use crate::rlhf::advantage::{self, KlControl, KlEstimator, moments};
use crate::rlhf::correction::{Correction, Mode};
use crate::rlhf::grpo::{self, Grpo};
use crate::rlhf::policy::{self, Policy};
use crate::rlhf::ppo::{self, Ppo, ValueHead};
use crate::run::prompts::{answers_of_rollout, steps, steps_of_rollout};
use crate::run::rewards::{Judged, Rewards};
use crate::run::setup::Described;
use crate::source;
use candle_core::{Device, Tensor};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

/// Prompts that an evaluation answers together.
const EVAL_ROWS: usize = 64;

struct Rollouts<'a> {
    recipe: &'a Recipe,
    model: &'a Described,
    prompts: &'a [Prompt],
    eval: &'a [Prompt],
    policy: Policy,
    rewards: Rewards,
    /// Names of their means and deviations in the metrics.
    names: Vec<(&'static str, &'static str)>,
    reference: Option<Reference>,
    kl: KlControl,
    /// The rollout that is learned from, and the windows that it has given.
    replay: Replay,
    given: u64,
    metrics: Vec<(&'static str, f64)>,
    samples: Vec<Value>,
}

/// The model at the start of the run.
enum Reference {
    /// The weights without their adapters.
    Bare,
    Copy(Box<Network>),
}

pub(super) fn open<'a>(setting: Setting<'a>) -> Result<Stage<'a>> {
    let (recipe, rlhf) = (setting.recipe, &setting.recipe.rlhf);
    let Some(questions) = setting.questions else {
        return Err(Error::new("the prompts of this stage were not read"));
    };
    let policy = Policy {
        temperature: rlhf.temperature,
    };
    let objective: Box<dyn crate::model::Objective> = match recipe.train.stage {
        recipe::Stage::Grpo => Box::new(Grpo::new(grpo_settings(recipe), policy)),
        _ => {
            let settings = ppo::Settings {
                cliprange: rlhf.ppo.cliprange,
                cliprange_value: rlhf.ppo.cliprange_value,
                vf_coef: rlhf.ppo.vf_coef,
            };
            let head = ValueHead::new(setting.model.spec.hidden, setting.device)?;
            Box::new(Ppo::new(settings, policy, head))
        }
    };
    let rewards = Rewards::open(rlhf, setting.device)?;
    let name = |r: &crate::run::rewards::Reward| {
        let base = format!("reward_{}", r.name);
        (lasting(base.clone()), lasting(format!("{base}_std")))
    };
    let kl = KlControl {
        coefficient: match recipe.train.stage {
            recipe::Stage::Ppo => rlhf.ppo.kl_coef,
            _ => rlhf.grpo.beta,
        },
        target: (recipe.train.stage == recipe::Stage::Ppo && rlhf.ppo.kl_target > 0.0)
            .then_some((rlhf.ppo.kl_target, rlhf.ppo.kl_horizon)),
    };
    let reference = match kl.coefficient > 0.0 {
        true => Some(reference(recipe, setting.model, setting.device)?),
        false => None,
    };
    Ok(Stage {
        objective,
        feed: Box::new(Rollouts {
            recipe,
            model: setting.model,
            prompts: &questions.train,
            eval: &questions.eval,
            policy,
            names: rewards.0.iter().map(name).collect(),
            rewards,
            reference,
            kl,
            replay: Replay::default(),
            given: 0,
            metrics: Vec::new(),
            samples: Vec::new(),
        }),
    })
}

/// Names of metrics live as long as the program: a few bytes for each reward of the run.
fn lasting(name: String) -> &'static str {
    Box::leak(name.into_boxed_str())
}

fn grpo_settings(recipe: &Recipe) -> grpo::Settings {
    let g = &recipe.rlhf.grpo;
    grpo::Settings {
        loss_type: match g.loss_type {
            GrpoLoss::Grpo => grpo::LossType::Grpo,
            GrpoLoss::Dapo => grpo::LossType::Dapo,
            GrpoLoss::DrGrpo => grpo::LossType::DrGrpo,
            GrpoLoss::Bnpo => grpo::LossType::Bnpo,
            GrpoLoss::Rloo => grpo::LossType::Rloo,
        },
        level: match g.importance_sampling_level {
            ImportanceLevel::Token => grpo::Level::Token,
            ImportanceLevel::Sequence => grpo::Level::Sequence,
        },
        epsilon: g.epsilon,
        epsilon_high: if g.epsilon_high > 0.0 {
            g.epsilon_high
        } else {
            g.epsilon
        },
        delta: (g.delta > 0.0).then_some(g.delta),
        beta: g.beta,
        kl_weighted: g.use_bias_correction_kl,
        max_completion_length: recipe.rlhf.max_completion_length,
    }
}

/// Does the run need a second copy of the weights, because the start can not be had by leaving adapters out?
pub fn needs_copy(recipe: &Recipe) -> bool {
    let wanted = match recipe.train.stage {
        recipe::Stage::Grpo => recipe.rlhf.grpo.beta > 0.0,
        recipe::Stage::Ppo => recipe.rlhf.ppo.kl_coef > 0.0,
        _ => false,
    };
    use recipe::LoraInit::{Default, Eva, Gaussian};
    let lora = &recipe.tune.lora;
    let starts_at_zero = matches!(lora.init_lora_weights, Default | Gaussian | Eva);
    let bare = recipe.tune.method == Method::Lora
        && starts_at_zero
        && lora.adapter.is_none()
        && lora.modules_to_save.is_empty();
    wanted && !bare
}

fn reference(recipe: &Recipe, model: &Described, device: &Device) -> Result<Reference> {
    if !needs_copy(recipe) {
        return Ok(Reference::Bare);
    }
    let dtype = recipe.model.dtype;
    let network = match recipe.model.init {
        ModelInit::Pretrained => {
            let adapter = recipe.tune.lora.adapter.as_deref();
            let adapter = adapter.filter(|_| recipe.tune.method == Method::Lora);
            model.infer(adapter.map(Path::new), Some(dtype), device)?
        }
        init => model.load(&source::Policy::dense(dtype), init, recipe.train.seed, device)?,
    };
    Ok(Reference::Copy(Box::new(network)))
}

/// What a forward pass over some answers is asked for: `f` gets hidden states `[N, D]`, head and batch.
fn over(network: &Network, batch: &Batch, f: impl FnOnce(&Tensor, &Head) -> Result<()>) -> Result<()> {
    let ctx = network.context(&batch.positions, &batch.documents, None)?;
    let h = network.hidden_states(&batch.ids, &ctx)?;
    f(&h, &network.head()?)
}

impl Rollouts<'_> {
    fn is_ppo(&self) -> bool {
        self.recipe.train.stage == recipe::Stage::Ppo
    }

    fn is_rloo(&self) -> bool {
        !self.is_ppo() && self.recipe.rlhf.grpo.loss_type == GrpoLoss::Rloo
    }

    fn coded(&self) -> bool {
        self.recipe.rlhf.rollout_weights != RolloutWeights::Exact
    }

    fn settings(&self, temperature: f64) -> generate::Settings {
        let rlhf = &self.recipe.rlhf;
        generate::Settings {
            max_new_tokens: rlhf.max_completion_length,
            temperature: temperature as f32,
            top_k: (rlhf.top_k > 0).then_some(rlhf.top_k),
            top_p: (rlhf.top_p < 1.0).then_some(rlhf.top_p as f32),
            seed: self.recipe.train.seed,
            stop_ids: self.model.tokenizer.stop_ids().to_vec(),
        }
    }

    /// The prompts of rollout number `rollout`, each once.
    fn chosen(&self, rollout: u64) -> Vec<usize> {
        let (seed, n) = (self.recipe.train.seed, self.prompts.len() as u64);
        let count = (answers_of_rollout(self.recipe) / self.recipe.rlhf.num_generations) as u64;
        let mut order: Option<(u64, Vec<usize>)> = None;
        (rollout * count..(rollout + 1) * count)
            .map(|unit| {
                let (epoch, at) = (unit / n, (unit % n) as usize);
                if !self.recipe.data.shuffle {
                    return at;
                }
                match &order {
                    Some((e, order)) if *e == epoch => order[at],
                    _ => {
                        let new = Rng::new(seed, Stream::Shuffle, &[epoch]).permutation(n as usize);
                        let first = new[at];
                        order = Some((epoch, new));
                        first
                    }
                }
            })
            .collect()
    }

    /// Texts of answers, and what the rewards say of them.
    fn judge(&mut self, prompts: &[&Prompt], answers: &[Answer]) -> Result<(Vec<String>, Vec<Vec<f64>>)> {
        let text = |answer: &Answer| {
            let stop = usize::from(answer.finished);
            self.model
                .tokenizer
                .decode(&answer.ids[..answer.ids.len() - stop], true)
        };
        let texts = answers.iter().map(text).collect::<Result<Vec<_>>>()?;
        let judged: Vec<Judged> = prompts
            .iter()
            .zip(answers)
            .zip(&texts)
            .map(|((prompt, answer), text)| Judged {
                prompt,
                text,
                tokens: answer.ids.len(),
                finished: answer.finished,
            })
            .collect();
        let scores = self.rewards.scores(&judged)?;
        Ok((texts, scores))
    }

    /// Answers, judges and prepares a rollout.
    fn roll(&mut self, rollout: u64, step: u64, engine: &Engine) -> Result<Replay> {
        let (rlhf, all) = (&self.recipe.rlhf, self.prompts);
        let group = rlhf.num_generations;
        let chosen = self.chosen(rollout);
        let prompts: Vec<&Prompt> = chosen
            .iter()
            .flat_map(|&p| std::iter::repeat_n(&all[p], group))
            .collect();
        let first = rollout * prompts.len() as u64;
        let request = |(i, p): (usize, &&Prompt)| Request {
            prompt: p.ids.clone(),
            number: first + i as u64,
        };
        let requests: Vec<Request> = prompts.iter().enumerate().map(request).collect();
        let started = Instant::now();
        let answers = generate::rollout(&engine.network, &requests, &self.settings(rlhf.temperature))?;
        let seconds = started.elapsed().as_secs_f64();
        let (texts, scores) = self.judge(&prompts, &answers)?;
        let totals = self.rewards.total(&scores);
        self.measure(&answers, &scores, &totals, seconds);
        let keep = |(p, a): (&&Prompt, &Answer)| Kept {
            ids: p.ids.iter().chain(&a.ids).copied().collect(),
            prompt: p.ids.len(),
            factor: 1.0,
            counts: 1.0,
            ..Kept::default()
        };
        let mut kept: Vec<Kept> = prompts.iter().zip(&answers).map(keep).collect();
        self.exact(&mut kept, engine)?;
        if self.coded() {
            self.correct(&mut kept, &answers);
        }
        if self.is_ppo() {
            self.ppo_advantages(&mut kept, &totals, &answers);
        } else {
            self.grpo_advantages(&mut kept, &totals, &answers);
        }
        if rlhf.sample_steps > 0 && rollout.is_multiple_of(rlhf.sample_steps as u64) {
            self.keep_samples(step, &prompts, &answers, &texts, &scores, &kept)?;
        }
        if self.on_policy() {
            // They are those of the one step that follows: the ratio is 1.
            kept.iter_mut().for_each(|k| k.old.clear());
        }
        // Mini-batches take answers of all prompts.
        if rlhf.num_mini_batches > 1 {
            let order = Rng::new(self.recipe.train.seed, Stream::Shuffle, &[rollout, 1]).permutation(kept.len());
            kept = order.into_iter().map(|i| std::mem::take(&mut kept[i])).collect();
        }
        self.weigh(&mut kept);
        Ok(Replay {
            rollout,
            kept,
            kl_coefficient: self.kl.coefficient,
        })
    }

    /// Each answer is learned from once, in the step after it was written.
    fn on_policy(&self) -> bool {
        steps_of_rollout(self.recipe) == 1
    }

    /// Log-probabilities under the exact weights and the reference, and values, where the loss needs them.
    fn exact(&self, kept: &mut [Kept], engine: &Engine) -> Result<()> {
        let network = &engine.network;
        let values = self.is_ppo().then(|| ValueHead::of(&network.own)).transpose()?;
        let old = !self.on_policy() || self.coded() || self.is_ppo() || self.is_rloo();
        for kept in kept.chunks_mut(self.recipe.train.batch_size) {
            let batch = replay::batch(&kept.iter().collect::<Vec<_>>(), false);
            let ranges = policy::answers(&batch);
            let mut put = |column: Vec<f32>, of: fn(&mut Kept) -> &mut Vec<f32>| {
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
            match &self.reference {
                Some(Reference::Bare) => network.without_adapters(|| reference(network))?,
                Some(Reference::Copy(copy)) => reference(copy)?,
                None => {}
            }
        }
        Ok(())
    }

    /// Importance ratios of answers that were sampled under other weights.
    fn correct(&mut self, kept: &mut [Kept], answers: &[Answer]) {
        let rlhf = &self.recipe.rlhf;
        let mode = match rlhf.rollout_correction {
            RolloutCorrection::None => return,
            RolloutCorrection::TokenTruncate => Mode::TokenTruncate,
            RolloutCorrection::TokenMask => Mode::TokenMask,
            RolloutCorrection::SequenceTruncate => Mode::SequenceTruncate,
            RolloutCorrection::SequenceMask => Mode::SequenceMask,
        };
        let correction = Correction {
            mode,
            min: (rlhf.rollout_clip_min > 0.0).then_some(rlhf.rollout_clip_min),
            max: Some(rlhf.rollout_clip_max),
        };
        let (mut ratios, mut apart) = (Vec::new(), Vec::new());
        for (kept, answer) in kept.iter_mut().zip(answers) {
            kept.ratios = correction.ratios(&kept.old, &answer.log_probs);
            ratios.extend(kept.ratios.iter().map(|r| *r as f64));
            let both = kept.old.iter().zip(&answer.log_probs);
            apart.extend(both.map(|(e, s)| (*e as f64 - *s as f64).abs()));
        }
        self.metrics.push(("rollout_ratio", moments(&ratios).0));
        self.metrics.push(("rollout_log_prob_difference", moments(&apart).0));
    }

    fn grpo_advantages(&mut self, kept: &mut [Kept], totals: &[f64], answers: &[Answer]) {
        let grpo = &self.recipe.rlhf.grpo;
        let group = self.recipe.rlhf.num_generations;
        let advantages = if self.is_rloo() {
            let mut rewards = totals.to_vec();
            if self.reference.is_some() {
                let (mut sum, mut tokens) = (0.0, 0.0);
                for (reward, k) in rewards.iter_mut().zip(kept.iter()) {
                    let both = k.old.iter().zip(&k.reference);
                    let kl: f64 = both.map(|(o, r)| KlEstimator::K1.of(*o as f64, *r as f64)).sum();
                    *reward -= grpo.beta * kl;
                    (sum, tokens) = (sum + kl, tokens + k.tokens() as f64);
                }
                self.metrics.push(("kl", sum / tokens));
            }
            advantage::leave_one_out(&rewards, group, grpo.normalize_advantages)
        } else {
            let scale = match grpo.scale_rewards {
                ScaleRewards::Group => advantage::Scale::Group,
                ScaleRewards::Batch => advantage::Scale::Batch,
                ScaleRewards::None => advantage::Scale::None,
            };
            advantage::grouped(totals, group, scale)
        };
        self.metrics.push(("frac_reward_zero_std", advantages.zero_std));
        for ((kept, advantage), answer) in kept.iter_mut().zip(advantages.values).zip(answers) {
            kept.advantages = vec![advantage as f32];
            if grpo.mask_truncated_completions && !answer.finished {
                (kept.factor, kept.counts) = (0.0, 0.0);
            }
            if self.is_rloo() {
                kept.reference.clear();
            }
        }
    }

    fn ppo_advantages(&mut self, kept: &mut [Kept], totals: &[f64], answers: &[Answer]) {
        let ppo = &self.recipe.rlhf.ppo;
        let estimator = match ppo.kl_estimator {
            recipe::KlEstimator::K1 => KlEstimator::K1,
            recipe::KlEstimator::K3 => KlEstimator::K3,
        };
        let (mut all_kl, mut penalties) = (0.0, 0.0);
        let mut rewards: Vec<Vec<f64>> = Vec::with_capacity(kept.len());
        for ((k, total), answer) in kept.iter_mut().zip(totals).zip(answers) {
            let mut row = vec![0.0; k.tokens()];
            for (t, reference) in k.reference.iter().enumerate() {
                let (log_prob, reference) = (k.old[t] as f64, *reference as f64);
                row[t] = -self.kl.coefficient * estimator.of(log_prob, reference);
                penalties += row[t];
                all_kl += KlEstimator::K1.of(log_prob, reference);
            }
            let score = if total.is_nan() { 0.0 } else { *total };
            let open = if answer.finished { 0.0 } else { ppo.missing_eos_penalty };
            if let Some(last) = row.last_mut() {
                *last += score - open;
            }
            // Only the penalty needs it.
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
        if self.reference.is_some() {
            let n = kept.len() as f64;
            self.metrics.push(("kl", all_kl / n));
            self.metrics.push(("kl_coef", self.kl.coefficient));
            self.metrics.push(("kl_reward", penalties / n));
            self.kl.update(all_kl / n, kept.len());
        }
    }

    /// Factors that make the mean over a window's tokens one over the tokens of the whole rollout.
    fn weigh(&self, kept: &mut [Kept]) {
        let windows = self.recipe.rlhf.num_mini_batches;
        let dapo = !self.is_ppo() && self.recipe.rlhf.grpo.loss_type == GrpoLoss::Dapo;
        let count = |kept: &[Kept]| -> f64 { kept.iter().map(|k| k.counts as f64 * k.tokens() as f64).sum() };
        let all = count(kept);
        for window in kept.chunks_mut(kept.len().div_ceil(windows.max(1)).max(1)) {
            let tokens = count(window);
            if dapo && windows > 1 && all > 0.0 {
                let factor = (tokens * windows as f64 / all) as f32;
                window.iter_mut().for_each(|k| k.factor *= factor);
            }
            if tokens == 0.0 {
                // Nothing counts: a step without a gradient, but a step.
                window.iter_mut().for_each(|k| k.counts = 1.0);
            }
        }
    }

    fn measure(&mut self, answers: &[Answer], scores: &[Vec<f64>], totals: &[f64], seconds: f64) {
        let lengths: Vec<f64> = answers.iter().map(|a| a.ids.len() as f64).collect();
        let n = answers.len() as f64;
        let (reward, deviation) = moments(totals);
        let mut out = vec![("reward", reward), ("reward_std", deviation)];
        for ((mean, std), scores) in self.names.iter().zip(scores) {
            let (m, s) = moments(scores);
            out.extend([(*mean, m), (*std, s)]);
        }
        let open = answers.iter().filter(|a| !a.finished).count() as f64;
        out.extend([
            ("completion_length", lengths.iter().sum::<f64>() / n),
            (
                "completion_length_min",
                lengths.iter().copied().fold(f64::INFINITY, f64::min),
            ),
            ("completion_length_max", lengths.iter().copied().fold(0.0, f64::max)),
            ("completions_truncated", open / n),
            ("rollout_tokens_per_second", lengths.iter().sum::<f64>() / seconds),
        ]);
        self.metrics.extend(out.into_iter().filter(|(_, x)| x.is_finite()));
    }

    fn keep_samples(
        &mut self,
        step: u64,
        prompts: &[&Prompt],
        answers: &[Answer],
        texts: &[String],
        scores: &[Vec<f64>],
        kept: &[Kept],
    ) -> Result<()> {
        let count = self.recipe.rlhf.samples.min(answers.len());
        for s in 0..count {
            // Spread over the groups.
            let i = s * answers.len() / count;
            let scores = self.rewards.0.iter().zip(scores);
            let rewards: serde_json::Map<String, Value> =
                scores.map(|(r, scores)| (r.name.clone(), json!(scores[i]))).collect();
            let advantages: Vec<f64> = kept[i].advantages.iter().map(|a| *a as f64).collect();
            self.samples.push(json!({
                "step": step + 1,
                "prompt": self.model.tokenizer.decode(&prompts[i].ids, false)?,
                "completion": texts[i],
                "answer": prompts[i].answer,
                "rewards": rewards,
                "advantage": advantages.iter().sum::<f64>() / advantages.len().max(1) as f64,
                "tokens": answers[i].ids.len(),
                "finished": answers[i].finished,
            }));
        }
        Ok(())
    }
}

impl Feed for Rollouts<'_> {
    fn steps(&self) -> u64 {
        steps(self.recipe, self.prompts.len())
    }

    fn epoch_after(&self, steps: u64) -> f64 {
        let rollouts = steps.div_ceil(steps_of_rollout(self.recipe));
        let prompts = answers_of_rollout(self.recipe) / self.recipe.rlhf.num_generations;
        rollouts as f64 * prompts as f64 / self.prompts.len() as f64
    }

    fn window(&mut self, step: u64, engine: &Engine) -> Result<Vec<Batch>> {
        let all = steps_of_rollout(self.recipe);
        let (rollout, at) = (step / all, step % all);
        if self.replay.kept.is_empty() || self.replay.rollout != rollout {
            self.replay = self.roll(rollout, step, engine)?;
        }
        self.given = at + 1;
        let windows = self.recipe.rlhf.num_mini_batches;
        let size = self.replay.kept.len() / windows;
        let window = &self.replay.kept[(at as usize % windows) * size..][..size];
        let rows = window.chunks(self.recipe.train.batch_size);
        Ok(rows
            .map(|rows| replay::batch(&rows.iter().collect::<Vec<_>>(), self.is_ppo()))
            .collect())
    }

    /// Greedy answers to the prompts that are held out, and what they are worth.
    fn evaluate(&mut self, engine: &Engine) -> Result<Vec<(&'static str, f64)>> {
        let (mut all, mut lengths) = (vec![Vec::new(); self.names.len()], Vec::new());
        for (i, prompts) in self.eval.chunks(EVAL_ROWS).enumerate() {
            let request = |(j, p): (usize, &Prompt)| Request {
                prompt: p.ids.clone(),
                number: (i * EVAL_ROWS + j) as u64,
            };
            let requests: Vec<Request> = prompts.iter().enumerate().map(request).collect();
            let answers = generate::rollout(&engine.network, &requests, &self.settings(0.0))?;
            let (_, scores) = self.judge(&prompts.iter().collect::<Vec<_>>(), &answers)?;
            all.iter_mut().zip(scores).for_each(|(all, scores)| all.extend(scores));
            lengths.extend(answers.iter().map(|a| a.ids.len() as f64));
        }
        if lengths.is_empty() {
            return Ok(Vec::new());
        }
        let mut out = vec![("reward", moments(&self.rewards.total(&all)).0)];
        out.extend(
            self.names
                .iter()
                .zip(&all)
                .map(|((name, _), scores)| (*name, moments(scores).0)),
        );
        out.push(("completion_length", moments(&lengths).0));
        Ok(out.into_iter().filter(|(_, x)| x.is_finite()).collect())
    }

    fn state(&self) -> Result<Option<Vec<u8>>> {
        let mut replay = Replay {
            kl_coefficient: self.kl.coefficient,
            ..self.replay.clone()
        };
        if self.given >= steps_of_rollout(self.recipe) {
            replay.kept.clear();
        }
        Ok(Some(replay.to_bytes()))
    }

    fn restore(&mut self, state: &[u8]) -> Result<()> {
        self.replay = Replay::from_bytes(state)?;
        self.kl.coefficient = self.replay.kl_coefficient;
        Ok(())
    }

    fn metrics(&mut self) -> Vec<(&'static str, f64)> {
        std::mem::take(&mut self.metrics)
    }

    fn samples(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.samples)
    }
}
