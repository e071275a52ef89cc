//! What every program opens first: the model directory with its config, tokenizer and template.

use crate::base::{Error, Result};
use crate::data::codec::ChatRender;
use crate::export;
use crate::formats::StoredDtype;
use crate::formats::config::Config;
use crate::formats::template::ChatTemplate;
use crate::formats::tokenizer::Tokenizer;
use crate::formats::weights::Weights;
use crate::hub;
use crate::model::{Network, Spec, families, shapes};
use crate::ops::{self, update};
use crate::recipe::{Dtype, ModelInit};
use crate::report;
use crate::source::{Resident, resident};
use candle_core::{DType, Device, Tensor};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model directory, read but not loaded.
pub struct Described {
    pub dir: PathBuf,
    pub config: Config,
    pub spec: Spec,
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
}

impl Described {
    /// `path` is a directory or a hub id; `template` a Jinja file that takes the place of the model's own.
    ///
    /// Errors: everything that is wrong with the directory; a tokenizer with more ids than the embedding has rows.
    pub fn open(path: &str, revision: &str, template: Option<&str>) -> Result<Self> {
        if let Some(config) = shapes::config(path)? {
            return Ok(Self {
                dir: PathBuf::from(path),
                spec: families::read(&config)?,
                config,
                tokenizer: Tokenizer::bytes()?,
                template: None,
            });
        }
        let dir = hub::resolve_model(path, revision, true)?;
        let config = Config::load(&dir)?;
        let spec = families::read(&config)?;
        let tokenizer = Tokenizer::load(&dir)?;
        if tokenizer.vocab_size() > spec.vocab {
            return Err(
                Error::new("the tokenizer knows more tokens than the embedding has rows")
                    .at_path(&dir)
                    .found(format!("{} tokens", tokenizer.vocab_size()))
                    .expected(format!("at most {} (vocab_size of config.json)", spec.vocab))
                    .hint("use the tokenizer that belongs to this model, or resize the model's embedding first"),
            );
        }
        let template = match template {
            Some(file) => Some(ChatTemplate::from_file(Path::new(file), &tokenizer)?),
            None => ChatTemplate::from_dir(&dir, &tokenizer)?,
        };
        Ok(Self {
            dir,
            config,
            spec,
            tokenizer,
            template,
        })
    }

    /// Random weights of a built-in shape: there is no directory, and nothing to take away.
    pub fn is_shape(&self) -> bool {
        self.dir.to_string_lossy().starts_with(shapes::PREFIX)
    }

    /// The chat template as the data room sees it.
    pub fn template(&self) -> Option<&dyn ChatRender> {
        self.template.as_ref().map(|t| t as &dyn ChatRender)
    }

    /// Do the weights fit the config? Reads headers only.
    pub fn check_weights(&self, init: ModelInit) -> Result<()> {
        match init {
            ModelInit::Pretrained => resident::check_names(&self.spec.params(), &Weights::open(&self.dir)?),
            ModelInit::Random => Ok(()),
        }
    }

    /// Loads the weights; `init = random` draws them from `seed` instead.
    pub fn load(&self, dtype: Dtype, init: ModelInit, seed: u64, device: &Device) -> Result<Network> {
        let params = self.spec.params();
        let source = match init {
            ModelInit::Pretrained => Resident::load(params, &Weights::open(&self.dir)?, dtype, device)?,
            ModelInit::Random => {
                let norm = if self.spec.norm_plus_one { 0.0 } else { 1.0 };
                Resident::random(params, seed, self.spec.initializer_range, norm, dtype, device)?
            }
        };
        Ok(Network::new(self.spec.clone(), Box::new(source), device.clone()))
    }
}

impl Described {
    /// The network for inference: stored weights in `dtype` (default: as they are stored; f16 as f32), with
    /// the PEFT adapter of a directory on its linears.
    pub fn infer(&self, adapter: Option<&Path>, dtype: Option<Dtype>, device: &Device) -> Result<Network> {
        let weights = Weights::open(&self.dir)?;
        let all_bf16 = weights
            .names()
            .all(|n| weights.info(n).is_some_and(|i| i.dtype == StoredDtype::Bf16));
        let stored = if all_bf16 { Dtype::Bf16 } else { Dtype::F32 };
        let source = Resident::load(self.spec.params(), &weights, dtype.unwrap_or(stored), device)?;
        let mut network = Network::new(self.spec.clone(), Box::new(source), device.clone());
        if let Some(dir) = adapter {
            let loaded = export::load_adapter(dir, &self.spec)?;
            export::check_base(dir, &export::fingerprint_of(&self.spec, &weights)?)?;
            for (module, adapter) in loaded.adapters {
                network.adapters.insert(module, Arc::new(adapter.on(device)?));
            }
            for (name, tensor) in &loaded.whole {
                let values = update::to_f32_vec(tensor)?;
                store(&network.param(name)?.tensor, &values)?;
            }
        }
        Ok(network)
    }
}

/// Sets a weight to these values, rounded to its type.
fn store(weight: &Tensor, values: &[f32]) -> Result<()> {
    match weight.dtype() {
        DType::BF16 => update::store_bf16(weight, |w| {
            for (w, &x) in w.iter_mut().zip(values) {
                *w = half::bf16::from_f32(x);
            }
        }),
        _ => update::with_slice_mut(weight, |w| w.copy_from_slice(values)),
    }
}

/// What a model computes, from its `config.json` alone.
pub fn read_spec(path: &str, revision: &str) -> Result<Spec> {
    if let Some(config) = shapes::config(path)? {
        return families::read(&config);
    }
    families::read(&Config::load(&hub::resolve_config(path, revision)?)?)
}

/// The device of that name, ready for use; a choice that may surprise is told.
pub fn device(name: &str) -> Result<Device> {
    let opened = ops::device::open(name)?;
    if let Some(note) = &opened.note {
        report::warn(note);
    }
    Ok(opened.device)
}
