//! One optimizer step: gradients of a window, clipping by the global norm, update.

use super::active::Active;
use super::hook::StepHook;
use super::pass::{self, Pass, Totals};
use super::reduce::Exchange;
use super::sinks::{Accumulate, Corrections, FusedUpdate, Norm};
use super::strategy::StepStrategy;
use crate::base::{Error, ErrorKind, Result};
use crate::comm::{Alone, Collective};
use crate::data::Batch;
use crate::model::{Network, Objective, Routers, TrainableNetwork};
use crate::ops::step::FoundInf;
use crate::ops::step_stats::{PendingSums, StepStats, StepSums};
use crate::ops::transfer::Copier;
use crate::ops::update;
use crate::optim::Optimizer;
use crate::peft::Dropout;
use crate::source::{Prepacking, TrainableStore};
use candle_core::Tensor;
use std::sync::Arc;

/// Lifetime of gradients between backward pass and update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gradients {
    /// Stored until the window is complete: accumulation and clipping.
    Keep,
    /// Applied and dropped at once: one micro-batch, no clipping.
    Fused,
    /// One pass for the norm, then a fused pass: clipping without storing gradients, one micro-batch.
    NormFirst,
}

impl Gradients {
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
    /// 0: no clipping.
    pub max_grad_norm: f64,
    /// Seed of dropout and stochastic rounding.
    pub seed: u64,
    /// Runs around each update.
    pub step_hook: Option<Box<dyn StepHook>>,
    /// The losses of the routers of a mixture of experts, and their metrics.
    pub routers: Routers,
    /// The ranks that share the micro-batches of a step; every one has all weights (`Engine::join`).
    pub(super) comm: Arc<dyn Collective>,
    /// Each rank has a part of the gradients and of the moments.
    pub(super) divided: bool,
    /// How the gradients of the ranks are added.
    pub(super) exchange: Exchange,
}

/// A step whose work is queued on the device. On a GPU the host may queue the next one before it reads the result with
/// `Engine::finish`: nothing waits then, and a step that is not finite holds back its update and all later ones.
pub struct QueuedStep {
    step: u64,
    gradients: Gradients,
    totals: Totals,
    step_stats: StepStats,
    /// Of the first pass of `NormFirst`.
    first: Option<PendingSums>,
    sums: PendingSums,
    /// Names of the gradients in the order of `StepStats::non_finite`.
    names: Vec<Arc<str>>,
}

impl QueuedStep {
    /// Number of trained tokens.
    pub fn trained(&self) -> u64 {
        self.totals.trained
    }

    /// Errors: a loss or a gradient is not finite.
    fn report(&self) -> Result<StepReport> {
        if let Some(first) = &self.first
            && !numbers(first)?.1.is_finite()
        {
            return Err(non_finite(&[], self.step));
        }
        let (sums, grad_norm) = numbers(&self.sums)?;
        if grad_norm.is_finite() {
            let totals = self.totals.with(sums);
            return Ok(StepReport { totals, grad_norm });
        }
        Err(match self.gradients {
            Gradients::Keep => {
                let found = self.step_stats.non_finite()?.into_iter();
                let names = found.filter_map(|i| self.names.get(i));
                let mut names: Vec<String> = names.map(|name| name.to_string()).collect();
                names.sort();
                non_finite(&names, self.step)
            }
            // Updates that the GPU skipped. The CPU has already returned an error at that gradient.
            Gradients::Fused | Gradients::NormFirst => held_back(self.step),
        })
    }
}

/// The result of a step.
#[derive(Debug, Clone, Copy)]
pub struct StepReport {
    /// Loss and counts of the window.
    pub totals: Totals,
    /// Global norm before clipping.
    pub grad_norm: f64,
}

