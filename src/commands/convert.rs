//! `ft convert`: writes a dense model as a mixture of experts, one tensor in memory at a time.
//!
//! Copies: every expert is the MLP. The weights of the chosen experts of a token add up to 1, so the mixture computes what the
//! dense model computes, whatever the router chooses (sparse upcycling, Komatsuzaki et al. 2022, arXiv 2212.05055).
//!
//! A split: the neurons of the MLP are divided among the experts (`neurons`). Their sum is the MLP; with fewer experts for a token
//! the output is an approximation, which training improves (Zhang et al. 2021, arXiv 2110.01786, section 3.1).
//!
//! Qwen2-MoE has a shared expert too. It is small and its output is 0 at first.
//!
//! Letters: D hidden size, I intermediate size of the dense model, W that of an expert, N experts.

mod neurons;
pub mod smile;

use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};
use crate::checkpoint;
use crate::commands::merge::{refuse_existing, refuse_quantized, refuse_strangers};
use crate::formats::StoredDtype;
use crate::formats::config::Config;
use crate::formats::weights::Weights;
use crate::formats::writer::{self, TensorPlan, Values};
use crate::hf::{self, OutputModel};
use crate::model::spec::ExpertsSpec;
use crate::model::{Spec, families};
use crate::report;
use crate::setup::locate;
use crate::train::verify;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Where the experts come from.
#[derive(Debug, Clone, Copy)]
pub enum ExpertOrigin<'a> {
    /// Each expert is the whole MLP.
    Copy,
    /// The experts share the neurons of the MLP, by their activations on rows of this file, at most this number of tokens.
    Split(&'a Path, usize),
}

#[derive(Debug, Clone, Copy)]
pub struct ConvertRequest<'a> {
    pub model: &'a Path,
    pub out: &'a Path,
    /// N
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    pub origin: ExpertOrigin<'a>,
    /// Seed of the routers of copies and of the initial clusters of a split.
    pub seed: u64,
}

/// The result of a conversion.
#[derive(Debug, Clone)]
pub struct ConvertReport {
    pub out: PathBuf,
    /// `model_type` of the mixture.
    pub model_type: String,
    /// Parameters before and after.
    pub parameters: [u64; 2],
    /// Parameters with which a token is multiplied, after.
    pub active: u64,
    /// Part of the activation of the neurons that the router's choice reaches on the rows of a split.
    pub reached: Option<f64>,
}

/// A tensor of the mixture that the dense model does not have.
#[derive(Debug, Clone, Copy)]
enum MixturePart {
    Router(usize),
    /// Layer, expert, projection (0: gate, 1: up, 2: down).
    Expert(usize, usize, usize),
    /// Layer and projection of the shared expert, whose output is 0.
    Shared(usize, usize),
    /// Layer: the factor of the output of the shared expert.
    SharedGate(usize),
}

/// Neurons of the shared expert of Qwen2-MoE, at most.
const SHARED: usize = 64;

