//! What a config names in the model that PEFT loads, which is that of transformers 5: modules that are saved whole, rows of
//! embedding and head, and linears whose names PEFT takes for those of experts. What PEFT would leave out is refused.

use super::load_adapter::{LoadedAdapter, choice, row_tables, unsaved};
use super::new_adapters::TrainedRows;
use crate::base::{Error, Result, suggest};
use crate::formats::adapter::{AdapterConfig, AdapterKind, PeftNames, Targets};
use crate::model::Spec;
use crate::model::spec::{EMBEDDING, LM_HEAD, is_constant};
use crate::peft::LoraConfig;
use crate::peft::targets::{self, Site};
use candle_core::Tensor;
use std::collections::{BTreeMap, BTreeSet};

/// Model types for which PEFT 0.21 takes the names of MLP linears in a LoRA config for those of experts, also if a model has
/// no experts (`_convert_peft_config_moe`).
const EXPERTS_BY_TYPE: [&str; 13] = [
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "flex_olmo",
    "glm4_moe",
    "glm4_moe_lite",
    "hunyuan_v1_moe",
    "mellum",
    "olmoe",
    "qwen3_moe",
    "qwen3_next",
    "solar_open",
];
/// These names.
const EXPERT_LINEARS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
/// The names of embedding and head in a config: no other part of a multimodal model has modules of these names.
const TABLES: [&str; 2] = ["embed_tokens", "lm_head"];

/// The module of a parameter.
pub(super) fn module_of(parameter: &str) -> &str {
    parameter.rsplit_once('.').map_or(parameter, |(module, _)| module)
}

/// True if `name` in `modules_to_save` or `trainable_token_indices` names this module. It may also be a name of older versions
/// of transformers.
pub(super) fn is_named(names: PeftNames, name: &str, module: &str) -> bool {
    targets::saves(&names.in_peft(module), name) || targets::saves(module, name) || names.in_files(name) == module
}

/// True if a name in `modules_to_save` names this module.
pub(super) fn saves(names: PeftNames, modules: &[String], module: &str) -> bool {
    modules.iter().any(|name| is_named(names, name, module))
}

/// True if PEFT saves this parameter with a module of this name: its own one, or the router that has the module.
fn saves_in_peft(names: PeftNames, name: &str, parameter: &str) -> bool {
    let in_peft = names.in_peft(parameter);
    let module = module_of(&in_peft);
    let router = module_of(module);
    targets::saves(module, name) || (router.ends_with(".mlp.gate") && targets::saves(router, name))
}

/// True if a name in `modules_to_save` names the module of this parameter.
pub(super) fn saves_parameter(names: PeftNames, modules: &[String], parameter: &str) -> bool {
    saves(names, modules, module_of(parameter)) || modules.iter().any(|m| saves_in_peft(names, m, parameter))
}

/// Parameter names of the modules in this list.
pub fn saved_whole(modules: &[String], spec: &Spec) -> Vec<String> {
    let (params, names) = (spec.params(), spec.peft_names());
    let saved = params.iter().filter(|p| saves_parameter(names, modules, &p.name));
    saved.map(|p| p.name.to_string()).collect()
}

/// True if earlier versions of ft named this parameter by `name`: they compared whole components of the path.
fn names_components(names: PeftNames, name: &str, parameter: &str) -> bool {
    let (module, in_peft) = (module_of(parameter), names.in_peft(parameter));
    targets::ends(module, name) || targets::ends(module_of(&in_peft), name) || names.in_files(name) == module
}

