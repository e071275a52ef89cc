//! OLMo 2: norms after each half, norms of q and k over all heads.

use super::{Config, NormNames, QkNorm, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    shared(config, spec)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}

/// Options that OLMo 2 and 3 share.
pub(super) fn shared(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norms = NormNames::AFTER;
    spec.qk_norm = Some(QkNorm::WHOLE);
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    super::attention_biases(config, spec, false)
}
