//! Gated DeltaNet in the place of the attention of a block (Qwen3.5, Qwen3-Next):
//!
//! ```text
//! x1 = x + out_proj(silu(z) · norm(delta_rule(conv(qkv), a, b)))    with qkv, z, b, a from norm x
//! ```
//!
//! The input projections are `DecoderBlock::attention_in`, `out_proj` is `DecoderBlock::o_proj`. A half has no norm
//! after it in these families. Letters as in `ops::delta_rule`.

pub(super) mod memory;

use super::block::{DecoderBlock, MixerGradient};
use super::contracts::{Context, GradSink, KvStore, Param, RecurrentState};
use super::projections::{SavedLow, add_residual};
use super::short_conv::continued;
use super::spec::DeltaNetSpec;
use crate::base::{Error, Result};
use crate::ops::delta_rule::{self, DeltaHeads, DeltaInputs};
use crate::ops::glu::{self, Activation};
use crate::ops::{rms_norm, short_conv, update};
use candle_core::{DType, Tensor};

/// The weights of Gated DeltaNet beside its projections.
pub struct DeltaNet {
    /// Its sizes.
    pub sizes: DeltaNetSpec,
    /// The convolution, `[C, 1, K]`.
    pub conv: Param,
    /// Logarithm of the decay rates, `[V]`.
    pub a_log: Param,
    /// Added to a, `[V]`.
    pub dt_bias: Param,
    /// The norm of each output head, `[Q]`; multiplies by w, not 1 + w.
    pub norm: Param,
}

/// Saved activations of Gated DeltaNet, `[N, ·]`.
pub(super) struct SavedDeltaNet {
    /// The input of the convolution.
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    /// Output of the delta rule.
    o: Tensor,
    /// u of the LoRA pairs of the input projections, and of out_proj.
    low: [SavedLow; 2],
}

impl DeltaNet {
    /// True if any of these parameters gets a gradient.
    pub(super) fn wanted(&self, sink: &dyn GradSink) -> bool {
        let all = [&self.conv, &self.a_log, &self.dt_bias, &self.norm];
        all.into_iter().any(|p| sink.wants(&p.name))
    }

    fn inputs<'a>(&'a self, qkv: &'a Tensor, a: &'a Tensor, b: &'a Tensor) -> DeltaInputs<'a> {
        DeltaInputs {
            qkv,
            a,
            b,
            a_log: &self.a_log.tensor,
            dt_bias: &self.dt_bias.tensor,
        }
    }
}

/// The sizes of the operation.
pub fn heads(spec: &DeltaNetSpec) -> DeltaHeads {
    DeltaHeads {
        key_heads: spec.key_heads,
        value_heads: spec.value_heads,
        key_dim: spec.key_dim,
        value_dim: spec.value_dim,
    }
}

/// Bytes of the state of a text in one layer (`RecurrentState`), f32.
pub(crate) fn state_bytes(spec: &DeltaNetSpec) -> u64 {
    4 * (heads(spec).state() + spec.kernel.saturating_sub(1) * spec.channels()) as u64
}

/// Widths per key head of q, k, v, z, and of b, a, in `in_proj_qkvz` and `in_proj_ba`.
fn widths(spec: &DeltaNetSpec) -> ([usize; 4], [usize; 2]) {
    let group = spec.value_heads / spec.key_heads;
    let values = group * spec.value_dim;
    ([spec.key_dim, spec.key_dim, values, values], [group; 2])
}

/// Cuts `[N, H·sum]` into parts `[N, H·width]`.
fn by_key_head<const P: usize>(x: &Tensor, heads: usize, widths: [usize; P]) -> Result<[Tensor; P]> {
    let n = x.dim(0)?;
    let all = x.reshape((n, heads, widths.iter().sum::<usize>()))?;
    let mut parts = widths.map(|_| x.clone());
    let mut first = 0;
    for (part, width) in parts.iter_mut().zip(widths) {
        *part = all.narrow(2, first, width)?.contiguous()?.reshape((n, heads * width))?;
        first += width;
    }
    Ok(parts)
}

