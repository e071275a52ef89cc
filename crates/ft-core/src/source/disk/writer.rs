//! The writer of the files of a source: each process its own, or the first rank of a machine for all ranks there. Files that
//! ranks share stay in the page cache, so the memory of a machine has them once.

use crate::base::{Result, files};
use crate::comm::{Collective, Patience, hosts};
use crate::formats::weights::Weights;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The writer of the files of a source. Default: each process writes its own.
#[derive(Clone, Default)]
pub struct SourceWriter(Option<Machine>);

#[derive(Clone)]
struct Machine {
    comm: Arc<dyn Collective>,
    /// This is the first rank of its machine.
    first: bool,
}

impl SourceWriter {
    /// The first rank of each machine writes, into its own directory. Returns the directory that the ranks of this machine
    /// share; `own`: that of this rank. All ranks call it.
    ///
    /// # Errors
    /// Another rank has failed.
    pub fn of_machine(comm: Arc<dyn Collective>, own: &Path) -> Result<(Self, PathBuf)> {
        let own = std::path::absolute(own).unwrap_or_else(|_| own.to_path_buf());
        let rank = comm.world().rank;
        let hosts = hosts(&*comm)?;
        let first = hosts.iter().position(|host| *host == hosts[rank]).unwrap_or(rank);
        let path = own.as_os_str().as_encoded_bytes().to_vec();
        let dir = comm.all_gather_bytes(path, Patience::Long)?.swap_remove(first);
        let dir = PathBuf::from(String::from_utf8_lossy(&dir).into_owned());
        let is_first = first == rank;
        let dir = if is_first { own } else { dir };
        Ok((Self(Some(Machine { comm, first: is_first })), dir))
    }

    /// These weights, for reads that leave nothing in the page cache unless ranks share it.
    pub(super) fn to_read(&self, weights: Weights) -> Weights {
        match self.0 {
            Some(_) => weights.cached(),
            None => weights.streamed(),
        }
    }

    /// Drops a file that was written from the page cache unless ranks share it.
    pub(super) fn written(&self, file: &Path) -> Result<()> {
        if self.0.is_none() {
            files::forget(&files::open(file)?, 0, 0);
        }
        Ok(())
    }

    /// Calls `work`, which writes files, on the process that writes. If ranks share the files, all ranks call it, and all find the
    /// new files afterwards. A thread that reads ahead may still read an old file: `work` replaces files by renaming.
    ///
    /// # Errors
    /// Any error of `work`; another rank has failed.
    pub fn write(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let Some(Machine { comm, first }) = &self.0 else {
            return work();
        };
        comm.all_gather_bytes(Vec::new(), Patience::Long)?;
        if *first {
            work()?;
        }
        comm.all_gather_bytes(Vec::new(), Patience::Long).map(drop)
    }
}
