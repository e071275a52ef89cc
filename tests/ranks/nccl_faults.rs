//! Failures of ranks with GPUs that NCCL connects: while they are connected, while a rank works alone, and of their launchers.

use crate::bench::{Bench, said};
use crate::gpus::in_software;
use crate::hangs::{disk_variables, until_saving};
use crate::job::{ranks_of, signal, wait};
use crate::nccl::{LONG, all, assert_once, has_gpus, launcher, start, start_with, until_saved};
use std::fs;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Longest time from a failure of one rank to the end of the others.
const SOON: Duration = Duration::from_secs(8);

/// One step on two ranks.
const SHORT: [&str; 2] = ["train.max_steps=1", "train.save_steps=0"];

/// NCCL itself waits without a limit there, and no launcher ends ranks on other machines.
#[test]
fn a_rank_that_is_killed_while_the_gpus_are_connected_ends_the_others() {
    if !in_software() {
        return;
    }
    for call in ["init", "group"] {
        let bench = Bench::new();
        let mut job = start_with(&bench, &vec![LONG.to_vec(); 3], 3, |number, command| {
            if number == 1 {
                command.env("SOFT_NCCL_END", call);
            }
        });
        let killed = wait(job.remove(1));
        assert_eq!(killed.status.code(), None, "{}", said(&killed));
        let begun = Instant::now();
        let (text, codes) = all(job);
        assert!(begun.elapsed() < SOON, "{call}: {:?}", begun.elapsed());
        assert_eq!(codes, [Some(1); 2], "{text}");
        let message = "the connection to rank 1 (host ";
        assert_eq!(text.matches(message).count(), 2, "{call}:\n{text}");
    }
}

#[test]
fn a_rank_that_cannot_connect_its_gpu_ends_the_others_and_says_why() {
    if !in_software() {
        return;
    }
    let bench = Bench::new();
    let with = |variable: &'static str, value: &'static str| {
        let begun = Instant::now();
        let job = start_with(&bench, &vec![LONG.to_vec(); 3], 3, |number, command| {
            if number == 1 {
                command.env(variable, value);
            }
        });
        let (text, codes) = all(job);
        assert!(begun.elapsed() < 2 * SOON, "{variable}: {:?}", begun.elapsed());
        (text, codes)
    };
    // Before the others wait for it in NCCL: one message for all.
    let (text, codes) = with("SOFT_CUDA_MEMORY_MIB", "12");
    assert!(
        codes[1].is_some_and(|code| code > 0) && codes == [codes[1]; 3],
        "{codes:?}\n{text}"
    );
    assert_once(
        &text,
        "memory of the GPU for the exchange between GPUs cannot be allocated",
    );
    assert_once(&text, "[rank 1 (host ");
    // While they wait.
    let (text, codes) = with("SOFT_NCCL_END", "refuse");
    assert_eq!(codes, [Some(1); 3], "{text}");
    assert_once(&text, "cause: ncclCommInitRank: no network");
    assert_once(&text, "[rank 1 (host ");
    assert_eq!(text.matches("the GPU of rank 1 (host ").count(), 2, "{text}");
}

#[test]
fn an_nccl_that_does_not_wait_in_its_calls_is_refused() {
    if !in_software() {
        return;
    }
    let bench = Bench::new();
    let job = start_with(&bench, &[LONG.to_vec(), LONG.to_vec()], 2, |_, command| {
        command.env("NCCL_COMM_BLOCKING", "0");
    });
    let (text, codes) = all(job);
    assert!(
        codes[0].is_some_and(|code| code > 0) && codes[0] == codes[1],
        "{codes:?}\n{text}"
    );
    assert_once(&text, "unset NCCL_COMM_BLOCKING");
    assert!(!bench.path("out").exists(), "a refused run leaves no trace");
}

/// A rank whose GPU computes for a minute makes no exchange.
#[test]
fn a_rank_that_computes_finds_that_another_one_is_gone() {
    if !in_software() {
        return;
    }
    let bench = Bench::new();
    let mut job = start_with(&bench, &[LONG.to_vec(), LONG.to_vec()], 2, |number, command| {
        if number == 0 {
            command.env("SOFT_CUDA_SLOW", "1");
        }
    });
    until_slow(&bench, &[job[0].id()]);
    signal(job[1].id(), "-KILL");
    wait(job.remove(1));
    let begun = Instant::now();
    let (text, codes) = all(job);
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    assert_eq!(codes, [Some(1)], "{text}");
    assert_once(&text, "the connection to rank 1 (host ");
}

/// Starts three ranks, of which rank 0 has a disk that is at fault at this checkpoint.
fn with_disk(bench: &Bench, more: &[&str], checkpoint: &str, fault: [&str; 3]) -> Option<Vec<Child>> {
    let variables = disk_variables(bench, checkpoint, fault)?;
    let arguments = [&LONG[..], more].concat();
    Some(start_with(bench, &vec![arguments; 3], 3, |number, command| {
        if number == 0 {
            command.envs(variables.clone());
        }
    }))
}

