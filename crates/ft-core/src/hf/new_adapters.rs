//! New adapters for a model: which linears get one, its kind and its initial values, and the other parameters that train
//! with it.

use super::expert_adapters;
use super::load_adapter::{choice, chosen_by, ranks_and_alphas};
use super::peft_model;
use crate::base::{Error, Result};
use crate::formats::adapter::{AdapterConfig, AdapterKind, RankAllocation, Targets};
use crate::model::{Adapters, Network, Spec, TokenRows, tokens};
use crate::peft::config::{LoraInit, PeftType};
use crate::peft::lora::{fresh, scaling, shapes};
use crate::peft::targets::{self, Site, select};
use crate::peft::{
    self, Adalora, Adapter, AdapterShape, Cayley, Dora, DropoutMask, Ia3, Loha, Lokr, Lora, LoraConfig, Oft,
};
use crate::peft::{Vera, VeraProjections};
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Number of terms of the Cayley-Neumann series, as in PEFT.
const NEUMANN_TERMS: usize = 5;

/// Rows of a matrix that train.
#[derive(Debug, Clone)]
pub struct TrainedRows {
    /// The name of the matrix.
    pub table: String,
    /// The rows.
    pub ids: Vec<u32>,
    /// Their values `[rows, D]`, if an adapter directory contains them.
    pub given: Option<Tensor>,
}

/// All facts about adapters that are known before the weights are loaded.
#[derive(Default)]
pub struct AdapterSet {
    /// The adapters by module name.
    pub adapters: Adapters,
    /// None: the method trains no adapters.
    pub config: Option<AdapterConfig>,
    /// Names of parameters that train in full beside the adapters (`modules_to_save`).
    pub whole: Vec<String>,
    /// The values of these parameters in an adapter directory.
    pub given: BTreeMap<String, Tensor>,
    /// Rows of embedding and head that train.
    pub rows: Vec<TrainedRows>,
    /// Warnings for the user.
    pub warnings: Vec<String>,
    /// The error of a part that PEFT would leave out. Runs of earlier versions have such parts, and may go on.
    pub left_out: Option<Error>,
}

impl AdapterSet {
    /// Moves the adapters to the device of `network`, and adds them and the trained rows to it.
    ///
    /// # Errors
    /// Not enough memory on the device; a token that the model does not have; a matrix with trained rows that is not in
    /// memory.
    pub fn attach(&mut self, network: &mut Network) -> Result<()> {
        for adapter in self.adapters.values_mut() {
            *adapter = Arc::new(adapter.on(&network.device)?);
        }
        network.adapters = self.adapters.clone();
        for TrainedRows { table, ids, given } in &self.rows {
            let rows = TokenRows::new(network, table, ids, given.as_ref())?;
            network.tokens.push(rows);
        }
        Ok(())
    }

    /// Names of all parameters that train.
    pub fn trained(&self) -> impl Iterator<Item = String> + '_ {
        let parts = self.adapters.values().flat_map(|a| a.parts());
        parts
            .map(|p| p.name.to_string())
            .chain(self.whole.iter().cloned())
            .chain(self.trained_rows())
    }

    /// Names of the parameters of trained rows.
    pub fn trained_rows(&self) -> impl Iterator<Item = String> + '_ {
        self.rows.iter().map(|rows| tokens::name_of(&rows.table))
    }
}

/// Makes new adapters for the linears that `lora` selects. `base` names the base model in `adapter_config.json`; initial
/// values depend on `seed` and the module only.
///
/// # Errors
/// Initial values that depend on weights or rows ([`adapters_to_fill`]); targets that match no linear; a rank or block
/// size that the linears do not allow; a module or token that the model does not have.
pub fn new_adapters(lora: &LoraConfig, spec: &Spec, base: Option<String>, seed: u64) -> Result<AdapterSet> {
    let drawn = matches!(lora.init_lora_weights, LoraInit::Default | LoraInit::Gaussian);
    if lora.peft_type == PeftType::Lora && (!drawn || lora.use_dora) {
        return Err(
            Error::unsupported("the initial values of these adapters depend on the model")
                .found(if drawn {
                    "DoRA: its magnitudes are norms of weights".to_string()
                } else {
                    format!("`{}`: computed from weights or rows", lora.init_lora_weights.name())
                })
                .expected("`default` or `gaussian`, without DoRA")
                .hint("create them with `adapters_to_fill`, and compute the values with the module `start` of `peft`"),
        );
    }
    let mut set = adapters_to_fill(lora, spec, base, seed)?;
    match set.left_out.take() {
        None => Ok(set),
        Some(error) => Err(error),
    }
}

