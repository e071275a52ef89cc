//! `ft convert`: writes a dense model as a mixture of experts, or a mixture with routers of two levels.

use super::out::out;
use crate::base::units::count;
use crate::base::{Error, Result};
use crate::commands::convert::{ConvertReport, ConvertRequest, ExpertOrigin, convert, smile};
use crate::commands::named;
use std::path::{Path, PathBuf};

/// Turn a dense model into a mixture of experts; convert a router
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft convert --model base --to moe --experts 8 --top-k 4 --out base-moe
  ft convert --model base --to moe --experts 8 --split rows.jsonl --out base-moe
  ft convert --model base-moe --to smile --groups 4 --out base-smile

Without --split every expert is a copy of the MLP, and the loss is that of the dense model. With --split the experts share the
neurons of the MLP: the model keeps its size, and a token needs less work. smile routes a token to groups of experts first. Train
the result (docs/moe.md).")]
pub struct Args {
    /// Model: directory, run, checkpoint, or hub id; llama, mistral, qwen2 or qwen3 (moe), qwen3_moe (smile)
    #[arg(long, value_name = "MODEL")]
    pub model: PathBuf,
    /// moe: a mixture of experts; smile: a mixture with routers of two levels
    #[arg(long, value_name = "KIND", value_parser = ["moe", "smile"])]
    pub to: String,
    /// moe: number of experts of a layer
    #[arg(long, value_name = "N", required_if_eq("to", "moe"), value_parser = clap::value_parser!(u32).range(2..=4096))]
    pub experts: Option<u32>,
    /// moe: number of experts of a token [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub top_k: Option<u32>,
    /// smile: number of groups of experts
    #[arg(long, value_name = "N", required_if_eq("to", "smile"), value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub groups: Option<u32>,
    /// smile: number of groups of a token [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub groups_per_token: Option<u32>,
    /// moe: divide the neurons of each MLP among the experts, by their activations on these rows
    #[arg(long, value_name = "FILE")]
    pub split: Option<PathBuf>,
    /// New directory
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Most tokens of the rows of --split
    #[arg(hide_short_help = true, long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    pub calibration_tokens: u32,
    /// moe: seed of the routers of copies, and of the first clusters of a split
    #[arg(hide_short_help = true, long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
}

pub fn run(args: Args) -> Result<i32> {
    let named = named::directories(Some(&args.model), &[])?;
    named.found.notes.iter().for_each(|line| super::note(line));
    let report = if args.to == "smile" {
        to_smile(&args, &named.model)?
    } else {
        to_moe(&args, &named.model)?
    };
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

/// Refuses options of the other kind.
fn only(kind: &str, given: [(&str, bool); 3]) -> Result<()> {
    match given.into_iter().find(|(_, is)| *is) {
        Some((flag, _)) => Err(Error::usage(format!("{flag} has no effect with --to {kind}")).hint("remove it")),
        None => Ok(()),
    }
}

fn to_smile(args: &Args, model: &Path) -> Result<ConvertReport> {
    only(
        "smile",
        [
            ("--experts", args.experts.is_some()),
            ("--top-k", args.top_k.is_some()),
            ("--split", args.split.is_some()),
        ],
    )?;
    smile::convert(&smile::SmileRequest {
        model,
        out: &args.out,
        groups: args.groups.unwrap_or(1) as usize,
        chosen: args.groups_per_token.unwrap_or(1) as usize,
    })
}

fn to_moe(args: &Args, model: &Path) -> Result<ConvertReport> {
    only(
        "moe",
        [
            ("--groups", args.groups.is_some()),
            ("--groups-per-token", args.groups_per_token.is_some()),
            ("", false),
        ],
    )?;
    convert(&ConvertRequest {
        model,
        out: &args.out,
        experts: args.experts.unwrap_or(2) as usize,
        top_k: args.top_k.unwrap_or(2) as usize,
        origin: match &args.split {
            Some(data) => ExpertOrigin::Split(data, args.calibration_tokens as usize),
            None => ExpertOrigin::Copy,
        },
        seed: args.seed,
    })
}
