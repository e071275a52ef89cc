//! The decoder block: attention half and MLP half, each with a forward and an explicit backward pass.
//!
//! ```text
//! x1 = x  + [norm] o_proj(attention([norm] rope([norm] q), [norm] rope([norm] k), v))    with q, k, v from [norm] x
//! x2 = x1 + [norm] down_proj(act(gate_proj(h)) · up_proj(h))                             with h = [norm] x1
//! ```
//!
//! Norms in brackets exist in some families only; Granite multiplies what is added to x and x1 by a constant. If the
//! halves are parallel, both read the same h = norm(x), or x. Gemma 4 has norms of v, layers that read k and v of an earlier
//! layer (`SharedStates`), and a third part (`per_layer`).

pub mod memory;
pub mod per_layer;

use super::contracts::{Context, GradSink, KvStore, Layer, Param};
use super::linear::Linear;
use super::mlp::SavedPieces;
use super::norm::Norm;
use super::projections::{Projections, SavedLow, add_residual};
use super::spec::{KeySource, LayerSpec, Spec};
use crate::base::{Error, Result};
use crate::ops::rope::Direction;
use crate::ops::{attention, rms_norm, rope, update};
use crate::source::GroupWeights;
use candle_core::{DType, Tensor};
use per_layer::PerLayerInput;
use std::sync::Arc;

/// A decoder layer, with its weights on the device.
pub struct Block {
    /// Handle that keeps the weights' memory from being reused.
    pub _weights: Arc<GroupWeights>,
    /// Sizes and options of the model.
    pub spec: Arc<Spec>,
    /// The layer, from 0.
    pub index: usize,
    /// q, k and v.
    pub attention_in: Projections,
    /// The output projection of the attention.
    pub o_proj: Projections,
    /// Norm of each query head, if the family has it.
    pub q_norm: Option<Norm>,
    /// Norm of each key head, if the family has it.
    pub k_norm: Option<Norm>,
    /// The attention sinks, if the family has them.
    pub sinks: Option<Param>,
    /// gate and up, or up alone.
    pub mlp_in: Projections,
    /// The output projection of the MLP.
    pub down_proj: Projections,
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
    /// Factor of the output of the layer.
    pub scale: f32,
}

/// The queries, and the keys unless they are those of another layer.
type QueriesKeys = (Tensor, Option<Tensor>);

/// Saved activations of the attention half.
struct SavedAttention {
    /// q and k before their norms, if they have norms.
    raw: Option<QueriesKeys>,
    /// v before its norm, if it has one.
    raw_v: Option<Tensor>,
    q: Tensor,
    /// k and v, unless they are those of another layer.
    kv: Option<(Tensor, Tensor)>,
    o: Tensor,
    lse: Tensor,
    /// Output of o_proj, if a norm follows it.
    y: Option<Tensor>,
    /// u of the LoRA pairs of q, k, v, and of o_proj.
    low: [SavedLow; 2],
}

/// Saved activations of a block, `[N, ·]`. The outputs of its norms and of the gate are cheap to recompute.
pub struct SavedActivations {
    attention: SavedAttention,
    /// The residual stream between the halves; `None`: they are parallel.
    x1: Option<Tensor>,
    /// gate and up of each piece of the tokens.
    parts: SavedPieces,
    /// The output of the MLP half, if the layer has a per-layer input.
    x2: Option<Tensor>,
}

impl Block {
    /// Its linears in model order, each with its module name: `model.layers.0.self_attn.q_proj`.
    pub fn into_linears(self) -> Vec<(String, Linear)> {
        let module = |l: &Linear| l.name.trim_end_matches(".weight").to_string();
        let mut all = vec![self.attention_in, self.o_proj, self.mlp_in, self.down_proj];
        all.extend(self.per_layer.into_iter().flat_map(|p| [p.gate, p.projection]));
        all.into_iter()
            .flat_map(Projections::into_linears)
            .map(|l| (module(&l), l))
            .collect()
    }

