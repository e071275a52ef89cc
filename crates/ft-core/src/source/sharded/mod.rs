//! A source whose matrices of decoder layers are stored in parts: each rank of a job has 1/W of every one (as FSDP, and
//! stage 3 of ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054). A layer is collected from all ranks ahead of its use, into
//! one of two buffers. Embedding, head, norms and biases are whole on every rank. With `MatrixDivision::InNode` a layer
//! is collected from the ranks of one machine (`machines`).
//!
//! Or only the routed experts are divided, each whole on one rank (`MatrixDivision::Experts`). Nothing is collected
//! then: the rows of the tokens travel to the experts (`model::experts`).
//!
//! All ranks fetch and prefetch the same layers in the same order. If rank 0 works alone
//! (`ShardedWeights::begin_alone`), it asks the others for each layer, and they answer (`ShardedWeights::answer`).
//!
//! Letters: W ranks.

mod expert_ranks;
mod machines;
mod origin;
mod own;
mod store;

pub use expert_ranks::{ExpertRanks, own_experts};
pub use machines::Machines;
pub use origin::WeightOrigin;

use super::slots::Slots;
use super::uploaded::FetchOrder;
use super::{Group, GroupWeights, ParamInfo, ResidentWeights, StreamedMatrix, WeightSource, expert_of, lock, no_such};
use crate::base::{Error, Result};
use crate::comm::{Collective, Patience, PendingNumbers, WholeList, part_of, share};
use crate::ops::Dtype;
use crate::quant::{Format, StorageDtype, Weight};
use candle_core::{Device, Tensor};
use own::{MatrixForm, OwnPart};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// True for a parameter that is stored in parts.
pub fn is_in_parts(p: &ParamInfo) -> bool {
    matches!(p.group, Group::Layer(_)) && p.shape.len() == 2 && !p.is_vector()
}

/// Bytes that a rank stores, on the average over the layers, of a matrix of `bytes` bytes.
pub fn part_bytes(p: &ParamInfo, bytes: u64, quantized: bool, ranks: u64) -> u64 {
    let n = p.elements() as u64;
    if quantized || n == 0 {
        bytes.div_ceil(ranks.max(1))
    } else {
        bytes / n * share(n, ranks)
    }
}

/// Bytes that rank `rank` of `size` stores of a matrix of `bytes` bytes.
pub fn own_bytes(p: &ParamInfo, format: Option<Format>, bytes: u64, (rank, size): (usize, usize)) -> u64 {
    match (format, p.shape.as_slice()) {
        (Some(format), &[rows, columns]) => {
            let parts = format.parts(rows, columns).into_iter();
            parts
                .map(|(_, length)| own::bytes_of(length, rank, size).len() as u64)
                .sum()
        }
        _ => bytes / p.elements().max(1) as u64 * part_of(&p.name, p.elements(), rank, size).len() as u64,
    }
}

/// Which matrices the ranks divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixDivision {
    /// Those of the decoder layers: each rank has some elements of every one.
    Elements,
    /// As `Elements`, but all ranks of a machine together have all of them.
    InNode,
    /// Those of the routed experts: each is whole on one rank.
    Experts,
}

impl MatrixDivision {
    /// True for a parameter that is divided.
    pub fn divides(self, p: &ParamInfo) -> bool {
        is_in_parts(p) && (self != Self::Experts || p.expert().is_some())
    }
}

/// Stores a part of every matrix of the decoder layers.
pub struct ShardedWeights {
    division: MatrixDivision,
    /// All ranks are one machine, unless the weights are divided inside each.
    machines: Machines,
    /// Number of routed experts of each layer.
    experts: BTreeMap<usize, usize>,
    expert_ranks: ExpertRanks,
    params: Vec<ParamInfo>,
    comm: Arc<dyn Collective>,
    origin: Arc<WeightOrigin>,
    /// Device of the own parts of active matrices; everything else is in host memory.
    device: Device,
    /// All other parameters.
    whole: ResidentWeights,
    /// Indices into `params` of the matrices of each layer.
    layers: BTreeMap<usize, Vec<usize>>,
    /// Matrices that are quantized while they are frozen: format, and data type of the dequantized values.
    quantized: BTreeMap<Arc<str>, (Format, Dtype)>,
    own: Mutex<BTreeMap<Arc<str>, OwnPart>>,
    /// Own parts of the exact values of matrices that were trained and are quantized again, with the low 16 bits of their
    /// masters.
    trained: Mutex<BTreeMap<Arc<str>, ExactPart>>,
    /// Active matrices.
    active: Mutex<BTreeSet<Arc<str>>>,
    slots: Mutex<Slots<usize, LayerContent>>,
    alone: Mutex<Rank0Work>,
}

