//! Mixtral: Mistral with experts in every layer.

use super::experts::{check, size, softmax};
use super::{Config, ExpertsSpec, Result, Spec};
use crate::base::Error;
use crate::model::spec::ExpertNames;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    let window = config.opt_usize("sliding_window")?;
    spec.ropes = vec![super::rope(config, spec, 1e6)?];
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    no_noise(config)?;
    let experts = ExpertsSpec {
        count: size(config, "num_local_experts", 8)?,
        intermediate: spec.intermediate,
        router: softmax(size(config, "num_experts_per_tok", 2)?, true),
        correction: false,
        bias: false,
        shared: None,
        names: ExpertNames::MIXTRAL,
    };
    for layer in &mut spec.layers {
        (layer.window, layer.experts) = (window, Some(experts));
    }
    check(config, &experts)
}

/// Refuses noise on the input of the router.
pub(super) fn no_noise(config: &Config) -> Result<()> {
    let noise = config.opt_f64("router_jitter_noise")?.unwrap_or(0.0);
    if noise != 0.0 {
        return Err(Error::unsupported("noise on the input of the router is not supported")
            .at(super::place(config, "router_jitter_noise"))
            .found(noise)
            .expected("0"));
    }
    Ok(())
}
