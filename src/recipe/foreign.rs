//! Detects a recipe in YAML, JSON or Python instead of TOML. The error names the command that translates such a file.

use crate::base::Error;
use crate::base::paths::shell_word;
use std::path::Path;

/// Returns the error for a recipe that is not TOML; `None` if it may be TOML.
pub fn refused(text: &str, path: &Path) -> Option<Error> {
    let ending = path.extension().map(|e| e.to_string_lossy().to_lowercase());
    let language = match ending.as_deref() {
        Some("toml") => of_text(text)?,
        Some("yaml" | "yml") => "YAML",
        Some("json" | "jsonc") => "JSON",
        Some("py") => "Python",
        Some("jsonl" | "ndjson" | "csv" | "tsv") => {
            let error = Error::usage("a recipe is TOML, and this is a file of rows").at_path(path);
            return Some(
                error.hint("rows belong in `data.train` of a recipe; `ft recipes` lists recipes to start from"),
            );
        }
        _ => of_text(text)?,
    };
    let error = Error::usage(format!("a recipe is TOML, and this is {language}")).at_path(path);
    if language == "Python" {
        return Some(
            error.hint("`ft recipes` lists recipes to start from, `ft recipes schema` all keys (docs/recipe.md)"),
        );
    }
    // `ft import` does not replace a file.
    let toml = path.with_extension("toml");
    let to = if toml == path {
        path.with_file_name("imported.toml")
    } else {
        toml
    };
    let (from, to) = if path.starts_with("/dev") {
        // Standard input or a pipe was read to its end.
        ("FILE".to_string(), "NAME.toml".to_string())
    } else {
        let word = |path: &Path| shell_word(&path.display().to_string());
        (word(path), word(&to))
    };
    Some(error.hint(format!(
        "`ft import {from} --to {to}` translates a configuration of another tool; `ft recipes schema` prints all keys (docs/recipe.md)",
    )))
}

/// Detects the language by the first line with content.
fn of_text(text: &str) -> Option<&'static str> {
    let mut lines = text.lines().map(str::trim);
    let first = lines.find(|l| !l.is_empty() && !l.starts_with('#'))?;
    if first.starts_with('{') {
        return Some("JSON");
    }
    if first == "---" || is_pair(first) {
        return Some("YAML");
    }
    (first.starts_with("import ") || first.starts_with("from ")).then_some("Python")
}

/// True for `key: value`, and for `key:`, which opens a table.
fn is_pair(line: &str) -> bool {
    let Some((key, _)) = line.split_once(':') else {
        return false;
    };
    let key = key.trim().trim_matches(['"', '\'']);
    !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_languages_are_named_with_the_command_that_translates() {
        let of = |name: &str, text: &str| refused(text, Path::new(name)).map(|e| e.to_string());
        let yaml = "# train\nmodel_name_or_path: Qwen/Qwen3-4B\nlora_rank: 8\nlearning_rate: 1.0e-4  # high\n\
                    deepspeed: ds.json\ndatasets:\n  - path: x\n";
        for (name, command) in [
            ("r.yaml", "`ft import r.yaml --to r.toml`"),
            ("a b/r.yml", "`ft import 'a b/r.yml' --to 'a b/r.toml'`"),
            ("a/r.toml", "`ft import a/r.toml --to a/imported.toml`"),
            ("recipe", "`ft import recipe --to recipe.toml`"),
            ("/dev/stdin", "`ft import FILE --to NAME.toml`"),
        ] {
            let e = of(name, yaml).unwrap();
            assert!(e.contains("this is YAML") && e.contains(command), "{e}");
            // A part of the file as a recipe would be another run.
            assert!(!e.contains("tune.lora.r"), "{e}");
        }
        assert!(of("r", "datasets:\n  - path: x\n").unwrap().contains("this is YAML"));
        let e = of("r.json", "{\n  \"max_steps\": 3,\n \"output_dir\": \"out\"\n}").unwrap();
        assert!(
            e.contains("this is JSON") && e.contains("`ft import r.json --to r.toml`"),
            "{e}"
        );
        let e = of("train.py", "import torch\n").unwrap();
        assert!(
            e.contains("Python") && e.contains("`ft recipes`") && !e.contains("ft import"),
            "{e}"
        );
        let e = of("data/train.jsonl", "{\"prompt\": 1}\n").unwrap();
        assert!(e.contains("`data.train`") && !e.contains("ft import"), "{e}");
        for toml in [
            "[model]\npath = \"a:b\"\n",
            "model.path = \"x\"",
            "# only: a comment\n",
            "",
            "oops",
        ] {
            assert!(of("r.toml", toml).is_none(), "{toml}");
        }
    }
}
