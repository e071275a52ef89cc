//! Ranks with GPUs that NCCL connects, started as `torchrun` and `ft launch` start them: the bits of one rank, and failures.
//!
//! `tools/soft-cuda/run.sh` runs them on GPUs in software, with a stand-in for NCCL. Real GPUs: only jobs that have one for each rank.

use crate::bench::{Bench, said};
use crate::gpus::{BASE, WIDE, assert_same_checkpoints, in_software};
use crate::job::{ranks_of, signal, wait};
use crate::same::{assert_same_final, assert_same_lines};
use std::fs;
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A run that does not end by itself in time, and prints little.
pub const LONG: [&str; 8] = [
    "model.device=auto",
    "tune.method=lora",
    "train.max_steps=100000",
    "train.logging_steps=100000",
    "train.gradient_accumulation_steps=3",
    "train.save_steps=2",
    "train.output_dir=out",
    "schedule.warmup_steps=0",
];

/// False, with a message, if there are too few GPUs.
pub fn has_gpus(needed: usize) -> bool {
    let enough = in_software() || ft::ops::device::gpus().is_ok_and(|gpus| gpus.len() >= needed);
    if !enough {
        eprintln!("skipped: fewer than {needed} GPUs");
    }
    enough
}

/// A command that sees `gpus` GPUs in software, and leaves no files of NCCL.
pub fn on_gpus(mut command: Command, bench: &Bench, gpus: usize) -> Command {
    if in_software() {
        let numbers: Vec<String> = (0..gpus).map(|gpu| gpu.to_string()).collect();
        command
            .env("SOFT_CUDA_DEVICES", gpus.to_string())
            .env("CUDA_VISIBLE_DEVICES", numbers.join(","));
    }
    command.env("TMPDIR", bench.dir.path());
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// `MASTER_PORT`: the next one is free.
pub fn master_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port() - 1
}

/// A rank of a job, with the variables of `torchrun`.
pub fn rank(bench: &Bench, (rank, size): (usize, usize), port: u16, arguments: &[&str]) -> Command {
    let first = ["--threads", "1", "train", "--recipe", "r.toml"];
    let mut command = bench.command(&[&first[..], arguments].concat());
    command.envs([
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", size.to_string()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", port.to_string()),
        ("FT_JOIN_TIMEOUT", "60".into()),
    ]);
    command
}

/// A job with one list of arguments for each rank, on `gpus` GPUs.
pub fn start(bench: &Bench, ranks: &[Vec<&str>], gpus: usize) -> Vec<Child> {
    start_with(bench, ranks, gpus, |_, _| ())
}

/// As `start`; `change` gets the number and the command of each rank.
pub fn start_with(bench: &Bench, ranks: &[Vec<&str>], gpus: usize, change: impl Fn(usize, &mut Command)) -> Vec<Child> {
    let port = master_port();
    let start = |(number, arguments): (usize, &Vec<&str>)| {
        let command = rank(bench, (number, ranks.len()), port, arguments);
        let mut command = on_gpus(command, bench, gpus);
        change(number, &mut command);
        command.spawn().unwrap()
    };
    ranks.iter().enumerate().map(start).collect()
}

/// The output of all ranks of a job, and their exit codes.
pub fn all(job: Vec<Child>) -> (String, Vec<Option<i32>>) {
    let ended: Vec<Output> = job.into_iter().map(wait).collect();
    let text = ended.iter().map(said).collect();
    (text, ended.iter().map(|out| out.status.code()).collect())
}

/// A job of `ft launch` without `mpirun`.
pub fn launch(bench: &Bench, size: usize, arguments: &[&str]) -> Child {
    launcher(bench, size, arguments).spawn().unwrap()
}

pub fn launcher(bench: &Bench, size: usize, arguments: &[&str]) -> Command {
    let number = size.to_string();
    let first = [
        "--threads",
        "1",
        "launch",
        "-n",
        &number,
        "--engine",
        "nccl",
        "train",
        "--recipe",
        "r.toml",
    ];
    let command = bench.command(&[&first[..], arguments].concat());
    on_gpus(command, bench, size)
}

pub fn assert_once(text: &str, message: &str) {
    assert_eq!(text.matches(message).count(), 1, "{message} in:\n{text}");
}

/// Trains into `out` and renames it, because checkpoints contain the name of their run.
fn train(bench: &Bench, size: usize, settings: &[&str], name: &str) {
    let given = |own: &&str| {
        settings
            .iter()
            .any(|more| more.split('=').next() == own.split('=').next())
    };
    let mut arguments: Vec<&str> = BASE.iter().copied().filter(|own| !given(own)).collect();
    arguments.extend(settings);
    arguments.extend(["model.device=auto", "train.output_dir=out"]);
    let (text, codes) = all(start(bench, &vec![arguments; size], size));
    assert!(
        codes.iter().all(|code| *code == Some(0)),
        "{size} ranks, {settings:?}\n{text}"
    );
    fs::rename(bench.path("out"), bench.path(name)).unwrap();
}

