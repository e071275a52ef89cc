//! `ft launch`: starts the ranks of a run on this machine: with `mpirun`, or by itself with the variables of `torchrun`, for NCCL.
//! It turns Ctrl-C and SIGTERM into a signal that lets the run save its state.

use super::launch;
use crate::base::signal::{SignalReaction, Stop};
use crate::base::{Error, Result, signal, worker};
use crate::report;
use std::ffi::OsString;
use std::net::TcpListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// Train on several ranks of this machine
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft launch -n 4 train --recipe my.toml
  ft launch -n 2 train --recipe my.toml --resume

Starts `mpirun`, or without MPI the ranks themselves, which NCCL connects. With `model.device = \"auto\"` each rank takes a GPU of its own, if there are GPUs. Ctrl-C and SIGTERM save the
state and stop all ranks.")]
pub struct Args {
    /// Number of ranks
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    n: u16,
    /// The connection of the ranks; without this option `mpi`, if this build has it
    #[arg(long, value_enum)]
    engine: Option<RankConnection>,
    /// `train` and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "train ..."
    )]
    command: Vec<OsString>,
}

/// The connection of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum RankConnection {
    /// Any ranks; they are started by `mpirun`
    Mpi,
    /// Ranks with a GPU each
    Nccl,
}

/// How long ranks may take to end by themselves after one of them has failed.
const GRACE: Duration = Duration::from_secs(10);
/// Time between two looks at the ranks.
const PAUSE: Duration = Duration::from_millis(50);

/// `own`: arguments of this program that belong before the subcommand.
pub fn run(args: Args, own: &[OsString]) -> Result<i32> {
    if args.command[0] != "train" {
        return Err(Error::usage("only `train` runs on several ranks")
            .found(format!("`{}`", args.command[0].to_string_lossy()))
            .hint("write `ft launch -n 4 train --recipe my.toml`"));
    }
    let refused = |without: &str, features: &str| {
        Error::usage("this program cannot train on several ranks")
            .found(format!("a build without {without}"))
            .hint(format!("build it with `cargo build --release --features {features}`"))
    };
    let engine = match args.engine {
        Some(engine) => engine,
        None if cfg!(feature = "nccl") && !cfg!(feature = "mpi") => RankConnection::Nccl,
        None => RankConnection::Mpi,
    };
    match engine {
        RankConnection::Mpi if !cfg!(feature = "mpi") => return Err(refused("MPI", "mpi`, or `--features cuda,nccl")),
        RankConnection::Nccl if !cfg!(feature = "nccl") => return Err(refused("NCCL", "cuda,nccl")),
        _ => {}
    }
    let program = std::env::current_exe().map_err(|e| Error::io("cannot find this program").cause(e))?;
    signal::conduct(SignalReaction::Stop(Stop {
        what: "stopping all ranks after this step".into(),
        then: "; Ctrl-C again stops now, without saving".into(),
        lost: "what was not saved is lost".into(),
        finishes: None,
    }));
    let arguments: Vec<OsString> = own.iter().chain(&args.command).cloned().collect();
    let ended = match engine {
        RankConnection::Mpi => wait(mpirun(args.n, &program, &arguments)?)?,
        RankConnection::Nccl => of_ranks(start(args.n, &program, &arguments)?)?,
    };
    Ok(ended.code().unwrap_or(128 + ended.signal().unwrap_or(0)))
}

/// In a process group of its own: Ctrl-C of the terminal would reach it too, and `mpirun` kills the ranks after a second. It gets
/// the signal `at_end` when this process ends.
fn apart(command: &mut Command, at_end: i32) {
    command.process_group(0);
    worker::end_with_parent(command, at_end);
}

fn mpirun(n: u16, program: &Path, arguments: &[OsString]) -> Result<Child> {
    let mut ranks = Command::new("mpirun");
    ranks.args(["-n", &n.to_string()]).arg(program).args(arguments);
    // Open MPI refuses more ranks than processors, and root; the ranks share the processors by themselves.
    ranks.envs([
        ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
        ("OMPI_MCA_hwloc_base_binding_policy", "none"),
        ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ]);
    apart(&mut ranks, libc::SIGTERM);
    ranks.spawn().map_err(|e| {
        Error::not_found("cannot start `mpirun`")
            .cause(e)
            .hint("install an MPI: `apt-get install openmpi-bin`")
    })
}

