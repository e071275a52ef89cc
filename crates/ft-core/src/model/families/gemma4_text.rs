//! Gemma 4, text only. Layers with full attention have other head sizes than those with a sliding window; the values are
//! normed without weights, or are the keys before norm and rotation; the last layers read the keys and values of an
//! earlier one; the small checkpoints add an embedding of the token to each layer.

use super::{Config, NormNames, QkNorm, Result, Spec};
use crate::base::Error;
use crate::model::rope::Rope;
use crate::model::spec::{KeySource, PerLayerSpec};
use serde_json::{Map, Value, json};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    if config.bool_or("enable_moe_block", false)? {
        return Err(
            Error::unsupported("config option `enable_moe_block` changes the model and is not supported")
                .at(config.path.display())
                .found(true)
                .hint("it would need mixture-of-experts layers: the checkpoints without experts are supported"),
        );
    }
    if let Some(found) = config.get("use_bidirectional_attention")
        && ![json!(false), json!("vision")].contains(found)
    {
        // "vision" concerns the tokens of images only.
        return Err(Error::unsupported("attention to later tokens is not supported")
            .at(super::place(config, "use_bidirectional_attention"))
            .found(found)
            .expected("null or \"vision\""));
    }
    spec.norms = NormNames::SANDWICH;
    spec.qk_norm = Some(QkNorm::HEADS);
    (spec.value_norm, spec.layer_scalar) = (true, true);
    spec.tied = config.bool_or("tie_word_embeddings", true)?;
    spec.activation = super::activation(config, "hidden_activation", "gelu_pytorch_tanh")?;
    spec.embedding_scale = (spec.hidden as f32).sqrt();
    spec.embedding_scale_rounded = true;
    spec.head_dim = config.opt_usize("head_dim")?.unwrap_or(256);
    spec.kv_heads = config.opt_usize("num_key_value_heads")?.unwrap_or(4);
    spec.attention_scale = 1.0;
    spec.logit_softcap = super::gemma2::softcap(config, "final_logit_softcapping", None)?;
    super::attention_biases(config, spec, false)?;
    let window = config.opt_usize("sliding_window")?.or(Some(512));
    super::windows(config, spec, window, |l| (l + 1) % 6 != 0)?;
    // transformers gives the last layer full attention, whatever the config says.
    if let Some(last) = spec.layers.last_mut() {
        last.window = None;
    }
    let keys_only = config.bool_or("attention_k_eq_v", false)?;
    sizes(config, spec, keys_only)?;
    for layer in spec.layers.iter_mut().filter(|l| l.window.is_none() && keys_only) {
        layer.keys = KeySource::KeysOnly;
    }
    shared_keys(config, spec, 0)?;
    spec.per_layer = match config.opt_usize0("hidden_size_per_layer_input")? {
        Some(0) => None,
        _ if null(config, "hidden_size_per_layer_input") => None,
        width => Some(PerLayerSpec {
            vocab: config.opt_usize("vocab_size_per_layer_input")?.unwrap_or(262_144),
            width: width.unwrap_or(256),
        }),
    };
    let full = spec.layers.iter().position(|l| l.window.is_none());
    let head_dim = full.map_or(spec.head_dim, |l| spec.head_dim_of(l));
    spec.ropes = vec![
        rope(config, spec, "full_attention", head_dim)?,
        rope(config, spec, "sliding_attention", spec.head_dim)?,
    ];
    for layer in &mut spec.layers {
        layer.rope = usize::from(layer.window.is_some());
    }
    Ok(())
}

fn null(config: &Config, key: &str) -> bool {
    config.raw.get(key).is_some_and(Value::is_null)
}

