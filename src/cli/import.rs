//! `ft import`: a recipe from a configuration of another training tool.

use super::out::out_raw;
use crate::base::paths::shell_word;
use crate::base::units::counted;
use crate::base::{Error, Result, files};
use crate::recipe;
use crate::recipe::import::{Registry, import, registry_folder};
use std::path::{Component, Path, PathBuf};

/// Make a recipe from a configuration of another training tool
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft import axolotl.yml                       prints the recipe
  ft import llamafactory.yaml --to my.toml    writes it

The file is YAML or JSON, of Axolotl, LLaMA-Factory, TRL, Unsloth or MLX. Each key of the recipe has the key of the other tool as a comment; what has no counterpart is
listed at the end of the recipe, with the reason.")]
pub struct Args {
    /// The configuration
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The new recipe [default: standard output]
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<i32> {
    let text = files::read_text(&args.file)?;
    let name = args.file.file_name().unwrap_or_default().to_string_lossy();
    refuse_others(&text, &args.file)?;
    let registry = registry(&text, &args.file)?;
    let imported = import(&text, &name, registry.as_ref())?;
    for (key, why) in &imported.left {
        super::note(&format!("{key}: {}", recipe::in_program_terms(why)));
    }
    super::note(&format!(
        "{} with a counterpart, {} without",
        counted(imported.taken, "key"),
        imported.left.len()
    ));
    if let Err(error) = recipe::parse(&imported.text, &name, &[]) {
        super::note(&format!(
            "the recipe is not complete: {}",
            recipe::in_program_terms(&error.to_string())
        ));
    }
    match args.to {
        None => out_raw(&imported.text)?,
        Some(to) if to.exists() => {
            return Err(Error::usage("the file already exists")
                .at_path(&to)
                .hint("give another name"));
        }
        Some(to) => {
            files::write_output(&to, imported.text.as_bytes())?;
            super::note(&format!("next:\n  ft plan --recipe {}", to.display()));
        }
    }
    Ok(0)
}

/// Errors: the file is a recipe of ft, or has rows.
fn refuse_others(text: &str, file: &Path) -> Result<()> {
    let ending = file.extension().map(|e| e.to_string_lossy().to_lowercase());
    if let Some("jsonl" | "ndjson" | "csv" | "tsv") = ending.as_deref() {
        return Err(Error::usage("this is a file of rows, not the configuration of a tool")
            .at_path(file)
            .hint("rows belong in `data.train` of a recipe; `ft recipes` lists recipes to start from"));
    }
    if recipe::written(text)
        .keys()
        .any(|key| recipe::table::find(key).is_some())
    {
        return Err(Error::usage("this is a recipe of ft, so it needs no import")
            .at_path(file)
            .hint(format!(
                "`ft plan {}` shows what it needs",
                shell_word(&file.display().to_string())
            )));
    }
    Ok(())
}

/// The datasets that a file of LLaMA-Factory names. Its folder is looked for in the current directory, in that of the file,
/// and in those above it.
fn registry(text: &str, file: &Path) -> Result<Option<Registry>> {
    let Some(folder) = registry_folder(text) else {
        return Ok(None);
    };
    let above = file.ancestors().skip(1).map(|dir| dir.join(&folder));
    let folders = [PathBuf::from(&folder)].into_iter().chain(above);
    let Some(folder) = folders.into_iter().find(|dir| dir.join("dataset_info.json").is_file()) else {
        return Ok(None);
    };
    let text = files::read_text(&folder.join("dataset_info.json"))?;
    let shown = folder
        .components()
        .filter(|part| *part != Component::CurDir)
        .collect::<PathBuf>();
    Registry::read(&text, &shown.to_string_lossy()).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_and_rows_are_not_imported() {
        let refused = |text: &str, name: &str| refuse_others(text, Path::new(name)).map_err(|e| e.to_string());
        let e = refused("[model]\npath = \"m\"\n", "a b/r.toml").unwrap_err();
        assert!(
            e.contains("a recipe of ft") && e.contains("`ft plan 'a b/r.toml'`"),
            "{e}"
        );
        let e = refused("{\"prompt\": \"a\"}\n", "data/train.jsonl").unwrap_err();
        assert!(e.contains("data/train.jsonl") && e.contains("`data.train`"), "{e}");
        for config in ["base_model: m\nadapter: lora\n", "{\"model\": {\"path\": \"m\"}}", ""] {
            refused(config, "r.yaml").unwrap();
        }
    }
}
