//! A PEFT adapter directory: `adapter_config.json`, `adapter_model.safetensors`, a short README.

use super::expert_adapters;
use super::fingerprint::{self, BaseHashes};
use super::load_adapter::{SEQUENCE_CLASSIFIER, ranks_and_alphas};
use super::{TOKENIZER, copy_beside};
use crate::base::staging::Staging;
use crate::base::{Error, Result, files};
use crate::formats::StoredDtype;
use crate::formats::adapter::{AdapterConfig, AdapterKind, VERA, WEIGHTS, file_key};
use crate::formats::index::stays_inside;
use crate::formats::writer::{self, TensorPlan, Values};
use crate::model::Adapters;
use crate::ops::update;
use crate::peft::lora::scaling;
use crate::peft::{Adapter, Lora, adalora_scaling};
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Writes the directory and returns its path: every tensor in f32 under PEFT's names, and the tokenizer files of
/// `base_dir`. `adapters` are keyed by module (`model.layers.0.self_attn.q_proj`), `whole` are full parameters stored
/// beside them (`modules_to_save`); `base` is the `fingerprint` of the base model, stored in the metadata of the
/// weights. Adapters that subtract their first product (`Lora::start`) must be converted before (`plain_lora`).
///
/// # Errors
/// No adapter; a rank or scale that differs from the config (PEFT would compute a different result); a value that is
/// not finite; a full disk. Then `out` is unchanged.
pub fn adapter(
    out: &Path,
    config: &AdapterConfig,
    adapters: &Adapters,
    whole: &BTreeMap<String, Tensor>,
    base_dir: &Path,
    base: &BaseHashes,
) -> Result<PathBuf> {
    adapter_over(out, config, adapters, whole, base_dir, &mut |_| Ok(base.clone()))
}

/// As `adapter`, for a base model that `base` writes into the staging directory; `base` returns its fingerprint. The
/// directory has all files but the weights then, and `base` may add or change some.
///
/// # Errors
/// As for `adapter`; any error of `base`.
pub fn adapter_over(
    out: &Path,
    config: &AdapterConfig,
    adapters: &Adapters,
    whole: &BTreeMap<String, Tensor>,
    base_dir: &Path,
    base: &mut dyn FnMut(&Path) -> Result<BaseHashes>,
) -> Result<PathBuf> {
    let tensors = tensors(out, config, adapters, whole)?;
    let list = plans(&tensors);
    let staging = Staging::create(out)?;
    let dir = staging.path();
    let mut next = tensors.iter();
    config.save(dir)?;
    copy_beside(base_dir, dir, &TOKENIZER)?;
    files::write_atomic(&dir.join("README.md"), readme(config, adapters.len()).as_bytes())?;
    let base = base(dir)?;
    let metadata = [
        (fingerprint::SAMPLED.to_string(), base.sampled),
        (fingerprint::WEIGHTS.to_string(), base.weights),
    ];
    writer::write_file(&dir.join(WEIGHTS), &list, &metadata, |plan, sink| match next.next() {
        Some((_, tensor)) => sink(Values::F32(&update::to_f32_vec(tensor)?)),
        None => Err(Error::not_found("no such adapter tensor").at(&plan.name)),
    })?;
    staging.commit()
}

/// Checks all that `adapter` needs, and writes nothing: config, names and shapes of the tensors, the files of the base model.
///
/// # Errors
/// As for `adapter`, for what can be known without the values.
pub fn rehearse_adapter(
    out: &Path,
    config: &AdapterConfig,
    adapters: &Adapters,
    whole: &BTreeMap<String, Tensor>,
    base_dir: &Path,
) -> Result<()> {
    writer::rehearse(&out.join(WEIGHTS), &plans(&tensors(out, config, adapters, whole)?))?;
    for path in TOKENIZER
        .iter()
        .map(|name| base_dir.join(name))
        .filter(|path| path.exists())
    {
        stays_inside(&path)?;
        files::open(&path)?;
    }
    Ok(())
}

