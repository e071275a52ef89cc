//! The placement of the weights must not change training: the same bits from the disk as from memory.

use crate::bench::{Bench, copy_all, files, number, said};
use ft::formats::config::Config;
use ft::model::families;
use ft::recipe::Dtype;
use ft::source::disk;
use serde_json::json;
use std::fs;
use std::path::Path;

/// Changes the config of the test model, and removes its weights.
pub fn random_model(bench: &Bench, changes: serde_json::Value) {
    let path = bench.path("model/config.json");
    let mut config: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    fs::write(&path, config.to_string()).unwrap();
    fs::remove_file(bench.path("model/model.safetensors")).unwrap();
}

/// Random weights for the config of the bench.
pub fn write_weights(bench: &Bench, dtype: Dtype) {
    let config = Config::load(&bench.path("model")).unwrap();
    let params = families::read(&config).unwrap().params();
    let file = bench.path("model/model.safetensors");
    disk::write_random(&file, &params, 5, 0.05, 1.0, dtype).unwrap();
}

/// Losses, gradient norms and evaluations of a run, bit by bit.
pub fn curve(bench: &Bench, run: &str) -> Vec<[u64; 3]> {
    let text = fs::read_to_string(bench.path(run).join("metrics.jsonl")).unwrap();
    let lines = text
        .lines()
        .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    lines
        .map(|l| match l.get("eval_loss") {
            Some(_) => [number(&l, "eval_loss").to_bits(), 0, 0],
            None => ["loss", "grad_norm", "trained_tokens"].map(|key| number(&l, key).to_bits()),
        })
        .collect()
}

/// Trains from memory and from the disk, with the whole head and with a chunked head; all results must be equal.
fn assert_equal(bench: &Bench, name: &str, settings: &[&str]) {
    let base = [
        "train.max_steps=7",
        "train.save_steps=5",
        "train.batch_size=2",
        "train.gradient_accumulation_steps=2",
        "data.eval=rows.jsonl",
        "train.eval_steps=4",
    ];
    let run = |place: &str, more: &[&str]| {
        let run = format!("{name}-{place}");
        let out = format!("train.output_dir={run}");
        bench.train(&[&base[..], settings, more, &[&out]].concat());
        assert!(!bench.path(&run).join("trained").exists() && !bench.path(&run).join("drawn").exists());
        (curve(bench, &run), files(&bench.path(&run).join("final")))
    };
    let here = run("device", &["memory.tier=device"]);
    assert_eq!(here.0.len(), 7 + 3);
    for (place, head) in [("whole", "memory.head_chunk=0"), ("pieces", "memory.head_chunk=1")] {
        let there = run(place, &["memory.tier=disk", head]);
        assert_eq!(here.0, there.0, "{name}: losses, head {place}");
        assert!(here.1 == there.1, "{name}: final/ differs, head {place}");
    }
}

const METHODS: [(&str, &[&str]); 6] = [
    ("full", &["tune.method=full"]),
    ("layers", &["tune.method=block", "tune.block.switch_every=2"]),
    (
        "modules",
        &[
            "tune.method=block",
            "tune.block.partition=module",
            "tune.block.switch_every=1",
        ],
    ),
    (
        "all",
        &[
            "tune.method=block",
            "tune.block.order=ascending",
            "tune.block.switch_every=1",
            "tune.block.include_embedding=true",
            "tune.block.include_lm_head=true",
            "tune.block.always_active=model.norm.",
        ],
    ),
    (
        "lora",
        &["tune.method=lora", "tune.lora.r=4", "tune.lora.lora_dropout=0.1"],
    ),
    ("freeze", &["tune.method=freeze", "tune.freeze.trainable_layers=1"]),
];

#[test]
fn a_checkpoint_on_the_disk_learns_what_it_learns_in_memory() {
    let bench = Bench::new();
    for (name, settings) in METHODS {
        let ways: &[(&str, &str)] = match name {
            "full" | "lora" => &[("f32", "false")],
            "modules" => &[("f32", "true"), ("bf16", "false")],
            _ => &[("bf16", "true")],
        };
        for (dtype, packing) in ways {
            let (dtype, packing) = (format!("model.dtype={dtype}"), format!("data.packing={packing}"));
            assert_equal(
                &bench,
                &format!("{name}-{dtype}"),
                &[settings, &[&dtype, &packing]].concat(),
            );
        }
    }
}

