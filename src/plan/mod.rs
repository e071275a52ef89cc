//! Forecasts the memory of a run: simulates one optimizer step in the order of the engine and records every tensor's
//! allocation and release in a ledger. Allocates no tensors.
//!
//! Letters: N tokens of the largest micro-batch, D hidden size, H heads, K key/value heads, E head size,
//! I intermediate size, V vocabulary, R rank of an adapter.
//!
//! Summary: resident weights + optimizer(active) + layers above the lowest active · N · D · 4 + the larger of
//! (work of one layer, chunk of logits) + gradients.

mod advice;
mod candidates;
mod experts;
pub mod gpu_time;
mod inputs;
mod knee;
mod layer_graphs;
pub mod link;
mod loss;
pub mod memory_plan;
mod model;
mod rank_weights;
pub mod resumed_choices;
pub mod run_plan;
mod search;
mod shared;
mod step;
mod streams;
mod table;
mod teacher;
mod time;
mod weights;

pub use candidates::turns_of;
pub use experts::ExpertForecast;
pub use inputs::{PlanInputs, ReferenceMemory};
pub use memory_plan::{MemoryPlan, PlanDevice, ProcessState};
pub use model::{AdapterCosts, PlanModel};
pub use run_plan::RunPlan;
pub use table::{Plan, PlanLine};
pub use time::seconds_of;
pub use weights::most_renewed;

use crate::base::ledger::{Allocation, Ledger, MemoryKind};
use crate::comm::{QUANTUM, share};
use crate::engine::divided::divides;
use crate::engine::{
    ActiveSet, GradientExchange, GradientStorage, UpdateExchange, corrected_bytes, ema_bytes, exchange_bytes,
    leaving_bytes, outer_bytes, sent_bytes,
};
use crate::generate;
use crate::model::sequence::sequence_bytes;
use crate::model::{Adapters, Spec};
use crate::ops::quantized::work_bytes;
use crate::ops::transfer::STAGING_BYTES;
use crate::optim::Optimizer;
use crate::optim::config::{Master, OptimizerName};
use crate::peft::start::cost;
use crate::recipe::{Dtype, LoraInit, Method, PeftType, Recipe, RolloutWeights};
use crate::setup::rewards::RewardModelSpec;
use crate::setup::{ActivePeriod, ElementBytes};
use crate::source::Placement;
use candidates::candidates;
use std::sync::Arc;

/// Code pages loaded at first use (1.6 to 1.9 MiB in the steps of `tests/memory`), stacks, small heap blocks.
pub const CODE: u64 = 3 << 20;

/// The cost of the adapters, for `PlanInputs`.
pub fn costs(adapters: &Adapters) -> AdapterCosts {
    let cost = |(module, adapter): (&String, &Arc<crate::peft::Adapter>)| (module.clone(), adapter.cost());
    Arc::new(adapters.iter().map(cost).collect())
}

