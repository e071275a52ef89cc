//! A Hugging Face model directory: weights in safetensors, config with all its keys, tokenizer files.

use super::{BESIDE, TOKENIZER, copy_beside, set_chat_template};
use crate::base::staging::Staging;
use crate::base::{Error, Result, files};
use crate::formats::writer::{self, TensorPlan, Values};
use crate::formats::{StoredDtype, Weights};
use crate::model::spec::LM_HEAD;
use crate::ops::Dtype;
use crate::source::ParamInfo;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// A model directory in which all weights have one number format.
pub struct ModelExport<'a> {
    /// The directory to write, e.g. `run/final`. An existing one is replaced when the new one is complete.
    pub out: &'a Path,
    /// Source of tokenizer files, generation settings and license; missing files are skipped.
    pub base_dir: &'a Path,
    /// The original `config.json`: all keys are copied, only the number format is set.
    pub config: Map<String, Value>,
    /// True if the head is tied: `lm_head.weight` is not written.
    pub tied: bool,
    /// The number format of the weights.
    pub dtype: Dtype,
    /// The parameters, in the order of the file.
    pub params: &'a [ParamInfo],
}

/// A model directory in which each tensor has its own number format.
pub struct Directory<'a> {
    /// The directory to write.
    pub out: &'a Path,
    /// Source of tokenizer files, generation settings and license.
    pub base_dir: &'a Path,
    /// The contents of `config.json`.
    pub config: &'a Map<String, Value>,
    /// The tensors, in the order of the files.
    pub tensors: &'a [TensorPlan],
    /// Size limit of a weight file; a single larger tensor may exceed it.
    pub shard_bytes: u64,
    /// Replaces the base model's `chat_template.jinja`.
    pub chat_template: Option<&'a str>,
}

/// Passes the values of one tensor to the sink.
pub(crate) type TensorFill<'a> = dyn FnMut(&TensorPlan, &mut dyn FnMut(Values) -> Result<()>) -> Result<()> + 'a;

/// Passes the values of the named parameter to the sink.
pub type ParamFill<'a> = dyn FnMut(&str, &mut dyn FnMut(Values) -> Result<()>) -> Result<()> + 'a;

/// Writes the directory and returns its path. `fill` passes the values of one parameter to the sink, at once or in
/// pieces; for bf16 output they are rounded to nearest, so bf16 values are written unchanged.
///
/// # Errors
/// A value that is not finite, a parameter of another size, a full disk; then `out` is unchanged.
pub fn model(e: &ModelExport, fill: &mut ParamFill) -> Result<PathBuf> {
    let dtype = stored(e.dtype);
    let tensors: Vec<TensorPlan> = e
        .params
        .iter()
        .filter(|p| !(e.tied && &*p.name == LM_HEAD))
        .map(|p| TensorPlan {
            name: p.name.to_string(),
            dtype,
            shape: p.shape.clone(),
        })
        .collect();
    let mut config = e.config.clone();
    set_dtype(&mut config, dtype);
    let directory = Directory {
        out: e.out,
        base_dir: e.base_dir,
        config: &config,
        tensors: &tensors,
        shard_bytes: writer::SHARD_BYTES,
        chat_template: None,
    };
    directory.write(&mut |plan, sink| fill(&plan.name, sink))
}

impl Directory<'_> {
    /// Writes the directory and returns its path; `fill` delivers the values of each tensor.
    ///
    /// # Errors
    /// As `model`.
    pub fn write(&self, fill: &mut TensorFill) -> Result<PathBuf> {
        let staging = Staging::create(self.out)?;
        let dir = staging.path();
        match self.multimodal_base()? {
            None => writer::write_model(dir, self.tensors, self.shard_bytes, fill)?,
            Some(base) => self.write_multimodal(dir, &base, fill)?,
        };
        let path = dir.join("config.json");
        let text = serde_json::to_string_pretty(self.config)
            .map_err(|e| Error::new("cannot write the config").at_path(&path).cause(e))?;
        files::write_atomic(&path, format!("{text}\n").as_bytes())?;
        copy_beside(self.base_dir, dir, &TOKENIZER)?;
        copy_beside(self.base_dir, dir, &BESIDE)?;
        if let Some(text) = self.chat_template {
            set_chat_template(dir, text)?;
        }
        staging.commit()
    }
}

impl Directory<'_> {
    /// The weights of the base model, if it has other parts than a language model.
    fn multimodal_base(&self) -> Result<Option<Weights>> {
        let wrapped = ["text_config", "vision_config", "mtp_num_hidden_layers"]
            .iter()
            .any(|key| self.config.contains_key(*key));
        wrapped.then(|| Weights::open(self.base_dir)).transpose()
    }

    /// Writes the language model under the names of the base model, and its other parts unchanged.
    fn write_multimodal(&self, dir: &Path, base: &Weights, fill: &mut TensorFill) -> Result<Vec<PathBuf>> {
        let renamed = self.tensors.iter().map(|plan| TensorPlan {
            name: base.stored_name(&plan.name),
            ..plan.clone()
        });
        let others = base.other_parts().iter().map(|info| TensorPlan {
            name: info.name.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
        });
        let all: Vec<TensorPlan> = renamed.chain(others).collect();
        let (mut own, mut others) = (self.tensors.iter(), base.other_parts().iter());
        writer::write_model(dir, &all, self.shard_bytes, |plan, sink| match own.next() {
            Some(own) => fill(own, sink),
            None => match others.next() {
                Some(info) => sink(Values::Raw(&base.read_other(info)?)),
                None => Err(Error::not_found("no such tensor").at(&plan.name)),
            },
        })
    }
}

/// The format of this type in a file.
pub fn stored(dtype: Dtype) -> StoredDtype {
    match dtype {
        Dtype::F32 => StoredDtype::F32,
        Dtype::Bf16 => StoredDtype::Bf16,
    }
}

/// Sets the number format under the key that the config uses: `torch_dtype` (transformers 4) or `dtype` (transformers
/// 5); if it has neither, under the first one, which both versions read.
pub fn set_dtype(config: &mut Map<String, Value>, dtype: StoredDtype) {
    let name = match dtype {
        StoredDtype::Bf16 => "bfloat16",
        StoredDtype::F16 => "float16",
        StoredDtype::F64 => "float64",
        _ => "float32",
    };
    let mut found = false;
    for key in ["torch_dtype", "dtype"] {
        if let Some(value) = config.get_mut(key) {
            *value = name.into();
            found = true;
        }
    }
    if !found {
        config.insert("torch_dtype".into(), name.into());
    }
}