#[test]
fn a_random_model_with_a_large_vocabulary_learns_the_same_from_the_disk() {
    for tied in [true, false] {
        let bench = Bench::new();
        let changes = json!({"vocab_size": 9000, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": tied});
        random_model(&bench, changes);
        write_weights(&bench, Dtype::F32);
        for (name, settings) in METHODS {
            let settings: Vec<&str> = if tied {
                // A tied head is not a separate block.
                settings
                    .iter()
                    .copied()
                    .filter(|s| !s.contains("include_lm_head"))
                    .collect()
            } else {
                settings.to_vec()
            };
            let more = ["model.dtype=bf16"];
            assert_equal(&bench, name, &[&settings[..], &more].concat());
        }
    }
}

#[test]
fn weights_that_are_codes_while_they_do_not_train_learn_the_same_from_the_disk() {
    let bench = Bench::new();
    for (format, dtype) in [("int8", "f32"), ("int4", "bf16"), ("nf4", "bf16")] {
        let (frozen, dtype) = (
            format!("memory.frozen_weights={format}"),
            format!("model.dtype={dtype}"),
        );
        for (name, settings) in &METHODS[2..5] {
            let name = format!("{format}-{name}");
            assert_equal(&bench, &name, &[*settings, &[&frozen[..], &dtype]].concat());
        }
    }
}

/// LoftQ quantizes some weights again: on the disk their new data is in files of the run.
#[test]
fn loftq_learns_the_same_from_the_disk() {
    let bench = Bench::new();
    let settings = [
        "tune.method=lora",
        "tune.lora.r=4",
        "tune.lora.init_lora_weights=loftq",
        "tune.lora.loftq_iter=3",
        "memory.frozen_weights=nf4",
    ];
    let run = |tier: &str| {
        let (place, out) = (format!("memory.tier={tier}"), format!("train.output_dir={tier}"));
        bench.train(
            &[
                &settings[..],
                &["train.max_steps=4", "train.save_steps=0", &place, &out],
            ]
            .concat(),
        );
        // The adapter names the directory of its base weights.
        let mut files = files(&bench.path(tier).join("final"));
        files.retain(|(name, _)| name.ends_with(".safetensors"));
        (curve(&bench, tier), files)
    };
    let (here, there) = (run("device"), run("disk"));
    assert_eq!(here.0, there.0);
    // The adapter, and the dequantized weights to which it belongs.
    assert_eq!(here.1.len(), 2);
    assert!(here.1 == there.1);
}

/// Files that `ft quantize` wrote, in both layouts, are read layer by layer, as the model and as the teacher.
#[test]
fn quantized_files_learn_the_same_from_the_disk() {
    let bench = Bench::new();
    for format in ["nf4", "int4"] {
        let made = bench.ft(&["quantize", "--model", "model", "--to", format, "--out", format]);
        assert!(made.status.success(), "{}", said(&made));
        let path = format!("model.path={format}");
        assert_equal(
            &bench,
            &format!("of-{format}"),
            &[&path, "tune.method=lora", "tune.lora.r=4"],
        );
        let teacher = format!("distill.teacher={format}");
        let run = |tier: &str| {
            let (run, tier) = (
                format!("{format}-taught-{tier}"),
                format!("distill.teacher_tier={tier}"),
            );
            let out = format!("train.output_dir={run}");
            let stage = [
                "train.stage=distill",
                "tune.method=full",
                "train.max_steps=3",
                "train.save_steps=0",
            ];
            bench.train(&[&stage[..], &[&teacher, &tier, &out]].concat());
            curve(&bench, &run)
        };
        assert_eq!(run("device"), run("disk"), "{format}");
    }
}

/// Quantization is temporary: `final/` holds the exact values of trained and of never trained parameters.
#[test]
fn codes_never_reach_the_final_weights() {
    let bench = Bench::new();
    for tier in ["device", "disk"] {
        let (run, tier, out) = (tier, format!("memory.tier={tier}"), format!("train.output_dir={tier}"));
        bench.train(&[
            "memory.frozen_weights=nf4",
            "tune.block.order=fixed",
            "tune.block.start_block=2",
            "train.max_steps=3",
            "train.save_steps=3",
            "train.gradient_accumulation_steps=1",
            &tier,
            &out,
        ]);
        let open = |file: &str| ft::formats::weights::Weights::open_file(&bench.path(file)).unwrap();
        let before = open("model/model.safetensors");
        let after = open(&format!("{run}/final/model.safetensors"));
        let saved = open(&format!("{run}/checkpoint-3/weights.safetensors"));
        let mut trained = 0;
        for name in before.names() {
            let (a, b) = (before.read_f32(name).unwrap(), after.read_f32(name).unwrap());
            let active = name.starts_with("model.layers.2.");
            assert_eq!(a != b, active, "{name}");
            if active {
                assert_eq!(b, saved.read_f32(name).unwrap(), "{name}");
                trained += 1;
            }
        }
        assert!(trained >= 9);
    }
}

#[test]
fn what_codes_lose_of_a_trained_block_is_told() {
    let bench = Bench::new();
    for tier in ["memory.tier=device", "memory.tier=disk"] {
        let base = [
            "memory.frozen_weights=int8",
            "tune.block.switch_every=1",
            "train.max_steps=3",
        ];
        bench.train(
            &[
                &base[..],
                &["train.save_steps=0", "train.output_dir=run", "--overwrite", tier],
            ]
            .concat(),
        );
        let events = fs::read_to_string(bench.path("run/events.jsonl")).unwrap();
        let lines = events
            .lines()
            .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
        let requantized: Vec<_> = lines.filter(|l| l.get("relative_error").is_some()).collect();
        assert_eq!(requantized.len(), 2, "{events}");
        for line in requantized {
            let errors = line["relative_error"].as_object().unwrap();
            assert_eq!(errors.len(), 7, "the projections of a layer");
            assert!(
                errors.values().all(|e| (1e-5..1e-2).contains(&e.as_f64().unwrap())),
                "{line}"
            );
        }
    }
}

#[test]
fn a_budget_sends_the_weights_to_the_disk() {
    let bench = Bench::new();
    let changes = json!({"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64});
    random_model(&bench, changes);
    let plan = |more: &[&str]| {
        let base = [
            "plan",
            "--recipe",
            "r.toml",
            "--json",
            "model.init=random",
            "memory.activations=recompute",
        ];
        let out = bench.ft(&[&base[..], more].concat());
        assert!(out.status.success(), "{more:?}\n{}", said(&out));
        let plan: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        (plan["weights"].as_u64().unwrap(), plan["peak_bytes"].as_u64().unwrap())
    };
    let (device, disk) = (plan(&["memory.tier=device"]), plan(&["memory.tier=disk"]));
    assert!(4 * disk.0 < device.0 && disk.1 < device.1, "{device:?} {disk:?}");
    let between = format!("memory.budget={}", (device.1 + disk.1) / 2);
    assert_eq!(plan(&[&between]).0, disk.0);
    assert_eq!(plan(&["memory.budget=100GiB"]).0, device.0);
    let refused = bench.ft(&["plan", "--recipe", "r.toml", "model.init=random", "memory.budget=1MiB"]);
    assert_eq!(refused.status.code(), Some(1));
}

/// LoRA over weights that are quantized because nothing else fits: the run says so.
#[test]
fn weights_that_are_quantized_to_fit_are_announced() {
    let bench = Bench::new();
    fs::remove_dir_all(bench.path("model")).unwrap();
    copy_all(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny"),
        &bench.path("model"),
    );
    let train = |budget: &str| {
        let _ = fs::remove_dir_all(bench.path("run"));
        let out = [
            "tune.method=lora",
            "memory.tier=device",
            "train.max_steps=1",
            "train.output_dir=run",
            budget,
        ];
        said(&bench.ft(&[&["train", "--recipe", "r.toml"][..], &out].concat()))
    };
    let warning = "the frozen weights are quantized to `";
    // The memory of the program itself differs by some hundred KiB.
    let mut budgets = (28_000..48_000).step_by(500);
    let found = budgets.find(|budget| train(&format!("memory.budget={budget}KiB")).contains(warning));
    assert!(found.is_some(), "no budget needs quantized weights");
    let text = train("memory.budget=auto");
    assert!(!text.contains(warning), "{text}");
}