/// A layer in a buffer.
enum LayerContent {
    InFlight(SentMatrices),
    Ready(Arc<GroupWeights>),
}

/// Matrices in flight: their indices and forms, and the lists of which they are made.
type SentMatrices = (Vec<(usize, MatrixForm)>, PendingNumbers<WholeList>);
/// Exact values of an own part, and the low 16 bits of their masters.
type ExactPart = (Tensor, Option<Tensor>);

/// The work of rank 0 alone.
#[derive(Default)]
struct Rank0Work {
    works: bool,
    /// The last layer that the others sent.
    layer: Option<(usize, Arc<GroupWeights>)>,
}

/// A request of rank 0: a layer by its number.
const LAYER: &str = "layer";
/// A parameter by its name.
const PARAM: &str = "parameter";

impl ShardedWeights {
    /// Reads the own parts of the matrices, and all other parameters, from `origin` into the storage that `storage` returns
    /// for them. A matrix that is quantized while it is read exists as a whole for that time. Active matrices have their parts on
    /// `device`, where they are updated. All ranks call it.
    ///
    /// # Errors
    /// A missing parameter, or one of another shape; a number that is not finite; with `MatrixDivision::InNode`,
    /// machines with different numbers of ranks.
    pub fn open(
        params: Vec<ParamInfo>,
        origin: WeightOrigin,
        storage: impl Fn(&ParamInfo) -> StorageDtype,
        comm: Arc<dyn Collective>,
        division: MatrixDivision,
        device: &Device,
    ) -> Result<Self> {
        if let WeightOrigin::Files(weights) = &origin {
            super::resident::check_names(&params, weights)?;
        }
        let origin = Arc::new(origin);
        let others = params.iter().filter(|p| !division.divides(p)).cloned().collect();
        let whole = ResidentWeights::build(others, &Device::Cpu, |p| origin.weight(p, storage(p)))?;
        let originals = origin.clone();
        let whole = whole.with_originals(move |p, dtype| originals.values(p, dtype));
        let (mut own, mut quantized) = (BTreeMap::new(), BTreeMap::new());
        let mut layers: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let mut experts: BTreeMap<usize, usize> = BTreeMap::new();
        for p in &params {
            if let (Group::Layer(layer), Some(expert)) = (p.group, p.expert()) {
                let count = experts.entry(layer).or_default();
                *count = (*count).max(expert + 1);
            }
        }
        let world = comm.world().clone();
        let machines = match division {
            MatrixDivision::InNode => Machines::of_job(&*comm)?,
            _ => Machines::one(world.size),
        };
        let mut source = Self {
            division,
            machines,
            experts,
            expert_ranks: ExpertRanks::new(comm.clone()),
            params: params.clone(),
            comm,
            origin: origin.clone(),
            device: device.clone(),
            whole,
            layers: BTreeMap::new(),
            quantized: BTreeMap::new(),
            own: Mutex::default(),
            trained: Mutex::default(),
            active: Mutex::default(),
            slots: Mutex::default(),
            alone: Mutex::default(),
        };
        for (index, p) in params.iter().enumerate().filter(|(_, p)| division.divides(p)) {
            let range = source.range(p);
            let elsewhere = division == MatrixDivision::Experts && range.is_empty();
            let part = match (origin.format(p, storage(p))?, storage(p)) {
                (None, StorageDtype::Dense(dtype) | StorageDtype::Quantized(_, dtype)) => {
                    let own = origin.part(p, dtype, &range)?;
                    let copies = source.copies(p, |range| origin.part(p, dtype, range))?;
                    OwnPart::Dense { own, copies }
                }
                (Some((format, dequantized_dtype)), _) if elsewhere => {
                    quantized.insert(p.name.clone(), (format, dequantized_dtype));
                    OwnPart::elsewhere(p, format, dequantized_dtype)?
                }
                (Some(_), storage) => match origin.weight(p, storage)? {
                    Weight::Quantized(codes) => {
                        quantized.insert(p.name.clone(), (codes.format(), codes.dequantized_dtype()));
                        match division {
                            MatrixDivision::Experts => OwnPart::Whole(codes),
                            _ => OwnPart::cut(&codes, |n| source.machines.bytes_of(n, world.rank))?,
                        }
                    }
                    _ => return Err(Error::internal("a weight on the CPU is not on the CPU").at(&*p.name)),
                },
            };
            own.insert(p.name.clone(), part);
            if let Group::Layer(layer) = p.group {
                layers.entry(layer).or_default().push(index);
            }
        }
        (source.layers, source.quantized, source.own) = (layers, quantized, Mutex::new(own));
        Ok(source)
    }