/// As [`new_adapters`], for all initial values. The caller computes those that depend on the model: pairs with
/// [`peft::start`] (they are drawn as for `default` here, what they subtract is zero), and magnitudes with
/// [`Dora::begin`] (they are one here). A part that PEFT would leave out is no error here: see [`AdapterSet::left_out`].
///
/// # Errors
/// As [`new_adapters`], except for initial values and such a part.
pub fn adapters_to_fill(lora: &LoraConfig, spec: &Spec, base: Option<String>, seed: u64) -> Result<AdapterSet> {
    adapters(lora, spec, base, Some(seed))
}

/// As [`adapters_to_fill`], for plans: LoRA pairs have shapes, but no values and no memory (`peft::lora::shapes`).
///
/// # Errors
/// As [`adapters_to_fill`].
pub fn adapter_shapes(lora: &LoraConfig, spec: &Spec, base: Option<String>) -> Result<AdapterSet> {
    adapters(lora, spec, base, None)
}

/// `seed`: that of the initial values; `None`: no values.
fn adapters(lora: &LoraConfig, spec: &Spec, base: Option<String>, seed: Option<u64>) -> Result<AdapterSet> {
    let all = spec.sites();
    let mut config = config_of(lora, base)?;
    config.names = spec.peft_names();
    expert_adapters::check_names(&config, spec)?;
    expert_adapters::divide_ranks(lora, &mut config, spec)?;
    let experts = expert_adapters::chosen(&config, spec);
    let in_file = |s: &Site| Site {
        module: config.name_in_file(&s.module),
        ..s.clone()
    };
    let open = peft_model::kept(&config, spec, &all)?;
    let chosen = chosen_by(&config, &open.sites, &|sites| {
        let chosen = if lora.only_parameters {
            Vec::new()
        } else {
            select(sites, &choice(&config))?
        };
        let with_experts: Vec<Site> = chosen
            .iter()
            .cloned()
            .chain(experts.iter().map(|e| in_file(&e.site)))
            .collect();
        targets::check_pattern(&config.rank_pattern, &with_experts, "LoraConfig::rank_pattern")?;
        targets::check_pattern(&config.alpha_pattern, &with_experts, "LoraConfig::alpha_pattern")?;
        Ok(chosen)
    })?;
    let all_sites: Vec<Site> = chosen
        .iter()
        .cloned()
        .chain(experts.iter().map(|e| e.site.clone()))
        .collect();
    let mut warnings = check_ranks(&config, &all_sites)?;
    warnings.extend(open.warning);
    let has_experts = spec.layers.iter().any(|layer| layer.experts.is_some());
    if has_experts && matches!(config.target_modules, Targets::AllLinear) {
        let rest = if experts.is_empty() {
            "routers, experts and shared experts have none and stay frozen; `LoraConfig::target_parameters` names those of \
             experts"
                .to_string()
        } else {
            format!(
                "{} parameters of experts have adapters by `LoraConfig::target_parameters`; routers and shared experts stay \
                 frozen",
                experts.len()
            )
        };
        warnings.push(format!(
            "`all-linear` covers the linear layers of attention in a model with experts: {} adapters; {rest}",
            chosen.len()
        ));
    }
    warnings.extend(other_blocks(&config, &chosen));
    settle_targets(&mut config, &chosen);
    let shared = match config.kind {
        AdapterKind::Vera { .. } => {
            let most = |of: fn(&Site) -> usize| chosen.iter().map(of).max().unwrap_or(0);
            let (inputs, outputs) = (most(|s| s.input), most(|s| s.output));
            Some(VeraProjections::fresh(config.r, inputs, outputs, seed.unwrap_or(0))?)
        }
        _ => None,
    };
    let gaussian = lora.init_lora_weights == LoraInit::Gaussian;
    let mut adapters = expert_adapters::fresh(&config, spec, gaussian, seed, all.len())?;
    let ranks = ranks_and_alphas(&config, chosen.iter().map(|s| &s.module))?;
    for (site, rank) in chosen.iter().zip(ranks) {
        let index = all.iter().position(|s| s.module == site.module).unwrap_or(0) as u64;
        let adapter = one(lora, &config, site, rank, index, seed, shared.as_ref())?;
        adapters.insert(site.module.clone(), Arc::new(adapter));
    }
    let (whole, refused) = peft_model::whole(&mut config, spec)?;
    Ok(AdapterSet {
        whole,
        rows: peft_model::rows(lora, &mut config, spec)?,
        adapters,
        config: Some(config),
        given: BTreeMap::new(),
        warnings,
        left_out: open.refused.or(refused),
    })
}

