//! The machines of a job, each with all weights (HSDP; ZeRO++ hpZ: Wang et al. 2023, arXiv 2306.10209). A layer is collected from
//! the ranks of one machine. A rank has its own part of a matrix, which it updates, and copies of the parts of its peers:
//! the rank of the same number on each other machine. The copies are renewed whenever own parts have changed.
//!
//! Letters: W ranks, L ranks of a machine.

use super::own::{OwnPart, bytes_of};
use super::{MatrixDivision, ShardedWeights};
use crate::base::{Error, Result};
use crate::comm::{Collective, Shard, World, hosts};
use crate::source::{ParamInfo, lock};
use candle_core::{Device, Tensor};
use std::ops::Range;

/// Makes the key of a renewal another one than that of a collection.
const RENEWAL: u64 = 1 << 63;

/// Which ranks are on which machine. Each has the same number of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machines(Vec<Vec<usize>>);

impl Machines {
    /// All ranks as one machine.
    pub fn one(size: usize) -> Self {
        Self(vec![(0..size).collect()])
    }

    /// The machines by their names. All ranks call it.
    ///
    /// # Errors
    /// Machines with different numbers of ranks; another rank has failed.
    pub fn of_job(comm: &dyn Collective) -> Result<Self> {
        Self::of_hosts(&hosts(comm)?)
    }

    /// The machines of a job; `hosts`: the name of the machine of each rank.
    ///
    /// # Errors
    /// Machines with different numbers of ranks.
    pub fn of_hosts(hosts: &[impl AsRef<str>]) -> Result<Self> {
        let mut all: Vec<(&str, Vec<usize>)> = Vec::new();
        for (rank, host) in hosts.iter().map(AsRef::as_ref).enumerate() {
            match all.iter_mut().find(|(name, _)| *name == host) {
                Some((_, ranks)) => ranks.push(rank),
                None => all.push((host, vec![rank])),
            }
        }
        let each = all.first().map_or(0, |(_, ranks)| ranks.len());
        if all.iter().any(|(_, ranks)| ranks.len() != each) {
            let of = |(name, ranks): &(&str, Vec<usize>)| format!("{} on {name}", ranks.len());
            return Err(Error::usage(
                "weights that are divided inside each machine need the same number of ranks on every machine",
            )
            .found(all.iter().map(of).collect::<Vec<_>>().join(", ")));
        }
        Ok(Self(all.into_iter().map(|(_, ranks)| ranks).collect()))
    }

    /// Number of machines.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The ranks of the machine of `rank`.
    pub fn ranks_with(&self, rank: usize) -> &[usize] {
        let own = self.0.iter().find(|ranks| ranks.contains(&rank));
        own.map_or(&[], Vec::as_slice)
    }

    /// The number of `rank` on its machine.
    pub(super) fn local(&self, rank: usize) -> usize {
        self.ranks_with(rank)
            .iter()
            .position(|other| *other == rank)
            .unwrap_or(0)
    }

    /// `rank` and its peers, in the order of the machines.
    pub(super) fn peers(&self, rank: usize) -> Vec<usize> {
        let local = self.local(rank);
        self.0.iter().map(|ranks| ranks[local]).collect()
    }

    /// The bytes of quantized data of `length` bytes that a rank stores.
    pub(super) fn bytes_of(&self, length: usize, rank: usize) -> Range<usize> {
        bytes_of(length, self.local(rank), self.ranks_with(rank).len())
    }
}

/// The list of one part.
fn one(part: Range<usize>) -> Vec<Range<usize>> {
    std::iter::once(part).collect()
}

impl ShardedWeights {
    /// The ranks of this machine, to which this rank sends its parts; `alone`: rank 0 alone, from the ranks of its machine.
    pub(super) fn receivers(&self, alone: bool) -> Vec<usize> {
        let near = self.machines.ranks_with(self.comm.world().rank);
        if !alone {
            near.to_vec()
        } else if near.contains(&0) {
            vec![0]
        } else {
            Vec::new()
        }
    }

