//! Preference stages of the `ft` program: what they refuse and what they leave behind.

use crate::bench::{Bench, number, said};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Before the run directory is made, with the line of the row.
#[test]
fn broken_rows_are_refused_before_anything_is_written() {
    let bench = Bench::new();
    let good = r#"{"prompt": "a", "chosen": " b", "rejected": " c"}"#;
    for (stage, row, want) in [
        (
            "dpo",
            r#"{"prompt": "a", "chosen": " b", "rejected": " b"}"#,
            "are equal",
        ),
        ("reward", r#"{"prompt": "a", "chosen": " b"}"#, "`rejected` is missing"),
        (
            "orpo",
            r#"{"prompt": "a", "completion": " b", "label": true}"#,
            "pairs of answers",
        ),
        (
            "kto",
            r#"{"prompt": "a", "completion": " b", "label": "good"}"#,
            "`label`",
        ),
        (
            "simpo",
            r#"{"prompt": "a long prompt that fills the window", "chosen": "b", "rejected": "c"}"#,
            "no room",
        ),
    ] {
        fs::write(bench.path("bad.jsonl"), format!("{good}\n{row}\n")).unwrap();
        let stage = format!("train.stage={stage}");
        let out = bench.ft(&[
            "train",
            "--recipe",
            "r.toml",
            &stage,
            "data.train=bad.jsonl",
            "data.max_length=16",
            "train.batch_size=2",
            "train.output_dir=bad",
        ]);
        let shown = said(&out);
        assert_eq!(out.status.code(), Some(1), "{shown}");
        assert!(shown.contains(want) && shown.contains("bad.jsonl:2"), "{shown}");
        assert!(!bench.path("bad").exists());
    }
    // Rows for another stage, and a stage for other rows.
    for (arguments, code, want) in [
        (
            ["train.stage=sft", "data.train=pairs.jsonl"],
            1,
            "cannot be learned from directly",
        ),
        (["train.stage=dpo", "data.train=rows.jsonl"], 1, "not a preference row"),
        (["train.stage=dpo", "data.format=text"], 2, "learns from preferences"),
        (["train.stage=kto", "data.train=pairs.jsonl"], 2, "at least two rows"),
    ] {
        let out = bench.ft(&[&["train", "--recipe", "r.toml"], &arguments[..]].concat());
        assert_eq!(out.status.code(), Some(code), "{}", said(&out));
        assert!(said(&out).contains(want), "{}", said(&out));
    }
}

/// The first loss of DPO is ln 2, whatever the tuning: the policy is its own reference.
#[test]
fn every_tuning_starts_at_its_reference() {
    for tuning in [
        &["tune.method=full"][..],
        &["tune.method=block", "memory.tier=disk"],
        &["tune.method=freeze", "tune.freeze.trainable_layers=1"],
        &["tune.method=lora", "tune.lora.r=4"],
        &["tune.method=lora", "tune.lora.r=4", "tune.lora.init_lora_weights=pissa"],
        &["tune.method=lora", "tune.lora.r=4", "memory.frozen_weights=nf4"],
    ] {
        let bench = Bench::new();
        let settings = [
            "train.stage=dpo",
            "data.train=pairs.jsonl",
            "train.max_steps=3",
            "train.batch_size=2",
        ];
        bench.train(&[&settings[..], tuning].concat());
        let steps = bench.steps("runs/sft");
        assert!(
            (number(&steps[0], "loss") - 2f64.ln()).abs() < 1e-4,
            "{tuning:?}: {}",
            steps[0]
        );
        assert!(number(&steps[2], "loss") < 2f64.ln() - 1e-3, "{tuning:?}: {}", steps[2]);
        assert!(number(&steps[2], "rewards/margins") > 0.0);
    }
}

/// `final/` of a reward model: a score head in the place of the output projection, the config of a classifier.
#[test]
fn a_reward_model_is_saved_as_a_sequence_classifier() {
    let bench = Bench::new();
    let settings = [
        "train.stage=reward",
        "data.train=pairs.jsonl",
        "train.max_steps=2",
        "tune.method=full",
    ];
    bench.train(&settings);
    let out = bench.path("runs/sft/final");
    let config: Value = serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["id2label"], serde_json::json!({"0": "LABEL_0"}));
    assert_eq!(config["pad_token_id"], 0);
    let names = names(&out.join("model.safetensors"));
    assert!(
        names.contains(&"score.weight".to_string()) && !names.contains(&"lm_head.weight".to_string()),
        "{names:?}"
    );

    let bench = Bench::new();
    bench.train(&[
        "train.stage=reward",
        "data.train=pairs.jsonl",
        "train.max_steps=2",
        "tune.method=lora",
    ]);
    let out = bench.path("runs/sft/final");
    let config: Value = serde_json::from_slice(&fs::read(out.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!(
        (&config["task_type"], &config["modules_to_save"][0]),
        (&"SEQ_CLS".into(), &"score".into())
    );
    assert!(names_of_adapter(&out).contains(&"base_model.model.score.weight".to_string()));
}

fn names(file: &Path) -> Vec<String> {
    let bytes = fs::read(file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    tensors.names().into_iter().map(|n| n.to_string()).collect()
}

fn names_of_adapter(dir: &Path) -> Vec<String> {
    names(&dir.join("adapter_model.safetensors"))
}
