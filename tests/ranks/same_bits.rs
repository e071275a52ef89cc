//! The same bits on 1, 2, 3 and 4 ranks, also after a stop on another number of ranks.

use crate::bench::{Bench, copy_all, files, goldens, said};
use crate::job;
use crate::same::{METHODS, assert_same};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::symlink;

/// Five micro-batches do not divide by 2, 3 or 4.
pub const BASE: [&str; 5] = [
    "train.max_steps=10",
    "train.save_steps=4",
    "train.save_total_limit=9",
    "train.batch_size=2",
    "train.gradient_accumulation_steps=5",
];

/// Ways to train beside those of `METHODS`.
const MORE: [(&str, &[&str]); 7] = [
    (
        // The last window of the epoch is short.
        "freeze",
        &[
            "tune.method=freeze",
            "tune.freeze.trainable_layers=1",
            "train.max_grad_norm=0",
            "train.max_steps=-1",
            "train.num_epochs=1",
            "train.save_steps=2",
            "train.batch_size=1",
        ],
    ),
    (
        "rounding and 8-bit states",
        &[
            "tune.method=full",
            "model.dtype=bf16",
            "optimizer.master=stochastic",
            "optimizer.state=int8",
            "memory.activations=keep",
        ],
    ),
    (
        "adafactor",
        &["tune.method=full", "optimizer.name=adafactor", "model.dtype=bf16"],
    ),
    (
        "masked blocks",
        &[
            "tune.method=block",
            "tune.block.partition=ratio",
            "tune.block.mask=scattered",
            "tune.block.order=ascending",
            "tune.block.switch_every=1",
        ],
    ),
    (
        "matrices in random order",
        &[
            "tune.method=block",
            "tune.block.partition=matrix",
            "tune.block.order=random",
            "tune.block.switch_every=1",
            "memory.activations=recompute",
        ],
    ),
    (
        "pretrain",
        &[
            "train.stage=pretrain",
            "tune.method=full",
            "optimizer.name=lion",
            "train.max_steps=-1",
            "train.num_epochs=1",
            "train.save_steps=2",
            "train.batch_size=1",
        ],
    ),
    (
        "orpo",
        &["train.stage=orpo", "data.train=pairs.jsonl", "tune.method=lora"],
    ),
];

/// Ways to train that are compared on one and three ranks only: the exchange is that of the others.
const ON_THREE: [(&str, &[&str]); 15] = [
    (
        "simpo",
        &["train.stage=simpo", "data.train=pairs.jsonl", "tune.method=lora"],
    ),
    ("ia3", &["tune.method=lora", "tune.lora.peft_type=ia3"]),
    ("vera", &["tune.method=lora", "tune.lora.peft_type=vera"]),
    ("loha", &["tune.method=lora", "tune.lora.peft_type=loha"]),
    ("lokr", &["tune.method=lora", "tune.lora.peft_type=lokr"]),
    (
        "oft",
        &[
            "tune.method=lora",
            "tune.lora.peft_type=oft",
            "tune.lora.oft_block_size=8",
        ],
    ),
    ("pissa", &["tune.method=lora", "tune.lora.init_lora_weights=pissa"]),
    ("olora", &["tune.method=lora", "tune.lora.init_lora_weights=olora"]),
    (
        "lora_ga",
        &[
            "tune.method=lora",
            "tune.lora.init_lora_weights=lora_ga",
            "tune.lora.init_samples=2",
        ],
    ),
    (
        "blocks in descending order",
        &[
            "tune.method=block",
            "tune.block.order=descending",
            "tune.block.switch_every=1",
        ],
    ),
    (
        "blocks by importance",
        &[
            "tune.method=block",
            "tune.block.order=importance",
            "tune.block.switch_every=1",
        ],
    ),
    ("one fixed block", &["tune.method=block", "tune.block.order=fixed"]),
    (
        "blocks corrected by LoRA",
        &[
            "tune.method=block",
            "tune.block.correction=lora",
            "tune.block.switch_every=2",
        ],
    ),
    ("lora on int8", &["tune.method=lora", "memory.frozen_weights=int8"]),
    ("lora on int4", &["tune.method=lora", "memory.frozen_weights=int4"]),
];