    /// The parts of a matrix that the ranks of this machine store.
    pub(super) fn shards(&self, p: &ParamInfo, part: &OwnPart) -> Result<Vec<Shard>> {
        let World { rank, size, .. } = *self.comm.world();
        let near = self.machines.ranks_with(rank);
        let parts = self.ranges(p);
        let of_near = |of: &dyn Fn(usize) -> Vec<Range<usize>>| -> Vec<Vec<Range<usize>>> {
            let of = |rank| if near.contains(&rank) { of(rank) } else { Vec::new() };
            (0..size).map(of).collect()
        };
        let codes = |own: Tensor, length: usize| Shard {
            own: vec![own],
            ranges: of_near(&|rank| match self.division {
                MatrixDivision::Experts if parts[rank].is_empty() => one(0..0),
                MatrixDivision::Experts => one(0..length),
                _ => one(self.machines.bytes_of(length, rank)),
            }),
        };
        match part {
            OwnPart::Dense { own, copies } => {
                let peers = self.machines.peers(rank);
                let (mut all, mut first) = (Vec::new(), 0);
                for &peer in &peers {
                    let length = parts[peer].len();
                    all.push(match copies {
                        Some(copies) if peer != rank => {
                            first += length;
                            copies.narrow(0, first - length, length)?
                        }
                        _ => own.to_device(&Device::Cpu)?,
                    });
                }
                Ok(vec![Shard {
                    own: all,
                    ranges: of_near(&|rank| {
                        let peers = self.machines.peers(rank).into_iter();
                        peers.map(|peer| parts[peer].clone()).collect()
                    }),
                }])
            }
            OwnPart::Codes { parts, .. } => Ok(parts.iter().map(|part| codes(part.own.clone(), part.length)).collect()),
            OwnPart::Whole(whole) => {
                let mut shards = Vec::new();
                for part in whole.parts() {
                    let length = part.bytes.len();
                    let own = Tensor::from_vec(part.bytes.into_owned(), length, &Device::Cpu)?;
                    shards.push(codes(own, length));
                }
                Ok(shards)
            }
        }
    }

    /// The copies of the parts of all peers, which `part` reads; `None`: there is one machine.
    pub(super) fn copies(
        &self,
        p: &ParamInfo,
        mut part: impl FnMut(&Range<usize>) -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        if self.machines.count() == 1 {
            return Ok(None);
        }
        let (rank, ranges) = (self.comm.world().rank, self.ranges(p));
        let peers = self.machines.peers(rank).into_iter().filter(|peer| *peer != rank);
        let parts = peers.map(|peer| part(&ranges[peer])).collect::<Result<Vec<_>>>()?;
        Ok(Some(Tensor::cat(&parts, 0)?))
    }

    /// Sends the own parts of the matrices that `changed` accepts to the peers, and takes theirs as copies. All ranks call it
    /// for the same matrices.
    pub(super) fn renew(&self, changed: &dyn Fn(&str) -> bool) -> Result<()> {
        if self.machines.count() == 1 {
            return Ok(());
        }
        let World { rank, size, .. } = *self.comm.world();
        let peers = self.machines.peers(rank);
        for indices in self.layers.values() {
            let (mut found, mut shards) = (Vec::new(), Vec::new());
            for &index in indices {
                let p = &self.params[index];
                let (true, Some(own)) = (changed(&p.name), self.own(&p.name)) else {
                    continue;
                };
                // The copies of a matrix follow each other, without the own part.
                let parts = self.ranges(p);
                let (mut ranges, mut first) = (vec![Vec::new(); size], 0);
                for &peer in &peers {
                    let length = if peer == rank { 0 } else { parts[peer].len() };
                    ranges[peer] = one(first..first + length);
                    first += length;
                }
                ranges[rank] = one(0..0);
                let own = vec![own.to_device(&Device::Cpu)?];
                shards.push(Shard { own, ranges });
                found.push(index);
            }
            let Some(&layer) = found.first() else { continue };
            let key = RENEWAL ^ (layer as u64) << 32 ^ found.len() as u64;
            let lists = self.comm.gather_shards(key, shards, peers.clone()).wait()?;
            for (index, list) in found.into_iter().zip(lists) {
                let name = &self.params[index].name;
                if let Some(OwnPart::Dense { copies, .. }) = lock(&self.own).get_mut(name) {
                    let length = list.elements();
                    *copies = Some(list.into_tensor(&[length])?);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machines(hosts: &str) -> Result<Machines> {
        let hosts: Vec<&str> = hosts.split(' ').collect();
        Machines::of_hosts(&hosts)
    }

    #[test]
    fn ranks_of_a_machine_need_not_follow_each_other() {
        let found = machines("a b a b a b").unwrap();
        assert_eq!((found.count(), found.ranks_with(3)), (2, &[1, 3, 5][..]));
        assert_eq!(
            (found.local(4), found.peers(4), found.peers(5)),
            (2, vec![4, 5], vec![4, 5])
        );
        assert_eq!(machines("a a a").unwrap(), Machines::one(3));
        assert_eq!(machines("a b").unwrap().peers(1), [0, 1]);
    }

    #[test]
    fn machines_have_the_same_number_of_ranks() {
        let error = machines("a a b a").unwrap_err().to_string();
        assert!(
            error.contains("the same number of ranks on every machine") && error.contains("3 on a, 1 on b"),
            "{error}"
        );
    }
}
