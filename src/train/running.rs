//! A training run between two steps: saves, evaluates, shows samples, stops after a signal, explains a failure.
//! Uses the engine and the run directory; `train` defines the order of the events.

use crate::base::signal::{SignalReaction, Stop};
use crate::base::units::bytes;
use crate::base::{Error, Result, memory, progress, signal, units};
use crate::comm::Patience;
use crate::data::{Batch, Dataset};
use crate::engine::window::{self, MicroReport};
use crate::engine::{self, Engine, GradientStorage, QueuedStep};
use crate::history;
use crate::ops;
use crate::ops::step_stats::StepSums;
use crate::plan::Plan;
use crate::recipe::{self, Memory, Recipe};
use crate::report::{self, EvalMetrics, Reporter, StepMetrics};
use crate::setup::ModelDir;
use crate::setup::active_schedule::ActiveSchedule;
use crate::train::best::BestModel;
use crate::train::budget::Budget;
use crate::train::directory::RunDirectory;
use crate::train::ended::FailedStep;
use crate::train::learning::LearningWatch;
use crate::train::ranks::RunRanks;
use crate::train::samples;
use crate::train::saving::RefusedSave;
use crate::train::stage::BatchSource;
use crate::train::state::RunFingerprint;
use crate::train::step_metrics::{copies, copy_metrics, expert_metrics, perplexity, sent_metrics};
use candle_core::Device;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// The state of a training run beside the engine.
pub struct TrainingRun<'a> {
    pub recipe: &'a Recipe,
    pub run_dir: &'a Path,
    pub model: &'a ModelDir,
    pub eval: Option<&'a Dataset>,
    pub batches: Box<dyn BatchSource + 'a>,
    pub schedule: &'a ActiveSchedule,
    pub fingerprint: RunFingerprint,
    pub reporter: Reporter,
    pub plan: &'a Plan,
    pub directory: RunDirectory,
    pub budget: Option<Budget>,
    pub pace: RunPace,
    pub ranks: &'a RunRanks,
    /// On rank 0.
    pub best: BestModel,
    /// A signal ended the work on a window, and all ranks know it.
    pub stopped: bool,
}

/// Prepares a stage for a new run. What a stage computes on rank 0 alone, the others get from it.
pub fn prepare(batches: &mut dyn BatchSource, engine: &Engine, ranks: &RunRanks) -> Result<()> {
    if !ranks.several() || !batches.is_made_by_root() {
        return batches.prepare(engine);
    }
    let done = engine.by_root(|| batches.prepare(engine))?.is_some();
    let own = if done { batches.state(0)? } else { None };
    let state = ranks.from_root(own.unwrap_or_default())?;
    if !done && !state.is_empty() {
        batches.restore(&state)?;
    }
    Ok(())
}

/// The last saved step, and the duration of the last step and save.
#[derive(Debug, Clone, Copy, Default)]
pub struct RunPace {
    /// Step of the newest checkpoint.
    pub saved: u64,
    pub step: Option<Duration>,
    pub save: Option<Duration>,
    /// The last try of a save for which the disk had no room.
    pub refused: Option<RefusedSave>,
    /// When the numbers of the last step were known.
    pub read: Option<Instant>,
    /// When the curves were drawn, and how long it took.
    pub drawn: Option<(Instant, Duration)>,
    /// The user was warned of slow copies.
    pub slow_copies: bool,
    /// The user was warned of rows for evaluation that `eval_accuracy` does not contain.
    pub unanswered: bool,
    /// Other ranks take part in a save.
    pub several: bool,
}

impl RunPace {
    /// The steps that are lost if the process ends now, during step `step`.
    fn lost(&self, step: u64) -> String {
        match self.saved + 1 {
            first if first >= step => format!("step {step}"),
            first => format!("steps {first} to {step}"),
        }
    }

    fn saving(&self) -> String {
        let long = self.save.filter(|time| time.as_secs() > 0);
        long.map_or(String::new(), |time| format!(" (about {})", units::duration(time)))
    }

