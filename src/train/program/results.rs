//! The results for the user: the last evaluation, samples, and `final/`.

use super::RunContext;
use super::steps::StepsEnd;
use crate::base::signal::{SignalReaction, Stop};
use crate::base::{Result, signal};
use crate::engine::Engine;
use crate::hf::{AdapterSet, BaseHashes};
use crate::recipe;
use crate::train::finish::{self, TrainedModel};
use crate::train::from_checkpoint::{self, RecipePaths};
use crate::train::owner;
use crate::train::running::{self, TrainingRun};
use serde_json::json;
use std::path::PathBuf;

/// The results of a run.
pub(super) struct RunResults {
    /// `None`: the weights are random.
    pub final_dir: Option<PathBuf>,
    pub peak_memory_bytes: u64,
}

/// Writes the results. `start_step`: the step after which the run went on.
///
/// Errors: as for an evaluation or an export.
pub(super) fn write(
    mut run: TrainingRun,
    mut engine: Engine,
    cx: &RunContext,
    start_step: u64,
    ended: &StepsEnd,
    adapters: &AdapterSet,
    base: &BaseHashes,
) -> Result<RunResults> {
    let (ranks, model, last_step) = (cx.ranks(), &cx.inputs.model, ended.last_step);
    for warning in &ended.warnings {
        run.reporter.warn(warning);
    }
    if cx.total_steps > 0 {
        run.evaluate_if_missing(&mut engine, last_step)?;
    }
    let out = cx.run_dir.join("final");
    if ranks.of_root(last_step > start_step || !out.exists())? {
        run.samples(&mut engine, last_step, "after")?;
        run.stop_if_asked(&engine, last_step)?;
    }
    signal::conduct(SignalReaction::Stop(Stop {
        what: "the last step is done and `final/` is being written".into(),
        then: "; Ctrl-C again stops now, without `final/`".into(),
        lost: "`final/` was not written; `--resume` continues from the newest checkpoint".into(),
        finishes: None,
    }));
    let mut said = Vec::new();
    run.directory.check(&mut run.reporter)?;
    let before = run.directory.aside()?;
    let peak_memory_bytes = running::peak_memory(cx.device)?;
    // The engine has the model of the last step.
    run.best.set_saved(last_step);
    let lost = run.best.lost(last_step).filter(|_| !model.is_shape());
    if let Some(lost) = &lost {
        run.reporter.warn(lost);
    }
    let earlier = run.best.step().filter(|step| *step != last_step && !model.is_shape());
    let mut recorded = None;
    let final_dir = if ranks.of_root(earlier.is_some())? {
        // The engine ends before the other weights are written: if that fails, the last steps are in a checkpoint.
        if ranks.of_root(run.pace.saved != last_step)?
            && let Err(e) = run.save(&engine, last_step)
        {
            if ranks.several() {
                return Err(run.ended(last_step, e));
            }
            // The result needs the checkpoint of the best step only.
            let e = recipe::in_program_terms(&e.to_string());
            run.reporter
                .warn(&format!("the state after the last step could not be saved: {e}"));
        }
        drop(engine);
        match earlier.filter(|_| ranks.is_root()) {
            Some(step) => {
                if lost.is_none() {
                    said.push(format!(
                        "final/ is the model of the best evaluation: {}",
                        run.best.describe()
                    ));
                }
                let paths = RecipePaths::OfRun(cx.recipe);
                let written = from_checkpoint::write(&cx.checkpoint_of(step), &out, paths);
                let written = written.map_err(|e| run.ended(last_step, e))?;
                recorded = Some(run.directory.record_final(&before));
                said.extend(written.notes);
                Some(out)
            }
            None => None,
        }
    } else {
        let exported = engine.with_averages(|engine| {
            let trained = TrainedModel::new(cx.recipe, model, engine, adapters, base);
            let written = engine.by_root(|| {
                let written = finish::export(&trained, &out, &mut |line| said.push(line.to_string()))?;
                if written.is_some() {
                    recorded = Some(run.directory.record_final(&before));
                }
                Ok(written)
            });
            // After an error of rank 0 too, all ranks put the weights back.
            if ranks.is_root() { Ok(written) } else { written.map(Ok) }
        });
        let exported = exported.and_then(|written| written);
        let written = exported.map_err(|e| run.export_failed(&engine, last_step, e))?;
        // Only rank 0 has the error, and the others may have parts of the state: see `export_failed`.
        let failed = ranks.export_failed_at_root(false)?;
        if failed && run.pace.saved != last_step {
            run.save_here(&engine, last_step)?;
        }
        drop(engine);
        written.flatten()
    };
    said.iter().for_each(|line| run.reporter.note(line));
    // Rank 0 removes the files of all ranks when none needs them any more.
    ranks.meet()?;
    let recorded = recorded.transpose()?;
    if let Some(recorded) = recorded {
        let (said, warnings) = run.directory.complete_final(recorded, &before)?;
        said.iter().for_each(|line| run.reporter.note(line));
        warnings.iter().for_each(|line| run.reporter.warn(line));
    } else {
        run.reporter
            .note("a built-in shape has random weights: no `final/` is written");
    }
    if ranks.is_root() {
        owner::remove_scratch(cx.run_dir)?;
    }
    run.draw(true);
    let reason = if ended.early { "early stopping" } else { "done" };
    run.reporter.event("stop", json!({"step": last_step, "reason": reason}));
    run.reporter.finish();
    Ok(RunResults {
        final_dir,
        peak_memory_bytes,
    })
}
