//! A mixture of experts in the place of the MLP: `y = Σ w_e · expert_e(h)` over the experts that the router chooses for a
//! token, plus the shared expert. An expert is `down_proj(act(gate_proj(h)) · up_proj(h))`.
//!
//! The weight of an expert multiplies the input of its down_proj, which is linear. So the gradient of the weight is a
//! product of two tensors that the backward pass has anyway, and the output of an expert is never needed again.
//!
//! Experts are computed one by one on the rows of their tokens, in ascending order, so every sum has a fixed order. An expert
//! without tokens is not computed; its parameters get gradients of zeros, as those of a fused tensor do.
//!
//! Letters: N tokens, n tokens of an expert, D hidden size, I intermediate size of an expert, E experts.

pub(super) mod adapters;
mod bias;
mod grouped;
pub(super) mod memory;

use adapters::JoinedAdapters;

use super::block::Block;
use super::contracts::{Context, GradSink, Param};
use super::linear::Linear;
use super::mlp::SavedPiece;
use super::network::param;
use super::projections::Projections;
use super::spec::ExpertsSpec;
use crate::base::{Error, Result};
use crate::ops::routing::{self, Assignment, Routing};
use crate::ops::{linear, update};
use crate::source::GroupWeights;
use candle_core::{DType, Tensor};

/// The weights of a mixture of experts.
pub struct Experts {
    sizes: ExpertsSpec,
    /// `[E, D]`; of a router of two levels `[E+G, D]`
    router: Param,
    /// `[E]`
    router_bias: Option<Param>,
    /// `[E]`
    correction: Option<Tensor>,
    experts: Vec<Expert>,
    /// The adapters on the parameters of all experts.
    joined: JoinedAdapters,
    /// Weight of the factor of the shared expert's output, `[1, D]`.
    shared_gate: Option<Param>,
}

/// One expert.
struct Expert {
    /// gate and up.
    inputs: Projections,
    down: Projections,
    /// `[D]`
    down_bias: Option<Param>,
}

/// Saved activations of a mixture of experts.
pub(super) struct SavedExperts {
    routing: Routing,
    assignment: Assignment,
    /// For each unit of the assignment; `None`: it has no tokens.
    experts: Vec<Option<SavedPiece>>,
    shared: Option<SavedPiece>,
}

/// What the backward pass of an expert must compute, and with which batch.
#[derive(Clone, Copy)]
struct Needs<'a> {
    ctx: &'a Context<'a>,
    /// The gradient with respect to the expert's input.
    dh: bool,
    /// The gradient of the weights of the tokens.
    weights: bool,
}

impl Experts {
    /// Reads the router and the experts of layer `index`; `linear` reads a linear by its name below the layer, `joined` has
    /// the adapters on the parameters of all experts.
    pub(super) fn read(
        sizes: ExpertsSpec,
        weights: &GroupWeights,
        index: usize,
        linear: &dyn Fn(&str, bool) -> Result<Linear>,
        joined: JoinedAdapters,
    ) -> Result<Self> {
        let named = |name: &str| param(weights, &format!("model.layers.{index}.{name}"));
        let bias = |of: String| sizes.bias.then(|| named(&format!("{of}.bias"))).transpose();
        let expert = |e: usize| {
            let projections = |which: &[usize], bias: bool| {
                let linears = which.iter().map(|&p| {
                    let mut linear = linear(&sizes.linear_name(e, p), bias)?;
                    joined.place(&mut linear, e, p)?;
                    Ok::<_, Error>(linear)
                });
                Ok::<_, Error>(Projections::separate(linears.collect::<Result<_>>()?))
            };
            Ok(Expert {
                inputs: projections(&[0, 1], sizes.bias)?,
                down: projections(&[2], false)?,
                down_bias: bias(sizes.linear_name(e, 2))?,
            })
        };
        let correction = sizes.correction.then(|| named(&sizes.correction_name())).transpose()?;
        let gate = sizes.shared.and_then(|s| s.gate);
        Ok(Self {
            sizes,
            router: named(&sizes.router_name())?,
            router_bias: bias(sizes.names.router.to_string())?,
            correction: correction.map(|c| c.tensor),
            experts: (0..sizes.count).map(expert).collect::<Result<_>>()?,
            joined,
            shared_gate: gate.map(|gate| named(&format!("{gate}.weight"))).transpose()?,
        })
    }

