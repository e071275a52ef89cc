//! A row gives the same result alone, among few rows and among many, and with a cache as without: for weights of
//! every storage type, with adapters, on every path of the CPU (`FT_CPU`).

use super::cache::{CacheLayout, CachedSequence};
use super::decode::{NewTokens, PassKind, on_host, step};
use super::tests::{VOCAB, argmax, full_logits, furthest, many, network, prompts, spec, warm};
use super::*;
use crate::formats::Config;
use crate::model::{Network, Spec, families};
use crate::ops::CpuBackend;
use crate::ops::Dtype;
use crate::ops::oracle::random;
use crate::peft::{Adapter, DropoutMask, Lora};
use crate::quant::{Format, StorageDtype};
use crate::source::{ResidentWeights, policy};
use candle_core::{DType, Device};
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;

/// Returns the network of `tests::network` with quantized projections.
fn quantized(format: Format, dtype: Dtype) -> Network {
    let spec = spec();
    let storage = |p: &crate::source::ParamInfo| {
        if policy::is_projection(p) {
            StorageDtype::Quantized(format, dtype)
        } else {
            StorageDtype::Dense(dtype)
        }
    };
    let source =
        ResidentWeights::random_stored(spec.params(), 11, spec.initializer_range, 1.0, storage, &Device::Cpu).unwrap();
    Network::new(spec, Arc::new(source), Device::Cpu)
}

/// Adds LoRA of rank `rank` to every projection.
fn adapted(mut network: Network, rank: usize) -> Network {
    for (seed, p) in (100..).zip(network.spec.params()) {
        if let (true, [outputs, inputs], Some(module)) =
            (policy::is_projection(&p), &p.shape[..], p.name.strip_suffix(".weight"))
        {
            let scaled = |shape, seed| (random(shape, seed) * 0.1).unwrap();
            let pair = (scaled((rank, *inputs), seed), scaled((*outputs, rank), seed + 1000));
            let lora = Lora::new(module, pair, 0.7, DropoutMask { p: 0.0, site: 0 });
            network.adapters.insert(module.into(), Arc::new(Adapter::Lora(lora)));
        }
    }
    network
}

/// A model of MiniCPM3 with so many heads.
fn latent(heads: usize) -> Spec {
    let sizes = [
        ("vocab_size", VOCAB),
        ("hidden_size", 24),
        ("intermediate_size", 40),
        ("num_hidden_layers", 2),
        ("num_attention_heads", heads),
        ("num_key_value_heads", heads),
        ("q_lora_rank", 12),
        ("kv_lora_rank", 8),
        ("qk_nope_head_dim", 6),
        ("qk_rope_head_dim", 4),
        ("v_head_dim", 5),
        ("max_position_embeddings", 128),
    ];
    let mut map: Map<String, Value> = sizes.into_iter().map(|(key, n)| (key.into(), n.into())).collect();
    map.insert("model_type".into(), "minicpm3".into());
    map.insert("rms_norm_eps".into(), 1e-6.into());
    families::read(&Config::from_map(map, Path::new("config.json"))).unwrap()
}

/// Networks in `dtype`: dense, with fused LoRA, with a LoRA rank too large to fuse, and quantized.
fn networks(dtype: Dtype) -> Vec<(&'static str, Network)> {
    let nf4 = Format::Nf4 { double: false };
    let int8 = Format::Int8 { group: 0 };
    let mut all = vec![
        ("dense", network(spec(), dtype)),
        ("dense with LoRA", adapted(network(spec(), dtype), 4)),
        ("dense with a large LoRA", adapted(network(spec(), dtype), 70)),
        ("int8", quantized(int8, dtype)),
        ("nf4 with LoRA", adapted(quantized(nf4, dtype), 4)),
    ];
    // In bf16 the output of attention is rounded twice with sinks, so it crosses ties more often.
    if dtype == Dtype::F32 {
        let sinks = Spec {
            attention_sinks: true,
            ..spec()
        };
        all.push(("dense with attention sinks", network(sinks, dtype)));
        for heads in [1, 3] {
            all.push(("latent attention", network(latent(heads), dtype)));
        }
    }
    all
}

/// Tolerance for the order of f32 sums, relative to the largest logit.
const ORDER: f32 = 1e-5;
/// On a path that rounds operands, the cached pass and the full pass round the same numbers, up to the order of the
/// sums that produced them. If this crosses a tie (about one number in 10⁴), an operand moves by a step of bf16:
/// 2^-8 of itself, in sums of 24 and more operands, and through three layers by a few such steps at most.
const STEP: f32 = 1.0 / 128.0;

