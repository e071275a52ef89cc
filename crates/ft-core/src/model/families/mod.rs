//! Converts `config.json` to `Spec`: the code that all families share; each family has a small file.
//!
//! Unknown options are copied unchanged by export; options that are known to change the mathematics and are not
//! supported are refused by name.

mod arcee;
mod cohere;
mod cohere2;
mod cwm;
mod deepseek;
mod dots1;
mod ernie4_5;
mod ernie4_5_moe;
mod exaone4;
mod experts;
mod flex_olmo;
mod gemma;
mod gemma2;
mod gemma3_text;
mod gemma3n_text;
mod gemma4_text;
mod glm;
mod glm4;
mod glm4_moe;
mod gpt_oss;
mod granite;
mod granite_swa;
mod granitemoe;
mod granitemoehybrid;
mod granitemoeshared;
mod helium;
mod hunyuan_v1_dense;
mod hunyuan_v1_moe;
mod hyperclovax;
mod internlm3;
mod jais2;
mod latent;
mod lfm2;
mod llama;
mod mellum;
mod minicpm3;
mod minimax_m2;
mod ministral;
mod ministral3;
mod mistral;
mod mixtral;
mod nanochat;
mod nemotron;
mod olmo;
mod olmo2;
mod olmo3;
mod olmoe;
mod options;
mod padding;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod refused;
mod seed_oss;
mod smollm3;
mod solar_open;
mod stablelm;
mod starcoder2;
mod support;
mod vaultgemma;
mod wrapped;
mod youtu;

use super::rope::Rope;
use super::spec::{
    DeltaNetSpec, ExpertsSpec, LayerNormParams, LayerSpec, Mixer, ModuleNames, NormNames, PerLayerSpec, QkNorm,
    SharedExpertSpec, Spec,
};
use crate::base::{Error, Result};
use crate::formats::config::Config;
use crate::ops::glu::Activation;
use crate::ops::rope::RopePairing;
use serde_json::{Map, Value, json};

use support::PARTIAL_ROTATION;
pub use support::{FAMILIES, Family, NAMES, table};