/// Writes the mixture to `out`.
///
/// Errors: a family or an option that no family with experts has; quantized weights; sizes that cannot be divided; `out` is not
/// empty; a file of the `final/` of a run is not as the run wrote it; not enough disk space. In these cases nothing is written.
pub fn convert(request: &ConvertRequest) -> Result<ConvertReport> {
    refuse_existing(request.out)?;
    verify::check_result(request.model)?;
    let config = locate::model_config(request.model, Config::load)?;
    let dense = families::read(&config)?;
    let raw = mixture_config(&config, &dense, request)?;
    let mixture = families::read(&Config::from_map(raw.clone(), &config.path))?;
    same_attention(&dense, &mixture, &config)?;
    let weights = Weights::open(request.model)?;
    refuse_quantized(&dense, &weights)?;
    refuse_strangers(&dense, &weights)?;
    for p in dense.params() {
        weights.require(&p.name, &p.shape)?;
    }
    let parts = parts(&mixture);
    let params = mixture.params();
    let tensors = plans(&weights, &params, &parts)?;
    let directory = OutputModel {
        out: request.out,
        base_dir: request.model,
        config: &raw,
        tensors: &tensors,
        shard_bytes: writer::SHARD_BYTES,
        chat_template: None,
    };
    checkpoint::check_space(request.out, directory.bytes()?)?;
    let splits = match request.origin {
        ExpertOrigin::Copy => None,
        ExpertOrigin::Split(data, tokens) => Some(neurons::split(request, data, tokens)?),
    };
    let shapes: HashMap<&str, usize> = params.iter().map(|p| (&*p.name, p.elements())).collect();
    let out = directory.write(&mut |plan, sink| match parts.get(&plan.name) {
        None => sink(Values::Raw(&weights.read_bytes(&plan.name)?)),
        Some(MixturePart::Router(layer)) => {
            let elements = shapes.get(plan.name.as_str()).copied().unwrap_or(0);
            match &splits {
                Some(splits) => sink(Values::F32(&splits[*layer].router)),
                None => sink(Values::F32(&random_router(request.seed, *layer, elements, &dense))),
            }
        }
        // The first neurons of the MLP; down and the gate are 0, as in a new adapter.
        Some(MixturePart::Shared(layer, projection)) if *projection < 2 => {
            let elements = shapes.get(plan.name.as_str()).copied().unwrap_or(0);
            let mut values = weights.read_f32(&dense_name(*layer, *projection))?;
            values.truncate(elements);
            sink(Values::F32(&values))
        }
        Some(MixturePart::Shared(..) | MixturePart::SharedGate(_)) => {
            let elements = shapes.get(plan.name.as_str()).copied().unwrap_or(0);
            sink(Values::F32(&vec![0.0; elements]))
        }
        Some(MixturePart::Expert(layer, expert, projection)) => {
            let name = dense_name(*layer, *projection);
            match &splits {
                None => sink(Values::Raw(&weights.read_bytes(&name)?)),
                Some(splits) => {
                    let own = splits[*layer].of(*expert, request.experts);
                    let values = weights.read_f32(&name)?;
                    sink(Values::F32(&cut(&values, *projection, own, &dense, request.top_k)))
                }
            }
        }
    })?;
    if let Some(note) = hf::config_note(&raw, request.model) {
        report::note(&note);
    }
    let reached = splits.map(|s| s.iter().map(|s| s.reached).sum::<f64>() / s.len().max(1) as f64);
    Ok(ConvertReport::new(out, &dense, &mixture, reached))
}

impl ConvertReport {
    fn new(out: PathBuf, before: &Spec, after: &Spec, reached: Option<f64>) -> Self {
        let count = elements(after);
        Self {
            out,
            model_type: after.model_type.clone(),
            parameters: [elements(before), count],
            active: count - routed(after, true) + routed(after, false),
            reached,
        }
    }
}

/// Number of parameters.
fn elements(spec: &Spec) -> u64 {
    spec.params().iter().map(|p| p.elements() as u64).sum()
}

/// Elements of the routed experts of all layers: of all of them, or of those of one token.
fn routed(spec: &Spec, all: bool) -> u64 {
    let of = |l: usize| match spec.layers[l].experts {
        Some(e) if all => (e.count * 3 * e.intermediate * spec.hidden) as u64,
        _ => spec.routed_elements(l) as u64,
    };
    (0..spec.layers.len()).map(of).sum()
}

/// The name of a projection of the dense MLP.
fn dense_name(layer: usize, projection: usize) -> String {
    let part = ["gate_proj", "up_proj", "down_proj"][projection];
    format!("model.layers.{layer}.mlp.{part}.weight")
}

/// The new tensors of the mixture by name.
fn parts(mixture: &Spec) -> HashMap<String, MixturePart> {
    let mut parts = HashMap::new();
    let experts = mixture.layers.iter().enumerate();
    let experts = experts.filter_map(|(l, layer)| Some((l, layer.experts?)));
    for (l, of) in experts {
        let of: ExpertsSpec = of;
        let named = |below: String| format!("model.layers.{l}.{below}");
        parts.insert(named(of.router_name()), MixturePart::Router(l));
        if let Some(shared) = of.shared {
            for (projection, name) in shared.names.iter().enumerate() {
                parts.insert(named(format!("{name}.weight")), MixturePart::Shared(l, projection));
            }
            let gate = shared
                .gate
                .map(|gate| (named(format!("{gate}.weight")), MixturePart::SharedGate(l)));
            parts.extend(gate);
        }
        for expert in 0..of.count {
            for projection in 0..3 {
                let name = named(format!("{}.weight", of.linear_name(expert, projection)));
                parts.insert(name, MixturePart::Expert(l, expert, projection));
            }
        }
    }
    parts
}

