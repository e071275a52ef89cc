//! DeepSeek-V2 and -V3, Kimi-K2 (V3 under another name), and GLM-4.7-Flash: latent attention; after the first layers experts with groups and shared experts.

use super::experts::{check, size};
use super::{Config, ExpertsSpec, Result, SharedExpertSpec, Spec, place};
use crate::base::Error;
use crate::model::spec::{ExpertNames, LatentSpec};
use crate::ops::rope::RopePairing;
use crate::ops::routing::{ExpertGroups, GroupScore, RouterSpec, Score};
use serde_json::Value;

/// The sizes of DeepSeek-V2 and -V3.
const SIZES: LatentSpec = LatentSpec {
    q_rank: Some(1536),
    kv_rank: 512,
    plain: 128,
    rotary: 64,
    value: 128,
};

/// `deepseek_v2`: softmax scores, optionally the best groups only.
pub(super) fn apply_v2(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.pairing = RopePairing::Neighbors;
    spec.mlp_bias = config.bool_or("mlp_bias", false)?;
    super::latent::apply(config, spec, SIZES)?;
    only(config, "scoring_func", &["softmax"])?;
    if config.bool_or("norm_topk_prob", false)? {
        return Err(Error::unsupported("`norm_topk_prob` is not supported in deepseek_v2")
            .at(place(config, "norm_topk_prob"))
            .found(true)
            .hint("remove it from `config.json`: transformers does not apply it in this family"));
    }
    let groups = match config.opt_str("topk_method")?.unwrap_or("greedy") {
        "greedy" => None,
        "group_limited_greedy" => Some(groups(config, GroupScore::Largest, None)?),
        other => {
            return Err(Error::unsupported("this choice of experts is not supported")
                .at(place(config, "topk_method"))
                .found(other)
                .expected("greedy or group_limited_greedy"));
        }
    };
    let router = RouterSpec {
        score: Score::Softmax,
        top_k: size(config, "num_experts_per_tok", 0)?,
        renormalize: false,
        scale: super::factor(config, "routed_scaling_factor", 1.0)?,
        groups,
    };
    let experts = experts(config, router, [64, 1407, 2])?;
    after_first(config, spec, experts, 0)
}

/// `deepseek_v3`: sigmoid scores with a correction.
pub(super) fn apply_v3(config: &Config, spec: &mut Spec) -> Result<()> {
    let router = sigmoid(config, spec, SIZES, RouterDefaults::new([8, 4], 8, 2.5))?;
    let experts = experts(config, router, [256, 2048, 1])?;
    after_first(config, spec, experts, 3)
}

/// `glm4_moe_lite`: as DeepSeek-V3; a list says which layers have experts.
pub(super) fn apply_glm(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    let sizes = LatentSpec {
        q_rank: Some(768),
        plain: 192,
        value: 256,
        ..SIZES
    };
    let router = sigmoid(config, spec, sizes, RouterDefaults::new([1, 1], 4, 1.8))?;
    let experts = experts(config, router, [64, 1536, 1])?;
    if config.get("mlp_layer_types").is_none_or(Value::is_null)
        && config
            .opt_usize0("first_k_dense_replace")?
            .is_some_and(|first| first != 1)
    {
        return Err(
            Error::unsupported("`first_k_dense_replace` is not supported in glm4_moe_lite")
                .at(place(config, "first_k_dense_replace"))
                .hint("remove it: transformers reads `mlp_layer_types`, whose default is 1 dense layer"),
        );
    }
    super::experts::of_list(config, spec, experts, |l| l > 0)
}

/// `dots1`: the experts of DeepSeek-V3, in groups or not.
pub(super) fn apply_dots(config: &Config, spec: &mut Spec) -> Result<()> {
    only(config, "scoring_func", &["sigmoid", "noaux_tc"])?;
    let router = RouterSpec {
        renormalize: config.bool_or("norm_topk_prob", false)?,
        ..chosen(config, RouterDefaults::new([1, 1], 0, 1.0))?
    };
    let experts = experts(config, router, [0, 1408, 0])?;
    after_first(config, spec, experts, 0)
}

/// The values of the keys of a router that a config leaves out.
struct RouterDefaults {
    /// Groups of experts, and groups that a token may use.
    groups: [usize; 2],
    /// Experts of a token.
    top_k: usize,
    /// The factor of their outputs.
    scale: f64,
}

impl RouterDefaults {
    fn new(groups: [usize; 2], top_k: usize, scale: f64) -> Self {
        Self { groups, top_k, scale }
    }
}

/// The options of DeepSeek-V3 and its successors.
fn sigmoid(config: &Config, spec: &mut Spec, sizes: LatentSpec, defaults: RouterDefaults) -> Result<RouterSpec> {
    if config.bool_or("rope_interleave", true)? {
        spec.pairing = RopePairing::Neighbors;
    }
    super::latent::apply(config, spec, sizes)?;
    only(config, "scoring_func", &["sigmoid"])?;
    chosen(config, defaults)
}

