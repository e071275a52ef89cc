//! Simulates the memory of forward pass and vector-Jacobian product of one layer, tensor by tensor as in
//! `model::block`.

use super::Inputs;
use super::ledger::{Allocation, Kind, Ledger};
use super::mlp::Parts;
use super::step::Sink;
use crate::engine::Active;
use crate::model::Spec;
use crate::ops::quantized;
use crate::peft::Cost;
use crate::recipe::Dtype;

/// As in `ops`: with fewer tasks the query heads of a key head are split over tasks.
const ENOUGH_TASKS: usize = 8;

pub(super) struct Block<'a> {
    pub spec: &'a Spec,
    index: usize,
    pub inputs: &'a Inputs,
    /// Active parameters are not quantized, whatever their storage is.
    active: &'a Active,
    /// Adapters use dropout: a masked copy of the input.
    dropout: bool,
    /// N: all tokens, or those of an MLP chunk.
    pub tokens: usize,
    /// Bytes of `[N, ·]` tensors.
    pub nd: u64,
    nq: u64,
    nkv: u64,
    pub ni: u64,
    lse: u64,
}

/// Activations of the attention half.
struct Attention {
    raw: Vec<Allocation>,
    qkv: Vec<Allocation>,
    o: Allocation,
    lse: Allocation,
    y: Option<Allocation>,
}

/// Saved activations of a layer.
pub(super) struct SavedActivations {
    attention: Attention,
    x1: Allocation,
    parts: Parts,
}

