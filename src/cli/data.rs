//! `ft data`: rendered rows with the trained tokens marked, and the counts.

use super::out::out_text;
use super::recipe_args::RecipeArgs;
use crate::base::Result;
use crate::report;

/// Show rows as the model sees them, trained tokens marked, and the counts
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft data --recipe recipes/quickstart.toml
  ft data --recipe my.toml --rows 20 data.train_on=all")]
pub struct Args {
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Rows to show
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub rows: usize,
}

pub fn run(args: Args) -> Result<i32> {
    let loaded = args.recipe.load_and_warn()?;
    out_text(crate::run::rows::describe(
        &loaded.recipe,
        args.rows,
        report::style().color,
    )?)?;
    Ok(0)
}
