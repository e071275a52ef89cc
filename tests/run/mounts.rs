//! Conditions that only the system can set: file systems without inodes or space, read-only, none at `/dev/shm` and
//! `/proc`, no network, a group with little memory. Needs root, so only `.ci/run` asks for it: each run is in a
//! namespace of its own, so nothing has to be undone.

use crate::bench::{Bench, files, said};
use crate::same::{assert_same, assert_same_lines};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const RUN: [&str; 6] = [
    "train",
    "--recipe",
    "r.toml",
    "train.max_steps=3",
    "train.save_steps=1",
    "train.output_dir=disk/run",
];

/// `ft` with these arguments after the shell's `setup`, in namespaces of its own. The content of `disk/run` afterwards is
/// copied to `left`.
fn inside(bench: &Bench, setup: &str, arguments: &[&str]) -> Output {
    let _ = fs::remove_dir_all(bench.path("left"));
    fs::create_dir_all(bench.path("disk")).unwrap();
    let inner = bench.command(arguments);
    let mut command = Command::new("unshare");
    let script = format!(
        "set -e\n{setup}\nset +e\n\"$0\" \"$@\"\ncode=$?\n[ ! -d disk/run ] || cp -r disk/run left\nexit $code"
    );
    command.args(["--mount", "--net", "sh", "-c", &script]);
    command.arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        command.env(name, value.unwrap());
    }
    command.current_dir(bench.dir.path()).output().unwrap()
}

