//! Lengths and languages of the texts of a recipe's training rows, for `ft data`.

use crate::base::Result;
use crate::data::peek::RowKind;
use crate::data::screen::stats::RowStats;
use crate::recipe::Recipe;
use crate::setup::ModelDir;
use crate::setup::prompts;
use crate::setup::rows::spec;
use crate::setup::sources::{RowSet, sources};

/// Reads all training rows. Errors: an invalid model directory or row.
pub fn of(recipe: &Recipe) -> Result<RowStats> {
    let model = ModelDir::of_recipe(recipe)?;
    let kind = match recipe.train.stage {
        stage if stage.is_preference() => RowKind::Pairs,
        _ if prompts::reinforces(recipe) => RowKind::Prompts,
        _ => RowKind::Text,
    };
    let sources = sources(recipe, RowSet::Train)?;
    let spec = spec(&sources, &recipe.data, recipe.train.stage, model.spec.vocab);
    RowStats::read(&spec, kind, &model.tokenizer, model.template())
}
