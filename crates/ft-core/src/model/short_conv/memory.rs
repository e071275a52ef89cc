//! Memory of a gated short convolution: each tensor that it allocates and frees, in the same order.

use super::super::block::memory::LayerMemory;
use super::super::contracts::GradSinkMemory;
use crate::base::ledger::MemoryKind::{Activations, LayerWork};
use crate::base::ledger::{Allocation, Ledger};
use crate::model::spec::{Mixer, SHORT_CONV, SHORT_CONV_BIAS};

/// As `SavedShortConv`.
pub(in crate::model) struct SavedShortConvMemory {
    /// b, c, v.
    parts: Vec<Allocation>,
    low: [Allocation; 2],
}

impl SavedShortConvMemory {
    /// Counts these tensors as saved activations from now on (`MemoryKind::Activations`).
    pub(in crate::model) fn relabel(self, l: &mut Ledger) -> Self {
        let mut to = |tensor| l.relabel(tensor, Activations);
        Self {
            parts: self.parts.into_iter().map(&mut to).collect(),
            low: self.low.map(&mut to),
        }
    }

    pub(in crate::model) fn free(self, l: &mut Ledger) {
        l.free_all(self.parts);
        l.free_all(self.low);
    }
}

impl LayerMemory<'_> {
    fn short_conv_bias(&self) -> bool {
        let layer = &self.settings.spec.layers[self.index];
        matches!(layer.mixer, Mixer::ShortConv { bias: true, .. })
    }

    pub(in crate::model) fn short_conv_wanted(&self, sink: &dyn GradSinkMemory) -> bool {
        let bias = self.short_conv_bias() && sink.wants(&self.name(SHORT_CONV_BIAS));
        bias || sink.wants(&self.name(SHORT_CONV))
    }

    pub(in crate::model) fn short_conv(&self, l: &mut Ledger) -> (Allocation, SavedShortConvMemory) {
        let (linears, out_proj) = self.linears(true);
        let before = self.settings.spec.norms.before_attention;
        let h = before.map(|_| l.alloc(LayerWork, self.nd));
        let low_in = self.low(l, &linears);
        let parts = self.projections(l, &linears, &[self.nd; 3]);
        l.free_all(h);
        let u = l.alloc(LayerWork, self.nd);
        self.with_earlier(l);
        let mixed = l.alloc(LayerWork, self.nd);
        l.free(u);
        let y = l.alloc(LayerWork, self.nd);
        l.free(mixed);
        let low_out = self.low(l, &[out_proj]);
        let out = self.linear(l, out_proj);
        l.free(y);
        let x1 = self.add_residual(l, out, out_proj);
        let low = [low_in, low_out];
        (x1, SavedShortConvMemory { parts, low })
    }

    pub(in crate::model) fn short_conv_backward(
        &self,
        l: &mut Ledger,
        saved: SavedShortConvMemory,
        dx1: Allocation,
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        let SavedShortConvMemory {
            parts,
            low: [low_in, low_out],
        } = saved;
        let (linears, out_proj) = self.linears(true);
        let before = self.settings.spec.norms.before_attention;
        let need_dh = need_dx || before.is_some_and(|n| self.norm_wanted(sink, n));
        let wanted = linears.iter().any(|&x| self.linear_wanted(sink, x));
        let d_out = self.scaled_gradient(l);
        let [u, mixed] = [l.alloc(LayerWork, self.nd), l.alloc(LayerWork, self.nd)];
        let y = self.linear_wanted(sink, out_proj).then(|| l.alloc(LayerWork, self.nd));
        let dy = self.linear_backward(l, out_proj, need_dh || wanted || self.short_conv_wanted(sink), sink);
        l.free_all(d_out);
        l.free(low_out);
        l.free_all(y);
        let Some(dy) = dy else {
            l.free_all(parts);
            l.free_all([u, mixed, dx1, low_in]);
            return None;
        };
        let mut parts = parts.into_iter();
        let (b, c, v) = (parts.next(), parts.next(), parts.next());
        // On the CPU gradients of gated products overwrite their operands.
        let replaced = |l: &mut Ledger, operand: Option<Allocation>| {
            if !self.settings.on_gpu {
                return operand;
            }
            let gradient = l.alloc(LayerWork, self.nd);
            l.free_all(operand);
            Some(gradient)
        };
        let dc = replaced(l, c);
        let d_mixed = replaced(l, Some(mixed));
        l.free(dy);
        self.with_earlier_backward(l);
        let du = l.alloc(LayerWork, self.nd);
        sink.give(l, &self.name(SHORT_CONV));
        l.free(u);
        if self.short_conv_bias() {
            sink.give(l, &self.name(SHORT_CONV_BIAS));
        }
        l.free_all(d_mixed);
        let dys = [replaced(l, b), dc, replaced(l, v)];
        l.free(du);
        let h = (wanted && before.is_some()).then(|| l.alloc(LayerWork, self.nd));
        let dys = dys.into_iter().flatten().collect();
        let dh = self.projections_backward(l, &linears, dys, need_dh, sink);
        l.free(low_in);
        l.free_all(h);
        let dx = dh.map(|dh| self.normed_backward(l, before, dh, sink));
        l.free(dx1);
        if need_dx {
            dx
        } else {
            l.free_all(dx);
            None
        }
    }
}