impl PlanInputs {
    /// Bytes to initialize new adapters: covariances of one layer, decompositions, and the pass over the calibration rows.
    fn start_bytes(&self, recipe: &Recipe, model: &PlanModel) -> u64 {
        let lora = &recipe.tune.lora;
        if recipe.tune.method != Method::Lora || !cost::decomposes(lora) {
            return 0;
        }
        let (samples, own) = match lora.init_lora_weights {
            LoraInit::Corda => (lora.corda.samples, lora.corda.data.is_empty()),
            _ => (lora.init_samples, true),
        };
        let mut tokens = (samples * self.longest) as u64;
        if own && self.data_bytes > 0 {
            tokens = tokens.min(self.data_bytes / 5);
        }
        let bytes = cost::bytes(lora, model.spec.hidden, tokens, &self.adapters);
        let mut pass = self.clone();
        (
            pass.strategy.saved_layers,
            pass.micro_batches,
            pass.strategy.offload_inputs,
        ) = (0, 1, false);
        (pass.strategy.gradients, pass.teacher) = (GradientStorage::NormFirst, None);
        pass.tokens = tokens as usize;
        match lora.init_lora_weights {
            // One forward and backward pass over all rows, with the gradients of the weights themselves.
            LoraInit::LoraGa => {
                let weights = self.adapters.keys().map(|module| format!("{module}.weight"));
                let mut l = Ledger::new(false);
                let fetched = weights::FetchedLayers::new(false);
                step::walk(&mut l, model, recipe, &pass, &ActiveSet::new(weights), fetched);
                bytes + l.peak + self.dequantized(model)
            }
            LoraInit::Corda | LoraInit::Eva => {
                // A layer before its covariances are decomposed.
                pass.tokens = pass.tokens.min(cost::TOKENS.max(self.longest));
                // EVA copies the inputs of trained tokens.
                let widest = model.spec.hidden.max(model.spec.intermediate);
                let copied = match lora.init_lora_weights {
                    LoraInit::Eva => self.element * (pass.tokens * widest) as u64,
                    _ => 0,
                };
                bytes.max(4 * tokens * model.spec.hidden as u64 + teacher::layer_work(model, &pass) + copied)
            }
            _ => bytes,
        }
    }

    /// `InactiveElements::bytes` of this rank.
    fn inactive_bytes(&self, turn: &ActivePeriod, element: ElementBytes) -> u64 {
        let placement = self.strategy.placement;
        let all = turn.inactive.bytes(placement, element);
        match placement {
            Placement::Sharded | Placement::ShardedHost => all.div_ceil(self.ranks as u64),
            _ => all,
        }
    }

    /// On a GPU: the buffer for the dequantized parts of the largest quantized weight.
    fn dequantized(&self, model: &PlanModel) -> u64 {
        let (storage, mut most) = (&self.strategy.storage, 0);
        model.each(&ActiveSet::new([]), |p, _| {
            if let (true, &[rows, columns]) = (storage.of(p).is_quantized(), p.shape.as_slice()) {
                most = work_bytes(rows, columns, storage.dtype()).max(most);
            }
        });
        if self.on_gpu { most } else { 0 }
    }

    /// The KV cache of one answer of `tokens` tokens, prompt included, and logits of one token, twice.
    fn answer(&self, spec: &Spec, tokens: usize) -> u64 {
        generate::cache_bytes(spec, tokens, self.on_gpu.then_some(self.element)) + 8 * spec.vocab as u64
    }

    /// `answers` answers that are generated together, of `tokens` tokens each: their KV cache, the copies of
    /// the adapters, and the work memory of a layer during prefill.
    fn answers(&self, model: &PlanModel, answers: usize, tokens: usize) -> u64 {
        if answers == 0 {
            return 0;
        }
        let mut own = self.clone();
        own.tokens = (answers * tokens).min(generate::GenerateLimits::default().prefill_tokens);
        (own.longest, own.strategy.offload_inputs) = (tokens, false);
        // On a GPU all LoRA pairs are copied in the type of the activations.
        let copies = if self.on_gpu {
            self.element * model.adapter_elements()
        } else {
            0
        };
        let (latent, reading) = if self.on_gpu {
            (0, 0)
        } else {
            let reading = generate::reading_work(model.spec, tokens, answers * tokens, own.tokens);
            (generate::latent_work(model.spec, own.tokens), reading)
        };
        let work = teacher::layer_work(model, &own).max(reading);
        // Steps of decoding are CUDA graphs, with memory of their own, and logits that stay.
        let experts = model.spec.layers.iter().any(|layer| layer.experts.is_some());
        let graph = if self.on_gpu && !experts && !self.strategy.placement.streams_layers() {
            own.tokens = answers;
            let logits = answers * model.spec.vocab;
            teacher::layer_work(model, &own) + self.element * logits as u64
        } else {
            0
        };
        answers as u64 * self.answer(model.spec, tokens) + copies + latent + work + graph
    }
}

