//! The inputs and decisions of a run, before anything is written.

use super::TrainOptions;
use crate::base::{Error, Result};
use crate::data::order::BatchStream;
use crate::engine::StepStrategy;
use crate::hf::AdapterSet;
use crate::plan::memory_plan::{MemoryPlan, PlanRefusal};
use crate::plan::resumed_choices;
use crate::plan::{Plan, RunPlan};
use crate::recipe::{LoadedRecipe, Recipe};
use crate::setup::active_schedule::ActiveSchedule;
use crate::setup::defaults::{self, ResumedValues};
use crate::setup::rows::{self, RecipeRows};
use crate::setup::{ModelDir, adapters, vocabulary};
use crate::train::gpus::OwnDevice;
use crate::train::{learning, ranks, stage};

/// The model directory and the rows of a run.
pub(super) struct RunInputs {
    /// With the rows of new tokens among the trained parameters.
    pub recipe: Recipe,
    pub model: ModelDir,
    pub rows: RecipeRows,
}

impl RunInputs {
    /// Errors: an invalid model directory or data file.
    pub fn read(recipe: &Recipe) -> Result<Self> {
        let mut model = ModelDir::of_recipe(recipe)?;
        let recipe = vocabulary::with_new_rows(recipe, model.new_rows.as_ref(), &model.spec);
        model.untie_for(&recipe)?;
        model.check_weights(recipe.model.init)?;
        let rows = RecipeRows::read(&recipe, &model)?;
        Ok(Self { recipe, model, rows })
    }
}

/// All decisions of a run: values of `auto` keys, adapters, schedule of active parameters, memory.
pub(super) struct RunDecisions<'a> {
    /// With the chosen values.
    pub loaded: LoadedRecipe,
    /// Without `auto` for keys that depend on rows and model.
    pub recipe: Recipe,
    pub adapters: AdapterSet,
    pub active_schedule: ActiveSchedule,
    pub stream: BatchStream<'a>,
    pub plan: Plan,
    pub strategy: StepStrategy,
    /// Why the run does not fit.
    pub refused: Option<PlanRefusal>,
}

impl<'a> RunDecisions<'a> {
    /// Errors: settings that contradict each other, the rows, or the model.
    pub fn new(loaded: &LoadedRecipe, inputs: &'a RunInputs, options: &TrainOptions, own: &OwnDevice) -> Result<Self> {
        let RunInputs { recipe, model, rows } = inputs;
        let before = ResumedValues::read(recipe, &options.resume)?;
        let stored = model.stored(recipe.model.init)?;
        let RunPlan {
            recipe: resolved,
            choices,
            adapters,
            active_schedule,
            stream,
            memory:
                MemoryPlan {
                    mut plan,
                    strategy,
                    refused,
                    ..
                },
        } = RunPlan::new(
            recipe,
            &model.spec,
            Some(rows),
            &stored,
            &before,
            &options.ranks.plan_device(own, recipe.distributed.weights)?,
            adapters::AdapterValues::Drawn,
        )?;
        let Some(stream) = stream else {
            return Err(Error::internal("a run has no rows"));
        };
        let mut loaded = defaults::record(loaded, &choices);
        loaded.remark("data", &rows::formats(recipe, &rows.train, rows.eval.as_ref()));
        stage::check(&resolved, model, &rows.train)?;
        learning::check(&resolved, &active_schedule, stream.steps())?;
        ranks::check(&resolved, &model.spec, own.device.is_cuda(), options.ranks.size())?;
        plan.choices
            .extend(resumed_choices::pinned_choices(&loaded.recipe, recipe));
        Ok(Self {
            loaded,
            recipe: resolved,
            adapters,
            active_schedule,
            stream,
            plan,
            strategy,
            refused,
        })
    }
}
