//! Every shipped recipe is planned; a plan needs a config and nothing else; `ft data`, `ft eval`, `ft generate`.

use crate::bench::{Bench, said};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn config(
    kind: &str,
    vocab: usize,
    hidden: usize,
    layers: usize,
    heads: [usize; 3],
    middle: usize,
    tied: bool,
) -> Value {
    json!({"model_type": kind, "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": heads[2],
        "intermediate_size": middle, "tie_word_embeddings": tied, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1000000.0})
}

#[test]
fn every_shipped_recipe_is_planned() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The published shapes of the models that the recipes name.
    let shapes = [
        (
            "sft-qwen",
            config("qwen2", 151936, 896, 24, [14, 2, 64], 4864, true),
            494_032_768u64,
        ),
        (
            "block-llama3-8b-24gb",
            config("llama", 128256, 4096, 32, [32, 8, 128], 14336, false),
            8_030_261_248,
        ),
        (
            "lora-qwen3-4b",
            config("qwen3", 151936, 2560, 36, [32, 8, 128], 9728, true),
            4_022_468_096,
        ),
    ];
    let mut planned = Vec::new();
    let bench = Bench::new();
    for (name, config, parameters) in shapes {
        let model = bench.path(name);
        fs::create_dir_all(&model).unwrap();
        fs::write(model.join("config.json"), config.to_string()).unwrap();
        let recipe = root.join("recipes").join(format!("{name}.toml"));
        let model = format!("model.path={}", model.display());
        // What `auto` chooses depends on what is free: set like this, the plan is the same on every machine.
        let (recompute, tier) = ("memory.activations=recompute", "memory.tier=device");
        let out = bench.ft(&[
            "plan",
            "--recipe",
            recipe.to_str().unwrap(),
            &model,
            recompute,
            tier,
            "--json",
        ]);
        assert!(out.status.success(), "{name}\n{}", said(&out));
        let plan: Value = serde_json::from_slice(&out.stdout).unwrap();
        let peak = plan["peak_bytes"].as_u64().unwrap();
        // bf16 weights are the floor; a full run adds state and gradients of everything.
        assert!(peak > 2 * parameters, "{name}: {peak}");
        // On a CPU the kept lower halves of retired blocks count too: 4 bytes an element and the work of one layer.
        let ceiling = if name == "sft-qwen" {
            20 * parameters
        } else {
            5 * parameters
        };
        assert!(peak < ceiling, "{name}: {peak}");
        planned.push(name.to_string());
    }
    // These start from what another recipe leaves behind.
    let (start, reward) = ("model.path=assets/tiny", "rlhf.rewards=exact");
    for (name, more) in [
        ("quickstart", &[][..]),
        ("pretrain-tiny", &[]),
        ("grpo-start-tiny", &[]),
        ("grpo-tiny", &[start]),
        ("ppo-tiny", &[start, reward]),
    ] {
        let recipe = format!("recipes/{name}.toml");
        let out = bench
            .command(&[&["plan", "--recipe", &recipe, "--json"], more].concat())
            .current_dir(root)
            .output()
            .unwrap();
        assert!(out.status.success(), "{name}\n{}", said(&out));
        let plan: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert!(plan["peak_bytes"].as_u64().unwrap() > 1 << 20);
        planned.push(name.to_string());
    }
    let mut shipped: Vec<String> = fs::read_dir(root.join("recipes"))
        .unwrap()
        .filter_map(|e| {
            e.unwrap()
                .file_name()
                .to_string_lossy()
                .strip_suffix(".toml")
                .map(str::to_string)
        })
        .collect();
    shipped.sort();
    planned.sort();
    assert_eq!(shipped, planned, "every recipe has a plan here");
}

#[test]
fn a_plan_above_the_budget_is_refused_before_anything_is_loaded() {
    let bench = Bench::new();
    for command in ["plan", "train"] {
        let out = bench.ft(&[command, "--recipe", "r.toml", "memory.budget=1MiB"]);
        assert_eq!(out.status.code(), Some(1), "{}", said(&out));
        assert!(said(&out).contains("budget"), "{}", said(&out));
    }
    assert!(!bench.path("runs").exists());
}

#[test]
fn a_trained_model_is_evaluated_and_written_with() {
    let bench = Bench::new();
    bench.train(&[
        "tune.method=block",
        "train.max_steps=30",
        "model.dtype=bf16",
        "train.output_dir=run",
        "train.save_steps=0",
    ]);
    let shown = bench.ft(&["data", "--recipe", "r.toml", "--rows", "2"]);
    assert!(shown.status.success() && !shown.stdout.is_empty(), "{}", said(&shown));
    let eval = |model: &str| -> f64 {
        let out = bench.ft(&["eval", "--model", model, "--data", "rows.jsonl", "--json"]);
        assert!(out.status.success(), "{}", said(&out));
        let report: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert!(report["tokens"].as_u64().unwrap() > 0);
        report["loss"].as_f64().unwrap()
    };
    assert!(eval("run/final") < eval("model") - 0.1, "thirty steps teach something");
    let out = bench.ft(&[
        "generate",
        "--model",
        "run/final",
        "--chat",
        "--prompt",
        "Add 17 and 25.",
        "--max-new-tokens",
        "4",
        "--temperature",
        "0",
    ]);
    assert!(out.status.success(), "{}", said(&out));
    let again = bench.ft(&[
        "generate",
        "--model",
        "run/final",
        "--chat",
        "--prompt",
        "Add 17 and 25.",
        "--max-new-tokens",
        "4",
        "--temperature",
        "0",
    ]);
    assert_eq!(out.stdout, again.stdout);
}

#[test]
fn zero_steps_save_the_initial_state() {
    let bench = Bench::new();
    bench.train(&["tune.method=full", "train.max_steps=0", "train.output_dir=run"]);
    let read = |path: std::path::PathBuf| ft::formats::weights::Weights::open_file(&path).unwrap();
    let (a, b) = (
        read(bench.path("model/model.safetensors")),
        read(bench.path("run/final/model.safetensors")),
    );
    for name in a.names() {
        assert_eq!(a.read_f32(name).unwrap(), b.read_f32(name).unwrap(), "{name}");
    }
}
