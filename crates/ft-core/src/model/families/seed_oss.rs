//! Seed-OSS: Llama with biases on q, k and v.

use super::{Config, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.qkv_bias = config.bool_or("attention_bias", true)?;
    spec.o_bias = config.bool_or("attention_out_bias", false)?;
    spec.mlp_bias = config.bool_or("mlp_bias", false)?;
    super::default_head_dim(config, spec, 128)?;
    if !config.raw.contains_key("num_key_value_heads") {
        spec.kv_heads = 8;
    }
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}
