//! Families with layers of their own, on the golden models of the parity tests: mixtures of experts, latent attention, AltUp.
//! Whole runs, and generation with a cache.

use crate::support::{gpu, short};
use crate::train::{close, ft, number};
use candle_core::Device;
use ft::generate::{GenerateLimits, GenerateSettings, KvDtype, Request, answer};
use ft::hf;
use ft::ops::Dtype;
use serde_json::Value;
use std::env;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn root() -> PathBuf {
    env::var("FT_ROOT").map_or_else(|_| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// The directory of the golden model of a family.
pub fn golden(family: &str) -> PathBuf {
    root().join("tests/parity/goldens/families").join(family)
}

/// The golden model of a family, with a tokenizer, in `dir`.
pub fn model(family: &str, dir: &Path) -> PathBuf {
    with_tokenizer(&format!("families/{family}"), dir)
}

/// A model of the goldens, with a tokenizer, in `dir`.
fn with_tokenizer(folder: &str, dir: &Path) -> PathBuf {
    let to = dir.join(folder);
    std::fs::create_dir_all(&to).unwrap();
    for from in [folder, "tokenizers/small"] {
        for entry in std::fs::read_dir(root().join("tests/parity/goldens").join(from)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
    to
}

/// The step lines of a run.
pub fn train(device: &str, model: &Path, settings: &[&str], out: &Path) -> Vec<Value> {
    let rows = root().join("tests/parity/goldens/data/eval_text.jsonl");
    let recipe = out.with_extension("toml");
    let text = format!("[model]\npath = {model:?}\n\n[data]\ntrain = {rows:?}\nmax_length = 64\n");
    std::fs::write(&recipe, text).unwrap();
    let place = |key: &str, value: &str| format!("{key}={value}");
    let (device, out_dir) = (
        place("model.device", device),
        place("train.output_dir", out.to_str().unwrap()),
    );
    let mut arguments = vec!["train", "--recipe", recipe.to_str().unwrap(), &device, &out_dir];
    arguments.extend([
        "train.max_steps=3",
        "train.batch_size=2",
        "train.logging_steps=1",
        "train.save_steps=0",
        "schedule.name=constant",
        "schedule.warmup_ratio=0",
        // A higher rate amplifies the rounding of bf16 from step to step.
        if settings.contains(&"model.dtype=bf16") {
            "optimizer.learning_rate=1e-4"
        } else {
            "optimizer.learning_rate=1e-3"
        },
    ]);
    // Each key may be given only once.
    arguments.retain(|a| !settings.iter().any(|s| s.split('=').next() == a.split('=').next()));
    arguments.extend(settings);
    ft(&arguments, true);
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    lines.filter(|l| l.get("loss").is_some()).collect()
}

/// Losses and gradient norms on a GPU are those on the CPU.
pub fn compare(family: &str, settings: &[&str]) {
    let dir = TempDir::new().unwrap();
    let model = model(family, dir.path());
    compare_runs(family, &model, settings, dir.path());
}

/// As `compare`, in the directories `cpu` and `gpu` of `dir`.
pub fn compare_runs(family: &str, model: &Path, settings: &[&str], dir: &Path) {
    let here = train("cpu", model, settings, &dir.join("cpu"));
    let there = train("cuda:0", model, settings, &dir.join("gpu"));
    assert_eq!((here.len(), there.len()), (3, 3), "{family} {settings:?}");
    // As in tests/gpu/train.rs.
    let (loss, norm) = if settings.contains(&"model.dtype=bf16") {
        (1e-2, 5e-2)
    } else {
        (1e-4, 1e-3)
    };
    for (a, b) in here.iter().zip(&there) {
        for (key, tolerance) in [("loss", loss), ("grad_norm", norm)] {
            let what = format!("{family} {settings:?}, step {}: {key}", a["step"]);
            close(number(a, key), number(b, key), tolerance, &what);
        }
    }
}

const F32: &str = "model.dtype=f32";
const BF16: &str = "model.dtype=bf16";
const FULL: &str = "tune.method=full";
const LORA: &str = "tune.method=lora";
pub const ON_EXPERTS: &str = "tune.lora.target_parameters=[\"mlp.experts.gate_up_proj\", \"mlp.experts.down_proj\"]";
const BLOCKS: [&str; 4] = [
    "tune.method=block",
    "tune.block.switch_every=1",
    "tune.block.partition=experts",
    "tune.block.experts_per_block=2",
];

#[test]
fn experts_lose_what_they_lose_on_the_cpu() {
    let Some(_gpu) = gpu() else { return };
    compare(
        "qwen3_moe",
        &[
            FULL,
            F32,
            "train.router_aux_loss_coef=0.01",
            "train.router_z_loss_coef=0.001",
        ],
    );
    compare("qwen2_moe", &[FULL, BF16]);
    compare("gpt_oss", &[FULL, F32]);
    compare("gpt_oss", &[LORA, BF16]);
    compare("gpt_oss", &[LORA, BF16, "memory.frozen_weights=int8"]);
    compare("qwen3_moe", &[LORA, F32, "memory.frozen_weights=nf4"]);
    compare("glm4_moe", &[FULL, F32, "memory.activations=keep"]);
    compare("qwen3_moe", &[LORA, F32, "tune.lora.r=4", ON_EXPERTS]);
    compare(
        "qwen3_moe",
        &[LORA, BF16, "tune.lora.r=4", "memory.frozen_weights=nf4", ON_EXPERTS],
    );
    compare(
        "mixtral",
        &[LORA, F32, "memory.frozen_weights=int8", "memory.tier=host"],
    );
    compare("olmoe", &[&BLOCKS[..], &[F32, "memory.tier=host"]].concat());
    compare("qwen2_moe", &[&BLOCKS[..], &[F32, "memory.tier=disk"]].concat());
    compare("qwen3_5_moe_text", &[FULL, F32]);
}

/// gpt-oss as published, with experts in MXFP4.
#[test]
fn published_experts_lose_what_they_lose_on_the_cpu() {
    let Some(_gpu) = gpu() else { return };
    let dir = TempDir::new().unwrap();
    let model = with_tokenizer("mxfp4", dir.path());
    for settings in [
        &[LORA, F32, "tune.lora.r=4"][..],
        &[LORA, BF16, "tune.lora.r=4", "memory.tier=host"],
    ] {
        compare_runs("mxfp4", &model, settings, dir.path());
        for run in ["cpu", "gpu"] {
            std::fs::remove_dir_all(dir.path().join(run)).unwrap();
        }
    }
}

#[test]
fn latent_attention_loses_what_it_loses_on_the_cpu() {
    let Some(_gpu) = gpu() else { return };
    compare("deepseek_v3", &[FULL, F32]);
    compare("deepseek_v2_groups", &[FULL, BF16]);
    compare("minicpm3", &[LORA, BF16, "tune.lora.r=4"]);
    compare("youtu", &[FULL, F32, "memory.activations=keep", "data.packing=true"]);
    compare("glm4_moe_lite", &[&BLOCKS[..], &[F32, "memory.tier=disk"]].concat());
}

#[test]
fn short_convolutions_lose_what_they_lose_on_the_cpu() {
    let Some(_gpu) = gpu() else { return };
    compare("lfm2", &[FULL, BF16]);
    compare(
        "lfm2_wide",
        &[LORA, F32, "tune.lora.r=4", "memory.tier=host", "data.packing=true"],
    );
}

#[test]
fn streams_lose_what_they_lose_on_the_cpu() {
    let Some(_gpu) = gpu() else { return };
    compare("gemma3n_text", &[FULL, F32]);
    compare("gemma3n_text_active", &[FULL, BF16]);
    // With the default seed one element has a gradient of about the ε of AdamW, so its update depends on the last bits: the third
    // norm differs by 2e-3 on an H200, with eight other seeds by 2e-6 at most.
    compare(
        "gemma3n_text",
        &[LORA, F32, "tune.lora.r=4", "memory.activations=keep", "train.seed=1"],
    );
    compare(
        "gemma3n_text",
        &[
            "tune.method=block",
            "tune.block.switch_every=1",
            F32,
            "memory.tier=host",
        ],
    );
}

/// A prompt, one that begins with it, and a short one.
pub fn prompts() -> Vec<Request> {
    let text = |seed: u32, n: u32| (0..n).map(|i| 5 + (i * 31 + seed * 7) % 100).collect::<Vec<u32>>();
    let prompts = [text(1, 20), [text(1, 20), text(2, 5)].concat(), text(3, 2)];
    let numbered = prompts.into_iter().zip(0..);
    numbered.map(|(prompt, number)| Request { prompt, number }).collect()
}

#[test]
fn greedy_answers_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let requests = prompts();
    for family in [
        "qwen2_moe",
        "gpt_oss",
        "deepseek_v3",
        "deepseek_v2",
        "minicpm3",
        "gemma3n_text",
        "lfm2",
    ] {
        for kv_cache in [None, Some(KvDtype::Int8)]
            .into_iter()
            .take(if short() { 1 } else { 2 })
        {
            let settings = GenerateSettings {
                max_new_tokens: 8,
                limits: GenerateLimits {
                    kv_cache,
                    ..GenerateLimits::default()
                },
                ..GenerateSettings::default()
            };
            let dir = TempDir::new().unwrap();
            let folder = model(family, dir.path());
            let [here, there] = [&Device::Cpu, &gpu.device].map(|device| {
                let network = hf::open(&folder, Dtype::F32, device).unwrap().model.network;
                answer(&network, &requests, &settings, &mut |_, _| Ok(())).unwrap().0
            });
            for (here, there) in here.iter().zip(&there) {
                assert_eq!(here.ids, there.ids, "{family}");
                let both = here.log_probs.iter().zip(&there.log_probs);
                let off = both.fold(0f32, |off, (a, b)| off.max((a - b).abs()));
                assert!(off <= if kv_cache.is_none() { 1e-4 } else { 5e-3 }, "{family}: {off}");
            }
        }
    }
}

/// A mixture whose sizes suit grouped products in 16 bits, with random weights (`model.init`).
pub fn wide_mixture(dir: &Path) -> PathBuf {
    let to = model("qwen3_moe", dir);
    let path = to.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (key, value) in [
        ("hidden_size", 128),
        ("moe_intermediate_size", 64),
        ("num_local_experts", 16),
        ("num_experts_per_tok", 4),
        ("head_dim", 32),
        ("intermediate_size", 192),
    ] {
        config[key] = value.into();
    }
    std::fs::write(&path, config.to_string()).unwrap();
    std::fs::remove_file(to.join("model.safetensors")).unwrap();
    to
}

/// Experts that are computed together, dense and quantized: losses of the CPU, and the forecast of the peak memory.
#[test]
fn experts_together_lose_and_need_what_is_forecast() {
    let Some(_gpu) = gpu() else { return };
    let dir = TempDir::new().unwrap();
    let model = wide_mixture(dir.path());
    for (name, settings) in [
        ("nf4", &[LORA, BF16, "memory.frozen_weights=nf4"][..]),
        (
            "int8",
            &[LORA, F32, "memory.frozen_weights=int8", "memory.activations=keep"],
        ),
        ("full", &[FULL, BF16, "train.router_aux_loss_coef=0.01"]),
        (
            "pairs",
            &[LORA, BF16, "memory.frozen_weights=nf4", "tune.lora.r=12", ON_EXPERTS],
        ),
        (
            "pairs f32",
            &[
                LORA,
                F32,
                "memory.frozen_weights=nf4",
                "memory.activations=keep",
                "tune.lora.r=4",
                // B is zero at first: with the usual rate the gradients of A stay too small to be seen.
                "optimizer.learning_rate=1e-2",
                ON_EXPERTS,
            ],
        ),
        (
            "pairs kept",
            &[LORA, BF16, "memory.activations=keep", "tune.lora.r=8", ON_EXPERTS],
        ),
    ] {
        let settings = [settings, &["model.init=random"]].concat();
        compare_runs(name, &model, &settings, dir.path());
        let run = dir.path().join("gpu");
        let lines = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
        let plan: Value = serde_json::from_slice(&std::fs::read(run.join("plan.json")).unwrap()).unwrap();
        let (used, forecast) = (number(&last, "peak_memory_bytes"), plan["peak_bytes"].as_f64().unwrap());
        println!("{name}: {used} bytes used, {forecast} forecast");
        assert!(
            (forecast / used - 1.0).abs() < 0.1,
            "{name}: {used} bytes used, {forecast} forecast"
        );
        for run in ["cpu", "gpu"] {
            std::fs::remove_dir_all(dir.path().join(run)).unwrap();
        }
    }
}
