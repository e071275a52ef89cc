//! The wire of a launcher without MPI (`torchrun`): numbers travel between GPUs over NCCL, all else (headers, losses, signals,
//! failures, saved states) over the TCP connections of `mesh`. A connection that ends says at once that a rank is gone.

use super::World;
use super::meeting::Rendezvous;
use super::mesh::{LostRanks, Mesh};
use super::wire::{POLL, WaitLimit, Wire};
use crate::base::{Error, Result, files, signal};
use crate::ops::nccl::{Communicator, NcclId, NcclLibrary, NcclResources, version_text};
use candle_core::Device;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// How long the connections of a rank that ends the job stay open: the others then find the rank that was lost first, and not this
/// one.
const LINGER: Duration = Duration::from_secs(1);
/// The message of a rank after a step in which it could fail alone.
const DONE: u8 = 0xfd;
const FAILED: u8 = 0xfe;

/// The wire of one rank.
pub(super) struct NcclWire {
    mesh: Mesh,
    world: World,
    gpus: Option<Communicator>,
}

/// Version of the NCCL library of this machine.
///
/// # Errors
/// There is none.
pub fn nccl_version() -> Result<String> {
    Ok(version_text(NcclLibrary::load()?.version()?))
}

/// Connects to the other ranks.
pub(super) fn open(rendezvous: &Rendezvous) -> Result<(NcclWire, World)> {
    let host = files::read_text(Path::new("/proc/sys/kernel/hostname")).unwrap_or_default();
    let host = host.split_whitespace().next().unwrap_or("unknown").to_string();
    let mesh = Mesh::open(rendezvous, &host)?;
    let world = World {
        rank: rendezvous.rank,
        size: rendezvous.size,
        host,
    };
    let wire = NcclWire {
        mesh,
        world: world.clone(),
        gpus: None,
    };
    Ok((wire, world))
}

