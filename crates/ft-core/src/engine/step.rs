//! One optimizer step: gradients of a window, clipping by the global norm, update.

use super::active::ActiveSet;
use super::clipping::{clip_coefficient, device_coefficient};
use super::config::TrainConfig;
use super::ema::Ema;
use super::hook::StepHook;
use super::layer_graphs::LayerGraphs;
use super::loss_scale::LossScale;
use super::outer::OuterState;
use super::pass::{self, GradientPass, Totals};
use super::reduce::GradientExchange;
use super::sinks::{
    AccumulateGradients, Corrections, FusedUpdate, MeasureNorm, ReduceRanks, advised, held_back, non_finite,
};
use super::strategy::StepStrategy;
use super::window::FailedMicroBatch;
use crate::base::{Error, ErrorKind, Result};
use crate::comm::{Collective, SingleRank};
use crate::data::Batch;
use crate::model::{EmbeddingNoise, Network, Objective, Routers, SequenceConfig, TrainableNetwork};
use crate::ops::step::FoundInf;
use crate::ops::step_stats::{PendingSums, StepStats, StepSums};
use crate::ops::transfer::Copier;
use crate::optim::Optimizer;
use crate::peft::DropoutKey;
use crate::source::TrainableStore;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Lifetime of gradients between backward pass and update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientStorage {
    /// Stored until the window is complete: accumulation and clipping.
    Keep,
    /// Applied and dropped at once: one micro-batch, no clipping.
    Fused,
    /// One pass for the norm, then a fused pass: clipping without storing gradients, one micro-batch.
    NormFirst,
}

impl GradientStorage {
    /// Chooses the fastest correct mode; `keep_fits` is false if the budget cannot hold all gradients at once.
    pub fn choose(micro_batches: usize, max_grad_norm: f64, all_active: bool, keep_fits: bool) -> Self {
        match (micro_batches, max_grad_norm > 0.0) {
            (1, false) if all_active || !keep_fits => Self::Fused,
            (1, true) if !keep_fits => Self::NormFirst,
            _ => Self::Keep,
        }
    }
}

/// A model in training: the network, its loss and its optimizer.
pub struct Engine {
    /// The model, also for decoding between steps.
    pub network: Network,
    /// The source of `network`.
    pub store: Arc<dyn TrainableStore>,
    /// The loss.
    pub objective: Box<dyn Objective>,
    /// Updates the weights; holds moments and fp32 masters.
    pub optimizer: Optimizer,
    /// How a step uses memory.
    pub strategy: StepStrategy,
    /// Copies layer inputs to the host and back, if the strategy offloads them.
    pub input_offload: Option<Copier>,
    /// Layers as CUDA graphs, if the strategy has them and the device can.
    pub layer_graphs: Option<LayerGraphs>,
    /// 0: no clipping.
    pub max_grad_norm: f64,
    /// Seed of dropout and stochastic rounding.
    pub seed: u64,
    /// Factor of the noise on the embeddings in training (`EmbeddingNoise`); 0: none.
    pub neftune_noise_alpha: f64,
    /// Runs around each update.
    pub step_hook: Option<Box<dyn StepHook>>,
    /// The averages of the trained weights.
    pub ema: Option<Ema>,
    /// The losses of the routers of a mixture of experts, and their metrics.
    pub routers: Routers,
    /// Ranks that share one micro-batch.
    pub sequence: SequenceConfig,
    /// Dynamic loss scaling, for f16.
    pub loss_scale: Option<LossScale>,
    /// The ranks that share the micro-batches of a step; the weights may be divided among them (`ShardedWeights`).
    pub(super) comm: Arc<dyn Collective>,
    /// Each rank has a part of the gradients and of the moments.
    pub(super) divided: bool,
    /// How the gradients of the ranks are added.
    pub(super) exchange: GradientExchange,
    /// Brings gradients to the host, if several ranks have GPUs.
    pub(super) copier: Option<Copier>,
    /// The ranks train alone between averages.
    pub(super) outer: Option<OuterState>,
    /// All ranks have the sums of the last step.
    agreed: bool,
    /// The micro-batch that failed, of the step that was queued last.
    pub failed: FailedMicroBatch,
}

