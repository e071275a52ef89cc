//! Gradients and optimizer states in parts: each rank has the sums of its part of every gradient, the moments and the low
//! bits of the fp32 masters of this part, updates it, and sends the new values to the others (as ZeRO stage 2: Rajbhandari et al. 2020, arXiv 1910.02054,
//! section 5).

use super::outer::{OUTER, rank_of};
use super::pass::{Totals, evaluate, evaluate_part};
use super::publish::{Publish, publish};
use super::reduce::{GradientExchange, OwnSum};
use super::squares;
use super::step::Engine;
use super::window::teams;
use crate::base::{Error, Result};
use crate::comm::{Collective, Patience, World, part_of};
use crate::data::Batch;
use crate::model::SequenceRanks;
use crate::ops::step::FoundInf;
use crate::ops::step_stats::{StepStats, StepSums};
use crate::ops::transfer::Copier;
use crate::ops::{master, step, update};
use crate::optim::{Optimizer, PartUpdate, range_of_part};
use crate::source::expert_of;
use crate::source::sharded::MatrixDivision;
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// The name of the low bits of a master beside the parts of a state.
const LOW: &str = "low";
/// The exact values of a weight that is stored in parts.
const EXACT: &str = "exact";
/// The average of a weight.
pub(super) const AVERAGE: &str = "average";
/// Elements of the state that are sent or written together.
pub(super) const PIECE: usize = 1 << 20;

/// The own parts of the sums of a window.
pub(super) struct DividedSums<'a> {
    comm: &'a dyn Collective,
    sums: Vec<OwnSum>,
}

impl<'a> DividedSums<'a> {
    pub(super) fn new(comm: &'a dyn Collective, sums: Vec<OwnSum>) -> Self {
        Self { comm, sums }
    }

    /// Names of the parameters.
    pub(super) fn names(&self) -> Vec<Arc<str>> {
        self.sums.iter().map(|sum| sum.param.name.clone()).collect()
    }

    /// Adds the squares of all gradients to `step_stats`, with the bits of one rank.
    pub(super) fn add_squares(&self, step_stats: &StepStats) -> Result<()> {
        squares::add(self.comm, &self.sums, step_stats)
    }

    /// Multiplies all sums by `factor`.
    pub(super) fn scale(&self, factor: f32) -> Result<()> {
        self.sums
            .iter()
            .try_for_each(|sum| update::scale_assign(&sum.sum, factor))
    }

    /// Names of gradients that are not finite on one of the ranks, sorted. Every rank must call it.
    pub(super) fn non_finite(&self) -> Result<Vec<String>> {
        let mut own = Vec::new();
        for sum in &self.sums {
            if !update::all_finite(&sum.sum)? {
                own.push(sum.param.name.to_string());
            }
        }
        let own = own.join("\n").into_bytes();
        let all = self.comm.all_gather_bytes(own, Patience::Step)?;
        let texts: Vec<_> = all.iter().map(|bytes| String::from_utf8_lossy(bytes)).collect();
        let names: BTreeSet<&str> = texts.iter().flat_map(|text| text.lines()).collect();
        Ok(names.into_iter().map(str::to_string).collect())
    }

    /// Updates every weight: each rank its part, with the sums times `coefficient`; `gate` can disable it.
    pub(super) fn update(mut self, optimizer: &mut Optimizer, lr: f64, coefficient: f32, gate: FoundInf) -> Result<()> {
        // A weight that is stored in parts is not sent: it is collected before its next use.
        let stored = self.sums.extract_if(.., |sum| sum.is_stored_in_parts());
        for sum in stored {
            update(optimizer, &[sum], lr, coefficient, gate)?;
        }
        let on_gpu = self.sums.iter().any(|sum| !sum.sum.device().is_cpu());
        if on_gpu {
            // In one launch. A CPU updates a parameter while the one before it travels.
            update(optimizer, &self.sums, lr, coefficient, gate)?;
        }
        let name = |sum: &OwnSum| (sum.param.name.clone(), sum.elements());
        let items: Vec<(Arc<str>, usize)> = self.sums.iter().map(name).collect();
        let is_bf16 = |sum: &OwnSum| sum.param.tensor.dtype() == DType::BF16;
        let mut updating = PartUpdater {
            bf16: self.sums.iter().map(is_bf16).collect(),
            weights: self.sums.iter().map(|sum| sum.param.tensor.clone()).collect(),
            sums: self.sums.into_iter().map(|sum| (!on_gpu).then_some(sum)).collect(),
            names: &items,
            optimizer,
            lr,
            coefficient,
            gate,
        };
        publish(self.comm, &items, &mut updating)
    }
}

