//! Granite 4.0 (dense): Granite 3 with gate and up in one matrix. Its checkpoints with experts or state-space layers are refused.

use super::{Config, Result, Spec};
use crate::base::Error;
use crate::model::rope::Rope;
use serde_json::{Value, json};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    let refused = |key: &str, why: &str, found: &Value| {
        Err(
            Error::unsupported(format!("model type `granitemoehybrid` is supported only without {why}"))
                .at(super::place(config, key))
                .found(found),
        )
    };
    let types = config.get("layer_types").or_else(|| config.get("layers_block_type"));
    let attends = |kind: &Value| kind == "attention" || kind == "full_attention";
    match types {
        Some(Value::Array(list)) if list.len() == spec.layers.len() && list.iter().all(attends) => {}
        // Without the key all layers are of the other kind.
        types => return refused("layer_types", "state-space layers", types.unwrap_or(&Value::Null)),
    }
    match config.get("num_local_experts") {
        Some(number) if number == &json!(0) => {}
        number => return refused("num_local_experts", "experts", number.unwrap_or(&json!(8))),
    }
    super::granite::apply(config, spec)?;
    // transformers has no biases of the MLP.
    spec.mlp_bias = false;
    spec.intermediate = config.opt_usize("shared_intermediate_size")?.unwrap_or(1024);
    spec.fused_gate_up = Some(["shared_mlp.input_linear", "shared_mlp.output_linear"]);
    match config.opt_str("position_embedding_type")? {
        Some("rope") => {}
        None => spec.ropes = vec![Rope::none()],
        Some(other) => return refused("position_embedding_type", "other positions", &json!(other)),
    }
    Ok(())
}
