//! f16 on every kind of layer, in the shapes of the golden models of the parity tests: losses and gradients are those of f32 on the
//! CPU, steps with a loss scale lose what they lose there, and answers continue from their caches. No kernel reads bf16 as f16.

use crate::families::{ON_EXPERTS, golden, model, prompts, train, wide_mixture};
use crate::support::{assert_close, flat, gpu};
use crate::train::{close, number};
use candle_core::{DType, Device, Tensor};
use ft::data::Batch;
use ft::data::batch::Example;
use ft::engine::sinks::CollectGradients;
use ft::engine::{ActiveSet, GradientPass};
use ft::formats::Config;
use ft::generate::{Answer, GenerateSettings, answer};
use ft::model::{Network, families};
use ft::ops::step_stats::StepStats;
use ft::ops::{Dtype, linear, rms_norm, short_conv, update};
use ft::sft::CausalLm;
use ft::source::ResidentWeights;
use std::collections::BTreeMap;
use std::sync::Arc;
use tempfile::TempDir;

/// A model for each kind of layer: Gated DeltaNet with projections of its own, and ordered by key head; streams and sparse gates;
/// per-layer inputs and shared keys; sinks, experts with biases; experts, also with a shared one; latent attention with smaller
/// heads of v, and with larger ones; short convolutions; LayerNorms with an MLP without a gate; norms without weights.
const FAMILIES: [&str; 13] = [
    "qwen3_5_text",
    "qwen3_next",
    "gemma3n_text",
    "gemma4_text_shared",
    "gpt_oss",
    "qwen3_moe",
    "qwen2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "lfm2_bias",
    "lfm2_wide",
    "starcoder2",
    "nanochat",
];

const LOSS_SCALE: f64 = 1024.0;

/// With random weights: those of the goldens are so large that rounding is what is measured. Seeds with which f16 chooses other
/// experts, or cuts a gate off at its limit that f32 does not, would measure that.
fn open(family: &str, dtype: Dtype, device: &Device) -> Network {
    let spec = families::read(&Config::load(&golden(family)).unwrap()).unwrap();
    let seed = if family == "gpt_oss" { 9 } else { 7 };
    let source = ResidentWeights::random(spec.params(), seed, 0.1, 0.8, dtype, device).unwrap();
    Network::new(spec, Arc::new(source), device.clone())
}

fn batch() -> Batch {
    let row = |seed: u32, n: u32| Example {
        ids: (0..n).map(|t| 5 + (37 * t + 11 * seed + t * t) % 100).collect(),
        trained: (0..n).map(|t| t > 0).collect(),
    };
    Batch::from_examples([&row(1, 21), &row(2, 5), &row(3, 12)])
}

/// The loss, and the gradient of every parameter without the factor of the loss scale.
fn loss_and_gradients(network: &Network, scale: f64) -> (f64, BTreeMap<String, Tensor>) {
    let active = ActiveSet::new(network.spec.params().into_iter().map(|p| p.name.to_string()));
    let mut sink = CollectGradients {
        active: &active,
        gradients: BTreeMap::new(),
    };
    let (objective, stats) = (
        CausalLm::new(network.spec.vocab),
        StepStats::new(&network.device).unwrap(),
    );
    let pass = GradientPass {
        loss_scale: scale,
        ..GradientPass::new(network, &objective, &active, &stats)
    };
    let totals = pass.window(&[batch()], &mut sink).unwrap();
    for gradient in sink.gradients.values() {
        update::scale_assign(gradient, 1.0 / scale as f32).unwrap();
    }
    (totals.with(stats.read().unwrap()).loss(), sink.gradients)
}

/// The distance of all gradients together, relative to their length, and the largest of one gradient with its name.
fn distances(got: &BTreeMap<String, Tensor>, want: &BTreeMap<String, Tensor>) -> (f64, f64, String) {
    assert!(want.len() > 8 && want.keys().eq(got.keys()));
    let (mut all, mut worst) = ([0f64; 2], (0f64, String::new()));
    for (name, want) in want {
        let (got, want) = (flat(&got[name]), flat(want));
        assert!(got.iter().all(|x| x.is_finite()) && got.len() == want.len(), "{name}");
        let pairs = got.iter().zip(&want).map(|(a, b)| [f64::from(a - b), f64::from(*b)]);
        let own = pairs.fold([0f64; 2], |[d, w], [a, b]| [d + a * a, w + b * b]);
        all = [all[0] + own[0], all[1] + own[1]];
        let off = (own[0] / own[1].max(1e-30)).sqrt();
        if off > worst.0 {
            worst = (off, name.clone());
        }
    }
    ((all[0] / all[1]).sqrt(), worst.0, worst.1)
}

