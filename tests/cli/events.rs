//! The event file of a run (`train.report_to`): written while the run goes on, and without a number twice after a kill.

use super::{Path, ft, text};
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The newest event file in a directory and its records, each with its length and checksums. Those before it have a header.
fn records(dir: &Path) -> (String, Vec<Vec<u8>>) {
    let entries = fs::read_dir(dir).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.contains("tfevents")).collect();
    names.sort();
    let read = |name: &String| {
        let bytes = fs::read(dir.join(name)).unwrap();
        let (mut rest, mut all) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let (record, after) = rest.split_at(length + 16);
            all.push(record.to_vec());
            rest = after;
        }
        all
    };
    let last = names.pop().unwrap();
    assert!(names.iter().all(|name| read(name).len() == 1), "{names:?}");
    let all = read(&last);
    (last, all)
}

#[test]
fn an_event_file_follows_the_run_and_survives_a_kill() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let place = format!("train.output_dir={}", run.display());
    let arguments = |more: &[&'static str]| -> Vec<String> {
        let fixed = [
            "train",
            "recipes/quickstart.toml",
            "train.batch_size=1",
            "train.save_steps=2",
            "train.eval_steps=4",
            "train.predict_with_generate=false",
            "train.sample_prompts=[]",
            &place,
        ];
        fixed.iter().chain(more).map(|text| text.to_string()).collect()
    };
    let call = |more: &[&'static str]| {
        let arguments = arguments(more);
        let out = ft(root, &arguments.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(out.status.success(), "{}", text(&out.stderr));
    };
    let mut child = Command::new(env!("CARGO_BIN_EXE_ft"))
        .args(arguments(&["train.report_to=tensorboard", "train.max_steps=100000"]))
        .current_dir(root)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while !run.join("checkpoint-6").exists() {
        assert!(begun.elapsed().as_secs() < 120 && child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let (first, written) = records(&run);
    assert!(written.len() > 8, "{} records while it ran", written.len());
    call(&["train.report_to=tensorboard", "train.max_steps=9", "--resume"]);
    let (second, live) = records(&run);
    // TensorBoard reads files in the order of their names.
    assert!(second > first, "{first} {second}");
    // A header and a start, then the records that an export makes of the metrics.
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert_eq!(live.len() - 2, metrics.lines().count());
    let exported = ft(
        dir.path(),
        &["runs", "export", "run", "--to", "tensorboard", "--out", "logs"],
    );
    assert!(exported.status.success(), "{}", text(&exported.stderr));
    assert!(live[2..] == records(&dir.path().join("logs/run")).1[1..]);
    // `--overwrite` removes the files with the run, and a run without the key writes none.
    call(&["train.max_steps=1", "--overwrite"]);
    let mut names = fs::read_dir(&run).unwrap().flatten().map(|entry| entry.file_name());
    assert!(!names.any(|name| name.to_string_lossy().contains("tfevents")));
}
