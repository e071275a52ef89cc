//! Adapters in complete runs: over every storage type, LoftQ, trained rows, and directories that are refused.

use crate::bench::{Bench, number, said};
use ft::formats::StoredDtype;
use ft::formats::weights::Weights;
use ft::formats::writer::{self, TensorPlan, Values};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const KINDS: [(&str, &[&str]); 10] = [
    ("lora", &[]),
    ("dora", &["tune.lora.use_dora=true"]),
    ("pissa", &["tune.lora.init_lora_weights=pissa"]),
    ("vera", &["tune.lora.peft_type=vera"]),
    ("ia3", &["tune.lora.peft_type=ia3"]),
    ("loha", &["tune.lora.peft_type=loha"]),
    ("lokr", &["tune.lora.peft_type=lokr"]),
    ("oft", &["tune.lora.peft_type=oft", "tune.lora.oft_block_size=8"]),
    (
        "adalora",
        &["tune.lora.peft_type=adalora", "tune.lora.adalora.orth_reg_weight=0.01"],
    ),
    ("tokens", &["tune.lora.trainable_token_indices=[40, 7]"]),
];
const STORAGES: [&str; 5] = [
    "model.dtype=f32",
    "model.dtype=bf16",
    "memory.frozen_weights=int8",
    "memory.frozen_weights=int4",
    "memory.frozen_weights=nf4",
];
const USUAL: [&str; 7] = [
    "tune.method=lora",
    "tune.lora.r=4",
    "optimizer.learning_rate=1e-2",
    "schedule.name=constant",
    "schedule.warmup_steps=0",
    "train.save_steps=0",
    "train.batch_size=4",
];

fn eval(bench: &Bench, model: &str, adapter: Option<&str>) -> f64 {
    let mut arguments = vec![
        "eval",
        "--model",
        model,
        "--data",
        "rows.jsonl",
        "--dtype",
        "f32",
        "--json",
    ];
    if let Some(adapter) = adapter {
        arguments.extend(["--adapter", adapter]);
    }
    let out = bench.ft(&arguments);
    assert!(out.status.success(), "{}", said(&out));
    number(&serde_json::from_slice::<Value>(&out.stdout).unwrap(), "loss")
}

#[test]
fn every_kind_learns_over_half_of_the_storages() {
    let bench = Bench::new();
    for (i, storage) in STORAGES.into_iter().enumerate() {
        // Every pair trains a step in `composition`.
        for (kind, settings) in KINDS.into_iter().skip(i % 2).step_by(2) {
            let run = [
                &USUAL[..],
                &[storage, "train.max_steps=12", "train.output_dir=run"],
                settings,
            ]
            .concat();
            bench.train(&[&run[..], &["--overwrite"]].concat());
            let losses: Vec<f64> = bench.steps("run").iter().map(|s| number(s, "loss")).collect();
            let mean = |some: &[f64]| some.iter().sum::<f64>() / some.len() as f64;
            let (first, last) = (mean(&losses[..4]), mean(&losses[8..]));
            assert!(last < first, "{kind} over {storage}: {first} to {last}");
        }
    }
}

