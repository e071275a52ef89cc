//! EXAONE 4: norms after each half, norms on q and k per head; sliding windows with positions, and full attention
//! without.

use super::{Config, NormNames, QkNorm, Result, Spec};
use crate::model::rope::Rope;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norms = NormNames::AFTER;
    spec.qk_norm = Some(QkNorm::HEADS);
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    let window = if config.raw.contains_key("sliding_window") {
        config.opt_usize("sliding_window")?
    } else {
        Some(4096)
    };
    let listed = config.get("layer_types").is_some();
    // The published pattern may be a text such as `LLLG`; then the layers are listed too.
    let pattern = if listed {
        1
    } else {
        config.opt_usize("sliding_window_pattern")?.unwrap_or(4)
    };
    super::windows(config, spec, window, |l| window.is_some() && (l + 1) % pattern != 0)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?, Rope::none()];
    for layer in &mut spec.layers {
        layer.rope = usize::from(window.is_some() && layer.window.is_none());
    }
    Ok(())
}
