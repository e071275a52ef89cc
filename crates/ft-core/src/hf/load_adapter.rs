//! Loads a PEFT adapter directory: either completely, or an error that lists every mismatch.

use super::build::{self, LinearTensors};
use super::classifier::SCORE;
use super::expert_adapters;
use super::peft_model::{is_named, missing_whole, module_of, saves, saves_parameter, settle_excluded};
use crate::base::{Error, Result, files};
use crate::formats::adapter::{self, AdapterConfig, AdapterKey, PeftNames, Targets};
use crate::formats::weights::Weights;
use crate::formats::{header, index};
use crate::model::{Adapters, Spec, spec};
use crate::ops::update;
use crate::peft::targets::{self, Site, TargetSelection};
use candle_core::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// PEFT's task type of an adapter with a score head.
pub const SEQUENCE_CLASSIFIER: &str = "SEQ_CLS";
/// Number of mismatches that are shown; the others are counted.
const SHOWN: usize = 20;

/// Contents of an adapter directory.
#[derive(Debug, Clone)]
pub struct LoadedAdapter {
    /// The settings, from `adapter_config.json`.
    pub config: AdapterConfig,
    /// The adapters by module name; those of all experts by the path of their parameter.
    pub adapters: Adapters,
    /// The parts of adapters of all experts, by the module of an expert's linear.
    pub of_experts: Adapters,
    /// Full parameters in f32 that replace the model's, by name (`modules_to_save`).
    pub whole: BTreeMap<String, Tensor>,
    /// Trained rows of matrices, f32 `[T, D]`, by the name of the matrix (`trainable_token_indices`).
    pub rows: BTreeMap<String, (Vec<u32>, Tensor)>,
    /// The score head `[1, D]`, f32, of a reward model's adapter.
    pub score: Option<Tensor>,
}

