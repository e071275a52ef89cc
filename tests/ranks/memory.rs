//! Memory of a rank: within 10 % of its plan, and gradients and moments fall with the number of ranks.

use crate::bench::Bench;
use crate::job::{self, ranks_of, signal, wait};
use crate::same_bits::REWARDS;
use serde_json::Value;
use std::fs;
use std::time::{Duration, Instant};

/// A model with wide layers and few tokens, so that weights, gradients and moments are most of the memory.
pub fn bench() -> Bench {
    bench_of(512)
}

/// As `bench`, with layers of this width.
pub fn bench_of(hidden: usize) -> Bench {
    let bench = Bench::new();
    let path = bench.path("model/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (key, value) in [
        ("hidden_size", hidden),
        ("intermediate_size", 4 * hidden),
        ("num_hidden_layers", 6),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 8),
        ("head_dim", hidden / 8),
    ] {
        config[key] = value.into();
    }
    fs::write(&path, config.to_string()).unwrap();
    bench
}

/// Peak memory of the tightest rank in the steps, forecast, and number of trained parameters.
fn measure(bench: &Bench, size: usize, weights: &str) -> (u64, u64, u64) {
    measured(bench, weights, |arguments| job::train(bench, size, arguments))
}

/// As `measure`; `train` runs a job.
fn measured(bench: &Bench, weights: &str, train: impl Fn(&[&str])) -> (u64, u64, u64) {
    measured_with(bench, &[weights, "tune.method=full"], train)
}

/// As `measured`, with more settings.
fn measured_with(bench: &Bench, settings: &[&str], train: impl Fn(&[&str])) -> (u64, u64, u64) {
    let arguments = [
        "model.init=random",
        "train.max_steps=3",
        "train.batch_size=1",
        "train.gradient_accumulation_steps=4",
        "train.save_steps=0",
        "data.max_length=64",
        "train.output_dir=out",
    ];
    train(&[&arguments[..], settings].concat());
    let plan: Value = serde_json::from_slice(&fs::read(bench.path("out/plan.json")).unwrap()).unwrap();
    let lines = fs::read_to_string(bench.path("out/metrics.jsonl")).unwrap();
    let peaks = lines
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).unwrap()["peak_memory_bytes"].as_u64());
    let found = (
        peaks.max().unwrap(),
        plan["peak_bytes"].as_u64().unwrap(),
        plan["trained_parameters"].as_u64().unwrap(),
    );
    fs::remove_dir_all(bench.path("out")).unwrap();
    found
}

#[test]
fn gradients_and_moments_are_divided_and_forecast() {
    let bench = bench();
    let replicated = "distributed.weights=replicated";
    let mut least = u64::MAX;
    for size in [1, 2, 4] {
        let (peak, forecast, trained) = measure(&bench, size, replicated);
        println!("{size} ranks: peak {peak}, forecast {forecast}");
        let error = peak as f64 / forecast as f64 - 1.0;
        assert!(error.abs() < 0.1, "{size} ranks: {peak} bytes, {forecast} forecast");
        if size == 4 {
            // 4 bytes of a gradient and 8 of two moments, less what is on the way.
            let saved = 12 * trained * 3 / 4 - (24 << 20);
            assert!(least > peak, "4 ranks need more than 2");
            let one = measure(&bench, 1, replicated).0;
            assert!(one - peak > saved * 8 / 10, "{one} on one rank, {peak} on four");
        }
        least = least.min(peak);
    }
    // Weights in parts: a quarter of the layers and two whole ones, of six.
    let (peak, forecast, trained) = measure(&bench, 4, "distributed.weights=sharded");
    println!("4 ranks, weights in parts: peak {peak}, forecast {forecast}");
    let error = peak as f64 / forecast as f64 - 1.0;
    assert!(error.abs() < 0.1, "weights in parts: {peak} bytes, {forecast} forecast");
    let saved = 4 * trained * 9 / 10 * (3 * 6 - 8) / (4 * 6);
    assert!(
        least - peak > saved * 8 / 10,
        "{least} with whole weights, {peak} in parts"
    );
    if !job::can_name_machines() {
        return;
    }
    // Half of the layers on each rank of two machines, and less than whole ones.
    let (more, forecast, _) = measured(&bench, "distributed.weights=sharded-in-node", |arguments| {
        let out = job::run_on(&bench, &["a", "a", "b", "b"], arguments);
        assert!(out.status.success(), "{}", crate::bench::said(&out));
    });
    println!("2 machines of 2 ranks: peak {more}, forecast {forecast}");
    let error = more as f64 / forecast as f64 - 1.0;
    assert!(error.abs() < 0.1, "two machines: {more} bytes, {forecast} forecast");
    let copies = 4 * trained * 9 / 10 / 4;
    assert!(more > peak + copies * 8 / 10, "{more} on two machines, {peak} on one");
}

/// Every layer is trained once, so that all low bits of masters are there.
const EACH_BLOCK: &str = "train.max_steps=7";

