//! A mixture of experts in the place of the MLP: `y = Σ w_e · expert_e(h)` over the experts that the router chooses for a
//! token, plus the shared expert. An expert is `down_proj(act(gate_proj(h)) · up_proj(h))`.
//!
//! The weight of an expert multiplies the input of its down_proj, which is linear. So the gradient of the weight is a
//! product of two tensors that the backward pass has anyway, and the output of an expert is never needed again.
//!
//! Experts are computed one by one on the rows of their tokens, in ascending order, so every sum has a fixed order. The weights
//! of an expert are fetched when it is computed (`reader`). An expert without tokens is not computed, and not fetched unless it
//! is trained; its parameters get gradients of zeros, as those of a fused tensor do. On a GPU experts that are all there
//! are computed together (`grouped`). Ranks may divide the experts (`ranks`).
//!
//! Letters: N tokens, n tokens of an expert, D hidden size, I intermediate size of an expert, E experts.

pub(super) mod adapters;
mod bias;
mod grouped;
mod in_order;
pub(super) mod memory;
mod ranks;
pub(super) mod reader;

pub use ranks::expert_words;

use adapters::JoinedSink;
use in_order::InOrder;
use reader::{Expert, ExpertReader};

use super::block::DecoderBlock;
use super::contracts::{Context, GradSink, Param};
use super::mlp::SavedPiece;
use super::network::param;
use super::projections::Projections;
use super::spec::ExpertsSpec;
use crate::base::Result;
use crate::ops::routing::{self, ExpertAssignment, Routing};
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
    reader: ExpertReader,
    /// Weight of the factor of the shared expert's output, `[1, D]`.
    shared_gate: Option<Param>,
}

/// The routing of a mixture of experts, and its saved activations if they were saved.
pub(super) struct SavedExperts {
    routing: Routing,
    assignment: ExpertAssignment,
    /// The saved activations of each unit of the assignment; `None`: nothing is saved of it.
    experts: Vec<Option<SavedPiece>>,
    shared: Option<SavedPiece>,
}

/// The gradients that the backward pass of an expert must compute, and the batch.
#[derive(Clone, Copy)]
struct ExpertGradientNeeds<'a> {
    ctx: &'a Context<'a>,
    /// The gradient with respect to the expert's input.
    dh: bool,
    /// The gradient of the weights of the tokens.
    weights: bool,
}

/// The inputs of the backward pass of the experts of a layer.
pub(super) struct ExpertsGradient<'a> {
    /// The input of the forward pass, `[N, D]`.
    pub h: &'a Tensor,
    /// The activations of the forward pass; `None`: they are computed again.
    pub saved: Option<SavedExperts>,
    /// The gradient of the output, `[N, D]`.
    pub dy: &'a Tensor,
    pub ctx: &'a Context<'a>,
    /// The gradient of h is needed.
    pub need_dh: bool,
}

/// The rows of one expert, of a unit of experts, or of the shared expert.
#[derive(Clone, Copy)]
struct ExpertTokens<'a> {
    /// `[n, D]`
    rows: &'a Tensor,
    /// The factors of the outputs, f32 `[n]`.
    weights: Option<&'a Tensor>,
    /// Receives the gradient of the factors, f32 `[n]`.
    d_weights: Option<&'a Tensor>,
    /// The gradient of the outputs, `[n, D]`.
    dy: &'a Tensor,
}

impl Experts {
    /// Reads the router of the layer of `reader`; the experts are read when they are needed.
    pub(super) fn read(weights: &GroupWeights, reader: ExpertReader) -> Result<Self> {
        let (sizes, index) = (reader.sizes, reader.index);
        let named = |name: &str| param(weights, &format!("model.layers.{index}.{name}"));
        let router_bias = sizes.bias.then(|| named(&format!("{}.bias", sizes.names.router)));
        let correction = sizes.correction.then(|| named(&sizes.correction_name())).transpose()?;
        let gate = sizes.shared.and_then(|s| s.gate);
        Ok(Self {
            sizes,
            router: named(&sizes.router_name())?,
            router_bias: router_bias.transpose()?,
            correction: correction.map(|c| c.tensor.flatten_all()).transpose()?,
            reader,
            shared_gate: gate.map(|gate| named(&format!("{gate}.weight"))).transpose()?,
        })
    }