/// True if every element of a trained parameter is updated by itself, so that ranks can divide the update.
pub(crate) fn updates_in_parts(recipe: &Recipe, masked: bool) -> bool {
    let hook = recipe.tune.method == Method::Lora && recipe.tune.lora.peft_type == PeftType::Adalora;
    divides(2, recipe.optimizer.name != OptimizerName::Adafactor, masked, hook)
}

/// The number of ranks over which gradients and moments are divided.
fn parts(recipe: &Recipe, inputs: &PlanInputs, active: &ActiveSet) -> u64 {
    if inputs.ranks > 1 && recipe.distributed.sync_every == 0 && updates_in_parts(recipe, active.is_masked()) {
        inputs.ranks as u64
    } else {
        1
    }
}

/// The most bytes that a rank sends in a step; with `distributed.sync_every`, for an average. Rows of divided experts: with an even
/// router.
pub fn sent(model: &PlanModel, recipe: &Recipe, inputs: &PlanInputs) -> u64 {
    let apart = recipe.distributed.sync_every > 0;
    let bf16 = |name: &str| recipe.model.dtype == Dtype::Bf16 && !model.is_adapter(name);
    // An average is a sum of exact weights.
    let exchange = GradientExchange {
        window: apart || recipe.distributed.exchange().window,
        ..recipe.distributed.exchange()
    };
    let words: Vec<_> = (0..inputs.ranks)
        .map(|rank| experts::words(model, inputs, rank))
        .collect();
    let of = |active: &ActiveSet, rank: usize| {
        let travels = |name: &&str| experts::is_here(model, inputs, rank, name).is_none();
        // Of the gradients of divided experts only the sums of squares travel.
        let here = active
            .names()
            .filter(|name| experts::is_here(model, inputs, rank, name) == Some(true));
        let squares = here.map(|name| model.elements(name).div_ceil(QUANTUM as u64));
        let squares = 4 * squares.sum::<u64>() * (inputs.ranks as u64 - 1);
        let sizes = active.names().filter(travels).map(|name| {
            let n = model.elements(name);
            let n = active.subset(name, n as usize).map_or(n, |part| part.len as u64);
            let updated = if model.is_in_parts(name) && inputs.strategy.placement.is_sharded() {
                UpdateExchange::Collected
            } else if bf16(name) {
                UpdateExchange::Bf16
            } else {
                UpdateExchange::F32
            };
            (name, n, updated)
        });
        let divided = parts(recipe, inputs, active) > 1;
        // Each rank that shares a micro-batch gives a contribution of its own.
        let shared = inputs.sequence.ranks;
        let (rounds, place) = ((inputs.micro_batches * shared) as u64, (rank, inputs.ranks));
        let (lowest, saved) = (active.lowest_layer(model.layers()), inputs.strategy.saved_layers);
        let documents = [0, inputs.batch_tokens];
        let attention = sequence_bytes(model.spec, inputs.sequence, &documents, lowest, saved, rank);
        let corrected = active.corrected().map(|name| (name, model.elements(name)));
        let stored = recipe.model.dtype.bytes();
        squares
            + sent_bytes(sizes, rounds, place, divided, exchange, inputs.on_gpu)
            + corrected_bytes(corrected, rounds, place, exchange)
            + weights::collected(model, inputs, stored, active, rank)
            + attention * rounds.div_ceil(inputs.ranks as u64)
            + experts::sent(model, recipe, inputs, active, words[rank])
    };
    let turns = inputs.turns.iter().map(|turn| &turn.active);
    let all = turns.flat_map(|active| (0..inputs.ranks).map(move |rank| of(active, rank)));
    all.max().unwrap_or(0)
}

