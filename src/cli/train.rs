//! `ft train`: runs a recipe, or shows its plan.

use super::out::{out, out_text};
use super::recipe_args::RecipeArgs;
use crate::base::paths::shell_word;
use crate::base::units::bytes;
use crate::base::{Result, secrets};
use crate::train::ranks::RunRanks;
use crate::train::{self, Resume, TrainOptions};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::Path;

const LONG: &str = "Examples:
  ft train --recipe recipes/quickstart.toml
  ft train --recipe my.toml train.max_steps=20 tune.method=lora
  ft train --recipe my.toml --dry-run   the plan and the resolved recipe only
  ft train --recipe my.toml --resume    continue from the newest checkpoint

Ctrl-C (or SIGTERM) stops the run. If gradients are kept until the update, the current step is canceled at the next
layer and the state after the previous step is saved; after `--resume` the step is computed again, bit-identical. If
gradients are applied immediately, the current step is finished first. Exit code 130 (SIGTERM: 143). A second Ctrl-C
ends the program immediately, without saving: exit code 131.

On a terminal the last line shows the progress. Without a terminal a plain progress line is written after ten seconds
without other output. FT_NO_PROGRESS=1 and --quiet turn both off.";

/// Train a model with a recipe
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft train recipes/quickstart.toml
  ft train --recipe my.toml train.max_steps=20 tune.method=lora
  ft train --recipe my.toml --dry-run   the plan and the resolved recipe only
  ft train --recipe my.toml --resume    continue from the newest checkpoint

Ctrl-C saves the state and stops; a second Ctrl-C stops immediately.",
    after_long_help = LONG)]
pub struct Args {
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Check everything, print the plan and the resolved recipe, and stop
    #[arg(long)]
    pub dry_run: bool,
    /// Continue from the newest complete checkpoint of the run directory, or of DIR
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = "", add = super::completions::run_directory())]
    resume: Option<String>,
    /// With --resume: if the newest checkpoint is damaged, continue from the newest one that is whole
    #[arg(long, requires = "resume")]
    allow_older: bool,
    /// Remove files of an earlier run from the run directory
    #[arg(long, conflicts_with = "resume")]
    pub overwrite: bool,
    /// Show where N steps spend their time: a table, and a trace for Perfetto
    #[arg(long, value_name = "steps=N", value_parser = parse_profile)]
    profile: Option<u64>,
    /// Print JSON at the end: final, peak_memory_bytes, forecast_bytes; with --dry-run the plan and the values
    #[arg(long)]
    json: bool,
}

impl Args {
    fn resume(&self) -> Resume {
        match self.resume.as_deref() {
            None => Resume::No,
            Some("") => Resume::Newest,
            Some(directory) => Resume::From(directory.into()),
        }
    }
}

/// The words of a command line in which the word after `--resume` (or `--resume=`) may also be the recipe or a `key=value`. Then
/// `--resume` gets the empty value of its own, and the word stays in its place.
pub fn separate_resume(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let is_setting = |word: &str| word.ends_with(".toml") || (word.contains('=') && !Path::new(word).exists());
    let mut out: Vec<OsString> = Vec::new();
    let mut ended = false;
    for argument in arguments {
        ended |= argument == "--";
        let word = argument.to_string_lossy();
        match word.strip_prefix("--resume=").filter(|word| !ended && is_setting(word)) {
            Some(setting) => out.extend(["--resume=".into(), setting.into()]),
            None => {
                let last = out.last_mut().filter(|last| !ended && *last == "--resume");
                if let Some(last) = last.filter(|_| is_setting(&word)) {
                    *last = "--resume=".into();
                }
                out.push(argument);
            }
        }
    }
    out
}