/// The router of sigmoid scores with their correction.
fn chosen(config: &Config, defaults: RouterDefaults) -> Result<RouterSpec> {
    only(config, "topk_method", &["noaux_tc"])?;
    Ok(RouterSpec {
        score: Score::Sigmoid,
        top_k: size(config, "num_experts_per_tok", defaults.top_k)?,
        renormalize: config.bool_or("norm_topk_prob", true)?,
        scale: super::factor(config, "routed_scaling_factor", defaults.scale)?,
        groups: Some(groups(config, GroupScore::TwoLargest, Some(defaults.groups))?),
    })
}

fn groups(config: &Config, score: GroupScore, defaults: Option<[usize; 2]>) -> Result<ExpertGroups> {
    let [count, chosen] = defaults.unwrap_or([0, 0]);
    Ok(ExpertGroups {
        count: size(config, "n_group", count)?,
        chosen: size(config, "topk_group", chosen)?,
        score,
    })
}

/// The experts with this router. The defaults: their number, their size, the number of shared ones.
fn experts(config: &Config, router: RouterSpec, [count, width, shared]: [usize; 3]) -> Result<ExpertsSpec> {
    let intermediate = size(config, "moe_intermediate_size", width)?;
    Ok(ExpertsSpec {
        count: size(config, "n_routed_experts", count)?,
        intermediate,
        correction: router.score == Score::Sigmoid,
        router,
        bias: false,
        shared: Some(SharedExpertSpec {
            intermediate: intermediate * size(config, "n_shared_experts", shared)?,
            names: [
                "mlp.shared_experts.gate_proj",
                "mlp.shared_experts.up_proj",
                "mlp.shared_experts.down_proj",
            ],
            gate: None,
        }),
        names: ExpertNames::MLP,
    })
}

/// Gives experts to all layers but the first `first_k_dense_replace`.
fn after_first(config: &Config, spec: &mut Spec, experts: ExpertsSpec, default: usize) -> Result<()> {
    if config.opt_usize0("moe_layer_freq")?.is_some_and(|n| n != 1) {
        return Err(Error::unsupported("`moe_layer_freq` is not supported")
            .at(place(config, "moe_layer_freq"))
            .expected(1)
            .hint("remove it from `config.json`: transformers does not apply it in this family"));
    }
    let dense = config.opt_usize0("first_k_dense_replace")?.unwrap_or(default);
    after(spec, experts, dense, config)
}

fn after(spec: &mut Spec, experts: ExpertsSpec, dense: usize, config: &Config) -> Result<()> {
    for layer in spec.layers.iter_mut().skip(dense) {
        layer.experts = Some(experts);
    }
    check(config, &experts)
}

