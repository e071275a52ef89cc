//! The decoder block: attention half and MLP half, each with a forward and an explicit backward pass.
//!
//! ```text
//! x1 = x  + [norm] o_proj(attention(rope([norm] q), rope([norm] k), v))    with q, k, v from norm(x)
//! x2 = x1 + [norm] down_proj(act(gate_proj(h)) · up_proj(h))               with h = norm(x1)
//! ```
//!
//! Norms in brackets exist in some families only.

pub mod memory;

use super::contracts::{Context, GradSink, KvStore, Layer, Param};
use super::linear::{Dx, Linear};
use super::mlp::SavedPieces;
use super::spec::Spec;
use crate::base::Result;
use crate::ops::rope::Direction;
use crate::ops::{attention, rms_norm, rope, update};
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
    pub o_proj: Linear,
    /// Norm of each query head, if the family has it.
    pub q_norm: Option<Param>,
    /// Norm of each key head, if the family has it.
    pub k_norm: Option<Param>,
    /// gate and up.
    pub mlp_in: Projections,
    /// The output projection of the MLP.
    pub down_proj: Linear,
    /// The norm before the attention.
    pub input_norm: Param,
    /// The norm after the attention, if the family has it.
    pub attention_post_norm: Option<Param>,
    /// The norm before the MLP.
    pub mlp_norm: Param,
    /// The norm after the MLP, if the family has it.
    pub mlp_post_norm: Option<Param>,
}

/// Several projections of one input: q, k, v, or gate and up; one matrix each, or one fused matrix (Phi-3).
pub enum Projections {
    /// One linear for each part.
    Separate(Vec<Linear>),
    /// One linear, and the widths of its parts.
    Fused(Linear, Vec<usize>),
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
}

/// Saved activations of a block, `[N, ·]`. The outputs of its norms and of the gate are cheap to recompute.
pub struct SavedActivations {
    attention: SavedAttention,
    /// The residual stream between the halves.
    x1: Tensor,
    /// gate and up of each piece of the tokens.
    parts: SavedPieces,
}

impl Projections {
    pub(super) fn forward(&self, x: &Tensor, ctx: &Context) -> Result<Vec<Tensor>> {
        match self {
            Self::Separate(linears) => linears.iter().map(|l| l.forward(x, ctx)).collect(),
            Self::Fused(linear, widths) => {
                let y = linear.forward(x, ctx)?;
                let mut start = 0;
                let mut parts = Vec::with_capacity(widths.len());
                for &width in widths {
                    parts.push(y.narrow(1, start, width)?.contiguous()?);
                    start += width;
                }
                Ok(parts)
            }
        }
    }

    /// Sums `∂x` over the parts; drops `dys` one by one. `x` is needed only if `wanted`.
    pub(super) fn backward(
        &self,
        x: Option<&Tensor>,
        dys: Vec<Tensor>,
        ctx: &Context,
        need_dx: bool,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        match self {
            Self::Separate(linears) => {
                let mut total: Option<Tensor> = None;
                for (linear, dy) in linears.iter().zip(dys) {
                    let dx = total.as_ref().map_or(Dx::new(need_dx), Dx::AddTo);
                    total = linear.backward(x, &dy, ctx, dx, sink)?;
                }
                Ok(total)
            }
            Self::Fused(linear, _) => {
                let dy = Tensor::cat(&dys, 1)?.contiguous()?;
                drop(dys);
                linear.backward(x, &dy, ctx, Dx::new(need_dx), sink)
            }
        }
    }

    pub(super) fn wanted(&self, sink: &dyn GradSink) -> bool {
        match self {
            Self::Separate(linears) => linears.iter().any(|l| l.wanted(sink)),
            Self::Fused(linear, _) => linear.wanted(sink),
        }
    }
}

impl Block {
    /// Its linears in model order, each with its module name: `model.layers.0.self_attn.q_proj`.
    pub fn into_linears(self) -> Vec<(String, Linear)> {
        let many = |p: Projections| match p {
            Projections::Separate(linears) => linears,
            Projections::Fused(linear, _) => vec![linear],
        };
        let mut all = many(self.attention_in);
        all.push(self.o_proj);
        all.extend(many(self.mlp_in));
        all.push(self.down_proj);
        let module = |l: &Linear| l.name.trim_end_matches(".weight").to_string();
        all.into_iter().map(|l| (module(&l), l)).collect()
    }

    pub(super) fn norm(&self, w: &Param, x: &Tensor) -> Result<Tensor> {
        rms_norm::forward(x, &w.tensor, self.spec.norm_eps, self.spec.norm_plus_one)
    }

    /// Backward of a norm: passes the weight's gradient to the sink, returns `∂x`.
    pub(super) fn norm_backward(&self, w: &Param, x: &Tensor, dy: &Tensor, sink: &mut dyn GradSink) -> Result<Tensor> {
        let need_dw = sink.wants(&w.name);
        let (dx, dw) = rms_norm::backward(x, &w.tensor, dy, self.spec.norm_eps, self.spec.norm_plus_one, need_dw)?;
        if let Some(dw) = dw {
            sink.take(w, dw)?;
        }
        Ok(dx)
    }

    fn attention_spec(&self) -> attention::Spec {
        attention::Spec {
            heads: self.spec.heads,
            kv_heads: self.spec.kv_heads,
            head_dim: self.spec.head_dim,
            scale: self.spec.attention_scale,
            softcap: self.spec.attention_softcap,
            window: self.spec.layers[self.index].window,
            bf16: self.o_proj.weight.is_bf16(),
        }
    }

