//! The ranks of a job over a `Wire`: a thread owns the wire and runs the operations in the order of the calls, so that
//! numbers travel while the rank computes.
//!
//! Each operation begins with a header from every rank to every rank: the number of the operation, its kind and its
//! key. All ranks see the same headers, so all of them find the same failure or the same mismatch.

use super::collect::own_bytes;
use super::wire::{POLL, PrintLine, WaitLimit, Wire};
use super::{Collective, Patience, PendingNumbers, PendingState, RankFault, Shard, WholeList, World, closed};
use crate::base::sync::lock;
use crate::base::{Error, Result, stalled};
use candle_core::Device;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

type Lists = Vec<Vec<f32>>;

enum Job {
    AllToAll(u64, Lists, Vec<usize>, Sender<Result<Lists>>),
    AllGather(u64, Vec<f32>, Vec<usize>, Sender<Result<Lists>>),
    GatherShards(u64, Vec<Shard>, Vec<usize>, Sender<Result<Vec<WholeList>>>),
    AllGatherBytes(Vec<u8>, Patience, Sender<Result<Vec<Vec<u8>>>>),
    Device(Device, Sender<Result<()>>),
    Fail(i32, String, Sender<Vec<RankFault>>),
    Close,
    Abort(i32),
}

/// How long a rank that has failed waits for the others to reach their next operation, before it ends the job.
const FAILURE_GRACE: Duration = Duration::from_secs(15);
/// Rank r waits this much longer than rank r - 1, so that one of them reports a rank that is missing.
const STAGGER: Duration = Duration::from_secs(2);
/// Exit code if a thread of a rank ended by itself.
const BUG: i32 = 70;

const ALL_TO_ALL: u64 = 1;
const ALL_GATHER: u64 = 2;
const ALL_GATHER_BYTES: u64 = 3;
const FAULT: u64 = 4;
const CLOSE: u64 = 5;
const GATHER_SHARDS: u64 = 6;
const DEVICE: u64 = 7;

fn kind_name(kind: u64) -> &'static str {
    match kind {
        ALL_TO_ALL => "an exchange",
        ALL_GATHER => "a gathering",
        ALL_GATHER_BYTES => "an agreement",
        FAULT => "a failure",
        CLOSE => "the end",
        GATHER_SHARDS => "a collection of weights",
        DEVICE => "the connection of devices",
        _ => "an unknown operation",
    }
}

/// The ranks of a job, over a wire.
pub struct RankGroup {
    world: World,
    jobs: Mutex<Sender<Job>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    own_devices: bool,
    /// Milliseconds.
    timeout: Arc<AtomicU64>,
    /// Bytes of numbers and weights that have left.
    sent: Arc<AtomicU64>,
}

