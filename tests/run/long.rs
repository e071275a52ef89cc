//! Long runs: what grows with the number of steps. 100,000 steps and metrics of 1 GB by hand: figures in docs/lab-book.md.

use crate::bench::{Bench, files, said};
use crate::disk::{Fault, Operation, on_disk, recorded};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

const RUN: [&str; 4] = [
    "tune.method=lora",
    "tune.lora.r=4",
    "data.max_length=48",
    "train.save_total_limit=1",
];

/// Blocks whose weights are on the disk; the active one changes in each part of a run.
const BLOCKS: [&str; 5] = [
    "tune.method=block",
    "tune.block.switch_every=10",
    "memory.tier=disk",
    "data.max_length=48",
    "train.save_total_limit=1",
];

/// Rollouts, which are judged at once.
const ROLLOUTS: [&str; 10] = [
    "train.stage=grpo",
    "tune.method=lora",
    "tune.lora.r=4",
    "data.max_length=64",
    "data.long=drop",
    "train.batch_size=2",
    "rlhf.rewards=[\"regex:[aeiou]\"]",
    "rlhf.num_generations=2",
    "rlhf.max_completion_length=4",
    "train.save_total_limit=1",
];

/// The resources of a process, and how much more of it later steps may hold. Of bytes the most of many moments counts; of files and
/// threads the least, because a save has some for a moment. An allocator needs some bytes more or less: in a third of 320 steps a
/// leak of 3.3 KiB per step is found, in one of 100 steps a leak of 10.5 KiB per step.
const HELD: [(&str, u64); 3] = [("resident bytes", 1 << 20), ("open files", 0), ("threads", 0)];
const BYTES: usize = 0;

/// Bytes of a line of a file of `/proc` about a process.
fn bytes_of(process: u32, file: &str, line: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/{file}")).ok()?;
    let kib = text.lines().find_map(|l| l.strip_prefix(line))?;
    let kib: u64 = kib.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// Most resident bytes so far.
fn peak(process: u32) -> Option<u64> {
    bytes_of(process, "status", "VmHWM:")
}

/// As in `HELD`. `VmRSS` lacks pages that a CPU has not added to the total yet; `smaps_rollup`, which not every kernel has, counts
/// them all.
fn held(process: u32) -> Option<[u64; 3]> {
    let count = |of: &str| Some(fs::read_dir(format!("/proc/{process}/{of}")).ok()?.count() as u64);
    let resident = if Path::new("/proc/self/smaps_rollup").exists() {
        bytes_of(process, "smaps_rollup", "Rss:")?
    } else {
        bytes_of(process, "status", "VmRSS:")?
    };
    Some([resident, count("fd")?, count("task")?])
}

/// Sizes of all files of a run by name; numbers of steps in names are one name, which may have several files.
fn sizes(bench: &Bench, run: &str) -> BTreeMap<String, Vec<usize>> {
    let mut out: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (name, bytes) in files(&bench.path(run)) {
        let plain = name.replace(|c: char| c.is_ascii_digit(), "");
        out.entry(plain).or_default().push(bytes.len());
    }
    out
}

/// How many more bytes a file may have in a longer run. `None`: it has lines for its steps.
fn grows_by(name: &str) -> Option<usize> {
    // A few numbers of steps, tokens, bytes and processes: they have more digits.
    const NUMBERS: usize = 64;
    match name {
        "metrics.jsonl" | "events.jsonl" | "samples.jsonl" => None,
        _ if name.contains("tfevents") => None,
        // A limited number of points for each curve: see `CURVES`.
        "curves.svg" => None,
        "plan.json" | "run.json" | "run.lock" | "checkpoint-/state.json" => Some(NUMBERS),
        _ => Some(0),
    }
}

/// Most bytes of the picture of the curves.
const CURVES: usize = 64 << 10;

/// The step of the last whole line of the metrics of a run; 0 before the first.
fn last_step(bench: &Bench, run: &str) -> usize {
    let mut end = Vec::new();
    let Ok(mut file) = fs::File::open(bench.path(run).join("metrics.jsonl")) else {
        return 0;
    };
    let size = file.metadata().unwrap().len();
    file.seek(SeekFrom::Start(size.saturating_sub(4096))).unwrap();
    file.read_to_end(&mut end).unwrap();
    let lines = String::from_utf8_lossy(&end).into_owned();
    let steps = lines
        .lines()
        .filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok());
    steps.filter_map(|l| l["step"].as_u64()).next_back().unwrap_or(0) as usize
}

