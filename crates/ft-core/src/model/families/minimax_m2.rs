//! MiniMax-M2: norms of q and k over all heads, rotation of a part of a head; experts with sigmoid scores and their correction in
//! every layer.

use super::experts::{check, size};
use super::{Config, ExpertsSpec, QkNorm, Result, Spec};
use crate::model::spec::ExpertNames;
use crate::ops::routing::{RouterSpec, Score};
use serde_json::json;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::default_head_dim(config, spec, 128)?;
    spec.qk_norm = Some(QkNorm::WHOLE);
    super::mixtral::no_noise(config)?;
    let mut parameters = super::rope_parameters(config, None, 5e6)?;
    // The published files say how many elements are rotated.
    if let (false, Some(n)) = (
        parameters.contains_key("partial_rotary_factor"),
        config.opt_usize("rotary_dim")?,
    ) {
        parameters.insert("partial_rotary_factor".into(), json!(n as f64 / spec.head_dim as f64));
    }
    spec.ropes = vec![super::rope_of(config, spec, &parameters)?];
    let experts = ExpertsSpec {
        count: size(config, "num_local_experts", 256)?,
        intermediate: spec.intermediate,
        router: RouterSpec {
            score: Score::Sigmoid,
            top_k: size(config, "num_experts_per_tok", 8)?,
            renormalize: true,
            scale: 1.0,
            groups: None,
        },
        correction: true,
        bias: false,
        shared: None,
        names: ExpertNames::MINIMAX,
    };
    for layer in &mut spec.layers {
        layer.experts = Some(experts);
    }
    check(config, &experts)
}
