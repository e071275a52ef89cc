//! `ft train`: recipe, data, model and plan, then the optimizer steps, then `final/`. One file for each of these parts.

mod begin;
mod engine;
mod inputs;
mod opened;
mod results;
mod steps;

use crate::base::{Result, aborted, signal};
use crate::ops;
use crate::plan::{Plan, resumed_choices};
use crate::recipe::{LoadedRecipe, Recipe};
use crate::train::Resume;
use crate::train::abort_message;
use crate::train::best::BestModel;
use crate::train::budget::Budget;
use crate::train::learning::RateSweep;
use crate::train::next;
use crate::train::ranks::RunRanks;
use crate::train::running::{self, RunPace, TrainingRun};
use crate::train::state::{self, RunFingerprint};
use begin::begin;
use candle_core::Device;
use engine::Trainer;
use inputs::{RunDecisions, RunInputs};
use opened::OpenedRun;
use std::path::{Path, PathBuf};
use steps::run_steps;

/// Command-line options of `ft train`, beside the recipe.
#[derive(Debug, Clone, Default)]
pub struct TrainOptions {
    /// The checkpoint from which the run continues.
    pub resume: Resume,
    /// Resume from an older checkpoint if the newest one is damaged.
    pub allow_older: bool,
    /// Start from the beginning in a directory that holds a run.
    pub overwrite: bool,
    /// Stop after the plan.
    pub dry_run: bool,
    /// The ranks of the run.
    pub ranks: RunRanks,
    /// The command line, for the user who looks at the run later.
    pub command: String,
    /// Steps of a profile; 0: none.
    pub profile: u64,
    /// No evaluations, samples and results: the steps are measured.
    pub only_steps: bool,
    /// The learning rate of each step, in place of that of the recipe.
    pub sweep: Option<RateSweep>,
}

/// The result of a run.
pub struct TrainOutcome {
    pub final_dir: Option<PathBuf>,
    pub plan: Plan,
    /// The resolved recipe.
    pub resolved: String,
    /// Commands to suggest next.
    pub next: Vec<String>,
    pub peak_memory_bytes: u64,
}

/// The values that all parts of a run use.
#[derive(Clone, Copy)]
struct RunContext<'a> {
    options: &'a TrainOptions,
    inputs: &'a RunInputs,
    /// Without `auto` for keys that depend on rows and model.
    recipe: &'a Recipe,
    loaded: &'a LoadedRecipe,
    plan: &'a Plan,
    device: &'a Device,
    run_dir: &'a Path,
    total_steps: u64,
}

impl RunContext<'_> {
    fn ranks(&self) -> &RunRanks {
        &self.options.ranks
    }

    fn eval_due(&self, step: u64) -> bool {
        due(step, self.recipe.train.eval_steps)
    }

    fn save_due(&self, step: u64) -> bool {
        due(step, self.recipe.train.save_steps)
    }

    fn checkpoint_of(&self, step: u64) -> PathBuf {
        self.run_dir.join(format!("checkpoint-{step}"))
    }
}

fn due(step: u64, every: usize) -> bool {
    every > 0 && step.is_multiple_of(every as u64)
}

/// Runs a recipe.
///
/// Errors: any invalid input (before the first step), a loss or gradient that is not finite, a full disk; a signal
/// after the state was saved (exit code 128 + signal).
pub fn train(loaded: &LoadedRecipe, options: &TrainOptions) -> Result<TrainOutcome> {
    let run_dir = PathBuf::from(&loaded.recipe.train.output_dir);
    // All ranks, before rank 0 changes the directory.
    let resume = crate::train::directory::resume_of(&run_dir, &options.resume)?;
    let options = &TrainOptions {
        resume,
        ..options.clone()
    };
    let recipe = resumed_choices::pin_resumed_choices(&loaded.recipe, &options.resume)?;
    let ranks = &options.ranks;
    ranks.0.set_timeout(recipe.distributed.limit());
    if !options.dry_run && ranks.is_root() {
        crate::train::directory::check(&run_dir, options)?;
    }
    let own = ranks.device(&recipe.model.device)?;
    signal::install()?;
    signal::quit("stopped before the first step");
    abort_message::prepare(&run_dir, options)?;

    // All input errors are found before anything is written.
    let inputs = RunInputs::read(&recipe)?;
    let RunDecisions {
        loaded,
        recipe,
        mut adapters,
        active_schedule,
        stream,
        plan,
        strategy,
        refused,
    } = RunDecisions::new(loaded, &inputs, options, &own)?;
    let outcome = |final_dir: Option<PathBuf>, peak_memory_bytes: u64| TrainOutcome {
        next: final_dir
            .as_deref()
            .map_or(Vec::new(), |dir| next::after_training(&recipe, dir)),
        final_dir,
        plan: plan.clone(),
        resolved: loaded.resolved.clone(),
        peak_memory_bytes,
    };
    if options.dry_run {
        return Ok(outcome(None, 0));
    }
    if let Some(refused) = refused {
        return Err(refused.error);
    }
    if let Some(budget) = recipe.memory.budget {
        ops::device::limit(&own.device, budget)?;
    }
    let cx = RunContext {
        options,
        inputs: &inputs,
        recipe: &recipe,
        loaded: &loaded,
        plan: &plan,
        device: &own.device,
        run_dir: &run_dir,
        total_steps: stream.steps(),
    };
    let opened = OpenedRun::new(&cx, &own, &adapters, &active_schedule, &strategy)?;
    let (start_step, scratch) = (opened.start_step(), opened.scratch.clone());
    aborted::keep(start_step);
    let mut reporter = opened.reporter(&cx, &own, &adapters, &active_schedule, &stream)?;
    let budget = Budget::of(&recipe, &own.device);
    if let Some(warning) = budget.and_then(Budget::warning) {
        reporter.warn(&warning);
    }
    let parts = engine::TrainerParts {
        strategy,
        stream,
        schedule: active_schedule,
    };
    let mut trainer = Trainer::new(&cx, &opened, &scratch, &mut adapters, parts, &mut reporter)?;
    let trained_tokens = trainer.restore(&cx, &opened, &adapters, &mut reporter)?;
    let OpenedRun {
        directory,
        resumed,
        taken,
        fingerprint,
        base,
        ..
    } = opened;
    let Trainer {
        mut engine,
        batches,
        schedule,
        ..
    } = trainer;
    let mut best = BestModel::new(&recipe.train);
    if ranks.is_root() && start_step > 0 {
        best.replay(&run_dir, start_step);
        // A full disk may have kept lines out of the metrics.
        resumed.iter().for_each(|from| best.add_saved(state::best(from)));
    }
    let mut run = TrainingRun {
        ranks,
        best,
        recipe: &recipe,
        run_dir: &run_dir,
        model: &inputs.model,
        eval: inputs.rows.eval.as_ref(),
        batches,
        schedule: &schedule,
        fingerprint: RunFingerprint {
            trained_tokens,
            ..fingerprint
        },
        reporter,
        plan: &plan,
        directory,
        budget,
        stopped: false,
        pace: RunPace {
            saved: start_step,
            several: ranks.several(),
            ..RunPace::default()
        },
    };
    begin(&mut run, &mut engine, &cx, start_step, taken.as_deref())?;
    let ended = run_steps(&mut run, &mut engine, &cx, start_step)?;
    if options.only_steps {
        run.reporter.finish();
        return Ok(outcome(None, running::peak_memory(&own.device)?));
    }
    let results = results::write(run, engine, &cx, start_step, &ended, &adapters, &base)?;
    Ok(outcome(results.final_dir, results.peak_memory_bytes))
}