/// Reads the sizes and options of a model from its config.
///
/// # Errors
/// An unknown `model_type`; an option of this config that ft does not support.
pub fn read(config: &Config) -> Result<Spec> {
    let place = config.path.display().to_string();
    let outer = config.model_type()?;
    if !NAMES.contains(&outer) {
        return Err(support::unsupported(config, outer));
    }
    let language_model = wrapped::language_model(config, outer)?;
    let multimodal = language_model.is_some();
    let config = language_model.as_ref().unwrap_or(config);
    let model_type = match config.model_type()? {
        // transformers reads it as DeepSeek-V3 too.
        "kimi_k2" => "deepseek_v3",
        own => own,
    };
    options::refuse_unsupported(config, model_type, &place)?;
    let (one_size, sizes) = match model_type {
        "gemma3n_text" => {
            let (config, sizes) = gemma3n_text::sizes(config)?;
            (Some(config), sizes)
        }
        "lfm2" => (Some(lfm2::sizes(config)?), Vec::new()),
        _ => (None, Vec::new()),
    };
    let config = one_size.as_ref().unwrap_or(config);
    let mut spec = common(config, model_type)?;
    spec.multimodal = multimodal;
    match model_type {
        "arcee" => arcee::apply(config, &mut spec)?,
        "cohere" => cohere::apply(config, &mut spec)?,
        "cohere2" => cohere2::apply(config, &mut spec)?,
        "cwm" => cwm::apply(config, &mut spec)?,
        "deepseek_v2" => deepseek::apply_v2(config, &mut spec)?,
        "deepseek_v3" => deepseek::apply_v3(config, &mut spec)?,
        "dots1" => dots1::apply(config, &mut spec)?,
        "ernie4_5" => ernie4_5::apply(config, &mut spec)?,
        "ernie4_5_moe" => ernie4_5_moe::apply(config, &mut spec)?,
        "exaone4" => exaone4::apply(config, &mut spec)?,
        "flex_olmo" => flex_olmo::apply(config, &mut spec)?,
        "gemma" => gemma::apply(config, &mut spec)?,
        "gemma2" => gemma2::apply(config, &mut spec)?,
        "gemma3_text" => gemma3_text::apply(config, &mut spec)?,
        "gemma3n_text" => gemma3n_text::apply(config, &mut spec, &sizes)?,
        "gemma4_text" => gemma4_text::apply(config, &mut spec)?,
        "glm" => glm::apply(config, &mut spec)?,
        "glm4" => glm4::apply(config, &mut spec)?,
        "glm4_moe" => glm4_moe::apply(config, &mut spec)?,
        "glm4_moe_lite" => deepseek::apply_glm(config, &mut spec)?,
        "gpt_oss" => gpt_oss::apply(config, &mut spec)?,
        "granite" => granite::apply(config, &mut spec)?,
        "granite_swa" => granite_swa::apply(config, &mut spec)?,
        "granitemoe" => granitemoe::apply(config, &mut spec)?,
        "granitemoehybrid" => granitemoehybrid::apply(config, &mut spec)?,
        "granitemoeshared" => granitemoeshared::apply(config, &mut spec)?,
        "helium" => helium::apply(config, &mut spec)?,
        "hunyuan_v1_dense" => hunyuan_v1_dense::apply(config, &mut spec)?,
        "hunyuan_v1_moe" => hunyuan_v1_moe::apply(config, &mut spec)?,
        "hyperclovax" => hyperclovax::apply(config, &mut spec)?,
        "internlm3" => internlm3::apply(config, &mut spec)?,
        "iquestcoder" => internlm3::apply_iquest(config, &mut spec)?,
        "jais2" => jais2::apply(config, &mut spec)?,
        "lfm2" => lfm2::apply(config, &mut spec)?,
        "llama" => llama::apply(config, &mut spec)?,
        "mellum" => mellum::apply(config, &mut spec)?,
        "minicpm3" => minicpm3::apply(config, &mut spec)?,
        "minimax_m2" => minimax_m2::apply(config, &mut spec)?,
        "ministral" => ministral::apply(config, &mut spec)?,
        "ministral3" => ministral3::apply(config, &mut spec)?,
        "mistral" => mistral::apply(config, &mut spec)?,
        "mixtral" => mixtral::apply(config, &mut spec)?,
        "nanochat" => nanochat::apply(config, &mut spec)?,
        "nemotron" => nemotron::apply(config, &mut spec)?,
        "olmo" => olmo::apply(config, &mut spec)?,
        "olmo2" => olmo2::apply(config, &mut spec)?,
        "olmo3" => olmo3::apply(config, &mut spec)?,
        "olmoe" => olmoe::apply(config, &mut spec)?,
        "phi3" => phi3::apply(config, &mut spec)?,
        "qwen2" | "qwen2_5_vl_text" => qwen2::apply(config, &mut spec)?,
        "qwen3" | "qwen3_vl_text" => qwen3::apply(config, &mut spec)?,
        "qwen2_moe" => qwen3_moe::apply_2(config, &mut spec)?,
        "qwen3_moe" => qwen3_moe::apply(config, &mut spec)?,
        "qwen3_moe_smile" => qwen3_moe::apply_smile(config, &mut spec)?,
        "qwen3_5_moe_text" => qwen3_5::apply_moe(config, &mut spec)?,
        "qwen3_5_text" => qwen3_5::apply(config, &mut spec)?,
        "qwen3_next" => qwen3_5::apply_next(config, &mut spec)?,
        "qwen3_vl_moe_text" => qwen3_moe::apply_vl(config, &mut spec)?,
        "seed_oss" => seed_oss::apply(config, &mut spec)?,
        "smollm3" => smollm3::apply(config, &mut spec)?,
        "solar_open" => solar_open::apply(config, &mut spec)?,
        "stablelm" => stablelm::apply(config, &mut spec)?,
        "starcoder2" => starcoder2::apply(config, &mut spec)?,
        "vaultgemma" => vaultgemma::apply(config, &mut spec)?,
        "youtu" => youtu::apply(config, &mut spec)?,
        other => return Err(support::unsupported(config, other)),
    }
    options::dropout_is_not_applied(config, &mut spec)?;
    check(&spec, &place)?;
    Ok(spec)
}

