//! Checks if a run can learn: before the first step from recipe, schedule and rows, during the run from its losses.
//! Works on numbers only.

use crate::base::units::{self, count};
use crate::base::{Error, Result};
use crate::data::order::BatchStream;
use crate::engine::TrainConfig;
use crate::optim::Schedule;
use crate::recipe::{OptimizerKeys, Recipe, Stage};
use crate::setup::active_schedule::ActiveSchedule;
use crate::setup::prompts;
use std::collections::VecDeque;

/// A run with fewer steps gets a warning.
const FEW_STEPS: u64 = 10;
/// Number of steps in which a rate above 0 is searched; a warmup step with rate 0 is followed by one above 0.
const SEARCHED: u64 = 10_000;
/// A learning rate below this changes no weight in f32.
const TINY_RATE: f64 = 1e-10;

/// Learning rate of optimizer step `step`, counted from 1. As in transformers the schedule does not go on in the steps that
/// were skipped before.
pub fn rate(recipe: &Recipe, lr_schedule: &Schedule, schedule: &ActiveSchedule, step: u64, skipped: u64) -> f64 {
    recipe.optimizer.learning_rate * lr_schedule.multiplier(step - skipped) * schedule.warmup(step)
}

/// A learning rate that grows by the same factor in every step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RateSweep {
    /// The rate of the first step.
    pub from: f64,
    /// The rate of the last step.
    pub to: f64,
    /// Number of steps.
    pub steps: u64,
}

impl RateSweep {
    /// The rate of a step, counted from 1.
    pub fn rate(&self, step: u64) -> f64 {
        let part = (step - 1) as f64 / (self.steps - 1).max(1) as f64;
        self.from * (self.to / self.from).powf(part)
    }
}

/// The settings of a step that the recipe has.
pub fn train_config(recipe: &Recipe) -> TrainConfig {
    let train = &recipe.train;
    let scaled = recipe.model.dtype.needs_loss_scale();
    TrainConfig {
        max_grad_norm: train.max_grad_norm,
        seed: train.seed,
        neftune_noise_alpha: train.neftune_noise_alpha,
        router_losses: train.router_losses(),
        ema: train.ema(),
        loss_scale: scaled.then(|| train.scale_config()),
        ..TrainConfig::default()
    }
}

/// True if the rate is above 0 in f32, the type in which weights are updated.
fn learns(rate: f64) -> bool {
    rate as f32 > 0.0
}

/// Errors: the run has steps, but none with a learning rate above 0.
pub fn check(recipe: &Recipe, schedule: &ActiveSchedule, steps: u64) -> Result<()> {
    let lr_schedule = Schedule::new(&recipe.schedule, steps);
    let mut rates = (1..=steps.min(SEARCHED)).map(|step| rate(recipe, &lr_schedule, schedule, step, 0));
    if steps == 0 || rates.any(learns) {
        return Ok(());
    }
    let set = recipe.optimizer.learning_rate;
    if !learns(set) {
        return Err(Error::usage("the learning rate is 0: the run would train nothing")
            .at(OptimizerKeys::learning_rate)
            .found(units::rate(set))
            .hint("remove the key to get the default, or set `train.max_steps = 0` to save the model as it is"));
    }
    Err(
        Error::usage("no step of the run has a learning rate above 0: it would train nothing")
            .at("schedule")
            .found(format!(
                "{}, {} of warmup; warmup begins at 0",
                plural(steps),
                plural(lr_schedule.warmup())
            ))
            .hint("set `schedule.warmup_steps = 0`, or more steps with `train.num_epochs` or `train.max_steps`"),
    )
}

/// `1 step`, `1,200 steps`.
fn plural(steps: u64) -> String {
    format!("{} step{}", count(steps), if steps == 1 { "" } else { "s" })
}

/// How often the run sees each row, as text; `None` for RL stages.
pub fn seen(recipe: &Recipe, stream: &BatchStream) -> Option<String> {
    if prompts::reinforces(recipe) || recipe.data.streaming || stream.steps() == 0 {
        return None;
    }
    let times = stream.epoch_after(stream.steps());
    let number = |x: f64| {
        if x.fract() == 0.0 || x >= 100.0 {
            format!("{x:.0}")
        } else {
            format!("{x:.1}")
        }
    };
    Some(match times {
        t if t < 0.995 => format!("{} % of the rows are used", number((100.0 * t).max(0.1))),
        t if t < 1.005 => "each row is used once".to_string(),
        t => format!("each row is used {} times", number(t)),
    })
}

/// Number of blocks that are trained, and number of all blocks; `None` if one set trains in all steps.
pub fn blocks_trained(recipe: &Recipe, schedule: &ActiveSchedule, steps: u64) -> Option<(usize, usize)> {
    let lr_schedule = Schedule::new(&recipe.schedule, steps);
    schedule.blocks_trained(steps, |step| learns(rate(recipe, &lr_schedule, schedule, step, 0)))
}

