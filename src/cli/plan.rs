//! `ft plan`: the memory that a recipe needs, before anything is allocated.

use super::out::{out, out_text};
use super::recipe_args::RecipeArgs;
use crate::base::Result;
use crate::commands::plan::plan;
use crate::report;

/// Forecast the memory of a recipe; allocates nothing
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft plan recipes/quickstart.toml
  ft plan --recipe my.toml --budget 24GiB            does it fit?
  ft plan --recipe my.toml tune.method=lora --json")]
pub struct Args {
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Most memory to use, in place of the recipe's `memory.budget`
    #[arg(long, value_name = "SIZE", value_parser = super::parse_bytes)]
    pub budget: Option<u64>,
    /// Print one JSON object: every line in bytes, the total as `peak_bytes`
    #[arg(long)]
    pub json: bool,
}

pub fn run(mut args: Args) -> Result<i32> {
    let mut loaded = args.recipe.load_and_warn()?;
    if args.budget.is_some() {
        loaded.recipe.memory.budget = args.budget;
    }
    let planned = plan(&loaded.recipe)?;
    planned.notes.iter().for_each(|line| super::note(line));
    if args.json {
        out(planned.json())?
    } else {
        out_text(planned.plan.table_within(report::result_width()))?;
        for text in [planned.verdict.text, planned.disk.text()] {
            let width = report::result_width().unwrap_or(usize::MAX / 2);
            report::wrapped(&text, width, 2, false).iter().try_for_each(out)?;
        }
    }
    Ok(0)
}
