//! Softmax attention: the half of a block that mixes tokens.
//!
//! ```text
//! x1 = x + [norm] o_proj([gate] attention([norm] rope([norm] q), [norm] rope([norm] k), v))    with q, k, v from [norm] x
//! ```
//!
//! Gemma 4 has norms of v, and layers that read k and v of an earlier layer (`SharedStates`).

pub(super) mod memory;

use super::block::{DecoderBlock, MixerGradient};
use super::contracts::{Context, GradSink, KvStore};
use super::projections::{SavedLow, add_residual};
use super::spec::{KeySource, LayerSpec};
use crate::base::{Error, Result};
use crate::ops::attention::{self, AttentionGradInputs};
use crate::ops::glu::{self, Activation};
use crate::ops::rope::RopeDirection;
use crate::ops::{rope, update};
use crate::trace;
use candle_core::Tensor;

/// The queries, and the keys unless they are those of another layer.
type QueriesKeys = (Tensor, Option<Tensor>);

/// Saved activations of the attention half.
pub(super) struct SavedAttention {
    /// q and k before their norms, if they have norms.
    raw: Option<QueriesKeys>,
    /// The gate of the output.
    gate: Option<Tensor>,
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

impl DecoderBlock {
    /// Cuts the output of q_proj `[N, H·2E]` into the queries and their gate, `[N, H·E]` each.
    fn split_gate(&self, q: Tensor) -> Result<(Tensor, Option<Tensor>)> {
        if !self.spec.output_gate {
            return Ok((q, None));
        }
        let (n, heads, e) = (q.dim(0)?, self.spec.heads, self.spec.head_dim_of(self.index));
        let both = q.reshape((n, heads, 2 * e))?;
        let part =
            |first: usize| -> Result<Tensor> { Ok(both.narrow(2, first, e)?.contiguous()?.reshape((n, heads * e))?) };
        Ok((part(0)?, Some(part(e)?)))
    }

    /// The inverse of `split_gate`, for gradients.
    fn join_gate(&self, dq: Tensor, d_gate: Option<Tensor>) -> Result<Tensor> {
        let Some(d_gate) = d_gate else { return Ok(dq) };
        let (n, heads, e) = (dq.dim(0)?, self.spec.heads, self.spec.head_dim_of(self.index));
        let parts = [dq.reshape((n, heads, e))?, d_gate.reshape((n, heads, e))?];
        Ok(Tensor::cat(&parts, 2)?.contiguous()?.reshape((n, 2 * heads * e))?)
    }

    /// `o · sigmoid(gate)`, if there is a gate.
    fn gated(gate: &Option<Tensor>, o: &Tensor) -> Result<Tensor> {
        match gate {
            Some(gate) => glu::forward(gate, o, Activation::Sigmoid),
            None => Ok(o.clone()),
        }
    }

    fn norm_follows_rope(&self) -> bool {
        self.spec.qk_norm.is_some_and(|norm| norm.after_rope)
    }

