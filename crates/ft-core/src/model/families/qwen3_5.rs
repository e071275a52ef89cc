//! Qwen3.5 and Qwen3-Next: Gated DeltaNet layers, and layers with gated attention.

use super::{Config, DeltaNetSpec, ExpertsSpec, LARGEST, Mixer, QkNorm, Result, Spec, experts, out_of_range, place};
use crate::base::Error;
use crate::model::rope::Rope;
use crate::ops::glu::Activation;
use serde_json::{Value, json};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    read(config, spec, false)
}

/// `by_key_head`: the projections of Gated DeltaNet are ordered by key head.
fn read(config: &Config, spec: &mut Spec, by_key_head: bool) -> Result<()> {
    spec.norm_plus_one = true;
    spec.qk_norm = Some(QkNorm::HEADS);
    spec.output_gate = true;
    super::attention_biases(config, spec, false)?;
    super::default_head_dim(config, spec, 256)?;
    if !config.bool_or("attn_output_gate", true)? {
        return Err(
            Error::unsupported("an attention without output gate is not supported in this family")
                .at(place(config, "attn_output_gate")),
        );
    }
    if spec.activation != Activation::Silu {
        return Err(
            Error::unsupported("the convolution of linear attention has another activation than silu")
                .at(place(config, "hidden_act"))
                .found(&config.raw["hidden_act"])
                .expected("silu"),
        );
    }
    let mut rope = super::rope_parameters(config, None, 10_000.0)?;
    rope.entry("partial_rotary_factor").or_insert(json!(0.25));
    spec.ropes = vec![Rope::new(
        &rope,
        spec.head_dim,
        spec.max_positions,
        &place(config, "rope"),
    )?];
    let size = |key: &str, default: usize| {
        let most = LARGEST
            .iter()
            .find(|(k, _)| *k == "head_dim")
            .map_or(0, |(_, most)| *most);
        match config.opt_usize(key)?.unwrap_or(default) {
            n if (1..=most).contains(&n) => Ok(n),
            n => Err(out_of_range(key, n, most, &config.path.display().to_string())),
        }
    };
    let sizes = DeltaNetSpec {
        key_heads: size("linear_num_key_heads", 16)?,
        value_heads: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        kernel: size("linear_conv_kernel_dim", 4)?,
        by_key_head,
    };
    let DeltaNetSpec {
        key_heads,
        value_heads,
        kernel,
        ..
    } = sizes;
    if !value_heads.is_multiple_of(key_heads) {
        return Err(
            Error::format("linear_num_value_heads is not a multiple of linear_num_key_heads")
                .at(config.path.display())
                .found(format!("{value_heads} and {key_heads}")),
        );
    }
    if kernel < 2 {
        return Err(Error::unsupported("a convolution over a single token is not supported")
            .at(place(config, "linear_conv_kernel_dim"))
            .found(kernel));
    }
    mixers(config, spec, sizes)
}

/// Qwen3-Next: the same layers with other projections, and experts.
pub(super) fn apply_next(config: &Config, spec: &mut Spec) -> Result<()> {
    read(config, spec, true)?;
    if config.opt_usize0("num_experts")? == Some(0) {
        return Ok(());
    }
    let experts = ExpertsSpec {
        shared: Some(experts::qwen_shared(config, 512)?),
        router: experts::softmax(
            experts::size(config, "num_experts_per_tok", 10)?,
            config.bool_or("norm_topk_prob", true)?,
        ),
        ..super::qwen3_moe::experts(config, 512, 512, 10)?
    };
    experts::of_layers(config, spec, experts)
}

/// Qwen3.5 with experts: experts in every layer; the weights of the chosen ones always add up to 1.
pub(super) fn apply_moe(config: &Config, spec: &mut Spec) -> Result<()> {
    read(config, spec, false)?;
    let top_k = experts::size(config, "num_experts_per_tok", 8)?;
    let experts = ExpertsSpec {
        shared: Some(experts::qwen_shared(config, 512)?),
        router: experts::softmax(top_k, true),
        ..super::qwen3_moe::experts(config, 256, 512, 8)?
    };
    for layer in &mut spec.layers {
        layer.experts = Some(experts);
    }
    experts::check(config, &experts)
}

