//! Latent attention in the place of the attention of a block (DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3):
//!
//! ```text
//! c, r = kv_a_proj(h)                  c: latent rows, r: the part of the keys that all heads share
//! q    = q_b_proj(norm q_a_proj(h))    or q_proj(h)
//! k, v = kv_b_proj(norm c), rope(r)
//! x1   = x + o_proj(attention(rope(q), k, v))    with h = norm x
//! ```
//!
//! q_a_proj (or q_proj) and kv_a_proj are `DecoderBlock::attention_in`, o_proj is `DecoderBlock::o_proj`. A half has no
//! norm after it in these families. On the CPU the KV cache has a latent row and the shared part of the key for each
//! token (`ops::latent::absorbed`), or the keys and values of all heads. Letters as in `ops::latent`.

pub(super) mod memory;

use super::block::{DecoderBlock, MixerGradient};
use super::contracts::{Context, GradSink, KvStore};
use super::norm::Norm;
use super::projections::{Projections, SavedLow, add_residual};
use super::spec::LatentSpec;
use crate::base::{Error, Result};
use crate::ops::attention::{self, AttentionGradInputs};
use crate::ops::latent::LatentHeads;
use candle_core::Tensor;

/// The weights of latent attention between its input and output projections.
pub struct LatentAttention {
    /// Its sizes.
    pub sizes: LatentSpec,
    /// The norm of the low-rank queries and the projection that reads it, unless q_proj computes the queries.
    pub queries: Option<(Norm, Projections)>,
    /// The norm of the latent rows, `[L]`.
    pub norm: Norm,
    /// The projection of the latent rows to keys and values.
    pub expand: Projections,
}

/// Saved activations of latent attention, `[N, ·]`.
pub(super) struct SavedLatent {
    /// The low-rank queries before their norm, if there are any.
    low_q: Option<Tensor>,
    /// The latent rows before their norm, and the rotated part of the keys before its rotation, `[N, L+R]`.
    low_kv: Tensor,
    /// Filled heads, `[N, H·E]`.
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    /// u of the LoRA pairs of the input projections, of q_b_proj, kv_b_proj and o_proj.
    low: [SavedLow; 4],
}

/// The first results of latent attention.
struct LatentInputs {
    /// Filled heads, `[N, H·E]`.
    q: Tensor,
    low_q: Option<Tensor>,
    low_kv: Tensor,
    /// u of the LoRA pairs of the input projections and of q_b_proj.
    low: [SavedLow; 2],
}

impl LatentAttention {
    /// True if a parameter between the input and output projections gets a gradient.
    pub(super) fn wanted(&self, sink: &dyn GradSink) -> bool {
        let queries = |(norm, linear): &(Norm, Projections)| norm.wanted(sink) || linear.wanted(sink);
        self.norm.wanted(sink) || self.expand.wanted(sink) || self.queries.as_ref().is_some_and(queries)
    }

    /// The latent rows of `low_kv`, `[N, L]`.
    fn rows(&self, low_kv: &Tensor) -> Result<Tensor> {
        Ok(low_kv.narrow(1, 0, self.sizes.kv_rank)?.contiguous()?)
    }
}

impl DecoderBlock {
    fn latent_heads(&self, net: &LatentAttention) -> LatentHeads {
        net.sizes.heads(self.spec.heads, self.spec.pairing)
    }

    /// Decoding over latent rows: as `latent`, with a cache that keeps them.
    pub(super) fn latent_cached(
        &self,
        net: &LatentAttention,
        x: &Tensor,
        ctx: &Context,
        cache: &mut dyn KvStore,
    ) -> Result<Tensor> {
        let heads = self.latent_heads(net);
        let (cos, sin) = &ctx.ropes[self.spec.layers[self.index].rope];
        let LatentInputs { q, low_kv, .. } = self.latent_inputs(net, x, ctx)?;
        let c = self.norm(&net.norm, &net.rows(&low_kv)?)?;
        let rows = heads.cached_rows(&c, &low_kv, (cos, sin))?;
        let w = net.expand.one()?.whole()?;
        let q = heads.absorbed_queries(&q, &w)?;
        // Rounded operands would be others than those of a pass without a cache.
        let spec = attention::AttentionSpec {
            kv_heads: 1,
            head_dim: rows.dim(1)?,
            bf16: false,
            ..self.attention_spec()
        };
        let (o, _) = cache.attend(self.index, &q, Some((&rows, &rows)), &spec)?;
        drop(q);
        let values = heads.absorbed_values(&o, &w)?;
        drop(o);
        let (out, low_out) = self.o_proj.forward_one(&values, ctx)?;
        add_residual(out, x, &low_out, self.spec.residual_scale)
    }

    /// The queries and the latent rows of x.
    fn latent_inputs(&self, net: &LatentAttention, x: &Tensor, ctx: &Context) -> Result<LatentInputs> {
        let (cos, sin) = &ctx.ropes[self.spec.layers[self.index].rope];
        let h = self.normed(&self.input_norm, x)?;
        let (parts, low_in) = self.attention_in.forward(&h, ctx)?;
        drop(h);
        let [first, low_kv] = <[Tensor; 2]>::try_from(parts)
            .map_err(|_| Error::internal("latent attention does not have 2 projections"))?;
        let (raw_q, low_q, low_b) = match &net.queries {
            Some((norm, linear)) => {
                let normed = self.norm(norm, &first)?;
                let (q, low) = linear.forward_one(&normed, ctx)?;
                (q, Some(first), low)
            }
            None => (first, None, None),
        };
        let q = self.latent_heads(net).queries(&raw_q, (cos, sin))?;
        Ok(LatentInputs {
            q,
            low_q,
            low_kv,
            low: [low_in, low_b],
        })
    }

