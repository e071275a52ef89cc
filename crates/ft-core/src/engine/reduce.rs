//! The sum of the gradients of all ranks. Each rank owns a part of every gradient (`comm::part`): it receives the part of
//! each micro-batch and adds them in the order of the micro-batches, so the sums have the bits of one rank. At the end
//! of the window every rank gets all sums.
//!
//! Letters: W ranks.

use crate::base::Result;
use crate::comm::{Collective, Pending, part};
use crate::model::Param;
use crate::ops::update;
use candle_core::Tensor;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Numbers that travel together.
const BUCKET: usize = 1 << 20;
/// Buckets under way, beside the one that waits for its place.
const UNDER_WAY: usize = 2;

/// Memory of a step that several ranks need beyond that of one: buckets that are sent and received, without the part of
/// the sums that other ranks have. `trained`: elements of all gradients; `largest`: of the largest one.
pub fn exchange_bytes(trained: u64, largest: u64, ranks: u64) -> u64 {
    if ranks < 2 {
        return 0;
    }
    let bucket = largest.max(BUCKET as u64).min(trained);
    let under_way = 2 * (UNDER_WAY as u64 + 1) * bucket;
    4 * under_way.saturating_sub(trained - trained / ranks).max(bucket)
}

/// Bytes that a rank sends in a step: its gradients in each round of micro-batches, and the sums of its part.
pub fn sent_bytes(trained: u64, micro_batches: u64, ranks: u64) -> u64 {
    let rounds = micro_batches.div_ceil(ranks.max(1));
    4 * (trained - trained / ranks.max(1)) * (rounds + 1)
}

/// One gradient of a bucket: name and number of elements.
type Entry = (Arc<str>, usize);

/// A parameter, and the shape of its gradient.
type Summed = (Param, Vec<usize>);

/// Gradients that are sent together.
#[derive(Default)]
struct Bucket {
    entries: Vec<Entry>,
    elements: usize,
    /// For each rank its part of every gradient, one after the other.
    parts: Vec<Vec<f32>>,
}

/// A bucket whose numbers are on their way.
struct Coming {
    entries: Vec<Entry>,
    contributors: usize,
    numbers: Pending,
}

/// Adds the gradients of all ranks.
pub(super) struct Reduce<'a> {
    comm: &'a dyn Collective,
    /// In this round the micro-batches of the first so many ranks count.
    contributors: usize,
    bucket: Bucket,
    coming: VecDeque<Coming>,
    /// Parameters in the order of their first gradient, with the shape of the gradient.
    params: Vec<Summed>,
    /// The sums of the own parts; `None` before the first one arrives.
    sums: BTreeMap<Arc<str>, Option<Vec<f32>>>,
}

/// Equal for the same gradients in the same order.
fn key(entries: &[Entry], contributors: usize) -> u64 {
    // FNV-1a: the same on every machine.
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut add = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    add(&contributors.to_le_bytes());
    for (name, n) in entries {
        add(name.as_bytes());
        add(&n.to_le_bytes());
    }
    hash
}

impl<'a> Reduce<'a> {
    pub(super) fn new(comm: &'a dyn Collective) -> Self {
        Self {
            comm,
            contributors: comm.world().size,
            bucket: Bucket::default(),
            coming: VecDeque::new(),
            params: Vec::new(),
            sums: BTreeMap::new(),
        }
    }

    pub(super) fn begin_round(&mut self, contributors: usize) {
        self.contributors = contributors;
    }

    /// Takes the gradient (f32, any shape) of a micro-batch.
    pub(super) fn take(&mut self, param: &Param, gradient: &Tensor) -> Result<()> {
        let n = gradient.elem_count();
        if !self.sums.contains_key(&param.name) {
            self.sums.insert(param.name.clone(), None);
            self.params.push((param.clone(), gradient.dims().to_vec()));
        }
        let world = self.comm.world();
        self.bucket.parts.resize(world.size, Vec::new());
        if world.rank < self.contributors {
            let flat = gradient.flatten_all()?;
            for (rank, list) in self.bucket.parts.iter_mut().enumerate() {
                let part = part(n, rank, world.size);
                if part.len() == n && list.is_empty() {
                    *list = update::to_f32_vec(&flat)?;
                } else if !part.is_empty() {
                    list.extend(update::to_f32_vec(&flat.narrow(0, part.start, part.len())?)?);
                }
            }
        }
        self.bucket.entries.push((param.name.clone(), n));
        self.bucket.elements += n;
        if self.bucket.elements >= BUCKET {
            self.flush()
        } else {
            Ok(())
        }
    }

