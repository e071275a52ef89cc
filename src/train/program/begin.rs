//! The measurements before the first step.

use super::RunContext;
use crate::base::{Error, Result};
use crate::checkpoint;
use crate::engine::Engine;
use crate::train::rehearsal;
use crate::train::running::TrainingRun;
use std::path::Path;

/// Evaluates and shows samples before the first step of a new run; finds out early that an evaluation fails. `taken`: the
/// checkpoint from which the run goes on, if it is that of another run.
///
/// Errors: as for an evaluation; the checkpoint of the best evaluation does not exist.
pub(super) fn begin(
    run: &mut TrainingRun,
    engine: &mut Engine,
    cx: &RunContext,
    start_step: u64,
    taken: Option<&Path>,
) -> Result<()> {
    run.expect_signal_after(start_step);
    take(run, cx, start_step, taken)?;
    if let Some(step) = run.best.step().filter(|step| !cx.checkpoint_of(*step).exists()) {
        return Err(gone(run, &cx.checkpoint_of(step))
            .hint("resume with `train.load_best_model_at_end=false`, or start the run again with `--overwrite`"));
    }
    // Rank 0 alone may have copied a checkpoint, and each rank may have read its rows again up to this step.
    run.ranks.meet_after_reading()?;
    if start_step == 0 && cx.total_steps > 0 && !cx.options.only_steps {
        run.samples(engine, 0, "before")?;
        run.evaluate(engine, 0)?;
        run.stop_if_asked(engine, 0)
    } else if start_step < cx.total_steps {
        // The checkpoint of this step was written before its evaluation.
        let evaluated = cx.eval_due(start_step) && run.evaluate_if_missing(engine, start_step)?;
        if !evaluated {
            rehearsal::of_evaluation(engine, &run.batches.eval()?, &mut run.reporter)?;
            // Its reads are not those of the next step.
            let _ = engine.store.expert_reads();
        }
        if cx.options.only_steps {
            return Ok(());
        }
        rehearsal::of_answers(run, engine)
    } else {
        Ok(())
    }
}

/// Brings `taken` into the directory of this run, so that it can be resumed there, and the checkpoint of the best evaluation so far,
/// which may become the result of this run.
fn take(run: &mut TrainingRun, cx: &RunContext, start_step: u64, taken: Option<&Path>) -> Result<()> {
    let Some(taken) = taken else { return Ok(()) };
    let best = run.best.step().filter(|step| *step != start_step);
    let there = best.map(|step| taken.with_file_name(format!("checkpoint-{step}")));
    if let Some(there) = &there {
        if !there.exists() {
            return Err(gone(run, there).hint(
                "resume with `train.load_best_model_at_end=false`, or from a directory that has this checkpoint",
            ));
        }
        checkpoint::verify(there)?;
    }
    // The best one first: when the last one is there, all are.
    let all: Vec<&Path> = there.as_deref().into_iter().chain([taken]).collect();
    checkpoint::bring(&all, cx.run_dir)?;
    run.directory.brought()?;
    let best = best.map_or(String::new(), |step| {
        format!(
            ", and checkpoint-{step}, the best evaluation so far: {}",
            run.best.describe_saved()
        )
    });
    run.reporter.note(&format!(
        "from {}: checkpoint-{start_step}{best}",
        taken.parent().unwrap_or(taken).display()
    ));
    Ok(())
}

fn gone(run: &TrainingRun, checkpoint: &Path) -> Error {
    Error::new("the checkpoint of the best evaluation does not exist any more")
        .at_path(checkpoint)
        .found(run.best.describe_saved())
}