/// Parameters that `modules_to_save` names and that the file, with the parameters of `whole`, does not have. In a file of an
/// earlier version of ft the modules whose names only end so are all absent: they keep the values of the base model, and the
/// config gets the paths of the others.
pub(super) fn missing_whole(config: &mut AdapterConfig, spec: &Spec, whole: &BTreeMap<String, Tensor>) -> Vec<String> {
    let (names, modules) = (config.names, std::mem::take(&mut config.modules_to_save));
    let saved = saved_whole(&modules, spec);
    let is_found = |p: &String| whole.contains_key(p);
    let by_components = |p: &String| modules.iter().any(|name| names_components(names, name, p));
    let of = |name: &String, p: &String| saves_parameter(names, std::slice::from_ref(name), p);
    // Those versions refused a name without such a module.
    let is_earlier = !saved.iter().any(|p| is_found(p) && !by_components(p))
        && modules.iter().all(|name| {
            let mut own = saved.iter().filter(|p| of(name, p)).peekable();
            own.peek().is_none() || own.any(|p| names_components(names, name, p))
        });
    let (kept, absent): (Vec<&String>, Vec<&String>) = saved.iter().partition(|p| !is_earlier || by_components(p));
    let mut settled: Vec<String> = Vec::new();
    for name in &modules {
        let paths: Vec<String> = if absent.iter().any(|p| of(name, p)) {
            let own = kept.iter().filter(|p| names_components(names, name, p));
            own.map(|p| module_of(&names.in_peft(p)).to_string()).collect()
        } else {
            vec![name.clone()]
        };
        for path in paths {
            if !settled.contains(&path) {
                settled.push(path);
            }
        }
    }
    config.modules_to_save = settled;
    kept.into_iter().filter(|p| !is_found(p)).cloned().collect()
}

/// Short names for `modules_to_save` that name these parameters, and no others that train. `None`: some of them cannot be
/// named alone.
pub fn naming(parameters: &[&str], spec: &Spec) -> Option<Vec<String>> {
    let names = spec.peft_names();
    let mut found: Vec<String> = Vec::new();
    for parameter in parameters {
        if saves_parameter(names, &found, parameter) {
            continue;
        }
        let in_peft = names.in_peft(parameter);
        let path = module_of(&in_peft);
        // The shortest end of the path first.
        let mut ends = path.rmatch_indices('.').map(|(at, _)| &path[at + 1..]).chain([path]);
        let names_no_other = |name: &&str| {
            let named = saved_whole(&[(*name).to_string()], spec);
            let is_wanted = |p: &String| is_constant(p) || parameters.contains(&p.as_str());
            !named.is_empty() && named.iter().all(is_wanted)
        };
        found.push(ends.find(names_no_other)?.to_string());
    }
    Some(found)
}

/// True if PEFT has no adapter of this kind on the linear, because it takes its name for that of experts. Those of experts themselves
/// are written as `target_parameters`.
fn taken_for_experts(kind: &AdapterKind, spec: &Spec, module: &str) -> bool {
    let by_type = !spec.multimodal && EXPERTS_BY_TYPE.contains(&spec.model_type.as_str());
    let by_name = || EXPERT_LINEARS.iter().any(|name| targets::ends(module, name));
    *kind == AdapterKind::Lora && by_type && by_name() && !is_of_expert(spec, module)
}

/// The linears from which the targets are chosen.
pub(super) struct OpenLinears {
    pub sites: Vec<Site>,
    /// A warning if `all-linear` leaves out others.
    pub warning: Option<String>,
    /// The error of a target that PEFT would leave out.
    pub refused: Option<Error>,
}

/// The linears on which PEFT keeps adapters of this config. All of them, with an error, if a target is one of the others.
pub(super) fn kept(config: &AdapterConfig, spec: &Spec, all: &[Site]) -> Result<OpenLinears> {
    let taken = |site: &Site| taken_for_experts(&config.kind, spec, &site.module);
    let (lost, kept): (Vec<Site>, Vec<Site>) = all.iter().cloned().partition(taken);
    let lost = unsaved(config, &lost);
    let why = format!(
        "for the model type `{}` PEFT takes `gate_proj`, `up_proj` and `down_proj` in a LoRA config for parameters of experts, \
         which this model does not have",
        spec.model_type
    );
    let mut open = OpenLinears {
        sites: kept,
        warning: None,
        refused: None,
    };
    if lost.is_empty() {
        return Ok(open);
    }
    if config.target_modules == Targets::AllLinear {
        open.warning = Some(format!(
            "`all-linear` covers the linear layers of attention here: {why}"
        ));
        return Ok(open);
    }
    if let Some(site) = targets::matching(&lost, &choice(config))?.first() {
        let refused = Error::unsupported(why)
            .at("LoraConfig::target_modules")
            .found(format!("an adapter on `{}`, which PEFT would leave out", site.module))
            .expected("linear layers of attention")
            .hint("leave the linear layers of the MLP out, or train another type of adapter, such as `adalora`");
        open.sites = all.to_vec();
        open.refused = Some(refused);
    }
    Ok(open)
}

