//! Hashes of what a recipe names beside the base model and the rows: a given adapter, rewards, a chat template, the
//! tokenizer of a teacher. A checkpoint stores them, and a resumed run compares them.

use crate::base::{Error, Result, files};
use crate::checkpoint;
use crate::data::content;
use crate::formats::adapter::{CONFIG, WEIGHTS};
use crate::formats::index::stays_inside;
use crate::formats::template::named;
use crate::recipe::{
    Alignment, Correction, Data, DistillSection, LoraKeys, Method, ModelInit, Quality, Recipe, RlSection, Stage,
};
use crate::setup::{ModelFiles, locate, rewards};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// Recipe keys (and `PROGRAMS`) with the hashes of the content that they name.
pub type SideHashes = BTreeMap<String, String>;

/// The files of reward programs. Other content is not refused: a program with a fault is corrected, and the run goes on.
pub const PROGRAMS: &str = "programs of rlhf.rewards";

/// The hashes of the content that a recipe names by its path.
///
/// Errors: a file that cannot be read; a directory that is not what the key expects.
pub fn hashes(recipe: &Recipe) -> Result<SideHashes> {
    let (tune, data, distill) = (&recipe.tune, &recipe.data, &recipe.distill);
    let mut out = Vec::new();
    let corrects = tune.method == Method::Block && tune.block.correction == Correction::Lora;
    if let Some(name) = &tune.lora.adapter
        && (tune.method == Method::Lora || corrects)
    {
        out.push((LoraKeys::adapter.0, adapter(&locate::adapter_directory(name)?)?));
    }
    if let Some(name) = data.chat_template.given()
        && named::find(name).is_none()
    {
        out.push((Data::chat_template.0, of_file(Path::new(name))?));
    }
    if !data.quality.decontaminate.is_empty() {
        // The hash of the training rows depends on these files: equal rows are proof enough.
        out.push((Quality::decontaminate.0, "by the training rows".to_string()));
    }
    // Without an alignment the tokenizer of the teacher is compared with that of the student.
    if recipe.train.stage == Stage::Distill
        && distill.alignment != Alignment::None
        && let Some(teacher) = &distill.teacher
    {
        let files = ModelFiles::of_config(teacher, &distill.teacher_revision, ModelInit::Pretrained)?;
        let tokenizer = files.dir.join("tokenizer.json");
        if tokenizer.is_file() {
            out.push((DistillSection::teacher.0, of_file(&tokenizer)?));
        }
    }
    if recipe.train.stage.is_rl()
        && let Some(found) = rewards::contents(&recipe.rl)?
    {
        out.push((RlSection::rewards.0, found.rewards));
        out.extend(found.programs.map(|hash| (PROGRAMS, hash)));
    }
    Ok(out.into_iter().map(|(key, hash)| (key.to_string(), hash)).collect())
}

/// True if the text of this key may differ from that in the checkpoint: what it names has the same content.
pub fn is_same(old: &SideHashes, new: &SideHashes, key: &str) -> bool {
    let same = |name: &str| old.get(name) == new.get(name);
    new.contains_key(key) && same(key) && (key != RlSection::rewards.0 || same(PROGRAMS))
}

/// The keys whose content is another one than in the checkpoint: key, hash in the checkpoint, hash now. Those that only
/// one of them has are not compared: their texts are.
pub fn differences<'a>(old: &'a SideHashes, new: &'a SideHashes) -> Vec<(&'a str, &'a str, &'a str)> {
    let both = new
        .iter()
        .filter_map(|(key, now)| Some((key.as_str(), old.get(key)?.as_str(), now.as_str())));
    both.filter(|(key, was, now)| *key != PROGRAMS && was != now).collect()
}

/// A warning if a reward program has changed since the checkpoint of step `step`.
pub fn other_program(old: &SideHashes, new: &SideHashes, step: u64) -> Option<String> {
    let (was, now) = (old.get(PROGRAMS)?, new.get(PROGRAMS)?);
    (was != now).then(|| {
        format!(
            "a program of `{}` has changed since checkpoint-{step}: answers that are generated from here on get the rewards of the \
             changed program",
            RlSection::rewards
        )
    })
}

fn of_file(path: &Path) -> Result<String> {
    Ok(content::of_texts(&[content::hash(path)?]))
}

