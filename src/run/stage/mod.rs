//! What differs between the stages of training: where the micro-batches of a step come from, and the objective that
//! turns them into a loss. One file a stage; the loop is the one of `train`.

pub mod lesson;
pub mod preference;
mod reinforce;
pub mod replay;
mod distill;
mod sft;

use crate::base::{Error, Result};
use crate::data::order::BatchStream;
use crate::data::{Batch, Dataset};
use crate::engine::Engine;
use crate::model::{Objective, Spec};
use crate::recipe::{self, Recipe};
use crate::run::prompts::Questions;
use crate::run::setup::Described;
use candle_core::Device;
use serde_json::Value;
use std::path::Path;

/// Where the micro-batches of a step come from. What a window holds must follow from (seed, step, weights) and from
/// what `state` saves: a resumed run is bit-equal to the run that was not stopped.
pub trait Feed {
    /// Epochs seen after `steps` steps, e.g. 1.5.
    fn epoch_after(&self, steps: u64) -> f64;

    /// Called once, before the first step of a new run: the weights are those of the start. A resumed run calls
    /// `restore` instead.
    fn prepare(&mut self, engine: &Engine) -> Result<()> {
        let _ = engine;
        Ok(())
    }

    /// The micro-batches of step `step`, from 0.
    fn window(&mut self, step: u64, engine: &Engine) -> Result<Vec<Batch>>;

    /// What is evaluated; empty: nothing is held out.
    fn eval(&self) -> Result<Vec<Batch>> {
        Ok(Vec::new())
    }

    /// What a stage that needs the engine for it measures on rows that are held out, by the names of `metrics.jsonl`
    /// without `eval_`.
    fn evaluate(&mut self, engine: &Engine) -> Result<Vec<(&'static str, f64)>> {
        let _ = engine;
        Ok(Vec::new())
    }

    /// What a checkpoint after `steps` steps must keep beside the weights. The window of the next step may have been
    /// asked for already.
    fn state(&self, steps: u64) -> Result<Option<Vec<u8>>> {
        let _ = steps;
        Ok(None)
    }

    fn restore(&mut self, state: &[u8]) -> Result<()> {
        let _ = state;
        Err(Error::new("the checkpoint keeps a state that this stage does not have"))
    }

    /// Means since the last call, by the names of `metrics.jsonl`.
    fn metrics(&mut self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }

    /// Texts since the last call, for `samples.jsonl`.
    fn samples(&mut self) -> Vec<Value> {
        Vec::new()
    }
}

/// A stage, ready for the loop.
pub struct Stage<'a> {
    pub feed: Box<dyn Feed + 'a>,
    pub objective: Box<dyn Objective>,
}

/// What a stage is made from.
pub struct Setting<'a> {
    pub recipe: &'a Recipe,
    pub spec: &'a Spec,
    pub model: &'a Described,
    pub device: &'a Device,
    pub run_dir: &'a Path,
    pub train: &'a Dataset,
    pub stream: BatchStream<'a>,
    pub eval: Option<&'a Dataset>,
    /// Prompts of a stage that trains by reward.
    pub questions: Option<&'a Questions>,
}

/// What a stage needs beside the model and its rows, looked at before anything is written.
pub fn check(recipe: &Recipe, model: &Described, train: &Dataset) -> Result<()> {
    match recipe.train.stage {
        recipe::Stage::Distill => distill::check(recipe, model, train),
        _ => Ok(()),
    }
}

/// The stage of a recipe.
pub fn open<'a>(setting: Setting<'a>) -> Result<Stage<'a>> {
    match setting.recipe.train.stage {
        recipe::Stage::Pretrain | recipe::Stage::Sft => Ok(sft::open(setting)),
        recipe::Stage::Ppo | recipe::Stage::Grpo => reinforce::open(setting),
        stage if stage.is_preference() => preference::open(setting),
        recipe::Stage::Distill => distill::open(setting),
        // Refused while the recipe was read.
        other => Err(Error::usage("this stage is not built yet").found(other.name())),
    }
}
