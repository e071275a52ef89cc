//! A PEFT adapter directory into adapters of a model: all of it, or an error that lists every difference.

use crate::base::{Error, Result};
use crate::formats::adapter::{self, AdapterConfig, AdapterKey, Targets};
use crate::formats::weights::Weights;
use crate::model::Adapters;
use crate::peft::Lora;
use crate::peft::lora::scaling;
use crate::peft::targets::Site;
use candle_core::{Device, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// Differences shown in full; the rest is counted.
const SHOWN: usize = 20;

/// Reads config, A `[R, I]` and B `[O, R]` (as f32, on the host) of every module of `sites` that the adapter
/// sits on. The scale is alpha / r, or alpha / √r with rsLoRA; `Lora::site` is the module's index in `sites`.
///
/// Errors: what `AdapterConfig::load` refuses; and, in one error, every tensor that is missing, unexpected, of
/// another shape or rank, on a module the model does not have, or not finite.
pub fn load_adapter(dir: &Path, sites: &[Site]) -> Result<(AdapterConfig, Adapters)> {
    let config = AdapterConfig::load(dir)?;
    let path = dir.join(adapter::WEIGHTS);
    let weights = Weights::open_file(&path)?;
    let mut faults = Vec::new();

    // Tensor names of A and B by module.
    let mut pairs: BTreeMap<String, [Option<String>; 2]> = BTreeMap::new();
    for name in weights.names() {
        let (module, side) = match adapter::parse_key(name) {
            Some(AdapterKey::A(module)) => (module, 0),
            Some(AdapterKey::B(module)) => (module, 1),
            Some(AdapterKey::Whole(_)) => {
                faults.push(format!(
                    "{name}: a whole tensor beside the adapter (`modules_to_save`) is not supported"
                ));
                continue;
            }
            None => {
                faults.push(format!("{name}: not a tensor of a LoRA adapter"));
                continue;
            }
        };
        if let Some(first) = pairs.entry(module).or_default()[side].replace(name.to_string()) {
            faults.push(format!("{name}: the same factor as {first}"));
        }
    }

    let known: BTreeMap<&str, usize> = sites.iter().enumerate().map(|(i, s)| (s.module.as_str(), i)).collect();
    let mut adapters = Adapters::new();
    for (module, names) in &pairs {
        let Some(&index) = known.get(module.as_str()) else {
            faults.push(format!("{module}: this model has no such linear"));
            continue;
        };
        let [a_key, b_key] = names;
        let (Some(a_key), Some(b_key)) = (a_key, b_key) else {
            let side = if a_key.is_none() { "A" } else { "B" };
            faults.push(format!("{}: missing", adapter::lora_key(module, side)));
            continue;
        };
        let r = rank_of(&config, module)?;
        let a = read(&weights, a_key, [r, sites[index].input], &mut faults)?;
        let b = read(&weights, b_key, [sites[index].output, r], &mut faults)?;
        let (Some(a), Some(b)) = (a, b) else { continue };
        let lora = Lora {
            a,
            b,
            a_name: format!("{module}.lora_A.weight").into(),
            b_name: format!("{module}.lora_B.weight").into(),
            scale: scaling(alpha_of(&config, module)?, r, config.use_rslora),
            dropout: config.lora_dropout as f32,
            site: index as u64,
        };
        adapters.insert(module.clone(), Arc::new(lora));
    }
    for module in expected(&config, sites) {
        if !pairs.contains_key(module) {
            faults.push(format!("{module}: a target of the config, but its tensors are missing"));
        }
    }
    if pairs.is_empty() && faults.is_empty() {
        faults.push("no adapter tensors at all".into());
    }
    if faults.is_empty() {
        return Ok((config, adapters));
    }
    let total = faults.len();
    faults.truncate(SHOWN);
    if total > SHOWN {
        faults.push(format!("and {} more", total - SHOWN));
    }
    let base = config
        .base_model_name_or_path
        .as_deref()
        .unwrap_or("not named in its config");
    Err(Error::new("adapter does not fit this model")
        .at_path(&path)
        .found(format!(
            "{total} {}:\n      {}",
            if total == 1 { "difference" } else { "differences" },
            faults.join("\n      ")
        ))
        .hint(format!("use the base model that the adapter was trained on: {base}")))
}

fn read(weights: &Weights, key: &str, shape: [usize; 2], faults: &mut Vec<String>) -> Result<Option<Tensor>> {
    let found = weights.info(key).map(|i| (i.shape.clone(), i.dtype));
    match found {
        Some((found, _)) if found != shape => {
            faults.push(format!("{key}: found {found:?}, expected {shape:?}"));
            Ok(None)
        }
        Some((_, dtype)) if !dtype.is_weight() => {
            faults.push(format!("{key}: stored as {dtype}, which cannot be read as weights"));
            Ok(None)
        }
        _ => {
            let values = weights.read_f32(key)?;
            if let Some(i) = values.iter().position(|x| !x.is_finite()) {
                faults.push(format!("{key}: the number at position {i} is not finite"));
                return Ok(None);
            }
            Ok(Some(Tensor::from_vec(values, &shape, &Device::Cpu)?))
        }
    }
}

/// Modules that the config targets, as far as it names them: a regular expression is not run, so there the
/// tensors in the file decide.
fn expected<'a>(config: &AdapterConfig, sites: &'a [Site]) -> BTreeSet<&'a str> {
    let ends = |module: &str, t: &String| module == t || module.ends_with(&format!(".{t}"));
    let named = |targets: &Targets, module: &str| match targets {
        Targets::AllLinear => true,
        Targets::List(list) => list.iter().any(|t| ends(module, t)),
        Targets::Pattern(_) => false,
    };
    let excluded = |module: &str| match &config.exclude_modules {
        None => false,
        // Nothing may be demanded that a pattern perhaps excludes.
        Some(Targets::Pattern(_)) => true,
        Some(targets) => named(targets, module),
    };
    let in_layers = |module: &str| match (&config.layers_to_transform, layer_of(module)) {
        (Some(layers), Some(l)) => layers.contains(&l),
        (Some(_), None) => false,
        (None, _) => true,
    };
    sites
        .iter()
        .map(|s| s.module.as_str())
        .filter(|m| named(&config.target_modules, m) && !excluded(m) && in_layers(m))
        .collect()
}