/// The hash of the weights and settings of a PEFT adapter, without the place of its base model: that may move too.
fn adapter(dir: &Path) -> Result<String> {
    let config = dir.join(CONFIG);
    stays_inside(&config)?;
    let bad = |e: serde_json::Error| Error::format("file is not valid JSON").at_path(&config).cause(e);
    let mut settings: Map<String, Value> = serde_json::from_str(&files::read_text(&config)?).map_err(bad)?;
    for key in ["base_model_name_or_path", "revision"] {
        settings.remove(key);
    }
    let weights = checkpoint::hash(&dir.join(WEIGHTS))?.1;
    Ok(content::of_texts(&[Value::Object(settings).to_string(), weights]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;
    use std::fs;
    use tempfile::TempDir;

    fn recipe(tables: &str) -> Recipe {
        let text = format!("[model]\npath = \"m\"\n{tables}");
        recipe::parse(&text, "r.toml", &[]).unwrap().recipe
    }

    /// A directory with these files.
    fn directory(contents: &[(&str, &str)]) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in contents {
            fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    #[test]
    fn a_recipe_that_names_nothing_has_no_hashes() {
        let plain = "[data]\ntrain = \"t\"\nchat_template = \"chatml\"\n[train]\nstage = \"grpo\"\n[rlhf]\nrewards = [\"exact\"]\n";
        assert_eq!(hashes(&recipe(plain)).unwrap(), SideHashes::new());
        // A key without effect is not read.
        let unused = "[data]\ntrain = \"t\"\n[tune]\nmethod = \"full\"\n[tune.lora]\nadapter = \"missing\"\n";
        assert_eq!(hashes(&recipe(unused)).unwrap(), SideHashes::new());
    }

    /// Row R6.
    #[test]
    fn an_adapter_is_known_by_weights_and_settings_and_not_by_its_place() {
        let of = |config: &str, weights: &str| {
            let dir = directory(&[(CONFIG, config), (WEIGHTS, weights)]);
            let path = dir.path().display();
            let tables =
                format!("[data]\ntrain = \"t\"\n[tune]\nmethod = \"lora\"\n[tune.lora]\nadapter = \"{path}\"\n");
            hashes(&recipe(&tables)).unwrap().remove("tune.lora.adapter").unwrap()
        };
        let found = of(r#"{"base_model_name_or_path": "a", "r": 8}"#, "weights");
        assert_eq!(found, of(r#"{"base_model_name_or_path": "b", "r": 8}"#, "weights"));
        assert_ne!(found, of(r#"{"base_model_name_or_path": "a", "r": 4}"#, "weights"));
        assert_ne!(found, of(r#"{"base_model_name_or_path": "a", "r": 8}"#, "weighty"));
    }

    /// Row R6.
    #[test]
    fn a_template_is_known_by_its_text_and_compared_rows_by_the_training_rows() {
        let of = |text: &str| {
            let dir = directory(&[("t.jinja", text)]);
            let path = dir.path().join("t.jinja");
            let tables = format!(
                "[data]\ntrain = \"t\"\nchat_template = \"{}\"\ndecontaminate = \"{}\"\n",
                path.display(),
                path.display()
            );
            hashes(&recipe(&tables)).unwrap()
        };
        let found = of("{{ messages }}");
        assert_eq!(found.len(), 2);
        assert_eq!(found, of("{{ messages }}"));
        let changed = of("{{ messages }}!");
        let differences = differences(&found, &changed);
        assert_eq!(differences.len(), 1);
        assert_eq!(differences[0].0, "data.chat_template");
        assert!(is_same(&found, &changed, "data.decontaminate"));
        assert!(!is_same(&found, &changed, "data.chat_template"));
        assert!(!is_same(&found, &changed, "tune.lora.adapter"));
        // A checkpoint of an earlier version has no hashes.
        assert!(!is_same(&SideHashes::new(), &found, "data.chat_template"));
        assert!(super::differences(&SideHashes::new(), &found).is_empty());
    }

    /// Row R6.
    #[test]
    fn a_program_may_move_or_change_but_not_both() {
        let of = |script: &str, argument: &str| {
            let dir = directory(&[("score.sh", script)]);
            let path = dir.path().join("score.sh");
            let tables = format!(
                "[data]\ntrain = \"t\"\n[train]\nstage = \"grpo\"\n[rlhf]\nrewards = [\"program:sh {} {argument}\"]\n",
                path.display()
            );
            hashes(&recipe(&tables)).unwrap()
        };
        let found = of("echo 1", "a");
        let moved = of("echo 1", "a");
        assert!(is_same(&found, &moved, "rlhf.rewards") && other_program(&found, &moved, 3).is_none());
        let changed = of("echo 2", "a");
        assert!(differences(&found, &changed).is_empty());
        assert!(!is_same(&found, &changed, "rlhf.rewards"));
        let warning = other_program(&found, &changed, 3).unwrap();
        assert!(
            warning.contains("`rlhf.rewards`") && warning.contains("checkpoint-3"),
            "{warning}"
        );
        assert_eq!(differences(&found, &of("echo 1", "b"))[0].0, "rlhf.rewards");
    }
}
