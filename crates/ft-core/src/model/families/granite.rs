//! Granite 3: Llama with factors of the embedding, the scores, the residual stream and the logits.

use super::{Config, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::attention_biases(config, spec, false)?;
    spec.mlp_bias = config.bool_or("mlp_bias", false)?;
    spec.embedding_scale = super::factor(config, "embedding_multiplier", 1.0)?;
    spec.noise_scale = spec.embedding_scale;
    spec.residual_scale = super::factor(config, "residual_multiplier", 1.0)?;
    spec.attention_scale = super::factor(config, "attention_multiplier", 1.0)?;
    spec.logit_scale = 1.0 / super::factor(config, "logits_scaling", 1.0)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}
