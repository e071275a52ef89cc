//! The forward pass, which saves the inputs of the layers and the activations of the uppermost ones; the objective; the
//! backward pass.

use super::active::ActiveSet;
use super::layer_graphs::LayerGraphs;
use super::window::{self, FailedMicroBatch, MicroReport};
use crate::base::progress::{self, Phase};
use crate::base::{Error, Result, signal};
use crate::comm::{Collective, SingleRank};
use crate::data::Batch;
use crate::model::routers::{RouterTally, Routers};
use crate::model::spec::EMBEDDING;
use crate::model::{
    Context, EmbeddingNoise, GradSink, Layer, Network, Objective, ObjectiveNeeds, ParamGradient, SequenceConfig,
    SequenceRanks, TokenRows,
};
use crate::ops::step_stats::{StepStats, StepSums};
use crate::ops::transfer::{ArrivingTensor, Copier, OffloadedTensor};
use crate::ops::update;
use crate::peft::DropoutKey;
use crate::source::Group;
use crate::trace;
use candle_core::{DType, Tensor};
use std::sync::LazyLock;

/// Sums over batches.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Totals {
    /// Sum of the loss, before the division by `weight`.
    pub loss_sum: f64,
    /// Divisor of the loss: for most objectives the number of trained tokens.
    pub weight: u64,
    /// Trained tokens.
    pub trained: u64,
    /// Trained tokens whose most likely prediction is correct.
    pub correct: u64,
    /// All tokens.
    pub tokens: u64,
}

impl Totals {
    /// The loss: the sum divided by the weight.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.weight as f64
    }

    /// Adds the totals of other batches.
    pub fn add(&mut self, other: Totals) {
        self.loss_sum += other.loss_sum;
        self.weight += other.weight;
        self.trained += other.trained;
        self.correct += other.correct;
        self.tokens += other.tokens;
    }

    /// Adds the counts of a batch.
    pub fn count(&mut self, batch: &Batch, objective: &dyn Objective) {
        self.weight += objective.weight(batch) as u64;
        self.trained += batch.trained() as u64;
        self.tokens += batch.len() as u64;
    }

    /// These totals with the sums of a step.
    pub fn with(self, sums: StepSums) -> Self {
        Self {
            loss_sum: sums.loss,
            correct: sums.correct as u64,
            ..self
        }
    }
}

/// Bit of a key of dropout masks where the number of the rank begins; below are micro-batch and piece.
const PART_OF_MICRO: u32 = 56;

/// Cost of the backward pass of a layer in forward passes, with recomputation.
const BACKWARD: u64 = 3;

/// Progress of a micro-batch, layer by layer.
struct LayerProgress {
    phase: Phase,
    layers: usize,
}

impl LayerProgress {
    fn new(layers: usize, lowest: usize) -> Self {
        Self {
            phase: progress::part("layer", layers + BACKWARD as usize * (layers - lowest)),
            layers,
        }
    }

    fn forward(&self, layer: usize) {
        self.phase.note(format!("forward {}/{}", layer + 1, self.layers));
        self.phase.set(layer as u64);
    }

    fn backward(&self, layer: usize) {
        let above = (self.layers - 1 - layer) as u64;
        self.phase.note(format!("backward {}/{}", above + 1, self.layers));
        self.phase.set(self.layers as u64 + BACKWARD * above);
    }
}

/// The saved input of a layer until its backward pass: on the device, offloaded, or being prefetched.
enum SavedInput {
    OnDevice(Tensor),
    Offloaded(OffloadedTensor),
    InFlight(ArrivingTensor),
}

impl SavedInput {
    /// Starts the prefetch of an offloaded input.
    fn prefetch(self, copier: Option<&Copier>) -> Result<Self> {
        match (self, copier) {
            (SavedInput::Offloaded(offloaded), Some(copier)) => Ok(SavedInput::InFlight(copier.fetch(offloaded)?)),
            (other, _) => Ok(other),
        }
    }

    fn get(self, copier: Option<&Copier>) -> Result<Tensor> {
        match (self.prefetch(copier)?, copier) {
            (SavedInput::OnDevice(x), _) => Ok(x),
            (SavedInput::InFlight(arriving), Some(copier)) => copier.receive(arriving),
            _ => Err(Error::internal("internal: an offloaded layer input has no copy engine")),
        }
    }
}

