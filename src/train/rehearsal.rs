//! The rehearsal before the first step: an evaluation, a save and an export are tried as far as that is cheap, so that a run
//! does not fail after hours for a reason that is there from the beginning.

use crate::base::rehearse::rehearse;
use crate::base::{Result, progress};
use crate::data::Batch;
use crate::engine::Engine;
use crate::formats::writer::SHARD_BYTES;
use crate::model::Spec;
use crate::recipe::{Method, Recipe};
use crate::report::Reporter;
use crate::setup::active_schedule::ActiveSchedule;
use crate::train::checkpoint_size::CheckpointSize;
use crate::train::finish::{self, TrainedModel};
use crate::train::owner::FINAL;
use crate::train::running::TrainingRun;
use crate::train::{samples, state};
use serde_json::json;
use std::path::Path;

/// Tries the file operations of a save and of the export, with the space that the run will need at the same time, `needed` bytes (a
/// quota is not in the free space that the file system names). The large files of the checkpoint are divided by `parts` ranks; `step`:
/// the first step.
pub fn of_disk(
    recipe: &Recipe,
    spec: &Spec,
    run_dir: &Path,
    (checkpoint, parts): (&CheckpointSize, usize),
    step: u64,
    needed: u64,
) -> Result<()> {
    let mut result = match recipe.tune.method {
        _ if recipe.model.path.is_shape() => 0,
        Method::Lora => checkpoint.weights,
        _ => spec.params().iter().map(|p| p.elements() as u64).sum::<u64>() * recipe.model.dtype.bytes(),
    };
    // As one save and the export are on the disk at the same time.
    let mut sizes = checkpoint.files(parts);
    while result > 0 {
        let shard = result.min(SHARD_BYTES);
        sizes.push(shard);
        result -= shard;
    }
    let why = "before the first step a save was tried";
    rehearse(&run_dir.join(format!("checkpoint-{step}")), &[], 0).map_err(|e| e.after(why))?;
    let why = "before the first step the export was tried";
    let later = needed.saturating_sub(sizes.iter().sum());
    rehearse(&run_dir.join(FINAL), &sizes, later).map_err(|e| e.after(why))
}

/// Checks that the state of the engine can be saved up to step `last`, and its model be written to `out`. All ranks call it.
pub fn of_files(trained: &TrainedModel, schedule: &ActiveSchedule, out: &Path, last: u64) -> Result<()> {
    let checked = trained.engine.by_root(|| {
        state::rehearse(trained.engine, schedule, last)?;
        finish::rehearse(trained, out)
    });
    checked.map(drop)
}

/// Evaluates the longest batch: for a run that does not begin with an evaluation. Only `events.jsonl` gets its loss.
pub fn of_evaluation(engine: &Engine, batches: &[Batch], reporter: &mut Reporter) -> Result<()> {
    let objective = engine.objective.as_ref();
    let counted = batches.iter().filter(|batch| objective.weight(batch) > 0);
    let Some(longest) = counted.max_by_key(|batch| batch.ids.len()) else {
        return Ok(());
    };
    let _phase = progress::phase("trying an evaluation", 0, "");
    let totals = engine.evaluate(longest)?;
    objective.metrics();
    let loss = totals.loss_sum / objective.weight(longest) as f64;
    reporter.event(
        "rehearsal",
        json!({"evaluation_tokens": longest.ids.len(), "loss": loss}),
    );
    Ok(())
}

/// Begins the answers that an evaluation and the end of the run need: to the longest of the sample prompts, of the questions of
/// `eval_accuracy`, and of the held-out prompts of an RL stage. For a run that does not begin with an evaluation. They are greedy, so
/// the random state stays as it is, and only `events.jsonl` gets their sizes. All ranks call it.
pub fn of_answers(run: &mut TrainingRun, engine: &Engine) -> Result<()> {
    let (recipe, model) = (run.recipe, run.model);
    let begun = engine.by_root(|| {
        let mut begun: Vec<usize> = Vec::new();
        begun.extend(samples::begin_sample(recipe, model, engine)?);
        if let Some(eval) = run.eval.filter(|_| recipe.train.predict_with_generate) {
            begun.extend(samples::begin_question(recipe, model, engine, eval)?);
        }
        begun.extend(run.batches.begin_answer(engine)?);
        Ok(begun)
    });
    // A signal ends them early; the first step sees it.
    let begun = run.ranks.unless_root_stopped(begun.map(Option::unwrap_or_default));
    let begun = begun.map_err(|e| e.after("before the first step an answer to the longest prompt was tried"))?;
    for tokens in begun.unwrap_or_default() {
        run.reporter.event("rehearsal", json!({"prompt_tokens": tokens}));
    }
    Ok(())
}
