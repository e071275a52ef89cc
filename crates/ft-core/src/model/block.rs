//! The decoder block: attention half and MLP half, each with a forward and an explicit backward pass.
//!
//! ```text
//! x1 = x  + [norm] o_proj(attention([norm] rope([norm] q), [norm] rope([norm] k), v))    with q, k, v from [norm] x
//! x2 = x1 + [norm] down_proj(act(gate_proj(h)) · up_proj(h))                             with h = [norm] x1
//! ```
//!
//! Norms in brackets exist in some families only; Granite multiplies what is added to x and x1 by a constant. If the
//! halves are parallel, both read the same h = [norm] x.

pub mod memory;

use super::contracts::{Context, GradSink, KvStore, Layer};
use super::linear::Linear;
use super::mlp::SavedPieces;
use super::norm::Norm;
use super::projections::{Projections, SavedLow, add_residual};
use super::spec::{LayerSpec, Spec};
use crate::base::{Error, Result};
use crate::ops::rope::Direction;
use crate::ops::{attention, rope, update};
use crate::source::GroupWeights;
use candle_core::Tensor;
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
}

/// Saved activations of the attention half.
struct SavedAttention {
    /// q and k before their norms, if they have norms.
    raw: Option<(Tensor, Tensor)>,
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
}

impl Block {
    /// Its linears in model order, each with its module name: `model.layers.0.self_attn.q_proj`.
    pub fn into_linears(self) -> Vec<(String, Linear)> {
        let module = |l: &Linear| l.name.trim_end_matches(".weight").to_string();
        [self.attention_in, self.o_proj, self.mlp_in, self.down_proj]
            .into_iter()
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
            kv_heads: self.spec.kv_heads,
            head_dim: self.spec.head_dim,
            scale: self.spec.attention_scale,
            softcap: self.spec.attention_softcap,
            window: self.spec.layers[self.index].window,
            bf16: self.o_proj.is_bf16(),
        }
    }

    /// Rotates q and k.
    fn rotate(&self, q: &Tensor, k: &Tensor, ctx: &Context, direction: Direction) -> Result<(Tensor, Tensor)> {
        let LayerSpec { rope, query_rope, .. } = self.spec.layers[self.index];
        let turn = |x: &Tensor, rope: usize| {
            let (cos, sin) = &ctx.ropes[rope];
            rope::apply(x, (cos, sin), self.spec.head_dim, self.spec.pairing, direction)
        };
        Ok((turn(q, query_rope.unwrap_or(rope))?, turn(k, rope)?))
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
        let (Some(q), Some(k), Some(v)) = (qkv.next(), qkv.next(), qkv.next()) else {
            return Err(Error::internal("attention needs three projections"));
        };
        drop(h);
        let both = |q: Tensor, k: Tensor| match (&self.q_norm, &self.k_norm) {
            (Some(qn), Some(kn)) => Ok::<_, Error>((self.norm(qn, &q)?, self.norm(kn, &k)?, Some((q, k)))),
            _ => Ok((q, k, None)),
        };
        let (q, k, raw) = if self.norm_follows_rope() {
            let rotated = self.rotate(&q, &k, ctx, Direction::Forward)?;
            drop((q, k));
            both(rotated.0, rotated.1)?
        } else {
            let (q, k, raw) = both(q, k)?;
            let (q, k) = self.rotate(&q, &k, ctx, Direction::Forward)?;
            (q, k, raw)
        };
        let spec = self.attention_spec();
        let (o, lse) = match cache {
            None => attention::forward(&q, &k, &v, &spec, ctx.documents, ctx.documents)?,
            Some(cache) => cache.attend(self.index, &q, &k, &v, &spec)?,
        };
        let (y, low_out) = self.o_proj.forward_one(&o, ctx)?;
        let (x1, y) = match &self.attention_post_norm {
            Some(norm) => (update::add(x, &self.norm(norm, &y)?)?, Some(y)),
            None => (add_residual(y, x, &low_out, self.spec.residual_scale)?, None),
        };
        Ok((
            x1,
            SavedAttention {
                raw,
                q,
                k,
                v,
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
        Ok(self.mlp_after(x, &x1, ctx, false)?.0)
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
            q,
            k,
            v,
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
        let need_do = need_dh || qk_wanted || self.attention_in.wanted(sink);
        let d_out = match (&self.attention_post_norm, &y) {
            (Some(norm), Some(y)) => self.norm_backward(norm, y, &dx1, sink)?,
            _ => self.scaled_gradient(&dx1)?,
        };
        drop(y);
        let d_o = self
            .o_proj
            .backward(Some(&o), low_out, vec![d_out], ctx, need_do, sink)?;
        let Some(d_o) = d_o else { return Ok(None) };
        let (mut dq, mut dk, dv) =
            attention::backward(&q, &k, &v, &o, &lse, &d_o, &self.attention_spec(), ctx.documents)?;
        drop((q, k, v, o, lse, d_o));
        let mut unnorm = |dq: &mut Tensor, dk: &mut Tensor| -> Result<()> {
            if let (Some((raw_q, raw_k)), Some(qn), Some(kn)) = (&raw, &self.q_norm, &self.k_norm) {
                *dq = self.norm_backward(qn, raw_q, dq, sink)?;
                *dk = self.norm_backward(kn, raw_k, dk, sink)?;
            }
            Ok(())
        };
        if self.norm_follows_rope() {
            unnorm(&mut dq, &mut dk)?;
            (dq, dk) = self.rotate(&dq, &dk, ctx, Direction::Backward)?;
        } else {
            (dq, dk) = self.rotate(&dq, &dk, ctx, Direction::Backward)?;
            unnorm(&mut dq, &mut dk)?;
        }
        drop(raw);
        let h = if self.attention_in.wanted(sink) {
            Some(self.normed(&self.input_norm, x)?)
        } else {
            None
        };
        let dh = self
            .attention_in
            .backward(h.as_ref(), low_in, vec![dq, dk, dv], ctx, need_dh, sink)?;
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
        let x1 = self.attention(x, ctx, None)?.0;
        Ok(self.mlp_after(x, &x1, ctx, false)?.0)
    }

    fn forward_saving(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, SavedActivations)> {
        let (x1, attention) = self.attention(x, ctx, None)?;
        let (y, parts) = self.mlp_after(x, &x1, ctx, true)?;
        let x1 = Some(x1).filter(|_| !self.spec.parallel);
        Ok((y, SavedActivations { attention, x1, parts }))
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
        let (x1, attention, parts) = match saved {
            Some(saved) => (saved.x1, saved.attention, saved.parts),
            None => {
                let (x1, attention) = self.attention(x, ctx, None)?;
                (Some(x1).filter(|_| !self.spec.parallel), attention, SavedPieces::new())
            }
        };
        // If no parameter in or below the attention half is trained, its activations are dropped.
        let attention_needed = need_dx || self.attention_wanted(sink);
        let attention = attention_needed.then_some(attention);
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
