//! Complete training runs: with every method the losses on a GPU are those on the CPU.
//!
//! Environment: `FT_BIN` and `FT_ROOT` are the program and the folder of the repository, if the tests run on another
//! machine than the build. `FT_GPU_RUNS=lora,full` limits the runs. `FT_GPU_SHORT=1` makes them short, for a slow device.

use crate::support::{gpu, short};
use ft::ops::CpuBackend;
use serde_json::Value;
use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// A GPU rounds the product of a small pair away beside that of W, as PEFT does: bf16 results of cuBLAS are rounded before
/// another product is added. The CPU adds both in f32. At a smaller rate the losses of three steps differ by 1 %.
const LORA_RATE: &str = "optimizer.learning_rate=1e-3";

/// Settings of each run in addition to the shared ones. The type is bf16 unless a run sets it.
const RUNS: [(&str, &[&str]); 29] = [
    ("full", &["tune.method=full"]),
    ("f32", &["tune.method=full", "model.dtype=f32"]),
    (
        "at once",
        &[
            "tune.method=full",
            "train.max_grad_norm=0",
            "train.gradient_accumulation_steps=1",
            // Without clipping, a higher rate amplifies the rounding of bf16 from step to step.
            "optimizer.learning_rate=1e-4",
        ],
    ),
    ("kept", &["tune.method=full", "memory.activations=keep"]),
    // With noise on the embeddings (NEFTune).
    (
        "recomputed",
        &[
            "tune.method=full",
            "memory.activations=recompute",
            "train.neftune_noise_alpha=5",
        ],
    ),
    ("layer by layer", &["tune.method=block", "tune.block.switch_every=2"]),
    (
        "matrix by matrix",
        &[
            "tune.method=block",
            "tune.block.switch_every=2",
            "tune.block.partition=matrix",
        ],
    ),
    (
        "a part of each",
        &[
            "tune.method=block",
            "tune.block.switch_every=2",
            "tune.block.partition=ratio",
        ],
    ),
    (
        "scattered",
        &[
            "tune.method=block",
            "tune.block.switch_every=2",
            "tune.block.partition=ratio",
            "tune.block.mask=scattered",
        ],
    ),
    (
        "corrected",
        &[
            "tune.method=block",
            "tune.block.switch_every=2",
            "tune.block.correction=sgd",
        ],
    ),
    ("last layers", &["tune.method=freeze"]),
    ("lora", &["tune.method=lora", LORA_RATE]),
    (
        "lora with dropout",
        &["tune.method=lora", LORA_RATE, "tune.lora.lora_dropout=0.1"],
    ),
    (
        "lora with a start",
        &["tune.method=lora", LORA_RATE, "tune.lora.init_lora_weights=pissa"],
    ),
    (
        "lora on int8",
        &["tune.method=lora", LORA_RATE, "memory.frozen_weights=int8"],
    ),
    (
        "lora on int4",
        &["tune.method=lora", LORA_RATE, "memory.frozen_weights=int4"],
    ),
    (
        "lora on nf4",
        &["tune.method=lora", LORA_RATE, "memory.frozen_weights=nf4"],
    ),
    (
        "blocks of int8",
        &[
            "tune.method=block",
            "tune.block.switch_every=2",
            "memory.frozen_weights=int8",
        ],
    ),
    (
        "lora on nf4 with LoftQ",
        &[
            "tune.method=lora",
            LORA_RATE,
            "memory.frozen_weights=nf4",
            "tune.lora.init_lora_weights=loftq",
            "tune.lora.loftq_iter=2",
        ],
    ),
    // On a CPU, host memory is device memory.
    (
        "lora on layers of the host",
        &["tune.method=lora", LORA_RATE, "memory.tier=host"],
    ),
    (
        "blocks from the host",
        &["tune.method=block", "tune.block.switch_every=2", "memory.tier=host"],
    ),
    (
        "lora on layers and a head of the disk",
        &[
            "tune.method=lora",
            LORA_RATE,
            "memory.tier=disk",
            "memory.head_chunk=4096",
        ],
    ),
    (
        "blocks from the disk",
        &["tune.method=block", "tune.block.switch_every=2", "memory.tier=disk"],
    ),
    (
        "adafactor",
        &[
            "tune.method=full",
            "optimizer.name=adafactor",
            "optimizer.learning_rate=1e-4",
        ],
    ),
    ("dora", &["tune.method=lora", "tune.lora.use_dora=true"]),
    // These have few parameters and use a higher learning rate.
    (
        "ia3",
        &[
            "tune.method=lora",
            "tune.lora.peft_type=ia3",
            "optimizer.learning_rate=1e-2",
        ],
    ),
    (
        "vera",
        &[
            "tune.method=lora",
            "tune.lora.peft_type=vera",
            "optimizer.learning_rate=1e-2",
        ],
    ),
    (
        "oft",
        &[
            "tune.method=lora",
            "tune.lora.peft_type=oft",
            "tune.lora.oft_block_size=8",
            // Rounding to bf16: with fewer tokens the norm of the third step differs by 6 % (in f32 by 4e-7).
            "data.max_length=256",
        ],
    ),
    (
        "adalora",
        &[
            "tune.method=lora",
            "tune.lora.peft_type=adalora",
            "tune.lora.adalora.orth_reg_weight=0.01",
            "optimizer.learning_rate=1e-2",
        ],
    ),
];

