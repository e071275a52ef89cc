//! Memory of a decoder layer: each tensor that `Block` allocates and frees in its forward and backward pass, in the
//! same order. The planner simulates a step with it.

use super::super::contracts::GradSinkMemory;
use super::super::linear::memory::LinearShape;
use super::super::mlp::memory::SavedPiecesMemory;
use crate::base::ledger::MemoryKind::{Activations, LayerWork};
use crate::base::ledger::{Allocation, Ledger};
use crate::model::Spec;
use crate::model::spec::{ATTENTION_SINKS, KeySource, PER_LAYER};
use crate::ops::attention;
use crate::peft::Cost;
use crate::source::{StoragePolicy, Sublayer};
use std::collections::BTreeMap;

/// Settings on which the memory of a layer depends.
#[derive(Clone, Copy)]
pub struct LayerMemorySettings<'a> {
    /// Sizes and options of the model.
    pub spec: &'a Spec,
    /// N: tokens of the micro-batch.
    pub tokens: usize,
    /// Fewest documents of a micro-batch.
    pub documents: usize,
    /// Bytes of an element of an activation.
    pub element: u64,
    /// Tensors are on a GPU.
    pub on_gpu: bool,
    /// As in `Context`.
    pub mlp_tokens: Option<usize>,
    /// Adapters use dropout, which needs a masked copy of the input.
    pub dropout: bool,
    /// Storage of the weights.
    pub storage: &'a StoragePolicy,
    /// Memory of the adapter on each linear, by module.
    pub adapters: &'a BTreeMap<String, Cost>,
    /// True if the parameter of this name is active. Active parameters are not quantized, whatever their storage is.
    pub active: &'a dyn Fn(&str) -> bool,
}

/// Simulates the memory of `Block`.
pub struct LayerMemory<'a> {
    pub(in crate::model) settings: LayerMemorySettings<'a>,
    pub(in crate::model) index: usize,
    /// Bytes of `[N, D]`, q, k, gate and lse. N: all tokens, or those of an MLP chunk.
    pub(in crate::model) nd: u64,
    nq: u64,
    nkv: u64,
    pub(in crate::model) ni: u64,
    lse: u64,
}

/// As `SavedAttention`.
struct SavedAttentionMemory {
    /// Of q and k; then of v.
    raw: Vec<Allocation>,
    qkv: Vec<Allocation>,
    o: Allocation,
    lse: Allocation,
    y: Option<Allocation>,
    low: [Allocation; 2],
}

/// As `SavedActivations`.
pub struct SavedActivationsMemory {
    attention: SavedAttentionMemory,
    x1: Option<Allocation>,
    parts: SavedPiecesMemory,
    x2: Option<Allocation>,
}

impl SavedAttentionMemory {
    /// Moves the tensors to the kind of saved activations.
    fn relabel(self, l: &mut Ledger) -> Self {
        let mut to = |tensor| l.relabel(tensor, Activations);
        Self {
            raw: self.raw.into_iter().map(&mut to).collect(),
            qkv: self.qkv.into_iter().map(&mut to).collect(),
            o: to(self.o),
            lse: to(self.lse),
            y: self.y.map(&mut to),
            low: self.low.map(&mut to),
        }
    }

    fn free(self, l: &mut Ledger) {
        l.free_all(self.raw);
        l.free_all(self.qkv);
        l.free_all([self.o, self.lse]);
        l.free_all(self.y);
        l.free_all(self.low);
    }
}

impl<'a> LayerMemory<'a> {
    /// The memory of layer `index`.
    pub fn new(settings: LayerMemorySettings<'a>, index: usize) -> Self {
        let LayerMemorySettings {
            spec, tokens, element, ..
        } = settings;
        let bytes = |width: usize| element * (tokens * width) as u64;
        Self {
            settings,
            index,
            nd: bytes(spec.hidden),
            nq: bytes(spec.query_width(index)),
            nkv: bytes(spec.kv_width(index)),
            ni: bytes(spec.intermediate_of(index)),
            lse: 4 * (tokens * spec.heads) as u64,
        }
    }

