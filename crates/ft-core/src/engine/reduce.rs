//! The sum of the gradients of all ranks. Each rank owns a part of every gradient (`comm::part_of`): it receives the part
//! of each micro-batch and adds them in the order of the micro-batches, so the sums have the bits of one rank.
//!
//! Letters: W ranks.

use super::publish::{Publish, publish};
use crate::base::Result;
use crate::comm::{Collective, PendingNumbers, QUANTUM, part_of};
use crate::model::Param;
use crate::ops::transfer::{Copier, OffloadedTensor};
use crate::ops::update;
use candle_core::{DType, Device, Tensor};
use half::bf16;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// Numbers that travel together.
pub(super) const BUCKET: usize = 1 << 20;
/// Buckets in flight, beside the one that is filled.
pub(super) const IN_FLIGHT: usize = 2;
/// Numbers that are on their way from a GPU to the buckets: the GPU computes the next gradients meanwhile.
const LEAVING: usize = 16 * BUCKET;

/// How the gradients of the ranks are added.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GradientExchange {
    /// True: on one GPU, too, the gradient of a micro-batch is computed first and then added to the sum, as on several.
    /// A product that adds to the sum rounds differently. The losses of micro-batches are added in the same way.
    pub ordered: bool,
    /// Gradients travel as bf16; they are added in f32. The own ones are rounded too, so that the result does not depend
    /// on the number of ranks, if there are at least two.
    pub bf16: bool,
    /// A rank adds the gradients of its micro-batches before they travel, once in a step: the order of the sums, and their
    /// last bits, depend on the number of ranks.
    pub window: bool,
}

/// Memory of the buckets that are sent and received in a step. `trained`: elements of all gradients.
pub fn exchange_bytes(trained: u64, ranks: u64) -> u64 {
    let bucket = trained.min(2 * BUCKET as u64);
    if ranks < 2 {
        0
    } else {
        4 * 2 * (IN_FLIGHT as u64 + 1) * bucket.min(BUCKET as u64)
    }
}

/// How the other ranks get the new values of a trained parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpdateExchange {
    /// As f32 numbers, after the update.
    F32,
    /// As bf16 numbers, after the update.
    Bf16,
    /// With the next collection of its layer: it is stored in parts.
    Collected,
}

/// Memory of gradients that are on their way from a GPU to the buckets: on the host, and on the GPU, where whole gradients
/// wait. `trained` as for `exchange_bytes`; `largest`: elements of the largest gradient.
pub fn leaving_bytes(trained: u64, largest: u64, ranks: u64) -> (u64, u64) {
    let of = |most: u64| if ranks < 2 { 0 } else { 4 * trained.min(most) };
    (of(LEAVING as u64), of(LEAVING as u64 + largest))
}

/// Bytes that rank `rank` of `size` sends in a step: its gradients in each round of micro-batches, the sums or the new
/// values of its part, and the sums of squares of its part. `params`: names and elements of the trained parameters.
/// Collections of layers are not in it. `on_gpu`: the sums of squares are f64.
pub fn sent_bytes<'a>(
    params: impl Iterator<Item = (&'a str, u64, UpdateExchange)>,
    micro_batches: u64,
    (rank, size): (usize, usize),
    divided: bool,
    exchange: GradientExchange,
    on_gpu: bool,
) -> u64 {
    let rounds = own_rounds(micro_batches, rank, size);
    let rounds = if exchange.window { rounds.min(1) } else { rounds };
    let of = |(name, n, updated): (&str, u64, UpdateExchange)| {
        let own = part_of(name, n as usize, rank, size).len() as u64;
        let squares = if divided { own.div_ceil(QUANTUM as u64) } else { 0 };
        let squares = if on_gpu { 2 * squares } else { squares };
        let gradient = gradient_words(name, n as usize, (rank, size), exchange.bf16);
        let of_piece = |piece: GradientPiece| match updated {
            UpdateExchange::Collected => 0,
            _ => words(
                piece.range(rank, size).len(),
                updated == UpdateExchange::Bf16 && divided,
            ),
        };
        let values: usize = GradientPiece::all(&name.into(), n as usize, size).map(of_piece).sum();
        4 * (gradient * rounds + (values as u64 + squares) * (size as u64 - 1))
    };
    if size < 2 { 0 } else { params.map(of).sum() }
}

