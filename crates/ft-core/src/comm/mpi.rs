//! The wire over MPI: point-to-point messages that do not block. The thread looks for their end and sleeps in between,
//! because other ranks and the computation of this one need the processors.

use super::World;
use super::wire::{Wait, Wire};
use crate::base::{Error, Result};
use ::mpi::environment::Universe;
use ::mpi::request::{LocalScope, Request, scope};
use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::{Buffer, BufferMut, Communicator, Destination, Equivalence, Source};
use ::mpi::{Tag, Threading};
use std::time::{Duration, Instant};

/// Bytes of a message; the counts of MPI are 32-bit integers.
const PIECE: usize = 1 << 30;
/// Time between two looks at messages under way.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// The wire, and the universe that ends with it.
pub(super) struct MpiWire {
    world: SimpleCommunicator,
    rank: usize,
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

type Open<'a, 'b, T> = (usize, Request<'a, [T], &'b LocalScope<'a>>);

impl MpiWire {
    /// Sends and receives in pieces of `piece` elements. Messages between two ranks arrive in their order, so one tag is
    /// enough.
    fn swap<T: Equivalence>(&mut self, out: &[(usize, &[T])], into: &mut [(usize, &mut [T])], piece: usize, wait: &Wait)
    where
        [T]: Buffer + BufferMut,
    {
        let tag: Tag = 1;
        scope(|scope| {
            let mut open: Vec<Open<T>> = Vec::new();
            for (rank, list) in into.iter_mut().filter(|(rank, _)| *rank != self.rank) {
                let from = self.world.process_at_rank(*rank as i32);
                for part in list.chunks_mut(piece) {
                    open.push((*rank, from.immediate_receive_into_with_tag(scope, part, tag)));
                }
            }
            for (rank, list) in out.iter().filter(|(rank, _)| *rank != self.rank) {
                let to = self.world.process_at_rank(*rank as i32);
                for part in list.chunks(piece) {
                    open.push((*rank, to.immediate_send_with_tag(scope, part, tag)));
                }
            }
            let (begun, mut pause) = (Instant::now(), SHORTEST);
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
                if wait.limit.is_some_and(|limit| begun.elapsed() > limit) {
                    let mut missing: Vec<usize> = open.iter().map(|(rank, _)| *rank).collect();
                    missing.sort_unstable();
                    missing.dedup();
                    wait.late(&missing);
                    self.world.abort(1);
                }
                std::thread::sleep(pause);
            }
        });
    }
}

impl Wire for MpiWire {
    fn bytes(&mut self, out: &[(usize, &[u8])], into: &mut [(usize, &mut [u8])], wait: &Wait) {
        self.swap(out, into, PIECE, wait);
    }

    fn floats(&mut self, out: &[(usize, &[f32])], into: &mut [(usize, &mut [f32])], wait: &Wait) {
        self.swap(out, into, PIECE / 4, wait);
    }

    fn abort(&mut self, code: i32) {
        self.world.abort(code);
    }
}
