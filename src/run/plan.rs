//! `ft plan`: the forecast of a recipe from `config.json` alone; the rows are read too where they are here.

use super::rows::{self, Rows};
use super::setup::{self, Described};
use super::{adapters, forecast, tuning::Tuning};
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
    let prepared = adapters::of(recipe, &spec)?;
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
    let mut notes = Vec::new();
    let forecast = match &rows {
        Some(rows) => {
            let stream = BatchStream::new(&rows.train, rows::stream(recipe, rows.train.examples.len()))?;
            let tuning = Tuning::new(recipe, &spec, &spec.params(), &prepared, rows.train.examples.len())?;
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
                "the rows are not here: every row is taken as {} tokens long",
                recipe.data.max_length
            ));
            let tuning = Tuning::new(recipe, &spec, &spec.params(), &prepared, 0)?;
            forecast::forecast(recipe, &spec, &prepared.adapters, &tuning, None, &stored, &device)?
        }
    };
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
