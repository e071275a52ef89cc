//! Resumes after files changed or moved that a recipe names beside its model: rows that are read during the run, a given
//! adapter, rewards.

use crate::bench::{Bench, copy_all, said};
use std::fs;
use std::path::Path;
use std::process::Output;

/// Changes the lowest bit of the last number of a file of f32 numbers.
fn flip(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let at = bytes.len() - 4;
    bytes[at] ^= 1;
    fs::write(file, bytes).unwrap();
}

fn refused(out: &Output, name: &str) {
    let text = said(out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(
        text.contains("differ from the saved run") && text.contains(name),
        "{name} is not named\n{text}"
    );
}

fn resumed(out: &Output) -> String {
    let text = said(out);
    assert!(out.status.success() && text.contains("resumed after step 2"), "{text}");
    text
}

/// Row R6.
#[test]
fn rows_that_are_read_during_the_run_may_move_and_not_change() {
    let bench = Bench::new();
    let row = |i: usize| format!("{{\"text\": \"row {i:02} goes on\"}}\n");
    let rows: String = (0..40).map(row).collect();
    fs::write(bench.path("a.jsonl"), &rows).unwrap();
    let train = |file: &str, more: &[&str]| {
        let file = format!("data.train={file}");
        let settings = [
            "train",
            "--recipe",
            "r.toml",
            &file[..],
            "data.streaming=true",
            "data.shuffle_window=15",
            "tune.method=lora",
            "train.batch_size=1",
            "train.gradient_accumulation_steps=1",
            "train.max_steps=2",
            "train.save_steps=2",
            "train.output_dir=run",
        ];
        bench.ft(&[&settings[..], more].concat())
    };
    let out = train("a.jsonl", &[]);
    assert!(out.status.success(), "{}", said(&out));
    // A row that this run has not read, in a file of the same size.
    fs::write(bench.path("a.jsonl"), rows.replace("row 30", "row 99")).unwrap();
    refused(&train("a.jsonl", &["--resume"]), "training rows: hash ");
    fs::write(bench.path("moved.jsonl"), rows).unwrap();
    resumed(&train("moved.jsonl", &["--resume"]));
}

/// Row R6.
#[test]
fn adapters_and_rewards_may_move_and_not_change() {
    let bench = Bench::new();
    let short = ["train.batch_size=2", "train.gradient_accumulation_steps=2"];
    let one = ["train.max_steps=1", "train.save_steps=0"];
    let start = ["tune.method=lora", "tune.lora.r=2", "train.output_dir=start"];
    bench.train(&[&short[..], &one, &start].concat());
    let judge = [
        "train.stage=reward",
        "data.train=pairs.jsonl",
        "tune.method=full",
        "train.output_dir=judge",
    ];
    bench.train(&[&short[..], &one, &judge].concat());
    copy_all(&bench.path("start/final"), &bench.path("adapter"));
    copy_all(&bench.path("judge/final"), &bench.path("scores"));
    fs::write(bench.path("judge.sh"), "while read -r line; do echo 1; done\n").unwrap();
    let train = |adapter: &str, scores: &str, more: &[&str]| {
        let adapter = format!("tune.lora.adapter={adapter}");
        let rewards = format!("rlhf.rewards=[\"model:{scores}\", \"program:sh judge.sh\"]");
        let settings = [
            "train",
            "--recipe",
            "r.toml",
            "train.stage=grpo",
            "tune.method=lora",
            &adapter[..],
            &rewards[..],
            "rlhf.grpo.beta=0.1",
            "rlhf.num_generations=4",
            "rlhf.max_completion_length=6",
            "train.max_steps=2",
            "train.save_steps=2",
            "train.output_dir=run",
        ];
        bench.ft(&[&settings[..], &short, more].concat())
    };
    let out = train("adapter", "scores", &[]);
    assert!(out.status.success(), "{}", said(&out));
    let resume = |adapter: &str, scores: &str| train(adapter, scores, &["--resume"]);

    // Moved: the same content.
    copy_all(&bench.path("adapter"), &bench.path("adapter-2"));
    copy_all(&bench.path("scores"), &bench.path("scores-2"));
    let text = resumed(&resume("adapter-2", "scores-2"));
    assert!(!text.contains("a program of `rlhf.rewards` has changed"), "{text}");
    // Changed where it was.
    flip(&bench.path("adapter/adapter_model.safetensors"));
    refused(&resume("adapter", "scores"), "tune.lora.adapter");
    flip(&bench.path("adapter/adapter_model.safetensors"));
    flip(&bench.path("scores/model.safetensors"));
    refused(&resume("adapter", "scores"), "rlhf.rewards");
    // Moved and changed.
    refused(&resume("adapter", "./scores"), "rlhf.rewards");
    flip(&bench.path("scores/model.safetensors"));
    // A program that was corrected goes on, with a warning.
    fs::write(bench.path("judge.sh"), "while read -r line; do echo 2; done\n").unwrap();
    let text = resumed(&resume("adapter", "scores"));
    assert!(
        text.contains("a program of `rlhf.rewards` has changed since checkpoint-2"),
        "{text}"
    );
}
