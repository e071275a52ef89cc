//! `ft data`: shows rendered rows with the trained tokens marked, and the counts.

use super::out::{out, out_text};
use super::recipe_args::RecipeArgs;
use crate::base::Result;
use crate::report;

/// Show rendered rows with the trained tokens marked, and the counts
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft data recipes/quickstart.toml
  ft data --recipe my.toml --rows 20 data.train_on=all
  ft data my.toml --json                             rows, tokens, trained tokens, cut rows")]
pub struct Args {
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Number of rows to show
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub rows: usize,
    /// Print the counts as one JSON object, without rows
    #[arg(long)]
    pub json: bool,
}

pub fn run(mut args: Args) -> Result<i32> {
    let loaded = args.recipe.load_and_warn()?;
    if args.json {
        out(crate::commands::data::counts(&loaded.recipe)?)?;
        return Ok(0);
    }
    out_text(crate::commands::data::describe(
        &loaded.recipe,
        args.rows,
        report::style().color,
    )?)?;
    Ok(0)
}
