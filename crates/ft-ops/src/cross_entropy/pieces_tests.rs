//! Tests with a vocabulary of several pieces, against plain code in f64.

use super::*;
use crate::oracle::{assert_close, assert_same_on_any_threads, bf16_pair, flat, random};
use candle_core::{DType, Device};

const D: usize = 12;
const V: usize = 2 * PIECE + 777;

struct Gradients {
    loss: f64,
    dh: Vec<f32>,
    dw: Vec<f32>,
}

/// The loss and the gradients by their definition.
fn plainly(h: &[f32], head: &[f32], targets: &[u32], options: &CrossEntropyOptions) -> Gradients {
    let mut found = Gradients {
        loss: 0.0,
        dh: vec![0.0; h.len()],
        dw: vec![0.0; head.len()],
    };
    let (cap, smoothing) = (options.softcap.map(f64::from), options.smoothing as f64);
    for (n, target) in targets.iter().enumerate() {
        if *target == IGNORE {
            continue;
        }
        let x = &h[n * D..][..D];
        let rows = head.chunks_exact(D);
        let raw = rows.map(|w| w.iter().zip(x).map(|(w, x)| *w as f64 * *x as f64).sum::<f64>());
        let logits: Vec<f64> = raw.map(|z| cap.map_or(z, |cap| cap * (z / cap).tanh())).collect();
        let max = logits.iter().copied().fold(f64::MIN, f64::max);
        let sum = logits.iter().map(|z| (z - max).exp()).sum::<f64>();
        let weight = options.weights.map_or(1.0, |w| w[n] as f64) * options.scale;
        for (v, z) in logits.iter().enumerate() {
            let wanted = smoothing / V as f64 + if v == *target as usize { 1.0 - smoothing } else { 0.0 };
            let p = (z - max).exp() / sum;
            found.loss -= wanted * (z - max - sum.ln());
            let slope = cap.map_or(1.0, |cap| 1.0 - (z / cap).powi(2));
            let g = weight * slope * (p - wanted);
            for i in 0..D {
                found.dh[n * D + i] += (g * head[v * D + i] as f64) as f32;
                found.dw[v * D + i] += (g * x[i] as f64) as f32;
            }
        }
    }
    found
}

/// A head whose rows grow from piece to piece or become smaller, so that the largest logit is in the last or in the first piece.
fn head(grows: bool) -> Vec<f32> {
    let mut head = flat(&random((V, D), 2));
    for (v, row) in head.chunks_exact_mut(D).enumerate() {
        let piece = v / PIECE;
        let factor = [0.3, 0.9, 1.8][if grows { piece } else { 2 - piece }];
        row.iter_mut().for_each(|x| *x *= factor);
    }
    head
}

#[test]
fn gradients_over_several_pieces_are_those_of_the_definition() {
    let targets = [
        5,
        IGNORE,
        PIECE as u32 + 3,
        V as u32 - 1,
        5,
        PIECE as u32,
        V as u32 - 700,
    ];
    let n = targets.len();
    // Numbers that bf16 holds: with a bf16 head the logits are those of the definition.
    let h = bf16_pair((n, D), 1).1;
    let weights = flat(&random(n, 3));
    for (grows, dtype, tolerance) in [
        (true, DType::F32, 1e-5),
        (false, DType::F32, 1e-5),
        (true, DType::BF16, 4e-3),
        (false, DType::BF16, 4e-3),
    ] {
        let tensor = Tensor::from_vec(head(grows), (V, D), &Device::Cpu).unwrap();
        let tensor = tensor.to_dtype(dtype).unwrap();
        let head = flat(&tensor.to_dtype(DType::F32).unwrap());
        for (softcap, smoothing, weights) in [
            (None, 0.0, None),
            (Some(4.0), 0.0, Some(&weights[..])),
            (None, 0.2, Some(&weights[..])),
            (Some(4.0), 0.2, None),
        ] {
            for (chunk, need_dw) in [(100, true), (2, true), (3, false)] {
                let options = CrossEntropyOptions {
                    softcap,
                    chunk,
                    scale: 0.5,
                    need_dh: true,
                    need_dw,
                    weights,
                    smoothing,
                };
                let want = plainly(&flat(&h), &head, &targets, &options);
                let step_stats = StepStats::new(&Device::Cpu).unwrap();
                let found = forward_backward(&h, &tensor, &targets, &options, &step_stats).unwrap();
                let loss = step_stats.read().unwrap().loss;
                assert!((loss - want.loss).abs() < 1e-5 * want.loss, "{loss} {}", want.loss);
                let close = |found: Option<Tensor>, want: &[f32], dims: (usize, usize)| {
                    let want = Tensor::from_slice(want, dims, &Device::Cpu).unwrap();
                    assert_close(&found.unwrap(), &want, tolerance);
                };
                close(found.dh, &want.dh, (n, D));
                if need_dw {
                    close(found.dw, &want.dw, (V, D));
                }
            }
        }
    }
}