/// Reads the config and the tensors (as f32, on the host) of all linears that have an adapter.
///
/// # Errors
/// Any error of `AdapterConfig::load`; a pickle beside the weights; and, in one error, every tensor that is missing,
/// unexpected, of another shape or rank, on a module that the model does not have, or not finite.
pub fn load_adapter(dir: &Path, spec: &Spec) -> Result<LoadedAdapter> {
    let mut config = AdapterConfig::load(dir)?;
    let naming = spec.peft_names();
    config.names = naming;
    let own = |name: String| naming.in_files(&name);
    if let adapter::AdapterKind::Adalora(allocation) = &mut config.kind {
        for (module, _) in &mut allocation.kept {
            *module = own(std::mem::take(module));
        }
    }
    refuse_pickles(dir)?;
    let path = dir.join(adapter::WEIGHTS);
    let weights = Weights::open_file(&path)?;
    let sites = spec.sites();
    let params = spec.params();
    let there: BTreeSet<&str> = params.iter().map(|p| module_of(&p.name)).collect();
    // The adapter has parts on modules of this model that ft does not adapt.
    let mut other = false;
    let mut faults = Vec::new();

    let mut found: BTreeMap<String, BTreeMap<&'static str, String>> = BTreeMap::new();
    let mut whole = BTreeMap::new();
    let mut rows = BTreeMap::new();
    let scores = config.task_type.as_deref() == Some(SEQUENCE_CLASSIFIER);
    let mut score = None;
    let mut head = None;
    if super::tie::config_unties(&config, spec) {
        faults.push(format!(
            "`modules_to_save` {:?}: gives the tied embedding and head separate matrices, which is not supported here",
            config.modules_to_save
        ));
    }
    for name in weights.names() {
        if adapter::VERA.contains(&name) && matches!(config.kind, adapter::AdapterKind::Vera { .. }) {
            continue;
        }
        let key = adapter::parse(name, &config.kind, config.use_dora).map(|key| match key {
            AdapterKey::Of(module, below) => AdapterKey::Of(own(module), below),
            AdapterKey::Rows(module) => AdapterKey::Rows(own(module)),
            AdapterKey::Whole(parameter) => AdapterKey::Whole(own(parameter)),
        });
        match key {
            Some(AdapterKey::Of(module, below)) => {
                if let Some(first) = found.entry(module).or_default().insert(below, name.to_string()) {
                    faults.push(format!("{name}: the same tensor as {first}"));
                }
            }
            Some(AdapterKey::Whole(parameter)) if scores && parameter == SCORE => {
                score = build::read(&weights, name, &[1, spec.hidden], &mut faults)?;
            }
            // PEFT also writes the tied head beside the embedding.
            Some(AdapterKey::Whole(parameter))
                if parameter == spec::LM_HEAD && spec.tied && config.ensure_weight_tying =>
            {
                head = build::read(&weights, name, &[spec.vocab, spec.hidden], &mut faults)?;
            }
            Some(AdapterKey::Whole(parameter)) => {
                other |= is_wrapped(&config, &parameter, &there);
                if let Some(tensor) = whole_parameter(&config, spec, &weights, name, &parameter, &mut faults)? {
                    whole.insert(parameter, tensor);
                }
            }
            Some(AdapterKey::Rows(module)) => {
                if let Some(found) = token_rows(&config, spec, &weights, name, &module, &mut faults)? {
                    rows.insert(format!("{module}.weight"), found);
                }
            }
            None => faults.push(format!("{name}: not a tensor of a {} adapter", config.name())),
        }
    }
    if let Some(head) = head {
        let values = |t: &Tensor| update::to_f32_vec(t);
        let same = match whole.get(spec::EMBEDDING) {
            Some(embedding) => values(embedding)? == values(&head)?,
            None => false,
        };
        if !same {
            faults.push(format!(
                "{}: the head of a tied model differs from the embedding in the same file",
                spec::LM_HEAD
            ));
        }
    }
    if scores && score.is_none() && faults.is_empty() {
        faults.push(format!("{SCORE}: missing, but the adapter is a sequence classifier"));
    }
    for p in missing_whole(&mut config, spec, &whole) {
        faults.push(format!("{p}: in `modules_to_save`, but its tensor is missing"));
    }

    for (module, ids) in &config.token_rows {
        let is = |table: &str| is_table(naming, table, module);
        let of_embedding = config
            .token_rows
            .iter()
            .find(|(m, _)| is_table(naming, spec::EMBEDDING, m));
        if !is(spec::EMBEDDING) && !is(spec::LM_HEAD) {
            faults.push(format!(
                "`{module}` in `trainable_token_indices` is neither embedding nor head"
            ));
        } else if is(spec::LM_HEAD) && spec.tied && of_embedding.is_none_or(|(_, own)| own != ids) {
            faults.push("`lm_head` in `trainable_token_indices`: the tied embedding has other token ids".into());
        }
    }
    for table in row_tables(&config, spec) {
        if !rows.contains_key(&table) {
            faults.push(format!(
                "{table}: in `trainable_token_indices`, but its rows are missing"
            ));
        }
    }

    let known: BTreeMap<&str, usize> = sites.iter().enumerate().map(|(i, s)| (s.module.as_str(), i)).collect();
    if config.layers_to_transform.is_some() && !config.layers_pattern.is_empty() {
        let in_file = |site: &Site| Site {
            module: config.name_in_file(&site.module),
            ..site.clone()
        };
        let in_file: Vec<Site> = sites.iter().map(in_file).collect();
        // PEFT takes a whole path in any layer.
        let is_path = |name: &String| in_file.iter().any(|site| site.module == *name);
        let by_layer = match &config.target_modules {
            Targets::AllLinear => true,
            Targets::List(names) => !names.iter().all(is_path),
            Targets::Pattern(_) => false,
        };
        if by_layer && !targets::names_layers(&config.layers_pattern, &in_file)? {
            faults.push(format!(
                "`layers_pattern` {:?}: the layers of this model have another name, so PEFT selects none of them",
                config.layers_pattern
            ));
        }
    }
    let shared = build::projections(&config, &weights, &mut faults)?;
    let mut adapters = expert_adapters::read(&config, &weights, spec, &mut found, &mut faults)?;
    let linears: Vec<&str> = found
        .keys()
        .map(String::as_str)
        .filter(|module| known.contains_key(module))
        .collect();
    let ranks = ranks_and_alphas(&config, &linears)?;
    let ranks: BTreeMap<&str, (usize, f64)> = linears.into_iter().zip(ranks).collect();
    for (module, names) in &found {
        let (Some(&index), Some(&(r, alpha))) = (known.get(module.as_str()), ranks.get(module.as_str())) else {
            faults.push(if there.contains(module.as_str()) {
                other = true;
                format!("{module}: ft has no adapters on this module")
            } else {
                format!("{module}: this model has no such linear")
            });
            continue;
        };
        let found = LinearTensors {
            config: &config,
            weights: &weights,
            site: &sites[index],
            index: index as u64,
            r,
            alpha,
            names,
            faults: &mut faults,
        };
        if let Some(adapter) = found.build(shared.as_ref())? {
            adapters.insert(module.clone(), Arc::new(adapter));
        }
    }
    for site in chosen_by(&config, &sites, &|sites| targets::matching(sites, &choice(&config)))? {
        if !found.contains_key(&site.module) {
            faults.push(format!(
                "{}: a target of the config, but its tensors are missing",
                site.module
            ));
        }
    }
    if adapters.is_empty() && faults.is_empty() {
        faults.push("the file has no adapter tensors".into());
    }
    if faults.is_empty() {
        // Older versions of ft wrote the key, which PEFT ignores.
        let modules: Vec<&str> = adapters.keys().map(String::as_str).collect();
        settle_excluded(&mut config, &modules);
        return Ok(LoadedAdapter {
            of_experts: expert_adapters::of_linears(&adapters, spec)?,
            config,
            adapters,
            whole,
            rows,
            score,
        });
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
    Err(Error::shape("adapter does not fit this model")
        .at_path(&path)
        .found(format!(
            "{total} {}:\n      {}",
            if total == 1 { "difference" } else { "differences" },
            faults.join("\n      ")
        ))
        .hint(if other {
            format!(
                "merge the adapter with PEFT into its base model, {base}: ft has no adapters on some of its modules"
            )
        } else {
            format!("use the base model that the adapter was trained on: {base}")
        }))
}

/// The target selection of the config.
pub fn choice(config: &AdapterConfig) -> TargetSelection<'_> {
    TargetSelection {
        targets: &config.target_modules,
        exclude: config.exclude_modules.as_ref(),
        layers: config.layers_to_transform.as_deref(),
    }
}

