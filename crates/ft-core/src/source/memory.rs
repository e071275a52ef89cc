//! Memory of the weights that a source holds: while it reads a weight, between the steps, and while it requantizes a
//! deactivated weight. The planner adds these up for a model.

use super::sharded::{MatrixDivision, is_in_parts, own_experts, part_bytes};
use super::{ParamInfo, Placement, SLOTS, StoragePolicy};
use crate::base::ledger::{Allocation, Ledger, MemoryKind};
use crate::quant::StorageDtype;
use std::collections::{BTreeMap, BTreeSet};

/// Settings on which the memory of a weight depends.
#[derive(Clone, Copy)]
pub struct WeightMemory<'a> {
    /// Storage of the weights.
    pub storage: &'a StoragePolicy,
    /// Where inactive weights are.
    pub placement: Placement,
    /// Ranks of the job.
    pub ranks: u64,
    /// Ranks that have all weights together, if they divide them: all, or those of a machine.
    pub near: u64,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Tensors are on a GPU.
    pub on_gpu: bool,
    /// Bytes per value when a weight is read for quantization; 0 if the files are quantized already.
    pub file_bytes: u64,
    /// Bytes per value in the model's type.
    pub value_bytes: u64,
    /// Bytes per value of the low part of the fp32 master.
    pub low_bytes: u64,
}

impl WeightMemory<'_> {
    /// The kind of memory of a staging buffer, which is on the host.
    pub fn staging(&self) -> MemoryKind {
        if self.on_gpu {
            MemoryKind::HostWeights
        } else {
            MemoryKind::Scratch
        }
    }

    /// The kind of memory of parts of weights.
    fn kind(&self) -> MemoryKind {
        match self.placement {
            Placement::ShardedHost => MemoryKind::HostWeights,
            _ => MemoryKind::Weights,
        }
    }

    /// True if another rank has this weight of an expert. The last rank has the most experts.
    pub fn is_elsewhere(&self, p: &ParamInfo) -> bool {
        let (last, size) = (self.ranks.saturating_sub(1) as usize, self.ranks.max(1) as usize);
        let own = own_experts(self.experts, last, size);
        let divided = self.placement == Placement::ExpertParallel && MatrixDivision::Experts.divides(p);
        divided && p.expert().is_some_and(|expert| !own.contains(&expert))
    }

    /// Reads a weight. A weight that is quantized exists twice for a short time: as read, and quantized. Returns what
    /// stays allocated.
    pub fn load(&self, l: &mut Ledger, p: &ParamInfo) -> Option<Allocation> {
        if self.is_elsewhere(p) {
            return None;
        }
        let storage = self.storage.of(p);
        let read = match storage {
            StorageDtype::Quantized(..) => self.file_bytes * p.elements() as u64,
            StorageDtype::Dense(_) => 0,
        };
        let read = l.alloc(self.staging(), read);
        let bytes = storage.bytes(&p.shape);
        let stored = match self.placement {
            Placement::ExpertParallel => Some(l.alloc(MemoryKind::Weights, bytes)),
            Placement::Device => Some(l.alloc(MemoryKind::Weights, bytes)),
            Placement::Sharded | Placement::ShardedHost if is_in_parts(p) => {
                // Quantized as a whole, then cut.
                if storage.is_quantized() {
                    l.touch(self.staging(), bytes);
                }
                let own = part_bytes(p, bytes, storage.is_quantized(), self.near);
                Some(l.alloc(self.kind(), own))
            }
            Placement::Sharded => Some(l.alloc(MemoryKind::Weights, bytes)),
            Placement::Host | Placement::ShardedHost => Some(l.alloc(MemoryKind::HostWeights, bytes)),
            // Weights that are not quantized in the files are written to a separate file first.
            Placement::Disk { .. } => {
                if storage.is_quantized() && self.file_bytes > 0 {
                    l.touch(self.staging(), bytes);
                }
                None
            }
        };
        l.free(read);
        stored
    }

    /// The low 16 bits of the masters of a block that is deactivated, in a staging buffer.
    pub fn low_bits(&self, l: &mut Ledger, elements: u64) -> Allocation {
        l.alloc(self.staging(), self.low_bytes * elements)
    }

    /// Requantizes a deactivated weight; its exact values stay beside the quantized data until the whole block is done.
    /// Returns what stays allocated.
    pub fn requantize(&self, l: &mut Ledger, p: &ParamInfo) -> Vec<Allocation> {
        let n = p.elements() as u64;
        let mut stays = Vec::new();
        if self.on_gpu {
            // Of a matrix in parts only the own one stays.
            let own = if self.placement.is_sharded() && is_in_parts(p) {
                part_bytes(p, self.value_bytes * n, false, self.ranks)
            } else {
                self.value_bytes * n
            };
            stays.push(l.alloc(MemoryKind::HostWeights, own));
        }
        let exact = l.alloc(self.staging(), 4 * n);
        // The low half is copied to join it with the high one.
        l.touch(self.staging(), self.low_bytes * n);
        let whole_on_one_rank = self.placement == Placement::ExpertParallel && MatrixDivision::Experts.divides(p);
        if whole_on_one_rank || self.placement.is_sharded() && is_in_parts(p) {
            // The whole weight and its low half are collected, and the quantized data is cut.
            let bytes = self.storage.of(p).bytes(&p.shape);
            l.touch(self.staging(), (self.value_bytes + self.low_bytes) * n + bytes);
            l.free(exact);
            let own = if !whole_on_one_rank {
                part_bytes(p, bytes, true, self.near)
            } else if self.is_elsewhere(p) {
                0
            } else {
                bytes
            };
            stays.push(l.alloc(self.kind(), own));
            return stays;
        }
        let quantized = l.alloc(MemoryKind::Weights, self.storage.of(p).bytes(&p.shape));
        l.free(exact);
        match self.placement {
            Placement::Device
            | Placement::Sharded
            | Placement::ShardedHost
            | Placement::ExpertParallel
            | Placement::Host => {
                stays.push(quantized);
            }
            Placement::Disk { .. } => l.free(quantized),
        }
        stays
    }
}