/// Checks the ranks: a product of rank `r` in a matrix with fewer than `r` rows or columns has parameters without
/// effect.
///
/// Errors: every adapter has such a rank. If only some have it, the function returns a warning.
fn check_ranks(config: &AdapterConfig, chosen: &[Site]) -> Result<Vec<String>> {
    if !matches!(
        config.kind,
        AdapterKind::Lora | AdapterKind::Loha | AdapterKind::Adalora(_)
    ) {
        return Ok(Vec::new());
    }
    let mut above = Vec::new();
    let ranks = ranks_and_alphas(config, chosen.iter().map(|s| &s.module))?;
    for (site, (r, _)) in chosen.iter().zip(ranks) {
        let most = site.input.min(site.output);
        if r > most {
            above.push((site, r, most));
        }
    }
    let Some((site, r, most)) = above.first() else {
        return Ok(Vec::new());
    };
    if above.len() == chosen.len() {
        let most = above.iter().map(|(.., most)| *most).max().unwrap_or(*most);
        return Err(
            Error::usage("the rank is larger than the rank of every matrix with an adapter")
                .at("LoraConfig::r")
                .found(r)
                .expected(format!("at most {most}"))
                .hint("lower `LoraConfig::r`, or train without adapters"),
        );
    }
    Ok(vec![format!(
        "{} of {} adapters have a larger rank than their matrix, which has no benefit: `{}` has rank {r}, its matrix \
         at most {most}",
        above.len(),
        chosen.len(),
        site.module
    )])
}

/// A warning of linears whose OFT blocks have another size, because that of the settings does not divide their inputs.
fn other_blocks(config: &AdapterConfig, chosen: &[Site]) -> Option<String> {
    let AdapterKind::Oft { block, .. } = config.kind else {
        return None;
    };
    let fitting = |s: &&Site| Oft::fitting(block, s.input) != block;
    let first = chosen.iter().find(fitting)?;
    Some(format!(
        "{} of {} adapters have blocks of another size than `LoraConfig::oft_block_size`, {block}, which does not divide \
         their inputs, as in PEFT: `{}` has blocks of {} for {} inputs",
        chosen.iter().filter(fitting).count(),
        chosen.len(),
        first.module,
        Oft::fitting(block, first.input),
        first.input
    ))
}

/// Reads a list of names, or one regular expression.
fn named(list: &[String], field: &str) -> Result<Targets> {
    match list {
        [one] if targets::is_regex(one) => Ok(Targets::Pattern(one.clone())),
        names if names.iter().any(|n| targets::is_regex(n)) => Err(Error::usage(format!(
            "`{field}` mixes a regular expression with other items"
        ))
        .found(format!("{names:?}"))
        .expected("names, or one regular expression for full module paths")),
        names => {
            let mut names = names.to_vec();
            names.sort();
            names.dedup();
            Ok(Targets::List(names))
        }
    }
}

/// Errors: layers beside a regular expression, which has no effect on it, and which PEFT refuses.
fn check_layers(targets: &Targets, layers: &[usize]) -> Result<()> {
    match targets {
        Targets::Pattern(pattern) if !layers.is_empty() => Err(Error::usage(
            "`LoraConfig::layers_to_transform` does not apply to a regular expression, and PEFT refuses both together",
        )
        .at("LoraConfig::layers_to_transform")
        .found(format!("{layers:?} with `{pattern}`"))
        .expected("names of modules, or only a regular expression")
        .hint(targets::layers_in_pattern(layers))),
        _ => Ok(()),
    }
}

/// Errors: settings with which PEFT has no adapters on parameters.
fn check_expert_adapter(lora: &LoraConfig) -> Result<()> {
    let drawn = matches!(lora.init_lora_weights, LoraInit::Default | LoraInit::Gaussian);
    let found = if lora.peft_type != PeftType::Lora {
        format!("adapters of the type `{}`", lora.peft_type.name())
    } else if lora.use_dora {
        "DoRA".to_string()
    } else if lora.lora_dropout > 0.0 {
        format!("a dropout of {}", lora.lora_dropout)
    } else if !drawn {
        format!("the initial values `{}`", lora.init_lora_weights.name())
    } else {
        return Ok(());
    };
    Err(
        Error::usage("adapters on the parameters of experts are plain LoRA, as in PEFT")
            .at("LoraConfig::target_parameters")
            .found(found)
            .expected("LoRA without dropout, with the initial values `default` or `gaussian`"),
    )
}