/// The inverse of `by_key_head`.
fn together(parts: &[&Tensor], heads: usize) -> Result<Tensor> {
    let n = parts.first().map_or(Ok(0), |part| part.dim(0))?;
    let each = |part: &&Tensor| part.reshape((n, heads, ()));
    let all = Tensor::cat(&parts.iter().map(each).collect::<candle_core::Result<Vec<_>>>()?, 2)?;
    Ok(all.contiguous()?.reshape((n, ()))?)
}

/// The outputs of the input projections as qkv, z, b and a.
fn split(spec: &DeltaNetSpec, parts: Vec<Tensor>) -> Result<[Tensor; 4]> {
    if spec.by_key_head
        && let [qkvz, ba] = &parts[..]
    {
        let (in_qkvz, in_ba) = widths(spec);
        let [q, k, v, z] = by_key_head(qkvz, spec.key_heads, in_qkvz)?;
        let [b, a] = by_key_head(ba, spec.key_heads, in_ba)?;
        return Ok([Tensor::cat(&[q, k, v], 1)?.contiguous()?, z, b, a]);
    }
    parts
        .try_into()
        .map_err(|_| Error::internal("Gated DeltaNet has another number of projections"))
}

/// The inverse of `split`, for gradients.
fn join(spec: &DeltaNetSpec, [qkv, z, b, a]: [Tensor; 4]) -> Result<Vec<Tensor>> {
    if !spec.by_key_head {
        return Ok(vec![qkv, z, b, a]);
    }
    let (keys, values) = (spec.key_width(), spec.value_width());
    let part = |first: usize, width: usize| qkv.narrow(1, first, width)?.contiguous();
    let (q, k, v) = (part(0, keys)?, part(keys, keys)?, part(2 * keys, values)?);
    Ok(vec![
        together(&[&q, &k, &v, &z], spec.key_heads)?,
        together(&[&b, &a], spec.key_heads)?,
    ])
}

impl DecoderBlock {
    /// The half that mixes tokens: `[N, D]` to `[N, D]`, and the activations to save.
    pub(super) fn delta_net(
        &self,
        net: &DeltaNet,
        x: &Tensor,
        ctx: &Context,
        cache: Option<&mut dyn KvStore>,
    ) -> Result<(Tensor, SavedDeltaNet)> {
        let sizes = &net.sizes;
        let h = self.normed(&self.input_norm, x)?;
        let (parts, low_in) = self.attention_in.forward(&h, ctx)?;
        drop(h);
        let [qkv, z, b, a] = split(sizes, parts)?;
        let o = match cache {
            None => {
                let mixed = short_conv::forward(&qkv, &net.conv.tensor, ctx.documents, true)?;
                delta_rule::forward(&net.inputs(&mixed, &a, &b), &heads(sizes), ctx.documents)?
            }
            Some(cache) => self.delta_rule_cached(net, [&qkv, &a, &b], ctx.documents, cache)?,
        };
        let normed = rms_norm::forward(&o, &net.norm.tensor, self.spec.norm_eps, false)?;
        let y = glu::forward(&z, &normed, Activation::Silu)?;
        drop(normed);
        let (out, low_out) = self.o_proj.forward_one(&y, ctx)?;
        drop(y);
        let x1 = add_residual(out, x, &low_out, self.spec.residual_scale)?;
        let low = [low_in, low_out];
        Ok((x1, SavedDeltaNet { qkv, z, b, a, o, low }))
    }