/// As `sent_bytes`, for parameters that are corrected in each round.
pub fn corrected_bytes<'a>(
    params: impl Iterator<Item = (&'a str, u64)>,
    micro_batches: u64,
    (rank, size): (usize, usize),
    exchange: GradientExchange,
) -> u64 {
    let of = |(name, n): (&str, u64)| {
        let own = part_of(name, n as usize, rank, size).len() as u64;
        let gradient = gradient_words(name, n as usize, (rank, size), exchange.bf16);
        let published = own * (size as u64 - 1) * micro_batches.div_ceil(size as u64);
        4 * (gradient * own_rounds(micro_batches, rank, size) + published)
    };
    if size < 2 { 0 } else { params.map(of).sum() }
}

/// Rounds in which a micro-batch of this rank counts.
fn own_rounds(micro_batches: u64, rank: usize, size: usize) -> u64 {
    micro_batches.saturating_sub(rank as u64).div_ceil(size.max(1) as u64)
}

/// f32 words in which a rank sends a gradient to the others.
fn gradient_words(name: &str, n: usize, (rank, size): (usize, usize), bf16: bool) -> u64 {
    let of_piece = |piece: GradientPiece| -> usize {
        let to = (0..size).filter(|to| *to != rank);
        to.map(|to| words(piece.range(to, size).len(), bf16)).sum()
    };
    GradientPiece::all(&name.into(), n, size).map(of_piece).sum::<usize>() as u64
}

/// Length of the list in which `n` numbers travel: two bf16 numbers in the bits of one f32.
pub(super) fn words(n: usize, bf16: bool) -> usize {
    if bf16 { n.div_ceil(2) } else { n }
}

/// Adds `values` to the list, rounded to bf16.
pub(super) fn pack(values: &[f32], list: &mut Vec<f32>) {
    let bits = |x: f32| u32::from(bf16::from_f32(x).to_bits());
    list.extend(values.chunks(2).map(|pair| {
        let high = pair.get(1).map_or(0, |x| bits(*x));
        f32::from_bits(high << 16 | bits(pair[0]))
    }));
}

/// The inverse of `pack`, of `n` values.
pub(super) fn unpack(list: &[f32], n: usize) -> Vec<f32> {
    let number = |bits: u32| bf16::from_bits(bits as u16).to_f32();
    let pairs = list.iter().map(|word| word.to_bits());
    pairs
        .flat_map(|bits| [number(bits & 0xFFFF), number(bits >> 16)])
        .take(n)
        .collect()
}

/// A piece of the part of every rank of one gradient, or of one parameter.
#[derive(Clone)]
pub(super) struct GradientPiece {
    pub(super) name: Arc<str>,
    /// Elements of the whole.
    pub(super) n: usize,
    pub(super) index: usize,
}

impl GradientPiece {
    /// Elements of a piece of the part of one rank.
    fn length(size: usize) -> usize {
        (BUCKET / size).max(1)
    }

    /// The pieces of a gradient or parameter; at least one.
    pub(super) fn all(name: &Arc<str>, n: usize, size: usize) -> impl Iterator<Item = Self> {
        let largest = (0..size).map(|rank| part_of(name, n, rank, size).len()).max();
        let count = largest.unwrap_or(0).div_ceil(Self::length(size)).max(1);
        let name = name.clone();
        (0..count).map(move |index| Self {
            name: name.clone(),
            n,
            index,
        })
    }

    /// Its elements in the part of `rank`.
    pub(super) fn range(&self, rank: usize, size: usize) -> Range<usize> {
        let part = part_of(&self.name, self.n, rank, size);
        let at = |index: usize| (part.start + index * Self::length(size)).min(part.end);
        at(self.index)..at(self.index + 1)
    }

    /// Its elements on all ranks.
    pub(super) fn elements(&self, size: usize) -> usize {
        (0..size).map(|rank| self.range(rank, size).len()).sum()
    }
}

/// Equal for the same pieces in the same order.
pub(super) fn key(pieces: &[GradientPiece], contributors: usize) -> u64 {
    // FNV-1a: the same on every machine.
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut add = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    add(&contributors.to_le_bytes());
    for piece in pieces {
        add(piece.name.as_bytes());
        add(&piece.n.to_le_bytes());
        add(&piece.index.to_le_bytes());
    }
    hash
}

