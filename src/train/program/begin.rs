//! The measurements before the first step.

use super::RunContext;
use crate::base::{Error, Result};
use crate::engine::Engine;
use crate::train::rehearsal;
use crate::train::running::TrainingRun;

/// Evaluates and shows samples before the first step of a new run; finds out early that an evaluation fails.
///
/// Errors: as for an evaluation; the checkpoint of the best evaluation does not exist.
pub(super) fn begin(run: &mut TrainingRun, engine: &mut Engine, cx: &RunContext, start_step: u64) -> Result<()> {
    run.expect_signal_after(start_step);
    if let Some(step) = run.best.step().filter(|step| !cx.checkpoint_of(*step).exists()) {
        return Err(
            Error::new("the checkpoint of the best evaluation does not exist any more")
                .at_path(&cx.checkpoint_of(step))
                .found(run.best.describe())
                .hint("resume with `train.load_best_model_at_end=false`, or start the run again with `--overwrite`"),
        );
    }
    if start_step == 0 && cx.total_steps > 0 && !cx.options.only_steps {
        run.samples(engine, 0, "before")?;
        run.evaluate(engine, 0)?;
        run.stop_if_asked(engine, 0)
    } else if start_step < cx.total_steps && cx.eval_due(start_step) {
        // The checkpoint of this step was written before its evaluation.
        run.evaluate_if_missing(engine, start_step)
    } else if start_step < cx.total_steps {
        rehearsal::of_evaluation(engine, &run.batches.eval()?, &mut run.reporter)
    } else {
        Ok(())
    }
}