impl RankGroup {
    /// Starts the thread of a group. `open` runs on it and returns the wire and the place of this rank; the wire is
    /// dropped there. `say` prints a line if the job is ended from here.
    ///
    /// # Errors
    /// Those of `open`; the thread cannot be started.
    pub fn start<W: Wire>(
        open: impl FnOnce() -> Result<(W, World)> + Send + 'static,
        say: PrintLine,
    ) -> Result<Arc<Self>> {
        let (jobs, queue) = channel();
        let (ready, opened) = channel();
        let timeout = Arc::new(AtomicU64::new(600_000));
        let limit = timeout.clone();
        let sent = Arc::new(AtomicU64::new(0));
        let counted = sent.clone();
        let work = move || {
            let (wire, world) = match open() {
                Ok(found) => found,
                Err(e) => return drop(ready.send(Err(e))),
            };
            if ready.send(Ok(world.clone())).is_ok() {
                let mut worker = GroupWorker {
                    wire,
                    world,
                    turn: 0,
                    faults: Vec::new(),
                    own: None,
                    limit,
                    sent: counted,
                    say,
                };
                let ended = catch_unwind(AssertUnwindSafe(|| worker.run(&queue)));
                if ended.is_err() {
                    // The others would wait for this rank.
                    worker.wire.abort(BUG);
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("ranks".into())
            .spawn(work)
            .map_err(|e| Error::io("cannot start the thread of the ranks").cause(e))?;
        let world = opened.recv().unwrap_or_else(|_| Err(closed()))?;
        Ok(Arc::new(Self {
            world,
            jobs: Mutex::new(jobs),
            thread: Mutex::new(Some(thread)),
            own_devices: W::OWN_DEVICES,
            timeout,
            sent,
        }))
    }

    /// Joins the job that an MPI launcher (`mpirun`, `srun`) started.
    ///
    /// # Errors
    /// MPI cannot be started.
    #[cfg(feature = "mpi")]
    pub fn mpi(say: PrintLine) -> Result<Arc<Self>> {
        Self::start(super::mpi::open, say)
    }

    /// Connects to the other ranks over TCP; their numbers travel over NCCL (`Collective::use_device`).
    ///
    /// # Errors
    /// A rank that does not connect in time; ranks that do not agree on their number.
    #[cfg(feature = "nccl")]
    pub fn nccl(rendezvous: super::Rendezvous, say: PrintLine) -> Result<Arc<Self>> {
        Self::start(move || super::nccl::open(&rendezvous), say)
    }

    fn send(&self, job: Job) {
        // A thread that has ended drops the channel of the reply: the caller gets an error.
        let _ = lock(&self.jobs).send(job);
    }

    fn end(&self, job: Job) {
        if let Some(thread) = lock(&self.thread).take() {
            self.send(job);
            let _ = thread.join();
        }
    }
}

impl Drop for RankGroup {
    /// A rank that was not closed has panicked.
    fn drop(&mut self) {
        self.end(Job::Abort(BUG));
    }
}

impl Collective for RankGroup {
    fn world(&self) -> &World {
        &self.world
    }

    fn all_to_all(&self, key: u64, parts: Vec<Vec<f32>>, lengths: Vec<usize>) -> PendingNumbers {
        let (reply, coming) = channel();
        self.send(Job::AllToAll(key, parts, lengths, reply));
        PendingNumbers(PendingState::InFlight(coming))
    }

    fn all_gather(&self, key: u64, own: Vec<f32>, lengths: Vec<usize>) -> PendingNumbers {
        let (reply, coming) = channel();
        self.send(Job::AllGather(key, own, lengths, reply));
        PendingNumbers(PendingState::InFlight(coming))
    }

    fn gather_shards(&self, key: u64, shards: Vec<Shard>, to: Vec<usize>) -> PendingNumbers<WholeList> {
        let (reply, coming) = channel();
        self.send(Job::GatherShards(key, shards, to, reply));
        PendingNumbers(PendingState::InFlight(coming))
    }

    fn all_gather_bytes(&self, own: Vec<u8>, patience: Patience) -> Result<Vec<Vec<u8>>> {
        let (reply, coming) = channel();
        self.send(Job::AllGatherBytes(own, patience, reply));
        coming.recv().unwrap_or_else(|_| Err(closed()))
    }

    fn use_device(&self, device: &Device) -> Result<()> {
        let (reply, coming) = channel();
        self.send(Job::Device(device.clone(), reply));
        coming.recv().unwrap_or_else(|_| Err(closed()))
    }

    fn own_devices(&self) -> bool {
        self.own_devices
    }

    fn fail(&self, code: i32, text: String) -> Vec<RankFault> {
        let (reply, coming) = channel();
        let rank = self.world.name();
        let own = RankFault { rank, code, text };
        self.send(Job::Fail(own.code, own.text.clone(), reply));
        coming.recv().unwrap_or_else(|_| vec![own])
    }

    fn close(&self) {
        self.end(Job::Close);
    }

    fn set_timeout(&self, timeout: Duration) {
        self.timeout
            .store(timeout.as_millis().try_into().unwrap_or(u64::MAX), SeqCst);
    }

    fn sent(&self) -> u64 {
        self.sent.load(SeqCst)
    }
}

/// The next operation of a rank.
#[derive(Clone, Copy, PartialEq)]
struct OperationHeader {
    turn: u64,
    kind: u64,
    /// The key of numbers, or the length of bytes.
    key: u64,
}

impl OperationHeader {
    const BYTES: usize = 24;

    fn to_bytes(self) -> Vec<u8> {
        [self.turn, self.kind, self.key]
            .iter()
            .flat_map(|n| n.to_le_bytes())
            .collect()
    }

    fn read(bytes: &[u8]) -> Self {
        let number = |i: usize| {
            let bytes = bytes.get(8 * i..8 * i + 8).and_then(|b| b.try_into().ok());
            bytes.map_or(0, u64::from_le_bytes)
        };
        Self {
            turn: number(0),
            kind: number(1),
            key: number(2),
        }
    }
}

struct GroupWorker<W: Wire> {
    wire: W,
    world: World,
    /// Number of operations so far.
    turn: u64,
    /// After the first failure nothing travels any more.
    faults: Vec<RankFault>,
    /// The failure of this rank.
    own: Option<String>,
    limit: Arc<AtomicU64>,
    sent: Arc<AtomicU64>,
    say: PrintLine,
}

impl<W: Wire> GroupWorker<W> {
    fn run(&mut self, jobs: &Receiver<Job>) {
        loop {
            let job = match jobs.recv_timeout(POLL) {
                Ok(job) => job,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    if self.faults.is_empty() {
                        self.look();
                    }
                    continue;
                }
            };
            match job {
                Job::AllToAll(key, parts, lengths, reply) => {
                    let _ = reply.send(self.all_to_all(key, parts, &lengths));
                }
                Job::AllGather(key, own, lengths, reply) => {
                    let _ = reply.send(self.all_gather(key, own, &lengths));
                }
                Job::GatherShards(key, shards, to, reply) => {
                    let _ = reply.send(self.gather_shards(key, &shards, &to));
                }
                Job::AllGatherBytes(own, patience, reply) => {
                    let _ = reply.send(self.all_gather_bytes(own, patience));
                }
                Job::Device(device, reply) => {
                    let _ = reply.send(self.device(&device));
                }
                Job::Fail(code, text, reply) => {
                    self.fail(code, &text);
                    let _ = reply.send(self.faults.clone());
                }
                Job::Close => {
                    if self.faults.is_empty() {
                        let _ = self.begin(CLOSE, 0, None);
                    }
                    return;
                }
                Job::Abort(code) => return self.wire.abort(code),
            }
        }
    }

    /// While this rank computes or saves.
    fn look(&mut self) {
        let wait = self.wait(None);
        if let Some((path, lasted)) = stalled::stalled(self.patience()) {
            let (path, seconds) = (path.display(), lasted.as_secs());
            wait.ends(&format!("{path}: the disk has not ended an operation in {seconds} s"));
            self.wire.abort(1);
        }
        self.wire.idle(&wait);
    }

    /// The time limit of this rank for numbers.
    fn patience(&self) -> Duration {
        Duration::from_millis(self.limit.load(SeqCst)) + STAGGER * self.world.rank as u32
    }

    fn wait(&self, limit: Option<Duration>) -> WaitLimit {
        WaitLimit {
            limit,
            silence: self.patience(),
            last: false,
            name: self.world.name(),
            own: self.own.clone(),
            say: self.say,
        }
    }

    /// Exchanges bytes whose lengths are known.
    fn swap(&mut self, own: &[&[u8]], lengths: &[usize], wait: &WaitLimit) -> Vec<Vec<u8>> {
        let mut into: Vec<Vec<u8>> = lengths.iter().map(|n| vec![0; *n]).collect();
        let mut views = views(&mut into);
        self.wire.bytes(&numbered(own), &mut views, wait);
        into
    }

    fn numbers(&mut self, out: &[&[f32]], lengths: &[usize]) -> Lists {
        let mut into: Lists = lengths.iter().map(|n| vec![0.0; *n]).collect();
        let wait = self.wait(Some(self.patience()));
        let mut views = views(&mut into);
        self.wire.floats(&numbered(out), &mut views, &wait);
        self.count(out.iter().map(|list| size_of_val(*list)));
        into
    }

    /// Adds the sizes of lists that have left.
    fn count(&self, sizes: impl Iterator<Item = usize>) {
        self.sent.fetch_add(sizes.sum::<usize>() as u64, SeqCst);
    }

    /// Exchanges the headers of an operation. Errors: a rank has failed or is at another operation.
    fn meet(&mut self, kind: u64, key: u64, limit: Option<Duration>) -> Result<Vec<OperationHeader>> {
        if !self.faults.is_empty() {
            return Err(self.error());
        }
        self.turn += 1;
        let own = OperationHeader {
            turn: self.turn,
            kind,
            key,
        };
        let bytes = own.to_bytes();
        let size = self.world.size;
        let wait = WaitLimit {
            last: kind == CLOSE,
            ..self.wait(limit)
        };
        let found = self.swap(&vec![&bytes[..]; size], &vec![OperationHeader::BYTES; size], &wait);
        let mut headers: Vec<OperationHeader> = found.iter().map(|bytes| OperationHeader::read(bytes)).collect();
        headers[self.world.rank] = own;
        if headers.iter().any(|h| h.kind == FAULT) {
            // The caller has to receive the texts.
            return Ok(headers);
        }
        let shape = |h: &OperationHeader| (h.turn, h.kind, if h.kind == ALL_GATHER_BYTES { 0 } else { h.key });
        if let Some(other) = headers.iter().position(|h| shape(h) != shape(&headers[0])) {
            let name = |h: &OperationHeader| format!("{} (operation {}, key {:x})", kind_name(h.kind), h.turn, h.key);
            let text = format!(
                "internal: the ranks have lost step: rank 0 is at {}, rank {other} at {}",
                name(&headers[0]),
                name(&headers[other])
            );
            self.faults.push(RankFault {
                rank: format!("rank {other}"),
                code: BUG,
                text,
            });
            return Err(self.error());
        }
        Ok(headers)
    }

    /// As `meet`; receives the texts of ranks that have failed.
    fn begin(&mut self, kind: u64, key: u64, limit: Option<Duration>) -> Result<Vec<OperationHeader>> {
        let headers = self.meet(kind, key, limit)?;
        if headers.iter().any(|h| h.kind == FAULT) {
            self.receive_faults(&headers, &[]);
            return Err(self.error());
        }
        Ok(headers)
    }

    /// `own`: name, code and text of this rank, if it has failed.
    fn receive_faults(&mut self, headers: &[OperationHeader], own: &[u8]) {
        let lengths: Vec<usize> = headers
            .iter()
            .map(|h| if h.kind == FAULT { h.key as usize } else { 0 })
            .collect();
        let wait = WaitLimit {
            last: true,
            ..self.wait(Some(FAILURE_GRACE))
        };
        let mut texts = self.swap(&vec![own; headers.len()], &lengths, &wait);
        texts[self.world.rank] = own.to_vec();
        for (header, bytes) in headers.iter().zip(texts) {
            if header.kind == FAULT {
                self.faults.push(fault_of(&bytes));
            }
        }
    }

    fn fail(&mut self, code: i32, text: &str) {
        if !self.faults.is_empty() {
            return;
        }
        self.own = Some(text.to_string());
        let own = format!("{code}\n{}\n{text}", self.world.name()).into_bytes();
        if let Ok(headers) = self.meet(FAULT, own.len() as u64, Some(FAILURE_GRACE)) {
            self.receive_faults(&headers, &own);
        }
    }

    /// The error of every operation after a failure.
    fn error(&self) -> Error {
        let first = self.faults.first();
        let text = first.map_or(String::new(), |f| {
            format!("{}: {}", f.rank, f.text.lines().next().unwrap_or_default())
        });
        Error::new("a rank has failed").cause(text)
    }

    fn all_to_all(&mut self, key: u64, mut parts: Lists, lengths: &[usize]) -> Result<Lists> {
        let limit = Some(self.patience());
        self.begin(ALL_TO_ALL, key, limit)?;
        let rank = self.world.rank;
        let own = std::mem::take(&mut parts[rank]);
        let lengths = others(lengths, rank);
        let out: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
        let mut into = self.numbers(&out, &lengths);
        into[rank] = own;
        Ok(into)
    }

    fn all_gather(&mut self, key: u64, own: Vec<f32>, lengths: &[usize]) -> Result<Lists> {
        let limit = Some(self.patience());
        self.begin(ALL_GATHER, key, limit)?;
        let rank = self.world.rank;
        let lengths = others(lengths, rank);
        let mut out: Vec<&[f32]> = vec![&own; self.world.size];
        out[rank] = &[];
        let mut into = self.numbers(&out, &lengths);
        into[rank] = own;
        Ok(into)
    }

    fn gather_shards(&mut self, key: u64, shards: &[Shard], to: &[usize]) -> Result<Vec<WholeList>> {
        let limit = Some(self.patience());
        self.begin(GATHER_SHARDS, key, limit)?;
        let rank = self.world.rank;
        let guards: Vec<Vec<_>> = shards
            .iter()
            .map(|shard| shard.own.iter().map(|own| own.storage_and_layout()).collect())
            .collect();
        let mut own = Vec::new();
        for (guards, shard) in guards.iter().zip(shards) {
            let bytes = guards.iter().zip(&shard.own);
            let bytes = bytes.map(|((guard, _), part)| own_bytes(guard, part));
            own.push(bytes.collect::<Result<Vec<&[u8]>>>()?);
        }
        let mut out = Vec::new();
        for (own, shard) in own.iter().zip(shards) {
            // In the order in which the others take them.
            let mut order: Vec<usize> = (0..own.len()).collect();
            order.sort_by_key(|part| shard.ranges[rank][*part].start);
            for part in order {
                let others = to.iter().filter(|to| **to != rank);
                out.extend(others.map(|to| (*to, own[part])));
            }
        }
        let whole = shards.iter().filter(|_| to.contains(&rank));
        let whole = whole.map(|shard| WholeList::zeros(shard.dtype(), shard.elements()));
        let mut whole: Vec<WholeList> = whole.collect::<Result<_>>()?;
        let mut into = Vec::new();
        for ((whole, shard), own) in whole.iter_mut().zip(shards).zip(&own) {
            let width = shard.dtype().size_in_bytes();
            let mut parts = Vec::new();
            for (of, ranges) in shard.ranges.iter().enumerate() {
                let some = ranges.iter().enumerate().filter(|(_, range)| !range.is_empty());
                parts.extend(some.map(|(part, range)| (range.start, width * range.len(), of, part)));
            }
            parts.sort_unstable();
            let mut rest = whole.bytes();
            for (_, length, of, part) in parts {
                let (here, after) = rest.split_at_mut(length);
                rest = after;
                if of == rank {
                    here.copy_from_slice(own[part]);
                } else {
                    into.push((of, here));
                }
            }
        }
        let wait = self.wait(limit);
        self.wire.bytes(&out, &mut into, &wait);
        self.count(out.iter().map(|(_, list)| list.len()));
        Ok(whole)
    }

    fn device(&mut self, device: &Device) -> Result<()> {
        // Until now ranks may have worked for different times.
        self.begin(DEVICE, 0, None)?;
        let limit = Some(self.patience());
        let wait = self.wait(limit);
        self.wire.device(device, &wait)?;
        // A rank whose device could not be connected says why.
        self.begin(DEVICE, 1, limit).map(drop)
    }

    fn all_gather_bytes(&mut self, own: Vec<u8>, patience: Patience) -> Result<Vec<Vec<u8>>> {
        let limit = (patience == Patience::Step).then(|| self.patience());
        let headers = self.begin(ALL_GATHER_BYTES, own.len() as u64, limit)?;
        let lengths: Vec<usize> = headers.iter().map(|h| h.key as usize).collect();
        // All ranks are here: the bytes have a limit also if the wait for the headers had none.
        let limit = Some(self.patience());
        let wait = self.wait(limit);
        let mut into = self.swap(&vec![&own[..]; headers.len()], &lengths, &wait);
        into[self.world.rank] = own;
        Ok(into)
    }
}

/// Each list with its rank.
fn numbered<'a, T>(lists: &[&'a [T]]) -> Vec<(usize, &'a [T])> {
    lists.iter().copied().enumerate().collect()
}

fn views<T>(lists: &mut [Vec<T>]) -> Vec<(usize, &mut [T])> {
    lists.iter_mut().map(Vec::as_mut_slice).enumerate().collect()
}

/// The lengths without that of the own rank.
fn others(lengths: &[usize], rank: usize) -> Vec<usize> {
    let mut lengths = lengths.to_vec();
    lengths[rank] = 0;
    lengths
}

fn fault_of(bytes: &[u8]) -> RankFault {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.splitn(3, '\n');
    let mut next = || lines.next().unwrap_or_default().to_string();
    let code = next().parse().unwrap_or(1);
    RankFault {
        code,
        rank: next(),
        text: next(),
    }
}
