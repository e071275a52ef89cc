//! Cached decoding, compared with full recomputation, and rows in a batch compared with single rows.

use super::cache::{CacheLayout, CachedSequence};
use super::decode::{NewTokens, PassKind, on_host, step};
use super::*;
use crate::base::Error;
use crate::base::signal::{self, SignalReaction, Stop};
use crate::data::{Batch, Example};
use crate::model::Network;
use crate::model::rope::Rope;
use crate::model::spec::{LayerSpec, ModuleNames, NormNames, QkNorm, Spec};
use crate::ops::Dtype;
use crate::ops::glu::Activation;
use crate::ops::rope::RopePairing;
use crate::source::ResidentWeights;
use candle_core::{DType, Device};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) const VOCAB: usize = 61;

/// A small model with all attention features: grouped key heads, norms of queries and keys, both softcaps, and a
/// layer with a window shorter than the prompts.
pub(super) fn spec() -> Spec {
    Spec {
        multimodal: false,
        warnings: Vec::new(),
        model_type: "test".into(),
        vocab: VOCAB,
        hidden: 24,
        intermediate: 40,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        norm_eps: 1e-6,
        norm_plus_one: false,
        plain_norms: false,
        layer_norm: None,
        norms: NormNames::BEFORE,
        qk_norm: Some(QkNorm::HEADS),
        output_gate: false,
        attention_sinks: false,
        value_norm: false,
        per_layer: None,
        streams: None,
        laurel: None,
        layer_scalar: false,
        qkv_bias: true,
        o_bias: false,
        mlp_bias: false,
        fused_qkv: false,
        fused_gate_up: None,
        plain_mlp: None,
        modules: ModuleNames::LLAMA,
        parallel: false,
        activation: Activation::Silu,
        clamped_glu: None,
        attention_scale: 0.4,
        attention_softcap: Some(5.0),
        logit_softcap: Some(8.0),
        logit_scale: 1.0,
        embedding_scale: 1.0,
        embedding_scale_rounded: false,
        noise_scale: 1.0,
        residual_scale: 1.0,
        pairing: RopePairing::Halves,
        tied: true,
        padding: None,
        layers: [None, Some(4), None]
            .map(|window| LayerSpec {
                window,
                ..LayerSpec::default()
            })
            .to_vec(),
        ropes: vec![Rope {
            inv_freq: vec![1.0, 0.3, 0.1, 0.03],
            attention_factor: 1.0,
            ..Rope::default()
        }],
        max_positions: 128,
        initializer_range: 0.3,
    }
}

pub(super) fn network(spec: Spec, dtype: Dtype) -> Network {
    let source = ResidentWeights::random(spec.params(), 11, spec.initializer_range, 1.0, dtype, &Device::Cpu).unwrap();
    Network::new(spec, Arc::new(source), Device::Cpu)
}

pub(super) fn prompts() -> Vec<Vec<u32>> {
    [7usize, 1, 12, 4]
        .iter()
        .enumerate()
        .map(|(row, &n)| (0..n).map(|i| ((i * i * 7 + row * 13 + 5) % VOCAB) as u32).collect())
        .collect()
}

/// Returns the logits `[V]` after the last of `ids`, without a cache.
pub(super) fn full_logits(network: &Network, ids: &[u32]) -> Vec<f32> {
    let batch = Batch::from_examples([&Example {
        ids: ids.to_vec(),
        trained: vec![true; ids.len()],
    }]);
    let ctx = network.context(&batch.positions, &batch.documents, None).unwrap();
    let h = network.hidden_states(&batch.ids, &ctx).unwrap();
    let head = network.head().unwrap();
    let logits = head.logits(&h).unwrap();
    let last = logits.to_vec2::<f32>().unwrap().pop().unwrap();
    last.into_iter()
        .map(|x| head.softcap.map_or(x, |cap| cap * (x / cap).tanh()))
        .collect()
}

pub(super) fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best }) as u32
}

pub(super) fn settings(n: usize) -> GenerateSettings {
    GenerateSettings {
        max_new_tokens: n,
        ..GenerateSettings::default()
    }
}

fn run(network: &Network, prompts: &[Vec<u32>], settings: &GenerateSettings) -> Vec<Vec<u32>> {
    generate(network, prompts, settings, &mut |_, _| Ok(())).unwrap()
}

pub(super) fn furthest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max)
}

