//! GLM-4.5: rotation of half a head, optional norms of q and k; after the first layers experts with sigmoid scores, groups, a
//! correction of the scores, and shared experts.

use super::experts::{check, size};
use super::{Config, ExpertsSpec, QkNorm, Result, SharedExpertSpec, Spec};
use crate::model::spec::ExpertNames;
use crate::ops::routing::{ExpertGroups, GroupScore, RouterSpec, Score};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    spec.qkv_bias = config.bool_or("attention_bias", false)?;
    if config.bool_or("use_qk_norm", false)? {
        spec.qk_norm = Some(QkNorm::HEADS);
    }
    spec.ropes = vec![super::partial_rope(config, spec, 10_000.0, 0.5)?];
    let experts = experts(config, 1408)?;
    let dense = config.opt_usize0("first_k_dense_replace")?.unwrap_or(1);
    for layer in spec.layers.iter_mut().skip(dense) {
        layer.experts = Some(experts);
    }
    check(config, &experts)
}

/// The experts of GLM-4.5; `width`: the default of their size.
pub(super) fn experts(config: &Config, width: usize) -> Result<ExpertsSpec> {
    let intermediate = size(config, "moe_intermediate_size", width)?;
    Ok(ExpertsSpec {
        count: size(config, "n_routed_experts", 128)?,
        intermediate,
        router: RouterSpec {
            score: Score::Sigmoid,
            top_k: size(config, "num_experts_per_tok", 8)?,
            renormalize: config.bool_or("norm_topk_prob", true)?,
            scale: super::factor(config, "routed_scaling_factor", 1.0)?,
            groups: Some(ExpertGroups {
                count: size(config, "n_group", 1)?,
                chosen: size(config, "topk_group", 1)?,
                score: GroupScore::TwoLargest,
            }),
        },
        correction: true,
        bias: false,
        shared: Some(SharedExpertSpec {
            intermediate: intermediate * size(config, "n_shared_experts", 1)?,
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