/// A forward and backward pass without an update: gradients of `active` go to a sink. Activations that are not saved are
/// recomputed, bit-exactly.
#[derive(Clone, Copy)]
pub struct GradientPass<'a> {
    /// The model.
    pub network: &'a Network,
    /// The loss.
    pub objective: &'a dyn Objective,
    /// The parameters that get gradients.
    pub active: &'a ActiveSet,
    /// Receives loss and correct predictions.
    pub step_stats: &'a StepStats,
    /// Number of uppermost layers whose activations are saved; of the others only the inputs are saved.
    pub saved_layers: usize,
    /// Offloads layer inputs to the host.
    pub input_offload: Option<&'a Copier>,
    /// Layers as CUDA graphs; those that can be recorded save no activations.
    pub layer_graphs: Option<&'a LayerGraphs>,
    /// Key of the dropout masks of the first micro-batch; `None`: no dropout.
    pub dropout: Option<DropoutKey>,
    /// The noise on the embeddings of the first micro-batch; `None`: no noise.
    pub noise: Option<EmbeddingNoise>,
    /// The pass changes no weights, so a signal may end it at any layer.
    pub may_stop: bool,
    /// The losses of the routers of a mixture of experts, and their metrics.
    pub routers: Option<&'a Routers>,
    /// Factor of all gradients.
    pub loss_scale: f64,
    /// The ranks that share the window.
    pub comm: &'a dyn Collective,
    /// Each rank has gradients of its own micro-batches only, divided by their weight.
    pub apart: bool,
    /// On a GPU too the losses of each micro-batch are summed by themselves, then in the order of the micro-batches: the sums
    /// are on the host at the end.
    pub ordered: bool,
    /// Ranks that share one micro-batch.
    pub sequence: SequenceConfig,
    /// Here the pass stores which micro-batch failed.
    pub failed: Option<&'a FailedMicroBatch>,
}

impl<'a> GradientPass<'a> {
    /// On one rank, without dropout; saves layer inputs only, on the device.
    pub fn new(
        network: &'a Network,
        objective: &'a dyn Objective,
        active: &'a ActiveSet,
        step_stats: &'a StepStats,
    ) -> Self {
        static ALONE: LazyLock<SingleRank> = LazyLock::new(SingleRank::default);
        Self {
            network,
            objective,
            active,
            step_stats,
            saved_layers: 0,
            input_offload: None,
            layer_graphs: None,
            dropout: None,
            noise: None,
            may_stop: false,
            routers: None,
            loss_scale: 1.0,
            comm: &*ALONE,
            apart: false,
            ordered: false,
            sequence: SequenceConfig::default(),
            failed: None,
        }
    }

    /// Errors: a signal asks to stop, and the pass may stop.
    fn unless_stopped(&self) -> Result<()> {
        match signal::received().filter(|_| self.may_stop) {
            Some(s) => Err(Error::signal(
                s,
                "stopped within a step; this step did not change the weights",
            )),
            None => Ok(()),
        }
    }

