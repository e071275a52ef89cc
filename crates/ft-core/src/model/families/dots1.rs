//! dots.llm1: the attention of Qwen3, and the experts of DeepSeek-V3.

use super::{Config, QkNorm, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.qk_norm = Some(QkNorm::HEADS);
    super::attention_biases(config, spec, false)?;
    let window = if config.raw.contains_key("sliding_window") {
        config.opt_usize("sliding_window")?
    } else {
        Some(4096)
    };
    let full = config.opt_usize0("max_window_layers")?.unwrap_or(62);
    super::windows(config, spec, window, |l| window.is_some() && l >= full)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    super::deepseek::apply_dots(config, spec)
}