    /// Which matrices are divided.
    pub fn division(&self) -> MatrixDivision {
        self.division
    }

    /// True if this rank has a part of the parameter only.
    pub fn in_parts(&self, name: &str) -> bool {
        lock(&self.own).contains_key(name)
    }

    /// The elements of a parameter that each rank has; `None`: it is not in parts.
    pub fn parts(&self, name: &str) -> Option<Vec<Range<usize>>> {
        let p = self.in_parts(name).then(|| self.param(name).ok()).flatten()?;
        Some(self.ranges(p))
    }

    /// True for an expert that is whole on one rank, which takes its gradients.
    pub fn on_one_rank(&self, name: &str) -> bool {
        self.division == MatrixDivision::Experts && self.in_parts(name)
    }

    /// The own part of an active matrix, flat: the optimizer updates it in place. `None`: it is not in parts.
    pub fn own(&self, name: &str) -> Option<Tensor> {
        match lock(&self.own).get(name) {
            Some(OwnPart::Dense { own, .. }) => Some(own.clone()),
            _ => None,
        }
    }

    /// Rank 0 works alone from now on: it asks the others for what it needs.
    pub fn begin_alone(&self) {
        *lock(&self.alone) = Rank0Work {
            works: true,
            layer: None,
        };
    }

    /// True on rank 0 while it works alone.
    pub(super) fn works_alone(&self) -> bool {
        lock(&self.alone).works
    }

    /// All ranks work together again.
    pub fn end_alone(&self) {
        *lock(&self.alone) = Rank0Work::default();
    }

    /// Answers a request of rank 0; `None` if it is not for this source.
    pub fn answer(&self, name: &str, what: &str) -> Option<Result<()>> {
        let indices = match what {
            LAYER => self.layers.get(&name.parse().ok()?)?.clone(),
            PARAM => vec![self.params.iter().position(|p| &*p.name == name)?],
            _ => return None,
        };
        Some(
            self.send(&indices, true)
                .and_then(|(_, coming)| coming.wait().map(drop)),
        )
    }

    fn members(&self, layer: usize) -> impl Iterator<Item = &ParamInfo> {
        let indices = self.layers.get(&layer).into_iter().flatten();
        indices.map(|&index| &self.params[index])
    }

    /// The elements of a parameter that each rank has.
    fn ranges(&self, p: &ParamInfo) -> Vec<Range<usize>> {
        ranges(self.division, &self.experts, p, self.comm.world().size)
    }

    /// The elements of a parameter that this rank has.
    fn range(&self, p: &ParamInfo) -> Range<usize> {
        self.ranges(p).swap_remove(self.comm.world().rank)
    }

    /// An expert of this rank.
    fn own_expert(&self, layer: usize, expert: usize) -> Result<Arc<GroupWeights>> {
        let mut weights = GroupWeights::default();
        let of = |p: &&ParamInfo| p.expert() == Some(expert);
        for p in self.members(layer).filter(of) {
            let weight = match lock(&self.own).get(&p.name) {
                Some(OwnPart::Dense { own, .. }) => own.reshape(p.shape.as_slice())?.into(),
                Some(OwnPart::Whole(codes)) => Weight::Quantized(codes.clone()),
                _ => return Err(no_such(&p.name)),
            };
            weights.insert(p.name.clone(), weight);
        }
        // Its biases, which every rank has.
        for (name, weight) in self.whole.fetch(Group::Layer(layer))?.iter() {
            if expert_of(name) == Some(expert) {
                weights.insert(name.clone(), weight.clone());
            }
        }
        Ok(Arc::new(weights))
    }

    fn forget(&self) {
        lock(&self.slots).clear();
        lock(&self.alone).layer = None;
    }

