//! `ft convert`: writes a dense model as a mixture of experts.

use super::out::out;
use crate::base::Result;
use crate::base::units::count;
use crate::commands::convert::{Origin, Request, convert};
use crate::commands::named;
use std::path::PathBuf;

/// Turn a dense model into a mixture of experts
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft convert --model base --to moe --experts 8 --out base-moe
  ft convert --model base --to moe --experts 8 --top-k 4 --split rows.jsonl --out base-moe

Without --split every expert is a copy of the MLP, and the loss is that of the dense model. With --split the experts share the
neurons of the MLP: the model keeps its size, and a token needs less work. Train the result (docs/moe.md).")]
pub struct Args {
    /// Model: directory, run, checkpoint, or hub id; llama, mistral or qwen3
    #[arg(long, value_name = "MODEL")]
    pub model: PathBuf,
    /// moe: a mixture of experts
    #[arg(long, value_name = "KIND", value_parser = ["moe"])]
    pub to: String,
    /// Number of experts of a layer
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=4096))]
    pub experts: u32,
    /// Number of experts of a token
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    pub top_k: u32,
    /// Divide the neurons of each MLP among the experts, by their activations on these rows
    #[arg(long, value_name = "FILE")]
    pub split: Option<PathBuf>,
    /// New directory
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Most tokens of the rows of --split
    #[arg(hide_short_help = true, long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    pub calibration_tokens: u32,
    /// Seed of the routers of copies, and of the first clusters of a split
    #[arg(hide_short_help = true, long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
}

pub fn run(args: Args) -> Result<i32> {
    let (model, _, named) = named::directories(Some(&args.model), &[])?;
    named.notes.iter().for_each(|line| super::note(line));
    let report = convert(&Request {
        model: &model,
        out: &args.out,
        experts: args.experts as usize,
        top_k: args.top_k as usize,
        origin: match &args.split {
            Some(data) => Origin::Split(data, args.calibration_tokens as usize),
            None => Origin::Copy,
        },
        seed: args.seed,
    })?;
    let [before, after] = report.parameters;
    super::note(&format!(
        "a `{}` of {} parameters ({} before); a token is multiplied with {}",
        report.model_type,
        count(after),
        count(before),
        count(report.active)
    ));
    if let Some(reached) = report.reached {
        super::note(&format!(
            "on the rows the chosen experts have {:.1} % of the activation of the neurons",
            100.0 * reached
        ));
    }
    out(report.out.display())?;
    super::next(&report.out, &["eval", "generate"]);
    Ok(0)
}
