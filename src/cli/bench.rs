//! `ft bench`: measures the first steps of a recipe.

use super::out::{out, out_text};
use super::recipe_args::RecipeArgs;
use crate::base::{Error, Result};
use crate::commands::bench;

/// Measure the steps of a recipe, and compare them with a saved measurement
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft bench recipes/quickstart.toml   20 steps: seconds, tokens/s, memory
  ft bench my.toml --save before     keeps the numbers under a name
  ft bench my.toml --against before  compares with them
  ft bench my.toml memory.activations=recompute --steps 5

The run is made in a directory that is removed; it evaluates, saves and exports nothing.")]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Steps that are measured, after one that is not; 2 or more
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(2..=1_000_000))]
    steps: u64,
    /// Save the numbers under a name, or to a file with a `/` or `.json` in its name
    #[arg(long, value_name = "NAME")]
    save: Option<String>,
    /// Compare with saved numbers
    #[arg(long, value_name = "NAME")]
    against: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(mut args: Args) -> Result<i32> {
    let loaded = args.recipe.load()?;
    // Before the run: a name that is wrong must not cost its time.
    let baseline = args
        .against
        .as_ref()
        .map(|name| bench::saved(&loaded, name))
        .transpose()?;
    if let Some(name) = &args.save {
        bench::refuse_strangers(&bench::place(&loaded, name))?;
    }
    let Some(file) = &args.recipe.recipe else {
        return Err(Error::internal("a recipe was loaded without its file"));
    };
    let measured = bench::measure(file, &args.recipe.overrides, args.steps)?;
    let saved = args.save.as_ref().map(|name| bench::place(&loaded, name));
    // Before the output, which may be closed.
    saved.iter().try_for_each(|path| measured.write(path))?;
    if args.json {
        out(&measured.json)?;
    } else {
        out_text(measured.lines(baseline.as_ref()).join("\n"))?;
    }
    if let Some(path) = saved {
        super::note(&format!("saved to {}", path.display()));
    }
    Ok(0)
}
