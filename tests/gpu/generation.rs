//! Decoding with quantized weights and with KV caches of every type: answers and log-probabilities are those of the CPU.

use crate::support::{Gpu, KINDS, assert_same_bits, flat, gpu, short};
use candle_core::{DType, Device, Tensor};
use ft::generate::{Answer, Formats, KvDtype, Limits, QuantizedCopy, Request, SampledModel, Settings, answer};
use ft::hf;
use ft::model::Network;
use ft::ops::kv_block::KvBlock;
use ft::ops::paged::PAGE;
use ft::quant::Format;
use ft::recipe::Dtype;
use std::path::Path;

fn network(dtype: Dtype, device: &Device) -> Network {
    let root = std::env::var("FT_ROOT").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").to_string());
    let opened = hf::open(&Path::new(&root).join("assets/tiny"), dtype, device).unwrap();
    opened.model.network
}

/// Prompts with a common beginning, and one that is longer than a page.
fn requests() -> Vec<Request> {
    let text = |seed: u32, n: u32| (0..n).map(|i| 5 + (i * 31 + seed * 7) % 200).collect::<Vec<u32>>();
    let start = text(1, 40);
    let with = |more: Vec<u32>| [start.clone(), more].concat();
    let prompts = [with(text(2, 5)), with(text(3, 60)), text(4, 3)];
    let numbered = prompts.into_iter().zip(0..);
    numbered.map(|(prompt, number)| Request { prompt, number }).collect()
}

fn answers<'a>(model: impl Into<SampledModel<'a>>, kv_cache: Option<KvDtype>) -> Vec<Answer> {
    let settings = Settings {
        max_new_tokens: if short() { 6 } else { 20 },
        limits: Limits {
            kv_cache,
            ..Limits::default()
        },
        ..Settings::default()
    };
    answer(model, &requests(), &settings, &mut |_, _| Ok(())).unwrap().0
}

/// The largest difference of two log-probabilities, up to the first token that differs.
fn difference(got: &[Answer], want: &[Answer], exact: bool, what: &str) -> f32 {
    let mut most = 0f32;
    for (got, want) in got.iter().zip(want) {
        if exact {
            assert_eq!(got.ids, want.ids, "{what}");
        }
        let same = got.ids.iter().zip(&want.ids).take_while(|(a, b)| a == b).count();
        assert!(same > 0 || !exact, "{what}");
        let pairs = got.log_probs.iter().zip(&want.log_probs).take(same);
        most = pairs.fold(most, |most, (a, b)| most.max((a - b).abs()));
    }
    most
}

#[test]
fn caches_of_every_type_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let (here, there) = (network(Dtype::F32, &Device::Cpu), network(Dtype::F32, &gpu.device));
    let plain = answers(&here, None);
    for kv_cache in [None, Some(KvDtype::F32), Some(KvDtype::Bf16), Some(KvDtype::Int8)] {
        let (want, got) = (answers(&here, kv_cache), answers(&there, kv_cache));
        let off = difference(&got, &want, true, &format!("{kv_cache:?}"));
        let lost = difference(&want, &plain, false, "");
        println!(
            "f32 model, {kv_cache:?}: differs from the CPU by {off:.1e}; the CPU from an exact cache by {lost:.1e}"
        );
        // A number next to the middle between two stored ones can be rounded to either.
        let most = if kv_cache.is_none_or(|kv| kv == KvDtype::F32) {
            1e-4
        } else {
            5e-3
        };
        assert!(off <= most, "{kv_cache:?}: {off}");
    }
    // bf16: the activations themselves are rounded on a GPU.
    let (here, there) = (network(Dtype::Bf16, &Device::Cpu), network(Dtype::Bf16, &gpu.device));
    for kv_cache in [None, Some(KvDtype::F32), Some(KvDtype::Bf16), Some(KvDtype::Int8)] {
        let off = difference(&answers(&there, kv_cache), &answers(&here, kv_cache), false, "");
        println!("bf16 model, {kv_cache:?}: differs from the CPU by {off:.1e}");
        assert!(off <= 0.25, "{kv_cache:?}: {off}");
    }
}

#[test]
fn quantized_copies_answer_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let formats = [
        Format::Int8 { group: 0 },
        Format::Int4 { group: 64 },
        Format::Nf4 { double: true },
    ];
    for (dtype, most) in [(Dtype::F32, 1e-4), (Dtype::Bf16, 0.25)] {
        let (here, there) = (network(dtype, &Device::Cpu), network(dtype, &gpu.device));
        for format in formats.into_iter().take(if short() { 2 } else { 3 }) {
            let copy = |network| QuantizedCopy::new(network, Formats::of(format)).unwrap();
            let (here, mut copied) = (copy(&here), copy(&there));
            assert_eq!(here.bytes(), copied.bytes());
            let want = answers(&here, None);
            let got = answers(&copied, None);
            let off = difference(&got, &want, dtype == Dtype::F32, &format.to_string());
            println!("{dtype:?}, {format}: differs from the CPU by {off:.1e}");
            assert!(off <= most, "{dtype:?} {format}: {off}");
            // Weights that have not changed give the same copy.
            copied.refresh(&there, &|name| name.contains("layers.1.")).unwrap();
            assert_eq!(answers(&copied, None), got);
        }
    }
}

fn values(gpu: &Gpu, block: &KvBlock, (tokens, width): (usize, usize), dtype: DType) -> Tensor {
    let to = Tensor::zeros((tokens, width), dtype, &gpu.device).unwrap();
    block.get(&to).unwrap();
    to
}

/// As a page of the CPU stores them: code = nearest(x · 127 / absmax) of each head of a token.
#[test]
fn blocks_of_int8_hold_the_numbers_of_the_definition() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (heads, head_dim, tokens) in [(1, 16, 1), (3, 40, 9), (2, 128, PAGE + 3)] {
            let width = heads * head_dim;
            let x = gpu.random((tokens, width), dtype, 3);
            let block = KvBlock::new(&x.gpu, tokens + 2, head_dim).unwrap();
            // In two parts.
            let half = tokens / 2;
            block.put(0, &x.gpu.narrow(0, 0, half).unwrap()).unwrap();
            block.put(half, &x.gpu.narrow(0, half, tokens - half).unwrap()).unwrap();
            let got = values(&gpu, &block, (tokens, width), dtype);
            let want: Vec<f32> = flat(&x.cpu)
                .chunks(head_dim)
                .flat_map(|head| {
                    let absmax = head.iter().fold(0f32, |m, x| m.max(x.abs()));
                    let scale = absmax / 127.0;
                    head.iter()
                        .map(move |x| (x * (127.0 / absmax)).round_ties_even() * scale)
                })
                .collect();
            let want = Tensor::from_vec(want, (tokens, width), &Device::Cpu).unwrap();
            match dtype {
                DType::F32 => assert_eq!(flat(&got), flat(&want)),
                _ => crate::support::assert_close(&got, &want, tolerance),
            }
            assert_same_bits(&got, &values(&gpu, &block, (tokens, width), dtype));
            assert!(block.put(3, &x.gpu).is_err());
        }
        let row = Tensor::new(&[[0f32, 0.0, 1.0, f32::NAN]], &Device::Cpu).unwrap();
        let row = gpu.pair(&row, dtype).gpu;
        let block = KvBlock::new(&row, 1, 2).unwrap();
        block.put(0, &row).unwrap();
        let got = flat(&values(&gpu, &block, (1, 4), dtype));
        assert_eq!(got[..2], [0.0, 0.0]);
        assert!(got[2].is_nan() && got[3].is_nan());
    }
}
