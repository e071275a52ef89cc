//! Jais 2: LayerNorms, biases on all linears, an MLP without a gate whose activation is the square of ReLU.

use super::{Config, LayerNormParams, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::layer_norms(config, spec, "layer_norm_eps", LayerNormParams::BOTH)?;
    spec.plain_mlp = Some(["mlp.up_proj", "mlp.down_proj"]);
    spec.activation = super::activation(config, "hidden_act", "relu2")?;
    super::attention_biases(config, spec, true)?;
    spec.mlp_bias = config.bool_or("mlp_bias", true)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}
