//! Adapters on layers that not every family has (AltUp, per-layer inputs, linears outside of the layers, Gated DeltaNet,
//! short convolutions, latent attention, experts): after training every tensor is that of the CPU, by its name.
//! With `FT_GPU_SHORT=1` each kind of layer is compared on one family only.

use crate::families::{model, train};
use crate::support::{gpu, short};
use candle_core::{Device, Tensor, safetensors};
use std::collections::BTreeMap;
use std::path::Path;
use tempfile::TempDir;

/// The tensors of the adapter that a run wrote, by name.
fn trained(run: &Path) -> BTreeMap<String, Vec<f32>> {
    let file = run.join("final/adapter_model.safetensors");
    let values = |t: Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let all = safetensors::load(file, &Device::Cpu).unwrap();
    all.into_iter().map(|(name, t)| (name, values(t))).collect()
}

fn largest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |most, x| if x.is_nan() { x } else { most.max(x.abs()) })
}

/// Trains adapters with SGD, whose steps are proportional to the gradients, and compares the change of each tensor with
/// that of the CPU, in f32. `sites`: parts of names that have adapters. Returns the number of tensors.
fn compare(family: &str, settings: &[&str], sites: &[&str]) -> usize {
    let dir = TempDir::new().unwrap();
    let model = model(family, dir.path());
    let run = |device: &str, rate: &str, name: &str| {
        let own = [
            "tune.method=lora",
            "tune.lora.r=2",
            "model.dtype=f32",
            rate,
            "optimizer.name=sgd",
            "optimizer.momentum=0.9",
        ];
        let out = dir.path().join(name);
        let steps = train(device, &model, &[&own[..], settings].concat(), &out);
        (steps, trained(&out))
    };
    let rate = "optimizer.learning_rate=0.05";
    // So small a rate changes nothing; 0 is refused.
    let (_, start) = run("cpu", "optimizer.learning_rate=1e-30", "start");
    let (losses, here) = run("cpu", rate, "cpu");
    let (other_losses, there) = run("cuda:0", rate, "gpu");
    assert_eq!((losses.len(), other_losses.len()), (3, 3), "{family}");
    assert_eq!(
        here.keys().collect::<Vec<_>>(),
        there.keys().collect::<Vec<_>>(),
        "{family}"
    );
    for site in sites {
        assert!(
            here.keys().any(|name| name.contains(site)),
            "{family}: no adapter on {site}"
        );
    }
    let change = |to: &[f32], name: &str| largest(to.iter().zip(&start[name]).map(|(a, b)| a - b));
    // Of tensors that hardly change, the rounding of the weight itself is left.
    let all = largest(here.iter().map(|(name, values)| change(values, name)));
    assert!(all > 1e-3, "{family}: {all}");
    for (name, values) in &here {
        let off = largest(values.iter().zip(&there[name]).map(|(a, b)| a - b));
        let most = change(values, name).max(1e-3 * all);
        assert!(
            off <= 1e-3 * most,
            "{family} {settings:?}: {name} is off by {off}, its change is {most}, the largest {all}"
        );
    }
    let still = here.iter().filter(|(name, values)| change(values, name) == 0.0).count();
    assert!(
        still * 10 < here.len(),
        "{family}: {still} of {} did not change",
        here.len()
    );
    here.len()
}

const EXPERTS: &str = "tune.lora.target_parameters=[\"mlp.experts.gate_up_proj\", \"mlp.experts.down_proj\"]";
const ALTUP: [&str; 7] = [
    "altup.modality_router",
    "altup.prediction_coefs",
    "altup.correction_coefs",
    "altup_projections",
    "altup_unembed_projections",
    "laurel.linear_left",
    "per_layer_input_gate",
];
const DELTA: [&str; 5] = [
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_a",
    "linear_attn.out_proj",
    "self_attn.q_proj",
];
const DELTA_AND_EXPERTS: [&str; 5] = [
    "in_proj_qkvz",
    "in_proj_ba",
    "linear_attn.out_proj",
    "self_attn.q_proj",
    "mlp.experts",
];
const LATENT: [&str; 4] = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"];

#[test]
fn every_tensor_is_that_of_the_cpu() {
    let Some(_gpu) = gpu() else { return };
    let outside = [&ALTUP[..], &["model.per_layer_model_projection"]].concat();
    let mut tensors = compare("gemma3n_text_active", &[], &outside);
    tensors += compare("qwen3_next_experts", &[EXPERTS, "memory.tier=host"], &DELTA_AND_EXPERTS);
    // On the device experts are computed together.
    tensors += compare("qwen3_moe", &[EXPERTS], &["mlp.experts"]);
    tensors += compare("deepseek_v3", &["memory.tier=disk"], &LATENT);
    let convolution = ["tune.lora.use_dora=true", "memory.activations=keep"];
    tensors += compare("lfm2", &convolution, &["conv.in_proj", "conv.out_proj", "magnitude"]);
    if !short() {
        tensors += compare(
            "gemma3n_text_active",
            &[
                "tune.lora.use_dora=true",
                "tune.lora.target_modules=[\"altup.modality_router\", \"altup_projections.0\", \"per_layer_model_projection\"]",
            ],
            &["magnitude"],
        );
        tensors += compare(
            "gemma4_text_shared",
            &["memory.activations=keep"],
            &["per_layer_projection", "per_layer_model_projection"],
        );
        tensors += compare("qwen3_5_text", &[], &DELTA);
        tensors += compare("deepseek_v2_groups", &["memory.tier=disk"], &["kv_a_proj_with_mqa"]);
        tensors += compare("gpt_oss_plain", &[EXPERTS], &["mlp.experts"]);
    }
    println!("{tensors} tensors");
    assert!(tensors > if short() { 150 } else { 250 }, "{tensors}");
}