/// Runs `ft` with a visible or a hidden GPU.
pub fn ft(arguments: &[&str], on_gpu: bool) -> String {
    let out = run_ft(arguments, on_gpu);
    assert!(
        out.status.success(),
        "{arguments:?}\n{}",
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8_lossy(&out.stdout).into_owned()
}

fn run_ft(arguments: &[&str], on_gpu: bool) -> Output {
    let place = |name: &str, built: &str| env::var(name).unwrap_or_else(|_| built.to_string());
    let mut command = Command::new(place("FT_BIN", env!("CARGO_BIN_EXE_ft")));
    command
        .args(arguments)
        .current_dir(place("FT_ROOT", env!("CARGO_MANIFEST_DIR")))
        .env("NO_COLOR", "1")
        .env("HF_HUB_OFFLINE", "1");
    if !on_gpu {
        command.env("CUDA_VISIBLE_DEVICES", "");
    }
    // AMX and AVX512-BF16 round activations to bf16. The reference keeps them in f32.
    if matches!(CpuBackend::current().name(), "amx" | "avx512-bf16") {
        command.env("FT_CPU", "avx512");
    }
    command.output().unwrap()
}

/// Number of steps of a run.
fn steps() -> usize {
    if short() { 3 } else { 6 }
}

/// Calls `check` with every run that `FT_GPU_RUNS` names (all without it), and fails at the end if one failed.
fn each_run(check: impl Fn(&str, &'static [&'static str])) {
    let wanted = env::var("FT_GPU_RUNS").unwrap_or_default();
    let wanted: Vec<&str> = wanted.split(',').filter(|name| !name.is_empty()).collect();
    for name in &wanted {
        assert!(
            RUNS.iter().any(|run| run.0 == *name),
            "FT_GPU_RUNS: there is no run `{name}`"
        );
    }
    let chosen = RUNS.iter().filter(|run| wanted.is_empty() || wanted.contains(&run.0));
    let failed: Vec<&str> = chosen
        .inspect(|(name, _)| eprintln!("run: {name}"))
        .filter(|(name, settings)| catch_unwind(AssertUnwindSafe(|| check(name, settings))).is_err())
        .map(|(name, _)| *name)
        .collect();
    assert!(failed.is_empty(), "failed runs: {failed:?}");
}

/// Returns the step lines of a run on `device`.
pub fn train(device: &str, settings: &[&str], out: &Path) -> Vec<Value> {
    let (device, place) = (
        format!("model.device={device}"),
        format!("train.output_dir={}", out.display()),
    );
    let most = format!("train.max_steps={}", steps());
    let mut arguments = vec!["train", "--recipe", "recipes/quickstart.toml", &device, &place, &most];
    arguments.extend([
        "model.dtype=bf16",
        "tune.method=full",
        "train.logging_steps=1",
        "train.save_steps=0",
        if short() {
            "train.batch_size=1"
        } else {
            "train.batch_size=4"
        },
        "train.gradient_accumulation_steps=2",
        "train.predict_with_generate=false",
        "train.sample_prompts=[]",
        // A single row has a large gradient.
        if short() {
            "optimizer.learning_rate=1e-4"
        } else {
            "optimizer.learning_rate=1e-3"
        },
        "schedule.name=constant",
        "schedule.warmup_ratio=0",
    ]);
    if short() {
        // Packed rows of half the length of the recipe's.
        arguments.extend(["data.eval=[]", "data.max_length=128"]);
    }
    // Each key may be given only once.
    arguments.retain(|a| !settings.iter().any(|s| s.split('=').next() == a.split('=').next()));
    arguments.extend(settings);
    ft(&arguments, true);
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    lines.filter(|l| l.get("loss").is_some()).collect()
}

pub fn number(line: &Value, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("no {key} in {line}"))
}

pub fn close(here: f64, there: f64, tolerance: f64, what: &str) {
    let difference = (here - there).abs();
    assert!(difference <= tolerance * here.abs(), "{what}: CPU {here}, GPU {there}");
}

