//! A layer whose tokens have several streams (AltUp, Gemma 3n). It reads and writes rows of A·D elements, so that for the
//! engine it is a layer like any other; inside, the two halves of `DecoderBlock` compute the active stream.
//!
//! ```text
//! p  = predicted streams of x,      c = prediction_coefs(router(x_a))
//! x1 = Laurel of p_a + attention(p_a),      x2 = x1 + MLP(x1)
//! q  = p corrected with x2,      f = correction_coefs(router(x2)) + 1
//! y  = q, where the per-layer part of (s · q_a) is added to all streams but stream 0
//! router(h) = tanh(modality_router(norm(h) / D))
//! ```
//!
//! Letters: A streams, a the active one, D width of a stream; `ops::altup` has the formulas.

mod memory;

use super::{DecoderBlock, MixerGradient, SavedActivations};
use crate::base::{Error, Result};
use crate::model::contracts::{Context, GradSink, KvStore, Param};
use crate::model::linear::{Dx, Linear};
use crate::model::mlp::MlpGradient;
use crate::model::named_sums::NamedSums;
use crate::model::norm::Norm;
use crate::model::spec::AltUpSpec;
use crate::ops::{altup, linear, update};
use candle_core::Tensor;

/// The piece of tokens (`Context::piece`) whose dropout masks the second use of the router has: no MLP has as many.
const SECOND: usize = 1 << 31;

/// The weights of AltUp in a layer.
pub struct AltUp {
    /// A, and the active stream.
    pub streams: AltUpSpec,
    /// `[A, D]`
    pub router: Linear,
    /// The norm before the router, with the factor 1 / D.
    pub norm: Norm,
    /// `[A², A]`
    pub prediction: Linear,
    /// `[A, A]`
    pub correction: Linear,
    /// s `[D]`
    pub scale: Param,
}

/// Gradients of the router and its adapter, which a layer uses twice: a sink gets the sums after the last use.
struct RouterSums {
    wanted: Vec<String>,
    sums: NamedSums,
}

impl RouterSums {
    fn new(altup: &AltUp, sink: &dyn GradSink) -> Self {
        let adapter = altup.router.adapter.iter().flat_map(|a| a.parts());
        let names = [altup.router.name.clone()].into_iter();
        let names = names.chain(altup.norm.weight.iter().map(|p| p.name.clone()));
        let names = names.chain(adapter.map(|p| p.name)).map(|name| name.to_string());
        Self {
            wanted: names.filter(|name| sink.wants(name)).collect(),
            sums: NamedSums::default(),
        }
    }

    fn finish(mut self, sink: &mut dyn GradSink) -> Result<()> {
        while let Some((param, sum)) = self.sums.pop_first() {
            sink.take(&param, sum)?;
        }
        Ok(())
    }
}

/// The gradient of the input `[N, I]` of a linear, from that of its output, `dy` `[N, O]`; `x` as for `Linear::backward`.
fn input_gradient(
    linear: &Linear,
    x: Option<&Tensor>,
    dy: &Tensor,
    ctx: &Context,
    sink: &mut dyn GradSink,
) -> Result<Tensor> {
    let dx = linear.backward(x, dy, ctx, Dx::New, sink)?;
    dx.ok_or_else(|| Error::internal("a linear has no input gradient"))
}

impl GradSink for RouterSums {
    fn wants(&self, name: &str) -> bool {
        self.wanted.iter().any(|wanted| wanted == name)
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        self.sums.add(param, gradient)
    }
}

impl AltUp {
    fn active(&self) -> std::ops::Range<usize> {
        self.streams.active..self.streams.active + 1
    }

    /// The context of the second use of the router, whose adapter has other dropout masks there, as in PEFT.
    fn second<'a>(&self, ctx: &'a Context) -> Context<'a> {
        ctx.piece(SECOND)
    }

    /// True if a parameter that the predictions need gets a gradient.
    fn predicts(&self, sink: &dyn GradSink) -> bool {
        self.norm.wanted(sink) || self.router.wanted(sink) || self.prediction.wanted(sink)
    }

    /// transformers clips the coefficients in training; ft does not, so it refuses those that would change.
    fn check_clip(&self) -> Result<()> {
        let Some(clip) = self.streams.clip else { return Ok(()) };
        // As there, of the weight without its adapter.
        for linear in [&self.prediction, &self.correction] {
            let values = update::to_f32_vec(linear.weight.dense()?)?;
            if let Some(found) = values.into_iter().find(|x| x.abs() > clip) {
                return Err(Error::unsupported(
                    "training with a coefficient beyond `altup_coef_clip` is not supported",
                )
                .at(&*linear.name)
                .found(found)
                .expected(format!("at most {clip}, or a larger limit in `config.json`")));
            }
        }
        Ok(())
    }
}

