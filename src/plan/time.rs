//! Estimates the time of a step by counting operations, to rank settings. On a GPU it is the time of `gpu_time`.
//!
//! Letters as in `plan`. A product of N tokens with a weight of p elements costs 2·N·p operations, and packing the
//! weight costs as much as `PACKED_TOKENS` more tokens.

use super::candidates::candidates;
use super::loss::{LogitsChunk, head_uses};
use super::model::PlanModel;
use super::{PlanInputs, experts, gpu_time};
use crate::engine::{ActiveSet, GradientStorage};
use crate::model::pieces::pieces;
use crate::ops::CpuBackend;
use crate::recipe::{Dtype, Recipe};
use crate::setup::ElementBytes;
use crate::source::Sublayer;
use crate::source::sharded::is_in_parts;

/// Packing a weight takes as long as a product of this many tokens. Measured: packing takes about 15 % of a product
/// with 512 tokens (75 = 0.15 · 512).
const PACKED_TOKENS: f64 = 75.0;
/// Dot products of bf16 pairs pack no weight. They read it from memory, which takes as long as a product of this many
/// tokens (0.2 ns an element at 10 GB/s of a thread; 2 operations at 0.2 TFLOP/s are 0.01 ns).
const READ_TOKENS_DOTS: f64 = 20.0;
/// With tiles (AMX) tasks pack a weight in the cache: estimated as a quarter of a product with 512 tokens. (A profile has 44 % tiles
/// and 16 % packing, of activations too: docs/benchmarks-cpu.md. x·Wᵀ of at most 64 tokens does not pack the weight, but no choice depends on it.)
const PACKED_TOKENS_TILES: f64 = 128.0;
/// Operations per second of one thread, and of one thread with a tile unit.
const THREAD_RATE: f64 = 50e9;
const TILES_RATE: f64 = 500e9;
/// Bytes per second from the disk.
pub(super) const DISK_RATE: f64 = 1e9;
/// Bytes per second that a rank sends, if nothing is said about the connection: 10 Gb/s.
pub(super) const RANKS_RATE: f64 = 1.25e9;
/// If computation and reading overlap, this fraction of the shorter one does not.
const NOT_HIDDEN: f64 = 0.1;

/// The time of computation and of reading that overlap.
pub(super) fn overlapping(work: f64, read: f64) -> f64 {
    work.max(read) + NOT_HIDDEN * work.min(read)
}

/// Seconds of one optimizer step of the slowest active set on a typical CPU, or on the GPU of `inputs`. `model` was inspected with the
/// storage and the adapters of `inputs`.
pub fn seconds_of(model: &PlanModel, recipe: &Recipe, inputs: &PlanInputs) -> f64 {
    // Of equal sets the lowest one is the slowest; `candidates` always contains it.
    let sets = candidates(model, inputs, ElementBytes::default())
        .into_iter()
        .map(|turn| {
            if inputs.on_gpu {
                gpu_time::turn_time(model, recipe, inputs, &turn.active).seconds()
            } else {
                cpu_seconds(model, recipe, inputs, &turn.active)
            }
        });
    sets.fold(0.0, f64::max)
}

