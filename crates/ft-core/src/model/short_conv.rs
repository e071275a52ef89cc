//! A gated short convolution in the place of the attention of a block (LFM2):
//!
//! ```text
//! x1 = x + out_proj(c ⊙ (conv(b ⊙ v) [+ bias]))    with b, c, v from norm x
//! ```
//!
//! The input projection is `DecoderBlock::attention_in`, its result is cut into b, c and v; `out_proj` is
//! `DecoderBlock::o_proj`. A half has no norm after it in this family.
//!
//! Letters: N tokens, D hidden size, K taps.

pub(super) mod memory;

use super::block::{DecoderBlock, MixerGradient};
use super::contracts::{Context, GradSink, KvStore, Param, RecurrentState};
use super::projections::{SavedLow, add_residual};
use crate::base::{Error, Result};
use crate::ops::glu::{self, Activation};
use crate::ops::{linear, short_conv, update};
use candle_core::Tensor;

/// The weight of a gated short convolution beside its projections.
pub struct ShortConv {
    /// `[D, 1, K]`
    pub conv: Param,
    /// `[D]`
    pub bias: Option<Param>,
    /// K.
    pub kernel: usize,
}

/// Saved activations of a gated short convolution, `[N, D]`.
pub(super) struct SavedShortConv {
    b: Tensor,
    c: Tensor,
    v: Tensor,
    /// u of the LoRA pairs of the input projection, and of out_proj.
    low: [SavedLow; 2],
}

impl ShortConv {
    /// True if its weight or its bias gets a gradient.
    pub(super) fn wanted(&self, sink: &dyn GradSink) -> bool {
        let bias = self.bias.as_ref();
        sink.wants(&self.conv.name) || bias.is_some_and(|bias| sink.wants(&bias.name))
    }

    /// The convolution of whole documents, or of the tokens of this rank after those that it reads of ranks before.
    fn convolved(&self, u: &Tensor, ctx: &Context) -> Result<Tensor> {
        let w = &self.conv.tensor;
        let Some(sequence) = ctx.sequence else {
            return short_conv::forward(u, w, ctx.documents, false);
        };
        let (all, documents) = sequence.with_earlier(u, self.kernel)?;
        let mixed = short_conv::forward(&all, w, &documents, false)?;
        let before = all.dim(0)? - u.dim(0)?;
        drop(all);
        // In place: the bias is added to it.
        Ok(mixed.narrow(0, before, u.dim(0)?)?.force_contiguous()?)
    }

    /// The gradients of u and, if `need_dw`, of the weight.
    fn convolved_backward(
        &self,
        u: &Tensor,
        d_mixed: &Tensor,
        ctx: &Context,
        need_dw: bool,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let w = &self.conv.tensor;
        let Some(sequence) = ctx.sequence else {
            return short_conv::backward(u, w, d_mixed, ctx.documents, false, need_dw);
        };
        let (all, documents) = sequence.with_earlier(u, self.kernel)?;
        let before = update::zeros((all.dim(0)? - u.dim(0)?, u.dim(1)?), u.dtype(), u.device())?;
        let d_mixed = Tensor::cat(&[&before, d_mixed], 0)?;
        let (d_all, dw) = short_conv::backward(&all, w, &d_mixed, &documents, false, need_dw)?;
        drop((all, d_mixed));
        Ok((sequence.with_earlier_backward(d_all, self.kernel)?, dw))
    }

    fn add_bias(&self, mixed: &Tensor) -> Result<()> {
        match &self.bias {
            Some(bias) => update::add_rows(mixed, &bias.tensor),
            None => Ok(()),
        }
    }
}

/// Bytes of the state of a text in one layer, f32: the last inputs of the convolution.
pub(crate) fn state_bytes(kernel: usize, hidden: usize) -> u64 {
    4 * (kernel.saturating_sub(1) * hidden) as u64
}

/// `gate ⊙ x`.
fn gated(gate: &Tensor, x: &Tensor) -> Result<Tensor> {
    glu::forward(gate, x, Activation::Identity)
}

/// The convolution with weight `w` `[C, 1, K]` of new tokens x `[N, C]` after the last K - 1 inputs of each document, `[K - 1, C]`
/// (`None`: a new document, whose inputs before it are 0): the results `[N, C]`, and the last inputs of each document.
pub(super) fn continued(
    inputs: Vec<Option<Tensor>>,
    x: &Tensor,
    w: &Tensor,
    documents: &[usize],
    silu: bool,
) -> Result<(Tensor, Vec<Tensor>)> {
    let (before, width) = (w.dim(2)? - 1, x.dim(1)?);
    // Each document with the inputs before it.
    let (mut rows, mut offsets) = (Vec::new(), vec![0]);
    for (d, inputs) in documents.windows(2).zip(inputs) {
        let inputs = inputs.map_or_else(|| update::zeros((before, width), x.dtype(), x.device()), Ok)?;
        rows.extend([inputs, x.narrow(0, d[0], d[1] - d[0])?]);
        offsets.push(d[1] + before * offsets.len());
    }
    let all = Tensor::cat(&rows, 0)?;
    let mixed = short_conv::forward(&all, w, &offsets, silu)?;
    let new = |d: &[usize]| mixed.narrow(0, d[0] + before, d[1] - d[0] - before);
    let new = offsets.windows(2).map(new).collect::<candle_core::Result<Vec<_>>>()?;
    // `copy` would copy the rows of all documents.
    let last = |end: &usize| all.narrow(0, end - before, before)?.force_contiguous();
    let last = offsets[1..].iter().map(last).collect::<candle_core::Result<Vec<_>>>()?;
    Ok((Tensor::cat(&new, 0)?, last))
}

