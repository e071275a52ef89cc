//! Several ranks: finds out whether a launcher (`mpirun`, `srun`) started this process as one of a job, joins the job, and
//! shows its failures once.

use crate::base::{Error, Result};
use crate::comm::Fault;
use crate::recipe;
use crate::report;
use crate::train::ranks::Ranks;
use std::collections::BTreeMap;

/// The place of this process in a job, as the launcher says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub rank: usize,
    pub size: usize,
}

/// Variables with rank and size: of Open MPI, of MPICH and others with its process manager, of `srun` with PMIx.
const VARIABLES: [(&str, &str); 3] = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
];

/// The place in a job of several processes. MPI is started only if there is one: alone it would start a server.
pub fn launched() -> Option<Place> {
    place_in(&|name| std::env::var(name).ok()?.parse().ok())
}

fn place_in(number: &dyn Fn(&str) -> Option<usize>) -> Option<Place> {
    let place = |(rank, size): (&str, &str)| {
        let (rank, size) = (number(rank)?, number(size)?);
        (size > 1 && rank < size).then_some(Place { rank, size })
    };
    VARIABLES.into_iter().find_map(place)
}

/// Joins the job. Returns its ranks, and the compute threads of this one if the machine is shared.
pub fn join(launched: Option<Place>) -> Result<(Ranks, Option<usize>)> {
    match launched {
        None => Ok((Ranks::default(), None)),
        Some(place) => joined(place),
    }
}

#[cfg(not(feature = "mpi"))]
fn joined(place: Place) -> Result<(Ranks, Option<usize>)> {
    Err(Error::usage("this program cannot train on several ranks")
        .found(format!(
            "rank {} of {}, and a build without MPI",
            place.rank, place.size
        ))
        .hint("build it with `cargo build --release --features mpi`, or start it without a launcher"))
}

#[cfg(feature = "mpi")]
fn joined(place: Place) -> Result<(Ranks, Option<usize>)> {
    use crate::comm::{Group, Patience};
    let group = Group::mpi(report::last_words)?;
    let ranks = Ranks(group);
    let world = ranks.0.world().clone();
    if world.size != place.size {
        return Err(Error::new("the launcher and the MPI library do not fit together")
            .found(format!("{} ranks of the launcher, {} of MPI", place.size, world.size))
            .hint("start the program with the `mpirun` of the MPI with which it was built"));
    }
    let hosts = ranks.0.bytes(world.host.clone().into_bytes(), Patience::Long)?;
    let local = hosts.iter().filter(|host| **host == world.host.as_bytes()).count();
    let own = std::thread::available_parallelism().map_or(1, usize::from);
    Ok((ranks, Some(threads(own, online(), local))))
}

/// Number of processors of the machine.
#[cfg(feature = "mpi")]
fn online() -> usize {
    // SAFETY: it reads a number of the system.
    let found = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    usize::try_from(found).unwrap_or(1)
}

/// Compute threads of a rank that may use `own` of `online` processors, with `local` ranks on the machine. A launcher
/// that binds the ranks to processors has divided them already.
#[cfg(any(feature = "mpi", test))]
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
            place_in(&|name| set.get(name).copied())
        };
        assert_eq!(place(&[]), None);
        assert_eq!(place(&[("OMPI_COMM_WORLD_RANK", 0), ("OMPI_COMM_WORLD_SIZE", 1)]), None);
        let want = Some(Place { rank: 2, size: 4 });
        assert_eq!(place(&[("OMPI_COMM_WORLD_RANK", 2), ("OMPI_COMM_WORLD_SIZE", 4)]), want);
        assert_eq!(place(&[("PMI_RANK", 2), ("PMI_SIZE", 4)]), want);
        // A batch script without `srun` has the size only.
        assert_eq!(place(&[("SLURM_STEP_NUM_TASKS", 4)]), None);
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
