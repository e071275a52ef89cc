//! `ft data --json`: the counts of a recipe's rows.

use super::rows::Rows;
use super::setup::ModelDir;
use crate::base::Result;
use crate::data::{Dataset, Stats};
use crate::recipe::Recipe;
use serde_json::{Value, json};

/// Reads all rows. Errors: an invalid model directory or row.
pub fn counts(recipe: &Recipe) -> Result<Value> {
    let model = ModelDir::of_recipe(recipe)?;
    let Rows { train, eval, questions } = Rows::read(recipe, &model)?;
    if let Some(questions) = questions {
        return Ok(json!({
            "train": {"rows": questions.train.len()},
            "eval": {"rows": questions.eval.len()},
            "max_length": recipe.data.max_length,
        }));
    }
    Ok(json!({
        "train": of(&train),
        "eval": eval.as_ref().map(of),
        "max_length": recipe.data.max_length,
    }))
}

fn of(rows: &Dataset) -> Value {
    let Stats {
        tokens,
        trained_tokens,
        truncated_rows,
        truncated_tokens,
        dropped_rows,
        longest,
        shortest,
        ..
    } = rows.stats;
    json!({
        "rows": rows.examples.len(), "tokens": tokens, "trained_tokens": trained_tokens,
        "truncated_rows": truncated_rows, "truncated_tokens": truncated_tokens, "dropped_rows": dropped_rows,
        "longest": longest, "shortest": shortest,
    })
}