/// The sites outside `modules_to_save` that `choose` selects by their names in the model that PEFT loads.
///
/// # Errors
/// Any error of `choose`.
pub(crate) fn chosen_by(
    config: &AdapterConfig,
    sites: &[Site],
    choose: &dyn Fn(&[Site]) -> Result<Vec<Site>>,
) -> Result<Vec<Site>> {
    let open = unsaved(config, sites);
    let named: Vec<Site> = open
        .iter()
        .map(|site| Site {
            module: config.name_in_file(&site.module),
            ..site.clone()
        })
        .collect();
    let chosen = choose(&named)?;
    let kept = named.iter().zip(open).filter(|(named, _)| chosen.contains(named));
    Ok(kept.map(|(_, site)| site).collect())
}

/// The sites outside `modules_to_save`: modules that are saved whole never have an adapter.
pub fn unsaved(config: &AdapterConfig, sites: &[Site]) -> Vec<Site> {
    let open = |s: &&Site| !saves(config.names, &config.modules_to_save, &s.module);
    sites.iter().filter(open).cloned().collect()
}

/// True if `module` of `trainable_token_indices` names this matrix.
fn is_table(names: PeftNames, table: &str, module: &str) -> bool {
    is_named(names, module, module_of(table))
}

/// Names of the matrices whose rows the config trains. A tied head is not a separate matrix.
pub fn row_tables(config: &AdapterConfig, spec: &Spec) -> Vec<String> {
    let params = spec.params();
    let tables = [spec::EMBEDDING, spec.head_name()];
    let named = |t: &str| config.token_rows.iter().any(|(m, _)| is_table(spec.peft_names(), t, m));
    let there = |t: &str| params.iter().any(|p| &*p.name == t);
    let mut out: Vec<String> = tables
        .into_iter()
        .filter(|t| there(t) && named(t))
        .map(str::to_string)
        .collect();
    out.dedup();
    out
}

