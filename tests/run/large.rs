//! Rows in a token cache, and rows that are read during the run.

use crate::bench::{Bench, number};
use crate::resume::assert_same;
use std::fs;
use std::time::{Duration, Instant};

/// Rows of text, some longer than 64 tokens, and a few for the evaluation.
fn texts(bench: &Bench) {
    let row = |i: usize| format!("{{\"text\": \"row {i} {}\"}}\n", "goes on and on ".repeat(1 + i % 30));
    fs::write(bench.path("a.jsonl"), (0..40).map(row).collect::<String>()).unwrap();
    fs::write(bench.path("b.jsonl"), (40..60).map(row).collect::<String>()).unwrap();
}

const BASE: [&str; 6] = [
    "data.train=[\"a.jsonl\", \"b.jsonl\"]",
    "data.max_length=64",
    "data.packing=true",
    "tune.method=lora",
    "train.batch_size=1",
    "train.gradient_accumulation_steps=2",
];

#[test]
fn a_run_with_a_token_cache_is_the_run_in_memory_and_the_cache_can_be_removed() {
    let bench = Bench::new();
    texts(&bench);
    let more = ["data.eval_fraction=0.1", "train.eval_steps=3", "train.max_steps=6"];
    let run = |out: &str, cache: &str| {
        let out = format!("train.output_dir={out}");
        bench.train(&[&BASE[..], &more, &[&out, cache]].concat());
    };
    run("memory", "data.cache=false");
    assert!(!bench.path(".ft-tokens").exists());
    run("first", "data.cache=true");
    run("second", "data.cache=true");
    assert_same(&bench, "memory", "first");
    assert_same(&bench, "memory", "second");
    let steps = bench.steps("first");
    let fill = steps[0]["packing_fill"].as_f64().unwrap();
    assert!(fill > 0.5 && fill <= 1.0, "{fill}");
    let events = bench.lines("first/events.jsonl");
    let data = events.iter().find(|e| e["event"] == "data").unwrap();
    assert!(
        data["split_rows"].as_u64().unwrap() > 0 && data["truncated_rows"] == 0,
        "{data}"
    );
    let sets = || fs::read_dir(bench.path(".ft-tokens")).unwrap().count();
    assert_eq!(sets(), 1);
    fs::remove_dir_all(bench.path(".ft-tokens")).unwrap();
    run("third", "data.cache=true");
    assert_same(&bench, "memory", "third");
    // `ft data` counts the same rows.
    let ft = |cache: &str| {
        let arguments = [&["data", "--recipe", "r.toml", "--rows", "1"][..], &BASE, &[cache]].concat();
        let out = bench.ft(&arguments);
        assert!(out.status.success());
        String::from_utf8(out.stdout).unwrap()
    };
    let shown = ft("data.cache=true");
    assert_eq!(shown, ft("data.cache=false"));
    assert!(
        shown.contains("rows split") && shown.contains("are split into"),
        "{shown}"
    );
}

#[test]
fn a_run_that_reads_its_rows_resumes_to_the_same_bits() {
    let bench = Bench::new();
    texts(&bench);
    fs::copy(bench.path("b.jsonl"), bench.path("eval.jsonl")).unwrap();
    let more = [
        "data.streaming=true",
        "data.shuffle_window=15",
        "data.eval=eval.jsonl",
        "train.eval_steps=40",
        "train.max_steps=80",
        "train.save_steps=3",
    ];
    let with = |out: &'static str| [&BASE[..], &more, &[out]].concat();
    bench.train(&with("train.output_dir=whole"));
    let steps = bench.steps("whole");
    assert!(steps.last().unwrap()["epoch"].as_f64().unwrap() >= 1.0);
    assert!(
        steps
            .iter()
            .all(|s| s["truncated_rows"] == 0.0 && s["dropped_rows"] == 0.0)
    );
    let mut child = bench.start(&with("train.output_dir=broken"));
    let started = Instant::now();
    while !bench.path("broken/checkpoint-6/manifest.json").exists() && started.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    bench.train(&[&with("train.output_dir=broken")[..], &["--resume"]].concat());
    assert_same(&bench, "whole", "broken");
}