    /// The same layer for an MLP chunk.
    pub(in crate::model) fn piece(&self, tokens: usize) -> Self {
        Self::new(
            LayerMemorySettings {
                tokens,
                ..self.settings
            },
            self.index,
        )
    }

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

    /// Bytes of `[N, width]`.
    pub(in crate::model) fn bytes(&self, width: usize) -> u64 {
        self.settings.element * (self.settings.tokens * width) as u64
    }

    pub(in crate::model) fn name(&self, below: &str) -> String {
        format!("model.layers.{}.{below}", self.index)
    }

    /// The linears of a half that read the norm's output, and the one that writes to the residual stream.
    pub(in crate::model) fn linears(&self, attention: bool) -> (Vec<LinearShape>, LinearShape) {
        let part = if attention { Sublayer::Attention } else { Sublayer::Mlp };
        let mut all: Vec<LinearShape> = self
            .settings
            .spec
            .linears(self.index)
            .into_iter()
            .filter(|linear| linear.sublayer == part && !PER_LAYER.contains(&linear.name))
            .map(|linear| (linear.name, linear.input, linear.output))
            .collect();
        let last = all.pop().unwrap_or(("", 0, 0));
        (all, last)
    }

    /// Several linears with one input: q, k, v, or gate and up; or one linear with parts of these widths.
    pub(in crate::model) fn projections(
        &self,
        l: &mut Ledger,
        linears: &[LinearShape],
        widths: &[u64],
    ) -> Vec<Allocation> {
        if linears.len() > 1 || widths.len() == 1 {
            return linears.iter().map(|&x| self.linear(l, x)).collect();
        }
        let y = self.linear(l, linears[0]);
        let parts = widths.iter().map(|&w| l.alloc(LayerWork, w)).collect();
        l.free(y);
        parts
    }

    fn attention(&self, l: &mut Ledger) -> (Allocation, SavedAttentionMemory) {
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
        let o = l.alloc(LayerWork, self.nq);
        let lse = l.alloc(LayerWork, self.lse);
        let low_out = self.low(l, &[o_proj]);
        let mut x1 = self.linear(l, o_proj);
        let mut y = None;
        if names.after_attention.is_some() {
            y = Some(x1);
            let normed = l.alloc(LayerWork, self.nd);
            x1 = l.alloc(LayerWork, self.nd);
            l.free(normed);
        } else {
            x1 = self.add_residual(l, x1, o_proj);
        }
        let low = [low_in, low_out];
        let saved = SavedAttentionMemory {
            raw,
            qkv,
            o,
            lse,
            y,
            low,
        };
        (x1, saved)
    }

    /// From the layer's input to its output; the returned output is held.
    pub fn forward(&self, l: &mut Ledger, keep: bool) -> (Allocation, Option<SavedActivationsMemory>) {
        let copies = self.pair_copies(l);
        let (x1, attention) = self.attention(l);
        let attention = if keep {
            Some(attention.relabel(l))
        } else {
            attention.free(l);
            None
        };
        let input = self.mlp_input(l);
        let (x2, parts) = self.mlp(l, keep);
        l.free_all(input);
        let x1 = if keep && !self.settings.spec.parallel {
            Some(l.relabel(x1, Activations))
        } else {
            l.free(x1);
            None
        };
        let (y, x2) = self.end(l, x2);
        l.free(copies);
        let Some(attention) = attention else {
            l.free_all(x2);
            return (y, None);
        };
        let x2 = x2.map(|x2| l.relabel(x2, Activations));
        (
            y,
            Some(SavedActivationsMemory {
                attention,
                x1,
                parts,
                x2,
            }),
        )
    }

    fn mlp_wanted(&self, sink: &dyn GradSinkMemory) -> bool {
        let (mut linears, down) = self.linears(false);
        linears.push(down);
        let names = self.settings.spec.norms;
        let mut norms = [names.before_mlp, names.after_mlp].into_iter().flatten();
        linears.iter().any(|&x| self.linear_wanted(sink, x)) || norms.any(|n| self.norm_wanted(sink, n))
    }

