//! Linears with one input: q, k, v, or gate and up, or a single one.
//!
//! On a GPU the LoRA pairs of all of them are computed together, from copies in the type of the activations, and u = x·Aᵀ
//! is saved with the activations. The product with W is added to the product of a pair, in one buffer; cuBLAS rounds each
//! product to bf16 before it adds, in either order.
//!
//! DoRA without dropout is computed with them: y = g ⊙ (x·Wᵀ + u·Bᵀ) + b with g = m / ‖V‖; the sum is f32 until y is
//! rounded.
//!
//! Letters: N tokens, I input features, O output features, R rank, T columns of u (`ops::lora_pairs`).

use super::contracts::{Context, GradSink};
use super::linear::{Dx, Linear};
use crate::base::{Error, Result};
use crate::ops::lora_pairs::{self, PairStack};
use crate::ops::{adapters, linear, update};
use crate::peft::{FrozenLinear, Lora, ParamGradient};
use crate::trace;
use candle_core::{DType, Tensor};
use std::sync::Arc;

/// Linears with one input, each with one result; or one linear whose result is cut into parts (Phi-3).
pub struct Projections {
    linears: Vec<Linear>,
    /// The widths of the parts of a fused linear; else empty.
    widths: Vec<usize>,
    /// On a GPU: the LoRA pairs.
    pairs: Option<Arc<PairStack>>,
}

/// The LoRA pairs of the groups of linears of a layer, if they have any.
pub(super) type LayerPairs = Vec<Option<Arc<PairStack>>>;

/// The tensors that the backward pass of the LoRA pairs reuses.
pub(super) struct SavedPairs {
    /// `[N, T]`
    u: Tensor,
    /// For each pair: g `[O]` and the output `[N, O]` if it is DoRA.
    dora: Vec<Option<(Tensor, Tensor)>>,
}

/// `SavedPairs`, if the pairs were computed together.
pub(super) type SavedLow = Option<SavedPairs>;

/// Computes x + `scale` · y, `[N, D]` each: in `y`, unless it is an output that was saved.
pub(super) fn add_residual(y: Tensor, x: &Tensor, low: &SavedLow, scale: f32) -> Result<Tensor> {
    let saved = low.as_ref().is_some_and(|low| low.dora.iter().any(Option::is_some));
    match (saved, scale) {
        (true, 1.0) => return update::add(&y, x),
        (true, _) => return update::add(&(y * f64::from(scale))?, x),
        (false, 1.0) => {}
        (false, _) => update::scale_assign(&y, scale)?,
    }
    update::add_assign(&y, x)?;
    Ok(y)
}

/// What the pairs of a group have computed: the stack, u `[N, T]`, and what DoRA saves of each pair.
type LowForward<'a> = (&'a PairStack, Tensor, Vec<Option<(Tensor, Tensor)>>);

/// True if the products of two linears with x are one call: both without an adapter, or both with a LoRA pair that is computed
/// with the others (`together`).
fn can_join(two: [&Linear; 2], x: &Tensor, together: bool) -> bool {
    if !x.device().is_cuda() {
        return false;
    }
    let alone = |l: &&Linear| l.adapter.is_none();
    let paired = |l: &&Linear| together && l.pair_on_gpu().is_some() && l.dora().is_none();
    let [Ok(first), Ok(second)] = two.map(|l| l.weight.dense()) else {
        return false;
    };
    (two.iter().all(alone) || two.iter().all(paired))
        && two[0].bias.is_some() == two[1].bias.is_some()
        && linear::can_join(x, [first, second])
}

/// The outputs of two linears that can be joined, `[N, O]` each.
fn forward_two(two: [&Linear; 2], x: &Tensor, low: &mut Option<LowForward>, ctx: &Context) -> Result<[Tensor; 2]> {
    for linear in two {
        ctx.seen(&linear.name, x)?;
    }
    let _span = trace::weight("two linears", &two[0].name);
    let ws = [two[0].weight.dense()?, two[1].weight.dense()?];
    let biases = match two.map(|l| l.bias.as_ref()) {
        [Some(first), Some(second)] => Some([&first.tensor, &second.tensor]),
        _ => None,
    };
    let Some((pairs, u, dora)) = low.as_mut().filter(|_| two[0].pair_on_gpu().is_some()) else {
        return linear::forward_two(x, ws, biases);
    };
    let first = dora.len();
    dora.extend([None, None]);
    let ys = linear::two_outputs(x, ws)?;
    pairs.up_into(first, u, &ys[0])?;
    pairs.up_into(first + 1, u, &ys[1])?;
    linear::forward_add_two([&ys[0], &ys[1]], x, ws)?;
    for (y, bias) in ys.iter().zip(biases.iter().flatten()) {
        update::add_rows(y, bias)?;
    }
    Ok(ys)
}