/// Largest accepted sizes for a config without weights: well above those of any published model. If there are weights,
/// `formats::fits` checks the sizes against them first.
const LARGEST: [(&str, usize); 9] = [
    ("vocab_size", 1 << 24),
    ("hidden_size", 1 << 20),
    ("intermediate_size", 1 << 22),
    ("num_hidden_layers", 1 << 12),
    ("num_attention_heads", 1 << 14),
    ("num_key_value_heads", 1 << 14),
    ("head_dim", 1 << 14),
    ("vocab_size_per_layer_input", 1 << 24),
    ("hidden_size_per_layer_input", 1 << 20),
];
/// Largest number of parameters of the whole model; their bytes can be added without overflow.
const PARAMETERS: u128 = 1 << 48;
/// Largest number of experts in all layers, each with tensors of its own.
const EXPERTS: usize = 1 << 16;

fn common(config: &Config, model_type: &str) -> Result<Spec> {
    // Check before the sizes are used.
    for (key, most) in LARGEST {
        if let Some(n) = config.opt_usize0(key)?.filter(|n| *n > most) {
            return Err(out_of_range(key, n, most, &config.path.display().to_string()));
        }
    }
    let hidden = config.usize("hidden_size")?;
    let heads = config.usize("num_attention_heads")?;
    let layers = config.usize("num_hidden_layers")?;
    let head_dim = match config.opt_usize("head_dim")? {
        // `latent` sets the size of the heads.
        _ if latent::FAMILIES.contains(&model_type) => 1,
        Some(e) => e,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(Error::format(
                "`hidden_size` is not a multiple of `num_attention_heads` and there is no `head_dim`",
            )
            .at(place(config, "hidden_size"))
            .found(format!("{hidden} and {heads}")));
        }
    };
    Ok(Spec {
        model_type: model_type.to_string(),
        vocab: config.usize("vocab_size")?,
        hidden,
        intermediate: match config.opt_usize("intermediate_size")? {
            // All its layers have experts.
            None if model_type == "qwen3_5_moe_text" => config.opt_usize("moe_intermediate_size")?.unwrap_or(512),
            None if model_type == "solar_open" => config.opt_usize("moe_intermediate_size")?.unwrap_or(1280),
            _ => config.usize("intermediate_size")?,
        },
        heads,
        kv_heads: config.opt_usize("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        norm_eps: config.opt_f64("rms_norm_eps")?.unwrap_or(1e-6),
        norm_plus_one: false,
        plain_norms: false,
        layer_norm: None,
        norms: NormNames::BEFORE,
        qk_norm: None,
        output_gate: false,
        attention_sinks: false,
        value_norm: false,
        per_layer: None,
        streams: None,
        laurel: None,
        layer_scalar: false,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        fused_qkv: false,
        fused_gate_up: None,
        plain_mlp: None,
        modules: ModuleNames::LLAMA,
        parallel: false,
        activation: activation(config, "hidden_act", "silu")?,
        clamped_glu: None,
        attention_scale: 1.0 / (head_dim as f32).sqrt(),
        attention_softcap: None,
        logit_softcap: None,
        logit_scale: 1.0,
        embedding_scale: 1.0,
        embedding_scale_rounded: false,
        noise_scale: 1.0,
        residual_scale: 1.0,
        pairing: RopePairing::Halves,
        tied: config.bool_or("tie_word_embeddings", false)?,
        padding: padding::token(config, model_type)?,
        multimodal: false,
        warnings: Vec::new(),
        layers: vec![LayerSpec::default(); layers],
        ropes: Vec::new(),
        max_positions: config.opt_usize("max_position_embeddings")?.unwrap_or(usize::MAX),
        initializer_range: config.opt_f64("initializer_range")?.unwrap_or(0.02) as f32,
    })
}

/// Sets the head size of a family whose default is not hidden / heads.
fn default_head_dim(config: &Config, spec: &mut Spec, default: usize) -> Result<()> {
    if !config.raw.contains_key("head_dim") {
        spec.head_dim = default;
        spec.attention_scale = 1.0 / (default as f32).sqrt();
    }
    Ok(())
}

