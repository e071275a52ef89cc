//! FlexOlmo: OLMo 2 with the experts of OLMoE in every layer.

use super::experts::check;
use super::{Config, ExpertsSpec, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::olmo2::shared(config, spec)?;
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-6);
    spec.ropes = vec![super::rope(config, spec, 500_000.0)?];
    let experts = ExpertsSpec {
        // The width of an expert is that of the config's MLP.
        intermediate: spec.intermediate,
        ..super::qwen3_moe::experts(config, 7, spec.intermediate, 5)?
    };
    for layer in &mut spec.layers {
        layer.experts = Some(experts);
    }
    check(config, &experts)
}
