//! Gradient sinks: the use of a gradient as soon as it is computed.

use super::active::ActiveSet;
use super::divided::DividedSums;
use super::reduce::{GradientExchange, ReduceGradients};
use crate::base::{Error, Result};
use crate::comm::Collective;
use crate::model::{GradSink, NamedSums, Param};
use crate::ops::step::FoundInf;
use crate::ops::step_stats::StepStats;
use crate::ops::transfer::Copier;
use crate::ops::{Dtype, index_subset, update};
use crate::optim::{Optimizer, Update};
use crate::source::{ShardedWeights, WeightSource};
use crate::trace;
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What helps against a loss or a gradient that is not finite.
pub(super) const HINT: &str = "lower the learning rate, check the data, or use `Dtype::F32`";

/// The error with the advice for weights of this type.
pub(super) fn advised(e: Error, dtype: Dtype) -> Error {
    let widens = dtype == Dtype::F32 && e.hint_text() == Some(HINT);
    if widens {
        e.hint("lower the learning rate, or check the data")
    } else {
        e
    }
}

/// `names`: the gradients that are not finite, first those that the backward pass computes first.
pub(super) fn non_finite(names: &[String], step: u64) -> Error {
    let e = Error::non_finite(format!(
        "a gradient is not finite at step {step}; the weights were not changed by this step"
    ))
    .hint(HINT);
    match names {
        [] => e.found("a norm that is not finite"),
        [first, ..] => e.at(first).found(format!(
            "{} such gradients: {}",
            names.len(),
            names[..names.len().min(5)].join(", ")
        )),
    }
}

/// The error of the modes that apply gradients at once.
pub(super) fn held_back(step: u64) -> Error {
    Error::non_finite(format!(
        "a gradient is not finite at step {step}; this gradient and all later ones of the step were not applied"
    ))
    .hint(HINT)
}

/// The error of a sink that applies gradients at once.
fn not_applied(name: &str) -> Error {
    Error::non_finite("a gradient is not finite; this gradient and all later ones of the step were not applied")
        .at(name)
        .hint(HINT)
}

/// Corrections of inactive parameters.
#[derive(Default)]
pub struct Corrections {
    /// On a GPU: squares of their gradients. After the first non-finite gradient no weight changes.
    sums: Option<StepStats>,
}

impl Corrections {
    /// Applies the correction if `param` is only corrected, and returns true; the caller then drops the gradient.
    fn make(
        &mut self,
        active: &ActiveSet,
        optimizer: &mut Optimizer,
        lr: f64,
        param: &Param,
        gradient: &Tensor,
    ) -> Result<bool> {
        let Some(correction) = active.corrects(&param.name) else {
            return Ok(false);
        };
        let mut gate = FoundInf::default();
        if gradient.device().is_cpu() {
            if !update::all_finite(gradient)? {
                return Err(not_applied(&param.name));
            }
        } else {
            if self.sums.is_none() {
                self.sums = Some(StepStats::new(gradient.device())?);
            }
            if let Some(sums) = &self.sums {
                sums.add_squares(gradient)?;
                gate.finite = sums.gate();
            }
        }
        let lr = lr * correction.scale;
        optimizer.descend(&param.name, &param.tensor, gradient, lr, correction.sign, gate)?;
        Ok(true)
    }

    /// True if all gradients were finite. Waits for the GPU if it applied corrections.
    ///
    /// # Errors
    /// A failed read from the device.
    pub fn finite(&self) -> Result<bool> {
        match &self.sums {
            Some(sums) => Ok(sums.read()?.squares.is_finite()),
            None => Ok(true),
        }
    }
}

/// The gradient of the active elements.
fn active_part(active: &ActiveSet, param: &Param, gradient: Tensor) -> Result<Tensor> {
    match active.subset(&param.name, gradient.elem_count()) {
        Some(subset) => index_subset::gather(&gradient, &subset),
        None => Ok(gradient),
    }
}

/// Accumulates gradients over the micro-batches of a window; corrects inactive parameters.
pub struct AccumulateGradients<'a> {
    active: &'a ActiveSet,
    optimizer: &'a mut Optimizer,
    lr: f64,
    sums: NamedSums,
    /// Updates of corrected parameters.
    pub corrections: Corrections,
    /// Adds the gradients of all ranks; `None` on one rank.
    reduce: Option<ReduceGradients<'a>>,
    /// As `GradientExchange::ordered`.
    ordered: bool,
    /// The sums of the part of this rank.
    divided: Option<DividedSums<'a>>,
    /// The sums of the own micro-batches travel, once.
    window: Option<OwnWindow>,
    /// For corrections, which are made with the sums of a round; `None` on one rank.
    round: Option<RoundRanks<'a>>,
    /// As in `GradSink::contributors`.
    contributors: usize,
    /// Weights of which this rank has a part: the part is updated, and the collected weight is not kept.
    sharded: Option<&'a ShardedWeights>,
}

