//! Parses and checks a recipe; the result is one typed value with every default filled in.
//! Contains names, defaults and checks. Uses no tensors, opens no model.
//!
//! Text and arguments -> `draft` (the input with positions) -> `check` (type and range of every key) ->
//! `RecipeSections` (the typed sections of `table`) -> `lower` (rules over several keys) -> `Recipe`. `table` drives
//! all steps.

mod check;
pub mod device_ref;
mod draft;
mod foreign;
pub mod import;
mod lower;
pub mod model_ref;
pub mod peers;
mod resolved;
mod schema;
pub mod suggest;
pub mod table;
pub mod terms;
pub mod types;
mod value;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_generated;
#[cfg(test)]
mod tests_stages;

pub use device_ref::DeviceRef;
pub use lower::ACCUMULATION;
pub use model_ref::ModelRef;
pub use resolved::{reference, without_paths};
pub use schema::schema;
pub use terms::in_program_terms;
pub use types::*;
pub use value::{Auto, ChunkSize, ValueKind};

use crate::base::{Error, Result, files, paths};
use check::KeyValues;
use draft::{Draft, Problem};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use table::{KeyPath, RecipeSections, Section};

/// A recipe that passed every check.
#[derive(Debug, Clone)]
pub struct LoadedRecipe {
    pub recipe: Recipe,
    /// The recipe as written, without the arguments.
    pub text: String,
    /// TOML: every key with its value, and a comment: `recipe`, `argument` or `default: <reason>`.
    pub resolved: String,
    /// Written keys without effect, one line each.
    pub warnings: Vec<String>,
    /// Every key path with its value as TOML, in the order of the table; used to compare two runs.
    pub values: Vec<(String, String)>,
    /// The keys that have no effect with the other settings.
    pub without_effect: BTreeSet<&'static str>,
}

impl LoadedRecipe {
    /// Writes the resolved value of an `auto` key into `values` and `resolved`. `value` is TOML.
    pub fn resolve(&mut self, KeyPath(key): KeyPath, value: &str, why: &str) {
        if let Some((_, old)) = self.values.iter_mut().find(|(path, _)| path == key) {
            *old = value.to_string();
        }
        self.resolved = resolved::with_value(&self.resolved, key, value, why);
    }

    /// Writes remarks into `resolved`, as comments below the header of a table.
    pub fn remark(&mut self, table: &str, lines: &[String]) {
        let header = format!("[{table}]\n");
        let comments: String = lines
            .iter()
            .map(|line| format!("# {}\n", line.replace(['\n', '\r'], " ")))
            .collect();
        self.resolved = self.resolved.replacen(&header, &format!("{header}{comments}"), 1);
    }
}

/// Returns the numbers and texts of a TOML text by dotted path, for `resolved.toml` of a run.
pub fn written(text: &str) -> BTreeMap<String, String> {
    let typed = |value: &draft::WrittenValue| match value {
        draft::WrittenValue::Integer(i) => Some(i.to_string()),
        draft::WrittenValue::Number(x) => Some(x.to_string()),
        draft::WrittenValue::Text(t) => Some(t.clone()),
        _ => None,
    };
    let written = Draft::new(text, "resolved.toml", &[]).written;
    written
        .iter()
        .filter_map(|w| Some((w.dotted(), typed(&w.value)?)))
        .collect()
}

/// Formats a number as TOML for this key.
pub fn number(key: KeyPath, value: f64) -> String {
    let whole = table::find(key.0).is_some_and(|k| matches!(k.kind, ValueKind::Integer));
    if whole {
        format!("{value:.0}")
    } else {
        resolved::number(value)
    }
}