fn names(mesh: &Mesh, ranks: &[usize]) -> String {
    let name = |rank: &usize| format!("rank {rank} (host {})", mesh.hosts[*rank]);
    ranks.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// Looks at the connections in a thread of its own: NCCL connects the GPUs without a limit of time, also if a rank has ended or
/// failed.
struct Guard(Arc<AtomicU8>);

/// States of a guard.
const WAITS: u8 = 0;
const LOOKS: u8 = 1;
const ENDS: u8 = 2;

impl Guard {
    fn new(wire: &NcclWire, wait: &WaitLimit) -> Result<Self> {
        let fault = |e| Error::io("the connections to the other ranks cannot be watched").cause(e);
        let mesh = wire.mesh.watched().map_err(fault)?;
        let state = Arc::new(AtomicU8::new(WAITS));
        let (seen, wait) = (state.clone(), wait.with_own(None));
        let look = move || {
            let mut begun = Instant::now();
            loop {
                std::thread::sleep(POLL);
                let why = match seen.load(Ordering::Acquire) {
                    WAITS => {
                        begun = Instant::now();
                        None
                    }
                    LOOKS => trouble(&mesh, begun.elapsed(), wait.limit),
                    _ => return,
                };
                // Failures that are seen after the end belong to another operation.
                if let Some(why) = why
                    && seen.load(Ordering::Acquire) == LOOKS
                {
                    wait.ends(&why);
                    std::thread::sleep(LINGER);
                    signal::abandon(1);
                }
            }
        };
        let thread = std::thread::Builder::new().name("ranks".into());
        thread.spawn(look).map_err(fault)?;
        Ok(Self(state))
    }

    fn begin(&self) {
        self.0.store(LOOKS, Ordering::Release);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.store(ENDS, Ordering::Release);
    }
}

/// Why the GPUs will not be connected, if it is known.
fn trouble(mesh: &Mesh, time: Duration, limit: Option<Duration>) -> Option<String> {
    let gone = mesh.gone();
    if !gone.is_empty() {
        let gone = names(mesh, &gone);
        return Some(format!(
            "the connection to {gone} has ended while the GPUs were connected"
        ));
    }
    let failed = mesh.about_to_say(FAILED);
    if !failed.is_empty() {
        return Some(format!("the GPU of {} could not be connected", names(mesh, &failed)));
    }
    let late = limit.is_some_and(|limit| time > limit);
    late.then(|| format!("NCCL has not connected the GPUs in {} s", time.as_secs()))
}

impl NcclWire {
    fn names(&self, ranks: &[usize]) -> String {
        names(&self.mesh, ranks)
    }

    /// Says why, and ends the job: the other ranks see that the connections of this one end.
    fn end(&mut self, lost: LostRanks, wait: &WaitLimit) -> ! {
        match lost {
            LostRanks::Late(missing) => wait.late(&missing),
            LostRanks::Silent(missing) => wait.silent(&missing),
            LostRanks::Gone(ranks) => wait.ends(&format!("the connection to {} has ended", self.names(&ranks))),
        }
        std::thread::sleep(LINGER);
        signal::abandon(1)
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.world.rank;
        (0..self.world.size).filter(move |rank| *rank != own)
    }

    /// `own` goes to all; returns what came from each.
    fn share<const N: usize>(&mut self, own: [u8; N], wait: &WaitLimit) -> Vec<[u8; N]> {
        let mut all = vec![own; self.world.size];
        let out: Vec<(usize, &[u8])> = self.others().map(|rank| (rank, &own[..])).collect();
        let rank = self.world.rank;
        let lists = all.iter_mut().enumerate().filter(|(from, _)| *from != rank);
        let mut into: Vec<(usize, &mut [u8])> = lists.map(|(from, list)| (from, &mut list[..])).collect();
        if let Err(lost) = self.mesh.swap(&out, &mut into, wait) {
            self.end(lost, wait);
        }
        all
    }

    /// After a step: the message of each rank, if the step is done on all ranks.
    fn agree<const N: usize, T>(&mut self, own: &Result<T>, more: [u8; N], wait: &WaitLimit) -> Option<Vec<[u8; N]>> {
        let word = if own.is_ok() { DONE } else { FAILED };
        // A rank that is gone does not hear of it.
        let wait = wait.with_own(own.as_ref().err().map(Error::to_string));
        let said = self.share([word], &wait);
        let all = self.share(more, &wait);
        said.iter().all(|word| *word == [DONE]).then_some(all)
    }

    /// Connects the GPUs. NCCL waits without a limit for a rank that has failed, so the ranks agree after each step. `None`: another
    /// rank has failed, and says why in its next operation.
    fn connect(&mut self, device: &Device, wait: &WaitLimit) -> Result<Option<Communicator>> {
        let library = if device.is_cuda() {
            NcclLibrary::load().and_then(|library| Ok((library.version()?, library)))
        } else {
            Err(Error::unsupported("ranks without MPI need a GPU each")
                .found("a rank that trains on the CPU")
                .hint("train on a GPU, or build with the feature `mpi` and start the ranks with `mpirun`"))
        };
        let version = library.as_ref().map_or(0, |(version, _)| *version);
        let all = self.agree(&library, version.to_le_bytes(), wait);
        let (_, library) = library?;
        let Some(all) = all else { return Ok(None) };
        let versions: Vec<u32> = all.into_iter().map(u32::from_le_bytes).collect();
        if let Some(other) = versions.iter().position(|other| *other != version) {
            return Err(Error::unsupported("the GPUs of the ranks cannot be connected")
                .found(format!(
                    "NCCL {} on rank {}, NCCL {} on {}",
                    version_text(version),
                    self.world.rank,
                    version_text(versions[other]),
                    self.names(&[other])
                ))
                .expected("the same version on all ranks"));
        }
        // Memory that is missing, or a network that NCCL cannot use, must be known before the others wait for this rank.
        let prepared = Guard::new(self, wait).and_then(|guard| {
            let id = if self.world.is_root() { library.id()? } else { [0; 128] };
            Ok((guard, id, NcclResources::new(library, device)?))
        });
        let id: NcclId = prepared.as_ref().map_or([0; 128], |(_, id, _)| *id);
        let all = self.agree(&prepared, id, wait);
        let (guard, _, prepared) = prepared?;
        let Some(all) = all else { return Ok(None) };
        guard.begin();
        let joined = prepared.join((self.world.rank, self.world.size), all[0]);
        let joined = joined.and_then(|gpus| self.first(gpus));
        drop(guard);
        let all = self.agree(&joined, [0; 1], wait);
        let gpus = joined?;
        if all.is_none() {
            gpus.give_up();
            return Ok(None);
        }
        Ok(Some(gpus))
    }

    /// NCCL connects two GPUs at their first exchange, which takes memory: before ft asks how much is free.
    fn first(&self, mut gpus: Communicator) -> Result<Communicator> {
        let own = [self.world.rank as f32];
        let out: Vec<(usize, &[f32])> = self.others().map(|rank| (rank, &own[..])).collect();
        let mut found = vec![[-1.0]; self.world.size];
        let mut into: Vec<(usize, &mut [f32])> = found.iter_mut().map(|n| &mut n[..]).enumerate().collect();
        into.remove(self.world.rank);
        // The guard looks at the other ranks.
        gpus.swap(&out, &mut into, &mut || Ok(()))?;
        match self.others().find(|rank| found[*rank] != [*rank as f32]) {
            None => Ok(gpus),
            Some(rank) => Err(Error::internal("NCCL does not carry what was sent")
                .found(found[rank][0])
                .expected(format!("{rank} from rank {rank}"))),
        }
    }

    fn exchange(
        &mut self,
        gpus: &mut Communicator,
        out: &[(usize, &[f32])],
        into: &mut [(usize, &mut [f32])],
        wait: &WaitLimit,
    ) -> Result<()> {
        let begun = Instant::now();
        let mut looked = begun;
        let mut gone = Vec::new();
        let mut look = || {
            if looked.elapsed() > POLL {
                looked = Instant::now();
                gone = self.mesh.gone();
            }
            let late = wait.limit.is_some_and(|limit| begun.elapsed() > limit);
            if gone.is_empty() && !late {
                return Ok(());
            }
            // All ranks have reached this exchange; which one has stopped is not known.
            let others: Vec<usize> = self.others().collect();
            Err(Error::io(format!(
                "an exchange over NCCL with {} has not ended in {} s",
                self.names(&others),
                begun.elapsed().as_secs()
            ))
            .hint(
                "look for the rank that has stopped (with `NCCL_DEBUG=INFO` in the environment NCCL prints what it does), \
                 or raise `Collective::set_timeout`",
            ))
        };
        let done = gpus.swap(out, into, &mut look);
        if !gone.is_empty() {
            self.end(LostRanks::Gone(gone), wait);
        }
        done
    }
}

impl Wire for NcclWire {
    const OWN_DEVICES: bool = true;

    fn bytes(&mut self, out: &[(usize, &[u8])], into: &mut [(usize, &mut [u8])], wait: &WaitLimit) {
        let rank = self.world.rank;
        let out: Vec<(usize, &[u8])> = out.iter().copied().filter(|(to, _)| *to != rank).collect();
        let others = into.iter_mut().filter(|(from, _)| *from != rank);
        let mut others: Vec<(usize, &mut [u8])> = others.map(|(from, list)| (*from, &mut list[..])).collect();
        if let Err(lost) = self.mesh.swap(&out, &mut others, wait) {
            self.end(lost, wait);
        }
    }

    fn floats(&mut self, out: &[(usize, &[f32])], into: &mut [(usize, &mut [f32])], wait: &WaitLimit) {
        let done = match self.gpus.take() {
            Some(mut gpus) => {
                let done = self.exchange(&mut gpus, out, into, wait);
                self.gpus = Some(gpus);
                done
            }
            None => Err(Error::internal("numbers travel before the GPUs are connected")),
        };
        let Err(error) = done else { return };
        // A rank that has died is a failure of NCCL too; the connections say which.
        std::thread::sleep(POLL);
        let gone = self.mesh.gone();
        if gone.is_empty() {
            wait.ends(&error.line());
        } else {
            self.end(LostRanks::Gone(gone), wait);
        }
        std::thread::sleep(LINGER);
        self.abort(1);
    }

    fn device(&mut self, device: &Device, wait: &WaitLimit) -> Result<()> {
        self.gpus = self.connect(device, wait)?;
        Ok(())
    }

    fn idle(&mut self, wait: &WaitLimit) {
        let gone = self.mesh.gone();
        if !gone.is_empty() {
            self.end(LostRanks::Gone(gone), wait);
        }
        self.mesh.exchange_heartbeats(wait.heartbeat_every());
    }

    fn abort(&mut self, code: i32) {
        signal::abandon(code);
    }
}