/// The ranks whose micro-batches are computed at the same time.
struct RoundRanks<'a> {
    among: ReduceRanks<'a>,
    /// Number of ranks, from rank 0 on, whose gradients count.
    contributors: usize,
}

/// The ranks that add their gradients, and how.
#[derive(Clone, Copy)]
pub struct ReduceRanks<'a> {
    /// The ranks.
    pub comm: &'a dyn Collective,
    /// How they add gradients.
    pub exchange: GradientExchange,
    /// Brings gradients to the host, if they are on a GPU.
    pub copier: Option<&'a Copier>,
}

impl<'a> ReduceRanks<'a> {
    fn reduce(self) -> ReduceGradients<'a> {
        ReduceGradients::new(self.comm, self.copier, self.exchange.bf16)
    }
}

impl RoundRanks<'_> {
    /// The sum of the gradients of a parameter over the round.
    fn sum(&self, param: &Param, gradient: &Tensor) -> Result<Tensor> {
        let mut reduce = self.among.reduce();
        reduce.begin_round(self.contributors);
        reduce.take(param, gradient)?;
        let sum = reduce.whole_sums()?.pop();
        sum.map(|(_, sum)| sum)
            .ok_or_else(|| Error::internal("a sum is missing").at(&param.name))
    }
}

/// The rounds of a window whose gradients are added here before they travel.
struct OwnWindow {
    rank: usize,
    /// The most ranks that count in a round.
    contributors: usize,
    /// The current micro-batch counts.
    counts: bool,
}

impl<'a> AccumulateGradients<'a> {
    /// A sink without gradients. With several ranks `complete` must be called after the last one. `sharded`: the source of
    /// the weights, if they are stored in parts.
    pub fn new(
        active: &'a ActiveSet,
        optimizer: &'a mut Optimizer,
        lr: f64,
        among: ReduceRanks<'a>,
        sharded: Option<&'a ShardedWeights>,
    ) -> Self {
        let (world, exchange) = (among.comm.world(), among.exchange);
        let round = RoundRanks {
            among,
            contributors: world.size,
        };
        let window = OwnWindow {
            rank: world.rank,
            contributors: 0,
            counts: true,
        };
        Self {
            active,
            optimizer,
            lr,
            sums: NamedSums::default(),
            corrections: Corrections::default(),
            reduce: (world.size > 1).then(|| among.reduce()),
            ordered: exchange.ordered,
            divided: None,
            window: (world.size > 1 && exchange.window).then_some(window),
            round: (world.size > 1).then_some(round),
            contributors: usize::MAX,
            sharded,
        }
    }

    /// Waits for the sums over all ranks. If they are `divided`, only those of the part of this rank; then `sums` stays
    /// empty.
    ///
    /// # Errors
    /// Another rank has failed.
    pub fn complete(&mut self, comm: &'a dyn Collective, divided: bool) -> Result<()> {
        let Some(mut reduce) = self.reduce.take() else {
            return Ok(());
        };
        if let Some(window) = &self.window {
            reduce.begin_round(window.contributors);
            for (param, sum) in std::mem::take(&mut self.sums).into_order() {
                reduce.take(&param, &sum)?;
            }
        }
        if divided {
            self.divided = Some(DividedSums::new(comm, reduce.own_sums()?));
            return Ok(());
        }
        for (param, sum) in reduce.whole_sums()? {
            self.sums.add(&param, sum)?;
        }
        Ok(())
    }

    /// Adds the squares of all gradients to `step_stats` in order of arrival: on the CPU bit-equal to `MeasureNorm`.
    ///
    /// # Errors
    /// Another rank has failed.
    pub fn add_squares(&self, step_stats: &StepStats) -> Result<()> {
        if let Some(divided) = &self.divided {
            return divided.add_squares(step_stats);
        }
        step_stats.add_squares_of(&self.sums.in_order().collect::<Vec<_>>())
    }

    /// Names of the parameters with a gradient, as `add_squares` uses them.
    pub(super) fn names(&self) -> Vec<Arc<str>> {
        match &self.divided {
            Some(divided) => divided.names(),
            None => self.sums.names().to_vec(),
        }
    }