fn cpu_seconds(model: &PlanModel, recipe: &Recipe, inputs: &PlanInputs, active: &ActiveSet) -> f64 {
    let spec = model.spec;
    let tiles = CpuBackend::current().packs_bf16() && recipe.model.dtype == Dtype::Bf16;
    let packed = match CpuBackend::current() {
        _ if !tiles => PACKED_TOKENS,
        CpuBackend::Amx => PACKED_TOKENS_TILES,
        _ => READ_TOKENS_DOTS,
    };
    let layers = spec.layers.len();
    let lowest = active.lowest_layer(layers);
    let n = inputs.tokens as f64;
    let (mut attention, mut mlp) = (0.0, 0.0);
    // The mean of all layers.
    for linear in spec.alike().into_iter().flat_map(|l| spec.linears(l)) {
        let elements = (linear.input * linear.output) as f64 / layers as f64;
        match linear.sublayer {
            Sublayer::Mlp => mlp += elements,
            _ => attention += elements,
        }
    }
    for l in spec.alike() {
        mlp += spec.routed_elements(l) as f64 / layers as f64;
    }
    let count = pieces(inputs.tokens, inputs.strategy.mlp_tokens).len() as f64;
    // Half of the scores are masked.
    let with_attention = (0..layers).filter(|l| spec.layers[*l].mixer.has_keys());
    let query_width = with_attention.map(|l| spec.query_width(l) as f64).sum::<f64>() / layers as f64;
    let scores = 2.0 * n * inputs.longest as f64 * query_width;
    let layer = 2.0 * (attention * (n + packed) + mlp * (n + packed * count)) + scores;
    let above = (layers - lowest) as f64;
    let recomputed = (above - inputs.strategy.saved_layers as f64).max(0.0);
    let in_parts = inputs.head_chunk(spec, active).is_some();
    let chunk = LogitsChunk::new(spec, recipe, inputs, active.contains(spec.head_name()), in_parts);
    let chunks = inputs.tokens.div_ceil(chunk.tokens.max(1)) as f64;
    let head = 2.0 * (n + packed * chunks) * (spec.vocab * spec.hidden) as f64;
    let wanted = model.sum(active, |p| if active.wants(&p.name) { p.elements() as u64 } else { 0 });
    let trained = 2.0 * n * wanted as f64;
    let through = layer * (layers as f64 + recomputed + above);
    let products = head_uses(spec, recipe, inputs, in_parts).products;
    let work = through + products as f64 * head + trained;
    let rate = if tiles { TILES_RATE } else { THREAD_RATE };
    let work = work / (rate * inputs.threads as f64);
    let read = bytes_read(model, recipe, inputs, active, lowest) / DISK_RATE;
    let stored = recipe.model.dtype.bytes();
    let collected = super::weights::collected(model, inputs, stored, active, 0) as f64 / RANKS_RATE;
    let read = read + collected / inputs.rounds().max(1) as f64;
    let passes = match inputs.strategy.gradients {
        GradientStorage::NormFirst => 2.0,
        _ => 1.0,
    };
    overlapping(work, read) * inputs.rounds() as f64 * passes
}

impl PlanInputs {
    /// Micro-batches, or parts of them, that a rank computes in a step.
    pub(super) fn rounds(&self) -> usize {
        (self.micro_batches * self.sequence.ranks).div_ceil(self.ranks.max(1))
    }
}

/// Bytes read from the disk in one micro-batch: every layer forward, layers of the backward pass again, a head in
/// parts as often as the loss reads it. Of the routed experts those that get tokens.
pub(super) fn bytes_read(
    model: &PlanModel,
    recipe: &Recipe,
    inputs: &PlanInputs,
    active: &ActiveSet,
    lowest: usize,
) -> f64 {
    if !inputs.strategy.placement.streams_layers() {
        return 0.0;
    }
    let (spec, stored) = (model.spec, recipe.model.dtype.bytes());
    let layer = |first: usize| {
        let read = model.layer(first);
        let sharded = inputs.strategy.placement.is_sharded();
        let read = read
            .filter(|p| sharded && is_in_parts(p) || p.expert().is_none() && !experts::held(recipe, active, &p.name));
        read.map(|p| inputs.strategy.storage.of(&p).bytes(&p.shape) as f64)
            .sum::<f64>()
    };
    let layers = model.runs(active).into_iter().map(|run| {
        let twice = (run.first + run.count).saturating_sub(lowest.max(run.first));
        layer(run.first) * (run.count + twice) as f64
    });
    let head = match inputs.head_chunk(spec, active) {
        Some(_) => {
            let reads = head_uses(spec, recipe, inputs, true).reads;
            (reads * stored * (spec.vocab * spec.hidden) as u64) as f64
        }
        None => 0.0,
    };
    let experts = if inputs.strategy.placement.streams_experts() {
        experts::bytes(model, recipe, inputs, active)
    } else {
        0.0
    };
    layers.sum::<f64>() + experts + head
}
