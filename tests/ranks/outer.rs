//! Ranks that train alone between averages (`distributed.sync_every`): the numbers of a plain PyTorch loop, resumed runs, and
//! failures.

use crate::bench::{Bench, files, goldens, said};
use crate::job::{self, ranks_of, signal, wait};
use candle_core::{DType, Device, safetensors};
use serde_json::Value;
use std::collections::HashMap;

/// Steps of `RESUMED`.
const STEPS: u64 = 10;

/// Each with checkpoints after steps 4 and 8.
const RESUMED: [&[&str]; 2] = [
    &[
        "tune.method=block",
        "tune.block.switch_every=2",
        "model.dtype=bf16",
        "memory.frozen_weights=nf4",
    ],
    &[
        "tune.method=full",
        "optimizer.state=int8",
        "data.eval_fraction=0.3",
        "train.eval_steps=2",
        "distributed.proximal=0.1",
    ],
];

const BASE: [&str; 7] = [
    "train.max_steps=10",
    "train.save_steps=4",
    "train.save_total_limit=9",
    "train.batch_size=1",
    "train.gradient_accumulation_steps=4",
    "distributed.sync_every=2",
    "schedule.warmup_steps=0",
];

fn weights(file: std::path::PathBuf) -> HashMap<String, Vec<f64>> {
    let flat = |(name, tensor): (String, candle_core::Tensor)| {
        let values = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
        (name, values.to_vec1().unwrap())
    };
    let all = safetensors::load(file, &Device::Cpu).unwrap();
    all.into_iter().map(flat).collect()
}