/// Pieces that are sent together.
#[derive(Default)]
struct Bucket {
    pieces: Vec<GradientPiece>,
    elements: usize,
    /// For each rank its part of every piece, one after the other.
    parts: Vec<Vec<f32>>,
    /// The same on its way from a GPU; then `parts` are empty.
    leaving: Vec<Vec<OffloadedTensor>>,
    contributors: usize,
}

/// A bucket whose numbers are on their way.
struct InFlightBucket {
    pieces: Vec<GradientPiece>,
    contributors: usize,
    numbers: PendingNumbers,
}

/// The sum of a gradient over the window: the part of this rank.
pub(super) struct OwnSum {
    pub(super) param: Param,
    /// Shape of the whole gradient.
    pub(super) shape: Vec<usize>,
    /// The elements of each rank.
    pub(super) parts: Vec<Range<usize>>,
    /// The elements of this rank.
    pub(super) range: Range<usize>,
    /// f32 `[range.len()]`
    pub(super) sum: Tensor,
}

impl OwnSum {
    /// Elements of the whole gradient.
    pub(super) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// True if `param` has the own part of the weight only, which is flat.
    pub(super) fn is_stored_in_parts(&self) -> bool {
        self.shape.len() > 1 && self.param.tensor.rank() == 1
    }
}

/// Adds the gradients of all ranks.
pub(super) struct ReduceGradients<'a> {
    comm: &'a dyn Collective,
    /// Brings gradients from a GPU.
    copier: Option<&'a Copier>,
    /// Gradients travel as bf16.
    bf16: bool,
    /// Number of ranks, from rank 0 on, whose micro-batches count in this round.
    contributors: usize,
    bucket: Bucket,
    /// Full buckets whose numbers are on their way from a GPU.
    leaving: VecDeque<Bucket>,
    coming: VecDeque<InFlightBucket>,
    /// Parameters in the order of their first gradient, with the shape of the gradient.
    params: Vec<(Param, Vec<usize>)>,
    /// The elements of each rank, of parameters that are whole on one rank.
    on_one_rank: BTreeMap<Arc<str>, Vec<Range<usize>>>,
    /// The sums of the own parts; the first contribution fills them.
    sums: BTreeMap<Arc<str>, Vec<f32>>,
}

impl<'a> ReduceGradients<'a> {
    /// `copier`: that of the GPU, if gradients are there.
    pub(super) fn new(comm: &'a dyn Collective, copier: Option<&'a Copier>, bf16: bool) -> Self {
        Self {
            comm,
            copier,
            bf16,
            contributors: comm.world().size,
            bucket: Bucket::default(),
            leaving: VecDeque::new(),
            coming: VecDeque::new(),
            params: Vec::new(),
            on_one_rank: BTreeMap::new(),
            sums: BTreeMap::new(),
        }
    }

    pub(super) fn begin_round(&mut self, contributors: usize) {
        self.contributors = contributors;
    }

    /// Takes the gradient (f32, any shape) of a micro-batch.
    pub(super) fn take(&mut self, param: &Param, gradient: &Tensor) -> Result<()> {
        let n = gradient.elem_count();
        let world = self.comm.world();
        let (rank, size) = (world.rank, world.size);
        if !self.sums.contains_key(&param.name) {
            let own = part_of(&param.name, n, rank, size).len();
            self.sums.insert(param.name.clone(), Vec::with_capacity(own));
            self.params.push((param.clone(), gradient.dims().to_vec()));
        }
        let flat = gradient.flatten_all()?;
        for piece in GradientPiece::all(&param.name, n, size) {
            if rank < self.contributors {
                self.fill(&piece, &flat)?;
            }
            self.bucket.elements += piece.elements(size);
            self.bucket.pieces.push(piece);
            if self.bucket.elements >= BUCKET {
                self.close()?;
            }
        }
        Ok(())
    }