/// Compares runs on two and three ranks with that on one.
fn check(settings: &[&str]) {
    let bench = Bench::new();
    train(&bench, 1, settings, "one");
    for size in [2, 3] {
        if !has_gpus(size) {
            return;
        }
        let name = format!("of-{size}");
        train(&bench, size, settings, &name);
        assert_same_lines(&bench, "one", &name);
        assert_same_final(&bench, "one", &name);
        assert_same_checkpoints(&bench, "one", &name, 0);
    }
}

#[test]
fn full_training_has_the_bits_of_one_rank() {
    check(&[&WIDE[..], &["tune.method=full", "model.dtype=bf16"]].concat());
}

#[test]
fn adapters_have_the_bits_of_one_rank() {
    check(&["tune.method=lora", "tune.lora.r=4", "tune.lora.lora_dropout=0.1"]);
}

/// Waits until the run has this checkpoint.
pub fn until_saved(bench: &Bench, job: &mut Child) {
    let begun = Instant::now();
    while !bench.path("out/checkpoint-2/manifest.json").exists() {
        assert!(job.try_wait().unwrap().is_none(), "the job has ended");
        assert!(begun.elapsed() < Duration::from_secs(60), "no checkpoint");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_killed_rank_ends_the_job_and_is_named() {
    if !has_gpus(3) {
        return;
    }
    let bench = Bench::new();
    kill_one(&bench, false);
    // The newest checkpoint is valid: one rank goes on with it.
    let on = [&LONG[..], &["train.max_steps=3", "train.save_steps=0", "--resume"]].concat();
    let newest = fs::read_dir(bench.path("out")).unwrap().flatten();
    let newest = newest.filter_map(|e| e.file_name().to_str()?.strip_prefix("checkpoint-")?.parse::<u64>().ok());
    let end = format!("train.max_steps={}", newest.max().unwrap() + 1);
    let (text, codes) = all(start(&bench, &[[&on[..], &[&end]].concat()], 1));
    assert_eq!(codes, [Some(0)], "{text}");
    assert!(bench.path("out/final").exists());
}

/// Between GPUs of one machine NCCL itself does not see that a process has ended.
#[test]
fn a_killed_rank_is_found_also_if_nccl_does_not_see_it() {
    if in_software() {
        kill_one(&Bench::new(), true);
    }
}

fn kill_one(bench: &Bench, silent: bool) {
    let mut command = launcher(bench, 3, &LONG);
    if silent {
        command.env("SOFT_NCCL_SILENT", "1");
    }
    let mut job = command.spawn().unwrap();
    until_saved(bench, &mut job);
    let ranks = ranks_of(&job);
    assert_eq!(ranks.len(), 3);
    signal(ranks[2], "-KILL");
    let begun = Instant::now();
    let out = wait(job);
    assert!(begun.elapsed() < Duration::from_secs(9), "{:?}", begun.elapsed());
    let text = said(&out);
    assert_eq!(out.status.code(), Some(128 + 9), "{text}");
    assert_once(&text, "rank 2 was ended by signal 9");
    // From each of the other two.
    assert_eq!(text.matches("the connection to rank 2 (host ").count(), 2, "{text}");
    for rank in ranks {
        assert!(
            !fs::exists(format!("/proc/{rank}/fd")).unwrap(),
            "rank {rank} still runs"
        );
    }
}

#[test]
fn the_launcher_of_ft_lets_the_ranks_save() {
    if !has_gpus(2) {
        return;
    }
    let bench = Bench::new();
    let mut job = launch(&bench, 2, &LONG);
    until_saved(&bench, &mut job);
    signal(job.id(), "-TERM");
    let out = wait(job);
    let text = said(&out);
    assert_eq!(out.status.code(), Some(128 + 10), "{text}");
    assert_once(&text, "stopped by a signal; the state after step");
}

#[test]
fn a_rank_that_hangs_is_named_after_the_time_limit() {
    if !has_gpus(2) {
        return;
    }
    let bench = Bench::new();
    let arguments = [&LONG[..], &["distributed.timeout=2"]].concat();
    let mut job = start(&bench, &[arguments.clone(), arguments], 2);
    until_saved(&bench, &mut job[0]);
    signal(job[1].id(), "-STOP");
    let begun = Instant::now();
    let mut hangs = job.remove(1);
    let out = wait(job.remove(0));
    hangs.kill().unwrap();
    hangs.wait().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let text = said(&out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    // Rank 0 has met it before the exchange or not.
    let (waits, exchanges) = ("has waited 2 s for rank 1", "an exchange over NCCL with rank 1 (host ");
    assert_eq!(
        text.matches(waits).count() + text.matches(exchanges).count(),
        1,
        "{text}"
    );
}

#[test]
fn an_error_of_one_rank_names_it() {
    if !has_gpus(2) {
        return;
    }
    let bench = Bench::new();
    let wrong = [&LONG[..], &["data.train=missing.jsonl"]].concat();
    let (text, codes) = all(start(&bench, &[LONG.to_vec(), wrong], 2));
    assert_eq!(codes, [Some(1); 2], "{text}");
    assert_once(&text, "missing.jsonl");
    assert_once(&text, "[rank 1 (host ");
    assert!(!bench.path("out").exists(), "a refused run leaves no trace");
}

#[test]
fn ranks_that_cannot_meet_say_why() {
    let bench = Bench::new();
    let of = |place: (usize, usize), port: u16, seconds: &str| {
        let mut command = rank(&bench, place, port, &LONG);
        command.env("FT_JOIN_TIMEOUT", seconds);
        on_gpus(command, &bench, 2)
    };
    // Rank 0 thinks that it is one of three.
    let port = master_port();
    let job = vec![
        of((0, 3), port, "60").spawn().unwrap(),
        of((1, 2), port, "60").spawn().unwrap(),
    ];
    let (text, codes) = all(job);
    assert_eq!(codes, [Some(2); 2], "{text}");
    assert_eq!(
        text.matches("the ranks do not agree on their number").count(),
        2,
        "{text}"
    );
    assert!(
        text.contains("rank 1 (host ") && text.contains(" is one of 2, rank 0 (host "),
        "{text}"
    );
    // Nobody listens.
    let port = master_port();
    let (text, codes) = all(vec![of((1, 2), port, "1").spawn().unwrap()]);
    assert_eq!(codes, [Some(1)], "{text}");
    assert_once(&text, "rank 1 cannot reach rank 0");
    assert!(
        text.contains(&format!("127.0.0.1:{}", port + 1)) && text.contains("MASTER_PORT"),
        "{text}"
    );
    // Nobody comes.
    let (text, codes) = all(vec![of((0, 2), port, "1").spawn().unwrap()]);
    assert_eq!(codes, [Some(1)], "{text}");
    assert_once(&text, "rank 1 of 2 missing after 1 s");
    // One of three does not: the other two say so, with one exit code.
    let port = master_port();
    let two = [0, 1].map(|number| of((number, 3), port, "2").spawn().unwrap());
    let (text, codes) = all(two.into());
    assert_eq!(codes, [Some(1); 2], "{text}");
    assert_eq!(text.matches("rank 2 of 3 missing after 2 s").count(), 2, "{text}");
    // Values that make no sense.
    let (text, codes) = all(vec![of((2, 2), port, "1").spawn().unwrap()]);
    assert_eq!(codes, [Some(2)], "{text}");
    assert_once(&text, "less than `WORLD_SIZE`, which is 2");
    let mut wrong = of((1, 2), port, "1");
    wrong.env("MASTER_PORT", "http");
    let (text, codes) = all(vec![wrong.spawn().unwrap()]);
    assert_eq!(codes, [Some(2)], "{text}");
    assert_once(&text, "`MASTER_PORT`");
    let (text, codes) = all(vec![of((1, 2), port, "18446744073709551615").spawn().unwrap()]);
    assert_eq!(codes, [Some(2)], "{text}");
    assert_once(&text, "a number of seconds, at most 86400");
    // One of them is missing: the process must not train alone.
    let mut wrong = of((1, 2), port, "1");
    wrong.env_remove("RANK");
    let (text, codes) = all(vec![wrong.spawn().unwrap()]);
    assert_eq!(codes, [Some(2)], "{text}");
    assert_once(&text, "the launcher has not set `RANK`");
    assert!(!bench.path("out").exists());
}

#[test]
fn ranks_without_a_gpu_each_are_refused() {
    if !in_software() {
        return;
    }
    let bench = Bench::new();
    let refused = |device: &str, message: &str| {
        let device = format!("model.device={device}");
        let arguments = [&LONG[1..], &[&device]].concat();
        let (text, codes) = all(start(&bench, &[arguments.clone(), arguments], 1));
        assert!(codes.iter().all(|code| code.is_some_and(|code| code > 0)), "{text}");
        assert_once(&text, message);
    };
    refused("cpu", "ranks without MPI need a GPU each");
    refused("auto", "2 ranks and 1 GPU on host");
    refused("cuda:0", "rank 0 and rank 1 on host");
    // Also the third one, which has a GPU of its own, must not wait.
    let cuda = [&LONG[1..], &["model.device=cuda:0"]].concat();
    let job = start_with(&bench, &[cuda.clone(), cuda.clone(), cuda], 2, |number, command| {
        if number == 2 {
            command.env("CUDA_VISIBLE_DEVICES", "1");
        }
    });
    let (text, codes) = all(job);
    assert_eq!(codes, [Some(2); 3], "{text}");
    assert_once(&text, "each rank needs a GPU of its own without MPI");
}
