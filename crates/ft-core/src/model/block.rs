//! The decoder block: a half that mixes tokens and an MLP half, each with a forward and an explicit backward pass.
//!
//! ```text
//! x1 = x  + [norm] o_proj([gate] attention([norm] rope([norm] q), [norm] rope([norm] k), v))    with q, k, v from [norm] x
//! x2 = x1 + [norm] down_proj(act(gate_proj(h)) · up_proj(h))                             with h = [norm] x1
//! ```
//!
//! The first half is `attention`, or in some layers Gated DeltaNet (`delta_net`), latent attention (`latent`) or a gated short
//! convolution (`short_conv`) in its place. Norms and the gate in brackets exist in some families only; Granite multiplies what is added to x and x1 by a constant. If the halves are parallel, both
//! read the same h = norm(x), or x. Gemma 4 has a third part (`per_layer`). In Gemma 3n a token has several streams (`altup`,
//! `laurel`): the halves compute one of them.

pub mod altup;
pub mod laurel;
pub mod memory;
pub mod per_layer;

use super::attention::SavedAttention;
use super::contracts::{Context, GradSink, KvStore, Layer, Param};
use super::delta_net::{DeltaNet, SavedDeltaNet};
use super::experts::Experts;
use super::latent::{LatentAttention, SavedLatent};
use super::linear::Linear;
use super::mlp::{MlpGradient, SavedMlp};
use super::norm::Norm;
use super::projections::Projections;
use super::short_conv::{SavedShortConv, ShortConv};
use super::spec::Spec;
use crate::base::{Error, Result};
use crate::ops::update;
use crate::source::GroupWeights;
use altup::AltUp;
use candle_core::Tensor;
use laurel::Laurel;
use per_layer::PerLayerInput;
use std::sync::Arc;

/// A decoder layer, with its weights on the device.
pub struct DecoderBlock {
    /// Handle that keeps the weights' memory from being reused.
    pub _weights: Arc<GroupWeights>,
    /// Sizes and options of the model.
    pub spec: Arc<Spec>,
    /// The layer, from 0.
    pub index: usize,
    /// q, k and v; the input projections of Gated DeltaNet, or of a short convolution.
    pub attention_in: Projections,
    /// The output projection of the half that mixes tokens.
    pub o_proj: Projections,
    /// Attention: the norm of each query head, if the family has it.
    pub q_norm: Option<Norm>,
    /// Attention: the norm of each key head, if the family has it.
    pub k_norm: Option<Norm>,
    /// Attention: the norm of each value head, if the family has it; it has no weight.
    pub value_norm: Option<Norm>,
    /// The attention sinks, if the family has them.
    pub sinks: Option<Param>,
    /// The other weights of Gated DeltaNet, if the layer has it in the place of attention.
    pub delta_net: Option<DeltaNet>,
    /// The other weights of latent attention, if the layer has it in the place of attention.
    pub latent: Option<LatentAttention>,
    /// The other weight of a short convolution, if the layer has it in the place of attention.
    pub short_conv: Option<ShortConv>,
    /// gate and up, or up alone; of the shared expert, if the layer has experts.
    pub mlp_in: Projections,
    /// The output projection of the MLP.
    pub down_proj: Projections,
    /// A mixture of experts in the place of the MLP.
    pub experts: Option<Experts>,
    /// The norm before the attention, if the family has it.
    pub input_norm: Option<Norm>,
    /// The norm after the attention, if the family has it.
    pub attention_post_norm: Option<Norm>,
    /// The norm before the MLP, if the family has it.
    pub mlp_norm: Option<Norm>,
    /// The norm after the MLP, if the family has it.
    pub mlp_post_norm: Option<Norm>,
    /// The part that reads the per-layer input, if the family has it.
    pub per_layer: Option<PerLayerInput>,
    /// A projection beside the attention, if the family has it.
    pub laurel: Option<Laurel>,
    /// The part that computes the other streams, if tokens have several.
    pub altup: Option<AltUp>,
    /// m of a sparse gate (`ops::sparse_gate`), if the layer has one.
    pub sparse_gate: Option<f32>,
    /// Factor of the output of the layer.
    pub scale: f32,
}