#[test]
fn loftq_is_saved_with_the_weights_that_it_belongs_to() {
    let bench = Bench::new();
    let off = |out: &std::process::Output| -> (f64, f64) {
        let said = said(out);
        let line = said
            .lines()
            .find(|l| l.contains("loftq: mean relative quantization error"))
            .unwrap_or_else(|| panic!("{said}"));
        let numbers: Vec<f64> = line.split_whitespace().filter_map(|w| w.parse().ok()).collect();
        (numbers[0], numbers[1])
    };
    for storage in ["int4", "nf4", "int8"] {
        let mut last = f64::INFINITY;
        for iterations in ["1", "4"] {
            let (frozen, iterations) = (
                format!("memory.frozen_weights={storage}"),
                format!("tune.lora.loftq_iter={iterations}"),
            );
            let settings = [
                "train",
                "--recipe",
                "r.toml",
                "--overwrite",
                "tune.lora.init_lora_weights=loftq",
                "train.max_steps=6",
                "train.output_dir=run",
                &frozen,
                &iterations,
            ];
            let out = bench.ft(&[&settings[..], &USUAL].concat());
            assert!(out.status.success(), "{}", said(&out));
            let (before, after) = off(&out);
            assert!(after < before && after < last, "{storage}: {before} {after} {last}");
            last = after;
        }
        // Over its own base the adapter gives the trained model; over the original base it is refused.
        let own = eval(&bench, "run/final/base", Some("run/final"));
        let plain = eval(&bench, "run/final/base", None);
        assert!(own < plain, "{storage}: {own} {plain}");
        let out = bench.ft(&[
            "eval",
            "--model",
            "model",
            "--adapter",
            "run/final",
            "--data",
            "rows.jsonl",
        ]);
        assert_eq!(out.status.code(), Some(1));
        assert!(said(&out).contains("another base model"), "{}", said(&out));
        let _ = fs::remove_dir_all(bench.path("merged"));
        let out = bench.ft(&[
            "merge",
            "--model",
            "run/final/base",
            "--adapter",
            "run/final",
            "--out",
            "merged",
        ]);
        assert!(out.status.success(), "{}", said(&out));
        let merged = eval(&bench, "merged", None);
        assert!((merged / own - 1.0).abs() < 1e-5, "{storage}: {merged} {own}");
    }
    // An adapter saved after 0 steps is the initialization: it gives the loss of the first step.
    let zero = [
        "tune.lora.init_lora_weights=loftq",
        "memory.frozen_weights=int4",
        "tune.lora.loftq_iter=3",
    ];
    let with = |steps: &'static str, out: &'static str| [&USUAL[..], &zero, &[steps, out]].concat();
    bench.train(&with("train.max_steps=0", "train.output_dir=zero"));
    bench.train(&with("train.max_steps=1", "train.output_dir=one"));
    let again = [
        "model.path=zero/final/base",
        "tune.lora.adapter=zero/final",
        "train.max_steps=1",
        "train.output_dir=again",
    ];
    bench.train(&[&USUAL[..1], &USUAL[2..], &again].concat());
    let (one, again) = (bench.steps("one"), bench.steps("again"));
    for key in ["loss", "grad_norm"] {
        let (a, b) = (number(&one[0], key), number(&again[0], key));
        assert!((a / b - 1.0).abs() < 1e-4, "{key}: {a} {b}");
    }
    for settings in [&["memory.frozen_weights=bf16"][..], &[]] {
        let mut all = vec![
            "train",
            "--recipe",
            "r.toml",
            "tune.lora.init_lora_weights=loftq",
            "train.output_dir=none",
        ];
        all.extend(USUAL);
        all.extend(settings);
        let out = bench.ft(&all);
        assert_eq!(out.status.code(), Some(2), "{}", said(&out));
        assert!(said(&out).contains("needs quantized weights"), "{}", said(&out));
    }
}

fn tensors(file: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let weights = Weights::open_file(file).unwrap();
    let names: Vec<String> = weights.names().map(str::to_string).collect();
    let read = |name: String| {
        let shape = weights.info(&name).unwrap().shape.clone();
        let values = weights.read_f32(&name).unwrap();
        (name, (shape, values))
    };
    names.into_iter().map(read).collect()
}

