//! Preference stages of the `ft` program: refused inputs and output files.

use crate::bench::{Bench, number, said};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The refusal comes before the run directory is created, and names the line of the row.
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
            "no tokens are left",
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
            "data.render=plain",
            "data.max_length=16",
            "train.batch_size=2",
            "train.output_dir=bad",
        ]);
        let shown = said(&out);
        assert_eq!(out.status.code(), Some(1), "{shown}");
        assert!(shown.contains(want) && shown.contains("bad.jsonl:2"), "{shown}");
        assert!(!bench.path("bad").exists());
    }
    // Rows of another stage, and a stage without its rows.
    for (arguments, code, want) in [
        (
            ["train.stage=sft", "data.train=pairs.jsonl"],
            1,
            "this stage cannot train on rows",
        ),
        (["train.stage=dpo", "data.train=rows.jsonl"], 1, "not a preference row"),
        (["train.stage=dpo", "data.format=text"], 2, "trains on preference rows"),
        (["train.stage=kto", "data.train=pairs.jsonl"], 2, "at least two rows"),
    ] {
        let out = bench.ft(&[&["train", "--recipe", "r.toml"], &arguments[..]].concat());
        assert_eq!(out.status.code(), Some(code), "{}", said(&out));
        assert!(said(&out).contains(want), "{}", said(&out));
    }
    // One row is held out: the micro-batches are large enough.
    let row = |i: usize| format!("{{\"prompt\": \"a{i}\", \"completion\": \" b\", \"label\": true}}\n");
    fs::write(bench.path("judged.jsonl"), (0..10).map(row).collect::<String>()).unwrap();
    let out = bench.ft(&[
        "train",
        "--recipe",
        "r.toml",
        "train.stage=kto",
        "data.train=judged.jsonl",
        "data.render=plain",
        "data.eval_fraction=0.1",
        "train.batch_size=4",
    ]);
    assert_eq!(out.status.code(), Some(2), "{}", said(&out));
    let shown = said(&out);
    assert!(
        shown.contains("the rows for evaluation") && shown.contains("raise `data.eval_fraction`"),
        "{shown}"
    );
}

/// The first loss of DPO is ln 2 with every method: the policy equals its reference.
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

/// `final/` of a reward model: a score head instead of the output projection, and the config of a classifier.
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
    let readme = fs::read_to_string(out.join("README.md")).unwrap();
    assert!(
        readme.contains("AutoModelForSequenceClassification.from_pretrained(\"path/to/base\", num_labels=1)"),
        "{readme}"
    );
}

/// The adapter of a reward model is evaluated over its base; the merged directory gives the same result.
#[test]
fn the_adapter_of_a_reward_model_is_evaluated_and_merged() {
    let bench = Bench::new();
    bench.train(&[
        "train.stage=reward",
        "data.train=pairs.jsonl",
        "data.eval=pairs.jsonl",
        "train.max_steps=20",
        "train.eval_steps=20",
        "tune.method=lora",
    ]);
    let eval = |arguments: &[&str]| -> Value {
        let out = bench.ft(&[&["eval", "--data", "pairs.jsonl", "--json"], arguments].concat());
        assert!(out.status.success(), "{}", said(&out));
        serde_json::from_slice(&out.stdout).unwrap()
    };
    let close = |a: f64, b: f64, what: &str| assert!((a - b).abs() < 1e-4 * (1.0 + b.abs()), "{what}: {a} {b}");
    let beside = eval(&["--model", "model", "--adapter", "runs/sft/final"]);
    let trained = bench
        .lines("runs/sft/metrics.jsonl")
        .into_iter()
        .rfind(|l| l.get("eval_loss").is_some())
        .unwrap();
    for key in ["loss", "accuracy", "margin", "mean_reward"] {
        close(number(&beside, key), number(&trained, &format!("eval_{key}")), key);
    }
    assert!(
        number(&beside, "margin") > 0.0 && number(&beside, "rows") == 4.0,
        "{beside}"
    );

    let out = bench.ft(&[
        "merge",
        "--model",
        "model",
        "--adapter",
        "runs/sft/final",
        "--out",
        "merged",
    ]);
    assert!(out.status.success(), "{}", said(&out));
    let names = names(&bench.path("merged/model.safetensors"));
    assert!(
        names.contains(&"score.weight".to_string()) && !names.contains(&"lm_head.weight".to_string()),
        "{names:?}"
    );
    let config: Value = serde_json::from_slice(&fs::read(bench.path("merged/config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"][0], "LlamaForSequenceClassification");
    // Base weights that exist nowhere else are saved too, as those of a language model: the score head is part of the
    // adapter.
    bench.train(&[
        "train.stage=reward",
        "data.train=pairs.jsonl",
        "train.max_steps=2",
        "tune.method=lora",
        "tune.lora.init_lora_weights=pissa",
        "tune.lora.save_residual=true",
        "train.output_dir=moved",
    ]);
    eval(&["--model", "moved/final/base", "--adapter", "moved/final"]);
    let merged = eval(&["--model", "merged"]);
    for key in ["loss", "accuracy", "margin", "mean_reward"] {
        close(number(&merged, key), number(&beside, key), key);
    }
    for arguments in [
        &["generate", "--prompt", "a", "--model", "merged"][..],
        &[
            "generate",
            "--prompt",
            "a",
            "--model",
            "model",
            "--adapter",
            "runs/sft/final",
        ],
        &[
            "train",
            "--recipe",
            "r.toml",
            "tune.method=lora",
            "tune.lora.adapter=runs/sft/final",
            "train.output_dir=b",
        ],
    ] {
        let out = bench.ft(arguments);
        assert!(
            !out.status.success() && said(&out).contains("reward model"),
            "{}",
            said(&out)
        );
    }
}

fn names(file: &Path) -> Vec<String> {
    let bytes = fs::read(file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    tensors.names().into_iter().map(|n| n.to_string()).collect()
}

fn names_of_adapter(dir: &Path) -> Vec<String> {
    names(&dir.join("adapter_model.safetensors"))
}