    /// The effect of a signal during step `step`: the step is abandoned or finished first.
    fn within(&self, step: u64, gives_up: bool) -> Stop {
        let lost = self.lost(step);
        if gives_up {
            Stop {
                what: format!("stopping: step {step} is discarded"),
                then: format!(
                    ", the state after step {} is saved now{}; Ctrl-C again stops before that and loses {lost}",
                    step - 1,
                    self.saving()
                ),
                lost: format!("{lost} lost"),
                finishes: None,
            }
        } else {
            Stop {
                what: "stopping after this step".into(),
                then: format!("; Ctrl-C again stops now and loses {lost}"),
                lost: format!("{lost} lost"),
                finishes: Some(self.step),
            }
        }
    }

    /// The effect of a signal after step `step`, while no step is running.
    fn after(&self, step: u64) -> Stop {
        // The signal may be that of a launcher, because another rank is dead: then nothing is saved.
        let what = if self.several {
            format!("stopping: if all ranks are alive, the state after step {step} will be saved")
        } else {
            format!("stopping: the state after step {step} is saved{}", self.saving())
        };
        let (then, lost) = if self.saved >= step {
            ("; Ctrl-C again stops now".into(), "nothing lost".into())
        } else {
            let lost = self.lost(step);
            (
                format!("; Ctrl-C again stops now and loses {lost}"),
                format!("{lost} lost"),
            )
        };
        Stop {
            what,
            then,
            lost,
            finishes: None,
        }
    }
}

/// Peak memory so far: of GPU tensors and CUDA graphs, or of this process on the CPU.
pub fn peak_memory(device: &Device) -> Result<u64> {
    let gpu = ops::device::memory(device)?;
    match gpu {
        Some(gpu) => Ok(gpu.peak_used + ops::graph::memory(device)?.1),
        None => Ok(memory::peak_resident()),
    }
}

/// A step whose losses may not be known yet.
pub struct UnreadStep {
    pub step: u64,
    pub epoch: f64,
    pub learning_rate: f64,
    /// Trained tokens of the run before this step.
    pub trained_before: u64,
    pub label: Option<String>,
    /// A line on the terminal too.
    pub print: bool,
    /// Metrics of the stage.
    pub more: Vec<(&'static str, f64)>,
    /// Of a step that is printed: the tokens of each expert, by layer.
    pub loads: Vec<(usize, Vec<u64>)>,
    pub started: Instant,
    /// Bytes that this rank had sent before this step (`Collective::sent`).
    pub sent_before: u64,
    pub queued: QueuedStep,
}

impl TrainingRun<'_> {
    /// The micro-batches of step `step`, counted from 0: the window of all ranks. A window that depends on more than
    /// seed and weights is made by rank 0, and the others get it as the state of the stage.
    ///
    /// Errors: those of the stage; a signal on rank 0 (`stopped` is set then).
    pub fn window(&mut self, step: u64, engine: &Engine) -> Result<Vec<Batch>> {
        let ranks = self.ranks;
        if !ranks.several() || !self.batches.is_made_by_root() {
            return self.batches.window(step, engine);
        }
        let made = engine.by_root(|| self.batches.window(step, engine));
        if ranks.is_root() {
            let window = match made.map(Option::unwrap_or_default) {
                Err(e) if signal::received().is_some() => {
                    self.stopped = true;
                    ranks.from_root(Vec::new())?;
                    return Err(e);
                }
                window => window?,
            };
            ranks.from_root([vec![1], self.batches.state(step)?.unwrap_or_default()].concat())?;
            return Ok(window);
        }
        made?;
        let state = ranks.from_root(Vec::new())?;
        match state.split_first() {
            Some((_, state)) => {
                self.batches.restore(state)?;
                // They were for rank 0.
                self.batches.metrics();
                self.batches.samples();
                self.batches.window(step, engine)
            }
            None => {
                self.stopped = true;
                Err(Error::new("a signal ended the work of rank 0"))
            }
        }
    }

