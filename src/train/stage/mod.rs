//! The differences between the training stages: the source of the micro-batches of a step, and the objective that
//! computes the loss. One file per stage; the training loop is in `train`.

pub mod advantages;
mod distill;
pub mod preference;
mod reference;
mod rl;
pub mod rollout_buffer;
mod sft;

use crate::base::{Error, Result};
use crate::data::order::BatchStream;
use crate::data::source::position;
use crate::data::{Batch, Dataset, RowOrigin, RowPosition, Source};
use crate::engine::{Engine, StepStrategy};
use crate::model::{Network, Objective, Spec};
use crate::recipe::{self, Recipe};
use crate::setup::ModelDir;
use crate::setup::active_schedule::ActiveSchedule;
use crate::setup::prompts::PromptSet;
use candle_core::Device;
use serde_json::Value;
use std::path::Path;

/// The source of the micro-batches of a step. A window must depend only on (seed, step, weights) and on the bytes of
/// `state`: then a resumed run is bit-equal to an uninterrupted run.
pub trait BatchSource {
    /// Epochs completed after `steps` steps, e.g. 1.5.
    fn epoch_after(&self, steps: u64) -> f64;

    /// Called once, before the first step of a new run, with the initial weights. A resumed run calls `restore`
    /// instead.
    fn prepare(&mut self, engine: &Engine) -> Result<()> {
        let _ = engine;
        Ok(())
    }

    /// True if `prepare` and `window` compute more than all ranks should compute again, or depend on more than seed and
    /// weights (answers, rewards). Rank 0 calls them then, and the others get its `state`.
    fn is_made_by_root(&self) -> bool {
        false
    }

    /// Returns the micro-batches of step `step`, counted from 0.
    fn window(&mut self, step: u64, engine: &Engine) -> Result<Vec<Batch>>;

    /// The rows of each micro-batch of step `step`, counted from 0, in the files of `sources`. Empty: they are not known.
    fn rows(&self, step: u64, sources: &[Source]) -> Result<Vec<Vec<RowPosition>>> {
        let _ = (step, sources);
        Ok(Vec::new())
    }

    /// The batches of the evaluation; empty if no rows are held out.
    fn eval(&self) -> Result<Vec<Batch>> {
        Ok(Vec::new())
    }

    /// Begins an answer of `evaluate`, to the longest prompt. Returns the tokens of the prompt; `None`: it generates nothing.
    fn begin_answer(&self, engine: &Engine) -> Result<Option<usize>> {
        let _ = engine;
        Ok(None)
    }

    /// Measures held-out rows if that needs the engine. The names are those of `metrics.jsonl` without `eval_`.
    fn evaluate(&mut self, engine: &Engine) -> Result<Vec<(&'static str, f64)>> {
        let _ = engine;
        Ok(Vec::new())
    }

    /// State for a checkpoint after `steps` steps, beside the weights. The window of the next step may have been
    /// requested already.
    fn state(&self, steps: u64) -> Result<Option<Vec<u8>>> {
        let _ = steps;
        Ok(None)
    }

    fn restore(&mut self, state: &[u8]) -> Result<()> {
        let _ = state;
        Err(Error::new(
            "the checkpoint contains a state that this stage does not have",
        ))
    }

    /// Means since the last call, with the names of `metrics.jsonl`.
    fn metrics(&mut self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }

    /// Texts since the last call, for `samples.jsonl`.
    fn samples(&mut self) -> Vec<Value> {
        Vec::new()
    }
}

/// The data source and the objective of a stage.
pub struct Stage<'a> {
    pub batches: Box<dyn BatchSource + 'a>,
    pub objective: Box<dyn Objective>,
}

/// The inputs to create a stage.
pub struct StageContext<'a> {
    pub recipe: &'a Recipe,
    pub spec: &'a Spec,
    pub model: &'a ModelDir,
    pub device: &'a Device,
    pub run_dir: &'a Path,
    pub train: &'a Dataset,
    pub stream: BatchStream<'a>,
    pub eval: Option<&'a Dataset>,
    /// Prompts of an RL stage.
    pub questions: Option<&'a PromptSet>,
    /// This is rank 0, which alone makes what `BatchSource::is_made_by_root` names.
    pub is_root: bool,
}

/// The policy before its first step, also in a resumed run.
pub struct PolicyStart<'a> {
    /// With the start values of its adapters, if they change the model.
    pub network: &'a Network,
    pub strategy: &'a StepStrategy,
    pub schedule: &'a ActiveSchedule,
}

/// The rows of `train` in each micro-batch of step `step`.
fn rows_of(train: &Dataset, stream: &BatchStream, step: u64, sources: &[Source]) -> Result<Vec<Vec<RowPosition>>> {
    let origins = train.all_origins()?;
    let of = |micro| {
        let rows = stream.rows(micro);
        let rows: Vec<RowOrigin> = rows.iter().filter_map(|row| origins.get(*row).copied()).collect();
        places(&rows, sources)
    };
    Ok(stream.window_indices(step).map(of).collect())
}

fn places(rows: &[RowOrigin], sources: &[Source]) -> Vec<RowPosition> {
    rows.iter().map(|row| position(sources, *row)).collect()
}

/// Checks the other inputs of a stage, such as the teacher, before anything is written.
pub fn check(recipe: &Recipe, model: &ModelDir, train: &Dataset) -> Result<()> {
    match recipe.train.stage {
        recipe::Stage::Distill => distill::check(recipe, model, train),
        _ => Ok(()),
    }
}

/// Creates the stage of a recipe.
pub fn open<'a>(setting: StageContext<'a>, start: &PolicyStart) -> Result<Stage<'a>> {
    match setting.recipe.train.stage {
        recipe::Stage::Pretrain | recipe::Stage::Sft => sft::open(setting),
        recipe::Stage::Ppo | recipe::Stage::Grpo => rl::open(setting, start),
        stage if stage.is_preference() => preference::open(setting),
        recipe::Stage::Distill => distill::open(setting),
        // The recipe parser refuses it already.
        other => Err(Error::usage("this stage is not implemented yet").found(other.name())),
    }
}