/// The whole process hangs in a save, as on a machine that is lost; the others wait for it without a limit.
#[test]
fn a_process_without_mpi_that_hangs_in_a_save_ends_the_job() {
    if !in_software() {
        return;
    }
    let bench = Bench::new();
    let Some(mut job) = with_disk(&bench, &["distributed.timeout=3"], "checkpoint-10", ["stall", "4", "2"]) else {
        return;
    };
    until_saved(&bench, &mut job[0]);
    until_saving(&bench, "checkpoint-10");
    signal(job[0].id(), "-STOP");
    let begun = Instant::now();
    let mut hangs = job.remove(0);
    let (text, codes) = all(job);
    hangs.kill().unwrap();
    hangs.wait().unwrap();
    assert!(begun.elapsed() < 2 * SOON, "{:?}", begun.elapsed());
    assert_eq!(codes, [Some(1); 2], "{text}");
    // Rank 2 finds that rank 1 has ended, or it has waited as long.
    assert_once(&text, "no heartbeat of rank 0 for 5 s");
    assert!(text.contains("the job ends; the newest checkpoint is valid"), "{text}");
    let verified = bench.ft(&["runs", "verify", "out"]);
    assert!(verified.status.success(), "{}", said(&verified));
    let resumed = [&LONG[..], &["--resume", "train.max_steps=12"]].concat();
    let (text, codes) = all(start(&bench, &vec![resumed; 3], 3));
    assert_eq!(codes, [Some(0); 3], "{text}");
    assert!(bench.path("out/final").exists());
}

/// Each operation of a save takes a while, and the whole save longer than the others wait for a heartbeat.
#[test]
fn a_slow_save_without_mpi_is_no_hang() {
    if !in_software() {
        return;
    }
    let bench = Bench::new();
    let more = ["train.max_steps=5", "train.save_steps=4", "distributed.timeout=3"];
    let Some(job) = with_disk(&bench, &more, "checkpoint-4", ["slow", "1", "500"]) else {
        return;
    };
    until_saving(&bench, "checkpoint-4");
    let begun = Instant::now();
    while !bench.path("out/checkpoint-4").exists() && begun.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let took = begun.elapsed();
    let (text, codes) = all(job);
    println!("{took:?}");
    assert_eq!(codes, [Some(0); 3], "{text}");
    // Rank 2 waits for 4 s more than the limit.
    assert!(took > Duration::from_secs(7), "{took:?}");
}

/// Waits until the slow kernels of these processes have begun.
fn until_slow(bench: &Bench, processes: &[u32]) {
    let begun = Instant::now();
    for process in processes {
        while !bench.path(&format!("soft-slow-{process}")).exists() {
            assert!(begun.elapsed() < Duration::from_secs(60), "no kernel is slow");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// `srun torchrun ft train`: the ranks inherit the variables of MPI from the one process that `srun` started on each node.
#[test]
fn ranks_of_torchrun_do_not_take_inherited_variables_of_mpi() {
    if !has_gpus(2) {
        return;
    }
    let bench = Bench::new();
    let arguments = [&LONG[..], &SHORT].concat();
    let srun = |command: &mut Command| {
        command.envs([("PMI_RANK", "0"), ("PMI_SIZE", "2")]);
    };
    let job = start_with(&bench, &[arguments.clone(), arguments.clone()], 2, |_, command| {
        srun(command);
        command.env("TORCHELASTIC_RUN_ID", "none");
    });
    let (text, codes) = all(job);
    assert_eq!(codes, [Some(0); 2], "{text}");
    assert!(bench.path("out/final").exists());
    // `ft launch` removes them.
    fs::remove_dir_all(bench.path("out")).unwrap();
    let mut command = launcher(&bench, 2, &arguments);
    srun(&mut command);
    let out = wait(command.spawn().unwrap());
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
    assert!(bench.path("out/final").exists());
}

/// False for a process that has ended, also before its parent process has read the exit code.
fn runs(process: u32) -> bool {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let state = text.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !"ZX".contains(state))
}

#[test]
fn a_second_ctrl_c_at_the_launcher_leaves_no_process() {
    if !in_software() {
        return;
    }
    let bench = Bench::new();
    let mut command = launcher(&bench, 2, &LONG);
    // Both ranks hang for a minute in one of the first steps.
    command.env("SOFT_CUDA_SLOW", "5000");
    let mut job = command.spawn().unwrap();
    until_saved(&bench, &mut job);
    let ranks = ranks_of(&job);
    assert_eq!(ranks.len(), 2);
    until_slow(&bench, &ranks);
    signal(job.id(), "-INT");
    std::thread::sleep(Duration::from_secs(1));
    assert!(ranks.iter().all(|rank| runs(*rank)), "nothing hangs");
    signal(job.id(), "-INT");
    let begun = Instant::now();
    while job.try_wait().unwrap().is_none() || ranks.iter().any(|rank| runs(*rank)) {
        if begun.elapsed() > SOON {
            for process in ranks.iter().filter(|rank| runs(**rank)) {
                signal(*process, "-KILL");
            }
            panic!("a process is left: {}", said(&job.wait_with_output().unwrap()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let out = job.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(131), "{}", said(&out));
}
