//! The streams of AltUp before the first layer and after the last one (Gemma 3n): stream 0 is the embedding x, the others are
//! projections of it with the same root mean square per token; the output is the mean of the streams, projected back.
//!
//! ```text
//! h_0 = x,  h_i = matched(P_i x, x)          y = (h_0 + Σ_i matched(Q_i h_i, h_0)) / A
//! ```
//!
//! nanochat has a norm there instead.
//!
//! Letters: A streams, D width of a stream.

use super::contracts::{Context, GradSink};
use super::linear::{Dx, Linear};
use super::network::Network;
use super::norm::Norm;
use super::spec::{STREAMS_IN, STREAMS_OUT};
use crate::base::Result;
use crate::ops::{altup, update};
use candle_core::Tensor;

impl Network {
    /// The projections `P_i` or `Q_i`, if the family has streams.
    fn stream_projections(&self, name: &str) -> Result<Vec<Linear>> {
        let Some(streams) = self.spec.streams else {
            return Ok(Vec::new());
        };
        let one = |i: usize| self.linear_outside(&format!("{name}.{}", i - 1));
        (1..streams.count).map(one).collect()
    }

    /// The norm of the embedding; it has no parameters.
    fn embedding_norm(&self) -> Result<Option<Norm>> {
        let plain = self.spec.plain_norms;
        plain.then(|| self.plain_norm(self.spec.hidden)).transpose()
    }

    /// From the embedding `[N, D]` to what the first layer reads, `[N, A·D]`.
    pub(super) fn spread(&self, x: Tensor, ctx: &Context) -> Result<Tensor> {
        let Some(streams) = self.spec.streams else {
            return match self.embedding_norm()? {
                Some(norm) => norm.forward(&x, &self.spec),
                None => Ok(x),
            };
        };
        let (n, d) = x.dims2()?;
        let h = update::zeros((n, streams.count * d), x.dtype(), x.device())?;
        h.slice_set(&x, 1, 0)?;
        for (i, p) in self.stream_projections(STREAMS_IN)?.iter().enumerate() {
            let projected = p.forward(&x, ctx)?;
            h.slice_set(&altup::matched(&projected, &x)?, 1, (i + 1) * d)?;
        }
        Ok(h)
    }

    /// Backward of `spread` from the gradient `dh` `[N, A·D]`: passes the gradients of the projections to the sink, returns that
    /// of the embedding, `[N, D]`.
    ///
    /// # Errors
    /// As for `embed`.
    pub fn spread_backward(&self, ids: &[u32], dh: Tensor, ctx: &Context, sink: &mut dyn GradSink) -> Result<Tensor> {
        let Some(streams) = self.spec.streams else {
            return match self.embedding_norm()? {
                Some(norm) => norm.backward(&self.embedded(ids, ctx)?, &dh, &self.spec, sink),
                None => Ok(dh),
            };
        };
        let x = self.embedded(ids, ctx)?;
        let dx = altup::sum(&dh, streams.count, 0..1, 1.0)?;
        for (i, p) in self.stream_projections(STREAMS_IN)?.iter().enumerate() {
            let projected = p.forward(&x, ctx)?;
            let dy = altup::sum(&dh, streams.count, i + 1..i + 2, 1.0)?;
            let dp = altup::matched_backward(&projected, &x, &dy, &dx)?;
            drop((projected, dy));
            p.backward(Some(&x), &dp, ctx, Dx::AddTo(&dx), sink)?;
        }
        Ok(dx)
    }

    /// From the output of the last layer, `[N, A·D]`, to what the final norm reads, `[N, D]`.
    pub(super) fn merge(&self, h: &Tensor, ctx: &Context) -> Result<Tensor> {
        let Some(streams) = self.spec.streams else {
            return Ok(h.clone());
        };
        let count = streams.count;
        let first = altup::sum(h, count, 0..1, 1.0)?;
        let y = first.copy()?;
        for (i, q) in self.stream_projections(STREAMS_OUT)?.iter().enumerate() {
            let own = altup::sum(h, count, i + 1..i + 2, 1.0)?;
            let projected = q.forward(&own, ctx)?;
            drop(own);
            update::add_assign(&y, &altup::matched(&projected, &first)?)?;
        }
        update::scale_assign(&y, 1.0 / count as f32)?;
        Ok(y)
    }

    /// Backward of `merge` from the gradient `d` `[N, D]`: `[N, A·D]`.
    fn merge_backward(&self, h: &Tensor, d: Tensor, ctx: &Context, sink: &mut dyn GradSink) -> Result<Tensor> {
        let Some(streams) = self.spec.streams else { return Ok(d) };
        let (count, width) = (streams.count, self.spec.hidden);
        update::scale_assign(&d, 1.0 / count as f32)?;
        let first = altup::sum(h, count, 0..1, 1.0)?;
        let d_first = d.copy()?;
        let dh = update::zeros(h.shape(), h.dtype(), h.device())?;
        for (i, q) in self.stream_projections(STREAMS_OUT)?.iter().enumerate() {
            let own = altup::sum(h, count, i + 1..i + 2, 1.0)?;
            let projected = q.forward(&own, ctx)?;
            let dp = altup::matched_backward(&projected, &first, &d, &d_first)?;
            drop(projected);
            if let Some(d_own) = q.backward(Some(&own), &dp, ctx, Dx::New, sink)? {
                dh.slice_set(&d_own, 1, (i + 1) * width)?;
            }
        }
        dh.slice_set(&d_first, 1, 0)?;
        Ok(dh)
    }

    /// True if a parameter between the last layer and the head gets a gradient.
    ///
    /// # Errors
    /// A failed read of the weights.
    pub fn end_wanted(&self, sink: &dyn GradSink) -> Result<bool> {
        let out = self.stream_projections(STREAMS_OUT)?;
        Ok(self.final_norm()?.wanted(sink) || out.iter().any(|q| q.wanted(sink)))
    }

    /// Backward of `normalize`: from the gradient `dh` `[N, D]` to that of the output x `[N, ·]` of the last layer.
    ///
    /// # Errors
    /// As for `normalize`.
    pub fn normalize_backward(
        &self,
        x: &Tensor,
        dh: &Tensor,
        ctx: &Context,
        sink: &mut dyn GradSink,
    ) -> Result<Tensor> {
        let d = self
            .final_norm()?
            .backward(&self.merge(x, ctx)?, dh, &self.spec, sink)?;
        self.merge_backward(x, d, ctx, sink)
    }
}
