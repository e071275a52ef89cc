//! A simulated allocator: counts the allocated bytes at each moment of a step, by kind, and finds the peak.

use std::ops::{Index, IndexMut};

/// A use of memory, in the order of the table of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryKind {
    /// Weights on the device.
    Weights,
    /// Initial weights, for the KL divergence.
    Reference,
    /// Parameters of adapters.
    Adapters,
    /// Optimizer states of the active parameters.
    Optimizer,
    /// Low 16 bits of the fp32 masters of inactive parameters. On the host.
    InactiveMasters,
    /// Moving averages of the active parameters. On the host.
    Averages,
    /// Weights on the host, before they are copied to a GPU.
    HostWeights,
    /// Layer inputs on the host.
    OffloadedInputs,
    /// Gradients of ranks with GPUs: the sums, and what is on its way. On the host.
    HostGradients,
    /// Gradients of parameters.
    Gradients,
    /// Layer inputs that the backward pass needs.
    LayerInputs,
    /// Saved activations of layers that are not recomputed.
    Activations,
    /// Temporary memory of one layer.
    LayerWork,
    /// Logits and gradients of the loss.
    Loss,
    /// KV cache and quantized weights of a rollout.
    Rollout,
    /// Weights of a teacher, and its forward pass.
    Teacher,
    /// Weights of reward models, and their forward passes.
    RewardModels,
    /// A tensor that is written to a file. On the host.
    Saving,
    /// Tokenized rows and batches. On the host.
    Data,
    /// Buffers of CPU operations.
    Scratch,
    /// Memory of the program before a model is loaded. On the host.
    Process,
}

const KINDS: usize = MemoryKind::Process as usize + 1;

/// Bytes of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BytesByKind([u64; KINDS]);

impl Index<MemoryKind> for BytesByKind {
    type Output = u64;

    fn index(&self, kind: MemoryKind) -> &u64 {
        &self.0[kind as usize]
    }
}

impl IndexMut<MemoryKind> for BytesByKind {
    fn index_mut(&mut self, kind: MemoryKind) -> &mut u64 {
        &mut self.0[kind as usize]
    }
}

/// One simulated allocation. Must be freed with `Ledger::free`.
#[derive(Debug)]
#[must_use]
pub struct Allocation {
    kind: MemoryKind,
    bytes: u64,
}

/// The simulated allocator.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    now: BytesByKind,
    total: u64,
    /// Prefix of the names of moments.
    prefix: &'static str,
    moment: String,
    /// The peak of each kind.
    pub largest: BytesByKind,
    /// Host memory is counted separately.
    host_apart: bool,
    host: u64,
    /// The peak of host memory, if it is counted separately.
    pub host_peak: u64,
    /// The peak of the sum.
    pub peak: u64,
    /// The name of that moment.
    pub peak_moment: String,
    /// The bytes of each kind at that moment.
    pub at_peak: BytesByKind,
}

impl MemoryKind {
    const ALL: [MemoryKind; KINDS] = [
        MemoryKind::Weights,
        MemoryKind::Reference,
        MemoryKind::Adapters,
        MemoryKind::Optimizer,
        MemoryKind::InactiveMasters,
        MemoryKind::Averages,
        MemoryKind::HostWeights,
        MemoryKind::OffloadedInputs,
        MemoryKind::HostGradients,
        MemoryKind::Gradients,
        MemoryKind::LayerInputs,
        MemoryKind::Activations,
        MemoryKind::LayerWork,
        MemoryKind::Loss,
        MemoryKind::Rollout,
        MemoryKind::Teacher,
        MemoryKind::RewardModels,
        MemoryKind::Saving,
        MemoryKind::Data,
        MemoryKind::Scratch,
        MemoryKind::Process,
    ];

    /// True if this kind stays in host memory when tensors are on a GPU.
    fn on_host(self) -> bool {
        matches!(
            self,
            MemoryKind::InactiveMasters
                | MemoryKind::Averages
                | MemoryKind::HostWeights
                | MemoryKind::OffloadedInputs
                | MemoryKind::HostGradients
                | MemoryKind::Saving
                | MemoryKind::Data
                | MemoryKind::Process
        )
    }
}

impl Ledger {
    /// `host_apart`: tensors are on a GPU, and host memory is counted separately.
    pub fn new(host_apart: bool) -> Self {
        Self {
            host_apart,
            ..Self::default()
        }
    }

    /// Names the current moment of the step.
    pub fn moment(&mut self, name: impl Into<String>) {
        self.moment = format!("{}{}", self.prefix, name.into());
    }

    /// Sets the prefix of the following moments.
    pub fn set_prefix(&mut self, prefix: &'static str) {
        self.prefix = prefix;
    }