/// Bytes of the optimizer state of a parameter of `shape`: moments of its active part, and the low 16 bits of
/// the master, both divided over `parts` ranks.
fn state_bytes(recipe: &Recipe, active: &ActiveSet, name: &str, shape: &[usize], bf16: bool, parts: u64) -> u64 {
    let n: usize = shape.iter().product();
    let moments = match active.subset(name, n) {
        Some(part) => Optimizer::state_bytes(&recipe.optimizer, &[part.len]),
        None => Optimizer::state_bytes(&recipe.optimizer, shape),
    };
    let own = if parts > 1 {
        (moments as u128 * u128::from(share(n as u64, parts))).div_ceil(n.max(1) as u128) as u64
    } else {
        moments
    };
    let low = if parts > 1 { share(n as u64, parts) } else { n as u64 };
    own + low * Optimizer::master_bytes(&recipe.optimizer, bf16)
}

/// The forecast of one run: the worst moment of its worst step.
pub fn forecast(spec: &Spec, recipe: &Recipe, inputs: &PlanInputs) -> Plan {
    let model = PlanModel::new(spec, &inputs.strategy.storage, &inputs.adapters);
    forecast_of(&model, recipe, inputs)
}

/// As `forecast`, for a model that was inspected before with the storage and the adapters of `inputs`.
pub fn forecast_of(model: &PlanModel, recipe: &Recipe, inputs: &PlanInputs) -> Plan {
    let stored = recipe.model.dtype.bytes();
    // The low 16 bits of the fp32 master stay when its block is deactivated.
    let master = Optimizer::master_bytes(&recipe.optimizer, stored == 2);
    let element = ElementBytes { stored, master };
    let mut worst: Option<(Ledger, u64)> = None;
    for turn in candidates(model, inputs, element) {
        let found = of_turn(model, recipe, inputs, turn, element);
        if worst.as_ref().is_none_or(|(w, _)| found.0.peak > w.peak) {
            worst = Some(found);
        }
    }
    let (ledger, trained) = worst.unwrap_or_default();
    let parameters = model.parameters() + model.adapter_elements();
    table::plan(model, recipe, inputs, ledger, parameters, trained)
}

