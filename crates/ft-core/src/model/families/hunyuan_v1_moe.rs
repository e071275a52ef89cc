//! Hunyuan with experts: the attention of the dense models; experts and a shared expert in every layer.

use super::experts::{check, size, softmax};
use super::{Config, ExpertsSpec, Result, SharedExpertSpec, Spec};
use crate::model::spec::ExpertNames;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::hunyuan_v1_dense::apply(config, spec)?;
    // transformers writes the number of experts of a token under either name. Lists by layer are an error of `size`.
    let top_k = if config.raw.contains_key("num_experts_per_tok") {
        "num_experts_per_tok"
    } else {
        "moe_topk"
    };
    let count = if config.raw.contains_key("num_local_experts") {
        "num_local_experts"
    } else {
        "num_experts"
    };
    let experts = ExpertsSpec {
        count: size(config, count, 1)?,
        intermediate: spec.intermediate,
        router: softmax(size(config, top_k, 1)?, true),
        correction: false,
        bias: false,
        shared: Some(SharedExpertSpec {
            intermediate: spec.intermediate,
            names: [
                "mlp.shared_mlp.gate_proj",
                "mlp.shared_mlp.up_proj",
                "mlp.shared_mlp.down_proj",
            ],
            gate: None,
        }),
        names: ExpertNames::HUNYUAN,
    };
    for layer in &mut spec.layers {
        layer.experts = Some(experts);
    }
    check(config, &experts)
}
