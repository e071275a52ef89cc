//! `ft tune-lr`: suggests a learning rate.

use super::out::{out, out_colored};
use super::recipe_args::RecipeArgs;
use crate::base::{Error, Result, files};
use crate::commands::tune_lr;
use crate::report;
use crate::train::RateSweep;
use std::path::PathBuf;

/// Suggest a learning rate: a short run with a rate that grows (learning-rate range test)
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft tune-lr my.toml                               100 steps from 1e-7 to 1
  ft tune-lr my.toml --steps 50 --to 0.01 --svg lr.svg
  ft tune-lr my.toml tune.method=full --json       all numbers

The run is made in a directory that is removed; it evaluates, saves and exports nothing. The schedule of the recipe is
not used.")]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Steps of the test
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(tune_lr::LEAST_STEPS..))]
    steps: u64,
    /// Learning rate of the first step
    #[arg(long, value_name = "RATE", default_value_t = 1e-7)]
    from: f64,
    /// Learning rate of the last step
    #[arg(long, value_name = "RATE", default_value_t = 1.0)]
    to: f64,
    /// Write the curves to a file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(mut args: Args) -> Result<i32> {
    args.recipe.load_and_warn()?;
    let Some(file) = &args.recipe.recipe else {
        return Err(Error::internal("a recipe was loaded without its file"));
    };
    let sweep = RateSweep {
        from: args.from,
        to: args.to,
        steps: args.steps,
    };
    tune_lr::check(&sweep)?;
    if let Some(svg) = &args.svg {
        // Before the test, which takes minutes.
        files::check_output(svg)?;
        files::AtomicFile::create(svg)?;
    }
    let found = tune_lr::measure(file, &args.recipe.overrides, sweep)?;
    if args.json {
        out(found.json())?;
    } else {
        let colors = report::result_is_terminal() && report::style().color;
        // As `ft runs plot`.
        let width = report::result_width().unwrap_or(80).min(120);
        out_colored(found.lines(width, colors).join("\n"))?;
    }
    if let Some(svg) = &args.svg {
        files::write_output(svg, found.svg().as_bytes())?;
    }
    Ok(0)
}