    /// Sends what is in the bucket.
    pub(super) fn flush(&mut self) -> Result<()> {
        let Bucket { entries, parts, .. } = std::mem::take(&mut self.bucket);
        if entries.is_empty() {
            return Ok(());
        }
        let world = self.comm.world();
        let own: usize = entries
            .iter()
            .map(|(_, n)| part(*n, world.rank, world.size).len())
            .sum();
        let lengths = (0..world.size)
            .map(|rank| if rank < self.contributors { own } else { 0 })
            .collect();
        let numbers = self.comm.exchange(key(&entries, self.contributors), parts, lengths);
        self.coming.push_back(Coming {
            entries,
            contributors: self.contributors,
            numbers,
        });
        while self.coming.len() > UNDER_WAY {
            self.receive()?;
        }
        Ok(())
    }

    /// Adds the oldest bucket under way to the sums, the first rank's first.
    fn receive(&mut self) -> Result<()> {
        let Some(bucket) = self.coming.pop_front() else {
            return Ok(());
        };
        let world = self.comm.world();
        for list in bucket.numbers.wait()?.iter().take(bucket.contributors) {
            let mut rest = &list[..];
            for (name, n) in &bucket.entries {
                let (own, after) = rest.split_at(part(*n, world.rank, world.size).len());
                rest = after;
                match self.sums.get_mut(name) {
                    Some(Some(sum)) => sum.iter_mut().zip(own).for_each(|(sum, g)| *sum += g),
                    Some(none) => *none = Some(own.to_vec()),
                    None => {}
                }
            }
        }
        Ok(())
    }

    /// The parameters in the order of their first gradient, each with its sum over the window (f32).
    pub(super) fn finish(mut self) -> Result<Vec<(Param, Tensor)>> {
        self.flush()?;
        while !self.coming.is_empty() {
            self.receive()?;
        }
        let mut out = Vec::with_capacity(self.params.len());
        let mut coming: VecDeque<(Vec<Summed>, Pending)> = VecDeque::new();
        let mut params = std::mem::take(&mut self.params).into_iter().peekable();
        while params.peek().is_some() {
            let (mut some, mut elements) = (Vec::new(), 0);
            while let Some((_, shape)) = params.peek()
                && (elements == 0 || elements + count(shape) <= BUCKET)
            {
                elements += count(shape);
                some.extend(params.next());
            }
            coming.push_back(self.publish(some));
            if coming.len() > UNDER_WAY
                && let Some((some, pending)) = coming.pop_front()
            {
                self.assemble(some, pending, &mut out)?;
            }
        }
        for (some, pending) in coming {
            self.assemble(some, pending, &mut out)?;
        }
        Ok(out)
    }

    /// Sends the own parts of some sums to all ranks.
    fn publish(&mut self, some: Vec<Summed>) -> (Vec<Summed>, Pending) {
        let size = self.comm.world().size;
        let entries: Vec<Entry> = some.iter().map(|(p, shape)| (p.name.clone(), count(shape))).collect();
        let mut own = Vec::new();
        for (name, _) in &entries {
            own.extend(self.sums.remove(name).flatten().unwrap_or_default());
        }
        let length = |rank| entries.iter().map(|(_, n)| part(*n, rank, size).len()).sum();
        let pending = self
            .comm
            .gather(key(&entries, size), own, (0..size).map(length).collect());
        (some, pending)
    }

    /// Puts the parts of all ranks together.
    fn assemble(&self, some: Vec<Summed>, pending: Pending, out: &mut Vec<(Param, Tensor)>) -> Result<()> {
        let lists = pending.wait()?;
        let mut rest: Vec<&[f32]> = lists.iter().map(Vec::as_slice).collect();
        for (param, shape) in some {
            let n = count(&shape);
            let mut values = Vec::with_capacity(n);
            for (rank, rest) in rest.iter_mut().enumerate() {
                let (own, after) = rest.split_at(part(n, rank, lists.len()).len());
                values.extend_from_slice(own);
                *rest = after;
            }
            let sum = Tensor::from_vec(values, shape, param.tensor.device())?;
            out.push((param, sum));
        }
        Ok(())
    }
}

fn count(shape: &[usize]) -> usize {
    shape.iter().product()
}
