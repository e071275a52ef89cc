//! The optimizer steps of a run.

use super::RunContext;
use crate::base::{ErrorKind, Result, signal};
use crate::engine::{ActiveSet, Engine};
use crate::optim::Schedule;
use crate::setup::prompts;
use crate::train::ended::FailedStep;
use crate::train::learning::{self, LearningWatch};
use crate::train::profile::Profile;
use crate::train::running::{TrainingRun, UnreadStep};
use crate::train::saving::SaveReason;
use crate::train::step_metrics;
use serde_json::json;
use std::time::Instant;

/// How the steps ended.
pub(super) struct StepsEnd {
    pub last_step: u64,
    /// By `early_stopping_patience`, before the last step of the plan.
    pub early: bool,
    /// Warnings about the whole run.
    pub warnings: Vec<String>,
}

/// Runs the steps after `start_step`.
///
/// Errors: a loss or gradient that is not finite; a save that fails (on one rank a full disk is a warning); a signal after the
/// state was saved.
pub(super) fn run_steps(
    run: &mut TrainingRun,
    engine: &mut Engine,
    cx: &RunContext,
    start_step: u64,
) -> Result<StepsEnd> {
    let RunContext {
        options,
        recipe,
        total_steps,
        ..
    } = *cx;
    let (ranks, schedule) = (cx.ranks(), run.schedule);
    run.reporter.begin();
    let lr_schedule = Schedule::new(&recipe.schedule, total_steps);
    let mut active = schedule.active(start_step + 1);
    let mut watch = LearningWatch::new(recipe, cx.inputs.model.spec.vocab, start_step);
    // On a GPU the numbers of a step are read after the next one is queued. A rollout waits for the device anyway.
    // An average needs the weights of each step.
    // Several ranks wait for the sums of each step.
    let late = cx.device.is_cuda() && !ranks.several() && !prompts::reinforces(recipe) && engine.ema.is_none();
    let mut unread: Option<UnreadStep> = None;
    let mut last_step = start_step;
    let mut trained_tokens = run.fingerprint.trained_tokens;
    let mut profile = Profile::new(
        cx.run_dir,
        start_step,
        if ranks.is_root() { options.profile } else { 0 },
    );
    let mut early = start_step > 0 && start_step < total_steps && run.ends_early(start_step)?;
    for step in start_step + 1..=total_steps {
        if early {
            break;
        }
        last_step = step;
        let _span = profile.before(step, &mut run.reporter)?;
        let there = run.directory.check(&mut run.reporter);
        there.map_err(|e| run.ended(step - 1, e))?;
        if schedule.switches_at(step) || step == start_step + 1 {
            active = switch(run, engine, step)?;
        }
        let started = Instant::now();
        run.expect_signal(step, engine.can_abandon(&active));
        let window = match run.window(step - 1, engine) {
            Ok(window) => window,
            Err(e) => {
                if let Some(before) = unread.take() {
                    run.log_step(engine, before, &mut watch)?;
                }
                // A rollout takes long: a signal during it saves the state and stops.
                if !ranks.several() || run.stopped {
                    run.stop_if_asked(engine, step - 1)?;
                }
                // Rank 0 or each rank alone has made the window: the error may be that of one rank.
                return Err(run.failed(engine, step, trained_tokens, e, FailedStep::BeforeThePass));
            }
        };
        let lr = match &options.sweep {
            Some(sweep) => sweep.rate(step),
            None => learning::rate(recipe, &lr_schedule, schedule, step, engine.skipped_steps()),
        };
        let scale = engine.loss_scale;
        let sent_before = ranks.0.sent();
        let queued = engine.queue_step(step, &window, &active, lr, true, unread.as_ref().map(|u| &u.queued));
        if let Some(before) = unread.take() {
            run.log_step(engine, before, &mut watch)?;
        }
        let queued = match queued {
            Ok(queued) => queued,
            Err(e) => {
                if matches!(e.kind(), ErrorKind::Signal(_)) {
                    run.stop_if_asked(engine, step - 1)?;
                }
                let of_all_ranks = engine.is_of_all_ranks(&e);
                let place = FailedStep::InThePass { of_all_ranks };
                return Err(run.failed(engine, step, trained_tokens, e, place));
            }
        };
        run.expect_signal_after(step);
        let this = UnreadStep {
            step,
            epoch: run.batches.epoch_after(step),
            learning_rate: lr,
            trained_before: trained_tokens,
            label: schedule.label(step),
            print: step.is_multiple_of(recipe.train.logging_steps.max(1) as u64) || step == total_steps,
            loads: engine.routers.loads(),
            more: [
                engine.objective.metrics(),
                run.batches.metrics(),
                engine.routers.metrics(),
                step_metrics::scale_metrics(scale, engine),
            ]
            .concat(),
            started,
            sent_before,
            queued,
        };
        trained_tokens += this.queued.trained();
        // Before anything else looks at the state, its step is complete and found to be finite.
        let read_now = !late
            || step == total_steps
            || cx.save_due(step)
            || run.retries_save()
            || cx.eval_due(step)
            || schedule.switches_at(step + 1)
            || signal::received().is_some();
        if !read_now {
            unread = Some(this);
            continue;
        }
        run.log_step(engine, this, &mut watch)?;
        early = after_step(run, engine, cx, step)?;
    }
    profile.end(&mut run.reporter)?;
    Ok(StepsEnd {
        last_step,
        early,
        warnings: watch.end(),
    })
}

/// The active parameters from step `step` on. The engine changes to them.
fn switch(run: &mut TrainingRun, engine: &mut Engine, step: u64) -> Result<ActiveSet> {
    let schedule = run.schedule;
    let switches = schedule.switches_at(step);
    let survives = |name: &str| !switches || schedule.survives_switch(name, step);
    let active = schedule.active(step);
    let requantized = engine.switch(&active, survives)?;
    if !requantized.is_empty() {
        let errors: serde_json::Map<_, _> = requantized
            .iter()
            .map(|r| (r.name.to_string(), json!(r.error)))
            .collect();
        run.reporter
            .event("requantize", json!({"step": step, "relative_error": errors}));
    }
    if switches {
        run.reporter
            .event("switch", json!({"step": step, "active_block": schedule.label(step)}));
    }
    Ok(active)
}

/// Saves and evaluates, if that is due after this step. True if the run ends early.
fn after_step(run: &mut TrainingRun, engine: &mut Engine, cx: &RunContext, step: u64) -> Result<bool> {
    for sample in run.batches.samples() {
        run.reporter.sample(&sample);
    }
    // Between averages there is no state that all ranks have.
    if !engine.is_synchronized() {
        return Ok(false);
    }
    let is_last = step >= cx.total_steps;
    if cx.save_due(step) || !is_last && run.retries_save() {
        let reason = if is_last {
            SaveReason::Last
        } else if cx.save_due(step) {
            SaveReason::Due
        } else {
            SaveReason::Again
        };
        let saved = run.save_if_disk_has_room(engine, step, reason);
        saved.map_err(|e| run.ended(step, e))?;
    }
    run.stop_if_asked(engine, step)?;
    run.stop_above_budget(engine, step)?;
    if !cx.eval_due(step) || step >= cx.total_steps {
        return Ok(false);
    }
    run.evaluate(engine, step)?;
    run.stop_if_asked(engine, step)?;
    run.keep_best(engine, step).map_err(|e| run.ended(step, e))?;
    run.ends_early(step)
}
