//! Command R7B and Command A: as Cohere without norms on q and k; sliding windows with positions, full attention without.

use super::{Config, Result, Spec};
use crate::model::rope::Rope;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::cohere::shared(config, spec)?;
    let window = config.opt_usize("sliding_window")?.or(Some(4096));
    let pattern = config.opt_usize("sliding_window_pattern")?.unwrap_or(4).max(1);
    super::windows(config, spec, window, |l| (l + 1) % pattern != 0)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?, Rope::none()];
    for layer in &mut spec.layers {
        layer.rope = usize::from(layer.window.is_none());
    }
    Ok(())
}