    /// The accumulated gradient of a parameter.
    pub fn gradient(&self, name: &str) -> Option<Tensor> {
        self.sums.get(name).cloned()
    }

    /// Adds to accumulated gradients, by name.
    pub(super) fn add(&self, more: &[(Arc<str>, Tensor)]) -> Result<()> {
        for (name, more) in more {
            if let Some(sum) = self.sums.get(name) {
                update::add_assign(sum, more)?;
            }
        }
        Ok(())
    }

    /// Multiplies all accumulated gradients by `factor`.
    ///
    /// # Errors
    /// A gradient is neither f32 nor contiguous (`Shape`).
    pub fn scale(&self, factor: f32) -> Result<()> {
        if let Some(divided) = &self.divided {
            return divided.scale(factor);
        }
        let mut gradients = self.sums.by_name();
        gradients.try_for_each(|(_, gradient)| update::scale_assign(gradient, factor))
    }

    /// Names of gradients whose squares are not finite, in the order of the backward pass; sorted, if the sums are divided.
    ///
    /// # Errors
    /// Another rank has failed.
    pub fn non_finite(&self) -> Result<Vec<String>> {
        if let Some(divided) = &self.divided {
            return divided.non_finite();
        }
        let mut names = Vec::new();
        for (name, gradient) in self.sums.names().iter().zip(self.sums.in_order()) {
            if !update::sum_squares(gradient)?.is_finite() {
                names.push(name.to_string());
            }
        }
        Ok(names)
    }

    /// Updates every weight with its accumulated gradient times `coefficient`; `gate` can disable it.
    ///
    /// # Errors
    /// As `Optimizer::update`; another rank has failed.
    pub fn update(&mut self, coefficient: f32, gate: FoundInf) -> Result<()> {
        let _span = trace::span("update");
        if let Some(divided) = self.divided.take() {
            return divided.update(self.optimizer, self.lr, coefficient, gate);
        }
        if self.active.is_masked() {
            // One after the other: each update copies a part of its weight.
            while let Some((param, gradient)) = self.sums.pop_first() {
                let update = Update {
                    name: &param.name,
                    weight: &param.tensor,
                    gradient: &gradient,
                    subset: self.active.subset(&param.name, param.tensor.elem_count()),
                };
                self.optimizer.update_gated(&[update], self.lr, coefficient, gate)?;
            }
            return Ok(());
        }
        let updates: Vec<Update> = self
            .sums
            .by_name()
            .map(|(param, gradient)| Update {
                name: &param.name,
                weight: &param.tensor,
                gradient,
                subset: None,
            })
            .collect();
        self.optimizer.update_gated(&updates, self.lr, coefficient, gate)
    }
}

impl GradSink for AccumulateGradients<'_> {
    fn wants(&self, name: &str) -> bool {
        self.active.wants(name)
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        let (active, lr) = (self.active, self.lr);
        let stored = self.sharded.and_then(|store| store.own(&param.name));
        let stored = stored.map(|tensor| Param {
            tensor,
            ..param.clone()
        });
        let param = stored.as_ref().unwrap_or(param);
        let gradient = match &self.round {
            Some(round) if active.corrects(&param.name).is_some() => round.sum(param, &gradient)?,
            _ => gradient,
        };
        if self.corrections.make(active, self.optimizer, lr, param, &gradient)? {
            return Ok(());
        }
        let gradient = active_part(self.active, param, gradient)?;
        if let (Some(reduce), Some(store)) = (&mut self.reduce, self.sharded)
            && store.on_one_rank(&param.name)
            && let Some(parts) = store.parts(&param.name)
        {
            return reduce.take_own(param, gradient.dims(), parts, Some(&gradient));
        }
        match (&mut self.reduce, &self.window) {
            (Some(reduce), None) => return reduce.take(param, &gradient),
            // Sent with the others, but not added by them if no micro-batch of this rank counts.
            (_, Some(window)) if !window.counts && self.sums.get(&param.name).is_some() => return Ok(()),
            _ => {}
        }
        self.sums.add(param, gradient)
    }

    /// On a GPU the GEMM of the next micro-batch accumulates into the sum: no second gradient tensor, and no extra pass
    /// that adds it to the sum. On the CPU this would be no faster, and would change the order of the sums.
    fn sum(&self, name: &str) -> Option<Tensor> {
        let sum = self.sums.get(name)?;
        // The gradients that an idle rank computes again are not added.
        let counts = self.window.as_ref().is_none_or(|window| window.counts);
        (counts && sum.device().is_cuda() && !self.active.is_masked() && !self.ordered).then(|| sum.clone())
    }

    fn take_elsewhere(&mut self, name: &str, shape: Vec<usize>) -> Result<()> {
        let (Some(reduce), Some(store)) = (&mut self.reduce, self.sharded) else {
            return Ok(());
        };
        if let (Some(tensor), Some(parts)) = (store.own(name), store.parts(name)) {
            let name = store.param(name)?.name.clone();
            return reduce.take_own(&Param { name, tensor }, &shape, parts, None);
        }
        Ok(())
    }

    fn contributors(&self) -> usize {
        self.contributors
    }

    fn in_order(&self) -> bool {
        self.round.is_some()
    }

    fn begin_round(&mut self, contributors: usize) {
        self.contributors = contributors;
        if let Some(round) = &mut self.round {
            round.contributors = contributors;
        }
        if let Some(window) = &mut self.window {
            window.contributors = window.contributors.max(contributors);
            window.counts = window.rank < contributors;
        } else if let Some(reduce) = &mut self.reduce {
            reduce.begin_round(contributors);
        }
    }

    fn end_round(&mut self) -> Result<()> {
        self.reduce.as_mut().map_or(Ok(()), ReduceGradients::flush)
    }
}