/// Rank 0 makes the answers of the stages with rewards.
pub const REWARDS: [&str; 7] = [
    "train.stage=grpo",
    "train.max_steps=6",
    "train.gradient_accumulation_steps=4",
    "rlhf.rewards=[\"regex:[aeiou]\", \"length:4\"]",
    "rlhf.max_completion_length=8",
    "rlhf.sample_steps=1",
    "rlhf.num_generations=4",
];
const WITH_REWARDS: [(&str, &[&str]); 2] = [
    (
        "grpo",
        &[
            "tune.method=lora",
            "rlhf.num_iterations=2",
            "rlhf.num_mini_batches=2",
            "rlhf.grpo.beta=0.1",
        ],
    ),
    (
        "ppo",
        &[
            "train.stage=ppo",
            "tune.method=lora",
            "rlhf.num_generations=1",
            "rlhf.num_iterations=2",
            "rlhf.ppo.kl_target=0.5",
            "rlhf.ppo.kl_horizon=20",
        ],
    ),
];

/// Weights in parts.
pub const SHARDED: &str = "distributed.weights=sharded";

/// All files of the checkpoints of a run: names and bytes.
fn exact_checkpoints(bench: &Bench, run: &str) -> Vec<(String, Vec<u8>)> {
    let all = files(&bench.path(run)).into_iter();
    let found: Vec<_> = all.filter(|(name, _)| name.starts_with("checkpoint-")).collect();
    assert!(!found.is_empty(), "{run} has no checkpoint");
    found
}

/// The checkpoints of a run: names and bytes. Where the weights were is not compared, and so no hash of the state.
pub fn checkpoints(bench: &Bench, run: &str) -> Vec<(String, Vec<u8>)> {
    let mut found = exact_checkpoints(bench, run);
    found.retain(|(name, _)| !name.ends_with("manifest.json"));
    for (_, bytes) in found.iter_mut().filter(|(name, _)| name.ends_with("state.json")) {
        let mut state: Value = serde_json::from_slice(bytes).unwrap();
        let weights = state["recipe"]["distributed.weights"].take();
        assert!(!weights.is_null(), "{state}");
        *bytes = state.to_string().into_bytes();
    }
    found
}

/// Trains into `out` and renames it, because checkpoints contain the name of their run.
pub fn train(bench: &Bench, size: usize, settings: &[&str], name: &str) {
    job::train(bench, size, &[&BASE[..], settings, &["train.output_dir=out"]].concat());
    fs::rename(bench.path("out"), bench.path(name)).unwrap();
}

pub fn assert_same_checkpoints(bench: &Bench, one: &str, other: &str, method: &str) {
    let (one, found) = (checkpoints(bench, one), checkpoints(bench, other));
    let names = |all: &[(String, Vec<u8>)]| all.iter().map(|f| f.0.clone()).collect::<Vec<_>>();
    assert_eq!(names(&one), names(&found), "{method}: {other}");
    for (a, b) in one.iter().zip(&found) {
        assert!(a.1 == b.1, "{method}: {} of {other} differs", a.0);
    }
}

fn check(methods: &[(&str, &[&str])]) {
    check_on(&[2, 3, 4], methods);
}

fn check_on(sizes: &[usize], methods: &[(&str, &[&str])]) {
    for (method, settings) in methods {
        let bench = Bench::new();
        copy_all(&goldens().join("training/models/qwen3"), &bench.path("teacher"));
        copy_all(&goldens().join("tokenizers/chat"), &bench.path("teacher"));
        train(&bench, 1, settings, "one");
        for &size in sizes {
            let name = format!("of-{size}");
            // Three ranks have parts of the weights, if this can be.
            let whole = [
                "memory.tier=disk",
                "optimizer.name=adafactor",
                "tune.block.partition=ratio",
            ];
            let sharded = size == 3 && !settings.iter().any(|setting| whole.contains(setting));
            let weights = if sharded { &[SHARDED][..] } else { &[] };
            train(&bench, size, &[settings, weights].concat(), &name);
            assert_same_checkpoints(&bench, "one", &name, method);
            if !sharded {
                let [one, other] = ["one", &name].map(|run| exact_checkpoints(&bench, run));
                assert!(one == other, "{method}: a file of a checkpoint of {name} differs");
            }
            assert_same(&bench, "one", &name);
            let left = fs::read_dir(bench.path(&name)).unwrap().flatten();
            let scratch: Vec<_> = left
                .filter(|e| e.file_name().to_string_lossy().starts_with("rank-"))
                .collect();
            assert!(scratch.is_empty(), "{scratch:?}");
        }
    }
}

#[test]
fn methods_have_the_bits_of_one_rank() {
    check(&METHODS[..7]);
}

#[test]
fn stages_have_the_bits_of_one_rank() {
    check(&METHODS[7..]);
}