/// The tensors to write, each with the type of the tensor that it is made of.
fn plans(
    weights: &Weights,
    params: &[crate::source::ParamInfo],
    parts: &HashMap<String, MixturePart>,
) -> Result<Vec<TensorPlan>> {
    let stored = |name: &str| -> Result<StoredDtype> {
        let info = weights.info(name).map(|info| info.dtype);
        info.ok_or_else(|| Error::not_found("a weight is missing").at(name))
    };
    let plan = |p: &crate::source::ParamInfo| {
        let dtype = match parts.get(&*p.name) {
            None => stored(&p.name)?,
            Some(MixturePart::Router(layer) | MixturePart::SharedGate(layer)) => stored(&dense_name(*layer, 0))?,
            Some(MixturePart::Shared(layer, projection)) => stored(&dense_name(*layer, *projection))?,
            Some(MixturePart::Expert(layer, _, projection)) => stored(&dense_name(*layer, *projection))?,
        };
        Ok(TensorPlan {
            name: p.name.to_string(),
            dtype,
            shape: p.shape.clone(),
        })
    };
    params.iter().map(plan).collect()
}

/// The neurons `own` of a projection of the dense MLP: rows of gate and up, columns of down. The weights of the chosen experts
/// of a token add up to 1, so their sum is multiplied by their number.
fn cut(values: &[f32], projection: usize, own: &[u32], dense: &Spec, top_k: usize) -> Vec<f32> {
    if projection < 2 {
        let d = dense.hidden;
        return own
            .iter()
            .flat_map(|&i| values[i as usize * d..][..d].iter().copied())
            .collect();
    }
    let rows = values.chunks_exact(dense.intermediate);
    let factor = top_k as f32;
    rows.flat_map(|row| own.iter().map(move |&i| row[i as usize] * factor))
        .collect()
}

/// Without differences between the logits of copies, all of them would stay equal.
fn random_router(seed: u64, layer: usize, elements: usize, dense: &Spec) -> Vec<f32> {
    let rng = Rng::new(seed, Stream::Init, &[layer as u64]);
    (0..elements as u64)
        .map(|i| rng.normal(i) * dense.initializer_range)
        .collect()
}

fn refuse(config: &Config, key: &str, why: &str) -> Error {
    Error::unsupported(format!("this model cannot become a mixture of experts: {why}"))
        .at(format!("{}: {key}", config.path.display()))
}

