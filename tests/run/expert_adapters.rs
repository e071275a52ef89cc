//! Whole runs with adapters on the parameters of experts: every tier and storage, resumed and continued, merged, divided ranks,
//! and what is refused.

use crate::bench::{Bench, goldens, number, said};
use crate::resume::assert_same;
use crate::tiers::curve;
use ft::formats::weights::Weights;
use serde_json::Value;
use std::fs;

const BOTH: &str = "tune.lora.target_parameters=[\"mlp.experts.gate_up_proj\", \"mlp.experts.down_proj\"]";
const SHORT: [&str; 5] = [
    "train.max_steps=4",
    "train.batch_size=2",
    "data.max_length=64",
    "tune.method=lora",
    "optimizer.learning_rate=1e-2",
];

fn train(bench: &Bench, run: &str, settings: &[&str]) {
    let out = format!("train.output_dir={run}");
    bench.train(&[&SHORT[..], &["tune.lora.r=4"], settings, &[&out]].concat());
    assert_eq!(bench.steps(run).len(), 4, "{run}");
}

fn losses(bench: &Bench, run: &str) -> Vec<f64> {
    bench.steps(run).iter().map(|line| number(line, "loss")).collect()
}

fn config(bench: &Bench, run: &str) -> Value {
    let text = fs::read_to_string(bench.path(run).join("final/adapter_config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Names and shapes in the saved adapter.
fn saved(bench: &Bench, run: &str) -> Vec<(String, Vec<usize>)> {
    let weights = Weights::open_file(&bench.path(run).join("final/adapter_model.safetensors")).unwrap();
    let all = weights
        .names()
        .map(|n| (n.to_string(), weights.info(n).unwrap().shape.clone()));
    all.collect()
}

#[test]
fn adapters_on_experts_train_in_every_tier_and_storage() {
    for family in ["qwen3_moe", "gpt_oss_plain", "mixtral"] {
        let bench = Bench::of_family(family);
        train(&bench, "attention", &[]);
        train(&bench, "memory", &[BOTH]);
        let [attention, memory] = ["attention", "memory"].map(|run| losses(&bench, run));
        assert_eq!(attention[0], memory[0], "{family}: a new adapter changes nothing");
        assert!(memory[3] < attention[3], "{family}: {memory:?} {attention:?}");
        assert!(
            saved(&bench, "memory")
                .iter()
                .any(|(n, _)| n.contains("layers.0.mlp.experts.base_layer.lora_B"))
        );
        let ways: [(&str, &[&str]); 3] = [
            ("disk", &["memory.tier=disk"]),
            ("kept", &["memory.activations=keep"]),
            ("recompute", &["memory.activations=recompute"]),
        ];
        for (run, settings) in ways {
            train(&bench, run, &[&[BOTH], settings].concat());
            assert_eq!(curve(&bench, run), curve(&bench, "memory"), "{family}: {run}");
            let file = |run: &str| fs::read(bench.path(run).join("final/adapter_model.safetensors")).unwrap();
            assert!(file(run) == file("memory"), "{family}: {run}");
        }
        for storage in ["bf16", "nf4", "int8"] {
            let frozen = format!("memory.frozen_weights={storage}");
            let dtype = if storage == "bf16" {
                "model.dtype=bf16"
            } else {
                "model.dtype=f32"
            };
            let both: [&[&str]; 2] = [&[BOTH, &frozen, dtype], &[BOTH, &frozen, dtype, "memory.tier=disk"]];
            let runs = [format!("{storage}-memory"), format!("{storage}-disk")];
            for (run, settings) in runs.iter().zip(both) {
                train(&bench, run, settings);
            }
            assert_eq!(curve(&bench, &runs[0]), curve(&bench, &runs[1]), "{family}: {storage}");
            let got = losses(&bench, &runs[0]);
            assert!(got[3] < got[0], "{family}: {storage}: {got:?}");
        }
    }
}

#[test]
fn published_mxfp4_experts_get_adapters() {
    let bench = Bench::of_model(&goldens().join("mxfp4"));
    for (run, tier) in [("memory", "memory.tier=device"), ("disk", "memory.tier=disk")] {
        train(&bench, run, &[BOTH, tier]);
    }
    assert_eq!(curve(&bench, "memory"), curve(&bench, "disk"));
    let got = losses(&bench, "memory");
    assert!(got[3] < got[0], "{got:?}");
}

#[test]
fn a_killed_run_with_adapters_on_experts_resumes_to_the_same_bits() {
    let bench = Bench::of_family("qwen3_moe");
    let base = ["train.max_steps=60", "train.save_steps=3", "tune.lora.r=4", BOTH];
    let with = |out: &'static str| [&SHORT[1..], &base[..], &[out]].concat();
    bench.train(&with("train.output_dir=whole"));
    let mut child = bench.start(&with("train.output_dir=broken"));
    let saved = |entry: fs::DirEntry| entry.path().join("manifest.json").exists();
    while !fs::read_dir(bench.path("broken")).is_ok_and(|all| all.flatten().any(saved)) {
        assert!(
            child.try_wait().unwrap().is_none(),
            "the run ended without a checkpoint"
        );
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!bench.path("broken/final").exists(), "the run was not killed");
    bench.train(&[&with("train.output_dir=broken")[..], &["--resume"]].concat());
    assert_same(&bench, "whole", "broken");

    let out = bench.ft(&["adapter", "show", "whole/final"]);
    assert!(
        String::from_utf8_lossy(&out.stdout).contains("mlp.experts.down_proj"),
        "{}",
        said(&out)
    );
    let out = bench.ft(&["adapter", "combine", "whole/final", "broken/final", "--out", "sum"]);
    assert!(
        !out.status.success() && said(&out).contains("mlp.experts.gate_up_proj"),
        "{}",
        said(&out)
    );

    // The merged model has the loss of the adapter.
    let (model, adapter) = (bench.path("model"), bench.path("whole/final"));
    let [model, adapter, merged] = [&model, &adapter, &bench.path("merged")].map(|p| p.to_str().unwrap().to_string());
    let out = bench.ft(&[
        "merge",
        "--model",
        &model,
        "--adapter",
        &adapter,
        "--dtype",
        "f32",
        "--out",
        &merged,
    ]);
    assert!(out.status.success(), "{}", said(&out));
    let loss = |arguments: &[&str]| {
        let all = [&["eval", "--data", "rows.jsonl", "--dtype", "f32", "--json"], arguments].concat();
        let out = bench.ft(&all);
        assert!(out.status.success(), "{}", said(&out));
        number(&serde_json::from_slice(&out.stdout).unwrap(), "loss")
    };
    let (one, two) = (
        loss(&["--model", &model, "--adapter", &adapter]),
        loss(&["--model", &merged]),
    );
    assert!(
        (one / two - 1.0).abs() < 1e-5 && one < 0.95 * loss(&["--model", &model]),
        "{one} {two}"
    );
}

/// The reference is the model without its adapters: at first both are the same.
#[test]
fn a_preference_run_has_a_reference_without_the_adapters() {
    let bench = Bench::of_family("olmoe");
    let pairs = [
        "train.stage=dpo",
        "data.train=pairs.jsonl",
        "data.format=preference",
        "data.render=plain",
    ];
    train(
        &bench,
        "dpo",
        &[
            &pairs[..],
            &[BOTH, "tune.lora.target_modules=[]", "data.max_length=128"],
        ]
        .concat(),
    );
    let got = losses(&bench, "dpo");
    assert!(
        (got[0] - 2f64.ln()).abs() < 1e-5 && got[1..].iter().all(|loss| *loss != got[0]),
        "{got:?}"
    );
}

#[test]
fn divided_ranks_are_written_for_peft() {
    let bench = Bench::of_family("olmoe");
    // Six experts, two for each token.
    for (rank, wanted, r) in [("each", 12, 12), ("active", 6, 12), ("all", 2, 12)] {
        let (r, rank) = (format!("tune.lora.r={r}"), format!("tune.lora.expert_rank={rank}"));
        train(&bench, &rank, &[BOTH, &r, &rank, "tune.lora.lora_alpha=24"]);
        let shapes = saved(&bench, &rank);
        let a = shapes
            .iter()
            .find(|(n, _)| n.ends_with("layers.0.mlp.experts.lora_A.weight"))
            .unwrap();
        assert_eq!(a.1[0], wanted * 6, "{rank}");
        let attention = shapes
            .iter()
            .find(|(n, _)| n.ends_with("q_proj.lora_A.weight"))
            .unwrap();
        assert_eq!(attention.1[0], 12);
        let config = config(&bench, &rank);
        let names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"];
        for name in names {
            if wanted == 12 {
                assert!(config["rank_pattern"].as_object().unwrap().is_empty());
            } else {
                assert_eq!(config["rank_pattern"][name], wanted);
                assert_eq!(config["alpha_pattern"][name], 2 * wanted);
            }
        }
        // The saved adapter is loaded as it was trained.
        let adapter = format!("tune.lora.adapter={rank}/final");
        let next = format!("{rank}-next");
        bench.train(&[&SHORT[..], &[&adapter, &format!("train.output_dir={next}")]].concat());
        assert!(losses(&bench, &next)[0] < losses(&bench, &rank)[0]);
        assert_eq!(saved(&bench, &next), shapes);
    }
}

#[test]
fn what_peft_does_not_have_is_refused() {
    let refused = |bench: &Bench, settings: &[&str]| {
        let out = bench.ft(&[&["train", "--recipe", "r.toml"], &SHORT[..], settings].concat());
        assert!(!out.status.success(), "{settings:?}");
        said(&out)
    };
    let bench = Bench::of_family("olmoe");
    let cases: [(&[&str], &[&str]); 9] = [
        (&["tune.lora.lora_dropout=0.1"], &["target_parameters", "dropout"]),
        (&["tune.lora.use_dora=true"], &["target_parameters", "DoRA"]),
        (&["tune.lora.init_lora_weights=pissa"], &["target_parameters", "pissa"]),
        (&["tune.lora.peft_type=loha"], &["target_parameters"]),
        (
            &["tune.lora.expert_rank=all"],
            &["tune.lora.expert_rank", "rank 4 for 6 experts"],
        ),
        (&["tune.lora.rank_pattern=experts.w1=3"], &["rank_pattern"]),
        (
            &["tune.lora.modules_to_save=down_proj"],
            &["linear layers of single experts", "`tune.lora.target_parameters`"],
        ),
        (
            &["tune.lora.target_parameters=[\"mlp.experts.w1\"]"],
            &["mlp.experts.w1", "`mlp.experts.gate_up_proj`"],
        ),
        (
            &["tune.method=block", "tune.block.correction=lora"],
            &["target_parameters"],
        ),
    ];
    for (settings, wanted) in cases {
        let said = refused(&bench, &[&[BOTH, "tune.lora.r=4"], settings].concat());
        assert!(wanted.iter().all(|part| said.contains(part)), "{settings:?}: {said}");
    }
    let empty = refused(&bench, &["tune.lora.target_modules=[]"]);
    assert!(empty.contains("target_modules") && empty.contains("empty"), "{empty}");
    let dense = refused(&Bench::new(), &[BOTH]);
    assert!(dense.contains("a model with experts"), "{dense}");
    // No linears, only experts; `ft plan` says what `all-linear` covers.
    train(&bench, "only", &[BOTH, "tune.lora.target_modules=[]"]);
    assert!(saved(&bench, "only").iter().all(|(name, _)| name.contains(".experts.")));
    assert_eq!(config(&bench, "only")["target_modules"], Value::Array(Vec::new()));
    let plan = bench.ft(&[&["plan", "--recipe", "r.toml"], &SHORT[..], &[BOTH]].concat());
    let text = said(&plan) + &String::from_utf8_lossy(&plan.stdout);
    assert!(
        text.contains("8 adapters") && text.contains("4 parameters of experts"),
        "{text}"
    );
}
