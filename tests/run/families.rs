//! Whole runs of families whose layers differ from Llama: LayerNorms, an MLP without a gate, parallel halves, Gated DeltaNet,
//! latent attention;
//! and of multimodal models.

use crate::bench::{Bench, files, goldens, number, said};
use crate::tiers::curve;
use ft::formats::weights::Weights;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;

const SHORT: [&str; 3] = ["train.max_steps=4", "train.batch_size=2", "data.max_length=64"];

fn train(bench: &Bench, run: &str, settings: &[&str]) {
    let out = format!("train.output_dir={run}");
    bench.train(&[&SHORT[..], settings, &[&out]].concat());
    let losses: Vec<f64> = bench.steps(run).iter().map(|line| number(line, "loss")).collect();
    assert_eq!(losses.len(), 4, "{run}");
    assert!(
        losses.iter().all(|loss| loss.is_finite() && *loss > 0.0),
        "{run}: {losses:?}"
    );
}

fn loss(bench: &Bench, arguments: &[&str]) -> f64 {
    let out = bench.ft(&[&["eval", "--data", "rows.jsonl", "--json"], arguments].concat());
    assert!(out.status.success(), "{}", said(&out));
    let line: Value = serde_json::from_slice(&out.stdout).unwrap();
    number(&line, "loss")
}