/// Updates each weight at once: no gradient outlives its layer. Only for windows of one micro-batch.
pub struct FusedUpdate<'a> {
    /// The parameters that get gradients.
    pub active: &'a ActiveSet,
    /// Updates the weights.
    pub optimizer: &'a mut Optimizer,
    /// Learning rate.
    pub lr: f64,
    /// Clipping factor: known in advance, or 1.
    pub coefficient: f32,
    /// On a GPU: a clipping factor that the host does not know.
    pub further: Option<&'a Tensor>,
    /// Losses and squares. On a GPU no weight changes after the first non-finite value; the host does not wait for it.
    pub step_stats: &'a StepStats,
    /// Updates of corrected parameters.
    pub corrections: Corrections,
}

impl GradSink for FusedUpdate<'_> {
    fn wants(&self, name: &str) -> bool {
        self.active.wants(name)
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        let (active, lr) = (self.active, self.lr);
        if self.corrections.make(active, self.optimizer, lr, param, &gradient)? {
            return Ok(());
        }
        let subset = self.active.subset(&param.name, gradient.elem_count());
        let gradient = active_part(self.active, param, gradient)?;
        self.step_stats.add_squares(&gradient)?;
        if self.step_stats.known().is_some_and(|sums| !sums.squares.is_finite()) {
            return Err(not_applied(&param.name));
        }
        let update = Update {
            name: &param.name,
            weight: &param.tensor,
            gradient: &gradient,
            subset,
        };
        let gate = FoundInf {
            coefficient: self.further,
            finite: self.step_stats.gate(),
        };
        self.optimizer.update_gated(&[update], self.lr, self.coefficient, gate)
    }
}

/// Only measures the norm: the first of two passes, for clipping without storing gradients (LOMO, Lv et al. 2023,
/// arXiv 2306.09782, section 3.3).
pub struct MeasureNorm<'a> {
    /// The parameters that get gradients.
    pub active: &'a ActiveSet,
    /// Receives the squares of the gradients.
    pub step_stats: &'a StepStats,
    /// The first gradient whose squares are not finite. On a GPU it is not known.
    pub non_finite: Vec<String>,
}

impl GradSink for MeasureNorm<'_> {
    fn wants(&self, name: &str) -> bool {
        self.active.contains(name)
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        self.step_stats
            .add_squares(&active_part(self.active, param, gradient)?)?;
        let known = self.step_stats.known();
        if self.non_finite.is_empty() && known.is_some_and(|sums| !sums.squares.is_finite()) {
            self.non_finite.push(param.name.to_string());
        }
        Ok(())
    }
}

/// Stores every gradient; for tests.
pub struct CollectGradients<'a> {
    /// The parameters that get gradients.
    pub active: &'a ActiveSet,
    /// The gradients by parameter name.
    pub gradients: BTreeMap<String, Tensor>,
}

impl GradSink for CollectGradients<'_> {
    fn wants(&self, name: &str) -> bool {
        self.active.contains(name)
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        match self.gradients.insert(param.name.to_string(), gradient) {
            None => Ok(()),
            Some(_) => {
                Err(Error::internal("one backward pass computed two gradients of one parameter").at(&param.name))
            }
        }
    }
}
