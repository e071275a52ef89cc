//! `ft plan`: the memory forecast of a recipe from `config.json` alone. Also reads the rows if they are available.

use crate::base::units::bytes;
use crate::base::{Result, files, memory};
use crate::data::describe::visible;
use crate::model::shapes;
use crate::ops;
use crate::plan::memory_plan::Verdict;
use crate::plan::{Plan, RunPlan};
use crate::recipe::{ModelInit, ModelRef, Recipe};
use crate::setup::defaults::ResumedValues;
use crate::setup::rows::{self, RecipeRows};
use crate::setup::{self, ModelDir};
use crate::train::directory;
use crate::train::header;
use crate::train::learning;
use candle_core::Device;
use serde_json::{Value, json};
use std::path::Path;

pub struct RecipePlan {
    pub plan: Plan,
    pub verdict: Verdict,
    pub disk: Space,
    /// Assumptions of the plan.
    pub notes: Vec<String>,
    /// The run does not fit this machine.
    pub refused: bool,
}

/// Disk space of a run, computed as `ft train` does before it starts.
#[derive(Debug, Clone, PartialEq)]
pub struct Space {
    /// Checkpoints (temporarily one more than the limit), the result, and scratch files.
    pub needed: u64,
    /// `None`: the free space is unknown.
    pub free: Option<u64>,
    pub directory: String,
}

impl Space {
    pub fn fits(&self) -> bool {
        self.free.is_none_or(|free| self.needed <= free)
    }

    pub fn text(&self) -> String {
        let free = match self.free {
            Some(free) => format!("{} free", bytes(free)),
            None => "free space unknown".into(),
        };
        let verdict = if self.fits() { "" } else { "does not fit: " };
        format!(
            "disk: {verdict}{} for checkpoints and the result, {free} in {}",
            bytes(self.needed),
            self.directory
        )
    }
}

impl RecipePlan {
    /// The JSON of the plan with verdict and disk space.
    pub fn json(&self) -> Value {
        let mut out = self.plan.json();
        out["fits"] = json!(self.verdict.fits);
        out["verdict"] = json!(self.verdict.text);
        out["disk"] = json!({
            "needed_bytes": self.disk.needed,
            "free_bytes": self.disk.free,
            "directory": self.disk.directory,
            "fits": self.disk.fits(),
        });
        out
    }
}

/// Plans a recipe. Loads no weights.
///
/// Errors: an invalid config or data file, or a plan above a budget of the recipe.
pub fn plan(recipe: &Recipe) -> Result<RecipePlan> {
    let (dir, mut spec) = setup::read_spec(&recipe.model.path, &recipe.model.revision, recipe.model.init)?;
    spec.tied = setup::stays_tied(recipe, &spec)?;
    // The recipe may name a GPU of another machine.
    let device = match recipe.model.device.as_str() {
        "auto" => ops::device::open("auto")?.device,
        _ => Device::Cpu,
    };
    let rows = if rows_are_here(recipe, &dir) {
        Some(read(recipe, &dir)?)
    } else {
        None
    };
    let stored = setup::StoredWeights::find(&dir, &spec, recipe.model.init)?;
    let RunPlan {
        recipe: settled,
        adapters,
        active_schedule,
        stream,
        memory,
        ..
    } = RunPlan::new(
        recipe,
        &spec,
        rows.as_ref(),
        &stored,
        &ResumedValues::default(),
        &device,
    )?;
    let mut notes = Vec::new();
    match (&rows, &stream) {
        (Some(rows), Some(stream)) => {
            let formats = rows::formats(recipe, &rows.train, rows.eval.as_ref());
            notes.extend(formats.iter().map(|line| format!("format {}", visible(line))));
            notes.extend(rows.train.readings.iter().flat_map(|r| r.warnings()));
            match learning::check(&settled, &active_schedule, stream.steps()) {
                Ok(()) => notes.extend(learning::warnings(&settled, &active_schedule, stream)),
                Err(e) => notes.push(format!("`ft train` would reject this recipe: {e}")),
            }
        }
        _ => notes.push(format!(
            "the rows are not available: the plan assumes {} tokens in every row and {} forward passes per step",
            recipe.data.max_length, settled.train.gradient_accumulation_steps
        )),
    }
    let recipe = &settled;
    let given = u64::try_from(recipe.train.max_steps).ok();
    let steps = stream
        .as_ref()
        .map(|stream| stream.steps())
        .or(given)
        .unwrap_or(u64::MAX);
    let elements = header::trained_elements(&active_schedule, steps, &spec.params(), &adapters.adapters);
    let directory = Path::new(&recipe.train.output_dir);
    let disk = Space {
        needed: directory::space_needed(recipe, &spec, elements, memory.strategy.placement),
        free: files::free_space(directory),
        directory: recipe.train.output_dir.clone(),
    };
    let verdict = memory.verdict(recipe);
    let does_not_fit = memory.refused.is_some();
    match memory.refused {
        Some(refused) if refused.by_budget => return Err(refused.error),
        // The run may be planned for another machine.
        Some(refused) => notes.push(format!(
            "`ft train` would reject this recipe on this machine: {}",
            refused.error
        )),
        None => {}
    }
    Ok(RecipePlan {
        plan: memory.plan,
        verdict,
        disk,
        notes,
        refused: does_not_fit,
    })
}