impl DecoderBlock {
    /// The router: from `[N, D]` to `[N, A]`.
    fn router(&self, altup: &AltUp, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        let h = self.norm(&altup.norm, x)?;
        Ok(altup.router.forward(&h, ctx)?.tanh()?)
    }

    /// Backward of `router` from its output r and the gradient `dr`, `[N, A]` each: returns the gradient of x, `[N, D]`.
    fn router_backward(
        &self,
        altup: &AltUp,
        x: &Tensor,
        r: &Tensor,
        dr: &Tensor,
        ctx: &Context,
        sums: &mut RouterSums,
    ) -> Result<Tensor> {
        let dt = (dr * r.sqr()?.affine(-1.0, 1.0)?)?;
        let h = if altup.router.wanted(&*sums) {
            Some(self.norm(&altup.norm, x)?)
        } else {
            None
        };
        let dh = input_gradient(&altup.router, h.as_ref(), &dt, ctx, sums)?;
        self.norm_backward(&altup.norm, x, &dh, sums)
    }

    /// The active stream of x `[N, A·D]`, the output of the router for it `[N, A]`, and the coefficients `[N, A²]`.
    fn coefficients(&self, altup: &AltUp, x: &Tensor, ctx: &Context) -> Result<(Tensor, Tensor, Tensor)> {
        let own = altup::sum(x, altup.streams.count, altup.active(), 1.0)?;
        let r = self.router(altup, &own, ctx)?;
        let c = altup.prediction.forward(&r, ctx)?;
        Ok((own, r, c))
    }

    /// The output of the router for x2 `[N, D]`, and the factors of the correction, `[N, A]` each.
    fn factors(&self, altup: &AltUp, x2: &Tensor, ctx: &Context) -> Result<(Tensor, Tensor)> {
        let ctx = altup.second(ctx);
        let r = self.router(altup, x2, &ctx)?;
        let f = altup.correction.forward(&r, &ctx)?;
        Ok((r, f.affine(1.0, 1.0)?))
    }

    /// From the streams x `[N, A·D]` to the streams of the next layer, with the KV cache of earlier tokens if there is one;
    /// also the activations to save if `keep`.
    pub(super) fn altup_forward(
        &self,
        altup: &AltUp,
        x: &Tensor,
        ctx: &Context,
        cache: Option<&mut dyn KvStore>,
        keep: bool,
    ) -> Result<(Tensor, Option<SavedActivations>)> {
        let AltUpSpec { count, active, .. } = altup.streams;
        let c = self.coefficients(altup, x, ctx)?.2;
        let own = altup::predict_one(x, &c, count, active)?;
        let decodes = cache.is_some();
        let (x1, mixer) = self.mixer(&own, ctx, cache)?;
        if !decodes {
            self.share(&mixer, ctx);
        }
        let mixer = keep.then_some(mixer);
        self.laurel_assign(&own, &x1, ctx)?;
        drop(own);
        let (x2, parts) = self.mlp(&x1, &x1, ctx, keep)?;
        let x1 = keep.then_some(x1);
        let f = self.factors(altup, &x2, ctx)?.1;
        let y = altup::predict(x, &c, count)?;
        altup::correct_assign(&y, &x2, &f, active)?;
        if let Some(p) = &self.per_layer {
            let scale = altup.scale.tensor.to_dtype(y.dtype())?;
            let read = altup::sum(&y, count, altup.active(), 1.0)?.broadcast_mul(&scale)?;
            altup::add_to(&y, &self.per_layer_forward(p, &read, ctx)?, 1..count)?;
        }
        let saved = mixer.map(|mixer| SavedActivations {
            mixer,
            x1,
            parts,
            x2: Some(x2),
        });
        Ok((y, saved))
    }

    fn with_streams(&self) -> Result<&AltUp> {
        let missing = || Error::internal("a layer with one residual stream has no AltUp");
        self.altup.as_ref().ok_or_else(missing)
    }