/// Saved activations of the half that mixes tokens.
enum SavedMixer {
    Attention(SavedAttention),
    DeltaNet(SavedDeltaNet),
    Latent(SavedLatent),
    ShortConv(SavedShortConv),
}

/// Saved activations of a block, `[N, ·]`. The outputs of its norms and of the gate are cheap to recompute.
pub struct SavedActivations {
    mixer: SavedMixer,
    /// The residual stream between the halves; `None`: they are parallel.
    x1: Option<Tensor>,
    /// Those of the MLP or of the experts.
    parts: SavedMlp,
    /// The output of the MLP half, if the layer has a per-layer input.
    x2: Option<Tensor>,
}

impl DecoderBlock {
    /// Its linears in model order, without those of routed experts, each with its module name:
    /// `model.layers.0.self_attn.q_proj`.
    pub fn into_linears(self) -> Vec<(String, Linear)> {
        let module = |l: &Linear| l.name.trim_end_matches(".weight").to_string();
        let mut all = vec![self.attention_in];
        if let Some(LatentAttention { queries, expand, .. }) = self.latent {
            all.extend(queries.map(|(_, linear)| linear));
            all.push(expand);
        }
        all.extend([self.o_proj, self.mlp_in, self.down_proj]);
        all.extend(self.laurel.into_iter().flat_map(|l| [l.left, l.right]));
        all.extend(self.per_layer.into_iter().flat_map(|p| [p.gate, p.projection]));
        let all = all.into_iter().flat_map(Projections::into_linears);
        let altup = self.altup.into_iter();
        let all = all.chain(altup.flat_map(|a| [a.router, a.prediction, a.correction]));
        all.map(|l| (module(&l), l)).collect()
    }

    pub(super) fn norm(&self, norm: &Norm, x: &Tensor) -> Result<Tensor> {
        norm.forward(x, &self.spec)
    }

    /// The norm of the output of a half, added to the residual stream.
    pub(super) fn norm_plus(&self, norm: &Norm, y: &Tensor, x: &Tensor) -> Result<Tensor> {
        norm.forward_plus(y, Some(x), &self.spec)
    }

    /// Backward of a norm: passes the gradients of its parameters to the sink, returns `∂x`.
    pub(super) fn norm_backward(
        &self,
        norm: &Norm,
        x: &Tensor,
        dy: &Tensor,
        sink: &mut dyn GradSink,
    ) -> Result<Tensor> {
        norm.backward(x, dy, &self.spec, sink)
    }

    /// The input of a half after its norm, if it has one.
    pub(super) fn normed(&self, norm: &Option<Norm>, x: &Tensor) -> Result<Tensor> {
        match norm {
            Some(norm) => self.norm(norm, x),
            None => Ok(x.clone()),
        }
    }

    /// Backward of a half from its input on: the gradient `dh` after its norm, and that of the residual stream beside it.
    pub(super) fn normed_backward(
        &self,
        norm: &Option<Norm>,
        x: &Tensor,
        dh: Tensor,
        past: Option<&Tensor>,
        sink: &mut dyn GradSink,
    ) -> Result<Tensor> {
        match (norm, past) {
            (Some(norm), _) => norm.backward_plus(x, &dh, past, &self.spec, sink),
            (None, Some(past)) => update::add_assign(&dh, past).map(|()| dh),
            (None, None) => Ok(dh),
        }
    }

    /// The input of the MLP: x1, or if the halves are parallel (`None`), the input of the attention.
    fn mlp_input(&self, x: &Tensor, x1: Option<&Tensor>) -> Result<Tensor> {
        match x1 {
            Some(x1) => Ok(x1.clone()),
            None => self.normed(&self.input_norm, x),
        }
    }

    /// The MLP half after the attention half.
    fn mlp_after(&self, x: &Tensor, x1: &Tensor, ctx: &Context, keep: bool) -> Result<(Tensor, SavedMlp)> {
        let input = self.mlp_input(x, Some(x1).filter(|_| !self.spec.parallel))?;
        self.mlp(&input, x1, ctx, keep)
    }

