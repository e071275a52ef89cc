//! Gated DeltaNet (Qwen3.5, Qwen3-Next): its operations, whole runs, and generation with the state in the cache.

use crate::families::compare;
use crate::support::{Gpu, KINDS, assert_close, assert_same_bits, gpu, short};
use candle_core::{DType, Device, Tensor};
use ft::formats::Config;
use ft::generate::{GenerateLimits, GenerateSettings, Request, answer};
use ft::model::{Network, families};
use ft::ops::delta_rule::{self, DeltaGradients, DeltaHeads, DeltaInputs};
use ft::ops::{Dtype, short_conv};
use ft::source::ResidentWeights;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

#[test]
fn short_convolutions_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (documents, channels, kernel, silu) in [
            (vec![0, 9], 7, 4, true),
            (vec![0, 1, 1, 3, 200, 261], 40, 4, true),
            (vec![0, 5], 3, 1, true),
            (vec![0, 2, 70], 300, 8, true),
            (vec![0, 1, 1, 3, 200, 261], 40, 3, false),
        ] {
            let n = *documents.last().unwrap();
            for stored in [dtype, DType::F32] {
                let (x, dy) = (gpu.random((n, channels), dtype, 1), gpu.random((n, channels), dtype, 3));
                let w = gpu.random((channels, 1, kernel), stored, 2);
                let y = short_conv::forward(&x.gpu, &w.gpu, &documents, silu).unwrap();
                assert_eq!(y.dtype(), dtype);
                let want = short_conv::forward(&x.cpu, &w.weight(), &documents, silu).unwrap();
                assert_close(&y, &want, tolerance);
                let run = |need| short_conv::backward(&x.gpu, &w.gpu, &dy.gpu, &documents, silu, need).unwrap();
                let (dx, dw) = run(true);
                let (want_dx, want_dw) =
                    short_conv::backward(&x.cpu, &w.weight(), &dy.cpu, &documents, silu, true).unwrap();
                assert_close(&dx, &want_dx, tolerance);
                assert_close(dw.as_ref().unwrap(), &want_dw.unwrap(), 1e-4);
                assert_same_bits(&run(true).1.unwrap(), &dw.unwrap());
                assert!(run(false).1.is_none());
            }
        }
    }
    let (x, w) = (gpu.random((4, 3), DType::F32, 1), gpu.random((3, 1, 9), DType::F32, 2));
    let error = short_conv::forward(&x.gpu, &w.gpu, &[0, 4], true)
        .unwrap_err()
        .to_string();
    assert!(error.contains("taps"), "{error}");
}

fn heads(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> DeltaHeads {
    DeltaHeads {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
    }
}

/// qkv, a, b, A_log, dt_bias on both devices.
fn tensors(gpu: &Gpu, h: &DeltaHeads, tokens: usize, dtype: DType) -> [[Tensor; 5]; 2] {
    let width = 2 * h.key_heads * h.key_dim + h.value_heads * h.value_dim;
    let v = h.value_heads;
    let pairs = [
        gpu.random((tokens, width), dtype, 1),
        gpu.random((tokens, v), dtype, 2),
        gpu.random((tokens, v), dtype, 3),
        gpu.random(v, DType::F32, 4),
        gpu.random(v, dtype, 5),
    ];
    [
        pairs.each_ref().map(|p| p.cpu.clone()),
        pairs.each_ref().map(|p| p.gpu.clone()),
    ]
}

fn inputs([qkv, a, b, a_log, dt_bias]: &[Tensor; 5]) -> DeltaInputs<'_> {
    DeltaInputs {
        qkv,
        a,
        b,
        a_log,
        dt_bias,
    }
}

fn gradients(g: DeltaGradients) -> [Tensor; 5] {
    [g.qkv, g.a, g.b, g.a_log, g.dt_bias]
}

