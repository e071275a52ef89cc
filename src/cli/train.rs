//! `ft train`: run a recipe, or show what it would do.

use super::recipe_args::RecipeArgs;
use crate::base::{Error, Result};
use std::path::{Path, PathBuf};

/// Train a model as a recipe says
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft train --recipe recipes/quickstart.toml
  ft train --recipe my.toml train.max_steps=20 tune.method=lora
  ft train --recipe my.toml --dry-run                the plan and the resolved recipe only
  ft train --recipe my.toml --resume                 go on from the newest complete checkpoint

Ctrl-C saves the state and stops (exit code 130); a second Ctrl-C stops at once.")]
pub struct Args {
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Check everything, print the plan and the resolved recipe, and stop
    #[arg(long)]
    pub dry_run: bool,
    /// Go on from the newest complete checkpoint of the run directory, or of DIR
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = "")]
    resume: Option<String>,
    /// Remove what an earlier run left in the run directory
    #[arg(long, conflicts_with = "resume")]
    pub overwrite: bool,
}

/// What `--resume` asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    No,
    /// From the recipe's own run directory.
    Newest,
    /// From this run directory or checkpoint.
    From(PathBuf),
}

impl Args {
    /// The word after `--resume` may be the first `key=value` instead of a directory.
    fn settle_resume(&mut self) -> Resume {
        match self.resume.take() {
            None => Resume::No,
            Some(word) if word.is_empty() => Resume::Newest,
            Some(word) if word.contains('=') && !Path::new(&word).exists() => {
                self.recipe.overrides.insert(0, word);
                Resume::Newest
            }
            Some(word) => Resume::From(PathBuf::from(word)),
        }
    }
}

pub fn run(mut args: Args) -> Result<i32> {
    let resume = args.settle_resume();
    let loaded = args.recipe.load()?;
    // WIRE: crate::run::train(loaded, resume, args.dry_run, args.overwrite)
    let _ = (loaded, resume, args.dry_run, args.overwrite);
    Err(Error::new("`ft train` is not wired yet"))
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
        let mut args = Only::try_parse_from(all).unwrap().args;
        (args.settle_resume(), args.recipe.overrides)
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
        let (what, overrides) = resume(&["train.seed=1", "--resume", "runs/a", "train.max_steps=2"]);
        assert_eq!(what, Resume::From("runs/a".into()));
        assert_eq!(overrides.len(), 2);
    }
}
