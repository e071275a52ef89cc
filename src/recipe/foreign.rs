//! Detects a recipe in YAML, JSON or Python instead of TOML, and translates its first lines in the error.

use super::peers;
use crate::base::Error;
use std::path::Path;

/// Number of lines that a hint translates.
const SHOWN: usize = 6;

/// Returns the error for a recipe that is not TOML; `None` if it may be TOML.
pub fn refused(text: &str, path: &Path) -> Option<Error> {
    let ending = path.extension().map(|e| e.to_string_lossy().to_lowercase());
    let language = match ending.as_deref() {
        Some("toml") => of_text(text)?,
        Some("yaml" | "yml") => "YAML",
        Some("json" | "jsonc") => "JSON",
        Some("py") => "Python",
        _ => of_text(text)?,
    };
    let error = Error::usage(format!("a recipe is TOML, and this is {language}")).at_path(path);
    let lines: Vec<String> = text.lines().filter_map(translated).take(SHOWN).collect();
    Some(if lines.is_empty() {
        error.hint("`ft recipes` lists recipes to start from, `ft recipes schema` all keys (docs/recipe.md)")
    } else {
        error.hint(format!(
            "write each key as `table.key = value`; the first lines of this file as a recipe:\n      {}",
            lines.join("\n      ")
        ))
    })
}

/// Detects the language by the first line with content.
fn of_text(text: &str) -> Option<&'static str> {
    let mut lines = text.lines().map(str::trim);
    let first = lines.find(|l| !l.is_empty() && !l.starts_with('#'))?;
    if first.starts_with('{') {
        return Some("JSON");
    }
    if first == "---" || pair(first).is_some() {
        return Some("YAML");
    }
    (first.starts_with("import ") || first.starts_with("from ")).then_some("Python")
}

/// Parses `key: value` from a line of YAML or JSON; `key: ` opens a table.
fn pair(line: &str) -> Option<(&str, &str)> {
    let line = line.trim().trim_end_matches(',');
    let (key, value) = line.split_once(':')?;
    let key = key.trim().trim_matches(['"', '\'']);
    let is_name = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
    let (value, _) = value.split_once(" #").unwrap_or((value, ""));
    is_name.then_some((key, value.trim()))
}

/// Translates a line of another tool's YAML file to TOML, if ft has a key for it.
fn translated(line: &str) -> Option<String> {
    let (name, value) = pair(line)?;
    let key = peers::key_for(name)?;
    let plain = value.trim_matches(['"', '\'']);
    if plain.is_empty()
        || plain.starts_with(['{', '&', '*', '|', '>'])
        || (plain.starts_with('[') && !value.ends_with(']'))
    {
        return None;
    }
    let value = peers::value_for(name, &key, plain)?;
    Some(format!("{key} = {value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_languages_are_named_and_translated() {
        let of = |name: &str, text: &str| refused(text, Path::new(name)).map(|e| e.to_string());
        let yaml = "# train\nmodel_name_or_path: Qwen/Qwen3-4B\nlora_rank: 8\nlearning_rate: 1.0e-4  # high\n\
                    deepspeed: ds.json\ndatasets:\n  - path: x\n";
        for name in ["r.yaml", "r.yml", "r.toml", "recipe"] {
            let e = of(name, yaml).unwrap();
            assert!(e.contains("this is YAML"), "{e}");
            assert!(
                e.contains("model.path = \"Qwen/Qwen3-4B\"") && e.contains("tune.lora.r = 8"),
                "{e}"
            );
            assert!(e.contains("optimizer.learning_rate = 1.0e-4"), "{e}");
        }
        let e = of(
            "r.yaml",
            "bf16: true\nlora_target: q_proj,v_proj\noptim: adamw_torch\nmax_steps: 3\n",
        )
        .unwrap();
        for line in [
            "model.dtype = \"bf16\"",
            "tune.lora.target_modules = [\"q_proj\", \"v_proj\"]",
            "optimizer.name = \"adamw\"",
            "train.max_steps = 3",
        ] {
            assert!(e.contains(line), "{line}: {e}");
        }
        let e = of("r.json", "{\n  \"max_steps\": 3,\n \"output_dir\": \"out\"\n}").unwrap();
        assert!(e.contains("this is JSON") && e.contains("train.max_steps = 3"), "{e}");
        assert!(e.contains("train.output_dir = \"out\""), "{e}");
        assert!(of("train.py", "import torch\n").unwrap().contains("Python"));
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
