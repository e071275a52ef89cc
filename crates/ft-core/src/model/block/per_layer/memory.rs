//! Memory of the part of a layer that reads the per-layer input: each tensor that `per_layer.rs` allocates and frees, in the
//! same order.

use super::super::memory::LayerMemory;
use crate::base::ledger::MemoryKind::LayerWork;
use crate::base::ledger::{Allocation, Ledger};
use crate::model::contracts::GradSinkMemory;
use crate::model::linear::memory::LinearShape;
use crate::model::spec::PER_LAYER;

impl LayerMemory<'_> {
    /// The linears that read the per-layer input, if there is one: gate and projection.
    pub(in crate::model) fn per_layer(&self) -> Option<[LinearShape; 2]> {
        let spec = self.settings.spec;
        let width = spec.per_layer?.width;
        Some([
            LinearShape::new(PER_LAYER[0], spec.hidden, width),
            LinearShape::new(PER_LAYER[1], width, spec.hidden),
        ])
    }

    /// As `DecoderBlock::end`: the output, and x2 if it is another tensor.
    pub(in crate::model) fn end(&self, l: &mut Ledger, x2: Allocation) -> (Allocation, Option<Allocation>) {
        let Some([gate, projection]) = self.per_layer() else {
            return (x2, None);
        };
        let narrow = self.bytes(gate.output);
        let low = self.low(l, &[gate]);
        let g = self.linear(l, gate);
        let (input, m) = (l.alloc(LayerWork, narrow), l.alloc(LayerWork, narrow));
        l.free_all([low, input, g]);
        let low = self.low(l, &[projection]);
        let z = self.linear(l, projection);
        let y = l.alloc(LayerWork, self.nd);
        l.free_all([low, z, m]);
        (y, Some(x2))
    }

    /// As `DecoderBlock::per_layer_backward`; `dy` is freed.
    pub(in crate::model) fn per_layer_backward(
        &self,
        l: &mut Ledger,
        [gate, projection]: [LinearShape; 2],
        dy: Allocation,
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        let narrow = self.bytes(gate.output);
        let input = l.alloc(LayerWork, narrow);
        let low_in = self.low(l, &[gate]);
        let g = self.linear(l, gate);
        let m = l.alloc(LayerWork, narrow);
        let low_out = self.low(l, &[projection]);
        let z = self.linear(l, projection);
        let dz = self.norm_backward(l, PER_LAYER[2], self.nd, sink);
        l.free(z);
        // The gradient of the per-layer input is small: it counts always.
        let dm = self.linear_backward(l, projection, true, sink);
        l.free_all([dz, low_out, m]);
        l.free_all(dm);
        let dx = self.linear_backward(l, gate, need_dx, sink);
        l.free_all([input, g, low_in, dy]);
        dx
    }
}