    pub(super) fn attention_spec(&self) -> attention::AttentionSpec {
        attention::AttentionSpec {
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
    fn rotate(&self, (q, k): &QueriesKeys, ctx: &Context, direction: RopeDirection) -> Result<QueriesKeys> {
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

    fn keys(&self) -> KeySource {
        self.spec.layers[self.index].keys
    }

    /// Stores k and v for the layers that read them.
    pub(super) fn share_keys(&self, saved: &SavedAttention, ctx: &Context) {
        if let Some((k, v)) = saved.kv.as_ref().filter(|_| self.spec.shares_keys(self.index)) {
            ctx.shared.put_keys(self.index, k, v);
        }
    }

    /// As `mixer`, for attention.
    pub(super) fn attention(
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
        let (q, gate) = self.split_gate(q)?;
        let mut raw_v = None;
        if let (Some(raw), Some(norm)) = (&v, &self.value_norm) {
            let normed = self.norm(norm, raw)?;
            raw_v = v.replace(normed);
        }
        let (mut qk, mut raw) = ((q, k), None);
        if self.norm_follows_rope() {
            qk = self.rotate(&qk, ctx, RopeDirection::Forward)?;
        }
        if let Some(normed) = self.normed_heads(&qk)? {
            raw = Some(std::mem::replace(&mut qk, normed));
        }
        if !self.norm_follows_rope() {
            qk = self.rotate(&qk, ctx, RopeDirection::Forward)?;
        }
        let (q, kv) = (qk.0, qk.1.zip(v));
        let spec = self.attention_spec();
        let new = kv.as_ref().map(|(k, v)| (k, v));
        let span = trace::span("attention");
        let (o, lse) = match (cache, new, self.keys()) {
            (None, Some((k, v)), _) => ctx.attend(&q, k, v, &spec)?,
            (None, None, KeySource::Layer(from)) => {
                let (k, v) = ctx.shared.keys(from)?;
                ctx.attend(&q, &k, &v, &spec)?
            }
            (Some(cache), None, KeySource::Layer(from)) => cache.attend(from, &q, None, &spec)?,
            (Some(cache), new, _) => cache.attend(self.index, &q, new, &spec)?,
            (None, None, _) => return Err(Error::internal("attention needs keys and values")),
        };
        drop(span);
        if let Some(sinks) = &self.sinks {
            attention::sinks::apply(&o, &lse, &sinks.tensor)?;
        }
        let gated = Self::gated(&gate, &o)?;
        let (y, low_out) = self.o_proj.forward_one(&gated, ctx)?;
        drop(gated);
        let (x1, y) = match &self.attention_post_norm {
            Some(norm) => (self.norm_plus(norm, &y, x)?, Some(y)),
            None => (add_residual(y, x, &low_out, self.spec.residual_scale)?, None),
        };
        Ok((
            x1,
            SavedAttention {
                raw,
                gate,
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

    pub(super) fn sinks_wanted(&self, sink: &dyn GradSink) -> bool {
        self.sinks.as_ref().is_some_and(|sinks| sink.wants(&sinks.name))
    }

    pub(super) fn attention_backward(
        &self,
        saved: SavedAttention,
        gradient: MixerGradient,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let MixerGradient {
            x,
            dx1,
            d_shared,
            ctx,
            need_dx,
        } = gradient;
        let SavedAttention {
            raw,
            gate,
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
        let gated = if self.o_proj.wanted(sink) {
            Some(Self::gated(&gate, &o)?)
        } else {
            None
        };
        let d_o = self
            .o_proj
            .backward(gated.as_ref(), low_out, vec![d_out], ctx, need_do, sink)?;
        drop(gated);
        let Some(d_o) = d_o else { return Ok(None) };
        let (d_gate, d_o) = match gate {
            Some(gate) => {
                let (d_gate, ungated) = glu::backward(&gate, &o, &d_o, Activation::Sigmoid)?;
                drop(d_o);
                (Some(d_gate), ungated)
            }
            None => (None, d_o),
        };
        let (k, v) = match (kv, self.keys()) {
            (Some(kv), _) => kv,
            (None, KeySource::Layer(from)) => ctx.shared.keys(from)?,
            (None, _) => return Err(Error::internal("attention needs keys and values")),
        };
        if let Some(sinks) = self.sinks.as_ref().filter(|s| sink.wants(&s.name)) {
            sink.take(sinks, attention::sinks::backward(&o, &lse, &d_o, &sinks.tensor)?)?;
        }
        let span = trace::span("attention backward");
        let inputs = AttentionGradInputs {
            q: &q,
            k: &k,
            v: &v,
            o: &o,
            lse: &lse,
            dout: &d_o,
        };
        let (dq, dk, dv) = ctx.attend_backward(inputs, &self.attention_spec())?;
        drop(span);
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
            dqk = self.rotate(&dqk, ctx, RopeDirection::Backward)?;
        } else {
            dqk = self.rotate(&dqk, ctx, RopeDirection::Backward)?;
            unnorm(&mut dqk)?;
        }
        drop(raw);
        if let (Some(raw), Some(d), Some(norm)) = (&raw_v, &mut dv, &self.value_norm) {
            *d = self.norm_backward(norm, raw, d, sink)?;
        }
        drop(raw_v);
        let (dq, dk) = (self.join_gate(dqk.0, d_gate)?, dqk.1);
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
        let dx = self.normed_backward(&self.input_norm, x, dh, Some(&dx1), sink)?;
        Ok(need_dx.then_some(dx))
    }
}