/// f16 has three bits more than bf16, so its gradients are closer to those of f32.
#[test]
fn losses_and_gradients_are_those_of_f32() {
    let Some(gpu) = gpu() else { return };
    let mut wrong = Vec::new();
    for family in FAMILIES {
        let (want, here) = loss_and_gradients(&open(family, Dtype::F32, &Device::Cpu), 1.0);
        let (loss, there) = loss_and_gradients(&open(family, Dtype::F16, &gpu.device), LOSS_SCALE);
        let (_, coarse) = loss_and_gradients(&open(family, Dtype::Bf16, &gpu.device), 1.0);
        let (f16, bf16) = (distances(&there, &here), distances(&coarse, &here));
        println!("{family}: loss {want} {loss}, gradients differ by {f16:?}, in bf16 by {bf16:?}");
        close(want, loss, 1e-3, family);
        if f16.0 > 1e-2 || f16.0 > bf16.0 / 4.0 || f16.1 > 3e-2 {
            wrong.push((family, f16, bf16));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn steps_with_a_loss_scale_are_those_of_f32() {
    let Some(_gpu) = gpu() else { return };
    for family in ["qwen3_5_text", "gemma3n_text", "gpt_oss", "deepseek_v3", "lfm2_bias"] {
        let dir = TempDir::new().unwrap();
        let folder = model(family, dir.path());
        let run = |device, dtype| {
            let settings = ["tune.method=full", "model.init=random", dtype, "train.max_steps=2"];
            train(device, &folder, &settings, &dir.path().join(device))
        };
        let (here, there) = (run("cpu", "model.dtype=f32"), run("cuda:0", "model.dtype=f16"));
        assert_eq!((here.len(), there.len()), (2, 2), "{family}");
        for (a, b) in here.iter().zip(&there) {
            let what = format!("{family}, step {}", a["step"]);
            close(number(a, "loss"), number(b, "loss"), 2e-3, &format!("{what}: loss"));
            let norm = format!("{what}: norm");
            close(number(a, "grad_norm"), number(b, "grad_norm"), 1e-2, &norm);
            let scale = (number(b, "loss_scale"), number(b, "skipped_steps"));
            assert_eq!(scale, (65536.0, 0.0), "{what}");
        }
    }
}

/// Experts that are computed together, dense and quantized.
#[test]
fn grouped_experts_lose_what_they_lose_in_f32() {
    let Some(_gpu) = gpu() else { return };
    let dir = TempDir::new().unwrap();
    let folder = wide_mixture(dir.path());
    for settings in [
        &["tune.method=full"][..],
        &["tune.method=lora", "memory.frozen_weights=nf4"],
        &["tune.method=lora", "memory.frozen_weights=int8"],
        &[
            "tune.method=lora",
            "memory.frozen_weights=nf4",
            "tune.lora.r=12",
            ON_EXPERTS,
        ],
    ] {
        let run = |device, dtype| {
            let settings = [settings, &["model.init=random", dtype, "train.max_steps=2"]].concat();
            train(device, &folder, &settings, &dir.path().join(device))
        };
        let (here, there) = (run("cpu", "model.dtype=f32"), run("cuda:0", "model.dtype=f16"));
        assert_eq!((here.len(), there.len()), (2, 2), "{settings:?}");
        for (a, b) in here.iter().zip(&there) {
            let what = format!("{settings:?}, step {}", a["step"]);
            close(number(a, "loss"), number(b, "loss"), 2e-3, &format!("{what}: loss"));
            close(
                number(a, "grad_norm"),
                number(b, "grad_norm"),
                1e-2,
                &format!("{what}: norm"),
            );
            assert_eq!(number(b, "skipped_steps"), 0.0, "{what}");
        }
        for device in ["cpu", "cuda:0"] {
            std::fs::remove_dir_all(dir.path().join(device)).unwrap();
        }
    }
}

#[test]
fn answers_continue_from_their_caches() {
    let Some(gpu) = gpu() else { return };
    let requests = prompts();
    let settings = GenerateSettings {
        max_new_tokens: 6,
        ..GenerateSettings::default()
    };
    for family in FAMILIES {
        let answers = |dtype, device: &Device| -> Vec<Answer> {
            let network = open(family, dtype, device);
            answer(&network, &requests, &settings, &mut |_, _| Ok(())).unwrap().0
        };
        let (here, there) = (answers(Dtype::F32, &Device::Cpu), answers(Dtype::F16, &gpu.device));
        let (mut off, mut same) = (0f32, 0);
        for (a, b) in here.iter().zip(&there) {
            let equal = a.ids.iter().zip(&b.ids).take_while(|(a, b)| a == b).count();
            let pairs = a.log_probs.iter().zip(&b.log_probs).take(equal);
            off = pairs.fold(off, |off, (a, b)| off.max((a - b).abs()));
            same += equal;
        }
        println!("{family}: {same} of 18 tokens, log-probabilities differ by up to {off:.1e}");
        // Rounding may decide between two tokens that are about as likely.
        assert!(same >= 12 && off <= 1e-2, "{family}: {same} tokens, {off}");
    }
}

/// The kernels of f16 have f16 in the place of bf16: with both they would read one as the other.
#[test]
fn operands_in_bf16_and_f16_are_an_error_or_exact() {
    let Some(gpu) = gpu() else { return };
    let of = |shape: &[usize], dtype, seed| gpu.random(shape, dtype, seed);
    let (x, w) = (of(&[6, 8], DType::F16, 1), of(&[8, 1, 3], DType::BF16, 2));
    let row = of(&[8], DType::BF16, 3);
    let other = of(&[6, 8], DType::BF16, 4);
    let stats = StepStats::new(&gpu.device).unwrap();
    let refused = [
        short_conv::forward(&x.gpu, &w.gpu, &[0, 6], false).err(),
        rms_norm::forward(&x.gpu, &row.gpu, 1e-6, false).err(),
        update::add(&x.gpu, &other.gpu).err(),
        update::add_rows(&x.gpu, &row.gpu).err(),
        stats.add_squares_of(&[&x.gpu, &other.gpu]).err(),
    ];
    for (i, error) in refused.into_iter().enumerate() {
        let said = error.unwrap_or_else(|| panic!("operation {i} ran")).to_string();
        assert!(said.contains("bf16") && said.contains("f16"), "{i}: {said}");
    }
    // Casts and products have an answer.
    let weight = of(&[5, 8], DType::BF16, 5);
    let y = linear::forward(&x.gpu, &weight.gpu, None).unwrap();
    assert_close(&y, &linear::forward(&x.cpu, &weight.cpu, None).unwrap(), 2e-3);
}