    /// Waits for the numbers of a step, and writes its line of metrics.
    ///
    /// Errors: a loss or a gradient was not finite; see `failed`.
    pub fn log_step(&mut self, engine: &mut Engine, unread: UnreadStep, watch: &mut LearningWatch) -> Result<()> {
        let (step, before) = (unread.step, unread.trained_before);
        let report = match engine.finish(&unread.queued) {
            Ok(report) => report,
            Err(e) => {
                let of_all_ranks = engine.is_of_all_ranks(&e);
                let place = FailedStep::InThePass { of_all_ranks };
                return Err(self.failed(engine, step, before, e, place));
            }
        };
        // A step that was queued during the one before begins when that one ends.
        let started = self.pace.read.map_or(unread.started, |read| read.max(unread.started));
        let now = Instant::now();
        let elapsed = now.duration_since(started);
        (self.pace.read, self.pace.step) = (Some(now), Some(elapsed));
        let trained_tokens = before + report.totals.trained;
        let copied = copies(engine)?;
        if copied.refused > 0 && !std::mem::replace(&mut self.pace.slow_copies, true) {
            self.reporter.warn(&format!(
                "the system refuses to page-lock {} of host memory: weights are copied to the GPU more slowly, and not \
                 during computation; raise the limit of locked memory (`ulimit -l`)",
                bytes(copied.refused)
            ));
        }
        let peak = self.ranks.most(peak_memory(&engine.network.device)?, Patience::Step)?;
        // After an agreement all operations of the step have ended.
        let sent = self.ranks.0.sent().saturating_sub(unread.sent_before);
        let sent = self.ranks.most(sent, Patience::Step)?;
        let metrics = StepMetrics {
            step,
            epoch: unread.epoch,
            loss: report.totals.loss(),
            learning_rate: unread.learning_rate,
            grad_norm: report.grad_norm,
            tokens_per_second: report.totals.tokens as f64 / elapsed.as_secs_f64(),
            trained_tokens,
            peak_memory_bytes: peak,
            active_block: unread.label,
            more: [
                unread.more,
                copy_metrics(&copied),
                expert_metrics(engine.store.expert_reads().unwrap_or_default()),
                sent_metrics(sent),
            ]
            .concat(),
        };
        if unread.print && !unread.loads.is_empty() {
            let layers = (unread.loads.iter()).map(|(layer, tokens)| (layer.to_string(), json!(tokens)));
            let layers: Map<String, Value> = layers.collect();
            let event = json!({"step": step, "tokens_of_experts": layers});
            self.reporter.event("router_load", event);
        }
        self.reporter.step(&metrics, unread.print);
        if report.skipped {
            watch.skip();
            self.reporter.event("skip", json!({"step": step}));
        } else if let Some(warning) = watch.step(metrics.loss, metrics.learning_rate, metrics.grad_norm) {
            self.reporter.warn(&warning);
        }
        self.fingerprint.trained_tokens = trained_tokens;
        Ok(())
    }

    /// Registers the effect of a signal during step `step`.
    pub fn expect_signal(&self, step: u64, gives_up: bool) {
        signal::conduct(SignalReaction::Stop(self.pace.within(step, gives_up)));
    }

    /// Registers the effect of a signal until the step after `step` begins.
    pub fn expect_signal_after(&self, step: u64) {
        signal::conduct(SignalReaction::Stop(self.pace.after(step)));
    }

    /// Draws `curves.svg`. Within a run only as long as that takes a hundredth of its time: it reads all metrics.
    pub fn draw(&mut self, always: bool) {
        if !self.ranks.is_root() || !always && self.pace.drawn.is_some_and(|(end, time)| end.elapsed() < 100 * time) {
            return;
        }
        let begun = Instant::now();
        if let Err(e) = history::write(self.run_dir, Some(self.plan.peak_bytes)) {
            self.reporter
                .warn(&format!("the curves of the run cannot be drawn: {e}"));
        }
        self.pace.drawn = Some((Instant::now(), begun.elapsed()));
    }

