//! Several ranks: finds out whether a launcher (`mpirun`, `srun`, `torchrun`) started this process as one of a job, joins the
//! job, and shows its failures once.

use crate::base::aborted::{self, AbortMessage};
use crate::base::{Error, Result, files};
use crate::comm::{Collective, RankFault};
use crate::recipe;
use crate::report;
use crate::train::ranks::RunRanks;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// The place of this process in a job, as the launcher says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobPlace {
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

/// Most ranks of a job: a larger number is a mistake.
const MOST_RANKS: usize = 1 << 16;

/// The variable with the text that only ranks of one job have. `ft launch` sets it.
pub(super) const JOB: &str = crate::base::secrets::JOB;

/// The place in a job of several processes. MPI is started only if there is one: alone it would start a server.
///
/// Errors: variables of a launcher that make no sense together. Each process would train alone, into one directory.
pub fn launched() -> Result<Option<JobPlace>> {
    place_in(&|name| std::env::var(name).ok())
}

/// As `launched`, with other variables.
#[doc(hidden)]
pub fn place_in(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<JobPlace>> {
    let text = |name: &str| variable(name).filter(|text| !text.is_empty());
    let number = |name: &str| text(name)?.parse().ok();
    let of_mpi = |(rank, size): (&str, &str)| {
        let (rank, size) = (number(rank)?, number(size)?);
        let by = Launcher::Mpi;
        (size > 1 && rank < size).then_some(JobPlace { rank, size, by })
    };
    let of_mpi = || VARIABLES.into_iter().find_map(of_mpi);
    // A script for `srun` often sets the variables of `torchrun` too, and the ranks of a `torchrun` that `srun` or `mpirun` has
    // started inherit theirs.
    let only_master = cfg!(feature = "nccl") && !cfg!(feature = "mpi");
    if only_master || text("TORCHELASTIC_RUN_ID").is_some() {
        return Ok(of_master(&text)?.or_else(of_mpi));
    }
    match of_mpi() {
        None => of_master(&text),
        found => Ok(found),
    }
}

/// A warning for the user if `srun` has started several tasks that are not connected: each one trains alone. This may be wanted, if each
/// has a recipe of its own.
pub fn warning_of_task() -> Option<String> {
    task_without_mpi(&|name| std::env::var(name).ok())
}

fn task_without_mpi(variable: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let number = |name: &str| variable(name)?.parse::<usize>().ok();
    // A batch script without `srun` has no step.
    variable("SLURM_STEP_ID").filter(|text| !text.is_empty())?;
    let (task, tasks) = (number("SLURM_PROCID")?, number("SLURM_STEP_NUM_TASKS")?);
    (tasks > 1).then(|| {
        format!(
            "this is task {task} of {tasks} of an `srun` without MPI, and trains alone; ranks of one run: `srun --mpi=pmix` (`srun --mpi=list` \
             shows what there is), and an ft with MPI (`cargo build --release --features mpi`)"
        )
    })
}

/// The place by the variables of `torchrun`. Without an address they may be those of another program.
fn of_master(text: &dyn Fn(&str) -> Option<String>) -> Result<Option<JobPlace>> {
    let (rank, size) = (text("RANK"), text("WORLD_SIZE"));
    if text("MASTER_ADDR").is_none() || (rank.is_none() && size.is_none()) {
        return Ok(None);
    }
    let read = |name: &str, text: Option<String>, expected: &str| {
        let number = text.as_deref().and_then(|text| text.parse::<usize>().ok());
        number.ok_or_else(|| {
            let error = match text {
                None => Error::usage(format!("the launcher has not set `{name}`")),
                Some(text) => wrong(name, &text),
            };
            error
                .expected(expected)
                .hint("one process alone: unset RANK, WORLD_SIZE and MASTER_ADDR")
        })
    };
    let size = read("WORLD_SIZE", size, "the number of processes of the job")?;
    if size > MOST_RANKS {
        return Err(wrong("WORLD_SIZE", &size.to_string()).expected(format!("at most {MOST_RANKS}")));
    }
    if size < 2 {
        return Ok(None);
    }
    let rank = read("RANK", rank, "the number of this process, from 0")?;
    let by = Launcher::Master;
    Ok(Some(JobPlace { rank, size, by }))
}

fn wrong(name: &str, found: &str) -> Error {
    Error::usage(format!("the launcher has set `{name}` to a wrong value")).found(format!("`{found}`"))
}

/// Prints a line of the ranks in the terms of the program.
#[cfg(any(feature = "mpi", feature = "nccl"))]
fn say(line: &str) {
    report::final_line(&recipe::in_program_terms(line));
}

/// `rank 1 (host b)` in a job of several ranks.
static NAME: OnceLock<String> = OnceLock::new();

/// What stays true when a rank is gone.
const JOB_ENDS: &str = "the job ends; the newest checkpoint is valid";

/// A rank that panics or is aborted says its name, because the others may not know why the job ends.
fn name_in_abort_message(place: JobPlace) -> Result<()> {
    let host = files::read_text(Path::new("/proc/sys/kernel/hostname")).unwrap_or_default();
    let host = host.split_whitespace().next().unwrap_or("unknown");
    let name = NAME.get_or_init(|| format!("rank {} (host {host})", place.rank));
    aborted::say_if_aborted(AbortMessage {
        out_of_memory: [
            format!("error: [{name}] out of memory: the system refused "),
            format!(" bytes; {JOB_ENDS}\n"),
        ],
        other: format!("error: [{name}] this process was aborted; {JOB_ENDS}\n"),
        kept: None,
        hint: format!(
            "hint: `ft plan --ranks {}` shows the memory of a rank; set `memory.budget` to what is free for one rank, or \
             `distributed.weights = \"sharded\"`, then go on with `--resume`\n",
            place.size
        ),
    })
}

/// Prints a panic of a rank of a job; also where another rank speaks. False: there is one rank.
pub(super) fn say_bug(text: &str) -> bool {
    let Some(name) = NAME.get() else { return false };
    // A panic often causes others, at last one that aborts the process.
    if aborted::begins_to_say() {
        report::final_line(&format!("error: [{name}] {text}\n{JOB_ENDS}"));
    }
    true
}

/// Joins the job. Returns its ranks, and the compute threads of this one if the machine is shared.
pub fn join(launched: Option<JobPlace>) -> Result<(RunRanks, Option<usize>)> {
    use crate::comm::Patience;
    let Some(place) = launched else {
        return Ok((RunRanks::default(), None));
    };
    // Before MPI is started, which would print a trace of the calls.
    name_in_abort_message(place)?;
    let ranks = RunRanks(match place.by {
        Launcher::Mpi => by_mpi(place)?,
        Launcher::Master => by_master(place)?,
    });
    let own = format!("{}\n{}", ranks.0.world().host, processors());
    let all = ranks.0.all_gather_bytes(own.clone().into_bytes(), Patience::Long)?;
    let at_a_time = std::thread::available_parallelism().map_or(1, usize::from);
    Ok((ranks, Some(threads(at_a_time, &own, &all))))
}

#[cfg(not(all(feature = "mpi", feature = "nccl")))]
fn refused(place: JobPlace, without: &str, features: &str) -> Error {
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
fn by_mpi(place: JobPlace) -> Result<Arc<dyn Collective>> {
    Err(refused(place, "MPI", "mpi"))
}

#[cfg(feature = "mpi")]
fn by_mpi(place: JobPlace) -> Result<Arc<dyn Collective>> {
    let group = crate::comm::RankGroup::mpi(say)?;
    let found = group.world().size;
    if found != place.size {
        // The ranks of the launcher cannot talk to each other: each one ends by itself.
        group.close();
        return Err(Error::new("the launcher and the MPI library do not fit together")
            .found(format!("{} ranks of the launcher, {found} of MPI", place.size))
            .hint("start the program with the `mpirun` of the MPI with which it was built"));
    }
    Ok(group)
}

#[cfg(not(feature = "nccl"))]
fn by_master(place: JobPlace) -> Result<Arc<dyn Collective>> {
    Err(refused(place, "NCCL", "cuda,nccl"))
}

/// How long the ranks wait for each other at the start, unless `FT_JOIN_TIMEOUT` says it: as PyTorch.
#[cfg(feature = "nccl")]
const JOIN_SECONDS: u64 = 300;
/// The most that it may say: a day.
#[cfg(feature = "nccl")]
const MOST_JOIN_SECONDS: u64 = 86_400;

#[cfg(feature = "nccl")]
fn by_master(place: JobPlace) -> Result<Arc<dyn Collective>> {
    rendezvous(place).inspect_err(|error| {
        // Rank 0 cannot speak for a rank that it does not know.
        if place.rank > 0 {
            say(&format!("[rank {}] {error}", place.rank));
        }
    })
}

#[cfg(feature = "nccl")]
fn rendezvous(place: JobPlace) -> Result<Arc<dyn Collective>> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let wrong = |name: &str, expected: &str| wrong(name, &variable(name)).expected(expected);
    let JobPlace { rank, size, .. } = place;
    if rank >= size {
        return Err(wrong("RANK", &format!("less than `WORLD_SIZE`, which is {size}")));
    }
    let port = variable("MASTER_PORT")
        .parse::<u16>()
        .ok()
        .and_then(|port| port.checked_add(1));
    let port = port.ok_or_else(|| wrong("MASTER_PORT", "a port from 1 to 65534"))?;
    let seconds = match variable("FT_JOIN_TIMEOUT").as_str() {
        "" => Some(JOIN_SECONDS),
        text => text.parse().ok().filter(|seconds| *seconds <= MOST_JOIN_SECONDS),
    };
    let seconds = seconds.ok_or_else(|| {
        let expected = format!("a number of seconds, at most {MOST_JOIN_SECONDS}");
        wrong("FT_JOIN_TIMEOUT", &expected)
    })?;
    let local = variable("LOCAL_WORLD_SIZE");
    let rendezvous = crate::comm::Rendezvous {
        rank,
        size,
        host: variable("MASTER_ADDR"),
        port,
        job: std::env::var(JOB).unwrap_or_else(|_| variable("TORCHELASTIC_RUN_ID")),
        one_machine: local.is_empty() || local == size.to_string(),
        limit: std::time::Duration::from_secs(seconds),
    };
    let group = crate::comm::RankGroup::nccl(rendezvous, say).map_err(|e| {
        e.hint(
            "all ranks need the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE; rank 0 listens on MASTER_PORT + 1, which must be free and \
             reachable; FT_JOIN_TIMEOUT sets the seconds to wait",
        )
    })?;
    Ok(group)
}

/// The processors that this process may use, as the system writes them.
fn processors() -> String {
    let status = files::read_text(Path::new("/proc/self/status")).unwrap_or_default();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed:"));
    allowed.unwrap_or_default().trim().to_string()
}

/// Compute threads of a rank that may use `own` processors at a time. `processors`: its machine and processors; `all`: those of all
/// ranks. Ranks with the same ones share them, also if a container has a part of the machine. A launcher that binds the ranks to
/// processors has divided them already.
fn threads(own: usize, processors: &str, all: &[Vec<u8>]) -> usize {
    let sharing = all.iter().filter(|other| **other == processors.as_bytes()).count();
    (own / sharing.max(1)).max(1)
}

/// Ends the job with the result of this rank: the exit code. Rank 0 shows what failed.
pub fn finish(ranks: &RunRanks, result: Result<i32>) -> Result<i32> {
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
fn texts(faults: &[RankFault], size: usize) -> Vec<String> {
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
            place_in(&|name| set.get(name).map(usize::to_string)).unwrap()
        };
        assert_eq!(place(&[]), None);
        assert_eq!(place(&[("OMPI_COMM_WORLD_RANK", 0), ("OMPI_COMM_WORLD_SIZE", 1)]), None);
        let by = Launcher::Mpi;
        let want = Some(JobPlace { rank: 2, size: 4, by });
        assert_eq!(place(&[("OMPI_COMM_WORLD_RANK", 2), ("OMPI_COMM_WORLD_SIZE", 4)]), want);
        assert_eq!(place(&[("PMI_RANK", 2), ("PMI_SIZE", 4)]), want);
        // A batch script without `srun` has the size only.
        assert_eq!(place(&[("SLURM_STEP_NUM_TASKS", 4)]), None);
        // `srun` without a process manager: the tasks do not know each other.
        let warning = |set: &[(&str, usize)]| {
            let set: BTreeMap<&str, usize> = set.iter().copied().collect();
            task_without_mpi(&|name| set.get(name).map(usize::to_string))
        };
        let of_srun = [("SLURM_STEP_NUM_TASKS", 4), ("SLURM_PROCID", 1), ("SLURM_STEP_ID", 0)];
        assert_eq!(place(&of_srun), None);
        let found = warning(&of_srun).unwrap();
        assert!(
            found.contains("task 1 of 4") && found.contains("`srun --mpi=pmix`"),
            "{found}"
        );
        assert_eq!(warning(&of_srun[..2]), None, "a batch script");
        let one = [("SLURM_STEP_NUM_TASKS", 1), ("SLURM_PROCID", 0), ("SLURM_STEP_ID", 0)];
        assert_eq!(warning(&one), None);
        let of_torchrun = [
            ("RANK", 2),
            ("WORLD_SIZE", 4),
            ("MASTER_ADDR", 0),
            ("MASTER_PORT", 29500),
        ];
        let by = Launcher::Master;
        assert_eq!(place(&of_torchrun), Some(JobPlace { rank: 2, size: 4, by }));
        assert_eq!(place(&of_torchrun[..2]), None, "other programs use such names too");
        assert_eq!(place(&[("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", 0)]), None);
        let both = [&of_torchrun[..], &[("PMI_RANK", 2), ("PMI_SIZE", 4)]].concat();
        if cfg!(feature = "mpi") || !cfg!(feature = "nccl") {
            assert_eq!(
                place(&both),
                Some(JobPlace {
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
        assert_eq!(place(&started_by_srun), Some(JobPlace { rank: 2, size: 4, by }));
    }

    #[test]
    fn variables_of_a_launcher_that_are_there_in_part_are_an_error() {
        let place = |set: &[(&str, &str)]| {
            let set: BTreeMap<&str, &str> = set.iter().copied().collect();
            place_in(&|name| set.get(name).map(|text| text.to_string()))
        };
        let address = ("MASTER_ADDR", "a");
        assert_eq!(
            place(&[address]).unwrap(),
            None,
            "a script may set it for all its programs"
        );
        assert_eq!(place(&[address, ("WORLD_SIZE", "1")]).unwrap(), None);
        assert_eq!(place(&[("MASTER_ADDR", ""), ("WORLD_SIZE", "2")]).unwrap(), None);
        for (set, want) in [
            (&[address, ("WORLD_SIZE", "2")][..], "has not set `RANK`"),
            (&[address, ("WORLD_SIZE", "2"), ("RANK", "")], "has not set `RANK`"),
            (
                &[address, ("WORLD_SIZE", "2"), ("RANK", "-1")],
                "`RANK` to a wrong value",
            ),
            (&[address, ("RANK", "0")], "has not set `WORLD_SIZE`"),
            (
                &[address, ("RANK", "0"), ("WORLD_SIZE", "x")],
                "`WORLD_SIZE` to a wrong value",
            ),
            (&[address, ("RANK", "0"), ("WORLD_SIZE", "4000000000")], "at most 65536"),
        ] {
            let error = place(set).unwrap_err();
            assert!(
                error.to_string().contains(want) && error.exit_code() == 2,
                "{set:?}: {error}"
            );
        }
    }

    #[test]
    fn ranks_share_the_processors_of_their_machine() {
        let all = |ranks: &[&str]| -> Vec<Vec<u8>> { ranks.iter().map(|rank| rank.as_bytes().to_vec()).collect() };
        let same = all(&["a\nffff"; 4]);
        assert_eq!(threads(16, "a\nffff", &same), 4);
        assert_eq!(threads(2, "a\nffff", &same), 1);
        // A container with a limit of processor time has all processors of the machine in its list.
        assert_eq!(threads(8, "a\nffff", &same), 2);
        let bound = all(&["a\nf", "a\nf0", "b\nf", "b\nf0"]);
        assert_eq!(threads(4, "a\nf", &bound), 4, "bound by the launcher");
        let by_socket = all(&["a\nff", "a\nff", "a\nff00", "a\nff00"]);
        assert_eq!(threads(8, "a\nff", &by_socket), 4, "two ranks on each socket");
        assert!(!processors().is_empty(), "the system says them");
    }

    #[test]
    fn equal_failures_are_one_text() {
        let fault = |rank: &str, text: &str| RankFault {
            rank: rank.into(),
            code: 1,
            text: text.into(),
        };
        assert_eq!(texts(&[fault("a", "no file"), fault("b", "no file")], 2), ["no file"]);
        let some = [fault("a", "no file"), fault("b", "full"), fault("c", "full")];
        assert_eq!(texts(&some, 4), ["[b, c] full", "[a] no file"]);
    }
}