/// A step whose work is queued on the device. On a GPU the host may queue the next one before it reads the result with
/// `Engine::finish`: nothing waits then, and a step that is not finite holds back its update and all later ones.
pub struct QueuedStep {
    step: u64,
    gradients: GradientStorage,
    totals: Totals,
    step_stats: StepStats,
    /// Of the first pass of `NormFirst`.
    first: Option<PendingSums>,
    pub(super) sums: PendingSums,
    /// Names of the gradients in the order of `StepStats::non_finite`.
    names: Vec<Arc<str>>,
    /// The loss scale that is still in the norm.
    unscale: f64,
    /// A gradient overflowed, so nothing was updated.
    skipped: bool,
    /// The parameters that the step changed.
    changed: Arc<BTreeSet<String>>,
}

impl QueuedStep {
    /// Number of trained tokens.
    pub fn trained(&self) -> u64 {
        self.totals.trained
    }

    /// Errors: a loss or a gradient is not finite.
    fn report(&self) -> Result<StepReport> {
        if self.skipped {
            return Ok(StepReport {
                totals: self.totals.with(self.sums.wait()?),
                grad_norm: f64::INFINITY,
                skipped: true,
            });
        }
        if let Some(first) = &self.first
            && !sums_and_norm(first)?.1.is_finite()
        {
            return Err(non_finite(&[], self.step));
        }
        let (sums, grad_norm) = sums_and_norm(&self.sums)?;
        if grad_norm.is_finite() {
            return Ok(StepReport {
                totals: self.totals.with(sums),
                grad_norm: grad_norm * self.unscale,
                skipped: false,
            });
        }
        Err(match self.gradients {
            GradientStorage::Keep => {
                let found = self.step_stats.non_finite()?.into_iter();
                let names = found.filter_map(|i| self.names.get(i));
                let names: Vec<String> = names.map(|name| name.to_string()).collect();
                non_finite(&names, self.step)
            }
            // Updates that the GPU skipped. The CPU has already returned an error at that gradient.
            GradientStorage::Fused | GradientStorage::NormFirst => held_back(self.step),
        })
    }
}

/// The result of a step.
#[derive(Debug, Clone, Copy)]
pub struct StepReport {
    /// Loss and counts of the window.
    pub totals: Totals,
    /// Global norm before clipping; infinite if the step was skipped.
    pub grad_norm: f64,
    /// A gradient was not finite at this loss scale: nothing was updated.
    pub skipped: bool,
}

impl Engine {
    /// Prepares `model` for training steps as `strategy` says, with the default `TrainConfig`: gradients are clipped to a
    /// global norm of 1. `first`: the active parameters of the first step; used with ranks only.
    ///
    /// # Errors
    /// The copy streams of the device cannot be created.
    pub fn new(
        model: TrainableNetwork,
        objective: Box<dyn Objective>,
        optimizer: Optimizer,
        strategy: StepStrategy,
        first: &ActiveSet,
    ) -> Result<Self> {
        Self::with_config(model, objective, optimizer, strategy, first, TrainConfig::default())
    }

    /// As `new`, with these settings.
    ///
    /// # Errors
    /// As for `new`.
    pub fn with_config(
        model: TrainableNetwork,
        objective: Box<dyn Objective>,
        optimizer: Optimizer,
        strategy: StepStrategy,
        first: &ActiveSet,
        config: TrainConfig,
    ) -> Result<Self> {
        let TrainableNetwork { mut network, store } = model;
        strategy.apply(&mut network);
        network.objective_params = objective.params();
        let input_offload = if strategy.offload_inputs {
            Some(Copier::new(&network.device)?)
        } else {
            None
        };
        let mut engine = Self {
            layer_graphs: strategy.graphs_on(&network.device),
            network,
            store,
            objective,
            optimizer,
            strategy,
            input_offload,
            max_grad_norm: config.max_grad_norm,
            seed: config.seed,
            neftune_noise_alpha: config.neftune_noise_alpha,
            step_hook: config.step_hook,
            ema: config.ema.map(Ema::new),
            routers: Routers::new(config.router_losses),
            sequence: SequenceConfig::default(),
            loss_scale: config.loss_scale.map(LossScale::new),
            comm: Arc::new(SingleRank::default()),
            divided: false,
            exchange: GradientExchange::default(),
            copier: None,
            outer: None,
            agreed: false,
            failed: FailedMicroBatch::of(0),
        };
        if let Some(ranks) = config.ranks {
            engine.join(ranks.comm, first, ranks.exchange)?;
            engine.sequence = ranks.sequence;
            if let Some(outer) = ranks.outer {
                engine.train_apart(outer);
            }
        }
        Ok(engine)
    }