impl DecoderBlock {
    /// The half that mixes tokens: `[N, D]` to `[N, D]`, and the activations to save.
    pub(super) fn short_conv(
        &self,
        net: &ShortConv,
        x: &Tensor,
        ctx: &Context,
        cache: Option<&mut dyn KvStore>,
    ) -> Result<(Tensor, SavedShortConv)> {
        let h = self.normed(&self.input_norm, x)?;
        let (parts, low_in) = self.attention_in.forward(&h, ctx)?;
        drop(h);
        let parts = parts.try_into();
        let [b, c, v]: [Tensor; 3] =
            parts.map_err(|_| Error::internal("a short convolution does not have 3 projections"))?;
        let u = gated(&b, &v)?;
        let mixed = match cache {
            None => net.convolved(&u, ctx)?,
            Some(cache) => self.short_conv_cached(net, &u, ctx.documents, cache)?,
        };
        drop(u);
        net.add_bias(&mixed)?;
        let y = gated(&c, &mixed)?;
        drop(mixed);
        let (out, low_out) = self.o_proj.forward_one(&y, ctx)?;
        drop(y);
        let x1 = add_residual(out, x, &low_out, self.spec.residual_scale)?;
        let low = [low_in, low_out];
        Ok((x1, SavedShortConv { b, c, v, low }))
    }

    /// The convolution after the tokens so far.
    fn short_conv_cached(
        &self,
        net: &ShortConv,
        u: &Tensor,
        documents: &[usize],
        cache: &mut dyn KvStore,
    ) -> Result<Tensor> {
        let states = cache.states(self.index)?.into_iter();
        let inputs = states.map(|state| state.map(|state| state.inputs)).collect();
        let (mixed, inputs) = continued(inputs, u, &net.conv.tensor, documents, false)?;
        let next = inputs.into_iter().map(|inputs| RecurrentState { inputs, state: None });
        cache.set_states(self.index, next.collect())?;
        Ok(mixed)
    }

    pub(super) fn short_conv_backward(
        &self,
        net: &ShortConv,
        saved: SavedShortConv,
        gradient: MixerGradient,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let MixerGradient {
            x, dx1, ctx, need_dx, ..
        } = gradient;
        let SavedShortConv {
            b,
            c,
            v,
            low: [low_in, low_out],
        } = saved;
        let need_dh = need_dx || self.input_norm.as_ref().is_some_and(|norm| norm.wanted(sink));
        let need_dy = need_dh || net.wanted(sink) || self.attention_in.wanted(sink);
        let d_out = self.scaled_gradient(&dx1)?;
        let u = gated(&b, &v)?;
        let mixed = net.convolved(&u, ctx)?;
        net.add_bias(&mixed)?;
        let y = if self.o_proj.wanted(sink) {
            Some(gated(&c, &mixed)?)
        } else {
            None
        };
        let dy = self
            .o_proj
            .backward(y.as_ref(), low_out, vec![d_out], ctx, need_dy, sink)?;
        drop(y);
        let Some(dy) = dy else { return Ok(None) };
        let (dc, d_mixed) = glu::backward_in_place(c, mixed, &dy, Activation::Identity)?;
        drop(dy);
        let wanted = sink.wants(&net.conv.name);
        let (du, d_conv) = net.convolved_backward(&u, &d_mixed, ctx, wanted)?;
        drop(u);
        if let Some(gradient) = d_conv {
            sink.take(&net.conv, gradient)?;
        }
        if let Some(bias) = net.bias.as_ref().filter(|bias| sink.wants(&bias.name)) {
            sink.take(bias, linear::grad_bias(&d_mixed)?)?;
        }
        drop(d_mixed);
        let (db, dv) = glu::backward_in_place(b, v, &du, Activation::Identity)?;
        drop(du);
        let h = if self.attention_in.wanted(sink) {
            Some(self.normed(&self.input_norm, x)?)
        } else {
            None
        };
        let dh = self
            .attention_in
            .backward(h.as_ref(), low_in, vec![db, dc, dv], ctx, need_dh, sink)?;
        drop(h);
        let Some(dh) = dh else { return Ok(None) };
        let dx = self.normed_backward(&self.input_norm, x, dh, Some(&dx1), sink)?;
        Ok(need_dx.then_some(dx))
    }
}