/// The names in the table of docs/runs.md, without those of temporary files; of a checkpoint without its step.
fn documented() -> BTreeSet<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/runs.md");
    let page = fs::read_to_string(page).unwrap();
    let rows = page.lines().skip_while(|line| !line.starts_with("| name |"));
    let rows = rows.take_while(|line| line.starts_with('|'));
    rows.filter(|row| !row.contains("removed at the end of the run"))
        .filter_map(|row| row.split('|').nth(1))
        .flat_map(|names| names.split('`').skip(1).step_by(2))
        .map(|name| name.trim_end_matches('/').replace("<step>", ""))
        .collect()
}

/// A run of `3 * part` steps with a save at every `save`: its last third takes no more memory, files and threads than its second,
/// and leaves what a run of `part` steps leaves, under names that are documented.
fn grows_not(run: &[&str], part: usize, save: usize, pause: Duration) {
    let bench = Bench::new();
    let save = format!("train.save_steps={save}");
    let steps = |n: usize| format!("train.max_steps={n}");
    let (all, few) = (steps(3 * part), steps(part));
    let with = |steps, out| [run, &[&save, steps, out]].concat();
    let mut child = bench.start(&with(&all, "train.output_dir=long"));
    let mut seen: Vec<(usize, [u64; 3])> = Vec::new();
    let until = Instant::now() + Duration::from_secs(120 + part as u64);
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "too slow");
        let step = last_step(&bench, "long");
        seen.extend(held(child.id()).filter(|_| step > 0).map(|held| (step, held)));
        std::thread::sleep(pause);
    }
    assert!(bench.path("long/final").exists());
    let last = seen.last().map_or(0, |(step, _)| *step);
    let of_steps = |steps: std::ops::Range<usize>, n: usize| {
        let some = seen.iter().filter(|(step, _)| steps.contains(step));
        let some = some.map(|(_, held)| held[n]);
        let found = if n == BYTES { some.max() } else { some.min() };
        found.unwrap_or_else(|| {
            panic!(
                "the process was not seen in the steps {steps:?} ({} times in all): this machine is too busy for a look every {pause:?}",
                seen.len()
            )
        })
    };
    for (n, (what, more)) in HELD.into_iter().enumerate() {
        // The first part has seen two saves.
        let (first, later) = (of_steps(part..2 * part, n), of_steps(2 * part..last, n));
        println!("{what}: {first} in the second third, {later} in the last");
        assert!(later <= first + more, "{what}: {first}, later {later}");
    }
    // A name of the same length: files contain it.
    bench.train(&with(&few, "train.output_dir=part"));
    let (short, long) = (sizes(&bench, "part"), sizes(&bench, "long"));
    let counts = |all: &BTreeMap<String, Vec<usize>>| -> Vec<(String, usize)> {
        all.iter().map(|(name, sizes)| (name.clone(), sizes.len())).collect()
    };
    assert_eq!(counts(&short), counts(&long));
    let documented = documented();
    for name in long.keys().map(|name| name.split('/').next().unwrap()) {
        assert!(documented.contains(name), "{name} is not in {documented:?}");
    }
    assert!(short.contains_key("run.json") && short.contains_key("checkpoint-/weights.safetensors"));
    for (name, sizes) in &short {
        let Some(more) = grows_by(name) else { continue };
        for (size, longer) in sizes.iter().zip(&long[name]) {
            assert!(
                longer.abs_diff(*size) <= more,
                "{name}: {size} bytes, of a longer run {longer}"
            );
        }
    }
    let curves = long["curves.svg"][0];
    assert!(curves <= CURVES, "curves.svg: {curves} bytes");
}

