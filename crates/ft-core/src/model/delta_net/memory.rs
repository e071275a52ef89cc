//! Memory of Gated DeltaNet: each tensor that it allocates and frees, in the same order.

use super::super::block::memory::LayerMemory;
use super::super::contracts::GradSinkMemory;
use super::super::spec::DeltaNetSpec;
use crate::base::ledger::MemoryKind::{Activations, LayerWork};
use crate::base::ledger::{Allocation, Ledger};

/// As `SavedDeltaNet`.
pub(in crate::model) struct SavedDeltaNetMemory {
    sizes: DeltaNetSpec,
    /// qkv, z, b, a.
    parts: Vec<Allocation>,
    o: Allocation,
    low: [Allocation; 2],
}

impl SavedDeltaNetMemory {
    /// Counts these tensors as saved activations from now on (`MemoryKind::Activations`).
    pub(in crate::model) fn relabel(self, l: &mut Ledger) -> Self {
        let mut to = |tensor| l.relabel(tensor, Activations);
        Self {
            sizes: self.sizes,
            parts: self.parts.into_iter().map(&mut to).collect(),
            o: to(self.o),
            low: self.low.map(&mut to),
        }
    }

    pub(in crate::model) fn free(self, l: &mut Ledger) {
        l.free_all(self.parts);
        l.free(self.o);
        l.free_all(self.low);
    }
}

const NORM: &str = "linear_attn.norm";

impl LayerMemory<'_> {
    /// Bytes of qkv, z, b and a.
    fn delta_parts(&self, sizes: &DeltaNetSpec) -> [u64; 4] {
        [
            sizes.channels(),
            sizes.value_width(),
            sizes.value_heads,
            sizes.value_heads,
        ]
        .map(|width| self.bytes(width))
    }

    /// Bytes of the gradients of the other weights.
    fn give_delta(&self, l: &mut Ledger, below: &str, sink: &mut dyn GradSinkMemory) {
        sink.give(l, &self.name(&format!("linear_attn.{below}")));
    }

    pub(in crate::model) fn delta_wanted(&self, sink: &dyn GradSinkMemory) -> bool {
        let names = ["norm.weight", "conv1d.weight", "A_log", "dt_bias"];
        names
            .iter()
            .any(|n| sink.wants(&self.name(&format!("linear_attn.{n}"))))
    }

    pub(in crate::model) fn delta_net(&self, l: &mut Ledger, sizes: DeltaNetSpec) -> (Allocation, SavedDeltaNetMemory) {
        let (linears, out_proj) = self.linears(true);
        let [channels, value, ..] = self.delta_parts(&sizes);
        let h = self
            .settings
            .spec
            .norms
            .before_attention
            .map(|_| l.alloc(LayerWork, self.nd));
        let low_in = self.low(l, &linears);
        let mut parts: Vec<Allocation> = linears.iter().map(|&x| self.linear(l, x)).collect();
        l.free_all(h);
        if sizes.by_key_head {
            let cut = self.delta_parts(&sizes).map(|w| l.alloc(LayerWork, w));
            let raw = std::mem::replace(&mut parts, cut.into());
            l.touch(LayerWork, channels);
            l.free_all(raw);
        }
        let mixed = l.alloc(LayerWork, channels);
        let o = l.alloc(LayerWork, value);
        if self.settings.on_gpu {
            let (tokens, documents) = (self.settings.tokens, self.settings.documents);
            l.touch(LayerWork, super::heads(&sizes).device_bytes_forward(tokens, documents));
        }
        l.free(mixed);
        let normed = l.alloc(LayerWork, value);
        let y = l.alloc(LayerWork, value);
        l.free(normed);
        let low_out = self.low(l, &[out_proj]);
        let out = self.linear(l, out_proj);
        l.free(y);
        let x1 = self.add_residual(l, out, out_proj);
        let low = [low_in, low_out];
        let saved = SavedDeltaNetMemory { sizes, parts, o, low };
        (x1, saved)
    }

    pub(in crate::model) fn delta_net_backward(
        &self,
        l: &mut Ledger,
        saved: SavedDeltaNetMemory,
        dx1: Allocation,
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        let SavedDeltaNetMemory {
            sizes,
            parts,
            o,
            low: [low_in, low_out],
        } = saved;
        let (linears, out_proj) = self.linears(true);
        let [channels, value, heads, _] = self.delta_parts(&sizes);
        let before = self.settings.spec.norms.before_attention;
        let need_dh = need_dx || before.is_some_and(|n| self.norm_wanted(sink, n));
        let wanted = linears.iter().any(|&x| self.linear_wanted(sink, x));
        let d_out = self.scaled_gradient(l);
        let normed = l.alloc(LayerWork, value);
        let y = self.linear_wanted(sink, out_proj).then(|| l.alloc(LayerWork, value));
        let dy = self.linear_backward(l, out_proj, need_dh || wanted || self.delta_wanted(sink), sink);
        l.free_all(d_out);
        l.free(low_out);
        l.free_all(y);
        let Some(dy) = dy else {
            l.free_all(parts);
            l.free_all([normed, o, dx1, low_in]);
            return None;
        };
        let mut parts = parts.into_iter();
        let (qkv, z, gates) = (parts.next(), parts.next(), parts);
        // The gradients of z and of the norm's output overwrite them.
        let in_place = self
            .settings
            .on_gpu
            .then(|| [l.alloc(LayerWork, value), l.alloc(LayerWork, value)]);
        l.free(dy);
        let d_o = self.norm_backward(l, NORM, value, sink);
        l.free_all([normed, o]);
        l.free_all(in_place.into_iter().flatten());
        let mixed = l.alloc(LayerWork, channels);
        let d_mixed = l.alloc(LayerWork, channels);
        let d_gates = [l.alloc(LayerWork, heads), l.alloc(LayerWork, heads)];
        if self.settings.on_gpu {
            let (tokens, documents) = (self.settings.tokens, self.settings.documents);
            l.touch(LayerWork, super::heads(&sizes).device_bytes(tokens, documents));
        }
        l.free_all([mixed, d_o]);
        l.free_all(gates);
        let d_qkv = l.alloc(LayerWork, channels);
        // A GPU computes the gradients of the sums again for each tap.
        let du = l.alloc(LayerWork, if self.settings.on_gpu { 0 } else { channels });
        self.give_delta(l, "conv1d.weight", sink);
        l.free_all([du, d_mixed]);
        l.free_all(qkv);
        self.give_delta(l, "A_log", sink);
        self.give_delta(l, "dt_bias", sink);
        let h = (wanted && before.is_some()).then(|| l.alloc(LayerWork, self.nd));
        let mut dys = vec![d_qkv];
        dys.extend(z);
        dys.extend(d_gates);
        if sizes.by_key_head {
            l.touch(LayerWork, channels);
            let joined = linears
                .iter()
                .map(|x| l.alloc(LayerWork, self.bytes(x.output)))
                .collect();
            l.free_all(std::mem::replace(&mut dys, joined));
        }
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
