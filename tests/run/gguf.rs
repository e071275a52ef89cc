//! `ft export --to gguf`: the files of every family, bit by bit as when llama.cpp read them, adapters, refusals.

use crate::bench::{Bench, copy_all, goldens, said};
use ft::formats::gguf::GgufReader;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Variant of a golden family and the hash of its file in f32. By hand: llama.cpp gives the greedy tokens of the golden
/// with it (docs/lab-book.md, 2026-11-24); after a change the tokens must be compared again.
const FILES: &str = include_str!("gguf.txt");

fn model(bench: &Bench, variant: &str) -> String {
    let family = goldens().join("families").join(variant);
    let golden: Value = serde_json::from_slice(&fs::read(family.join("golden.json")).unwrap()).unwrap();
    let dir = bench.path(variant);
    copy_all(&family, &dir);
    if let Some(other) = golden["weights_from"].as_str() {
        copy_weights(&goldens().join("families").join(other), &dir);
    }
    copy_all(
        &goldens().join("tokenizers").join(golden["tokenizer"].as_str().unwrap()),
        &dir,
    );
    variant.to_string()
}

fn copy_weights(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with("model") {
            fs::copy(&path, to.join(name)).unwrap();
        }
    }
}

fn exported(bench: &Bench, from: &str, more: &[&str]) -> Value {
    let arguments = [&["export", from, "--to", "gguf", "--json"][..], more].concat();
    let out = bench.ft(&arguments);
    assert!(out.status.success(), "{from}: {}", said(&out));
    serde_json::from_slice(&out.stdout).unwrap()
}

#[test]
fn every_family_is_written_as_llama_cpp_read_it() {
    let bench = Bench::new();
    let mut found = String::new();
    for line in FILES.lines() {
        let (variant, _) = line.split_once(' ').unwrap();
        let from = model(&bench, variant);
        let to = format!("{variant}-gguf");
        let report = exported(&bench, &from, &["--type", "f32", "--out", &to]);
        let file = bench.path(report["out"].as_str().unwrap());
        let hash = blake3::hash(&fs::read(&file).unwrap()).to_string();
        found += &format!("{variant} {}\n", &hash[..16]);
        assert_eq!(report["formats"][0]["largest_error"], 0.0, "{variant}: {report}");
    }
    if std::env::var_os("FT_BLESS").is_some() {
        fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/gguf.txt"), &found).unwrap();
    } else {
        assert_eq!(found, FILES);
    }
}

#[test]
fn other_formats_and_an_adapter() {
    let bench = Bench::new();
    let report = exported(&bench, "model", &["--type", "q4_k_m", "--out", "small"]);
    let types: Vec<&str> = report["formats"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| f["type"].as_str().unwrap())
        .collect();
    // Its rows are no multiple of 256 elements, some not of 32.
    assert_eq!(types, ["F32", "F16", "Q8_0"], "{report}");
    let error = report["formats"][2]["rms_error"].as_f64().unwrap();
    assert!(error > 1e-3 && error < 1e-2, "{report}");
    let notes = report["notes"].to_string();
    assert!(
        notes.contains("matrices have rows that are no multiple of 256"),
        "{notes}"
    );
    let report = exported(&bench, "model", &["--pre-tokenizer", "qwen2", "--out", "named"]);
    assert_eq!(report["notes"], serde_json::json!([]));
    let report = exported(&bench, "model", &["--pre-tokenizer", "quen2", "--out", "misnamed"]);
    assert!(report["notes"][0].as_str().unwrap().contains("`quen2`"), "{report}");
    let modelfile = fs::read_to_string(bench.path("small/Modelfile")).unwrap();
    assert!(modelfile.starts_with("FROM ./model-Q4_K_M.gguf\n"), "{modelfile}");
    assert!(modelfile.contains("PARAMETER stop \"<|im_end|>\""), "{modelfile}");

    bench.train(&[
        "tune.method=lora",
        "tune.lora.r=2",
        "train.max_steps=1",
        "train.output_dir=runs/lora",
    ]);
    let report = exported(&bench, "runs/lora", &["--type", "f32", "--out", "adapter"]);
    assert_eq!(
        (report["kind"].as_str(), report["architecture"].as_str()),
        (Some("adapter"), Some("llama"))
    );
    let file = GgufReader::open(&bench.path(report["out"].as_str().unwrap())).unwrap();
    let shapes = |last: &str| -> Vec<Vec<usize>> {
        let wanted = format!("blk.0.attn_q.weight.{last}");
        let own = file.tensors.iter().filter(|tensor| tensor.name == wanted);
        own.map(|tensor| tensor.shape.clone()).collect()
    };
    assert!(shapes("lora_a").iter().all(|s| s[0] == 2) && shapes("lora_b").iter().all(|s| s[1] == 2));
    assert_eq!((shapes("lora_a").len(), shapes("lora_b").len()), (1, 1));
    let refused = bench.ft(&["export", "runs/lora", "--to", "gguf", "--type", "q8_0", "--out", "no"]);
    assert!(refused.status.code() == Some(2) && said(&refused).contains("not quantized"));
    let refused = bench.ft(&["export", "model", "--type", "q8_0", "--out", "no"]);
    assert!(said(&refused).contains("--to gguf"), "{}", said(&refused));
}

