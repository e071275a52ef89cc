//! Qwen3-MoE, Qwen2-MoE and Qwen3-VL-MoE: their dense families with experts in the place of MLPs. And a type of ft's own: Qwen3-MoE
//! with routers of two levels.

use super::experts::{of_layers, qwen_shared, size, softmax};
use super::{Config, ExpertsSpec, QkNorm, Result, Spec};
use crate::model::spec::ExpertNames;
use crate::ops::routing::{ExpertGroups, GroupScore, Score};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::qwen3::shared(config, spec)?;
    super::qwen2::sliding_everywhere(config, spec)?;
    let experts = experts(config, 128, 768, 8)?;
    of_layers(config, spec, experts)
}

/// Routers of two levels (SMILE, arXiv 2212.05191): the rows of the groups follow those of the experts.
pub(super) fn apply_smile(config: &Config, spec: &mut Spec) -> Result<()> {
    super::qwen3::shared(config, spec)?;
    super::qwen2::sliding_everywhere(config, spec)?;
    let mut experts = experts(config, 128, 768, 8)?;
    experts.router.score = Score::TwoLevel;
    experts.router.groups = Some(ExpertGroups {
        count: size(config, "router_groups", 8)?,
        chosen: size(config, "router_groups_per_token", 1)?,
        score: GroupScore::Sum,
    });
    of_layers(config, spec, experts)
}

/// Qwen2-MoE: biases on q, k and v; a shared expert whose output has a factor of its own.
pub(super) fn apply_2(config: &Config, spec: &mut Spec) -> Result<()> {
    super::qwen2::sliding_experts(config, spec)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    spec.qkv_bias = config.bool_or("qkv_bias", true)?;
    let experts = ExpertsSpec {
        shared: Some(qwen_shared(config, 5632)?),
        ..experts(config, 60, 1408, 4)?
    };
    of_layers(config, spec, experts)
}

/// The language model of Qwen3-VL with experts: the weights of the chosen ones always add up to 1.
pub(super) fn apply_vl(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.qk_norm = Some(QkNorm::HEADS);
    super::attention_biases(config, spec, false)?;
    spec.ropes = vec![super::rope(config, spec, 500_000.0)?];
    let mut experts = experts(config, 60, 1408, 4)?;
    experts.router.renormalize = true;
    of_layers(config, spec, experts)
}

/// Experts with the names and the keys of Qwen; with transformers' defaults of the family.
pub(super) fn experts(config: &Config, experts: usize, width: usize, top_k: usize) -> Result<ExpertsSpec> {
    // transformers 5 writes the number of experts under another name.
    let count = if config.raw.contains_key("num_local_experts") {
        "num_local_experts"
    } else {
        "num_experts"
    };
    Ok(ExpertsSpec {
        count: size(config, count, experts)?,
        intermediate: size(config, "moe_intermediate_size", width)?,
        router: softmax(
            size(config, "num_experts_per_tok", top_k)?,
            config.bool_or("norm_topk_prob", false)?,
        ),
        correction: false,
        bias: false,
        shared: None,
        names: ExpertNames::MLP,
    })
}