/// A run that fails says why and where, and leaves no result.
fn refused(bench: &Bench, out: &Output, words: &[&str]) {
    let text = said(out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(
        text.contains("error:") && words.iter().any(|word| text.contains(word)),
        "{words:?}\n{text}"
    );
    assert!(!bench.path("left/final").exists(), "{text}");
}

/// Rows C12, S7: places that are missing or locked.
#[test]
#[ignore = "mounts, so root: .ci/run"]
fn missing_and_locked_places_are_no_obstacle_or_refused() {
    let bench = Bench::new();
    bench.train(&["train.max_steps=3", "train.save_steps=1", "train.output_dir=whole"]);
    for setup in [
        "mount -t tmpfs none disk",
        // Nothing can be put there.
        "mount -t tmpfs -o ro none /dev/shm",
        "mount -t tmpfs -o ro none /tmp 2>/dev/null || true",
        "mount -t tmpfs -o ro none /sys",
        "mount -t tmpfs -o ro none /root",
        "mount -t tmpfs -o ro none cache 2>/dev/null || { mkdir -p cache; mount -t tmpfs -o ro none cache; }",
    ] {
        if setup.contains(" /tmp") && bench.dir.path().starts_with("/tmp") {
            continue;
        }
        let out = inside(&bench, setup, &RUN);
        assert!(out.status.success(), "{setup}\n{}", said(&out));
        assert_same(&bench, "whole", "left");
        fs::remove_dir_all(bench.path("disk")).unwrap();
    }
    // Without `/proc` a program cannot be started again as the process for templates.
    let out = inside(&bench, "mount -t tmpfs -o ro none /proc", &RUN);
    match out.status.code() {
        Some(0) => assert_same_lines(&bench, "whole", "left"),
        _ => refused(&bench, &out, &["/proc/self/exe"]),
    }
    fs::remove_dir_all(bench.path("disk")).unwrap();
    let out = inside(&bench, "mount -t tmpfs -o ro none disk", &RUN);
    refused(&bench, &out, &["Read-only file system"]);
}

/// Rows C3, C12: a file system with so many inodes or bytes; all numbers from none to enough.
#[test]
#[ignore = "mounts, so root: .ci/run"]
fn any_number_of_inodes_or_bytes_works_or_is_refused_before_the_first_step() {
    let bench = Bench::new();
    bench.train(&["train.max_steps=3", "train.save_steps=1", "train.output_dir=whole"]);
    let (mut works, mut early, mut late) = (0, 0, 0);
    let inodes = (2..60).map(|n| format!("nr_inodes={n}"));
    let sizes = (0..40).map(|n| format!("size={}k", 8 + 24 * n));
    for limit in inodes.chain(sizes) {
        let out = inside(&bench, &format!("mount -t tmpfs -o {limit} none disk"), &RUN);
        if out.status.success() {
            assert_same(&bench, "whole", "left");
            works += 1;
            continue;
        }
        let text = said(&out);
        refused(
            &bench,
            &out,
            &["No space left", "not enough disk space", "no room for more files"],
        );
        if bench.path("left/metrics.jsonl").exists() {
            // Room that was there at the start: what was saved is whole.
            late += 1;
            let out = bench.ft(&[
                "train",
                "--recipe",
                "r.toml",
                "train.max_steps=3",
                "train.save_steps=1",
                "train.output_dir=left",
                "--resume",
            ]);
            let nothing = said(&out).contains("no run to resume");
            assert!(out.status.success() || nothing, "{limit}\n{text}\n{}", said(&out));
            if !nothing {
                assert_same(&bench, "whole", "left");
            }
        } else {
            early += 1;
        }
    }
    println!("{works} work, {early} are refused before the first step, {late} later");
    assert!(works > 5 && early > 5);
    assert_eq!(late, 0);
}

/// Row C4: a disk with just enough space for a run also has enough to resume it: its checkpoints do not count twice.
#[test]
#[ignore = "mounts, so root: .ci/run"]
fn a_resume_needs_no_more_space_than_the_run() {
    let bench = Bench::new();
    let settings = ["tune.method=full", "train.max_steps=4", "train.save_steps=1"];
    bench.train(&[&settings[..], &["train.output_dir=whole"]].concat());
    // As if the run had been killed in its last step.
    let mut made = Command::new("cp");
    made.args(["-r", "whole", "stopped"]);
    assert!(made.current_dir(bench.dir.path()).status().unwrap().success());
    for name in ["final", "checkpoint-4"] {
        fs::remove_dir_all(bench.path("stopped").join(name)).unwrap();
    }
    let checkpoint = files(&bench.path("stopped/checkpoint-3"));
    let held: usize = checkpoint.iter().map(|(_, bytes)| bytes.len()).sum();
    let run = [
        &["train", "--recipe", "r.toml", "train.output_dir=disk/run"][..],
        &settings,
    ]
    .concat();
    let out = inside(&bench, "mount -t tmpfs -o size=64k none disk", &run);
    refused(&bench, &out, &["not enough disk space"]);
    let text = said(&out);
    let numbers = text.split(" bytes)").filter_map(|part| part.rsplit('(').next());
    let needed: usize = numbers.filter_map(|number| number.parse().ok()).max().unwrap();
    // What the run has beside its checkpoint; each file takes whole pages.
    let others = 200_000;
    assert!(held > others, "{held}");
    let setup = format!(
        "mount -t tmpfs -o size={} none disk\ncp -r stopped disk/run",
        needed + others
    );
    let out = inside(&bench, &setup, &[&run[..], &["--resume"]].concat());
    assert!(out.status.success(), "{needed} bytes\n{}", said(&out));
    assert_same(&bench, "whole", "left");
}

/// The directory of control groups that limit memory, and the file with the limit of a group: of version 1 if there are some, else of
/// version 2.
fn memory_groups() -> (&'static Path, &'static str) {
    let first = Path::new("/sys/fs/cgroup/memory");
    if first.is_dir() {
        (first, "memory.limit_in_bytes")
    } else {
        (Path::new("/sys/fs/cgroup"), "memory.max")
    }
}

/// Row S10: a control group with little memory. `auto` keeps below it, or the run is refused; the system kills nothing.
#[test]
#[ignore = "a control group, so root: .ci/run"]
fn a_run_keeps_below_the_memory_of_its_group() {
    let bench = Bench::new();
    // Where whole weights do not fit, `auto` stores frozen ones in 8 bits, with other losses.
    bench.recipe("[memory]\nfrozen_weights = \"f32\"\n");
    let (groups, limit) = memory_groups();
    let group = groups.join(format!("ft-test-{}", std::process::id()));
    bench.train(&["train.max_steps=3", "train.save_steps=1", "train.output_dir=whole"]);
    let mut outcomes = Vec::new();
    for mib in [8, 16, 24, 32, 48, 64, 96, 128, 256] {
        // A new group: no page of an earlier run counts.
        fs::create_dir(&group).unwrap();
        fs::write(group.join(limit), (mib << 20).to_string()).unwrap();
        let enter = format!("echo $$ > {}", group.join("cgroup.procs").display());
        let out = inside(&bench, &enter, &RUN);
        fs::remove_dir(&group).unwrap();
        let text = said(&out);
        match out.status.code() {
            Some(0) => assert_same(&bench, "whole", "left"),
            Some(1 | 2) => assert!(text.contains("memory"), "{mib} MiB\n{text}"),
            other => panic!("{mib} MiB: {other:?}\n{text}"),
        }
        outcomes.push((mib, out.status.code()));
        let _ = fs::remove_dir_all(bench.path("disk"));
    }
    println!("{outcomes:?}");
    assert_eq!(outcomes.last().unwrap().1, Some(0));
}
