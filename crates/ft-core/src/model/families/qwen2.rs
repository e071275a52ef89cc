//! Qwen2 and Qwen2.5: biases on q, k, v; optional windows above `max_window_layers`.

use super::{Config, Result, Spec};

pub fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.qkv_bias = true;
    sliding(config, spec)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}

/// Qwen's sliding windows: off unless `use_sliding_window`, then from layer `max_window_layers` on.
pub fn sliding(config: &Config, spec: &mut Spec) -> Result<()> {
    let on = config.bool_or("use_sliding_window", false)?;
    let window = if on {
        config.opt_usize("sliding_window")?.or(Some(4096))
    } else {
        None
    };
    let first = config.opt_usize("max_window_layers")?.unwrap_or(28);
    if !on {
        // If the switch is off, no window is applied, whatever `layer_types` contains.
        return Ok(());
    }
    super::windows(config, spec, window, |l| l >= first)
}
