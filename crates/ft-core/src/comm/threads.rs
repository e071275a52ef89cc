//! Ranks that are threads of one process, for tests.

use super::wire::{WaitLimit, Wire};
use super::{Collective, Patience, PendingNumbers, PendingState, RankFault, RankGroup, Shard, WholeList, World};
use crate::base::Result;
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

enum Message {
    Bytes(Vec<u8>),
    Floats(Vec<f32>),
}

/// The channels of one rank to and from every rank.
struct ThreadWire {
    rank: usize,
    to: Vec<Sender<Message>>,
    from: Vec<Receiver<Message>>,
}

impl ThreadWire {
    fn travels(&self, rank: usize, length: usize) -> bool {
        rank != self.rank && length > 0
    }

    fn receive(&self, rank: usize, wait: &WaitLimit) -> Message {
        let found = match wait.limit {
            Some(limit) => self.from[rank].recv_timeout(limit).ok(),
            None => self.from[rank].recv().ok(),
        };
        found.unwrap_or_else(|| {
            wait.late(&[rank]);
            panic!("rank {rank} is missing")
        })
    }
}

impl Wire for ThreadWire {
    fn bytes(&mut self, out: &[(usize, &[u8])], into: &mut [(usize, &mut [u8])], wait: &WaitLimit) {
        for (rank, list) in out.iter().filter(|(rank, list)| self.travels(*rank, list.len())) {
            let _ = self.to[*rank].send(Message::Bytes(list.to_vec()));
        }
        for (rank, list) in into.iter_mut().filter(|(rank, list)| self.travels(*rank, list.len())) {
            match self.receive(*rank, wait) {
                Message::Bytes(found) => list.copy_from_slice(&found),
                Message::Floats(_) => panic!("numbers instead of bytes"),
            }
        }
    }

    fn floats(&mut self, out: &[(usize, &[f32])], into: &mut [(usize, &mut [f32])], wait: &WaitLimit) {
        for (rank, list) in out.iter().filter(|(rank, list)| self.travels(*rank, list.len())) {
            let _ = self.to[*rank].send(Message::Floats(list.to_vec()));
        }
        for (rank, list) in into.iter_mut().filter(|(rank, list)| self.travels(*rank, list.len())) {
            match self.receive(*rank, wait) {
                Message::Floats(found) => list.copy_from_slice(&found),
                Message::Bytes(_) => panic!("bytes instead of numbers"),
            }
        }
    }

    fn abort(&mut self, code: i32) {
        panic!("the job was ended with code {code}");
    }
}

/// Runs `work` on `size` ranks; returns their results in order.
pub(crate) fn run<T: Send>(size: usize, work: impl Fn(Arc<dyn Collective>) -> T + Sync) -> Vec<T> {
    run_on(&vec!["here"; size], work)
}

