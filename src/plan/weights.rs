//! Memory of the weights of a model: loading, resident weights, requantization between two blocks.

use super::PlanInputs;
use super::model::PlanModel;
use crate::base::ledger::{Allocation, Ledger, MemoryKind};
use crate::comm::share;
use crate::engine::ActiveSet;
use crate::model::spec::EMBEDDING;
use crate::model::{Spec, tokens};
use crate::quant::StorageDtype;
use crate::recipe::Recipe;
use crate::setup::ElementBytes;
use crate::source::memory::{LayerSlots, WeightMemory, head_slots};
use crate::source::sharded::{collections, is_in_parts, own_bytes, part_bytes};
use crate::source::{Group, ParamInfo, Placement, StoragePolicy};

impl PlanInputs {
    /// Rows per chunk if the output projection is held only in chunks.
    pub(super) fn head_chunk(&self, spec: &Spec, active: &ActiveSet) -> Option<usize> {
        let head = spec.head_name();
        let whole = active.contains(head) || self.trains_rows_of(head);
        self.strategy.placement.head_chunk(whole)
    }

    /// True if rows of the embedding are read one by one.
    pub(super) fn reads_embedding_rows(&self, spec: &Spec, active: &ActiveSet) -> bool {
        let whole = active.contains(EMBEDDING) || self.trains_rows_of(EMBEDDING);
        self.strategy.placement.reads_embedding_rows(whole, spec.tied)
    }

    /// True if rows of this matrix train: it is in memory for the whole run.
    pub(super) fn trains_rows_of(&self, table: &str) -> bool {
        let rows = tokens::name_of(table);
        self.turns.iter().any(|turn| turn.active.contains(&rows))
    }
}

/// Bytes of weights that are in the memory of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WeightBytes {
    /// Those that stay, and the double buffers of routed experts and of chunks of the head.
    pub always: u64,
    /// The double buffer for layers.
    pub layers: u64,
}

/// The two layers that a GPU holds of those on the host: the ones that were fetched last. An active layer is on the GPU anyway.
pub(super) struct FetchedLayers {
    held: Vec<(usize, Allocation)>,
    /// False: the caller counts two layers all the time.
    tracked: bool,
}

impl FetchedLayers {
    /// No layer yet; `tracked`: the layers are counted here.
    pub fn new(tracked: bool) -> Self {
        Self {
            held: Vec::new(),
            tracked,
        }
    }

    /// True if layers are brought to a GPU.
    pub fn is_of(inputs: &PlanInputs) -> bool {
        inputs.on_gpu && inputs.strategy.placement.streams_layers()
    }

    /// From now on these layers are there.
    pub fn hold(
        &mut self,
        l: &mut Ledger,
        model: &PlanModel,
        inputs: &PlanInputs,
        active: &ActiveSet,
        layers: [usize; 2],
    ) {
        if !self.tracked {
            return;
        }
        let held = std::mem::take(&mut self.held);
        let (stay, go): (Vec<_>, Vec<_>) = held.into_iter().partition(|(layer, _)| layers.contains(layer));
        self.held = stay;
        l.free_all(go.into_iter().map(|(_, weights)| weights));
        for layer in layers {
            if layer >= model.layers() || self.held.iter().any(|(held, _)| *held == layer) {
                continue;
            }
            let streamed = model.layer(layer);
            let sharded = inputs.strategy.placement.is_sharded();
            // A sharded layer is there as a whole, also what trains.
            let streamed =
                streamed.filter(|p| sharded && is_in_parts(p) || p.expert().is_none() && !active.contains(&p.name));
            let bytes = streamed.map(|p| stored_bytes(inputs, active, &p)).sum();
            self.held.push((layer, l.alloc(MemoryKind::Weights, bytes)));
        }
    }

    /// The layers are no longer needed.
    pub fn free(self, l: &mut Ledger) {
        l.free_all(self.held.into_iter().map(|(_, weights)| weights));
    }
}

/// Bytes of a weight as it is stored. Active ones are not quantized.
fn stored_bytes(inputs: &PlanInputs, active: &ActiveSet, p: &ParamInfo) -> u64 {
    let storage = &inputs.strategy.storage;
    if active.contains(&p.name) {
        storage.dtype().bytes() * p.elements() as u64
    } else {
        storage.of(p).bytes(&p.shape)
    }
}

