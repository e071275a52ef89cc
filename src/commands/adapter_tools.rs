//! `ft adapter`: shows, compares and combines adapter directories. Needs no model.

use crate::base::{Error, Result};
use crate::commands::merge::refuse_existing;
use crate::formats::adapter::{self, AdapterConfig, AdapterKey, AdapterKind, Targets};
use crate::formats::weights::Weights;
use crate::hf::{self, BaseHashes};
use crate::model::Adapters;
use crate::peft::lora::scaling;
use crate::peft::start::algebra::{self, CompressedPair};
use crate::peft::{Adapter, DropoutMask, Lora};
use crate::setup::locate;
use crate::train::verify;
use candle_core::{Device, Tensor};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The output of `ft adapter show`.
pub struct AdapterSummary {
    pub kind: &'static str,
    pub elements: u64,
    pub bytes: u64,
    pub base: Option<String>,
    pub fingerprint: Option<String>,
    /// The rank, and all other config values that are not the default.
    pub settings: Vec<(String, String)>,
    /// Names of linears, each with the number of layers that have it.
    pub modules: Vec<String>,
}

impl AdapterSummary {
    pub fn json(&self) -> Value {
        json!({
            "kind": self.kind,
            "elements": self.elements,
            "bytes": self.bytes,
            "base": self.base,
            "base_fingerprint": self.fingerprint,
            "settings": self.settings.iter().cloned().collect::<BTreeMap<_, _>>(),
            "modules": self.modules,
        })
    }
}

/// The directory of an adapter: a directory, a run, or a hub id.
///
/// Errors: as `locate::adapter_directory`.
pub fn find(name: &Path) -> Result<PathBuf> {
    if name.is_dir() && !locate::is_run(name) {
        Ok(name.to_path_buf())
    } else {
        locate::adapter_directory(&name.to_string_lossy())
    }
}

fn open(dir: &Path) -> Result<(AdapterConfig, Weights)> {
    let config = AdapterConfig::load(dir)?;
    let weights = Weights::open_file(&dir.join(adapter::WEIGHTS))?;
    Ok((config, weights))
}

/// Errors: an invalid adapter directory.
pub fn show(dir: &Path) -> Result<AdapterSummary> {
    let (config, weights) = open(dir)?;
    let mut elements = 0u64;
    let mut counted: BTreeMap<String, (usize, String)> = BTreeMap::new();
    for name in weights.names() {
        let Some(info) = weights.info(name) else { continue };
        if adapter::VERA.contains(&name) {
            continue;
        }
        elements += info.count() as u64;
        let line = match adapter::parse(name, &config.kind, config.use_dora) {
            Some(AdapterKey::Of(module, below)) => {
                let last = module.rsplit('.').next().unwrap_or(&module).to_string();
                format!("{last}.{below}")
            }
            Some(AdapterKey::Rows(module)) => format!("rows of {module}"),
            Some(AdapterKey::Whole(parameter)) => format!("{parameter} (full)"),
            None => format!("{name} (unknown to ft)"),
        };
        let entry = counted.entry(line).or_insert((0, format!("{:?}", info.shape)));
        entry.0 += 1;
        if entry.1 != format!("{:?}", info.shape) {
            entry.1 = "several shapes".into();
        }
    }
    let mut settings = Vec::new();
    let mut say = |key: &str, value: String| settings.push((key.to_string(), value));
    if !matches!(config.kind, AdapterKind::Ia3 { .. } | AdapterKind::Oft { .. }) {
        say("rank", config.r.to_string());
    }
    if !matches!(
        config.kind,
        AdapterKind::Ia3 { .. } | AdapterKind::Oft { .. } | AdapterKind::Vera { .. }
    ) {
        say("alpha", config.lora_alpha.to_string());
    }
    if config.use_rslora {
        say("scale", "alpha / sqrt(rank)".into());
    }
    if !config.rank_pattern.is_empty() {
        say("ranks", format!("{} by module", config.rank_pattern.len()));
    }
    let targets = match &config.target_modules {
        Targets::AllLinear => "all-linear".to_string(),
        Targets::List(names) => names.join(", "),
        Targets::Pattern(pattern) => format!("regular expression {pattern}"),
    };
    say("targets", targets);
    if !config.target_parameters.is_empty() {
        say("parameters", config.target_parameters.join(", "));
    }
    Ok(AdapterSummary {
        kind: config.name(),
        elements,
        bytes: weights.total_bytes(),
        base: config.base_model_name_or_path.clone(),
        fingerprint: hf::base_of(&weights).map(|base| base.name().to_string()),
        settings,
        modules: counted
            .into_iter()
            .map(|(name, (n, shape))| format!("{n} × {name} {shape}"))
            .collect(),
    })
}

