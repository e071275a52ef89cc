//! Qwen3: norms on q and k per head, optional biases, sliding windows as in Qwen2.

use super::{Config, QkNorm, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::default_head_dim(config, spec, 128)?;
    super::qwen2::sliding(config, spec)?;
    shared(config, spec)
}

/// The options that Qwen3 and Qwen3-MoE share; the heads have hidden / heads elements if the config has no `head_dim`.
pub(super) fn shared(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.qk_norm = Some(QkNorm::HEADS);
    super::attention_biases(config, spec, false)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}
