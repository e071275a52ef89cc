//! Hugging Face model directories and PEFT adapter directories: opens, loads and writes them; creates new adapters;
//! merges adapters into weights. A directory is built under a temporary name and renamed when it is complete.
//! Independent of training.

mod adapter;
mod build;
mod classifier;
mod expert_adapters;
mod fingerprint;
mod load_adapter;
mod merged;
mod mlx;
mod model;
mod new_adapters;
mod open;
mod other_parts;
mod peft_model;
mod python_numbers;
mod tie;

pub use adapter::{adapter, adapter_over, plain_lora, pruned, rehearse_adapter};
pub use classifier::{SCORE, as_classifier, has_score};
pub use fingerprint::of as fingerprint_of;
pub use fingerprint::{BaseHashes, Fingerprint, base_of, check_base, fingerprint};
pub use load_adapter::{LoadedAdapter, load_adapter};
pub use load_adapter::{SEQUENCE_CLASSIFIER, choice, ranks_and_alphas, row_tables, unsaved};
pub use merged::{WeightedAdapter, merged};
pub use mlx::mlx_adapter;
pub use model::{ModelExport, ParamFill, TensorFill, WriteMore, model, rehearse_model};
pub use model::{OutputModel, set_dtype, set_language_key, stored};
pub use new_adapters::{AdapterSet, TrainedRows, adapter_shapes, adapters_to_fill, new_adapters, subtracts_init};
pub use open::{OpenModel, open, open_dequantized};
pub use other_parts::bytes_of_other_parts;
pub use peft_model::{check_saved_again, left_out_of_checkpoint, naming, saved_whole};
pub use python_numbers::{config_note, left_out_note, writable_config};
pub use tie::{untied_weights, unties};

use crate::base::{Error, Result, files};
use crate::formats::index::stays_inside;
use crate::formats::{read_json_object, read_json_to_rewrite};
use serde_json::{Map, Value};
use std::path::Path;

/// Tokenizer files of a model.
const TOKENIZER: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
    CHAT_TEMPLATE,
];
const CHAT_TEMPLATE: &str = "chat_template.jinja";
const GENERATION: &str = "generation_config.json";

/// Files copied with the weights: settings of images and of sampling, license.
const BESIDE: [&str; 10] = [
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    GENERATION,
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
    "USE_POLICY.md",
];

/// Copies those files of `names` that exist in `from`.
fn copy_beside(from: &Path, to: &Path, names: &[&str]) -> Result<()> {
    for name in names {
        let source = from.join(name);
        // A pipe or a device is refused: without this file the result would be incomplete.
        if source.exists() && !source.is_dir() {
            stays_inside(&source)?;
            files::copy_atomic(&source, &to.join(name))?;
        }
    }
    Ok(())
}

/// Writes the chat template used in training into an exported directory; it overrides one in `tokenizer_config.json`.
///
/// # Errors
/// The file cannot be written.
pub fn set_chat_template(dir: &Path, text: &str) -> Result<()> {
    files::write_atomic(&dir.join(CHAT_TEMPLATE), text.as_bytes())
}

/// As `set_chat_template`, for the template of conversations with tools.
///
/// # Errors
/// The file cannot be written.
pub fn set_tools_template(dir: &Path, text: &str) -> Result<()> {
    let dir = dir.join("additional_chat_templates");
    files::create_dir_all(&dir)?;
    files::write_atomic(&dir.join("tool_use.jinja"), text.as_bytes())
}

/// Removes the settings of quantized weights from the contents of a `config.json`, also from the part of the language model.
pub fn unquantized(config: &mut Map<String, Value>) {
    const KEY: &str = "quantization_config";
    config.retain(|key, _| key != KEY);
    if let Some(Value::Object(text)) = config.get_mut("text_config") {
        text.retain(|key, _| key != KEY);
    }
}

/// Writes the ids that end an answer into `generation_config.json` of an exported directory. `config`: the contents of
/// `config.json`, for a directory without generation settings. A setting that JSON cannot represent (`NaN`, `Infinity`) is
/// left out; returns the names of these settings, for `left_out_note`.
///
/// # Errors
/// The file cannot be read or written.
pub fn set_stop_ids(dir: &Path, config: &Map<String, Value>, ids: &[u32]) -> Result<Vec<String>> {
    let path = dir.join(GENERATION);
    let mut map = generation_settings(dir, config)?;
    let before = if path.is_file() {
        read_json_object(&path)?
    } else {
        Map::new()
    };
    // That of the ids is set below.
    let is_lost = |key: &&String| !map.contains_key(*key) && *key != "eos_token_id";
    let left_out = before.keys().filter(is_lost).cloned().collect();
    map.insert("eos_token_id".into(), ids.into());
    let text = serde_json::to_string_pretty(&map).map_err(|e| {
        Error::new("cannot write the generation settings")
            .at_path(&path)
            .cause(e)
    })?;
    files::write_atomic(&path, format!("{text}\n").as_bytes())?;
    Ok(left_out)
}

/// Checks that `set_stop_ids` can read the generation settings of the base model in `dir`, and writes nothing.
///
/// # Errors
/// The file cannot be read.
pub fn rehearse_stop_ids(dir: &Path, config: &Map<String, Value>) -> Result<()> {
    generation_settings(dir, config).map(drop)
}

fn generation_settings(dir: &Path, config: &Map<String, Value>) -> Result<Map<String, Value>> {
    let path = dir.join(GENERATION);
    if path.is_file() {
        return read_json_to_rewrite(&path);
    }
    let kept = config
        .iter()
        .filter(|(key, _)| ["bos_token_id", "pad_token_id"].contains(&key.as_str()));
    Ok(kept.map(|(key, value)| (key.clone(), value.clone())).collect())
}

#[cfg(test)]
mod adapter_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
pub(crate) mod testing;
