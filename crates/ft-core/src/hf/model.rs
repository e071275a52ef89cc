//! A Hugging Face model directory: weights in safetensors, config with all its keys, tokenizer files.

use super::other_parts::OtherParts;
use super::{BESIDE, TOKENIZER, copy_beside, set_chat_template, writable_config};
use crate::base::staging::Staging;
use crate::base::{Error, Result, files};
use crate::formats::index::stays_inside;
use crate::formats::writer::{self, TensorPlan, Values};
use crate::formats::{StoredDtype, Weights, joined};
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
    /// The original `config.json`: all keys are copied, except those that `writable_config` leaves out; the number format is set.
    pub config: Map<String, Value>,
    /// True if the head is tied: `lm_head.weight` is not written.
    pub tied: bool,
    /// The number format of the weights.
    pub dtype: Dtype,
    /// The parameters, in the order of the file.
    pub params: &'a [ParamInfo],
    /// Writes more files into the directory before it gets its name.
    pub more: Option<WriteMore<'a>>,
}

/// Writes more files into a directory that does not have its name yet.
pub type WriteMore<'a> = &'a dyn Fn(&Path) -> Result<()>;

/// A model directory in which each tensor has its own number format.
pub struct OutputModel<'a> {
    /// The directory to write.
    pub out: &'a Path,
    /// Source of tokenizer files, generation settings and license.
    pub base_dir: &'a Path,
    /// The contents of `config.json`; `writable_config` says what is left out, `config_note` in words for the user.
    pub config: &'a Map<String, Value>,
    /// The tensors, in the order of the files.
    pub tensors: &'a [TensorPlan],
    /// Size limit of a weight file; a single larger tensor may exceed it.
    pub shard_bytes: u64,
    /// Replaces the base model's `chat_template.jinja`.
    pub chat_template: Option<&'a str>,
}

/// Passes the values of one tensor to the sink.
pub type TensorFill<'a> = dyn FnMut(&TensorPlan, &mut dyn FnMut(Values) -> Result<()>) -> Result<()> + 'a;

/// Passes the values of the named parameter to the sink.
pub type ParamFill<'a> = dyn FnMut(&str, &mut dyn FnMut(Values) -> Result<()>) -> Result<()> + 'a;

/// Writes the directory and returns its path. `fill` passes the values of one parameter to the sink, at once or in
/// pieces; for bf16 output they are rounded to nearest, so bf16 values are written unchanged.
///
/// # Errors
/// A value that is not finite, a parameter of another size, a full disk; then `out` is unchanged.
pub fn model(e: &ModelExport, fill: &mut ParamFill) -> Result<PathBuf> {
    with_directory(e, |directory| {
        let staging = directory.staged(&mut |plan, sink| fill(&plan.name, sink), e.more)?;
        staging.commit()
    })
}

/// Checks all that `model` needs, and writes nothing: names, shapes and formats of the tensors, the files of the base model,
/// and that `fill` delivers the smallest tensor with the size of its shape.
///
/// # Errors
/// As `model`, for what can be known without the other values.
pub fn rehearse_model(e: &ModelExport, fill: &mut ParamFill) -> Result<()> {
    with_directory(e, |directory| {
        directory.rehearse(&mut |plan, sink| fill(&plan.name, sink))
    })
}

fn with_directory<T>(e: &ModelExport, work: impl FnOnce(&OutputModel) -> Result<T>) -> Result<T> {
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
    work(&OutputModel {
        out: e.out,
        base_dir: e.base_dir,
        config: &config,
        tensors: &tensors,
        shard_bytes: writer::SHARD_BYTES,
        chat_template: None,
    })
}

impl OutputModel<'_> {
    /// Writes the directory, whose name must be free, and returns its path; `fill` delivers the values of each tensor, in the order of `tensors` except
    /// those of experts that share a tensor in the files.
    ///
    /// # Errors
    /// As `model`; another process has written there meanwhile.
    pub fn write(&self, fill: &mut TensorFill) -> Result<PathBuf> {
        self.write_with(fill, None)
    }

    /// As `write`; `more` writes more files before the directory gets its name. They may replace those of the base model.
    ///
    /// # Errors
    /// As `write`, and those of `more`; then `out` is unchanged.
    pub fn write_with(&self, fill: &mut TensorFill, more: Option<WriteMore>) -> Result<PathBuf> {
        self.staged(fill, more)?.commit_new()
    }

    fn staged(&self, fill: &mut TensorFill, more: Option<WriteMore>) -> Result<Staging> {
        let staging = Staging::create(self.out)?;
        let dir = staging.path();
        self.write_weights(dir, fill)?;
        let path = dir.join("config.json");
        let (config, _) = writable_config(self.config, self.base_dir);
        let text = serde_json::to_string_pretty(&config)
            .map_err(|e| Error::new("cannot write the config").at_path(&path).cause(e))?;
        files::write_atomic(&path, format!("{text}\n").as_bytes())?;
        copy_beside(self.base_dir, dir, &TOKENIZER)?;
        copy_beside(self.base_dir, dir, &BESIDE)?;
        if let Some(text) = self.chat_template {
            set_chat_template(dir, text)?;
        }
        if let Some(more) = more {
            more(dir)?;
        }
        Ok(staging)
    }
}

/// The tensors of the files, in order.
struct Contents {
    own: Vec<joined::OutputTensor>,
    /// Names and formats of all, those of the base model last.
    plans: Vec<TensorPlan>,
    /// The other parts of the base model.
    others: Option<OtherParts>,
}

