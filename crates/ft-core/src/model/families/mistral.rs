//! Mistral: a sliding window in every layer, unless it is null in the config.

use super::{Config, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    // transformers' default if the key is missing; null disables the window.
    let window = if config.raw.contains_key("sliding_window") {
        config.opt_usize("sliding_window")?
    } else {
        Some(4096)
    };
    for layer in &mut spec.layers {
        layer.window = window;
    }
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}