/// Tensor names of a safetensors file.
fn names(file: &Path) -> BTreeSet<String> {
    let bytes = fs::read(file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let names = header.as_object().unwrap().keys();
    names.filter(|name| *name != "__metadata__").cloned().collect()
}

#[test]
fn every_method_trains_layers_that_are_not_those_of_llama() {
    // The files of the last six are bf16, and so is what `ft merge` writes.
    for (family, tolerance) in [
        ("cohere_qk_norm", 1e-4),
        ("starcoder2", 1e-4),
        ("olmo", 1e-4),
        ("qwen3_5_text", 1e-2),
        ("qwen3_next", 1e-2),
        ("deepseek_v3", 1e-2),
        ("minicpm3", 1e-2),
        ("gemma3n_text", 1e-2),
        ("lfm2", 1e-2),
        ("lfm2_bias", 1e-2),
    ] {
        let bench = Bench::of_family(family);
        let methods: [(&str, &[&str]); 9] = [
            ("full", &["tune.method=full"]),
            ("chunks", &["tune.method=full", "memory.mlp_chunk=16"]),
            ("block", &["tune.method=block", "tune.block.switch_every=1"]),
            (
                "modules",
                &[
                    "tune.method=block",
                    "tune.block.partition=module",
                    "tune.block.switch_every=1",
                ],
            ),
            ("freeze", &["tune.method=freeze", "tune.freeze.trainable_layers=1"]),
            ("packed", &["tune.method=full", "data.packing=true"]),
            ("lora", &["tune.method=lora", "tune.lora.r=4"]),
            ("ia3", &["tune.method=lora", "tune.lora.peft_type=ia3"]),
            (
                "nf4",
                &[
                    "tune.method=lora",
                    "tune.lora.r=4",
                    "memory.frozen_weights=nf4",
                    "model.dtype=bf16",
                ],
            ),
        ];
        for (name, settings) in methods {
            train(&bench, name, settings);
        }
        // The sums of the gradients have another order.
        for (whole, chunks) in bench.steps("full").iter().zip(bench.steps("chunks")) {
            let (whole, chunks) = (number(whole, "loss"), number(&chunks, "loss"));
            assert!((whole - chunks).abs() < 1e-6 * whole, "{family}: {whole} {chunks}");
        }
        for method in ["full", "lora"] {
            let disk = format!("{method}-disk");
            let method_key = format!("tune.method={method}");
            train(&bench, &disk, &[&method_key, "tune.lora.r=4", "memory.tier=disk"]);
            assert_eq!(curve(&bench, method), curve(&bench, &disk), "{family} {method}");
            assert!(
                files(&bench.path(method).join("final")) == files(&bench.path(&disk).join("final")),
                "{family} {method}"
            );
        }
        assert_eq!(
            names(&bench.path("full/final/model.safetensors")),
            names(&bench.path("model/model.safetensors")),
            "{family}"
        );
        let out = bench.ft(&["merge", "--adapter", "lora", "--out", "merged"]);
        assert!(out.status.success(), "{}", said(&out));
        let (merged, run) = (loss(&bench, &["--model", "merged"]), loss(&bench, &["--model", "lora"]));
        assert!((merged - run).abs() < tolerance * run, "{family}: {merged} {run}");
    }
}

/// transformers has no sequence classifier of these families; the form is that of the others.
#[test]
fn reward_models_of_families_without_a_classifier_are_trained_and_read() {
    for (family, class) in [("lfm2", "Lfm2"), ("cohere2", "Cohere2"), ("gemma3n_text", "Gemma3n")] {
        let bench = Bench::of_family(family);
        for method in ["full", "lora"] {
            let (out, key) = (format!("train.output_dir={method}"), format!("tune.method={method}"));
            let ran = bench.ft(&[
                "train",
                "--recipe",
                "r.toml",
                "train.stage=reward",
                "data.train=pairs.jsonl",
                "data.eval=pairs.jsonl",
                "train.max_steps=12",
                "train.batch_size=3",
                "train.eval_steps=12",
                "optimizer.learning_rate=3e-3",
                &key,
                &out,
            ]);
            let printed = said(&ran);
            let warned = printed.contains("GenericForSequenceClassification");
            assert!(ran.status.success() && warned, "{printed}");
        }
        let merged = [
            "merge",
            "--model",
            "model",
            "--adapter",
            "lora/final",
            "--out",
            "merged",
        ];
        let out = bench.ft(&merged);
        assert!(out.status.success(), "{}", said(&out));
        for (model, run) in [("full/final", "full"), ("merged", "lora")] {
            let config: Value =
                serde_json::from_slice(&fs::read(bench.path(model).join("config.json")).unwrap()).unwrap();
            assert_eq!(
                config["architectures"],
                json!([format!("{class}ForSequenceClassification")])
            );
            let file = bench.path(model).join("model.safetensors");
            let names = names(&file);
            assert!(
                names.contains("score.weight") && !names.contains("lm_head.weight"),
                "{names:?}"
            );
            let out = bench.ft(&[
                "eval",
                "--model",
                model,
                "--data",
                "pairs.jsonl",
                "--dtype",
                "f32",
                "--json",
            ]);
            assert!(out.status.success(), "{}", said(&out));
            let read: Value = serde_json::from_slice(&out.stdout).unwrap();
            let trained = bench.lines(&format!("{run}/metrics.jsonl"));
            let trained = trained.into_iter().rfind(|l| l.get("eval_loss").is_some()).unwrap();
            // `ft merge` writes the type of the files.
            let tolerance = if model == "merged" { 2e-2 } else { 1e-4 };
            for key in ["loss", "margin", "mean_reward"] {
                let (read, trained) = (number(&read, key), number(&trained, &format!("eval_{key}")));
                let close = (read - trained).abs() < tolerance * (1.0 + trained.abs());
                assert!(close, "{family} {model} {key}: {read} {trained}");
            }
            assert!(number(&read, "margin") > 0.0, "{family}: {read}");
        }
    }
}

/// Adds tensors with the names of the layers for multi-token prediction of a family.
fn add_prediction_layers(file: &Path, names: [&str; 2]) {
    let bytes = fs::read(file).unwrap();
    let data: Vec<u8> = (0..64).collect();
    let mut tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    for name in names {
        let added = TensorView::new(Dtype::BF16, vec![4, 8], &data).unwrap();
        tensors.push((name.to_string(), added));
    }
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let all = safetensors::serialize(tensors, Some(metadata)).unwrap();
    fs::write(file, all).unwrap();
}

/// Makes the multimodal model `gemma3n` of a `gemma3n_text`: its language model, and tensors of the other parts.
fn wrap(dir: &Path) {
    let file = dir.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let data: Vec<u8> = (0..64).collect();
    let inner = |name: String| match name.strip_prefix("model.") {
        Some(below) => format!("model.language_model.{below}"),
        None => name,
    };
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    let mut tensors: Vec<_> = tensors.into_iter().map(|(name, t)| (inner(name), t)).collect();
    for name in ["vision_tower.a.weight", "audio_tower.b.weight", "embed_vision.c.weight"] {
        let added = TensorView::new(Dtype::BF16, vec![4, 8], &data).unwrap();
        tensors.push((format!("model.{name}"), added));
    }
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    fs::write(&file, safetensors::serialize(tensors, Some(metadata)).unwrap()).unwrap();
    let config = dir.join("config.json");
    let text: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    let whole = json!({
        "model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": text,
        "vision_config": {"model_type": "gemma3n_vision"}, "audio_config": {"model_type": "gemma3n_audio"}});
    fs::write(config, whole.to_string()).unwrap();
}

/// The table of the per-layer embeddings trains as any other matrix, and stays as it is where it is not active.
#[test]
fn the_table_of_the_per_layer_embeddings_trains() {
    let bench = Bench::of_family("gemma4_text_shared");
    let table = |dir: &str| {
        let bytes = fs::read(bench.path(dir).join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let table = tensors.tensor("model.embed_tokens_per_layer.weight").unwrap();
        table.data().to_vec()
    };
    let block = [
        "tune.method=block",
        "tune.block.order=fixed",
        "tune.block.start_block=1",
        "train.save_steps=2",
        "schedule.warmup_steps=0",
    ];
    let with = [&block[..], &["tune.block.include_embedding=true"]].concat();
    train(&bench, "layers", &block);
    train(&bench, "table", &with);
    train(&bench, "disk", &[&with[..], &["memory.tier=disk"]].concat());
    train(&bench, "full", &["tune.method=full", "schedule.warmup_steps=0"]);
    let base = table("model");
    assert!(table("layers/final") == base);
    assert!(table("full/final") != base && table("table/final") != base);
    // No other parameter is in that block.
    let rest = |dir: &str| {
        let bytes = fs::read(bench.path(dir).join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
        let others = tensors.into_iter().filter(|(name, _)| !name.contains("per_layer."));
        let others = others.map(|(name, t)| (name, t.data().to_vec()));
        others.collect::<std::collections::BTreeMap<_, _>>()
    };
    assert!(rest("table/final") == rest("model"));
    assert_eq!(curve(&bench, "table"), curve(&bench, "disk"));
    assert!(files(&bench.path("table/final")) == files(&bench.path("disk/final")));
    let checkpoint = bench.path("disk/checkpoint-2").display().to_string();
    let again = ["memory.tier=disk", "train.output_dir=again", "--resume", &checkpoint];
    bench.train(&[&SHORT[..], &with, &again].concat());
    assert!(table("again/final") == table("table/final"));
}

/// Published files of Gemma 3n have keys and values also of the layers that read those of another layer.
#[test]
fn keys_that_nothing_reads_are_no_error() {
    let bench = Bench::of_family("gemma3n_text");
    let before = loss(&bench, &["--model", "model"]);
    let file = bench.path("model/model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let data = vec![0u8; 2 * 16 * 24];
    let mut tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    for (name, shape) in [("k_proj", vec![16, 24]), ("v_proj", vec![16, 24]), ("k_norm", vec![8])] {
        let size = 2 * shape.iter().product::<usize>();
        let added = TensorView::new(Dtype::BF16, shape, &data[..size]).unwrap();
        tensors.push((format!("model.layers.4.self_attn.{name}.weight"), added));
    }
    fs::write(&file, safetensors::serialize(tensors, None).unwrap()).unwrap();
    assert_eq!(loss(&bench, &["--model", "model"]), before);
    train(&bench, "full", &["tune.method=full", "memory.tier=disk"]);
}

#[test]
fn the_other_parts_of_a_multimodal_model_stay_as_they_are() {
    for family in ["gemma3", "qwen2_5_vl", "qwen3_5", "gemma3n_text", "deepseek_v3"] {
        let bench = Bench::of_family(family);
        if family == "gemma3n_text" {
            wrap(&bench.path("model"));
        }
        let predicting = match family {
            "qwen3_5" => Some(["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"]),
            "deepseek_v3" => Some([
                "model.layers.2.eh_proj.weight",
                "model.layers.2.self_attn.o_proj.weight",
            ]),
            _ => None,
        };
        if let Some(names) = predicting {
            add_prediction_layers(&bench.path("model/model.safetensors"), names);
        }
        if family == "deepseek_v3" {
            let path = bench.path("model/config.json");
            let text = fs::read_to_string(&path).unwrap();
            let one = text.replace("\"num_nextn_predict_layers\": 0", "\"num_nextn_predict_layers\": 1");
            assert!(one != text);
            fs::write(&path, one).unwrap();
        }
        train(&bench, "full", &["tune.method=full"]);
        train(&bench, "lora", &["tune.method=lora", "tune.lora.r=4"]);
        let out = bench.ft(&["merge", "--adapter", "lora", "--out", "merged"]);
        assert!(out.status.success(), "{}", said(&out));
        let [before, after, merged] =
            ["model", "full/final", "merged"].map(|dir| Weights::open(&bench.path(dir)).unwrap());
        let stored = |weights: &Weights| -> Vec<(String, Vec<u8>)> {
            let others = weights.other_parts().iter();
            let mut all: Vec<_> = others
                .map(|info| (info.name.clone(), weights.read_other(info).unwrap()))
                .collect();
            all.sort();
            all
        };
        assert!(!stored(&before).is_empty(), "{family}");
        assert!(stored(&before) == stored(&after), "{family}");
        assert!(stored(&before) == stored(&merged), "{family}");
        let prediction = stored(&before)
            .iter()
            .filter(|(name, _)| predicting.is_some_and(|names| names.contains(&name.as_str())))
            .count();
        assert_eq!(prediction, predicting.map_or(0, |names| names.len()));
        assert_eq!(
            names(&bench.path("full/final/model.safetensors")),
            names(&bench.path("model/model.safetensors")),
            "{family}"
        );
    }
}

/// The names are those of PEFT 0.21 with `all-linear`, for the multimodal class and for a text model with other linears.
#[test]
fn adapters_of_multimodal_models_have_the_names_of_the_whole_model() {
    let text = fs::read_to_string(goldens().join("multimodal_adapters.json")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    for (family, wanted) in golden.as_object().unwrap() {
        let bench = Bench::of_family(family);
        train(&bench, "lora", &["tune.method=lora", "tune.lora.r=2"]);
        let file = bench.path("lora/final/adapter_model.safetensors");
        let wanted: BTreeSet<String> = serde_json::from_value(wanted.clone()).unwrap();
        assert_eq!(names(&file), wanted, "{family}");
        let config = fs::read_to_string(bench.path("lora/final/adapter_config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        if family == "qwen3_5_text" {
            let linear = ["in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"];
            let targets: Vec<String> = serde_json::from_value(config["target_modules"].clone()).unwrap();
            assert!(
                linear.iter().all(|name| targets.iter().any(|t| t == name)),
                "{targets:?}"
            );
        } else {
            let targets = config["target_modules"].as_str().unwrap();
            assert!(targets.contains(r"model\.language_model\.layers"), "{targets}");
        }
        // A second run continues from the adapter.
        train(
            &bench,
            "more",
            &[
                "tune.method=lora",
                "tune.lora.adapter=lora/final",
                "schedule.warmup_steps=0",
            ],
        );
        assert_eq!(
            names(&bench.path("more/final/adapter_model.safetensors")),
            wanted,
            "{family}"
        );
        let out = bench.ft(&["merge", "--adapter", "lora", "--out", "merged"]);
        assert!(out.status.success(), "{}", said(&out));
        let (merged, run) = (loss(&bench, &["--model", "merged"]), loss(&bench, &["--model", "lora"]));
        assert!((merged - run).abs() < 1e-2 * run, "{family}: {merged} {run}");
    }
}

/// EVA and CorDA with `adaptive_rank` write a rank for each linear into the config.
#[test]
fn ranks_of_an_initialization_name_the_modules_of_a_multimodal_model() {
    let bench = Bench::of_family("qwen3_vl");
    let eva = "tune.lora.init_lora_weights=eva";
    let corda = "tune.lora.init_lora_weights=corda";
    for (run, settings) in [
        ("eva", ["tune.lora.r=4", eva, "tune.lora.eva.rho=2"]),
        // Fewer directions than linears: some lose their adapter.
        ("eva_few", ["tune.lora.r=1", eva, "tune.lora.eva.rho=8"]),
        ("corda", ["tune.lora.r=4", corda, "tune.lora.corda.adaptive_rank=true"]),
    ] {
        train(&bench, run, &[&["tune.method=lora"][..], &settings].concat());
        let config = fs::read_to_string(bench.path(run).join("final/adapter_config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        let of_file = |name: &str| name.replace('\\', "").starts_with("model.language_model.layers.");
        let ranks = config["rank_pattern"].as_object().unwrap();
        assert!(
            !ranks.is_empty() && ranks.keys().all(|name| of_file(name)),
            "{run}: {ranks:?}"
        );
        let adapters = names(&bench.path(run).join("final/adapter_model.safetensors")).len() / 2;
        assert_eq!(adapters < 2 * 7, run == "eva_few", "{run}: {adapters} adapters");
        if run == "eva_few" {
            let targets: Vec<String> = serde_json::from_value(config["target_modules"].clone()).unwrap();
            assert!(
                targets.len() == adapters && targets.iter().all(|name| of_file(name)),
                "{targets:?}"
            );
        }
        assert!(loss(&bench, &["--model", run]).is_finite());
    }
}
