//! Several ranks: finds out whether a launcher (`mpirun`, `srun`, `torchrun`) started this process as one of a job, joins the
//! job, and shows its failures once.

use crate::base::{Error, Result};
use crate::comm::{Collective, Fault};
use crate::recipe;
use crate::report;
use crate::train::ranks::Ranks;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The place of this process in a job, as the launcher says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub rank: usize,
    pub size: usize,
    by: Launcher,
}

/// How the ranks of a job meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Launcher {
    Mpi,
    /// At the address of `MASTER_ADDR` and `MASTER_PORT`: `torchrun`, `ft launch` without MPI.
    Master,
}

/// Variables with rank and size: of Open MPI, of MPICH and others with its process manager, of `srun` with PMIx.
pub(super) const VARIABLES: [(&str, &str); 3] = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
];

/// The place in a job of several processes. MPI is started only if there is one: alone it would start a server.
pub fn launched() -> Option<Place> {
    place_in(&|name| std::env::var(name).ok())
}

fn place_in(text: &dyn Fn(&str) -> Option<String>) -> Option<Place> {
    let number = |name: &str| text(name)?.parse().ok();
    let place = |(rank, size): (&str, &str), by| {
        let (rank, size) = (number(rank)?, number(size)?);
        (size > 1).then_some(Place { rank, size, by })
    };
    let of_mpi = |names| place(names, Launcher::Mpi).filter(|place| place.rank < place.size);
    let of_master = || {
        text("MASTER_ADDR")?;
        place(("RANK", "WORLD_SIZE"), Launcher::Master)
    };
    // A script for `srun` often sets the variables of `torchrun` too, and the ranks of a `torchrun` that `srun` or `mpirun` has
    // started inherit theirs.
    let only_master = cfg!(feature = "nccl") && !cfg!(feature = "mpi");
    if only_master || text("TORCHELASTIC_RUN_ID").is_some() {
        return of_master().or_else(|| VARIABLES.into_iter().find_map(of_mpi));
    }
    VARIABLES.into_iter().find_map(of_mpi).or_else(of_master)
}

/// Joins the job. Returns its ranks, and the compute threads of this one if the machine is shared.
pub fn join(launched: Option<Place>) -> Result<(Ranks, Option<usize>)> {
    use crate::comm::Patience;
    let Some(place) = launched else {
        return Ok((Ranks::default(), None));
    };
    let ranks = Ranks(match place.by {
        Launcher::Mpi => by_mpi(place)?,
        Launcher::Master => by_master(place)?,
    });
    let host = ranks.0.world().host.clone();
    let hosts = ranks.0.bytes(host.clone().into_bytes(), Patience::Long)?;
    let local = hosts.iter().filter(|other| **other == host.as_bytes()).count();
    let own = std::thread::available_parallelism().map_or(1, usize::from);
    Ok((ranks, Some(threads(own, online(), local))))
}

#[cfg(not(all(feature = "mpi", feature = "nccl")))]
fn refused(place: Place, without: &str, features: &str) -> Error {
    Error::usage("this program cannot train on several ranks")
        .found(format!(
            "rank {} of {}, and a build without {without}",
            place.rank, place.size
        ))
        .hint(format!(
            "build it with `cargo build --release --features {features}`, or start it without a launcher"
        ))
}

#[cfg(not(feature = "mpi"))]
fn by_mpi(place: Place) -> Result<Arc<dyn Collective>> {
    Err(refused(place, "MPI", "mpi"))
}

#[cfg(feature = "mpi")]
fn by_mpi(place: Place) -> Result<Arc<dyn Collective>> {
    let group = crate::comm::Group::mpi(report::last_words)?;
    let found = group.world().size;
    if found != place.size {
        return Err(Error::new("the launcher and the MPI library do not fit together")
            .found(format!("{} ranks of the launcher, {found} of MPI", place.size))
            .hint("start the program with the `mpirun` of the MPI with which it was built"));
    }
    Ok(group)
}

#[cfg(not(feature = "nccl"))]
fn by_master(place: Place) -> Result<Arc<dyn Collective>> {
    Err(refused(place, "NCCL", "cuda,nccl"))
}

/// How long the ranks wait for each other at the start, unless `FT_JOIN_TIMEOUT` says it: as PyTorch.
#[cfg(feature = "nccl")]
const JOIN_SECONDS: u64 = 300;

#[cfg(feature = "nccl")]
fn by_master(place: Place) -> Result<Arc<dyn Collective>> {
    rendezvous(place).inspect_err(|error| {
        // Rank 0 cannot speak for a rank that it does not know.
        if place.rank > 0 {
            let text = recipe::in_program_terms(&error.to_string());
            report::last_words(&format!("[rank {}] {text}", place.rank));
        }
    })
}

