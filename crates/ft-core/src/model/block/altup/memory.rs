//! Memory of a layer with several streams, and of Laurel: each tensor that `altup.rs` and `laurel.rs` allocate and free, in
//! the same order.
//!
//! `nd` is one stream; the tensors of the router are narrow and count as one.

use super::super::memory::{LayerMemory, SavedActivationsMemory};
use crate::base::ledger::MemoryKind::{Activations, LayerWork};
use crate::base::ledger::{Allocation, Ledger};
use crate::model::contracts::GradSinkMemory;
use crate::model::linear::memory::LinearShape;
use crate::model::spec::{ALTUP, AltUpSpec, LAUREL, PER_LAYER};

impl LayerMemory<'_> {
    fn laurel(&self) -> Option<[LinearShape; 2]> {
        let (rank, d) = (self.settings.spec.laurel?, self.settings.spec.hidden);
        Some([
            LinearShape::new(LAUREL[0], d, rank),
            LinearShape::new(LAUREL[1], rank, d),
        ])
    }

    fn altup_linears(&self) -> Vec<LinearShape> {
        let all = self.settings.spec.altup_linears().into_iter();
        all.map(LinearShape::from).collect()
    }

    /// The router or a linear that reads its output, beside the tensors of `narrow`.
    fn of_router(&self, l: &mut Ledger, name: &str) {
        for linear in self.altup_linears().into_iter().filter(|linear| linear.name == name) {
            let y = self.linear(l, linear);
            l.free(y);
        }
    }

    /// The active stream and its norm, the router and a linear that reads its output.
    fn router_forward(&self, l: &mut Ledger, after: &str) {
        let h = l.alloc(LayerWork, self.nd);
        self.of_router(l, ALTUP[0]);
        l.free(h);
        self.of_router(l, after);
    }

    /// The coefficients and factors, with what the router makes of its inputs.
    fn narrow(&self, l: &mut Ledger, streams: AltUpSpec) -> Allocation {
        l.alloc(LayerWork, self.bytes(streams.count * (streams.count + 2)))
    }

    fn laurel_forward(&self, l: &mut Ledger) {
        let Some([left, right]) = self.laurel() else { return };
        let h = l.alloc(LayerWork, self.nd);
        let lows = [self.low(l, &[left]), self.low(l, &[right])];
        let low = self.linear(l, left);
        let z = self.linear(l, right);
        l.touch(LayerWork, self.nd);
        l.free_all(lows);
        l.free_all([h, low, z]);
    }

    fn laurel_gradients(&self, l: &mut Ledger, need_dh: bool, sink: &mut dyn GradSinkMemory) -> Option<Allocation> {
        let [left, right] = self.laurel()?;
        let wanted = self.laurel_wanted(sink);
        if !need_dh && !wanted {
            return None;
        }
        let h = l.alloc(LayerWork, self.nd);
        let lows = [self.low(l, &[left]), self.low(l, &[right])];
        let low = self.linear(l, left);
        let z = self.linear(l, right);
        let dz = self.norm_backward(l, LAUREL[2], self.nd, sink);
        l.free(z);
        let d_low = self.linear_backward(l, right, need_dh || self.linear_wanted(sink, left), sink);
        l.free_all([dz, low]);
        let dh = if d_low.is_some() {
            self.linear_backward(l, left, need_dh, sink)
        } else {
            None
        };
        l.free_all(d_low);
        l.free_all(lows);
        l.free(h);
        dh
    }

    fn laurel_wanted(&self, sink: &dyn GradSinkMemory) -> bool {
        self.laurel().is_some_and(|pair| {
            pair.into_iter().any(|x| self.linear_wanted(sink, x)) || self.norm_wanted(sink, LAUREL[2])
        })
    }

    /// As `DecoderBlock::altup_forward`.
    pub(in crate::model) fn altup_forward(
        &self,
        l: &mut Ledger,
        streams: AltUpSpec,
        keep: bool,
    ) -> (Allocation, Option<SavedActivationsMemory>) {
        let copies = self.pair_copies(l);
        let narrow = self.narrow(l, streams);
        let own = l.alloc(LayerWork, self.nd);
        self.router_forward(l, ALTUP[2]);
        let (x1, mixer) = self.mixer(l);
        let mixer = if keep {
            Some(mixer.relabel(l))
        } else {
            mixer.free(l);
            None
        };
        self.laurel_forward(l);
        l.free(own);
        let (x2, parts) = self.mlp(l, keep);
        let x1 = if keep {
            Some(l.relabel(x1, Activations))
        } else {
            l.free(x1);
            None
        };
        self.router_forward(l, ALTUP[3]);
        let y = l.alloc(LayerWork, streams.count as u64 * self.nd);
        if let Some([gate, projection]) = self.per_layer() {
            let read = l.alloc(LayerWork, self.nd);
            l.touch(LayerWork, self.nd);
            self.per_layer_work(l, gate, projection);
            l.free(read);
        }
        l.free_all([copies, narrow]);
        let saved = match mixer {
            Some(mixer) => Some(SavedActivationsMemory {
                mixer,
                x1,
                parts,
                x2: Some(l.relabel(x2, Activations)),
            }),
            None => {
                l.free(x2);
                None
            }
        };
        (y, saved)
    }

    /// The memory that the per-layer part allocates in its forward pass, the sum of its work and its output.
    fn per_layer_work(&self, l: &mut Ledger, gate: LinearShape, projection: LinearShape) {
        let narrow = self.bytes(gate.output);
        let low = self.low(l, &[gate]);
        let g = self.linear(l, gate);
        let (input, m) = (l.alloc(LayerWork, narrow), l.alloc(LayerWork, narrow));
        l.free_all([low, input, g]);
        let low = self.low(l, &[projection]);
        let z = self.linear(l, projection);
        l.touch(LayerWork, self.nd);
        l.free_all([low, z, m]);
    }

    /// As `DecoderBlock::corrected_backward`.
    fn corrected_backward(&self, l: &mut Ledger, sink: &mut dyn GradSinkMemory) -> Allocation {
        self.router_forward(l, ALTUP[3]);
        if let Some([gate, projection]) = self.per_layer() {
            let [corrected, read, dz] = [(); 3].map(|()| l.alloc(LayerWork, self.nd));
            let narrow = self.bytes(gate.output);
            let input = l.alloc(LayerWork, narrow);
            let low_in = self.low(l, &[gate]);
            let g = self.linear(l, gate);
            let m = l.alloc(LayerWork, narrow);
            let low_out = self.low(l, &[projection]);
            let z = self.linear(l, projection);
            let d_norm = self.norm_backward(l, PER_LAYER[2], self.nd, sink);
            l.free(z);
            let dm = self.linear_backward(l, projection, true, sink);
            l.free_all([d_norm, low_out, m]);
            l.free_all(dm);
            let d = self.linear_backward(l, gate, true, sink);
            l.free_all([input, g, low_in, read, dz]);
            l.touch(LayerWork, self.nd);
            sink.give(l, &self.name(ALTUP[4]));
            l.free_all(d);
            l.free(corrected);
        }
        let dx2 = l.alloc(LayerWork, self.nd);
        self.router_backward(l, ALTUP[3], sink);
        dx2
    }

    /// The linear after the router, and `DecoderBlock::router_backward`: a norm, its gradient, and that of its output.
    /// The sink gets the gradients of the router at the end of the layer (`RouterSums`).
    fn router_backward(&self, l: &mut Ledger, after: &str, sink: &mut dyn GradSinkMemory) {
        for linear in self.altup_linears().into_iter().filter(|linear| linear.name == after) {
            self.linear_gradients(l, linear, true, sink);
        }
        let work = l.alloc(LayerWork, 2 * self.nd);
        self.of_router(l, ALTUP[0]);
        l.free(work);
    }

    /// The names of the parameters whose gradients `RouterSums` holds.
    fn router_parts(&self, sink: &dyn GradSinkMemory) -> Vec<String> {
        let mut all = [ALTUP[0], ALTUP[1]]
            .map(|name| self.name(&format!("{name}.weight")))
            .to_vec();
        let linears = self.altup_linears();
        let adapter = linears.first().and_then(|&router| self.adapter(router));
        all.extend(
            adapter
                .iter()
                .flat_map(|cost| &cost.trained)
                .map(|(name, _)| name.to_string()),
        );
        all.retain(|name| sink.wants(name));
        all
    }

    /// As `DecoderBlock::altup_vjp`; `dy` is freed.
    pub(in crate::model) fn altup_vjp(
        &self,
        l: &mut Ledger,
        streams: AltUpSpec,
        kept: Option<SavedActivationsMemory>,
        dy: Allocation,
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        let copies = self.pair_copies(l);
        let narrow = self.narrow(l, streams);
        let read = l.alloc(LayerWork, self.nd);
        self.router_forward(l, ALTUP[2]);
        let own = l.alloc(LayerWork, self.nd);
        let router = self.router_parts(sink);
        let prediction = self.altup_linears().into_iter().find(|linear| linear.name == ALTUP[2]);
        let predicts = !router.is_empty() || prediction.is_some_and(|linear| self.linear_wanted(sink, linear));
        let need_own = need_dx || predicts;
        let mixer_needed = need_own || self.laurel_wanted(sink) || self.mixer_wanted(sink);
        let SavedActivationsMemory { mixer, x1, parts, x2 } = match kept {
            Some(kept) => kept,
            None => {
                let (x1, mixer) = self.mixer(l);
                self.laurel_forward(l);
                let (x2, parts) = self.mlp(l, true);
                let (x1, x2) = (Some(x1), Some(x2));
                SavedActivationsMemory { mixer, x1, parts, x2 }
            }
        };
        let mixer = if mixer_needed {
            Some(mixer)
        } else {
            mixer.free(l);
            None
        };
        let dx2 = self.corrected_backward(l, sink);
        let sums: Vec<Allocation> = router.iter().map(|name| sink.compute(l, name)).collect();
        l.free_all(x2);
        let dx1 = self.mlp_backward(l, parts, mixer_needed, sink);
        l.free_all(x1);
        l.free(dx2);
        let mut d_own = None;
        match (mixer, dx1) {
            (Some(mixer), Some(dx1)) => {
                let before = self.settings.spec.norms.before_attention;
                let need_dh = need_own || before.is_some_and(|n| self.norm_wanted(sink, n));
                let d_shared = self.laurel_gradients(l, need_dh, sink);
                d_own = self.mixer_backward(l, mixer, dx1, d_shared, need_own, sink);
            }
            (mixer, dx1) => {
                if let Some(mixer) = mixer {
                    mixer.free(l);
                }
                l.free_all(dx1);
            }
        }
        l.free(own);
        let found = d_own.is_some();
        l.free_all(d_own);
        if found {
            self.router_backward(l, ALTUP[2], sink);
            for name in &router {
                let one = sink.compute(l, name);
                l.free(one);
            }
        }
        for (name, sum) in router.iter().zip(sums) {
            sink.take(l, name, sum);
        }
        l.free_all([copies, narrow, read]);
        if found && need_dx {
            return Some(dy);
        }
        l.free(dy);
        None
    }
}