/// The output of `ft adapter diff`.
pub struct AdapterDifference {
    /// Keys of the configs with both values.
    pub settings: Vec<(String, String, String)>,
    pub only_a: Vec<String>,
    pub only_b: Vec<String>,
    /// Tensors with different shapes or values: name and difference.
    pub tensors: Vec<(String, String)>,
    /// ‖a - b‖ over ‖a‖, over all tensors that both have.
    pub relative: f64,
}

impl AdapterDifference {
    pub fn same(&self) -> bool {
        self.settings.is_empty() && self.only_a.is_empty() && self.only_b.is_empty() && self.tensors.is_empty()
    }

    pub fn lines(&self) -> Vec<String> {
        let mut out: Vec<String> = self
            .settings
            .iter()
            .map(|(k, a, b)| format!("config {k}: {a} -> {b}"))
            .collect();
        out.extend(self.only_a.iter().map(|n| format!("only in the first: {n}")));
        out.extend(self.only_b.iter().map(|n| format!("only in the second: {n}")));
        out.extend(self.tensors.iter().map(|(n, what)| format!("{n}: {what}")));
        if !self.tensors.is_empty() {
            out.push(format!(
                "relative difference of all tensors together: {:.3e}",
                self.relative
            ));
        }
        out
    }

    pub fn json(&self) -> Value {
        json!({
            "same": self.same(),
            "config": self.settings.iter().map(|(k, a, b)| json!([k, a, b])).collect::<Vec<_>>(),
            "only_a": self.only_a,
            "only_b": self.only_b,
            "tensors": self.tensors.iter().cloned().collect::<BTreeMap<_, _>>(),
            "relative": self.relative,
        })
    }
}

/// Errors: one of the directories is invalid.
pub fn diff(a: &Path, b: &Path) -> Result<AdapterDifference> {
    let ((config_a, weights_a), (config_b, weights_b)) = (open(a)?, open(b)?);
    let (json_a, json_b) = (config_a.to_json(), config_b.to_json());
    let keys: BTreeSet<&String> = [&json_a, &json_b]
        .into_iter()
        .filter_map(Value::as_object)
        .flat_map(|m| m.keys())
        .collect();
    let mut settings = Vec::new();
    for key in keys {
        let text = |v: &Value| v.get(key).map_or("missing".to_string(), Value::to_string);
        let (x, y) = (text(&json_a), text(&json_b));
        if x != y && key != "peft_version" {
            settings.push((key.clone(), x, y));
        }
    }
    let only = |from: &Weights, other: &Weights| {
        let names = from.names().filter(|n| other.info(n).is_none());
        names.map(str::to_string).collect::<Vec<_>>()
    };
    let (mut tensors, mut difference, mut size) = (Vec::new(), 0f64, 0f64);
    for name in weights_a.names() {
        let (Some(one), Some(two)) = (weights_a.info(name), weights_b.info(name)) else {
            continue;
        };
        if one.shape != two.shape {
            tensors.push((name.to_string(), format!("{:?} -> {:?}", one.shape, two.shape)));
            continue;
        }
        let (x, y) = (weights_a.read_f32(name)?, weights_b.read_f32(name)?);
        let squares = |v: &mut dyn Iterator<Item = f32>| v.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let d = squares(&mut x.iter().zip(&y).map(|(x, y)| x - y));
        let s = squares(&mut x.iter().copied());
        (difference, size) = (difference + d, size + s);
        if d > 0.0 {
            let most = x.iter().zip(&y).fold(0f32, |m, (x, y)| m.max((x - y).abs()));
            tensors.push((
                name.to_string(),
                format!(
                    "relative difference {:.3e}, largest absolute difference {most:.3e}",
                    (d / s.max(f64::MIN_POSITIVE)).sqrt()
                ),
            ));
        }
    }
    Ok(AdapterDifference {
        settings,
        only_a: only(&weights_a, &weights_b),
        only_b: only(&weights_b, &weights_a),
        tensors,
        relative: (difference / size.max(f64::MIN_POSITIVE)).sqrt(),
    })
}