    /// The gradient of the output of a half, before its factor.
    pub(super) fn scaled_gradient(&self, dy: &Tensor) -> Result<Tensor> {
        match self.spec.residual_scale {
            1.0 => Ok(dy.clone()),
            scale => Ok((dy * f64::from(scale))?),
        }
    }

    /// The half that mixes tokens: `[N, D]` to `[N, D]`, and the activations to save.
    fn mixer(&self, x: &Tensor, ctx: &Context, cache: Option<&mut dyn KvStore>) -> Result<(Tensor, SavedMixer)> {
        match (&self.delta_net, &self.latent, &self.short_conv) {
            (Some(net), ..) => {
                let (x1, saved) = self.delta_net(net, x, ctx, cache)?;
                Ok((x1, SavedMixer::DeltaNet(saved)))
            }
            (None, Some(net), _) => {
                let (x1, saved) = self.latent(net, x, ctx, cache)?;
                Ok((x1, SavedMixer::Latent(saved)))
            }
            (None, None, Some(net)) => {
                let (x1, saved) = self.short_conv(net, x, ctx, cache)?;
                Ok((x1, SavedMixer::ShortConv(saved)))
            }
            (None, None, None) => {
                let (x1, saved) = self.attention(x, ctx, cache)?;
                Ok((x1, SavedMixer::Attention(saved)))
            }
        }
    }

    /// Stores what later layers read.
    fn share(&self, saved: &SavedMixer, ctx: &Context) {
        match saved {
            SavedMixer::Attention(saved) => self.share_keys(saved, ctx),
            SavedMixer::DeltaNet(_) | SavedMixer::Latent(_) | SavedMixer::ShortConv(_) => {}
        }
    }

    /// Decoding: as `forward` (`x` `[N, D]`, of several streams `[N, A·D]`, to the same shape), with the KV cache of
    /// earlier tokens.
    ///
    /// # Errors
    /// The weights of the layer cannot be read; not enough memory on the device; a `cache` that does not fit the model.
    pub fn forward_cached(&self, x: &Tensor, ctx: &Context, cache: &mut dyn KvStore) -> Result<Tensor> {
        if let Some(altup) = &self.altup {
            return Ok(self.altup_forward(altup, x, ctx, Some(cache), false)?.0);
        }
        let x1 = match &self.latent {
            // The cache cannot tell the keys of one head from latent rows, and keeps the keys (`generate::cache`).
            Some(net) if self.spec.heads > 1 && cache.latent_rows(self.index) => {
                self.latent_cached(net, x, ctx, cache)?
            }
            _ => self.mixer(x, ctx, Some(cache))?.0,
        };
        self.end(&self.mlp_after(x, &x1, ctx, false)?.0, ctx)
    }

    fn mixer_wanted(&self, sink: &dyn GradSink) -> bool {
        let norms = [
            self.input_norm.as_ref(),
            self.q_norm.as_ref(),
            self.k_norm.as_ref(),
            self.attention_post_norm.as_ref(),
        ];
        self.attention_in.wanted(sink)
            || self.o_proj.wanted(sink)
            || norms.into_iter().flatten().any(|norm| norm.wanted(sink))
            || self.sinks_wanted(sink)
            || self.delta_net.as_ref().is_some_and(|net| net.wanted(sink))
            || self.latent.as_ref().is_some_and(|net| net.wanted(sink))
            || self.short_conv.as_ref().is_some_and(|net| net.wanted(sink))
    }

    fn mixer_backward(
        &self,
        saved: SavedMixer,
        gradient: MixerGradient,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        match (saved, &self.delta_net, &self.latent, &self.short_conv) {
            (SavedMixer::Attention(saved), ..) => self.attention_backward(saved, gradient, sink),
            (SavedMixer::DeltaNet(saved), Some(net), ..) => self.delta_net_backward(net, saved, gradient, sink),
            (SavedMixer::Latent(saved), _, Some(net), _) => self.latent_backward(net, saved, gradient, sink),
            (SavedMixer::ShortConv(saved), .., Some(net)) => self.short_conv_backward(net, saved, gradient, sink),
            _ => Err(Error::internal("the saved activations belong to another layer")),
        }
    }
}

