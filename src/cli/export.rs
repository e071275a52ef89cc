//! `ft export`: writes a model or adapter directory, or a GGUF file, from a checkpoint, a run, or a model.

use super::out::out;
use crate::base::paths::shell_word;
use crate::base::units::bytes;
use crate::base::{Error, Result};
use crate::commands::export::export;
use crate::commands::gguf;
use crate::commands::mlx;
use crate::gguf::FileType;
use crate::recipe::Dtype;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Convert a checkpoint or a run to a model or adapter directory
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft export runs/sft/checkpoint-400 --out model-400
  ft export runs/sft --out model  final/, else the newest checkpoint
  ft export --model base --to hf --dtype f32 --out base-f32
  ft export runs/sft --to gguf --type q4_k_m --out sft-gguf

A checkpoint is exported as `final/` would be at that step. The base model of the run must be on this machine (or in
the hub cache); the training rows are not needed. A LoRA adapter becomes a GGUF adapter: merge it first (`ft merge`) for
a whole model.")]
pub struct Args {
    /// Checkpoint, run, model directory, adapter directory, or hub id
    #[arg(value_name = "FROM", required_unless_present = "model", add = super::completions::run_directory())]
    from: Option<PathBuf>,
    /// The same, as a flag
    #[arg(long, value_name = "FROM", conflicts_with = "from")]
    model: Option<PathBuf>,
    /// hf: a Hugging Face directory; gguf: for llama.cpp, Ollama; mlx: for mlx-lm
    #[arg(long, value_name = "FORMAT", default_value = "hf", value_parser = ["hf", "gguf", "mlx"], hide_possible_values = true)]
    to: String,
    /// New directory
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Of a checkpoint: its base model, if it is not where the run had it
    #[arg(long, value_name = "MODEL")]
    base: Option<String>,
    /// f32 or bf16, for whole models [default: unchanged]
    #[arg(long, value_name = "TYPE", value_parser = super::parse_dtype)]
    dtype: Option<Dtype>,
    /// Of a GGUF file: f32, f16, bf16, q8_0, q6_k, q4_k_m or q4_0 [default: q8_0; of an adapter f16]
    #[arg(long = "type", value_name = "TYPE", value_parser = parse_type)]
    file_type: Option<FileType>,
    /// Of a GGUF file: the pre-tokenizer's name in llama.cpp [default: an equal or a near one, if ft has its name]
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pre_tokenizer: Option<String>,
    /// Print one JSON object: out, kind (model or adapter), step
    #[arg(long)]
    json: bool,
}

pub fn run(mut args: Args) -> Result<i32> {
    let Some(from) = args.from.take().or(args.model.take()) else {
        return Err(Error::usage("no checkpoint or model is given").expected("a checkpoint, a run or a model"));
    };
    if args.base.is_some() && args.to != "hf" {
        return Err(Error::usage("`--base` is for `--to hf` only")
            .at("--base")
            .found(format!("--to {}", args.to))
            .expected("--to hf")
            .hint(format!(
                "export to a Hugging Face directory first, then convert that with `--to {}`",
                args.to
            )));
    }
    if args.to == "gguf" {
        return to_gguf(&from.to_string_lossy(), &args);
    }
    if args.file_type.is_some() || args.pre_tokenizer.is_some() {
        return Err(
            Error::usage("`--type` and `--pre-tokenizer` have an effect on GGUF files only").hint("add `--to gguf`"),
        );
    }
    if args.to == "mlx" {
        return to_mlx(&from.to_string_lossy(), &args);
    }
    let report = export(&from.to_string_lossy(), &args.out, args.dtype, args.base.as_deref())?;
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

fn to_mlx(from: &str, args: &Args) -> Result<i32> {
    let report = mlx::export(from, &args.out, args.dtype)?;
    report.notes.iter().for_each(|line| super::note(line));
    if args.json {
        let kind = if report.adapter { "adapter" } else { "model" };
        out(json!({"out": report.out.display().to_string(), "kind": kind, "base": report.base}))?;
        return Ok(0);
    }
    out(report.out.display())?;
    let dir = shell_word(&report.out.display().to_string());
    super::note(&match report.base {
        Some(base) => format!(
            "next:\n  mlx_lm.generate --model {} --adapter-path {dir} --prompt TEXT",
            shell_word(&base)
        ),
        None => format!("next:\n  mlx_lm.generate --model {dir} --prompt TEXT"),
    });
    Ok(0)
}

fn parse_type(text: &str) -> std::result::Result<FileType, String> {
    FileType::parse(&text.to_lowercase()).ok_or_else(|| format!("expected {}", FileType::NAMES.join(", ")))
}

fn to_gguf(from: &str, args: &Args) -> Result<i32> {
    if args.dtype.is_some() {
        return Err(Error::usage("`--dtype` has no effect on GGUF files")
            .at("--dtype")
            .found("--to gguf")
            .expected("--to hf or --to mlx")
            .hint("give `--type`"));
    }
    let report = gguf::export(from, &args.out, args.file_type, args.pre_tokenizer.as_deref())?;
    report.notes.iter().for_each(|line| super::note(line));
    if args.json {
        let formats = report.fidelity.iter().map(|f| {
            json!({"type": f.block.to_string(), "tensors": f.tensors, "bytes": f.bytes, "rms_error": f.rms,
                "largest_error": f.largest})
        });
        let formats: Vec<_> = formats.collect();
        let kind = if report.adapter { "adapter" } else { "model" };
        out(
            json!({"out": report.file.display().to_string(), "kind": kind, "architecture": report.architecture,
            "bytes": report.bytes, "formats": formats, "notes": report.notes}),
        )?;
        return Ok(0);
    }
    gguf::fidelity(&report.fidelity)
        .iter()
        .for_each(|line| super::note(line));
    super::note(&format!(
        "architecture {}, {}",
        report.architecture,
        bytes(report.bytes)
    ));
    out(report.file.display())?;
    if !report.adapter {
        let folder = report.file.parent().unwrap_or(Path::new("."));
        super::note(&format!(
            "next:\n  llama-cli -m {}\n  ollama create NAME -f {}",
            shell_word(&report.file.display().to_string()),
            shell_word(&folder.join("Modelfile").display().to_string())
        ));
    }
    Ok(0)
}