/// The result of `ft adapter combine`.
pub struct CombineReport {
    pub rank: usize,
    pub modules: usize,
    /// The largest relative error over all linears that compression to a lower rank caused.
    pub lost: Option<f64>,
}

/// Combines plain LoRA adapters with weights into one: Σ wᵢ·sᵢ·Bᵢ·Aᵢ as one pair of the summed rank, or its best
/// approximation of rank `rank`.
///
/// Errors: an adapter that is not plain LoRA; adapters of two base models; sizes that differ; `out` is not empty.
pub fn combine(adapters: &[(PathBuf, f32)], out: &Path, rank: Option<usize>) -> Result<CombineReport> {
    refuse_existing(out)?;
    let mut pairs: BTreeMap<String, (Vec<Tensor>, Vec<Tensor>)> = BTreeMap::new();
    let mut base: Option<(BaseHashes, &Path)> = None;
    let mut first: Option<(AdapterConfig, &Path)> = None;
    for (dir, weight) in adapters {
        verify::check_result(dir)?;
        let (config, weights) = open(dir)?;
        if config.kind != AdapterKind::Lora
            || config.use_dora
            || !config.modules_to_save.is_empty()
            || !config.token_rows.is_empty()
            || !config.target_parameters.is_empty()
        {
            let mut found = config.name().to_string();
            if !config.target_parameters.is_empty() {
                found += &format!(" on {}", config.target_parameters.join(", "));
            }
            if !config.modules_to_save.is_empty() {
                found += &format!(" with `modules_to_save`: {}", config.modules_to_save.join(", "));
            }
            if !config.token_rows.is_empty() {
                found += " with `trainable_token_indices`";
            }
            return Err(
                Error::new("only plain LoRA adapters of linear layers can be added up into one adapter")
                    .at_path(dir)
                    .found(found)
                    .hint("`ft merge` adds adapters of every kind to the weights of the model"),
            );
        }
        if let Some(named) = hf::base_of(&weights) {
            match &base {
                Some((own, other)) if !own.agrees(&named) => {
                    return Err(Error::new("the adapters belong to different base models")
                        .at_path(dir)
                        .found(named.name())
                        .expected(format!("{}, as {}", own.name(), other.display())));
                }
                // The base that is known already has more information: it lists its weights.
                Some((own, _)) if !own.weights.is_empty() => {}
                _ => base = Some((named, dir)),
            }
        }
        let mut parts = Vec::new();
        for name in weights.names() {
            let Some(AdapterKey::Of(module, below)) = adapter::parse(name, &config.kind, false) else {
                return Err(Error::new("not a tensor of a LoRA adapter").at(name));
            };
            parts.push((name, module, below));
        }
        let ranks = hf::ranks_and_alphas(&config, parts.iter().map(|(_, module, _)| module))?;
        for ((name, module, below), (r, alpha)) in parts.into_iter().zip(ranks) {
            let Some(info) = weights.info(name) else { continue };
            let tensor = Tensor::from_vec(weights.read_f32(name)?, info.shape.as_slice(), &Device::Cpu)?;
            let entry = pairs.entry(module).or_default();
            if below == "lora_A.weight" {
                entry.0.push(tensor);
            } else {
                let scale = scaling(alpha, r, config.use_rslora);
                entry.1.push((tensor * f64::from(scale * weight))?);
            }
        }
        first.get_or_insert((config, dir));
    }
    if rank == Some(0) {
        return Err(Error::usage("an adapter of rank 0 changes nothing")
            .at("--rank")
            .found(0)
            .expected("1 or more"));
    }
    let Some((mut config, dir)) = first else {
        return Err(Error::usage("no adapter is given"));
    };
    // B already contains the scale, so the scale is 1.
    config.use_rslora = false;
    config.alpha_pattern.clear();
    config.rank_pattern.clear();
    config.target_modules = Targets::List(pairs.keys().cloned().collect());
    config.exclude_modules = None;
    config.layers_to_transform = None;
    // PEFT refuses it without a list of layers.
    config.layers_pattern.clear();
    let mut all = Adapters::new();
    let (mut most, mut ranks) = (None, BTreeMap::new());
    for (module, (a, b)) in pairs {
        let fault = |e: candle_core::Error| {
            Error::new("the LoRA factors of a linear layer do not fit together")
                .at(&module)
                .cause(e)
        };
        let a = Tensor::cat(&a, 0).and_then(|t| t.contiguous()).map_err(fault)?;
        let b = Tensor::cat(&b, 1).and_then(|t| t.contiguous()).map_err(fault)?;
        if a.dim(0)? != b.dim(1)? {
            return Err(Error::new("a linear layer has only one LoRA factor").at(&module));
        }
        let mut lora = Lora::new(&module, (a, b), 1.0, DropoutMask::default());
        // A rank above the sum of the ranks would only add zeros.
        if let Some(r) = rank.map(|rank| rank.min(lora.rank())) {
            let CompressedPair { a, b, error } = algebra::compressed(&lora, r, 1.0)?;
            let pair = (
                Tensor::from_vec(a, (r, lora.a.dim(1)?), &Device::Cpu)?,
                Tensor::from_vec(b, (lora.b.dim(0)?, r), &Device::Cpu)?,
            );
            lora = Lora::new(&module, pair, 1.0, DropoutMask::default());
            most = Some(error.max(most.unwrap_or(0.0)));
        }
        ranks.insert(module.clone(), lora.rank());
        all.insert(module, Arc::new(Adapter::Lora(lora)));
    }
    config.r = ranks.values().copied().max().unwrap_or(1);
    config.lora_alpha = config.r as f64;
    for (module, &r) in ranks.iter().filter(|(_, r)| **r != config.r) {
        config.rank_pattern.push((module.replace('.', "\\."), r));
        config.alpha_pattern.push((module.replace('.', "\\."), r as f64));
    }
    let base = base.map(|(base, _)| base).unwrap_or_default();
    hf::adapter(out, &config, &all, &BTreeMap::new(), dir, &base)?;
    Ok(CombineReport {
        rank: config.r,
        modules: all.len(),
        lost: most,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::StoredDtype;
    use crate::formats::writer::{self, TensorPlan, Values};

    /// The sum names its modules, so it has neither layers nor the name of their list, which PEFT refuses alone.
    #[test]
    fn a_sum_of_adapters_on_some_layers_has_no_list_of_layers() {
        let dir = tempfile::tempdir().unwrap();
        let one = dir.path().join("one");
        std::fs::create_dir(&one).unwrap();
        let config = json!({
            "peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"],
            "layers_to_transform": [1], "layers_pattern": ["layers"]});
        std::fs::write(one.join(adapter::CONFIG), config.to_string()).unwrap();
        let module = "model.layers.1.self_attn.q_proj";
        let plans = [("lora_A", vec![1, 4]), ("lora_B", vec![4, 1])].map(|(side, shape)| TensorPlan {
            name: adapter::file_key(&format!("{module}.{side}.weight")),
            dtype: StoredDtype::F32,
            shape,
        });
        writer::write_file(&one.join(adapter::WEIGHTS), &plans, &[], |_, sink| {
            sink(Values::F32(&[0.5; 4]))
        })
        .unwrap();
        let out = dir.path().join("out");
        combine(&[(one.clone(), 1.0)], &out, None).unwrap();
        let written = AdapterConfig::load(&out).unwrap();
        assert_eq!(written.target_modules, Targets::List(vec![module.into()]));
        assert_eq!(
            (written.layers_to_transform, written.layers_pattern),
            (None, Vec::new())
        );
        // A rank above the sum of the ranks is that sum.
        let more = dir.path().join("more");
        assert_eq!(combine(&[(one.clone(), 1.0)], &more, Some(3)).unwrap().rank, 1);
        assert_eq!(AdapterConfig::load(&more).unwrap().r, 1);
        assert!(combine(&[(one, 1.0)], &dir.path().join("none"), Some(0)).is_err());
    }
}