/// The config of the mixture: of the family that computes the same attention.
fn mixture_config(config: &Config, dense: &Spec, request: &ConvertRequest) -> Result<Map<String, Value>> {
    let &ConvertRequest { experts, top_k, .. } = request;
    if !(1..=experts).contains(&top_k) || experts < 2 {
        return Err(Error::usage("a token cannot have this number of experts")
            .at("convert")
            .found(format!("{top_k} of {experts}"))
            .expected("two or more experts, and from 1 to all of them for a token"));
    }
    let width = match request.origin {
        ExpertOrigin::Copy => dense.intermediate,
        ExpertOrigin::Split(..) if dense.intermediate.is_multiple_of(experts) => dense.intermediate / experts,
        ExpertOrigin::Split(..) => {
            return Err(
                Error::usage("the neurons of the MLP cannot be divided evenly among the experts")
                    .at(format!("{}: intermediate_size", config.path.display()))
                    .found(format!("{} neurons, {experts} experts", dense.intermediate))
                    .expected(format!("a divisor of {}", dense.intermediate)),
            );
        }
    };
    let mut raw = config.raw.clone();
    let mut set = |key: &str, value: Value| raw.insert(key.into(), value);
    set("num_experts_per_tok", json!(top_k));
    set("output_router_logits", json!(false));
    set("rms_norm_eps", json!(dense.norm_eps));
    set("head_dim", json!(dense.head_dim));
    set("tie_word_embeddings", json!(dense.tied));
    let windows: Vec<_> = dense.layers.iter().map(|l| l.window).collect();
    match dense.model_type.as_str() {
        "qwen2" | "qwen3" => {
            if windows.iter().any(Option::is_some) {
                return Err(refuse(
                    config,
                    "use_sliding_window",
                    "a Qwen-MoE applies windows to other layers",
                ));
            }
            if dense.model_type == "qwen3" {
                set("model_type", json!("qwen3_moe"));
                set("architectures", json!(["Qwen3MoeForCausalLM"]));
            } else {
                set("model_type", json!("qwen2_moe"));
                set("architectures", json!(["Qwen2MoeForCausalLM"]));
                set("qkv_bias", json!(true));
                set("shared_expert_intermediate_size", json!(SHARED.min(dense.intermediate)));
            }
            set("num_experts", json!(experts));
            set("moe_intermediate_size", json!(width));
            set("norm_topk_prob", json!(true));
            set("decoder_sparse_step", json!(1));
            set("mlp_only_layers", json!([]));
            set("use_sliding_window", json!(false));
            set("sliding_window", Value::Null);
            for key in ["layer_types", "max_window_layers"] {
                raw.remove(key);
            }
        }
        "llama" | "mistral" => {
            if dense.qkv_bias || dense.o_bias || dense.mlp_bias {
                return Err(refuse(config, "attention_bias, mlp_bias", "Mixtral has no biases"));
            }
            set("model_type", json!("mixtral"));
            set("architectures", json!(["MixtralForCausalLM"]));
            set("num_local_experts", json!(experts));
            set("intermediate_size", json!(width));
            set("router_jitter_noise", json!(0.0));
            set("sliding_window", json!(windows.first().copied().flatten()));
            if raw.get("rope_parameters").is_none_or(Value::is_null) {
                // The default of Mixtral is another one.
                raw.entry("rope_theta").or_insert(json!(10_000.0));
            }
            for key in ["attention_bias", "mlp_bias", "pretraining_tp"] {
                raw.remove(key);
            }
        }
        other => {
            return Err(
                Error::unsupported(format!("`{other}` cannot become a mixture of experts"))
                    .at(config.path.display())
                    .expected(
                        "llama, mistral, qwen2 or qwen3: transformers has mixtures with the same attention for them",
                    ),
            );
        }
    }
    Ok(raw)
}

/// Checks that the mixture differs from the dense model in its MLPs only.
fn same_attention(dense: &Spec, mixture: &Spec, config: &Config) -> Result<()> {
    let layers = |s: &Spec| -> Vec<_> { s.layers.iter().map(|l| (l.window, l.rope, l.query_rope)).collect() };
    let sizes = |s: &Spec| [s.vocab, s.hidden, s.heads, s.kv_heads, s.head_dim, s.max_positions];
    let biases = |s: &Spec| [s.qkv_bias, s.o_bias];
    let ropes = dense.ropes != mixture.ropes || dense.pairing != mixture.pairing;
    let norms = dense.norm_eps != mixture.norm_eps || dense.qk_norm != mixture.qk_norm;
    let parts = [
        (
            "sliding windows or the RoPE of a layer",
            layers(dense) != layers(mixture),
        ),
        ("RoPE", ropes),
        ("sizes", sizes(dense) != sizes(mixture)),
        ("biases", biases(dense) != biases(mixture)),
        ("tied embeddings", dense.tied != mixture.tied),
        ("norms", norms),
        ("attention scale", dense.attention_scale != mixture.attention_scale),
        ("activation", dense.activation != mixture.activation),
    ];
    let others: Vec<&str> = parts
        .iter()
        .filter(|(_, differs)| *differs)
        .map(|(name, _)| *name)
        .collect();
    if others.is_empty() {
        return Ok(());
    }
    let kind = &mixture.model_type;
    let why = format!("as `{kind}` this config gives another attention, norm or activation");
    Err(refuse(config, "config", &why).found(format!("different: {}", others.join(", "))))
}