    /// Runs the micro-batches of one optimizer step. The gradients are scaled by `loss_scale` / (weight of the whole window). The
    /// returned totals contain the counts only; `step_stats` has the sums. `batches`: the window of all ranks; each rank
    /// computes its part of it (`window::rounds`).
    ///
    /// # Errors
    /// No token is trained (`Argument`); a batch that does not fit the model; a failed read of the weights; any error
    /// of the objective and of `sink`.
    pub fn window(&self, batches: &[Batch], sink: &mut dyn GradSink) -> Result<Totals> {
        let weight: usize = batches.iter().map(|b| self.objective.weight(b)).sum();
        if weight == 0 {
            return Err(
                Error::argument("nothing is trained in this step: every token of its rows is masked")
                    .hint("look at the encoded rows"),
            );
        }
        let filled: Vec<usize> = (0..batches.len()).filter(|i| !batches[*i].is_empty()).collect();
        let mut rounds = window::rounds(&filled, &window::teams(self.comm.world(), self.sequence.ranks));
        let (mut weight, mut share) = (weight, filled.len());
        if self.apart {
            rounds.retain(|round| round.counts);
            weight = self.own_weight(batches, &filled)?;
            share = rounds.len();
        }
        let share = 1.0 / share as f64;
        let mut totals = Totals::default();
        for index in &filled {
            totals.count(&batches[*index], self.objective);
        }
        let on_host = self.step_stats.known().is_some();
        let note = |micro: usize| self.failed.iter().for_each(|failed| failed.note(micro));
        let (mut reports, mut sums) = (Vec::new(), Vec::new());
        let phase = progress::part("micro-batch", rounds.len());
        for (done, round) in rounds.iter().enumerate() {
            phase.set(done as u64);
            let (micro, batch) = (round.micro as u64, &batches[round.micro]);
            let dropout = self.dropout.map(|key| DropoutKey { micro, ..key });
            let sequence = self.shared(batch)?;
            let part = sequence.as_ref().map(|sequence| sequence.part(batch)).transpose()?;
            let mut ctx = match &sequence {
                Some(sequence) => {
                    // Each rank has masks of its own.
                    let part = (self.comm.world().rank % self.sequence.ranks) as u64;
                    let dropout = dropout.map(|key| DropoutKey {
                        micro: key.micro + (part << PART_OF_MICRO),
                        ..key
                    });
                    self.network.context_of(sequence, batch, dropout)?
                }
                None => self.network.context(&batch.positions, &batch.documents, dropout)?,
            };
            ctx.noise = self.noise.map(|noise| EmbeddingNoise {
                first_row: batches[..round.micro].iter().map(rows).sum::<usize>() as u64,
                ..noise
            });
            if let Some(routers) = self.routers {
                ctx.shared.watch_routers(RouterTally::new(routers.losses, share));
            }
            sink.begin_round(round.contributors * self.sequence.ranks);
            // Else the sums of the window stay on the GPU.
            let own = (on_host || self.ordered)
                .then(|| StepStats::new(&self.network.device))
                .transpose()?;
            let step_stats = own.as_ref().unwrap_or(self.step_stats);
            let _span = trace::numbered("micro-batch", round.micro);
            let batch = part.as_ref().unwrap_or(batch);
            let passed = self.micro_batch(batch, &ctx, self.loss_scale / weight as f64, step_stats, sink);
            passed.inspect_err(|_| note(round.micro))?;
            sink.end_round()?;
            let routed = ctx.shared.take_routers();
            let report = MicroReport {
                micro,
                sums: StepSums::default(),
                means: window::take_means(self.objective),
                routers: routed.map(|tally| tally.to_wire()).unwrap_or_default(),
            };
            if round.counts {
                reports.push(report);
                sums.push(own.map(|own| own.start_reading()).transpose()?);
            }
        }
        for (report, sums) in reports.iter_mut().zip(sums) {
            report.sums = sums.map_or(Ok(StepSums::default()), |sums| sums.wait())?;
        }
        let mut all = StepSums::default();
        let reports = window::all(self.comm, reports)?;
        for report in &reports {
            all = all.plus(report.sums);
            if !report.sums.loss.is_finite() {
                note(report.micro as usize);
            }
            report.put_back(self.objective);
        }
        window::add_routers(self.routers, &reports);
        if on_host || self.ordered {
            self.step_stats.set_losses(all)?;
        }
        Ok(totals)
    }

    /// The tokens of this rank, if several share a micro-batch.
    fn shared<'b>(&'b self, batch: &'b Batch) -> Result<Option<SequenceRanks<'b>>> {
        if self.sequence.ranks == 1 {
            return Ok(None);
        }
        if self.routers.is_some_and(|routers| routers.losses.any()) {
            return Err(Error::unsupported(
                "router losses need the means over all tokens of a micro-batch, but several ranks share its tokens",
            )
            .hint("set the factors of the router losses to 0, or give each micro-batch to one rank"));
        }
        if self.objective.reads_whole_documents() {
            return Err(SequenceRanks::not_whole());
        }
        self.sequence.check(&self.network.spec)?;
        SequenceRanks::new(self.comm, self.sequence, batch).map(Some)
    }

    /// The weight of the micro-batches of this rank. Errors, on all ranks: one of them has none.
    fn own_weight(&self, batches: &[Batch], filled: &[usize]) -> Result<usize> {
        let world = self.comm.world();
        let of = |rank: usize| -> usize {
            let own = filled.iter().skip(rank).step_by(world.size);
            own.map(|micro| self.objective.weight(&batches[*micro])).sum()
        };
        match (0..world.size).find(|rank| of(*rank) == 0) {
            Some(rank) => Err(Error::argument(
                "nothing is trained on one rank in this step: every token of its rows is masked",
            )
            .found(format!("rank {rank}"))
            .hint("use more micro-batches for each rank, or larger ones")),
            None => Ok(of(world.rank)),
        }
    }