/// Warnings about settings that are allowed but rarely intended. `only_steps`: the run is made for its times; no warnings.
pub fn warnings(recipe: &Recipe, schedule: &ActiveSchedule, stream: &BatchStream, only_steps: bool) -> Vec<String> {
    let (steps, train) = (stream.steps(), &recipe.train);
    let mut all = Vec::new();
    if steps == 0 || only_steps {
        return all;
    }
    if steps < FEW_STEPS {
        let few = plural(steps);
        all.push(if train.max_steps > 0 {
            format!("the run has only {few}, because of `train.max_steps`")
        } else {
            format!(
                "the run has only {few}, which is rarely enough; raise `train.num_epochs`, or lower \
             `train.batch_size` or `train.gradient_accumulation_steps`"
            )
        });
    }
    let (step, epoch) = (stream.units_per_window(), stream.units_per_epoch());
    if !prompts::reinforces(recipe) && !recipe.data.streaming && step > epoch {
        all.push(format!(
            "one step uses rows more than once: it has {} × {} = {} rows, the data {}{}; lower `train.batch_size` or \
             `train.gradient_accumulation_steps`",
            train.batch_size,
            train.gradient_accumulation_steps,
            count(step),
            count(epoch),
            if recipe.data.packing { " packed ones" } else { "" },
        ));
    }
    if let Some((turns, blocks)) = blocks_trained(recipe, schedule, steps)
        && turns < blocks
    {
        all.push(format!(
            "only {turns} of {blocks} blocks will be trained: the run has {} and each block is active for {} \
             (`tune.block.switch_every`); train longer, or switch more often",
            plural(steps),
            plural(recipe.tune.block.switch_every.unwrap_or(1) as u64),
        ));
    }
    let warmup = Schedule::new(&recipe.schedule, steps).warmup();
    if warmup >= steps {
        all.push(format!(
            "the learning rate never reaches {}: {} of warmup in a run of {}",
            units::rate(recipe.optimizer.learning_rate),
            plural(warmup),
            plural(steps)
        ));
    }
    if recipe.optimizer.learning_rate < TINY_RATE {
        all.push(format!(
            "`optimizer.learning_rate` is {}: too small to change a weight",
            units::rate(recipe.optimizer.learning_rate)
        ));
    }
    all
}

/// Monitors the losses of a run for divergence, and checks if any step changed a weight.
pub struct LearningWatch {
    /// Step after which it begins; above 0 in a resumed run.
    start: u64,
    first: Vec<f64>,
    last: VecDeque<f64>,
    steps: u64,
    /// A loss per token above this is worse than uniform guessing.
    guessing: Option<f64>,
    comparable: bool,
    moved: bool,
    warned: bool,
    skipped: u64,
}

/// Number of losses in a mean.
const MEAN: usize = 10;

impl LearningWatch {
    /// `start`: the step from which a resumed run goes on, else 0.
    pub fn new(recipe: &Recipe, vocab: usize, start: u64) -> Self {
        let tokens = matches!(recipe.train.stage, Stage::Sft | Stage::Pretrain);
        Self {
            start,
            first: Vec::new(),
            last: VecDeque::new(),
            steps: 0,
            guessing: tokens.then(|| 1.5 * (vocab.max(2) as f64).ln()),
            // In RL stages the loss does not measure progress.
            comparable: !prompts::reinforces(recipe),
            moved: false,
            warned: false,
            skipped: 0,
        }
    }

    /// Adds a step. Returns a warning, at most once per run.
    pub fn step(&mut self, loss: f64, rate: f64, grad_norm: f64) -> Option<String> {
        self.moved |= learns(rate) && grad_norm > 0.0;
        self.steps += 1;
        if self.first.len() < MEAN {
            self.first.push(loss);
        }
        self.last.push_back(loss);
        if self.last.len() > MEAN {
            self.last.pop_front();
        }
        if self.steps >= 2 * MEAN as u64 {
            self.diverged()
        } else {
            None
        }
    }

    /// Counts a step that the loss scale skipped.
    pub fn skip(&mut self) {
        self.skipped += 1;
    }

    /// Returns the warnings at the end of a run.
    pub fn end(&mut self) -> Vec<String> {
        let mut all: Vec<String> = self.diverged().into_iter().collect();
        if self.start > 0 {
            // Steps before the resume may have changed weights.
            return all;
        }
        if self.steps == 0 && self.skipped > 0 {
            all.push(
                "no weight changed: every step was skipped, because a gradient was too large for f16 at its loss scale; \
                 train longer, or set a lower `train.loss_scale`"
                    .into(),
            );
        }
        if self.steps > 0 && !self.moved {
            all.push(
                "no weight changed: every step had a learning rate of 0 or a gradient of 0; the result equals the \
                 initial model"
                    .into(),
            );
        }
        all
    }

