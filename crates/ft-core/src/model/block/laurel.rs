//! Laurel (arXiv:2411.07501, as in Gemma 3n): a projection of low rank beside the attention. x1 is the residual stream after
//! the attention, h the normalized input of the attention, `[N, D]` each.
//!
//! ```text
//! x1' = (x1 + h + norm(right(left(h)))) / sqrt(2)
//! ```

use super::DecoderBlock;
use crate::base::Result;
use crate::model::contracts::{Context, GradSink};
use crate::model::norm::Norm;
use crate::model::projections::Projections;
use crate::ops::update;
use candle_core::Tensor;
use std::f32::consts::FRAC_1_SQRT_2;

/// The weights of Laurel in a layer.
pub struct Laurel {
    /// From the hidden states to the rank.
    pub left: Projections,
    /// From the rank to the hidden states.
    pub right: Projections,
    /// The norm of their product.
    pub norm: Norm,
}

impl Laurel {
    /// True if a parameter gets a gradient.
    pub(super) fn wanted(&self, sink: &dyn GradSink) -> bool {
        self.left.wanted(sink) || self.right.wanted(sink) || self.norm.wanted(sink)
    }
}

impl DecoderBlock {
    /// Computes x1' in place of x1 `[N, D]`, from the input x `[N, D]` of the layer.
    pub(super) fn laurel_assign(&self, x: &Tensor, x1: &Tensor, ctx: &Context) -> Result<()> {
        let Some(laurel) = &self.laurel else { return Ok(()) };
        let h = self.normed(&self.input_norm, x)?;
        let low = laurel.left.forward_one(&h, ctx)?.0;
        let z = laurel.right.forward_one(&low, ctx)?.0;
        update::add_assign(x1, &self.norm_plus(&laurel.norm, &z, &h)?)?;
        update::scale_assign(x1, FRAC_1_SQRT_2)
    }

    /// Backward of `laurel_assign`: the gradient `d` `[N, D]` of x1' becomes that of x1; returns that of h, `[N, D]`, if it is
    /// needed.
    pub(super) fn laurel_backward(
        &self,
        x: &Tensor,
        d: &Tensor,
        ctx: &Context,
        need_dh: bool,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let Some(laurel) = &self.laurel else { return Ok(None) };
        update::scale_assign(d, FRAC_1_SQRT_2)?;
        if !need_dh && !laurel.wanted(sink) {
            return Ok(None);
        }
        let h = self.normed(&self.input_norm, x)?;
        let (low, saved_left) = laurel.left.forward_one(&h, ctx)?;
        let (z, saved_right) = laurel.right.forward_one(&low, ctx)?;
        let dz = self.norm_backward(&laurel.norm, &z, d, sink)?;
        drop(z);
        let need_low = need_dh || laurel.left.wanted(sink);
        let d_low = laurel
            .right
            .backward(Some(&low), saved_right, vec![dz], ctx, need_low, sink)?;
        drop(low);
        let Some(d_low) = d_low else { return Ok(None) };
        let dh = laurel
            .left
            .backward(Some(&h), saved_left, vec![d_low], ctx, need_dh, sink)?;
        if let Some(dh) = &dh {
            update::add_assign(dh, d)?;
        }
        Ok(dh)
    }
}
