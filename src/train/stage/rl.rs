//! Stages `grpo` and `ppo`: the model answers prompts, rewards score the answers, and the answers become batches.
//!
//! A rollout is generated in full under the current weights, then trained on `num_iterations` times, in
//! `num_mini_batches` optimizer steps each time. Its content depends on (seed, its number, weights). A checkpoint
//! within a rollout stores its answers.
//!
//! Letters: A answers of a rollout, G answers to one prompt, T tokens of an answer.

use super::advantages::{self, AdvantageComputer, ReferenceModel};
use super::rollout_buffer::{self, RolloutBuffer, Trajectory};
use super::{BatchSource, PolicyStart, Stage, StageContext, reference};
use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result, progress};
use crate::data::prompts::Prompt;
use crate::data::{Batch, Mixture, RowPosition, Source};
use crate::engine::Engine;
use crate::generate::{self, Answer, CopyFormats, GenerateLimits, QuantizedCopy, Request};
use crate::quant::Format;
use crate::recipe::{Recipe, RolloutWeights};
use crate::report;
use crate::rlhf::advantage::moments;
use crate::setup::ModelDir;
use crate::setup::prompts::{answers_of_rollout, base_is_frozen, steps_of_rollout};
use crate::setup::rewards::{RewardInput, Rewards, WeightedReward};
use crate::train::samples;
use serde_json::{Value, json};
use std::time::Instant;

/// Prompts per batch of an evaluation.
const EVAL_ROWS: usize = 64;

struct Rollouts<'a> {
    recipe: &'a Recipe,
    model: &'a ModelDir,
    prompts: &'a [Prompt],
    mixture: Option<&'a Mixture>,
    eval: &'a [Prompt],
    rewards: Rewards,
    /// Metric names of the mean and the standard deviation of each reward.
    names: Vec<(&'static str, &'static str)>,
    reference: Option<ReferenceModel>,
    advantages: AdvantageComputer<'a>,
    /// Quantized copy of the weights for sampling, if the recipe asks for one.
    quantized: Option<QuantizedCopy>,
    /// The current rollout.
    rollout_buffer: RolloutBuffer,
    metrics: Vec<(&'static str, f64)>,
    samples: Vec<Value>,
    /// The warning that answers have no score was printed.
    warned: bool,
}

pub(super) fn open<'a>(setting: StageContext<'a>, start: &PolicyStart) -> Result<Stage<'a>> {
    let (recipe, rlhf) = (setting.recipe, &setting.recipe.rl);
    let Some(questions) = setting.questions else {
        return Err(Error::internal("the prompts of this stage were not read"));
    };
    let rewards = Rewards::open(rlhf, setting.device)?;
    let name = |r: &WeightedReward| {
        let base = format!("reward_{}", r.name);
        (lasting(base.clone()), lasting(format!("{base}_std")))
    };
    let advantages = AdvantageComputer::new(recipe);
    let reference = reference::open(&setting, start)?;
    Ok(Stage {
        objective: advantages::objective(recipe, setting.model.spec.hidden, setting.device)?,
        batches: Box::new(Rollouts {
            recipe,
            model: setting.model,
            prompts: &questions.train,
            mixture: questions.mixture.as_ref(),
            eval: &questions.eval,
            names: rewards.0.iter().map(name).collect(),
            rewards,
            reference,
            advantages,
            quantized: None,
            rollout_buffer: RolloutBuffer::default(),
            metrics: Vec::new(),
            samples: Vec::new(),
            warned: false,
        }),
    })
}

/// Metric names live until the program ends: a few bytes for each reward of the run.
fn lasting(name: String) -> &'static str {
    Box::leak(name.into_boxed_str())
}