#[test]
fn optimizers_and_tiers_have_the_bits_of_one_rank() {
    check(&MORE);
}

#[test]
fn other_adapters_and_orders_have_the_bits_of_one_rank() {
    check_on(&[3], &ON_THREE);
}

#[test]
fn stages_with_rewards_have_the_bits_of_one_rank() {
    for (stage, settings) in WITH_REWARDS {
        check(&[(stage, &[&REWARDS[..], settings].concat())]);
    }
}

#[test]
fn distillation_has_the_bits_of_one_rank() {
    let settings = [
        "train.stage=distill",
        "distill.teacher=teacher",
        "distill.lmbda=0.5",
        "distill.max_new_tokens=8",
    ];
    check(&[("distill", &settings)]);
}

/// A run on four ranks is continued on 1, 2 and 3.
#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    for (method, settings) in [METHODS[0], METHODS[3], METHODS[4]] {
        let bench = Bench::new();
        train(&bench, 4, &[settings, &[SHARDED]].concat(), "whole");
        for size in [1, 2, 3] {
            let name = format!("resumed-{size}");
            let from = format!("--resume={}", bench.path("whole/checkpoint-4").display());
            let weights = if size == 3 {
                SHARDED
            } else {
                "distributed.weights=replicated"
            };
            train(&bench, size, &[settings, &[&from, weights]].concat(), &name);
            // With that of the run before.
            assert!(
                checkpoints(&bench, "whole") == checkpoints(&bench, &name),
                "{method}: checkpoints on {size} ranks"
            );
            let result = |run: &str| files(&bench.path(run).join("final"));
            assert!(result("whole") == result(&name), "{method}: final/ on {size} ranks");
        }
    }
}

/// Each rank has its own directory of start values, as on machines without shared files, and only that of one rank has them from an
/// earlier run. Weights in parts are collected by all ranks or by none.
#[test]
fn start_values_are_read_by_all_ranks_or_by_none() {
    let (_, settings) = METHODS.iter().find(|(method, _)| *method == "corda").unwrap();
    let bench = Bench::new();
    let names = ["first", "second"];
    for name in names {
        fs::create_dir_all(bench.path(name).join("starts")).unwrap();
        for shared in ["model", "rows.jsonl", "r.toml"] {
            symlink(bench.path(shared), bench.path(name).join(shared)).unwrap();
        }
    }
    symlink("/proc/self/cwd/starts", bench.path(".ft-starts")).unwrap();
    let train = |out: &str| {
        let out = format!("train.output_dir={}", bench.path(out).display());
        let arguments = [&BASE[..], settings, &[SHARDED, &out]].concat();
        let ranks = names.map(|name| (bench.path(name), arguments.clone()));
        let ran = job::wait(job::begin(job::mpirun_in(&bench, &ranks)));
        assert!(ran.status.success(), "{}", said(&ran));
        said(&ran).contains("uses the components of an earlier run")
    };
    let starts = |name: &str| files(&bench.path(name).join("starts"));
    assert!(!train("out"));
    fs::rename(bench.path("out"), bench.path("first-run")).unwrap();
    assert!(starts("first").len() == 1 && starts("first") == starts("second"));
    assert!(train("out"));
    fs::rename(bench.path("out"), bench.path("second-run")).unwrap();
    fs::remove_file(bench.path("second/starts").join(&starts("second")[0].0)).unwrap();
    assert!(!train("out"));
    assert!(starts("first") == starts("second"));
    for run in ["second-run", "out"] {
        assert_same(&bench, "first-run", run);
    }
}

/// The directory of start values is a file here. A run needs only its own.
#[test]
fn start_values_that_cannot_be_stored_end_no_run() {
    let (_, settings) = METHODS.iter().find(|(method, _)| *method == "corda").unwrap();
    let bench = Bench::new();
    for size in [1, 2] {
        let out = bench.path(&format!("on-{size}/out"));
        fs::create_dir_all(out.parent().unwrap()).unwrap();
        fs::write(out.with_file_name(".ft-starts"), "").unwrap();
        let out = format!("train.output_dir={}", out.display());
        let short = ["train.max_steps=1", "train.save_steps=0"];
        let ran = job::run(&bench, size, &[&BASE[..], settings, &short, &[&out]].concat());
        let text = said(&ran);
        assert!(ran.status.success(), "{text}");
        assert_eq!(text.matches("cannot be stored for other runs").count(), 1, "{text}");
    }
}
