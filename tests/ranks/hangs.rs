//! Ranks that hang in a save, and disks that are slow or hang. Libraries make operations on the files of one checkpoint, or of one model,
//! slow or hang, on one rank.

use crate::bench::{Bench, copy_all, goldens, said};
use crate::disk::{self, Library};
use crate::faults::{LONG, assert_once, go_on, until_saved};
use crate::job::{self, ranks_of, signal, wait};
use crate::parts::PARTS;
use ft::formats::weights::Weights;
use std::fs;
use std::process::{Child, Output};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Seconds after which a rank is missed. A busy disk may take seconds for one operation.
const TIMEOUT: &str = "distributed.timeout=3";
const LONGER: &str = "distributed.timeout=6";

/// The variables of a rank whose disk is at fault from an operation on this checkpoint on.
pub fn disk_variables(bench: &Bench, checkpoint: &str, fault: [&str; 3]) -> Option<[(&'static str, String); 5]> {
    let dir = bench.dir.path().canonicalize().unwrap();
    let [mode, at, number] = fault.map(str::to_string);
    Some([
        ("LD_PRELOAD", disk::library()?.display().to_string()),
        ("FT_DISK_ROOT", format!("{}/out/{checkpoint}*", dir.display())),
        ("FT_DISK_MODE", mode),
        ("FT_DISK_AT", at),
        ("FT_DISK_ERRNO", number),
    ])
}

/// Starts a job in which the disk of a rank is at fault.
fn with_disk(bench: &Bench, other: usize, more: &[&str], checkpoint: &str, fault: [&str; 3]) -> Option<Child> {
    let variables = disk_variables(bench, checkpoint, fault)?.map(|(name, value)| format!("{name}={value}"));
    let before: Vec<&str> = ["env"]
        .into_iter()
        .chain(variables.iter().map(String::as_str))
        .collect();
    let arguments = [&LONG[..], &[TIMEOUT], more].concat();
    Some(job::begin(job::mpirun_but(bench, &vec![arguments; 3], other, &before)))
}

/// Waits until the save of this checkpoint is under way.
pub fn until_saving(bench: &Bench, checkpoint: &str) {
    let begun = Instant::now();
    let is_there = || {
        let names = std::fs::read_dir(bench.path("out")).into_iter().flatten().flatten();
        names
            .into_iter()
            .any(|e| e.file_name().to_string_lossy().contains(&format!("{checkpoint}.tmp")))
    };
    while !is_there() {
        assert!(begun.elapsed() < Duration::from_secs(60), "no save");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn assert_ended(bench: &Bench, begun: Instant, out: &Output) -> String {
    let text = said(out);
    assert!(!out.status.success(), "{text}");
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}: {text}",
        begun.elapsed()
    );
    assert!(text.contains("the job ends; the newest checkpoint is valid"), "{text}");
    let verified = bench.ft(&["runs", "verify", "out"]);
    assert!(verified.status.success(), "{}", said(&verified));
    go_on(bench, 2);
    text
}

/// Its other threads live, and say which file it is.
#[test]
fn a_disk_that_hangs_in_a_save_ends_the_job() {
    for (form, rank) in [("distributed.checkpoint=one", 0), (PARTS, 1)] {
        let bench = Bench::new();
        // After the directory and the first file.
        let Some(mut job) = with_disk(&bench, rank, &[form], "checkpoint-10", ["stall", "4", "100"]) else {
            return;
        };
        until_saved(&bench, &mut job);
        let begun = Instant::now();
        let text = assert_ended(&bench, begun, &wait(job));
        assert_once(&text, "the disk has not ended an operation in");
        assert!(
            text.contains(&format!("rank {rank} (host ")) && text.contains("/checkpoint-10"),
            "{text}"
        );
    }
}

/// The whole process hangs, as on a machine that is lost; the others wait for it without a limit.
#[test]
fn a_process_that_hangs_in_a_save_ends_the_job() {
    let bench = Bench::new();
    let Some(mut job) = with_disk(&bench, 0, &[], "checkpoint-10", ["stall", "4", "2"]) else {
        return;
    };
    until_saved(&bench, &mut job);
    until_saving(&bench, "checkpoint-10");
    signal(ranks_of(&job)[0], "-STOP");
    let begun = Instant::now();
    let text = assert_ended(&bench, begun, &wait(job));
    assert!(
        text.contains("rank 1 (host ") && text.contains("no heartbeat of rank 0 for 5 s"),
        "{text}"
    );
}

/// Each operation of a save takes a while, and the whole save longer than the limit.
#[test]
fn a_slow_save_is_no_hang() {
    // Rank 1 waits for two seconds more than the limit.
    for (form, rank, pause) in [("distributed.checkpoint=one", 0, "420"), (PARTS, 2, "1200")] {
        let bench = Bench::new();
        let more = ["train.max_steps=7", "train.save_total_limit=9", LONGER, form];
        let begun = Instant::now();
        let Some(job) = with_disk(&bench, rank, &more, "checkpoint-5", ["slow", "1", pause]) else {
            return;
        };
        let out = wait(job);
        assert!(out.status.success(), "{}", said(&out));
        println!("{form}: {:?}", begun.elapsed());
        assert!(
            begun.elapsed() > Duration::from_secs(9),
            "{form}: {:?}",
            begun.elapsed()
        );
    }
}

/// One rank has all long rows of an evaluation, so the other one is ready long before it.
#[test]
fn a_slow_evaluation_is_no_hang() {
    let bench = Bench::new();
    let mut rows = String::new();
    for row in 0..1600 {
        let words = "the cat ran home blue ".repeat(if row % 2 == 1 { 18 } else { 1 });
        let pair =
            serde_json::json!({"prompt": "say it", "chosen": format!("{words}a"), "rejected": format!("{words}b")});
        rows.push_str(&format!("{pair}\n"));
    }
    fs::write(bench.path("held.jsonl"), rows).unwrap();
    let more = [
        "train.stage=simpo",
        "tune.method=lora",
        "data.train=pairs.jsonl",
        "data.eval=held.jsonl",
        "train.batch_size=1",
        "distributed.timeout=2",
    ];
    let begun = Instant::now();
    let mut job = job::start(&bench, &vec![[&LONG[..], &more].concat(); 2]);
    // The evaluation is before the first step.
    until_saved(&bench, &mut job);
    assert!(begun.elapsed() > Duration::from_secs(3), "{:?}", begun.elapsed());
    let metrics = fs::read_to_string(bench.path("out/metrics.jsonl")).unwrap();
    assert!(metrics.contains("eval_loss"), "{metrics}");
    signal(ranks_of(&job)[0], "-USR1");
    let out = wait(job);
    assert_eq!(out.status.code(), Some(128 + 10), "{}", said(&out));
}

/// Variables with which reads of the files in this directory are slow. `None`: no C compiler.
fn slow_files(bench: &Bench, directory: &str, how: &[String]) -> Option<Vec<String>> {
    static BUILT: Library = OnceLock::new();
    let library = disk::compiled(&BUILT, "tests/ranks/slow.c")?;
    let files = bench.dir.path().canonicalize().unwrap().join(directory);
    let first = [
        "env".into(),
        format!("LD_PRELOAD={}", library.display()),
        format!("FT_SLOW_FILES={}/", files.display()),
    ];
    Some([&first[..], how].concat())
}

/// Variables with which each read of a checkpoint of `out` takes `pause` milliseconds.
fn slow_reads(bench: &Bench, checkpoint: &str, pause: u64) -> Option<Vec<String>> {
    slow_files(bench, &format!("out/{checkpoint}"), &[format!("FT_SLOW_READ={pause}")])
}

/// Variables with which each read of weights of this model takes `pause` milliseconds, when they are loaded: the hash of the
/// weights and their headers are read before the run directory is opened.
fn slow_load(bench: &Bench, model: &str, pause: u64) -> Option<Vec<String>> {
    let opened = bench.path("out/run.json");
    let how = [
        format!("FT_SLOW_PREAD={pause}"),
        format!("FT_SLOW_WHEN={}", opened.display()),
        format!("FT_SLOW_TIMES={}", bench.path(SLOW_TIMES).display()),
    ];
    slow_files(bench, model, &how)
}

/// When the slow reads of `slow_load` began.
const SLOW_TIMES: &str = "times.txt";

/// Seconds from the first slow read of `slow_load` to the last one.
fn slowed(bench: &Bench) -> f64 {
    let text = fs::read_to_string(bench.path(SLOW_TIMES)).expect("no read was slow");
    let times: Vec<f64> = text.lines().map(|line| line.parse().unwrap()).collect();
    times[times.len() - 1] - times[0]
}

/// Every rank verifies the checkpoint of a resumed run; one of them reads for longer than the limit.
#[test]
fn a_slow_read_of_a_checkpoint_is_no_hang() {
    let bench = Bench::new();
    let Some(slow) = slow_reads(&bench, "checkpoint-5", 250) else {
        return;
    };
    let run = [&LONG[..], &[PARTS, "distributed.timeout=2"]].concat();
    job::train(&bench, 2, &[&run[..], &["train.max_steps=5"]].concat());
    fs::remove_dir_all(bench.path("out/final")).unwrap();
    let before: Vec<&str> = slow.iter().map(String::as_str).collect();
    let resume = [&run[..], &["train.max_steps=6", "train.save_steps=0", "--resume"]].concat();
    let begun = Instant::now();
    let out = wait(job::begin(job::mpirun_but(&bench, &vec![resume; 2], 1, &before)));
    assert!(out.status.success(), "{}", said(&out));
    assert!(bench.path("out/final").exists());
    assert!(begun.elapsed() > Duration::from_secs(3), "{:?}", begun.elapsed());
}

/// A run goes on from another directory; rank 0 reads the checkpoint of the best evaluation there for longer than the limit.
#[test]
fn a_slow_read_of_the_best_checkpoint_is_no_hang() {
    let bench = Bench::new();
    let run = [
        &LONG[..],
        &[
            "distributed.weights=sharded",
            "distributed.timeout=2",
            "data.eval_fraction=0.3",
            "train.eval_steps=2",
            "train.save_steps=3",
            "train.save_total_limit=9",
            "train.load_best_model_at_end=true",
            "train.max_steps=4",
        ],
    ]
    .concat();
    job::train(&bench, 2, &run);
    assert!(
        bench.path("out/checkpoint-2").exists(),
        "the first evaluation is the best so far"
    );
    let Some(slow) = slow_reads(&bench, "checkpoint-2", 500) else {
        return;
    };
    let before: Vec<&str> = slow.iter().map(String::as_str).collect();
    let more = ["train.output_dir=other", "--resume=out/checkpoint-3"];
    let ranks = vec![[&run[..], &more].concat(); 2];
    let begun = Instant::now();
    let out = wait(job::begin(job::mpirun_but(&bench, &ranks, 0, &before)));
    assert!(out.status.success(), "{}", said(&out));
    assert!(bench.path("other/checkpoint-2").exists());
    // Rank 1 waits for two seconds more than the limit.
    assert!(begun.elapsed() > Duration::from_secs(5), "{:?}", begun.elapsed());
}

/// One rank loads the model, or the teacher, for longer than the limit.
#[test]
fn a_slow_load_of_a_model_is_no_hang() {
    let cases: [(&str, &[&str]); 2] = [
        ("model", &[]),
        ("teacher", &["train.stage=distill", "distill.teacher=teacher"]),
    ];
    for (model, settings) in cases {
        let bench = Bench::new();
        copy_all(&goldens().join("training/models/qwen3"), &bench.path("teacher"));
        copy_all(&goldens().join("tokenizers/chat"), &bench.path("teacher"));
        // Each tensor takes one read at least.
        let tensors = Weights::open(&bench.path(model)).unwrap().len() as u64;
        let Some(slow) = slow_load(&bench, model, 4000 / tensors + 1) else {
            return;
        };
        let before: Vec<&str> = slow.iter().map(String::as_str).collect();
        let short = [
            "train.max_steps=1",
            "train.save_steps=0",
            "tune.method=full",
            "distributed.timeout=2",
        ];
        let run = [&LONG[..], &short, settings].concat();
        let out = wait(job::begin(job::mpirun_but(&bench, &vec![run; 2], 1, &before)));
        assert!(out.status.success(), "{model}: {}", said(&out));
        assert!(bench.path("out/final").exists());
        let seconds = slowed(&bench);
        assert!(seconds > 3.0, "{model}: {seconds} s");
    }
}

/// A read that does not end is found, although the others wait for this rank without a limit.
#[test]
fn a_disk_that_hangs_while_a_model_is_loaded_ends_the_job() {
    let bench = Bench::new();
    let Some(slow) = slow_load(&bench, "model", 100_000) else {
        return;
    };
    let before: Vec<&str> = slow.iter().map(String::as_str).collect();
    let run = [&LONG[..], &[TIMEOUT]].concat();
    let begun = Instant::now();
    let out = wait(job::begin(job::mpirun_but(&bench, &vec![run; 2], 1, &before)));
    let text = said(&out);
    assert!(!out.status.success(), "{text}");
    assert!(
        begun.elapsed() < Duration::from_secs(30),
        "{:?}: {text}",
        begun.elapsed()
    );
    assert_once(&text, "the disk has not ended an operation in");
    assert!(
        text.contains("rank 1 (host ") && text.contains("model/model.safetensors"),
        "{text}"
    );
}
