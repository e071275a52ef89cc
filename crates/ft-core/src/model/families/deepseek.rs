//! DeepSeek-V2 and -V3, and GLM-4.7-Flash: latent attention; after the first layers experts with groups and shared experts.

use super::experts::{check, size};
use super::{Config, ExpertsSpec, Result, SharedExpertSpec, Spec, place};
use crate::base::Error;
use crate::model::spec::{ExpertNames, LatentSpec};
use crate::ops::rope::Pairing;
use crate::ops::routing::{GroupScore, Groups, RouterSpec, Score};
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
pub fn apply_v2(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.pairing = Pairing::Neighbors;
    spec.mlp_bias = config.bool_or("mlp_bias", false)?;
    super::latent::apply(config, spec, SIZES)?;
    only(config, "scoring_func", &["softmax"])?;
    if config.bool_or("norm_topk_prob", false)? {
        return Err(Error::unsupported("`norm_topk_prob` is not supported in deepseek_v2")
            .at(place(config, "norm_topk_prob"))
            .found(true)
            .hint("transformers does not apply it in this family"));
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
pub fn apply_v3(config: &Config, spec: &mut Spec) -> Result<()> {
    let router = sigmoid(config, spec, SIZES, ([8, 4], 8, 2.5))?;
    let experts = experts(config, router, [256, 2048, 1])?;
    after_first(config, spec, experts, 3)
}

/// `glm4_moe_lite`: as DeepSeek-V3; a list says which layers have experts.
pub fn apply_glm(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    let sizes = LatentSpec {
        q_rank: Some(768),
        plain: 192,
        value: 256,
        ..SIZES
    };
    let router = sigmoid(config, spec, sizes, ([1, 1], 4, 1.8))?;
    let experts = experts(config, router, [64, 1536, 1])?;
    let list = match config.get("mlp_layer_types") {
        None | Some(Value::Null) => {
            if config.opt_usize0("first_k_dense_replace")?.is_some_and(|first| first != 1) {
                return Err(Error::unsupported("`first_k_dense_replace` is not supported in glm4_moe_lite")
                    .at(place(config, "first_k_dense_replace"))
                    .hint("transformers reads `mlp_layer_types`, whose default is 1 dense layer"));
            }
            return after(spec, experts, 1, config);
        }
        Some(Value::Array(list)) if list.len() == spec.layers.len() => list,
        Some(other) => {
            return Err(Error::format("`mlp_layer_types` must name every layer")
                .at(place(config, "mlp_layer_types"))
                .found(other)
                .expected(format!("{} entries", spec.layers.len())));
        }
    };
    for (layer, kind) in spec.layers.iter_mut().zip(list) {
        layer.experts = match kind.as_str() {
            Some("sparse") => Some(experts),
            Some("dense") => None,
            _ => {
                return Err(Error::unsupported("this kind of MLP is not supported")
                    .at(place(config, "mlp_layer_types"))
                    .found(kind)
                    .expected("dense or sparse"));
            }
        };
    }
    check(config, &experts)
}

/// What DeepSeek-V3 and its successors share. The defaults: groups and chosen groups, experts of a token, factor.
fn sigmoid(
    config: &Config,
    spec: &mut Spec,
    sizes: LatentSpec,
    (in_groups, top_k, scale): ([usize; 2], usize, f64),
) -> Result<RouterSpec> {
    if config.bool_or("rope_interleave", true)? {
        spec.pairing = Pairing::Neighbors;
    }
    super::latent::apply(config, spec, sizes)?;
    only(config, "scoring_func", &["sigmoid"])?;
    only(config, "topk_method", &["noaux_tc"])?;
    Ok(RouterSpec {
        score: Score::Sigmoid,
        top_k: size(config, "num_experts_per_tok", top_k)?,
        renormalize: config.bool_or("norm_topk_prob", true)?,
        scale: super::factor(config, "routed_scaling_factor", scale)?,
        groups: Some(groups(config, GroupScore::TwoLargest, Some(in_groups))?),
    })
}

fn groups(config: &Config, score: GroupScore, defaults: Option<[usize; 2]>) -> Result<Groups> {
    let [count, chosen] = defaults.unwrap_or([0, 0]);
    Ok(Groups {
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
            .hint("transformers does not apply it in this family"));
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
