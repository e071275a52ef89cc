//! The arguments `RECIPE key=value ...` of several subcommands, and the errors for flags that are keys of a recipe.

use super::completions;
use crate::base::{Error, Result};
use crate::recipe::{self, LoadedRecipe, peers};
use crate::report::warn;
use clap::error::{ContextKind, ContextValue};
use std::ffi::OsString;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct RecipeArgs {
    /// The recipe (examples: `ft recipes`); the flag is optional: `ft train my.toml`
    #[arg(long, value_name = "FILE", add = completions::recipe())]
    pub recipe: Option<PathBuf>,
    /// The recipe, and values such as `train.max_steps=20`
    // Shown as `[RECIPE] [KEY=VALUE]...`: one list, from which `take_recipe` takes the recipe.
    #[arg(value_name = "RECIPE] [KEY=VALUE", add = completions::recipe_or_key())]
    pub overrides: Vec<String>,
}

impl RecipeArgs {
    /// Reads and checks the recipe, and prints a warning for each key without effect.
    pub fn load_and_warn(&mut self) -> Result<LoadedRecipe> {
        let loaded = self.load()?;
        for line in &loaded.warnings {
            warn(line);
        }
        Ok(loaded)
    }

    /// Reads and checks the recipe; the caller prints its warnings.
    pub fn load(&mut self) -> Result<LoadedRecipe> {
        self.take_recipe()?;
        match &self.recipe {
            Some(recipe) => recipe::load(recipe, &self.overrides),
            None => Err(Error::usage("no recipe is given")
                .expected("a recipe file, as in `ft train my.toml`")
                .hint("`ft recipes` lists recipes to start from, `ft recipes copy NAME` copies one")),
        }
    }

    /// Takes a word without `=` as the recipe. Errors: there are two.
    pub fn take_recipe(&mut self) -> Result<()> {
        let is_file = |o: &String| !o.contains('=') || PathBuf::from(o).is_file();
        let Some(index) = self.overrides.iter().position(is_file) else {
            return Ok(());
        };
        let file = self.overrides.remove(index);
        if let Some(recipe) = &self.recipe {
            return Err(Error::usage("two recipes are given")
                .found(format!("`{}` and `{file}`", recipe.display()))
                .hint("write values as `key=value`, as in `train.max_steps=20`"));
        }
        self.recipe = Some(file.into());
        match self.overrides.iter().find(|o| is_file(o)) {
            Some(second) => Err(Error::usage("argument is not `key=value`")
                .found(format!("`{second}`"))
                .hint("write the dotted recipe path and the value, as in `train.max_steps=20`")),
            None => Ok(()),
        }
    }
}

/// Subcommands that accept recipe keys.
const WITH_RECIPE: [&str; 7] = ["train", "plan", "data", "eval", "distill", "bench", "tune-lr"];

/// Returns the error for a flag that clap does not know and that is a recipe key of ft or of another tool; `None`: the
/// error of clap is better.
pub fn explain(error: &clap::Error, arguments: &[OsString]) -> Option<Error> {
    if error.kind() != clap::error::ErrorKind::UnknownArgument {
        return None;
    }
    let words: Vec<String> = arguments.iter().map(|a| a.to_string_lossy().into_owned()).collect();
    let command = words.get(1).filter(|c| WITH_RECIPE.contains(&c.as_str()))?;
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let at = words
        .iter()
        .position(|w| w == flag || w.starts_with(&format!("{flag}=")))?;
    let (name, given) = match words[at].split_once('=') {
        Some((name, value)) => (name, Some(value.to_string())),
        None => (
            words[at].as_str(),
            words.get(at + 1).filter(|w| !w.starts_with("--")).cloned(),
        ),
    };
    let name = name.trim_start_matches('-');
    let unknown = Error::usage(format!("`ft {command}` has no flag `{flag}`"));
    if let Some(key) = peers::key_for(name) {
        let value = given.unwrap_or_else(|| "true".into());
        let value = match peers::value_for(name, &key, &value) {
            Some(toml) => toml.trim_matches('"').to_string(),
            None => "VALUE".into(),
        };
        return Some(unknown.hint(format!("write recipe values as `key=value`: `{key}={value}`")));
    }
    let last = name.rsplit('.').next().unwrap_or(name);
    let sentence = peers::sentence_for(last).map(str::to_string);
    let path: Vec<String> = name.split('.').map(str::to_string).collect();
    let near = || Some(recipe::suggest::hint(&path, false)).filter(|hint| hint.starts_with("did you mean"));
    sentence.or_else(near).map(|hint| unknown.hint(hint))
}
