//! Writes a LoRA adapter as a GGUF adapter for llama.cpp (`--lora`).

use super::arch;
use super::{model, names};
use crate::base::{Error, Result};
use crate::formats::config::Config;
use crate::formats::gguf::{self, BlockType, GgufReader, MetadataValue, TensorEntry};
use crate::hf;
use crate::model::families;
use crate::ops::update;
use crate::peft::Adapter;
use std::path::Path;

/// The adapter to write, and the options of its file.
#[derive(Debug, Clone, Copy)]
pub struct AdapterFile<'a> {
    /// The adapter directory.
    pub dir: &'a Path,
    /// The directory of its base model; only its config is read.
    pub base: &'a Path,
    /// `general.name`.
    pub name: &'a str,
    /// f32, f16 or bf16.
    pub block: BlockType,
}

/// Writes the adapter to `out`. Returns the architecture and the size of the file.
///
/// # Errors
/// An adapter of another kind than LoRA on linears, or one that also replaces whole parameters or rows (`Unsupported`); a
/// family that llama.cpp does not have; a value that is not finite, or too large for f16; a file that cannot be written.
pub fn adapter(file: &AdapterFile<'_>, out: &Path) -> Result<(&'static str, u64)> {
    let spec = families::read(&Config::read(file.base)?)?;
    let arch = arch::of(&spec)?;
    let loaded = hf::load_adapter(file.dir, &spec)?;
    let (query_factor, _) = model::scales(&spec, &arch)?;
    let merge = "merge the adapter into its base model, and export the result";
    if !loaded.whole.is_empty() || !loaded.rows.is_empty() || loaded.score.is_some() {
        return Err(
            Error::unsupported("a GGUF adapter cannot store whole parameters or rows of an embedding")
                .at_path(file.dir)
                .found("modules_to_save, trainable tokens or a score head")
                .hint(merge),
        );
    }
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (module, adapter) in &loaded.adapters {
        let Adapter::Lora(lora) = &**adapter else {
            return Err(Error::unsupported("only LoRA can be written as a GGUF adapter")
                .at_path(file.dir)
                .found(loaded.config.name())
                .hint(merge));
        };
        let place = module
            .strip_prefix("model.layers.")
            .and_then(|rest| rest.split_once('.'));
        let place = place.and_then(|(layer, below)| Some((layer.parse::<usize>().ok()?, below)));
        let named = place.and_then(|(layer, below)| Some((names::module(&spec, &arch, layer, below)?, below)));
        let Some((name, below)) = named.filter(|(name, _)| !name.ends_with("attn_kv_b")) else {
            return Err(Error::unsupported("a module of the adapter has no name in GGUF files")
                .at(module)
                .hint(merge));
        };
        // llama.cpp multiplies with alpha / rank: alpha is 1 in the file.
        let scaled = below == "self_attn.q_proj" && spec.qk_norm.is_none();
        let (rank, factor) = (lora.rank() as f32, lora.scale * if scaled { query_factor } else { 1.0 });
        let (a, b) = (update::to_f32_vec(&lora.a)?, update::to_f32_vec(&lora.b)?);
        let b = names::order(&spec, &arch, below).apply(b, lora.rank());
        let b = b.into_iter().map(|x| x * factor * rank).collect();
        for (last, tensor, values) in [("lora_a", &lora.a, a), ("lora_b", &lora.b, b)] {
            entries.push(TensorEntry {
                name: format!("{name}.weight.{last}"),
                shape: tensor.dims().to_vec(),
                block: file.block,
            });
            data.push(values);
        }
    }
    let keys: Vec<(String, MetadataValue)> = vec![
        ("general.architecture".into(), arch.name.into()),
        ("general.type".into(), "adapter".into()),
        ("general.name".into(), file.name.into()),
        ("adapter.type".into(), "lora".into()),
        ("adapter.lora.alpha".into(), MetadataValue::F32(1.0)),
    ];
    let mut values = data.into_iter();
    let bytes = gguf::write(out, &keys, &entries, |entry, sink| {
        model::encode(entry, &values.next().unwrap_or_default(), sink).map(drop)
    })?;
    if GgufReader::open(out)?.tensors != entries {
        return Err(Error::internal("the file that was written has another header").at_path(out));
    }
    Ok((arch.name, bytes))
}
