//! Starts jobs with `mpirun`.

use crate::bench::{Bench, said};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Settings of Open MPI for ranks that share one machine, also as root and in a container. Other MPIs ignore them.
const SETTINGS: [(&str, &str); 8] = [
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("OMPI_MCA_btl", "self,vader"),
    ("OMPI_MCA_btl_vader_single_copy_mechanism", "none"),
    ("OMPI_MCA_plm", "isolated"),
    ("OMPI_MCA_mpi_yield_when_idle", "1"),
];

/// Longest duration of a job.
const LIMIT: Duration = Duration::from_secs(120);

/// A job with one list of arguments for each rank.
pub fn mpirun(bench: &Bench, ranks: &[Vec<&str>]) -> Command {
    mpirun_on(bench, ranks, &[])
}

/// As `mpirun`, with a working directory for each rank.
pub fn mpirun_in(bench: &Bench, ranks: &[(PathBuf, Vec<&str>)]) -> Command {
    start_ranks(bench, ranks, &|_| Vec::new())
}

/// As `mpirun`, with these words before the program of rank `other`.
pub fn mpirun_but(bench: &Bench, ranks: &[Vec<&str>], other: usize, before: &[&str]) -> Command {
    let words = |rank| if rank == other { before.to_vec() } else { Vec::new() };
    start_ranks(bench, &here(bench, ranks), &words)
}

/// Gives a rank the name of a machine of its own.
const NAMED: [&str; 6] = [
    "unshare",
    "--map-root-user",
    "--uts",
    "sh",
    "-c",
    "hostname \"$0\" && exec \"$@\"",
];

/// True if this system lets a process have a machine name of its own. Else the tests fail; with `FT_TEST_NO_UNSHARE=1` they are
/// left out.
pub fn can_name_machines() -> bool {
    let named = Command::new(NAMED[0]).args(&NAMED[1..]).args(["a", "true"]).status();
    let can = named.is_ok_and(|status| status.success());
    assert!(
        can || std::env::var_os("FT_TEST_NO_UNSHARE").is_some(),
        "`unshare --map-root-user --uts` is not allowed here; FT_TEST_NO_UNSHARE=1 leaves these tests out"
    );
    can
}

/// As `mpirun`, on machines of these names, which are one machine in truth; none: on this machine.
pub fn mpirun_on(bench: &Bench, ranks: &[Vec<&str>], hosts: &[&str]) -> Command {
    let named = |rank: usize| match hosts.get(rank) {
        Some(host) => [&NAMED[..], &[host]].concat(),
        None => Vec::new(),
    };
    start_ranks(bench, &here(bench, ranks), &named)
}

/// All ranks in the directory of the bench.
fn here<'a>(bench: &Bench, ranks: &[Vec<&'a str>]) -> Vec<(PathBuf, Vec<&'a str>)> {
    let all = ranks.iter().cloned();
    all.map(|arguments| (bench.dir.path().to_path_buf(), arguments))
        .collect()
}

/// `before`: words before the program of a rank.
fn start_ranks<'a>(bench: &Bench, ranks: &[(PathBuf, Vec<&str>)], before: &dyn Fn(usize) -> Vec<&'a str>) -> Command {
    let mut command = Command::new("mpirun");
    for (rank, (directory, arguments)) in ranks.iter().enumerate() {
        if rank > 0 {
            command.arg(":");
        }
        command.args(["-n", "1", "-wdir"]).arg(directory);
        command
            .args(before(rank))
            .args([
                env!("CARGO_BIN_EXE_ft"),
                "--threads",
                "1",
                "train",
                "--recipe",
                "r.toml",
            ])
            .args(arguments);
    }
    command
        .current_dir(bench.dir.path())
        .envs(SETTINGS)
        // Jobs that start and end side by side would remove each other's files from one folder.
        .env("OMPI_MCA_orte_tmpdir_base", bench.dir.path())
        .env("NO_COLOR", "1")
        .env("FT_CACHE_DIR", bench.path("cache"))
        .env("HF_HUB_OFFLINE", "1");
    command
}

/// Starts a job.
pub fn start(bench: &Bench, ranks: &[Vec<&str>]) -> Child {
    begin(mpirun(bench, ranks))
}

/// Starts a command, mostly of `mpirun`.
pub fn begin(mut command: Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().expect("`mpirun` must be on the path")
}

/// Starts a job with `ft launch`.
pub fn launch(bench: &Bench, size: usize, arguments: &[&str]) -> Child {
    let size = size.to_string();
    let first = ["--threads", "1", "launch", "-n", &size, "train", "--recipe", "r.toml"];
    let mut command = bench.command(&[&first[..], arguments].concat());
    command
        .envs(SETTINGS)
        .env("OMPI_MCA_orte_tmpdir_base", bench.dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Starts one process as the launcher of another MPI does.
pub fn of_other_mpi(bench: &Bench, rank: usize, size: usize, arguments: &[&str]) -> Child {
    let first = ["--threads", "1", "train", "--recipe", "r.toml"];
    let mut command = bench.command(&[&first[..], arguments].concat());
    command
        .envs(SETTINGS)
        .env("OMPI_MCA_orte_tmpdir_base", bench.dir.path())
        .env("PMI_RANK", rank.to_string())
        .env("PMI_SIZE", size.to_string());
    begin(command)
}

/// Waits for the end of a job; a job that hangs fails the test.
pub fn wait(mut child: Child) -> Output {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > LIMIT {
            child.kill().unwrap();
            panic!("the job hangs: {}", said(&child.wait_with_output().unwrap()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

/// Runs a job of `size` ranks with the same arguments.
pub fn run(bench: &Bench, size: usize, arguments: &[&str]) -> Output {
    wait(start(bench, &vec![arguments.to_vec(); size]))
}

/// As `run`, with a rank for each of these names of machines.
pub fn run_on(bench: &Bench, hosts: &[&str], arguments: &[&str]) -> Output {
    let ranks = vec![arguments.to_vec(); hosts.len()];
    wait(begin(mpirun_on(bench, &ranks, hosts)))
}

/// As `run`; the job must succeed.
pub fn train(bench: &Bench, size: usize, arguments: &[&str]) {
    let out = run(bench, size, arguments);
    assert!(out.status.success(), "{size} ranks, {arguments:?}\n{}", said(&out));
}

/// Process ids of the ranks of a job, in their order.
pub fn ranks_of(job: &Child) -> Vec<u32> {
    let children = format!("/proc/{0}/task/{0}/children", job.id());
    let text = std::fs::read_to_string(children).unwrap_or_default();
    let mut ids: Vec<u32> = text.split_whitespace().filter_map(|id| id.parse().ok()).collect();
    ids.sort_by_key(|id| {
        let variables = std::fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
        let variables = String::from_utf8_lossy(&variables).into_owned();
        let rank = variables
            .split('\0')
            .find_map(|v| v.strip_prefix("OMPI_COMM_WORLD_RANK=").or(v.strip_prefix("RANK=")));
        rank.and_then(|rank| rank.parse::<u32>().ok())
    });
    ids
}

/// Sends a signal.
pub fn signal(process: u32, name: &str) {
    let sent = Command::new("kill")
        .args([name, &process.to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
}
