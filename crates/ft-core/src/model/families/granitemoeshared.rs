//! Granite 4 with experts and attention only: Granite 3 with experts, and a shared expert.

use super::experts::size;
use super::{Config, Result, SharedExpertSpec, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::granitemoe::apply(config, spec)?;
    // 0: it has none.
    if config.opt_usize0("shared_intermediate_size")?.unwrap_or(0) == 0 {
        return Ok(());
    }
    let shared = SharedExpertSpec {
        intermediate: size(config, "shared_intermediate_size", 1024)?,
        names: [
            "shared_mlp.input_linear",
            "shared_mlp.input_linear",
            "shared_mlp.output_linear",
        ],
        gate: None,
    };
    for experts in spec.layers.iter_mut().filter_map(|layer| layer.experts.as_mut()) {
        experts.shared = Some(shared);
    }
    Ok(())
}
