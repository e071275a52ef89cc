//! Signals where no step runs: in a save, while rows are prepared, in commands that write a directory. The process ends soon with the
//! code of the signal, and leaves nothing incomplete. An operation of the disk is held up meanwhile.

use crate::bench::{Bench, copy_all, files, goldens, said};
use crate::disk::{Fault, on_disk};
use crate::patience::{ended, signal, until};
use crate::same::assert_same;
use crate::turn::turn;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// How long the disk is held.
const HELD: i32 = 2;
/// The longest time from the signal to the end: that of the disk, and of a machine that does other work.
const LIMIT: Duration = Duration::from_secs(10);

/// Signals with the exit code of a process that they stop.
const SIGNALS: [(&str, i32); 3] = [("-INT", 130), ("-TERM", 143), ("-USR1", 138)];

fn spawned(command: &mut Command) -> Child {
    let command = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Starts a command; the operation `at` of those on paths that begin with `place` takes a while. `None` without a C compiler.
fn held(bench: &Bench, words: &[&str], place: &str, at: usize) -> Option<Child> {
    let mut command = bench.command(words);
    on_disk(bench, &mut command, Fault::Stall(HELD), at)?;
    let root = bench.dir.path().canonicalize().unwrap().join(place);
    command.env("FT_DISK_ROOT", format!("{}*", root.display()));
    Some(spawned(&mut command))
}

/// Sends the `number`-th signal of this turn. The process ends in time, with the code of the signal.
fn stop(child: Child, number: usize, what: &str) -> Output {
    let (name, code) = SIGNALS[(turn() + number) % SIGNALS.len()];
    signal(&child, name);
    let out = ended(child, LIMIT, what);
    assert_eq!(out.status.code(), Some(code), "{what}, {name}\n{}", said(&out));
    out
}

/// The names in a directory that begin with `start`.
fn names(dir: &Path, start: &str) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    let names = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(start)).collect()
}

/// No file and directory below `dir` has a temporary name.
fn assert_nothing_temporary(dir: &Path) {
    for name in names(dir, "") {
        assert!(!name.contains(".tmp-"), "{} stays in {}", name, dir.display());
        if dir.join(&name).is_dir() {
            assert_nothing_temporary(&dir.join(name));
        }
    }
}