/// Converts the settings to a PEFT config.
fn config_of(lora: &LoraConfig, base: Option<String>) -> Result<AdapterConfig> {
    let kind = match lora.peft_type {
        PeftType::Lora => AdapterKind::Lora,
        PeftType::Ia3 => AdapterKind::Ia3 {
            feedforward: Targets::List(lora.feedforward_modules.clone()),
        },
        PeftType::Vera => AdapterKind::Vera {
            d_initial: lora.d_initial,
        },
        PeftType::Loha => AdapterKind::Loha,
        PeftType::Lokr => AdapterKind::Lokr {
            factor: lora.decompose_factor,
            both: lora.decompose_both,
        },
        PeftType::Oft => AdapterKind::Oft {
            block: lora.oft_block_size,
            blocks: 0,
            neumann: lora.use_cayley_neumann.then_some(NEUMANN_TERMS),
        },
        PeftType::Adalora => AdapterKind::Adalora(RankAllocation::default()),
    };
    let is_lora = kind == AdapterKind::Lora;
    if !lora.target_parameters.is_empty() {
        check_expert_adapter(lora)?;
    }
    let drops = matches!(
        kind,
        AdapterKind::Lora | AdapterKind::Vera { .. } | AdapterKind::Adalora(_)
    );
    let patterns = matches!(kind, AdapterKind::Lora | AdapterKind::Loha | AdapterKind::Lokr { .. });
    let target_modules = if lora.only_parameters {
        Targets::List(Vec::new())
    } else if lora.target_modules.is_empty() {
        Targets::AllLinear
    } else {
        named(&lora.target_modules, "LoraConfig::target_modules")?
    };
    check_layers(&target_modules, &lora.layers_to_transform)?;
    Ok(AdapterConfig {
        kind,
        r: lora.r,
        lora_alpha: lora.lora_alpha,
        lora_dropout: if drops { lora.lora_dropout } else { 0.0 },
        target_modules,
        exclude_modules: if lora.exclude_modules.is_empty() {
            None
        } else {
            Some(named(&lora.exclude_modules, "LoraConfig::exclude_modules")?)
        },
        target_parameters: lora.target_parameters.clone(),
        layers_to_transform: Some(lora.layers_to_transform.clone()).filter(|l| !l.is_empty()),
        rank_pattern: if patterns {
            lora.rank_pattern.clone()
        } else {
            Vec::new()
        },
        alpha_pattern: if patterns {
            lora.alpha_pattern.clone()
        } else {
            Vec::new()
        },
        modules_to_save: lora.modules_to_save.clone(),
        use_rslora: is_lora && lora.use_rslora,
        use_dora: is_lora && lora.use_dora,
        base_model_name_or_path: base,
        ..AdapterConfig::default()
    })
}

/// The modules with these names in the language model of a multimodal model, as a regular expression: the other parts
/// have modules of the same names. `outside`: also modules outside of its layers.
fn language_model(names: &[String], layers: Option<Vec<usize>>, outside: bool) -> String {
    let within = match layers {
        Some(layers) => {
            let layers = layers.iter().map(usize::to_string).collect::<Vec<_>>();
            format!(r"layers\.(?:{})\.", layers.join("|"))
        }
        None if outside => String::new(),
        None => r"layers\.(?:[0-9]+)\.".to_string(),
    };
    // A name may start anywhere in the path: `q_proj`, `layers.0.mlp.up_proj`.
    let names: Vec<String> = names.iter().map(|name| name.replace('.', "\\.")).collect();
    let names = names.join("|");
    format!(r"(?=model\.language_model\.{within})(?:.*\.)?(?:{names})")
}

