//! Exchange of numbers and bytes between the ranks of a job: processes that train one model together. Knows ranks,
//! sizes and order; does not know layers, parameters or files.
//!
//! Every rank calls the same methods of `Collective` in the same order. A call carries a key that must be equal on all
//! ranks, so ranks at different operations get an error instead of foreign numbers. A rank that fails says so in its
//! next call (`Collective::fail`). Every other rank gets the text as the error of that call, so no rank waits for it.
//!
//! Letters: W ranks.

mod collect;
mod greeting;
mod group;
#[cfg(any(feature = "nccl", test))]
#[cfg_attr(not(feature = "nccl"), allow(unreachable_pub, reason = "exported with the feature"))]
mod meeting;
#[cfg(any(feature = "nccl", test))]
mod mesh;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod shards;
mod wire;
#[cfg(test)]
pub(crate) mod threads;

#[cfg(test)]
mod tests;

pub use collect::{Shard, WholeList};
// For the fuzz targets.
#[doc(hidden)]
pub use greeting::{greeting_again, ranks_in};
pub use group::RankGroup;
#[cfg(feature = "nccl")]
pub use meeting::Rendezvous;
#[cfg(feature = "mpi")]
pub use mpi::mpi_version;
#[cfg(feature = "nccl")]
pub use nccl::nccl_version;
pub use shards::{QUANTUM, part_of, share};

use crate::base::{Error, Result};
use candle_core::Device;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// The place of this process in its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// Number of this process, from 0. Rank 0 writes the files of a run.
    pub rank: usize,
    /// Number of processes, W.
    pub size: usize,
    /// Name of the machine.
    pub host: String,
}

impl World {
    /// True for the rank that writes the files of a run.
    pub fn is_root(&self) -> bool {
        self.rank == 0
    }

    /// `rank 2 (host b)`.
    pub fn name(&self) -> String {
        format!("rank {} (host {})", self.rank, self.host)
    }
}

/// The error of a rank, as all ranks of the job know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankFault {
    /// `World::name` of the rank.
    pub rank: String,
    /// Exit code that the rank asks for.
    pub code: i32,
    /// The error.
    pub text: String,
}

/// Numbers that are on their way: from each rank a list, or each list as a whole.
#[must_use]
pub struct PendingNumbers<T = Vec<f32>>(PendingState<T>);

enum PendingState<T> {
    Here(Result<Vec<T>>),
    InFlight(Receiver<Result<Vec<T>>>),
    /// Runs when the lists have arrived.
    #[cfg(test)]
    Timed(Box<PendingState<T>>, Box<dyn FnOnce() + Send>),
}

impl<T> PendingNumbers<T> {
    /// The lists, in the order of the ranks or of the request.
    ///
    /// # Errors
    /// Another rank has failed, or is at another operation.
    pub fn wait(self) -> Result<Vec<T>> {
        match self.0 {
            PendingState::Here(lists) => lists,
            PendingState::InFlight(reply) => reply.recv().unwrap_or_else(|_| Err(closed())),
            #[cfg(test)]
            PendingState::Timed(state, then) => {
                let lists = PendingNumbers(*state).wait();
                then();
                lists
            }
        }
    }
}

/// How long a rank waits for the bytes of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// As for numbers (`Collective::set_timeout`): all ranks do the same work.
    Step,
    /// As long as it takes, with heartbeats if the wire has them: one rank saves, or reads rows.
    Long,
}

/// The operations of all ranks together.
pub trait Collective: Send + Sync {
    /// The place of this rank.
    fn world(&self) -> &World;

    /// List `parts[j]` goes to rank j; a list of `lengths[j]` numbers comes from rank j. As `all_to_all_single` of
    /// torch. `key`: equal on all ranks.
    fn all_to_all(&self, key: u64, parts: Vec<Vec<f32>>, lengths: Vec<usize>) -> PendingNumbers;

