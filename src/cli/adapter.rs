//! `ft adapter`: shows an adapter, compares two, combines several into one.

use super::out::out;
use crate::base::Result;
use crate::base::units::{bytes, count};
use crate::commands::adapter_tools as tools;
use clap::Subcommand;
use std::path::PathBuf;

/// Show, compare or combine PEFT adapters
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft adapter show runs/lora/final
  ft adapter diff runs/a/final runs/b/final
  ft adapter combine skill=0.7 style=0.3 --out both
  ft adapter combine skill habit=-1 --rank 16 --out changed")]
pub struct Args {
    #[command(subcommand)]
    action: AdapterAction,
}

#[derive(Debug, Subcommand)]
enum AdapterAction {
    /// Show the trained modules, the size and the base model of an adapter
    Show {
        /// PEFT adapter: directory, run, or hub id
        dir: PathBuf,
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// Show the differences between two adapters
    Diff {
        /// PEFT adapter: directory, run, or hub id
        a: PathBuf,
        /// Another PEFT adapter
        b: PathBuf,
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// Combine LoRA adapters of one base model: the weighted sum of their weight changes
    Combine {
        /// Adapters (directories, runs, hub ids), each with its weight [default: 1]; a negative weight subtracts the adapter
        #[arg(value_name = "DIR[=WEIGHT]", required = true, value_parser = super::parse_weighted)]
        adapters: Vec<(PathBuf, f32)>,
        /// New adapter directory
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Compress to this rank [default: the sum of the ranks, without loss]
        #[arg(long, value_name = "R", value_parser = clap::value_parser!(u32).range(1..))]
        rank: Option<u32>,
    },
}

pub fn run(args: Args) -> Result<i32> {
    match args.action {
        AdapterAction::Show { dir, json } => {
            let shown = tools::show(&tools::find(&dir)?)?;
            if json {
                out(shown.json())?;
                return Ok(0);
            }
            out(format!("{:<10} {}", "kind", shown.kind))?;
            out(format!("{:<10} {}", "trains", count(shown.elements)))?;
            out(format!("{:<10} {}", "size", bytes(shown.bytes)))?;
            out(format!(
                "{:<10} {}",
                "base",
                shown.base.as_deref().unwrap_or("not named")
            ))?;
            let print = shown
                .fingerprint
                .as_deref()
                .unwrap_or("unknown (saved by another tool)");
            out(format!("{:<10} {print}", "weights"))?;
            for (key, value) in &shown.settings {
                out(format!("{key:<10} {value}"))?;
            }
            for line in &shown.modules {
                out(format!("  {line}"))?;
            }
        }
        AdapterAction::Diff { a, b, json } => {
            let found = tools::diff(&tools::find(&a)?, &tools::find(&b)?)?;
            if json {
                out(found.json())?;
                return Ok(0);
            }
            if found.same() {
                out("the adapters are identical")?;
            }
            for line in found.lines() {
                out(line)?;
            }
        }
        AdapterAction::Combine {
            adapters,
            out: to,
            rank,
        } => {
            let found = adapters.iter().map(|(name, w)| Ok((tools::find(name)?, *w)));
            let adapters = found.collect::<Result<Vec<_>>>()?;
            let rank = rank.map(|rank| rank as usize);
            let report = tools::combine(&adapters, &to, rank)?;
            if let Some(rank) = rank.filter(|rank| *rank > report.rank) {
                super::note(&format!(
                    "rank {rank} exceeds the sum of the ranks, {}; the sum is used, because higher ranks would only add zeros",
                    report.rank
                ));
            }
            if let Some(lost) = report.lost {
                super::note(&format!(
                    "compressed: at most {lost:.2e} of the weight change of a linear is lost"
                ));
            }
            super::note(&format!("rank {}, {} linear layers", report.rank, report.modules));
            out(to.display())?;
        }
    }
    Ok(0)
}