/// Replaces `all-linear` by the module names of this model: other loaders may match more modules with it.
fn settle_targets(config: &mut AdapterConfig, chosen: &[Site]) {
    if config.target_modules == Targets::AllLinear {
        // A number alone is no name: `altup_projections.0`.
        let last = |s: &Site| {
            let (above, last) = s.module.rsplit_once('.')?;
            let list = above.rsplit('.').next().filter(|_| last.parse::<usize>().is_ok());
            Some(list.map_or(last.to_string(), |list| format!("{list}.{last}")))
        };
        let mut names: Vec<String> = chosen.iter().filter_map(last).collect();
        names.sort();
        names.dedup();
        config.target_modules = Targets::List(names);
    }
    let modules: Vec<&str> = chosen.iter().map(|s| s.module.as_str()).collect();
    if peft_model::settle_excluded(config, &modules) {
        return;
    }
    if let (true, Targets::List(names)) = (config.names.multimodal, &config.target_modules) {
        let outside = chosen.iter().any(|s| targets::layer_of(&s.module).is_none());
        let paths: Vec<String> = chosen.iter().map(|s| config.name_in_file(&s.module)).collect();
        let layers = config.layers_to_transform.take();
        // A whole path is taken in any layer, which a pattern with the layers does not express.
        config.target_modules = if layers.is_some() && names.iter().any(|name| paths.contains(name)) {
            Targets::List(paths)
        } else {
            Targets::Pattern(language_model(names, layers, outside))
        };
    }
    if let AdapterKind::Ia3 {
        feedforward: Targets::List(feedforward),
    } = &mut config.kind
    {
        // PEFT requires that the feed-forward modules are among the targets.
        feedforward.retain(|f| chosen.iter().any(|s| targets::ends(&s.module, f)));
        // Its IA3 has no `layers_to_transform`: the targets are whole paths.
        if config.layers_to_transform.take().is_some() {
            let paths = || chosen.iter().map(|s| s.module.clone());
            let scales_input = |path: &String| feedforward.iter().any(|f| targets::ends(path, f));
            let inputs = paths().filter(scales_input).collect();
            *feedforward = inputs;
            config.target_modules = Targets::List(paths().collect());
        }
    }
}

fn one(
    lora: &LoraConfig,
    config: &AdapterConfig,
    site: &Site,
    (r, alpha): (usize, f64),
    index: u64,
    draw: Option<u64>,
    shared: Option<&VeraProjections>,
) -> Result<Adapter> {
    let seed = draw.unwrap_or(0);
    let (module, i, o) = (site.module.as_str(), site.input, site.output);
    let mask = DropoutMask {
        p: config.lora_dropout as f32,
        site: index,
    };
    let ratio = (alpha / r as f64) as f32;
    let shape = AdapterShape {
        rank: r,
        input: i,
        output: o,
    };
    Ok(match &config.kind {
        AdapterKind::Lora => {
            let gaussian = lora.init_lora_weights == LoraInit::Gaussian;
            let pair = match draw {
                Some(seed) => fresh(r, i, o, gaussian, seed, index)?,
                None => shapes(r, i, o)?,
            };
            let scale = scaling(alpha, r, config.use_rslora);
            let mut pair = Lora::new(module, pair, scale, mask);
            if subtracts_init(lora.init_lora_weights) {
                pair.start = Some((peft::full(&[r, i], 0.0)?, peft::full(&[o, r], 0.0)?));
            }
            if config.use_dora {
                Adapter::Dora(Dora::new(module, pair, peft::full(&[o], 1.0)?))
            } else {
                Adapter::Lora(pair)
            }
        }
        AdapterKind::Ia3 { feedforward } => {
            let scales_input = targets::scales_input(&config.name_in_file(module), feedforward)?;
            Adapter::Ia3(Ia3::fresh(module, i, o, scales_input)?)
        }
        AdapterKind::Vera { d_initial } => {
            let Some(shared) = shared else {
                return Err(Error::new("VeRA needs its shared pair of matrices").at(module));
            };
            let d = peft::full(&[r], *d_initial as f32)?;
            Adapter::Vera(Vera::new(module, shared.clone(), peft::full(&[o], 0.0)?, d, i, mask))
        }
        AdapterKind::Loha => Adapter::Loha(Loha::fresh(module, shape, ratio, seed, index)?),
        AdapterKind::Lokr { factor, both } => {
            Adapter::Lokr(Lokr::fresh(module, shape, *factor, *both, ratio, seed, index)?)
        }
        AdapterKind::Oft { block, neumann, .. } => {
            let cayley = neumann.map_or(Cayley::Exact, Cayley::Neumann);
            Adapter::Oft(Oft::fresh(module, i, Oft::fitting(*block, i), cayley)?)
        }
        AdapterKind::Adalora(_) => Adapter::Adalora(Adalora::fresh(
            module,
            shape,
            peft::adalora_scaling(alpha, r),
            seed,
            mask,
        )?),
    })
}

/// True for initializations that put a part of the weights into the LoRA pair and subtract it from the base weights.
pub fn subtracts_init(init: LoraInit) -> bool {
    match init {
        LoraInit::Pissa | LoraInit::Olora | LoraInit::Corda | LoraInit::LoraGa => true,
        LoraInit::Default | LoraInit::Gaussian | LoraInit::Eva | LoraInit::Loftq => false,
    }
}
