//! Phi-3, Phi-3.5 and Phi-4: one projection for q, k, v, one for gate and up; optional window in every layer; LongRoPE.

use super::{Config, Result, Spec};
use serde_json::json;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    (spec.fused_qkv, spec.fused_gate_up) = (true, Some(super::GATE_UP));
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    let window = config.opt_usize("sliding_window")?;
    for layer in &mut spec.layers {
        layer.window = window;
    }
    let mut parameters = super::rope_parameters(config, None, 10_000.0)?;
    let kind = parameters.get("rope_type").or_else(|| parameters.get("type"));
    // Old configs call LongRoPE `su` or `yarn`.
    if kind.is_some_and(|kind| kind == "su" || kind == "yarn") {
        parameters.insert("rope_type".into(), json!("longrope"));
    }
    let original = parameters.entry("original_max_position_embeddings");
    original.or_insert(json!(4096));
    spec.ropes = vec![super::rope_of(config, spec, &parameters)?];
    Ok(())
}