fn plans(tensors: &[(String, Tensor)]) -> Vec<TensorPlan> {
    let plan = |(name, tensor): &(String, Tensor)| TensorPlan {
        name: name.clone(),
        dtype: StoredDtype::F32,
        shape: tensor.dims().to_vec(),
    };
    tensors.iter().map(plan).collect()
}

/// The tensors of the file under PEFT's names.
fn tensors(
    out: &Path,
    config: &AdapterConfig,
    adapters: &Adapters,
    whole: &BTreeMap<String, Tensor>,
) -> Result<Vec<(String, Tensor)>> {
    if adapters.is_empty() {
        return Err(Error::new("there is no adapter to save").at_path(out));
    }
    let mut tensors: Vec<(String, Tensor)> = Vec::new();
    let ranks = ranks_and_alphas(config, adapters.keys())?;
    for ((module, adapter), rank) in adapters.iter().zip(ranks) {
        check(config, module, adapter, rank)?;
        if let Adapter::Experts(own) = &**adapter {
            let parts = expert_adapters::tensors(module, own, adapters)?;
            tensors.extend(parts.map(|(name, tensor)| (file_key(&config.name_in_file(&name)), tensor)));
            continue;
        }
        tensors.extend(
            adapter
                .parts()
                .into_iter()
                .map(|p| (file_key(&config.name_in_file(&p.name)), p.tensor)),
        );
    }
    let shared = adapters.values().find_map(|a| match &**a {
        Adapter::Vera(vera) => Some(&vera.shared),
        _ => None,
    });
    if let Some(shared) = shared {
        let pair = [shared.a.clone(), shared.b.clone()];
        tensors.extend(VERA.into_iter().map(String::from).zip(pair));
    }
    tensors.extend(
        whole
            .iter()
            .map(|(name, t)| (file_key(&config.name_in_file(name)), t.clone())),
    );
    Ok(tensors)
}

/// Checks that the config, with this rank and alpha of the module, describes what the adapter computes.
fn check(config: &AdapterConfig, module: &str, adapter: &Adapter, (r, alpha): (usize, f64)) -> Result<()> {
    let (rank, scale, wanted) = match adapter {
        Adapter::Lora(Lora { start: Some(_), .. }) => {
            let what = "the initial LoRA pair (A₀, B₀) was not merged into the adapter before it was saved";
            return Err(Error::internal(what).at(module));
        }
        Adapter::Lora(_) | Adapter::Dora(_) => match adapter.lora() {
            Some(lora) => (lora.rank(), lora.scale, scaling(alpha, r, config.use_rslora)),
            None => return Ok(()),
        },
        Adapter::Experts(own) => (own.rank(), own.scale, scaling(alpha, r, config.use_rslora)),
        Adapter::Loha(loha) => (r, loha.scale, (alpha / r as f64) as f32),
        Adapter::Lokr(lokr) => (r, lokr.scale, (alpha / r as f64) as f32),
        Adapter::Adalora(own) => {
            let kept = match &config.kind {
                AdapterKind::Adalora(allocation) => allocation.kept_of(module),
                _ => None,
            };
            let left = kept.map_or(r, |k| k.iter().filter(|k| **k).count());
            let wanted = adalora_scaling(alpha, r);
            if own.rank() == left && own.scale == wanted {
                return Ok(());
            }
            (own.rank(), own.scale, wanted)
        }
        _ => return Ok(()),
    };
    if rank == r && scale == wanted {
        return Ok(());
    }
    Err(Error::new("adapter does not match its config")
        .at(module)
        .found(format!("rank {rank}, scale {scale}"))
        .expected(format!("rank {r}, scale {wanted}")))
}