/// Row S3.
#[test]
fn a_signal_in_a_save_ends_the_run_with_that_checkpoint() {
    let bench = Bench::new();
    let base = [
        "tune.method=block",
        "tune.block.switch_every=1",
        "train.save_steps=2",
        "train.max_steps=4",
    ];
    let with = |more: &[&'static str]| [&["train", "--recipe", "r.toml"][..], &base, more].concat();
    bench.train(&[&base[..], &["train.output_dir=whole"]].concat());
    // The directory of the checkpoint is there, and some of its files.
    for (number, at) in [3, 9].into_iter().enumerate() {
        let _ = fs::remove_dir_all(bench.path("run"));
        let Some(child) = held(&bench, &with(&["train.output_dir=run"]), "run/checkpoint-2", at) else {
            return;
        };
        until("no save", || !names(&bench.path("run"), "checkpoint-2.tmp-").is_empty());
        stop(child, number, "a save");
        assert_eq!(bench.steps("run").len(), 2);
        assert!(bench.path("run/checkpoint-2/manifest.json").exists() && !bench.path("run/final").exists());
        assert_nothing_temporary(&bench.path("run"));
        let events = bench.lines("run/events.jsonl");
        assert!(events.last().unwrap().to_string().contains("signal"), "{events:?}");
        assert!(bench.ft(&["runs", "verify", "run"]).status.success());
        let resumed = bench.ft(&with(&["train.output_dir=run", "--resume"]));
        assert!(resumed.status.success(), "{}", said(&resumed));
        assert_same(&bench, "whole", "run");
    }
}

/// True if the process has a handler of this signal.
#[cfg(target_os = "linux")]
fn handles(child: &Child, signal: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Row S3.
#[test]
#[cfg(target_os = "linux")]
fn a_signal_while_rows_are_prepared_ends_the_program_and_leaves_nothing() {
    let bench = Bench::new();
    let rows = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    fs::write(bench.path("rows.jsonl"), rows.repeat(4000)).unwrap();
    for (number, words) in [
        &["train", "--recipe", "r.toml", "train.output_dir=run"][..],
        &["data", "r.toml", "--stats"],
    ]
    .into_iter()
    .enumerate()
    {
        let child = spawned(&mut bench.command(words));
        until("no handler", || handles(&child, 15));
        // 92 000 rows take seconds.
        std::thread::sleep(Duration::from_millis(300));
        let out = stop(child, number, "the preparation of rows");
        assert!(said(&out).contains("stopped"), "{words:?}\n{}", said(&out));
        assert!(out.stdout.is_empty() && !bench.path("run").exists(), "{words:?}");
        assert_nothing_temporary(bench.dir.path());
    }
}

/// Row S3.
#[test]
fn a_signal_in_a_command_that_writes_a_model_leaves_nothing() {
    let bench = Bench::new();
    let lora = ["tune.method=lora", "tune.lora.r=2", "train.max_steps=2"];
    bench.train(&[&lora[..], &["train.save_steps=2", "train.output_dir=run"]].concat());
    let commands: [&[&str]; 4] = [
        &["export", "run/checkpoint-2", "--out", "out"],
        &["export", "model", "--to", "gguf", "--out", "out"],
        &["merge", "--model", "model", "--adapter", "run/final", "--out", "out"],
        &["quantize", "--model", "model", "--to", "nf4", "--out", "out"],
    ];
    for (number, words) in commands.into_iter().enumerate() {
        let what = format!("{words:?}");
        // After the mark of the temporary directory.
        let Some(child) = held(&bench, words, "out", 7) else {
            return;
        };
        until(&what, || !names(bench.dir.path(), "out.tmp-").is_empty());
        std::thread::sleep(Duration::from_millis(100));
        stop(child, number, &what);
        assert!(!bench.path("out").exists(), "{what}");
        assert_nothing_temporary(bench.dir.path());
        let again = bench.ft(words);
        assert!(again.status.success() && bench.path("out").exists(), "{}", said(&again));
        fs::remove_dir_all(bench.path("out")).unwrap();
    }
}

/// Row S3.
#[test]
fn a_signal_while_outputs_of_a_teacher_are_stored_leaves_whole_files() {
    let bench = Bench::new();
    copy_all(&goldens().join("training/models/qwen3"), &bench.path("teacher"));
    copy_all(&goldens().join("tokenizers/chat"), &bench.path("teacher"));
    let row = |n: usize| {
        let answer = format!("The answer to question number {n} is {}, as was said before.", n * n);
        let messages = serde_json::json!([{"role": "user", "content": format!("Question {n}?")},
            {"role": "assistant", "content": answer}]);
        format!("{}\n", serde_json::json!({"messages": messages}))
    };
    fs::write(bench.path("many.jsonl"), (0..1200).map(row).collect::<String>()).unwrap();
    let words = |rows: &'static str| {
        let teacher = ["train.stage=distill", "distill.teacher=teacher", "--out", "out"];
        [
            &["distill", "cache", "--threads", "1", "--recipe", "r.toml", rows],
            &teacher[..],
        ]
        .concat()
    };
    // The teacher runs.
    let child = spawned(&mut bench.command(&words("data.train=many.jsonl")));
    until("no outputs", || bench.path("out/run.lock").exists());
    std::thread::sleep(Duration::from_millis(100));
    let out = stop(child, 0, "the teacher runs");
    assert!(said(&out).contains("the same command continues"), "{}", said(&out));
    assert!(!bench.path("out/cache.json").exists());
    assert_nothing_temporary(&bench.path("out"));

    // The first operation on the directory, before there is anything to keep; then the same command.
    fs::remove_dir_all(bench.path("out")).unwrap();
    let few = words("data.train=rows.jsonl");
    let whole = bench.ft(&few);
    assert!(whole.status.success(), "{}", said(&whole));
    let right = files(&bench.path("out"));
    fs::remove_dir_all(bench.path("out")).unwrap();
    let Some(child) = held(&bench, &few, "out", 2) else {
        return;
    };
    until("no directory", || bench.path("out").exists());
    std::thread::sleep(Duration::from_millis(100));
    stop(child, 1, "the lock of the directory");
    assert_nothing_temporary(bench.dir.path());
    let again = bench.ft(&few);
    assert!(again.status.success(), "{}", said(&again));
    assert!(files(&bench.path("out")) == right);
}
