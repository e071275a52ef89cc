//! Helium: Llama that rotates neighboring elements; the output projection never has a bias.

use super::{Config, Result, Spec};
use crate::base::Error;
use crate::ops::rope::RopePairing;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.pairing = RopePairing::Neighbors;
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-8);
    super::default_head_dim(config, spec, 128)?;
    if spec.heads.checked_mul(spec.head_dim) != Some(spec.hidden) {
        return Err(Error::format("the heads together must have the hidden size")
            .at(config.path.display())
            .found(format!("{} heads of {}", spec.heads, spec.head_dim))
            .expected(spec.hidden));
    }
    spec.qkv_bias = config.bool_or("attention_bias", false)?;
    spec.mlp_bias = config.bool_or("mlp_bias", false)?;
    spec.ropes = vec![super::rope(config, spec, 100_000.0)?];
    Ok(())
}
