//! Decoding with quantized weights and with KV caches of every type: answers and log-probabilities are those of the CPU.

use crate::support::{Gpu, KINDS, assert_close, assert_same_bits, flat, gpu, short};
use candle_core::{DType, Device, Tensor};
use ft::formats::Config;
use ft::generate::{
    Answer, CopyFormats, GenerateLimits, GenerateSettings, KvDtype, QuantizedCopy, Request, SampledModel, answer,
};
use ft::hf;
use ft::model::{Network, families};
use ft::ops::attention;
use ft::ops::device::memory;
use ft::ops::kv_block::{KvBlock, KvDocument, KvPart, KvStep};
use ft::ops::paged::{self, PAGE, Page, PageForm, PagedDocument};
use ft::ops::sample;
use ft::quant::Format;
use ft::recipe::Dtype;
use ft::source::ResidentWeights;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

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
    let settings = GenerateSettings {
        max_new_tokens: if short() { 6 } else { 20 },
        limits: GenerateLimits {
            kv_cache,
            ..GenerateLimits::default()
        },
        ..GenerateSettings::default()
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

/// The first token with which the sum of the probabilities exceeds the random number, with sums in f64.
#[test]
fn tokens_are_sampled_from_all_logits() {
    let Some(gpu) = gpu() else { return };
    let (rows, vocab, temperature, cap) = (9, 3001, 0.7, 5.0);
    for (dtype, _) in KINDS {
        let logits = gpu.random((rows, vocab), dtype, 1);
        let values = flat(&logits.cpu);
        let uniform: Vec<f64> = (0..rows).map(|r| (0.11 * r as f64 + 0.05) % 1.0).collect();
        let rule = sample::SamplingRule {
            cap: Some(cap),
            temperature,
            uniform: Some(&uniform),
        };
        let greedy = sample::SamplingRule { uniform: None, ..rule };
        let drawn = sample::draw(&logits.gpu, &rule).unwrap();
        let likely = sample::draw(&logits.gpu, &greedy).unwrap();
        for (r, row) in values.chunks(vocab).enumerate() {
            let weights: Vec<f64> = row
                .iter()
                .map(|x| (f64::from(cap * (x / cap).tanh()) / f64::from(temperature)).exp())
                .collect();
            let total: f64 = weights.iter().sum();
            let mut left = uniform[r] * total;
            let id = weights.iter().position(|w| {
                left -= w;
                left < 0.0
            });
            let highest = row.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
            let top = row.iter().position(|x| *x == highest);
            for (got, id) in [(drawn[r], id.unwrap()), (likely[r], top.unwrap())] {
                let got = got.unwrap();
                let off = f64::from(got.log_prob) - (weights[id] / total).ln();
                assert!(
                    got.id as usize == id && off.abs() < 1e-5,
                    "row {r}: {got:?}, want {id}, off {off}"
                );
            }
        }
    }
    let mut bad = vec![0f32; 2 * vocab];
    bad[vocab + 3] = f32::NAN;
    let bad = Tensor::from_vec(bad, (2, vocab), &gpu.device).unwrap();
    let rule = sample::SamplingRule {
        cap: None,
        temperature: 1.0,
        uniform: None,
    };
    let drawn = sample::draw(&bad, &rule).unwrap();
    assert!(drawn[0].is_some_and(|d| d.id == 0) && drawn[1].is_none(), "{drawn:?}");
}

#[test]
fn sampled_answers_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    // With top-p, tokens are sampled on the host.
    for top_p in [None, Some(0.9)] {
        let settings = GenerateSettings {
            max_new_tokens: 8,
            temperature: 0.8,
            top_p,
            seed: 3,
            ..GenerateSettings::default()
        };
        let of = |device: &Device| {
            let network = network(Dtype::F32, device);
            answer(&network, &requests(), &settings, &mut |_, _| Ok(())).unwrap().0
        };
        let off = difference(&of(&gpu.device), &of(&Device::Cpu), true, "sampled");
        assert!(off < 1e-3, "top_p {top_p:?}: {off}");
    }
}