impl OutputModel<'_> {
    /// Bytes of all tensors of the files: `tensors` and the other parts of the base model.
    ///
    /// # Errors
    /// The weights of the base model cannot be read; a quantized tensor of another part that cannot be dequantized.
    pub fn bytes(&self) -> Result<u64> {
        let plans = self.contents()?.plans;
        Ok(plans.iter().filter_map(TensorPlan::bytes).sum())
    }

    /// As `rehearse_model`.
    fn rehearse(&self, fill: &mut TensorFill) -> Result<()> {
        let contents = self.contents()?;
        writer::rehearse(&self.out.join("model.safetensors"), &contents.plans)?;
        for name in TOKENIZER.iter().chain(&BESIDE) {
            let path = self.base_dir.join(name);
            if path.exists() {
                stays_inside(&path)?;
                files::open(&path)?;
            }
        }
        let sizes = contents.own.iter().zip(&contents.plans);
        let Some((smallest, plan)) = sizes.min_by_key(|(_, plan)| plan.bytes()) else {
            return Ok(());
        };
        let (expected, mut found) = (plan.shape.iter().product::<usize>(), 0);
        smallest.write(self.tensors, fill, &mut |values| {
            found += match values {
                Values::F32(v) => v.len(),
                Values::Bf16(v) => v.len(),
                Values::F16(v) => v.len(),
                Values::Raw(bytes) => bytes.len() / plan.dtype.size(),
            };
            Ok(())
        })?;
        if found != expected {
            return Err(Error::internal("a tensor has more or fewer values than its shape")
                .at(&plan.name)
                .found(found)
                .expected(format!("{expected} for {:?}", plan.shape)));
        }
        Ok(())
    }

    /// The names and joined tensors of the base model, and its other parts. Their values stay the same.
    ///
    /// Errors: a quantized tensor of another part that cannot be dequantized.
    fn contents(&self) -> Result<Contents> {
        let wrapped = ["text_config", "vision_config", "mtp_num_hidden_layers"]
            .iter()
            .any(|key| self.config.contains_key(*key));
        // Weights of random init have no base.
        let base = if wrapped {
            Some(Weights::open(self.base_dir)?)
        } else {
            Weights::open(self.base_dir).ok()
        };
        let usual = || joined::usual(self.config);
        let layout = base
            .as_ref()
            .map_or_else(usual, |base| base.experts_layout(self.config));
        let own = joined::outputs(self.tensors, layout);
        let base = base.filter(|base| wrapped || !base.other_parts().is_empty());
        let renamed = own.iter().map(|output| TensorPlan {
            name: base
                .as_ref()
                .map_or(output.plan.name.clone(), |base| base.stored_name(&output.plan.name)),
            ..output.plan.clone()
        });
        let mut plans: Vec<TensorPlan> = renamed.collect();
        let dense = match plans.first().map(|plan| plan.dtype) {
            Some(StoredDtype::F32 | StoredDtype::F64) => StoredDtype::F32,
            Some(StoredDtype::F16) => StoredDtype::F16,
            _ => StoredDtype::Bf16,
        };
        let others = base.map(|base| OtherParts::of(base, dense)).transpose()?;
        plans.extend(others.iter().flat_map(OtherParts::plans));
        Ok(Contents { own, plans, others })
    }

    fn write_weights(&self, dir: &Path, fill: &mut TensorFill) -> Result<Vec<PathBuf>> {
        let Contents { own, plans, others } = self.contents()?;
        let mut own = own.iter();
        writer::write_model(dir, &plans, self.shard_bytes, |plan, sink| {
            match (own.next(), &others) {
                (Some(own), _) => own.write(self.tensors, fill, sink),
                (None, Some(others)) => others.write(&plan.name, sink),
                (None, None) => Err(Error::not_found("no such tensor").at(&plan.name)),
            }
        })
    }
}

/// The format of this type in a file.
pub fn stored(dtype: Dtype) -> StoredDtype {
    match dtype {
        Dtype::F32 => StoredDtype::F32,
        Dtype::Bf16 => StoredDtype::Bf16,
        Dtype::F16 => StoredDtype::F16,
    }
}

/// Sets a key of the language model. In the config of a multimodal model it is in `text_config`, and also at the top if that
/// has the key already.
pub fn set_language_key(config: &mut Map<String, Value>, key: &str, value: &Value) {
    let inner = match config.get_mut("text_config") {
        Some(Value::Object(text)) => {
            text.insert(key.into(), value.clone());
            true
        }
        _ => false,
    };
    if !inner || config.contains_key(key) {
        config.insert(key.into(), value.clone());
    }
}

/// Sets the number format under the key that the config uses: `torch_dtype` (transformers 4) or `dtype` (transformers
/// 5); if it has neither, under the first one, which both versions read. Also in the part of a multimodal model's config from which
/// transformers opens the text model alone.
pub fn set_dtype(config: &mut Map<String, Value>, dtype: StoredDtype) {
    let name = match dtype {
        StoredDtype::Bf16 => "bfloat16",
        StoredDtype::F16 => "float16",
        StoredDtype::F64 => "float64",
        _ => "float32",
    };
    let set = |config: &mut Map<String, Value>| {
        let mut found = false;
        for key in ["torch_dtype", "dtype"] {
            if let Some(value) = config.get_mut(key) {
                *value = name.into();
                found = true;
            }
        }
        found
    };
    if let Some(Value::Object(text)) = config.get_mut("text_config") {
        set(text);
    }
    if !set(config) {
        config.insert("torch_dtype".into(), name.into());
    }
}