    /// The linears of all experts, in model order.
    pub(super) fn into_linears(self) -> impl Iterator<Item = Linear> {
        let all = self.experts.into_iter().flat_map(|e| [e.inputs, e.down]);
        all.flat_map(Projections::into_linears)
    }

    /// True if any parameter gets a gradient.
    pub(super) fn wanted(&self, sink: &dyn GradSink) -> bool {
        let expert = |e: &Expert| e.inputs.wanted(sink) || e.down.wanted(sink) || wants(&e.down_bias, sink);
        self.router_wanted(sink) || self.joined.wanted(sink) || self.experts.iter().any(expert)
    }

    fn router_wanted(&self, sink: &dyn GradSink) -> bool {
        sink.wants(&self.router.name) || wants(&self.router_bias, sink) || wants(&self.shared_gate, sink)
    }

    fn route(&self, h: &Tensor) -> Result<Routing> {
        let bias = self.router_bias.as_ref().map(|bias| &bias.tensor);
        let logits = linear::forward_f32(h, &self.router.tensor, bias)?;
        let routed = self.sizes.router.route(&logits, self.correction.as_ref());
        routed.map_err(|e| e.or_at(&*self.router.name))
    }

    /// The factors of the shared expert's output, f32 `[N]`.
    fn shared_factors(&self, h: &Tensor) -> Result<Option<Tensor>> {
        let Some(gate) = &self.shared_gate else { return Ok(None) };
        Ok(Some(routing::gates(&linear::forward_f32(h, &gate.tensor, None)?)?))
    }
}

fn wants(param: &Option<Param>, sink: &dyn GradSink) -> bool {
    param.as_ref().is_some_and(|param| sink.wants(&param.name))
}

/// Adds the gradient of a small matrix that reads `h`: `dz` `[N, O]` f32, `weight` `[O, D]`. `dh` comes first. On a GPU `dz`
/// gets the type of `h`.
fn project_backward(
    weight: &Param,
    h: &Tensor,
    dz: &Tensor,
    dh: Option<&Tensor>,
    sink: &mut dyn GradSink,
) -> Result<()> {
    let dz = &dz.to_dtype(h.dtype())?;
    if let Some(dh) = dh {
        linear::backward_input_add(dh, dz, &weight.tensor)?;
    }
    if !sink.wants(&weight.name) {
        return Ok(());
    }
    match sink.sum(&weight.name) {
        Some(sum) => linear::grad_weight_add(&sum, dz, h, weight.tensor.dtype()),
        None => sink.take(weight, linear::grad_weight(dz, h, weight.tensor.dtype())?),
    }
}

impl Block {
    /// The experts' sum for h, the input after the norm, without the residual stream: `[N, D]` to `[N, D]`.
    pub(super) fn experts_forward(
        &self,
        experts: &Experts,
        h: &Tensor,
        ctx: &Context,
        keep: bool,
    ) -> Result<(Tensor, Option<SavedExperts>)> {
        let routing = experts.route(h)?;
        ctx.shared.routed(self.index, &routing);
        let mut y = None;
        let mut shared = None;
        if experts.sizes.shared.is_some() {
            let factors = experts.shared_factors(h)?;
            let (part, saved) = self.expert_forward(&self.mlp_in, &self.down_proj, h, factors.as_ref(), ctx, keep)?;
            (y, shared) = (Some(part), saved);
        }
        let y = match y {
            Some(y) => y,
            None => update::zeros(h.shape(), h.dtype(), h.device())?,
        };
        let assignment = routing.assign(h.device(), experts.together(h, ctx))?;
        let mut saved = Vec::new();
        for unit in assignment.units() {
            let Some(of) = assignment.of(unit.clone())? else {
                saved.push(None);
                continue;
            };
            let rows = of.gather(h)?;
            let (part, kept) = match &experts.experts[unit] {
                [expert] => {
                    let weights = Some(&of.weights);
                    let (part, kept) = self.expert_forward(&expert.inputs, &expert.down, &rows, weights, ctx, keep)?;
                    if let Some(b) = &expert.down_bias {
                        bias::add(b, &part, &of.weights)?;
                    }
                    (part, kept)
                }
                group => self.group_forward(group, &of, &rows, keep)?,
            };
            drop(rows);
            of.add_to(&y, &part)?;
            saved.push(kept);
        }
        let saved = keep.then_some(SavedExperts {
            routing,
            assignment,
            experts: saved,
            shared,
        });
        Ok((y, saved))
    }