pub fn run(mut args: Args, ranks: &RunRanks) -> Result<i32> {
    let resume = args.resume();
    let loaded = args.recipe.load()?;
    let options = TrainOptions {
        resume,
        allow_older: args.allow_older,
        overwrite: args.overwrite,
        dry_run: args.dry_run,
        ranks: ranks.clone(),
        command: command_line(),
        profile: args.profile.unwrap_or(0),
        only_steps: false,
        sweep: None,
    };
    let outcome = train::train(&loaded, &options)?;
    if !ranks.is_root() {
        return Ok(0);
    }
    if args.dry_run {
        loaded.warnings.iter().for_each(|line| crate::report::warn(line));
        if args.json {
            let values: Vec<(&String, String)> = loaded
                .values
                .iter()
                .map(|(key, value)| (key, secrets::mask(value)))
                .collect();
            let is_masked = values.iter().any(|(_, value)| value.contains(secrets::MASK));
            let values: serde_json::Map<String, Value> = values
                .into_iter()
                .map(|(key, value)| (key.clone(), json!(value)))
                .collect();
            let mut line = json!({"plan": outcome.plan.json(), "recipe": values});
            if is_masked {
                note_mask();
                line["masked"] = json!(true);
            }
            out(line)?;
            return Ok(0);
        }
        out_text(outcome.plan.table_within(crate::report::result_width()))?;
        out("")?;
        let resolved = secrets::mask(&outcome.resolved);
        if resolved.contains(secrets::MASK) {
            note_mask();
        }
        out(resolved)?;
        return Ok(0);
    }
    if args.json {
        out(json!({
            "final": outcome.final_dir.as_ref().map(|dir| dir.display().to_string()),
            "peak_memory_bytes": outcome.peak_memory_bytes,
            "forecast_bytes": outcome.plan.peak_bytes,
        }))?;
        return Ok(0);
    }
    if let Some(final_dir) = &outcome.final_dir {
        super::note(&format!(
            "memory: peak {} measured, {} forecast",
            bytes(outcome.peak_memory_bytes),
            bytes(outcome.plan.peak_bytes)
        ));
        out(final_dir.display())?;
        if !outcome.next.is_empty() {
            super::note(&format!("next:\n  {}", outcome.next.join("\n  ")));
        }
    }
    Ok(0)
}

/// With such values the printed recipe does not work.
fn note_mask() {
    super::note(&format!(
        "values of the recipe that look like secrets are `{}` in this output; the recipe itself keeps them",
        secrets::MASK
    ));
}

/// Parses `steps=N`, or `N`.
fn parse_profile(text: &str) -> std::result::Result<u64, String> {
    let steps = text.strip_prefix("steps=").unwrap_or(text).parse().ok();
    steps
        .filter(|n| (1..=1000).contains(n))
        .ok_or_else(|| "expected steps=N, N from 1 to 1000".to_string())
}

/// The command of this process as a line for a shell. Secrets are masked: a run records it, and `ft push` publishes it.
fn command_line() -> String {
    line_of(std::env::args_os().skip(1))
}

fn line_of(arguments: impl Iterator<Item = OsString>) -> String {
    let words = arguments.map(|word| shell_word(&word.to_string_lossy()));
    let line = std::iter::once("ft".to_string()).chain(words).collect::<Vec<_>>();
    secrets::mask(&line.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        args: Args,
    }

    fn resume(words: &[&str]) -> (Resume, Vec<String>) {
        let mut all = vec!["ft", "--recipe", "r.toml"];
        all.extend(words);
        let all = separate_resume(all.into_iter().map(OsString::from));
        let args = Only::try_parse_from(all).unwrap().args;
        (args.resume(), args.recipe.overrides)
    }

    #[test]
    fn the_recorded_command_has_no_secrets() {
        let words = [
            "train",
            "r.toml",
            "rlhf.rewards=[\"program:sh -c 'judge --api-key \\\"a b\\\" sk-PLANTEDCMD0123456789' --password=x\"]",
            "data.train=https://me:pw@host/x.jsonl",
            "train.seed=1",
        ];
        assert_eq!(
            line_of(words.into_iter().map(OsString::from)),
            "ft train r.toml 'rlhf.rewards=[\"program:sh -c '\\''judge --api-key \\\"<secret>\\\" <secret>'\\'' \
             --password=<secret>\"]' data.train=https://<secret>@host/x.jsonl train.seed=1"
        );
    }

    #[test]
    fn resume_takes_a_directory_or_nothing() {
        assert_eq!(resume(&[]).0, Resume::No);
        assert_eq!(resume(&["--resume"]).0, Resume::Newest);
        assert_eq!(resume(&["--resume", "--dry-run"]).0, Resume::Newest);
        assert_eq!(resume(&["--resume", "runs/a"]).0, Resume::From("runs/a".into()));
        let (what, overrides) = resume(&["--resume", "train.seed=1", "train.max_steps=2"]);
        assert_eq!(what, Resume::Newest);
        assert_eq!(overrides, ["train.seed=1", "train.max_steps=2"]);
        // The last value of a key counts.
        let (what, overrides) = resume(&["train.seed=1", "--resume", "train.seed=2"]);
        assert_eq!(what, Resume::Newest);
        assert_eq!(overrides, ["train.seed=1", "train.seed=2"]);
        assert_eq!(resume(&["train.seed=1", "--resume=train.seed=2"]), (what, overrides));
        let (what, overrides) = resume(&["train.seed=1", "--resume", "other.toml"]);
        assert_eq!(what, Resume::Newest);
        assert_eq!(overrides, ["train.seed=1", "other.toml"]);
        let (what, overrides) = resume(&["train.seed=1", "--resume", "runs/a", "train.max_steps=2"]);
        assert_eq!(what, Resume::From("runs/a".into()));
        assert_eq!(overrides.len(), 2);
    }
}