/// Converts to an equivalent plain LoRA on the original weights: the first product that an adapter subtracts
/// (`Lora::start`) becomes a second half of the pair with opposite sign; ranks double, scales stay.
///
/// # Errors
/// Some adapters subtract their first product and others do not, or are no LoRA.
pub fn plain_lora(config: &AdapterConfig, adapters: &Adapters) -> Result<(AdapterConfig, Adapters)> {
    let starts = adapters
        .values()
        .any(|a| a.lora().is_some_and(|lora| lora.start.is_some()));
    if !starts {
        return Ok((config.clone(), adapters.clone()));
    }
    // alpha / r with both doubled; alpha / √r with alpha times √2.
    let more = if config.use_rslora { 2f64.sqrt() } else { 2.0 };
    let mut config = config.clone();
    config.r *= 2;
    config.lora_alpha *= more;
    config.rank_pattern.iter_mut().for_each(|(_, r)| *r *= 2);
    config.alpha_pattern.iter_mut().for_each(|(_, alpha)| *alpha *= more);
    let mut plain = Adapters::new();
    let ranks = ranks_and_alphas(&config, adapters.keys())?;
    for ((module, adapter), (r, alpha)) in adapters.iter().zip(ranks) {
        let Some(lora) = adapter.lora() else {
            return Err(Error::new("only a LoRA can subtract its first product").at(module));
        };
        let pair = match lora.start {
            Some(_) => lora.plain()?,
            None => {
                return Err(Error::new(
                    "some adapters of this model subtract their first product, and this one does not",
                )
                .at(module));
            }
        };
        let lora = Lora::new(module, pair, scaling(alpha, r, config.use_rslora), lora.mask);
        plain.insert(module.clone(), Arc::new(Adapter::Lora(lora)));
    }
    Ok((config, plain))
}

/// AdaLoRA adapters as PEFT saves them: without the pruned singular values; the config lists the kept ones.
/// `kept` is by module; if it is empty, nothing changes.
///
/// # Errors
/// The number of flags of a module differs from its number of singular values (`Shape`).
pub fn pruned(
    config: &AdapterConfig,
    adapters: &Adapters,
    kept: &BTreeMap<String, Vec<bool>>,
) -> Result<(AdapterConfig, Adapters)> {
    let (mut config, mut adapters) = (config.clone(), adapters.clone());
    for (module, adapter) in &mut adapters {
        if let (Adapter::Adalora(own), Some(kept)) = (&**adapter, kept.get(module)) {
            *adapter = Arc::new(Adapter::Adalora(own.without(module, kept)?));
        }
    }
    if let (AdapterKind::Adalora(allocation), false) = (&mut config.kind, kept.is_empty()) {
        allocation.kept = kept.iter().map(|(m, k)| (m.clone(), k.clone())).collect();
    }
    Ok((config, adapters))
}

fn readme(c: &AdapterConfig, modules: usize) -> String {
    let base = c.base_model_name_or_path.as_deref().unwrap_or("");
    // Local paths describe this machine and are useless elsewhere.
    let is_hub = base.split('/').count() == 2 && !base.starts_with(['.', '/', '~']) && !base.contains('\\');
    let (header, named) = if is_hub {
        (format!("base_model: {base}\n"), format!("`{base}`"))
    } else {
        (String::new(), "the base model it was trained on".to_string())
    };
    let name = c.name();
    let size = match c.kind {
        AdapterKind::Ia3 { .. } | AdapterKind::Oft { .. } => String::new(),
        AdapterKind::Vera { .. } => format!("Rank {}, on", c.r),
        _ => format!("Rank {}, alpha {}, on", c.r, c.lora_alpha),
    };
    let size = if size.is_empty() { "On".to_string() } else { size };
    let (class, labels) = match c.task_type.as_deref() {
        Some(SEQUENCE_CLASSIFIER) => ("AutoModelForSequenceClassification", ", num_labels=1"),
        _ if c.names.multimodal => ("AutoModelForImageTextToText", ""),
        _ => ("AutoModelForCausalLM", ""),
    };
    format!(
        "---\n{header}library_name: peft\ntags:\n- lora\n---\n\n# {name} adapter\n\n\
         {size} {modules} linear layers. Trained with ft {}.\n\n\
         ```python\n\
         from peft import PeftModel\n\
         from transformers import {class}\n\n\
         base = {class}.from_pretrained(\"{}\"{labels})\n\
         model = PeftModel.from_pretrained(base, \"path/to/this/directory\")\n\
         ```\n\n\
         Use it only with {named}; it does not fit other weights.\n\
         `model.merge_and_unload()` merges the adapter into the base model.\n",
        env!("CARGO_PKG_VERSION"),
        if is_hub { base } else { "path/to/base" },
    )
}
