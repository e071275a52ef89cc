//! Memory of what makes the streams of AltUp before the layers and joins them after the layers, as `model::streams`; and of
//! adapters on linears outside of the layers.
//!
//! `nd`: bytes of one stream. A model without streams takes nothing here.

use crate::base::ledger::{Allocation, Ledger, MemoryKind};
use crate::model::block::memory::LayerMemorySettings;
use crate::model::contracts::GradSinkMemory;
use crate::model::spec::{STREAMS_IN, STREAMS_OUT};

fn modules(settings: &LayerMemorySettings, of: &str) -> Vec<String> {
    let others = settings.spec.streams.map_or(0, |s| s.count - 1);
    (0..others).map(|i| format!("{of}.{i}")).collect()
}

/// The adapter of a linear outside of the layers, in its forward pass.
pub(super) fn adapter_forward(l: &mut Ledger, settings: &LayerMemorySettings, module: &str) {
    if let Some(cost) = settings.adapters.get(module) {
        settings.adapter_forward(l, cost, settings.spec.hidden);
    }
}

/// The gradients of a linear outside of the layers, and those of its adapter.
pub(super) fn linear_backward(
    l: &mut Ledger,
    settings: &LayerMemorySettings,
    module: &str,
    sink: &mut dyn GradSinkMemory,
) {
    if let Some(cost) = settings.adapters.get(module) {
        settings.adapter_backward(l, cost, settings.spec.hidden, true, true, sink);
    }
    sink.give(l, &format!("{module}.weight"));
}

/// From the embedding to the streams: the embedding, a projection, and that with another magnitude.
pub(super) fn spread(l: &mut Ledger, settings: &LayerMemorySettings, nd: u64) {
    if settings.spec.plain_norms {
        l.touch(MemoryKind::LayerWork, nd);
    }
    if settings.spec.streams.is_some() {
        l.moment("the streams of a token");
        let held = l.alloc(MemoryKind::LayerWork, 2 * nd + row(settings, nd));
        modules(settings, STREAMS_IN)
            .iter()
            .for_each(|module| adapter_forward(l, settings, module));
        l.touch(MemoryKind::LayerWork, nd);
        l.free(held);
    }
}

fn row(settings: &LayerMemorySettings, nd: u64) -> u64 {
    nd * settings.spec.streams.map_or(1, |s| s.count as u64)
}

/// Backward of `spread`: frees the gradient of the streams, returns that of the embedding.
pub(super) fn spread_backward(
    l: &mut Ledger,
    settings: &LayerMemorySettings,
    nd: u64,
    dh: Allocation,
    sink: &mut dyn GradSinkMemory,
) -> Allocation {
    if settings.spec.plain_norms {
        let x = l.alloc(MemoryKind::LayerWork, nd);
        let dx = l.alloc(MemoryKind::LayerWork, nd);
        l.free_all([x, dh]);
        return dx;
    }
    if settings.spec.streams.is_none() {
        return dh;
    }
    l.moment("the gradients of the streams");
    let dx = l.alloc(MemoryKind::LayerWork, nd);
    l.touch(MemoryKind::LayerWork, 4 * nd);
    let work = l.alloc(MemoryKind::LayerWork, 2 * nd);
    for module in modules(settings, STREAMS_IN) {
        linear_backward(l, settings, &module, sink);
    }
    l.free_all([work, dh]);
    dx
}

/// From the streams to the input of the final norm: stream 0, the sum, and a projection.
pub(super) fn merge(l: &mut Ledger, settings: &LayerMemorySettings, nd: u64) {
    if settings.spec.streams.is_some() {
        let held = l.alloc(MemoryKind::LayerWork, 3 * nd);
        modules(settings, STREAMS_OUT)
            .iter()
            .for_each(|module| adapter_forward(l, settings, module));
        l.touch(MemoryKind::LayerWork, nd);
        l.free(held);
    }
}

/// Backward of `merge`; the caller holds the gradient of the streams.
pub(super) fn merge_backward(l: &mut Ledger, settings: &LayerMemorySettings, nd: u64, sink: &mut dyn GradSinkMemory) {
    if settings.spec.streams.is_some() {
        l.touch(MemoryKind::LayerWork, 6 * nd);
        let work = l.alloc(MemoryKind::LayerWork, 5 * nd);
        for module in modules(settings, STREAMS_OUT) {
            linear_backward(l, settings, &module, sink);
        }
        l.free(work);
    }
}

/// True if a projection of `merge` gets a gradient.
pub(super) fn out_wanted(settings: &LayerMemorySettings, sink: &dyn GradSinkMemory) -> bool {
    modules(settings, STREAMS_OUT).iter().any(|module| {
        let adapter = settings.adapters.get(module).into_iter().flat_map(|cost| &cost.trained);
        sink.wants(&format!("{module}.weight")) || adapter.into_iter().any(|(name, _)| sink.wants(name))
    })
}
