//! Gemma (1): as Llama, with Gemma's norms, a scaled embedding and a tied head.

use super::{Config, Result, Spec};
use crate::ops::glu::Activation;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norm_plus_one = true;
    spec.tied = config.bool_or("tie_word_embeddings", true)?;
    // The published configs have `gelu`; the models use the tanh approximation, as transformers does.
    spec.activation = match super::activation(config, "hidden_act", "gelu_pytorch_tanh")? {
        Activation::Gelu => Activation::GeluTanh,
        other => other,
    };
    spec.embedding_scale = (spec.hidden as f32).sqrt();
    spec.embedding_scale_rounded = true;
    super::default_head_dim(config, spec, 256)?;
    super::attention_biases(config, spec, false)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}
