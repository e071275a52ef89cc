//! The MLP half of a block: `x2 = x1 + [norm] down_proj(act(gate_proj(h)) · up_proj(h))` with `h = [norm] x`, or without a
//! gate `x2 = x1 + [norm] down_proj(act(up_proj(h)))`. x is x1, unless the halves are parallel.
//!
//! The MLP handles tokens independently, so it can process them in pieces: of the wide tensors `[N, I]` (gate, up,
//! their product, its gradient) only one piece exists at a time. Outputs and input gradients are bit-equal.

pub(super) mod memory;

use super::block::DecoderBlock;
use super::contracts::{Context, GradSink};
use super::experts::{Experts, ExpertsGradient, SavedExperts};
use super::pieces::{GradientSums, pieces, rows};
use super::projections::{SavedLow, add_residual};
use crate::base::{Error, Result};
use crate::ops::{clamped_glu, glu, sparse_gate, update};
use candle_core::Tensor;

/// Saved activations of a piece.
pub(super) struct SavedPiece {
    /// gate and up, or up alone
    parts: Vec<Tensor>,
    /// u of the LoRA pairs of gate and up, and of down if no norm follows it.
    low: [SavedLow; 2],
}

impl SavedPiece {
    pub(super) fn new(parts: Vec<Tensor>, low: [SavedLow; 2]) -> Self {
        Self { parts, low }
    }

    pub(super) fn into_parts(self) -> (Vec<Tensor>, [SavedLow; 2]) {
        (self.parts, self.low)
    }
}

/// Saved activations of an MLP; empty if they were not saved.
#[derive(Default)]
pub(super) struct SavedMlp {
    /// Of each piece of the tokens.
    pieces: Vec<SavedPiece>,
    /// Of a mixture of experts.
    experts: Option<SavedExperts>,
    /// The sum of the experts, if a norm follows it.
    sum: Option<Tensor>,
}

/// The backward pass of the MLP half.
pub(super) struct MlpGradient<'a> {
    /// The input of the half, `[N, D]`.
    pub x: &'a Tensor,
    pub saved: SavedMlp,
    /// The gradient of the output, `[N, D]`.
    pub dy: &'a Tensor,
    pub ctx: &'a Context<'a>,
    pub need_dx: bool,
}

/// Gradients that the backward pass of an MLP must compute.
#[derive(Clone, Copy)]
pub struct MlpNeeds {
    /// True if a parameter of gate or up is trained.
    pub inputs: bool,
    /// True if a parameter of down is trained.
    pub down: bool,
    /// The gradient with respect to the norm's output.
    pub dh: bool,
}

impl MlpNeeds {
    /// The gradient with respect to the product of gate and up.
    pub fn dm(self) -> bool {
        self.dh || self.inputs
    }
}

impl DecoderBlock {
    /// The product of gate and up after the activation, `[N, I]`.
    pub(super) fn activated(&self, parts: &[Tensor]) -> Result<Tensor> {
        match parts {
            [up] => glu::activate(up, self.spec.activation),
            [gate, up] if self.sparse_gate.is_some() => {
                let gate = self.sparse(gate)?;
                glu::forward(&gate, up, self.spec.activation)
            }
            [gate, up] => match self.spec.clamped_glu {
                Some(unit) => clamped_glu::forward(gate, up, unit),
                None => glu::forward(gate, up, self.spec.activation),
            },
            _ => Err(Error::internal("an MLP needs one or two projections")),
        }
    }

    /// The gate after the cut of a layer with sparse activations.
    fn sparse(&self, gate: &Tensor) -> Result<Tensor> {
        match self.sparse_gate {
            Some(m) => sparse_gate::forward(gate, m),
            None => Ok(gate.clone()),
        }
    }

    /// Backward of `activated`.
    pub(super) fn activated_backward(&self, parts: Vec<Tensor>, dm: &Tensor) -> Result<Vec<Tensor>> {
        let mut parts = parts.into_iter();
        match (parts.next(), parts.next()) {
            (Some(up), None) => Ok(vec![glu::activate_backward(up, dm, self.spec.activation)?]),
            (Some(gate), Some(up)) if self.sparse_gate.is_some() => {
                let sparse = self.sparse(&gate)?;
                let (d_gate, d_up) = glu::backward_in_place(sparse, up, dm, self.spec.activation)?;
                self.sparse_gate
                    .map_or(Ok(()), |m| sparse_gate::backward_assign(&gate, &d_gate, m))?;
                Ok(vec![d_gate, d_up])
            }
            (Some(gate), Some(up)) => {
                let (d_gate, d_up) = match self.spec.clamped_glu {
                    Some(unit) => clamped_glu::backward_in_place(gate, up, dm, unit)?,
                    None => glu::backward_in_place(gate, up, dm, self.spec.activation)?,
                };
                Ok(vec![d_gate, d_up])
            }
            _ => Err(Error::internal("an MLP needs one or two projections")),
        }
    }

