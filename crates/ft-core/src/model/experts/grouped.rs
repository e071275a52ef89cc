//! Several experts of a mixture in one product (`ops::grouped`), on a GPU. Their rows follow each other, so the other operations run
//! once for all of them. The gradients of weights and biases are computed for each expert alone.
//!
//! LoRA pairs on the joined parameters are computed for all experts too (`ops::expert_pairs`). They have no dropout and subtract no
//! start. Experts with other adapters are computed one at a time.
//!
//! Letters: R rows of all experts of a group, D hidden size, I intermediate size of an expert, P columns of a pair.

use super::super::block::DecoderBlock;
use super::super::contracts::{Context, GradSink, Param};
use super::super::linear::Linear;
use super::super::mlp::SavedPiece;
use super::super::spec::ExpertsSpec;
use super::adapters::PairsTogether;
use super::reader::Expert;
use super::{ExpertGradientNeeds, ExpertTokens, Experts, bias, zero_gradients};
use crate::base::{Error, Result};
use crate::ops::expert_pairs::Members;
use crate::ops::grouped::{self, GroupWeight};
use crate::ops::routing::{self, AssignedTokens};
use candle_core::Tensor;
use std::ops::Range;

/// All experts of a layer, for computing several of them together.
pub(super) struct JoinedExperts<'a> {
    pub experts: Vec<Expert>,
    pairs: Vec<PairsTogether<'a>>,
}

/// Successive experts that are computed together.
#[derive(Clone, Copy)]
pub(super) struct ExpertUnit<'a> {
    experts: &'a [Expert],
    /// The first of them.
    first: usize,
    pairs: &'a [PairsTogether<'a>],
}

/// The backward pass of pairs that read x `[R, ·]`.
struct PairGradient<'a> {
    /// Needed only for the gradients of the pairs.
    x: Option<&'a Tensor>,
    /// `[R, P]`; computed again if it is not given.
    u: Option<Tensor>,
    /// The gradients of the outputs, `[R, ·]` each.
    dys: &'a [Tensor],
    /// The gradient of x, to which that of the pairs is added.
    dx: Option<&'a Tensor>,
}

impl JoinedExperts<'_> {
    pub(super) fn group(&self, unit: Range<usize>) -> ExpertUnit<'_> {
        ExpertUnit {
            first: unit.start,
            experts: &self.experts[unit],
            pairs: &self.pairs,
        }
    }
}

impl Expert {
    /// gate, up and down.
    fn all(&self) -> impl Iterator<Item = &Linear> {
        self.inputs.linears().iter().chain(self.down.linears())
    }

    /// Projection `p`: 0 gate, 1 up, 2 down.
    fn linear(&self, p: usize) -> Result<&Linear> {
        let missing = || Error::internal(format!("an expert has no projection {p} (0 gate, 1 up, 2 down)"));
        self.all().nth(p).ok_or_else(missing)
    }

    /// Of gate, up and down.
    fn biases(&self) -> [Option<&Param>; 3] {
        let mut inputs = self.inputs.linears().iter().map(|l| l.bias.as_ref());
        [
            inputs.next().flatten(),
            inputs.next().flatten(),
            self.down_bias.as_ref(),
        ]
    }
}

impl Experts {
    /// All experts, if they can be computed together for rows like `h`. A source that streams experts brings one at a time. With one
    /// token no two of its experts would be in a unit.
    pub(super) fn together(&self, h: &Tensor, ctx: &Context) -> Result<Option<JoinedExperts<'_>>> {
        let streamed = self.reader.source.streams_experts();
        let possible = ExpertsSpec::together(h.device().is_cuda(), streamed, self.reader.products);
        if !possible || ctx.observer.is_some() || h.dim(0)? < 2 {
            return Ok(None);
        }
        let plain = |(p, l): (usize, &Linear)| {
            (l.adapter.is_none() || self.reader.joined.has(p)) && l.weight.grouped().is_some()
        };
        let of_rows = |b: &Param| b.tensor.dtype() == h.dtype();
        let mut experts = Vec::new();
        for e in 0..self.sizes.count {
            let expert = self.reader.read(e)?;
            let fits = expert.all().enumerate().all(plain)
                && expert.biases().iter().flatten().all(|b| of_rows(b))
                && grouped::fits(h, expert.all().filter_map(|l| l.weight.grouped()));
            // Usually all are alike, so the first one decides.
            if !fits {
                return Ok(None);
            }
            experts.push(expert);
        }
        let pairs = self.reader.joined.together(h.dtype())?;
        Ok(Some(JoinedExperts { experts, pairs }))
    }
}

