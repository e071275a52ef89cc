//! OLMoE: norms before each half, norms of q and k over all heads, experts in every layer.

use super::experts::check;
use super::{Config, ExpertsSpec, QkNorm, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.qk_norm = Some(QkNorm::WHOLE);
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    super::attention_biases(config, spec, false)?;
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    let experts = ExpertsSpec {
        // The width of an expert is that of the config's MLP.
        intermediate: spec.intermediate,
        ..super::qwen3_moe::experts(config, 64, spec.intermediate, 8)?
    };
    for layer in &mut spec.layers {
        layer.experts = Some(experts);
    }
    check(config, &experts)
}
