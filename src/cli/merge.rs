//! `ft merge`: merges a base model and its adapters into one model directory.

use super::out::out;
use crate::base::Result;
use crate::base::units::bytes;
use crate::commands::merge::merge;
use crate::commands::named;
use crate::recipe::Dtype;
use std::path::PathBuf;

/// Merge PEFT adapters into their base model
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft merge --adapter runs/lora --out merged     base model from the run
  ft merge --model base --adapter runs/lora/final --out merged
  ft merge --model base --adapter runs/lora/final --out merged --dtype f32
  ft merge --model base --adapter skill=0.7 --adapter style=0.3 --out both
  ft merge --model base --adapter habit=-1 --out without
  ft merge --model Qwen/Qwen3-0.6B --adapter someone/skill@v2 --out merged

A hub id may name its revision, as `someone/skill@v2`. The sum is computed in f32; --dtype is only the type of the stored weights.")]
pub struct Args {
    /// Base model: directory, run, or hub id [default: the base model in the adapter config]
    #[arg(long, value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// PEFT adapter directory, run, checkpoint, or hub id; several are added, each with its weight [default: 1]
    #[arg(long, value_name = "DIR[=WEIGHT]", required = true, value_parser = super::parse_weighted, add = super::completions::model())]
    pub adapter: Vec<(PathBuf, f32)>,
    /// New directory for the merged model
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// f32 or bf16 [default: as the base weights are stored]
    #[arg(long, value_name = "TYPE", value_parser = super::parse_dtype)]
    pub dtype: Option<Dtype>,
}

pub fn run(args: Args) -> Result<i32> {
    let names: Vec<PathBuf> = args.adapter.iter().map(|(dir, _)| dir.clone()).collect();
    let named = named::directories(args.model.as_deref(), &names)?;
    named.found.notes.iter().for_each(|line| super::note(line));
    let adapters: Vec<(PathBuf, f32)> = named
        .adapters
        .into_iter()
        .zip(&args.adapter)
        .map(|(dir, (_, w))| (dir, *w))
        .collect();
    let report = merge(&named.model, &adapters, &args.out, args.dtype)?;
    super::note(&format!(
        "merged {} of {} tensors, {}, stored as {}; rounding error {:.2e} of the weight change; \
         outputs differ by at most {:.2e} (largest output {:.3})",
        report.merged,
        report.tensors,
        bytes(report.bytes),
        report.dtypes.join(", "),
        report.rounding,
        report.logits.largest_change,
        report.logits.largest_logit,
    ));
    out(report.out.display())?;
    super::next(&report.out, &["generate", "eval", "quantize"]);
    Ok(0)
}