impl Engine {
    /// Prepares `model` for training steps as `strategy` says. Gradients are clipped to a global norm of 1; change
    /// `max_grad_norm` and `seed` before the first step. `first`: the active parameters of the first step.
    ///
    /// # Errors
    /// The copy streams of the device cannot be created.
    pub fn new(
        model: TrainableNetwork,
        objective: Box<dyn Objective>,
        optimizer: Optimizer,
        strategy: StepStrategy,
        first: &Active,
    ) -> Result<Self> {
        let TrainableNetwork { mut network, mut store } = model;
        network.mlp_tokens = strategy.mlp_tokens;
        network.products = strategy.storage.products();
        network.objective_params = objective.params();
        if let Some(copies) = &strategy.packed_copies {
            store = Arc::new(Prepacking::new(store, copies.clone(), first.names()));
            network.source = store.clone();
        }
        let input_offload = if strategy.offload_inputs {
            Some(Copier::new(&network.device)?)
        } else {
            None
        };
        Ok(Self {
            network,
            store,
            objective,
            optimizer,
            strategy,
            input_offload,
            max_grad_norm: 1.0,
            seed: 0,
            step_hook: None,
            routers: Routers::default(),
            comm: Arc::new(Alone::default()),
            divided: false,
            exchange: Exchange::default(),
        })
    }

    /// The ranks that share the micro-batches of a step.
    pub fn comm(&self) -> &dyn Collective {
        &*self.comm
    }

    /// True if each rank has a part of the gradients and of the optimizer states.
    pub fn is_divided(&self) -> bool {
        self.divided
    }

    /// Runs step number `step` (from 1) on one window of micro-batches at learning rate `lr`.
    ///
    /// # Errors
    /// A loss or gradient is not finite; with stored gradients the active weights are then unchanged.
    pub fn step(&mut self, step: u64, batches: &[Batch], active: &Active, lr: f64) -> Result<StepReport> {
        let queued = self.queue_step(step, batches, active, lr, false, None)?;
        self.finish(&queued)
    }

    /// A hook needs all gradients at the update.
    fn effective_gradients(&self) -> Gradients {
        match self.step_hook {
            Some(_) => Gradients::Keep,
            None => self.strategy.gradients,
        }
    }

    /// True if no weight changes before the last gradient of a step is computed; then a step can be abandoned halfway.
    /// Several ranks always finish a step together.
    pub fn changes_last(&self, active: &Active) -> bool {
        self.comm.world().size == 1
            && self.effective_gradients() == Gradients::Keep
            && active.corrected().next().is_none()
    }

    /// Queues step number `step`; on a CPU it is complete then. `before`: the step before, if its result was not read
    /// yet. If `may_stop` is set and `changes_last` holds, a signal ends the step at the next layer.
    ///
    /// # Errors
    /// As `step`; those of `before` too. Kind `Signal` if the step was abandoned: the state is that of the previous
    /// step.
    pub fn queue_step(
        &mut self,
        step: u64,
        batches: &[Batch],
        active: &Active,
        lr: f64,
        may_stop: bool,
        before: Option<&QueuedStep>,
    ) -> Result<QueuedStep> {
        let may_stop = may_stop && self.changes_last(active);
        let queued = self.run_step(step, batches, active, lr, may_stop, before);
        for rows in &self.network.tokens {
            rows.place(&self.network)?;
        }
        queued
    }

    /// Returns the result of a step, when its losses and its norm are known.
    ///
    /// # Errors
    /// A loss or gradient was not finite. With stored gradients (`Gradients::Keep`) weights and optimizer states are
    /// those before the step.
    pub fn finish(&mut self, queued: &QueuedStep) -> Result<StepReport> {
        let report = queued.report();
        // Without stored gradients the updates before the first value that is not finite were made.
        if let Err(e) = &report
            && e.kind() == ErrorKind::NonFinite
            && queued.gradients == Gradients::Keep
        {
            self.optimizer.take_back(queued.step);
        }
        report
    }

