//! Phi-3: one projection for q, k, v, one for gate and up; optional window in every layer.

use super::{Config, Result, Spec};

pub fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.fused_projections = true;
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    let window = config.opt_usize("sliding_window")?;
    for layer in &mut spec.layers {
        layer.window = window;
    }
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}
