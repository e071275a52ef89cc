//! Memory of what makes the streams of AltUp before the layers and joins them after the layers, as `model::streams`.
//!
//! `nd`: bytes of one stream. A model without streams takes nothing here.

use crate::base::ledger::{Allocation, Ledger, MemoryKind};
use crate::model::Spec;
use crate::model::contracts::GradSinkMemory;
use crate::model::spec::{STREAMS_IN, STREAMS_OUT};

fn names<'a>(spec: &Spec, of: &'a str) -> impl Iterator<Item = String> + 'a {
    let others = spec.streams.map_or(0, |s| s.count - 1);
    (0..others).map(move |i| format!("{of}.{i}.weight"))
}

/// From the embedding to the streams: the embedding, a projection, and that with another magnitude.
pub(super) fn spread(l: &mut Ledger, spec: &Spec, nd: u64) {
    if spec.streams.is_some() {
        l.moment("the streams of a token");
        l.touch(MemoryKind::LayerWork, 3 * nd + row(spec, nd));
    }
}

fn row(spec: &Spec, nd: u64) -> u64 {
    nd * spec.streams.map_or(1, |s| s.count as u64)
}

/// Backward of `spread`: frees the gradient of the streams, returns that of the embedding.
pub(super) fn spread_backward(
    l: &mut Ledger,
    spec: &Spec,
    nd: u64,
    dh: Allocation,
    sink: &mut dyn GradSinkMemory,
) -> Allocation {
    if spec.streams.is_none() {
        return dh;
    }
    l.moment("the gradients of the streams");
    let dx = l.alloc(MemoryKind::LayerWork, nd);
    l.touch(MemoryKind::LayerWork, 4 * nd);
    let work = l.alloc(MemoryKind::LayerWork, 2 * nd);
    names(spec, STREAMS_IN).for_each(|name| sink.give(l, &name));
    l.free_all([work, dh]);
    dx
}

/// From the streams to the input of the final norm: stream 0, the sum, and a projection.
pub(super) fn merge(l: &mut Ledger, spec: &Spec, nd: u64) {
    if spec.streams.is_some() {
        l.touch(MemoryKind::LayerWork, 4 * nd);
    }
}

/// Backward of `merge`; the caller holds the gradient of the streams.
pub(super) fn merge_backward(l: &mut Ledger, spec: &Spec, nd: u64, sink: &mut dyn GradSinkMemory) {
    if spec.streams.is_some() {
        l.touch(MemoryKind::LayerWork, 6 * nd);
        let work = l.alloc(MemoryKind::LayerWork, 5 * nd);
        names(spec, STREAMS_OUT).for_each(|name| sink.give(l, &name));
        l.free(work);
    }
}

/// True if a projection of `merge` gets a gradient.
pub(super) fn out_wanted(spec: &Spec, sink: &dyn GradSinkMemory) -> bool {
    names(spec, STREAMS_OUT).any(|name| sink.wants(&name))
}