    /// Evaluates after `step`. A signal ends it early; the caller then saves and stops. If it fails, the state is saved.
    ///
    /// Errors: the evaluation has no number that the recipe names as the metric of the best model.
    pub fn evaluate(&mut self, engine: &mut Engine, step: u64) -> Result<()> {
        let measured = engine.with_averages(|engine| self.measure(engine, step));
        let added = measured.and_then(|numbers| match numbers {
            Some(numbers) if !numbers.is_empty() && self.ranks.is_root() => self.best.add(step, &numbers),
            _ => Ok(()),
        });
        added.map_err(|e| self.evaluation_failed(engine, step, e))
    }

    /// The numbers of an evaluation after `step`; they are reported. `None`: a signal ended it.
    fn measure(&mut self, engine: &Engine, step: u64) -> Result<Option<Vec<(String, f64)>>> {
        let measured = engine
            .by_root(|| self.batches.evaluate(engine))
            .map(Option::unwrap_or_default);
        let Some(found) = self.ranks.unless_root_stopped(measured)? else {
            return Ok(None);
        };
        if !found.is_empty() {
            self.reporter.measured(step, &found);
        }
        let mut numbers: Vec<_> = found.iter().map(|(name, x)| (format!("eval_{name}"), *x)).collect();
        let batches = self.batches.eval()?;
        if batches.is_empty() {
            return Ok(Some(numbers));
        }
        engine.objective.metrics();
        let own = match self.evaluate_own(engine, &batches) {
            // All ranks know it.
            Ok(None) => return Ok(None),
            own => own.map(Option::unwrap_or_default),
        };
        // The batches of one rank may take much longer than those of another one.
        let Some(own) = self.ranks.unless_stopped(own, Patience::Long)? else {
            return Ok(None);
        };
        let mut totals = engine::Totals::default();
        for batch in batches.iter().filter(|b| engine.objective.weight(b) > 0) {
            totals.count(batch, engine.objective.as_ref());
        }
        for report in window::all(&*self.ranks.0, own)? {
            totals.loss_sum += report.sums.loss;
            totals.correct += report.sums.correct as u64;
            report.put_back(engine.objective.as_ref());
        }
        let accuracy = match self.eval {
            Some(eval) if self.recipe.train.predict_with_generate => engine
                .by_root(|| samples::accuracy(self.recipe, self.model, engine, eval))
                .map(Option::unwrap_or_default),
            _ => Ok(samples::AnswerAccuracy::default()),
        };
        let Some(accuracy) = self.ranks.unless_root_stopped(accuracy)? else {
            return Ok(None);
        };
        if let Some(warning) = &accuracy.warning
            && !std::mem::replace(&mut self.pace.unanswered, true)
        {
            self.reporter.warn(warning);
        }
        let metrics = EvalMetrics {
            step,
            eval_loss: totals.loss(),
            eval_perplexity: perplexity(&self.recipe.train, totals.loss()),
            eval_tokens: totals.trained,
            eval_accuracy: accuracy.exact,
            more: engine.objective.metrics(),
        };
        self.reporter.eval(&metrics);
        numbers.extend(metrics.numbers());
        Ok(Some(numbers))
    }

    /// True if the evaluations up to `step` did not get better for as long as the recipe allows.
    pub fn ends_early(&mut self, step: u64) -> Result<bool> {
        let over = self.ranks.of_root(self.best.is_over())?;
        if over {
            self.reporter.note(&format!(
                "stopped early after step {step}: {} evaluations without a better value; the best: {}",
                self.recipe.train.early_stopping_patience,
                self.best.describe()
            ));
        }
        Ok(over)
    }