/// `3` of `model.layers.3.mlp.up_proj`.
fn layer_of(module: &str) -> Option<usize> {
    module.split('.').find_map(|part| part.parse().ok())
}

/// Rank of a module: its entry in `rank_pattern`, else `r`.
pub(super) fn rank_of(config: &AdapterConfig, module: &str) -> Result<usize> {
    Ok(*pattern_entry(&config.rank_pattern, module, "rank_pattern")?.unwrap_or(&config.r))
}

/// Alpha of a module: its entry in `alpha_pattern`, else `lora_alpha`.
pub(super) fn alpha_of(config: &AdapterConfig, module: &str) -> Result<f64> {
    Ok(*pattern_entry(&config.alpha_pattern, module, "alpha_pattern")?.unwrap_or(&config.lora_alpha))
}

/// PEFT matches a key as the whole module path or its end. Keys are regular expressions there; ft takes plain
/// names (also with `^`, `$` and `\.`) and refuses the rest, because a wrong guess changes what is computed.
fn pattern_entry<'a, T>(patterns: &'a BTreeMap<String, T>, module: &str, key: &str) -> Result<Option<&'a T>> {
    let mut found = None;
    for (pattern, value) in patterns {
        let rest = pattern.strip_prefix('^');
        let plain = rest.unwrap_or(pattern).trim_end_matches('$').replace("\\.", ".");
        if !plain.chars().all(|c| c.is_alphanumeric() || "._-".contains(c)) {
            return Err(
                Error::new(format!("`{key}` has a regular expression, which ft does not run"))
                    .at(adapter::CONFIG)
                    .found(format!("{pattern:?}"))
                    .expected("module names or their ends"),
            );
        }
        let matches = module == plain || (rest.is_none() && module.ends_with(&format!(".{plain}")));
        if !matches {
            continue;
        }
        if found.is_some() {
            return Err(Error::new(format!("two keys of `{key}` match one module"))
                .at(module)
                .hint("which of them counts depends on the order in the file: name the module whole"));
        }
        found = Some(value);
    }
    Ok(found)
}
