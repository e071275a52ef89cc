//! A simulated allocator: records the bytes held at each moment of a step, by kind, and the peak.

use std::ops::{Index, IndexMut};

/// A line of the plan. The order is the order of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Weights,
    PackedCopies,
    Reference,
    Adapters,
    Optimizer,
    Retired,
    OnHost,
    Offloaded,
    Gradients,
    Inputs,
    Activations,
    Layer,
    Loss,
    Rollout,
    Teacher,
    Judges,
    Saving,
    Data,
    Scratch,
    Process,
}

const KINDS: usize = Kind::Process as usize + 1;

/// Bytes of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes([u64; KINDS]);

impl Index<Kind> for Sizes {
    type Output = u64;

    fn index(&self, kind: Kind) -> &u64 {
        &self.0[kind as usize]
    }
}

impl IndexMut<Kind> for Sizes {
    fn index_mut(&mut self, kind: Kind) -> &mut u64 {
        &mut self.0[kind as usize]
    }
}

/// Bytes of one simulated allocation. Must be freed with `Ledger::drop`.
#[derive(Debug)]
#[must_use]
pub struct Allocation {
    kind: Kind,
    bytes: u64,
}

#[derive(Debug, Clone, Default)]
pub struct Ledger {
    now: Sizes,
    total: u64,
    /// Prefix of the names of moments.
    prefix: &'static str,
    moment: String,
    /// The peak of each kind.
    pub largest: Sizes,
    /// Host memory is counted separately.
    two_places: bool,
    host: u64,
    pub host_peak: u64,
    /// The peak of the sum, its moment, and the sizes of all kinds at that moment.
    pub peak: u64,
    pub peak_moment: String,
    pub at_peak: Sizes,
}

impl Kind {
    const ALL: [Kind; KINDS] = [
        Kind::Weights,
        Kind::PackedCopies,
        Kind::Reference,
        Kind::Adapters,
        Kind::Optimizer,
        Kind::Retired,
        Kind::OnHost,
        Kind::Offloaded,
        Kind::Gradients,
        Kind::Inputs,
        Kind::Activations,
        Kind::Layer,
        Kind::Loss,
        Kind::Rollout,
        Kind::Teacher,
        Kind::Judges,
        Kind::Saving,
        Kind::Data,
        Kind::Scratch,
        Kind::Process,
    ];

    /// True if this kind stays in host memory when tensors are on a GPU.
    fn on_host(self) -> bool {
        matches!(
            self,
            Kind::Retired | Kind::OnHost | Kind::Offloaded | Kind::Saving | Kind::Data | Kind::Process
        )
    }
}

impl Ledger {
    /// `two_places`: tensors are on a GPU, the rest on the host.
    pub fn new(two_places: bool) -> Self {
        Self {
            two_places,
            ..Self::default()
        }
    }

    /// Names the current moment of the step.
    pub fn moment(&mut self, name: impl Into<String>) {
        self.moment = format!("{}{}", self.prefix, name.into());
    }

    /// Sets the prefix of the following moments.
    pub fn during(&mut self, prefix: &'static str) {
        self.prefix = prefix;
    }

    pub fn alloc(&mut self, kind: Kind, bytes: u64) -> Allocation {
        // Saturates: a huge size must not wrap around to a small one.
        self.now[kind] = self.now[kind].saturating_add(bytes);
        self.largest[kind] = self.largest[kind].max(self.now[kind]);
        if self.two_places && kind.on_host() {
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

    pub fn free(&mut self, held: Allocation) {
        let now = &mut self.now[held.kind];
        *now = now.saturating_sub(held.bytes);
        if self.two_places && held.kind.on_host() {
            self.host = self.host.saturating_sub(held.bytes);
        } else {
            self.total = self.total.saturating_sub(held.bytes);
        }
    }

    /// Moves the bytes to another kind.
    pub fn relabel(&mut self, held: Allocation, kind: Kind) -> Allocation {
        let bytes = held.bytes;
        self.free(held);
        self.alloc(kind, bytes)
    }

    pub fn free_all(&mut self, held: impl IntoIterator<Item = Allocation>) {
        held.into_iter().for_each(|h| self.free(h));
    }

    /// Allocates and frees at once.
    pub fn touch(&mut self, kind: Kind, bytes: u64) {
        let held = self.alloc(kind, bytes);
        self.free(held);
    }

    /// What is held now.
    pub fn sizes(&self) -> Sizes {
        self.now
    }

    /// Allocates `times` copies of the difference between the current sizes and `before`.
    pub fn alloc_again(&mut self, before: &Sizes, times: u64) -> Vec<Allocation> {
        let now = self.now;
        let kinds = (0..KINDS).filter_map(|i| Some((Kind::ALL[i], now.0[i].checked_sub(before.0[i])?)));
        let grown = kinds.filter(|(_, bytes)| *bytes > 0).collect::<Vec<_>>();
        let hold = |(kind, bytes): (Kind, u64)| self.alloc(kind, bytes.saturating_mul(times));
        grown.into_iter().map(hold).collect()
    }

    #[cfg(test)]
    pub fn now(&self) -> u64 {
        self.total + self.host
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_what_was_held_together() {
        let mut l = Ledger::default();
        let weights = l.alloc(Kind::Weights, 100);
        l.moment("loss");
        l.touch(Kind::Loss, 50);
        l.moment("layer");
        let a = l.alloc(Kind::Layer, 20);
        let b = l.alloc(Kind::Layer, 40);
        l.free(a);
        l.touch(Kind::Layer, 15);
        assert_eq!((l.peak, l.peak_moment.as_str()), (160, "layer"));
        assert_eq!(l.at_peak[Kind::Layer], 60);
        assert_eq!(l.at_peak[Kind::Loss], 0);
        assert_eq!((l.largest[Kind::Loss], l.largest[Kind::Layer]), (50, 60));
        l.free_all([weights, b]);
        assert_eq!(l.now(), 0);
    }

    #[test]
    fn the_same_again_is_held_as_often_as_asked() {
        let mut l = Ledger::default();
        let first = l.alloc(Kind::Inputs, 5);
        let before = l.sizes();
        let more = [l.alloc(Kind::Inputs, 7), l.alloc(Kind::Activations, 11)];
        let again = l.alloc_again(&before, 3);
        assert_eq!((l.sizes()[Kind::Inputs], l.sizes()[Kind::Activations]), (33, 44));
        l.free_all(again);
        l.free_all(more);
        l.free(first);
        assert_eq!((l.now(), l.peak), (0, 77));
        // A huge size does not wrap around.
        l.touch(Kind::Layer, u64::MAX);
        let most = [l.alloc(Kind::Layer, u64::MAX), l.alloc(Kind::Loss, u64::MAX)];
        assert_eq!(l.peak, u64::MAX);
        l.free_all(most);
    }

    #[test]
    fn with_a_gpu_the_host_is_counted_apart() {
        let mut l = Ledger::new(true);
        let held = [l.alloc(Kind::Weights, 100), l.alloc(Kind::Process, 70)];
        l.touch(Kind::Saving, 30);
        l.touch(Kind::Layer, 5);
        assert_eq!((l.peak, l.host_peak), (105, 100));
        l.free_all(held);
        assert_eq!(l.now(), 0);
    }
}
