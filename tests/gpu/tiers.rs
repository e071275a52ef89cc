//! Training runs whose weights are not on the device, or that need more than one model: LoftQ, files that are quantized
//! already, distillation. The place of the weights changes nothing.

use crate::families;
use crate::support::{gpu, short};
use crate::train::{close, ft, number, train};
use candle_core::{Device, Tensor, safetensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use tempfile::TempDir;

const LORA: [&str; 2] = ["tune.method=lora", "optimizer.learning_rate=1e-3"];

fn losses(lines: &[Value]) -> Vec<f64> {
    lines.iter().map(|line| number(line, "loss")).collect()
}

/// Trains with the weights on the device, in host memory and on the disk.
fn places(dir: &Path, settings: &[&str]) -> [Vec<f64>; 3] {
    ["device", "host", "disk"].map(|tier| {
        let place = format!("memory.tier={tier}");
        losses(&train("cuda:0", &[settings, &[&place]].concat(), &dir.join(tier)))
    })
}

fn assert_equal(got: &[Vec<f64>; 3], here: &[f64], what: &str) {
    assert!(got[0].iter().all(|loss| loss.is_finite()), "{what}: {:?}", got[0]);
    assert!(got[0] == got[1] && got[0] == got[2], "{what}: {got:?}");
    for (there, here) in got[0].iter().zip(here) {
        close(*here, *there, 1e-2, what);
    }
}

#[test]
fn loftq_starts_alike_wherever_the_weights_are() {
    let Some(_gpu) = gpu() else { return };
    let loftq = [
        "memory.frozen_weights=int4",
        "tune.lora.init_lora_weights=loftq",
        "tune.lora.loftq_iter=2",
    ];
    let dir = TempDir::new().unwrap();
    let settings = [&LORA[..], &loftq].concat();
    let here = losses(&train("cpu", &settings, &dir.path().join("cpu")));
    assert_equal(&places(dir.path(), &settings), &here, "LoftQ");
}

/// Pairs from the gradients of quantized weights, and frozen weights in bf16 below an f32 model.
#[test]
fn gradients_of_codes_and_bf16_below_f32_are_alike_wherever_the_weights_are() {
    let Some(_gpu) = gpu() else { return };
    for more in [
        ["memory.frozen_weights=nf4", "tune.lora.init_lora_weights=lora_ga"],
        ["memory.frozen_weights=bf16", "tune.lora.init_lora_weights=default"],
    ] {
        let dir = TempDir::new().unwrap();
        let settings = [&LORA[..], &["model.dtype=f32"], &more].concat();
        let here = losses(&train("cpu", &settings, &dir.path().join("cpu")));
        assert_equal(&places(dir.path(), &settings), &here, more[1]);
    }
}

/// With NF4 the files have the layout of bitsandbytes.
#[test]
fn files_that_are_quantized_are_read_layer_by_layer() {
    let Some(_gpu) = gpu() else { return };
    let formats: &[&str] = if short() { &["nf4"] } else { &["nf4", "int4"] };
    for format in formats {
        let dir = TempDir::new().unwrap();
        let model = dir.path().join("model").display().to_string();
        ft(
            &["quantize", "--model", "assets/tiny", "--to", format, "--out", &model],
            false,
        );
        let path = format!("model.path={model}");
        let settings = [&LORA[..], &[&path]].concat();
        let here = losses(&train("cpu", &settings, &dir.path().join("cpu")));
        assert_equal(&places(dir.path(), &settings), &here, format);
    }
}

/// The teacher is the student in 4 bits.
#[test]
fn distillation_is_that_of_the_cpu_and_of_heads_in_parts() {
    let Some(_gpu) = gpu() else { return };
    let methods: &[&str] = if short() {
        &["tune.method=lora"]
    } else {
        &["tune.method=lora", "tune.method=full"]
    };
    for method in methods {
        let dir = TempDir::new().unwrap();
        let base = [
            *method,
            "train.stage=distill",
            // The divergence is small: over fewer tokens it differs by more from the CPU's.
            "data.max_length=256",
            "distill.teacher=assets/tiny",
            "distill.teacher_weights=int4",
            "distill.alpha=0.3",
            "distill.beta=0.5",
        ];
        let run = |device: &str, name: &str, more: &[&str]| {
            let lines = train(device, &[&base[..], more].concat(), &dir.path().join(name));
            let parts = lines.iter().map(|line| number(line, "divergence"));
            (losses(&lines), parts.collect::<Vec<_>>())
        };
        let (here, there) = (run("cpu", "cpu", &[]), run("cuda:0", "gpu", &[]));
        let disk = [
            "memory.tier=disk",
            "memory.head_chunk=4096",
            "distill.teacher_tier=disk",
        ];
        // A head that trains is held whole.
        let streamed = run("cuda:0", "disk", &disk);
        for (i, loss) in here.0.iter().enumerate() {
            close(*loss, there.0[i], 1e-2, method);
            close(here.1[i], there.1[i], 5e-2, method);
            close(there.0[i], streamed.0[i], 1e-3, &format!("{method}, heads in parts"));
        }
    }
}

/// At its peak the layers that the GPU fetched last are the trained ones, which are there anyway.
#[test]
fn the_forecast_of_frozen_layers_on_the_host_is_what_is_used() {
    let Some(_gpu) = gpu() else { return };
    let dir = TempDir::new().unwrap();
    let run = dir.path().join("run");
    // Rows as long as the forecast assumes, with a logit for each token.
    let settings = [
        "tune.method=freeze",
        "memory.tier=host",
        "data.packing=true",
        "data.train_on=all",
        "data.max_length=256",
    ];
    let lines = train("cuda:0", &settings, &run);
    let plan: Value = serde_json::from_slice(&std::fs::read(run.join("plan.json")).unwrap()).unwrap();
    let forecast = plan["peak_bytes"].as_f64().unwrap();
    let used = number(lines.last().unwrap(), "peak_memory_bytes");
    println!("{used} bytes used, {forecast} forecast");
    assert!(
        (forecast / used - 1.0).abs() < 0.08,
        "{used} bytes used, {forecast} forecast"
    );
}

/// Block training with SGD: `final/` of a GPU, with the layers on it or in host memory, has the weights of the CPU.
#[test]
fn trained_weights_are_those_of_the_cpu() {
    let Some(_gpu) = gpu() else { return };
    let dir = TempDir::new().unwrap();
    let model = families::model("qwen2", dir.path());
    let weights = |folder: &Path| -> BTreeMap<String, Vec<f32>> {
        let all = safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
        let values = |t: Tensor| {
            let t = t.to_dtype(candle_core::DType::F32).unwrap();
            t.flatten_all().unwrap().to_vec1().unwrap()
        };
        all.into_iter().map(|(name, t)| (name, values(t))).collect()
    };
    let run = |device: &str, tier: &str| {
        let out = dir.path().join(format!("{}-{tier}", &device[..3]));
        let place = format!("memory.tier={tier}");
        let settings = [
            "tune.method=block",
            "tune.block.switch_every=1",
            "model.dtype=f32",
            "optimizer.name=sgd",
            "optimizer.learning_rate=0.05",
            &place,
        ];
        families::train(device, &model, &settings, &out);
        weights(&out.join("final"))
    };
    let (start, here) = (weights(&model), run("cpu", "device"));
    let apart = |a: &[f32], b: &[f32]| {
        a.iter().zip(b).fold(0f32, |most, (a, b)| {
            if a.is_finite() {
                most.max((a - b).abs())
            } else {
                f32::INFINITY
            }
        })
    };
    let most = here
        .iter()
        .map(|(name, values)| apart(values, &start[name]))
        .fold(0.0, f32::max);
    assert!(most > 1e-3, "{most}");
    for tier in ["device", "host"] {
        for (name, values) in run("cuda:0", tier) {
            let off = apart(&values, &here[&name]);
            assert!(
                off <= 1e-3 * most,
                "{tier}: {name} is off by {off}, the largest change is {most}"
            );
        }
    }
}