    /// One expert on rows `[n, D]`, each output multiplied with its weight, f32 `[n]`.
    fn expert_forward(
        &self,
        inputs: &Projections,
        down: &Projections,
        rows: &Tensor,
        weights: Option<&Tensor>,
        ctx: &Context,
        keep: bool,
    ) -> Result<(Tensor, Option<SavedPiece>)> {
        let (parts, low_in) = inputs.forward(rows, ctx)?;
        let m = self.activated(&parts)?;
        let parts = keep.then_some((parts, low_in));
        if let Some(weights) = weights {
            routing::scale_rows(&m, weights)?;
        }
        let (y, low_out) = down.forward_one(&m, ctx)?;
        Ok((
            y,
            parts.map(|(parts, low_in)| SavedPiece::new(parts, [low_in, low_out])),
        ))
    }

    /// Maps `dy` `[N, D]` to `∂h`, if it is needed; passes gradients to `sink`. Computes again what was not saved.
    pub(super) fn experts_backward(
        &self,
        experts: &Experts,
        (h, saved): (&Tensor, Option<SavedExperts>),
        dy: &Tensor,
        ctx: &Context,
        need_dh: bool,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let mut sink = experts.joined.sink(sink);
        let dh = self.routed_backward(experts, (h, saved), dy, (ctx, need_dh), &mut sink)?;
        sink.finish()?;
        Ok(dh)
    }

    /// As `experts_backward`; the gradients of adapters are those of each expert.
    fn routed_backward(
        &self,
        experts: &Experts,
        (h, saved): (&Tensor, Option<SavedExperts>),
        dy: &Tensor,
        (ctx, need_dh): (&Context, bool),
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let (routing, assignment, saved, saved_shared) = match saved {
            Some(saved) => (saved.routing, saved.assignment, saved.experts, saved.shared),
            None => {
                let routing = experts.route(h)?;
                let assignment = routing.assign(h.device(), experts.together(h, ctx))?;
                (routing, assignment, Vec::new(), None)
            }
        };
        let needs = Needs {
            ctx,
            dh: need_dh,
            weights: need_dh || experts.router_wanted(sink),
        };
        let mut dh = None;
        if experts.sizes.shared.is_some() {
            let factors = experts.shared_factors(h)?;
            let linears = (&self.mlp_in, &self.down_proj);
            let zeros = |g: &Tensor| update::zeros(g.shape(), g.dtype(), g.device());
            let d = factors.as_ref().filter(|_| needs.weights).map(zeros).transpose()?;
            let tokens = (h, factors.as_ref(), d.as_ref());
            let part = self.expert_backward(linears, tokens, saved_shared, dy, needs, sink)?;
            if let (Some(gate), Some(g), Some(d)) = (&experts.shared_gate, factors, d) {
                routing::gates_backward(&g, &d)?;
                let dz = d.reshape((g.dim(0)?, 1))?;
                project_backward(gate, h, &dz, part.as_ref(), sink)?;
            }
            dh = part;
        }
        if need_dh && dh.is_none() {
            dh = Some(update::zeros(h.shape(), h.dtype(), h.device())?);
        }
        let d_weights = needs.weights.then(|| assignment.numbers()).transpose()?;
        let mut saved = saved.into_iter();
        for unit in assignment.units() {
            let kept = saved.next().flatten();
            let group = &experts.experts[unit.clone()];
            let Some(of) = assignment.of(unit)? else {
                group.iter().try_for_each(|expert| zero_gradients(expert, sink))?;
                continue;
            };
            let rows = of.gather(h)?;
            let dy = of.gather(dy)?;
            let d_own = d_weights.as_ref().map(|all| of.part(all)).transpose()?;
            let part = match group {
                [expert] => {
                    let linears = (&expert.inputs, &expert.down);
                    let tokens = (&rows, Some(&of.weights), d_own.as_ref());
                    let part = self.expert_backward(linears, tokens, kept, &dy, needs, sink)?;
                    if let Some(b) = &expert.down_bias {
                        bias::backward(b, &dy, &of.weights, d_own.as_ref(), sink)?;
                    }
                    part
                }
                group => self.group_backward(group, (&of, &rows, d_own.as_ref()), kept, &dy, needs, sink)?,
            };
            if let (Some(dh), Some(part)) = (&dh, part) {
                of.add_to(dh, &part)?;
            }
        }
        if let Some(d_weights) = d_weights {
            let dz = routing.backward(&d_weights, &ctx.shared.router_gradient())?;
            let dz = dz.to_device(h.device())?;
            project_backward(&experts.router, h, &dz, dh.as_ref(), sink)?;
            if let Some(b) = &experts.router_bias {
                bias::of_router(b, &dz, sink)?;
            }
        }
        Ok(dh)
    }