/// Bytes of the resident weights, and of the double buffer for layers from the disk. `value_bytes`: bytes per value in
/// the model's type. `held`: matrices that are in memory, although they are not active.
pub(super) fn resident(
    model: &PlanModel,
    storage: &StoragePolicy,
    value_bytes: u64,
    placement: Placement,
    ranks: u64,
    active: &ActiveSet,
    held: &dyn Fn(&str) -> bool,
) -> WeightBytes {
    let spec = model.spec;
    // Active parameters are not quantized.
    let bytes = |p: &ParamInfo| {
        if active.contains(&p.name) {
            value_bytes * p.elements() as u64
        } else {
            storage.of(p).bytes(&p.shape)
        }
    };
    if !placement.streams_layers() {
        let always = model.sum(active, bytes);
        return WeightBytes { always, layers: 0 };
    }
    let always = |p: &ParamInfo| {
        if held(&p.name) {
            true
        } else if &*p.name == spec.head_name() {
            placement.head_chunk(false).is_none()
        } else {
            p.group == Group::Head
        }
    };
    let stays = |p: &ParamInfo| active.contains(&p.name) || always(p);
    let outside = model.outside().iter().filter(|p| stays(p));
    let mut resident: u64 = outside.map(bytes).sum();
    let mut slots = LayerSlots::default();
    for run in model.runs(active) {
        let mut streamed = Vec::new();
        for p in model.layer(run.first) {
            let bytes = bytes(&p);
            if placement.is_sharded() && is_in_parts(&p) {
                let own = part_bytes(&p, bytes, false, ranks) * u64::from(active.contains(&p.name));
                resident = resident.saturating_add(own.saturating_mul(run.count as u64));
                streamed.push((p, bytes));
            } else if stays(&p) {
                resident = resident.saturating_add(bytes.saturating_mul(run.count as u64));
            } else {
                streamed.push((p, bytes));
            }
        }
        if placement.is_sharded() {
            slots.add_whole(streamed, run.count);
        } else {
            slots.add(streamed, run.count);
        }
    }
    let whole = active.contains(spec.head_name()) || held(spec.head_name());
    let head = placement
        .head_chunk(whole)
        .map_or(0, |chunk| head_slots(chunk, (spec.vocab, spec.hidden), value_bytes));
    WeightBytes {
        always: resident + slots.expert_bytes() + head,
        layers: slots.layer_bytes(),
    }
}

impl WeightBytes {
    /// All of them.
    pub fn bytes(&self) -> u64 {
        self.always.saturating_add(self.layers)
    }
}

/// Bytes of the weights of a rank that has a part of every matrix of the layers, with two layers that were collected.
pub(super) fn in_parts(model: &PlanModel, inputs: &PlanInputs, value_bytes: u64, active: &ActiveSet) -> u64 {
    let storage = &inputs.strategy.storage;
    let bytes = |p: &ParamInfo| {
        let quantized = storage.of(p).is_quantized() && !active.contains(&p.name);
        if active.contains(&p.name) {
            (value_bytes * p.elements() as u64, quantized)
        } else {
            (storage.of(p).bytes(&p.shape), quantized)
        }
    };
    let mut all: u64 = model.outside().iter().map(|p| bytes(p).0).sum();
    let mut largest = 0;
    for run in model.runs(active) {
        let mut collected = 0;
        for p in model.layer(run.first) {
            let (mut own, quantized) = bytes(&p);
            if is_in_parts(&p) {
                collected += own;
                own = part_bytes(&p, own, quantized, inputs.near() as u64);
            }
            all = all.saturating_add(own.saturating_mul(run.count as u64));
        }
        largest = largest.max(collected);
    }
    all + 2 * largest
}

/// Host bytes of a rank whose layers go to a GPU in parts: the own parts of inactive matrices, all other weights, and two layers
/// that were collected.
pub(super) fn parts_on_host(model: &PlanModel, inputs: &PlanInputs, active: &ActiveSet) -> u64 {
    let storage = &inputs.strategy.storage;
    let whole = |p: &ParamInfo| stored_bytes(inputs, active, p);
    let mut all: u64 = model.outside().iter().map(whole).sum();
    // An own part on the GPU is copied to the host for a collection.
    let mut largest = 0;
    for run in model.runs(active) {
        let mut collected = 0;
        for p in model.layer(run.first) {
            let mut own = whole(&p);
            if is_in_parts(&p) {
                collected += own;
                let near = inputs.near() as u64;
                if active.contains(&p.name) {
                    let on_gpu = part_bytes(&p, own, false, inputs.ranks as u64);
                    collected += on_gpu;
                    own = part_bytes(&p, own, false, near).saturating_sub(on_gpu);
                } else {
                    own = part_bytes(&p, own, storage.of(&p).is_quantized(), near);
                }
            }
            all = all.saturating_add(own.saturating_mul(run.count as u64));
        }
        largest = largest.max(collected);
    }
    all + 2 * largest
}

