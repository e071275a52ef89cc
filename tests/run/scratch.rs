//! Temporary files of commands that are stopped or killed: in a run directory, and beside the stored outputs of a teacher.

use crate::bench::{Bench, copy_all, files, goldens, said};
use ft::base::lock::{LockWords, RunLock};
use ft::base::staging::ScratchDirectory;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};

/// Temporary entries of the run.
fn temporary(bench: &Bench) -> Vec<PathBuf> {
    let entries = fs::read_dir(bench.path("run")).unwrap().map(|e| e.unwrap().path());
    entries
        .filter(|path| path.to_string_lossy().contains(".tmp-"))
        .collect()
}

/// A chat with the model of a checkpoint, which waits for its first line; its written model is there.
fn chat(bench: &Bench) -> (Child, ChildStdin, PathBuf) {
    let before = temporary(bench);
    let mut child = bench
        .command(&["generate", "--model", "run/checkpoint-2", "--chat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let input = child.stdin.take().unwrap();
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let is_written = |path: &PathBuf| !before.contains(path) && path.join("model/config.json").exists();
        if let Some(written) = temporary(bench).into_iter().find(is_written) {
            return (child, input, written);
        }
        assert!(child.try_wait().unwrap().is_none(), "the chat has ended");
        assert!(Instant::now() < until, "no model was written");
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// Rows C1, C10, S3.
#[test]
fn a_model_written_from_a_checkpoint_leaves_the_run_directory_with_its_process() {
    let bench = Bench::new();
    let run = ["train.output_dir=run", "train.save_steps=2"];
    bench.train(&[&run[..], &["train.max_steps=2"]].concat());
    // Ctrl-C while it is in use.
    let (mut child, _input, _) = chat(&bench);
    // SAFETY: the process is a child of this test and was not waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    assert!(!child.wait().unwrap().success());
    assert!(temporary(&bench).is_empty(), "{:?}", temporary(&bench));
    // Killed before it has read the model: a resume removes it, and leaves that of a process that works.
    let left = (0..20).find_map(|_| {
        let (mut killed, _input, left) = chat(&bench);
        killed.kill().unwrap();
        killed.wait().unwrap();
        left.exists().then_some(left)
    });
    let left = left.expect("20 processes have read their model before they were killed");
    let used = ScratchDirectory::beside(&bench.path("run/checkpoint-2")).unwrap();
    let resume = [
        &["train", "--recipe", "r.toml", "--resume", "train.max_steps=3"],
        &run[..],
    ]
    .concat();
    let out = bench.ft(&resume);
    assert!(out.status.success(), "{}", said(&out));
    let name = left.file_name().unwrap().to_string_lossy().into_owned();
    assert!(said(&out).contains(&name), "{}", said(&out));
    assert_eq!(temporary(&bench), [used.path()]);
    drop(used);
    assert!(temporary(&bench).is_empty(), "{:?}", temporary(&bench));
}

/// Rows C1, C10.
#[test]
fn stored_outputs_go_on_after_a_kill_and_are_not_written_by_two_processes() {
    let bench = Bench::new();
    copy_all(&goldens().join("training/models/qwen3"), &bench.path("teacher"));
    copy_all(&goldens().join("tokenizers/chat"), &bench.path("teacher"));
    let arguments = [
        "distill",
        "cache",
        "--json",
        "--recipe",
        "r.toml",
        "--out",
        "out",
        "train.stage=distill",
        "distill.teacher=teacher",
    ];
    let first = bench.ft(&arguments);
    assert!(first.status.success(), "{}", said(&first));
    let whole = files(&bench.path("out"));
    // Killed within a file, with whole ones before it.
    fs::remove_file(bench.path("out/cache.json")).unwrap();
    fs::write(bench.path("out/rows-00000.safetensors.tmp-77"), "half").unwrap();
    fs::create_dir(bench.path("out/teacher")).unwrap();
    // Another process works there.
    let words = LockWords { busy: "", instead: "" };
    let held = RunLock::acquire_as(&bench.path("out"), words).unwrap();
    let before = files(&bench.path("out"));
    let refused = bench.ft(&arguments);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        said(&refused).contains("another `ft distill cache` is in progress"),
        "{}",
        said(&refused)
    );
    assert!(files(&bench.path("out")) == before && bench.path("out/teacher").exists());
    held.abandon().unwrap();
    let again = bench.ft(&arguments);
    assert!(again.status.success(), "{}", said(&again));
    let report: serde_json::Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!(report["found"], 1);
    assert!(files(&bench.path("out")) == whole && !bench.path("out/teacher").exists());
}