#[cfg(feature = "nccl")]
fn rendezvous(place: Place) -> Result<Arc<dyn Collective>> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let wrong = |name: &str, expected: &str| {
        Error::usage(format!("the launcher has set `{name}` to a wrong value"))
            .found(format!("`{}`", variable(name)))
            .expected(expected)
    };
    let Place { rank, size, .. } = place;
    if rank >= size {
        return Err(wrong("RANK", &format!("less than `WORLD_SIZE`, which is {size}")));
    }
    let port = variable("MASTER_PORT")
        .parse::<u16>()
        .ok()
        .and_then(|port| port.checked_add(1));
    let port = port.ok_or_else(|| wrong("MASTER_PORT", "a port from 1 to 65534"))?;
    let seconds = match variable("FT_JOIN_TIMEOUT").as_str() {
        "" => JOIN_SECONDS,
        text => text
            .parse()
            .map_err(|_| wrong("FT_JOIN_TIMEOUT", "a number of seconds"))?,
    };
    let rendezvous = crate::comm::Rendezvous {
        rank,
        size,
        host: variable("MASTER_ADDR"),
        port,
        limit: std::time::Duration::from_secs(seconds),
    };
    let group = crate::comm::Group::nccl(rendezvous, report::last_words).map_err(|e| {
        e.hint(
            "all ranks need the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE; rank 0 listens on MASTER_PORT + 1, which must be free and \
             reachable; FT_JOIN_TIMEOUT sets the seconds to wait",
        )
    })?;
    Ok(group)
}

/// Number of processors of the machine.
fn online() -> usize {
    // SAFETY: it reads a number of the system.
    let found = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    usize::try_from(found).unwrap_or(1)
}

/// Compute threads of a rank that may use `own` of `online` processors, with `local` ranks on the machine. A launcher
/// that binds the ranks to processors has divided them already.
fn threads(own: usize, online: usize, local: usize) -> usize {
    if own < online { own } else { (own / local.max(1)).max(1) }
}

/// Ends the job with the result of this rank: the exit code. Rank 0 shows what failed.
pub fn finish(ranks: &Ranks, result: Result<i32>) -> Result<i32> {
    if !ranks.several() {
        return result;
    }
    let code = match result {
        Ok(code) => code,
        Err(error) => {
            let faults = ranks.0.fail(error.exit_code(), error.to_string());
            if ranks.is_root() {
                for text in texts(&faults, ranks.size()) {
                    report::error(&recipe::in_program_terms(&text));
                }
            }
            faults.iter().map(|fault| fault.code).max().unwrap_or(error.exit_code())
        }
    };
    ranks.0.close();
    Ok(code)
}

/// One text for each different failure, with the ranks that have it unless all have it.
fn texts(faults: &[Fault], size: usize) -> Vec<String> {
    let mut ranks: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for fault in faults {
        ranks.entry(&fault.text).or_default().push(&fault.rank);
    }
    ranks
        .into_iter()
        .map(|(text, ranks)| {
            if ranks.len() == size {
                text.to_string()
            } else {
                format!("[{}] {text}", ranks.join(", "))
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_known_by_the_variables_of_its_launcher() {
        let place = |set: &[(&str, usize)]| {
            let set: BTreeMap<&str, usize> = set.iter().copied().collect();
            place_in(&|name| set.get(name).map(usize::to_string))
        };
        assert_eq!(place(&[]), None);
        assert_eq!(place(&[("OMPI_COMM_WORLD_RANK", 0), ("OMPI_COMM_WORLD_SIZE", 1)]), None);
        let by = Launcher::Mpi;
        let want = Some(Place { rank: 2, size: 4, by });
        assert_eq!(place(&[("OMPI_COMM_WORLD_RANK", 2), ("OMPI_COMM_WORLD_SIZE", 4)]), want);
        assert_eq!(place(&[("PMI_RANK", 2), ("PMI_SIZE", 4)]), want);
        // A batch script without `srun` has the size only.
        assert_eq!(place(&[("SLURM_STEP_NUM_TASKS", 4)]), None);
        let of_torchrun = [
            ("RANK", 2),
            ("WORLD_SIZE", 4),
            ("MASTER_ADDR", 0),
            ("MASTER_PORT", 29500),
        ];
        let by = Launcher::Master;
        assert_eq!(place(&of_torchrun), Some(Place { rank: 2, size: 4, by }));
        assert_eq!(place(&of_torchrun[..2]), None, "other programs use such names too");
        assert_eq!(place(&[("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", 0)]), None);
        let both = [&of_torchrun[..], &[("PMI_RANK", 2), ("PMI_SIZE", 4)]].concat();
        if cfg!(feature = "mpi") || !cfg!(feature = "nccl") {
            assert_eq!(
                place(&both),
                Some(Place {
                    rank: 2,
                    size: 4,
                    by: Launcher::Mpi
                }),
                "the launcher of MPI goes first"
            );
        }
        let started_by_srun = [
            &[("TORCHELASTIC_RUN_ID", 1), ("PMI_RANK", 0), ("PMI_SIZE", 2)],
            &of_torchrun[..],
        ]
        .concat();
        assert_eq!(place(&started_by_srun), Some(Place { rank: 2, size: 4, by }));
    }

    #[test]
    fn ranks_share_the_processors_of_their_machine() {
        assert_eq!(threads(16, 16, 4), 4);
        assert_eq!(threads(2, 2, 4), 1);
        assert_eq!(threads(4, 16, 4), 4, "bound by the launcher");
    }

    #[test]
    fn equal_failures_are_one_text() {
        let fault = |rank: &str, text: &str| Fault {
            rank: rank.into(),
            code: 1,
            text: text.into(),
        };
        assert_eq!(texts(&[fault("a", "no file"), fault("b", "no file")], 2), ["no file"]);
        let some = [fault("a", "no file"), fault("b", "full"), fault("c", "full")];
        assert_eq!(texts(&some, 4), ["[b, c] full", "[a] no file"]);
    }
}