/// Which layers have attention: `layer_types`, or every n-th layer.
fn mixers(config: &Config, spec: &mut Spec, sizes: DeltaNetSpec) -> Result<()> {
    let types = match config.get("layer_types") {
        None => None,
        Some(Value::Array(list)) if list.len() == spec.layers.len() => Some(list),
        Some(_) => {
            return Err(Error::format("`layer_types` must name every layer")
                .at(place(config, "layer_types"))
                .expected(format!("{} entries", spec.layers.len())));
        }
    };
    let interval = config.opt_usize("full_attention_interval")?.unwrap_or(4);
    if interval == 0 {
        return Err(Error::format("`full_attention_interval` is 0").at(config.path.display()));
    }
    for (l, layer) in spec.layers.iter_mut().enumerate() {
        let name = types.map_or(Some(""), |types| types[l].as_str());
        layer.mixer = match name {
            Some("linear_attention") => Mixer::DeltaNet(sizes),
            Some("full_attention") => Mixer::Attention,
            Some("") if types.is_none() && (l + 1).is_multiple_of(interval) => Mixer::Attention,
            Some("") if types.is_none() => Mixer::DeltaNet(sizes),
            found => {
                return Err(Error::unsupported("layer type is not supported")
                    .at(place(config, "layer_types"))
                    .found(found.unwrap_or("no name"))
                    .expected("full_attention or linear_attention"));
            }
        };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;
    use std::path::Path;

    fn read_config(model_type: &str, changes: Value) -> Result<Spec> {
        let mut config = json!({
            "model_type": model_type, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8});
        let map = config.as_object_mut().unwrap();
        map.extend(changes.as_object().unwrap().clone());
        families::read(&Config::from_map(map.clone(), Path::new("config.json")))
    }

    #[test]
    fn every_fourth_layer_has_attention() {
        let spec = read_config("qwen3_5_text", json!({})).unwrap();
        let mixers: Vec<bool> = spec.layers.iter().map(|l| l.mixer == Mixer::Attention).collect();
        assert_eq!(mixers, [false, false, false, true, false, false, false, true]);
        assert_eq!(spec.alike(), [0, 0, 0, 3, 0, 0, 0, 3]);
        // A quarter of a head of 32 is rotated.
        assert_eq!(spec.ropes[0].inv_freq.len(), 4);
        let shapes = |l: usize| -> Vec<(&str, usize, usize)> {
            spec.linears(l).iter().map(|l| (l.name, l.input, l.output)).collect()
        };
        assert_eq!(
            shapes(0)[..5],
            [
                ("linear_attn.in_proj_qkv", 64, 96),
                ("linear_attn.in_proj_z", 64, 32),
                ("linear_attn.in_proj_b", 64, 4),
                ("linear_attn.in_proj_a", 64, 4),
                ("linear_attn.out_proj", 32, 64),
            ]
        );
        // q_proj has the gate too.
        assert_eq!(shapes(3)[0], ("self_attn.q_proj", 64, 256));
        let next = read_config("qwen3_next", json!({"num_experts": 0, "full_attention_interval": 2})).unwrap();
        assert_eq!(next.linears(0)[0].output, 96 + 32);
        assert_eq!(next.alike(), [0, 1, 0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn other_options_are_refused_by_name() {
        for (model_type, changes, name) in [
            ("qwen3_5_text", json!({"hidden_act": "gelu"}), "hidden_act"),
            ("qwen3_5_text", json!({"attn_output_gate": false}), "attn_output_gate"),
            (
                "qwen3_5_text",
                json!({"linear_conv_kernel_dim": 1}),
                "linear_conv_kernel_dim",
            ),
            (
                "qwen3_5_text",
                json!({"linear_num_key_heads": 3}),
                "linear_num_key_heads",
            ),
            ("qwen3_5_text", json!({"linear_key_head_dim": 0}), "linear_key_head_dim"),
            (
                "qwen3_5_text",
                json!({"full_attention_interval": 0}),
                "full_attention_interval",
            ),
            (
                "qwen3_5_text",
                json!({"layer_types": ["full_attention"]}),
                "layer_types",
            ),
            (
                "qwen3_5_text",
                json!({"layer_types": vec!["chunked_attention"; 8]}),
                "layer_types",
            ),
            ("qwen3_5_text", json!({"num_experts": 4}), "num_experts"),
            ("qwen3_next", json!({"num_experts": 4}), "num_experts_per_tok"),
        ] {
            let e = read_config(model_type, changes).unwrap_err().to_string();
            assert!(e.contains(name), "{name}: {e}");
        }
    }

    #[test]
    fn a_gpu_has_kernels_up_to_some_sizes() {
        let spec = read_config("qwen3_5_text", json!({})).unwrap();
        assert!(spec.runs_on(true).is_ok());
        for change in [
            json!({"linear_key_head_dim": 192}),
            json!({"linear_conv_kernel_dim": 9}),
        ] {
            let spec = read_config("qwen3_5_text", change).unwrap();
            assert!(spec.runs_on(false).is_ok());
            assert!(spec.runs_on(true).unwrap_err().to_string().contains("Gated DeltaNet"));
        }
    }
}