/// `attention_bias`: biases on all four projections of the attention.
fn attention_biases(config: &Config, spec: &mut Spec, default: bool) -> Result<()> {
    let bias = config.bool_or("attention_bias", default)?;
    (spec.qkv_bias, spec.o_bias) = (bias, bias);
    Ok(())
}

/// Gate and up in one matrix, and down, of most families that have such a matrix.
const GATE_UP: [&str; 2] = ["mlp.gate_up_proj", "mlp.down_proj"];

/// LayerNorms with these parameters; `key` is their epsilon.
fn layer_norms(config: &Config, spec: &mut Spec, key: &str, params: LayerNormParams) -> Result<()> {
    spec.layer_norm = Some(params);
    spec.norm_eps = config.opt_f64(key)?.unwrap_or(1e-5);
    Ok(())
}

/// A positive factor.
fn factor(config: &Config, key: &str, default: f64) -> Result<f32> {
    match config.opt_f64(key)?.unwrap_or(default) {
        x if x > 0.0 && (x as f32).is_finite() && x as f32 > 0.0 => Ok(x as f32),
        found => Err(Error::format(format!("`{key}` must be positive"))
            .at(config.path.display())
            .found(found)),
    }
}

fn activation(config: &Config, key: &str, default: &str) -> Result<Activation> {
    match config.opt_str(key)?.unwrap_or(default) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Ok(Activation::GeluTanh),
        "gelu" => Ok(Activation::Gelu),
        "relu2" => Ok(Activation::Relu2),
        other => Err(Error::unsupported(format!("activation `{other}` is not supported"))
            .at(format!("{}: {key}", config.path.display()))
            .expected("silu, gelu, gelu_pytorch_tanh or relu2")),
    }
}

/// The single set of rope parameters of most families, in any form of the config.
fn rope(config: &Config, spec: &Spec, default_theta: f64) -> Result<Rope> {
    rope_of(config, spec, &rope_parameters(config, None, default_theta)?)
}

/// As `rope`, of a family that rotates this part of a head unless its config has another.
fn partial_rope(config: &Config, spec: &Spec, default_theta: f64, part: f64) -> Result<Rope> {
    let mut parameters = rope_parameters(config, None, default_theta)?;
    parameters.entry("partial_rotary_factor").or_insert(json!(part));
    rope_of(config, spec, &parameters)
}

/// The rope parameters of the layers with full attention, as `Rope::new` takes them; a base of 0: the config has none.
///
/// # Errors
/// Parameters that are not an object.
pub fn rope_of_config(config: &Config) -> Result<Map<String, Value>> {
    rope_parameters(config, Some("full_attention"), 0.0)
}

fn rope_of(config: &Config, spec: &Spec, parameters: &Map<String, Value>) -> Result<Rope> {
    Rope::new(parameters, spec.head_dim, spec.max_positions, &place(config, "rope"))
}

/// Rope parameters in the form of transformers 5 (`rope_parameters`, for all layers or per layer type) or of
/// transformers 4 (`rope_theta` and `rope_scaling`).
fn rope_parameters(config: &Config, layer_type: Option<&str>, default_theta: f64) -> Result<Map<String, Value>> {
    let object = |key: &str| match config.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(map)) => Ok(Some(map)),
        Some(other) => Err(Error::format(format!("`{key}` is not a JSON object"))
            .at(config.path.display())
            .found(other)),
    };
    let parameters = object("rope_parameters")?;
    let by_type = parameters
        .and_then(|m| m.get(layer_type.unwrap_or("full_attention")))
        .and_then(Value::as_object);
    let mut map = match (by_type, parameters) {
        (Some(own), _) => own.clone(),
        (None, Some(shared)) if !shared.values().any(Value::is_object) => shared.clone(),
        (None, Some(_)) => {
            return Err(Error::format("`rope_parameters` has no entry for this kind of layer")
                .at(config.path.display())
                .expected(layer_type.unwrap_or("full_attention")));
        }
        (None, None) => object("rope_scaling")?.cloned().unwrap_or_default(),
    };
    // Without a default base the config was read before.
    if let (Some(_), Some(scaling)) = (parameters, object("rope_scaling")?.filter(|m| !m.is_empty()))
        && default_theta > 0.0
    {
        let of_kind = layer_type.filter(|_| by_type.is_some());
        same_rope(config, &map, scaling, default_theta, of_kind)?;
    }
    if !map.contains_key("rope_theta") {
        map.insert(
            "rope_theta".into(),
            json!(config.opt_f64("rope_theta")?.unwrap_or(default_theta)),
        );
    }
    if let (false, Some(partial)) = (
        map.contains_key("partial_rotary_factor"),
        config.opt_f64("partial_rotary_factor")?,
    ) {
        map.insert("partial_rotary_factor".into(), json!(partial));
    }
    // In transformers the number of the config goes before that of a rope that is not for one type of layers.
    let kind = map.get("rope_type").or_else(|| map.get("type")).and_then(Value::as_str);
    let outer_first = by_type.is_none() && matches!(kind, Some("llama3" | "longrope" | "yarn"));
    if let (true, Some(n)) = (
        outer_first || !map.contains_key("original_max_position_embeddings"),
        config.opt_usize("original_max_position_embeddings")?,
    ) {
        map.insert("original_max_position_embeddings".into(), json!(n));
    }
    Ok(map)
}

