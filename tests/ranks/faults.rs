//! Failures: each ends the job on all ranks with one message, and nothing hangs.

use crate::bench::{Bench, copy_all, goldens, said};
use crate::job::{self, ranks_of, signal, wait};
use crate::parts::PARTS;
use std::io::Read;
use std::process::Child;
use std::time::{Duration, Instant};

const BASE: [&str; 4] = [
    "train.max_steps=6",
    "train.gradient_accumulation_steps=4",
    "train.batch_size=1",
    "train.output_dir=out",
];

/// A run that does not end by itself in time, and prints little: its messages are read when it has ended.
pub const LONG: [&str; 6] = [
    "train.max_steps=100000",
    "train.logging_steps=100000",
    "train.gradient_accumulation_steps=4",
    "train.save_steps=5",
    "train.output_dir=out",
    "schedule.warmup_steps=0",
];

/// Runs a job in which one rank has more arguments; returns its exit code and its messages.
fn with_other(bench: &Bench, size: usize, other: usize, more: &[&str]) -> (i32, String) {
    let mut ranks = vec![BASE.to_vec(); size];
    ranks[other].extend(more);
    let out = wait(job::start(bench, &ranks));
    (out.status.code().unwrap_or(-1), said(&out))
}

pub fn assert_once(text: &str, message: &str) {
    assert_eq!(text.matches(message).count(), 1, "{message} in:\n{text}");
}