    /// The ranks that share the micro-batches of a step.
    pub fn comm(&self) -> &dyn Collective {
        &*self.comm
    }

    /// True if each rank has a part of the gradients and of the optimizer states.
    pub fn is_divided(&self) -> bool {
        self.divided
    }

    /// True if all ranks have this error of the last step, at the same place: a number that is not finite in the sums of all ranks.
    /// An error before, for example of a router, may be that of one rank.
    pub fn is_of_all_ranks(&self, e: &Error) -> bool {
        self.agreed && e.kind() == ErrorKind::NonFinite
    }

    /// Runs step number `step` (from 1) on one window of micro-batches at learning rate `lr`.
    ///
    /// # Errors
    /// A loss or gradient is not finite; with stored gradients the active weights are then unchanged.
    pub fn step(&mut self, step: u64, batches: &[Batch], active: &ActiveSet, lr: f64) -> Result<StepReport> {
        let queued = self.queue_step(step, batches, active, lr, false, None)?;
        self.finish(&queued)
    }

    /// A hook needs all gradients at the update. A step can be skipped only if all gradients are known before it.
    fn effective_gradients(&self) -> GradientStorage {
        match (&self.step_hook, self.strategy.gradients) {
            (Some(_), _) => GradientStorage::Keep,
            (None, GradientStorage::Fused) if self.loss_scale.is_some() => GradientStorage::NormFirst,
            (None, gradients) => gradients,
        }
    }

    /// Steps that the loss scale has skipped so far.
    pub fn skipped_steps(&self) -> u64 {
        self.loss_scale.map_or(0, |scale| scale.skipped)
    }

    /// The factor of the gradients of the next step.
    fn gradient_scale(&self, active: &ActiveSet) -> Result<f64> {
        let Some(scale) = &self.loss_scale else { return Ok(1.0) };
        if active.corrected().next().is_some() {
            return Err(Error::unsupported(
                "a correction is applied as soon as it is computed, so a step with a loss scale cannot skip it",
            )
            .hint("use `Dtype::Bf16` or `Dtype::F32`"));
        }
        if self.routers.losses.any() {
            return Err(Error::unsupported("the losses of routers have no loss scale")
                .hint("use `Dtype::Bf16` or `Dtype::F32`"));
        }
        Ok(f64::from(scale.scale))
    }

    /// True if no weight changes before the last gradient of a step is computed; then a step can be abandoned halfway.
    /// Several ranks always finish a step together.
    pub fn can_abandon(&self, active: &ActiveSet) -> bool {
        self.comm.world().size == 1
            && self.effective_gradients() == GradientStorage::Keep
            && active.corrected().next().is_none()
    }

    /// Queues step number `step`; on a CPU it is complete then. `before`: the step before, if its result was not read
    /// yet. If `may_stop` is set and `can_abandon` holds, a signal ends the step at the next layer.
    ///
    /// # Errors
    /// As `step`; those of `before` too. Kind `Signal` if the step was abandoned: the state is that of the previous
    /// step.
    pub fn queue_step(
        &mut self,
        step: u64,
        batches: &[Batch],
        active: &ActiveSet,
        lr: f64,
        may_stop: bool,
        before: Option<&QueuedStep>,
    ) -> Result<QueuedStep> {
        let may_stop = may_stop && self.can_abandon(active);
        (self.agreed, self.failed) = (false, FailedMicroBatch::of(step));
        self.begin_apart(active)?;
        let queued = self.run_step(step, batches, active, lr, may_stop, before);
        let queued = queued.map_err(|e| advised(e, self.strategy.storage.dtype()));
        if queued.is_ok() {
            self.average(step)?;
        }
        self.place_rows()?;
        queued
    }

    /// Returns the result of a step, when its losses and its norm are known. With averages (`ema`) no later step may be queued
    /// before: the weights are added to them.
    ///
    /// # Errors
    /// A loss or gradient was not finite. With stored gradients (`GradientStorage::Keep`) weights and optimizer states
    /// are those before the step.
    pub fn finish(&mut self, queued: &QueuedStep) -> Result<StepReport> {
        let report = queued.report().map_err(|e| advised(e, self.strategy.storage.dtype()));
        // Without stored gradients the updates before the first value that is not finite were made.
        if let Err(e) = &report
            && e.kind() == ErrorKind::NonFinite
            && queued.gradients == GradientStorage::Keep
        {
            self.optimizer.take_back(queued.step);
        }
        if report.as_ref().is_ok_and(|report| !report.skipped) && self.is_synchronized() {
            self.add_to_averages(&queued.changed)?;
        }
        report
    }