    /// From the gradients `dy` `[N, A·D]` of the output to the gradient of x2 `[N, D]`; `dy` become those of the predictions.
    /// `own`: the predicted active stream, `[N, D]`.
    fn corrected_backward(
        &self,
        own: &Tensor,
        x2: &Tensor,
        dy: &Tensor,
        ctx: &Context,
        sums: &mut RouterSums,
        sink: &mut dyn GradSink,
    ) -> Result<Tensor> {
        let altup = self.with_streams()?;
        let AltUpSpec { count, active, .. } = altup.streams;
        let (r, f) = self.factors(altup, x2, ctx)?;
        if let Some(p) = &self.per_layer {
            let corrected = altup::corrected(own, x2, &f, active)?;
            let scale = altup.scale.tensor.to_dtype(corrected.dtype())?;
            let read = corrected.broadcast_mul(&scale)?;
            let dz = altup::sum(dy, count, 1..count, 1.0)?;
            if let Some(d) = self.per_layer_part_backward(p, &read, &dz, ctx, true, sink)? {
                drop((read, dz));
                altup::add_to(dy, &d.broadcast_mul(&scale)?, altup.active())?;
                if sink.wants(&altup.scale.name) {
                    sink.take(&altup.scale, linear::grad_bias(&(d * corrected)?)?)?;
                }
            }
        }
        let (dx2, df) = altup::correct_backward(dy, own, x2, &f, active)?;
        let ctx = altup.second(ctx);
        let dr = input_gradient(&altup.correction, Some(&r), &df, &ctx, sink)?;
        update::add_assign(&dx2, &self.router_backward(altup, x2, &r, &dr, &ctx, sums)?)?;
        Ok(dx2)
    }

    /// As `Layer::vjp`.
    pub(super) fn altup_vjp(
        &self,
        x: &Tensor,
        saved: Option<SavedActivations>,
        dy: Tensor,
        ctx: &Context,
        need_dx: bool,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let altup = self.with_streams()?;
        altup.check_clip()?;
        let AltUpSpec { count, active, .. } = altup.streams;
        let (read, r, c) = self.coefficients(altup, x, ctx)?;
        let own = altup::predict_one(x, &c, count, active)?;
        let SavedActivations { mixer, x1, parts, x2 } = match saved {
            Some(saved) => saved,
            None => {
                let (x1, mixer) = self.mixer(&own, ctx, None)?;
                self.laurel_assign(&own, &x1, ctx)?;
                let (x2, parts) = self.mlp(&x1, &x1, ctx, true)?;
                let (x1, x2) = (Some(x1), Some(x2));
                SavedActivations { mixer, x1, parts, x2 }
            }
        };
        let (Some(x1), Some(x2)) = (x1, x2) else {
            return Err(Error::internal("the saved activations belong to another layer"));
        };
        let need_own = need_dx || altup.predicts(sink);
        let laurel_wanted = self.laurel.as_ref().is_some_and(|laurel| laurel.wanted(sink));
        let mixer_needed = need_own || laurel_wanted || self.mixer_wanted(sink);
        let mixer = mixer_needed.then_some(mixer);
        let mut sums = RouterSums::new(altup, sink);
        let dx2 = self.corrected_backward(&own, &x2, &dy, ctx, &mut sums, sink)?;
        drop(x2);
        let gradient = MlpGradient {
            x: &x1,
            saved: parts,
            dy: &dx2,
            ctx,
            need_dx: mixer_needed,
        };
        let dx1 = self.mlp_backward(gradient, sink)?;
        drop((x1, dx2));
        let mut d_own = None;
        if let (Some(mixer), Some(dx1)) = (mixer, dx1) {
            let need_dh = need_own || self.input_norm.as_ref().is_some_and(|norm| norm.wanted(sink));
            let d_shared = self.laurel_backward(&own, &dx1, ctx, need_dh, sink)?;
            let gradient = MixerGradient {
                x: &own,
                dx1,
                d_shared,
                ctx,
                need_dx: need_own,
            };
            d_own = self.mixer_backward(mixer, gradient, sink)?;
        }
        drop(own);
        let Some(d_own) = d_own else {
            sums.finish(sink)?;
            return Ok(None);
        };
        altup::add_to(&dy, &d_own, altup.active())?;
        drop(d_own);
        let dc = altup::predict_backward(x, &c, &dy, count)?;
        let dr = input_gradient(&altup.prediction, Some(&r), &dc, ctx, sink)?;
        let d_read = self.router_backward(altup, &read, &r, &dr, ctx, &mut sums)?;
        altup::add_to(&dy, &d_read, altup.active())?;
        sums.finish(sink)?;
        Ok(need_dx.then_some(dy))
    }
}