#[test]
fn only_the_named_rows_of_embedding_and_head_train() {
    let bench = Bench::new();
    let settings = [
        "tune.lora.trainable_token_indices=[40, 7]",
        "train.max_steps=6",
        "train.output_dir=run",
    ];
    bench.train(&[&USUAL[..], &settings].concat());
    let config: Value =
        serde_json::from_slice(&fs::read(bench.path("run/final/adapter_config.json")).unwrap()).unwrap();
    assert_eq!(
        config["trainable_token_indices"],
        serde_json::json!({"embed_tokens": [40, 7], "lm_head": [40, 7]})
    );
    let out = bench.ft(&["merge", "--model", "model", "--adapter", "run/final", "--out", "merged"]);
    assert!(out.status.success(), "{}", said(&out));
    let before = tensors(&bench.path("model/model.safetensors"));
    let after = tensors(&bench.path("merged/model.safetensors"));
    let saved = tensors(&bench.path("run/final/adapter_model.safetensors"));
    // No row of the data contains token 7: it is never an input, but its logit is always part of the softmax.
    for (module, wanted) in [("model.embed_tokens", &[40][..]), ("lm_head", &[7, 40])] {
        let name = format!("{module}.weight");
        let rows = &saved[&format!("base_model.model.{module}.token_adapter.trainable_tokens_delta")].1;
        let width = before[&name].0[1];
        let pairs = before[&name].1.chunks(width).zip(after[&name].1.chunks(width));
        let changed: Vec<usize> = pairs.enumerate().filter(|(_, (a, b))| a != b).map(|(i, _)| i).collect();
        assert_eq!(changed, wanted, "{name}");
        assert_eq!(&after[&name].1[40 * width..][..width], &rows[..width], "{name}");
    }
    let (own, merged) = (eval(&bench, "model", Some("run/final")), eval(&bench, "merged", None));
    assert!((own / merged - 1.0).abs() < 1e-5, "{own} {merged}");
    // Training continues from the saved adapter.
    let again = [
        "tune.lora.adapter=run/final",
        "train.max_steps=0",
        "train.output_dir=again",
    ];
    bench.train(&[&USUAL[..1], &USUAL[2..], &again].concat());
    assert_eq!(saved, tensors(&bench.path("again/final/adapter_model.safetensors")));
    for (settings, part) in [
        (&["tune.lora.trainable_token_indices=[40, 40]"][..], "listed twice"),
        (&["tune.lora.trainable_token_indices=[400]"], "not in the vocabulary"),
        (
            &[
                "tune.lora.trainable_token_indices=[4]",
                "tune.lora.modules_to_save=lm_head",
            ],
            "trains the full matrix",
        ),
    ] {
        let mut all = vec![
            "train",
            "--recipe",
            "r.toml",
            "train.max_steps=1",
            "train.output_dir=none",
        ];
        all.extend(USUAL);
        all.extend(settings);
        let out = bench.ft(&all);
        assert!(
            !out.status.success() && said(&out).contains(part),
            "{settings:?}: {}",
            said(&out)
        );
    }
}

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn write(file: &Path, tensors: &Tensors) {
    let plans: Vec<TensorPlan> = tensors
        .iter()
        .map(|(name, (shape, _))| TensorPlan {
            name: name.clone(),
            dtype: StoredDtype::F32,
            shape: shape.clone(),
        })
        .collect();
    writer::write_file(file, &plans, &[], |plan, sink| {
        sink(Values::F32(&tensors[&plan.name].1))
    })
    .unwrap();
}

const Q: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";

#[test]
fn another_dropout_of_a_given_adapter_is_said() {
    let bench = Bench::new();
    let first = [
        "tune.lora.lora_dropout=0.25",
        "train.max_steps=1",
        "train.output_dir=first",
    ];
    bench.train(&[&USUAL[..], &first].concat());
    for (dropout, warns) in [("0.0", true), ("0.25", false)] {
        let dropout = format!("tune.lora.lora_dropout={dropout}");
        let out = format!("train.output_dir=next-{warns}");
        let next = ["tune.lora.adapter=first/final", "train.max_steps=1", &dropout, &out];
        let ran = bench.ft(&[&["train", "--recipe", "r.toml"], &USUAL[..1], &USUAL[2..], &next].concat());
        assert!(ran.status.success(), "{}", said(&ran));
        let warning = "the dropout of the given adapter, 0.25, is replaced";
        assert_eq!(said(&ran).contains(warning), warns, "{}", said(&ran));
    }
}