#[test]
fn cached_logits_are_those_of_the_whole_sequence() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for (name, network) in networks(dtype) {
            let exact = errors(&network, KvDtype::F32);
            let (steps, bound) = if CpuBackend::current().packs_bf16() && dtype == Dtype::Bf16 {
                (exact.len() / 10, STEP)
            } else {
                (0, ORDER)
            };
            let off = exact.iter().filter(|e| **e > ORDER).count();
            let worst = exact.iter().fold(0f32, |m, e| m.max(*e));
            assert!(
                off <= steps && worst < bound,
                "{dtype:?} {name}: {off} rows, {worst} at most"
            );
            // If attention rounds to bf16, a bf16 cache loses nothing.
            if steps > 0 {
                assert_eq!(errors(&network, KvDtype::Bf16), exact, "{name}");
            }
        }
    }
}

/// Decodes rows together token by token; returns the error of the logits against a full pass over the row, relative
/// to the largest.
fn errors(network: &Network, stored: KvDtype) -> Vec<f32> {
    let layout = CacheLayout::new(&network.spec, Some(stored), &Device::Cpu, DType::F32);
    let mut rows = prompts();
    let mut held: Vec<CachedSequence> = rows
        .iter()
        .map(|_| CachedSequence::new(&layout, Vec::new(), 0, 64))
        .collect();
    let mut errors = Vec::new();
    for token in 0..20 {
        let pass = if token == 0 { PassKind::Prompt } else { PassKind::Answer };
        let parts = rows.iter().zip(held.drain(..)).map(|(row, sequence)| NewTokens {
            tokens: &row[sequence.len()..],
            sequence,
            logits: true,
        });
        let mut parts: Vec<NewTokens> = parts.collect();
        let logits = step(&network.into(), &mut parts, pass, false, None).unwrap();
        let logits = on_host(logits.as_ref(), network.spec.logit_softcap).unwrap();
        held = parts.into_iter().map(|p| p.sequence).collect();
        for (row, logits) in rows.iter_mut().zip(logits.chunks_exact(VOCAB)) {
            let want = full_logits(network, row);
            let largest = want.iter().fold(1f32, |m, x| m.max(x.abs()));
            errors.push(furthest(logits, &want) / largest);
            row.push(argmax(&want));
        }
    }
    errors
}

/// With `same_bits` no bit of a log-probability depends on the other rows of the batch or on how prompts are cut.
#[test]
fn the_same_bits_in_any_company() {
    // The AMX emulator is slow, and f32 models never use AMX.
    let played = !CpuBackend::current().available();
    let mut cases = vec![(Dtype::Bf16, KvDtype::Bf16, if played { "with LoRA" } else { "" })];
    if !played {
        cases.push((Dtype::F32, KvDtype::F32, ""));
        cases.push((Dtype::F32, KvDtype::Int8, "dense"));
        cases.push((Dtype::Bf16, KvDtype::F32, "dense"));
    }
    for (dtype, stored, which) in cases {
        for (name, network) in networks(dtype).iter().filter(|(name, _)| name.contains(which)) {
            same_bits(network, Some(stored), &format!("{name}, {dtype:?}, cache {stored:?}"));
        }
    }
}

pub(super) fn same_bits<'a>(model: impl Into<SampledModel<'a>> + Copy, stored: Option<KvDtype>, name: &str) {
    let requests = many(5);
    let with = |requests: &[Request], rows, prefill_tokens, share_prefixes| {
        let limits = GenerateLimits {
            rows,
            prefill_tokens,
            share_prefixes,
            kv_cache: stored,
            same_bits: true,
            ..GenerateLimits::default()
        };
        rollout(model, requests, &GenerateSettings { limits, ..warm() }).unwrap()
    };
    let all = with(&requests, 64, 1000, true);
    for (rows, prefill, share) in [(1, 1000, true), (2, 7, false), (11, 100, false), (64, 1, true)] {
        assert!(
            all == with(&requests, rows, prefill, share),
            "{name}: {rows} {prefill} {share}"
        );
    }
    for (request, answer) in requests.iter().zip(&all) {
        assert_eq!(with(std::slice::from_ref(request), 4, 50, true)[0], *answer, "{name}");
    }
}
