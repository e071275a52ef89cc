//! Expert parallelism (GShard, arXiv 2006.16668, section 3): each rank has some of the routed experts of every layer. Knows which
//! rank has an expert, and exchanges what the experts of other ranks need.
//!
//! Letters: E experts, W ranks.

use crate::base::Result;
use crate::comm::{Collective, World};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The experts, of `count`, that rank `rank` of `size` has. They follow each other, so a group of experts is on one rank if the
/// number of groups is a multiple of W.
pub fn own_experts(count: usize, rank: usize, size: usize) -> Range<usize> {
    rank * count / size..(rank + 1) * count / size
}

/// The ranks among which the experts are divided.
pub struct ExpertRanks {
    comm: Arc<dyn Collective>,
    /// Bytes that this rank sent.
    sent: AtomicU64,
}

impl ExpertRanks {
    pub(super) fn new(comm: Arc<dyn Collective>) -> Self {
        Self {
            comm,
            sent: AtomicU64::new(0),
        }
    }

    /// The place of this rank.
    pub fn world(&self) -> &World {
        self.comm.world()
    }

    /// The experts, of `count`, of each rank.
    pub fn experts(&self, count: usize) -> Vec<Range<usize>> {
        let size = self.world().size;
        (0..size).map(|rank| own_experts(count, rank, size)).collect()
    }

    /// As `Collective::all_to_all`; waits.
    ///
    /// # Errors
    /// Another rank has failed, or is at another operation.
    pub fn all_to_all(&self, key: u64, parts: Vec<Vec<f32>>, lengths: Vec<usize>) -> Result<Vec<Vec<f32>>> {
        let own = self.world().rank;
        let others = parts.iter().enumerate().filter(|(rank, _)| *rank != own);
        let numbers: usize = others.map(|(_, part)| part.len()).sum();
        self.sent.fetch_add(4 * numbers as u64, Relaxed);
        self.comm.all_to_all(key, parts, lengths).wait()
    }

    /// Bytes that this rank sent since the last call.
    pub fn take_sent(&self) -> u64 {
        self.sent.swap(0, Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::own_experts;

    #[test]
    fn every_expert_is_on_one_rank() {
        for count in [1, 2, 8, 60, 128] {
            for size in 1..=9 {
                let all: Vec<usize> = (0..size).flat_map(|rank| own_experts(count, rank, size)).collect();
                assert!(all.into_iter().eq(0..count), "{count} experts on {size} ranks");
                // The plan looks at the last rank, which has the most.
                let most = (0..size).map(|rank| own_experts(count, rank, size).len()).max();
                assert_eq!(most, Some(own_experts(count, size - 1, size).len()));
            }
        }
    }
}
