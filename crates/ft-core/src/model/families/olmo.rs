//! OLMo (1): Llama with LayerNorms without parameters.

use super::{Config, LayerNormParams, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.layer_norm = Some(LayerNormParams {
        weight: false,
        bias: false,
    });
    spec.norm_eps = 1e-5;
    super::attention_biases(config, spec, false)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}
