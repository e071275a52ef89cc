//! LFM2: gated short convolutions between layers with attention, norms on the heads of q and k, other names.

use super::{Config, Mixer, ModuleNames, NormNames, QkNorm, Result, Spec, place};
use crate::base::Error;
use crate::ops::glu::Activation;
use serde_json::{Value, json};

/// Sizes that files leave out, as transformers has them.
const DEFAULTS: [(&str, usize); 6] = [
    ("vocab_size", 65_536),
    ("hidden_size", 2560),
    ("num_hidden_layers", 32),
    ("num_attention_heads", 32),
    ("num_key_value_heads", 8),
    ("max_position_embeddings", 128_000),
];

/// The config with the keys that all families share: older files have other names for some, and the width of the MLP is computed.
pub(super) fn sizes(config: &Config) -> Result<Config> {
    let mut own = config.clone();
    for (key, size) in DEFAULTS {
        own.raw.entry(key).or_insert(json!(size));
    }
    let tied = config.bool_or("tie_embedding", config.bool_or("tie_word_embeddings", true)?)?;
    own.raw.insert("tie_word_embeddings".into(), json!(tied));
    let eps = config.opt_f64("norm_eps")?.unwrap_or(1e-5);
    own.raw.insert("rms_norm_eps".into(), json!(eps));
    own.raw.insert("intermediate_size".into(), json!(intermediate(config)?));
    Ok(own)
}

/// I: the size of the config, or two thirds of it, times a factor, rounded up to a multiple.
fn intermediate(config: &Config) -> Result<usize> {
    let named = match config.opt_usize("block_ff_dim")? {
        Some(size) => size,
        None => config.opt_usize("intermediate_size")?.unwrap_or(12_288),
    };
    if named > 1 << 22 {
        return Err(super::out_of_range(
            "intermediate_size",
            named,
            1 << 22,
            &config.path.display().to_string(),
        ));
    }
    if !config.bool_or("block_auto_adjust_ff_dim", true)? {
        return Ok(named);
    }
    let size = 2 * named / 3;
    if config.raw.get("block_ffn_dim_multiplier") == Some(&Value::Null) {
        return Ok(size);
    }
    super::factor(config, "block_ffn_dim_multiplier", 1.0)?;
    let factor = config.opt_f64("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let multiple = config.opt_usize("block_multiple_of")?.unwrap_or(256);
    if multiple == 0 {
        return Err(Error::format("`block_multiple_of` is 0").at(config.path.display()));
    }
    Ok(((factor * size as f64) as usize)
        .div_ceil(multiple)
        .saturating_mul(multiple))
}

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    (spec.norms, spec.qk_norm, spec.modules) = (NormNames::LFM2, Some(QkNorm::LFM2), ModuleNames::LFM2);
    spec.activation = Activation::Silu;
    spec.ropes = vec![super::rope(config, spec, 1e6)?];
    let bias = config.bool_or("conv_bias", false)?;
    let kernel = config.opt_usize("conv_L_cache")?.unwrap_or(3);
    if !(2..=256).contains(&kernel) {
        return Err(
            Error::unsupported("a short convolution of this length is not supported")
                .at(place(config, "conv_L_cache"))
                .found(kernel)
                .expected("2 to 256 tokens"),
        );
    }
    let count = spec.layers.len();
    let listed = |key: &str| match config.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(list)) => Ok(Some(list)),
        Some(found) => Err(Error::format(format!("`{key}` is not a list"))
            .at(place(config, key))
            .found(found)),
    };
    let (types, attention) = (listed("layer_types")?, listed("full_attn_idxs")?);
    if types.is_some_and(|types| types.len() != count) {
        return Err(Error::format("`layer_types` must name every layer")
            .at(place(config, "layer_types"))
            .expected(format!("{count} entries")));
    }
    for (l, layer) in spec.layers.iter_mut().enumerate() {
        let attends = match types.map(|types| &types[l]) {
            Some(name) if name == "full_attention" => true,
            Some(name) if name == "conv" => false,
            Some(found) => {
                return Err(Error::unsupported("layer type is not supported")
                    .at(place(config, "layer_types"))
                    .found(found)
                    .expected("full_attention or conv"));
            }
            None => attention.is_none_or(|list| list.contains(&json!(l))),
        };
        if !attends {
            layer.mixer = Mixer::ShortConv { kernel, bias };
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;
    use std::path::Path;

    fn read(changes: Value) -> Result<Spec> {
        let mut config = json!({
            "model_type": "lfm2", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "block_ff_dim": 12_288, "full_attn_idxs": [2]});
        let map = config.as_object_mut().unwrap();
        map.extend(changes.as_object().unwrap().clone());
        families::read(&Config::from_map(map.clone(), Path::new("config.json")))
    }

    #[test]
    fn old_and_new_keys_name_the_sizes() {
        let spec = read(json!({})).unwrap();
        assert!(spec.tied && spec.norm_eps == 1e-5);
        // As in LFM2-1.2B: two thirds of 12,288 are a multiple of 256.
        assert_eq!(spec.intermediate, 8192);
        let attends: Vec<bool> = spec.layers.iter().map(|l| l.mixer == Mixer::Attention).collect();
        assert_eq!(attends, [false, false, true, false]);
        assert_eq!(spec.final_norm().name, "model.embedding_norm");
        for (changes, width, tied) in [
            (
                json!({"block_auto_adjust_ff_dim": false, "tie_embedding": false}),
                12_288,
                false,
            ),
            (
                json!({"block_ff_dim": null, "intermediate_size": 100, "block_multiple_of": 8}),
                72,
                true,
            ),
            (
                json!({"block_ff_dim": 100, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 16}),
                96,
                true,
            ),
            (json!({"block_ff_dim": 100, "block_ffn_dim_multiplier": null}), 66, true),
        ] {
            let spec = read(changes.clone()).unwrap();
            assert_eq!((spec.intermediate, spec.tied), (width, tied), "{changes}");
        }
    }

    #[test]
    fn other_options_are_refused_by_name() {
        for (changes, name) in [
            (json!({"conv_bias": 1}), "conv_bias"),
            (json!({"conv_L_cache": 1}), "conv_L_cache"),
            (json!({"layer_types": ["conv"]}), "layer_types"),
            (json!({"layer_types": vec!["sliding_attention"; 4]}), "layer_types"),
            (json!({"full_attn_idxs": 2}), "full_attn_idxs"),
            (json!({"block_multiple_of": 0}), "block_multiple_of"),
            (json!({"block_ffn_dim_multiplier": -1.0}), "block_ffn_dim_multiplier"),
        ] {
            let e = read(changes).unwrap_err().to_string();
            assert!(e.contains(name), "{name}: {e}");
        }
    }

    #[test]
    fn biases_are_on_the_convolutions_only() {
        let of = |bias: bool| {
            let params = read(json!({"conv_bias": bias})).unwrap().params();
            let names = params.into_iter().map(|p| p.name.to_string());
            names.filter(|name| name.ends_with(".bias")).collect::<Vec<_>>()
        };
        assert!(of(false).is_empty());
        let layer = |l: usize| ["in_proj", "out_proj", "conv"].map(|name| format!("model.layers.{l}.conv.{name}.bias"));
        assert_eq!(of(true), [layer(0), layer(1), layer(3)].concat());
    }

    #[test]
    fn a_gpu_has_kernels_for_few_taps() {
        let spec = read(json!({"conv_L_cache": 9})).unwrap();
        assert!(spec.runs_on(false).is_ok());
        assert!(spec.runs_on(true).unwrap_err().to_string().contains("taps"));
    }
}
