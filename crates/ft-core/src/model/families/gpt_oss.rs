//! gpt-oss: attention sinks, sliding windows in every second layer, rope yarn; experts with biases, and limits of their gates.

use super::experts::{check, size, softmax};
use super::{Config, ExpertsSpec, Result, Spec};
use crate::model::rope::Rope;
use crate::model::spec::ExpertNames;
use crate::ops::clamped_glu::ClampedGlu;
use serde_json::{Value, json};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    super::default_head_dim(config, spec, 64)?;
    super::attention_biases(config, spec, true)?;
    spec.attention_sinks = true;
    let window = if config.raw.contains_key("sliding_window") {
        config.opt_usize("sliding_window")?
    } else {
        Some(128)
    };
    super::windows(config, spec, window, |l| l % 2 == 0)?;
    spec.ropes = vec![rope(config, spec)?];
    spec.clamped_glu = Some(ClampedGlu {
        alpha: super::factor(config, "swiglu_alpha", 1.702)?,
        limit: super::factor(config, "swiglu_limit", 7.0)?,
    });
    let count = if config.raw.contains_key("num_local_experts") {
        "num_local_experts"
    } else {
        "num_experts"
    };
    let experts = ExpertsSpec {
        count: size(config, count, 128)?,
        intermediate: spec.intermediate,
        // A softmax over the chosen logits is the softmax over all, renormalized.
        router: softmax(size(config, "num_experts_per_tok", 4)?, true),
        correction: false,
        bias: true,
        shared: None,
        names: ExpertNames::GPT_OSS,
    };
    for layer in &mut spec.layers {
        layer.experts = Some(experts);
    }
    check(config, &experts)
}

/// Without rope parameters it is yarn.
fn rope(config: &Config, spec: &Spec) -> Result<Rope> {
    let mut parameters = super::rope_parameters(config, None, 150_000.0)?;
    let given = |key: &str| config.get(key).is_some_and(Value::is_object);
    if !given("rope_parameters") && !given("rope_scaling") {
        let yarn = json!({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096});
        parameters.extend(
            yarn.as_object()
                .into_iter()
                .flatten()
                .map(|(k, v)| (k.clone(), v.clone())),
        );
    }
    super::rope_of(config, spec, &parameters)
}