impl Projections {
    /// One linear for each part.
    pub fn separate(linears: Vec<Linear>) -> Self {
        Self {
            linears,
            widths: Vec::new(),
            pairs: None,
        }
    }

    /// One linear, and the widths of its parts.
    pub fn fused(linear: Linear, widths: Vec<usize>) -> Self {
        Self {
            widths,
            ..Self::separate(vec![linear])
        }
    }

    /// Copies the LoRA pairs of these groups for their products, if they are on a GPU. `known`: the copies, if they were
    /// made before.
    pub(super) fn copy_pairs(mut groups: Vec<&mut Self>, known: &mut Option<LayerPairs>) -> Result<()> {
        if let Some(known) = known {
            for (group, pairs) in groups.into_iter().zip(known) {
                group.pairs = pairs.clone();
            }
            return Ok(());
        }
        Self::copy(groups.iter_mut().filter(|g| g.members().next().is_some()).collect())?;
        *known = Some(groups.iter().map(|group| group.pairs.clone()).collect());
        Ok(())
    }

    fn copy(groups: Vec<&mut &mut Self>) -> Result<()> {
        let Some(first) = groups.first() else { return Ok(()) };
        let dtype = first.linears.first().map_or(DType::F32, |l| l.weight.model_type());
        let matrices: Vec<Vec<_>> = (groups.iter())
            .map(|g| g.members().map(|(_, lora)| lora.matrices()).collect())
            .collect();
        let stacks = lora_pairs::stacks(&matrices, dtype)?;
        drop(matrices);
        for (group, stack) in groups.into_iter().zip(stacks) {
            group.pairs = Some(Arc::new(stack));
        }
        Ok(())
    }

    /// The linears, in model order.
    pub fn into_linears(self) -> Vec<Linear> {
        self.linears
    }

    /// The linears, in model order.
    pub(super) fn linears(&self) -> &[Linear] {
        &self.linears
    }

    /// The linear, if it is the only one.
    pub(super) fn one(&self) -> Result<&Linear> {
        match &self.linears[..] {
            [linear] => Ok(linear),
            _ => Err(Error::internal("a projection is not a single linear")),
        }
    }

    /// True if the first weight is bf16.
    pub fn is_bf16(&self) -> bool {
        self.linears.first().is_some_and(|l| l.weight.is_bf16())
    }

    /// True if any parameter gets a gradient.
    pub fn wanted(&self, sink: &dyn GradSink) -> bool {
        self.linears.iter().any(|l| l.wanted(sink))
    }

    /// The linears whose LoRA pair is in the stack, in its order.
    fn members(&self) -> impl Iterator<Item = (&Linear, &Lora)> {
        self.linears.iter().filter_map(|l| Some((l, l.pair_on_gpu()?)))
    }

    /// The stack, unless a part of an adapter has dropout and another has not: the first product that it subtracts, and
    /// W under DoRA, have none.
    fn pairs(&self, ctx: &Context) -> Option<&PairStack> {
        let apart =
            |(l, lora): (&Linear, &Lora)| (lora.start.is_some() || l.dora().is_some()) && lora.mask.drops(ctx.dropout);
        self.pairs.as_deref().filter(|_| !self.members().any(apart))
    }

    fn drops(&self, ctx: &Context) -> bool {
        self.members().any(|(_, lora)| lora.mask.drops(ctx.dropout))
    }

    /// u = s · x·Aᵀ of all pairs, `[N, T]`. Each adapter has a dropout mask of its own.
    fn down(&self, pairs: &PairStack, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        if !self.drops(ctx) {
            return pairs.down(x);
        }
        let u = pairs.columns(x.dim(0)?)?;
        for (i, (_, lora)) in self.members().enumerate() {
            pairs.down_one(i, &lora.mask.dropped(x, ctx.dropout)?, &u)?;
        }
        Ok(u)
    }

    /// g `[O]` of pair `i`, if it is DoRA.
    fn factors(&self, pairs: &PairStack, i: usize, linear: &Linear) -> Result<Option<Tensor>> {
        let Some(dora) = linear.dora() else { return Ok(None) };
        let a = pairs.a(i)?;
        let across = update::zeros((a.dim(0)?, linear.dims().0), DType::F32, a.device())?;
        linear.weight.forward_add(&across, &a)?;
        Ok(Some(dora.factors(linear, &across)?))
    }