/// Head sizes and key heads of the layers with full attention: `per_layer_config` of new files, or two keys for all of them.
fn sizes(config: &Config, spec: &mut Spec, keys_only: bool) -> Result<()> {
    let place = super::place(config, "per_layer_config");
    let Some(Value::Object(layers)) = config.get("per_layer_config") else {
        let head_dim = config.opt_usize("global_head_dim")?.unwrap_or(512);
        let kv_heads = config.opt_usize("num_global_key_value_heads")?.filter(|_| keys_only);
        for layer in spec.layers.iter_mut().filter(|l| l.window.is_none()) {
            (layer.head_dim, layer.kv_heads) = (Some(head_dim), kv_heads);
        }
        return Ok(());
    };
    for (layer, own) in layers {
        let found = layer.parse().ok().and_then(|l: usize| spec.layers.get_mut(l));
        let (Some(of), Value::Object(own)) = (found, own) else {
            return Err(
                Error::format("`per_layer_config` names a layer that does not exist, or has no keys for it")
                    .at(place)
                    .found(layer),
            );
        };
        for (key, value) in own {
            let size = value.as_u64().and_then(|n| usize::try_from(n).ok());
            match (key.as_str(), size.filter(|n| (1..1 << 14).contains(n))) {
                ("head_dim", Some(n)) => of.head_dim = Some(n),
                ("num_key_value_heads", Some(n)) => of.kv_heads = Some(n),
                _ => {
                    return Err(
                        Error::unsupported(format!("`{key}` of a single layer is not supported"))
                            .at(format!("{place}.{layer}"))
                            .found(value)
                            .expected("sizes `head_dim` and `num_key_value_heads`"),
                    );
                }
            }
        }
    }
    // One rope for all layers of a kind.
    let differs = |l: usize| {
        let kind = spec.layers[l].window.is_some();
        let first = spec.layers.iter().position(|other| other.window.is_some() == kind);
        first.is_some_and(|first| spec.head_dim_of(first) != spec.head_dim_of(l))
            || kind && spec.head_dim_of(l) != spec.head_dim
    };
    match (0..spec.layers.len()).find(|l| differs(*l)) {
        Some(l) => Err(
            Error::unsupported("layers with the same kind of attention have different head sizes")
                .at(format!("{place}.{l}")),
        ),
        None => Ok(()),
    }
}

/// The last layers read the keys and values of the last layer before them with the same kind of attention.
pub(super) fn shared_keys(config: &Config, spec: &mut Spec, default: usize) -> Result<()> {
    let count = config.opt_usize0("num_kv_shared_layers")?.unwrap_or(default);
    let place = super::place(config, "num_kv_shared_layers");
    let wide = config.bool_or("use_double_wide_mlp", false)?;
    let first = spec.layers.len().checked_sub(count).filter(|first| *first > 0);
    let Some(first) = first else {
        return Err(
            Error::format("`num_kv_shared_layers` leaves no layer with keys of its own")
                .at(place)
                .found(count),
        );
    };
    for l in first..spec.layers.len() {
        let kind = spec.layers[l].window.is_some();
        let from = (0..first)
            .rev()
            .find(|from| spec.layers[*from].window.is_some() == kind);
        let Some(from) = from else {
            return Err(
                Error::format("a layer shares the keys of a kind of layer that does not exist")
                    .at(place)
                    .found(format!("layer {l}")),
            );
        };
        if spec.kv_heads_of(from) != spec.kv_heads_of(l) {
            return Err(Error::format(
                "a layer takes the keys of an earlier layer, but the two have different numbers of key heads",
            )
            .at(place)
            .found(format!("layers {l} and {from}")));
        }
        spec.layers[l].keys = KeySource::Layer(from);
        spec.layers[l].intermediate = wide.then_some(2 * spec.intermediate);
    }
    Ok(())
}

fn rope(config: &Config, spec: &Spec, kind: &str, head_dim: usize) -> Result<Rope> {
    let parameters = match (config.get("rope_parameters"), kind) {
        (Some(_), _) => super::rope_parameters(config, Some(kind), 10_000.0)?,
        (None, "full_attention") => Map::from_iter([
            ("rope_type".to_string(), json!("proportional")),
            ("partial_rotary_factor".to_string(), json!(0.25)),
            ("rope_theta".to_string(), json!(1_000_000.0)),
        ]),
        (None, _) => Map::from_iter([("rope_theta".to_string(), json!(10_000.0))]),
    };
    let place = super::place(config, &format!("rope_parameters.{kind}"));
    let rotary_type = parameters.get("rope_type").and_then(Value::as_str).unwrap_or("default");
    let partial = parameters.get("partial_rotary_factor").and_then(Value::as_f64);
    match (rotary_type, partial) {
        ("proportional", _) | ("default", None | Some(1.0)) => {
            Rope::new(&parameters, head_dim, spec.max_positions, &place)
        }
        // In transformers the default type of this family ignores the factor.
        (other, _) => Err(
            Error::unsupported(format!("rope type `{other}` is not supported in gemma4_text"))
                .at(place)
                .expected("proportional, or default without partial_rotary_factor"),
        ),
    }
}