    fn rotate(&self, x: &Tensor, ctx: &Context, direction: Direction) -> Result<Tensor> {
        let (cos, sin) = &ctx.ropes[self.spec.layers[self.index].rope];
        rope::apply(x, cos, sin, self.spec.head_dim, direction)
    }

    /// The attention half: `[N, D]` to `[N, D]`, and the activations to save.
    fn attention(
        &self,
        x: &Tensor,
        ctx: &Context,
        cache: Option<&mut dyn KvStore>,
    ) -> Result<(Tensor, SavedAttention)> {
        let h = self.norm(&self.input_norm, x)?;
        let mut qkv = self.attention_in.forward(&h, ctx)?.into_iter();
        let (Some(q), Some(k), Some(v)) = (qkv.next(), qkv.next(), qkv.next()) else {
            return Err(crate::base::Error::internal("attention needs three projections"));
        };
        drop(h);
        let (q, k, raw) = match (&self.q_norm, &self.k_norm) {
            (Some(qn), Some(kn)) => (self.norm(qn, &q)?, self.norm(kn, &k)?, Some((q, k))),
            _ => (q, k, None),
        };
        let q = self.rotate(&q, ctx, Direction::Forward)?;
        let k = self.rotate(&k, ctx, Direction::Forward)?;
        let spec = self.attention_spec();
        let (o, lse) = match cache {
            None => attention::forward(&q, &k, &v, &spec, ctx.documents, ctx.documents)?,
            Some(cache) => cache.attend(self.index, &q, &k, &v, &spec)?,
        };
        let y = self.o_proj.forward(&o, ctx)?;
        let (x1, y) = match &self.attention_post_norm {
            Some(norm) => (update::add(x, &self.norm(norm, &y)?)?, Some(y)),
            None => {
                update::add_assign(&y, x)?;
                (y, None)
            }
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
            },
        ))
    }

    /// Decoding: as `forward`, with the KV cache of earlier tokens.
    pub fn forward_cached(&self, x: &Tensor, ctx: &Context, cache: &mut dyn KvStore) -> Result<Tensor> {
        let x1 = self.attention(x, ctx, Some(cache))?.0;
        Ok(self.mlp(&x1, ctx, false)?.0)
    }

    fn attention_wanted(&self, sink: &dyn GradSink) -> bool {
        let norms = [
            Some(&self.input_norm),
            self.q_norm.as_ref(),
            self.k_norm.as_ref(),
            self.attention_post_norm.as_ref(),
        ];
        self.attention_in.wanted(sink)
            || self.o_proj.wanted(sink)
            || norms.into_iter().flatten().any(|n| sink.wants(&n.name))
    }

    fn attention_backward(
        &self,
        x: &Tensor,
        saved: SavedAttention,
        dx1: Tensor,
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
        } = saved;
        let need_dh = need_dx || sink.wants(&self.input_norm.name);
        let qk_wanted = [&self.q_norm, &self.k_norm]
            .into_iter()
            .flatten()
            .any(|n| sink.wants(&n.name));
        let need_do = need_dh || qk_wanted || self.attention_in.wanted(sink);
        let d_out = match (&self.attention_post_norm, &y) {
            (Some(norm), Some(y)) => self.norm_backward(norm, y, &dx1, sink)?,
            _ => dx1.clone(),
        };
        drop(y);
        let d_o = self.o_proj.backward(Some(&o), &d_out, ctx, Dx::new(need_do), sink)?;
        drop(d_out);
        let Some(d_o) = d_o else { return Ok(None) };
        let (dq, dk, dv) = attention::backward(&q, &k, &v, &o, &lse, &d_o, &self.attention_spec(), ctx.documents)?;
        drop((q, k, v, o, lse, d_o));
        let mut dq = self.rotate(&dq, ctx, Direction::Backward)?;
        let mut dk = self.rotate(&dk, ctx, Direction::Backward)?;
        if let (Some((raw_q, raw_k)), Some(qn), Some(kn)) = (&raw, &self.q_norm, &self.k_norm) {
            dq = self.norm_backward(qn, raw_q, &dq, sink)?;
            dk = self.norm_backward(kn, raw_k, &dk, sink)?;
        }
        drop(raw);
        let h = if self.attention_in.wanted(sink) {
            Some(self.norm(&self.input_norm, x)?)
        } else {
            None
        };
        let dh = self
            .attention_in
            .backward(h.as_ref(), vec![dq, dk, dv], ctx, need_dh, sink)?;
        drop(h);
        let Some(dh) = dh else { return Ok(None) };
        let dx = self.norm_backward(&self.input_norm, x, &dh, sink)?;
        update::add_assign(&dx, &dx1)?;
        Ok(need_dx.then_some(dx))
    }
}

impl Layer for Block {
    type SavedActivations = SavedActivations;

    fn forward(&self, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        let x1 = self.attention(x, ctx, None)?.0;
        Ok(self.mlp(&x1, ctx, false)?.0)
    }

    fn forward_saving(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, SavedActivations)> {
        let (x1, attention) = self.attention(x, ctx, None)?;
        let (y, parts) = self.mlp(&x1, ctx, true)?;
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
                (x1, attention, SavedPieces::new())
            }
        };
        // If no parameter in or below the attention half is trained, its activations are dropped.
        let attention_needed = need_dx || self.attention_wanted(sink);
        let attention = attention_needed.then_some(attention);
        let dx1 = self.mlp_backward(&x1, parts, dy, ctx, attention_needed, sink)?;
        drop(x1);
        match (attention, dx1) {
            (Some(saved), Some(dx1)) => self.attention_backward(x, saved, dx1, ctx, need_dx, sink),
            _ => Ok(None),
        }
    }
}