    /// Evaluates the batches of this rank, round by round as those of a step; `None` on all ranks: a signal ended it.
    fn evaluate_own(&self, engine: &Engine, batches: &[Batch]) -> Result<Option<Vec<MicroReport>>> {
        let objective = engine.objective.as_ref();
        let filled = batches.iter().enumerate().filter(|(_, b)| objective.weight(b) > 0);
        let filled: Vec<usize> = filled.map(|(index, _)| index).collect();
        let rounds = window::rounds(&filled, &engine.team());
        let phase = progress::phase("evaluating", rounds.len(), "batches");
        let mut reports = Vec::new();
        // If layers are collected or batches are shared, all ranks compute the same number of batches.
        let together = engine.store.sharded().is_some() || engine.sequence.ranks > 1;
        for (index, round) in rounds.into_iter().enumerate() {
            if self.ranks.stops_before(index, together)? {
                return Ok(None);
            }
            if !together && !round.counts {
                continue;
            }
            let totals = engine.evaluate(&batches[round.micro])?;
            if !round.counts {
                window::take_means(objective);
                continue;
            }
            reports.push(MicroReport {
                micro: round.micro as u64,
                sums: StepSums {
                    loss: totals.loss_sum,
                    correct: totals.correct as f64,
                    squares: 0.0,
                },
                means: window::take_means(objective),
                routers: Vec::new(),
            });
            phase.add(1);
        }
        Ok(Some(reports))
    }

    /// Evaluates after `step` unless `metrics.jsonl` has the result already: a run may have been stopped between a save
    /// and the evaluation of the same step. False if it has.
    ///
    /// Errors: as `stop_if_asked`.
    pub fn evaluate_if_missing(&mut self, engine: &mut Engine, step: u64) -> Result<bool> {
        // The last line that `evaluate` writes.
        let last = if self.batches.eval()?.is_empty() {
            "eval_"
        } else {
            "eval_loss"
        };
        // Lines that wait for the disk are not in the file.
        self.reporter.sync();
        let known = self.ranks.is_root() && self.reporter.has_evaluation(step, last);
        if self.ranks.of_root(known)? {
            return Ok(false);
        }
        self.reporter.drop_evaluation(step);
        self.evaluate(engine, step)?;
        self.stop_if_asked(engine, step)?;
        Ok(true)
    }

    /// Shows answers to the sample prompts. A signal ends it early; the caller then saves and stops.
    pub fn samples(&mut self, engine: &mut Engine, step: u64, when: &str) -> Result<()> {
        let ask = |engine: &Engine| samples::answers(self.recipe, self.model, engine, self.eval);
        // An error that leaves `with_averages` ends the run; a signal does not.
        let answers = engine.with_averages(|engine| {
            let asked = engine.by_root(|| ask(engine)).map(Option::unwrap_or_default);
            self.ranks.unless_root_stopped(asked)
        });
        let Some(answers) = answers.map_err(|e| self.evaluation_failed(engine, step, e))? else {
            return Ok(());
        };
        for one in answers {
            self.reporter
                .note(&format!("{when}: {}\n        -> {}", one.prompt, one.answer));
            if !self.reporter.has_sample(step, when, &one.prompt) {
                self.reporter.sample(&json!({
                    "step": step, "when": when, "prompt": one.prompt, "completion": one.answer,
                    "reference": one.reference,
                }));
            }
        }
        Ok(())
    }

    /// Errors: a signal was received; the state after `step` is saved then.
    pub fn stop_if_asked(&mut self, engine: &Engine, step: u64) -> Result<()> {
        let Some(signal) = self.ranks.signal()? else {
            return Ok(());
        };
        // A saved state is saved again only if the stage has new state.
        let saved = self.run_dir.join(format!("checkpoint-{step}/manifest.json")).exists();
        let due = !saved || self.pace.saved != step || self.batches.state(step)?.is_some();
        if self.ranks.of_root(due)? {
            self.save_here(engine, step)?;
        }
        self.ranks.meet()?;
        self.reporter
            .event("stop", json!({"step": step, "reason": "signal", "signal": signal}));
        self.reporter.finish();
        Err(Error::signal(
            signal,
            format!("stopped by a signal; the state after step {step} is saved"),
        )
        .at_path(self.run_dir)
        .hint("continue with `--resume`"))
    }

