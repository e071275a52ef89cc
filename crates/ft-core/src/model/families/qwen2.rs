//! Qwen2 and Qwen2.5: biases on q, k, v; optional windows above `max_window_layers`.

use super::{Config, Result, Spec};
use crate::base::Error;
use serde_json::Value;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.qkv_bias = true;
    sliding(config, spec)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}

/// Qwen's sliding windows: off unless `use_sliding_window`, then from layer `max_window_layers` on.
pub(super) fn sliding(config: &Config, spec: &mut Spec) -> Result<()> {
    sliding_where(config, spec, |l, first| l >= first)
}

/// The windows of Qwen2-MoE: in every second layer below `max_window_layers`.
pub(super) fn sliding_experts(config: &Config, spec: &mut Spec) -> Result<()> {
    let slides = |kinds: &Vec<Value>| kinds.iter().any(|kind| kind == "sliding_attention");
    let listed = config.get("layer_types").and_then(Value::as_array).is_some_and(slides);
    if listed && !config.bool_or("use_sliding_window", false)? {
        return Err(
            Error::unsupported("`layer_types` has sliding attention, but `use_sliding_window` is false")
                .at(super::place(config, "layer_types"))
                .hint("transformers gives these layers a window of 0 tokens"),
        );
    }
    sliding_where(config, spec, |l, first| l % 2 == 0 && l < first)
}

/// As `sliding`. If the config has no `layer_types`, `slides(index, max_window_layers)` says whether a layer has a window.
fn sliding_where(config: &Config, spec: &mut Spec, slides: impl Fn(usize, usize) -> bool) -> Result<()> {
    // If the switch is off, no window is applied, whatever `layer_types` contains.
    if !config.bool_or("use_sliding_window", false)? {
        return Ok(());
    }
    let window = window(config)?;
    let first = config.opt_usize0("max_window_layers")?.unwrap_or(28);
    super::windows(config, spec, window, |l| window.is_some() && slides(l, first))
}

fn window(config: &Config) -> Result<Option<usize>> {
    if config.raw.contains_key("sliding_window") {
        config.opt_usize("sliding_window")
    } else {
        Ok(Some(4096))
    }
}

/// The windows of Qwen3-MoE: in every layer, if `use_sliding_window` is on. transformers reads no list of layers here.
pub(super) fn sliding_everywhere(config: &Config, spec: &mut Spec) -> Result<()> {
    if config.bool_or("use_sliding_window", false)? {
        let window = window(config)?;
        spec.layers.iter_mut().for_each(|layer| layer.window = window);
    }
    Ok(())
}