/// Refuses a `rope_scaling` beside other `rope_parameters`: transformers 5 uses `rope_scaling` and gives no warning. Of ropes by
/// kind of layer (`of_kind`) it only changes the keys of the layers with full attention that `rope_scaling` has.
fn same_rope(
    config: &Config,
    parameters: &Map<String, Value>,
    scaling: &Map<String, Value>,
    theta: f64,
    of_kind: Option<&str>,
) -> Result<()> {
    if of_kind.is_some_and(|kind| kind != "full_attention") {
        return Ok(());
    }
    // Numbers are compared as numbers: `4` is `4.0`.
    let same = |a: &Value, b: &Value| a == b || a.as_f64().is_some_and(|a| Some(a) == b.as_f64());
    let named = |map: &Map<String, Value>| {
        let mut map = map.clone();
        map.retain(|_, value| !value.is_null());
        if let Some(kind) = map.remove("type") {
            map.entry("rope_type").or_insert(kind);
        }
        map
    };
    let (mut own, mut theirs) = (named(parameters), named(scaling));
    let outer = config.opt_f64("rope_theta")?.unwrap_or(theta);
    own.entry("rope_theta").or_insert(json!(outer));
    if of_kind.is_none() {
        theirs.entry("rope_theta").or_insert(json!(outer));
    }
    let differs = |(key, value): (&String, &Value)| !own.get(key).is_some_and(|own| same(own, value));
    let lacks = |key: &String| of_kind.is_none() && !theirs.contains_key(key) && key != "partial_rotary_factor";
    let found = theirs.iter().find(|entry| differs(*entry)).map(|(key, _)| key);
    match found.or_else(|| own.keys().find(|key| lacks(key))) {
        None => Ok(()),
        Some(key) => Err(
            Error::unsupported("`rope_scaling` and `rope_parameters` describe different positions")
                .at(config.path.display())
                .found(format!("`{key}` is not the same in both"))
                .hint("remove the one that does not belong to this model; with both, transformers uses `rope_scaling`"),
        ),
    }
}

/// Sets the sliding windows from `layer_types` if the config has it; else the layers for which `default` is true.
fn windows(config: &Config, spec: &mut Spec, window: Option<usize>, default: impl Fn(usize) -> bool) -> Result<()> {
    let types = match config.get("layer_types") {
        None | Some(Value::Null) => None,
        Some(Value::Array(list)) if list.len() == spec.layers.len() => Some(list),
        Some(other) => {
            return Err(Error::format("`layer_types` must name every layer")
                .at(place(config, "layer_types"))
                .found(
                    other
                        .as_array()
                        .map_or("not a list".to_string(), |l| format!("{} entries", l.len())),
                )
                .expected(format!("{} entries", spec.layers.len())));
        }
    };
    for (l, layer) in spec.layers.iter_mut().enumerate() {
        let slides = match types.and_then(|t| t[l].as_str()) {
            Some("sliding_attention") => true,
            Some("full_attention") => false,
            None if types.is_none() => default(l),
            found => {
                return Err(Error::unsupported("layer type is not supported")
                    .at(place(config, "layer_types"))
                    .found(found.unwrap_or("no name"))
                    .expected("full_attention or sliding_attention"));
            }
        };
        layer.window = if slides { window } else { None };
        if slides && window.is_none() {
            return Err(
                Error::format("a layer has sliding attention, but the config has no sliding_window")
                    .at(place(config, "sliding_window")),
            );
        }
    }
    Ok(())
}