/// Row S11.
#[test]
fn a_longer_run_holds_no_more_memory_files_or_threads() {
    grows_not(&RUN, 320, 80, Duration::from_millis(20));
}

/// Row S11. All numbers of steps have three digits, so that the sizes of files can be compared.
#[test]
fn a_longer_run_by_blocks_from_the_disk_holds_no_more_memory_files_or_threads() {
    grows_not(&BLOCKS, 100, 25, Duration::from_millis(5));
}

/// Row S11.
#[test]
fn a_longer_run_with_rollouts_holds_no_more_memory_files_or_threads() {
    grows_not(&ROLLOUTS, 100, 25, Duration::from_millis(5));
}

/// Row S11. `FT_TEST_STEPS` is another number of steps.
#[test]
#[ignore = "by hand: a quarter of an hour"]
fn a_hundred_thousand_steps_hold_no_more_memory_files_or_threads() {
    let steps = std::env::var("FT_TEST_STEPS").map_or(100_000, |n| n.parse().unwrap());
    grows_not(&RUN, steps / 3, steps / 50, Duration::from_millis(500));
}

/// A resume puts its lines behind a file of `size` bytes, which it neither holds in memory nor writes again.
fn long_metrics_are_appended(size: usize) {
    let bench = Bench::new();
    let run = |more: &[&'static str]| [&RUN[..3], &["train.save_steps=4", "train.output_dir=run"], more].concat();
    bench.train(&run(&["train.max_steps=4"]));
    let path = bench.path("run/metrics.jsonl");
    let lines = fs::read_to_string(&path).unwrap();
    let first = format!("{}\n", lines.lines().next().unwrap()).repeat(1000);
    let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    for _ in 0..size / first.len() {
        file.write_all(first.as_bytes()).unwrap();
    }
    file.write_all(lines.as_bytes()).unwrap();
    drop(file);
    let facts = || {
        let facts = fs::metadata(&path).unwrap();
        (facts.len(), facts.ino())
    };
    let (before, file) = facts();
    let mut child = bench.start(&run(&["train.max_steps=6", "--resume", "--threads", "2"]));
    let mut most = 0;
    while child.try_wait().unwrap().is_none() {
        most = most.max(peak(child.id()).unwrap_or(0));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(child.wait().unwrap().success());
    let (after, same) = facts();
    println!("{before} bytes, {} more, {most} resident at most", after - before);
    assert_eq!(same, file);
    let mut end = String::new();
    let mut file = fs::File::open(&path).unwrap();
    file.seek(SeekFrom::Start(before)).unwrap();
    file.read_to_string(&mut end).unwrap();
    let steps = end
        .lines()
        .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["step"].as_u64());
    assert_eq!(steps.collect::<Vec<_>>(), [Some(5), Some(6)]);
    assert!(most > 0 && most < MOST_RESIDENT, "{most} bytes resident");
}

/// A limit for the memory of a run of the tiny model, and half of the shorter metrics.
const MOST_RESIDENT: u64 = 96 << 20;

/// Row S11.
#[test]
fn metrics_that_do_not_fit_in_memory_are_appended() {
    long_metrics_are_appended(2 * MOST_RESIDENT as usize);
}

/// Row S11.
#[test]
#[ignore = "by hand: 1 GB on the disk, and a minute"]
fn metrics_of_a_gigabyte_are_appended() {
    long_metrics_are_appended(1 << 30);
}

/// Row S11. However long it is: a line is put at the end, also after a resume that cuts off the lines behind its checkpoint.
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
