//! ERNIE 4.5 (dense): Llama that rotates neighboring elements; optional biases on all linears.

use super::{Config, Result, Spec};
use crate::ops::rope::RopePairing;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.pairing = RopePairing::Neighbors;
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    spec.tied = config.bool_or("tie_word_embeddings", true)?;
    let bias = config.bool_or("use_bias", false)?;
    (spec.qkv_bias, spec.o_bias, spec.mlp_bias) = (bias, bias, bias);
    super::default_head_dim(config, spec, 128)?;
    if !config.raw.contains_key("num_key_value_heads") {
        spec.kv_heads = 2;
    }
    spec.ropes = vec![super::rope(config, spec, 500_000.0)?];
    Ok(())
}