    /// Starts to collect these matrices on all ranks; `alone`: on rank 0.
    fn send(&self, indices: &[usize], alone: bool) -> Result<SentMatrices> {
        let own = lock(&self.own);
        let (mut forms, mut shards) = (Vec::new(), Vec::new());
        for &index in indices {
            let p = &self.params[index];
            let part = own.get(&p.name).ok_or_else(|| no_such(&p.name))?;
            forms.push((index, part.form()));
            shards.extend(self.shards(p, part)?);
        }
        let elements: usize = shards.iter().map(|shard| shard.elements()).sum();
        let first = indices.first().copied().unwrap_or(0);
        let key = (first as u64) << 40 ^ elements as u64;
        Ok((forms, self.comm.gather_shards(key, shards, self.receivers(alone))))
    }

    /// Builds the matrices that were collected.
    fn build(&self, (forms, coming): SentMatrices) -> Result<Vec<(Arc<str>, Weight)>> {
        let mut lists = coming.wait()?.into_iter();
        let mut out = Vec::with_capacity(forms.len());
        for (index, form) in forms {
            let p = &self.params[index];
            out.push((p.name.clone(), form.build(p, &mut lists)?));
        }
        Ok(out)
    }

    /// Collects one matrix as it is stored: on all ranks, or on rank 0 if it works alone.
    fn collect(&self, name: &str) -> Result<Weight> {
        let index = self.params.iter().position(|p| &*p.name == name);
        let index = index.ok_or_else(|| no_such(name))?;
        let alone = self.ask(name, PARAM)?;
        let found = self.build(self.send(&[index], alone)?)?.pop();
        Ok(found.ok_or_else(|| no_such(name))?.1)
    }

    /// If rank 0 works alone, asks the others to send something to it. Returns whether it does.
    fn ask(&self, name: &str, what: &str) -> Result<bool> {
        if !lock(&self.alone).works {
            return Ok(false);
        }
        self.comm
            .all_gather_bytes(format!("{name}\n{what}").into_bytes(), Patience::Step)?;
        Ok(true)
    }

    fn start(&self, layer: usize) -> Result<LayerContent> {
        let indices = self.layers.get(&layer).map_or(&[][..], Vec::as_slice);
        Ok(LayerContent::InFlight(self.send(indices, false)?))
    }

    fn receive(&self, layer: usize, content: LayerContent) -> Result<Arc<GroupWeights>> {
        match content {
            LayerContent::Ready(weights) => Ok(weights),
            LayerContent::InFlight(sent) => self.with_others(layer, self.build(sent)?),
        }
    }

    /// A layer with its parameters that are whole on every rank.
    fn with_others(&self, layer: usize, matrices: Vec<(Arc<str>, Weight)>) -> Result<Arc<GroupWeights>> {
        let mut weights = GroupWeights::default();
        let group = Group::Layer(layer);
        if self.whole.params().iter().any(|p| p.group == group) {
            for (name, weight) in self.whole.fetch(group)?.iter() {
                weights.insert(name.clone(), weight.clone());
            }
        }
        for (name, weight) in matrices {
            weights.insert(name, weight);
        }
        Ok(Arc::new(weights))
    }

    /// A layer for rank 0, which works alone.
    fn layer_alone(&self, layer: usize) -> Result<Arc<GroupWeights>> {
        if let Some((here, weights)) = &lock(&self.alone).layer
            && *here == layer
        {
            return Ok(weights.clone());
        }
        lock(&self.alone).layer = None;
        let alone = self.ask(&layer.to_string(), LAYER)?;
        let indices = self.layers.get(&layer).map_or(&[][..], Vec::as_slice);
        let weights = self.with_others(layer, self.build(self.send(indices, alone)?)?)?;
        lock(&self.alone).layer = Some((layer, weights.clone()));
        Ok(weights)
    }
}

/// The elements of a parameter that each of `size` ranks has. `experts`: of each layer.
fn ranges(division: MatrixDivision, experts: &BTreeMap<usize, usize>, p: &ParamInfo, size: usize) -> Vec<Range<usize>> {
    let n = p.elements();
    let of = |rank| match (division, p.group, p.expert()) {
        (MatrixDivision::Experts, Group::Layer(layer), Some(expert)) => {
            let count = experts.get(&layer).copied().unwrap_or(0);
            let own = own_experts(count, rank, size).contains(&expert);
            0..if own { n } else { 0 }
        }
        _ => part_of(&p.name, n, rank, size),
    };
    (0..size).map(of).collect()
}