/// Updates the own part of a parameter before it is sent.
struct PartUpdater<'a> {
    /// `None`: updated.
    sums: Vec<Option<OwnSum>>,
    bf16: Vec<bool>,
    weights: Vec<Tensor>,
    names: &'a [(Arc<str>, usize)],
    optimizer: &'a mut Optimizer,
    lr: f64,
    coefficient: f32,
    gate: FoundInf<'a>,
}

impl Publish for PartUpdater<'_> {
    fn own(&mut self, item: usize, range: Range<usize>) -> Result<Vec<f32>> {
        if let Some(sum) = self.sums[item].take() {
            update(self.optimizer, &[sum], self.lr, self.coefficient, self.gate)?;
        }
        if range.is_empty() {
            return Ok(Vec::new());
        }
        Optimizer::stored_part(&self.names[item].0, &self.weights[item], &range)
    }

    fn put(&mut self, item: usize, range: Range<usize>, values: &[f32]) -> Result<()> {
        Optimizer::set_part(&self.names[item].0, &self.weights[item], &range, values)
    }

    fn is_bf16(&self, item: usize) -> bool {
        self.bf16[item]
    }
}

fn update(optimizer: &mut Optimizer, sums: &[OwnSum], lr: f64, coefficient: f32, gate: FoundInf) -> Result<()> {
    let parts: Vec<PartUpdate> = sums.iter().map(part).collect();
    optimizer.update_parts(&parts, lr, coefficient, gate)
}

fn part(sum: &OwnSum) -> PartUpdate<'_> {
    PartUpdate {
        name: &sum.param.name,
        weight: &sum.param.tensor,
        shape: &sum.shape,
        range: sum.range.clone(),
        gradient: &sum.sum,
    }
}

/// Collects whole low bits.
struct WholeLowBits {
    own: Vec<Vec<i16>>,
    first: Vec<usize>,
    whole: Vec<Vec<i16>>,
}

impl Publish for WholeLowBits {
    fn own(&mut self, item: usize, range: Range<usize>) -> Result<Vec<f32>> {
        let first = range.start - self.first[item];
        let values = &self.own[item][first..first + range.len()];
        self.whole[item][range].copy_from_slice(values);
        Ok(values.iter().map(|low| f32::from(*low)).collect())
    }

    fn put(&mut self, item: usize, range: Range<usize>, values: &[f32]) -> Result<()> {
        let to = self.whole[item][range].iter_mut();
        to.zip(values).for_each(|(to, value)| *to = *value as i16);
        Ok(())
    }
}

/// Receives the values of a moment in pieces: u8 codes or f32 numbers.
pub type MomentSink<'a> = dyn FnMut(MomentValues) -> Result<()> + 'a;

