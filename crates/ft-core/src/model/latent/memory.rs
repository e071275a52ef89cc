//! Memory of latent attention: each tensor that it allocates and frees, in the same order.

use super::super::block::memory::LayerMemory;
use super::super::contracts::GradSinkMemory;
use super::super::linear::memory::LinearShape;
use super::super::spec::{LATENT_NORM, LATENT_QUERY_NORM, LatentSpec};
use crate::base::ledger::MemoryKind::{Activations, LayerWork};
use crate::base::ledger::{Allocation, Ledger};

/// As `SavedLatent`.
pub(in crate::model) struct SavedLatentMemory {
    sizes: LatentSpec,
    low_q: Option<Allocation>,
    low_kv: Allocation,
    /// q, k, v, o and lse.
    heads: Vec<Allocation>,
    low: [Allocation; 4],
}

impl SavedLatentMemory {
    /// Counts these tensors as saved activations from now on (`MemoryKind::Activations`).
    pub(in crate::model) fn relabel(self, l: &mut Ledger) -> Self {
        let mut to = |tensor| l.relabel(tensor, Activations);
        Self {
            sizes: self.sizes,
            low_q: self.low_q.map(&mut to),
            low_kv: to(self.low_kv),
            heads: self.heads.into_iter().map(&mut to).collect(),
            low: self.low.map(&mut to),
        }
    }

    pub(in crate::model) fn free(self, l: &mut Ledger) {
        l.free_all(self.low_q);
        l.free(self.low_kv);
        l.free_all(self.heads);
        l.free_all(self.low);
    }
}

/// The linears of latent attention, in the order of `Spec::linears`.
struct Linears {
    /// q_a_proj or q_proj, and kv_a_proj_with_mqa.
    inputs: Vec<LinearShape>,
    query: Option<LinearShape>,
    expand: LinearShape,
    out: LinearShape,
}

