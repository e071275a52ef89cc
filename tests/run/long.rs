//! Long runs: what grows with the number of steps. 100,000 steps and metrics of 1 GB, by hand: docs/lab-book.md.

use crate::bench::{Bench, files, said};
use crate::disk::{Fault, Operation, on_disk, recorded};
use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

const RUN: [&str; 5] = [
    "tune.method=lora",
    "tune.lora.r=4",
    "data.max_length=48",
    "train.save_total_limit=1",
    "train.save_steps=8",
];

/// What a process holds, and how much more of it later steps may hold.
const HELD: [(&str, u64); 3] = [("resident bytes", 1 << 20), ("open files", 0), ("threads", 0)];

/// As in `HELD`.
fn held(process: u32) -> Option<[u64; 3]> {
    let proc = format!("/proc/{process}");
    let status = fs::read_to_string(format!("{proc}/status")).ok()?;
    let kib = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kib: u64 = kib.trim().strip_suffix(" kB")?.parse().ok()?;
    let count = |of: &str| Some(fs::read_dir(format!("{proc}/{of}")).ok()?.count() as u64);
    Some([kib << 10, count("fd")?, count("task")?])
}

/// Sizes of the files of a run whose lines do not grow with the steps; numbers of steps in names are one name.
fn sizes(bench: &Bench, run: &str) -> BTreeMap<String, usize> {
    let plain = |name: &str| name.replace(|c: char| c.is_ascii_digit(), "");
    let all = files(&bench.path(run)).into_iter();
    all.filter(|f| !f.0.ends_with(".jsonl") && f.0.contains('/'))
        .map(|f| (plain(&f.0), f.1.len()))
        .collect()
}

/// Row L1. The last third of a run takes no more memory, files and threads than its first.
#[test]
fn a_longer_run_holds_no_more_memory_files_or_threads() {
    let bench = Bench::new();
    let with = |steps: &'static str, out: &'static str| [&RUN[..], &[steps, out]].concat();
    let mut child = bench.start(&with("train.max_steps=48", "train.output_dir=long"));
    let mut seen: Vec<(usize, [u64; 3])> = Vec::new();
    let until = Instant::now() + Duration::from_secs(120);
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "too slow");
        let lines = fs::read_to_string(bench.path("long/metrics.jsonl")).unwrap_or_default();
        let step = lines.lines().count();
        seen.extend(held(child.id()).filter(|_| step > 0).map(|held| (step, held)));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(bench.path("long/final").exists());
    let last = seen.last().unwrap().0;
    let most = |steps: std::ops::Range<usize>, n: usize| {
        let some = seen.iter().filter(|(step, _)| steps.contains(step));
        some.map(|(_, held)| held[n]).max().unwrap()
    };
    for (n, (what, more)) in HELD.into_iter().enumerate() {
        // The first part has seen two saves.
        let (first, later) = (most(16..32, n), most(32..last, n));
        assert!(later <= first + more, "{what}: {first}, later {later}");
    }
    bench.train(&with("train.max_steps=16", "train.output_dir=short"));
    let (short, long) = (sizes(&bench, "short"), sizes(&bench, "long"));
    assert_eq!(short.keys().collect::<Vec<_>>(), long.keys().collect::<Vec<_>>());
    for (name, size) in &short {
        // Numbers of steps have more digits.
        assert!(long[name] <= size + 64, "{name}: {size}, longer {}", long[name]);
    }
}

/// Row L2. However long it is: a line is put at the end, also after a resume that cuts off the lines behind its checkpoint.
#[test]
fn metrics_are_appended_and_never_written_again() {
    let bench = Bench::new();
    let run = |flag: &[&str]| {
        let words = [
            "train",
            "--recipe",
            "r.toml",
            "train.max_steps=6",
            "train.save_steps=4",
            "train.output_dir=run",
        ];
        bench.command(&[&words[..], &RUN[..3], flag].concat())
    };
    let mut command = run(&[]);
    if on_disk(&bench, &mut command, Fault::Record, 0).is_none() {
        return;
    }
    assert!(command.output().unwrap().status.success());
    // Ends where the files and their operations are counted.
    let appended = |all: &[Operation], mut end: usize| {
        let (mut writes, mut cuts) = (0, 0);
        for operation in all {
            assert!(operation.other != "run/metrics.jsonl", "{operation}");
            if operation.path != "run/metrics.jsonl" {
                continue;
            }
            match operation.what {
                'w' => {
                    assert_eq!(operation.offset, end, "{operation}");
                    end += operation.text().len();
                    writes += 1;
                }
                't' => {
                    assert!(operation.offset <= end, "{operation}");
                    end = operation.offset;
                    cuts += 1;
                }
                _ => {}
            }
        }
        assert_eq!(end as u64, fs::metadata(bench.path("run/metrics.jsonl")).unwrap().len());
        (writes, cuts)
    };
    let all = recorded(&bench);
    let (writes, cuts) = appended(&all, 0);
    assert!(writes >= 6 && cuts == 0, "{writes} writes, {cuts} cuts");
    // Killed in step 6: the line of step 5 is behind the checkpoint of step 4.
    let at = 1 + all
        .iter()
        .rposition(|o| o.path == "run/metrics.jsonl" && o.what == 'w')
        .unwrap();
    fs::remove_dir_all(bench.path("run")).unwrap();
    let mut command = run(&[]);
    on_disk(&bench, &mut command, Fault::Kill, at).unwrap();
    assert!(!command.output().unwrap().status.success());
    let before = fs::metadata(bench.path("run/metrics.jsonl")).unwrap().len();
    let mut command = run(&["--resume"]);
    on_disk(&bench, &mut command, Fault::Record, 0).unwrap();
    let out = command.output().unwrap();
    assert!(out.status.success(), "{}", said(&out));
    let (writes, cuts) = appended(&recorded(&bench), before as usize);
    assert!(writes >= 2 && cuts == 1, "{writes} writes, {cuts} cuts");
}
