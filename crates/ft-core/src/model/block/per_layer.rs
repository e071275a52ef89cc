//! The end of a layer of Gemma 4: the part that reads the per-layer input i `[N, P]`, and the factor s of the layer.
//!
//! ```text
//! y = s · (x2 + norm(projection(act(gate(x2)) · i)))
//! ```
//!
//! All of it but x2 is narrow, so its activations are computed again in the backward pass.

mod memory;

use super::DecoderBlock;
use crate::base::Result;
use crate::model::contracts::{Context, GradSink};
use crate::model::norm::Norm;
use crate::model::projections::Projections;
use crate::ops::{glu, update};
use candle_core::Tensor;

/// The weights that read the per-layer input of a layer.
pub struct PerLayerInput {
    /// P
    pub width: usize,
    /// From the hidden states to P.
    pub gate: Projections,
    /// From P to the hidden states.
    pub projection: Projections,
    /// The norm of what is added.
    pub norm: Norm,
}

impl PerLayerInput {
    fn wanted(&self, ctx: &Context, sink: &dyn GradSink) -> bool {
        self.gate.wanted(sink)
            || self.projection.wanted(sink)
            || self.norm.wanted(sink)
            || ctx.shared.wants_input_gradients()
    }
}

impl DecoderBlock {
    /// From x2 `[N, D]` to the output of the layer; x2 is overwritten if the layer has no per-layer input.
    pub(super) fn end(&self, x2: &Tensor, ctx: &Context) -> Result<Tensor> {
        let y = match &self.per_layer {
            None => x2.clone(),
            Some(p) => {
                let y = self.per_layer_forward(p, x2, ctx)?;
                update::add_assign(&y, x2)?;
                y
            }
        };
        if self.scale != 1.0 {
            update::scale_assign(&y, self.scale)?;
        }
        Ok(y)
    }

    /// The output of the part, which is added, `[N, D]`, from its input.
    pub(super) fn per_layer_forward(&self, p: &PerLayerInput, x2: &Tensor, ctx: &Context) -> Result<Tensor> {
        let gate = p.gate.forward_one(x2, ctx)?.0;
        let m = glu::forward(&gate, &ctx.shared.input(self.index, p.width)?, self.spec.activation)?;
        drop(gate);
        let z = p.projection.forward_one(&m, ctx)?.0;
        self.norm(&p.norm, &z)
    }

    /// The gradient of the output of the layer before its factor.
    pub(super) fn unscaled(&self, dy: Tensor) -> Result<Tensor> {
        match self.scale {
            1.0 => Ok(dy),
            scale => Ok((&dy * f64::from(scale))?),
        }
    }

    /// Maps `dy` `[N, D]`, before the factor, to `∂x2` if it is needed.
    pub(super) fn per_layer_backward(
        &self,
        p: &PerLayerInput,
        x2: &Tensor,
        dy: Tensor,
        ctx: &Context,
        need_dx: bool,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let dx = self.per_layer_part_backward(p, x2, &dy, ctx, need_dx, sink)?;
        if let Some(dx) = &dx {
            update::add_assign(dx, &dy)?;
        }
        Ok(dx)
    }

    /// Backward of `per_layer_forward`, from the gradient `dy` `[N, D]` of what the part adds.
    pub(super) fn per_layer_part_backward(
        &self,
        p: &PerLayerInput,
        x2: &Tensor,
        dy: &Tensor,
        ctx: &Context,
        need_dx: bool,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        if !need_dx && !p.wanted(ctx, sink) {
            return Ok(None);
        }
        let input = ctx.shared.input(self.index, p.width)?;
        let (gate, low_in) = p.gate.forward_one(x2, ctx)?;
        let m = glu::forward(&gate, &input, self.spec.activation)?;
        let (z, low_out) = p.projection.forward_one(&m, ctx)?;
        let dz = self.norm_backward(&p.norm, &z, dy, sink)?;
        drop(z);
        let to_input = ctx.shared.wants_input_gradients();
        let need_dm = need_dx || to_input || p.gate.wanted(sink);
        let dm = p.projection.backward(Some(&m), low_out, vec![dz], ctx, need_dm, sink)?;
        drop(m);
        let Some(dm) = dm else { return Ok(None) };
        let (d_gate, d_input) = glu::backward_in_place(gate, input, &dm, self.spec.activation)?;
        drop(dm);
        if to_input {
            ctx.shared.put_input_gradient(self.index, &d_input)?;
        }
        drop(d_input);
        p.gate.backward(Some(x2), low_in, vec![d_gate], ctx, need_dx, sink)
    }
}
