//! f16 on every kind of layer, on the golden models of the parity tests: losses and gradients are those of f32 on the CPU, a step
//! with a loss scale changes the weights as there, and answers continue from their caches. No kernel reads bf16 as f16.

use crate::families::{model, train};
use crate::support::{assert_close, flat, gpu};
use crate::train::{close, number};
use candle_core::{DType, Device, Tensor};
use ft::data::Batch;
use ft::data::batch::Example;
use ft::engine::sinks::Collect;
use ft::engine::{Active, Pass};
use ft::generate::{Answer, Request, Settings, answer};
use ft::hf;
use ft::model::Network;
use ft::ops::step_stats::StepStats;
use ft::ops::{Dtype, linear, rms_norm, short_conv, update};
use ft::sft::CausalLm;
use std::collections::BTreeMap;
use std::path::Path;
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

fn open(folder: &Path, dtype: Dtype, device: &Device) -> Network {
    let opened = hf::open(folder, dtype, device).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    opened.model.network
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
    let active = Active::new(network.spec.params().into_iter().map(|p| p.name.to_string()));
    let mut sink = Collect {
        active: &active,
        gradients: BTreeMap::new(),
    };
    let (objective, stats) = (
        CausalLm::new(network.spec.vocab),
        StepStats::new(&network.device).unwrap(),
    );
    let pass = Pass {
        loss_scale: scale,
        ..Pass::new(network, &objective, &active, &stats)
    };
    let totals = pass.window(&[batch()], &mut sink).unwrap();
    for gradient in sink.gradients.values() {
        update::scale_assign(gradient, 1.0 / scale as f32).unwrap();
    }
    (totals.with(stats.read().unwrap()).loss(), sink.gradients)
}

#[test]
fn losses_and_gradients_are_those_of_f32() {
    let Some(gpu) = gpu() else { return };
    for family in FAMILIES {
        let dir = TempDir::new().unwrap();
        let folder = model(family, dir.path());
        let (want, here) = loss_and_gradients(&open(&folder, Dtype::F32, &Device::Cpu), 1.0);
        let (loss, there) = loss_and_gradients(&open(&folder, Dtype::F16, &gpu.device), LOSS_SCALE);
        assert!(here.len() > 8 && here.keys().eq(there.keys()), "{family}");
        let mut worst = (0f32, "");
        for (name, want) in &here {
            let (got, want) = (flat(&there[name]), flat(want));
            let largest = want.iter().fold(0f32, |m, x| m.max(x.abs()));
            assert!(got.iter().all(|x| x.is_finite()) && got.len() == want.len(), "{name}");
            let off = got.iter().zip(&want).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            worst = if off > worst.0 * largest {
                (off / largest, name)
            } else {
                worst
            };
        }
        println!("{family}: loss {want} {loss}, gradients differ by up to {worst:?}");
        close(want, loss, 1e-3, family);
        assert!(worst.0 <= 1e-2, "{family}: {worst:?}");
    }
}

#[test]
fn steps_with_a_loss_scale_are_those_of_f32() {
    let Some(_gpu) = gpu() else { return };
    for family in ["qwen3_5_text", "gemma3n_text", "gpt_oss", "deepseek_v3", "lfm2_bias"] {
        let dir = TempDir::new().unwrap();
        let folder = model(family, dir.path());
        let run = |device, dtype| {
            let settings = ["tune.method=full", dtype, "train.max_steps=2"];
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

#[test]
fn answers_continue_from_their_caches() {
    let Some(gpu) = gpu() else { return };
    let text = |seed: u32, n: u32| (0..n).map(|i| 5 + (i * 31 + seed * 7) % 100).collect::<Vec<u32>>();
    let prompts = [text(1, 20), [text(1, 20), text(2, 5)].concat(), text(3, 2)];
    let requests: Vec<Request> = (prompts.into_iter().zip(0..))
        .map(|(prompt, number)| Request { prompt, number })
        .collect();
    let settings = Settings {
        max_new_tokens: 6,
        ..Settings::default()
    };
    for family in FAMILIES {
        let dir = TempDir::new().unwrap();
        let folder = model(family, dir.path());
        let answers = |dtype, device: &Device| -> Vec<Answer> {
            let network = open(&folder, dtype, device);
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