impl WeightSource for ShardedWeights {
    fn fetch_dense(&self, layer: usize) -> Result<Arc<GroupWeights>> {
        match self.division {
            MatrixDivision::Experts => self.whole.fetch(Group::Layer(layer)),
            _ => self.fetch(Group::Layer(layer)),
        }
    }

    fn fetch_expert(&self, layer: usize, expert: usize) -> Result<Arc<GroupWeights>> {
        let world = self.comm.world();
        let own = || own_experts(self.experts.get(&layer).copied().unwrap_or(0), world.rank, world.size);
        if self.division == MatrixDivision::Experts && own().contains(&expert) {
            return self.own_expert(layer, expert);
        }
        self.fetch(Group::Layer(layer))
    }

    fn expert_ranks(&self) -> Option<&ExpertRanks> {
        let divides = self.division == MatrixDivision::Experts && !lock(&self.alone).works;
        divides.then_some(&self.expert_ranks)
    }

    fn fetch(&self, group: Group) -> Result<Arc<GroupWeights>> {
        let Group::Layer(layer) = group else {
            return self.whole.fetch(group);
        };
        if lock(&self.alone).works {
            return self.layer_alone(layer);
        }
        let here = lock(&self.slots).take(layer);
        let content = match here {
            Some(content) => content,
            None => self.start(layer)?,
        };
        let weights = self.receive(layer, content)?;
        lock(&self.slots).put(layer, LayerContent::Ready(weights.clone()), false);
        Ok(weights)
    }

    fn prefetch(&self, group: Group) {
        let Group::Layer(layer) = group else { return };
        let collects = self.division != MatrixDivision::Experts && self.layers.contains_key(&layer);
        if lock(&self.alone).works || !collects {
            return;
        }
        let here = lock(&self.slots).take(layer);
        // Ignores an error: the fetch of the layer returns it again.
        if let Some(content) = here.or_else(|| self.start(layer).ok()) {
            lock(&self.slots).put(layer, content, true);
        }
    }

    fn params(&self) -> &[ParamInfo] {
        &self.params
    }

    fn resident_bytes(&self) -> u64 {
        let own: u64 = lock(&self.own).values().map(OwnPart::bytes).sum();
        own + self.whole.resident_bytes()
    }

    fn in_memory(&self, name: &str) -> Option<Tensor> {
        self.whole.in_memory(name)
    }

    fn rows(&self, name: &str, ids: &[u32]) -> Result<(Tensor, Vec<u32>)> {
        self.whole.rows(name, ids)
    }

    fn streamed(&self, _: &str) -> Option<Box<dyn StreamedMatrix + '_>> {
        None
    }
}

/// How often each layer is collected in a step, after steps like it: `rounds` micro-batches through `layers` layers, the
/// backward pass down to layer `lowest`; layers that `trains` change at the end. `uploaded`: for a GPU, through
/// `UploadedWeights`.
pub fn collections(
    layers: usize,
    lowest: usize,
    rounds: usize,
    uploaded: bool,
    trains: impl Fn(usize) -> bool,
) -> Vec<u64> {
    let (mut slots, mut on_device) = (Slots::<usize, ()>::default(), Slots::<usize, ()>::default());
    let mut order = FetchOrder::default();
    let mut counts = vec![0; layers];
    // From the third step on the order of the layers is known.
    for step in 0..3 {
        let mut collect = |layer: usize, prefetched: bool| {
            if slots.take(layer).is_none() {
                counts[layer] += u64::from(step == 2);
            }
            slots.put(layer, (), prefetched);
        };
        let mut visit = |layer: usize, prefetched: bool| {
            if !uploaded {
                return collect(layer, prefetched);
            }
            if on_device.take(layer).is_none() {
                collect(layer, false);
                if let Some(next) = order.follow(layer).filter(|next| *next < layers) {
                    collect(next, true);
                }
            }
            on_device.put(layer, (), prefetched);
        };
        for _ in 0..rounds {
            visit(0, true);
            for l in 0..layers {
                if l + 1 < layers {
                    visit(l + 1, true);
                }
                visit(l, false);
            }
            for l in (lowest..layers).rev() {
                visit(if l > lowest { l - 1 } else { 0 }, true);
                visit(l, false);
            }
        }
        slots.retain(|layer| !trains(*layer));
        on_device.retain(|layer| !trains(*layer));
    }
    counts
}