/// A piece of a moment.
pub enum MomentValues<'a> {
    /// Codes of an 8-bit moment.
    U8(&'a [u8]),
    /// Values, or scales of an 8-bit moment.
    F32(&'a [f32]),
}

/// A tensor of an optimizer state, as rank 0 saves it.
pub struct SavedMoment {
    /// Name of the parameter.
    pub name: String,
    /// Name of the tensor (`SavedState::parts`).
    pub part: &'static str,
    /// `U8` or `F32`
    pub dtype: DType,
    /// Elements on all ranks together.
    pub elements: usize,
}

impl Engine {
    /// Joins a job: the ranks share the micro-batches of every step. Gradients and moments are divided if every element is
    /// updated by itself and nothing needs whole gradients. `active`: the active parameters of any step.
    ///
    /// # Errors
    /// The copy stream of a GPU cannot be created.
    pub fn join(
        &mut self,
        comm: Arc<dyn Collective>,
        active: &super::ActiveSet,
        exchange: GradientExchange,
    ) -> Result<()> {
        let device = &self.network.device;
        if comm.world().size > 1 && !device.is_cpu() {
            self.copier = Some(Copier::new(device)?);
        }
        self.divided = divides(
            comm.world().size,
            self.optimizer.can_divide(),
            active.is_masked(),
            self.step_hook.is_some(),
        );
        self.comm = comm;
        self.exchange = exchange;
        Ok(())
    }

    /// Errors: weights in parts that cannot be updated in parts.
    pub(super) fn check_parts(&self, active: &super::ActiveSet) -> Result<()> {
        let Some(store) = self.store.sharded() else {
            return Ok(());
        };
        let mut biases = active
            .names()
            .filter(|name| expert_of(name).is_some() && !store.in_parts(name));
        if store.division() == MatrixDivision::Experts && biases.next().is_some() {
            return Err(Error::unsupported(
                "the biases of experts that are divided among ranks are not trained",
            ));
        }
        let in_parts = |mut names: Box<dyn Iterator<Item = &str> + '_>| names.any(|name| store.in_parts(name));
        if in_parts(Box::new(active.corrected())) {
            return Err(Error::unsupported(
                "`BlockConfig::correction` needs whole weights, but each rank stores a part of them",
            )
            .hint("store all weights on every rank"));
        }
        if !self.divided && in_parts(Box::new(active.names())) {
            return Err(Error::unsupported(
                "Adafactor, AdaLoRA and active fractions of matrices (`BlockConfig::partition`) need whole matrices, \
                 but each rank stores a part of them",
            )
            .hint("store all weights on every rank"));
        }
        Ok(())
    }

    /// The place of the ranks that share a micro-batch with this one, among all groups of ranks.
    pub fn team(&self) -> World {
        teams(self.comm.world(), self.sequence.ranks)
    }

    /// Loss of one batch, without gradients. If ranks share a micro-batch, all of them call it: the sums are those of the tokens
    /// of this rank, the counts those of the batch.
    ///
    /// # Errors
    /// As for `step`, without gradients.
    pub fn evaluate(&self, batch: &Batch) -> Result<Totals> {
        let (network, objective) = (&self.network, self.objective.as_ref());
        let ranks = self.sequence.ranks;
        if ranks == 1 {
            return evaluate(network, objective, batch);
        }
        // All groups of ranks or none, because all exchange at the same time.
        let mut shares = batch.len() >= ranks;
        if self.comm.world().size > ranks {
            let all = self.comm.all_gather_bytes(vec![u8::from(shares)], Patience::Step)?;
            shares = all.iter().all(|own| own == &[1]);
        }
        if shares {
            let sequence = SequenceRanks::new(&*self.comm, self.sequence, batch)?;
            return evaluate_part(network, objective, batch, Some(&sequence));
        }
        // Too few tokens to share: they are those of the first rank.
        let totals = evaluate(network, objective, batch)?;
        let counts = self.comm.world().rank.is_multiple_of(ranks);
        Ok(if counts {
            totals
        } else {
            totals.with(StepSums::default())
        })
    }

    /// Gives every rank all low bits of the masters outside `active`: their store takes them.
    pub(super) fn gather_low(&mut self, active: &super::ActiveSet) -> Result<()> {
        let world = self.comm.world();
        // A weight that is stored in parts keeps its low bits.
        let stays = |name: &str| active.contains(name) || self.is_in_parts(name);
        let names = self.optimizer.low_parts_outside(stays);
        let mut items = Vec::new();
        let (mut own, mut first) = (Vec::new(), Vec::new());
        for name in &names {
            let n = self.elements(name)?;
            let low = self.optimizer.low_part(name);
            own.push(low.map(|low| low.to_vec1()).transpose()?.unwrap_or_default());
            first.push(part_of(name, n, world.rank, world.size).start);
            items.push((Arc::from(name.as_str()), n));
        }
        let mut low = WholeLowBits {
            own,
            first,
            whole: items.iter().map(|(_, n)| vec![0; *n]).collect(),
        };
        publish(&*self.comm, &items, &mut low)?;
        for ((name, n), whole) in items.iter().zip(low.whole) {
            self.optimizer
                .join_low(name, Tensor::from_vec(whole, *n, &Device::Cpu)?);
        }
        Ok(())
    }

    /// Keeps the own part of the low bits of the active masters.
    pub(super) fn cut_low(&mut self, active: &super::ActiveSet) -> Result<()> {
        for name in active.names() {
            let n = self.elements(name)?;
            if let Some(own) = self.own_part(name, n) {
                self.optimizer.cut_low(name, &own)?;
            }
        }
        Ok(())
    }

    /// True if each rank stores a part of this weight.
    pub(super) fn is_in_parts(&self, name: &str) -> bool {
        self.store.sharded().is_some_and(|store| store.in_parts(name))
    }

    /// As `exact_of_all`, of a weight that is stored in parts.
    pub(super) fn exact_of_owners(&self, name: &str, sink: &mut super::switch::ExactSink) -> Result<()> {
        self.comm
            .all_gather_bytes(format!("{name}\n{EXACT}").into_bytes(), Patience::Step)?;
        self.answer(name, EXACT, &mut |values| match values {
            MomentValues::F32(values) => sink(values),
            MomentValues::U8(_) => Ok(()),
        })
    }

    /// The exact values of the own part of a weight that is stored in parts, f32.
    pub(super) fn exact_part(&self, name: &str) -> Result<Tensor> {
        let missing = || Error::internal("a weight is not stored in parts").at(name);
        let (weight, low) = self.store.sharded().ok_or_else(missing)?.exact_part(name)?;
        let values = match low.as_ref().or(self.optimizer.low_part(name)) {
            Some(low) => step::join(&weight, low)?,
            None => update::to_f32_vec(&weight)?,
        };
        let n = values.len();
        Ok(Tensor::from_vec(values, n, &Device::Cpu)?)
    }

    /// Passes the exact values of a weight whose low bits are divided to `sink`. For rank 0 within `by_root`.
    pub(super) fn exact_of_all(&self, name: &str, sink: &mut super::switch::ExactSink) -> Result<()> {
        let weight = self.network.param(name)?.tensor.flatten_all()?;
        let (asked, mut at) = (format!("{name}\n{LOW}"), 0);
        self.comm.all_gather_bytes(asked.into_bytes(), Patience::Step)?;
        self.answer(name, LOW, &mut |values| {
            let MomentValues::F32(low) = values else {
                return Ok(());
            };
            let high = update::to_f32_vec(&weight.narrow(0, at, low.len())?)?;
            at += low.len();
            let join = |(high, low): (&f32, &f32)| {
                let low = *low as i16 as u16;
                match weight.dtype() {
                    DType::F16 => master::join_f16(f16::from_f32(*high), low),
                    _ => master::join(bf16::from_f32(*high), low),
                }
            };
            sink(&high.iter().zip(low).map(join).collect::<Vec<_>>())
        })
    }

    /// The elements of a parameter whose moments this rank has: `None` if it has all of them.
    pub(super) fn own_part(&self, name: &str, n: usize) -> Option<Range<usize>> {
        let world = self.comm.world();
        self.divided.then(|| self.part(name, n, world.rank))
    }

    /// The elements of a parameter that a rank has, if gradients are divided.
    pub(super) fn part(&self, name: &str, n: usize, rank: usize) -> Range<usize> {
        let stored = self.store.sharded().and_then(|store| store.parts(name));
        match stored {
            Some(mut parts) => parts.swap_remove(rank),
            None => part_of(name, n, rank, self.comm.world().size),
        }
    }

    /// The part of this rank of a saved tensor of the state of `name`, a parameter of `n` elements. `part` as in
    /// `SavedMoment`.
    ///
    /// # Errors
    /// A tensor that is too short.
    pub fn own_moment(&self, name: &str, n: usize, part: &str, tensor: Tensor) -> Result<Tensor> {
        let Some(own) = self.own_part(name, n) else {
            return Ok(tensor);
        };
        let range = range_of_part(part, &own);
        if tensor.elem_count() < range.end {
            return Err(Error::format("an optimizer state has the wrong size").at(name));
        }
        let own = tensor.flatten_all()?.narrow(0, range.start, range.len())?;
        if range.is_empty() {
            return update::zeros(0, own.dtype(), own.device());
        }
        // A copy of these elements alone, so that the rest is freed.
        Ok(own.force_contiguous()?)
    }

    /// The tensors of all optimizer states, in the order of a checkpoint.
    pub fn saved_moments(&self) -> Vec<SavedMoment> {
        let all = self.optimizer.saved().flat_map(|state| {
            let of = state.part_of;
            let name = state.name.to_string();
            state.parts.into_iter().map(move |(part, tensor)| SavedMoment {
                name: name.clone(),
                part,
                dtype: tensor.dtype(),
                elements: of.map_or(tensor.elem_count(), |n| range_of_part(part, &(0..n)).end),
            })
        });
        self.moments_apart(all.collect())
    }

    /// Runs `work` on rank 0; the other ranks answer what it asks for (`moment`) until it ends. Returns its result on rank
    /// 0 and `None` on the others. All ranks call it.
    ///
    /// # Errors
    /// Those of `work`, on rank 0; another rank has failed.
    pub fn by_root<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        let comm = &*self.comm;
        let sharded = self.store.sharded();
        let asks = comm.world().size > 1 && (self.divided || self.trains_apart() || sharded.is_some());
        if sharded.is_some() {
            // On every rank: layers that were collected take no memory beside those of rank 0.
            self.store.drop_collected();
        }
        if comm.world().is_root() {
            sharded.filter(|_| asks).inspect(|store| store.begin_alone());
            let done = work();
            sharded.inspect(|store| store.end_alone());
            // Ends the wait of the others, also after an error. They wait already: one that does not answer is lost.
            let ended = if asks {
                comm.all_gather_bytes(Vec::new(), Patience::Step)
            } else {
                Ok(Vec::new())
            };
            let done = done?;
            return ended.map(|_| Some(done));
        }
        if !asks {
            return Ok(None);
        }
        loop {
            let asked = comm.all_gather_bytes(Vec::new(), Patience::Long)?.swap_remove(0);
            let text = String::from_utf8_lossy(&asked);
            let Some((name, part)) = text.split_once('\n') else {
                return Ok(None);
            };
            match sharded.and_then(|store| store.answer(name, part)) {
                Some(answered) => answered?,
                None => self.answer(name, part, &mut |_| Ok(()))?,
            }
        }
    }

    /// Passes a tensor of an optimizer state to `sink`, with the elements of all ranks. For rank 0 within `by_root`.
    ///
    /// # Errors
    /// There is no such state; another rank has failed; any error of `sink`.
    pub fn moment(&self, moment: &SavedMoment, sink: &mut MomentSink) -> Result<()> {
        if self.divided || self.trains_apart() {
            let asked = format!("{}\n{}", moment.name, moment.part);
            self.comm.all_gather_bytes(asked.into_bytes(), Patience::Step)?;
        }
        self.answer(&moment.name, moment.part, sink)
    }

    /// What this rank has of a tensor of the state, flat. The number: the elements of the whole parameter, if it is a part.
    pub(super) fn held(&self, name: &str, part: &str) -> Result<(Tensor, Option<usize>)> {
        let missing = || Error::internal("an optimizer state is missing").at(name);
        if part == LOW {
            let low = self.optimizer.low_part(name).ok_or_else(missing)?.to_vec1::<i16>()?;
            let low: Vec<f32> = low.into_iter().map(f32::from).collect();
            return Ok((Tensor::new(low, &Device::Cpu)?, Some(self.elements(name)?)));
        }
        if part == EXACT {
            return Ok((self.exact_part(name)?, Some(self.elements(name)?)));
        }
        let values = match part {
            AVERAGE => Some(self.ema.as_ref().and_then(|ema| ema.values(name)).ok_or_else(missing)?),
            OUTER => Some(self.outer_momentum(name).ok_or_else(missing)?),
            _ => None,
        };
        if let Some(own) = values {
            return Ok((Tensor::new(own, &Device::Cpu)?, Some(self.elements(name)?)));
        }
        let state = self.optimizer.saved_of(rank_of(name).1).ok_or_else(missing)?;
        let own = state.parts.iter().find(|(own, _)| *own == part).ok_or_else(missing)?;
        Ok((own.1.flatten_all()?, state.part_of))
    }

    /// The part of all ranks in `moment`: the owners send their elements in order, and `sink` gets them on rank 0.
    pub(super) fn answer(&self, name: &str, part: &str, sink: &mut MomentSink) -> Result<()> {
        let (own, n) = self.held(name, part)?;
        let own = &own;
        let world = self.comm.world();
        let owners: Vec<(usize, usize)> = match n {
            // All ranks have a state of their own, of the same shape.
            None if self.trains_apart() => vec![(rank_of(name).0, own.elem_count())],
            None => return give(own, sink),
            Some(n) => {
                let part_of_rank = |rank| range_of_part(part, &self.part(name, n, rank));
                let mut owners: Vec<usize> = (0..world.size).filter(|rank| !part_of_rank(*rank).is_empty()).collect();
                owners.sort_by_key(|rank| part_of_rank(*rank).start);
                owners
                    .into_iter()
                    .map(|rank| (rank, part_of_rank(rank).len()))
                    .collect()
            }
        };
        // A failure of the sink is reported after the last piece, so that no rank waits.
        let mut done = Ok(());
        for (owner, length) in owners {
            for first in (0..length).step_by(PIECE) {
                let count = PIECE.min(length - first);
                let values = || own.narrow(0, first, count);
                let found = if owner == 0 {
                    world.is_root().then(values).transpose()?
                } else {
                    self.to_root(owner, count, own.dtype(), values)?
                };
                if let (Some(found), Ok(())) = (found, &done) {
                    done = give(&found, sink);
                }
            }
        }
        done
    }

    /// Sends `count` numbers (u8 or f32) of `owner` to rank 0, which gets them.
    fn to_root(
        &self,
        owner: usize,
        count: usize,
        dtype: DType,
        values: impl FnOnce() -> candle_core::Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        let world = self.comm.world();
        let (mut parts, mut lengths) = (vec![Vec::new(); world.size], vec![0; world.size]);
        if world.rank == owner {
            parts[0] = numbers(&values()?)?;
        }
        if world.is_root() {
            lengths[owner] = count;
        }
        let found = self
            .comm
            .all_to_all(count as u64, parts, lengths)
            .wait()?
            .swap_remove(owner);
        if !world.is_root() {
            return Ok(None);
        }
        let found = Tensor::from_vec(found, count, &Device::Cpu)?;
        Ok(Some(found.to_dtype(dtype)?))
    }
}

/// True if `ranks` ranks divide gradients and moments: every element is updated by itself, and neither masks nor a hook
/// need whole gradients.
pub fn divides(ranks: usize, by_element: bool, masked: bool, hook: bool) -> bool {
    ranks > 1 && by_element && !masked && !hook
}

/// The numbers of a moment, also of its codes.
fn numbers(values: &Tensor) -> Result<Vec<f32>> {
    match values.dtype() {
        DType::U8 => Ok(update::to_bytes(values)?.into_iter().map(f32::from).collect()),
        _ => update::to_f32_vec(values),
    }
}

/// Passes a flat tensor to `sink`.
pub(super) fn give(values: &Tensor, sink: &mut MomentSink) -> Result<()> {
    match values.dtype() {
        DType::U8 => sink(MomentValues::U8(&update::to_bytes(values)?)),
        _ => sink(MomentValues::F32(&update::to_f32_vec(values)?)),
    }
}