    fn micro_batch(
        &self,
        batch: &Batch,
        ctx: &Context,
        scale: f64,
        step_stats: &StepStats,
        sink: &mut dyn GradSink,
    ) -> Result<()> {
        let GradientPass {
            network,
            objective,
            active,
            input_offload: offload,
            layer_graphs: graphs,
            ..
        } = *self;
        graphs.map_or(Ok(()), |graphs| graphs.begin(ctx))?;
        let layers = network.layers();
        let lowest = active.lowest_layer(layers);
        let need = |dh| ObjectiveNeeds { scale, dh, dw: false };
        let progress = LayerProgress::new(layers, lowest);

        // Forward: save the inputs of the layers that the backward pass visits, and all activations of the uppermost ones.
        let mut inputs = Vec::with_capacity(layers - lowest);
        network.source.prefetch(Group::Layer(0));
        let mut x = {
            let _span = trace::span("embedding");
            network.embed(&batch.ids, ctx)?
        };
        for l in 0..layers {
            self.unless_stopped()?;
            progress.forward(l);
            let _span = trace::numbered("layer", l);
            if l + 1 < layers {
                network.source.prefetch(Group::Layer(l + 1));
            }
            if l < lowest && objective.hidden_layers().contains(&l) {
                let out = objective.evaluate_hidden(l, &x, batch, need(false), step_stats)?;
                pass_on(out.objective_params, sink)?;
            }
            let recorded = graphs.map_or(Ok(None), |graphs| graphs.forward(network, l, &x, ctx))?;
            let y = if recorded.is_none() && l >= lowest && l + self.saved_layers >= layers {
                let (y, saved) = network.block(l)?.forward_saving(&x, ctx)?;
                inputs.push((SavedInput::OnDevice(x), Some(saved)));
                y
            } else {
                let y = match recorded {
                    Some(y) => y,
                    None => network.block(l)?.forward(&x, ctx)?,
                };
                if l >= lowest {
                    // Release the previous input on the device: its copy to the host is usually finished by now.
                    if let (Some(copier), Some((SavedInput::Offloaded(before), _))) = (offload, inputs.last_mut()) {
                        copier.release(before)?;
                    }
                    let input = match offload {
                        Some(copier) => SavedInput::Offloaded(copier.offload(x)?),
                        None => SavedInput::OnDevice(x),
                    };
                    inputs.push((input, None));
                }
                y
            };
            x = y;
        }

        // Prefetch the first input of the backward pass while the loss is computed.
        if let Some((last, saved)) = inputs.pop() {
            inputs.push((last.prefetch(offload)?, saved));
        }

        // Loss, and its gradient with respect to the last hidden states.
        let head = network.head()?;
        let need_dx = lowest < layers || active.lowest() == Group::Embedding;
        let at_the_end = ObjectiveNeeds {
            dw: sink.wants(&head.name) || network.tokens.iter().any(|t| t.table == head.name && t.wanted(sink)),
            ..need(need_dx || network.end_wanted(sink)?)
        };
        let span = trace::span("loss");
        let mut out = objective.evaluate(&network.normalize(&x, ctx)?, &head, batch, at_the_end, step_stats)?;
        drop(span);
        // All ranks of a job look at the sum of all losses.
        if self.comm.world().size == 1
            && let Some(sums) = step_stats.known().filter(|s| !s.loss.is_finite())
        {
            return Err(non_finite_loss(sums.loss));
        }
        pass_on(out.objective_params, sink)?;
        // A tied head is the embedding: its gradient waits for the gradient of the embedding lookup.
        let mut tied = None;
        let mut rows: Vec<(&TokenRows, Tensor)> = Vec::new();
        if let Some(dw) = out.dw.take_if(|_| !sink.wants(&head.name)) {
            // Only some rows of the gradient are needed.
            for t in network.tokens.iter().filter(|t| t.table == head.name && t.wanted(sink)) {
                rows.push((t, t.of_whole(&dw)?));
            }
        }
        if let Some(dw) = out.dw.take() {
            if network.spec.tied {
                tied = Some(dw)
            } else {
                sink.take(&head.param()?, dw)?
            }
        }
        drop(head);
        if !network.spec.tied {
            for (t, gradient) in rows.drain(..) {
                sink.take(&t.param, gradient)?;
            }
        }
        let Some(dh) = out.dh.take() else { return Ok(()) };
        let mut dx = network.normalize_backward(&x, &dh, ctx, sink)?;
        drop((x, dh));

        // Backward, down to the lowest active layer.
        ctx.shared.start_backward(lowest, active.lowest() == Group::Embedding)?;
        for l in (lowest..layers).rev() {
            self.unless_stopped()?;
            progress.backward(l);
            let _span = trace::numbered("layer backward", l);
            // After the lowest layer follows the forward pass of the next batch.
            network
                .source
                .prefetch(Group::Layer(if l > lowest { l - 1 } else { 0 }));
            let need_dx = l > lowest || active.lowest() == Group::Embedding;
            let Some((x, saved)) = inputs.pop() else {
                return Err(Error::internal("internal: a layer input was not saved"));
            };
            // Prefetch the next input while this one is used.
            if let Some((next, saved)) = inputs.pop() {
                inputs.push((next.prefetch(offload)?, saved));
            }
            let x = x.get(offload)?;
            let mut hidden_dx = None;
            if objective.hidden_layers().contains(&l) {
                let out = objective.evaluate_hidden(l, &x, batch, need(need_dx), step_stats)?;
                pass_on(out.objective_params, sink)?;
                hidden_dx = out.dh;
            }
            let recorded = match graphs.filter(|_| saved.is_none() && need_dx) {
                Some(graphs) => graphs.backward(network, l, (&x, &dx), ctx, sink)?,
                None => None,
            };
            let below = match recorded {
                Some(below) => Some(below),
                None => network.block(l)?.vjp(&x, saved, dx, ctx, need_dx, sink)?,
            };
            dx = match (below, hidden_dx) {
                (Some(below), Some(hidden_dx)) => (below + hidden_dx)?,
                (Some(below), None) => below,
                (None, _) => return Ok(()),
            };
        }
        if active.lowest() == Group::Embedding {
            dx = network.spread_backward(&batch.ids, dx, ctx, sink)?;
            network.per_layer_backward(&batch.ids, &dx, ctx, sink)?;
            for t in network.tokens.iter().filter(|t| &*t.table == EMBEDDING) {
                if !t.wanted(sink) {
                    continue;
                }
                let gradient = match rows.pop() {
                    Some((_, gradient)) => gradient,
                    None => t.zeros()?,
                };
                t.add_embedded(network, &gradient, &batch.ids, &dx)?;
                sink.take(&t.param, gradient)?;
            }
            embedding_gradient(network, batch, &dx, tied, sink)?;
        }
        Ok(())
    }
}