/// Starts the ranks, with the variables of `torchrun`.
fn start(n: u16, program: &Path, arguments: &[OsString]) -> Result<Vec<Child>> {
    // Rank 0 listens on the port after that of the variable.
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = free.map_err(|e| Error::io("there is no free port").cause(e))?.port() - 1;
    let mut secret = [0; 16];
    getrandom::fill(&mut secret).map_err(|e| Error::new("the system gives no random numbers").cause(e))?;
    let job: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut ranks: Vec<Child> = Vec::new();
    for rank in 0..n {
        let mut command = Command::new(program);
        command.args(arguments).envs([
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", n.to_string()),
            ("LOCAL_WORLD_SIZE", n.to_string()),
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("MASTER_PORT", port.to_string()),
            (launch::JOB, job.clone()),
        ]);
        // Those of an `srun` or `mpirun` around this program.
        for (rank, size) in launch::VARIABLES {
            command.env_remove(rank).env_remove(size);
        }
        // Of two signals SIGINT alone also ends a rank that does not react to the first one.
        apart(&mut command, libc::SIGINT);
        match command.spawn() {
            Ok(child) => ranks.push(child),
            Err(e) => {
                for child in &mut ranks {
                    let _ = child.kill().and_then(|()| child.wait());
                }
                return Err(Error::io(format!("cannot start rank {rank}")).cause(e));
            }
        }
    }
    Ok(ranks)
}

/// Waits for the end of all ranks; passes a signal on once. Returns how the first one that failed has ended. The others have some
/// time to say what they know, and are killed.
fn of_ranks(mut ranks: Vec<Child>) -> Result<ExitStatus> {
    let mut ended: Vec<Option<ExitStatus>> = vec![None; ranks.len()];
    let (mut passed_on, mut killed) = (false, false);
    let mut failed: Option<(ExitStatus, Instant)> = None;
    loop {
        for (rank, (child, ended)) in ranks.iter_mut().zip(&mut ended).enumerate() {
            if ended.is_some() {
                continue;
            }
            let found = child
                .try_wait()
                .map_err(|e| Error::io(format!("cannot wait for rank {rank}")).cause(e))?;
            let Some(status) = found else { continue };
            *ended = found;
            if let Some(signal) = status.signal().filter(|_| !killed) {
                report::error(&format!("rank {rank} was ended by signal {signal}"));
            }
            if !status.success() && failed.is_none() {
                failed = Some((status, Instant::now()));
            }
        }
        let first = ended.first().copied().flatten();
        if let Some(last) = first.filter(|_| ended.iter().all(Option::is_some)) {
            return Ok(failed.map_or(last, |(status, _)| status));
        }
        let running = ranks.iter_mut().zip(&ended).filter(|(_, ended)| ended.is_none());
        if !killed && failed.is_some_and(|(_, at)| at.elapsed() > GRACE) {
            killed = true;
            running.for_each(|(child, _)| drop(child.kill()));
        } else if !passed_on && signal::received().is_some() {
            passed_on = true;
            running.for_each(|(child, _)| save(child));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Waits for the end of the job; passes a signal on once.
fn wait(mut ranks: Child) -> Result<ExitStatus> {
    let mut passed_on = false;
    loop {
        let ended = ranks
            .try_wait()
            .map_err(|e| Error::io("cannot wait for `mpirun`").cause(e))?;
        if let Some(ended) = ended {
            return Ok(ended);
        }
        if !passed_on && signal::received().is_some() {
            passed_on = true;
            save(&ranks);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Lets a child that was not waited for yet save its state and stop.
fn save(child: &Child) {
    // SAFETY: a signal to a child that was not waited for yet, so the id is still its own.
    unsafe { libc::kill(child.id() as i32, libc::SIGUSR1) };
}
