//! A gated short convolution in the place of the attention of a block (LFM2):
//!
//! ```text
//! x1 = x + out_proj(c ⊙ conv(b ⊙ v))    with b, c, v from norm x
//! ```
//!
//! The input projection is `Block::attention_in`, its result is cut into b, c and v; `out_proj` is `Block::o_proj`. A half has no
//! norm after it in this family.
//!
//! Letters: N tokens, D hidden size, K taps.

pub(super) mod memory;

use super::block::Block;
use super::contracts::{Context, DeltaState, GradSink, KvStore, Param};
use super::projections::{SavedLow, add_residual};
use crate::base::{Error, Result};
use crate::ops::glu::{self, Activation};
use crate::ops::{short_conv, update};
use candle_core::Tensor;

/// The weight of a gated short convolution beside its projections.
pub struct ShortConv {
    /// `[D, 1, K]`
    pub conv: Param,
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
    /// True if its weight gets a gradient.
    pub(super) fn wanted(&self, sink: &dyn GradSink) -> bool {
        sink.wants(&self.conv.name)
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

impl Block {
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
        let [b, c, v]: [Tensor; 3] = parts.map_err(|_| Error::internal("a short convolution has other projections"))?;
        let u = gated(&b, &v)?;
        let mixed = match cache {
            None => short_conv::forward(&u, &net.conv.tensor, ctx.documents, false)?,
            Some(cache) => self.short_conv_cached(net, &u, ctx.documents, cache)?,
        };
        drop(u);
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
        let (before, width) = (net.kernel - 1, u.dim(1)?);
        // Each document with the inputs before it; those of a new one are 0.
        let (mut rows, mut offsets) = (Vec::new(), vec![0]);
        for (d, state) in documents.windows(2).zip(cache.states(self.index)?) {
            let inputs = match state {
                Some(state) => state.inputs,
                None => update::zeros((before, width), u.dtype(), u.device())?,
            };
            rows.extend([inputs, u.narrow(0, d[0], d[1] - d[0])?]);
            offsets.push(d[1] + before * offsets.len());
        }
        let all = Tensor::cat(&rows, 0)?;
        let mixed = short_conv::forward(&all, &net.conv.tensor, &offsets, false)?;
        let new = |d: &[usize]| mixed.narrow(0, d[0] + before, d[1] - d[0] - before);
        let new = offsets.windows(2).map(new).collect::<candle_core::Result<Vec<_>>>()?;
        let next = offsets[1..].iter().map(|end| {
            Ok(DeltaState {
                inputs: all.narrow(0, end - before, before)?.force_contiguous()?,
                state: None,
            })
        });
        cache.set_states(self.index, next.collect::<Result<_>>()?)?;
        Ok(Tensor::cat(&new, 0)?)
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn short_conv_backward(
        &self,
        net: &ShortConv,
        x: &Tensor,
        saved: SavedShortConv,
        dx1: Tensor,
        ctx: &Context,
        need_dx: bool,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
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
        let mixed = short_conv::forward(&u, &net.conv.tensor, ctx.documents, false)?;
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
        let wanted = net.wanted(sink);
        let (du, d_conv) = short_conv::backward(&u, &net.conv.tensor, &d_mixed, ctx.documents, false, wanted)?;
        drop((u, d_mixed));
        if let Some(gradient) = d_conv {
            sink.take(&net.conv, gradient)?;
        }
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
