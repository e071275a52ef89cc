//! Memory of attention: each tensor that it allocates and frees, in the same order.

use super::super::block::memory::{LayerMemory, LayerMemorySettings};
use super::super::contracts::GradSinkMemory;
use crate::base::ledger::MemoryKind::{Activations, LayerWork};
use crate::base::ledger::{Allocation, Ledger};
use crate::model::spec::{ATTENTION_SINKS, KeySource};
use crate::ops::attention;

/// As `SavedAttention`.
pub(in crate::model) struct SavedAttentionMemory {
    /// q, k and v before their norms.
    raw: Vec<Allocation>,
    gate: Option<Allocation>,
    qkv: Vec<Allocation>,
    o: Allocation,
    lse: Allocation,
    y: Option<Allocation>,
    low: [Allocation; 2],
}

impl SavedAttentionMemory {
    /// Counts these tensors as saved activations from now on (`MemoryKind::Activations`).
    pub(in crate::model) fn relabel(self, l: &mut Ledger) -> Self {
        let mut to = |tensor| l.relabel(tensor, Activations);
        Self {
            raw: self.raw.into_iter().map(&mut to).collect(),
            gate: self.gate.map(&mut to),
            qkv: self.qkv.into_iter().map(&mut to).collect(),
            o: to(self.o),
            lse: to(self.lse),
            y: self.y.map(&mut to),
            low: self.low.map(&mut to),
        }
    }

    pub(in crate::model) fn free(self, l: &mut Ledger) {
        l.free_all(self.raw);
        l.free_all(self.gate);
        l.free_all(self.qkv);
        l.free_all([self.o, self.lse]);
        l.free_all(self.y);
        l.free_all(self.low);
    }
}

