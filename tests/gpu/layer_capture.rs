//! Training with layers as CUDA graphs has the bits of training without.

use crate::captures::{alone, is_soft};
use crate::families::{compare_runs, model};
use crate::support::{gpu, short};
use candle_core::Device;
use ft::data::{Batch, Example};
use ft::engine::{ActiveSet, Engine, GradientStorage, StepStrategy};
use ft::hf;
use ft::model::{TrainableNetwork, families, shapes};
use ft::ops::{Dtype, graph, oracle, update};
use ft::optim::Optimizer;
use ft::optim::config::OptimizerConfig;
use ft::peft::LoraConfig;
use ft::sft::CausalLm;
use ft::source::ResidentWeights;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

const LAYERS: usize = 6;
/// Enough for the planner.
const DEEP: usize = 24;

/// What trains.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Tuning {
    Full,
    /// One layer in the middle.
    Layer,
    Lora,
}

/// A model of equal layers.
fn engine(device: &Device, dtype: Dtype, tuning: Tuning, strategy: StepStrategy) -> (Engine, ActiveSet) {
    let mut spec = families::read(&shapes::config("shape:tiny").unwrap().unwrap()).unwrap();
    spec.layers = vec![spec.layers[0]; LAYERS];
    let (params, vocab) = (spec.params(), spec.vocab);
    let source = ResidentWeights::random(params.clone(), 1, 0.02, 1.0, dtype, device).unwrap();
    let mut model = TrainableNetwork::new(spec, Arc::new(source), device.clone());
    let names: Vec<String> = match tuning {
        Tuning::Full => params.iter().map(|p| p.name.to_string()).collect(),
        Tuning::Layer => {
            let of_layer = params.iter().filter(|p| p.name.starts_with("model.layers.1."));
            of_layer.map(|p| p.name.to_string()).collect()
        }
        Tuning::Lora => {
            let network = &mut model.network;
            let mut adapters = hf::adapters_to_fill(&LoraConfig::default(), &network.spec, None, 0).unwrap();
            adapters.attach(network).unwrap();
            let parts: Vec<_> = network.adapters.values().flat_map(|adapter| adapter.parts()).collect();
            // Neither A nor B is zero.
            for (part, seed) in parts.iter().zip(1..) {
                let small = oracle::random(part.tensor.shape(), seed).affine(0.05, 0.0).unwrap();
                update::add_assign(&part.tensor, &small.to_device(device).unwrap()).unwrap();
            }
            parts.iter().map(|p| p.name.to_string()).collect()
        }
    };
    let active = ActiveSet::new(names);
    let optimizer = Optimizer::new(OptimizerConfig::default());
    let engine = Engine::new(model, Box::new(CausalLm::new(vocab)), optimizer, strategy, &active).unwrap();
    (engine, active)
}

/// A micro-batch with rows of these lengths.
fn batch(rows: &[u32], seed: u32) -> Batch {
    let rows: Vec<Example> = (rows.iter())
        .map(|length| Example {
            ids: (0..*length).map(|t| (37 * t + 5 * seed) % 896).collect(),
            trained: (0..*length).map(|t| t > 2).collect(),
        })
        .collect();
    Batch::from_examples(&rows)
}

/// The micro-batches of the steps. The second and third step have the lengths of the first, the others do not.
fn windows(micro_batches: usize) -> Vec<Vec<Batch>> {
    let lengths: [&[u32]; 5] = [&[24, 9], &[24, 9], &[24, 9], &[33], &[7, 8, 9]];
    let of = |(step, rows): (usize, &&[u32])| (0..micro_batches).map(|m| batch(rows, (7 * step + m) as u32)).collect();
    lengths.iter().enumerate().map(of).collect()
}

/// Losses, norms and trained weights of five steps in bits, and how many layers were launched as graphs.
fn train(
    device: &Device,
    dtype: Dtype,
    tuning: Tuning,
    strategy: StepStrategy,
    clip: f64,
    micro_batches: usize,
) -> (Vec<u64>, u64) {
    let (mut engine, active) = engine(device, dtype, tuning, strategy);
    engine.max_grad_norm = clip;
    let mut bits = Vec::new();
    for (window, step) in windows(micro_batches).iter().zip(1..) {
        let report = engine.step(step, window, &active, 1e-3).unwrap();
        bits.extend([report.totals.loss().to_bits(), report.grad_norm.to_bits()]);
    }
    for name in active.names() {
        let values = update::to_f32_vec(&engine.network.param(name).unwrap().tensor).unwrap();
        bits.extend(values.into_iter().map(|x| u64::from(x.to_bits())));
    }
    let launches = engine.layer_graphs.as_ref().map_or(0, |graphs| graphs.launches());
    (bits, launches)
}

