//! Output of ft: a Hugging Face model directory, or a PEFT adapter directory. Each is built under a temporary name and
//! renamed when it is complete. Also the reverse: loads adapters into a model, and merges adapters into weights.
//! Handles file layouts of other tools; independent of training.

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
mod tie;

pub use adapter::{adapter, adapter_over, plain_lora, pruned, rehearse_adapter};
pub use classifier::{SCORE, as_classifier};
pub use fingerprint::of as fingerprint_of;
pub use fingerprint::{BaseHashes, Fingerprint, base_of, check_base, fingerprint};
pub use load_adapter::{LoadedAdapter, load_adapter};
pub use load_adapter::{SEQUENCE_CLASSIFIER, alpha_of, choice, rank_of, row_tables, saved_whole, unsaved};
pub use merged::{WeightedAdapter, merged};
pub use mlx::mlx_adapter;
pub use model::{ModelExport, ParamFill, WriteMore, model, rehearse_model};
pub use model::{OutputModel, set_dtype, stored};
pub use new_adapters::{AdapterSet, TrainedRows, adapter_shapes, adapters_to_fill, new_adapters, subtracts_init};
pub use open::{OpenModel, open, open_dequantized};
pub use tie::{untied_weights, unties};

use crate::base::{Error, Result, files};
use crate::formats::index::stays_inside;
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

/// Files copied with the weights: settings of images and of sampling, license.
const BESIDE: [&str; 10] = [
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
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
        if source.is_file() {
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

/// Writes the ids that end an answer into `generation_config.json` of an exported directory. `config`: the contents of
/// `config.json`, for a directory without generation settings.
///
/// # Errors
/// The file cannot be read or written.
pub fn set_stop_ids(dir: &Path, config: &Map<String, Value>, ids: &[u32]) -> Result<()> {
    let path = dir.join("generation_config.json");
    let bad = |e: serde_json::Error| Error::format("file is not valid JSON").at_path(&path).cause(e);
    let mut map: Map<String, Value> = if path.is_file() {
        serde_json::from_str(&files::read_text(&path)?).map_err(bad)?
    } else {
        let kept = config
            .iter()
            .filter(|(key, _)| ["bos_token_id", "pad_token_id"].contains(&key.as_str()));
        kept.map(|(key, value)| (key.clone(), value.clone())).collect()
    };
    map.insert("eos_token_id".into(), ids.into());
    let text = serde_json::to_string_pretty(&map).map_err(bad)?;
    files::write_atomic(&path, format!("{text}\n").as_bytes())
}

#[cfg(test)]
mod adapter_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod testing;