fn token_rows(
    config: &AdapterConfig,
    spec: &Spec,
    weights: &Weights,
    name: &str,
    module: &str,
    faults: &mut Vec<String>,
) -> Result<Option<(Vec<u32>, Tensor)>> {
    let table = format!("{module}.weight");
    let ids = config
        .token_rows
        .iter()
        .find(|(m, _)| is_table(config.names, &table, m));
    let (true, Some((_, ids))) = (row_tables(config, spec).contains(&table), ids) else {
        faults.push(format!(
            "{name}: rows of a matrix that `trainable_token_indices` does not name, or that this model does not have"
        ));
        return Ok(None);
    };
    if let Some(id) = ids.iter().find(|id| **id as usize >= spec.vocab) {
        faults.push(format!(
            "{name}: token id {id} is outside the vocabulary of {}",
            spec.vocab
        ));
        return Ok(None);
    }
    let found = build::read(weights, name, &[ids.len(), spec.hidden], faults)?;
    Ok(found.map(|t| (ids.clone(), t)))
}

fn whole_parameter(
    config: &AdapterConfig,
    spec: &Spec,
    weights: &Weights,
    name: &str,
    parameter: &str,
    faults: &mut Vec<String>,
) -> Result<Option<Tensor>> {
    if !saves_parameter(config.names, &config.modules_to_save, parameter) {
        faults.push(format!(
            "{name}: a full tensor, but its module is not in `modules_to_save`"
        ));
        return Ok(None);
    }
    let params = spec.params();
    match params.iter().find(|p| &*p.name == parameter) {
        Some(p) => build::read(weights, name, &p.shape, faults),
        None => {
            faults.push(format!("{parameter}: this model has no such parameter"));
            Ok(None)
        }
    }
}

/// True if this whole parameter is of a module of the model that has an adapter itself, or is in a module that the config saves
/// with all in it: ft has neither.
fn is_wrapped(config: &AdapterConfig, parameter: &str, there: &BTreeSet<&str>) -> bool {
    let module = module_of(parameter);
    if let Some(inner) = module.strip_suffix(".base_layer") {
        return there.contains(inner);
    }
    let saved = |module: &str| saves(config.names, &config.modules_to_save, module);
    there.contains(module) && !saves_parameter(config.names, &config.modules_to_save, parameter) && {
        let mut above = module;
        std::iter::from_fn(|| {
            above = above.rsplit_once('.')?.0;
            Some(above)
        })
        .any(saved)
    }
}

/// Refuses a directory with a pickle beside the weights: another loader could read it.
fn refuse_pickles(dir: &Path) -> Result<()> {
    if let Some(path) = files::list(dir)?.iter().find(|p| index::is_weight_pickle(p)) {
        return Err(header::pickle(path).hint("remove it from the adapter directory; ft reads only safetensors"));
    }
    Ok(())
}