/// Row A4.
#[test]
fn an_adapter_that_does_not_fit_is_refused_by_every_command() {
    let bench = Bench::new();
    bench.train(&[&USUAL[..], &["train.max_steps=1", "train.output_dir=run"]].concat());
    let good = bench.path("run/final");
    // Without the fingerprint, as other tools save it.
    let all = tensors(&good.join("adapter_model.safetensors"));
    type Fault = fn(&mut Tensors, &Path);
    let faults: [(&str, Fault, &str); 6] = [
        (
            "rank",
            |t, _| {
                let (shape, values) = t.get_mut(Q).unwrap();
                shape[0] = 2;
                values.truncate(2 * shape[1]);
            },
            "found [2, 32], expected [4, 32]",
        ),
        (
            "shape",
            |t, _| {
                let (shape, values) = t.get_mut(Q).unwrap();
                shape[1] = 16;
                values.truncate(4 * 16);
            },
            "found [4, 16], expected [4, 32]",
        ),
        (
            "missing",
            |t, _| {
                t.remove(Q);
            },
            "lora_A.weight: missing",
        ),
        (
            "unexpected",
            |t, _| {
                let q = t[Q].clone();
                t.insert(Q.replace("q_proj", "z_proj"), q);
            },
            "no such linear",
        ),
        (
            "whole",
            |t, _| {
                let q = t[Q].clone();
                t.insert("base_model.model.lm_head.weight".into(), q);
            },
            "not in `modules_to_save`",
        ),
        (
            "pickle",
            |_, dir| fs::write(dir.join("adapter_model.bin"), b"\x80\x02}q\x00.").unwrap(),
            "pickle",
        ),
    ];
    for (name, fault, part) in faults {
        let dir = bench.path(name);
        fs::create_dir_all(&dir).unwrap();
        fs::copy(good.join("adapter_config.json"), dir.join("adapter_config.json")).unwrap();
        let mut own = all.clone();
        fault(&mut own, &dir);
        write(&dir.join("adapter_model.safetensors"), &own);
        refused(&bench, "model", name, part);
    }
    // Another base of the same shapes: one value differs.
    fs::create_dir_all(bench.path("other")).unwrap();
    for entry in fs::read_dir(bench.path("model")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, bench.path("other").join(path.file_name().unwrap())).unwrap();
    }
    let mut weights = tensors(&bench.path("model/model.safetensors"));
    weights.get_mut("model.embed_tokens.weight").unwrap().1[0] += 1.0;
    write(&bench.path("other/model.safetensors"), &weights);
    refused(&bench, "other", "run/final", "another base model");
    // A target that does not exist in the model: the error shows the names that exist.
    let mut arguments = vec!["train", "--recipe", "r.toml", "tune.lora.target_modules=[\"q_prj\"]"];
    arguments.extend(["train.output_dir=none"]);
    arguments.extend(USUAL);
    let out = bench.ft(&arguments);
    assert!(!out.status.success());
    let said = said(&out);
    assert!(
        said.contains("`q_prj` matches no linear") && said.contains("linear layers of this model: q_proj"),
        "{said}"
    );
    assert!(!bench.path("none").exists(), "refused before anything is written");
}

/// Asserts that eval, merge and train refuse the adapter.
fn refused(bench: &Bench, model: &str, adapter: &str, part: &str) {
    let path = format!("model.path={model}");
    let own = format!("tune.lora.adapter={adapter}");
    let commands: [&[&str]; 3] = [
        &["eval", "--model", model, "--adapter", adapter, "--data", "rows.jsonl"],
        &["merge", "--model", model, "--adapter", adapter, "--out", "out"],
        &[
            "train",
            "--recipe",
            "r.toml",
            "tune.method=lora",
            "train.max_steps=1",
            "train.output_dir=out",
            &path,
            &own,
        ],
    ];
    for command in commands {
        let out = bench.ft(command);
        assert_eq!(out.status.code(), Some(1), "{adapter}: {command:?}\n{}", said(&out));
        assert!(said(&out).contains(part), "{adapter}: {command:?}\n{}", said(&out));
        assert!(!bench.path("out/final").exists());
    }
    let _ = fs::remove_dir_all(bench.path("out"));
}
