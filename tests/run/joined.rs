//! Whole runs of families whose files have the experts of a layer in one tensor: every method, tier and storage; the results
//! have the same tensors.

use crate::bench::{Bench, files, goldens, number, said};
use crate::tiers::curve;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

fn train(bench: &Bench, run: &str, settings: &[&str]) {
    let out = format!("train.output_dir={run}");
    let short = ["train.max_steps=4", "train.batch_size=2", "data.max_length=64"];
    bench.train(&[&short[..], settings, &[&out]].concat());
    let losses: Vec<f64> = bench.steps(run).iter().map(|line| number(line, "loss")).collect();
    assert_eq!(losses.len(), 4, "{run}");
    assert!(
        losses.iter().all(|loss| loss.is_finite() && *loss > 0.0),
        "{run}: {losses:?}"
    );
}

/// The tensors of a safetensors file: shape and bytes.
fn tensors(dir: &Path) -> BTreeMap<String, (Value, Vec<u8>)> {
    let bytes = fs::read(dir.join("model.safetensors")).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..data]).unwrap();
    let place = |entry: &Value, i: usize| data + entry["data_offsets"][i].as_u64().unwrap() as usize;
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    tensors
        .map(|(name, entry)| {
            let bytes = bytes[place(&entry, 0)..place(&entry, 1)].to_vec();
            (name, (entry["shape"].clone(), bytes))
        })
        .collect()
}

fn shapes(dir: &Path) -> BTreeMap<String, Value> {
    tensors(dir)
        .into_iter()
        .map(|(name, (shape, _))| (name, shape))
        .collect()
}

#[test]
fn every_method_trains_and_writes_joined_experts() {
    for family in [
        "gpt_oss",
        "granitemoe",
        "granitemoeshared",
        "qwen3_5_moe",
        "qwen3_vl_moe",
    ] {
        let bench = Bench::of_family(family);
        let before = tensors(&bench.path("model"));
        let methods: [(&str, &[&str]); 6] = [
            ("full", &["tune.method=full"]),
            ("block", &["tune.method=block", "tune.block.switch_every=1"]),
            ("freeze", &["tune.method=freeze", "tune.freeze.trainable_layers=1"]),
            ("lora", &["tune.method=lora", "tune.lora.r=4"]),
            (
                "nf4",
                &["tune.method=lora", "memory.frozen_weights=nf4", "model.dtype=bf16"],
            ),
            (
                "nf4-disk",
                &[
                    "tune.method=lora",
                    "memory.frozen_weights=nf4",
                    "model.dtype=bf16",
                    "memory.tier=disk",
                ],
            ),
        ];
        for (name, settings) in methods {
            train(&bench, name, settings);
        }
        assert_eq!(curve(&bench, "nf4"), curve(&bench, "nf4-disk"), "{family}");
        for method in ["full", "block", "lora"] {
            let disk = format!("{method}-disk");
            let method_key = format!("tune.method={method}");
            let more = ["tune.lora.r=4", "memory.tier=disk", "tune.block.switch_every=1"];
            train(&bench, &disk, &[&[method_key.as_str()], &more[..]].concat());
            assert_eq!(curve(&bench, method), curve(&bench, &disk), "{family} {method}");
            assert!(
                files(&bench.path(method).join("final")) == files(&bench.path(&disk).join("final")),
                "{family} {method}"
            );
        }
        let names: BTreeMap<String, Value> = before
            .iter()
            .map(|(name, (shape, _))| (name.clone(), shape.clone()))
            .collect();
        for run in ["full", "block", "freeze"] {
            assert_eq!(shapes(&bench.path(run).join("final")), names, "{family} {run}");
        }
        // Only the last layer is trained, in bf16: the others have the same bits.
        train(
            &bench,
            "bf16",
            &[
                "tune.method=freeze",
                "tune.freeze.trainable_layers=1",
                "model.dtype=bf16",
            ],
        );
        let after = tensors(&bench.path("bf16/final"));
        let joined = |name: &&String| name.contains("experts") || name.contains("put_linear");
        let (mut same, mut changed) = (0, 0);
        for name in before.keys().filter(joined) {
            if before[name] == after[name] {
                same += 1;
            } else {
                changed += 1;
            }
        }
        assert!(same > 0 && changed > 0, "{family}: {same} {changed}");
        for name in before.keys().filter(|name| name.contains("layers.0.")) {
            assert!(before[name] == after[name], "{family}: {name}");
        }
        let out = bench.ft(&["merge", "--adapter", "lora", "--out", "merged"]);
        assert!(out.status.success(), "{}", said(&out));
        assert_eq!(shapes(&bench.path("merged")), names, "{family}");
        let merged = tensors(&bench.path("merged"));
        for name in before.keys().filter(joined) {
            assert!(before[name] == merged[name], "{family}: {name}");
        }
    }
}