/// Layers of two head sizes, the last two with the keys and values of earlier layers, as in Gemma 4.
fn shared_keys(dtype: Dtype, device: &Device) -> Network {
    let config = json!({
        "model_type": "gemma4_text", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 512, "sliding_window": 20,
        "max_position_embeddings": 256, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 256,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    });
    let config = Config::from_map(config.as_object().unwrap().clone(), Path::new("config.json"));
    let spec = families::read(&config).unwrap();
    let source = ResidentWeights::random(spec.params(), 5, 0.1, 0.8, dtype, device).unwrap();
    Network::new(spec, Arc::new(source), device.clone())
}

#[test]
fn shared_keys_and_layers_of_different_heads_answer_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (dtype, most) in [(Dtype::F32, 1e-4), (Dtype::Bf16, 0.25)] {
        let (here, there) = (shared_keys(dtype, &Device::Cpu), shared_keys(dtype, &gpu.device));
        for kv_cache in [None, Some(KvDtype::Bf16), Some(KvDtype::Int8)] {
            let (want, got) = (answers(&here, kv_cache), answers(&there, kv_cache));
            let off = difference(&got, &want, dtype == Dtype::F32 && kv_cache.is_none(), "shared keys");
            println!("{dtype:?} model, {kv_cache:?}: differs from the CPU by {off:.1e}");
            let most = if kv_cache.is_none() { most } else { 5e-3f32.max(most) };
            assert!(off <= most, "{dtype:?} {kv_cache:?}: {off}");
        }
    }
}

/// The KV cache and everything else of a generation is free after it.
#[test]
fn generations_leave_the_pool_as_it_was() {
    let Some(gpu) = gpu() else { return };
    let network = network(Dtype::Bf16, &gpu.device);
    for kv_cache in [KvDtype::Bf16, KvDtype::Int8] {
        let pool: Vec<(u64, u64)> = (0..if short() { 4 } else { 20 })
            .map(|_| {
                answers(&network, Some(kv_cache));
                gpu.device.synchronize().unwrap();
                let memory = memory(&gpu.device).unwrap().unwrap();
                (memory.used, memory.peak_used)
            })
            .collect();
        assert!(pool[1..].iter().all(|p| *p == pool[1]), "{kv_cache:?}: {pool:?}");
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
            let copy = |network| QuantizedCopy::new(network, CopyFormats::of(format)).unwrap();
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

/// One layer.
fn part(tokens: usize, block: &KvBlock) -> KvPart<'_> {
    KvPart {
        tokens,
        layers: vec![Some(block)],
    }
}

const STORED: [KvDtype; 3] = [KvDtype::F32, KvDtype::Bf16, KvDtype::Int8];

/// A token that sees only itself gets its own value back, as the cache stored it: code = nearest(x · 127 / absmax) of
/// each head of a token.
#[test]
fn blocks_hold_the_numbers_of_the_definition() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (heads, head_dim, tokens) in [(1, 16, 1), (3, 40, 9), (2, 128, PAGE + 3)] {
            let stored = STORED.into_iter().filter(|s| dtype == DType::F32 || *s != KvDtype::F32);
            for stored in stored {
                let (form, spec) = forms(stored, heads, heads, head_dim);
                let width = heads * head_dim;
                let [q, k, v] = [1, 2, 3].map(|seed| gpu.random((tokens, width), dtype, seed));
                let blocks: Vec<KvBlock> = (0..tokens)
                    .map(|_| KvBlock::new(form, 2, &gpu.device).unwrap())
                    .collect();
                let texts: Vec<KvDocument> = blocks
                    .iter()
                    .enumerate()
                    .map(|(i, block)| KvDocument {
                        queries: i..i + 1,
                        parts: vec![part(1, block)],
                    })
                    .collect();
                let step = KvStep::new(&texts, &gpu.device).unwrap();
                step.put(0, &k.gpu, &v.gpu).unwrap();
                let got = step.attend(0, &q.gpu, &spec).unwrap().0;
                let want = flat(&v.cpu)
                    .chunks(head_dim)
                    .flat_map(|head| as_stored(head, stored))
                    .collect::<Vec<f32>>();
                let want = Tensor::from_vec(want, (tokens, width), &Device::Cpu).unwrap();
                match dtype {
                    DType::F32 => assert_eq!(flat(&got), flat(&want)),
                    _ => assert_close(&got, &want, tolerance),
                }
                assert!(step.put(1, &k.gpu, &v.gpu).is_err());
                assert!(step.put(0, &k.gpu.narrow(0, 0, tokens - 1).unwrap(), &v.gpu).is_err());
                let late = KvDocument {
                    queries: 0..1,
                    parts: vec![part(3, &blocks[0])],
                };
                assert!(KvStep::new(&[late], &gpu.device).is_err());
            }
        }
        let row = gpu
            .pair(
                &Tensor::new(&[[0f32, 0.0, 1.0, f32::NAN]], &Device::Cpu).unwrap(),
                dtype,
            )
            .gpu;
        let (form, spec) = forms(KvDtype::Int8, 2, 2, 2);
        let block = KvBlock::new(form, 1, &gpu.device).unwrap();
        let text = KvDocument {
            queries: 0..1,
            parts: vec![part(1, &block)],
        };
        let step = KvStep::new(&[text], &gpu.device).unwrap();
        step.put(0, &row.zeros_like().unwrap(), &row).unwrap();
        let got = flat(&step.attend(0, &row.ones_like().unwrap(), &spec).unwrap().0);
        assert_eq!(got[..2], [0.0, 0.0]);
        assert!(got[2].is_nan() && got[3].is_nan());
    }
}