/// Refuses other values of an option of the files that transformers does not read.
fn only(config: &Config, key: &str, values: &[&str]) -> Result<()> {
    match config.opt_str(key)? {
        Some(other) if !values.contains(&other) => Err(Error::unsupported(format!("this `{key}` is not supported"))
            .at(place(config, key))
            .found(other)
            .expected(values.join(" or "))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;
    use crate::model::spec::Mixer;
    use std::path::Path;

    /// DeepSeek-V2-Lite, with the changes of a test.
    fn read(changes: Value) -> Result<Spec> {
        let mut config = serde_json::json!({
            "model_type": "deepseek_v2", "vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944,
            "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": null,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
            "moe_layer_freq": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": false,
            "rope_theta": 10_000, "rope_scaling": {
                "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096}});
        let map = config.as_object_mut().unwrap();
        map.extend(changes.as_object().unwrap().clone());
        families::read(&Config::from_map(map.clone(), Path::new("config.json")))
    }

    #[test]
    fn the_parameters_of_deepseek_v2_lite() {
        let spec = read(serde_json::json!({})).unwrap();
        let count: usize = spec.params().iter().map(crate::source::ParamInfo::elements).sum();
        assert_eq!(count, 15_706_484_224);
        let sparse = spec.layers.iter().filter(|l| l.experts.is_some()).count();
        assert_eq!((sparse, spec.head_dim), (26, 192));
        // 192^-0.5 times the square of 1 + 0.0707 ln 40; cos and sin have no factor.
        let wanted = 192f64.powf(-0.5) * (1.0 + 0.0707 * 40f64.ln()).powi(2);
        assert!((f64::from(spec.attention_scale) - wanted).abs() < 1e-7);
        assert_eq!(spec.ropes[0].attention_factor, 1.0);
        assert_eq!(spec.ropes[0].inv_freq.len(), 32);
        assert!(spec.runs_on(true).is_ok());
        let names: Vec<&str> = spec.linears(1).iter().map(|l| l.name).collect();
        let of_attention = ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"];
        assert_eq!(names[..4], of_attention.map(|n| format!("self_attn.{n}")));
        assert_eq!(spec.sites().len(), 27 * 4);
    }

    /// The sizes of Kimi-K2: a trillion parameters.
    #[test]
    fn kimi_k2_is_deepseek_v3() {
        let read = |model_type: &str| {
            read(serde_json::json!({
                "model_type": model_type, "vocab_size": 163_840, "hidden_size": 7168, "intermediate_size": 18_432,
                "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
                "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
                "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": true,
                "routed_scaling_factor": 2.827, "rope_theta": 50_000, "rope_scaling": {
                    "type": "yarn", "factor": 32, "beta_fast": 1, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 4096}}))
            .unwrap()
        };
        let (kimi, deepseek) = (read("kimi_k2"), read("deepseek_v3"));
        assert_eq!(format!("{kimi:?}"), format!("{deepseek:?}"));
        let count: usize = kimi.params().iter().map(crate::source::ParamInfo::elements).sum();
        assert_eq!(count, 1_026_408_232_448);
        let experts = kimi.layers[1].experts.unwrap();
        assert_eq!(
            (kimi.layers[0].experts, experts.count, experts.router.top_k),
            (None, 384, 8)
        );
    }

    #[test]
    fn sizes_that_a_config_leaves_out_are_those_of_transformers() {
        let all: Vec<&str> = vec!["q_lora_rank", "qk_nope_head_dim", "v_head_dim", "n_shared_experts"];
        let spec = |model_type: &str| {
            let mut config = serde_json::json!({
                "model_type": model_type, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 4, "num_attention_heads": 4, "num_experts_per_tok": 2});
            let map = config.as_object_mut().unwrap();
            all.iter().for_each(|key| assert!(!map.contains_key(*key)));
            families::read(&Config::from_map(map.clone(), Path::new("config.json"))).unwrap()
        };
        for (model_type, q_rank, kv_rank, heads, sparse) in [
            ("deepseek_v2", 1536, 512, [128, 64, 128], 4),
            ("deepseek_v3", 1536, 512, [128, 64, 128], 1),
            ("glm4_moe_lite", 768, 512, [192, 64, 256], 3),
            ("minicpm3", 768, 256, [64, 32, 16], 0),
            ("youtu", 1536, 512, [128, 64, 128], 0),
        ] {
            let spec = spec(model_type);
            let [plain, rotary, value] = heads;
            let sizes = LatentSpec {
                q_rank: Some(q_rank),
                kv_rank,
                plain,
                rotary,
                value,
            };
            assert_eq!(spec.layers[0].mixer, Mixer::Latent(sizes), "{model_type}");
            let with_experts = spec.layers.iter().filter(|l| l.experts.is_some()).count();
            assert_eq!(with_experts, sparse, "{model_type}");
            assert_eq!(spec.tied, ["minicpm3", "youtu"].contains(&model_type));
        }
    }

    #[test]
    fn other_options_are_refused_by_name() {
        let v3 = |changes: Value| {
            let mut all =
                serde_json::json!({"model_type": "deepseek_v3", "scoring_func": "sigmoid", "topk_method": "noaux_tc"});
            all.as_object_mut()
                .unwrap()
                .extend(changes.as_object().unwrap().clone());
            all
        };
        let glm = |changes: Value| {
            let mut all = v3(changes);
            all["model_type"] = "glm4_moe_lite".into();
            all
        };
        use serde_json::json;
        for (changes, word) in [
            (json!({"topk_method": "noaux_tc"}), "topk_method"),
            (json!({"scoring_func": "sigmoid"}), "scoring_func"),
            (json!({"norm_topk_prob": true}), "norm_topk_prob"),
            (json!({"moe_layer_freq": 2}), "moe_layer_freq"),
            (json!({"num_key_value_heads": 4}), "num_key_value_heads"),
            (json!({"topk_method": "group_limited_greedy"}), "n_group"),
            (
                json!({"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}),
                "num_experts_per_tok",
            ),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
            (json!({"qk_rope_head_dim": 0}), "qk_rope_head_dim"),
            (json!({"qk_rope_head_dim": 63}), "rotary"),
            (json!({"kv_lora_rank": 0}), "kv_lora_rank"),
            (json!({"v_head_dim": 1u64 << 40}), "v_head_dim"),
            (v3(json!({"scoring_func": "softmax"})), "scoring_func"),
            (v3(json!({"topk_method": "greedy"})), "topk_method"),
            (glm(json!({"mlp_layer_types": ["dense"]})), "mlp_layer_types"),
            (glm(json!({"mlp_layer_types": vec!["wide"; 27]})), "mlp_layer_types"),
            (glm(json!({"first_k_dense_replace": 2})), "first_k_dense_replace"),
        ] {
            let found = read(changes.clone());
            let e = found
                .err()
                .map(|e| e.to_string())
                .unwrap_or_else(|| panic!("{changes} is accepted"));
            assert!(e.contains(word), "{word}: {e}");
        }
    }
}
