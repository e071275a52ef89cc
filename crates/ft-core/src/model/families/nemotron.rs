//! Nemotron 3 and 4, Minitron: LayerNorms that multiply by 1 + w, an MLP without a gate whose activation is the square of
//! ReLU, rotation of half a head.

use super::{Config, LayerNormParams, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::layer_norms(config, spec, "norm_eps", LayerNormParams::BOTH)?;
    spec.norm_plus_one = true;
    spec.plain_mlp = Some(["mlp.up_proj", "mlp.down_proj"]);
    spec.activation = super::activation(config, "hidden_act", "relu2")?;
    super::attention_biases(config, spec, false)?;
    spec.mlp_bias = config.bool_or("mlp_bias", false)?;
    spec.ropes = vec![super::partial_rope(config, spec, 10_000.0, 0.5)?];
    Ok(())
}
