//! Ranks that share the tokens of a micro-batch: the losses of one rank, and memory that falls with their number.

use crate::bench::{Bench, number};
use crate::job;
use serde_json::Value;
use std::fs;

/// Losses, gradient norms and losses of evaluations, in order.
pub fn numbers(bench: &Bench, run: &str) -> Vec<f64> {
    let lines = fs::read_to_string(bench.path(run).join("metrics.jsonl")).unwrap();
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let of = |line: Value| ["loss", "grad_norm", "eval_loss"].map(|key| line[key].as_f64());
    lines.flat_map(of).flatten().collect()
}

#[test]
fn ranks_that_share_micro_batches_have_the_losses_of_one() {
    let bench = Bench::new();
    let train = |size: usize, settings: &[&str], more: &[&str], name: &str| {
        let base = [
            "train.max_steps=3",
            "train.batch_size=2",
            "train.gradient_accumulation_steps=2",
            "train.eval_steps=3",
            "train.save_steps=0",
            "data.eval_fraction=0.2",
            "data.packing=true",
            "data.max_length=96",
        ];
        let out = format!("train.output_dir={name}");
        job::train(&bench, size, &[&base[..], settings, more, &[&out]].concat());
        numbers(&bench, name)
    };
    let full: &[&str] = &["tune.method=full"];
    let lora: &[&str] = &["tune.method=lora"];
    for (method, jobs) in [
        (full, &[(2, &["distributed.sequence=2"][..])][..]),
        // The model has four query heads; keys are gathered by two groups of two ranks.
        (
            lora,
            &[
                (4, &["distributed.sequence=4"]),
                (4, &["distributed.sequence=2", "distributed.sequence_by=gather"]),
            ],
        ),
    ] {
        let want = train(1, method, &[], &format!("{}-one", &method[0][12..]));
        assert!(want.len() >= 7, "{want:?}");
        for (number, (size, more)) in jobs.iter().enumerate() {
            let found = train(*size, method, more, &format!("{}-{number}", &method[0][12..]));
            assert_eq!(found.len(), want.len());
            for (found, want) in found.iter().zip(&want) {
                assert!(
                    (found / want - 1.0).abs() < 1e-5,
                    "{size} ranks, {method:?}: {found} {want}"
                );
            }
        }
    }
}

/// The balance loss of the routers is a product of means over the tokens of a micro-batch: that of all tokens is not the mean of those
/// of two parts.
#[test]
fn routers_have_the_metrics_of_whole_micro_batches() {
    let bench = Bench::of_family("gpt_oss_plain");
    let train = |size: usize, more: &[&str], name: &str| {
        let settings = [
            "tune.method=full",
            "train.max_steps=2",
            "train.batch_size=1",
            "train.gradient_accumulation_steps=2",
            "train.logging_steps=1",
            "train.save_steps=0",
        ];
        let out = format!("train.output_dir={name}");
        job::train(&bench, size, &[&settings[..], more, &[&out]].concat());
        let keys = [
            "loss",
            "router_aux_loss",
            "router_z_loss",
            "router_entropy",
            "router_max_load",
        ];
        let of = |step: Value| keys.map(|key| number(&step, key));
        bench.steps(name).into_iter().map(of).collect::<Vec<_>>()
    };
    let want = train(1, &[], "one");
    let found = train(2, &["distributed.sequence=2"], "two");
    assert!(want.len() == 2 && found.len() == 2);
    for (found, want) in found.iter().flatten().zip(want.iter().flatten()) {
        assert!((found / want - 1.0).abs() < 1e-5, "{found} {want}");
    }
}

/// A wide model and one long row: activations are most of the memory.
fn wide() -> Bench {
    let bench = crate::memory::bench();
    let text = "a long row of words that goes on and on ".repeat(150);
    let row = serde_json::json!({ "text": text }).to_string();
    fs::write(bench.path("long.jsonl"), format!("{row}\n{row}\n")).unwrap();
    bench
}

/// The peak of a step of ranks that share a row, which is that of the forecast.
fn peak(bench: &Bench, size: usize, more: &[&str]) -> u64 {
    let settings = [
        "model.init=random",
        "train.stage=pretrain",
        "data.train=long.jsonl",
        "tune.method=lora",
        "train.max_steps=1",
        "train.batch_size=1",
        "train.gradient_accumulation_steps=1",
        "train.save_steps=0",
        "data.max_length=1024",
        "distributed.sequence=2",
        "train.output_dir=out",
    ];
    job::train(bench, size, &[&settings[..], more].concat());
    let plan: Value = serde_json::from_slice(&fs::read(bench.path("out/plan.json")).unwrap()).unwrap();
    let forecast = plan["peak_bytes"].as_u64().unwrap();
    let lines = fs::read_to_string(bench.path("out/metrics.jsonl")).unwrap();
    let of = |line: &str| serde_json::from_str::<Value>(line).unwrap()["peak_memory_bytes"].as_u64();
    let peak = lines.lines().filter_map(of).max().unwrap();
    fs::remove_dir_all(bench.path("out")).unwrap();
    println!("{size} ranks, {more:?}: peak {peak}, forecast {forecast}");
    let error = peak as f64 / forecast as f64 - 1.0;
    assert!(
        error.abs() < 0.1,
        "{size} ranks, {more:?}: {peak} bytes, {forecast} forecast"
    );
    peak
}

#[test]
fn activations_are_divided_and_forecast() {
    let bench = wide();
    let keep = "memory.activations=keep";
    let peaks = [
        peak(&bench, 1, &[keep]),
        peak(&bench, 2, &[keep]),
        peak(&bench, 2, &[keep, "distributed.sequence_by=gather"]),
    ];
    assert!(
        peaks[1] < peaks[0] * 8 / 10 && peaks[2] < peaks[0] * 8 / 10,
        "{peaks:?}"
    );
}

/// Convolutions over tokens of the ranks before.
#[test]
fn convolutions_are_divided_and_forecast() {
    let bench = wide();
    let path = bench.path("model/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let layers = ["conv", "conv", "full_attention", "conv", "conv", "conv"];
    config["model_type"] = "lfm2".into();
    config["layer_types"] = serde_json::json!(layers);
    config["block_auto_adjust_ff_dim"] = false.into();
    // Few columns in the MLP, so that the peak is that of a convolution.
    config["intermediate_size"] = 64.into();
    fs::write(&path, config.to_string()).unwrap();
    let peaks = [
        peak(&bench, 1, &["memory.activations=keep"]),
        peak(&bench, 2, &["memory.activations=keep"]),
        peak(&bench, 2, &["memory.activations=recompute"]),
    ];
    assert!(
        peaks[1] < peaks[0] * 9 / 10 && peaks[2] < peaks[1] * 95 / 100,
        "{peaks:?}"
    );
}