#[test]
fn a_logit_that_is_not_finite_spoils_only_its_token() {
    let targets = [5, PIECE as u32 + 3, 2];
    let h = random((3, D), 1);
    let mut bad = flat(&h);
    bad[D + 4] = f32::INFINITY;
    let bad = Tensor::from_vec(bad, (3, D), &Device::Cpu).unwrap();
    let head = Tensor::from_vec(head(true), (V, D), &Device::Cpu).unwrap();
    let options = CrossEntropyOptions {
        need_dh: true,
        ..CrossEntropyOptions::losses(None, 8)
    };
    let run = |h: &Tensor| {
        let step_stats = StepStats::new(&Device::Cpu).unwrap();
        let dh = forward_backward(h, &head, &targets, &options, &step_stats).unwrap().dh;
        (flat(&dh.unwrap()), step_stats.read().unwrap().loss)
    };
    let ((good, _), (spoiled, loss)) = (run(&h), run(&bad));
    assert!(!loss.is_finite());
    assert!(spoiled[D..2 * D].iter().all(|x| x.is_nan()), "{:?}", &spoiled[D..2 * D]);
    for rows in [0..D, 2 * D..3 * D] {
        assert_eq!(good[rows.clone()], spoiled[rows]);
    }
}

#[test]
fn several_pieces_are_bit_equal_on_any_number_of_threads() {
    let (h, head) = (random((9, D), 1), bf16_pair((V, D), 2).0);
    let targets: Vec<u32> = (0..9).map(|i| i * 1000).collect();
    let options = CrossEntropyOptions {
        need_dh: true,
        need_dw: true,
        smoothing: 0.1,
        ..CrossEntropyOptions::losses(Some(5.0), 4)
    };
    assert_same_on_any_threads(|| {
        let step_stats = StepStats::new(&Device::Cpu).unwrap();
        let out = forward_backward(&h, &head, &targets, &options, &step_stats).unwrap();
        let loss = step_stats.read().unwrap().loss as f32;
        vec![
            Tensor::new(loss, &Device::Cpu).unwrap(),
            out.dh.unwrap(),
            out.dw.unwrap(),
        ]
    });
}

/// The first of equal logits is the prediction, also across pieces.
#[test]
fn of_equal_logits_the_first_piece_has_the_prediction() {
    let mut head = vec![0f32; V * D];
    let (first, later) = (7, PIECE + 9);
    for v in [first, later] {
        head[v * D] = 2.0;
    }
    let head = Tensor::from_vec(head, (V, D), &Device::Cpu).unwrap();
    let h = Tensor::ones((2, D), DType::F32, &Device::Cpu).unwrap();
    let step_stats = StepStats::new(&Device::Cpu).unwrap();
    forward_only(&h, &head, &[first as u32, later as u32], None, 8, &step_stats).unwrap();
    assert_eq!(step_stats.read().unwrap().correct, 1.0);
}