/// Bytes of the weights of a rank that has some of the routed experts, and everything else.
pub(super) fn with_own_experts(model: &PlanModel, inputs: &PlanInputs, value_bytes: u64, active: &ActiveSet) -> u64 {
    let memory = inputs.weight_memory(model.experts(), ElementBytes::default());
    model.sum(active, |p| {
        if memory.is_elsewhere(p) {
            0
        } else if active.contains(&p.name) {
            value_bytes * p.elements() as u64
        } else {
            inputs.strategy.storage.of(p).bytes(&p.shape)
        }
    })
}

/// Bytes that rank `rank` sends in a step, so that the layers are collected.
pub(super) fn collected(
    model: &PlanModel,
    inputs: &PlanInputs,
    value_bytes: u64,
    active: &ActiveSet,
    rank: usize,
) -> u64 {
    if !inputs.strategy.placement.is_sharded() {
        return 0;
    }
    let (layers, size, near) = (model.layers(), inputs.ranks, inputs.near());
    let trains = |layer: usize| model.layer(layer).any(|p| is_in_parts(&p) && active.contains(&p.name));
    let lowest = active.lowest_layer(layers);
    let counts = collections(
        layers,
        lowest,
        inputs.rounds(),
        inputs.strategy.placement == Placement::ShardedHost,
        trains,
    );
    let of = |p: ParamInfo| {
        let (format, bytes) = match inputs.strategy.storage.of(&p) {
            StorageDtype::Quantized(format, _) if !active.contains(&p.name) => {
                (Some(format), inputs.strategy.storage.of(&p).bytes(&p.shape))
            }
            _ => (None, value_bytes * p.elements() as u64),
        };
        if format.is_some() {
            return own_bytes(&p, format, bytes, (rank % near, near));
        }
        // The own part, and copies of those of the same rank on other machines.
        let peers = (rank % near..size).step_by(near);
        peers.map(|peer| own_bytes(&p, None, bytes, (peer, size))).sum()
    };
    let of_layer = |layer: usize| model.layer(layer).filter(is_in_parts).map(of).sum::<u64>();
    let all = counts.iter().enumerate().map(|(layer, count)| count * of_layer(layer));
    all.sum::<u64>() * (near as u64 - 1) + renewed(model, inputs, value_bytes, active, rank)
}

/// Bytes of new values that rank `rank` sends in a step to the ranks of other machines that have copies of them.
pub(super) fn renewed(
    model: &PlanModel,
    inputs: &PlanInputs,
    value_bytes: u64,
    active: &ActiveSet,
    rank: usize,
) -> u64 {
    if inputs.machines < 2 || !inputs.strategy.placement.is_sharded() {
        return 0;
    }
    let of = |p: &ParamInfo| {
        if is_in_parts(p) && active.contains(&p.name) {
            own_bytes(p, None, value_bytes * p.elements() as u64, (rank, inputs.ranks))
        } else {
            0
        }
    };
    let own = (0..model.layers()).flat_map(|layer| model.layer(layer)).map(|p| of(&p));
    own.sum::<u64>() * (inputs.machines as u64 - 1)
}

/// The most bytes of new values that a rank sends to other machines in a step.
pub fn most_renewed(model: &PlanModel, recipe: &Recipe, inputs: &PlanInputs) -> u64 {
    let stored = recipe.model.dtype.bytes();
    let turns = inputs.turns.iter().map(|turn| &turn.active);
    let of = |active| (0..inputs.ranks).map(move |rank| renewed(model, inputs, stored, active, rank));
    turns.flat_map(of).max().unwrap_or(0)
}

/// Bytes of the largest layer with experts, if the weights are not on the device.
pub(super) fn largest_mixture(model: &PlanModel, inputs: &PlanInputs) -> u64 {
    let storage = &inputs.strategy.storage;
    let whole = |first: usize| model.layer(first).map(|p| storage.of(&p).bytes(&p.shape)).sum();
    let runs = model.runs(&ActiveSet::new([])).into_iter().map(|run| run.first);
    let mixtures = runs.filter(|l| model.spec.layers[*l].experts.is_some());
    let streamed = inputs.strategy.placement.streams_layers();
    mixtures.filter(|_| streamed).map(whole).max().unwrap_or(0)
}