impl Rollouts<'_> {
    fn settings(&self, temperature: f64) -> generate::GenerateSettings {
        let rlhf = &self.recipe.rl;
        generate::GenerateSettings {
            max_new_tokens: rlhf.max_completion_length,
            temperature: temperature as f32,
            top_k: (rlhf.top_k > 0).then_some(rlhf.top_k),
            top_p: (rlhf.top_p < 1.0).then_some(rlhf.top_p as f32),
            seed: self.recipe.train.seed,
            stop_ids: self.model.tokenizer.stop_ids().to_vec(),
            limits: GenerateLimits::default(),
        }
    }

    /// The prompts of rollout number `rollout`, each once.
    fn chosen(&self, rollout: u64) -> Vec<usize> {
        let (seed, shuffle) = (self.recipe.train.seed, self.recipe.data.shuffle);
        let n = self.mixture.map_or(self.prompts.len(), Mixture::len) as u64;
        let count = (answers_of_rollout(self.recipe) / self.recipe.rl.num_generations) as u64;
        let mut order: Option<(u64, Vec<usize>)> = None;
        (rollout * count..(rollout + 1) * count)
            .map(|unit| {
                let (epoch, at) = (unit / n, (unit % n) as usize);
                if !shuffle && self.mixture.is_none() {
                    return at;
                }
                match &order {
                    Some((e, order)) if *e == epoch => order[at],
                    _ => {
                        let new = match self.mixture {
                            Some(mixture) => {
                                let rows = mixture.epoch(seed, epoch, shuffle);
                                rows.into_iter().map(|row| row as usize).collect()
                            }
                            None => Rng::new(seed, Stream::Shuffle, &[epoch]).permutation(n as usize),
                        };
                        let first = new[at];
                        order = Some((epoch, new));
                        first
                    }
                }
            })
            .collect()
    }

    /// Generates answers with the current weights, quantized or exact.
    fn sample(&mut self, requests: &[Request], engine: &Engine) -> Result<Vec<Answer>> {
        let settings = self.settings(self.recipe.rl.temperature);
        let format = match self.recipe.rl.rollout_weights {
            RolloutWeights::Exact => return generate::rollout(&engine.network, requests, &settings),
            RolloutWeights::Int8 => Format::Int8 { group: 0 },
            RolloutWeights::Int4 => Format::Int4 { group: 64 },
        };
        let copy = match &mut self.quantized {
            Some(copy) => {
                let same = base_is_frozen(self.recipe);
                copy.refresh(&engine.network, &|_| !same)?;
                copy
            }
            none => none.insert(QuantizedCopy::new(&engine.network, CopyFormats::of(format))?),
        };
        generate::rollout(&*copy, requests, &settings)
    }

    /// Returns the texts of the answers and their scores from each reward.
    fn judge(&mut self, prompts: &[&Prompt], answers: &[Answer]) -> Result<(Vec<String>, Vec<Vec<f64>>)> {
        let text = |answer: &Answer| {
            let stop = usize::from(answer.finished);
            self.model
                .tokenizer
                .decode(&answer.ids[..answer.ids.len() - stop], true)
        };
        let texts = answers.iter().map(text).collect::<Result<Vec<_>>>()?;
        let judged: Vec<RewardInput> = prompts
            .iter()
            .zip(answers)
            .zip(&texts)
            .map(|((prompt, answer), text)| RewardInput {
                prompt,
                text,
                tokens: answer.ids.len(),
                finished: answer.finished,
            })
            .collect();
        let phase = progress::phase("judging", judged.len(), "answers");
        let scores = self.rewards.scores(&judged)?;
        drop(phase);
        Ok((texts, scores))
    }

    /// Generates, scores and prepares a rollout.
    fn roll(&mut self, rollout: u64, step: u64, engine: &Engine) -> Result<RolloutBuffer> {
        let (rlhf, all) = (&self.recipe.rl, self.prompts);
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
        let answers = self.sample(&requests, engine)?;
        let seconds = started.elapsed().as_secs_f64();
        let (texts, scores) = self.judge(&prompts, &answers)?;
        let totals = self.rewards.total(&scores);
        self.measure(&answers, &scores, &totals, seconds);
        let keep = |(p, a): (&&Prompt, &Answer)| Trajectory {
            ids: p.ids.iter().chain(&a.ids).copied().collect(),
            prompt: p.ids.len(),
            factor: 1.0,
            counts: 1.0,
            ..Trajectory::default()
        };
        let mut kept: Vec<Trajectory> = prompts.iter().zip(&answers).map(keep).collect();
        self.advantages
            .read(&mut kept, &engine.network, self.reference.as_ref())?;
        let finished: Vec<bool> = answers.iter().map(|a| a.finished).collect();
        // Over all tokens, as those under the exact weights: top-k and top-p are no difference of the weights.
        let sampling: Vec<&[f32]> = answers.iter().map(|a| &a.full_log_probs[..]).collect();
        self.advantages.teach(&mut kept, &totals, &finished, &sampling);
        if rlhf.sample_steps > 0 && rollout.is_multiple_of(rlhf.sample_steps as u64) {
            self.keep_samples(step, &prompts, &answers, &texts, &scores, &kept)?;
        }
        if let Some(order) = self.mixed(rollout, kept.len()) {
            kept = order.into_iter().map(|i| std::mem::take(&mut kept[i])).collect();
        }
        self.advantages.weigh(&mut kept);
        Ok(RolloutBuffer {
            rollout,
            kept,
            kl_coefficient: self.advantages.kl.coefficient,
            ..RolloutBuffer::default()
        })
    }

    /// The order of the answers of a rollout in which mini-batches mix answers of all prompts, if there are several.
    fn mixed(&self, rollout: u64, answers: usize) -> Option<Vec<usize>> {
        let rng = || Rng::new(self.recipe.train.seed, Stream::Shuffle, &[rollout, 1]);
        (self.recipe.rl.num_mini_batches > 1).then(|| rng().permutation(answers))
    }

    /// The part of a rollout that step `at` of it trains on.
    fn mini_batch<'t, T>(&self, all: &'t [T], at: u64) -> &'t [T] {
        let windows = self.recipe.rl.num_mini_batches;
        let size = all.len() / windows;
        &all[(at as usize % windows) * size..][..size]
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
        let unscored = totals.iter().filter(|total| total.is_nan()).count();
        if unscored > 0 {
            out.push(("completions_unscored", unscored as f64 / n));
            self.warn_unscored(unscored, answers.len());
        }
        self.metrics.extend(out.into_iter().filter(|(_, x)| x.is_finite()));
    }

    /// Once in a run: each rollout has the number in its metrics.
    fn warn_unscored(&mut self, unscored: usize, answers: usize) {
        if std::mem::replace(&mut self.warned, true) {
            return;
        }
        let what = if self.advantages.is_ppo() {
            "they get the mean score of the others"
        } else {
            "their advantage is 0"
        };
        report::warn(&format!(
            "no reward gave a score to {unscored} of the {answers} answers of a rollout: {what} (`completions_unscored` in \
             `metrics.jsonl`)"
        ));
    }

    fn keep_samples(
        &mut self,
        step: u64,
        prompts: &[&Prompt],
        answers: &[Answer],
        texts: &[String],
        scores: &[Vec<f64>],
        kept: &[Trajectory],
    ) -> Result<()> {
        let count = self.recipe.rl.samples.min(answers.len());
        for s in 0..count {
            // Takes samples at equal distances over the groups.
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

impl BatchSource for Rollouts<'_> {
    fn epoch_after(&self, steps: u64) -> f64 {
        let rollouts = steps.div_ceil(steps_of_rollout(self.recipe));
        let prompts = answers_of_rollout(self.recipe) / self.recipe.rl.num_generations;
        rollouts as f64 * prompts as f64 / self.prompts.len() as f64
    }

    fn is_made_by_root(&self) -> bool {
        true
    }

    fn window(&mut self, step: u64, engine: &Engine) -> Result<Vec<Batch>> {
        let all = steps_of_rollout(self.recipe);
        let (rollout, at) = (step / all, step % all);
        if self.rollout_buffer.kept.is_empty() || self.rollout_buffer.rollout != rollout {
            self.rollout_buffer = self.roll(rollout, step, engine)?;
        }
        let window = self.mini_batch(&self.rollout_buffer.kept, at);
        let rows = window.chunks(self.recipe.train.batch_size);
        Ok(rows
            .map(|rows| rollout_buffer::batch(&rows.iter().collect::<Vec<_>>(), self.advantages.is_ppo()))
            .collect())
    }

    /// The rows of the prompts.
    fn rows(&self, step: u64, _: &[Source]) -> Result<Vec<Vec<RowPosition>>> {
        let all = steps_of_rollout(self.recipe);
        let (rollout, at) = (step / all, step % all);
        let chosen = self.chosen(rollout).into_iter();
        let group = self.recipe.rl.num_generations;
        let mut prompts: Vec<&Prompt> = chosen
            .flat_map(|p| std::iter::repeat_n(&self.prompts[p], group))
            .collect();
        if let Some(order) = self.mixed(rollout, prompts.len()) {
            prompts = order.into_iter().map(|i| prompts[i]).collect();
        }
        let window = self.mini_batch(&prompts, at);
        let micro_batches = window.chunks(self.recipe.train.batch_size);
        let places = |prompts: &[&Prompt]| -> Vec<RowPosition> { prompts.iter().map(|p| p.place.clone()).collect() };
        Ok(micro_batches.map(places).collect())
    }

    fn begin_answer(&self, engine: &Engine) -> Result<Option<usize>> {
        let prompts = self.eval.iter().map(|prompt| &prompt.ids);
        samples::begin_answer(&engine.network, prompts, &self.settings(0.0))
    }

    /// Answers the held-out prompts greedily and returns the mean scores.
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

    fn state(&self, steps: u64) -> Result<Option<Vec<u8>>> {
        let pending = self.metrics.iter().chain(&self.advantages.metrics);
        let mut rollout_buffer = RolloutBuffer {
            kl_coefficient: self.advantages.kl.coefficient,
            metrics: pending.map(|(name, value)| (name.to_string(), *value)).collect(),
            samples: self.samples.iter().map(Value::to_string).collect(),
            ..self.rollout_buffer.clone()
        };
        // The rollout is finished, unless the next step also trains on it.
        if rollout_buffer.rollout != steps / steps_of_rollout(self.recipe) {
            rollout_buffer.kept.clear();
            rollout_buffer.metrics.clear();
            rollout_buffer.samples.clear();
        }
        Ok(Some(rollout_buffer.to_bytes()))
    }

    fn restore(&mut self, state: &[u8]) -> Result<()> {
        let rollout_buffer = RolloutBuffer::from_bytes(state)?;
        rollout_buffer.check(self.model.spec.vocab, self.advantages.is_ppo())?;
        self.rollout_buffer = rollout_buffer;
        self.advantages.kl.coefficient = self.rollout_buffer.kl_coefficient;
        let pending = std::mem::take(&mut self.rollout_buffer.metrics).into_iter();
        self.metrics = pending.map(|(name, value)| (lasting(name), value)).collect();
        let samples = std::mem::take(&mut self.rollout_buffer.samples);
        let parsed = samples.iter().map(|line| serde_json::from_str(line));
        let broken = |e| Error::new("the samples of a rollout in the checkpoint are not valid").cause(e);
        self.samples = parsed.collect::<std::result::Result<_, _>>().map_err(broken)?;
        Ok(())
    }

    fn metrics(&mut self) -> Vec<(&'static str, f64)> {
        self.metrics.append(&mut self.advantages.metrics);
        std::mem::take(&mut self.metrics)
    }

    fn samples(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.samples)
    }
}