/// Tolerances as in tests/parity/training.rs.
#[test]
fn averages_have_the_numbers_of_a_plain_torch_loop() {
    let bench = Bench::new();
    let text = std::fs::read_to_string(goldens().join("training/outer.json")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let start = weights(bench.path("model/model.safetensors"));
    for (name, run) in golden["runs"].as_object().unwrap() {
        let mut settings = vec![
            "data.shuffle=false".to_string(),
            "train.save_steps=0".into(),
            "train.logging_steps=1".into(),
            format!("train.max_steps={}", golden["steps"]),
            format!("train.batch_size={}", golden["rows"]),
            format!("train.gradient_accumulation_steps={}", run["micro_batches"]),
            format!("train.output_dir={name}"),
        ];
        let keys = golden["recipe"].as_object().unwrap();
        settings.extend(keys.iter().map(|(key, value)| format!("{key}={value}")));
        let keys = run["keys"].as_object().unwrap();
        settings.extend(keys.iter().map(|(key, value)| format!("distributed.{key}={value}")));
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        job::train(&bench, run["replicas"].as_u64().unwrap() as usize, &settings);
        let losses: Vec<f64> = bench
            .steps(name)
            .iter()
            .map(|step| step["loss"].as_f64().unwrap())
            .collect();
        let want: Vec<f64> = run["losses"]
            .as_array()
            .unwrap()
            .iter()
            .map(|x| x.as_f64().unwrap())
            .collect();
        assert_eq!(losses.len(), want.len(), "{name}");
        for (found, want) in losses.iter().zip(&want) {
            assert!(
                (found / want - 1.0).abs() < 1e-4,
                "{name}: losses {losses:?}, torch {want:?}"
            );
        }
        let end = weights(bench.path(&format!("{name}/final/model.safetensors")));
        for (weight, want) in run["change_norms"].as_object().unwrap() {
            let pairs = end[weight].iter().zip(&start[weight]);
            let found = pairs.map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
            let want = want.as_f64().unwrap();
            assert!(
                (found / want - 1.0).abs() < 1e-3,
                "{name}: {weight}: {found}, torch {want}"
            );
        }
    }
}

fn result(bench: &Bench, run: &str) -> Vec<(String, Vec<u8>)> {
    let mut all = files(&bench.path(&format!("{run}/final")));
    all.extend(files(&bench.path(&format!("{run}/checkpoint-8"))));
    // The others have the name of the run directory in them.
    all.retain(|(name, _)| name.ends_with(".safetensors"));
    assert_eq!(all.len(), 3);
    all
}

#[test]
fn a_resumed_run_has_the_bits_of_the_whole_one() {
    for settings in RESUMED {
        let bench = Bench::new();
        let train = |size, out: &str, more: &[&str]| {
            let out = format!("train.output_dir={out}");
            job::run(&bench, size, &[&BASE[..], settings, &[&out], more].concat())
        };
        let whole = train(3, "whole", &[]);
        assert!(whole.status.success(), "{}", said(&whole));
        let from = format!("--resume={}", bench.path("whole/checkpoint-4").display());
        let resumed = train(3, "resumed", &[&from]);
        assert!(resumed.status.success(), "{}", said(&resumed));
        assert!(result(&bench, "whole") == result(&bench, "resumed"), "{settings:?}");
        let lines = |run: &str| {
            let all = bench
                .steps(run)
                .into_iter()
                .filter(|step| step["step"].as_u64().unwrap() > 4);
            all.map(|step| (step["loss"].clone(), step["grad_norm"].clone()))
                .collect::<Vec<_>>()
        };
        assert!(lines("whole") == lines("resumed") && lines("whole").len() as u64 == STEPS - 4);
        // Each rank has moments of its own.
        let other = train(2, "other", &[&from]);
        assert!(
            !other.status.success() && said(&other).contains("number of ranks: 3 -> 2"),
            "{}",
            said(&other)
        );
    }
}

#[test]
fn a_signal_and_a_killed_rank_leave_a_state_of_all_ranks() {
    let bench = Bench::new();
    let long = [
        "train.max_steps=100000",
        "train.logging_steps=100000",
        "train.gradient_accumulation_steps=4",
        "train.save_steps=10",
        "train.output_dir=out",
        "schedule.warmup_steps=0",
        "schedule.name=constant",
        "tune.method=full",
        "distributed.sync_every=5",
    ];
    let until_saved = |job: &mut std::process::Child| {
        let begun = std::time::Instant::now();
        while !bench.path("out/checkpoint-10/manifest.json").exists() {
            assert!(
                job.try_wait().unwrap().is_none() && begun.elapsed().as_secs() < 60,
                "no checkpoint"
            );
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    let mut job = job::start(&bench, &vec![long.to_vec(); 2]);
    until_saved(&mut job);
    signal(ranks_of(&job)[1], "-USR1");
    let out = wait(job);
    let text = said(&out);
    assert_eq!(out.status.code(), Some(128 + 10), "{text}");
    let (_, step) = text.split_once("the state after step ").unwrap();
    let step: u64 = step.split_once(' ').unwrap().0.parse().unwrap();
    assert!(step.is_multiple_of(5) && bench.path(&format!("out/checkpoint-{step}/manifest.json")).exists());
    std::fs::remove_dir_all(bench.path("out")).unwrap();

    let mut job = job::start(&bench, &vec![long.to_vec(); 2]);
    until_saved(&mut job);
    signal(ranks_of(&job)[0], "-KILL");
    assert!(!wait(job).status.success());
    let names = std::fs::read_dir(bench.path("out")).unwrap().flatten();
    let steps = names.filter_map(|e| e.file_name().to_str()?.strip_prefix("checkpoint-")?.parse::<u64>().ok());
    let end = format!("train.max_steps={}", steps.max().unwrap() + 7);
    job::train(&bench, 2, &[&long[..], &[&end, "--resume"]].concat());
    let whole = [&long[..], &[&end, "train.output_dir=whole"]].concat();
    job::train(&bench, 2, &whole);
    let last = |run: &str| files(&bench.path(&format!("{run}/final")));
    assert!(last("out") == last("whole"));
}

#[test]
fn what_would_differ_between_the_ranks_is_refused() {
    let bench = Bench::new();
    let cases: [(&[&str], &str); 4] = [
        (&["train.save_steps=3"], "`train.save_steps` contradict each other"),
        (&["tune.block.switch_every=3"], "tune.block.switch_every"),
        (&["distributed.weights=sharded"], "distributed.weights"),
        // Each rank would answer all rows with its own weights, and count the answers of all as its own ones.
        (
            &["train.stage=distill", "distill.teacher=model", "distill.lmbda=0.5"],
            "`distributed.sync_every` and `distill.lmbda` contradict each other",
        ),
    ];
    let plan = [
        "plan",
        "--recipe",
        "r.toml",
        "distributed.sync_every=2",
        "train.save_steps=2",
    ];
    for (settings, message) in cases {
        let out = bench.ft(&[&plan[..], settings].concat());
        assert!(
            out.status.code() == Some(2) && said(&out).contains(message),
            "{}",
            said(&out)
        );
    }
    let plan = [
        "plan",
        "--recipe",
        "r.toml",
        "--ranks",
        "2",
        "train.gradient_accumulation_steps=2",
        "--link",
        "1MB",
    ];
    let sync = [
        "tune.method=full",
        "distributed.sync_every=4",
        "distributed.outer_momentum=0.5",
    ];
    let out = bench.ft(&[&plan[..], &["--json"], &sync].concat());
    let json: Value = serde_json::from_slice(&out.stdout).unwrap();
    // 64,416 parameters, of which a rank sends one part and its average of the other, f32.
    assert_eq!(json["sync_every"], 4);
    let seconds = json["sent_bytes"].as_f64().unwrap() / 1e6;
    let text = said(&out);
    assert!(
        text.contains(&format!("{seconds:.3} s for an average, {:.3} s a step", seconds / 4.0)),
        "{text}"
    );
}
