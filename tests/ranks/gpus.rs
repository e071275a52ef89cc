//! Ranks with GPUs: the bits of one rank, also after a stop on another number of ranks; which GPU belongs to which rank.
//!
//! `tools/soft-cuda/run.sh` runs them on GPUs in software, on as many as a test needs. On a real GPU the ranks share it.

use crate::bench::{Bench, said};
use crate::job;
use crate::parts::PARTS;
use crate::same::{assert_same_final, assert_same_lines};
use crate::sequence::numbers;
use serde_json::Value;
use std::fs;
use std::process::{Command, Output};

/// On one rank `auto` lets products add to sums.
pub const BASE: [&str; 7] = [
    "train.max_steps=3",
    "train.save_steps=2",
    "train.save_total_limit=9",
    "train.batch_size=1",
    "train.gradient_accumulation_steps=3",
    "schedule.warmup_ratio=0",
    "distributed.sum=ordered",
];

/// Matrices with more than one unit of division, so that ranks have parts of them.
pub const WIDE: [&str; 2] = [
    concat!("model.path=", env!("CARGO_MANIFEST_DIR"), "/assets/tiny"),
    "data.max_length=64",
];

/// True if the GPUs are those of the software driver.
pub fn in_software() -> bool {
    std::env::var_os("SOFT_CUDA_FEATURES").is_some()
}

/// False, with a message, if there is no GPU and none is required.
fn has_gpus() -> bool {
    let required = std::env::var("FT_REQUIRE_GPU").is_ok_and(|v| v == "1");
    if in_software() || ft::ops::device::open("cuda:0").is_ok() {
        return true;
    }
    assert!(!required, "FT_REQUIRE_GPU=1, but there is no GPU");
    eprintln!("skipped: no GPU");
    false
}

/// Runs a job of `size` ranks on a machine with `gpus` GPUs in software.
fn run(bench: &Bench, size: usize, gpus: usize, arguments: &[&str]) -> Output {
    ended(job::mpirun(bench, &vec![arguments.to_vec(); size]), gpus)
}

fn ended(mut command: Command, gpus: usize) -> Output {
    if in_software() {
        let numbers: Vec<String> = (0..gpus).map(|gpu| gpu.to_string()).collect();
        command
            .env("SOFT_CUDA_DEVICES", gpus.to_string())
            .env("CUDA_VISIBLE_DEVICES", numbers.join(","));
    }
    job::wait(job::begin(command))
}

/// Trains into `out` and renames it, because checkpoints contain the name of their run.
fn train(bench: &Bench, size: usize, settings: &[&str], name: &str) {
    trained(bench, settings, name, |arguments| run(bench, size, size, arguments));
}

/// As `train`; `run` runs the job.
fn trained(bench: &Bench, settings: &[&str], name: &str, run: impl Fn(&[&str]) -> Output) {
    // A machine with real GPUs may have one only.
    let device = if in_software() { "auto" } else { "cuda:0" };
    let device = format!("model.device={device}");
    let mut arguments: Vec<&str> = BASE.to_vec();
    arguments.retain(|own| {
        !settings
            .iter()
            .any(|more| more.split('=').next() == own.split('=').next())
    });
    arguments.extend(settings);
    arguments.extend([device.as_str(), "train.output_dir=out"]);
    let out = run(&arguments);
    assert!(out.status.success(), "{name}, {arguments:?}\n{}", said(&out));
    fs::rename(bench.path("out"), bench.path(name)).unwrap();
}

/// The checkpoints of a run: names and bytes, without their lists of hashes.
fn checkpoints(bench: &Bench, run: &str, from: u64) -> Vec<(String, Vec<u8>)> {
    let mut found = crate::bench::files(&bench.path(run));
    found.retain(|(name, _)| {
        let step = name.strip_prefix("checkpoint-").and_then(|rest| rest.split_once('/'));
        let step = step.and_then(|(step, _)| step.parse::<u64>().ok());
        step.is_some_and(|step| step > from) && !name.ends_with("manifest.json")
    });
    assert!(!found.is_empty(), "{run} has no checkpoint");
    found
}

pub fn assert_same_checkpoints(bench: &Bench, one: &str, other: &str, from: u64) {
    let (one, found) = (checkpoints(bench, one, from), checkpoints(bench, other, from));
    let names = |all: &[(String, Vec<u8>)]| all.iter().map(|f| f.0.clone()).collect::<Vec<_>>();
    assert_eq!(names(&one), names(&found), "{other}");
    for (a, b) in one.iter().zip(&found) {
        assert!(a.1 == b.1, "{} of {other} differs", a.0);
    }
}

