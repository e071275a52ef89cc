//! Gemma 3n, text only. A token has several streams (AltUp), Laurel is added beside the attention, the first layers have sparse
//! gates; norms of v, shared keys and values, and per-layer inputs as in Gemma 4.

use super::{Config, NormNames, PerLayerSpec, QkNorm, Result, Spec};
use crate::base::Error;
use crate::model::rope::Rope;
use crate::model::spec::AltUpSpec;
use serde_json::{Map, Value, json};

/// Most streams: published models have 4.
const MOST_STREAMS: usize = 16;

/// The config with one number for the intermediate size, and the size of each layer.
pub(super) fn sizes(config: &Config) -> Result<(Config, Vec<usize>)> {
    let mut one = Config {
        raw: config.raw.clone(),
        path: config.path.clone(),
    };
    let Some(Value::Array(list)) = config.get("intermediate_size") else {
        return Ok((one, Vec::new()));
    };
    let size = |value: &Value| {
        let size = value.as_u64().and_then(|n| usize::try_from(n).ok());
        size.filter(|n| (1..1 << 22).contains(n)).ok_or_else(|| {
            Error::format("`intermediate_size` must be a size, or one for each layer")
                .at(super::place(config, "intermediate_size"))
                .found(value)
        })
    };
    let sizes: Vec<usize> = list.iter().map(size).collect::<Result<_>>()?;
    let most = sizes.iter().max().copied().unwrap_or(0);
    one.raw.insert("intermediate_size".into(), json!(most));
    Ok((one, sizes))
}

pub(super) fn apply(config: &Config, spec: &mut Spec, sizes: &[usize]) -> Result<()> {
    spec.norms = NormNames::SANDWICH;
    spec.qk_norm = Some(QkNorm::HEADS);
    spec.value_norm = true;
    spec.tied = config.bool_or("tie_word_embeddings", true)?;
    spec.activation = super::activation(config, "hidden_activation", "gelu_pytorch_tanh")?;
    spec.embedding_scale = (spec.hidden as f32).sqrt();
    spec.embedding_scale_rounded = true;
    spec.head_dim = config.opt_usize("head_dim")?.unwrap_or(256);
    spec.kv_heads = config.opt_usize("num_key_value_heads")?.unwrap_or(2);
    spec.attention_scale = 1.0;
    spec.logit_softcap = super::gemma2::softcap(config, "final_logit_softcapping", Some(30.0))?;
    super::attention_biases(config, spec, false)?;
    let window = config.opt_usize("sliding_window")?.or(Some(512));
    super::windows(config, spec, window, |l| (l + 1) % 5 != 0)?;
    super::gemma4_text::shared_keys(config, spec, 15)?;
    if !sizes.is_empty() && sizes.len() != spec.layers.len() {
        return Err(Error::format("`intermediate_size` must have a size for each layer")
            .at(super::place(config, "intermediate_size"))
            .found(format!("{} sizes", sizes.len()))
            .expected(format!("{}", spec.layers.len())));
    }
    for (layer, size) in spec.layers.iter_mut().zip(sizes) {
        layer.intermediate = (*size != spec.intermediate).then_some(*size);
    }
    sparse(config, spec)?;
    spec.laurel = Some(config.opt_usize("laurel_rank")?.unwrap_or(64));
    spec.streams = Some(streams(config)?);
    spec.per_layer = Some(PerLayerSpec {
        vocab: config.opt_usize("vocab_size_per_layer_input")?.unwrap_or(262_144),
        width: config.opt_usize("hidden_size_per_layer_input")?.unwrap_or(256),
    });
    spec.ropes = vec![
        rope(config, spec, "full_attention")?,
        rope(config, spec, "sliding_attention")?,
    ];
    for layer in &mut spec.layers {
        layer.rope = usize::from(layer.window.is_some());
    }
    Ok(())
}

fn streams(config: &Config) -> Result<AltUpSpec> {
    let count = config.opt_usize("altup_num_inputs")?.unwrap_or(4);
    let active = config.opt_usize0("altup_active_idx")?.unwrap_or(0);
    let range = |key: &str, found: usize, expected: String| {
        Error::format(format!("`{key}` is out of range"))
            .at(super::place(config, key))
            .found(found)
            .expected(expected)
    };
    if !(2..=MOST_STREAMS).contains(&count) {
        return Err(range("altup_num_inputs", count, format!("2 to {MOST_STREAMS}")));
    }
    if active >= count {
        return Err(range("altup_active_idx", active, format!("less than {count}")));
    }
    if !config.bool_or("altup_correct_scale", true)? {
        return Err(
            Error::unsupported("config option `altup_correct_scale` changes the model and is not supported")
                .at(super::place(config, "altup_correct_scale"))
                .found(false)
                .expected(true),
        );
    }
    let clip = match config.raw.get("altup_coef_clip") {
        Some(Value::Null) => None,
        _ => Some(config.opt_f64("altup_coef_clip")?.unwrap_or(120.0) as f32),
    };
    match clip.filter(|clip| *clip <= 0.0) {
        Some(found) => Err(Error::format("`altup_coef_clip` must be positive")
            .at(super::place(config, "altup_coef_clip"))
            .found(found)),
        None => Ok(AltUpSpec { count, active, clip }),
    }
}