/// Reads the recipe at `path` and applies `key=value` overrides.
/// Errors: the file cannot be read; all errors of `parse`.
pub fn load(path: &Path, overrides: &[String]) -> Result<LoadedRecipe> {
    if path.is_dir() {
        return Err(Error::usage("recipe is a directory")
            .at_path(path)
            .expected("a TOML file"));
    }
    if !path.exists() {
        let hint = "`ft recipes` lists recipes to start from, `ft recipes copy NAME` copies one";
        let hint = paths::hint(path).unwrap_or(hint.into());
        return Err(Error::usage(format!("there is no recipe `{}`", path.display())).hint(hint));
    }
    let text = files::read_text_or_stdin(path)?;
    if let Some(error) = foreign::refused(&text, path) {
        return Err(error);
    }
    parse(&text, &path.display().to_string(), overrides)
}

/// Checks recipe text and overrides; `name` is the file name in messages.
/// Errors (exit code 2): all mistakes in one error, each with its position and a hint.
pub fn parse(text: &str, name: &str, overrides: &[String]) -> Result<LoadedRecipe> {
    let mut draft = Draft::new(text, name, overrides);
    let mut warnings = Vec::new();
    let mut values = KeyValues::defaults(table::keys());
    check::check(&mut draft, &mut values, &mut warnings);
    // If the text is not valid TOML, every key in it would be reported as missing too.
    let readable = !draft.problems.iter().any(|p| p.error.what().contains("not valid TOML"));
    if readable {
        lower::resolve_rivals(&mut values, &mut warnings);
    }
    let settings = RecipeSections::read(&values);
    if readable {
        lower::cross_check(&mut draft, &values, &settings);
    }
    if let Some(error) = together(std::mem::take(&mut draft.problems)) {
        return Err(error);
    }
    warnings.extend(lower::warnings(&draft, &values, &settings));
    let keys = values.0.iter().map(|entry| entry.key);
    let without_effect = keys.filter(|key| lower::unused(&values, &settings, key).is_some());
    Ok(LoadedRecipe {
        text: text.to_string(),
        without_effect: without_effect.map(|key| key.path.0).collect(),
        resolved: resolved::resolved(&values, &settings),
        warnings,
        values: values
            .0
            .iter()
            .map(|e| (e.key.path.0.to_string(), resolved::toml(&e.value)))
            .collect(),
        recipe: lower::lower(settings, &values),
    })
}

/// The default of a key as TOML; `None` for unknown keys, and for those whose default depends on model, rows or memory.
pub fn default_value(key: &str) -> Option<String> {
    let key = table::find(key).filter(|key| key.default != "\"auto\"")?;
    Some(resolved::toml(&check::default_of(key)))
}

/// Rebuilds a recipe from the values of an earlier run, in the form of `LoadedRecipe::values`.
///
/// Errors: keys or values that this version does not support.
pub fn again(values: &BTreeMap<String, String>) -> Result<LoadedRecipe> {
    let is_default = |path: &String, value: &String| {
        table::find(path).is_some_and(|key| resolved::toml(&check::default_of(key)) == *value)
    };
    let written = values.iter().filter(|(path, value)| !is_default(path, value));
    let arguments: Vec<String> = written.map(|(path, value)| format!("{path}={value}")).collect();
    parse("", "the recipe of the run", &arguments)
}

/// The keys that have no effect in a recipe, from its values as for `again`. Empty if this version does not support them.
pub fn without_effect(values: &BTreeMap<String, String>) -> BTreeSet<&'static str> {
    let known = values.iter().filter(|(path, _)| table::find(path).is_some());
    let known = known.map(|(path, value)| (path.clone(), value.clone())).collect();
    again(&known).map(|loaded| loaded.without_effect).unwrap_or_default()
}

/// Returns a single error unchanged, and several errors under one heading, in the order of the text.
fn together(mut problems: Vec<Problem>) -> Option<Error> {
    problems.sort_by(|a, b| a.place.cmp(&b.place));
    if problems.len() < 2 {
        return problems.pop().map(|p| p.error);
    }
    let mut what = format!("the recipe has {} errors", problems.len());
    for problem in &problems {
        what.push_str(&format!("\n\nerror: {}", problem.error));
    }
    Some(Error::usage(what))
}