impl<'a> ExpertUnit<'a> {
    /// The pairs of the projections from `p` on, and the rows of their experts.
    fn pairs(&self, p: usize, of: &'a AssignedTokens) -> Option<(&'a PairsTogether<'a>, Members<'a>)> {
        let members = Members {
            first: self.first,
            counts: &of.counts,
        };
        let pairs = self.pairs.iter().find(|pairs| pairs.projections.start == p)?;
        Some((pairs, members))
    }

    /// Adds the products of the pairs of the projections from `p` on, which read x `[R, ·]`, to their outputs `ys` `[R, ·]`. Returns u
    /// `[R, P]`.
    fn add_pairs(&self, of: &AssignedTokens, p: usize, x: &Tensor, ys: &[Tensor]) -> Result<Option<Tensor>> {
        let Some((joined, members)) = self.pairs(p, of) else {
            return Ok(None);
        };
        let u = joined.pairs.down(x, members)?;
        for (part, y) in ys.iter().enumerate() {
            joined.pairs.up_add(y, &u, members, (part, ys.len()))?;
        }
        Ok(Some(u))
    }

    /// The backward pass of `add_pairs`: adds to `dx`, if it is given, and to the gradients in the sink.
    fn pairs_backward(
        &self,
        of: &AssignedTokens,
        p: usize,
        gradient: PairGradient<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<()> {
        let PairGradient { x, u, dys, dx } = gradient;
        let Some((joined, members)) = self.pairs(p, of) else {
            return Ok(());
        };
        let sum = |param: &Param| x.and_then(|x| Some((sink.sum(&param.name)?, x)));
        let (sum_a, sum_b) = (sum(joined.a), sum(joined.b));
        if let Some((sum, x)) = sum_b {
            let u = match u {
                Some(u) => u,
                None => joined.pairs.down(x, members)?,
            };
            for (part, dy) in dys.iter().enumerate() {
                joined.pairs.grad_b_add(&sum, dy, &u, members, (part, dys.len()))?;
            }
        }
        if dx.is_none() && sum_a.is_none() {
            return Ok(());
        }
        let du = joined.pairs.up_backward(dys, members)?;
        if let Some(dx) = dx {
            joined.pairs.down_backward_add(dx, &du, members)?;
        }
        match sum_a {
            Some((sum, x)) => joined.pairs.grad_a_add(&sum, &du, x, members),
            None => Ok(()),
        }
    }
}

/// The weights and the numbers of rows of projection `p`.
fn groups<'a>(experts: &'a [Expert], of: &AssignedTokens, p: usize) -> Result<Vec<(GroupWeight<'a>, usize)>> {
    let missing = || Error::internal("the weight of an expert does not fit a grouped product");
    let one = |(expert, rows): (&'a Expert, &usize)| {
        let weight = expert.linear(p)?.weight.grouped().ok_or_else(missing)?;
        Ok((weight, *rows))
    };
    experts.iter().zip(&of.counts).map(one).collect()
}

/// The biases and the numbers of rows of projection `p`; none without biases.
fn biases<'a>(experts: &'a [Expert], of: &AssignedTokens, p: usize) -> Vec<(&'a Tensor, usize)> {
    let all = experts.iter().zip(&of.counts);
    all.filter_map(|(expert, rows)| Some((&expert.biases()[p]?.tensor, *rows)))
        .collect()
}

/// Projection `p` of x `[R, ·]`: `[R, ·]`. `factors`: of the biases of the rows.
fn project(group: &[Expert], of: &AssignedTokens, p: usize, x: &Tensor, factors: Option<&Tensor>) -> Result<Tensor> {
    let (weights, biases) = (groups(group, of, p)?, biases(group, of, p));
    if biases.is_empty() {
        return grouped::forward(x, &weights);
    }
    // The product is added to the biases, so that a sum is rounded once.
    let y = grouped::bias_rows(&biases, factors)?;
    grouped::forward_add(&y, x, &weights)?;
    Ok(y)
}

impl DecoderBlock {
    /// As `expert_forward`, for the experts of a group: rows `[R, D]` to `[R, D]`.
    pub(super) fn group_forward(
        &self,
        group: ExpertUnit<'_>,
        of: &AssignedTokens,
        rows: &Tensor,
        keep: bool,
    ) -> Result<(Tensor, Option<SavedPiece>)> {
        let (parts, _) = group_parts(group, of, rows)?;
        let m = self.activated(&parts)?;
        let saved = keep.then(|| SavedPiece::new(parts, [None, None]));
        routing::scale_rows(&m, &of.weights)?;
        let y = project(group.experts, of, 2, &m, Some(&of.weights))?;
        group.add_pairs(of, 2, &m, std::slice::from_ref(&y))?;
        Ok((y, saved))
    }

