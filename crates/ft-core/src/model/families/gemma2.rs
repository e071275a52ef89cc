//! Gemma 2: soft caps, norms before and after each half, sliding windows in every second layer.

use super::{Config, NormNames, Result, Spec};
use crate::base::Error;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    shared(config, spec)?;
    spec.attention_softcap = softcap(config, "attn_logit_softcapping", Some(50.0))?;
    spec.logit_softcap = softcap(config, "final_logit_softcapping", Some(30.0))?;
    let window = config.opt_usize("sliding_window")?.or(Some(4096));
    super::windows(config, spec, window, |l| l % 2 == 0)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}

/// Options that Gemma 2 and 3 share.
pub(super) fn shared(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norm_plus_one = true;
    spec.norms = NormNames::SANDWICH;
    spec.tied = config.bool_or("tie_word_embeddings", true)?;
    spec.activation = super::activation(config, "hidden_activation", "gelu_pytorch_tanh")?;
    spec.embedding_scale = (spec.hidden as f32).sqrt();
    spec.embedding_scale_rounded = true;
    if config.opt_usize("head_dim")?.is_none() {
        spec.head_dim = 256;
    }
    let scalar = config.opt_f64("query_pre_attn_scalar")?.unwrap_or(256.0);
    if scalar <= 0.0 {
        return Err(Error::format("`query_pre_attn_scalar` must be positive")
            .at(config.path.display())
            .found(scalar));
    }
    spec.attention_scale = scalar.powf(-0.5) as f32;
    super::attention_biases(config, spec, false)
}

/// Reads a soft cap; null disables it.
pub(super) fn softcap(config: &Config, key: &str, default: Option<f32>) -> Result<Option<f32>> {
    if !config.raw.contains_key(key) {
        return Ok(default);
    }
    match config.opt_f64(key)? {
        Some(cap) if cap <= 0.0 => Err(Error::format(format!("`{key}` must be positive or null"))
            .at(config.path.display())
            .found(cap)),
        cap => Ok(cap.map(|c| c as f32)),
    }
}