/// Simulates a whole run for one active set; also returns the number of active elements.
fn of_turn(
    model: &PlanModel,
    recipe: &Recipe,
    inputs: &PlanInputs,
    turn: &ActivePeriod,
    element: ElementBytes,
) -> (Ledger, u64) {
    let (spec, active) = (model.spec, &turn.active);
    let ElementBytes { stored, master } = element;
    let outer = recipe.distributed.outer(inputs.ranks, 0);
    let fixed: u64 = inputs.adapters.values().map(|c| c.fixed).sum();
    let trained = model.sum_trained(active, |name| {
        let elements = model.elements(name);
        active
            .subset(name, elements as usize)
            .map_or(elements, |part| part.len as u64)
    });
    let parts = parts(recipe, inputs, active);
    let busy = experts::busy_rank(model, inputs, active);
    let state = model.sum_trained(active, |name| {
        let here = experts::is_here(model, inputs, busy, name);
        if here == Some(false) {
            return 0;
        }
        let parts = if here.is_some() { 1 } else { parts };
        let bf16 = stored == 2 && !model.is_adapter(name);
        let shape = model.shape(name);
        let outer = outer.map_or(0, |outer| {
            outer_bytes(&outer, model.elements(name), inputs.ranks as u64)
        });
        outer + shape.map_or(0, |shape| state_bytes(recipe, active, name, shape, bf16, parts))
    });
    // Corrected parameters need the low 16 bits of their masters too.
    let corrected = model.sum_corrected(active, |name| master * model.elements(name));
    // Weights for a GPU start on the host: all of them, or two layers that were read ahead. Pinned buffers copy those
    // that cannot be page-locked.
    let on_host: u64 = match inputs.strategy.placement {
        Placement::Host => {
            let all = model.sum(active, |p| inputs.strategy.storage.of(p).bytes(&p.shape));
            all + STAGING_BYTES
        }
        // Active matrices have their parts on the GPU.
        Placement::ShardedHost => weights::parts_on_host(model, inputs, active) + STAGING_BYTES,
        Placement::Disk { .. } if inputs.on_gpu => {
            let ahead = weights::resident(
                model,
                &inputs.strategy.storage,
                stored,
                inputs.strategy.placement,
                inputs.ranks as u64,
                active,
                &|name| inputs.trains_rows_of(name),
            );
            ahead.bytes() + STAGING_BYTES
        }
        _ => 0,
    };

    let mut ledger = Ledger::new(inputs.on_gpu);
    ledger.moment("loading");
    let mut held = vec![
        ledger.alloc(MemoryKind::Process, inputs.process_bytes),
        ledger.alloc(MemoryKind::Data, inputs.data_bytes),
    ];
    weights::load(&mut ledger, model, inputs);
    let resident = match inputs.strategy.placement {
        Placement::Sharded => weights::WeightBytes {
            always: weights::in_parts(model, inputs, stored, active),
            layers: 0,
        },
        Placement::ExpertParallel => weights::WeightBytes {
            always: weights::with_own_experts(model, inputs, stored, active),
            layers: 0,
        },
        placement => {
            let (storage, ranks) = (&inputs.strategy.storage, inputs.ranks as u64);
            let held = |name: &str| inputs.trains_rows_of(name);
            weights::resident(model, storage, stored, placement, ranks, active, &held)
        }
    };
    held.push(ledger.alloc(MemoryKind::Weights, resident.always));
    let layers = ledger.alloc(MemoryKind::Weights, resident.layers);
    held.push(weights::reordered(model, inputs, &mut ledger));
    held.push(weights::reference(&mut ledger, inputs));
    held.push(ledger.alloc(MemoryKind::InactiveMasters, inputs.inactive_bytes(turn, element)));
    if turn.deactivates {
        weights::deactivate(&mut ledger, model, inputs, active, element);
    }
    if let Some(teacher) = &inputs.teacher {
        held.push(ledger.alloc(MemoryKind::Teacher, teacher.weights()));
        held.push(ledger.alloc(MemoryKind::HostWeights, teacher.on_host(inputs.on_gpu)));
    }
    if let Some(teacher) = &inputs.teacher {
        let moments = Optimizer::state_bytes(&recipe.optimizer, &teacher.projection(spec));
        held.push(ledger.alloc(MemoryKind::Adapters, teacher.projections(spec)));
        held.push(ledger.alloc(MemoryKind::Optimizer, teacher.states as u64 * moments));
    }
    held.extend([
        ledger.alloc(MemoryKind::Adapters, (model.adapter_elements() + fixed) * 4),
        ledger.alloc(MemoryKind::HostWeights, on_host),
        ledger.alloc(MemoryKind::Optimizer, state + corrected),
        ledger.alloc(MemoryKind::Averages, averages(model, recipe, inputs, active, stored)),
    ]);
    if let Some(teacher) = &inputs.teacher {
        ledger.moment("the generated answers of the student");
        let answers = inputs.answers(model, teacher.answers, inputs.longest);
        ledger.touch(MemoryKind::Activations, answers);
    }
    let judges = inputs.judges.iter().map(RewardModelSpec::weights).sum();
    held.push(ledger.alloc(MemoryKind::RewardModels, judges));
    if inputs.rollout > 0 {
        held.push(rollout(&mut ledger, model, recipe, inputs));
    }
    ledger.moment("the initialization of the adapters");
    if recipe.tune.method == Method::Lora {
        let packed = cost::packed(&recipe.tune.lora, &inputs.adapters);
        held.push(ledger.alloc(MemoryKind::Scratch, inputs.threads as u64 * packed));
    }
    ledger.touch(MemoryKind::Scratch, inputs.start_bytes(recipe, model));
    let exchanged = exchange_bytes(trained, inputs.ranks as u64);
    // Averages of weights do not leave a GPU piece by piece.
    if inputs.on_gpu && recipe.distributed.sync_every == 0 {
        let (host, device) = leaving_bytes(trained, model.largest_trained(active), inputs.ranks as u64);
        held.push(ledger.alloc(MemoryKind::HostGradients, exchanged + host));
        held.push(ledger.alloc(MemoryKind::Gradients, device));
    } else {
        held.push(ledger.alloc(MemoryKind::Gradients, exchanged));
    }
    // In a step a GPU holds the layers that were fetched last.
    let tracked = weights::FetchedLayers::is_of(inputs);
    let mut layers = Some(layers);
    if tracked {
        ledger.free_all(layers.take());
    }
    step::walk(
        &mut ledger,
        model,
        recipe,
        inputs,
        active,
        weights::FetchedLayers::new(tracked),
    );
    held.push(layers.unwrap_or_else(|| ledger.alloc(MemoryKind::Weights, resident.layers)));
    step::evaluate(&mut ledger, model, recipe, inputs);
    // A checkpoint or `final/` converts one tensor at a time to f32; from the disk only a small part of it.
    ledger.moment("saving");
    let largest = match (recipe.tune.method, inputs.strategy.placement) {
        (Method::Lora, _) | (_, Placement::Disk { .. }) => model.largest_trained(active),
        _ => model.largest(),
    };
    ledger.touch(MemoryKind::Saving, 4 * largest);
    if recipe.train.ema().is_some() {
        // The exact values of a weight, and those that take their place.
        ledger.moment("the averages of the weights");
        ledger.touch(MemoryKind::Saving, 8 * model.largest_trained(active));
    }
    ledger.free_all(held);
    (ledger, trained)
}