#[test]
fn greedy_rows_together_are_rows_alone_and_recomputed() {
    let network = network(spec(), Dtype::F32);
    let together = run(&network, &prompts(), &settings(25));
    for (prompt, got) in prompts().into_iter().zip(&together) {
        assert_eq!(run(&network, std::slice::from_ref(&prompt), &settings(25))[0], *got);
        let mut ids = prompt.clone();
        for _ in 0..25 {
            ids.push(argmax(&full_logits(&network, &ids)));
        }
        assert_eq!(ids[prompt.len()..], got[..]);
    }
}

#[test]
fn rows_end_at_their_stop_id_while_others_go_on() {
    let network = network(spec(), Dtype::F32);
    let free = run(&network, &prompts(), &settings(16));
    // The stop id is one that row 0 generates in the middle.
    let stop = free[0][6];
    let mut heard = vec![Vec::new(); 4];
    let settings = GenerateSettings {
        stop_ids: vec![stop],
        ..settings(16)
    };
    let got = generate(&network, &prompts(), &settings, &mut |row, id| {
        heard[row].push(id);
        Ok(())
    })
    .unwrap();
    for (got, free) in got.iter().zip(&free) {
        let end = free.iter().position(|&id| id == stop).unwrap_or(free.len());
        assert_eq!(got[..], free[..end]);
    }
    assert!(got[0].len() < 16 && got.iter().any(|row| row.len() == 16));
    assert_eq!(heard, got);
}

#[test]
fn sampled_rows_do_not_depend_on_the_end_of_other_rows() {
    let network = network(spec(), Dtype::F32);
    let warm = GenerateSettings {
        temperature: 1.3,
        top_k: Some(20),
        top_p: Some(0.9),
        seed: 3,
        ..settings(30)
    };
    let free = run(&network, &prompts(), &warm);
    assert_eq!(free, run(&network, &prompts(), &warm));
    assert_ne!(
        free,
        run(
            &network,
            &prompts(),
            &GenerateSettings {
                seed: 4,
                ..warm.clone()
            }
        )
    );
    let stop = free[2][3];
    let stopped = run(
        &network,
        &prompts(),
        &GenerateSettings {
            stop_ids: vec![stop],
            ..warm
        },
    );
    for (got, free) in stopped.iter().zip(&free) {
        let end = free.iter().position(|&id| id == stop).unwrap_or(free.len());
        assert_eq!(got[..], free[..end]);
    }
}

#[test]
fn the_last_position_ends_a_row_and_bad_prompts_are_refused() {
    let mut short = spec();
    short.max_positions = 12;
    let network = network(short, Dtype::F32);
    let got = run(&network, &prompts(), &settings(100));
    // Position 12 is never an input: a prompt of 12 tokens has space for the token after it.
    assert_eq!(got.iter().map(Vec::len).collect::<Vec<_>>(), [6, 12, 1, 9]);
    assert!(run(&network, &[], &settings(3)).is_empty());
    assert_eq!(run(&network, &prompts(), &settings(0)), vec![Vec::<u32>::new(); 4]);
    for bad in [vec![], vec![1; 13], vec![VOCAB as u32]] {
        let e = generate(&network, &[vec![1], bad], &settings(1), &mut |_, _| Ok(())).unwrap_err();
        assert!(e.to_string().contains("prompt 2"), "{e}");
    }
    let e = generate(&network, &prompts(), &settings(5), &mut |_, _| {
        Err(Error::new("no more"))
    })
    .unwrap_err();
    assert_eq!(e.what(), "no more");
}