    pub(in crate::model) fn wants(&self, sink: &dyn GradSinkMemory, below: &str) -> bool {
        sink.wants(&self.name(&format!("{below}.weight")))
    }

    /// True if a parameter of this norm gets a gradient.
    pub(in crate::model) fn norm_wanted(&self, sink: &dyn GradSinkMemory, below: &str) -> bool {
        self.wants(sink, below) || sink.wants(&self.name(&format!("{below}.bias")))
    }

    /// The output of a norm that both halves read.
    fn mlp_input(&self, l: &mut Ledger) -> Option<Allocation> {
        self.settings.spec.parallel.then(|| l.alloc(LayerWork, self.nd))
    }

    /// Frees `dys` one by one. Several `dys` of one linear are joined.
    pub(in crate::model) fn projections_backward(
        &self,
        l: &mut Ledger,
        linears: &[LinearShape],
        dys: Vec<Allocation>,
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        if linears.len() == 1 && dys.len() == 1 {
            let dx = self.linear_backward(l, linears[0], need_dx, sink);
            l.free_all(dys);
            return dx;
        }
        if linears.len() == 1 {
            let whole = l.alloc(LayerWork, self.bytes(linears[0].2));
            l.free_all(dys);
            let dx = self.linear_backward(l, linears[0], need_dx, sink);
            l.free(whole);
            return dx;
        }
        // DoRA replaces each ∂y by g ⊙ ∂y.
        let scaled = linears.iter().filter(|&&x| self.output_in_low(x));
        let scaled = scaled.map(|x| self.bytes(x.2)).max();
        l.touch(LayerWork, scaled.unwrap_or(0));
        // One ∂x for all: later linears add to it.
        let total = need_dx.then(|| l.alloc(LayerWork, self.bytes(linears[0].1)));
        for (&linear, dy) in linears.iter().zip(dys) {
            self.linear_gradients(l, linear, need_dx, sink);
            l.free(dy);
        }
        total
    }

    /// `∂` of a norm over `bytes`; passes its weight's gradient to the sink.
    pub(in crate::model) fn norm_backward(
        &self,
        l: &mut Ledger,
        below: &str,
        bytes: u64,
        sink: &mut dyn GradSinkMemory,
    ) -> Allocation {
        let dx = l.alloc(LayerWork, bytes);
        // The gradient of the weight of a LayerNorm on a GPU: the normalized input.
        let normalized = self.settings.on_gpu && self.settings.spec.layer_norm.is_some() && self.wants(sink, below);
        l.touch(LayerWork, if normalized { bytes } else { 0 });
        for part in ["weight", "bias"] {
            sink.give(l, &self.name(&format!("{below}.{part}")));
        }
        dx
    }

    /// As `Block::normed_backward`; `dy` is freed.
    pub(in crate::model) fn normed_backward(
        &self,
        l: &mut Ledger,
        norm: Option<&str>,
        dy: Allocation,
        sink: &mut dyn GradSinkMemory,
    ) -> Allocation {
        let Some(norm) = norm else { return dy };
        let dx = self.norm_backward(l, norm, self.nd, sink);
        l.free(dy);
        dx
    }

    /// As `Block::scaled_gradient`.
    pub(in crate::model) fn scaled_gradient(&self, l: &mut Ledger) -> Option<Allocation> {
        (self.settings.spec.residual_scale != 1.0).then(|| l.alloc(LayerWork, self.nd))
    }

    fn attention_wanted(&self, sink: &dyn GradSinkMemory) -> bool {
        let (mut linears, o_proj) = self.linears(true);
        linears.push(o_proj);
        let norms = self.settings.spec.norms(self.index);
        let mut of_attention = norms.iter().filter(|n| n.sublayer == Sublayer::Attention);
        linears.iter().any(|&x| self.linear_wanted(sink, x))
            || of_attention.any(|n| self.norm_wanted(sink, n.name))
            || sink.wants(&self.name(ATTENTION_SINKS))
    }

