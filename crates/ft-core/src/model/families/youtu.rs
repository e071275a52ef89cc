//! Youtu-LLM: Llama with latent attention.

use super::{Config, Result, Spec};
use crate::model::spec::LatentSpec;
use crate::ops::rope::RopePairing;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.tied = config.bool_or("tie_word_embeddings", true)?;
    if config.bool_or("rope_interleave", true)? {
        spec.pairing = RopePairing::Neighbors;
    }
    if config.opt_f64("initializer_range")?.is_none() {
        spec.initializer_range = 2.0 / (5.0 * spec.hidden as f32).sqrt();
    }
    let sizes = LatentSpec {
        q_rank: Some(1536),
        kv_rank: 512,
        plain: 128,
        rotary: 64,
        value: 128,
    };
    super::latent::apply(config, spec, sizes)
}