/// How well a recipe fits the free memory of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    Fits,
    /// It needs nearly all memory, or fits only with weights on the disk or with fewer bits.
    Tight,
    No,
}

pub struct Fitted {
    pub fit: Fit,
    pub peak: u64,
    /// The restrictions that the planner chose to make it fit.
    pub remark: Option<String>,
}

/// Checks a recipe with built-in shapes as models. Reads and downloads nothing.
///
/// Errors: settings that contradict each other.
pub fn fit(recipe: &Recipe) -> Result<Fitted> {
    let recipe = with_shapes(recipe);
    let gpu = ops::device::memory(&ops::device::open("auto")?.device)?;
    let free = match gpu {
        Some(gpu) => Some(gpu.free),
        None => memory::available(),
    };
    let planned = plan(&recipe)?;
    let peak = planned.plan.peak_bytes;
    let lost = |key: &str, values: &[&str]| {
        let choices = planned.plan.choices.iter();
        let choice = choices
            .filter(|c| c.key == key)
            .find(|c| values.contains(&c.value.as_str()));
        choice.map(|c| c.value.clone())
    };
    let disk = lost("memory.tier", &["disk"]).map(|_| "weights on disk".to_string());
    let fewer = lost("memory.frozen_weights", &["int8", "int4", "nf4"]).map(|bits| format!("frozen weights in {bits}"));
    let fit = match planned.refused {
        true => Fit::No,
        false if disk.is_some() || fewer.is_some() => Fit::Tight,
        false if free.is_some_and(|free| peak > free / 10 * 9) => Fit::Tight,
        false => Fit::Fits,
    };
    let remark = [disk, fewer].into_iter().flatten().collect::<Vec<_>>().join(", ");
    Ok(Fitted {
        fit,
        peak,
        remark: Some(remark).filter(|r| !r.is_empty() && fit != Fit::No),
    })
}

fn shape_of(model: &ModelRef) -> ModelRef {
    shapes::of_model(&model.to_string()).map_or_else(|| model.clone(), ModelRef::Shape)
}

/// Returns the recipe with built-in shapes instead of its models, and without rows.
pub fn with_shapes(recipe: &Recipe) -> Recipe {
    let mut recipe = recipe.clone();
    recipe.model.path = shape_of(&recipe.model.path);
    recipe.model.init = ModelInit::Random;
    recipe.distill.teacher = recipe.distill.teacher.as_ref().map(shape_of);
    recipe.data.train = vec!["-".into()];
    recipe.data.eval = Vec::new();
    recipe
}

fn rows_are_here(recipe: &Recipe, dir: &Path) -> bool {
    let files = recipe.data.train.iter().chain(&recipe.data.eval);
    dir.join("tokenizer.json").is_file() && files.into_iter().all(|f| Path::new(f).is_file())
}

/// Reads rows with the tokenizer of the local model directory: a hub id would download the full model.
fn read(recipe: &Recipe, dir: &Path) -> Result<RecipeRows> {
    let here = ModelRef::Dir(dir.to_path_buf());
    RecipeRows::read(recipe, &ModelDir::of_recipe_at(recipe, &here)?)
}
