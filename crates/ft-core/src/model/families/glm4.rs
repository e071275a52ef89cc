//! GLM-4 (0414): norms before and after each half, neighboring elements of half a head are rotated, one projection for
//! gate and up.

use super::{Config, NormNames, Result, Spec};
use crate::ops::rope::RopePairing;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norms = NormNames::SANDWICH_GLM4;
    spec.pairing = RopePairing::Neighbors;
    spec.fused_gate_up = Some(super::GATE_UP);
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1.5625e-7);
    spec.qkv_bias = config.bool_or("attention_bias", true)?;
    super::default_head_dim(config, spec, 128)?;
    if !config.raw.contains_key("num_key_value_heads") {
        spec.kv_heads = 2;
    }
    spec.ropes = vec![super::partial_rope(config, spec, 10_000.0, 0.5)?];
    Ok(())
}
