//! Hunyuan with experts: the attention of the dense models; experts and a shared expert in every layer.

use super::experts::{check, size, softmax};
use super::{Config, ExpertsSpec, Result, SharedExpertSpec, Spec};
use crate::base::Error;
use crate::model::spec::ExpertNames;
use serde_json::Value;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::hunyuan_v1_dense::apply(config, spec)?;
    // transformers writes the number of experts of a token under either name.
    let top_k = if config.raw.contains_key("num_experts_per_tok") {
        "num_experts_per_tok"
    } else {
        "moe_topk"
    };
    let count = if config.raw.contains_key("num_local_experts") {
        "num_local_experts"
    } else {
        "num_experts"
    };
    let config = &of_all_layers(config, [top_k, count])?;
    let experts = ExpertsSpec {
        count: size(config, count, 1)?,
        intermediate: spec.intermediate,
        router: softmax(size(config, top_k, 1)?, true),
        correction: false,
        bias: false,
        shared: Some(SharedExpertSpec {
            intermediate: spec.intermediate,
            names: [
                "mlp.shared_mlp.gate_proj",
                "mlp.shared_mlp.up_proj",
                "mlp.shared_mlp.down_proj",
            ],
            gate: None,
        }),
        names: ExpertNames::HUNYUAN,
    };
    for layer in &mut spec.layers {
        layer.experts = Some(experts);
    }
    check(config, &experts)
}

/// The config with one number in the place of each list with a number for each layer.
///
/// Errors: the numbers of a list differ.
fn of_all_layers(config: &Config, keys: [&str; 2]) -> Result<Config> {
    let mut out = config.clone();
    for key in keys {
        let Some(Value::Array(list)) = config.get(key) else {
            continue;
        };
        match list.first() {
            Some(first) if list.iter().all(|other| other == first) => {
                out.raw.insert(key.into(), first.clone());
            }
            _ => {
                return Err(
                    Error::unsupported("layers with different numbers of experts are not supported")
                        .at(super::place(config, key))
                        .found(Value::from(list.clone())),
                );
            }
        }
    }
    Ok(out)
}
