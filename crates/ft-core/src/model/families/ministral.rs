//! Ministral (2410): Mistral with sliding windows in some layers.

use super::{Config, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::mistral::apply(config, spec)?;
    let window = spec.layers.first().and_then(|layer| layer.window);
    super::windows(config, spec, window, |_| window.is_some())
}