/// The inputs of the backward pass of a mixer, beside its saved activations.
pub(super) struct MixerGradient<'a> {
    /// The input of the layer, `[N, D]`.
    pub x: &'a Tensor,
    /// The gradient of x1 = x + mixer(x), `[N, D]`.
    pub dx1: Tensor,
    /// Of attention: the gradient of the MLP at the output of the norm that both halves read, `[N, D]`.
    pub d_shared: Option<Tensor>,
    pub ctx: &'a Context<'a>,
    /// The gradient of x is needed.
    pub need_dx: bool,
}

impl Layer for DecoderBlock {
    type SavedActivations = SavedActivations;

    fn forward(&self, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        if let Some(altup) = &self.altup {
            return Ok(self.altup_forward(altup, x, ctx, None, false)?.0);
        }
        let (x1, mixer) = self.mixer(x, ctx, None)?;
        self.share(&mixer, ctx);
        drop(mixer);
        let x2 = self.mlp_after(x, &x1, ctx, false)?.0;
        drop(x1);
        self.end(&x2, ctx)
    }

    fn forward_saving(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, SavedActivations)> {
        if let Some(altup) = &self.altup {
            let (y, saved) = self.altup_forward(altup, x, ctx, None, true)?;
            let none = || Error::internal("a layer saved no activations");
            return Ok((y, saved.ok_or_else(none)?));
        }
        let (x1, mixer) = self.mixer(x, ctx, None)?;
        self.share(&mixer, ctx);
        let (x2, parts) = self.mlp_after(x, &x1, ctx, true)?;
        let y = self.end(&x2, ctx)?;
        let x1 = Some(x1).filter(|_| !self.spec.parallel);
        let x2 = self.per_layer.is_some().then_some(x2);
        Ok((y, SavedActivations { mixer, x1, parts, x2 }))
    }

    fn vjp(
        &self,
        x: &Tensor,
        saved: Option<SavedActivations>,
        dy: Tensor,
        ctx: &Context,
        need_dx: bool,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        // The layers that read them are done.
        ctx.shared.drop_keys(self.index);
        if self.altup.is_some() {
            return self.altup_vjp(x, saved, dy, ctx, need_dx, sink);
        }
        let (x1, mixer, parts, x2) = match saved {
            Some(saved) => (saved.x1, saved.mixer, saved.parts, saved.x2),
            None => {
                let (x1, mixer) = self.mixer(x, ctx, None)?;
                let (x2, parts) = match self.per_layer {
                    None => (None, SavedMlp::default()),
                    Some(_) => {
                        let (x2, parts) = self.mlp_after(x, &x1, ctx, true)?;
                        (Some(x2), parts)
                    }
                };
                (Some(x1).filter(|_| !self.spec.parallel), mixer, parts, x2)
            }
        };
        // If no parameter in or below the first half is trained, its activations are dropped.
        let mixer_needed = need_dx || self.mixer_wanted(sink);
        let mixer = mixer_needed.then_some(mixer);
        let mut dy = self.unscaled(dy)?;
        if let (Some(p), Some(x2)) = (&self.per_layer, x2) {
            let need_dx2 = mixer_needed || self.mlp_wanted(sink);
            dy = match self.per_layer_backward(p, &x2, dy, ctx, need_dx2, sink)? {
                Some(dy) => dy,
                None => return Ok(None),
            };
        }
        let need_input = match x1 {
            Some(_) => mixer_needed,
            None => need_dx || self.input_norm.as_ref().is_some_and(|norm| norm.wanted(sink)),
        };
        let input = self.mlp_input(x, x1.as_ref())?;
        drop(x1);
        let gradient = MlpGradient {
            x: &input,
            saved: parts,
            dy: &dy,
            ctx,
            need_dx: need_input,
        };
        let d_input = self.mlp_backward(gradient, sink)?;
        drop(input);
        let Some(saved) = mixer else { return Ok(None) };
        let (dx1, d_shared) = if self.spec.parallel {
            (dy, d_input)
        } else {
            let Some(dx1) = d_input else { return Ok(None) };
            drop(dy);
            (dx1, None)
        };
        let gradient = MixerGradient {
            x,
            dx1,
            d_shared,
            ctx,
            need_dx,
        };
        self.mixer_backward(saved, gradient, sink)
    }
}