/// A linear: its name within the layer, input and output features.
pub(super) type Linear = (&'static str, usize, usize);

impl<'a> Block<'a> {
    pub fn new(spec: &'a Spec, index: usize, inputs: &'a Inputs, active: &'a Active, dropout: bool) -> Self {
        Self::of_tokens((spec, index), inputs, active, dropout, inputs.tokens)
    }

    fn of_tokens(
        (spec, index): (&'a Spec, usize),
        inputs: &'a Inputs,
        active: &'a Active,
        dropout: bool,
        tokens: usize,
    ) -> Self {
        let bytes = |width: usize| inputs.element * (tokens * width) as u64;
        Self {
            spec,
            index,
            inputs,
            active,
            dropout,
            tokens,
            nd: bytes(spec.hidden),
            nq: bytes(spec.query_width()),
            nkv: bytes(spec.kv_width()),
            ni: bytes(spec.intermediate),
            lse: 4 * (tokens * spec.heads) as u64,
        }
    }

    /// The same block for an MLP chunk.
    pub fn piece(&self, tokens: usize) -> Self {
        Self::of_tokens((self.spec, self.index), self.inputs, self.active, self.dropout, tokens)
    }

    fn n(&self, width: usize) -> u64 {
        self.inputs.element * (self.tokens * width) as u64
    }

    pub fn name(&self, below: &str) -> String {
        format!("model.layers.{}.{below}", self.index)
    }

    fn adapter(&self, linear: Linear) -> Option<&Cost> {
        self.inputs.adapters.get(&self.name(linear.0))
    }

    /// Temporary memory of an adapter kind other than LoRA.
    fn moment(&self, cost: &Cost) -> u64 {
        4 * (self.tokens as u64 * cost.per_token + cost.whole)
    }

    /// A product with a weight of another type than the activation. On a GPU the weight is dequantized, or widened from
    /// bf16 to f32, block by block; on the CPU both happen during packing.
    fn decode(&self, l: &mut Ledger, linear: Linear) {
        let (name, input, output) = linear;
        let weight = self.name(&format!("{name}.weight"));
        let quantized = self.inputs.strategy.storage.quantized().contains_key(weight.as_str());
        let bf16 = self.inputs.strategy.storage.dtype() == Dtype::Bf16;
        let mut bytes = 0;
        if quantized && !self.active.contains(&weight) {
            bytes += quantized::work_bytes(output, input, bf16);
        }
        if bf16 && self.adapter(linear).is_some_and(|c| c.widens) {
            bytes += quantized::work_bytes(output, input, false);
        }
        if self.inputs.on_gpu {
            l.touch(Kind::Layer, bytes);
        }
    }

    /// The linears of a half that read the norm's output, and the one that writes to the residual stream.
    pub fn linears(&self, attention: bool) -> (Vec<Linear>, Linear) {
        let part = if attention { "self_attn." } else { "mlp." };
        let mut all: Vec<Linear> = self
            .spec
            .linears()
            .into_iter()
            .filter(|(name, ..)| name.starts_with(part))
            .map(|(name, input, output, ..)| (name, input, output))
            .collect();
        let last = all.pop().unwrap_or(("", 0, 0));
        (all, last)
    }

    pub fn linear(&self, l: &mut Ledger, linear: Linear) -> Allocation {
        let (_, input, output) = linear;
        let y = l.alloc(Kind::Layer, self.n(output));
        self.decode(l, linear);
        if let Some(cost) = self.adapter(linear) {
            let copy = if self.dropout { self.n(input) } else { 0 };
            l.touch(Kind::Layer, copy + self.n(cost.rank) + self.moment(cost));
        }
        y
    }

    /// Several linears with one input: q, k, v, or gate and up.
    pub fn projections(&self, l: &mut Ledger, linears: &[Linear], widths: &[u64]) -> Vec<Allocation> {
        if !self.spec.fused_projections {
            return linears.iter().map(|&x| self.linear(l, x)).collect();
        }
        let y = self.linear(l, linears[0]);
        let parts = widths.iter().map(|&w| l.alloc(Kind::Layer, w)).collect();
        l.free(y);
        parts
    }

    fn attention(&self, l: &mut Ledger) -> (Allocation, Attention) {
        let (linears, o_proj) = self.linears(true);
        let h = l.alloc(Kind::Layer, self.nd);
        let mut qkv = self.projections(l, &linears, &[self.nq, self.nkv, self.nkv]);
        l.free(h);
        let v = qkv.pop();
        let mut raw = Vec::new();
        if self.spec.qk_norm {
            raw = std::mem::replace(
                &mut qkv,
                vec![l.alloc(Kind::Layer, self.nq), l.alloc(Kind::Layer, self.nkv)],
            );
        }
        let before = qkv;
        let mut qkv = vec![l.alloc(Kind::Layer, self.nq), l.alloc(Kind::Layer, self.nkv)];
        qkv.extend(v);
        let o = l.alloc(Kind::Layer, self.nq);
        let lse = l.alloc(Kind::Layer, self.lse);
        let mut x1 = self.linear(l, o_proj);
        let mut y = None;
        if self.spec.sandwich_norms {
            y = Some(x1);
            let normed = l.alloc(Kind::Layer, self.nd);
            x1 = l.alloc(Kind::Layer, self.nd);
            l.free(normed);
        }
        l.free_all(before);
        (x1, Attention { raw, qkv, o, lse, y })
    }

    /// From the layer's input to its output; the returned output is held.
    pub fn forward(&self, l: &mut Ledger, keep: bool) -> (Allocation, Option<SavedActivations>) {
        let (x1, attention) = self.attention(l);
        let attention = if keep {
            Some(relabel(l, attention))
        } else {
            self.drop_attention(l, attention);
            None
        };
        let (y, parts) = self.mlp(l, keep);
        let Some(attention) = attention else {
            l.free(x1);
            return (y, None);
        };
        let x1 = l.relabel(x1, Kind::Activations);
        (y, Some(SavedActivations { attention, x1, parts }))
    }

    fn drop_attention(&self, l: &mut Ledger, kept: Attention) {
        l.free_all(kept.raw);
        l.free_all(kept.qkv);
        l.free_all([kept.o, kept.lse]);
        l.free_all(kept.y);
    }

    pub fn wants(&self, sink: &Sink, below: &str) -> bool {
        sink.wants(&self.name(&format!("{below}.weight")))
    }

    pub fn linear_wanted(&self, sink: &Sink, linear: Linear) -> bool {
        let name = linear.0;
        let parts = |c: &Cost| c.trained.iter().any(|(part, _)| sink.wants(part));
        self.adapter(linear).is_some_and(parts)
            || self.wants(sink, name)
            || sink.wants(&self.name(&format!("{name}.bias")))
    }

    /// The caller holds the input and `∂y`; the returned `∂x`, if it is needed, is held.
    pub fn linear_backward(
        &self,
        l: &mut Ledger,
        linear: Linear,
        need_dx: bool,
        sink: &mut Sink,
    ) -> Option<Allocation> {
        let dx = need_dx.then(|| l.alloc(Kind::Layer, self.n(linear.1)));
        self.linear_gradients(l, linear, need_dx, sink);
        dx
    }

    fn linear_gradients(&self, l: &mut Ledger, linear: Linear, need_dx: bool, sink: &mut Sink) {
        let (name, input, _) = linear;
        if need_dx {
            self.decode(l, linear);
        }
        if let Some(cost) = self.adapter(linear) {
            let wanted = cost.trained.iter().any(|(part, _)| sink.wants(part));
            if wanted || need_dx {
                l.touch(Kind::Layer, self.moment(cost));
                let du = l.alloc(Kind::Layer, self.n(cost.rank));
                let mut gradients = Vec::new();
                if wanted {
                    let copy = l.alloc(Kind::Layer, if self.dropout { self.n(input) } else { 0 });
                    let u = l.alloc(Kind::Layer, self.n(cost.rank));
                    for (part, _) in &cost.trained {
                        gradients.push((sink.compute(l, part), part));
                    }
                    l.free_all([copy, u]);
                }
                if need_dx && self.dropout {
                    l.touch(Kind::Layer, self.n(input));
                }
                l.free(du);
                for (gradient, part) in gradients {
                    sink.take(l, part, gradient);
                }
            }
        }
        sink.give(l, &self.name(&format!("{name}.weight")));
        sink.give(l, &self.name(&format!("{name}.bias")));
    }

    /// Frees `dys` one by one.
    pub fn projections_backward(
        &self,
        l: &mut Ledger,
        linears: &[Linear],
        dys: Vec<Allocation>,
        need_dx: bool,
        sink: &mut Sink,
    ) -> Option<Allocation> {
        if self.spec.fused_projections {
            let whole = l.alloc(Kind::Layer, self.n(linears[0].2));
            l.free_all(dys);
            let dx = self.linear_backward(l, linears[0], need_dx, sink);
            l.free(whole);
            return dx;
        }
        // One ∂x for all: later linears add to it.
        let total = need_dx.then(|| l.alloc(Kind::Layer, self.n(linears[0].1)));
        for (&linear, dy) in linears.iter().zip(dys) {
            self.linear_gradients(l, linear, need_dx, sink);
            l.free(dy);
        }
        total
    }

    /// `∂` of a norm over `bytes`; passes its weight's gradient to the sink.
    pub fn norm_backward(&self, l: &mut Ledger, below: &str, bytes: u64, sink: &mut Sink) -> Allocation {
        let dx = l.alloc(Kind::Layer, bytes);
        sink.give(l, &self.name(&format!("{below}.weight")));
        dx
    }

    fn attention_wanted(&self, sink: &Sink) -> bool {
        let (mut linears, o_proj) = self.linears(true);
        linears.push(o_proj);
        let mut norms = vec!["input_layernorm", "self_attn.q_norm", "self_attn.k_norm"];
        if self.spec.sandwich_norms {
            norms.push("post_attention_layernorm");
        }
        linears.iter().any(|&x| self.linear_wanted(sink, x)) || norms.iter().any(|n| self.wants(sink, n))
    }

    /// The caller holds the layer's input; `dy` is freed; the returned `∂x`, if there is one, is held.
    pub fn vjp(
        &self,
        l: &mut Ledger,
        kept: Option<SavedActivations>,
        dy: Allocation,
        need_dx: bool,
        sink: &mut Sink,
    ) -> Option<Allocation> {
        let attention_needed = need_dx || self.attention_wanted(sink);
        let (x1, kept, parts) = match kept {
            Some(kept) => (kept.x1, kept.attention, kept.parts),
            None => {
                let (x1, attention) = self.attention(l);
                (x1, attention, Parts::new())
            }
        };
        let kept = if attention_needed {
            Some(kept)
        } else {
            self.drop_attention(l, kept);
            None
        };
        let dx1 = self.mlp_backward(l, parts, dy, attention_needed, sink);
        l.free(x1);
        match (kept, dx1) {
            (Some(kept), Some(dx1)) => self.attention_backward(l, kept, dx1, need_dx, sink),
            (kept, dx1) => {
                if let Some(kept) = kept {
                    self.drop_attention(l, kept);
                }
                l.free_all(dx1);
                None
            }
        }
    }

    fn attention_backward(
        &self,
        l: &mut Ledger,
        kept: Attention,
        dx1: Allocation,
        need_dx: bool,
        sink: &mut Sink,
    ) -> Option<Allocation> {
        let Attention { raw, qkv, o, lse, y } = kept;
        let (linears, o_proj) = self.linears(true);
        let need_dh = need_dx || self.wants(sink, "input_layernorm");
        let qk_wanted = self.wants(sink, "self_attn.q_norm") || self.wants(sink, "self_attn.k_norm");
        let need_do = need_dh || qk_wanted || linears.iter().any(|&x| self.linear_wanted(sink, x));
        let d_out = y.map(|y| {
            let d = self.norm_backward(l, "post_attention_layernorm", self.nd, sink);
            l.free(y);
            d
        });
        let d_o = self.linear_backward(l, o_proj, need_do, sink);
        l.free_all(d_out);
        let Some(d_o) = d_o else {
            l.free_all(raw);
            l.free_all(qkv);
            l.free_all([o, lse, dx1]);
            return None;
        };
        let dq = l.alloc(Kind::Layer, self.nq);
        let parts = self.parts();
        let partial = [
            l.alloc(Kind::Layer, parts * self.nkv),
            l.alloc(Kind::Layer, parts * self.nkv),
        ];
        let (dk, dv) = match parts {
            1 => {
                let [dk, dv] = partial;
                (dk, dv)
            }
            _ => {
                let [k, v] = partial;
                let dk = l.alloc(Kind::Layer, self.nkv);
                l.free(k);
                let dv = l.alloc(Kind::Layer, self.nkv);
                l.free(v);
                (dk, dv)
            }
        };
        l.free_all(qkv);
        l.free_all([o, lse, d_o]);
        // The inverse rotation writes new tensors; the tensors before it live until the end.
        let before = [dq, dk];
        let mut dq = l.alloc(Kind::Layer, self.nq);
        let mut dk = l.alloc(Kind::Layer, self.nkv);
        if self.spec.qk_norm {
            let normed = self.norm_backward(l, "self_attn.q_norm", self.nq, sink);
            l.free(std::mem::replace(&mut dq, normed));
            let normed = self.norm_backward(l, "self_attn.k_norm", self.nkv, sink);
            l.free(std::mem::replace(&mut dk, normed));
        }
        l.free_all(raw);
        let wanted = linears.iter().any(|&x| self.linear_wanted(sink, x));
        let h = wanted.then(|| l.alloc(Kind::Layer, self.nd));
        let dh = self.projections_backward(l, &linears, vec![dq, dk, dv], need_dh, sink);
        l.free_all(h);
        let dx = dh.map(|dh| {
            let dx = self.norm_backward(l, "input_layernorm", self.nd, sink);
            l.free(dh);
            dx
        });
        l.free_all(before);
        l.free(dx1);
        if need_dx {
            dx
        } else {
            l.free_all(dx);
            None
        }
    }

    /// Number of partial sums of dk and dv that attention keeps for each key head.
    fn parts(&self) -> u64 {
        let group = self.spec.heads / self.spec.kv_heads.max(1);
        let tasks = self.inputs.documents.max(1) * self.spec.kv_heads;
        let enough = |p: &usize| group.is_multiple_of(*p) && tasks * p >= ENOUGH_TASKS;
        (1..=group).find(enough).unwrap_or(group) as u64
    }
}

/// Moves the tensors to the kind of saved activations.
fn relabel(l: &mut Ledger, a: Attention) -> Attention {
    let mut move_to = |held| l.relabel(held, Kind::Activations);
    Attention {
        raw: a.raw.into_iter().map(&mut move_to).collect(),
        qkv: a.qkv.into_iter().map(&mut move_to).collect(),
        o: move_to(a.o),
        lse: move_to(a.lse),
        y: a.y.map(&mut move_to),
    }
}