/// Rank and alpha of each of these modules: their entries in `rank_pattern` and `alpha_pattern`, else `r` and `lora_alpha`.
/// Each call compiles the patterns, so one call is for all modules.
///
/// # Errors
/// A pattern is not a regular expression, or cannot be matched in reasonable time.
pub fn ranks_and_alphas(
    config: &AdapterConfig,
    modules: impl IntoIterator<Item = impl AsRef<str>>,
) -> Result<Vec<(usize, f64)>> {
    let modules = modules.into_iter().map(|module| config.name_in_file(module.as_ref()));
    let modules: Vec<String> = modules.collect();
    let ranks = targets::of_patterns(&config.rank_pattern, &modules)?;
    let alphas = targets::of_patterns(&config.alpha_pattern, &modules)?;
    let ranks = ranks.into_iter().map(|r| r.copied().unwrap_or(config.r));
    let alphas = alphas.into_iter().map(|a| a.copied().unwrap_or(config.lora_alpha));
    Ok(ranks.zip(alphas).collect())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{adapter_config, adapters, config, spec};
    use super::super::{BaseHashes, adapter, new_adapters};
    use super::*;
    use crate::peft::LoraConfig;
    use candle_core::Device;

    /// As PEFT: `key.endswith("norm")`.
    #[test]
    fn modules_to_save_are_all_modules_whose_names_end_so() {
        let spec = spec(&config(true));
        let lora = LoraConfig {
            r: 2,
            modules_to_save: vec!["norm".into()],
            ..LoraConfig::default()
        };
        let set = new_adapters(&lora, &spec, None, 0).unwrap();
        let layer =
            |l: usize| ["input_layernorm", "post_attention_layernorm"].map(|n| format!("model.layers.{l}.{n}.weight"));
        let mut wanted: Vec<String> = (0..2)
            .flat_map(layer)
            .chain(["model.norm.weight".to_string()])
            .collect();
        let mut found = set.whole.clone();
        wanted.sort();
        found.sort();
        assert_eq!(found, wanted);

        // A file of PEFT has all of them.
        let dir = tempfile::tempdir().unwrap();
        let mut config = adapter_config();
        config.modules_to_save = lora.modules_to_save;
        let tensor = |name: &String| {
            (
                name.clone(),
                Tensor::from_vec(vec![0.5f32; 8], 8, &Device::Cpu).unwrap(),
            )
        };
        let mut whole: BTreeMap<String, Tensor> = set.whole.iter().map(tensor).collect();
        let adapters = adapters(&config, |_| (2, 3.0));
        let all = dir.path().join("all");
        adapter(&all, &config, &adapters, &whole, dir.path(), &BaseHashes::default()).unwrap();
        assert!(load_adapter(&all, &spec).unwrap().whole.keys().eq(whole.keys()));
        whole.remove("model.layers.1.input_layernorm.weight");
        let fewer = dir.path().join("fewer");
        adapter(&fewer, &config, &adapters, &whole, dir.path(), &BaseHashes::default()).unwrap();
        let e = load_adapter(&fewer, &spec).unwrap_err().to_string();
        assert!(
            e.contains("1 difference") && e.contains("layers.1.input_layernorm.weight: in `modules_to_save`"),
            "{e}"
        );
        // A file of an earlier version of ft, which compared whole components: it has the last norm only.
        whole.retain(|name, _| name == "model.norm.weight");
        let earlier = dir.path().join("earlier");
        adapter(&earlier, &config, &adapters, &whole, dir.path(), &BaseHashes::default()).unwrap();
        let loaded = load_adapter(&earlier, &spec).unwrap();
        assert!(loaded.whole.keys().eq(whole.keys()));
        assert_eq!(loaded.config.modules_to_save, ["model.norm"]);
        // Without that one it is damaged, and so is a file of PEFT whose name is no whole component.
        for (name, modules) in [("empty", "norm"), ("ends", "layernorm")] {
            config.modules_to_save = vec![modules.into()];
            let out = dir.path().join(name);
            let none = BTreeMap::new();
            adapter(&out, &config, &adapters, &none, dir.path(), &BaseHashes::default()).unwrap();
            let e = load_adapter(&out, &spec).unwrap_err().to_string();
            assert!(e.contains("in `modules_to_save`, but its tensor is missing"), "{e}");
        }
    }
}