fn place(config: &Config, key: &str) -> String {
    format!("{}: {key}", config.path.display())
}

fn out_of_range(key: &str, found: usize, most: usize, place: &str) -> Error {
    Error::format(format!("`{key}` is out of range"))
        .at(place)
        .found(found)
        .expected(format!("1 to {most}"))
}

fn check(spec: &Spec, place: &str) -> Result<()> {
    let mut sizes = vec![
        ("vocab_size", spec.vocab),
        ("hidden_size", spec.hidden),
        ("intermediate_size", spec.intermediate),
        ("num_hidden_layers", spec.layers.len()),
        ("num_attention_heads", spec.heads),
        ("num_key_value_heads", spec.kv_heads),
        ("head_dim", spec.head_dim),
    ];
    for l in 0..spec.layers.len() {
        sizes.push(("head_dim", spec.head_dim_of(l)));
    }
    if let Some(PerLayerSpec { vocab, width }) = spec.per_layer {
        sizes.extend([
            ("vocab_size_per_layer_input", vocab),
            ("hidden_size_per_layer_input", width),
        ]);
    }
    for (key, n) in sizes {
        let most = LARGEST.iter().find(|(k, _)| *k == key).map_or(0, |(_, most)| *most);
        if n == 0 || n > most {
            return Err(out_of_range(key, n, most, place));
        }
    }
    let of_layer = |l: &usize| -> u128 {
        let linears = spec.linears(*l);
        let experts = spec.layers[*l].experts;
        let routed = experts.map_or(0, |e| {
            (e.count * 3) as u128 * e.intermediate as u128 * spec.hidden as u128
        });
        linears.iter().map(|l| l.input as u128 * l.output as u128).sum::<u128>() + routed
    };
    let matrices: u128 = spec.alike().iter().map(of_layer).sum();
    let per_layer = spec.per_layer.map_or(0, |p| p.vocab as u128 * p.width as u128);
    let tables = 2 * spec.vocab as u128 * spec.hidden as u128 + per_layer * spec.layers.len() as u128;
    let parameters = matrices + tables;
    if parameters > PARAMETERS {
        return Err(Error::format("the sizes make a model that is too large")
            .at(place)
            .found(format!("{parameters} parameters"))
            .expected(format!("at most {PARAMETERS}")));
    }
    let experts = spec.layers.iter().filter_map(|layer| layer.experts);
    let experts = experts.map(|e| e.count).fold(0, usize::saturating_add);
    if experts > EXPERTS {
        return Err(Error::format("the layers have too many experts together")
            .at(place)
            .found(experts)
            .expected(format!("at most {EXPERTS}")));
    }
    for l in 0..spec.layers.len() {
        let kv_heads = spec.kv_heads_of(l);
        if kv_heads == 0 || !spec.heads.is_multiple_of(kv_heads) {
            return Err(
                Error::format("num_attention_heads is not a multiple of num_key_value_heads")
                    .at(place)
                    .found(format!("{} and {kv_heads}", spec.heads)),
            );
        }
    }
    if !(spec.norm_eps > 0.0 && spec.norm_eps < 1.0) {
        return Err(Error::format("the epsilon of the norms is out of range")
            .at(place)
            .found(spec.norm_eps));
    }
    let partial = |rope: &Rope| rope.inv_freq.len() * 2 != spec.head_dim && *rope != Rope::none();
    if spec.ropes.iter().any(partial) && !PARTIAL_ROTATION.contains(&spec.model_type.as_str()) {
        let message = format!("`partial_rotary_factor` is not supported in {}", spec.model_type);
        return Err(Error::unsupported(message)
            .at(place)
            .hint("remove it from `config.json`: transformers does not apply it in this family"));
    }
    if spec.layers.iter().any(|l| l.window == Some(0)) {
        return Err(Error::format("`sliding_window` is 0").at(place));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