    /// Allocates `bytes`.
    pub fn alloc(&mut self, kind: MemoryKind, bytes: u64) -> Allocation {
        // Saturates: a huge size must not wrap around to a small one.
        self.now[kind] = self.now[kind].saturating_add(bytes);
        self.largest[kind] = self.largest[kind].max(self.now[kind]);
        if self.host_apart && kind.on_host() {
            self.host = self.host.saturating_add(bytes);
            self.host_peak = self.host_peak.max(self.host);
            return Allocation { kind, bytes };
        }
        self.total = self.total.saturating_add(bytes);
        if self.total > self.peak {
            self.peak = self.total;
            self.peak_moment.clone_from(&self.moment);
            self.at_peak = self.now;
        }
        Allocation { kind, bytes }
    }

    /// Frees an allocation.
    pub fn free(&mut self, allocation: Allocation) {
        let now = &mut self.now[allocation.kind];
        *now = now.saturating_sub(allocation.bytes);
        if self.host_apart && allocation.kind.on_host() {
            self.host = self.host.saturating_sub(allocation.bytes);
        } else {
            self.total = self.total.saturating_sub(allocation.bytes);
        }
    }

    /// Moves the bytes to another kind.
    pub fn relabel(&mut self, allocation: Allocation, kind: MemoryKind) -> Allocation {
        let bytes = allocation.bytes;
        self.free(allocation);
        self.alloc(kind, bytes)
    }

    /// Frees several allocations.
    pub fn free_all(&mut self, allocations: impl IntoIterator<Item = Allocation>) {
        allocations.into_iter().for_each(|a| self.free(a));
    }

    /// Allocates and frees at once.
    pub fn touch(&mut self, kind: MemoryKind, bytes: u64) {
        let allocation = self.alloc(kind, bytes);
        self.free(allocation);
    }

    /// The allocated bytes of each kind.
    pub fn sizes(&self) -> BytesByKind {
        self.now
    }

    /// Allocates `times` copies of the difference between the current sizes and `before`.
    pub fn alloc_again(&mut self, before: &BytesByKind, times: u64) -> Vec<Allocation> {
        let now = self.now;
        let kinds = (0..KINDS).filter_map(|i| Some((MemoryKind::ALL[i], now.0[i].checked_sub(before.0[i])?)));
        let grown = kinds.filter(|(_, bytes)| *bytes > 0).collect::<Vec<_>>();
        let alloc = |(kind, bytes): (MemoryKind, u64)| self.alloc(kind, bytes.saturating_mul(times));
        grown.into_iter().map(alloc).collect()
    }

    /// The allocated bytes of all kinds, on the device and on the host.
    pub fn total(&self) -> u64 {
        self.total + self.host
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_what_was_held_together() {
        let mut l = Ledger::default();
        let weights = l.alloc(MemoryKind::Weights, 100);
        l.moment("loss");
        l.touch(MemoryKind::Loss, 50);
        l.moment("layer");
        let a = l.alloc(MemoryKind::LayerWork, 20);
        let b = l.alloc(MemoryKind::LayerWork, 40);
        l.free(a);
        l.touch(MemoryKind::LayerWork, 15);
        assert_eq!((l.peak, l.peak_moment.as_str()), (160, "layer"));
        assert_eq!(l.at_peak[MemoryKind::LayerWork], 60);
        assert_eq!(l.at_peak[MemoryKind::Loss], 0);
        assert_eq!(
            (l.largest[MemoryKind::Loss], l.largest[MemoryKind::LayerWork]),
            (50, 60)
        );
        l.free_all([weights, b]);
        assert_eq!(l.total(), 0);
    }

    #[test]
    fn the_same_again_is_held_as_often_as_asked() {
        let mut l = Ledger::default();
        let first = l.alloc(MemoryKind::LayerInputs, 5);
        let before = l.sizes();
        let more = [
            l.alloc(MemoryKind::LayerInputs, 7),
            l.alloc(MemoryKind::Activations, 11),
        ];
        let again = l.alloc_again(&before, 3);
        assert_eq!(
            (l.sizes()[MemoryKind::LayerInputs], l.sizes()[MemoryKind::Activations]),
            (33, 44)
        );
        l.free_all(again);
        l.free_all(more);
        l.free(first);
        assert_eq!((l.total(), l.peak), (0, 77));
        // A huge size does not wrap around.
        l.touch(MemoryKind::LayerWork, u64::MAX);
        let most = [
            l.alloc(MemoryKind::LayerWork, u64::MAX),
            l.alloc(MemoryKind::Loss, u64::MAX),
        ];
        assert_eq!(l.peak, u64::MAX);
        l.free_all(most);
    }

    #[test]
    fn with_a_gpu_the_host_is_counted_apart() {
        let mut l = Ledger::new(true);
        let held = [l.alloc(MemoryKind::Weights, 100), l.alloc(MemoryKind::Process, 70)];
        l.touch(MemoryKind::Saving, 30);
        l.touch(MemoryKind::LayerWork, 5);
        assert_eq!((l.peak, l.host_peak), (105, 100));
        l.free_all(held);
        assert_eq!(l.total(), 0);
    }
}
