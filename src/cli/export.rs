//! `ft export`: writes a model or adapter directory from a checkpoint, a run, or a model.

use super::out::out;
use crate::base::{Error, Result};
use crate::commands::export::export;
use crate::recipe::Dtype;
use serde_json::json;
use std::path::PathBuf;

/// Convert a checkpoint or a run to a model or adapter directory
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft export runs/sft/checkpoint-400 --out model-400
  ft export runs/sft --out model                       final/, else the newest checkpoint
  ft export --model base --to hf --dtype f32 --out base-f32

A checkpoint is exported as `final/` would be at that step. The base model of the run must be on this machine (or in
the hub cache); the training rows are not needed.")]
pub struct Args {
    /// Checkpoint, run, model directory, adapter directory, or hub id
    #[arg(value_name = "FROM", required_unless_present = "model")]
    from: Option<PathBuf>,
    /// The same, as a flag
    #[arg(long, value_name = "FROM", conflicts_with = "from")]
    model: Option<PathBuf>,
    /// hf: a Hugging Face directory
    #[arg(long, value_name = "FORMAT", default_value = "hf", value_parser = ["hf"])]
    to: String,
    /// New directory
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// f32 or bf16, for whole models [default: unchanged]
    #[arg(long, value_name = "TYPE", value_parser = super::parse_dtype)]
    dtype: Option<Dtype>,
    /// Print one JSON object: out, kind (model or adapter), step
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<i32> {
    let Some(from) = args.from.or(args.model) else {
        return Err(Error::usage("no checkpoint or model is given").expected("a checkpoint, a run or a model"));
    };
    let report = export(&from.to_string_lossy(), &args.out, args.dtype)?;
    report.notes.iter().for_each(|line| super::note(line));
    if args.json {
        let kind = if report.adapter { "adapter" } else { "model" };
        out(json!({"out": report.out.display().to_string(), "kind": kind, "step": report.step}))?;
        return Ok(0);
    }
    if let Some(step) = report.step {
        super::note(&format!("the state after step {step}"));
    }
    out(report.out.display())?;
    super::next(
        &report.out,
        if report.adapter {
            &["generate", "eval", "merge"]
        } else {
            &["generate", "eval"]
        },
    );
    Ok(0)
}
