//! Llama 1 to 3.x, SmolLM2 and other models of `model_type` llama.

use super::{Config, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::attention_biases(config, spec, false)?;
    spec.mlp_bias = config.bool_or("mlp_bias", false)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}