fn as_stored(head: &[f32], stored: KvDtype) -> Vec<f32> {
    let absmax = head.iter().fold(0f32, |m, x| m.max(x.abs()));
    let number = |x: &f32| match stored {
        KvDtype::F32 => *x,
        KvDtype::Bf16 => half::bf16::from_f32(*x).to_f32(),
        KvDtype::Int8 => (x * (127.0 / absmax)).round_ties_even() * (absmax / 127.0),
    };
    head.iter().map(number).collect()
}

fn forms(stored: KvDtype, heads: usize, kv_heads: usize, head_dim: usize) -> (PageForm, attention::AttentionSpec) {
    let form = PageForm {
        stored,
        kv_heads,
        head_dim,
    };
    let spec = attention::AttentionSpec {
        heads,
        kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        softcap: None,
        window: None,
        bf16: false,
    };
    (form, spec)
}

/// The tokens of a batch in the order of its texts: first those behind a common beginning, then the new ones.
struct Text {
    own: usize,
    new: usize,
}

/// Attention on blocks with a common beginning against attention of the CPU on pages with the same numbers.
#[test]
fn attention_on_blocks_is_that_on_pages() {
    let Some(gpu) = gpu() else { return };
    let capped = |spec| attention::AttentionSpec {
        softcap: Some(2.0),
        ..spec
    };
    let windowed = |window, spec| attention::AttentionSpec {
        window: Some(window),
        ..spec
    };
    let text = |own, new| Text { own, new };
    // Rows that decode behind a long common beginning, a continued prompt, and a text without new tokens.
    let texts = [
        text(30, 1),
        text(0, 1),
        text(5, 1),
        text(70, 20),
        text(9, 0),
        text(1, 3),
    ];
    for (dtype, tolerance) in KINDS {
        for stored in STORED.into_iter().filter(|s| dtype == DType::F32 || *s != KvDtype::F32) {
            for (heads, kv_heads, head_dim) in [(4, 2, 64), (7, 1, 40), (8, 1, 128), (2, 2, 12), (2, 1, 512)] {
                let (form, _) = forms(stored, heads, kv_heads, head_dim);
                let spec = || forms(stored, heads, kv_heads, head_dim).1;
                let cases = [
                    (spec(), 300),
                    (spec(), 0),
                    (capped(windowed(100, spec())), 300),
                    (windowed(400, spec()), 130),
                ];
                for (spec, shared) in cases {
                    one(&gpu, dtype, tolerance, form, &spec, shared, &texts);
                }
            }
        }
    }
}