    /// The convolution and the delta rule after the tokens so far.
    fn delta_rule_cached(
        &self,
        net: &DeltaNet,
        [qkv, a, b]: [&Tensor; 3],
        documents: &[usize],
        cache: &mut dyn KvStore,
    ) -> Result<Tensor> {
        let sizes = &net.sizes;
        let heads = heads(sizes);
        // A new document begins with a state of 0.
        let (mut inputs, mut old) = (Vec::new(), Vec::new());
        for state in cache.states(self.index)? {
            let (before, state) = state.map_or((None, None), |s| (Some(s.inputs), s.state));
            inputs.push(before);
            let zeros = || update::zeros((1, heads.state()), DType::F32, qkv.device());
            old.push(state.map_or_else(zeros, Ok)?);
        }
        let (mixed, inputs) = continued(inputs, qkv, &net.conv.tensor, documents, true)?;
        let (o, after) =
            delta_rule::forward_from(&net.inputs(&mixed, a, b), &heads, documents, &Tensor::cat(&old, 0)?)?;
        // `copy` would copy the states of all documents.
        let next = inputs.into_iter().enumerate().map(|(i, inputs)| {
            Ok(RecurrentState {
                inputs,
                state: Some(after.narrow(0, i, 1)?.force_contiguous()?),
            })
        });
        cache.set_states(self.index, next.collect::<Result<_>>()?)?;
        Ok(o)
    }

    pub(super) fn delta_net_backward(
        &self,
        net: &DeltaNet,
        saved: SavedDeltaNet,
        gradient: MixerGradient,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let MixerGradient {
            x, dx1, ctx, need_dx, ..
        } = gradient;
        let SavedDeltaNet {
            qkv,
            z,
            b,
            a,
            o,
            low: [low_in, low_out],
        } = saved;
        let (sizes, eps) = (&net.sizes, self.spec.norm_eps);
        let need_dh = need_dx || self.input_norm.as_ref().is_some_and(|norm| norm.wanted(sink));
        let need_dy = need_dh || net.wanted(sink) || self.attention_in.wanted(sink);
        let d_out = self.scaled_gradient(&dx1)?;
        let normed = rms_norm::forward(&o, &net.norm.tensor, eps, false)?;
        let y = if self.o_proj.wanted(sink) {
            Some(glu::forward(&z, &normed, Activation::Silu)?)
        } else {
            None
        };
        let dy = self
            .o_proj
            .backward(y.as_ref(), low_out, vec![d_out], ctx, need_dy, sink)?;
        drop(y);
        let Some(dy) = dy else { return Ok(None) };
        let (dz, d_normed) = glu::backward_in_place(z, normed, &dy, Activation::Silu)?;
        drop(dy);
        let (d_o, d_norm) =
            rms_norm::backward(&o, &net.norm.tensor, &d_normed, eps, false, sink.wants(&net.norm.name))?;
        drop((d_normed, o));
        let mixed = short_conv::forward(&qkv, &net.conv.tensor, ctx.documents, true)?;
        let d = delta_rule::backward(&net.inputs(&mixed, &a, &b), &heads(sizes), ctx.documents, &d_o)?;
        drop((mixed, d_o, a, b));
        let (d_qkv, d_conv) = short_conv::backward(
            &qkv,
            &net.conv.tensor,
            &d.qkv,
            ctx.documents,
            true,
            sink.wants(&net.conv.name),
        )?;
        drop((qkv, d.qkv));
        for (param, gradient) in [(&net.norm, d_norm), (&net.conv, d_conv)] {
            if let Some(gradient) = gradient {
                sink.take(param, gradient)?;
            }
        }
        for (param, gradient) in [(&net.a_log, d.a_log), (&net.dt_bias, d.dt_bias)] {
            if sink.wants(&param.name) {
                sink.take(param, gradient)?;
            }
        }
        let h = if self.attention_in.wanted(sink) {
            Some(self.normed(&self.input_norm, x)?)
        } else {
            None
        };
        let dys = join(sizes, [d_qkv, dz, d.b, d.a])?;
        let dh = self
            .attention_in
            .backward(h.as_ref(), low_in, dys, ctx, need_dh, sink)?;
        drop(h);
        let Some(dh) = dh else { return Ok(None) };
        let dx = self.normed_backward(&self.input_norm, x, dh, Some(&dx1), sink)?;
        Ok(need_dx.then_some(dx))
    }
}
