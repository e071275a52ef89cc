//! The wire of a launcher without MPI (`torchrun`): numbers travel between GPUs over NCCL, all else (headers, losses, signals,
//! failures, saved states) over the TCP connections of `mesh`. A connection that ends says at once that a rank is gone.

use super::World;
use super::group::{Say, Wait, Wire};
use super::mesh::{Lost, Mesh, Rendezvous};
use crate::base::{Error, Result, files, signal};
use crate::ops::nccl::{Communicator, Id, Library, version_text};
use candle_core::Device;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the connections of a rank that ends the job stay open: a rank that computes meanwhile then finds the rank that was lost
/// first, and not this one.
const LINGER: Duration = Duration::from_secs(1);
/// Time between two looks at the connections during an exchange of NCCL.
const LOOK: Duration = Duration::from_millis(50);

/// The wire of one rank.
pub(super) struct NcclWire {
    mesh: Mesh,
    world: World,
    gpus: Option<Communicator>,
    say: Say,
}

/// Version of the NCCL library of this machine.
///
/// # Errors
/// There is none.
pub fn nccl_version() -> Result<String> {
    Ok(version_text(Library::load()?.version()?))
}

/// Connects to the other ranks.
pub(super) fn open(rendezvous: &Rendezvous, say: Say) -> Result<(NcclWire, World)> {
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
        say,
    };
    Ok((wire, world))
}