    fn run_step(
        &mut self,
        step: u64,
        batches: &[Batch],
        active: &Active,
        lr: f64,
        may_stop: bool,
        before: Option<&QueuedStep>,
    ) -> Result<QueuedStep> {
        let (network, seed, gradients) = (&self.network, self.seed, self.effective_gradients());
        let several = self.comm.world().size > 1;
        if several && gradients != Gradients::Keep {
            return Err(Error::unsupported(
                "a gradient is applied at once, which several ranks cannot do together",
            ));
        }
        let step_stats = StepStats::new(&network.device)?;
        // The sums whose guard holds back this pass too.
        let mut earlier = before.map(|before| &before.step_stats);
        let norm_stats = match gradients {
            Gradients::NormFirst => Some(StepStats::new(&network.device)?),
            _ => None,
        };
        // A hook needs the factor of the gradients on the host; corrections have sums of their own.
        let on_device = network.device.is_cuda() && self.step_hook.is_none() && active.corrected().next().is_none();
        self.optimizer.begin(step);
        let pass = Pass {
            saved_layers: self.strategy.saved_layers,
            input_offload: self.input_offload.as_ref(),
            dropout: Some(Dropout { seed, step, micro: 0 }),
            may_stop,
            routers: Some(&self.routers),
            comm: &*self.comm,
            ..Pass::new(network, self.objective.as_ref(), active, &step_stats)
        };
        let (mut first, mut names) = (None, Vec::new());
        let (totals, sums) = match gradients {
            Gradients::Keep => {
                step_stats.follow(earlier)?;
                let mut sink = Accumulate::new(active, &mut self.optimizer, lr, (&*self.comm, self.exchange));
                let totals = pass.window(batches, &mut sink)?;
                sink.complete(&*self.comm, self.divided)?;
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
                    sink.update(1.0, gate)?;
                    names = sink.order;
                } else {
                    let (_, grad_norm) = numbers(&sums)?;
                    if !grad_norm.is_finite() {
                        return Err(non_finite(&sink.non_finite()?, step));
                    }
                    if !sink.corrections.finite()? {
                        return Err(non_finite(&[], step));
                    }
                    let coefficient = clip_coefficient(grad_norm, self.max_grad_norm);
                    sink.update(coefficient, FoundInf::default())?;
                    if let Some(hook) = &mut self.step_hook {
                        hook.after_update(step, &|name| sink.gradient(name), coefficient)?;
                    }
                }
                (totals, sums)
            }
            Gradients::Fused | Gradients::NormFirst => {
                let (mut coefficient, mut further) = (1.0, None);
                if let Some(norm_stats) = &norm_stats {
                    let mut norm = Norm {
                        active,
                        step_stats: norm_stats,
                    };
                    let norm_pass = Pass {
                        step_stats: norm_stats,
                        ..pass
                    };
                    norm_pass.window(batches, &mut norm)?;
                    let sums = norm_stats.start_reading()?;
                    norm_stats.follow(earlier)?;
                    earlier = Some(norm_stats);
                    if on_device {
                        further = device_coefficient(norm_stats, self.max_grad_norm)?;
                    } else {
                        let (_, grad_norm) = numbers(&sums)?;
                        if !grad_norm.is_finite() {
                            return Err(non_finite(&[], step));
                        }
                        coefficient = clip_coefficient(grad_norm, self.max_grad_norm);
                    }
                    first = Some(sums);
                }
                step_stats.follow(earlier)?;
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
                    numbers(&sums)?;
                    return Err(held_back(step));
                }
                (totals, sums)
            }
        };
        Ok(QueuedStep {
            step,
            gradients,
            totals,
            step_stats,
            first,
            sums,
            names,
        })
    }
}

/// Waits for the sums of a pass; returns them with the global gradient norm. Errors: a loss that is not finite.
fn numbers(pending: &PendingSums) -> Result<(StepSums, f64)> {
    let sums = pending.wait()?;
    if sums.loss.is_finite() {
        Ok((sums, sums.squares.sqrt()))
    } else {
        Err(pass::non_finite_loss(sums.loss))
    }
}

/// The clipping factor of the squares so far, on the GPU.
fn device_coefficient(step_stats: &StepStats, max: f64) -> Result<Option<Tensor>> {
    match step_stats.squares()?.filter(|_| max > 0.0) {
        Some(squares) => Ok(Some(update::clip_coefficient(&squares, max)?)),
        None => Ok(None),
    }
}

/// As `torch.nn.utils.clip_grad_norm_`: min(1, max / (norm + 1e-6)).
fn clip_coefficient(norm: f64, max: f64) -> f32 {
    if max > 0.0 {
        (max / (norm + 1e-6)).min(1.0) as f32
    } else {
        1.0
    }
}

fn non_finite(names: &[String], step: u64) -> Error {
    let shown = names[..names.len().min(5)].join(", ");
    Error::non_finite(format!(
        "a gradient is not finite at step {step}; the weights were not changed by this step"
    ))
    .found(if shown.is_empty() {
        "a norm that is not finite".to_string()
    } else {
        shown
    })
    .hint("lower the learning rate, check the data, or use `Dtype::F32`")
}

