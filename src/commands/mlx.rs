//! `ft export --to mlx`: a model or an adapter for mlx-lm (Apple silicon).

use crate::base::staging::{ScratchDirectory, Staging};
use crate::base::{Error, Result, files};
use crate::commands::{export, merge, named};
use crate::formats::index::stays_inside;
use crate::formats::weights::Weights;
use crate::hf;
use crate::recipe::Dtype;
use crate::setup::locate::{NamedKind, locate};
use crate::train::verify;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The properties of the written files.
#[derive(Debug, Clone, PartialEq)]
pub struct MlxReport {
    pub out: PathBuf,
    pub adapter: bool,
    /// The base model of an adapter: a directory or a hub id.
    pub base: Option<String>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// Writes the directory `out` from a model, a run, a checkpoint, an adapter or a hub id. mlx-lm reads a model directory of
/// Hugging Face, but for most families only the older keys of rotary embeddings; an adapter has other names and the
/// transposed matrices.
///
/// Errors: `out` is not empty; there is nothing to export; an adapter that mlx-lm does not have; `dtype` for an adapter.
pub fn export(from: &str, out: &Path, dtype: Option<Dtype>) -> Result<MlxReport> {
    merge::refuse_existing(out)?;
    let found = named::find(from, None)?;
    let Some(adapter) = &found.adapter else {
        refuse_reward_model(&found.model)?;
        let scratch = ScratchDirectory::beside(out)?;
        let whole = scratch.path().join("model");
        let written = export::export(&found.model, &whole, dtype, None)?;
        let path = whole.join(CONFIG);
        let mut config = read(&path)?;
        if add_older_keys(&mut config) {
            files::write_atomic(&path, format!("{:#}\n", Value::Object(config)).as_bytes())?;
        }
        files::rename(&whole, out)?;
        return Ok(MlxReport {
            out: out.to_path_buf(),
            adapter: false,
            base: None,
            notes: found.notes.iter().cloned().chain(written.notes).collect(),
        });
    };
    if dtype.is_some() {
        return Err(Error::usage("an adapter keeps the type in which it was trained").hint("remove `--dtype`"));
    }
    let base = match locate(&found.model)? {
        NamedKind::Model(dir) | NamedKind::Adapter(dir) | NamedKind::Checkpoint(dir) => dir,
    };
    verify::check_result(adapter)?;
    let staging = Staging::create(out)?;
    hf::mlx_adapter(adapter, &base, staging.path())?;
    let mut notes = found.notes.clone();
    if add_older_keys(&mut read(&base.join(CONFIG))?) {
        let base = &found.model;
        notes.push(format!(
            "mlx-lm does not read `rope_parameters` in the config of {base} for every family: give it the base model that `ft export {base} --to mlx --out DIR` writes"
        ));
    }
    Ok(MlxReport {
        out: staging.commit_new()?,
        adapter: true,
        base: Some(found.model.clone()),
        notes,
    })
}

/// Refuses a model with a score head: mlx-lm has language models only.
fn refuse_reward_model(model: &str) -> Result<()> {
    let NamedKind::Model(dir) = locate(model)? else {
        return Ok(());
    };
    // Files that cannot be read are reported by the export.
    if Weights::open(&dir).is_ok_and(|weights| weights.info(hf::SCORE).is_some()) {
        return Err(Error::unsupported("mlx-lm has no reward models")
            .at_path(&dir)
            .found(format!("`{}` in the weights", hf::SCORE))
            .expected("a language model")
            .hint("`ft export` without `--to mlx` writes it for transformers"));
    }
    Ok(())
}

const CONFIG: &str = "config.json";

fn read(path: &Path) -> Result<Map<String, Value>> {
    stays_inside(path)?;
    serde_json::from_str(&files::read_text(path)?)
        .map_err(|e| Error::format(format!("invalid JSON: {e}")).at_path(path))
}

/// Adds the keys that a config had before `rope_parameters` of transformers 5: without them most families of mlx-lm take the
/// defaults of the family. Returns true if there were some to add. Parameters by kind of layer stay as they are.
fn add_older_keys(config: &mut Map<String, Value>) -> bool {
    let mut added = false;
    if let Some(Value::Object(text)) = config.get_mut("text_config") {
        added = add_older_keys(text);
    }
    let Some(Value::Object(mut scaling)) = config.get("rope_parameters").cloned() else {
        return added;
    };
    for key in ["rope_theta", "partial_rotary_factor"] {
        if let Some(value) = scaling.remove(key)
            && config.get(key).is_none_or(Value::is_null)
        {
            config.insert(key.into(), value);
            added = true;
        }
    }
    let is_scaled = scaling
        .get("rope_type")
        .is_some_and(|kind| kind.is_string() && kind != "default");
    if is_scaled && config.get("rope_scaling").is_none_or(Value::is_null) {
        config.insert("rope_scaling".into(), Value::Object(scaling));
        added = true;
    }
    added
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::StoredDtype;
    use crate::formats::writer::{self, TensorPlan, Values};
    use serde_json::json;

    #[test]
    fn a_reward_model_is_refused_before_anything_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        std::fs::create_dir(&model).unwrap();
        std::fs::write(model.join("config.json"), "{}").unwrap();
        let plan = TensorPlan {
            name: hf::SCORE.into(),
            dtype: StoredDtype::F32,
            shape: vec![1, 2],
        };
        writer::write_file(&model.join("model.safetensors"), &[plan], &[], |_, sink| {
            sink(Values::F32(&[1.0, 2.0]))
        })
        .unwrap();
        let out = dir.path().join("out");
        let e = export(model.to_str().unwrap(), &out, None).unwrap_err().to_string();
        assert!(e.contains("mlx-lm has no reward models"), "{e}");
        assert!(!out.exists());
    }

    #[test]
    fn older_keys_stand_beside_the_new_ones() {
        let of = |config: Value| {
            let mut config = config.as_object().unwrap().clone();
            let added = add_older_keys(&mut config);
            (added, Value::Object(config))
        };
        let plain = json!({"rope_theta": 5.0, "rope_type": "default", "partial_rotary_factor": 0.5});
        let want = json!({"rope_parameters": plain, "rope_theta": 5.0, "partial_rotary_factor": 0.5});
        assert_eq!(of(json!({"rope_parameters": plain})), (true, want.clone()));
        assert_eq!(of(want.clone()), (false, want.clone()));
        let text = json!({"text_config": {"rope_parameters": plain}});
        assert_eq!(of(text), (true, json!({"text_config": want})));
        let scaled = json!({"rope_theta": 5.0, "rope_type": "linear", "factor": 4.0});
        let want = json!({"rope_parameters": scaled, "rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}});
        assert_eq!(
            of(json!({"rope_parameters": scaled, "rope_scaling": null})),
            (true, want)
        );
        for same in [
            json!({"rope_theta": 5.0}),
            json!({"rope_parameters": {"full_attention": plain, "sliding_attention": plain}}),
        ] {
            assert_eq!(of(same.clone()), (false, same));
        }
    }
}