#[test]
fn rollouts_carry_the_stop_id_and_the_log_probability_of_every_id() {
    let network = network(spec(), Dtype::F32);
    let free = run(&network, &prompts(), &settings(16));
    let stop = free[0][6];
    for (temperature, top_k) in [(0.0f32, None), (0.7, None), (1.5, Some(5))] {
        let settings = GenerateSettings {
            temperature,
            top_k,
            stop_ids: vec![stop],
            ..settings(16)
        };
        let requests: Vec<Request> = prompts()
            .into_iter()
            .zip([0, 9, 7, 3])
            .map(|(prompt, number)| Request { prompt, number })
            .collect();
        let answers = rollout(&network, &requests, &settings).unwrap();
        for (request, answer) in requests.iter().zip(&answers) {
            assert_eq!(answer.ids.len(), answer.log_probs.len());
            assert_eq!(answer.finished, answer.ids.last() == Some(&stop));
            assert_eq!(
                answer.ids.iter().filter(|id| **id == stop).count(),
                usize::from(answer.finished)
            );
            assert!(answer.finished || answer.ids.len() == 16);
            let mut ids = request.prompt.clone();
            for (id, got) in answer.ids.iter().zip(&answer.log_probs) {
                let t = if temperature > 0.0 { temperature as f64 } else { 1.0 };
                let logits: Vec<f64> = full_logits(&network, &ids).iter().map(|x| *x as f64 / t).collect();
                let mut sorted = logits.clone();
                sorted.sort_by(|a, b| b.total_cmp(a));
                let total: f64 = sorted.iter().take(top_k.unwrap_or(VOCAB)).map(|x| x.exp()).sum();
                let want = logits[*id as usize] - total.ln();
                assert!((*got as f64 - want).abs() < 1e-4, "{got} {want}");
                ids.push(*id);
            }
        }
        // A request answered alone, with its number.
        let alone = rollout(&network, &requests[2..3], &settings).unwrap();
        assert_eq!(alone[0].ids, answers[2].ids);
    }
}

/// Returns groups with the same prompt, with a common prefix, and unrelated ones, of all lengths.
pub(super) fn many(groups: usize) -> Vec<Request> {
    let system: Vec<u32> = (0..21).map(|i| (i * 5 + 3) % VOCAB as u32).collect();
    let mut requests = Vec::new();
    for group in 0..groups {
        let mut prompt = if group % 3 == 2 { Vec::new() } else { system.clone() };
        prompt.extend((0..1 + 9 * group as u32).map(|i| (i * i + 7 * group as u32) % VOCAB as u32));
        for _ in 0..4 {
            let number = 100 - requests.len() as u64;
            let prompt = prompt.clone();
            requests.push(Request { prompt, number });
        }
    }
    requests
}

pub(super) fn warm() -> GenerateSettings {
    GenerateSettings {
        temperature: 1.1,
        seed: 5,
        stop_ids: vec![7, 11],
        ..settings(24)
    }
}

#[test]
fn no_limit_changes_an_answer() {
    let network = network(spec(), Dtype::F32);
    let requests = many(6);
    let with = |limits: GenerateLimits| {
        let settings = GenerateSettings { limits, ..warm() };
        answer(&network, &requests, &settings, &mut |_, _| Ok(())).unwrap()
    };
    let (all, speed) = with(GenerateLimits::default());
    assert!(all.iter().any(|a| a.finished) && all.iter().any(|a| !a.finished));
    let lengths: std::collections::BTreeSet<usize> = all.iter().map(|a| a.ids.len()).collect();
    assert!(lengths.len() > 4, "rows leave at different times");
    let tokens: usize = requests.iter().map(|r| r.prompt.len()).sum();
    assert_eq!(
        speed.prefill_tokens + speed.shared_tokens,
        tokens as u64 + shared_once(&requests)
    );
    assert!(speed.prefill_tokens < tokens as u64 / 2);
    let row = CacheLayout::new(&network.spec, None, &Device::Cpu, DType::F32).bytes(128);
    for (rows, cache_bytes, prefill_tokens, share_prefixes) in [
        (1, u64::MAX, 1000, true),
        (3, u64::MAX, 1000, false),
        (5, 3 * row, 10, true),
        (64, 2 * row, 1, true),
        (7, u64::MAX, 33, false),
    ] {
        let (answers, speed) = with(GenerateLimits {
            rows,
            cache_bytes,
            prefill_tokens,
            share_prefixes,
            ..GenerateLimits::default()
        });
        assert!(speed.cache_bytes <= cache_bytes);
        for (a, b) in answers.iter().zip(&all) {
            assert_eq!((&a.ids, a.finished), (&b.ids, b.finished));
            assert!(furthest(&a.log_probs, &b.log_probs) < 1e-4);
        }
        if !share_prefixes {
            assert_eq!((speed.shared_tokens, speed.prefill_tokens), (0, tokens as u64));
        }
    }
    let e = answer(
        &network,
        &requests,
        &GenerateSettings {
            limits: GenerateLimits {
                cache_bytes: row / 4,
                ..GenerateLimits::default()
            },
            ..warm()
        },
        &mut |_, _| Ok(()),
    );
    assert!(e.unwrap_err().to_string().contains("too small for one request"));
}