    /// The output of a linear with pair `i`, `[N, O]`, and what DoRA saves.
    fn forward_pair(
        &self,
        pairs: &PairStack,
        i: usize,
        linear: &Linear,
        x: &Tensor,
        u: &Tensor,
        ctx: &Context,
    ) -> Result<(Tensor, Option<(Tensor, Tensor)>)> {
        ctx.seen(&linear.name, x)?;
        let Some(g) = self.factors(pairs, i, linear)? else {
            return Ok((linear.forward_plus(x, pairs.up(i, u, x.dtype())?)?, None));
        };
        let sum = pairs.up(i, u, DType::F32)?;
        linear.weight.forward_add(&sum, x)?;
        let bias = linear.bias.as_ref().map(|b| &b.tensor);
        let y = adapters::scale_and_shift(&sum, &g, bias, x.dtype())?;
        Ok((y.clone(), Some((g, y))))
    }

    /// `x` `[N, I]` to the parts, `[N, ·]` each, and what the backward pass reuses.
    pub(super) fn forward(&self, x: &Tensor, ctx: &Context) -> Result<(Vec<Tensor>, SavedLow)> {
        let mut parts = Vec::with_capacity(self.linears.len());
        let mut low = match self.pairs(ctx) {
            Some(pairs) => Some((pairs, self.down(pairs, x, ctx)?, Vec::new())),
            None => None,
        };
        while let Some(linear) = self.linears.get(parts.len()) {
            if let Some(next) = self.linears.get(parts.len() + 1)
                && can_join([linear, next], x, low.is_some())
            {
                parts.extend(forward_two([linear, next], x, &mut low, ctx)?);
                continue;
            }
            parts.push(match &mut low {
                Some((pairs, u, dora)) if linear.pair_on_gpu().is_some() => {
                    let (y, saved) = self.forward_pair(pairs, dora.len(), linear, x, u, ctx)?;
                    dora.push(saved);
                    y
                }
                _ => linear.forward(x, ctx)?,
            });
        }
        if let [y] = &parts[..]
            && !self.widths.is_empty()
        {
            let mut start = 0;
            let part = |&width: &usize| {
                start += width;
                Ok(y.narrow(1, start - width, width)?.contiguous()?)
            };
            parts = self.widths.iter().map(part).collect::<Result<_>>()?;
        }
        Ok((parts, low.map(|(_, u, dora)| SavedPairs { u, dora })))
    }

    /// As `forward`, for a single linear: `[N, O]`.
    pub(super) fn forward_one(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, SavedLow)> {
        let (mut parts, low) = self.forward(x, ctx)?;
        match (parts.pop(), parts.is_empty()) {
            (Some(y), true) => Ok((y, low)),
            _ => Err(Error::internal("a single linear has several parts")),
        }
    }

    /// Sums `∂x` over the parts; drops `dys` one by one. `x` is needed only if `wanted`. Tensors that were not saved are
    /// computed again.
    pub(super) fn backward(
        &self,
        x: Option<&Tensor>,
        saved: SavedLow,
        mut dys: Vec<Tensor>,
        ctx: &Context,
        need_dx: bool,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        if !self.widths.is_empty() {
            dys = vec![Tensor::cat(&dys, 1)?.contiguous()?];
        }
        let mut total: Option<Tensor> = None;
        let low = self.low_backward(x, saved, &mut dys, ctx, need_dx, sink)?;
        let mut next = 0;
        if let Some(low) = &low {
            total = low.dx.clone();
        }
        for (linear, dy) in self.linears.iter().zip(dys) {
            let dx = total.as_ref().map_or(Dx::new(need_dx), Dx::AddTo);
            match &low {
                Some(low) if linear.pair_on_gpu().is_some() => {
                    total = FrozenLinear::backward(linear, &dy, dx)?;
                    if linear.dora().is_none() {
                        linear.own_gradients(x, &dy, sink)?;
                    }
                    low.gradients_b(next, linear, &dy, sink)?;
                    next += 1;
                }
                _ => total = linear.backward(x, &dy, ctx, dx, sink)?,
            }
        }
        if let Some(low) = low {
            low.gradients_a(self, ctx, sink)?;
        }
        Ok(total)
    }