    /// As `expert_backward`, for the experts of a group: from `dy` `[R, D]` to the gradient of the rows `[R, D]`, if it is needed.
    pub(super) fn group_backward(
        &self,
        all: ExpertUnit<'_>,
        of: &AssignedTokens,
        tokens: ExpertTokens<'_>,
        saved: Option<SavedPiece>,
        needs: ExpertGradientNeeds<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let ExpertTokens {
            rows, d_weights, dy, ..
        } = tokens;
        let group = all.experts;
        for (expert, _) in group.iter().zip(&of.counts).filter(|(_, rows)| **rows == 0) {
            zero_gradients(expert, sink)?;
        }
        let inputs_wanted = group.iter().any(|expert| expert.inputs.wanted(sink));
        let down_wanted = group.iter().any(|expert| expert.down.wanted(sink));
        let need_dm = needs.dh || needs.weights || inputs_wanted;
        if !need_dm && !down_wanted {
            down_bias_gradients(group, of, dy, sink)?;
            return Ok(None);
        }
        let (parts, u) = match saved {
            Some(saved) => (saved.into_parts().0, None),
            None => group_parts(all, of, rows)?,
        };
        let m = self.activated(&parts)?;
        let dm = if need_dm {
            Some(grouped::backward_input(dy, &groups(group, of, 2)?)?)
        } else {
            None
        };
        let scaled = down_wanted.then(|| m.copy()).transpose()?;
        if let Some(scaled) = &scaled {
            routing::scale_rows(scaled, &of.weights)?;
            own_gradients(group, of, 2, scaled, dy, sink)?;
        }
        let down = PairGradient {
            x: scaled.as_ref(),
            u: None,
            dys: std::slice::from_ref(dy),
            dx: dm.as_ref(),
        };
        all.pairs_backward(of, 2, down, sink)?;
        drop(scaled);
        if let (Some(dm), Some(d_weights)) = (&dm, d_weights) {
            routing::row_products(dm, &m, d_weights)?;
            let biases = biases(group, of, 2);
            if !biases.is_empty() {
                grouped::bias_products_add(dy, &biases, d_weights)?;
            }
        }
        down_bias_gradients(group, of, dy, sink)?;
        let Some(dm) = dm else { return Ok(None) };
        drop(m);
        if !needs.dh && !inputs_wanted {
            return Ok(None);
        }
        routing::scale_rows(&dm, &of.weights)?;
        let d_parts = self.activated_backward(parts, &dm)?;
        drop(dm);
        let mut dx = None;
        for (p, d) in d_parts.iter().enumerate().filter(|_| needs.dh) {
            let groups = groups(group, of, p)?;
            match &dx {
                Some(dx) => grouped::backward_input_add(dx, d, &groups)?,
                None => dx = Some(grouped::backward_input(d, &groups)?),
            }
        }
        let inputs = PairGradient {
            x: Some(rows),
            u,
            dys: &d_parts,
            dx: dx.as_ref(),
        };
        all.pairs_backward(of, 0, inputs, sink)?;
        for (p, d) in d_parts.iter().enumerate() {
            own_gradients(group, of, p, rows, d, sink)?;
        }
        Ok(dx)
    }
}

/// gate and up of the rows, `[R, I]` each, and u of their pairs, `[R, P]`.
fn group_parts(group: ExpertUnit<'_>, of: &AssignedTokens, rows: &Tensor) -> Result<(Vec<Tensor>, Option<Tensor>)> {
    let one = |p| project(group.experts, of, p, rows, None);
    let parts = [0, 1].into_iter().map(one).collect::<Result<Vec<_>>>()?;
    let u = group.add_pairs(of, 0, rows, &parts)?;
    Ok((parts, u))
}

/// Passes the gradients of the weights of projection `p` to the sink; inputs x and gradients dy `[R, ·]`.
fn own_gradients(
    group: &[Expert],
    of: &AssignedTokens,
    p: usize,
    x: &Tensor,
    dy: &Tensor,
    sink: &mut dyn GradSink,
) -> Result<()> {
    let mut first = 0;
    for (expert, &rows) in group.iter().zip(&of.counts) {
        let linear = expert.linear(p)?;
        if rows > 0 && linear.wanted(sink) {
            let (x, dy) = (x.narrow(0, first, rows)?, dy.narrow(0, first, rows)?);
            linear.own_gradients(Some(&x), &dy, sink)?;
        }
        first += rows;
    }
    Ok(())
}

/// Passes the gradients of the biases of the outputs to the sink; dy `[R, D]`.
fn down_bias_gradients(group: &[Expert], of: &AssignedTokens, dy: &Tensor, sink: &mut dyn GradSink) -> Result<()> {
    let mut first = 0;
    for (expert, &rows) in group.iter().zip(&of.counts) {
        if let Some(b) = expert.down_bias.as_ref().filter(|b| rows > 0 && sink.wants(&b.name)) {
            let weights = of.weights.narrow(0, first, rows)?;
            bias::backward(b, &dy.narrow(0, first, rows)?, &weights, None, sink)?;
        }
        first += rows;
    }
    Ok(())
}