/// Waits until the run has this checkpoint.
pub fn until_saved(bench: &Bench, job: &mut Child) {
    let begun = Instant::now();
    while !bench.path("out/checkpoint-5/manifest.json").exists() {
        if job.try_wait().unwrap().is_some() {
            let mut text = String::new();
            let _ = job.stderr.take().unwrap().read_to_string(&mut text);
            panic!("the job has ended: {text}");
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "no checkpoint");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Resumes the run for three steps.
pub fn go_on(bench: &Bench, size: usize) {
    go_on_with(bench, size, &[]);
}

/// As `go_on`, with the settings of the run beside those of `LONG`.
pub fn go_on_with(bench: &Bench, size: usize, settings: &[&str]) {
    let names = std::fs::read_dir(bench.path("out")).unwrap().flatten();
    let steps = names.filter_map(|e| e.file_name().to_str()?.strip_prefix("checkpoint-")?.parse::<u64>().ok());
    let end = format!("train.max_steps={}", steps.max().unwrap() + 3);
    job::train(
        bench,
        size,
        &[&LONG[..], settings, &[&end, "train.save_steps=0", "--resume"]].concat(),
    );
    assert!(bench.path("out/final").exists());
}

#[test]
fn ranks_that_run_something_else_are_refused() {
    let bench = Bench::new();
    let (code, text) = with_other(&bench, 3, 2, &["train.seed=7"]);
    assert_eq!(code, 2, "{text}");
    assert_once(&text, "rank 2: train.seed: 7 instead of 42");
    let rows = std::fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    let fewer: Vec<&str> = rows.lines().skip(1).collect();
    std::fs::write(bench.path("fewer.jsonl"), fewer.join("\n")).unwrap();
    let (code, text) = with_other(&bench, 2, 1, &["data.train=fewer.jsonl"]);
    assert_eq!(code, 2, "{text}");
    assert_once(&text, "rank 1: training rows:");
    assert!(!bench.path("out").exists(), "a refused run leaves no trace");
}

#[test]
fn an_error_of_one_rank_names_it() {
    let bench = Bench::new();
    let (code, text) = with_other(&bench, 3, 1, &["data.train=missing.jsonl"]);
    assert_eq!(code, 1, "{text}");
    assert_once(&text, "missing.jsonl");
    assert_once(&text, "[rank 1 (host ");
    let (code, text) = with_other(&bench, 2, 1, &["model.path=missing"]);
    assert_ne!(code, 0, "{text}");
    assert_once(&text, "[rank 1 (host ");
    // A mistake in its recipe too.
    let (code, text) = with_other(&bench, 2, 1, &["train.sead=1"]);
    assert_eq!(code, 2, "{text}");
    assert_once(&text, "[rank 1 (host ");
    assert!(!bench.path("out").exists());
}

#[test]
fn an_error_of_all_ranks_is_one_message() {
    let bench = Bench::new();
    let mut last = String::new();
    for (arguments, code, message) in [
        ("train.sead=1", 2, "train.sead"),
        ("train.gradient_accumulation_steps=2", 2, "2 with 3 ranks"),
        ("distributed.sequence=2", 2, "a divisor of 3"),
        ("memory.budget=1MB", 1, "does not fit"),
        ("optimizer.learning_rate=1e15", 1, "is not finite"),
    ] {
        let out = job::run(
            &bench,
            3,
            &[&BASE[..], &["train.save_steps=5", "tune.method=full", arguments]].concat(),
        );
        let text = said(&out);
        assert_eq!(out.status.code(), Some(code), "{text}");
        assert_once(&text, message);
        assert!(!text.contains("[rank"), "{text}");
        last = text;
    }
    // The state before the step that is not finite is saved.
    let names = std::fs::read_dir(bench.path("out")).unwrap().flatten();
    let names: Vec<String> = names
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    assert!(
        names.iter().any(|name| name.starts_with("checkpoint-")),
        "{names:?}\n{last}"
    );
    let out = bench.ft(&["runs", "verify", "out"]);
    assert!(out.status.success(), "{}", said(&out));
}

/// Two jobs cannot write one run.
#[test]
fn a_second_job_in_the_same_directory_is_refused() {
    let bench = Bench::new();
    let mut first = job::start(&bench, &vec![LONG.to_vec(); 2]);
    until_saved(&bench, &mut first);
    let second = job::run(&bench, 2, &[&LONG[..], &["--resume"]].concat());
    let text = said(&second);
    assert!(!second.status.success(), "{text}");
    assert_once(&text, "another run is in progress");
    assert!(first.try_wait().unwrap().is_none(), "the first job goes on");
    signal(ranks_of(&first)[0], "-USR1");
    assert_eq!(wait(first).status.code(), Some(128 + 10));
    go_on(&bench, 2);
}

#[test]
fn a_killed_rank_ends_the_job_and_the_checkpoint_is_valid() {
    let bench = Bench::new();
    for (size, form) in [(2, "distributed.checkpoint=one"), (4, PARTS)] {
        let arguments = [&LONG[..], &[form]].concat();
        let mut job = job::start(&bench, &vec![arguments; size]);
        until_saved(&bench, &mut job);
        let ranks = ranks_of(&job);
        assert_eq!(ranks.len(), size);
        signal(ranks[size - 1], "-KILL");
        let begun = Instant::now();
        let out = wait(job);
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        assert!(!out.status.success());
        let text = said(&out);
        assert!(text.contains("signal 9"), "{text}");
        // Nobody can save any more.
        assert!(!text.contains("is saved"), "{text}");
        // Goes on where the newest checkpoint is, with another number of ranks.
        go_on(&bench, 3);
        std::fs::remove_dir_all(bench.path("out")).unwrap();
    }
}

#[test]
fn a_rank_that_hangs_ends_the_job_after_the_time_limit() {
    let bench = Bench::new();
    let arguments = [&LONG[..], &["distributed.timeout=2"]].concat();
    let mut job = job::start(&bench, &vec![arguments; 3]);
    until_saved(&bench, &mut job);
    let ranks = ranks_of(&job);
    signal(ranks[1], "-STOP");
    let begun = Instant::now();
    let out = wait(job);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    let text = said(&out);
    assert!(
        text.contains("rank 0 (host ") && text.contains("has waited 2 s for rank 1"),
        "{text}"
    );
}

#[test]
fn a_signal_saves_the_state_of_all_ranks() {
    for form in ["distributed.checkpoint=one", PARTS] {
        let bench = Bench::new();
        let mut job = job::start(&bench, &vec![[&LONG[..], &[form]].concat(); 2]);
        until_saved(&bench, &mut job);
        // To one rank only, or to `mpirun`, which passes it to all: all stop after the same step.
        let receiver = if form == PARTS { job.id() } else { ranks_of(&job)[1] };
        signal(receiver, "-USR1");
        let out = wait(job);
        let text = said(&out);
        assert_eq!(out.status.code(), Some(128 + 10), "{text}");
        assert_once(&text, "stopped by a signal; the state after step");
        // Often the checkpoint that was waited for, else a later one.
        let (_, step) = text.split_once("the state after step ").unwrap();
        let step: u64 = step.split_once(' ').unwrap().0.parse().unwrap();
        let saved = bench.path(&format!("out/checkpoint-{step}/manifest.json"));
        assert!(step >= 5 && saved.exists(), "{text}");
        go_on(&bench, 2);
    }
}

/// A signal to one rank ends an evaluation on all of them, also if they collect layers from each other in it. The rank that got it
/// does not wait until the others have evaluated all of their rows.
#[test]
fn a_signal_in_an_evaluation_saves_the_state_of_all_ranks() {
    let answer = "the cat ran home blue ".repeat(1500);
    let long = format!(
        "{{\"messages\": [{{\"role\": \"user\", \"content\": \"say\"}}, {{\"role\": \"assistant\", \"content\": \"{answer}\"}}]}}\n"
    );
    // A rank has so few of the long rows that the ranks meet at the end only.
    for (weights, receiver, few) in [
        ("distributed.weights=replicated", 0, false),
        ("distributed.weights=replicated", 1, true),
        ("distributed.weights=sharded", 1, false),
    ] {
        let bench = Bench::new();
        let rows = std::fs::read_to_string(bench.path("rows.jsonl")).unwrap();
        let held = if few { long.repeat(12) } else { rows.repeat(300) };
        std::fs::write(bench.path("held.jsonl"), held).unwrap();
        let held = [
            "data.eval=held.jsonl",
            "train.batch_size=1",
            "distributed.timeout=2",
            "data.max_length=6000",
            weights,
        ];
        let mut job = job::start(&bench, &vec![[&LONG[..], &held].concat(); 2]);
        let begun = Instant::now();
        let events = || std::fs::read_to_string(bench.path("out/events.jsonl")).unwrap_or_default();
        while !events().contains("\"start\"") {
            assert!(job.try_wait().unwrap().is_none(), "the job has ended");
            assert!(begun.elapsed() < Duration::from_secs(60), "no start");
            std::thread::sleep(Duration::from_millis(5));
        }
        // The evaluation before the first step takes seconds.
        std::thread::sleep(Duration::from_millis(300));
        signal(ranks_of(&job)[receiver], "-USR1");
        let out = wait(job);
        let text = said(&out);
        assert_eq!(out.status.code(), Some(128 + 10), "{weights}\n{text}");
        assert_once(&text, "stopped by a signal; the state after step 0 is saved");
        assert!(
            bench.path("out/checkpoint-0/manifest.json").exists(),
            "{weights}\n{text}"
        );
        let metrics = std::fs::read_to_string(bench.path("out/metrics.jsonl")).unwrap_or_default();
        assert!(!metrics.contains("eval_loss"), "{weights}: it ran to its end");
    }
}

/// Each process is alone for the MPI of this program.
#[test]
fn ranks_of_the_launcher_of_another_mpi_are_refused() {
    let bench = Bench::new();
    let ranks: Vec<Child> = (0..2).map(|rank| job::of_other_mpi(&bench, rank, 2, &BASE)).collect();
    let mut texts = Vec::new();
    for rank in ranks {
        let out = wait(rank);
        let text = said(&out);
        assert_eq!(out.status.code(), Some(1), "{text}");
        assert!(!text.contains("MPI_ABORT"), "{text}");
        texts.push(text);
    }
    assert_once(&texts[0], "the launcher and the MPI library do not fit together");
    assert_once(&texts[0], "2 ranks of the launcher, 1 of MPI");
    assert!(!bench.path("out").exists(), "a refused run leaves no trace");
}

/// Every rank makes all answers of the student. A signal within them does not end one rank before the others.
#[test]
fn a_signal_while_a_student_answers_saves_the_state_of_all_ranks() {
    let bench = Bench::new();
    copy_all(&goldens().join("training/models/qwen3"), &bench.path("teacher"));
    copy_all(&goldens().join("tokenizers/chat"), &bench.path("teacher"));
    // The answers are long, and cut before they are trained: a step makes answers most of its time.
    let student = [
        "train.stage=distill",
        "distill.teacher=teacher",
        "distill.lmbda=1",
        "distill.max_new_tokens=480",
        "data.max_length=128",
        "train.batch_size=1",
    ];
    let mut job = job::start(&bench, &vec![[&LONG[..], &student].concat(); 2]);
    until_saved(&bench, &mut job);
    std::thread::sleep(Duration::from_millis(50));
    signal(ranks_of(&job)[1], "-USR1");
    let out = wait(job);
    let text = said(&out);
    assert_eq!(out.status.code(), Some(128 + 10), "{text}");
    assert_once(&text, "stopped by a signal; the state after step");
    let (_, step) = text.split_once("the state after step ").unwrap();
    let step = step.split_once(' ').unwrap().0;
    assert!(
        bench.path(&format!("out/checkpoint-{step}/manifest.json")).exists(),
        "{text}"
    );
}

#[test]
fn the_launcher_of_ft_lets_the_ranks_save() {
    let bench = Bench::new();
    let mut job = job::launch(&bench, 2, &LONG);
    until_saved(&bench, &mut job);
    signal(job.id(), "-TERM");
    let out = wait(job);
    let text = said(&out);
    assert_eq!(out.status.code(), Some(128 + 10), "{text}");
    assert_once(&text, "stopped by a signal; the state after step");
    go_on(&bench, 1);
    // Nothing else runs on several ranks.
    let out = bench.ft(&["launch", "-n", "2", "plan", "--recipe", "r.toml"]);
    assert_eq!(out.status.code(), Some(2), "{}", said(&out));
}

/// `final/` cannot be written on rank 0: the others take part in a save of the state after the last step.
#[test]
fn a_result_that_rank_0_cannot_write_is_not_lost() {
    for more in ["distributed.checkpoint=one", PARTS, "train.ema_decay=0.9"] {
        let bench = Bench::new();
        let settings = [more, "tune.method=full", "train.max_steps=400", "train.save_steps=1000"];
        let arguments = [&LONG[..], &settings].concat();
        let mut job = job::start(&bench, &vec![arguments.clone(); 2]);
        let begun = Instant::now();
        while bench.steps("out").is_empty() {
            assert!(job.try_wait().unwrap().is_none(), "the job has ended");
            assert!(begun.elapsed() < Duration::from_secs(60), "no step");
            std::thread::sleep(Duration::from_millis(2));
        }
        // After the rehearsal of the export.
        std::fs::write(bench.path("out/final"), "").unwrap();
        let out = wait(job);
        let text = said(&out);
        assert_eq!(out.status.code(), Some(1), "{more}\n{text}");
        assert_once(&text, "a file has its name");
        assert_once(&text, "the state after step 400 is saved: `--resume` writes `final/`");
        assert!(
            bench.path("out/checkpoint-400/manifest.json").exists(),
            "{more}\n{text}"
        );
        std::fs::remove_file(bench.path("out/final")).unwrap();
        job::train(&bench, 2, &[&arguments[..], &["--resume"]].concat());
        assert!(bench.path("out/final").is_dir(), "{more}");
    }
}
