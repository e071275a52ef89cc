//! VaultGemma: Gemma 2 without the norms after each half.

use super::{Config, NormNames, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::gemma2::apply(config, spec)?;
    spec.norms = NormNames {
        after_attention: None,
        after_mlp: None,
        ..NormNames::SANDWICH
    };
    Ok(())
}
