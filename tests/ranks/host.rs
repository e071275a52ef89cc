//! Frozen weights that the ranks of a machine read from the same files.

use crate::bench::{Bench, files, said};
use crate::job;
use crate::same::{METHODS, assert_same};
use crate::same_bits::{BASE, assert_same_checkpoints, checkpoints, train};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const HOST: &str = "distributed.weights=host";
const BLOCK: [&str; 5] = [
    "tune.method=block",
    "tune.block.partition=module",
    "tune.block.switch_every=2",
    "model.dtype=bf16",
    "memory.frozen_weights=int8",
];

/// The scratch files that are in a run directory now, by their paths.
fn scratch(run: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut open = vec![run.to_path_buf()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                if name.starts_with("rank-") || ["trained", "drawn", "decoded"].contains(&&*name) {
                    open.push(entry.path());
                }
            } else if next != run && name.ends_with(".safetensors") || name == "codes.safetensors" {
                let path = entry.path();
                found.insert(path.strip_prefix(run).unwrap().to_string_lossy().into_owned());
            }
        }
    }
    found
}

/// As `train`, with `HOST`; returns the scratch files that were seen.
fn train_watched(bench: &Bench, size: usize, settings: &[&str], name: &str) -> BTreeSet<String> {
    let arguments = [&BASE[..], settings, &[HOST, "train.output_dir=out"]].concat();
    let mut child = job::start(bench, &vec![arguments; size]);
    let mut seen = BTreeSet::new();
    while child.try_wait().unwrap().is_none() {
        seen.append(&mut scratch(&bench.path("out")));
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let out = job::wait(child);
    assert!(out.status.success(), "{settings:?}\n{}", said(&out));
    let left = scratch(&bench.path("out"));
    assert!(left.is_empty(), "{left:?}");
    for entry in fs::read_dir(bench.path("out")).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        assert!(!name.starts_with("rank-") && name != "trained", "{name} is left");
    }
    fs::rename(bench.path("out"), bench.path(name)).unwrap();
    seen
}

#[test]
fn shared_files_have_the_bits_of_one_rank() {
    let lora = |format| [METHODS[4].1, &[format, "model.dtype=bf16"]].concat();
    for settings in [
        lora("memory.frozen_weights=nf4"),
        lora("memory.frozen_weights=int8"),
        BLOCK.to_vec(),
    ] {
        let bench = Bench::new();
        train(&bench, 1, &settings, "one");
        for size in 2..=3 {
            let name = format!("of-{size}");
            let seen = train_watched(&bench, size, &settings, &name);
            assert_same_checkpoints(&bench, "one", &name, &settings.concat());
            assert_same(&bench, "one", &name);
            assert!(seen.contains("codes.safetensors"), "{seen:?}");
            assert!(!seen.iter().any(|path| path.starts_with("rank-")), "{seen:?}");
            let trained = seen.iter().any(|path| path.starts_with("trained/"));
            assert_eq!(trained, settings == BLOCK, "{seen:?}");
        }
    }
}

/// A run of three ranks is continued on one with its own weights and on two, and the other way round.
#[test]
fn a_run_with_shared_files_goes_on_with_another_number_of_ranks() {
    let bench = Bench::new();
    train_watched(&bench, 3, &BLOCK, "whole");
    let from = format!("--resume={}", bench.path("whole/checkpoint-4").display());
    let resumed = [&BLOCK[..], &[&from]].concat();
    train(&bench, 1, &resumed, "on-1");
    train_watched(&bench, 2, &resumed, "on-2");
    let whole = checkpoints(&bench, "whole");
    for name in ["on-1", "on-2"] {
        assert!(whole == checkpoints(&bench, name), "{name}");
        let result = |run: &str| files(&bench.path(run).join("final"));
        assert!(result("whole") == result(name), "{name}: final/");
    }
}

/// Each machine has files of its own, in the directory of its first rank.
#[test]
fn two_machines_have_a_set_of_files_each() {
    if !job::can_name_machines() {
        return;
    }
    let bench = Bench::new();
    train(&bench, 1, &BLOCK, "one");
    let arguments = [&BASE[..], &BLOCK, &[HOST, "train.output_dir=out"]].concat();
    let ranks = vec![arguments; 4];
    let mut child = job::begin(job::mpirun_on(&bench, &ranks, &["a", "b", "a", "b"]));
    let mut seen = BTreeSet::new();
    while child.try_wait().unwrap().is_none() {
        seen.append(&mut scratch(&bench.path("out")));
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let out = job::wait(child);
    assert!(out.status.success(), "{}", said(&out));
    fs::rename(bench.path("out"), bench.path("two-machines")).unwrap();
    assert_same(&bench, "one", "two-machines");
    for path in ["codes.safetensors", "rank-1/codes.safetensors"] {
        assert!(seen.contains(path), "{path} in {seen:?}");
    }
    let other = |path: &&String| path.starts_with("rank-2") || path.starts_with("rank-3");
    assert_eq!(seen.iter().find(other), None);
}

#[test]
fn settings_that_need_a_copy_for_each_rank_are_refused() {
    let bench = Bench::new();
    let tier = ["tune.method=lora", "memory.tier=device"];
    let apart = [
        "tune.method=lora",
        "distributed.sync_every=2",
        "train.max_steps=4",
        "train.save_steps=0",
    ];
    for (settings, parts) in [
        (&tier[..], ["a copy of them for each rank", "`auto` or `disk`"]),
        (
            &apart,
            ["contradict each other", "each rank changes all of its weights"],
        ),
    ] {
        let arguments = [&BASE[..], settings, &[HOST, "train.output_dir=out"]].concat();
        let out = job::run(&bench, 2, &arguments);
        let text = said(&out);
        assert!(!out.status.success() && !bench.path("out").exists(), "{text}");
        for part in parts {
            assert_eq!(text.matches(part).count(), 1, "{part} in:\n{text}");
        }
    }
    // Without effect on one rank.
    train(&bench, 1, &[&tier[..], &[HOST]].concat(), "alone");
}