fn names(mesh: &Mesh, ranks: &[usize]) -> String {
    let name = |rank: &usize| format!("rank {rank} (host {})", mesh.hosts[*rank]);
    ranks.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// Looks at the connections in a thread of its own until it is dropped: NCCL connects the GPUs without a limit of time, also if a
/// rank has ended.
struct Guard(Arc<AtomicBool>);

impl Guard {
    fn new(wire: &NcclWire, limit: Option<Duration>) -> Result<Self> {
        let fault = |e| Error::io("the connections to the other ranks cannot be watched").cause(e);
        let mesh = wire.mesh.watched().map_err(fault)?;
        let (say, own, done) = (wire.say, wire.world.name(), Arc::new(AtomicBool::new(false)));
        let (ended, begun) = (done.clone(), Instant::now());
        let look = move || {
            while !ended.load(Ordering::Acquire) {
                let gone = mesh.gone();
                if !gone.is_empty() {
                    say(&format!(
                        "{own}: the connection to {} has ended while the GPUs were connected",
                        names(&mesh, &gone)
                    ));
                } else if limit.is_some_and(|limit| begun.elapsed() > limit) {
                    say(&format!(
                        "{own}: NCCL has not connected the GPUs in {} s",
                        begun.elapsed().as_secs()
                    ));
                } else {
                    std::thread::sleep(LOOK);
                    continue;
                }
                std::thread::sleep(LINGER);
                signal::abandon(1);
            }
        };
        let thread = std::thread::Builder::new().name("ranks".into());
        thread.spawn(look).map_err(fault)?;
        Ok(Self(done))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl NcclWire {
    fn names(&self, ranks: &[usize]) -> String {
        names(&self.mesh, ranks)
    }

    /// Says why, and ends the job: the other ranks see that the connections of this one end.
    fn end(&mut self, lost: Lost, wait: &Wait) -> ! {
        match lost {
            Lost::Late(missing) => (wait.late)(&missing),
            Lost::Gone(ranks) => self.say_end(&format!("the connection to {} has ended", self.names(&ranks))),
        }
        std::thread::sleep(LINGER);
        signal::abandon(1)
    }

    fn say_end(&self, why: &str) {
        let own = self.world.name();
        (self.say)(&format!("{own}: {why}: the job ends; the newest checkpoint is valid"));
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.world.rank;
        (0..self.world.size).filter(move |rank| *rank != own)
    }

    /// `own` goes to all; returns what came from each.
    fn share<const N: usize>(&mut self, own: [u8; N], wait: &Wait) -> Vec<[u8; N]> {
        let mut all = vec![own; self.world.size];
        let out: Vec<(usize, &[u8])> = self.others().map(|rank| (rank, &own[..])).collect();
        let rank = self.world.rank;
        let lists = all.iter_mut().enumerate().filter(|(from, _)| *from != rank);
        let mut into: Vec<(usize, &mut [u8])> = lists.map(|(from, list)| (from, &mut list[..])).collect();
        if let Err(lost) = self.mesh.swap(&out, &mut into, wait.limit) {
            self.end(lost, wait);
        }
        all
    }

    /// Connects the GPUs. Every step is agreed, because NCCL waits without a limit for a rank that has failed.
    fn connect(&mut self, device: &Device, wait: &Wait) -> Result<Communicator> {
        let library = if device.is_cuda() {
            Library::load().and_then(|library| Ok((library.version()?, library)))
        } else {
            Err(Error::unsupported("ranks without MPI need a GPU each")
                .found("a rank that trains on the CPU")
                .hint("train on a GPU, or build with the feature `mpi` and start the ranks with `mpirun`"))
        };
        let own = library.as_ref().map_or(0, |(version, _)| *version);
        let versions = self.share(own.to_le_bytes(), wait).into_iter().map(u32::from_le_bytes);
        let versions: Vec<u32> = versions.collect();
        let (_, library) = library?;
        if let Some(other) = versions.iter().position(|version| *version != own) {
            let error = Error::unsupported("the GPUs of the ranks cannot be connected");
            return Err(match versions[other] {
                0 => error.found(format!("{} cannot use NCCL", self.names(&[other]))),
                version => error
                    .found(format!(
                        "NCCL {} on rank {}, NCCL {} on {}",
                        version_text(own),
                        self.world.rank,
                        version_text(version),
                        self.names(&[other])
                    ))
                    .expected("the same version on all ranks"),
            });
        }
        let new: Result<Id> = if self.world.is_root() {
            library.id()
        } else {
            Ok([0; 128])
        };
        let sent: Id = new.as_ref().copied().unwrap_or([0; 128]);
        let id = self.share(sent, wait)[0];
        new?;
        if id == [0; 128] {
            return Err(Error::unsupported("the GPUs of the ranks cannot be connected").found("rank 0 cannot use NCCL"));
        }
        let guard = Guard::new(self, wait.limit)?;
        let mut gpus = Communicator::join(library, device, (self.world.rank, self.world.size), id)?;
        // NCCL connects two GPUs at their first exchange, which takes memory: before ft asks how much is free.
        let own = [self.world.rank as f32];
        let out: Vec<(usize, &[f32])> = self.others().map(|rank| (rank, &own[..])).collect();
        let mut found = vec![[-1.0]; self.world.size];
        let mut into: Vec<(usize, &mut [f32])> = found.iter_mut().map(|n| &mut n[..]).enumerate().collect();
        into.remove(self.world.rank);
        self.exchange(&mut gpus, &out, &mut into, wait)?;
        drop(guard);
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
        wait: &Wait,
    ) -> Result<()> {
        let begun = Instant::now();
        let mut looked = begun;
        let mut lost = None;
        let mut look = || {
            if looked.elapsed() > LOOK {
                looked = Instant::now();
                let gone = self.mesh.gone();
                if !gone.is_empty() {
                    lost = Some(Lost::Gone(gone));
                } else if wait.limit.is_some_and(|limit| begun.elapsed() > limit) {
                    lost = Some(Lost::Late(self.others().collect()));
                }
            }
            match lost {
                None => Ok(()),
                Some(_) => Err(Error::io("a rank is gone")),
            }
        };
        let done = gpus.swap(out, into, &mut look);
        match lost {
            Some(lost) => self.end(lost, wait),
            None => done,
        }
    }
}

impl Wire for NcclWire {
    fn bytes(&mut self, out: &[(usize, &[u8])], into: &mut [(usize, &mut [u8])], wait: &Wait) {
        let rank = self.world.rank;
        let out: Vec<(usize, &[u8])> = out.iter().copied().filter(|(to, _)| *to != rank).collect();
        let others = into.iter_mut().filter(|(from, _)| *from != rank);
        let mut others: Vec<(usize, &mut [u8])> = others.map(|(from, list)| (*from, &mut list[..])).collect();
        if let Err(lost) = self.mesh.swap(&out, &mut others, wait.limit) {
            self.end(lost, wait);
        }
    }

    fn floats(&mut self, out: &[(usize, &[f32])], into: &mut [(usize, &mut [f32])], wait: &Wait) {
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
        std::thread::sleep(LOOK);
        let gone = self.mesh.gone();
        if gone.is_empty() {
            self.say_end(&error.line());
        } else {
            self.end(Lost::Gone(gone), wait);
        }
        std::thread::sleep(LINGER);
        self.abort(1);
    }

    fn device(&mut self, device: &Device, wait: &Wait) -> Result<()> {
        self.gpus = Some(self.connect(device, wait)?);
        Ok(())
    }

    fn abort(&mut self, code: i32) {
        signal::abandon(code);
    }
}
