//! The options that families with experts share.

use super::{Config, ExpertsSpec, LARGEST, Result, SharedExpertSpec, Spec, out_of_range, place};
use crate::base::Error;
use crate::ops::routing::{RouterSpec, Score};
use serde_json::Value;

/// A positive size of the config.
pub(super) fn size(config: &Config, key: &str, default: usize) -> Result<usize> {
    let most = LARGEST
        .iter()
        .find(|(k, _)| *k == "intermediate_size")
        .map_or(0, |(_, most)| *most);
    match config.opt_usize(key)?.unwrap_or(default) {
        n if (1..=most).contains(&n) => Ok(n),
        n => Err(out_of_range(key, n, most, &config.path.display().to_string())),
    }
}

/// The softmax router of most families.
pub(super) fn softmax(top_k: usize, renormalize: bool) -> RouterSpec {
    RouterSpec {
        score: Score::Softmax,
        top_k,
        renormalize,
        scale: 1.0,
        groups: None,
    }
}

/// The shared expert of Qwen's families.
pub(super) fn qwen_shared(config: &Config, default: usize) -> Result<SharedExpertSpec> {
    Ok(SharedExpertSpec {
        intermediate: size(config, "shared_expert_intermediate_size", default)?,
        names: [
            "mlp.shared_expert.gate_proj",
            "mlp.shared_expert.up_proj",
            "mlp.shared_expert.down_proj",
        ],
        gate: Some("mlp.shared_expert_gate"),
    })
}

/// Gives experts to the layers that have them: every `decoder_sparse_step`-th, except `mlp_only_layers`.
pub(super) fn of_layers(config: &Config, spec: &mut Spec, experts: ExpertsSpec) -> Result<()> {
    let step = config.opt_usize("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return Err(Error::format("`decoder_sparse_step` is 0").at(config.path.display()));
    }
    let dense: Vec<u64> = match config.get("mlp_only_layers") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(list)) if list.iter().all(Value::is_u64) => list.iter().filter_map(Value::as_u64).collect(),
        Some(other) => {
            return Err(Error::format("`mlp_only_layers` is not a list of layers")
                .at(place(config, "mlp_only_layers"))
                .found(other));
        }
    };
    for (l, layer) in spec.layers.iter_mut().enumerate() {
        let sparse = (l + 1).is_multiple_of(step) && !dense.contains(&(l as u64));
        layer.experts = sparse.then_some(experts);
    }
    check(config, &experts)
}

/// Gives experts to the layers that `mlp_layer_types` names, or to those for which `default` is true.
pub(super) fn of_list(
    config: &Config,
    spec: &mut Spec,
    experts: ExpertsSpec,
    default: impl Fn(usize) -> bool,
) -> Result<()> {
    let list = match config.get("mlp_layer_types") {
        None | Some(Value::Null) => None,
        Some(Value::Array(list)) if list.len() == spec.layers.len() => Some(list),
        Some(other) => {
            return Err(Error::format("`mlp_layer_types` must name every layer")
                .at(place(config, "mlp_layer_types"))
                .found(other)
                .expected(format!("{} entries", spec.layers.len())));
        }
    };
    for (l, layer) in spec.layers.iter_mut().enumerate() {
        let sparse = match list.map(|list| &list[l]) {
            None => default(l),
            Some(kind) if kind == "sparse" => true,
            Some(kind) if kind == "dense" => false,
            Some(kind) => {
                return Err(Error::unsupported("this kind of MLP is not supported")
                    .at(place(config, "mlp_layer_types"))
                    .found(kind)
                    .expected("dense or sparse"));
            }
        };
        layer.experts = sparse.then_some(experts);
    }
    check(config, &experts)
}

