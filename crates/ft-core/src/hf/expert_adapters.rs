//! LoRA on the parameters with the matrices of all experts (`target_parameters` of PEFT): which of them a config names, and
//! their tensors in a file.
//!
//! Letters: E experts, R rank, I input features, O output features of the joined matrix.

use super::build;
use super::load_adapter::ranks_and_alphas;
use crate::base::{Error, Result};
use crate::formats::adapter::{AdapterConfig, wrapper};
use crate::formats::weights::Weights;
use crate::model::spec::ExpertsSpec;
use crate::model::{Adapters, Spec};
use crate::peft::lora::scaling;
use crate::peft::{Adapter, ExpertLora, ExpertSite, LoraConfig, config::ExpertRank, targets};
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Names of the tensors of a module below it, with their names in a file.
type FileNames = BTreeMap<&'static str, String>;

/// The parameters that the config names: by their whole path in the model that PEFT loads, or by its end.
pub(super) fn chosen(config: &AdapterConfig, spec: &Spec) -> Vec<ExpertSite> {
    let mut sites = spec.expert_sites();
    sites.retain(|s| {
        let path = config.name_in_file(&s.site.module);
        config.target_parameters.iter().any(|name| targets::ends(&path, name))
    });
    sites
}

/// Checks that each name means a parameter.
pub(super) fn check_names(config: &AdapterConfig, spec: &Spec) -> Result<()> {
    let sites = spec.expert_sites();
    let paths: Vec<String> = sites.iter().map(|s| config.name_in_file(&s.site.module)).collect();
    for name in &config.target_parameters {
        if !paths.iter().any(|path| targets::ends(path, name)) {
            let error = Error::not_found("this model has no expert parameter with this name")
                .at("LoraConfig::target_parameters")
                .found(name);
            let layers = spec.layers.iter();
            let names = layers.filter_map(|l| l.experts).map(|e| e.names.module).next();
            return Err(match names {
                Some(module) => error.expected(format!(
                    "`{module}.gate_up_proj`, `{module}.down_proj`, or a whole path"
                )),
                None => error.expected("a model with experts"),
            });
        }
    }
    Ok(())
}

/// Writes the divided ranks of experts into the patterns, after those of the user: PEFT then has the same ranks. The scale
/// stays that of the other adapters.
///
/// Errors: a rank of less than one.
pub(super) fn divide_ranks(lora: &LoraConfig, config: &mut AdapterConfig, spec: &Spec) -> Result<()> {
    let of = |e: ExpertsSpec| match lora.expert_rank {
        ExpertRank::Each => 1,
        ExpertRank::Active => e.router.top_k,
        ExpertRank::All => e.count,
    };
    let divisor = spec.layers.iter().filter_map(|l| l.experts).map(of).max().unwrap_or(1);
    if config.target_parameters.is_empty() || divisor == 1 {
        return Ok(());
    }
    let rank = config.r / divisor;
    if rank == 0 {
        return Err(Error::usage("the divided rank of an expert is less than one")
            .at("LoraConfig::expert_rank")
            .found(format!("rank {} for {divisor} experts", config.r))
            .expected(format!("a rank of at least {divisor}"))
            .hint("raise `LoraConfig::r`, or give each expert the rank itself"));
    }
    let share = rank as f64 / config.r as f64;
    let alpha = config.lora_alpha * if config.use_rslora { share.sqrt() } else { share };
    for name in &config.target_parameters {
        config.rank_pattern.push((name.clone(), rank));
        config.alpha_pattern.push((name.clone(), alpha));
    }
    Ok(())
}

/// New adapters on the parameters that the config names. `first`: the number of linears, after which the initial values of
/// these are drawn.
pub(super) fn fresh(
    config: &AdapterConfig,
    spec: &Spec,
    gaussian: bool,
    seed: Option<u64>,
    first: usize,
) -> Result<Adapters> {
    let all = spec.expert_sites();
    let mut adapters = Adapters::new();
    let sites = chosen(config, spec);
    let ranks = ranks_and_alphas(config, sites.iter().map(|s| &s.site.module))?;
    for (site, (r, alpha)) in sites.into_iter().zip(ranks) {
        let path = site.site.module.clone();
        let index = first + all.iter().position(|s| s.site.module == path).unwrap_or(0);
        let scale = scaling(alpha, r, config.use_rslora);
        let own = match seed {
            Some(seed) => ExpertLora::fresh(&site, r, scale, gaussian, seed, index as u64)?,
            None => ExpertLora::shapes(&site, r, scale)?,
        };
        adapters.insert(path, Arc::new(Adapter::Experts(own)));
    }
    Ok(adapters)
}

/// Takes the tensors of these adapters out of `found`, the names in the file by module, and reads them.
pub(super) fn read(
    config: &AdapterConfig,
    weights: &Weights,
    spec: &Spec,
    found: &mut BTreeMap<String, FileNames>,
    faults: &mut Vec<String>,
) -> Result<Adapters> {
    let sites = chosen(config, spec);
    let has = |path: &str| sites.iter().any(|s| s.site.module == path);
    let mut adapters = Adapters::new();
    let ranks = ranks_and_alphas(config, sites.iter().map(|s| &s.site.module))?;
    for (site, (r, alpha)) in sites.iter().zip(ranks) {
        let path = &site.site.module;
        let module = wrapper(path, &has);
        let names = found.remove(&module).unwrap_or_default();
        let columns = r * site.experts;
        let mut take = |below: &str, shape: &[usize]| match names.get(below) {
            Some(name) => build::read(weights, name, shape, faults),
            None => {
                faults.push(format!("{module}.{below}: missing; it is of the parameter `{path}`"));
                Ok(None)
            }
        };
        let a = take("lora_A.weight", &[columns, site.site.input])?;
        let b = take("lora_B.weight", &[site.site.output, columns])?;
        if let Some((a, b)) = a.zip(b) {
            let scale = scaling(alpha, r, config.use_rslora);
            let own = ExpertLora::of_file(site, a, &b, scale)?;
            adapters.insert(path.clone(), Arc::new(Adapter::Experts(own)));
        }
    }
    Ok(adapters)
}

/// The tensors of the adapter on parameter `path`, by their names below the model.
pub(super) fn tensors(path: &str, own: &ExpertLora, all: &Adapters) -> Result<[(String, Tensor); 2]> {
    let module = wrapper(path, &|other| all.contains_key(other));
    Ok([
        (format!("{module}.lora_A.weight"), own.a.tensor.clone()),
        (format!("{module}.lora_B.weight"), own.b_of_file()?),
    ])
}

/// The pairs of single experts, by the module of their linear.
pub(super) fn of_linears(adapters: &Adapters, spec: &Spec) -> Result<Adapters> {
    let mut all = Adapters::new();
    for (path, linears) in spec.expert_linears() {
        let Some(Adapter::Experts(own)) = adapters.get(&path).map(|a| &**a) else {
            continue;
        };
        let parts = linears.len() / own.experts;
        for (i, module) in linears.into_iter().enumerate() {
            let pair = own.part(i / parts, i % parts, parts)?;
            all.insert(module, Arc::new(Adapter::Lora(pair)));
        }
    }
    Ok(all)
}
