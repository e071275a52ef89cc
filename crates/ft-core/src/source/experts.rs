//! Routed experts as parts of a layer: a source with slow storage brings those that a micro-batch needs, one at a time.

use super::{Group, ParamInfo, lock};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The weights that are brought at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LayerPart {
    /// A layer without its routed experts.
    Dense(usize),
    /// A routed expert of a layer.
    Expert(usize, usize),
}

impl LayerPart {
    /// The part of a parameter; `None`: it is outside the layers.
    pub(super) fn of(p: &ParamInfo) -> Option<Self> {
        match (p.group, p.expert()) {
            (Group::Layer(layer), Some(expert)) => Some(Self::Expert(layer, expert)),
            (Group::Layer(layer), None) => Some(Self::Dense(layer)),
            _ => None,
        }
    }

    /// The parts of a model: indices into `params`.
    pub(super) fn all(params: &[ParamInfo]) -> BTreeMap<Self, Vec<usize>> {
        let mut parts: BTreeMap<Self, Vec<usize>> = BTreeMap::new();
        for (i, p) in params.iter().enumerate() {
            if let Some(part) = Self::of(p) {
                parts.entry(part).or_default().push(i);
            }
        }
        parts
    }
}

/// The routed expert of the parameter of this name: `model.layers.3.mlp.experts.7.up_proj.weight` belongs to expert 7.
pub fn expert_of(name: &str) -> Option<usize> {
    let (_, rest) = name.split_once(".experts.")?;
    rest.split_once('.')?.0.parse().ok()
}

/// Experts that were brought, since the last question.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExpertReads {
    /// All experts of the layers that asked for some, once for each time that a layer asked.
    pub of: u64,
    /// Of these, the experts that were brought. One that was still there from the pass before is not counted.
    pub brought: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of the rows that this rank sent to and from the experts of other ranks.
    pub sent: u64,
}

impl ExpertReads {
    /// Brought experts as a part of all; `None`: no layer asked.
    pub fn share(&self) -> Option<f64> {
        (self.of > 0).then(|| self.brought as f64 / self.of as f64)
    }
}

/// The experts that the current layer needs next, and the counts of `ExpertReads`.
#[derive(Default)]
pub(super) struct ExpectedExperts {
    /// In the order in which they are fetched.
    next: Mutex<VecDeque<LayerPart>>,
    of: AtomicU64,
    brought: AtomicU64,
    bytes: AtomicU64,
}

impl ExpectedExperts {
    /// The layer needs these, of `count` experts. Returns the first one.
    pub(super) fn set(&self, experts: impl Iterator<Item = LayerPart>, count: usize) -> Option<LayerPart> {
        self.of.fetch_add(count as u64, Relaxed);
        let mut next = lock(&self.next);
        *next = experts.collect();
        next.front().copied()
    }

    /// `part` is fetched now. Returns the one that is fetched after it.
    pub(super) fn after(&self, part: LayerPart) -> Option<LayerPart> {
        let mut next = lock(&self.next);
        let at = next.iter().position(|p| *p == part)?;
        next.drain(..=at);
        next.front().copied()
    }

    /// Counts an expert of `bytes` bytes that was read or copied.
    pub(super) fn count(&self, bytes: u64) {
        self.brought.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }

    /// The counts since the last call.
    pub(super) fn take(&self) -> ExpertReads {
        let [of, brought, bytes] = [&self.of, &self.brought, &self.bytes].map(|n| n.swap(0, Relaxed));
        ExpertReads {
            of,
            brought,
            bytes,
            sent: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expert_is_known_by_its_name() {
        for (name, expert) in [
            ("model.layers.3.mlp.experts.7.up_proj.weight", Some(7)),
            ("model.layers.0.block_sparse_moe.experts.12.w1.bias", Some(12)),
            ("model.layers.0.mlp.shared_experts.up_proj.weight", None),
            ("model.layers.0.mlp.experts.gate_up_proj", None),
            ("model.layers.0.mlp.gate.weight", None),
        ] {
            assert_eq!(expert_of(name), expert, "{name}");
        }
    }

    #[test]
    fn each_fetch_says_what_follows_and_what_was_skipped_is_gone() {
        let expected = ExpectedExperts::default();
        let part = |e| LayerPart::Expert(1, e);
        assert_eq!(expected.set([2, 5, 7].map(part).into_iter(), 8), Some(part(2)));
        assert_eq!(expected.after(part(5)), Some(part(7)));
        assert_eq!(expected.after(part(2)), None);
        assert_eq!(expected.after(part(7)), None);
        expected.count(40);
        expected.count(2);
        let reads = expected.take();
        assert_eq!((reads.of, reads.brought, reads.bytes), (8, 2, 42));
        assert_eq!((reads.share(), expected.take().share()), (Some(0.25), None));
    }
}