/// True if the parameter is of a single expert: transformers joins those of a layer.
fn is_of_expert(spec: &Spec, parameter: &str) -> bool {
    let layers = spec.layers.iter().enumerate();
    let mut experts = layers.filter_map(|(l, layer)| Some((l, layer.experts?.names.experts)));
    experts.any(|(l, experts)| parameter.starts_with(&format!("model.layers.{l}.{experts}.")))
}

/// Checks that PEFT has all modules of an adapter that is trained further, so that it can be saved again.
///
/// # Errors
/// An adapter or a whole module, from an older version of PEFT or ft, that PEFT 0.21 would leave out.
pub fn check_saved_again(loaded: &LoadedAdapter, spec: &Spec) -> Result<()> {
    let mut adapters = loaded.adapters.keys();
    let adapter = adapters.find(|module| taken_for_experts(&loaded.config.kind, spec, module));
    match adapter.or_else(|| loaded.whole.keys().find(|name| is_of_expert(spec, name))) {
        None => Ok(()),
        Some(name) => Err(left_out(name).hint("merge it into the model, and train a new adapter on the merged model")),
    }
}

fn left_out(name: &str) -> Error {
    Error::unsupported("the adapter has a part that PEFT would leave out, so it cannot be saved after more training")
        .found(name)
}

/// The error of a tensor in a checkpoint of an earlier version, if PEFT would leave it out of an adapter of this kind.
pub fn left_out_of_checkpoint(kind: &AdapterKind, spec: &Spec, tensor: &str) -> Option<Error> {
    let (module, _) = tensor.split_once(".lora_")?;
    taken_for_experts(kind, spec, module).then(|| {
        left_out(tensor).hint(
            "write the adapter with the version that wrote the checkpoint, merge it into the model, and train a new adapter on \
             the merged model",
        )
    })
}

/// VeRA of PEFT has no `exclude_modules`: the targets are whole paths instead. True if they are now.
pub(super) fn settle_excluded(config: &mut AdapterConfig, chosen: &[&str]) -> bool {
    if !matches!(config.kind, AdapterKind::Vera { .. }) || config.exclude_modules.take().is_none() {
        return false;
    }
    let paths = chosen.iter().map(|module| config.name_in_file(module));
    config.target_modules = Targets::List(paths.collect());
    config.layers_to_transform = None;
    config.layers_pattern.clear();
    true
}

/// Rows of the embedding, and of the head if it is a separate matrix. Writes them to the config as PEFT does.
///
/// Errors: a duplicate token, a token outside the vocabulary, or a matrix that trains in full.
pub(super) fn rows(lora: &LoraConfig, config: &mut AdapterConfig, spec: &Spec) -> Result<Vec<TrainedRows>> {
    let field = "LoraConfig::trainable_token_indices";
    let mut ids: Vec<u32> = Vec::new();
    for &id in &lora.trainable_token_indices {
        if id >= spec.vocab || ids.contains(&(id as u32)) {
            return Err(Error::usage("a token is not in the vocabulary, or is listed twice")
                .at(field)
                .found(id)
                .expected(format!("distinct token ids below {}", spec.vocab)));
        }
        ids.push(id as u32);
    }
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let whole = saved_whole(&config.modules_to_save, spec);
    if let Some(whole) = whole.iter().find(|name| [EMBEDDING, LM_HEAD].contains(&name.as_str())) {
        let module = module_of(whole);
        return Err(Error::usage(format!(
            "`modules_to_save` trains the full matrix `{module}`: single rows of it cannot be trained separately"
        ))
        .at(field));
    }
    let modules: &[&str] = if spec.tied { &["embed_tokens"] } else { &TABLES };
    config.token_rows = modules.iter().map(|m| (m.to_string(), ids.clone())).collect();
    let tables = row_tables(config, spec).into_iter();
    Ok(tables
        .map(|table| TrainedRows {
            table,
            ids: ids.clone(),
            given: None,
        })
        .collect())
}

