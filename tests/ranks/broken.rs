//! Ranks that break down in a step, or that are not like the others: the job ends everywhere, with one message that names the rank.

use crate::bench::{Bench, said};
use crate::disk;
use crate::faults::{LONG, assert_once, go_on_with, until_saved};
use crate::job::{self, ranks_of, wait};
use crate::same_bits::{BASE, REWARDS};
use std::fmt::Write;
use std::fs;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// The job has ended since `begun`, with this message of rank 1; a resume goes on.
fn assert_ended(bench: &Bench, begun: Instant, out: &Output, message: &str, settings: &[&str]) {
    let text = said(out);
    assert!(!out.status.success(), "{text}");
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}: {text}",
        begun.elapsed()
    );
    assert_once(&text, "[rank 1 (host ");
    assert_once(&text, message);
    assert_once(&text, "the job ends; the newest checkpoint is valid");
    assert!(!text.contains("[rank 0") && !text.contains("is saved"), "{text}");
    let verified = bench.ft(&["runs", "verify", "out"]);
    assert!(verified.status.success(), "{}", said(&verified));
    go_on_with(bench, 2, settings);
}

/// The rows become longer and longer, so that each step needs more memory than those before; from a moment on one rank gets none.
#[test]
fn a_rank_that_gets_no_more_memory_in_a_step_ends_the_job() {
    let bench = Bench::new();
    let config = bench.path("model/config.json");
    let longer = fs::read_to_string(&config).unwrap();
    let longer = longer.replace("\"max_position_embeddings\": 512", "\"max_position_embeddings\": 8192");
    fs::write(&config, longer).unwrap();
    let mut rows = String::new();
    for row in 0..400 {
        let text = "a b ".repeat(4 + 2 * row);
        writeln!(
            rows,
            "{{\"messages\":[{{\"role\":\"user\",\"content\":\"{text}\"}},{{\"role\":\"assistant\",\"content\":\"{text}\"}}]}}"
        )
        .unwrap();
    }
    fs::write(bench.path("rows.jsonl"), rows).unwrap();
    let more = ["data.shuffle=false", "data.max_length=8192", "train.batch_size=1"];
    let mut job = job::start(&bench, &vec![[&LONG[..], &more].concat(); 3]);
    until_saved(&bench, &mut job);
    let rank = ranks_of(&job)[1].to_string();
    let limited = Command::new("prlimit").args(["--pid", &rank, "--data=1"]).status();
    assert!(limited.unwrap().success());
    let begun = Instant::now();
    let out = wait(job);
    let text = said(&out);
    println!("{text}");
    assert_ended(&bench, begun, &out, "out of memory: the system refused ", &more);
    assert!(
        text.contains("`ft plan --ranks 3`") && text.contains("--resume"),
        "{text}"
    );
}

/// In the computation, and in the thread that speaks to the other ranks.
#[test]
fn a_rank_that_panics_in_a_step_ends_the_job() {
    let Some(library) = disk::library() else { return };
    let preload = format!("LD_PRELOAD={}", library.display());
    for thread in ["ft", "ranks"] {
        let bench = Bench::new();
        let file = bench.path("now");
        let fails = format!("FT_CLOCK_FAILS={thread}:{}", file.display());
        let command = job::mpirun_but(&bench, &vec![LONG.to_vec(); 3], 1, &["env", &preload, &fails]);
        let mut job = job::begin(command);
        until_saved(&bench, &mut job);
        fs::write(file, "").unwrap();
        let begun = Instant::now();
        let out = wait(job);
        assert_ended(&bench, begun, &out, "bug in ft", &[]);
        if thread == "ft" {
            assert_eq!(out.status.code(), Some(70), "{}", said(&out));
        }
    }
}

/// The others wait for the rollout of rank 0: they take nothing else for it.
#[test]
fn a_rollout_that_is_not_finite_is_the_error_of_the_rank_that_makes_it() {
    let bench = Bench::new();
    let more = [
        "tune.method=full",
        "optimizer.learning_rate=1e15",
        "train.output_dir=out",
    ];
    let out = job::run(&bench, 2, &[&BASE[..], &REWARDS, &more].concat());
    let text = said(&out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert_once(&text, "the model's output is not finite");
    assert_once(&text, "[rank 0 (host ");
    assert!(!text.contains("[rank 1") && !text.contains("lost step"), "{text}");
}

/// Between the start of the ranks and the training.
#[test]
fn a_rank_that_cannot_begin_to_compute_says_why() {
    for rank in [0, 1] {
        let bench = Bench::new();
        let command = job::mpirun_but(&bench, &vec![LONG.to_vec(); 2], rank, &["env", "FT_CPU=nonsense"]);
        let out = wait(job::begin(command));
        let text = said(&out);
        assert_eq!(out.status.code(), Some(1), "{text}");
        assert_once(&text, "this set of CPU operations does not exist");
        assert_once(&text, &format!("[rank {rank} (host "));
        assert!(!text.contains("MPI_ABORT"), "{text}");
        assert!(!bench.path("out").exists(), "a refused run leaves no trace");
    }
}

#[test]
fn a_rank_with_other_instructions_or_another_program_is_refused() {
    let bench = Bench::new();
    let program = fs::read(env!("CARGO_BIN_EXE_ft")).unwrap();
    // Another program to its hash, though it does the same.
    fs::write(bench.path("other"), [&program[..], b"x"].concat()).unwrap();
    let made = Command::new("chmod").arg("755").arg(bench.path("other")).status();
    assert!(made.unwrap().success());
    let cases: [(&[&str], &str); 2] = [
        (
            &["env", "FT_CPU=portable"],
            "rank 2: CPU instructions: portable instead of ",
        ),
        (
            &["sh", "-c", "shift; exec ./other \"$@\"", "sh"],
            "rank 2: the program file, by its hash: ",
        ),
    ];
    for (before, message) in cases {
        let command = job::mpirun_but(&bench, &vec![LONG.to_vec(); 3], 2, before);
        let out = wait(job::begin(command));
        let text = said(&out);
        assert_eq!(out.status.code(), Some(2), "{text}");
        assert_once(&text, message);
        assert_once(&text, "the ranks do not run the same training");
        assert!(!text.contains("rank 1:"), "{text}");
        assert!(!bench.path("out").exists(), "a refused run leaves no trace");
    }
}
