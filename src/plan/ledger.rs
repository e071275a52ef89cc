//! An allocator on paper: what would be held at each moment of a step, by kind, and when it was most.

use std::collections::BTreeMap;

/// A line of the plan. The order is the order of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Weights,
    Copies,
    Reference,
    Adapters,
    Optimizer,
    Retired,
    OnHost,
    Parked,
    Gradients,
    Inputs,
    Activations,
    Layer,
    Loss,
    Rollout,
    Teacher,
    Saving,
    Data,
    Scratch,
    Process,
}

/// Bytes of one thing that is held. Has to be given back with `Ledger::drop`.
#[derive(Debug)]
#[must_use]
pub struct Held {
    kind: Kind,
    bytes: u64,
}

#[derive(Debug, Clone, Default)]
pub struct Ledger {
    now: BTreeMap<Kind, u64>,
    total: u64,
    moment: String,
    /// The most that each kind ever was.
    pub largest: BTreeMap<Kind, u64>,
    /// Host memory is counted apart.
    two_places: bool,
    host: u64,
    pub host_peak: u64,
    /// The most that all were together, when, and what they were then.
    pub peak: u64,
    pub peak_moment: String,
    pub at_peak: BTreeMap<Kind, u64>,
}

impl Kind {
    /// Does this stay in host memory where tensors lie on a GPU?
    fn on_host(self) -> bool {
        matches!(
            self,
            Kind::Retired | Kind::OnHost | Kind::Parked | Kind::Saving | Kind::Data | Kind::Process
        )
    }
}

impl Ledger {
    /// `two_places`: tensors on a GPU, the rest on the host.
    pub fn new(two_places: bool) -> Self {
        Self {
            two_places,
            ..Self::default()
        }
    }

    /// What follows happens at this moment of the step.
    pub fn moment(&mut self, name: impl Into<String>) {
        self.moment = name.into();
    }

    pub fn hold(&mut self, kind: Kind, bytes: u64) -> Held {
        let now = self.now.entry(kind).or_default();
        *now += bytes;
        let largest = self.largest.entry(kind).or_default();
        *largest = (*largest).max(*now);
        if self.two_places && kind.on_host() {
            self.host += bytes;
            self.host_peak = self.host_peak.max(self.host);
            return Held { kind, bytes };
        }
        self.total += bytes;
        if self.total > self.peak {
            self.peak = self.total;
            self.peak_moment.clone_from(&self.moment);
            self.at_peak.clone_from(&self.now);
        }
        Held { kind, bytes }
    }

    pub fn drop(&mut self, held: Held) {
        if let Some(now) = self.now.get_mut(&held.kind) {
            *now -= held.bytes;
        }
        if self.two_places && held.kind.on_host() {
            self.host -= held.bytes;
        } else {
            self.total -= held.bytes;
        }
    }

    /// The same bytes on another line.
    pub fn relabel(&mut self, held: Held, kind: Kind) -> Held {
        let bytes = held.bytes;
        self.drop(held);
        self.hold(kind, bytes)
    }

    pub fn drop_all(&mut self, held: impl IntoIterator<Item = Held>) {
        held.into_iter().for_each(|h| self.drop(h));
    }

    /// Held for a moment only.
    pub fn touch(&mut self, kind: Kind, bytes: u64) {
        let held = self.hold(kind, bytes);
        self.drop(held);
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
        let weights = l.hold(Kind::Weights, 100);
        l.moment("loss");
        l.touch(Kind::Loss, 50);
        l.moment("layer");
        let a = l.hold(Kind::Layer, 20);
        let b = l.hold(Kind::Layer, 40);
        l.drop(a);
        l.touch(Kind::Layer, 15);
        assert_eq!((l.peak, l.peak_moment.as_str()), (160, "layer"));
        assert_eq!(l.at_peak[&Kind::Layer], 60);
        assert_eq!(l.at_peak[&Kind::Loss], 0);
        assert_eq!((l.largest[&Kind::Loss], l.largest[&Kind::Layer]), (50, 60));
        l.drop_all([weights, b]);
        assert_eq!(l.now(), 0);
    }

    #[test]
    fn with_a_gpu_the_host_is_counted_apart() {
        let mut l = Ledger::new(true);
        let held = [l.hold(Kind::Weights, 100), l.hold(Kind::Process, 70)];
        l.touch(Kind::Saving, 30);
        l.touch(Kind::Layer, 5);
        assert_eq!((l.peak, l.host_peak), (105, 100));
        l.drop_all(held);
        assert_eq!(l.now(), 0);
    }
}