/// Compares runs on these numbers of ranks with that on one.
fn check(settings: &[&str], sizes: &[usize]) -> Bench {
    check_in(Bench::new(), settings, sizes)
}

fn check_in(bench: Bench, settings: &[&str], sizes: &[usize]) -> Bench {
    train(&bench, 1, settings, "one");
    for size in sizes {
        let name = format!("of-{size}");
        train(&bench, *size, settings, &name);
        assert_same_lines(&bench, "one", &name);
        assert_same_final(&bench, "one", &name);
        assert_same_checkpoints(&bench, "one", &name, 0);
    }
    bench
}

/// A run of three ranks is continued on 1 and 2.
#[test]
fn full_training_has_the_bits_of_one_rank_also_after_a_stop() {
    if !has_gpus() {
        return;
    }
    let settings = [
        &WIDE[..],
        &["tune.method=full", "model.dtype=bf16", "train.save_steps=1"],
    ]
    .concat();
    let bench = check(&settings, &[2, 3]);
    // Moments, masters and replicated weights of GPUs in parts.
    train(&bench, 3, &[&settings[..], &[PARTS]].concat(), "in-parts");
    for (run, size) in [("of-3", 1), ("of-3", 2), ("in-parts", 2)] {
        let from = format!("--resume={}", bench.path(run).join("checkpoint-2").display());
        let name = format!("{run}-on-{size}");
        train(&bench, size, &[&settings[..], &[&from]].concat(), &name);
        assert_same_final(&bench, "one", &name);
        assert_same_checkpoints(&bench, "one", &name, 2);
    }
}

