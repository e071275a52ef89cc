//! Cached decoding against recomputing everything, and rows together against rows alone.

use super::cache::Cache;
use super::decode::step;
use super::*;
use crate::base::Error;
use crate::data::{Batch, Example};
use crate::model::Network;
use crate::model::rope::Rope;
use crate::model::spec::{LayerSpec, Spec};
use crate::ops::glu::Activation;
use crate::recipe::Dtype;
use crate::source::Resident;
use candle_core::Device;

const VOCAB: usize = 61;

/// Small, with everything that attention can have: shared key heads, norms of queries and keys, both caps,
/// a layer with a window shorter than the prompts.
fn spec() -> Spec {
    Spec {
        model_type: "test".into(),
        vocab: VOCAB,
        hidden: 24,
        intermediate: 40,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        norm_eps: 1e-6,
        norm_plus_one: false,
        sandwich_norms: false,
        qk_norm: true,
        qkv_bias: true,
        o_bias: false,
        mlp_bias: false,
        fused_projections: false,
        activation: Activation::Silu,
        attention_scale: 0.4,
        attention_softcap: Some(5.0),
        logit_softcap: Some(8.0),
        embedding_scale: 1.0,
        tied: true,
        layers: [None, Some(4), None]
            .map(|window| LayerSpec { window, rope: 0 })
            .to_vec(),
        ropes: vec![Rope {
            inv_freq: vec![1.0, 0.3, 0.1, 0.03],
            attention_factor: 1.0,
        }],
        max_positions: 128,
        initializer_range: 0.3,
    }
}

fn network(spec: Spec, dtype: Dtype) -> Network {
    let source = Resident::random(spec.params(), 11, spec.initializer_range, 1.0, dtype, &Device::Cpu).unwrap();
    Network::new(spec, Box::new(source), Device::Cpu)
}

fn prompts() -> Vec<Vec<u32>> {
    [7usize, 1, 12, 4]
        .iter()
        .enumerate()
        .map(|(row, &n)| (0..n).map(|i| ((i * i * 7 + row * 13 + 5) % VOCAB) as u32).collect())
        .collect()
}

/// Logits `[V]` after the last of `ids`, without a cache.
fn full_logits(network: &Network, ids: &[u32]) -> Vec<f32> {
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

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best }) as u32
}

fn settings(n: usize) -> Settings {
    Settings {
        max_new_tokens: n,
        ..Settings::default()
    }
}

fn run(network: &Network, prompts: &[Vec<u32>], settings: &Settings) -> Vec<Vec<u32>> {
    generate(network, prompts, settings, &mut |_, _| Ok(())).unwrap()
}

#[test]
fn cached_logits_are_those_of_the_whole_sequence() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let network = network(spec(), dtype);
        let mut rows = prompts();
        let mut cache = Cache::new(3, rows.len(), network.spec.kv_width(), &Device::Cpu).unwrap();
        let mut seen = vec![0; rows.len()];
        for _ in 0..20 {
            let parts: Vec<(&[u32], usize)> = rows.iter().zip(&seen).map(|(r, &s)| (&r[s..], s)).collect();
            let logits = step(&network, &mut cache, &parts).unwrap();
            let logits = logits.chunks_exact(network.spec.vocab);
            for ((row, seen), logits) in rows.iter_mut().zip(&mut seen).zip(logits) {
                let want = full_logits(&network, row);
                let error = logits
                    .iter()
                    .zip(&want)
                    .map(|(a, b)| (a - b).abs())
                    .fold(0f32, f32::max);
                // Few rows and many are summed in different orders.
                let largest = want.iter().fold(1f32, |m, x| m.max(x.abs()));
                assert!(error < 1e-5 * largest, "{error} of {largest}");
                *seen = row.len();
                row.push(argmax(&want));
            }
        }
    }
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
    // The stop id is one that row 0 gives in the middle.
    let stop = free[0][6];
    let mut heard = vec![Vec::new(); 4];
    let settings = Settings {
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
fn sampled_rows_do_not_depend_on_their_neighbours_leaving() {
    let network = network(spec(), Dtype::F32);
    let warm = Settings {
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
            &Settings {
                seed: 4,
                ..warm.clone()
            }
        )
    );
    let stop = free[2][3];
    let stopped = run(
        &network,
        &prompts(),
        &Settings {
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
    // Position 12 is never fed: a prompt of 12 tokens has room for the token after it.
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
        let settings = Settings {
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
        // A request answered alone, under its number.
        let alone = rollout(&network, &requests[2..3], &settings).unwrap();
        assert_eq!(alone[0].ids, answers[2].ids);
    }
}