    fn diverged(&mut self) -> Option<String> {
        let n = (self.steps as usize / 2).clamp(1, MEAN);
        let mean = |losses: &mut dyn Iterator<Item = &f64>| losses.take(n).sum::<f64>() / n as f64;
        let first = mean(&mut self.first.iter());
        let last = mean(&mut self.last.iter().rev());
        let worse = self.steps > 1 && last > 3.0 * first + 1.0;
        let guesses = self.guessing.is_some_and(|most| last > most && last > 1.2 * first);
        // A resumed run does not have the first losses of the run, so `far` compares with guessing instead.
        let far = self.guessing.is_some_and(|most| last > 2.0 * most);
        if self.warned || !self.comparable || !(worse || guesses || far) {
            return None;
        }
        self.warned = true;
        let what = match (worse || guesses, self.guessing) {
            (false, Some(most)) => format!("worse than random guessing ({:.1})", most / 1.5),
            _ if self.start > 0 => format!("after step {} it was {first:.4}", self.start),
            _ => format!("the initial loss was {first:.4}"),
        };
        Some(format!(
            "the loss diverges: {last:.4} in the last {n} steps, {what}; lower `optimizer.learning_rate`"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;
    use crate::setup::{ModelFiles, adapters};

    fn recipe(more: &str) -> Recipe {
        let text = format!("[model]\npath = \"shape:small\"\n{more}");
        recipe::parse(&text, "r.toml", &[]).unwrap().recipe
    }

    fn schedule(recipe: &Recipe) -> ActiveSchedule {
        let spec = ModelFiles::of_recipe(recipe).unwrap().spec;
        let adapter_set = adapters::of(recipe, &spec).unwrap();
        ActiveSchedule::new(recipe, &spec, &spec.params(), &adapter_set).unwrap()
    }

    #[test]
    fn a_run_without_a_rate_is_refused() {
        let refused = |more: &str, steps| {
            let recipe = recipe(more);
            check(&recipe, &schedule(&recipe), steps).err().map(|e| e.to_string())
        };
        for name in ["constant", "linear", "cosine", "wsd"] {
            let with = |more: &str| format!("[schedule]\nname = \"{name}\"\n{more}\n");
            for (more, steps, fine) in [
                ("", 1, true),
                ("warmup_ratio = 1.0", 1, false),
                ("warmup_steps = 1", 1, false),
                ("warmup_steps = 1", 2, true),
                ("warmup_steps = 1000", 1, false),
                ("warmup_steps = 1000", 2, true),
                ("warmup_steps = 1000", 0, true),
                ("warmup_steps = 0\ndecay_ratio = 1.0", 1, true),
            ] {
                let found = refused(&with(more), steps);
                assert_eq!(found.is_none(), fine, "{name} {more} {steps}: {found:?}");
                assert!(found.is_none_or(|e| e.contains("warmup_steps = 0")));
            }
            let zero = format!("{}[optimizer]\nlearning_rate = 0\n", with(""));
            assert!(refused(&zero, 100).unwrap().contains("learning rate is 0"));
            assert!(refused(&zero.replace("= 0\n", "= 1e-60\n"), u64::MAX).is_some());
            assert!(refused(&zero, 0).is_none());
            let switching = format!("{}[tune.block]\nswitch_every = 1\nwarmup_after_switch = 9\n", with(""));
            assert!(refused(&switching, 1).is_none());
        }
    }

    /// Row S2.
    #[test]
    fn a_diverging_loss_gets_one_warning() {
        let losses = |stage: &str, losses: &[f64]| {
            let mut watch = LearningWatch::new(&recipe(&format!("[train]\nstage = \"{stage}\"\n")), 1000, 0);
            let mut warnings: Vec<String> = losses.iter().filter_map(|l| watch.step(*l, 1.0, 1.0)).collect();
            warnings.extend(watch.end());
            warnings.len()
        };
        let falling: Vec<f64> = (0..100).map(|i| 7.0 / (1.0 + i as f64)).collect();
        assert_eq!(losses("sft", &falling), 0);
        assert_eq!(losses("sft", &[6.9, 3000.0, 750_000.0]), 1);
        assert_eq!(losses("sft", &[6.9, 7.0, 6.8, 7.1]), 0);
        // A model that was good at first, and a single outlier.
        let spoiled: Vec<f64> = (0..100).map(|i| if i < 50 { 0.5 } else { 4.0 }).collect();
        assert_eq!(losses("sft", &spoiled), 1);
        let jump: Vec<f64> = (0..100).map(|i| if i == 50 { 8.0 } else { 0.5 }).collect();
        assert_eq!(losses("sft", &jump), 0);
        // Resumed after divergence.
        assert_eq!(losses("sft", &[700.0; 3]), 1);
        assert_eq!(losses("dpo", &[0.69, 9.0]), 1);
        assert_eq!(losses("dpo", &[0.69, 0.9]), 0);
    }

    #[test]
    fn a_run_that_moved_nothing_says_so() {
        for (rate, norm, moved) in [(1e-3, 1.0, true), (0.0, 1.0, false), (1e-3, 0.0, false)] {
            let mut watch = LearningWatch::new(&recipe(""), 1000, 0);
            assert!(watch.end().is_empty());
            watch.step(1.0, rate, norm);
            assert_eq!(watch.end().is_empty(), moved, "{rate} {norm}");
            // The steps before a resume may have changed weights.
            let mut resumed = LearningWatch::new(&recipe(""), 1000, 7);
            resumed.step(1.0, rate, norm);
            assert!(resumed.end().is_empty());
        }
    }
}