/// Outputs that are there already, and inputs that are the result of an export.
#[test]
fn wrong_places_are_called_what_they_are() {
    let bench = Bench::new();
    for run in ["runs/a", "runs/b"] {
        fs::create_dir_all(bench.path(run)).unwrap();
        fs::write(bench.path(run).join("events.jsonl"), "").unwrap();
    }
    fs::create_dir(bench.path("file-gguf")).unwrap();
    fs::write(bench.path("file-gguf/model.gguf"), "GGUF").unwrap();
    for (from, out, code, part) in [
        ("model", "rows.jsonl", 2, "this path is a file\n  --> rows.jsonl"),
        ("model", "rows.jsonl/x/y", 2, "this path is a file\n  --> rows.jsonl\n"),
        ("model", "runs", 2, "output directory is not empty\n  --> runs"),
        ("runs", "x", 1, "it has 2 runs: give one of them, such as `runs/a`"),
        ("file-gguf", "x", 1, "does not read them\n  --> file-gguf/model.gguf"),
    ] {
        for to in ["gguf", "mlx", "hf"] {
            let refused = bench.ft(&["export", from, "--to", to, "--out", out]);
            let text = said(&refused);
            assert!(
                refused.status.code() == Some(code) && text.contains(part),
                "{from} {to}: {text}"
            );
        }
    }
    for (to, part) in [
        ("gguf", "llama-cli -m 'my model/model-Q8_0.gguf'"),
        ("mlx", "--model 'my model'"),
        ("hf", "--model 'my model'"),
    ] {
        let out = bench.ft(&["export", "model", "--to", to, "--out", "my model"]);
        assert!(out.status.success() && said(&out).contains(part), "{}", said(&out));
        fs::remove_dir_all(bench.path("my model")).unwrap();
    }
}

#[test]
fn other_families_are_refused_by_name() {
    let bench = Bench::new();
    for (variant, why) in [
        ("qwen3_next", "Gated DeltaNet"),
        ("gemma3n_text", "per-layer inputs"),
        ("lfm2", "short convolutions"),
        ("minicpm3", "does not have it"),
        ("llama_rope_yarn_attention_factor", "attention factor"),
    ] {
        let from = model(&bench, variant);
        let out = bench.ft(&["export", &from, "--to", "gguf", "--out", "no"]);
        let text = said(&out);
        assert!(out.status.code() == Some(1) && text.contains(why), "{variant}: {text}");
        assert!(!bench.path("no").exists(), "{variant}");
    }
}
