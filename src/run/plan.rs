//! `ft plan`: the forecast of a recipe from `config.json` alone; the rows are read too where they are here.

use super::defaults::{self, Before};
use super::row_sizes::RowSizes;
use super::rows::{self, Rows};
use super::setup::{self, Described};
use super::{adapters, directory, forecast, header, learning, tuning::Tuning};
use crate::base::units::bytes;
use crate::base::{Result, files, memory};
use crate::data::describe::visible;
use crate::data::order::BatchStream;
use crate::model::shapes;
use crate::ops;
use crate::plan::Plan;
use crate::recipe::{ModelInit, Recipe};
use candle_core::Device;
use serde_json::{Value, json};
use std::path::Path;

pub struct Planned {
    pub plan: Plan,
    pub verdict: Verdict,
    pub disk: Space,
    /// What the plan had to assume.
    pub notes: Vec<String>,
    /// It does not fit this machine.
    pub refused: bool,
}

/// Does the run fit, here and now?
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    pub fits: bool,
    /// One line.
    pub text: String,
}

/// What a run writes, as `ft train` counts it before it starts.
#[derive(Debug, Clone, PartialEq)]
pub struct Space {
    /// Checkpoints (one more than are kept for a moment), the result, and what only the run itself needs.
    pub needed: u64,
    /// `None`: the disk does not tell.
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
            None => "unknown how much is free".into(),
        };
        let verdict = if self.fits() { "" } else { "does not fit: " };
        format!(
            "disk: {verdict}{} for checkpoints and the result, {free} in {}",
            bytes(self.needed),
            self.directory
        )
    }
}

impl Planned {
    /// The plan's own JSON, the verdict, and the disk.
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

/// Loads no weights.
///
/// Errors: what is wrong with the config, with files that are here, or a plan above a budget of the recipe.
pub fn plan(recipe: &Recipe) -> Result<Planned> {
    let (dir, mut spec) = setup::read_spec(&recipe.model.path, &recipe.model.revision, recipe.model.init)?;
    spec.tied = setup::stays_tied(recipe, &spec)?;
    // A GPU that a recipe names may be on another machine.
    let device = match recipe.model.device.as_str() {
        "auto" => ops::device::open("auto")?.device,
        _ => Device::Cpu,
    };
    let rows = if rows_are_here(recipe, &dir) {
        Some(read(recipe, &dir)?)
    } else {
        None
    };
    let stored = setup::Stored::find(&dir, &spec, recipe.model.init)?;
    let before = Before::default();
    let lengths = rows.as_ref().map(|rows| rows.train.lengths());
    let (mut settled, mut choices) = defaults::settle(recipe, &spec, lengths.as_deref(), &before);
    let mut notes = Vec::new();
    let stream = match &rows {
        Some(rows) => {
            let formats = rows::formats(recipe, &rows.train, rows.eval.as_ref());
            notes.extend(formats.iter().map(|line| format!("format {}", visible(line))));
            notes.extend(rows.train.readings.iter().flat_map(|r| r.warnings()));
            let count = rows.train.examples.len();
            let stream = BatchStream::new(&rows.train, rows::stream(&settled, count))?;
            choices.extend(defaults::settle_blocks(
                &mut settled,
                &spec,
                count,
                stream.steps(),
                &before,
            ));
            Some(stream)
        }
        None => {
            notes.push(format!(
                "the rows are not here: every row is taken as {} tokens long, a step as {} forward passes",
                recipe.data.max_length, settled.train.gradient_accumulation_steps
            ));
            None
        }
    };
    let recipe = &settled;
    let params = spec.params();
    let prepared = adapters::of(recipe, &spec)?;
    let tuning = Tuning::new(recipe, &spec, &params, &prepared)?;
    if let Some(stream) = &stream {
        match learning::check(recipe, &tuning, stream.steps()) {
            Ok(()) => notes.extend(learning::warnings(recipe, &tuning, stream)),
            Err(e) => notes.push(format!("`ft train` would refuse this: {e}")),
        }
    }
    let eval = rows.as_ref().and_then(|rows| rows.eval.as_ref());
    let sizes = stream.as_ref().map(|stream| RowSizes::new(recipe, stream, eval));
    let mut forecast = forecast::forecast(
        recipe,
        &spec,
        &prepared.adapters,
        &tuning,
        sizes.as_ref(),
        &stored,
        &device,
    )?;
    forecast.plan.choices.splice(0..0, choices);
    let given = u64::try_from(recipe.train.max_steps).ok();
    let steps = stream
        .as_ref()
        .map(|stream| stream.steps())
        .or(given)
        .unwrap_or(u64::MAX);
    let elements = header::trained_elements(&tuning, steps, &params, &prepared.adapters);
    let directory = Path::new(&recipe.train.output_dir);
    let disk = Space {
        needed: directory::space_needed(recipe, &spec, elements, forecast.place),
        free: files::free_space(directory),
        directory: recipe.train.output_dir.clone(),
    };
    let verdict = forecast.verdict(recipe);
    let does_not_fit = forecast.refused.is_some();
    match forecast.refused {
        Some(refused) if refused.by_budget => return Err(refused.error),
        // The run may be meant for another machine.
        Some(refused) => notes.push(format!("`ft train` would refuse this here: {}", refused.error)),
        None => {}
    }
    Ok(Planned {
        plan: forecast.plan,
        verdict,
        disk,
        notes,
        refused: does_not_fit,
    })
}

/// Does a recipe fit the memory that is free here?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    Fits,
    /// Nearly all of it, or only with weights on the disk or in fewer bits.
    Tight,
    No,
}

pub struct Fitted {
    pub fit: Fit,
    pub peak: u64,
    /// What the planner gave up to make it fit.
    pub remark: Option<String>,
}

/// The verdict on a recipe whose model has a built-in shape: nothing is read and nothing is fetched.
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
    let disk = lost("memory.tier", &["disk"]).map(|_| "weights on the disk".to_string());
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

fn shape_of(path: &str) -> String {
    shapes::of_model(path).unwrap_or_else(|| path.to_string())
}

/// The recipe with built-in shapes in the place of its models, and without rows.
pub fn with_shapes(recipe: &Recipe) -> Recipe {
    let mut recipe = recipe.clone();
    recipe.model.path = shape_of(&recipe.model.path);
    recipe.model.init = ModelInit::Random;
    recipe.distill.teacher = recipe.distill.teacher.as_deref().map(shape_of);
    recipe.data.train = vec!["-".into()];
    recipe.data.eval = Vec::new();
    recipe
}

fn rows_are_here(recipe: &Recipe, dir: &Path) -> bool {
    let files = recipe.data.train.iter().chain(&recipe.data.eval);
    dir.join("tokenizer.json").is_file() && files.into_iter().all(|f| Path::new(f).is_file())
}

/// From the model's directory: a hub id would be downloaded whole.
fn read(recipe: &Recipe, dir: &Path) -> Result<Rows> {
    let mut here = recipe.clone();
    here.model.path = dir.to_string_lossy().into_owned();
    Rows::read(recipe, &Described::of_recipe(&here)?)
}