#[test]
#[ignore = "runs only as the child of the test below"]
fn generates_after_a_signal() {
    signal::conduct(SignalReaction::Stop(Stop::default()));
    signal::install().unwrap();
    let id = std::process::id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    let start = Instant::now();
    while signal::received().is_none() && start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(signal::received(), Some(15));
    let network = network(spec(), Dtype::F32);
    let with = |limits: GenerateLimits| {
        let settings = GenerateSettings { limits, ..settings(5) };
        let mut tokens = 0;
        let answers = generate(&network, &prompts(), &settings, &mut |_, _| {
            tokens += 1;
            Ok(())
        });
        (answers.map_err(|e| e.to_string()), tokens)
    };
    let (stopped, tokens) = with(GenerateLimits::default());
    let e = stopped.unwrap_err();
    assert!(e.contains("stopped while generating"), "{e}");
    assert!((1..=prompts().len()).contains(&tokens), "{tokens}");
    let (complete, tokens) = with(GenerateLimits {
        may_stop: false,
        ..GenerateLimits::default()
    });
    assert!(complete.unwrap().iter().all(|ids| ids.len() == 5));
    assert_eq!(tokens, 5 * prompts().len());
}

/// A process that has got a signal has it to its end, so a child gets it.
#[test]
fn a_signal_ends_a_generation_unless_its_limits_forbid_it() {
    let out = Command::new(std::env::current_exe().unwrap())
        .args([
            "generate::tests::generates_after_a_signal",
            "--exact",
            "--ignored",
            "--nocapture",
        ])
        .output()
        .unwrap();
    let said = [out.stdout, out.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(out.status.success() && said.contains("1 passed"), "{said}");
}

/// Returns the number of tokens in nodes of the tree, each counted once.
fn shared_once(requests: &[Request]) -> u64 {
    let prompts: Vec<&[u32]> = requests.iter().map(|r| &r.prompt[..]).collect();
    let nodes = super::prefix::PrefixTree::new(&prompts).nodes;
    nodes.iter().map(|n| (n.end - n.start) as u64).sum()
}

#[test]
fn a_session_reads_only_what_is_new() {
    let network = network(spec(), Dtype::F32);
    let settings = settings(9);
    let mut session = Session::default();
    let mut ids = prompts()[2].clone();
    let mut speeds = Vec::new();
    for turn in 0..4 {
        let request = Request {
            prompt: ids.clone(),
            number: 0,
        };
        let alone = rollout(&network, std::slice::from_ref(&request), &settings).unwrap();
        let (answer, speed) = session
            .answer(&network, &request, &settings, &mut |_, _| Ok(()))
            .unwrap();
        assert_eq!(answer.ids, alone[0].ids);
        speeds.push((speed.prefill_tokens, speed.shared_tokens));
        ids.extend(&answer.ids);
        ids.extend([turn, 5, 9]);
        if turn == 2 {
            // Another text with a common prefix.
            ids = prompts()[2][..6].to_vec();
            ids.push(1);
        }
    }
    // The last token of each turn was not an input.
    assert_eq!(speeds[..3], [(12, 0), (4, 20), (4, 32)]);
    assert_eq!(speeds[3].0 + speeds[3].1, 7);
    assert!(speeds[3].1 >= 5);
}

/// Returns the logits after the last token of a prompt, `[V]`.
fn logits<'a>(policy: impl Into<SampledModel<'a>>, prompt: &[u32]) -> Vec<f32> {
    let policy = policy.into();
    let layout = CacheLayout::new(&policy.network.spec, None, &Device::Cpu, DType::F32);
    let part = NewTokens {
        sequence: CachedSequence::new(&layout, Vec::new(), 0, 64),
        tokens: prompt,
        logits: true,
    };
    let logits = step(&policy, &mut [part], PassKind::Prompt, false, None).unwrap();
    on_host(logits.as_ref(), policy.network.spec.logit_softcap).unwrap()
}

