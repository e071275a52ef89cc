//! `ft distill`: stores the outputs of a teacher for the rows of a recipe.

use super::out::out;
use super::recipe_args::RecipeArgs;
use crate::base::Result;
use crate::base::units::{bytes, count};
use crate::train::teacher_cache;
use serde_json::json;
use std::path::PathBuf;

/// Store the outputs of a teacher for the rows of a recipe
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft distill cache --recipe distill.toml --out teacher-outputs
  ft train --recipe distill.toml distill.teacher_cache=teacher-outputs

The teacher runs once over all training rows; training then does not run the teacher or load its weights. A stopped
call can be repeated: it continues from the stored outputs.")]
pub struct Args {
    #[command(subcommand)]
    command: DistillCommand,
}

#[derive(Debug, clap::Subcommand)]
enum DistillCommand {
    /// Store the log-probabilities of the most likely ids for each trained token
    Cache(CacheArgs),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft distill cache --recipe distill.toml --out teacher-outputs
  ft distill cache --recipe distill.toml distill.top_k=128 --out teacher-128")]
struct CacheArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Directory for the outputs; outputs of an earlier call in it are reused
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<i32> {
    let DistillCommand::Cache(mut args) = args.command;
    let loaded = args.recipe.load_and_warn()?;
    let report = teacher_cache::cache(&loaded.recipe, &args.out, &mut |line| super::note(line))?;
    if args.json {
        out(json!({
            "out": report.out.display().to_string(), "documents": report.documents, "tokens": report.tokens,
            "shards": report.shards, "found": report.found, "bytes": report.bytes, "covered": report.top_k_mass,
        }))?;
        return Ok(0);
    }
    super::note(&format!(
        "{} tokens of {} rows in {}; the stored ids cover {:.2} % of the probability",
        count(report.tokens as u64),
        count(report.documents as u64),
        bytes(report.bytes),
        100.0 * report.top_k_mass
    ));
    out(report.out.display())?;
    Ok(0)
}
