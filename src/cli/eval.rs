//! `ft eval`: loss, perplexity and accuracy of a model on a data file; of a reward model accuracy and margin.

use super::out::{out, out_text};
use crate::base::Result;
use crate::recipe::{Dtype, Render};
use crate::run::evaluate::evaluate;
use std::path::PathBuf;

/// Loss and perplexity on a data file; accuracy where rows have answers, or of a reward model on pairs
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft eval --model runs/quickstart/final --data assets/world/eval.jsonl
  ft eval --model base --adapter runs/lora/final --data eval.jsonl --json
  ft eval --model base --adapter runs/reward/final --data pairs.jsonl")]
pub struct Args {
    /// Model directory, or hub id
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// PEFT adapter directory
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Rows: jsonl, json, csv or parquet
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// How prompts and answers that are texts become one text, as `data.render` of a recipe: auto, chat or plain
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = render)]
    pub render: Render,
    /// f32 or bf16 [default: as the weights are stored]
    #[arg(long, value_name = "TYPE", value_parser = super::parse_dtype)]
    pub dtype: Option<Dtype>,
    /// One JSON object: loss, perplexity, tokens, accuracy (of a reward model margin and mean_reward)
    #[arg(long)]
    pub json: bool,
}

fn render(text: &str) -> std::result::Result<Render, String> {
    Render::parse(text).ok_or(format!("expected one of {}", Render::NAMES.join(", ")))
}

pub fn run(args: Args) -> Result<i32> {
    let report = evaluate(
        &args.model.to_string_lossy(),
        args.adapter.as_deref(),
        &args.data,
        args.render,
        args.dtype,
    )?;
    if args.json {
        out(report.json())?
    } else {
        out_text(report.text())?
    }
    Ok(0)
}
