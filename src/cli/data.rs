//! `ft data`: shows rendered rows with the trained tokens marked, and the counts; rows and statistics as JSON.

use super::out::{out, out_colored, out_raw};
use super::recipe_args::RecipeArgs;
use crate::base::Result;
use crate::commands::data;
use crate::report;

/// Show rendered rows with the trained tokens marked, and the counts
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft data recipes/quickstart.toml
  ft data --recipe my.toml --rows 20 data.train_on=all
  ft data my.toml --json | head -1  one row per line: ids, mask, spans, text
  ft data my.toml --stats           rows, tokens, lengths, cut rows by source
  ft data my.toml --stats --json    the same as one JSON object")]
pub struct Args {
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Number of rows to show [default: 3; with --json: all]
    #[arg(long, value_name = "N")]
    pub rows: Option<usize>,
    /// Print rows as JSON, one per line: token ids, loss mask, spans of trained tokens, text
    #[arg(long)]
    pub json: bool,
    /// Print statistics without rows: lengths, tokens, cut rows, for each source; with --json as one object
    #[arg(long, conflicts_with = "rows")]
    pub stats: bool,
}

/// Rows that are shown without `--rows`.
const SHOWN: usize = 3;

pub fn run(mut args: Args) -> Result<i32> {
    let loaded = args.recipe.load_and_warn()?;
    let recipe = &loaded.recipe;
    match (args.stats, args.json) {
        (true, true) => out(data::counts(recipe)?)?,
        (true, false) => out_raw(&data::statistics(recipe)?)?,
        (false, true) => data::rows(recipe, args.rows.unwrap_or(usize::MAX), &mut |row| out(row))?,
        (false, false) => out_colored(data::describe(
            recipe,
            args.rows.unwrap_or(SHOWN),
            report::style().color,
        )?)?,
    }
    Ok(0)
}