fn one(
    gpu: &Gpu,
    dtype: DType,
    tolerance: f32,
    form: PageForm,
    spec: &attention::AttentionSpec,
    shared: usize,
    texts: &[Text],
) {
    let width = spec.kv_heads * spec.head_dim;
    let random = |tokens: usize, seed| gpu.random((tokens.max(1), width), dtype, seed).rows(0, tokens);
    let pages = |pages: &mut Vec<Page>, k: &Tensor, v: &Tensor| {
        for (k, v) in flat(k).chunks(width).zip(flat(v).chunks(width)) {
            if pages.last().is_none_or(Page::is_full) {
                pages.push(Page::new(form));
            }
            pages.last_mut().unwrap().push(k, v, spec);
        }
    };
    // A step that only stores: as many new tokens as there are.
    let store = |room: usize, parts: &[(&Tensor, &Tensor)]| {
        let block = KvBlock::new(form, room, &gpu.device).unwrap();
        let mut tokens = 0;
        for (k, v) in parts {
            let n = k.dims()[0];
            tokens += n;
            let text = KvDocument {
                queries: 0..n,
                parts: vec![part(tokens, &block)],
            };
            KvStep::new(&[text], &gpu.device).unwrap().put(0, k, v).unwrap();
        }
        block
    };
    let (k, v) = (random(shared, 1), random(shared, 2));
    let half = shared / 2;
    let parts = [
        k.rows(0, half),
        v.rows(0, half),
        k.rows(half, shared - half),
        v.rows(half, shared - half),
    ];
    let common = store(
        shared + 1,
        &[(&parts[0].gpu, &parts[1].gpu), (&parts[2].gpu, &parts[3].gpu)],
    );
    let mut common_pages = Vec::new();
    pages(&mut common_pages, &k.cpu, &v.cpu);

    let (mut blocks, mut own_pages, mut at) = (Vec::new(), Vec::new(), 0);
    let all: usize = texts.iter().map(|t| t.new).sum();
    let q = gpu.random((all, spec.heads * spec.head_dim), dtype, 3);
    let (new_k, new_v) = (random(all, 4), random(all, 5));
    for (t, text) in texts.iter().enumerate() {
        let (k, v) = (random(text.own, 10 + t as u64), random(text.own, 20 + t as u64));
        let first = store(text.own + text.new / 2 + 1, &[(&k.gpu, &v.gpu)]);
        let further = KvBlock::new(form, text.new + 1, &gpu.device).unwrap();
        let mut own = Vec::new();
        pages(&mut own, &k.cpu, &v.cpu);
        pages(&mut own, &new_k.rows(at, text.new).cpu, &new_v.rows(at, text.new).cpu);
        own_pages.push(own);
        blocks.push((first, further));
        at += text.new;
    }
    let (mut documents, mut on_cpu, mut at) = (Vec::new(), Vec::new(), 0);
    for ((text, (first, further)), own) in texts.iter().zip(&blocks).zip(&own_pages) {
        let queries = at..at + text.new;
        at = queries.end;
        // The new tokens are in both blocks.
        let tokens = text.own + text.new / 2;
        documents.push(KvDocument {
            queries: queries.clone(),
            parts: vec![
                part(shared, &common),
                part(tokens, first),
                part(text.own + text.new - tokens, further),
            ],
        });
        on_cpu.push(PagedDocument {
            queries,
            pages: common_pages.iter().chain(own).collect(),
        });
    }
    let step = KvStep::new(&documents, &gpu.device).unwrap();
    step.put(0, &new_k.gpu, &new_v.gpu).unwrap();
    let (o, lse) = step.attend(0, &q.gpu, spec).unwrap();
    let (want, want_lse) = paged::attend(&q.cpu, &on_cpu, spec).unwrap();
    assert_close(&o, &want, tolerance);
    assert_close(&lse, &want_lse, tolerance);
    assert_same_bits(&o, &step.attend(0, &q.gpu, spec).unwrap().0);
}