/// Runs `work` on one rank for each of these names of machines.
pub(crate) fn run_on<T: Send>(hosts: &[&str], work: impl Fn(Arc<dyn Collective>) -> T + Sync) -> Vec<T> {
    let size = hosts.len();
    let mut to: Vec<Vec<Sender<Message>>> = (0..size).map(|_| Vec::new()).collect();
    let mut from: Vec<Vec<Receiver<Message>>> = (0..size).map(|_| Vec::new()).collect();
    for sender in to.iter_mut() {
        for receiver in from.iter_mut() {
            let (send, receive) = channel();
            sender.push(send);
            receiver.push(receive);
        }
    }
    let wires: Vec<ThreadWire> = to
        .into_iter()
        .zip(from)
        .enumerate()
        .map(|(rank, (to, from))| ThreadWire { rank, to, from })
        .collect();
    let work = &work;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = wires
            .into_iter()
            .map(|wire| {
                scope.spawn(move || {
                    let world = World {
                        rank: wire.rank,
                        size,
                        host: hosts[wire.rank].into(),
                    };
                    let group = RankGroup::start(move || Ok((wire, world)), |_| ()).unwrap();
                    let out = work(group.clone());
                    group.close();
                    out
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// When the operations of all ranks end, in seconds of a clock that stands still while they compute.
#[derive(Default)]
pub(crate) struct Clocks(Mutex<BTreeMap<(u64, usize), f64>>);

/// Ranks with a slow connection: the numbers that a rank sends leave one list after the other, at a rate. The time is that of
/// `Clocks`, so it is the same in every run.
pub(crate) struct SlowComm {
    comm: Arc<dyn Collective>,
    bytes_per_second: f64,
    clocks: Arc<Clocks>,
    own: Arc<Mutex<Clock>>,
}

/// The clock of one rank.
#[derive(Default)]
struct Clock {
    now: f64,
    /// When the connection is free again.
    free: f64,
    operations: u64,
}

impl SlowComm {
    pub(crate) fn new(comm: Arc<dyn Collective>, bytes_per_second: f64, clocks: Arc<Clocks>) -> Self {
        Self {
            comm,
            bytes_per_second,
            clocks,
            own: Arc::default(),
        }
    }

    /// Seconds since the beginning.
    pub(crate) fn seconds(&self) -> f64 {
        self.own.lock().unwrap().now
    }

    /// Begins an operation in which this rank sends `numbers` f32 numbers. The returned function ends it: it waits for
    /// all ranks.
    fn begin(&self, numbers: usize) -> impl FnOnce() + Send + 'static {
        let (rank, size) = (self.world().rank, self.world().size);
        let mut clock = self.own.lock().unwrap();
        clock.free = clock.free.max(clock.now) + 4.0 * numbers as f64 / self.bytes_per_second;
        clock.operations += 1;
        let operation = clock.operations;
        // Before the numbers leave, so every rank that has them finds it.
        self.clocks.0.lock().unwrap().insert((operation, rank), clock.free);
        let (clocks, own) = (self.clocks.clone(), self.own.clone());
        move || {
            let ends = clocks.0.lock().unwrap();
            let end = (0..size)
                .filter_map(|rank| ends.get(&(operation, rank)))
                .fold(0.0f64, |a, b| a.max(*b));
            let mut clock = own.lock().unwrap();
            clock.now = clock.now.max(end);
        }
    }
}

impl Collective for SlowComm {
    fn world(&self) -> &World {
        self.comm.world()
    }

    fn all_to_all(&self, key: u64, parts: Vec<Vec<f32>>, lengths: Vec<usize>) -> PendingNumbers {
        let all: usize = parts.iter().map(Vec::len).sum();
        let own = parts.get(self.world().rank).map_or(0, Vec::len);
        let end = self.begin(all - own);
        let pending = self.comm.all_to_all(key, parts, lengths);
        PendingNumbers(PendingState::Timed(Box::new(pending.0), Box::new(end)))
    }

    fn all_gather(&self, key: u64, own: Vec<f32>, lengths: Vec<usize>) -> PendingNumbers {
        let sent = own.len() * (self.world().size - 1);
        let end = self.begin(sent);
        let pending = self.comm.all_gather(key, own, lengths);
        PendingNumbers(PendingState::Timed(Box::new(pending.0), Box::new(end)))
    }

    fn gather_shards(&self, key: u64, shards: Vec<Shard>, to: Vec<usize>) -> PendingNumbers<WholeList> {
        self.comm.gather_shards(key, shards, to)
    }

    fn all_gather_bytes(&self, own: Vec<u8>, patience: Patience) -> Result<Vec<Vec<u8>>> {
        let end = self.begin(0);
        let all = self.comm.all_gather_bytes(own, patience);
        end();
        all
    }

    fn use_device(&self, device: &Device) -> Result<()> {
        self.comm.use_device(device)
    }

    fn own_devices(&self) -> bool {
        self.comm.own_devices()
    }

    fn fail(&self, code: i32, text: String) -> Vec<RankFault> {
        self.comm.fail(code, text)
    }

    fn close(&self) {
        self.comm.close();
    }

    fn set_timeout(&self, timeout: Duration) {
        self.comm.set_timeout(timeout);
    }

    fn sent(&self) -> u64 {
        self.comm.sent()
    }
}

/// Bytes of the own parts.
fn own_bytes(shards: &[Shard]) -> u64 {
    let bytes = |own: &Tensor| own.elem_count() * own.dtype().size_in_bytes();
    shards.iter().flat_map(|shard| &shard.own).map(bytes).sum::<usize>() as u64
}

/// Counts the numbers that a rank sends, then the bytes of weights, to the ranks that `counts` accepts.
pub(crate) struct CountingComm {
    comm: Arc<dyn Collective>,
    numbers: Arc<AtomicU64>,
    weights: Arc<AtomicU64>,
    counts: fn(usize, usize) -> bool,
}

impl CountingComm {
    pub(crate) fn new(comm: Arc<dyn Collective>, numbers: Arc<AtomicU64>, weights: Arc<AtomicU64>) -> Self {
        let counts = |_, _| true;
        Self {
            comm,
            numbers,
            weights,
            counts,
        }
    }

    /// Counts what travels from a rank to another one only if `counts` accepts the two.
    pub(crate) fn between(self, counts: fn(usize, usize) -> bool) -> Self {
        Self { counts, ..self }
    }

    fn counts(&self, to: usize) -> bool {
        let own = self.world().rank;
        to != own && (self.counts)(own, to)
    }
}

impl Collective for CountingComm {
    fn world(&self) -> &World {
        self.comm.world()
    }

    fn all_to_all(&self, key: u64, parts: Vec<Vec<f32>>, lengths: Vec<usize>) -> PendingNumbers {
        let counted = parts.iter().enumerate().filter(|(to, _)| self.counts(*to));
        let numbers: usize = counted.map(|(_, part)| part.len()).sum();
        self.numbers.fetch_add(numbers as u64, SeqCst);
        self.comm.all_to_all(key, parts, lengths)
    }

    fn all_gather(&self, key: u64, own: Vec<f32>, lengths: Vec<usize>) -> PendingNumbers {
        let others = (0..self.world().size).filter(|to| self.counts(*to)).count();
        self.numbers.fetch_add((own.len() * others) as u64, SeqCst);
        self.comm.all_gather(key, own, lengths)
    }

    fn gather_shards(&self, key: u64, shards: Vec<Shard>, to: Vec<usize>) -> PendingNumbers<WholeList> {
        let others = to.iter().filter(|to| self.counts(**to)).count();
        self.weights.fetch_add(own_bytes(&shards) * others as u64, SeqCst);
        self.comm.gather_shards(key, shards, to)
    }

    fn all_gather_bytes(&self, own: Vec<u8>, patience: Patience) -> Result<Vec<Vec<u8>>> {
        self.comm.all_gather_bytes(own, patience)
    }

    fn use_device(&self, device: &Device) -> Result<()> {
        self.comm.use_device(device)
    }

    fn own_devices(&self) -> bool {
        self.comm.own_devices()
    }

    fn fail(&self, code: i32, text: String) -> Vec<RankFault> {
        self.comm.fail(code, text)
    }

    fn close(&self) {
        self.comm.close();
    }

    fn set_timeout(&self, timeout: Duration) {
        self.comm.set_timeout(timeout);
    }

    fn sent(&self) -> u64 {
        self.comm.sent()
    }
}