impl LayerMemory<'_> {
    /// Bytes of the partial sums of dk and dv on a GPU, in f32; the kernels for f32 tensors have none.
    fn gpu_partial_sums(&self) -> u64 {
        let LayerMemorySettings { spec, tokens, .. } = self.settings;
        let parts = attention::gpu_backward_parts(spec.heads, spec.kv_heads_of(self.index), tokens);
        if self.settings.on_gpu && self.settings.element == 2 && parts > 1 {
            (2 * 4 * parts * tokens * spec.kv_width(self.index)) as u64
        } else {
            0
        }
    }

    /// dq, dk and dv, as `ops::attention::backward` computes them.
    pub(in crate::model) fn attention_gradients(&self, l: &mut Ledger) -> [Allocation; 3] {
        let spec = self.settings.spec;
        let dq = l.alloc(LayerWork, self.nq);
        let parts = if self.settings.on_gpu {
            1
        } else {
            let documents = self.settings.documents.max(1);
            attention::backward_parts(spec.heads, spec.kv_heads_of(self.index), documents) as u64
        };
        let partial = [
            l.alloc(LayerWork, parts * self.nkv),
            l.alloc(LayerWork, parts * self.nkv),
        ];
        match parts {
            1 => {
                let [dk, dv] = partial;
                l.touch(LayerWork, self.gpu_partial_sums());
                [dq, dk, dv]
            }
            _ => {
                let [k, v] = partial;
                let dk = l.alloc(LayerWork, self.nkv);
                l.free(k);
                let dv = l.alloc(LayerWork, self.nkv);
                l.free(v);
                [dq, dk, dv]
            }
        }
    }

    pub(in crate::model) fn attention(&self, l: &mut Ledger) -> (Allocation, SavedAttentionMemory) {
        let (linears, o_proj) = self.linears(true);
        let names = self.settings.spec.norms;
        let h = names.before_attention.map(|_| l.alloc(LayerWork, self.nd));
        let low_in = self.low(l, &linears);
        let keys = self.settings.spec.layers[self.index].keys;
        let widths = [self.nq, self.nkv, self.nkv];
        let (made, heads) = match keys {
            KeySource::Own => (3, 2),
            KeySource::KeysOnly => (2, 2),
            KeySource::Layer(_) => (1, 1),
        };
        let mut qkv = self.projections(l, &linears, &widths[..made]);
        l.free_all(h);
        let mut gate = None;
        if self.settings.spec.output_gate {
            let both = std::mem::replace(&mut qkv[0], l.alloc(LayerWork, self.nq));
            gate = Some(l.alloc(LayerWork, self.nq));
            l.free(both);
        }
        let mut v = qkv.drain(heads..).next();
        let mut raw_v = None;
        if self.settings.spec.value_norm && heads == 2 {
            let normed = l.alloc(LayerWork, self.nkv);
            raw_v = v.replace(normed);
        }
        let pair = |l: &mut Ledger| -> Vec<Allocation> {
            let widths = widths[..heads].iter();
            widths.map(|width| l.alloc(LayerWork, *width)).collect()
        };
        let mut raw = Vec::new();
        if self.settings.spec.qk_norm.is_some() {
            raw = std::mem::replace(&mut qkv, pair(l));
        }
        // The rotation writes new tensors.
        let before = qkv;
        let mut qkv = pair(l);
        l.free_all(before);
        raw.extend(raw_v);
        qkv.extend(v);
        self.attend(l);
        let o = l.alloc(LayerWork, self.nq);
        let lse = l.alloc(LayerWork, self.lse);
        let gated = gate.is_some().then(|| l.alloc(LayerWork, self.nq));
        let low_out = self.low(l, &[o_proj]);
        let mut x1 = self.linear(l, o_proj);
        l.free_all(gated);
        let mut y = None;
        if names.after_attention.is_some() {
            // The norm adds the residual stream.
            y = Some(x1);
            x1 = l.alloc(LayerWork, self.nd);
        } else {
            x1 = self.add_residual(l, x1, o_proj);
        }
        let low = [low_in, low_out];
        let saved = SavedAttentionMemory {
            raw,
            gate,
            qkv,
            o,
            lse,
            y,
            low,
        };
        (x1, saved)
    }

    pub(in crate::model) fn attention_backward(
        &self,
        l: &mut Ledger,
        saved: SavedAttentionMemory,
        dx1: Allocation,
        d_shared: Option<Allocation>,
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        let SavedAttentionMemory {
            raw,
            gate,
            qkv,
            o,
            lse,
            y,
            low: [low_in, low_out],
        } = saved;
        let (linears, o_proj) = self.linears(true);
        let (names, qk_norm) = (self.settings.spec.norms, self.settings.spec.qk_norm);
        let need_dh = need_dx || names.before_attention.is_some_and(|n| self.norm_wanted(sink, n));
        let sinks = self.name(ATTENTION_SINKS);
        let qk_wanted = qk_norm.is_some_and(|norm| norm.names.iter().any(|n| self.norm_wanted(sink, n)));
        let qk_wanted = qk_wanted || sink.wants(&sinks);
        let need_do = need_dh || qk_wanted || linears.iter().any(|&x| self.linear_wanted(sink, x));
        let d_out = match (y, names.after_attention) {
            (Some(y), Some(norm)) => {
                let d = self.norm_backward(l, norm, self.nd, sink);
                l.free(y);
                Some(d)
            }
            _ => self.scaled_gradient(l),
        };
        let gated = (gate.is_some() && self.linear_wanted(sink, o_proj)).then(|| l.alloc(LayerWork, self.nq));
        let d_o = self.linear_backward(l, o_proj, need_do, sink);
        l.free_all(d_out);
        l.free(low_out);
        l.free_all(gated);
        let Some(mut d_o) = d_o else {
            l.free_all(raw);
            l.free_all(gate);
            l.free_all(qkv);
            l.free_all([o, lse, dx1, low_in]);
            l.free_all(d_shared);
            return None;
        };
        let d_gate = gate.map(|gate| {
            let [d_gate, ungated] = [l.alloc(LayerWork, self.nq), l.alloc(LayerWork, self.nq)];
            l.free_all([gate, std::mem::replace(&mut d_o, ungated)]);
            d_gate
        });
        let spec = self.settings.spec;
        if spec.attention_sinks {
            sink.give(l, &sinks);
        }
        let [dq, dk, dv] = self.attend_backward(l);
        l.free_all(qkv);
        l.free_all([o, lse, d_o]);
        let keys = spec.layers[self.index].keys;
        let (mut dq, mut dk, mut dv) = (dq, Some(dk), Some(dv));
        if matches!(keys, KeySource::Layer(_)) {
            // Added to those of the other layers.
            l.free_all([dk.take(), dv.take()].into_iter().flatten());
        }
        let norms = [qk_norm.filter(|n| n.after_rope), qk_norm.filter(|n| !n.after_rope)];
        for (step, norm) in norms.into_iter().enumerate() {
            if step == 1 {
                // The inverse rotation writes new tensors.
                let rotated = l.alloc(LayerWork, self.nq);
                let rotated_k = dk.as_ref().map(|_| l.alloc(LayerWork, self.nkv));
                l.free(std::mem::replace(&mut dq, rotated));
                l.free_all(std::mem::replace(&mut dk, rotated_k));
            }
            if let Some(norm) = norm {
                let normed = self.norm_backward(l, norm.names[0], self.nq, sink);
                l.free(std::mem::replace(&mut dq, normed));
                if let Some(dk) = &mut dk {
                    let normed = self.norm_backward(l, norm.names[1], self.nkv, sink);
                    l.free(std::mem::replace(dk, normed));
                }
            }
        }
        l.free_all(raw);
        if let Some(dv) = dv.as_mut().filter(|_| spec.value_norm) {
            let normed = l.alloc(LayerWork, self.nkv);
            l.free(std::mem::replace(dv, normed));
        }
        if let Some(d_gate) = d_gate {
            let both = l.alloc(LayerWork, 2 * self.nq);
            l.free_all([std::mem::replace(&mut dq, both), d_gate]);
        }
        if keys == KeySource::KeysOnly {
            l.free_all(dv.take());
        }
        let wanted = linears.iter().any(|&x| self.linear_wanted(sink, x));
        let h = (wanted && names.before_attention.is_some()).then(|| l.alloc(LayerWork, self.nd));
        let dys = [Some(dq), dk, dv].into_iter().flatten().collect();
        let dh = self.projections_backward(l, &linears, dys, need_dh, sink);
        l.free(low_in);
        l.free_all(h);
        let dx = dh.map(|dh| self.normed_backward(l, names.before_attention, dh, sink));
        l.free(dx1);
        l.free_all(d_shared);
        if need_dx {
            dx
        } else {
            l.free_all(dx);
            None
        }
    }
}
