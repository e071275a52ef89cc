//! The wire over MPI: point-to-point messages that do not block. The thread looks for their end and sleeps in between,
//! because other ranks and the computation of this one need the processors.
//!
//! A rank that computes or works alone sends each other rank a heartbeat from time to time, with a tag of its own. So
//! one that waits without a limit finds a rank whose process hangs.

use super::World;
use super::wire::{POLL, WaitLimit, Wire};
use crate::base::{Error, Result};
use ::mpi::environment::Universe;
use ::mpi::request::{LocalScope, Request, StaticScope, scope};
use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::{Buffer, BufferMut, Communicator, Destination, Equivalence, Source};
use ::mpi::{Tag, Threading};
use std::time::{Duration, Instant};

/// Bytes of a message; the counts of MPI are 32-bit integers.
const PIECE: usize = 1 << 30;
/// Time between two looks at messages in flight.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

const NUMBERS: Tag = 1;
const LIFE: Tag = 2;
static HEARTBEAT: [u8; 1] = [1];

/// The wire, and the universe that ends with it.
pub(super) struct MpiWire {
    world: SimpleCommunicator,
    rank: usize,
    /// When the last heartbeat of each rank has arrived.
    seen: Vec<Instant>,
    /// When this rank has sent the last one.
    sent: Instant,
    /// The heartbeats of this rank that are still in flight.
    heartbeats: Vec<Option<Request<'static, [u8], StaticScope>>>,
    _universe: Universe,
}

/// Starts MPI on this thread.
pub(super) fn open() -> Result<(MpiWire, World)> {
    let fault = |what: &str| Error::new("MPI cannot be started").found(what);
    let (universe, threading) = ::mpi::initialize_with_threading(Threading::Funneled)
        .ok_or_else(|| fault("it was started before in this process"))?;
    if threading == Threading::Single {
        return Err(fault("a library without support of threads"));
    }
    let world = universe.world();
    let host = ::mpi::environment::processor_name().unwrap_or_default();
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let wire = MpiWire {
        world,
        rank,
        seen: vec![Instant::now(); size],
        sent: Instant::now(),
        heartbeats: (0..size).map(|_| None).collect(),
        _universe: universe,
    };
    Ok((wire, World { rank, size, host }))
}

/// Name and version of the MPI library, such as `Open MPI v4.1.4`. MPI need not be started.
pub fn mpi_version() -> String {
    let text = ::mpi::environment::library_version().unwrap_or_default();
    let first = text.split([',', '\n']).next().unwrap_or_default();
    first.trim_end_matches('\0').trim().to_string()
}

type OpenRequest<'a, 'b, T> = (usize, Request<'a, [T], &'b LocalScope<'a>>);

impl MpiWire {
    /// Sends and receives in pieces of `piece` elements. Messages between two ranks arrive in their order, so one tag is
    /// enough.
    fn swap<T: Equivalence>(
        &mut self,
        out: &[(usize, &[T])],
        into: &mut [(usize, &mut [T])],
        piece: usize,
        wait: &WaitLimit,
    ) where
        [T]: Buffer + BufferMut,
    {
        let tag = NUMBERS;
        let (world, seen) = (&self.world, &mut self.seen);
        scope(|scope| {
            let mut open: Vec<OpenRequest<T>> = Vec::new();
            // Sends are posted before receives. Over TCP a receive that is posted late makes the peer send at once; if
            // this rank posts its send after that, it waits behind these bytes, and the two directions run one after
            // the other.
            for (rank, list) in out.iter().filter(|(rank, _)| *rank != self.rank) {
                let to = world.process_at_rank(*rank as i32);
                for part in list.chunks(piece) {
                    open.push((*rank, to.immediate_send_with_tag(scope, part, tag)));
                }
            }
            for (rank, list) in into.iter_mut().filter(|(rank, _)| *rank != self.rank) {
                let from = world.process_at_rank(*rank as i32);
                for part in list.chunks_mut(piece) {
                    open.push((*rank, from.immediate_receive_into_with_tag(scope, part, tag)));
                }
            }
            let (begun, mut pause) = (Instant::now(), SHORTEST);
            let mut looked = begun;
            loop {
                let before = open.len();
                let still = open.into_iter().filter_map(|(rank, request)| {
                    let request = request.test().err()?;
                    Some((rank, request))
                });
                open = still.collect();
                if open.is_empty() {
                    return;
                }
                pause = if open.len() < before {
                    SHORTEST
                } else {
                    (2 * pause).min(LONGEST)
                };
                let missing = || {
                    let mut missing: Vec<usize> = open.iter().map(|(rank, _)| *rank).collect();
                    missing.sort_unstable();
                    missing.dedup();
                    missing
                };
                if wait.limit.is_some_and(|limit| begun.elapsed() > limit) {
                    wait.late(&missing());
                    world.abort(1);
                }
                if looked.elapsed() > POLL {
                    looked = Instant::now();
                    receive_heartbeats(world, seen);
                    let mut silent = missing();
                    silent.retain(|rank| seen[*rank].max(begun).elapsed() > wait.silence);
                    if wait.limit.is_none() && !silent.is_empty() {
                        wait.silent(&silent);
                        world.abort(1);
                    }
                }
                std::thread::sleep(pause);
            }
        });
    }
}

/// Takes the heartbeats that have arrived.
fn receive_heartbeats(world: &SimpleCommunicator, seen: &mut [Instant]) {
    while let Some(status) = world.any_process().immediate_probe_with_tag(LIFE) {
        let (from, mut heartbeat) = (status.source_rank(), HEARTBEAT);
        world
            .process_at_rank(from)
            .receive_into_with_tag(&mut heartbeat[..], LIFE);
        seen[from as usize] = Instant::now();
    }
}

impl Drop for MpiWire {
    /// Nobody waits for a heartbeat any more.
    fn drop(&mut self) {
        self.heartbeats.drain(..).flatten().for_each(std::mem::forget);
    }
}

impl Wire for MpiWire {
    fn bytes(&mut self, out: &[(usize, &[u8])], into: &mut [(usize, &mut [u8])], wait: &WaitLimit) {
        self.swap(out, into, PIECE, wait);
    }

    fn floats(&mut self, out: &[(usize, &[f32])], into: &mut [(usize, &mut [f32])], wait: &WaitLimit) {
        self.swap(out, into, PIECE / 4, wait);
    }

    fn idle(&mut self, wait: &WaitLimit) {
        receive_heartbeats(&self.world, &mut self.seen);
        if self.sent.elapsed() < wait.heartbeat_every() {
            return;
        }
        self.sent = Instant::now();
        let heartbeats = self.heartbeats.iter_mut().enumerate();
        for (rank, heartbeat) in heartbeats.filter(|(rank, _)| *rank != self.rank) {
            // One heartbeat at a time: a process that hangs takes none.
            *heartbeat = match heartbeat.take().map(Request::test) {
                Some(Err(in_flight)) => Some(in_flight),
                _ => {
                    let to = self.world.process_at_rank(rank as i32);
                    Some(to.immediate_send_with_tag(StaticScope, &HEARTBEAT[..], LIFE))
                }
            };
        }
    }

    fn abort(&mut self, code: i32) {
        self.world.abort(code);
    }
}
