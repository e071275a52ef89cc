//! Memory of a decoder layer: each tensor that `DecoderBlock` allocates and frees in its forward and backward pass, in
//! the same order. The planner simulates a step with it.

use super::super::attention::memory::SavedAttentionMemory;
use super::super::contracts::GradSinkMemory;
use super::super::delta_net::memory::SavedDeltaNetMemory;
use super::super::latent::memory::SavedLatentMemory;
use super::super::linear::memory::LinearShape;
use super::super::mlp::memory::SavedPiecesMemory;
use super::super::short_conv::memory::SavedShortConvMemory;
use crate::base::ledger::MemoryKind::{Activations, LayerWork};
use crate::base::ledger::{Allocation, Ledger};
use crate::model::spec::{ATTENTION_SINKS, LAUREL, Mixer, PER_LAYER};
use crate::model::{SequenceConfig, Spec};
use crate::peft::AdapterCost;
use crate::source::{StoragePolicy, Sublayer};
use std::collections::BTreeMap;

/// Settings on which the memory of a layer depends.
#[derive(Clone, Copy)]
pub struct LayerMemorySettings<'a> {
    /// Sizes and options of the model.
    pub spec: &'a Spec,
    /// N: tokens of the micro-batch.
    pub tokens: usize,
    /// The ranks that share a micro-batch: `tokens` are those of one of them.
    pub sequence: SequenceConfig,
    /// Fewest documents of a micro-batch.
    pub documents: usize,
    /// Bytes of an element of an activation.
    pub element: u64,
    /// Tensors are on a GPU.
    pub on_gpu: bool,
    /// Experts come from host memory or the disk, one at a time.
    pub experts_streamed: bool,
    /// Ranks among which the experts are divided.
    pub expert_ranks: usize,
    /// As in `Context`.
    pub mlp_tokens: Option<usize>,
    /// Adapters use dropout, which needs a masked copy of the input.
    pub dropout: bool,
    /// Storage of the weights.
    pub storage: &'a StoragePolicy,
    /// Memory of the adapter on each linear, by module.
    pub adapters: &'a BTreeMap<String, AdapterCost>,
    /// True if the parameter of this name is active. Active parameters are not quantized, whatever their storage is.
    pub active: &'a dyn Fn(&str) -> bool,
}

/// Simulates the memory of `DecoderBlock`.
pub struct LayerMemory<'a> {
    pub(in crate::model) settings: LayerMemorySettings<'a>,
    pub(in crate::model) index: usize,
    /// Bytes of `[N, D]`, q, k, gate and lse. N: all tokens, or those of an MLP chunk.
    pub(in crate::model) nd: u64,
    pub(in crate::model) nq: u64,
    pub(in crate::model) nkv: u64,
    pub(in crate::model) ni: u64,
    pub(in crate::model) lse: u64,
}

/// As `SavedMixer`.
pub(in crate::model) enum SavedMixerMemory {
    Attention(SavedAttentionMemory),
    DeltaNet(SavedDeltaNetMemory),
    Latent(Box<SavedLatentMemory>),
    ShortConv(SavedShortConvMemory),
}

impl SavedMixerMemory {
    pub(super) fn relabel(self, l: &mut Ledger) -> Self {
        match self {
            Self::Attention(saved) => Self::Attention(saved.relabel(l)),
            Self::DeltaNet(saved) => Self::DeltaNet(saved.relabel(l)),
            Self::Latent(saved) => Self::Latent(Box::new(saved.relabel(l))),
            Self::ShortConv(saved) => Self::ShortConv(saved.relabel(l)),
        }
    }

    pub(super) fn free(self, l: &mut Ledger) {
        match self {
            Self::Attention(saved) => saved.free(l),
            Self::DeltaNet(saved) => saved.free(l),
            Self::Latent(saved) => saved.free(l),
            Self::ShortConv(saved) => saved.free(l),
        }
    }
}

/// As `SavedActivations`.
pub struct SavedActivationsMemory {
    pub(super) mixer: SavedMixerMemory,
    pub(super) x1: Option<Allocation>,
    pub(super) parts: SavedPiecesMemory,
    pub(super) x2: Option<Allocation>,
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

    /// Bytes of `[N, width]`.
    pub(in crate::model) fn bytes(&self, width: usize) -> u64 {
        self.settings.element * (self.settings.tokens * width) as u64
    }

    pub(in crate::model) fn name(&self, below: &str) -> String {
        format!("model.layers.{}.{below}", self.index)
    }