/// Bytes of a weight while its codes are reordered, which the disk tier does each time it reads one.
pub(super) fn reordered(model: &PlanModel, inputs: &PlanInputs, l: &mut Ledger) -> Allocation {
    let storage = &inputs.strategy.storage;
    let mut most = 0;
    if matches!(inputs.strategy.placement, Placement::Disk { .. }) {
        model.each(&ActiveSet::new([]), |p, _| {
            if let StorageDtype::Quantized(format, _) = storage.of(p)
                && format.is_read_only()
            {
                most = storage.of(p).bytes(&p.shape).max(most);
            }
        });
    }
    l.alloc(inputs.weight_memory(0, ElementBytes::default()).staging(), most)
}

impl PlanInputs {
    fn weight_memory(&self, experts: usize, element: ElementBytes) -> WeightMemory<'_> {
        WeightMemory {
            storage: &self.strategy.storage,
            placement: self.strategy.placement,
            ranks: self.ranks as u64,
            near: self.near() as u64,
            experts,
            on_gpu: self.on_gpu,
            file_bytes: self.file_bytes,
            value_bytes: element.stored,
            low_bytes: element.master,
        }
    }
}

/// Loads every weight of the model.
pub(super) fn load(l: &mut Ledger, model: &PlanModel, inputs: &PlanInputs) {
    l.moment("loading");
    let memory = inputs.weight_memory(model.experts(), ElementBytes::default());
    let (first, last) = model.outside().split_at(model.outside().len().min(1));
    let mut allocations: Vec<Allocation> = first.iter().filter_map(|p| memory.load(l, p)).collect();
    each_layer(l, model, &ActiveSet::new([]), &mut allocations, |l, p| {
        memory.load(l, p)
    });
    allocations.extend(last.iter().filter_map(|p| memory.load(l, p)));
    l.free_all(allocations);
}

/// Loads the reference of an RL stage; returns what stays allocated.
pub(super) fn reference(l: &mut Ledger, inputs: &PlanInputs) -> Allocation {
    let held = l.alloc(MemoryKind::Reference, inputs.reference.held);
    let memory = inputs.weight_memory(0, ElementBytes::default());
    l.touch(memory.staging(), inputs.reference.read);
    held
}

/// Simulates something for each parameter of each layer; it leaves the returned memory allocated. Memory grows with
/// each layer, so the last of equal layers is the worst.
fn each_layer<A: IntoIterator<Item = Allocation>>(
    l: &mut Ledger,
    model: &PlanModel,
    active: &ActiveSet,
    allocations: &mut Vec<Allocation>,
    simulate: impl Fn(&mut Ledger, &ParamInfo) -> A,
) {
    for run in model.runs(active) {
        let before = l.sizes();
        for p in model.layer(run.first) {
            allocations.extend(simulate(l, &p));
        }
        if run.count > 1 {
            allocations.extend(l.alloc_again(&before, run.count as u64 - 2));
            for p in model.layer(run.first) {
                allocations.extend(simulate(l, &p));
            }
        }
    }
}

/// Deactivates a trained block: requantizes its quantized weights one by one. The caller holds the `resident` weights
/// and the exact values of other blocks. `value_bytes`: bytes per value in the model's type, and of the low part of the
/// fp32 master.
pub(super) fn deactivate(
    l: &mut Ledger,
    model: &PlanModel,
    inputs: &PlanInputs,
    active: &ActiveSet,
    element: ElementBytes,
) {
    let quantized = |p: &ParamInfo| active.contains(&p.name) && inputs.strategy.storage.of(p).is_quantized();
    let (mut elements, mut any) = (0, false);
    model.each(active, |p, count| {
        if active.contains(&p.name) {
            let all = p.elements() as u64;
            let sharded = inputs.strategy.placement == Placement::ShardedHost && is_in_parts(p);
            elements += count * if sharded { share(all, inputs.ranks as u64) } else { all };
            any |= quantized(p);
        }
    });
    if !any {
        return;
    }
    l.moment("the requantization of a block");
    let memory = inputs.weight_memory(model.experts(), element);
    let mut allocations = vec![memory.low_bits(l, elements)];
    each_layer(l, model, active, &mut allocations, |l, p| {
        if quantized(p) {
            memory.requantize(l, p)
        } else {
            Vec::new()
        }
    });
    l.free_all(allocations);
}