    /// Errors: the process exceeded the memory budget of the recipe; the state after `step` is saved first.
    pub fn stop_above_budget(&mut self, engine: &Engine, step: u64) -> Result<()> {
        let Some(budget) = self.budget else { return Ok(()) };
        // Of the ranks that need too much, the one that needs most.
        let peak = self
            .ranks
            .most(budget.excessive(memory::peak_resident()), Patience::Step)?;
        if peak == 0 {
            return Ok(());
        }
        self.save(engine, step)?;
        self.reporter.note(&self.plan.table());
        self.reporter.event(
            "stop",
            json!({"step": step, "reason": "memory budget", "peak_memory_bytes": peak}),
        );
        self.reporter.finish();
        Err(Error::new("the run used more memory than its budget")
            .at(Memory::budget)
            .found(format!(
                "a measured peak of {} in step {step}, {} forecast",
                bytes(peak),
                bytes(self.plan.peak_bytes)
            ))
            .expected(format!(
                "at most {}, the budget of {} plus 10 %",
                bytes(budget.most()),
                bytes(budget.bytes)
            ))
            .hint(format!(
                "the state after step {step} is saved: go on with `--resume memory.budget={}MiB`, or remove the budget",
                peak.div_ceil(1 << 20)
            )))
    }

    /// Handles a failed step. Before its pass, if gradients are kept, or if none was applied yet, the weights are still those of
    /// the step before, which are saved.
    pub fn failed(&mut self, engine: &Engine, step: u64, trained_tokens: u64, e: Error, place: FailedStep) -> Error {
        self.fingerprint.trained_tokens = trained_tokens;
        let of_all = place == FailedStep::InThePass { of_all_ranks: true };
        let kept = engine.strategy.gradients == GradientStorage::Keep || !engine.optimizer.has_updated(step);
        let kept = kept && !self.schedule.corrects_at_once();
        // Of several ranks the others may be in the pass already.
        let whole = kept || place == FailedStep::BeforeThePass && !self.ranks.several();
        // After the error of one rank the others do not come to a save.
        let in_parts = engine.is_divided() || engine.store.sharded().is_some() || self.writes_parts();
        let needs_all = self.ranks.several() && in_parts;
        let together = !engine.trains_apart() && (!needs_all || of_all);
        let safe = whole && together && step > 1 && !self.schedule.switches_at(step);
        let saved = if safe && self.recipe.train.save_steps > 0 {
            self.save_here(engine, step - 1)
        } else {
            Ok(())
        };
        if let Err(save) = saved {
            let save = recipe::in_program_terms(&save.to_string());
            self.reporter
                .warn(&format!("the state before the failed step could not be saved: {save}"));
        }
        let (event, e) = self.described(engine, step, e, place);
        self.reporter.event("stop", event);
        self.reporter.finish();
        if ops::device::out_of_memory(&e) {
            self.explain_memory(engine, e)
        } else {
            e
        }
    }

    /// Explains an out-of-memory error of a GPU: the plan, the memory in use, and possible changes.
    fn explain_memory(&mut self, engine: &Engine, e: Error) -> Error {
        let table = self.plan.table_within(report::width());
        self.reporter.note(&table);
        let used = ops::device::memory(&engine.network.device)
            .ok()
            .flatten()
            .unwrap_or_default();
        Error::out_of_memory("the GPU is out of memory")
            .found(format!(
                "tensors of {} at most, {} allocated on the GPU for them, {} of {} free; forecast {}",
                bytes(used.peak_used),
                bytes(used.peak_reserved),
                bytes(used.free),
                bytes(used.total),
                bytes(self.plan.peak_bytes)
            ))
            .hint(
                "set `memory.activations = \"recompute\"`, lower `train.batch_size` or `data.max_length`, \
                 or stop other programs on the GPU",
            )
            .cause(e)
    }
}