    /// The gradient of one expert with respect to its rows `[n, D]`, if it is needed; that with respect to their weights is
    /// stored in the third of the tokens, f32 `[n]`.
    fn expert_backward(
        &self,
        (inputs, down): (&Projections, &Projections),
        (rows, weights, d_weights): (&Tensor, Option<&Tensor>, Option<&Tensor>),
        saved: Option<SavedPiece>,
        dy: &Tensor,
        needs: Needs<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let ctx = needs.ctx;
        let inputs_wanted = inputs.wanted(sink);
        let need_dm = needs.dh || needs.weights || inputs_wanted;
        if !need_dm && !down.wanted(sink) {
            return Ok(None);
        }
        let (parts, low_in, low_out) = match saved.map(SavedPiece::into_parts) {
            Some((parts, [a, b])) => (parts, a, b),
            None => {
                let (parts, low) = inputs.forward(rows, ctx)?;
                (parts, low, None)
            }
        };
        let m = self.activated(&parts)?;
        let scaled = match weights {
            Some(weights) if down.wanted(sink) => {
                let scaled = m.copy()?;
                routing::scale_rows(&scaled, weights)?;
                Some(scaled)
            }
            Some(_) => None,
            None => Some(m.clone()),
        };
        let dm = down.backward(scaled.as_ref(), low_out, vec![dy.clone()], ctx, need_dm, sink)?;
        drop(scaled);
        let Some(dm) = dm else { return Ok(None) };
        if let Some(d_weights) = d_weights {
            routing::row_products(&dm, &m, d_weights)?;
        }
        if let Some(weights) = weights {
            routing::scale_rows(&dm, weights)?;
        }
        drop(m);
        if !needs.dh && !inputs_wanted {
            return Ok(None);
        }
        let d_parts = self.activated_backward(parts, &dm)?;
        drop(dm);
        let x = inputs_wanted.then_some(rows);
        inputs.backward(x, low_in, d_parts, ctx, needs.dh, sink)
    }
}

/// The gradients of an expert without tokens.
fn zero_gradients(expert: &Expert, sink: &mut dyn GradSink) -> Result<()> {
    let zeros = |param: &Param, sink: &mut dyn GradSink| {
        let zeros = update::zeros(param.tensor.shape(), DType::F32, param.tensor.device())?;
        sink.take(param, zeros)
    };
    let linears = [&expert.inputs, &expert.down].map(Projections::linears);
    for l in linears.into_iter().flatten() {
        if sink.wants(&l.name) && sink.sum(&l.name).is_none() {
            let tensor = l.weight.dense().map_err(|e| e.or_at(&*l.name))?.clone();
            let name = l.name.clone();
            zeros(&Param { name, tensor }, sink)?;
        }
    }
    let biases = linears.into_iter().flatten().filter_map(|l| l.bias.as_ref());
    for bias in biases.chain(&expert.down_bias) {
        if sink.wants(&bias.name) {
            zeros(bias, sink)?;
        }
    }
    Ok(())
}