/// The error of the modes that apply gradients at once.
fn held_back(step: u64) -> Error {
    Error::non_finite(format!(
        "a gradient is not finite at step {step}; this gradient and all later ones of the step were not applied"
    ))
    .hint("lower the learning rate, check the data, or use `Dtype::F32`")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Example;
    use crate::model::{families, shapes};
    use crate::ops::Dtype;
    use crate::optim::config::{OptimizerConfig, OptimizerName};
    use crate::sft::CausalLm;
    use crate::source::Resident;
    use candle_core::Device;

    /// A small model, trained with SGD, and its parameters.
    fn engine(gradients: Gradients) -> (Engine, Active) {
        let spec = families::read(&shapes::config("shape:small").unwrap().unwrap()).unwrap();
        let (params, vocab) = (spec.params(), spec.vocab);
        let settings = OptimizerConfig {
            name: OptimizerName::Sgd,
            ..OptimizerConfig::default()
        };
        let source = Resident::random(params.clone(), 1, 0.02, 1.0, Dtype::F32, &Device::Cpu).unwrap();
        let active = Active::new(params.iter().map(|p| p.name.to_string()));
        let model = TrainableNetwork::new(spec, Arc::new(source), Device::Cpu);
        let strategy = StepStrategy {
            gradients,
            ..StepStrategy::new(Dtype::F32)
        };
        let (objective, optimizer) = (Box::new(CausalLm::new(vocab)), Optimizer::new(settings));
        (
            Engine::new(model, objective, optimizer, strategy, &active).unwrap(),
            active,
        )
    }

    fn batches() -> [Batch; 1] {
        let row = Example {
            ids: (0..24).map(|t| (37 * t + 5) % 4096).collect(),
            trained: vec![true; 24],
        };
        [Batch::from_examples([&row])]
    }

    /// Two steps of SGD on one micro-batch: the change of every weight, and the reported norm.
    fn way(gradients: Gradients, max_grad_norm: f64) -> (Vec<f32>, f64) {
        let (mut engine, active) = engine(gradients);
        engine.max_grad_norm = max_grad_norm;
        let weights = |engine: &Engine| {
            let mut all = Vec::new();
            for name in active.names() {
                let add = &mut |some: &[f32]| {
                    all.extend_from_slice(some);
                    Ok(())
                };
                engine.exact(name, add).unwrap();
            }
            all
        };
        let before = weights(&engine);
        let mut norm = 0.0;
        for step in 1..=2 {
            norm = engine.step(step, &batches(), &active, 0.1).unwrap().grad_norm;
        }
        let moved = weights(&engine).iter().zip(&before).map(|(a, b)| a - b).collect();
        (moved, norm)
    }

    fn distance(a: &[f32], b: &[f32]) -> f64 {
        let squares = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2));
        squares.sum::<f64>().sqrt()
    }

    #[test]
    fn every_way_of_gradients_goes_the_same_way() {
        let kept = way(Gradients::Keep, 0.0);
        let size = distance(&kept.0, &vec![0.0; kept.0.len()]);
        let fused = way(Gradients::Fused, 0.0);
        assert!(fused == kept, "applied as they come");
        // A clip that halves the update.
        let max = 0.5 * kept.1;
        let (kept, twice) = (way(Gradients::Keep, max), way(Gradients::NormFirst, max));
        assert!(distance(&kept.0, &fused.0) > 0.3 * size, "nothing was clipped");
        assert!(twice == kept, "in two passes");
    }

    #[test]
    fn a_step_that_was_held_back_is_not_counted() {
        for (gradients, counted) in [(Gradients::Keep, 1), (Gradients::Fused, 2), (Gradients::NormFirst, 2)] {
            let (mut engine, active) = engine(gradients);
            engine.step(1, &batches(), &active, 0.1).unwrap();
            let mut queued = engine.queue_step(2, &batches(), &active, 0.1, false, None).unwrap();
            // As a GPU reports it, after it has skipped the updates.
            let sums = StepStats::new(&Device::Cpu).unwrap();
            sums.add(StepSums {
                squares: f64::NAN,
                ..StepSums::default()
            });
            queued.sums = sums.start_reading().unwrap();
            let error = engine.finish(&queued).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NonFinite);
            let counts: Vec<u64> = engine.optimizer.saved().map(|state| state.step).collect();
            assert!(
                !counts.is_empty() && counts.iter().all(|count| *count == counted),
                "{gradients:?}"
            );
        }
    }
}