/// Names of the parameters that train whole, and the error of a module that PEFT does not have, or would save with more
/// parameters: runs of earlier versions have those. The tied embedding and head are one parameter. PEFT keeps it tied with
/// `ensure_weight_tying`, which only the configs of LoRA and AdaLoRA have. For the other types the config names both
/// modules, and the file gets the same matrix for both.
///
/// Errors: a module that does not exist.
pub(super) fn whole(config: &mut AdapterConfig, spec: &Spec) -> Result<(Vec<String>, Option<Error>)> {
    let field = "LoraConfig::modules_to_save";
    let head = module_of(LM_HEAD);
    let is_head = |module: &String| is_named(spec.peft_names(), module, head);
    let embeds = |modules: &[String]| saved_whole(modules, spec).iter().any(|n| n == EMBEDDING);
    if spec.tied && config.modules_to_save.iter().any(is_head) {
        config.modules_to_save.retain(|m| !is_head(m));
        if !embeds(&config.modules_to_save) {
            config.modules_to_save.push("embed_tokens".into());
        }
    }
    let mut refused = None;
    for module in &config.modules_to_save {
        let parameters = saved_whole(std::slice::from_ref(module), spec);
        if parameters.is_empty() {
            let params = spec.params();
            let modules = params.iter().filter_map(|p| p.name.rsplit_once('.').map(|(m, _)| m));
            let last = modules.filter_map(|m| m.rsplit('.').next());
            let near = suggest::nearest(module, last.collect::<Vec<_>>());
            let error = Error::new(format!("`{module}` matches no module of this model")).at(field);
            return Err(match near {
                Some(near) => error.hint(format!("did you mean `{near}`?")),
                None => error,
            });
        }
        if let Some(name) = parameters.iter().find(|name| is_of_expert(spec, name)) {
            let error = Error::unsupported(format!(
                "`{module}` names linear layers of single experts: transformers joins those of a layer, so PEFT has no such \
                 module and would leave them out"
            ))
            .at(field)
            .found(module_of(name))
            .hint("train adapters on the experts with `LoraConfig::target_parameters`");
            refused.get_or_insert(error);
        }
    }
    let names = saved_whole(&config.modules_to_save, spec);
    config.modules_to_save = in_peft(std::mem::take(&mut config.modules_to_save), spec);
    let incomplete = check_complete(&config.modules_to_save, &names, spec).err();
    refused = refused.or(incomplete.map(|e| e.at(field)));
    if spec.tied && embeds(&config.modules_to_save) {
        config.ensure_weight_tying = config.kind.has_rows();
        if !config.ensure_weight_tying {
            config.modules_to_save.push(head.into());
        }
    }
    Ok((names, refused))
}

/// The names with which PEFT saves the same modules: whole paths where it has other names for them, or where other parts of
/// a multimodal model may have modules of the same names.
fn in_peft(modules: Vec<String>, spec: &Spec) -> Vec<String> {
    let names = spec.peft_names();
    let mut all: Vec<String> = Vec::new();
    for name in modules {
        let parameters = saved_whole(std::slice::from_ref(&name), spec);
        let same = parameters.iter().all(|p| saves_in_peft(names, &name, p));
        let settled = if same && (!names.multimodal || TABLES.contains(&name.as_str())) {
            vec![name]
        } else {
            let paths = parameters.iter().map(|p| module_of(&names.in_peft(p)).to_string());
            paths.collect()
        };
        for name in settled {
            if !all.contains(&name) {
                all.push(name);
            }
        }
    }
    all
}

/// Errors: PEFT would save a module with parameters that are not in `saved`.
fn check_complete(modules: &[String], saved: &[String], spec: &Spec) -> Result<()> {
    let names = spec.peft_names();
    let saved: BTreeSet<&str> = saved.iter().map(String::as_str).collect();
    for p in spec.params().iter().filter(|p| !saved.contains(&*p.name)) {
        let path = names.in_peft(&p.name);
        let mut module = path.as_str();
        while let Some((above, _)) = module.rsplit_once('.') {
            module = above;
            if let Some(name) = modules.iter().find(|name| targets::saves(module, name)) {
                return Err(Error::unsupported(format!(
                    "`{name}` names the module `{module}`, which has other modules in it: PEFT would save all of them"
                ))
                .found(format!("`{path}` in it"))
                .expected("a single linear layer, norm, router or table")
                .hint("name the modules in it instead"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
