//! `ft plan`: the forecast of a recipe from `config.json` alone; the rows are read too where they are here.

use super::rows::{self, Rows};
use super::setup::{self, Described};
use super::defaults::{self, Before};
use super::{adapters, forecast, learning, tuning::Tuning};
use crate::base::Result;
use crate::data::order::BatchStream;
use crate::ops;
use crate::plan::Plan;
use crate::recipe::Recipe;
use candle_core::Device;
use std::path::Path;

pub struct Planned {
    pub plan: Plan,
    /// What the plan had to assume.
    pub notes: Vec<String>,
}

/// Loads no weights.
///
/// Errors: what is wrong with the config, with files that are here, or a plan above `memory.budget`.
pub fn plan(recipe: &Recipe) -> Result<Planned> {
    let spec = setup::read_spec(&recipe.model.path, &recipe.model.revision)?;
    // A GPU that a recipe names may be on another machine.
    let device = match recipe.model.device.as_str() {
        "auto" => ops::device::open("auto")?.device,
        _ => Device::Cpu,
    };
    let rows = if rows_are_here(recipe) {
        Some(read(recipe)?)
    } else {
        None
    };
    let stored = setup::Stored::find(Path::new(&recipe.model.path), &spec, recipe.model.init)?;
    let before = Before::default();
    let lengths = rows.as_ref().map(|rows| rows.train.lengths());
    let (mut settled, mut choices) = defaults::settle(recipe, &spec, lengths.as_deref(), &before);
    let mut notes = Vec::new();
    let mut forecast = match &rows {
        Some(rows) => {
            let n = rows.train.examples.len();
            let stream = BatchStream::new(&rows.train, rows::stream(&settled, n))?;
            choices.extend(defaults::settle_blocks(&mut settled, &spec, n, stream.steps(), &before));
            let recipe = &settled;
            let prepared = adapters::of(recipe, &spec)?;
            let tuning = Tuning::new(recipe, &spec, &spec.params(), &prepared)?;
            match learning::check(recipe, &tuning, stream.steps()) {
                Ok(()) => notes.extend(learning::warnings(recipe, &tuning, &stream)),
                Err(e) => notes.push(format!("`ft train` would refuse this: {e}")),
            }
            forecast::forecast(
                recipe,
                &spec,
                &prepared.adapters,
                &tuning,
                Some(&stream),
                &stored,
                &device,
            )?
        }
        None => {
            notes.push(format!(
                "the rows are not here: every row is taken as {} tokens long, a step as {} forward passes",
                recipe.data.max_length, settled.train.gradient_accumulation_steps
            ));
            let recipe = &settled;
            let prepared = adapters::of(recipe, &spec)?;
            let tuning = Tuning::new(recipe, &spec, &spec.params(), &prepared)?;
            forecast::forecast(recipe, &spec, &prepared.adapters, &tuning, None, &stored, &device)?
        }
    };
    forecast.plan.choices.splice(0..0, choices);
    match forecast.refused {
        Some(refused) if refused.by_budget => return Err(refused.error),
        // The run may be meant for another machine.
        Some(refused) => notes.push(format!("`ft train` would refuse this here: {}", refused.error)),
        None => {}
    }
    Ok(Planned {
        plan: forecast.plan,
        notes,
    })
}

fn rows_are_here(recipe: &Recipe) -> bool {
    let files = recipe.data.train.iter().chain(&recipe.data.eval);
    Path::new(&recipe.model.path).join("tokenizer.json").is_file() && files.into_iter().all(|f| Path::new(f).is_file())
}

fn read(recipe: &Recipe) -> Result<Rows> {
    let model = Described::open(
        &recipe.model.path,
        &recipe.model.revision,
        recipe.data.chat_template.as_deref(),
    )?;
    Rows::read(recipe, &model)
}