    /// The linears of a half that read the norm's output, and the one that writes to the residual stream.
    pub(in crate::model) fn linears(&self, attention: bool) -> (Vec<LinearShape>, LinearShape) {
        let half = if attention { Sublayer::Attention } else { Sublayer::Mlp };
        let beside = |name: &str| PER_LAYER.contains(&name) || LAUREL.contains(&name);
        let mut all: Vec<LinearShape> = self
            .settings
            .spec
            .linears(self.index)
            .into_iter()
            .filter(|linear| linear.sublayer == half && !beside(linear.name))
            .map(LinearShape::from)
            .collect();
        let last = all.pop().unwrap_or_default();
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

    /// As `DecoderBlock::mixer`.
    pub(super) fn mixer(&self, l: &mut Ledger) -> (Allocation, SavedMixerMemory) {
        match self.settings.spec.layers[self.index].mixer {
            Mixer::Attention => {
                let (x1, saved) = self.attention(l);
                (x1, SavedMixerMemory::Attention(saved))
            }
            Mixer::DeltaNet(sizes) => {
                let (x1, saved) = self.delta_net(l, sizes);
                (x1, SavedMixerMemory::DeltaNet(saved))
            }
            Mixer::Latent(sizes) => {
                let (x1, saved) = self.latent(l, sizes);
                (x1, SavedMixerMemory::Latent(Box::new(saved)))
            }
            Mixer::ShortConv { .. } => {
                let (x1, saved) = self.short_conv(l);
                (x1, SavedMixerMemory::ShortConv(saved))
            }
        }
    }

    /// From the layer's input to its output; the returned output is held.
    pub fn forward(&self, l: &mut Ledger, keep: bool) -> (Allocation, Option<SavedActivationsMemory>) {
        if let Some(streams) = self.settings.spec.streams {
            return self.altup_forward(l, streams, keep);
        }
        let copies = self.pair_copies(l);
        let (x1, mixer) = self.mixer(l);
        let mixer = if keep {
            Some(mixer.relabel(l))
        } else {
            mixer.free(l);
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
        let Some(mixer) = mixer else {
            l.free_all(x2);
            return (y, None);
        };
        let x2 = x2.map(|x2| l.relabel(x2, Activations));
        (y, Some(SavedActivationsMemory { mixer, x1, parts, x2 }))
    }

    fn mlp_wanted(&self, sink: &dyn GradSinkMemory) -> bool {
        let (mut linears, down) = self.linears(false);
        linears.push(down);
        let names = self.settings.spec.norms;
        let mut norms = [names.before_mlp, names.after_mlp].into_iter().flatten();
        let experts = self.settings.spec.layers[self.index].experts;
        linears.iter().any(|&x| self.linear_wanted(sink, x))
            || experts.is_some_and(|sizes| self.experts_wanted(sink, &sizes))
            || norms.any(|n| self.norm_wanted(sink, n))
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
            let whole = l.alloc(LayerWork, self.bytes(linears[0].output));
            l.free_all(dys);
            let dx = self.linear_backward(l, linears[0], need_dx, sink);
            l.free(whole);
            return dx;
        }
        // DoRA replaces each ∂y by g ⊙ ∂y.
        let scaled = linears.iter().filter(|&&x| self.output_in_low(x));
        let scaled = scaled.map(|x| self.bytes(x.output)).max();
        l.touch(LayerWork, scaled.unwrap_or(0));
        // One ∂x for all: later linears add to it.
        let total = need_dx.then(|| l.alloc(LayerWork, self.bytes(linears[0].input)));
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

    /// As `DecoderBlock::normed_backward`; `dy` is freed.
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

    /// As `DecoderBlock::scaled_gradient`.
    pub(in crate::model) fn scaled_gradient(&self, l: &mut Ledger) -> Option<Allocation> {
        (self.settings.spec.residual_scale != 1.0).then(|| l.alloc(LayerWork, self.nd))
    }

    pub(super) fn mixer_wanted(&self, sink: &dyn GradSinkMemory) -> bool {
        let (mut linears, o_proj) = self.linears(true);
        linears.push(o_proj);
        let norms = self.settings.spec.norms(self.index);
        let mut of_attention = norms.iter().filter(|n| n.sublayer == Sublayer::Attention);
        linears.iter().any(|&x| self.linear_wanted(sink, x))
            || of_attention.any(|n| self.norm_wanted(sink, n.name))
            || match self.settings.spec.layers[self.index].mixer {
                Mixer::Attention => sink.wants(&self.name(ATTENTION_SINKS)),
                Mixer::DeltaNet(_) => self.delta_wanted(sink),
                // Its linears and norms are in the lists.
                Mixer::Latent(_) => false,
                Mixer::ShortConv { .. } => self.short_conv_wanted(sink),
            }
    }

    /// As `DecoderBlock::mixer_backward`.
    pub(super) fn mixer_backward(
        &self,
        l: &mut Ledger,
        kept: SavedMixerMemory,
        dx1: Allocation,
        d_shared: Option<Allocation>,
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        match kept {
            SavedMixerMemory::Attention(kept) => self.attention_backward(l, kept, dx1, d_shared, need_dx, sink),
            SavedMixerMemory::DeltaNet(kept) => self.delta_net_backward(l, kept, dx1, need_dx, sink),
            SavedMixerMemory::Latent(kept) => self.latent_backward(l, *kept, dx1, need_dx, sink),
            SavedMixerMemory::ShortConv(kept) => self.short_conv_backward(l, kept, dx1, need_dx, sink),
        }
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
        if let Some(streams) = self.settings.spec.streams {
            return self.altup_vjp(l, streams, kept, dy, need_dx, sink);
        }
        let copies = self.pair_copies(l);
        let mixer_needed = need_dx || self.mixer_wanted(sink);
        let per_layer = self.per_layer();
        let (x1, kept, parts, x2) = match kept {
            Some(kept) => (kept.x1, kept.mixer, kept.parts, kept.x2),
            None => {
                let (x1, mixer) = self.mixer(l);
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
                (x1, mixer, parts, x2)
            }
        };
        let kept = if mixer_needed {
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
            let need_dx2 = mixer_needed || self.mlp_wanted(sink);
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
            mixer_needed
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
            Some(kept) => self.mixer_backward(l, kept, dx1, d_shared, need_dx, sink),
            None => {
                l.free(dx1);
                l.free_all(d_shared);
                None
            }
        };
        l.free(copies);
        dx
    }
}