/// Blocks, bf16 with low bits of masters, and frozen weights in files.
#[test]
fn other_ways_to_train_need_the_memory_of_their_plan() {
    let bf16 = "model.dtype=bf16";
    let (replicated, sharded) = ("distributed.weights=replicated", "distributed.weights=sharded");
    let blocks = ["tune.method=block", "tune.block.switch_every=1", EACH_BLOCK];
    let with = |more: &[&'static str]| [&blocks[..], more].concat();
    // With wider layers the buffers of the exchange, which are not always full, are a smaller part.
    let cases = [
        (512, 2, vec![replicated, "tune.method=full", bf16]),
        (512, 3, vec![sharded, "tune.method=full", bf16]),
        (512, 2, with(&[replicated, bf16])),
        (512, 3, with(&[sharded])),
        (768, 2, with(&["distributed.weights=host", bf16])),
    ];
    let mut wrong = Vec::new();
    for (hidden, size, settings) in cases {
        let bench = bench_of(hidden);
        let train = |arguments: &[&str]| job::train(&bench, size, arguments);
        let (peak, forecast, _) = measured_with(&bench, &settings, train);
        let ratio = peak as f64 / forecast as f64;
        println!("{size} ranks, {settings:?}: peak {peak}, forecast {forecast}, {ratio:.3}");
        if (ratio - 1.0).abs() >= 0.1 {
            wrong.push(format!("{size} ranks, {settings:?}: {peak} bytes, {forecast} forecast"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Only rank 0 makes rollouts, so no other rank needs the copy of the weights that is their reference.
#[test]
fn one_rank_has_the_copy_of_the_reference() {
    let bench = bench();
    let settings = [
        "train.batch_size=2",
        "train.max_steps=100000",
        "train.logging_steps=1",
        "train.save_steps=0",
        "train.output_dir=out",
        "model.init=random",
        "tune.method=freeze",
        "tune.freeze.trainable_layers=1",
    ];
    let peak_of_other = |beta: &str| {
        let beta = format!("rlhf.grpo.beta={beta}");
        let mut job = job::start(&bench, &vec![[&REWARDS[..], &settings, &[&*beta]].concat(); 2]);
        let begun = Instant::now();
        while bench.steps("out").len() < 2 {
            assert!(job.try_wait().unwrap().is_none(), "the job has ended");
            assert!(begun.elapsed() < Duration::from_secs(60), "no step");
            std::thread::sleep(Duration::from_millis(5));
        }
        let status = fs::read_to_string(format!("/proc/{}/status", ranks_of(&job)[1])).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        let kilobytes: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
        signal(ranks_of(&job)[0], "-KILL");
        assert!(!wait(job).status.success());
        fs::remove_dir_all(bench.path("out")).unwrap();
        kilobytes << 10
    };
    let (without, with) = (peak_of_other("0"), peak_of_other("0.1"));
    // f32 matrices of six layers.
    let copy = 4 * 6 * (4 * 512 * 512 + 3 * 512 * 2048);
    println!("peak of rank 1: {without} without a reference, {with} with one of {copy}");
    assert!(with < without + copy / 3, "{without} without, {with} with a reference");
}

/// Block training of 8B on two ranks of 24 GB and of 70B on four of 80 GB, as `ft plan --ranks` sees it, without the low
/// bits of masters, which on CPUs stay in memory.
#[test]
fn large_models_fit_several_ranks() {
    let bench = Bench::new();
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/recipes/block-llama3-8b-24gb.toml");
    for (shape, ranks, budget, weights) in [
        ("llama-3.1-8b", "2", "24GB", "replicated"),
        ("llama-3.1-70b", "4", "80GB", "sharded"),
    ] {
        let model = format!("model.path=shape:{shape}");
        let planned = |weights: &str| {
            let weights = format!("distributed.weights={weights}");
            let settings = [
                &model,
                "model.init=random",
                "optimizer.master=stochastic",
                "model.device=cpu",
                "memory.tier=device",
                &weights,
            ];
            let arguments = [
                "plan", "--recipe", recipe, "--ranks", ranks, "--budget", budget, "--json",
            ];
            bench.ft(&[&arguments[..], &settings].concat())
        };
        let plan = |weights: &str| -> Value {
            let out = planned(weights);
            serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", crate::bench::said(&out)))
        };
        let auto = plan("auto");
        assert_eq!(auto["fits"], true, "{shape}: {auto}");
        let chosen = plan(weights);
        // Each process measures its own memory before the model is loaded.
        let peaks = [&auto, &chosen].map(|plan| plan["peak_bytes"].as_u64().unwrap());
        assert!(
            peaks[0].abs_diff(peaks[1]) < 4 << 20,
            "{shape}: {weights} is chosen: {peaks:?}"
        );
        assert_eq!(auto["sent_bytes"], chosen["sent_bytes"], "{shape}");
        if weights == "sharded" {
            let out = planned("replicated");
            let text = crate::bench::said(&out);
            assert!(
                !out.status.success() && text.contains("does not fit the memory budget"),
                "{shape}: {text}"
            );
        }
        println!(
            "{shape}: {} bytes, {} sent in a step",
            auto["peak_bytes"], auto["sent_bytes"]
        );
    }
}
