//! StableLM: Llama with LayerNorms, optional biases on q, k and v, rotation of a quarter of a head; optionally parallel
//! halves with one norm.

use super::{Config, LayerNormParams, NormNames, Result, Spec};
use crate::base::Error;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::layer_norms(config, spec, "layer_norm_eps", LayerNormParams::BOTH)?;
    spec.qkv_bias = config.bool_or("use_qkv_bias", false)?;
    if config.bool_or("use_parallel_residual", false)? {
        (spec.norms, spec.parallel) = (NormNames::SHARED, true);
    }
    if config.bool_or("qk_layernorm", false)? {
        return Err(Error::unsupported(
            "config option `qk_layernorm` changes the model and is not supported in stablelm",
        )
        .at(config.path.display())
        .hint("these checkpoints (StableLM 2 12B) store the norm of each head as a tensor of its own"));
    }
    spec.ropes = vec![super::partial_rope(config, spec, 10_000.0, 0.25)?];
    Ok(())
}
