//! Command R and R+: LayerNorms without bias, parallel halves with one norm, a factor of the logits; R+ has norms on q and
//! k.

use super::{Config, LayerNormParams, NormNames, QkNorm, Result, Spec};
use crate::ops::rope::RopePairing;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    shared(config, spec)?;
    if config.bool_or("use_qk_norm", false)? {
        spec.qk_norm = Some(QkNorm::OWN_WEIGHTS);
    }
    spec.ropes = vec![super::rope(config, spec, 500_000.0)?];
    Ok(())
}

/// Options that Cohere 1 and 2 share.
pub(super) fn shared(config: &Config, spec: &mut Spec) -> Result<()> {
    let params = LayerNormParams {
        weight: true,
        bias: false,
    };
    super::layer_norms(config, spec, "layer_norm_eps", params)?;
    (spec.norms, spec.parallel) = (NormNames::SHARED, true);
    spec.pairing = RopePairing::Neighbors;
    spec.tied = config.bool_or("tie_word_embeddings", true)?;
    spec.logit_scale = super::factor(config, "logit_scale", 0.0625)?;
    super::attention_biases(config, spec, false)
}