impl LayerMemory<'_> {
    fn latent_linears(&self, sizes: &LatentSpec) -> Linears {
        let (mut all, out) = self.linears(true);
        let expand = all.pop().unwrap_or_default();
        let query = sizes.q_rank.and_then(|_| all.pop());
        Linears {
            inputs: all,
            query,
            expand,
            out,
        }
    }

    pub(in crate::model) fn latent(&self, l: &mut Ledger, sizes: LatentSpec) -> (Allocation, SavedLatentMemory) {
        let linears = self.latent_linears(&sizes);
        let h = self
            .settings
            .spec
            .norms
            .before_attention
            .map(|_| l.alloc(LayerWork, self.nd));
        let low_in = self.low(l, &linears.inputs);
        let first = self.linear(l, linears.inputs[0]);
        let low_kv = self.linear(l, linears.inputs[1]);
        l.free_all(h);
        let (raw_q, low_q, low_b) = match linears.query {
            Some(query) => {
                let normed = l.alloc(LayerWork, self.bytes(query.input));
                let low = self.low(l, &[query]);
                let q = self.linear(l, query);
                l.free(normed);
                (q, Some(first), low)
            }
            None => (first, None, l.alloc(LayerWork, 0)),
        };
        let q = l.alloc(LayerWork, self.nq);
        l.free(raw_q);
        let rows = l.alloc(LayerWork, self.bytes(sizes.kv_rank));
        let normed = l.alloc(LayerWork, self.bytes(sizes.kv_rank));
        l.free(rows);
        let low_expand = self.low(l, &[linears.expand]);
        let kv = self.linear(l, linears.expand);
        l.free(normed);
        let [k, v] = [l.alloc(LayerWork, self.nq), l.alloc(LayerWork, self.nq)];
        l.free(kv);
        self.attend(l);
        let o = l.alloc(LayerWork, self.nq);
        let lse = l.alloc(LayerWork, self.lse);
        let values = self.latent_values(l, &linears.out);
        let low_out = self.low(l, &[linears.out]);
        let out = self.linear(l, linears.out);
        l.free_all(values);
        let x1 = self.add_residual(l, out, linears.out);
        let saved = SavedLatentMemory {
            sizes,
            low_q,
            low_kv,
            heads: vec![q, k, v, o, lse],
            low: [low_in, low_b, low_expand, low_out],
        };
        (x1, saved)
    }

    /// As `LatentHeads::cut`: the output of attention without its filling.
    fn latent_values(&self, l: &mut Ledger, out: &LinearShape) -> Option<Allocation> {
        let bytes = self.bytes(out.input);
        (bytes != self.nq).then(|| l.alloc(LayerWork, bytes))
    }

    pub(in crate::model) fn latent_wanted(&self, sink: &dyn GradSinkMemory, sizes: &LatentSpec) -> bool {
        let linears = self.latent_linears(sizes);
        let of_queries = linears
            .query
            .is_some_and(|query| self.linear_wanted(sink, query) || self.norm_wanted(sink, LATENT_QUERY_NORM));
        of_queries || self.linear_wanted(sink, linears.expand) || self.norm_wanted(sink, LATENT_NORM)
    }

    pub(in crate::model) fn latent_backward(
        &self,
        l: &mut Ledger,
        saved: SavedLatentMemory,
        dx1: Allocation,
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        let SavedLatentMemory {
            sizes,
            low_q,
            low_kv,
            heads,
            low: [low_in, low_b, low_expand, low_out],
        } = saved;
        let linears = self.latent_linears(&sizes);
        let before = self.settings.spec.norms.before_attention;
        let need_dh = need_dx || before.is_some_and(|n| self.norm_wanted(sink, n));
        let inputs_wanted = linears.inputs.iter().any(|&x| self.linear_wanted(sink, x));
        let need_in = need_dh || inputs_wanted;
        let d_out = self.scaled_gradient(l);
        let values = if self.linear_wanted(sink, linears.out) {
            self.latent_values(l, &linears.out)
        } else {
            None
        };
        let need_do = need_in || self.latent_wanted(sink, &sizes);
        let d_values = self.linear_backward(l, linears.out, need_do, sink);
        l.free_all(d_out);
        l.free(low_out);
        l.free_all(values);
        let Some(d_values) = d_values else {
            l.free_all(low_q);
            l.free_all(heads);
            l.free_all([low_kv, low_in, low_b, low_expand, dx1]);
            return None;
        };
        let d_o = if self.bytes(linears.out.input) == self.nq {
            d_values
        } else {
            let filled = l.alloc(LayerWork, self.nq);
            l.free(d_values);
            filled
        };
        let [dq, dk, dv] = self.attend_backward(l);
        l.free_all(heads);
        l.free(d_o);
        let d_queries = l.alloc(LayerWork, self.bytes(linears.query.unwrap_or(linears.inputs[0]).output));
        l.free(dq);
        let d_kv = l.alloc(LayerWork, self.bytes(linears.expand.output));
        let d_rotary = l.alloc(LayerWork, self.bytes(sizes.rotary));
        l.free_all([dk, dv]);
        let rows = l.alloc(LayerWork, self.bytes(sizes.kv_rank));
        l.free(low_kv);
        let need_rows = need_in || self.norm_wanted(sink, LATENT_NORM);
        let d_rows = self.normed_linear_backward(l, linears.expand, LATENT_NORM, d_kv, need_rows, sink);
        l.free(low_expand);
        l.free(rows);
        let d_first = match (linears.query, low_q) {
            (Some(query), Some(low_q)) => {
                let need = need_in || self.norm_wanted(sink, LATENT_QUERY_NORM);
                let d = self.normed_linear_backward(l, query, LATENT_QUERY_NORM, d_queries, need, sink);
                l.free(low_q);
                d
            }
            _ => Some(d_queries),
        };
        l.free(low_b);
        let (Some(d_first), Some(d_rows), true) = (d_first, d_rows, need_in) else {
            l.free_all([d_rotary, low_in, dx1]);
            return None;
        };
        let d_low = l.alloc(LayerWork, self.bytes(linears.inputs[1].output));
        l.free_all([d_rows, d_rotary]);
        let h = (inputs_wanted && before.is_some()).then(|| l.alloc(LayerWork, self.nd));
        let dh = self.projections_backward(l, &linears.inputs, vec![d_first, d_low], need_dh, sink);
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

    /// The backward pass of a linear that reads a norm; `dy` is freed. `need`: the gradient at the norm's input, which is
    /// returned.
    fn normed_linear_backward(
        &self,
        l: &mut Ledger,
        linear: LinearShape,
        norm: &str,
        dy: Allocation,
        need: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        let width = self.bytes(linear.input);
        let normed = self.linear_wanted(sink, linear).then(|| l.alloc(LayerWork, width));
        let d_normed = self.linear_backward(l, linear, need, sink);
        l.free(dy);
        l.free_all(normed);
        let d_normed = d_normed?;
        let dx = self.norm_backward(l, norm, width, sink);
        l.free(d_normed);
        Some(dx)
    }
}