/// Of three micro-batches the second rank computes the last one again, for nothing.
#[test]
fn sums_of_own_micro_batches_count_each_of_them_once() {
    if !has_gpus() {
        return;
    }
    let bench = Bench::new();
    let settings = ["tune.method=full", "model.dtype=f32", "train.max_steps=2"];
    train(&bench, 1, &settings, "one");
    train(
        &bench,
        2,
        &[&settings[..], &["distributed.sum=window"]].concat(),
        "window",
    );
    let numbers = |run: &str| -> Vec<[f64; 2]> {
        let text = fs::read_to_string(bench.path(run).join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let of = |line: Value| Some([line["loss"].as_f64()?, line["grad_norm"].as_f64()?]);
        lines.filter_map(of).collect()
    };
    let (one, window) = (numbers("one"), numbers("window"));
    assert_eq!((one.len(), window.len()), (2, 2));
    for (a, b) in one.as_flattened().iter().zip(window.as_flattened()) {
        assert!((a - b).abs() < 1e-4 * a.abs(), "{one:?} {window:?}");
    }
}

#[test]
fn blocks_from_the_host_have_the_bits_of_one_rank() {
    if has_gpus() {
        let block = [
            "tune.method=block",
            "tune.block.switch_every=2",
            "model.dtype=bf16",
            "memory.tier=host",
        ];
        check(&block, &[2]);
    }
}

/// A layer is brought with all its experts; rank 0 answers alone.
#[test]
fn a_mixture_of_experts_in_parts_has_the_bits_of_one_rank() {
    if !has_gpus() {
        return;
    }
    for method in ["lora", "full"] {
        let settings = [
            &format!("tune.method={method}"),
            "tune.lora.r=4",
            "distributed.weights=sharded",
            "train.sample_prompts=Two plus three",
            "train.max_steps=2",
        ];
        let settings: Vec<&str> = settings
            .into_iter()
            .filter(|s| method == "lora" || !s.contains("lora.r"))
            .collect();
        check_in(Bench::of_family("qwen3_moe"), &settings, &[2]);
        let replicated = settings.into_iter().filter(|s| !s.contains("sharded"));
        check_in(Bench::of_family("qwen3_moe"), &replicated.collect::<Vec<_>>(), &[2]);
    }
    let divided = [
        &BASE[..],
        &[
            "model.device=auto",
            "distributed.weights=expert-parallel",
            "train.output_dir=out",
        ],
    ]
    .concat();
    let out = run(&Bench::of_family("qwen3_moe"), 2, 2, &divided);
    assert_eq!(out.status.code(), Some(2));
    assert!(
        said(&out).contains("divided experts are not supported on GPUs yet"),
        "{}",
        said(&out)
    );
}

/// Each rank has a part of every matrix of the layers: frozen parts in host memory, those of active matrices on its GPU.
#[test]
fn weights_in_parts_have_the_bits_of_one_rank() {
    if !has_gpus() {
        return;
    }
    let all = |own: &[&'static str]| [&WIDE[..], &["distributed.weights=sharded", "train.save_steps=1"], own].concat();
    let full = all(&["tune.method=full", "model.dtype=bf16"]);
    let bench = check(&full, &[2, 3]);
    train(&bench, 3, &[&full[..], &[PARTS]].concat(), "in-parts");
    for (run, size) in [("of-3", 1), ("of-3", 2), ("in-parts", 1)] {
        let from = format!("--resume={}", bench.path(run).join("checkpoint-2").display());
        let name = format!("{run}-on-{size}");
        train(&bench, size, &[&full[..], &[&from]].concat(), &name);
        assert_same_final(&bench, "one", &name);
    }
    let block = ["tune.method=block", "model.dtype=bf16", "tune.block.switch_every=1"];
    check(&all(&block), &[2, 3]);
    check(
        &all(&["tune.method=lora", "model.dtype=bf16", "memory.frozen_weights=nf4"]),
        &[2],
    );
}

/// Two machines of one or two ranks, which are one machine in truth. Copies of the parts of other machines are in host memory.
#[test]
fn weights_in_parts_of_each_machine_have_the_bits_of_one_rank() {
    if !has_gpus() || !job::can_name_machines() {
        return;
    }
    let common = [
        "distributed.weights=sharded-in-node",
        "train.save_steps=1",
        "model.dtype=bf16",
    ];
    let block = [
        "tune.method=block",
        "tune.block.switch_every=1",
        "memory.frozen_weights=nf4",
    ];
    let cases: [(&[&str], &[&str]); 2] = [
        (
            &["tune.method=full", "train.gradient_accumulation_steps=4"],
            &["a", "b", "a", "b"],
        ),
        (&block, &["a", "b"]),
    ];
    for (own, hosts) in cases {
        let settings = [&WIDE[..], &common, own].concat();
        let bench = Bench::new();
        train(&bench, 1, &settings, "one");
        trained(&bench, &settings, "two-machines", |arguments| {
            let ranks = vec![arguments.to_vec(); hosts.len()];
            ended(job::mpirun_on(&bench, &ranks, hosts), hosts.len() / 2)
        });
        assert_same_lines(&bench, "one", "two-machines");
        assert_same_final(&bench, "one", "two-machines");
        assert_same_checkpoints(&bench, "one", "two-machines", 0);
    }
}

#[test]
fn adapters_in_f32_have_the_bits_of_one_rank() {
    if has_gpus() {
        check(
            &["tune.method=lora", "tune.lora.r=4", "tune.lora.lora_dropout=0.1"],
            &[3],
        );
    }
}

/// Random numbers, codes and averages of a part begin where the part begins; Adafactor needs whole gradients.
#[test]
fn optimizers_have_the_bits_of_one_rank() {
    if has_gpus() {
        let rounded = [
            "tune.method=full",
            "model.dtype=bf16",
            "optimizer.master=stochastic",
            "optimizer.state=int8",
            "train.ema_decay=0.5",
        ];
        check(&[&WIDE[..], &rounded].concat(), &[2]);
        check(&["tune.method=full", "optimizer.name=adafactor"], &[2]);
    }
}

/// Averages of ranks that train alone; on one rank the keys have no effect.
#[test]
fn ranks_that_train_alone_are_averaged() {
    if !has_gpus() {
        return;
    }
    let bench = Bench::new();
    let apart = [
        "tune.method=full",
        "distributed.sync_every=2",
        "distributed.sum=auto",
        "train.max_steps=4",
    ];
    train(&bench, 2, &apart, "gpu");
    job::train(
        &bench,
        2,
        &[
            &apart[..],
            &[
                "train.batch_size=1",
                "train.gradient_accumulation_steps=3",
                "train.save_steps=2",
                "schedule.warmup_ratio=0",
                "model.device=cpu",
                "train.output_dir=cpu",
            ],
        ]
        .concat(),
    );
    let losses = |run: &str| -> Vec<f64> {
        let steps = bench.steps(run);
        steps.iter().map(|step| step["loss"].as_f64().unwrap()).collect()
    };
    let (here, there) = (losses("cpu"), losses("gpu"));
    assert_eq!(here.len(), 4);
    for (a, b) in here.iter().zip(&there) {
        assert!((a - b).abs() < 1e-4 * a, "CPU {here:?}, GPU {there:?}");
    }
}

/// Ranks that share the tokens of a micro-batch exchange heads of attention, and rows of convolutions, through host memory.
#[test]
fn ranks_that_share_micro_batches_have_the_losses_of_one_gpu() {
    if !has_gpus() {
        return;
    }
    let packed = ["data.packing=true", "data.max_length=96", "train.save_steps=0"];
    let compare = |bench: Bench, settings: &[&str], sizes: &[usize]| {
        let settings = [&packed[..], settings].concat();
        train(&bench, 1, &settings, "one");
        let want = numbers(&bench, "one");
        assert!(want.len() >= 6, "{want:?}");
        for size in sizes {
            let shared = format!("distributed.sequence={size}");
            let name = format!("of-{size}");
            train(&bench, *size, &[&settings[..], &[&shared]].concat(), &name);
            let found = numbers(&bench, &name);
            println!("{size} ranks, {settings:?}: {want:?} {found:?}");
            assert_eq!(found.len(), want.len());
            for (found, want) in found.iter().zip(&want) {
                assert!(
                    (found / want - 1.0).abs() < 1e-5,
                    "{size} ranks, {settings:?}: {found} {want}"
                );
            }
        }
    };
    compare(Bench::new(), &["tune.method=full"], &[2, 4]);
    compare(Bench::new(), &["tune.method=lora", "model.dtype=bf16"], &[2]);
    compare(
        Bench::of_family("lfm2"),
        &["tune.method=full", "train.stage=pretrain"],
        &[2],
    );
}

/// Layers of all ranks come from the same files.
#[test]
fn shared_files_have_the_bits_of_one_gpu() {
    if !has_gpus() {
        return;
    }
    let settings = [
        &WIDE[..],
        &[
            "tune.method=block",
            "tune.block.switch_every=1",
            "model.dtype=bf16",
            "memory.tier=disk",
            "memory.frozen_weights=nf4",
            "distributed.weights=host",
        ],
    ]
    .concat();
    check(&settings, &[2]);
}

#[test]
fn each_rank_has_a_gpu_of_its_own_or_says_so() {
    if !in_software() {
        return;
    }
    let bench = Bench::new();
    let more = [
        "tune.method=lora",
        "model.device=auto",
        "train.max_steps=1",
        "distributed.sum=auto",
        "train.output_dir=out",
    ];
    let with = |settings: &[&str]| {
        let mut arguments: Vec<&str> = BASE.to_vec();
        arguments.retain(|own| !more.iter().any(|m| m.split('=').next() == own.split('=').next()));
        arguments.extend(more);
        arguments.retain(|own| !settings.iter().any(|s| s.split('=').next() == own.split('=').next()));
        arguments.extend(settings);
        run(&bench, 2, 1, &arguments)
    };
    let refused = |settings: &[&str], text: &str| {
        let out = with(settings);
        let all = said(&out);
        assert_eq!(out.status.code(), Some(2), "{all}");
        assert_eq!(all.matches(text).count(), 1, "{text} in:\n{all}");
    };
    refused(&[], "2 ranks and 1 GPU on host");
    refused(
        &[
            "model.device=cuda:0",
            "distributed.sequence=2",
            "distributed.sequence_by=gather",
        ],
        "on GPUs ranks share a micro-batch by heads of attention only",
    );
    // Two ranks share one if the recipe names it, and say so.
    let out = with(&["model.device=cuda:0"]);
    let all = said(&out);
    assert!(
        out.status.success() && all.contains("2 ranks of this machine share one"),
        "{all}"
    );
    let plan = bench
        .command(&[
            "plan",
            "--recipe",
            "r.toml",
            "--ranks",
            "2",
            "--json",
            "train.gradient_accumulation_steps=2",
        ])
        .env("SOFT_CUDA_DEVICES", "1")
        .env("CUDA_VISIBLE_DEVICES", "0")
        .output()
        .unwrap();
    let notes = said(&plan);
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap_or_else(|e| panic!("{e}: {notes}"));
    assert!(
        plan["host_gradients"].as_u64().unwrap() > 0 && plan["peak_host_bytes"].is_u64(),
        "{plan}"
    );
    assert!(notes.contains("would reject 2 ranks on this machine"), "{notes}");
}
