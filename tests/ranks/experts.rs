//! Experts that are divided among ranks: the files of one rank, and refusals before a run writes anything.

use crate::bench::{Bench, files, said};
use crate::job;
use crate::parts::PARTS;
use serde_json::Value;
use std::fs;

const BASE: [&str; 6] = [
    "train.max_steps=3",
    "train.save_steps=2",
    "train.batch_size=1",
    "train.gradient_accumulation_steps=4",
    "data.eval_fraction=0.2",
    "train.eval_steps=3",
];
const DIVIDED: &str = "distributed.weights=expert-parallel";

/// The weights and optimizer states that a run saved, by the names of their files.
fn saved(bench: &Bench, run: &str) -> Vec<(String, Vec<u8>)> {
    let mut all = files(&bench.path(run));
    all.retain(|(name, _)| name.ends_with(".safetensors"));
    assert!(
        all.len() >= 3,
        "{:?}",
        all.iter().map(|(name, _)| name).collect::<Vec<_>>()
    );
    all
}

fn lines(bench: &Bench, run: &str) -> Vec<Value> {
    let text = fs::read_to_string(bench.path(run).join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn divided_experts_have_the_files_of_one_rank() {
    let bench = Bench::of_family("qwen3_moe");
    let train = |method: &[&str], size: usize, more: &[&str], name: &str| {
        let out = format!("train.output_dir={name}");
        job::train(&bench, size, &[&BASE[..], method, more, &[&out]].concat());
    };
    // Each block has two experts of a layer, or the rest.
    let block = [
        "tune.method=block",
        "tune.block.partition=experts",
        "tune.block.experts_per_block=2",
        "tune.block.switch_every=1",
        "model.dtype=bf16",
    ];
    train(&block, 1, &[], "blocks-one");
    train(&block, 2, &[DIVIDED], "blocks-two");
    assert!(saved(&bench, "blocks-one") == saved(&bench, "blocks-two"));
    let lora = ["tune.method=lora", "tune.lora.r=4"];
    train(&lora, 1, &[], "one");
    // The last round of three ranks has one micro-batch.
    train(&lora, 3, &[DIVIDED], "three");
    assert!(saved(&bench, "one") == saved(&bench, "three"));
    let numbers = |run: &str| -> Vec<String> {
        let of = |line: Value| ["loss", "grad_norm", "eval_loss"].map(|key| line[key].to_string());
        lines(&bench, run).into_iter().flat_map(of).collect()
    };
    assert_eq!(numbers("one"), numbers("three"));
    let sent = lines(&bench, "three")
        .iter()
        .filter_map(|line| line["expert_bytes_sent"].as_f64())
        .sum::<f64>();
    assert!(sent > 0.0);
    // It goes on with another number of ranks.
    let from = format!("--resume={}", bench.path("three/checkpoint-2").display());
    train(&lora, 2, &[DIVIDED, &from], "resumed");
    let result = |run: &str| files(&bench.path(run).join("final"));
    assert!(result("one") == result("resumed"));
    // Each rank saves its own experts.
    train(&block, 2, &[DIVIDED, PARTS], "blocks-in-parts");
    let from = format!("--resume={}", bench.path("blocks-in-parts/checkpoint-2").display());
    train(&block, 1, &[&from], "blocks-resumed");
    for run in ["blocks-in-parts", "blocks-resumed"] {
        assert!(result("blocks-one") == result(run), "{run}");
    }
}

#[test]
fn what_needs_whole_experts_is_refused_before_the_run() {
    let bench = Bench::of_family("qwen3_moe");
    for (settings, text) in [
        (
            &["tune.method=full", "optimizer.name=adafactor"][..],
            "needs an update of each element",
        ),
        (
            &[
                "tune.method=lora",
                "tune.lora.target_parameters=[\"mlp.experts.down_proj\"]",
            ],
            "needs experts without adapters",
        ),
        (&["tune.method=lora", "memory.tier=disk"], "divides experts in memory"),
    ] {
        let out = job::run(&bench, 2, &[settings, &[DIVIDED, "train.max_steps=1"]].concat());
        assert!(!out.status.success() && said(&out).contains(text), "{}", said(&out));
        assert!(!bench.path("runs").exists());
    }
}
