//! Qwen3: norms on q and k per head, optional biases, sliding windows as in Qwen2.

use super::{Config, QkNorm, Result, Spec};

pub fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.qk_norm = Some(QkNorm::HEADS);
    super::attention_biases(config, spec, false)?;
    // transformers' default if the key is missing is 128, not hidden / heads.
    if config.opt_usize("head_dim")?.is_none() {
        spec.head_dim = 128;
        spec.attention_scale = 1.0 / 128f32.sqrt();
    }
    super::qwen2::sliding(config, spec)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}