    /// Input x and residual stream x1, `[N, D]` each, to `[N, D]`; also returns gate and up if `keep`.
    pub(super) fn mlp(&self, x: &Tensor, x1: &Tensor, ctx: &Context, keep: bool) -> Result<(Tensor, SavedMlp)> {
        if let Some(experts) = &self.experts {
            return self.experts_half(experts, x, x1, ctx, keep);
        }
        let all = pieces(x1.dims()[0], ctx.mlp_tokens);
        if all.len() == 1 {
            let (y, parts) = self.mlp_piece(x, x1, ctx, keep)?;
            let pieces = parts.into_iter().collect();
            return Ok((
                y,
                SavedMlp {
                    pieces,
                    ..SavedMlp::default()
                },
            ));
        }
        let y = update::zeros(x1.shape(), x1.dtype(), x1.device())?;
        let mut pieces = Vec::new();
        for (i, piece) in all.iter().enumerate() {
            let (part, parts) = self.mlp_piece(&rows(x, piece)?, &rows(x1, piece)?, &ctx.piece(i), keep)?;
            y.slice_set(&part, 0, piece.start)?;
            pieces.extend(parts);
        }
        Ok((
            y,
            SavedMlp {
                pieces,
                ..SavedMlp::default()
            },
        ))
    }

    /// As `mlp`, of a mixture of experts: the tokens are not cut into pieces, the wide tensors are those of one expert.
    fn experts_half(
        &self,
        experts: &Experts,
        x: &Tensor,
        x1: &Tensor,
        ctx: &Context,
        keep: bool,
    ) -> Result<(Tensor, SavedMlp)> {
        let h = self.normed(&self.mlp_norm, x)?;
        let (y, experts) = self.experts_forward(experts, &h, ctx, keep)?;
        let (y, sum) = match &self.mlp_post_norm {
            Some(norm) => (self.norm_plus(norm, &y, x1)?, keep.then_some(y)),
            None => (add_residual(y, x1, &None, self.spec.residual_scale)?, None),
        };
        Ok((
            y,
            SavedMlp {
                pieces: Vec::new(),
                experts,
                sum,
            },
        ))
    }

    fn experts_half_backward(
        &self,
        experts: &Experts,
        gradient: MlpGradient<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let MlpGradient {
            x,
            mut saved,
            dy,
            ctx,
            need_dx,
        } = gradient;
        if !need_dx && !self.mlp_wanted(sink) {
            return Ok(None);
        }
        let h = self.normed(&self.mlp_norm, x)?;
        let need_dh = need_dx || self.mlp_norm.as_ref().is_some_and(|norm| norm.wanted(sink));
        let scaled = match &self.mlp_post_norm {
            Some(norm) => {
                let y = match saved.sum {
                    Some(y) => y,
                    None => {
                        let (y, routed) = self.experts_again(experts, &h, ctx)?;
                        saved.experts = Some(routed);
                        y
                    }
                };
                self.norm_backward(norm, &y, dy, sink)?
            }
            None => self.scaled_gradient(dy)?,
        };
        let of = ExpertsGradient {
            h: &h,
            saved: saved.experts,
            dy: &scaled,
            ctx,
            need_dh,
        };
        let Some(dh) = self.experts_backward(experts, of, sink)? else {
            return Ok(None);
        };
        drop((h, scaled));
        let past = (!self.spec.parallel).then_some(dy);
        let dx = self.normed_backward(&self.mlp_norm, x, dh, past, sink)?;
        Ok(need_dx.then_some(dx))
    }

    fn mlp_piece(&self, x: &Tensor, x1: &Tensor, ctx: &Context, keep: bool) -> Result<(Tensor, Option<SavedPiece>)> {
        let h = self.normed(&self.mlp_norm, x)?;
        let (parts, low_in) = self.mlp_in.forward(&h, ctx)?;
        drop(h);
        let m = self.activated(&parts)?;
        let saved = keep.then_some((parts, low_in));
        let (y, low_out) = self.down_proj.forward_one(&m, ctx)?;
        let (y, low_out) = match &self.mlp_post_norm {
            // The backward pass needs y: it computes down again.
            Some(norm) => (self.norm_plus(norm, &y, x1)?, None),
            None => (add_residual(y, x1, &low_out, self.spec.residual_scale)?, low_out),
        };
        let piece = |(parts, low_in)| SavedPiece {
            parts,
            low: [low_in, low_out],
        };
        Ok((y, saved.map(piece)))
    }

