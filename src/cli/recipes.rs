//! `ft recipes`: the recipes inside the binary: list, show, copy.

use super::out::{out, out_raw, out_text};
use crate::base::{Error, Result, files};
use crate::recipe::{self, suggest};
use std::path::PathBuf;

/// Name and text of every shipped recipe.
pub const SHIPPED: [(&str, &str); 12] = [
    (
        "block-llama3-8b-24gb",
        include_str!("../../recipes/block-llama3-8b-24gb.toml"),
    ),
    ("distill-qwen3", include_str!("../../recipes/distill-qwen3.toml")),
    ("distill-tiny", include_str!("../../recipes/distill-tiny.toml")),
    ("dpo-tiny", include_str!("../../recipes/dpo-tiny.toml")),
    ("grpo-start-tiny", include_str!("../../recipes/grpo-start-tiny.toml")),
    ("grpo-tiny", include_str!("../../recipes/grpo-tiny.toml")),
    ("lora-qwen3-4b", include_str!("../../recipes/lora-qwen3-4b.toml")),
    ("ppo-tiny", include_str!("../../recipes/ppo-tiny.toml")),
    ("pretrain-tiny", include_str!("../../recipes/pretrain-tiny.toml")),
    ("quickstart", include_str!("../../recipes/quickstart.toml")),
    ("reward-tiny", include_str!("../../recipes/reward-tiny.toml")),
    ("sft-qwen", include_str!("../../recipes/sft-qwen.toml")),
];

/// Recipes to start from: list, show, copy
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft recipes
  ft recipes show quickstart
  ft recipes copy sft-qwen                           writes sft-qwen.toml here")]
pub struct Args {
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Names, methods and models
    List,
    /// Print a recipe
    Show { name: String },
    /// Write a recipe to a file
    Copy {
        name: String,
        /// The new file [default: NAME.toml]
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
    },
}

pub fn run(args: Args) -> Result<i32> {
    match args.action.unwrap_or(Action::List) {
        Action::List => list()?,
        Action::Show { name } => out_raw(find(&name)?.1)?,
        Action::Copy { name, to } => {
            let (name, text) = find(&name)?;
            let to = to.unwrap_or_else(|| PathBuf::from(format!("{name}.toml")));
            if to.exists() {
                return Err(Error::new("file exists already")
                    .at_path(&to)
                    .hint("give another name with `--to FILE`"));
            }
            files::write_atomic(&to, text.as_bytes())?;
            out(to.display())?;
        }
    }
    Ok(0)
}

fn list() -> Result<()> {
    let width = SHIPPED.iter().map(|(n, _)| n.len()).max().unwrap_or(0);
    for (name, text) in SHIPPED {
        let r = recipe::parse(text, name, &[])?.recipe;
        let method = format!("{} {}", r.train.stage.name(), r.tune.method.name());
        out_text(format!("{name:<width$}  {method:<14}  {}", r.model.path))?;
    }
    Ok(())
}

fn find(name: &str) -> Result<(&'static str, &'static str)> {
    let wanted = name.strip_suffix(".toml").unwrap_or(name);
    if let Some(found) = SHIPPED.iter().find(|(n, _)| *n == wanted) {
        return Ok(*found);
    }
    let names: Vec<&str> = SHIPPED.iter().map(|(n, _)| *n).collect();
    let error =
        Error::usage(format!("no recipe has the name `{name}`")).expected(format!("one of {}", names.join(", ")));
    Err(match suggest::nearest(wanted, names) {
        Some(near) => error.hint(format!("did you mean `{near}`?")),
        None => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_recipe_in_the_folder_is_shipped_and_parses_without_a_warning() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes");
        let on_disk = files::list(&folder).unwrap();
        assert_eq!(on_disk.len(), SHIPPED.len());
        for (path, (name, text)) in on_disk.iter().zip(SHIPPED) {
            assert_eq!(path.file_name().unwrap().to_str().unwrap(), format!("{name}.toml"));
            assert_eq!(files::read_text(path).unwrap(), text);
            let loaded = recipe::load(path, &[]).unwrap();
            assert_eq!(loaded.warnings, Vec::<String>::new(), "{name}");
            let again = recipe::parse(&loaded.resolved, name, &[]).unwrap();
            assert_eq!(loaded.values, again.values, "{name}");
            assert!(
                text.starts_with('#'),
                "{name} starts with a comment that says what it does"
            );
            assert!(text.lines().count() <= 40, "{name} is short");
        }
    }

    #[test]
    fn names_are_found_or_suggested() {
        assert_eq!(find("quickstart.toml").unwrap().0, "quickstart");
        assert!(
            find("quikstart")
                .unwrap_err()
                .to_string()
                .contains("did you mean `quickstart`?")
        );
    }
}