    /// The part of the pairs, if they are computed together. Replaces `dys` of DoRA linears by the gradients of x·Wᵀ + u·Bᵀ.
    fn low_backward<'a>(
        &'a self,
        x: Option<&'a Tensor>,
        saved: SavedLow,
        dys: &mut [Tensor],
        ctx: &Context,
        need_dx: bool,
        sink: &mut dyn GradSink,
    ) -> Result<Option<LowBackward<'a>>> {
        let Some(pairs) = self.pairs(ctx) else { return Ok(None) };
        let adapters_x = x.filter(|_| self.members().any(|(l, _)| l.adapter_wanted(sink)));
        if adapters_x.is_none() && !need_dx {
            return Ok(None);
        }
        let low = match (adapters_x, saved) {
            (_, Some(low)) => Some(low),
            (Some(x), None) if self.members().any(|(l, _)| l.dora().is_some()) => self.forward(x, ctx)?.1,
            (Some(x), None) => Some(SavedPairs {
                u: self.down(pairs, x, ctx)?,
                dora: Vec::new(),
            }),
            (None, None) => None,
        };
        let rows = dys.first().map_or(Ok(0), |dy| dy.dim(0))?;
        let du = pairs.columns(rows)?;
        let mut i = 0;
        for (linear, dy) in self.linears.iter().zip(dys) {
            if linear.pair_on_gpu().is_none() {
                continue;
            }
            if let Some(dora) = linear.dora() {
                let bias = linear.bias.as_ref().map(|b| &b.tensor);
                let g = match low.as_ref().and_then(|low| low.dora.get(i)?.as_ref()) {
                    Some((g, y)) => {
                        if adapters_x.is_some() && sink.wants(&dora.name) {
                            let ParamGradient { param, gradient } = dora.magnitude_gradient(dy, y, bias)?;
                            sink.take(&param, gradient)?;
                        }
                        g.clone()
                    }
                    None => match self.factors(pairs, i, linear)? {
                        Some(g) => g,
                        None => return Err(Error::internal("a DoRA adapter has no factors")),
                    },
                };
                linear.own_gradients(x, dy, sink)?;
                *dy = adapters::scale_columns(dy, &g)?;
            }
            pairs.up_backward(i, dy, &du)?;
            i += 1;
        }
        let dx = if need_dx {
            Some(self.down_backward(pairs, &du, ctx)?)
        } else {
            None
        };
        let x = adapters_x.zip(low.map(|low| low.u));
        Ok(Some(LowBackward { pairs, du, dx, x }))
    }

    /// ∂x through the pairs, `[N, I]`.
    fn down_backward(&self, pairs: &PairStack, du: &Tensor, ctx: &Context) -> Result<Tensor> {
        if !self.drops(ctx) {
            return pairs.down_backward(du);
        }
        let mut total: Option<Tensor> = None;
        for (i, (_, lora)) in self.members().enumerate() {
            let through = pairs.back_up_one(i, du)?;
            lora.mask.assign(&through, ctx.dropout)?;
            match &total {
                Some(total) => update::add_assign(total, &through)?,
                None => total = Some(through),
            }
        }
        total.ok_or_else(|| Error::internal("a stack of LoRA pairs is empty"))
    }
}

/// The backward pass through the pairs: the tensors that their gradients need.
struct LowBackward<'a> {
    pairs: &'a PairStack,
    /// `[N, T]`
    du: Tensor,
    /// `[N, I]`, if it is needed.
    dx: Option<Tensor>,
    /// x `[N, I]` and u `[N, T]`, if gradients are needed.
    x: Option<(&'a Tensor, Tensor)>,
}

impl LowBackward<'_> {
    /// Passes the gradient of B of pair `i` to the sink.
    fn gradients_b(&self, i: usize, linear: &Linear, dy: &Tensor, sink: &mut dyn GradSink) -> Result<()> {
        let (Some((_, u)), Some(lora)) = (&self.x, linear.pair_on_gpu()) else {
            return Ok(());
        };
        let [_, b] = lora.pair();
        if !sink.wants(&b.name) {
            return Ok(());
        }
        match sink.sum(&b.name) {
            Some(sum) => self.pairs.grad_b(i, dy, u, Some(&sum)).map(|_| ()),
            None => sink.take(&b, self.pairs.grad_b(i, dy, u, None)?),
        }
    }

    /// Passes the gradients of A of all pairs to the sink.
    fn gradients_a(self, of: &Projections, ctx: &Context, sink: &mut dyn GradSink) -> Result<()> {
        let Some((x, _)) = &self.x else { return Ok(()) };
        let summed = of.members().any(|(_, lora)| sink.sum(&lora.a_name).is_some());
        let mut together = if of.drops(ctx) || summed {
            Vec::new()
        } else {
            self.pairs.grads_a(&self.du, x)?
        }
        .into_iter();
        for (i, (_, lora)) in of.members().enumerate() {
            let ([a, _], known) = (lora.pair(), together.next());
            if !sink.wants(&a.name) {
                continue;
            }
            let sum = sink.sum(&a.name);
            let gradient = match known {
                Some(gradient) => gradient,
                None => {
                    let x = lora.mask.dropped(x, ctx.dropout)?;
                    self.pairs.grad_a(i, &self.du, &x, sum.as_ref())?
                }
            };
            if sum.is_none() {
                sink.take(&a, gradient)?;
            }
        }
        Ok(())
    }
}