    /// True if any parameter of this half gets a gradient.
    pub(super) fn mlp_wanted(&self, sink: &dyn GradSink) -> bool {
        let mut norms = [&self.mlp_norm, &self.mlp_post_norm].into_iter().flatten();
        self.mlp_in.wanted(sink)
            || self.down_proj.wanted(sink)
            || self.experts.as_ref().is_some_and(|experts| experts.wanted(sink))
            || norms.any(|norm| norm.wanted(sink))
    }

    /// Maps `dy` `[N, D]` to `∂x` through the MLP if needed; passes weight gradients to `sink`. Recomputes `parts` if
    /// empty.
    pub(super) fn mlp_backward(&self, gradient: MlpGradient<'_>, sink: &mut dyn GradSink) -> Result<Option<Tensor>> {
        if let Some(experts) = &self.experts {
            return self.experts_half_backward(experts, gradient, sink);
        }
        let MlpGradient {
            x,
            saved,
            dy,
            ctx,
            need_dx,
        } = gradient;
        let post_wanted = self.mlp_post_norm.as_ref().is_some_and(|norm| norm.wanted(sink));
        let dh = need_dx || self.mlp_norm.as_ref().is_some_and(|norm| norm.wanted(sink));
        let needs = MlpNeeds {
            inputs: self.mlp_in.wanted(sink),
            down: self.down_proj.wanted(sink),
            dh,
        };
        if !needs.dm() && !needs.down && !post_wanted {
            return Ok(None);
        }
        let all = pieces(x.dims()[0], ctx.mlp_tokens);
        let mut saved = saved.pieces.into_iter();
        let dh = if all.len() == 1 {
            self.mlp_piece_backward(x, saved.next(), dy, ctx, needs, sink)?
        } else {
            let zeros = || update::zeros(x.shape(), x.dtype(), x.device());
            let dh = needs.dh.then(zeros).transpose()?;
            let mut sums = GradientSums::new(sink);
            for (i, piece) in all.iter().enumerate() {
                let (x, dy) = (rows(x, piece)?, rows(dy, piece)?);
                let part = self.mlp_piece_backward(&x, saved.next(), &dy, &ctx.piece(i), needs, &mut sums)?;
                if let (Some(dh), Some(part)) = (&dh, part) {
                    dh.slice_set(&part, 0, piece.start)?;
                }
            }
            sums.finish()?;
            dh
        };
        let Some(dh) = dh else { return Ok(None) };
        let past = (!self.spec.parallel).then_some(dy);
        let dx = self.normed_backward(&self.mlp_norm, x, dh, past, sink)?;
        Ok(need_dx.then_some(dx))
    }

    /// Returns the gradient with respect to h, the output of the norm, if it is needed.
    fn mlp_piece_backward(
        &self,
        x: &Tensor,
        saved: Option<SavedPiece>,
        dy: &Tensor,
        ctx: &Context,
        needs: MlpNeeds,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let h = if needs.inputs || saved.is_none() {
            Some(self.normed(&self.mlp_norm, x)?)
        } else {
            None
        };
        let (parts, low_in, low_out) = match (saved, &h) {
            (Some(SavedPiece { parts, low: [a, b] }), _) => (parts, a, b),
            (None, Some(h)) => {
                let (parts, low) = self.mlp_in.forward(h, ctx)?;
                (parts, low, None)
            }
            (None, None) => return Ok(None),
        };
        let h = h.filter(|_| needs.inputs);
        let m = if needs.down || self.mlp_post_norm.is_some() {
            Some(self.activated(&parts)?)
        } else {
            None
        };
        let (d_down, low_out) = match (&self.mlp_post_norm, &m) {
            (Some(norm), Some(m)) => {
                let (y, low_out) = self.down_proj.forward_one(m, ctx)?;
                (self.norm_backward(norm, &y, dy, sink)?, low_out)
            }
            _ => (self.scaled_gradient(dy)?, low_out),
        };
        let dm = self
            .down_proj
            .backward(m.as_ref(), low_out, vec![d_down], ctx, needs.dm(), sink)?;
        drop(m);
        let Some(dm) = dm else { return Ok(None) };
        let d_parts = self.activated_backward(parts, &dm)?;
        drop(dm);
        self.mlp_in.backward(h.as_ref(), low_in, d_parts, ctx, needs.dh, sink)
    }
}