    /// As `mixer`, for latent attention.
    pub(super) fn latent(
        &self,
        net: &LatentAttention,
        x: &Tensor,
        ctx: &Context,
        cache: Option<&mut dyn KvStore>,
    ) -> Result<(Tensor, SavedLatent)> {
        let heads = self.latent_heads(net);
        let (cos, sin) = &ctx.ropes[self.spec.layers[self.index].rope];
        let LatentInputs {
            q,
            low_q,
            low_kv,
            low: [low_in, low_b],
        } = self.latent_inputs(net, x, ctx)?;
        let rows = self.norm(&net.norm, &net.rows(&low_kv)?)?;
        let (kv, low_expand) = net.expand.forward_one(&rows, ctx)?;
        drop(rows);
        let (k, v) = heads.keys_values(&kv, &low_kv, (cos, sin))?;
        drop(kv);
        let spec = self.attention_spec();
        let (o, lse) = match cache {
            None => ctx.attend(&q, &k, &v, &spec)?,
            Some(cache) => cache.attend(self.index, &q, Some((&k, &v)), &spec)?,
        };
        let values = heads.cut(&o)?;
        let (out, low_out) = self.o_proj.forward_one(&values, ctx)?;
        drop(values);
        let x1 = add_residual(out, x, &low_out, self.spec.residual_scale)?;
        let low = [low_in, low_b, low_expand, low_out];
        let saved = SavedLatent {
            low_q,
            low_kv,
            q,
            k,
            v,
            o,
            lse,
            low,
        };
        Ok((x1, saved))
    }

    pub(super) fn latent_backward(
        &self,
        net: &LatentAttention,
        saved: SavedLatent,
        gradient: MixerGradient,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let MixerGradient {
            x, dx1, ctx, need_dx, ..
        } = gradient;
        let SavedLatent {
            low_q,
            low_kv,
            q,
            k,
            v,
            o,
            lse,
            low: [low_in, low_b, low_expand, low_out],
        } = saved;
        let heads = self.latent_heads(net);
        let (cos, sin) = &ctx.ropes[self.spec.layers[self.index].rope];
        let need_dh = need_dx || self.input_norm.as_ref().is_some_and(|norm| norm.wanted(sink));
        let need_in = need_dh || self.attention_in.wanted(sink);
        let need_do = need_in || net.wanted(sink);
        let d_out = self.scaled_gradient(&dx1)?;
        let values = if self.o_proj.wanted(sink) {
            Some(heads.cut(&o)?)
        } else {
            None
        };
        let d_values = self
            .o_proj
            .backward(values.as_ref(), low_out, vec![d_out], ctx, need_do, sink)?;
        drop(values);
        let Some(d_values) = d_values else { return Ok(None) };
        let d_o = heads.fill(&d_values)?;
        drop(d_values);
        let inputs = AttentionGradInputs {
            q: &q,
            k: &k,
            v: &v,
            o: &o,
            lse: &lse,
            dout: &d_o,
        };
        let (dq, dk, dv) = ctx.attend_backward(inputs, &self.attention_spec())?;
        drop((q, k, v, o, lse, d_o));
        let d_queries = heads.queries_backward(&dq, (cos, sin))?;
        drop(dq);
        let (d_kv, d_rotary) = heads.keys_values_backward(&dk, &dv, (cos, sin))?;
        drop((dk, dv));
        // From keys and values to the latent rows.
        let rows = net.rows(&low_kv)?;
        drop(low_kv);
        let need_rows = need_in || net.norm.wanted(sink);
        let normed = if net.expand.wanted(sink) {
            Some(self.norm(&net.norm, &rows)?)
        } else {
            None
        };
        let d_normed = net
            .expand
            .backward(normed.as_ref(), low_expand, vec![d_kv], ctx, need_rows, sink)?;
        drop(normed);
        let d_rows = match d_normed {
            Some(d) => Some(self.norm_backward(&net.norm, &rows, &d, sink)?),
            None => None,
        };
        drop(rows);
        // From the queries to the low-rank ones.
        let d_first = match (&net.queries, low_q) {
            (Some((norm, linear)), Some(low_q)) => {
                let need = need_in || norm.wanted(sink);
                let normed = if linear.wanted(sink) {
                    Some(self.norm(norm, &low_q)?)
                } else {
                    None
                };
                let d_normed = linear.backward(normed.as_ref(), low_b, vec![d_queries], ctx, need, sink)?;
                drop(normed);
                match d_normed {
                    Some(d) => Some(self.norm_backward(norm, &low_q, &d, sink)?),
                    None => None,
                }
            }
            _ => Some(d_queries),
        };
        let (Some(d_first), Some(d_rows), true) = (d_first, d_rows, need_in) else {
            return Ok(None);
        };
        let d_low = Tensor::cat(&[&d_rows, &d_rotary], 1)?.contiguous()?;
        drop((d_rows, d_rotary));
        let h = if self.attention_in.wanted(sink) {
            Some(self.normed(&self.input_norm, x)?)
        } else {
            None
        };
        let dys = vec![d_first, d_low];
        let dh = self
            .attention_in
            .backward(h.as_ref(), low_in, dys, ctx, need_dh, sink)?;
        drop(h);
        let Some(dh) = dh else { return Ok(None) };
        let dx = self.normed_backward(&self.input_norm, x, dh, Some(&dx1), sink)?;
        Ok(need_dx.then_some(dx))
    }
}
