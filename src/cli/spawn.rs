//! `ft launch`: starts the ranks of a run on this machine with `mpirun`. A spawner only: the ranks are those of MPI. Unlike
//! `mpirun`, it turns Ctrl-C and SIGTERM into a signal that lets the run save its state.

use crate::base::signal::{Conduct, Stop};
use crate::base::{Error, Result, signal};
use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

/// Train on several ranks of this machine
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft launch -n 4 train --recipe my.toml
  ft launch -n 2 train --recipe my.toml --resume

Starts `mpirun`. With `model.device = \"auto\"` each rank takes a GPU of its own, if there are GPUs. Ctrl-C and SIGTERM save the
state and stop all ranks.")]
pub struct Args {
    /// Number of ranks
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    n: u16,
    /// `train` and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "train ..."
    )]
    command: Vec<OsString>,
}

/// Time between two looks at the ranks.
const PAUSE: Duration = Duration::from_millis(50);

/// `own`: arguments of this program that belong before the subcommand.
pub fn run(args: Args, own: &[OsString]) -> Result<i32> {
    if args.command[0] != "train" {
        return Err(Error::usage("only `train` runs on several ranks")
            .found(format!("`{}`", args.command[0].to_string_lossy()))
            .hint("write `ft launch -n 4 train --recipe my.toml`"));
    }
    if !cfg!(feature = "mpi") {
        return Err(Error::usage("this program cannot train on several ranks")
            .found("a build without MPI")
            .hint("build it with `cargo build --release --features mpi`"));
    }
    let program = std::env::current_exe().map_err(|e| Error::io("cannot find this program").cause(e))?;
    let mut ranks = Command::new("mpirun");
    ranks
        .args(["-n", &args.n.to_string()])
        .arg(program)
        .args(own)
        .args(&args.command);
    // Open MPI refuses more ranks than processors, and root; the ranks share the processors by themselves.
    ranks.envs([
        ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
        ("OMPI_MCA_hwloc_base_binding_policy", "none"),
        ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ]);
    // Ctrl-C of the terminal would reach `mpirun`, which kills the ranks after a second.
    ranks.process_group(0);
    // SAFETY: one system call between fork and exec: if this process is killed, the ranks get SIGTERM.
    unsafe {
        ranks.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
    signal::conduct(Conduct::Stop(Stop {
        what: "stopping all ranks after this step".into(),
        then: "; Ctrl-C again stops now, without saving".into(),
        lost: "what was not saved is lost".into(),
        finishes: None,
    }));
    let started = ranks.spawn().map_err(|e| {
        Error::not_found("cannot start `mpirun`")
            .cause(e)
            .hint("install an MPI: `apt-get install openmpi-bin`")
    })?;
    let ended = wait(started)?;
    Ok(ended.code().unwrap_or(128 + ended.signal().unwrap_or(0)))
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
            // SAFETY: a signal to a child that was not waited for yet, so the id is still its own.
            unsafe { libc::kill(ranks.id() as i32, libc::SIGUSR1) };
        }
        std::thread::sleep(PAUSE);
    }
}
