//! What families with experts share.

use super::{Config, ExpertsSpec, LARGEST, Result, SharedExpertSpec, Spec, out_of_range, place};
use crate::base::Error;
use crate::ops::routing::{RouterSpec, Score};
use serde_json::Value;

/// A positive size of the config.
pub fn size(config: &Config, key: &str, default: usize) -> Result<usize> {
    let most = LARGEST
        .iter()
        .find(|(k, _)| *k == "intermediate_size")
        .map_or(0, |(_, most)| *most);
    match config.opt_usize(key)?.unwrap_or(default) {
        n if (1..=most).contains(&n) => Ok(n),
        n => Err(out_of_range(key, n, most, &config.path.display().to_string())),
    }
}

/// The softmax router of most families.
pub fn softmax(top_k: usize, renormalize: bool) -> RouterSpec {
    RouterSpec {
        score: Score::Softmax,
        top_k,
        renormalize,
        scale: 1.0,
        groups: None,
    }
}

/// A shared expert with Qwen's names.
pub fn shared(gate: &'static str) -> SharedExpertSpec {
    SharedExpertSpec {
        intermediate: 0,
        names: [
            "mlp.shared_expert.gate_proj",
            "mlp.shared_expert.up_proj",
            "mlp.shared_expert.down_proj",
        ],
        gate: Some(gate),
    }
}

/// Gives experts to the layers that have them: every `decoder_sparse_step`-th, except `mlp_only_layers`.
pub fn of_layers(config: &Config, spec: &mut Spec, experts: ExpertsSpec) -> Result<()> {
    let step = config.opt_usize("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return Err(Error::format("`decoder_sparse_step` is 0").at(config.path.display()));
    }
    let dense: Vec<u64> = match config.get("mlp_only_layers") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(list)) if list.iter().all(Value::is_u64) => list.iter().filter_map(Value::as_u64).collect(),
        Some(other) => {
            return Err(Error::format("`mlp_only_layers` is not a list of layers")
                .at(place(config, "mlp_only_layers"))
                .found(other));
        }
    };
    for (l, layer) in spec.layers.iter_mut().enumerate() {
        let sparse = (l + 1).is_multiple_of(step) && !dense.contains(&(l as u64));
        layer.experts = sparse.then_some(experts);
    }
    check(config, &experts)
}

/// Checks the numbers of a router.
pub fn check(config: &Config, experts: &ExpertsSpec) -> Result<()> {
    let router = &experts.router;
    let groups = router.groups.map_or((1, 1), |g| (g.count, g.chosen));
    let available = match groups {
        (count, chosen) if count > 0 && experts.count.is_multiple_of(count) && chosen <= count => {
            experts.count / count * chosen
        }
        _ => 0,
    };
    if router.top_k > available {
        return Err(Error::format("a token cannot have this number of experts")
            .at(place(config, "num_experts_per_tok"))
            .found(format!(
                "{} of {} in {} of {} groups",
                router.top_k, experts.count, groups.1, groups.0
            ))
            .expected("no more than the chosen groups have, in groups of the same size"));
    }
    Ok(())
}
