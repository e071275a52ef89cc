//! InternLM 3 and IQuest-Coder: Llama with heads of 128 elements unless the config says otherwise.

use super::{Config, Result, Spec, place};
use crate::base::Error;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    // Published configs have the names of the first release.
    let bias = |new: &str, old: &str| config.bool_or(if config.raw.contains_key(new) { new } else { old }, false);
    let (attention, mlp) = (bias("attention_bias", "qkv_bias")?, bias("mlp_bias", "bias")?);
    if attention != mlp {
        return Err(
            Error::unsupported("biases on some of the linear layers are not supported")
                .at(place(config, "qkv_bias"))
                .found(attention)
                .expected(format!("the value of `bias`: {mlp}"))
                .hint("transformers refuses it too"),
        );
    }
    if !config.raw.contains_key("num_key_value_heads") {
        spec.kv_heads = 2;
    }
    shared(config, spec, attention, mlp)
}

/// IQuest-Coder.
pub(super) fn apply_iquest(config: &Config, spec: &mut Spec) -> Result<()> {
    if config.bool_or("use_sliding_window", false)? {
        return Err(Error::unsupported("sliding windows are not supported in this family")
            .at(place(config, "use_sliding_window"))
            .hint("transformers refuses them too"));
    }
    if !config.raw.contains_key("num_key_value_heads") {
        spec.kv_heads = 8;
    }
    let (attention, mlp) = (
        config.bool_or("attention_bias", false)?,
        config.bool_or("mlp_bias", false)?,
    );
    shared(config, spec, attention, mlp)
}

/// `attention`, `mlp`: whether their linears have biases.
fn shared(config: &Config, spec: &mut Spec, attention: bool, mlp: bool) -> Result<()> {
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    super::default_head_dim(config, spec, 128)?;
    (spec.qkv_bias, spec.o_bias, spec.mlp_bias) = (attention, attention, mlp);
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}