/// The first layer of a form runs as it is, the second is recorded and launched: so 5 launches of 6 layers, and 6 if the lengths
/// are those of the micro-batch before.
#[test]
fn training_has_the_bits_of_training_without() {
    let Some(gpu) = gpu() else { return };
    for dtype in [Dtype::Bf16, Dtype::F32] {
        for (tuning, gradients, clip, micro_batches, launches) in [
            // The lowest layer needs no gradient of its input, and is not recorded backward.
            (Tuning::Lora, GradientStorage::Keep, 0.5, 1, 27 + 22),
            // The second micro-batch has the lengths of the first.
            (Tuning::Lora, GradientStorage::Keep, 0.5, 2, 57 + 47),
            (Tuning::Full, GradientStorage::Keep, 0.5, 1, 27 + 27),
            (Tuning::Full, GradientStorage::Keep, 0.5, 2, 57 + 57),
            (Tuning::Full, GradientStorage::Fused, 0.0, 1, 27 + 27),
            // Two passes.
            (Tuning::Full, GradientStorage::NormFirst, 0.5, 1, 57 + 57),
            // Four layers above the active one need the gradient of their input only.
            (Tuning::Layer, GradientStorage::Keep, 0.5, 1, 27 + 17),
        ] {
            let what = format!("{dtype:?} {tuning:?} {gradients:?} {micro_batches}");
            // A slow device has one case in f32.
            if short() && dtype == Dtype::F32 && (tuning, micro_batches) != (Tuning::Full, 2) {
                continue;
            }
            let strategy = |layer_graphs| StepStrategy {
                gradients,
                layer_graphs,
                ..StepStrategy::new(dtype)
            };
            let (want, none) = train(&gpu.device, dtype, tuning, strategy(false), clip, micro_batches);
            let (got, found) = train(&gpu.device, dtype, tuning, strategy(true), clip, micro_batches);
            assert_eq!(none, 0);
            assert!(got == want, "{what}");
            assert_eq!(found, launches, "{what}");
            assert_eq!(graph::take_refusal(), None, "{what}");
        }
    }
}

/// Batches of other lengths between two steps take the place of the lists on the GPU that the graphs of the steps read.
#[test]
fn evaluations_between_the_steps_change_no_bit() {
    let Some(gpu) = gpu() else { return };
    let of = |layer_graphs| {
        let strategy = StepStrategy {
            layer_graphs,
            ..StepStrategy::new(Dtype::Bf16)
        };
        let (mut engine, active) = engine(&gpu.device, Dtype::Bf16, Tuning::Lora, strategy);
        let mut bits = Vec::new();
        for step in 1..=3 {
            let report = engine
                .step(step, &[batch(&[24, 9], step as u32)], &active, 1e-3)
                .unwrap();
            bits.extend([report.totals.loss().to_bits(), report.grad_norm.to_bits()]);
            let others = (10..22).map(|length| engine.evaluate(&batch(&[length], 1)).unwrap());
            bits.extend(others.map(|totals| totals.loss().to_bits()));
        }
        let launches = engine.layer_graphs.as_ref().map_or(0, |graphs| graphs.launches());
        (bits, launches)
    };
    let ((want, none), (got, launches)) = (of(false), of(true));
    assert!(got == want);
    // 5, 6 and 6 layers forward; 4, 5 and 5 backward.
    assert_eq!((none, launches), (0, 17 + 14));
    assert_eq!(graph::take_refusal(), None);
}

/// Without graphs the layers run as they are.
#[test]
fn a_driver_that_refuses_graphs_changes_no_bit() {
    let name = "layer_capture::a_driver_that_refuses_graphs_changes_no_bit";
    let Some(gpu) = gpu() else { return };
    if !is_soft() {
        return eprintln!("skipped: on the software driver only");
    }
    if let Some((passed, said)) = alone(name, "refused", &[("SOFT_CUDA_REFUSE_GRAPHS", "1")]) {
        return assert!(passed, "{said}");
    }
    let of = |layer_graphs| {
        let strategy = StepStrategy {
            layer_graphs,
            ..StepStrategy::new(Dtype::Bf16)
        };
        train(&gpu.device, Dtype::Bf16, Tuning::Lora, strategy, 0.5, 1)
    };
    let (want, _) = of(false);
    let (got, launches) = of(true);
    assert!(got == want);
    assert_eq!(launches, 0);
    assert!(graph::take_refusal().is_some());
}

/// A model of 24 small layers, which get random weights.
fn deep(dir: &Path) -> PathBuf {
    let to = model("qwen3", dir);
    let path = to.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["num_hidden_layers"] = DEEP.into();
    config["max_window_layers"] = DEEP.into();
    if config.get("layer_types").is_some() {
        config["layer_types"] = vec!["full_attention"; DEEP].into();
    }
    fs::write(&path, config.to_string()).unwrap();
    fs::remove_file(to.join("model.safetensors")).unwrap();
    to
}

/// The program chooses graphs for small layers: losses of the CPU, and the forecast of the peak memory.
#[test]
fn the_memory_of_a_run_is_that_of_the_forecast() {
    let Some(_gpu) = gpu() else { return };
    let dir = TempDir::new().unwrap();
    let deep = deep(dir.path());
    for (name, settings) in [
        ("lora", &["tune.method=lora", "model.dtype=bf16"][..]),
        ("full", &["tune.method=full", "model.dtype=bf16"]),
        (
            "blocks",
            &["tune.method=block", "model.dtype=f32", "tune.block.switch_every=2"],
        ),
    ] {
        // Rows as long as the forecast assumes, with a logit for each token.
        let shared = ["model.init=random", "data.packing=true", "data.train_on=all"];
        let settings = [settings, &shared].concat();
        compare_runs(name, &deep, &settings, dir.path());
        let run = dir.path().join("gpu");
        let plan: Value = serde_json::from_slice(&fs::read(run.join("plan.json")).unwrap()).unwrap();
        assert!(plan.to_string().contains("as CUDA graphs"), "{name}: {plan}");
        let lines = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
        let forecast = plan["peak_bytes"].as_f64().unwrap();
        let used = last["peak_memory_bytes"].as_f64().unwrap();
        println!("{name}: {used} bytes used, {forecast} forecast");
        assert!(
            (forecast / used - 1.0).abs() < 0.1,
            "{name}: {used} bytes used, {forecast} forecast"
        );
        for run in ["cpu", "gpu"] {
            fs::remove_dir_all(dir.path().join(run)).unwrap();
        }
    }
}