/// Checks the numbers of a router.
pub(super) fn check(config: &Config, experts: &ExpertsSpec) -> Result<()> {
    let router = &experts.router;
    if router.top_k > router.available(experts.count) {
        return Err(
            Error::format("a token is routed to more experts than its groups of experts have")
                .at(place(config, "num_experts_per_tok"))
                .found(match router.groups {
                    Some(g) => format!(
                        "{} of {}, from {} of {} groups",
                        router.top_k, experts.count, g.chosen, g.count
                    ),
                    None => format!("{} of {}", router.top_k, experts.count),
                })
                .expected("no more than the chosen groups have, in groups of the same size"),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;
    use serde_json::json;
    use std::path::Path;

    fn read(model_type: &str, changes: Value) -> Result<Spec> {
        let mut config = json!({
            "model_type": model_type, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2});
        let count = match model_type {
            "gpt_oss" | "granitemoe" | "minimax_m2" | "mixtral" => "num_local_experts",
            "dots1" | "glm4_moe" | "solar_open" => "n_routed_experts",
            _ => "num_experts",
        };
        let map = config.as_object_mut().unwrap();
        map.insert(count.into(), json!(8));
        map.extend(changes.as_object().unwrap().clone());
        families::read(&Config::from_map(map.clone(), Path::new("config.json")))
    }

    fn sparse(spec: &Spec) -> Vec<usize> {
        (0..spec.layers.len())
            .filter(|l| spec.layers[*l].experts.is_some())
            .collect()
    }

    #[test]
    fn the_layers_with_experts() {
        let layers = |changes| sparse(&read("qwen3_moe", changes).unwrap());
        assert_eq!(layers(json!({})), [0, 1, 2, 3]);
        assert_eq!(layers(json!({"decoder_sparse_step": 2})), [1, 3]);
        assert_eq!(layers(json!({"mlp_only_layers": [0, 2]})), [1, 3]);
        assert_eq!(
            sparse(&read("glm4_moe", json!({"first_k_dense_replace": 3})).unwrap()),
            [3]
        );
        assert_eq!(
            sparse(&read("glm4_moe", json!({"first_k_dense_replace": 0})).unwrap()),
            [0, 1, 2, 3]
        );
    }

    #[test]
    fn the_parameters_of_a_layer() {
        let spec = read(
            "qwen2_moe",
            json!({"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}),
        )
        .unwrap();
        let params = spec.layer_params(1);
        let shape = |name: &str| params.iter().find(|p| p.name.ends_with(name)).map(|p| p.shape.clone());
        assert_eq!(shape("mlp.gate.weight"), Some(vec![8, 64]));
        assert_eq!(shape("mlp.experts.7.down_proj.weight"), Some(vec![64, 32]));
        assert_eq!(shape("mlp.experts.8.down_proj.weight"), None);
        assert_eq!(shape("mlp.shared_expert.up_proj.weight"), Some(vec![48, 64]));
        assert_eq!(shape("mlp.shared_expert_gate.weight"), Some(vec![1, 64]));
        assert_eq!(spec.routed_elements(1), 2 * 3 * 32 * 64);
        let minimax = read("minimax_m2", json!({})).unwrap();
        let correction = "block_sparse_moe.e_score_correction_bias";
        assert!(minimax.layer_params(0).iter().any(|p| p.name.ends_with(correction)));
        let mixtral = read("mixtral", json!({})).unwrap();
        let named = |p: &crate::source::ParamInfo| p.name.ends_with("block_sparse_moe.experts.0.w3.weight");
        assert!(mixtral.layer_params(0).iter().any(named));
    }

    #[test]
    fn a_router_of_two_levels_has_rows_of_groups() {
        let smile = |changes| read("qwen3_moe_smile", changes);
        let spec = smile(json!({"router_groups": 4, "moe_intermediate_size": 32})).unwrap();
        let params = spec.layer_params(0);
        let router = params.iter().find(|p| p.name.ends_with("mlp.gate.weight")).unwrap();
        assert_eq!(router.shape, [8 + 4, 64]);
        assert_eq!(spec.routed_elements(0), 2 * 3 * 32 * 64);
        for changes in [
            json!({"router_groups": 3}),
            json!({"router_groups": 8}),
            json!({"router_groups": 4, "router_groups_per_token": 5}),
        ] {
            let e = smile(changes).unwrap_err().to_string();
            assert!(e.contains("num_experts_per_tok"), "{e}");
        }
    }

    #[test]
    fn gpt_oss_has_biases_sinks_and_yarn() {
        let spec = read("gpt_oss", json!({"intermediate_size": 32})).unwrap();
        let params = spec.layer_params(0);
        let shape = |name: &str| params.iter().find(|p| p.name.ends_with(name)).map(|p| p.shape.clone());
        assert_eq!(shape("mlp.router.bias"), Some(vec![8]));
        assert_eq!(shape("mlp.experts.7.gate_proj.bias"), Some(vec![32]));
        assert_eq!(shape("mlp.experts.7.down_proj.bias"), Some(vec![64]));
        assert_eq!(shape("self_attn.o_proj.bias"), Some(vec![64]));
        assert_eq!(shape("self_attn.sinks"), Some(vec![4]));
        let windows: Vec<_> = spec.layers.iter().map(|l| l.window).collect();
        assert_eq!(windows, [Some(128), None, Some(128), None]);
        assert!(spec.ropes[0].attention_factor > 1.3);
        let plain = read(
            "gpt_oss",
            json!({"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}),
        )
        .unwrap();
        assert_eq!(plain.ropes[0].attention_factor, 1.0);
    }

    /// transformers gives each family of Qwen other layers with windows.
    #[test]
    fn the_layers_of_qwen_with_windows() {
        let on = json!({"use_sliding_window": true, "sliding_window": 7, "max_window_layers": 3});
        let windows = |model_type| -> Vec<_> {
            let mut changes = on.clone();
            if model_type == "qwen3_moe_smile" {
                changes["router_groups"] = json!(4);
            }
            let spec = read(model_type, changes).unwrap();
            spec.layers.iter().map(|l| l.window).collect()
        };
        assert_eq!(windows("qwen2_moe"), [Some(7), None, Some(7), None]);
        assert_eq!(windows("qwen3_moe"), [Some(7); 4]);
        assert_eq!(windows("qwen3_moe_smile"), [Some(7); 4]);
        let first = |first| {
            let spec = read(
                "qwen2_moe",
                json!({"use_sliding_window": true, "max_window_layers": first}),
            )
            .unwrap();
            spec.layers.iter().map(|l| l.window).collect::<Vec<_>>()
        };
        assert_eq!(first(0), [None; 4]);
        assert_eq!(first(28), [Some(4096), None, Some(4096), None]);
    }

    #[test]
    fn a_shared_expert_of_granite_has_gate_and_up_in_one_linear() {
        let spec = read(
            "granitemoeshared",
            json!({"num_local_experts": 8, "num_experts": null, "shared_intermediate_size": 20}),
        )
        .unwrap();
        let params = spec.layer_params(0);
        let shape = |name: &str| params.iter().find(|p| p.name.ends_with(name)).map(|p| p.shape.clone());
        assert_eq!(shape("shared_mlp.input_linear.weight"), Some(vec![40, 64]));
        assert_eq!(shape("shared_mlp.output_linear.weight"), Some(vec![64, 20]));
        let without = read(
            "granitemoeshared",
            json!({"num_local_experts": 8, "num_experts": null, "shared_intermediate_size": 0}),
        )
        .unwrap();
        assert!(without.layer_params(0).iter().all(|p| !p.name.contains("shared_mlp")));
    }

    /// Its files have no size of dense layers.
    #[test]
    fn qwen3_5_with_experts_needs_no_intermediate_size() {
        let spec = read(
            "qwen3_5_moe_text",
            json!({"intermediate_size": null, "moe_intermediate_size": 32}),
        )
        .unwrap();
        assert_eq!(sparse(&spec), [0, 1, 2, 3]);
        let router = spec.layers[0].experts.unwrap().router;
        assert!(router.renormalize && router.top_k == 2);
    }

    #[test]
    fn adapters_are_placed_on_attention() {
        let sites = read("qwen2_moe", json!({"mlp_only_layers": [0]})).unwrap().sites();
        assert_eq!(sites.len(), 4 * 4);
        assert!(sites.iter().all(|site| site.module.contains(".self_attn.")));
    }

    #[test]
    fn other_options_are_refused_by_name() {
        for (model_type, changes, name) in [
            ("qwen3_moe", json!({"num_experts_per_tok": 9}), "num_experts_per_tok"),
            ("qwen3_moe", json!({"num_experts": 16_385}), "65540"),
            ("qwen3_moe", json!({"decoder_sparse_step": 0}), "decoder_sparse_step"),
            ("qwen3_moe", json!({"mlp_only_layers": "0"}), "mlp_only_layers"),
            (
                "qwen3_moe",
                json!({"moe_intermediate_size": 0}),
                "moe_intermediate_size",
            ),
            ("mixtral", json!({"router_jitter_noise": 0.1}), "router_jitter_noise"),
            (
                "qwen2_moe",
                json!({"layer_types": vec!["sliding_attention"; 4]}),
                "layer_types",
            ),
            (
                "ernie4_5_moe",
                json!({"moe_num_experts": 8, "num_experts": null, "use_bias": true}),
                "use_bias",
            ),
            (
                "ernie4_5_moe",
                json!({"moe_num_experts": 8, "num_experts": null, "moe_norm_min": 0.1}),
                "moe_norm_min",
            ),
            (
                "ernie4_5_moe",
                json!({"moe_k": 9, "moe_num_experts": 8, "num_experts": null}),
                "num_experts_per_tok",
            ),
            ("gpt_oss", json!({"swiglu_limit": 0.0}), "swiglu_limit"),
            ("gpt_oss", json!({"swiglu_alpha": -1.0}), "swiglu_alpha"),
            ("gpt_oss", json!({"num_experts_per_tok": 9}), "num_experts_per_tok"),
            ("gpt_oss", json!({"sliding_window": null}), "sliding_window"),
            ("granitemoe", json!({"logits_scaling": 0.0}), "logits_scaling"),
            (
                "qwen3_5_moe_text",
                json!({"attn_output_gate": false}),
                "attn_output_gate",
            ),
            ("olmoe", json!({"clip_qkv": 8.0}), "clip_qkv"),
            (
                "dots1",
                json!({"n_shared_experts": 1, "scoring_func": "softmax"}),
                "scoring_func",
            ),
            ("dots1", json!({}), "n_shared_experts"),
            ("solar_open", json!({"use_qk_norm": true}), "use_qk_norm"),
            (
                "solar_open",
                json!({"first_k_dense_replace": 1}),
                "first_k_dense_replace",
            ),
            (
                "hunyuan_v1_moe",
                json!({"num_experts_per_tok": [1, 2, 1, 2]}),
                "num_experts_per_tok",
            ),
            ("minimax_m2", json!({"router_jitter_noise": 0.1}), "router_jitter_noise"),
            ("mellum", json!({"mlp_only_layers": [1]}), "mlp_only_layers"),
            ("mellum", json!({"mlp_layer_types": ["dense"]}), "mlp_layer_types"),
            ("glm4_moe", json!({"n_group": 3}), "num_experts_per_tok"),
            (
                "glm4_moe",
                json!({"n_group": 4, "topk_group": 5}),
                "num_experts_per_tok",
            ),
        ] {
            let e = read(model_type, changes).unwrap_err().to_string();
            assert!(e.contains(name), "{name}: {e}");
        }
    }
}
