//! The routed experts that a micro-batch brings to the device, if the weights are in host memory or on the disk.

use super::PlanInputs;
use super::candidates::candidates;
use super::model::PlanModel;
use crate::engine::ActiveSet;
use crate::model::expert_words;
use crate::model::spec::ExpertsSpec;
use crate::recipe::{Method, Recipe};
use crate::setup::ElementBytes;
use crate::source::sharded::own_experts;
use crate::source::{Group, Placement, Sublayer, expert_of};

/// The cost of the experts of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertForecast {
    /// The part of the experts of a layer that is brought, if the router chooses all of them equally often. A router that
    /// prefers some brings less.
    pub share: f64,
    /// Bytes for each micro-batch, forward and backward, of the active set that reads most.
    pub bytes: f64,
}

/// The probability that one of `tokens` tokens is routed to an expert: 1 - (1 - K/E)^N.
fn share(sizes: &ExpertsSpec, tokens: usize) -> f64 {
    let missed = 1.0 - sizes.router.top_k as f64 / sizes.count.max(1) as f64;
    1.0 - missed.max(0.0).powf(tokens as f64)
}

/// The part of the routed experts of a layer that a pass through it reads.
fn part_read(model: &PlanModel, inputs: &PlanInputs, layer: usize) -> f64 {
    let sizes = model.spec.layers.get(layer).and_then(|l| l.experts);
    sizes.map_or(1.0, |sizes| share(&sizes, inputs.tokens))
}

/// True for parameters that are on the device while they are active.
pub(super) fn held(recipe: &Recipe, active: &ActiveSet, name: &str) -> bool {
    recipe.tune.method != Method::Lora && active.contains(name)
}

/// The share and the bytes of the experts that are brought to the device; `None`: no experts are brought.
pub(super) fn forecast(model: &PlanModel, recipe: &Recipe, inputs: &PlanInputs) -> Option<ExpertForecast> {
    if !inputs.strategy.placement.streams_experts() {
        return None;
    }
    let mut with_experts = model.spec.layers.iter().filter_map(|l| l.experts);
    let share = share(&with_experts.next()?, inputs.tokens);
    let turns = candidates(model, inputs, ElementBytes::default()).into_iter();
    let bytes = turns.map(|turn| bytes(model, recipe, inputs, &turn.active));
    Some(ExpertForecast {
        share,
        bytes: bytes.fold(0.0, f64::max),
    })
}

/// Bytes of the experts that a micro-batch brings, forward and backward.
pub(super) fn bytes(model: &PlanModel, recipe: &Recipe, inputs: &PlanInputs, active: &ActiveSet) -> f64 {
    let layers = model.layers();
    let lowest = active.lowest_layer(layers);
    // A norm after the experts needs their sum: a layer that did not save it computes them again before their backward pass.
    let again = match model.spec.norms.after_mlp {
        Some(_) => layers.saturating_sub(inputs.strategy.saved_layers),
        None => 0,
    };
    let storage = &inputs.strategy.storage;
    let runs = model.runs(active).into_iter().map(|run| {
        let end = run.first + run.count;
        let from_lowest = |end: usize| end.saturating_sub(lowest.max(run.first));
        let mut passes = run.count + from_lowest(end) + from_lowest(end.min(again));
        if (run.first..end).contains(&lowest) && !reaches_experts(model, recipe, active, lowest) {
            passes -= 1;
        }
        let brought = model
            .layer(run.first)
            .filter(|p| p.expert().is_some() && !held(recipe, active, &p.name));
        let once: u64 = brought.map(|p| storage.of(&p).bytes(&p.shape)).sum();
        once as f64 * part_read(model, inputs, run.first) * passes as f64
    });
    runs.sum()
}