    /// Adds the elements of a piece of a gradient (flat) to the bucket.
    fn fill(&mut self, piece: &GradientPiece, flat: &Tensor) -> Result<()> {
        let size = self.comm.world().size;
        let copier = self.copier.filter(|_| !flat.device().is_cpu());
        self.bucket.parts.resize(size, Vec::new());
        self.bucket.leaving.resize_with(size, Vec::new);
        for rank in 0..size {
            let range = piece.range(rank, size);
            if range.is_empty() {
                continue;
            }
            let values = flat.narrow(0, range.start, range.len())?;
            match copier {
                Some(copier) => self.bucket.leaving[rank].push(copier.offload(values)?),
                None => update::with_slice(&values, |values| put(values, self.bf16, &mut self.bucket.parts[rank]))?,
            }
        }
        Ok(())
    }

    /// The bucket is full.
    fn close(&mut self) -> Result<()> {
        let mut bucket = std::mem::take(&mut self.bucket);
        bucket.contributors = self.contributors;
        if self.copier.is_none() {
            return self.send(bucket);
        }
        self.leaving.push_back(bucket);
        while self.leaving.iter().map(|bucket| bucket.elements).sum::<usize>() > LEAVING {
            self.arrive()?;
        }
        Ok(())
    }

    /// Waits for the numbers of the oldest bucket that leaves a GPU, and sends them.
    fn arrive(&mut self) -> Result<()> {
        let (Some(mut bucket), Some(copier)) = (self.leaving.pop_front(), self.copier) else {
            return Ok(());
        };
        for (runs, list) in std::mem::take(&mut bucket.leaving).into_iter().zip(&mut bucket.parts) {
            for run in runs {
                if self.bf16 {
                    let mut values = Vec::new();
                    copier.read(run, &mut values)?;
                    put(&values, true, list);
                } else {
                    copier.read(run, list)?;
                }
            }
        }
        self.send(bucket)
    }

    /// A parameter that is whole on one rank, with the elements of each rank: nothing travels. `gradient`: that of one micro-batch,
    /// on its rank.
    pub(super) fn take_own(
        &mut self,
        param: &Param,
        shape: &[usize],
        parts: Vec<Range<usize>>,
        gradient: Option<&Tensor>,
    ) -> Result<()> {
        let sum = match self.sums.get_mut(&param.name) {
            Some(sum) => sum,
            None => {
                self.params.push((param.clone(), shape.to_vec()));
                self.on_one_rank.insert(param.name.clone(), parts);
                self.sums.entry(param.name.clone()).or_default()
            }
        };
        let Some(gradient) = gradient else { return Ok(()) };
        update::with_slice(&gradient.flatten_all()?, |own| {
            if sum.is_empty() {
                sum.extend_from_slice(own);
            } else {
                sum.iter_mut().zip(own).for_each(|(sum, g)| *sum += g);
            }
        })
    }

    /// Sends the numbers in the bucket to the other ranks, and waits for all that are on their way.
    pub(super) fn flush(&mut self) -> Result<()> {
        if !self.bucket.pieces.is_empty() {
            self.close()?;
        }
        while !self.leaving.is_empty() {
            self.arrive()?;
        }
        Ok(())
    }

    fn send(&mut self, bucket: Bucket) -> Result<()> {
        let Bucket {
            pieces,
            mut parts,
            contributors,
            ..
        } = bucket;
        let world = self.comm.world();
        parts.resize(world.size, Vec::new());
        let length = |piece: &GradientPiece| words(piece.range(world.rank, world.size).len(), self.bf16);
        let own: usize = pieces.iter().map(length).sum();
        let lengths = (0..world.size)
            .map(|rank| if rank < contributors { own } else { 0 })
            .collect();
        let numbers = self.comm.all_to_all(key(&pieces, contributors), parts, lengths);
        self.coming.push_back(InFlightBucket {
            pieces,
            contributors,
            numbers,
        });
        while self.coming.len() > IN_FLIGHT {
            self.receive()?;
        }
        Ok(())
    }

