//! MiniCPM 3: Llama with latent attention, and factors of the embedding, of what a half of a layer adds, and of the logits.

use super::{Config, Result, Spec};
use crate::model::spec::LatentSpec;
use serde_json::Value;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    spec.tied = config.bool_or("tie_word_embeddings", true)?;
    spec.mlp_bias = config.bool_or("mlp_bias", false)?;
    let sizes = LatentSpec {
        q_rank: Some(768),
        kv_rank: 256,
        plain: 64,
        rotary: 32,
        value: spec.hidden / spec.heads.max(1),
    };
    super::latent::apply(config, spec, sizes)?;
    let null = |key: &str| config.raw.get(key) == Some(&Value::Null);
    spec.embedding_scale = super::factor(config, "scale_emb", 12.0)?;
    if !null("scale_depth") {
        let depth = f64::from(super::factor(config, "scale_depth", 1.4)?);
        spec.residual_scale = (depth / (spec.layers.len() as f64).sqrt()) as f32;
    }
    if !null("dim_model_base") {
        spec.logit_scale = super::factor(config, "dim_model_base", 256.0)? / spec.hidden as f32;
    }
    Ok(())
}
