//! Choices of the first plan of a run that its resumes keep.

use crate::base::{Error, Result, files};
use crate::recipe::table::KeyPath;
use crate::recipe::{Auto, ChunkSize, Memory, Recipe, WeightStorage};
use crate::setup::defaults::{self, Choice, Resume};
use std::collections::BTreeMap;
use std::path::Path;

/// The settings that affect training and that a resumed run keeps as its first plan chose them.
const KEPT: [KeyPath; 2] = [Memory::frozen_weights, Memory::mlp_chunk];

/// The choices that a checkpoint stores, by their keys.
pub fn kept_choices(choices: &[Choice]) -> BTreeMap<String, String> {
    let kept = choices.iter().filter(|choice| KEPT.contains(&choice.key));
    kept.map(|choice| (choice.key.0.to_string(), choice.value.clone()))
        .collect()
}

/// Reads JSON that may not be there.
fn read_json(file: &Path) -> Result<serde_json::Value> {
    if !file.is_file() {
        return Ok(serde_json::Value::Null);
    }
    let text = files::read_text(file)?;
    serde_json::from_str(&text).map_err(|e| Error::new("the plan of the run cannot be read").at_path(file).cause(e))
}

/// For a resumed run, keeps the choices of its first plan that affect training: the storage of frozen weights and the
/// MLP chunk. They are in the given checkpoint, and in the plan beside it.
///
/// Errors: a plan that cannot be read.
pub fn pin_resumed_choices(recipe: &Recipe, resume: &Resume) -> Result<Recipe> {
    let Some(run_dir) = defaults::run_of(recipe, resume) else {
        return Ok(recipe.clone());
    };
    let mut recipe = recipe.clone();
    let plan = read_json(&run_dir.join("plan.json"))?;
    let checkpoint = resume
        .directory(Path::new(&recipe.train.output_dir))
        .map(|dir| dir.join("state.json"));
    let saved = checkpoint.as_deref().map_or(Ok(serde_json::Value::Null), read_json)?;
    let value = |key: KeyPath| {
        let in_plan = || plan["chosen"][key.0]["value"].as_str();
        saved["chosen"][key.0].as_str().or_else(in_plan)
    };
    if recipe.memory.frozen_weights == Auto::Auto
        && let Some(before) = value(Memory::frozen_weights).and_then(WeightStorage::parse)
    {
        recipe.memory.frozen_weights = Auto::Of(before);
    }
    if recipe.memory.mlp_chunk == ChunkSize::Auto {
        recipe.memory.mlp_chunk = value(Memory::mlp_chunk)
            .and_then(|n| n.parse().ok())
            .map_or(ChunkSize::Auto, ChunkSize::of);
    }
    Ok(recipe)
}

/// The values that `pin_resumed_choices` kept, for the plan of the resumed run: the next resume reads them there.
pub fn pinned_choices(open: &Recipe, recipe: &Recipe) -> Vec<Choice> {
    let kept = |key, value| Choice {
        key,
        value,
        why: "as in the first plan of the run".into(),
    };
    let (was, memory) = (&open.memory, &recipe.memory);
    let mut all = Vec::new();
    if was.frozen_weights != memory.frozen_weights {
        all.push(kept(Memory::frozen_weights, memory.frozen_weights.name().into()));
    }
    if let (ChunkSize::Auto, Some(tokens)) = (was.mlp_chunk, memory.mlp_chunk.written()) {
        all.push(kept(Memory::mlp_chunk, tokens.to_string()));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{self, Tier};

    #[test]
    fn a_run_that_goes_on_keeps_what_it_chose() {
        let dir = tempfile::tempdir().unwrap();
        let chosen = r#"{"chosen": {"memory.frozen_weights": {"value": "nf4", "why": ""},
            "memory.mlp_chunk": {"value": "512", "why": ""}, "memory.tier": {"value": "disk", "why": ""}}}"#;
        std::fs::write(dir.path().join("plan.json"), chosen).unwrap();
        std::fs::create_dir(dir.path().join("checkpoint-3")).unwrap();
        std::fs::write(dir.path().join("checkpoint-3/manifest.json"), "{}").unwrap();
        let recipe = |more: &str| {
            let text = format!("[model]\npath = \"shape:small\"\n[memory]\n{more}");
            recipe::parse(&text, "r.toml", &[]).unwrap().recipe
        };
        let memory = |recipe: &Recipe, from: Option<&Path>| {
            let resume = from.map_or(Resume::No, |p| Resume::From(p.to_path_buf()));
            let memory = pin_resumed_choices(recipe, &resume).unwrap().memory;
            (memory.frozen_weights, memory.mlp_chunk, memory.tier)
        };
        let open = recipe("");
        assert_eq!(memory(&open, None), (Auto::Auto, ChunkSize::Auto, Tier::Auto));
        for from in [dir.path().to_path_buf(), dir.path().join("checkpoint-3")] {
            assert_eq!(
                memory(&open, Some(&from)),
                (Auto::Of(WeightStorage::Nf4), ChunkSize::Of(512), Tier::Auto)
            );
        }
        // A checkpoint that was copied has no plan beside it.
        let alone = dir.path().join("copied/checkpoint-3");
        std::fs::create_dir_all(&alone).unwrap();
        std::fs::write(alone.join("manifest.json"), "{}").unwrap();
        std::fs::write(
            alone.join("state.json"),
            r#"{"chosen": {"memory.frozen_weights": "int8"}}"#,
        )
        .unwrap();
        assert_eq!(
            memory(&open, Some(&alone)),
            (Auto::Of(WeightStorage::Int8), ChunkSize::Auto, Tier::Auto)
        );
        // A second resume too, although the setting is not open any more in the new plan.
        let again = pin_resumed_choices(&open, &Resume::From(dir.path().to_path_buf())).unwrap();
        let choices = pinned_choices(&open, &again).into_iter().map(|c| (c.key.0, c.value));
        let want = [("memory.frozen_weights", "nf4"), ("memory.mlp_chunk", "512")];
        assert!(choices.eq(want.map(|(key, value)| (key, value.to_string()))));
        assert!(pinned_choices(&open, &open).is_empty());
        let written = recipe("frozen_weights = \"int8\"\nmlp_chunk = 0\n");
        assert_eq!(
            memory(&written, Some(dir.path())),
            (Auto::Of(WeightStorage::Int8), ChunkSize::Whole, Tier::Auto)
        );
        assert_eq!(
            memory(&open, Some(&dir.path().join("none"))),
            (Auto::Auto, ChunkSize::Auto, Tier::Auto)
        );
    }
}