    /// The caller holds the layer's input; `dy` is freed; the returned `∂x`, if there is one, is held.
    pub fn vjp(
        &self,
        l: &mut Ledger,
        kept: Option<SavedActivationsMemory>,
        dy: Allocation,
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        let copies = self.pair_copies(l);
        let attention_needed = need_dx || self.attention_wanted(sink);
        let per_layer = self.per_layer();
        let (x1, kept, parts, x2) = match kept {
            Some(kept) => (kept.x1, kept.attention, kept.parts, kept.x2),
            None => {
                let (x1, attention) = self.attention(l);
                let (x2, parts) = match per_layer {
                    Some(_) => {
                        let (x2, parts) = self.mlp(l, true);
                        (Some(x2), parts)
                    }
                    None => (None, SavedPiecesMemory::new()),
                };
                let x1 = if self.settings.spec.parallel {
                    l.free(x1);
                    None
                } else {
                    Some(x1)
                };
                (x1, attention, parts, x2)
            }
        };
        let kept = if attention_needed {
            Some(kept)
        } else {
            kept.free(l);
            None
        };
        let mut dy = dy;
        if self.settings.spec.layer_scalar {
            let scaled = l.alloc(LayerWork, self.nd);
            l.free(std::mem::replace(&mut dy, scaled));
        }
        if let Some(linears) = per_layer {
            let need_dx2 = attention_needed || self.mlp_wanted(sink);
            let below = self.per_layer_backward(l, linears, dy, need_dx2, sink);
            l.free_all(x2);
            let Some(below) = below else {
                l.free_all(parts.into_iter().flatten());
                if let Some(kept) = kept {
                    kept.free(l);
                }
                l.free_all(x1);
                l.free(copies);
                return None;
            };
            dy = below;
        }
        let spec = self.settings.spec;
        let input_wanted = || spec.norms.before_attention.is_some_and(|n| self.norm_wanted(sink, n));
        let need_input = if spec.parallel {
            need_dx || input_wanted()
        } else {
            attention_needed
        };
        let input = self.mlp_input(l);
        let d_input = self.mlp_backward(l, parts, need_input, sink);
        l.free_all(input);
        l.free_all(x1);
        let (dx1, d_shared) = match (d_input, spec.parallel) {
            (Some(dx1), false) => {
                l.free(dy);
                (dx1, None)
            }
            (d_shared, _) => (dy, d_shared),
        };
        let dx = match kept {
            Some(kept) => self.attention_backward(l, kept, (dx1, d_shared), need_dx, sink),
            None => {
                l.free(dx1);
                l.free_all(d_shared);
                None
            }
        };
        l.free(copies);
        dx
    }

    fn attention_backward(
        &self,
        l: &mut Ledger,
        saved: SavedAttentionMemory,
        (dx1, d_shared): (Allocation, Option<Allocation>),
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        let SavedAttentionMemory {
            raw,
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
        let d_o = self.linear_backward(l, o_proj, need_do, sink);
        l.free_all(d_out);
        l.free(low_out);
        let Some(d_o) = d_o else {
            l.free_all(raw);
            l.free_all(qkv);
            l.free_all([o, lse, dx1, low_in]);
            l.free_all(d_shared);
            return None;
        };
        let spec = self.settings.spec;
        if spec.attention_sinks {
            sink.give(l, &sinks);
        }
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
        let (dk, dv) = match parts {
            1 => {
                let [dk, dv] = partial;
                l.touch(LayerWork, self.gpu_partial_sums());
                (dk, dv)
            }
            _ => {
                let [k, v] = partial;
                let dk = l.alloc(LayerWork, self.nkv);
                l.free(k);
                let dv = l.alloc(LayerWork, self.nkv);
                l.free(v);
                (dk, dv)
            }
        };
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