#[test]
fn rl_prompts_in_a_token_cache_are_those_in_memory_also_in_a_resumed_run() {
    let bench = Bench::new();
    let row = |i: usize| format!("{{\"prompt\": \"ask {i}\", \"answer\": \"{i}\", \"level\": 0.3}}\n");
    fs::write(bench.path("q.jsonl"), (0..24).map(row).collect::<String>()).unwrap();
    let with = |out: &'static str, cache: &'static str| {
        [
            "data.train=q.jsonl",
            "data.render=plain",
            "data.eval_fraction=0.2",
            "train.stage=grpo",
            "tune.method=lora",
            "train.batch_size=4",
            "train.gradient_accumulation_steps=1",
            "train.max_steps=4",
            "train.save_steps=2",
            "train.eval_steps=2",
            "rlhf.rewards=[\"regex:[aeiou]\"]",
            "rlhf.num_generations=4",
            "rlhf.max_completion_length=6",
            out,
            cache,
        ]
    };
    bench.train(&with("train.output_dir=memory", "data.cache=false"));
    bench.train(&with("train.output_dir=first", "data.cache=true"));
    bench.train(&with("train.output_dir=second", "data.cache=true"));
    assert_same(&bench, "memory", "first");
    assert_same(&bench, "memory", "second");
    assert_eq!(fs::read_dir(bench.path(".ft-tokens")).unwrap().count(), 1);
    // A checkpoint of the run in memory continues with cached prompts.
    let more = ["--resume", "second/checkpoint-2"];
    bench.train(&[&with("train.output_dir=second", "data.cache=true")[..], &more].concat());
    assert_same(&bench, "memory", "second");
    let counts = |cache: &'static str| {
        let out = bench.ft(&[
            &["data", "--stats", "--recipe", "r.toml"][..],
            &with("train.output_dir=x", cache),
        ]
        .concat());
        assert!(out.status.success());
        String::from_utf8(out.stdout).unwrap()
    };
    assert_eq!(counts("data.cache=true"), counts("data.cache=false"));
}

#[test]
fn preference_stages_with_a_token_cache_are_those_in_memory() {
    let bench = Bench::new();
    let row = |i: usize| format!("{{\"prompt\": \"ask {i}\", \"chosen\": \" yes {i}\", \"rejected\": \" no\"}}\n");
    fs::write(bench.path("p.jsonl"), (0..24).map(row).collect::<String>()).unwrap();
    for stage in ["dpo", "orpo", "kto"] {
        let run = |out: &str, cache: &str| {
            let (stage, out) = (
                format!("train.stage={stage}"),
                format!("train.output_dir={stage}-{out}"),
            );
            bench.train(&[
                "data.train=p.jsonl",
                "data.render=plain",
                "data.eval_fraction=0.2",
                "tune.method=lora",
                "train.batch_size=2",
                "train.gradient_accumulation_steps=1",
                "train.max_steps=3",
                &stage,
                &out,
                cache,
            ]);
        };
        run("memory", "data.cache=false");
        run("first", "data.cache=true");
        run("second", "data.cache=true");
        assert_same(&bench, &format!("{stage}-memory"), &format!("{stage}-first"));
        assert_same(&bench, &format!("{stage}-memory"), &format!("{stage}-second"));
    }
    // The three stages train other parts of the rows.
    assert_eq!(fs::read_dir(bench.path(".ft-tokens")).unwrap().count(), 3);
}

/// The rows cannot be read any more, before a step whose gradients are applied as soon as they are computed: the state before it
/// is saved.
#[test]
fn a_file_that_cannot_be_read_any_more_loses_no_step() {
    let bench = Bench::new();
    let row = |i: usize| format!("{{\"text\": \"row {i} goes on\"}}\n");
    fs::write(bench.path("a.jsonl"), (0..12).map(row).collect::<String>()).unwrap();
    let settings = [
        "data.train=a.jsonl",
        "data.streaming=true",
        "data.shuffle_window=4",
        "data.max_length=64",
        "tune.method=full",
        "train.max_grad_norm=0",
        "train.batch_size=1",
        "train.gradient_accumulation_steps=1",
        "train.max_steps=1000000",
        "train.save_steps=1000000",
        "schedule.warmup_steps=0",
        "train.output_dir=run",
    ];
    let mut child = bench.start(&settings);
    let started = Instant::now();
    while bench.steps("run").len() < 3 {
        assert!(started.elapsed() < Duration::from_secs(60), "no steps");
        std::thread::sleep(Duration::from_millis(2));
    }
    let plan = fs::read_to_string(bench.path("run/plan.json")).unwrap();
    assert!(plan.contains("\"applied as soon as they are computed\""), "{plan}");
    // The next epoch opens it again.
    fs::rename(bench.path("a.jsonl"), bench.path("away.jsonl")).unwrap();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > Duration::from_secs(120) {
            child.kill().unwrap();
            panic!("the run does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(child.wait().unwrap().code(), Some(1));
    let done = bench.steps("run").len();
    assert!(
        bench.path(&format!("run/checkpoint-{done}/manifest.json")).exists(),
        "{done} steps"
    );
    fs::rename(bench.path("away.jsonl"), bench.path("a.jsonl")).unwrap();
    let end = format!("train.max_steps={}", done + 3);
    bench.train(&[&settings[..], &[end.as_str(), "--resume"]].concat());
    let events = bench.lines("run/events.jsonl");
    let resumed = events.iter().rfind(|e| e["event"] == "resume").unwrap();
    assert_eq!(resumed["step"], done, "{resumed}");
    let steps: Vec<f64> = bench.steps("run").iter().map(|line| number(line, "step")).collect();
    let all: Vec<f64> = (1..=done + 3).map(|step| step as f64).collect();
    assert_eq!(steps, all);
}