    /// True if any parameter gets a gradient.
    pub(super) fn wanted(&self, sink: &dyn GradSink) -> bool {
        self.router_wanted(sink)
            || self.reader.joined.wanted(sink)
            || (0..self.sizes.count).any(|e| self.reader.wanted(e, sink))
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

impl DecoderBlock {
    /// The experts' sum for h, the input after the norm, without the residual stream: `[N, D]` to `[N, D]`.
    pub(super) fn experts_forward(
        &self,
        experts: &Experts,
        h: &Tensor,
        ctx: &Context,
        keep: bool,
    ) -> Result<(Tensor, Option<SavedExperts>)> {
        let (y, saved) = self.experts_of(experts, h, ctx, keep, true)?;
        Ok((y, keep.then_some(saved)))
    }

    /// The output of `experts_forward` again, in the backward pass; with the routing, which that needs too.
    pub(super) fn experts_again(&self, experts: &Experts, h: &Tensor, ctx: &Context) -> Result<(Tensor, SavedExperts)> {
        self.experts_of(experts, h, ctx, false, false)
    }

    /// `keep`: saves activations; `record_load`: adds the routing to the statistics of the routers.
    fn experts_of(
        &self,
        experts: &Experts,
        h: &Tensor,
        ctx: &Context,
        keep: bool,
        record_load: bool,
    ) -> Result<(Tensor, SavedExperts)> {
        // The host waits for the router: the experts are prepared before, the load is counted afterwards.
        let together = experts.together(h, ctx)?;
        let routing = experts.route(h)?;
        let used: Vec<usize> = used(&routing).collect();
        if together.is_none() {
            experts.reader.expect(&used);
        }
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
        let assignment = routing.assign(h.device(), together.is_some())?;
        let mut saved = Vec::new();
        let ranks = experts.ranks()?;
        if let Some(ranks) = ranks {
            self.forward_over_ranks(experts, ranks, h, &y, &assignment, ctx)?;
        }
        for unit in assignment.units().into_iter().filter(|_| ranks.is_none()) {
            let Some(of) = assignment.of(unit.clone())? else {
                saved.push(None);
                continue;
            };
            let rows = of.gather(h)?;
            let (part, kept) = match &together {
                Some(all) if unit.len() > 1 => self.group_forward(all.group(unit), &of, &rows, keep)?,
                _ => {
                    let own;
                    let expert = match &together {
                        Some(all) => &all.experts[unit.start],
                        None => {
                            own = experts.reader.read(unit.start)?;
                            &own
                        }
                    };
                    let weights = Some(&of.weights);
                    let (part, kept) = self.expert_forward(&expert.inputs, &expert.down, &rows, weights, ctx, keep)?;
                    if let Some(b) = &expert.down_bias {
                        bias::add(b, &part, &of.weights)?;
                    }
                    (part, kept)
                }
            };
            drop(rows);
            of.add_to(&y, &part)?;
            saved.push(kept);
        }
        if record_load {
            ctx.shared.routed(self.index, &routing);
        }
        let saved = SavedExperts {
            routing,
            assignment,
            experts: saved,
            shared,
        };
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

    /// Returns `∂h` `[N, D]`, if it is needed; passes gradients to `sink`. Computes again what was not saved.
    pub(super) fn experts_backward(
        &self,
        experts: &Experts,
        of: ExpertsGradient<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let mut sink = experts.reader.joined.sink(sink);
        let dh = self.routed_backward(experts, of, &mut sink)?;
        sink.finish()?;
        Ok(dh)
    }

    /// As `experts_backward`; the gradients of adapters are those of each expert.
    fn routed_backward(
        &self,
        experts: &Experts,
        of: ExpertsGradient<'_>,
        sink: &mut JoinedSink<'_>,
    ) -> Result<Option<Tensor>> {
        let ExpertsGradient {
            h,
            saved,
            dy,
            ctx,
            need_dh,
        } = of;
        let together = experts.together(h, ctx)?;
        let (routing, assignment, saved, saved_shared) = match saved {
            Some(saved) => (saved.routing, saved.assignment, saved.experts, saved.shared),
            None => {
                let routing = experts.route(h)?;
                let assignment = routing.assign(h.device(), together.is_some())?;
                (routing, assignment, Vec::new(), None)
            }
        };
        let needs = ExpertGradientNeeds {
            ctx,
            dh: need_dh,
            weights: need_dh || experts.router_wanted(sink),
        };
        let all = needs.dh || needs.weights || experts.reader.joined.wanted(sink);
        let computed: Vec<usize> = used(&routing)
            .filter(|&e| all || experts.reader.wanted(e, sink))
            .collect();
        if together.is_none() {
            experts.reader.expect(&computed);
        }
        let mut dh = None;
        if experts.sizes.shared.is_some() {
            let factors = experts.shared_factors(h)?;
            let zeros = |g: &Tensor| update::zeros(g.shape(), g.dtype(), g.device());
            let d = factors.as_ref().filter(|_| needs.weights).map(zeros).transpose()?;
            let tokens = ExpertTokens {
                rows: h,
                weights: factors.as_ref(),
                d_weights: d.as_ref(),
                dy,
            };
            let part = self.expert_backward(&self.mlp_in, &self.down_proj, tokens, saved_shared, needs, sink)?;
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
        sink.start()?;
        let d_weights = needs.weights.then(|| assignment.numbers()).transpose()?;
        let mut saved = saved.into_iter();
        let ranks = experts.ranks()?;
        if let Some(ranks) = ranks {
            let of = ranks::OverRanks {
                ranks,
                assignment: &assignment,
                h,
                dy,
                dh: dh.as_ref(),
                d_weights: d_weights.as_ref(),
            };
            self.backward_over_ranks(experts, of, needs, sink)?;
        }
        for unit in assignment.units().into_iter().filter(|_| ranks.is_none()) {
            let kept = saved.next().flatten();
            let Some(of) = assignment.of(unit.clone())? else {
                unit.into_iter()
                    .try_for_each(|e| experts.reader.zero_gradients(e, sink))?;
                continue;
            };
            let own;
            let expert = match &together {
                Some(all) => &all.experts[unit.start],
                None if computed.binary_search(&unit.start).is_err() => continue,
                None => {
                    own = experts.reader.read(unit.start)?;
                    &own
                }
            };
            let rows = of.gather(h)?;
            let dy = of.gather(dy)?;
            let d_own = d_weights.as_ref().map(|all| of.part(all)).transpose()?;
            let tokens = ExpertTokens {
                rows: &rows,
                weights: Some(&of.weights),
                d_weights: d_own.as_ref(),
                dy: &dy,
            };
            let part = match &together {
                Some(all) if unit.len() > 1 => {
                    if sink.in_order() {
                        let mut sink = InOrder::new(&all.experts[unit.clone()], sink);
                        let part = self.group_backward(all.group(unit), &of, tokens, kept, needs, &mut sink)?;
                        sink.finish()?;
                        part
                    } else {
                        self.group_backward(all.group(unit), &of, tokens, kept, needs, sink)?
                    }
                }
                _ => {
                    let part = self.expert_backward(&expert.inputs, &expert.down, tokens, kept, needs, sink)?;
                    if let Some(b) = &expert.down_bias {
                        bias::backward(b, &dy, &of.weights, d_own.as_ref(), sink)?;
                    }
                    part
                }
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
    /// stored in `ExpertTokens::d_weights`.
    fn expert_backward(
        &self,
        inputs: &Projections,
        down: &Projections,
        tokens: ExpertTokens<'_>,
        saved: Option<SavedPiece>,
        needs: ExpertGradientNeeds<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let ExpertTokens {
            rows,
            weights,
            d_weights,
            dy,
        } = tokens;
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

/// The experts that have tokens, in ascending order.
fn used(routing: &Routing) -> impl Iterator<Item = usize> {
    let counts = routing.counts().into_iter().enumerate();
    counts.filter(|(_, tokens)| *tokens > 0).map(|(e, _)| e)
}

impl ExpertReader {
    /// The gradients of expert `e`, which has no tokens.
    fn zero_gradients(&self, e: usize, sink: &mut dyn GradSink) -> Result<()> {
        if self.wanted(e, sink) {
            zero_gradients(&self.read(e)?, sink)?;
        }
        Ok(())
    }
}

/// The gradients of an expert without tokens.
fn zero_gradients(expert: &Expert, sink: &mut dyn GradSink) -> Result<()> {
    let zeros = |param: &Param, sink: &mut dyn GradSink| {
        let zeros = update::zeros(param.tensor.shape(), DType::F32, param.tensor.device())?;
        sink.take(param, zeros)
    };
    // In the order of `expert_backward`: on several ranks the order of gradients must not depend on the rows.
    for l in [&expert.down, &expert.inputs]
        .into_iter()
        .flat_map(Projections::linears)
    {
        if sink.wants(&l.name) && sink.sum(&l.name).is_none() {
            let tensor = l.weight.dense().map_err(|e| e.or_at(&*l.name))?.clone();
            let name = l.name.clone();
            zeros(&Param { name, tensor }, sink)?;
        }
        if let Some(bias) = l.bias.as_ref().filter(|bias| sink.wants(&bias.name)) {
            zeros(bias, sink)?;
        }
    }
    if let Some(bias) = expert.down_bias.as_ref().filter(|bias| sink.wants(&bias.name)) {
        zeros(bias, sink)?;
    }
    Ok(())
}
