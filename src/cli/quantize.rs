//! `ft quantize`: writes a model directory with quantized projections.

use super::out::out;
use crate::base::units::bytes;
use crate::base::{Error, Result};
use crate::commands::named;
use crate::commands::quantize::{QuantizeRequest, quantize};
use crate::quant::Format;
use std::path::PathBuf;

/// Quantize the projections of a model to 8 or 4 bits
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft quantize --model base --to nf4 --out base-nf4
  ft quantize --model base --to int4 --budget 6GiB --data rows.jsonl --out mixed

nf4 uses the format of bitsandbytes: transformers can load the directory. The other formats, and nf4 of a model with experts,
are specific to ft.
With --budget the attention and the MLP of each layer get 16 bits, 8 bits or the bits of --to, chosen by the measured
increase of the loss on the rows of --data; quantization.md in the new directory reports the measurements and the choice.")]
pub struct Args {
    /// Model: directory, run, checkpoint, or hub id
    #[arg(long, value_name = "MODEL")]
    pub model: PathBuf,
    /// int8, int4 or nf4; with --budget the smallest format that can be chosen
    #[arg(long, value_name = "FORMAT", value_parser = ["int8", "int4", "nf4"])]
    pub to: String,
    /// New directory
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Number of weights that share a scale: 128 (int8), 64 or 128 (int4) [default: a row, 64]
    #[arg(hide_short_help = true, long, value_name = "N")]
    pub group_size: Option<usize>,
    /// nf4: keep the scales in 32 bits
    #[arg(hide_short_help = true, long)]
    pub no_double_quantization: bool,
    /// Most memory for all weights, such as 6GiB
    #[arg(long, value_name = "SIZE", requires = "data", value_parser = super::parse_bytes)]
    pub budget: Option<u64>,
    /// Calibration rows
    #[arg(long, value_name = "FILE", requires = "budget")]
    pub data: Option<PathBuf>,
    /// Most calibration tokens
    #[arg(hide_short_help = true, long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub calibration_tokens: u32,
}

pub fn run(args: Args) -> Result<i32> {
    let to = format(&args)?;
    let budget = args.budget.zip(args.data.as_deref());
    let named = named::directories(Some(&args.model), &[])?;
    named.found.notes.iter().for_each(|line| super::note(line));
    let report = quantize(&QuantizeRequest {
        model: &named.model,
        out: &args.out,
        to,
        budget,
        calibration_tokens: args.calibration_tokens as usize,
    })?;
    super::note(&report.text);
    super::note(&format!(
        "{} before, {} after",
        bytes(report.before),
        bytes(report.after)
    ));
    out(report.out.display())?;
    super::next(&report.out, &["generate", "eval"]);
    Ok(0)
}

fn format(args: &Args) -> Result<Format> {
    let bad = |expected: &str| {
        Error::usage(format!("--to {} has no groups of this size", args.to))
            .at("--group-size")
            .found(args.group_size.unwrap_or(0))
            .expected(expected)
    };
    if args.no_double_quantization && args.to != "nf4" {
        return Err(Error::usage("--no-double-quantization needs --to nf4").found(format!("--to {}", args.to)));
    }
    match (args.to.as_str(), args.group_size) {
        ("int8", None) => Ok(Format::Int8 { group: 0 }),
        ("int8", Some(128)) => Ok(Format::Int8 { group: 128 }),
        ("int8", _) => Err(bad("128, or no --group-size: one scale per row")),
        ("int4", None | Some(64)) => Ok(Format::Int4 { group: 64 }),
        ("int4", Some(128)) => Ok(Format::Int4 { group: 128 }),
        ("int4", _) => Err(bad("64 or 128")),
        (_, None | Some(64)) => Ok(Format::Nf4 {
            double: !args.no_double_quantization,
        }),
        _ => Err(bad("64")),
    }
}