/// Number of rows (documents) of a batch.
fn rows(batch: &Batch) -> usize {
    batch.documents.len().saturating_sub(1)
}

/// Passes the gradients of the objective's parameters to the sink, if they are trained.
fn pass_on(objective_params: Vec<ParamGradient>, sink: &mut dyn GradSink) -> Result<()> {
    for ParamGradient { param, gradient } in objective_params {
        if sink.wants(&param.name) {
            sink.take(&param, gradient)?;
        }
    }
    Ok(())
}

fn embedding_gradient(
    network: &Network,
    batch: &Batch,
    dx: &Tensor,
    tied: Option<Tensor>,
    sink: &mut dyn GradSink,
) -> Result<()> {
    if !sink.wants(EMBEDDING) {
        return Ok(());
    }
    let table = network.embedding()?;
    let dw = match tied {
        Some(dw) => dw,
        None => update::zeros(table.tensor.shape(), DType::F32, &network.device)?,
    };
    network.add_lookups(&dw, &batch.ids, dx, network.embedding_factor()?)?;
    sink.take(&table, dw)
}

pub(super) fn non_finite_loss(loss: f64) -> Error {
    Error::non_finite("the loss is not finite; the weights were not changed by this step")
        .found(loss)
        .hint(super::sinks::HINT)
}

/// Loss of one batch, without gradients.
///
/// # Errors
/// As for `Engine::step`, without gradients.
pub fn evaluate(network: &Network, objective: &dyn Objective, batch: &Batch) -> Result<Totals> {
    evaluate_part(network, objective, batch, None)
}

/// As `evaluate`; with `sequence` the sums are those of the tokens of this rank, and the counts those of the batch.
pub(super) fn evaluate_part(
    network: &Network,
    objective: &dyn Objective,
    batch: &Batch,
    sequence: Option<&SequenceRanks>,
) -> Result<Totals> {
    let mut totals = Totals::default();
    if objective.weight(batch) > 0 {
        totals.count(batch, objective);
        let part = sequence.map(|sequence| sequence.part(batch)).transpose()?;
        let ctx: Context = match sequence {
            Some(sequence) => network.context_of(sequence, batch, None)?,
            None => network.context(&batch.positions, &batch.documents, None)?,
        };
        let batch = part.as_ref().unwrap_or(batch);
        let need = ObjectiveNeeds {
            scale: 1.0,
            dh: false,
            dw: false,
        };
        let step_stats = StepStats::new(&network.device)?;
        let h = network.hidden_states_seen(&batch.ids, &ctx, &mut |layer, x| {
            if objective.hidden_layers().contains(&layer) {
                objective.evaluate_hidden(layer, x, batch, need, &step_stats)?;
            }
            Ok(())
        })?;
        objective.evaluate(&h, &network.head()?, batch, need, &step_stats)?;
        totals = totals.with(step_stats.read()?);
    }
    Ok(totals)
}
