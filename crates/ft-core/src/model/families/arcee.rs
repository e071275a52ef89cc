//! Arcee (AFM): Llama whose MLP has no gate; its activation is the square of ReLU.

use super::{Config, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    spec.plain_mlp = Some(["mlp.up_proj", "mlp.down_proj"]);
    spec.activation = super::activation(config, "hidden_act", "relu2")?;
    super::attention_biases(config, spec, false)?;
    spec.mlp_bias = config.bool_or("mlp_bias", false)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}
