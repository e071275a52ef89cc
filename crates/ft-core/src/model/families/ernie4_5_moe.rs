//! ERNIE 4.5 with experts: the attention of the dense models; experts with a correction of the scores, and a shared expert.

use super::experts::{check, size, softmax};
use super::{Config, ExpertsSpec, Result, SharedExpertSpec, Spec, place};
use crate::base::Error;
use crate::model::spec::ExpertNames;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::ernie4_5::apply(config, spec)?;
    if !config.raw.contains_key("num_key_value_heads") {
        spec.kv_heads = 4;
    }
    let head_dim = spec.hidden / spec.heads.max(1);
    super::default_head_dim(config, spec, head_dim)?;
    // Of that size.
    spec.ropes = vec![super::rope(config, spec, 500_000.0)?];
    if config.bool_or("use_bias", false)? {
        return Err(Error::unsupported("`use_bias` is not supported in ernie4_5_moe")
            .at(place(config, "use_bias"))
            .hint("it would need a bias of the LM head"));
    }
    let smallest = config.opt_f64("moe_norm_min")?.unwrap_or(1e-12);
    if smallest.is_nan() || smallest > 1e-9 {
        return Err(Error::unsupported(
            "`moe_norm_min` (a lower bound of the sum of routing weights) is not supported",
        )
        .at(place(config, "moe_norm_min"))
        .found(smallest)
        .expected("at most 1e-9"));
    }
    let intermediate = size(config, "moe_intermediate_size", 1536)?;
    let shared = config.opt_usize0("moe_num_shared_experts")?.unwrap_or(2);
    let experts = ExpertsSpec {
        count: size(config, "moe_num_experts", 64)?,
        intermediate,
        router: softmax(size(config, "moe_k", 6)?, true),
        correction: true,
        bias: false,
        shared: (shared > 0).then_some(SharedExpertSpec {
            intermediate: intermediate * shared.min(1 << 12),
            names: [
                "mlp.shared_experts.gate_proj",
                "mlp.shared_experts.up_proj",
                "mlp.shared_experts.down_proj",
            ],
            gate: None,
        }),
        names: ExpertNames::ERNIE,
    };
    let first = config.opt_usize0("moe_layer_start_index")?.unwrap_or(1);
    let interval = size(config, "moe_layer_interval", 1)?;
    // -1: the last layer.
    let last = match config.get("moe_layer_end_index").and_then(serde_json::Value::as_i64) {
        Some(last) if last >= 0 => last as usize,
        _ => spec.layers.len().saturating_sub(1),
    };
    for (l, layer) in spec.layers.iter_mut().enumerate() {
        let sparse = (l + 1).is_multiple_of(interval) && (first..=last).contains(&l);
        layer.experts = sparse.then_some(experts);
    }
    check(config, &experts)
}
