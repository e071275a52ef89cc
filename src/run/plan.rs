//! `ft plan`: the forecast of a recipe from `config.json` alone; the rows are read too where they are here.

use super::defaults::{self, Before};
use super::row_sizes::RowSizes;
use super::rows::{self, Rows};
use super::setup::{self, Described};
use super::{adapters, directory, forecast, header, learning, tuning::Tuning};
use crate::base::units::bytes;
use crate::base::{Result, files};
use crate::data::order::BatchStream;
use crate::ops;
use crate::plan::Plan;
use crate::recipe::Recipe;
use candle_core::Device;
use serde_json::{Value, json};
use std::path::Path;

pub struct Planned {
    pub plan: Plan,
    pub verdict: Verdict,
    pub disk: Space,
    /// What the plan had to assume.
    pub notes: Vec<String>,
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
    let (dir, mut spec) = setup::read_spec(&recipe.model.path, &recipe.model.revision)?;
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
    })
}

fn rows_are_here(recipe: &Recipe, dir: &Path) -> bool {
    let files = recipe.data.train.iter().chain(&recipe.data.eval);
    dir.join("tokenizer.json").is_file() && files.into_iter().all(|f| Path::new(f).is_file())
}

/// From the model's directory: a hub id would be downloaded whole.
fn read(recipe: &Recipe, dir: &Path) -> Result<Rows> {
    let template = recipe.data.chat_template.as_deref();
    let model = Described::open(&dir.to_string_lossy(), &recipe.model.revision, template)?;
    Rows::read(recipe, &model)
}