#[test]
fn delta_rules_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (h, documents) in [
            (heads(1, 1, 4, 3), vec![0, 5]),
            (heads(2, 4, 8, 40), vec![0, 1, 1, 40, 105]),
            (heads(1, 3, 33, 16), vec![0, 64, 130]),
            (heads(1, 2, 128, 128), vec![0, if short() { 70 } else { 700 }]),
        ] {
            let tokens = *documents.last().unwrap();
            let [cpu, device] = tensors(&gpu, &h, tokens, dtype);
            let (here, there) = (inputs(&cpu), inputs(&device));
            let o = delta_rule::forward(&there, &h, &documents).unwrap();
            assert_eq!(o.dtype(), dtype);
            assert_close(&o, &delta_rule::forward(&here, &h, &documents).unwrap(), tolerance);
            let before = gpu.random((documents.len() - 1, h.state()), DType::F32, 6);
            let (o, after) = delta_rule::forward_from(&there, &h, &documents, &before.gpu).unwrap();
            let (want_o, want) = delta_rule::forward_from(&here, &h, &documents, &before.cpu).unwrap();
            assert_close(&o, &want_o, tolerance);
            assert_close(&after, &want, 1e-4);
            let d_o = gpu.random((tokens, h.value_heads * h.value_dim), dtype, 7);
            let run = || gradients(delta_rule::backward(&there, &h, &documents, &d_o.gpu).unwrap());
            let want = gradients(delta_rule::backward(&here, &h, &documents, &d_o.cpu).unwrap());
            let got = run();
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(got.dtype(), if i < 3 { dtype } else { DType::F32 });
                assert_close(got, want, if i < 3 { tolerance } else { 1e-4 });
            }
            for (again, got) in run().iter().zip(&got) {
                assert_same_bits(again, got);
            }
        }
    }
    let h = heads(1, 1, 129, 4);
    let [_, device] = tensors(&gpu, &h, 3, DType::F32);
    let error = delta_rule::forward(&inputs(&device), &h, &[0, 3]).unwrap_err();
    assert!(error.to_string().contains("keys"), "{error}");
}

/// More tables of documents than are cached: one is freed while kernels that read it are still queued.
#[test]
fn tables_of_documents_live_until_they_are_read() {
    let Some(gpu) = gpu() else { return };
    let h = heads(1, 1, 4, 3);
    let documents: Vec<Vec<usize>> = (1..30).map(|first| vec![0, first, 30]).collect();
    let [cpu, device] = tensors(&gpu, &h, 30, DType::F32);
    let run = |tensors: &[Tensor; 5], d: &Vec<usize>| delta_rule::forward(&inputs(tensors), &h, d).unwrap();
    let got: Vec<Tensor> = documents.iter().map(|d| run(&device, d)).collect();
    for (got, documents) in got.iter().zip(&documents) {
        assert_close(got, &run(&cpu, documents), 1e-4);
    }
}

#[test]
fn every_method_loses_what_it_loses_on_the_cpu() {
    let Some(_gpu) = gpu() else { return };
    let methods: [(&str, &[&str]); 6] = [
        ("qwen3_5_text", &["tune.method=full", "model.dtype=f32"]),
        (
            "qwen3_next",
            &["tune.method=full", "model.dtype=f32", "data.packing=true"],
        ),
        ("qwen3_5_text", &["tune.method=full", "model.dtype=bf16"]),
        (
            "qwen3_next",
            &[
                "tune.method=block",
                "tune.block.switch_every=1",
                "model.dtype=f32",
                "memory.tier=host",
            ],
        ),
        (
            "qwen3_5_text",
            &["tune.method=lora", "tune.lora.r=4", "model.dtype=f32"],
        ),
        (
            "qwen3_5_text",
            &[
                "tune.method=lora",
                "tune.lora.r=4",
                "model.dtype=f32",
                "memory.tier=host",
            ],
        ),
    ];
    for (family, settings) in methods {
        compare(family, settings);
    }
}

fn network(model_type: &str, dtype: Dtype, device: &Device) -> Network {
    let config = json!({
        "model_type": model_type, "vocab_size": 256, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
        "num_experts": 0,
    });
    let config = Config::from_map(config.as_object().unwrap().clone(), Path::new("config.json"));
    let spec = families::read(&config).unwrap();
    let source = ResidentWeights::random(spec.params(), 5, 0.1, 0.8, dtype, device).unwrap();
    Network::new(spec, Arc::new(source), device.clone())
}

/// The state of the convolution and of the delta rule goes from step to step, also for prompts that begin alike.
#[test]
fn greedy_answers_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let text = |seed: u32, n: u32| (0..n).map(|i| 5 + (i * 31 + seed * 7) % 200).collect::<Vec<u32>>();
    let prompts = [text(1, 40), [text(1, 40), text(2, 5)].concat(), text(3, 2)];
    let requests: Vec<Request> = prompts
        .into_iter()
        .zip(0..)
        .map(|(prompt, number)| Request { prompt, number })
        .collect();
    for family in ["qwen3_5_text", "qwen3_next"] {
        let settings = GenerateSettings {
            max_new_tokens: 8,
            limits: GenerateLimits::default(),
            ..GenerateSettings::default()
        };
        let [here, there] = [&Device::Cpu, &gpu.device].map(|device| {
            let network = network(family, Dtype::F32, device);
            answer(&network, &requests, &settings, &mut |_, _| Ok(())).unwrap().0
        });
        for (here, there) in here.iter().zip(&there) {
            assert_eq!(here.ids, there.ids, "{family}");
            let both = here.log_probs.iter().zip(&there.log_probs);
            let off = both.fold(0f32, |off, (a, b)| off.max((a - b).abs()));
            assert!(off <= 1e-4, "{family}: {off}");
        }
    }
}
