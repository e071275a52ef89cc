//! `--recipe R key=value ...`, as several subcommands take it.

use crate::base::{Error, Result};
use crate::recipe::{self, Loaded};
use crate::report::warn;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct RecipeArgs {
    /// The recipe, a TOML file (`ft recipes` lists some to start from)
    #[arg(long, value_name = "FILE")]
    pub recipe: PathBuf,
    /// Values that take the place of the recipe's, such as `train.max_steps=20`
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
}

impl RecipeArgs {
    /// Reads and checks the recipe, and shows a warning for each key without effect.
    pub fn load_and_warn(&self) -> Result<Loaded> {
        let loaded = self.load()?;
        for line in &loaded.warnings {
            warn(line);
        }
        Ok(loaded)
    }

    /// Reads and checks the recipe; its warnings are left to the caller.
    pub fn load(&self) -> Result<Loaded> {
        if let Some(file) = self.overrides.iter().find(|o| !o.contains('=') && o.ends_with(".toml")) {
            return Err(Error::usage("a recipe is given by its flag")
                .found(format!("`{file}`"))
                .hint(format!("write `--recipe {file}`")));
        }
        recipe::load(&self.recipe, &self.overrides)
    }
}