    fn run_step(
        &mut self,
        step: u64,
        batches: &[Batch],
        active: &ActiveSet,
        lr: f64,
        may_stop: bool,
        before: Option<&QueuedStep>,
    ) -> Result<QueuedStep> {
        let (network, seed, gradients) = (&self.network, self.seed, self.effective_gradients());
        let several = self.comm.world().size > 1;
        if several && gradients != GradientStorage::Keep {
            return Err(Error::unsupported(
                "a gradient is applied at once, which several ranks cannot do together",
            ));
        }
        self.check_parts(active)?;
        let scale = self.gradient_scale(active)?;
        let scaled = self.loss_scale.is_some();
        let step_stats = StepStats::new(&network.device)?;
        // The sums whose guard holds back this pass too. A step with a loss scale is known to be finite, or was skipped.
        let mut earlier = before.map(|before| &before.step_stats).filter(|_| !scaled);
        let norm_stats = match gradients {
            GradientStorage::NormFirst => Some(StepStats::new(&network.device)?),
            _ => None,
        };
        // A hook needs the factor of the gradients on the host, and so does the decision to skip a step; corrections have
        // sums of their own.
        let on_device =
            network.device.is_cuda() && self.step_hook.is_none() && active.corrected().next().is_none() && !scaled;
        self.optimizer.begin(step);
        let pass = GradientPass {
            saved_layers: self.strategy.saved_layers,
            input_offload: self.input_offload.as_ref(),
            layer_graphs: self.layer_graphs.as_ref(),
            dropout: Some(DropoutKey { seed, step, micro: 0 }),
            noise: (self.neftune_noise_alpha > 0.0).then_some(EmbeddingNoise {
                alpha: self.neftune_noise_alpha,
                seed,
                step,
                first_row: 0,
            }),
            may_stop,
            routers: Some(&self.routers),
            loss_scale: scale,
            comm: &*self.comm,
            apart: self.outer.is_some(),
            ordered: several || self.exchange.ordered && gradients == GradientStorage::Keep,
            sequence: self.sequence,
            failed: Some(&self.failed),
            ..GradientPass::new(network, self.objective.as_ref(), active, &step_stats)
        };
        let (mut first, mut names) = (None, Vec::new());
        let (mut unscale, mut skipped) = (1.0, false);
        let (totals, sums) = match gradients {
            GradientStorage::Keep => {
                step_stats.follow(earlier)?;
                let alone = SingleRank::default();
                let comm: &dyn Collective = if self.outer.is_some() { &alone } else { &*self.comm };
                let pull = self.proximal()?;
                let among = ReduceRanks {
                    comm,
                    exchange: self.exchange,
                    copier: self.copier.as_ref(),
                };
                let mut sink = AccumulateGradients::new(active, &mut self.optimizer, lr, among, self.store.sharded());
                let totals = pass.window(batches, &mut sink)?;
                sink.complete(comm, self.divided)?;
                self.agreed = self.outer.is_none();
                if scaled {
                    sink.scale((1.0 / scale) as f32)?;
                }
                sink.add(&pull)?;
                if let Some(hook) = &mut self.step_hook {
                    hook.before_update(&|name| sink.gradient(name))?;
                }
                sink.add_squares(&step_stats)?;
                let sums = step_stats.start_reading()?;
                // The device finished the step before while this one was queued. If it failed, `finish` takes its count of
                // updates back, so this step must not count one.
                before.map(QueuedStep::report).transpose()?;
                if on_device {
                    let coefficient = device_coefficient(&step_stats, self.max_grad_norm)?;
                    let gate = FoundInf {
                        coefficient: coefficient.as_ref(),
                        finite: step_stats.gate(),
                    };
                    names = sink.names();
                    sink.update(1.0, gate)?;
                    self.store.updated(&|name| active.contains(name))?;
                } else if scaled && overflowed(&sums)? {
                    skipped = true;
                } else {
                    let (_, grad_norm) = sums_and_norm(&sums)?;
                    if !grad_norm.is_finite() {
                        return Err(non_finite(&sink.non_finite()?, step));
                    }
                    if !sink.corrections.finite()? {
                        return Err(non_finite(&[], step));
                    }
                    let coefficient = clip_coefficient(grad_norm, self.max_grad_norm);
                    sink.update(coefficient, FoundInf::default())?;
                    self.store.updated(&|name| active.contains(name))?;
                    if let Some(hook) = &mut self.step_hook {
                        hook.after_update(step, &|name| sink.gradient(name), coefficient)?;
                    }
                }
                (totals, sums)
            }
            GradientStorage::Fused | GradientStorage::NormFirst => {
                let (mut coefficient, mut further) = (1.0, None);
                if let Some(norm_stats) = &norm_stats {
                    let mut norm = MeasureNorm {
                        active,
                        step_stats: norm_stats,
                        non_finite: Vec::new(),
                    };
                    let norm_pass = GradientPass {
                        step_stats: norm_stats,
                        ..pass
                    };
                    let totals = norm_pass.window(batches, &mut norm)?;
                    let sums = norm_stats.start_reading()?;
                    norm_stats.follow(earlier)?;
                    earlier = Some(norm_stats);
                    if on_device {
                        further = device_coefficient(norm_stats, self.max_grad_norm)?;
                    } else if scaled && overflowed(&sums)? {
                        skipped = true;
                    } else {
                        let (_, grad_norm) = sums_and_norm(&sums)?;
                        if !grad_norm.is_finite() {
                            return Err(non_finite(&norm.non_finite, step));
                        }
                        unscale = 1.0 / scale;
                        coefficient = clip_coefficient(grad_norm * unscale, self.max_grad_norm) * unscale as f32;
                    }
                    if skipped {
                        return self.skipped_step(step, totals, step_stats, sums);
                    }
                    first = Some(sums);
                }
                step_stats.follow(earlier)?;
                // The first of two passes has counted the tokens of each expert.
                let again = Routers::new(self.routers.losses);
                let routers = Some(if first.is_some() { &again } else { &self.routers });
                let pass = GradientPass { routers, ..pass };
                let optimizer = &mut self.optimizer;
                let mut sink = FusedUpdate {
                    active,
                    optimizer,
                    lr,
                    coefficient,
                    further: further.as_ref(),
                    step_stats: &step_stats,
                    corrections: Corrections::default(),
                };
                let totals = pass.window(batches, &mut sink)?;
                let corrected = sink.corrections;
                let sums = step_stats.start_reading()?;
                if !corrected.finite()? {
                    // If a loss is not finite, that is the error.
                    sums_and_norm(&sums)?;
                    return Err(held_back(step));
                }
                (totals, sums)
            }
        };
        if skipped {
            return self.skipped_step(step, totals, step_stats, sums);
        }
        if let Some(scale) = &mut self.loss_scale {
            scale.update(false)?;
        }
        Ok(QueuedStep {
            step,
            gradients,
            totals,
            step_stats,
            first,
            sums,
            names,
            unscale,
            skipped,
            changed: active.all(),
        })
    }

    /// Lowers the loss scale after a step that overflowed.
    fn skipped_step(
        &mut self,
        step: u64,
        totals: Totals,
        step_stats: StepStats,
        sums: PendingSums,
    ) -> Result<QueuedStep> {
        if let Some(scale) = &mut self.loss_scale {
            scale.update(true)?;
        }
        Ok(QueuedStep {
            step,
            gradients: self.effective_gradients(),
            totals,
            step_stats,
            first: None,
            sums,
            names: Vec::new(),
            unscale: 1.0,
            skipped: true,
            changed: Arc::default(),
        })
    }
}

/// Waits for the sums of a pass; true if the loss or a gradient is not finite.
fn overflowed(pending: &PendingSums) -> Result<bool> {
    let sums = pending.wait()?;
    Ok(!(sums.loss.is_finite() && sums.squares.is_finite()))
}

/// Waits for the sums of a pass; returns them with the global gradient norm. Errors: a loss that is not finite.
fn sums_and_norm(pending: &PendingSums) -> Result<(StepSums, f64)> {
    let sums = pending.wait()?;
    if sums.loss.is_finite() {
        Ok((sums, sums.squares.sqrt()))
    } else {
        Err(pass::non_finite_loss(sums.loss))
    }
}