    pub(super) fn norm(&self, norm: &Norm, x: &Tensor) -> Result<Tensor> {
        norm.forward(x, &self.spec)
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

    fn norm_follows_rope(&self) -> bool {
        self.spec.qk_norm.is_some_and(|norm| norm.after_rope)
    }

    fn attention_spec(&self) -> attention::Spec {
        attention::Spec {
            heads: self.spec.heads,
            kv_heads: self.spec.kv_heads_of(self.index),
            head_dim: self.spec.head_dim_of(self.index),
            scale: self.spec.attention_scale,
            softcap: self.spec.attention_softcap,
            window: self.spec.layers[self.index].window,
            bf16: self.o_proj.is_bf16(),
        }
    }

    /// Rotates q and k.
    fn rotate(&self, (q, k): &QueriesKeys, ctx: &Context, direction: Direction) -> Result<QueriesKeys> {
        let LayerSpec { rope, query_rope, .. } = self.spec.layers[self.index];
        let turn = |x: &Tensor, rope: usize| {
            let (cos, sin) = &ctx.ropes[rope];
            let head_dim = self.spec.head_dim_of(self.index);
            rope::apply(x, (cos, sin), head_dim, self.spec.pairing, direction)
        };
        let k = k.as_ref().map(|k| turn(k, rope)).transpose()?;
        Ok((turn(q, query_rope.unwrap_or(rope))?, k))
    }

    /// q and k after their norms, if they have norms.
    fn normed_heads(&self, (q, k): &QueriesKeys) -> Result<Option<QueriesKeys>> {
        let Some(norm) = &self.q_norm else { return Ok(None) };
        let k = match (&self.k_norm, k) {
            (Some(norm), Some(k)) => Some(self.norm(norm, k)?),
            _ => None,
        };
        Ok(Some((self.norm(norm, q)?, k)))
    }

    /// The weight of the norm of v: it has none.
    fn ones(&self, v: &Tensor) -> Result<Tensor> {
        Ok(Tensor::ones(self.spec.head_dim_of(self.index), DType::F32, v.device())?)
    }

    fn keys(&self) -> KeySource {
        self.spec.layers[self.index].keys
    }

    /// Stores k and v for the layers that read them.
    fn share(&self, saved: &SavedAttention, ctx: &Context) {
        if let Some((k, v)) = saved.kv.as_ref().filter(|_| self.spec.shares_keys(self.index)) {
            ctx.shared.put_keys(self.index, k, v);
        }
    }

    /// The input of a half after its norm, if it has one.
    pub(super) fn normed(&self, norm: &Option<Norm>, x: &Tensor) -> Result<Tensor> {
        match norm {
            Some(norm) => self.norm(norm, x),
            None => Ok(x.clone()),
        }
    }

    /// Backward of `normed`.
    pub(super) fn normed_backward(
        &self,
        norm: &Option<Norm>,
        x: &Tensor,
        dy: Tensor,
        sink: &mut dyn GradSink,
    ) -> Result<Tensor> {
        match norm {
            Some(norm) => self.norm_backward(norm, x, &dy, sink),
            None => Ok(dy),
        }
    }

    /// What the MLP reads: x1, or if the halves are parallel (`None`), what the attention reads.
    fn mlp_input(&self, x: &Tensor, x1: Option<&Tensor>) -> Result<Tensor> {
        match x1 {
            Some(x1) => Ok(x1.clone()),
            None => self.normed(&self.input_norm, x),
        }
    }

    /// The MLP half after the attention half.
    fn mlp_after(&self, x: &Tensor, x1: &Tensor, ctx: &Context, keep: bool) -> Result<(Tensor, SavedPieces)> {
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

    /// The attention half: `[N, D]` to `[N, D]`, and the activations to save.
    fn attention(
        &self,
        x: &Tensor,
        ctx: &Context,
        cache: Option<&mut dyn KvStore>,
    ) -> Result<(Tensor, SavedAttention)> {
        let h = self.normed(&self.input_norm, x)?;
        let (qkv, low_in) = self.attention_in.forward(&h, ctx)?;
        let mut qkv = qkv.into_iter();
        let Some(q) = qkv.next() else {
            return Err(Error::internal("attention needs a projection of the queries"));
        };
        let k = qkv.next();
        let mut v = match self.keys() {
            KeySource::KeysOnly => k.clone(),
            _ => qkv.next(),
        };
        drop(h);
        let mut raw_v = None;
        if let Some(raw) = v.as_ref().filter(|_| self.spec.value_norm) {
            let normed = rms_norm::forward(raw, &self.ones(raw)?, self.spec.norm_eps, false)?;
            raw_v = v.replace(normed);
        }
        let (mut qk, mut raw) = ((q, k), None);
        if self.norm_follows_rope() {
            qk = self.rotate(&qk, ctx, Direction::Forward)?;
        }
        if let Some(normed) = self.normed_heads(&qk)? {
            raw = Some(std::mem::replace(&mut qk, normed));
        }
        if !self.norm_follows_rope() {
            qk = self.rotate(&qk, ctx, Direction::Forward)?;
        }
        let (q, kv) = (qk.0, qk.1.zip(v));
        let spec = self.attention_spec();
        let new = kv.as_ref().map(|(k, v)| (k, v));
        let (o, lse) = match (cache, new, self.keys()) {
            (None, Some((k, v)), _) => attention::forward(&q, k, v, &spec, ctx.documents, ctx.documents)?,
            (None, None, KeySource::Layer(from)) => {
                let (k, v) = ctx.shared.keys(from)?;
                attention::forward(&q, &k, &v, &spec, ctx.documents, ctx.documents)?
            }
            (Some(cache), None, KeySource::Layer(from)) => cache.attend(from, &q, None, &spec)?,
            (Some(cache), new, _) => cache.attend(self.index, &q, new, &spec)?,
            (None, None, _) => return Err(Error::internal("attention needs keys and values")),
        };
        if let Some(sinks) = &self.sinks {
            attention::sinks::apply(&o, &lse, &sinks.tensor)?;
        }
        let (y, low_out) = self.o_proj.forward_one(&o, ctx)?;
        let (x1, y) = match &self.attention_post_norm {
            Some(norm) => (update::add(x, &self.norm(norm, &y)?)?, Some(y)),
            None => (add_residual(y, x, &low_out, self.spec.residual_scale)?, None),
        };
        Ok((
            x1,
            SavedAttention {
                raw,
                raw_v,
                q,
                kv,
                o,
                lse,
                y,
                low: [low_in, low_out],
            },
        ))
    }

    /// Decoding: as `forward`, with the KV cache of earlier tokens.
    pub fn forward_cached(&self, x: &Tensor, ctx: &Context, cache: &mut dyn KvStore) -> Result<Tensor> {
        let x1 = self.attention(x, ctx, Some(cache))?.0;
        self.end(&self.mlp_after(x, &x1, ctx, false)?.0, ctx)
    }

    fn sinks_wanted(&self, sink: &dyn GradSink) -> bool {
        self.sinks.as_ref().is_some_and(|sinks| sink.wants(&sinks.name))
    }

    fn attention_wanted(&self, sink: &dyn GradSink) -> bool {
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
    }

    /// `d_shared`: the gradient of the MLP at the output of the norm that both halves read.
    fn attention_backward(
        &self,
        x: &Tensor,
        saved: SavedAttention,
        (dx1, d_shared): (Tensor, Option<Tensor>),
        ctx: &Context,
        need_dx: bool,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let SavedAttention {
            raw,
            raw_v,
            q,
            kv,
            o,
            lse,
            y,
            low: [low_in, low_out],
        } = saved;
        let need_dh = need_dx || self.input_norm.as_ref().is_some_and(|norm| norm.wanted(sink));
        let qk_wanted = [&self.q_norm, &self.k_norm]
            .into_iter()
            .flatten()
            .any(|norm| norm.wanted(sink));
        let need_do = need_dh || qk_wanted || self.sinks_wanted(sink) || self.attention_in.wanted(sink);
        let d_out = match (&self.attention_post_norm, &y) {
            (Some(norm), Some(y)) => self.norm_backward(norm, y, &dx1, sink)?,
            _ => self.scaled_gradient(&dx1)?,
        };
        drop(y);
        let d_o = self
            .o_proj
            .backward(Some(&o), low_out, vec![d_out], ctx, need_do, sink)?;
        let Some(d_o) = d_o else { return Ok(None) };
        let (k, v) = match (kv, self.keys()) {
            (Some(kv), _) => kv,
            (None, KeySource::Layer(from)) => ctx.shared.keys(from)?,
            (None, _) => return Err(Error::internal("attention needs keys and values")),
        };
        if let Some(sinks) = self.sinks.as_ref().filter(|s| sink.wants(&s.name)) {
            sink.take(sinks, attention::sinks::backward(&o, &lse, &d_o, &sinks.tensor)?)?;
        }
        let (dq, dk, dv) = attention::backward(&q, &k, &v, &o, &lse, &d_o, &self.attention_spec(), ctx.documents)?;
        drop((q, k, v, o, lse, d_o));
        let (mut dqk, mut dv) = match self.keys() {
            KeySource::Layer(from) => {
                ctx.shared.add_key_gradients(from, dk, dv)?;
                ((dq, None), None)
            }
            _ => {
                if let Some((more_k, more_v)) = ctx.shared.take_key_gradients(self.index) {
                    update::add_assign(&dk, &more_k)?;
                    update::add_assign(&dv, &more_v)?;
                }
                ((dq, Some(dk)), Some(dv))
            }
        };
        let mut unnorm = |dqk: &mut QueriesKeys| -> Result<()> {
            if let (Some((raw_q, raw_k)), Some(qn)) = (&raw, &self.q_norm) {
                dqk.0 = self.norm_backward(qn, raw_q, &dqk.0, sink)?;
                if let (Some(raw_k), Some(kn), Some(dk)) = (raw_k, &self.k_norm, &mut dqk.1) {
                    *dk = self.norm_backward(kn, raw_k, dk, sink)?;
                }
            }
            Ok(())
        };
        if self.norm_follows_rope() {
            unnorm(&mut dqk)?;
            dqk = self.rotate(&dqk, ctx, Direction::Backward)?;
        } else {
            dqk = self.rotate(&dqk, ctx, Direction::Backward)?;
            unnorm(&mut dqk)?;
        }
        drop(raw);
        if let (Some(raw), Some(d)) = (&raw_v, &mut dv) {
            *d = rms_norm::backward(raw, &self.ones(raw)?, d, self.spec.norm_eps, false, false)?.0;
        }
        drop(raw_v);
        let (dq, dk) = dqk;
        if let (KeySource::KeysOnly, Some(dk)) = (self.keys(), &dk)
            && let Some(dv) = dv.take()
        {
            update::add_assign(dk, &dv)?;
        }
        let h = if self.attention_in.wanted(sink) {
            Some(self.normed(&self.input_norm, x)?)
        } else {
            None
        };
        let dh = self.attention_in.backward(
            h.as_ref(),
            low_in,
            [Some(dq), dk, dv].into_iter().flatten().collect(),
            ctx,
            need_dh,
            sink,
        )?;
        drop(h);
        let Some(dh) = dh else { return Ok(None) };
        if let Some(d_shared) = d_shared {
            update::add_assign(&dh, &d_shared)?;
        }
        let dx = self.normed_backward(&self.input_norm, x, dh, sink)?;
        update::add_assign(&dx, &dx1)?;
        Ok(need_dx.then_some(dx))
    }
}

impl Layer for Block {
    type SavedActivations = SavedActivations;

    fn forward(&self, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        let (x1, saved) = self.attention(x, ctx, None)?;
        self.share(&saved, ctx);
        drop(saved);
        let x2 = self.mlp_after(x, &x1, ctx, false)?.0;
        drop(x1);
        self.end(&x2, ctx)
    }

    fn forward_saving(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, SavedActivations)> {
        let (x1, attention) = self.attention(x, ctx, None)?;
        self.share(&attention, ctx);
        let (x2, parts) = self.mlp_after(x, &x1, ctx, true)?;
        let y = self.end(&x2, ctx)?;
        let x1 = Some(x1).filter(|_| !self.spec.parallel);
        let x2 = self.per_layer.is_some().then_some(x2);
        Ok((
            y,
            SavedActivations {
                attention,
                x1,
                parts,
                x2,
            },
        ))
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
        let (x1, attention, parts, x2) = match saved {
            Some(saved) => (saved.x1, saved.attention, saved.parts, saved.x2),
            None => {
                let (x1, attention) = self.attention(x, ctx, None)?;
                let (x2, parts) = match self.per_layer {
                    None => (None, SavedPieces::new()),
                    Some(_) => {
                        let (x2, parts) = self.mlp_after(x, &x1, ctx, true)?;
                        (Some(x2), parts)
                    }
                };
                (Some(x1).filter(|_| !self.spec.parallel), attention, parts, x2)
            }
        };
        // If no parameter in or below the attention half is trained, its activations are dropped.
        let attention_needed = need_dx || self.attention_wanted(sink);
        let attention = attention_needed.then_some(attention);
        let mut dy = self.unscaled(dy)?;
        if let (Some(p), Some(x2)) = (&self.per_layer, x2) {
            let need_dx2 = attention_needed || self.mlp_wanted(sink);
            dy = match self.per_layer_backward(p, &x2, dy, ctx, need_dx2, sink)? {
                Some(dy) => dy,
                None => return Ok(None),
            };
        }
        let need_input = match x1 {
            Some(_) => attention_needed,
            None => need_dx || self.input_norm.as_ref().is_some_and(|norm| norm.wanted(sink)),
        };
        let input = self.mlp_input(x, x1.as_ref())?;
        drop(x1);
        let d_input = self.mlp_backward(&input, parts, &dy, ctx, need_input, sink)?;
        drop(input);
        let Some(saved) = attention else { return Ok(None) };
        if self.spec.parallel {
            return self.attention_backward(x, saved, (dy, d_input), ctx, need_dx, sink);
        }
        let Some(dx1) = d_input else { return Ok(None) };
        update::add_assign(&dx1, &dy)?;
        drop(dy);
        self.attention_backward(x, saved, (dx1, None), ctx, need_dx, sink)
    }
}
