//! Granite 3 with experts: Granite with experts in every layer.

use super::experts::{check, size, softmax};
use super::{Config, ExpertsSpec, Result, Spec};
use crate::model::spec::ExpertNames;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::granite::apply(config, spec)?;
    // transformers has no biases of experts.
    spec.mlp_bias = false;
    let experts = ExpertsSpec {
        count: size(config, "num_local_experts", 8)?,
        intermediate: spec.intermediate,
        // A softmax over the chosen logits is the softmax over all, renormalized.
        router: softmax(size(config, "num_experts_per_tok", 2)?, true),
        correction: false,
        bias: false,
        shared: None,
        names: ExpertNames::GRANITE,
    };
    for layer in &mut spec.layers {
        layer.experts = Some(experts);
    }
    check(config, &experts)
}
