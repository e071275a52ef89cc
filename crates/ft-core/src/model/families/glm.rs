//! GLM-4 of 2024 (`-hf` checkpoints): as `glm4` with norms before each half only.

use super::{Config, NormNames, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::glm4::apply(config, spec)?;
    spec.norms = NormNames::BEFORE;
    Ok(())
}