/// The double buffers of the layers that are streamed, and of their routed experts. A slot has the size of the largest layer
/// without its experts, or of the largest expert; parameters of the same name in two layers or two experts share their buffer.
#[derive(Default)]
pub struct LayerSlots {
    layers: DoubleBufferSize,
    experts: DoubleBufferSize,
}

/// A double buffer.
#[derive(Default)]
struct DoubleBufferSize {
    /// The largest parameter of each name.
    largest: BTreeMap<String, u64>,
    /// Number of layers or experts.
    items: u64,
}

impl DoubleBufferSize {
    fn hold(&mut self, name: String, bytes: u64) {
        let largest = self.largest.entry(name).or_default();
        *largest = bytes.max(*largest);
    }

    fn bytes(&self) -> u64 {
        (SLOTS as u64).min(self.items) * self.largest.values().sum::<u64>()
    }
}

impl LayerSlots {
    /// Adds `count` equal layers that stream these parameters, each with its bytes.
    pub fn add(&mut self, params: impl IntoIterator<Item = (ParamInfo, u64)>, count: usize) {
        let mut streams = false;
        let mut experts = BTreeSet::new();
        for (p, bytes) in params {
            let below = p.name.splitn(4, '.').nth(3).unwrap_or_default();
            match p.expert() {
                Some(expert) => {
                    experts.insert(expert);
                    self.experts.hold(below.replacen(&format!(".{expert}."), ".", 1), bytes);
                }
                None => {
                    self.layers.hold(below.to_string(), bytes);
                    streams = true;
                }
            }
        }
        self.layers.items += if streams { count as u64 } else { 0 };
        self.experts.items += (experts.len() * count) as u64;
    }

    /// As `add`, for layers that are copied with all their experts.
    pub fn add_whole(&mut self, params: impl IntoIterator<Item = (ParamInfo, u64)>, count: usize) {
        for (p, bytes) in params {
            let below = p.name.splitn(4, '.').nth(3).unwrap_or_default();
            self.layers.hold(below.to_string(), bytes);
        }
        self.layers.items += count as u64;
    }

    /// Bytes of the slots of layers.
    pub fn layer_bytes(&self) -> u64 {
        self.layers.bytes()
    }

    /// Bytes of the slots of routed experts.
    pub fn expert_bytes(&self) -> u64 {
        self.experts.bytes()
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.layer_bytes() + self.expert_bytes()
    }
}