/// The rank that has most of the active experts, if experts are divided.
pub(super) fn busy_rank(model: &PlanModel, inputs: &PlanInputs, active: &ActiveSet) -> usize {
    let mut elements = vec![0; inputs.ranks.max(1)];
    if inputs.strategy.placement == Placement::ExpertParallel {
        for name in active.names() {
            let here = (0..inputs.ranks).find(|rank| is_here(model, inputs, *rank, name) == Some(true));
            if let Some(rank) = here {
                elements[rank] += model.elements(name);
            }
        }
    }
    let most = elements.iter().copied().max();
    elements.iter().position(|n| Some(*n) == most).unwrap_or(0)
}

/// True if rank `rank` has this matrix of an expert; `None`: it is not divided.
pub(super) fn is_here(model: &PlanModel, inputs: &PlanInputs, rank: usize, name: &str) -> Option<bool> {
    let divided = inputs.strategy.placement == Placement::ExpertParallel && name.ends_with(".weight");
    let expert = expert_of(name).filter(|_| divided)?;
    Some(own_experts(model.experts(), rank, inputs.ranks.max(1)).contains(&expert))
}

/// Words of the rows that rank `rank` sends in the forward and in the backward pass of a layer, with an even router; `None`: no
/// experts are divided.
pub(super) fn words(model: &PlanModel, inputs: &PlanInputs, rank: usize) -> Option<[f64; 2]> {
    let spec = model.spec;
    let divided = inputs.strategy.placement == Placement::ExpertParallel;
    // Equal layers, as those of all known models.
    let sizes = spec.layers.iter().find_map(|l| l.experts).filter(|_| divided)?;
    Some(expert_words(&sizes, spec.hidden, (rank, inputs.ranks), inputs.tokens))
}

/// Bytes of the rows that a rank sends in a step to and from the experts of other ranks. `words`: those of this rank.
pub(super) fn sent(
    model: &PlanModel,
    recipe: &Recipe,
    inputs: &PlanInputs,
    active: &ActiveSet,
    words: Option<[f64; 2]>,
) -> u64 {
    let Some([forward, backward]) = words else { return 0 };
    let (layers, spec) = (model.layers(), model.spec);
    let lowest = active.lowest_layer(layers);
    let mixtures = (0..layers).filter(|l| spec.layers[*l].experts.is_some());
    let words: f64 = mixtures
        .map(|layer| {
            let again =
                spec.norms.after_mlp.is_some() && layer >= lowest && layer + inputs.strategy.saved_layers < layers;
            let back = layer > lowest || layer == lowest && reaches_experts(model, recipe, active, lowest);
            forward * (1.0 + f64::from(u8::from(again))) + backward * f64::from(u8::from(back))
        })
        .sum();
    let rounds = inputs.micro_batches.div_ceil(inputs.ranks.max(1));
    (4.0 * words) as u64 * rounds as u64
}

/// True if the backward pass of the lowest layer goes through all its experts: something before them or beside them is trained.
fn reaches_experts(model: &PlanModel, recipe: &Recipe, active: &ActiveSet, lowest: usize) -> bool {
    let before = model.spec.norms.before_mlp;
    let before = before.map_or(String::new(), |norm| format!("model.layers.{lowest}.{norm}."));
    let mut layer = model.layer(lowest);
    active.lowest() == Group::Embedding
        || recipe.tune.method == Method::Lora
        || layer.any(|p| {
            let reaches = p.sublayer != Sublayer::Mlp || !before.is_empty() && p.name.starts_with(&before);
            reaches && active.wants(&p.name)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{families, shapes};

    #[test]
    fn few_tokens_need_few_experts() {
        let spec = families::read(&shapes::config("shape:qwen3-30b-a3b").unwrap().unwrap()).unwrap();
        let sizes = spec.layers[0].experts.unwrap();
        assert_eq!((sizes.count, sizes.router.top_k), (128, 8));
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        near(share(&sizes, 1), 0.0625);
        near(share(&sizes, 2), 1.0 - 0.9375 * 0.9375);
        assert!(share(&sizes, 2048) > 0.999 && share(&sizes, 2048) <= 1.0);
    }
}