    /// `own` goes to every rank; a list of `lengths[j]` numbers comes from rank j. As `all_gather` of torch. `key`:
    /// equal on all ranks.
    fn all_gather(&self, key: u64, own: Vec<f32>, lengths: Vec<usize>) -> PendingNumbers;

    /// The whole lists of which ranks store parts. This rank sends its parts to the ranks `to`; it gets the lists if it is one
    /// of them. Groups of ranks can collect lists of their own at the same time. `key`: equal on all ranks. The own parts must
    /// not change before the end.
    fn gather_shards(&self, key: u64, shards: Vec<Shard>, to: Vec<usize>) -> PendingNumbers<WholeList>;

    /// The bytes of every rank, in the order of the ranks, on every rank.
    ///
    /// # Errors
    /// Another rank has failed, or is at another operation.
    fn all_gather_bytes(&self, own: Vec<u8>, patience: Patience) -> Result<Vec<Vec<u8>>>;

    /// The numbers of this rank are on `device` from now on. All ranks call it before their first exchange of numbers.
    ///
    /// # Errors
    /// The devices of the ranks cannot be connected.
    fn use_device(&self, device: &Device) -> Result<()>;

    /// True if two ranks cannot share a device.
    fn own_devices(&self) -> bool;

    /// Tells all ranks that this one has failed, unless a failure is already known to all. Returns the failures that
    /// all ranks know.
    fn fail(&self, code: i32, text: String) -> Vec<RankFault>;

    /// Waits until all ranks are here, and ends the connection.
    fn close(&self);

    /// Sets how long a rank waits for the numbers of another one.
    fn set_timeout(&self, timeout: Duration);

    /// Bytes of numbers and of weights that this rank has sent to others so far, by the operations that have ended.
    /// Headers and the bytes of `all_gather_bytes` are not in it.
    fn sent(&self) -> u64;
}

/// The name of the machine of each rank. All ranks call it.
///
/// # Errors
/// Another rank has failed.
pub fn hosts(comm: &dyn Collective) -> Result<Vec<String>> {
    let own = comm.world().host.clone().into_bytes();
    let hosts = comm.all_gather_bytes(own, Patience::Long)?;
    Ok(hosts
        .iter()
        .map(|host| String::from_utf8_lossy(host).into_owned())
        .collect())
}

/// The job of one rank.
#[derive(Debug, Clone)]
pub struct SingleRank(World);

impl Default for SingleRank {
    fn default() -> Self {
        Self(World {
            rank: 0,
            size: 1,
            host: String::new(),
        })
    }
}

impl Collective for SingleRank {
    fn world(&self) -> &World {
        &self.0
    }

    fn all_to_all(&self, _: u64, parts: Vec<Vec<f32>>, _: Vec<usize>) -> PendingNumbers {
        PendingNumbers(PendingState::Here(Ok(parts)))
    }

    fn all_gather(&self, _: u64, own: Vec<f32>, _: Vec<usize>) -> PendingNumbers {
        PendingNumbers(PendingState::Here(Ok(vec![own])))
    }

    fn gather_shards(&self, _: u64, shards: Vec<Shard>, _: Vec<usize>) -> PendingNumbers<WholeList> {
        PendingNumbers(PendingState::Here(shards.iter().map(Shard::alone).collect()))
    }

    fn all_gather_bytes(&self, own: Vec<u8>, _: Patience) -> Result<Vec<Vec<u8>>> {
        Ok(vec![own])
    }

    fn use_device(&self, _: &Device) -> Result<()> {
        Ok(())
    }

    fn own_devices(&self) -> bool {
        false
    }

    fn fail(&self, code: i32, text: String) -> Vec<RankFault> {
        let rank = self.0.name();
        vec![RankFault { rank, code, text }]
    }

    fn close(&self) {}

    fn set_timeout(&self, _: Duration) {}

    fn sent(&self) -> u64 {
        0
    }
}

fn closed() -> Error {
    Error::internal("the connection between the ranks has ended")
}