/// Bytes of the double buffer for chunks of `chunk` rows of an output projection `[rows, width]`.
pub fn head_slots(chunk: usize, (rows, width): (usize, usize), value_bytes: u64) -> u64 {
    let chunk = chunk.min(rows);
    let slots = SLOTS.min(rows.div_ceil(chunk.max(1)));
    slots as u64 * value_bytes * (chunk * width) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Dtype;
    use crate::source::policy::{StorageRules, WeightStorage};
    use crate::source::{Group, Sublayer};

    fn param(layer: usize, name: &str, shape: &[usize]) -> ParamInfo {
        ParamInfo {
            group: Group::Layer(layer),
            sublayer: if shape.len() == 2 {
                Sublayer::Mlp
            } else {
                Sublayer::Attention
            },
            name: format!("model.layers.{layer}.{name}").into(),
            shape: shape.to_vec(),
        }
    }

    /// Two int8 matrices of a layer with an f32 scale per row, and a norm that stays bf16.
    fn params() -> [ParamInfo; 3] {
        [
            param(0, "mlp.up_proj.weight", &[256, 64]),
            param(0, "mlp.down_proj.weight", &[64, 128]),
            param(0, "input_layernorm.weight", &[64]),
        ]
    }

    const CODES: [u64; 2] = [256 * (64 + 4), 64 * (128 + 4)];
    const NUMBERS: [u64; 2] = [256 * 64, 64 * 128];
    const NORM: u64 = 2 * 64;

    fn peak(
        quantized: bool,
        placement: Placement,
        simulate: impl Fn(&mut Ledger, &WeightMemory) -> Vec<Allocation>,
    ) -> u64 {
        let rules = StorageRules {
            frozen: quantized.then_some(WeightStorage::Int8),
            ..StorageRules::default()
        };
        let memory = WeightMemory {
            storage: &StoragePolicy::new(&rules, Dtype::Bf16, &params(), |_| false).unwrap(),
            placement,
            on_gpu: false,
            file_bytes: 2,
            ranks: 1,
            near: 1,
            experts: 0,
            value_bytes: 2,
            low_bytes: 2,
        };
        let mut ledger = Ledger::new(false);
        let stays = simulate(&mut ledger, &memory);
        ledger.free_all(stays);
        assert_eq!(ledger.total(), 0);
        ledger.peak
    }

    #[test]
    fn a_weight_that_is_quantized_exists_twice_while_it_is_loaded() {
        let load = |l: &mut Ledger, memory: &WeightMemory| params().iter().filter_map(|p| memory.load(l, p)).collect();
        assert_eq!(
            peak(false, Placement::Device, load),
            2 * (NUMBERS[0] + NUMBERS[1]) + NORM,
            "dense weights are read where they stay"
        );
        let first = 2 * NUMBERS[0] + CODES[0];
        let second = CODES[0] + 2 * NUMBERS[1] + CODES[1];
        assert_eq!(peak(true, Placement::Device, load), first.max(second));
        // Through a file: one weight at a time.
        assert_eq!(peak(true, Placement::Disk { head_rows: None }, load), first);
        assert_eq!(peak(false, Placement::Disk { head_rows: None }, load), 0);
    }

    #[test]
    fn a_deactivated_block_is_requantized_one_weight_after_another() {
        let requantize = |l: &mut Ledger, memory: &WeightMemory| {
            let mut stays = vec![memory.low_bits(l, params().iter().map(|p| p.elements() as u64).sum())];
            stays.extend(params()[..2].iter().flat_map(|p| memory.requantize(l, p)));
            stays
        };
        let low = 2 * (NUMBERS[0] + NUMBERS[1] + NORM / 2);
        let first = 4 * NUMBERS[0] + (2 * NUMBERS[0]).max(CODES[0]);
        let second = CODES[0] + 4 * NUMBERS[1] + (2 * NUMBERS[1]).max(CODES[1]);
        assert_eq!(peak(true, Placement::Device, requantize), low + first.max(second));
        assert_eq!(peak(true, Placement::Disk { head_rows: None }, requantize), low + first);
    }

    #[test]
    fn a_slot_has_the_size_of_the_largest_layer() {
        let mut slots = LayerSlots::default();
        slots.add([(param(0, "a", &[1]), 10), (param(0, "b", &[1]), 5)], 1);
        assert_eq!(slots.bytes(), 15);
        slots.add([(param(1, "a", &[1]), 4), (param(1, "b", &[1]), 7)], 3);
        slots.add([], 9);
        assert_eq!(slots.bytes(), 2 * 17);
        // Two experts of any layer, whatever their number is.
        let expert = |e: usize| {
            let one = |below: &str, bytes| (param(4, &format!("mlp.experts.{e}.{below}"), &[1]), bytes);
            [one("up.weight", 100 + e as u64), one("down.weight", 50)]
        };
        slots.add((0..8).flat_map(expert), 2);
        assert_eq!(slots.bytes(), 2 * 17 + 2 * (107 + 50));
        assert_eq!(head_slots(10, (100, 8), 2), 2 * 2 * 10 * 8);
        assert_eq!(head_slots(200, (100, 8), 2), 2 * 100 * 8);
    }
}