#[test]
fn a_quantized_copy_computes_with_dequantized_weights_and_is_refreshed() {
    use crate::ops::update;
    use crate::quant::{self, Format};
    let int8 = Format::Int8 { group: 0 };
    let (exact, prompt) = (network(spec(), Dtype::F32), prompts()[2].clone());
    // The same weights, but with dequantized projections.
    let dequantized = network(spec(), Dtype::F32);
    for p in dequantized.source.params() {
        if let (true, &[rows, columns]) = (crate::source::policy::is_projection(p), &p.shape[..]) {
            let weight = dequantized.source.in_memory(&p.name).unwrap();
            let values = update::to_f32_vec(&weight).unwrap();
            let values = quant::quantize(&values, (rows, columns), int8, Dtype::F32)
                .unwrap()
                .dequantize();
            update::set(&weight, &values).unwrap();
        }
    }
    let plain = CopyFormats {
        projections: int8,
        head: None,
    };
    let copy = QuantizedCopy::new(&exact, plain).unwrap();
    let want = logits(&dequantized, &prompt);
    let largest = want.iter().fold(0f32, |m, x| m.max(x.abs()));
    assert!(furthest(&logits(&copy, &prompt), &want) < 1e-4 * largest);
    let off = furthest(&want, &logits(&exact, &prompt));
    assert!(off > 0.0 && off < 0.1 * largest, "{off} of {largest}");
    // Quantizes the head too.
    let mut copy = QuantizedCopy::new(&exact, CopyFormats::of(int8)).unwrap();
    let with_head = logits(&copy, &prompt);
    let off = furthest(&with_head, &want);
    assert!(off > 0.0 && off < 0.1 * largest, "{off} of {largest}");
    let dense: u64 = exact.source.params().iter().map(|p| 4 * p.elements() as u64).sum();
    assert!(copy.bytes() > 0 && copy.bytes() < dense / 2);
    // The weights change: the quantized copy stays the same until `refresh`.
    for name in [
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.embed_tokens.weight",
    ] {
        let weight = exact.source.in_memory(name).unwrap();
        update::with_slice_mut(&weight, |w| w.iter_mut().for_each(|x| *x *= -1.5)).unwrap();
    }
    let fresh = logits(&QuantizedCopy::new(&exact, CopyFormats::of(int8)).unwrap(), &prompt);
    let mut seen = vec![with_head, logits(&copy, &prompt)];
    for part in ["layers.1.", "layers.0.", "embed_tokens"] {
        copy.refresh(&exact, &|name| name.contains(part)).unwrap();
        seen.push(logits(&copy, &prompt));
    }
    assert!(seen.windows(2).all(|w| w[0] != w[1]));
    assert_eq!(seen[4], fresh);
    // Rollouts return the log-probabilities of the copy.
    let settings = GenerateSettings {
        temperature: 1.0,
        ..settings(6)
    };
    let answers = rollout(&copy, &many(3), &settings).unwrap();
    assert!(
        answers
            .iter()
            .all(|a| a.ids.len() == 6 && a.log_probs.iter().all(|x| *x < 0.0))
    );
}

/// On the disk a head in chunks stays there, and rows of the embedding are read one by one.
#[test]
fn a_coded_copy_of_layers_of_the_disk_reads_the_head_in_chunks() {
    use crate::formats::weights::Weights;
    use crate::ops::cross_entropy::PIECE;
    use crate::quant::Format;
    use crate::source::{DiskWeights, StoragePolicy, disk};
    let dir = tempfile::TempDir::new().unwrap();
    let formats = CopyFormats {
        projections: Format::Int8 { group: 0 },
        head: None,
    };
    let resident = network(spec(), Dtype::F32);
    let whole = QuantizedCopy::new(&resident, formats).unwrap();
    let file = dir.path().join("model.safetensors");
    disk::write_random(&file, &spec().params(), 11, spec().initializer_range, 1.0, Dtype::F32).unwrap();
    let options = disk::DiskOptions {
        dtype: Dtype::F32,
        storage: StoragePolicy::dense(Dtype::F32),
        device: Device::Cpu,
        trained: dir.path().join("trained"),
        codes: dir.path().join("codes.safetensors"),
        head: spec().head_name().to_string(),
        head_rows: Some(PIECE),
    };
    let source = DiskWeights::open(spec().params(), Weights::open_file(&file).unwrap(), options).unwrap();
    let streamed = Network::new(spec(), Arc::new(source), Device::Cpu);
    let mut copy = QuantizedCopy::new(&streamed, CopyFormats::of(Format::Int8 { group: 0 })).unwrap();
    assert_eq!(copy.bytes(), whole.bytes());
    for prompt in prompts() {
        assert_eq!(logits(&copy, &prompt), logits(&whole, &prompt));
    }
    copy.refresh(&streamed, &|name| name.contains("layers.0.")).unwrap();
    assert_eq!(logits(&copy, &prompts()[0]), logits(&whole, &prompts()[0]));
}