    /// Adds the oldest bucket in flight to the sums, the first rank's first.
    fn receive(&mut self) -> Result<()> {
        let Some(bucket) = self.coming.pop_front() else {
            return Ok(());
        };
        let world = self.comm.world();
        for list in bucket.numbers.wait()?.iter().take(bucket.contributors) {
            let mut rest = &list[..];
            for piece in &bucket.pieces {
                let range = piece.range(world.rank, world.size);
                let (own, after) = rest.split_at(words(range.len(), self.bf16));
                rest = after;
                let unpacked = self.bf16.then(|| unpack(own, range.len()));
                let own = unpacked.as_deref().unwrap_or(own);
                let Some(sum) = self.sums.get_mut(&piece.name) else {
                    continue;
                };
                let first = range.start - part_of(&piece.name, piece.n, world.rank, world.size).start;
                if sum.len() == first {
                    sum.extend_from_slice(own);
                } else {
                    let sum = &mut sum[first..first + own.len()];
                    sum.iter_mut().zip(own).for_each(|(sum, g)| *sum += g);
                }
            }
        }
        Ok(())
    }

    /// The parameters in the order of their first gradient, each with the own part of its sum over the window, on the device
    /// of the parameter.
    pub(super) fn own_sums(self) -> Result<Vec<OwnSum>> {
        let mut own = self.host_sums()?;
        for sum in &mut own {
            sum.sum = moved(&sum.sum, sum.param.tensor.device())?;
        }
        Ok(own)
    }

    /// As `own_sums`, in host memory.
    fn host_sums(mut self) -> Result<Vec<OwnSum>> {
        self.flush()?;
        while !self.coming.is_empty() {
            self.receive()?;
        }
        let world = self.comm.world();
        let mut out = Vec::with_capacity(self.params.len());
        for (param, shape) in self.params {
            let n = shape.iter().product();
            let parts = match self.on_one_rank.remove(&param.name) {
                Some(parts) => parts,
                None => (0..world.size)
                    .map(|rank| part_of(&param.name, n, rank, world.size))
                    .collect(),
            };
            let range = parts[world.rank].clone();
            let values = self.sums.remove(&param.name).unwrap_or_default();
            let sum = Tensor::from_vec(values, range.len(), &Device::Cpu)?;
            out.push(OwnSum {
                param,
                shape,
                parts,
                range,
                sum,
            });
        }
        Ok(out)
    }

    /// As `own_sums`, but the whole sums (f32, the shape of the gradient), which every rank gets.
    pub(super) fn whole_sums(self) -> Result<Vec<(Param, Tensor)>> {
        let comm = self.comm;
        let own = self.host_sums()?;
        let items: Vec<_> = own.iter().map(|sum| (sum.param.name.clone(), sum.elements())).collect();
        let mut gathered = WholeSums {
            whole: own.iter().map(|sum| vec![0.0; sum.elements()]).collect(),
            own,
        };
        publish(comm, &items, &mut gathered)?;
        let mut out = Vec::with_capacity(items.len());
        for (sum, mut values) in gathered.own.into_iter().zip(gathered.whole) {
            update::with_slice(&sum.sum, |own| values[sum.range.clone()].copy_from_slice(own))?;
            let whole = Tensor::from_vec(values, sum.shape, &Device::Cpu)?;
            let whole = moved(&whole, sum.param.tensor.device())?;
            out.push((sum.param, whole));
        }
        Ok(out)
    }
}

/// Adds values to a list, as they travel.
fn put(values: &[f32], bf16: bool, list: &mut Vec<f32>) {
    if bf16 {
        pack(values, list);
    } else {
        list.extend_from_slice(values);
    }
}

/// A tensor of the host on this device.
fn moved(host: &Tensor, device: &Device) -> Result<Tensor> {
    if device.is_cpu() {
        return Ok(host.clone());
    }
    // Also without elements, for which a device allocates nothing.
    let there = update::zeros(host.shape(), DType::F32, device)?;
    update::with_slice(host, |values| update::set(&there, values))??;
    Ok(there)
}

/// Collects whole sums.
struct WholeSums {
    own: Vec<OwnSum>,
    whole: Vec<Vec<f32>>,
}

impl Publish for WholeSums {
    fn own(&mut self, item: usize, range: Range<usize>) -> Result<Vec<f32>> {
        let sum = &self.own[item];
        let at = range.start - sum.range.start;
        update::with_slice(&sum.sum, |values| values[at..at + range.len()].to_vec())
    }

    fn put(&mut self, item: usize, range: Range<usize>, values: &[f32]) -> Result<()> {
        self.whole[item][range].copy_from_slice(values);
        Ok(())
    }
}