/// The resumed run starts from the checkpoint of a step in the middle. tests/run/resume.rs stops and kills runs.
#[test]
fn every_method_loses_what_it_loses_on_the_cpu_and_resumes_to_the_same_bits() {
    let Some(_gpu) = gpu() else { return };
    each_run(|name, settings| {
        let dir = TempDir::new().unwrap();
        let stop = steps().div_ceil(2);
        let save = format!("train.save_steps={stop}");
        let saving = [settings, &[save.as_str()]].concat();
        let here = train("cpu", settings, &dir.path().join("cpu"));
        let there = train("cuda:0", &saving, &dir.path().join("gpu"));
        assert_eq!((here.len(), there.len()), (steps(), steps()), "{name}");
        let (loss, norm) = if settings.contains(&"model.dtype=f32") {
            (1e-4, 1e-3)
        } else {
            (1e-2, 5e-2)
        };
        for (a, b) in here.iter().zip(&there) {
            let what = format!("{name}, step {}", a["step"]);
            close(number(a, "loss"), number(b, "loss"), loss, &format!("{what}: loss"));
            close(
                number(a, "grad_norm"),
                number(b, "grad_norm"),
                norm,
                &format!("{what}: norm"),
            );
            assert_eq!(a["trained_tokens"], b["trained_tokens"], "{what}");
        }
        // A few rows in a few steps do not show it.
        if !short() {
            let (first, last) = (number(&there[0], "loss"), number(&there[5], "loss"));
            assert!(last < first, "{name}: {first} to {last}");
        }
        let checkpoint = dir.path().join(format!("gpu/checkpoint-{stop}"));
        let resume = ["--resume", checkpoint.to_str().unwrap()];
        let rest = train("cuda:0", &[settings, &resume].concat(), &dir.path().join("resumed"));
        // With the lines of the run before.
        assert_eq!(rest.len(), steps(), "{name}");
        for (a, b) in there.iter().zip(&rest) {
            assert_eq!(a["step"], b["step"], "{name}");
            assert_eq!(number(a, "loss").to_bits(), number(b, "loss").to_bits(), "{name}");
        }
    });
}

/// Losses and norms are read after the next step was queued. With a save after every step they are read at once.
#[test]
fn a_step_that_is_not_finite_leaves_the_state_before_it() {
    let Some(_gpu) = gpu() else { return };
    let states = ["train.save_steps=100", "train.save_steps=1"].map(|save| {
        let dir = TempDir::new().unwrap();
        let place = format!("train.output_dir={}", dir.path().display());
        let out = run_ft(
            &[
                "train",
                "--recipe",
                "recipes/quickstart.toml",
                "model.device=cuda:0",
                "tune.method=full",
                "optimizer.learning_rate=1e15",
                "schedule.name=constant",
                "schedule.warmup_ratio=0",
                "train.max_steps=4",
                "train.batch_size=1",
                "train.sample_prompts=[]",
                "data.eval=[]",
                "train.predict_with_generate=false",
                save,
                &place,
            ],
            true,
        );
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(said.contains("the weights were not changed by this step"), "{said}");
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert_eq!(read("metrics.jsonl").lines().count(), 1);
        let stop = read("events.jsonl").lines().last().unwrap().to_string();
        assert_eq!(serde_json::from_str::<Value>(&stop).unwrap()["step"], 2, "{stop}");
        let saved = std::fs::read_dir(dir.path().join("checkpoint-1")).unwrap();
        let tensors = saved.map(|entry| entry.unwrap().path());
        let tensors = tensors.filter(|path| path.extension().is_some_and(|e| e == "safetensors"));
        let mut tensors: Vec<_> = tensors
            .map(|path| (path.file_name().unwrap().to_owned(), std::fs::read(&path).unwrap()))
            .collect();
        tensors.sort();
        assert!(!tensors.is_empty());
        tensors
    });
    assert!(states[0] == states[1], "the saved states differ");
}

#[test]
fn layer_inputs_in_host_memory_change_nothing() {
    let Some(_gpu) = gpu() else { return };
    let losses = |activations: &'static str| {
        let dir = TempDir::new().unwrap();
        let lines = train("cuda:0", &["tune.method=full", activations], &dir.path().join("out"));
        lines.iter().map(|l| number(l, "loss").to_bits()).collect::<Vec<_>>()
    };
    assert_eq!(
        losses("memory.activations=host"),
        losses("memory.activations=recompute")
    );
}

#[test]
fn generation_and_evaluation_are_those_of_the_cpu() {
    let Some(_gpu) = gpu() else { return };
    let both = |arguments: &[&str]| {
        let arguments = [arguments, &["--model", "assets/tiny", "--dtype", "f32"]].concat();
        [false, true].map(|on_gpu| ft(&arguments, on_gpu))
    };
    let [here, there] = both(&["generate", "--prompt", "The river of", "--temperature", "0"]);
    assert_eq!(here, there);
    let [here, there] = both(&["eval", "--data", "assets/world/eval.jsonl", "--json"]);
    let loss = |text: &str| number(&serde_json::from_str(text).unwrap(), "loss");
    close(loss(&here), loss(&there), 1e-4, "evaluation");
}
