//! HyperCLOVA X SEED: Granite with norms after each half too; the logits are multiplied by their factor.

use super::{Config, NormNames, Result, Spec, place};
use crate::base::Error;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::granite::apply(config, spec)?;
    spec.logit_scale = super::factor(config, "logits_scaling", 1.0)?;
    if config.opt_f64("attention_multiplier")?.is_none() {
        spec.attention_scale = 1.0 / (spec.head_dim as f32).sqrt();
    }
    if config.bool_or("use_post_norm", true)? {
        if spec.residual_scale != 1.0 {
            return Err(
                Error::unsupported("a factor after the norm of attention or MLP is not supported")
                    .at(place(config, "residual_multiplier"))
                    .found(spec.residual_scale)
                    .expected("1 if `use_post_norm` is true"),
            );
        }
        spec.norms = NormNames {
            after_attention: Some("post_norm1"),
            after_mlp: Some("post_norm2"),
            ..NormNames::BEFORE
        };
    }
    Ok(())
}