/// gpt-oss as published: adapters train on the codes; all parameters train from the
/// dequantized values, and are written in bf16.
#[test]
fn gpt_oss_trains_from_mxfp4() {
    let bench = Bench::of_model(&goldens().join("mxfp4"));
    train(&bench, "lora", &["tune.method=lora"]);
    train(&bench, "lora-disk", &["tune.method=lora", "memory.tier=disk"]);
    assert_eq!(curve(&bench, "lora"), curve(&bench, "lora-disk"));
    train(&bench, "full", &["tune.method=full", "model.dtype=bf16"]);
    let full = ["tune.method=full", "model.dtype=bf16", "memory.tier=disk"];
    train(&bench, "full-disk", &full);
    assert_eq!(curve(&bench, "full"), curve(&bench, "full-disk"));
    // Trained weights are dequantized to bf16, with a warning.
    for (run, settings) in [
        ("block", &["tune.method=block", "tune.block.switch_every=1"][..]),
        (
            "experts",
            &[
                "tune.method=block",
                "tune.block.switch_every=1",
                "tune.block.partition=experts",
            ],
        ),
        ("freeze", &["tune.method=freeze", "tune.freeze.trainable_layers=1"]),
    ] {
        let disk = format!("{run}-disk");
        let settings = [settings, &["model.dtype=bf16"]].concat();
        train(&bench, run, &settings);
        train(&bench, &disk, &[&settings[..], &["memory.tier=disk"]].concat());
        assert_eq!(curve(&bench, run), curve(&bench, &disk), "{run}");
        let losses: Vec<f64> = bench.steps(run).iter().map(|line| number(line, "loss")).collect();
        assert!(losses.last() < losses.first(), "{run}: {losses:?}");
    }
    let out = format!("train.output_dir={}", "warned");
    let said_ = said(&bench.ft(&[
        "train",
        "--recipe",
        "r.toml",
        "tune.method=block",
        "model.dtype=bf16",
        "train.max_steps=1",
        "data.max_length=64",
        &out,
    ]));
    assert!(said_.contains("dequantized values"), "{said_}");
    let out = bench.ft(&["merge", "--adapter", "lora", "--out", "merged"]);
    assert!(out.status.success(), "{}", said(&out));
    let experts = "model.layers.0.mlp.experts";
    for dir in ["full/final", "block/final", "merged"] {
        let shapes = shapes(&bench.path(dir));
        assert_eq!(
            shapes[&format!("{experts}.gate_up_proj")],
            serde_json::json!([3, 32, 128])
        );
        assert_eq!(
            shapes[&format!("{experts}.gate_up_proj_bias")],
            serde_json::json!([3, 128])
        );
        assert_eq!(shapes[&format!("{experts}.down_proj")], serde_json::json!([3, 64, 32]));
        assert!(
            !shapes
                .keys()
                .any(|name| name.contains("experts.0.") || name.contains("blocks"))
        );
        let config = fs::read_to_string(bench.path(dir).join("config.json")).unwrap();
        assert!(!config.contains("quantization_config"), "{dir}");
    }
    // A copy that ft quantized again is read back.
    let out = bench.ft(&["quantize", "--model", "merged", "--to", "nf4", "--out", "nf4"]);
    assert!(out.status.success(), "{}", said(&out));
    let loss = |model: &str| {
        let out = bench.ft(&["eval", "--data", "rows.jsonl", "--json", "--model", model]);
        assert!(out.status.success(), "{}", said(&out));
        number(&serde_json::from_slice(&out.stdout).unwrap(), "loss")
    };
    let (merged, run, nf4) = (loss("merged"), loss("lora"), loss("nf4"));
    assert!((merged - run).abs() < 1e-2 * run, "{merged} {run}");
    assert!((nf4 - merged).abs() < 0.2 * merged, "{nf4} {merged}");
}

/// With a budget some layers stay dense: their joined tensors have all experts, and the others none.
#[test]
fn a_budget_quantizes_the_experts_of_a_layer_together_or_not_at_all() {
    let bench = Bench::of_family("granitemoe");
    let before = fs::metadata(bench.path("model/model.safetensors")).unwrap().len();
    let (mut dense, mut quantized) = (0, 0);
    for percent in [70, 90, 100] {
        let out = format!("q{percent}");
        let budget = (before * percent / 100).to_string();
        let ran = bench.ft(&[
            "quantize",
            "--model",
            "model",
            "--to",
            "int4",
            "--budget",
            &budget,
            "--data",
            "rows.jsonl",
            "--out",
            &out,
        ]);
        if !ran.status.success() {
            continue;
        }
        for (name, shape) in shapes(&bench.path(&out)) {
            if name.ends_with("put_linear.weight") {
                assert_eq!(shape[0], 5, "{percent}: {name}");
                dense += 1;
            }
            quantized += usize::from(name.contains("experts.4.") && name.ends_with(".codes"));
        }
        let ran = bench.ft(&["eval", "--data", "rows.jsonl", "--json", "--model", &out]);
        assert!(ran.status.success(), "{}", said(&ran));
    }
    assert!(dense > 0 && quantized > 0, "{dense} {quantized}");
}