/// The part of each layer's gate that becomes 0.
fn sparse(config: &Config, spec: &mut Spec) -> Result<()> {
    let key = "activation_sparsity_pattern";
    let layers = spec.layers.len();
    let wrong = |found: String| {
        Error::format(format!("`{key}` must have a number from 0 to below 1 for each layer"))
            .at(super::place(config, key))
            .found(found)
            .expected(format!("{layers} numbers"))
    };
    match config.get(key) {
        None => {
            let sparse = if layers > 10 { 10 } else { 0 };
            spec.layers[..sparse].iter_mut().for_each(|layer| layer.sparsity = 0.95);
        }
        Some(Value::Array(list)) if list.len() == layers => {
            for (layer, value) in spec.layers.iter_mut().zip(list) {
                let part = value.as_f64().filter(|part| (0.0..1.0).contains(&(*part as f32)));
                layer.sparsity = part.ok_or_else(|| wrong(value.to_string()))? as f32;
            }
        }
        Some(Value::Array(list)) => return Err(wrong(format!("{} numbers", list.len()))),
        Some(other) => return Err(wrong(other.to_string())),
    }
    Ok(())
}

fn rope(config: &Config, spec: &Spec, kind: &str) -> Result<Rope> {
    let full = kind == "full_attention";
    let theta = if full { 1_000_000.0 } else { 10_000.0 };
    let mut parameters = match config.get("rope_parameters").and_then(Value::as_object) {
        Some(own) if own.get(kind).is_none_or(Value::is_null) && own.values().any(Value::is_object) => {
            Map::from_iter([("rope_theta".to_string(), json!(theta))])
        }
        Some(_) => super::rope_parameters(config, Some(kind), theta)?,
        // In configs of transformers 4 the layers with a window use `rope_local_base_freq` and no scaling.
        None if full => super::rope_parameters(config, None, theta)?,
        None => {
            let local = config.opt_f64("rope_local_base_freq")?.unwrap_or(theta);
            Map::from_iter([("rope_theta".to_string(), json!(local))])
        }
    };
    if parameters
        .remove("partial_rotary_factor")
        .is_some_and(|part| part.as_f64() != Some(1.0))
    {
        return Err(
            Error::unsupported("`partial_rotary_factor` is not supported in gemma3n_text")
                .at(super::place(config, &format!("rope_parameters.{kind}"))),
        );
    }
    let place = super::place(config, &format!("rope_parameters.{kind}"));
    Rope::new(&parameters, spec.head_dim, spec.max_positions, &place)
}

#[cfg(test)]
mod tests {
    use crate::formats::config::Config;
    use crate::model::Spec;
    use crate::model::families::read;
    use serde_json::{Map, Value, json};
    use std::path::Path;

    fn spec(changes: Value) -> crate::base::Result<Spec> {
        let value = json!({
            "model_type": "gemma3n_text", "vocab_size": 32, "hidden_size": 16, "intermediate_size": [12, 12, 8],
            "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
            "sliding_window": 4, "max_position_embeddings": 64, "num_kv_shared_layers": 0, "laurel_rank": 4,
            "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 24, "altup_num_inputs": 3,
            "activation_sparsity_pattern": [0.9, 0.0, 0.5]});
        let (Value::Object(mut all), Value::Object(changes)) = (value, changes) else {
            panic!("no objects");
        };
        all.extend(changes);
        read(&Config::from_map(Map::from_iter(all), Path::new("config.json")))
    }

    #[test]
    fn options_are_read_or_refused_by_name() {
        let found = spec(json!({})).unwrap();
        let sizes: Vec<usize> = (0..3).map(|l| found.intermediate_of(l)).collect();
        assert_eq!((sizes, found.row()), (vec![12, 12, 8], 48));
        assert_eq!(
            found.layers.iter().map(|l| l.sparsity).collect::<Vec<_>>(),
            [0.9, 0.0, 0.5]
        );
        assert_eq!(found.alike(), [0, 1, 2]);
        assert!(found.runs_on(false).is_ok() && found.runs_on(true).is_ok());
        let many = spec(json!({"altup_num_inputs": 9})).unwrap();
        assert!(many.runs_on(true).unwrap_err().to_string().contains("AltUp"));
        assert_eq!(
            spec(json!({"altup_coef_clip": null})).unwrap().streams.unwrap().clip,
            None
        );
        for (key, value) in [
            ("altup_correct_scale", json!(false)),
            ("altup_num_inputs", json!(1)),
            ("altup_active_idx", json!(3)),
            ("altup_coef_clip", json!(-1.0)),
            ("intermediate_size", json!([12, 12])),
            ("intermediate_size", json!([12, 0, 8])),
            ("activation_sparsity_pattern", json!([0.5, 1.0, 0.0])),
            ("activation_sparsity_pattern", json!(0.5)),
            ("hidden_size_per_layer_input", json!(0)),
            ("num_kv_shared_layers", json!(3)),
        ] {
            let said = spec(json!({ key: value })).unwrap_err().to_string();
            assert!(said.contains(key), "{key}: {said}");
        }
    }
}