/// Bytes of the averages of the active parameters; ranks that divide moments divide them too.
fn averages(model: &PlanModel, recipe: &Recipe, inputs: &PlanInputs, active: &ActiveSet, stored: u64) -> u64 {
    if recipe.train.ema().is_none() {
        return 0;
    }
    let exact = recipe.model.dtype == Dtype::Bf16 && recipe.optimizer.master == Master::F32;
    let parts = parts(recipe, inputs, active);
    let busy = experts::busy_rank(model, inputs, active);
    model.sum_trained(active, |name| {
        let own = match experts::is_here(model, inputs, busy, name) {
            Some(false) => 0,
            Some(true) => model.elements(name),
            None => share(model.elements(name), parts),
        };
        ema_bytes(own, stored == 4 || exact || model.is_adapter(name))
    })
}

/// Simulates the answers of a rollout; returns the quantized copy of the weights.
fn rollout(ledger: &mut Ledger, model: &PlanModel, recipe: &Recipe, inputs: &PlanInputs) -> Allocation {
    // Every matrix is quantized: to 8 bits, or to 4 bits with a scale and a minimum for 64 values.
    let matrices = model.sum(&ActiveSet::new([]), |p| match p.shape.len() {
        2 => p.elements() as u64,
        _ => 0,
    });
    let codes = match recipe.rl.rollout_weights {
        RolloutWeights::Exact => 0,
        RolloutWeights::Int8 => matrices,
        RolloutWeights::Int4 => matrices * 9 / 16,
    };
    // The copy is complete on the device, also if the weights are not there.
    let copied = codes > 0 && inputs.on_gpu && inputs.strategy.placement.streams_layers();
    let embedding = if copied {
        inputs.element * (model.spec.vocab * model.spec.hidden) as u64
    } else {
        0
    };
    let held = ledger.alloc(MemoryKind::Rollout, codes + embedding);
    if codes > 0 {
        // A layer with experts is copied as a whole.
        ledger.touch(MemoryKind::Rollout, weights::largest_mixture(model, inputs));
    }
    ledger.moment("the rollout");
    // Keys and values of every token of every answer.
    let answers = inputs.answers(model, inputs.rollout, inputs.longest);
    ledger.touch(MemoryKind::Rollout, answers);
    let answered = inputs.rollout.max(inputs.evaluation.answers);
    let work = inputs
        .judges
        .iter()
        .map(|j| j.forward(inputs, answered, inputs.longest));
    ledger.moment("the rewards of the answers");
    ledger.touch(MemoryKind::RewardModels, work.max().unwrap_or(0));
    held
}

#[cfg(test)]
mod tests;
