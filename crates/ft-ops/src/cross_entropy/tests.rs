//! Tests of the fused linear and cross-entropy.

use super::*;
use crate::oracle::{as_operand, assert_close, assert_same_on_any_threads, bf16_pair, flat, random};
use candle_core::{D, DType, Device, Var};

const SHAPES: [(usize, usize, usize); 3] = [(1, 8, 5), (11, 16, 37), (70, 40, 300)];

/// Returns the output and its sums: loss, trained, correct.
fn with_gradients(
    h: &Tensor,
    head: &Tensor,
    targets: &[u32],
    options: &CrossEntropyOptions,
) -> (CrossEntropyOutput, (f64, usize, usize)) {
    let step_stats = StepStats::new(&Device::Cpu).unwrap();
    let out = forward_backward(h, head, targets, options, &step_stats).unwrap();
    let (sums, trained) = (step_stats.read().unwrap(), out.trained);
    (out, (sums.loss, trained, sums.correct as usize))
}

fn without(h: &Tensor, head: &Tensor, targets: &[u32], cap: Option<f32>, chunk: usize) -> Result<(f64, usize, usize)> {
    let step_stats = StepStats::new(&Device::Cpu)?;
    let trained = forward_only(h, head, targets, cap, chunk, &step_stats)?;
    let sums = step_stats.read()?;
    Ok((sums.loss, trained, sums.correct as usize))
}

fn targets(n: usize, v: usize) -> Vec<u32> {
    (0..n)
        .map(|i| if i % 3 == 1 { IGNORE } else { (i * 7 % v) as u32 })
        .collect()
}

/// Returns the log-probabilities of the targets of the trained rows.
fn composed(h: &Tensor, head: &Tensor, targets: &[u32], cap: Option<f32>) -> Tensor {
    let rows: Vec<u32> = (0..targets.len() as u32)
        .filter(|i| targets[*i as usize] != IGNORE)
        .collect();
    let ids: Vec<u32> = rows.iter().map(|i| targets[*i as usize]).collect();
    let count = rows.len();
    let rows = Tensor::from_vec(rows, count, &Device::Cpu).unwrap();
    let ids = Tensor::from_vec(ids, (count, 1), &Device::Cpu).unwrap();
    let h = h.index_select(&rows, 0).unwrap();
    let mut logits = h.matmul(&head.t().unwrap()).unwrap();
    if let Some(cap) = cap {
        logits = ((logits / cap as f64).unwrap().tanh().unwrap() * cap as f64).unwrap();
    }
    let sum = logits.exp().unwrap().sum_keepdim(D::Minus1).unwrap();
    let log_probs = logits.broadcast_sub(&sum.log().unwrap()).unwrap();
    log_probs.gather(&ids, 1).unwrap().squeeze(1).unwrap()
}

#[test]
fn weights_of_tokens_match_autograd() {
    for (n, d, v) in SHAPES {
        for cap in [None, Some(2.5)] {
            let h = Var::from_tensor(&random((n, d), 1)).unwrap();
            let head = Var::from_tensor(&random((v, d), 2)).unwrap();
            let targets = targets(n, v);
            let weights: Vec<f32> = flat(&random(n, 3));
            let kept: Vec<f32> = (0..n).filter(|i| targets[*i] != IGNORE).map(|i| weights[i]).collect();
            let kept = Tensor::from_vec(kept.clone(), kept.len(), &Device::Cpu).unwrap();
            let log_probs = composed(&h, &head, &targets, cap);
            let loss = (log_probs * kept).unwrap().sum_all().unwrap().neg().unwrap();
            let grads = (loss * 0.25).unwrap().backward().unwrap();
            let options = CrossEntropyOptions {
                softcap: cap,
                chunk: 3,
                scale: 0.25,
                need_dh: true,
                need_dw: true,
                weights: Some(&weights),
                smoothing: 0.0,
            };
            let (out, _) = with_gradients(&h, &head, &targets, &options);
            assert_close(&out.dh.unwrap(), grads.get(&h).unwrap(), 2e-5);
            assert_close(&out.dw.unwrap(), grads.get(&head).unwrap(), 2e-5);
            let short = CrossEntropyOptions {
                weights: Some(&weights[1..]),
                ..options
            };
            let step_stats = StepStats::new(&Device::Cpu).unwrap();
            assert!(forward_backward(&h, head.as_tensor(), &targets, &short, &step_stats).is_err());
        }
    }
}

#[test]
fn matches_autograd() {
    for (n, d, v) in SHAPES {
        for cap in [None, Some(2.5)] {
            for chunk in [1, 4, 1000] {
                let h = Var::from_tensor(&random((n, d), 1)).unwrap();
                let head = Var::from_tensor(&random((v, d), 2)).unwrap();
                let targets = targets(n, v);
                let log_probs = composed(&h, &head, &targets, cap);
                let loss = log_probs.sum_all().unwrap().neg().unwrap();
                let grads = (&loss * 0.25).unwrap().backward().unwrap();
                let loss = loss.to_scalar::<f32>().unwrap() as f64;
                let options = CrossEntropyOptions {
                    softcap: cap,
                    chunk,
                    scale: 0.25,
                    need_dh: true,
                    need_dw: true,
                    weights: None,
                    smoothing: 0.0,
                };
                let (out, sums) = with_gradients(&h, &head, &targets, &options);
                assert!((sums.0 - loss).abs() <= 1e-5 * loss, "{} {loss}", sums.0);
                assert_eq!(sums.1, targets.iter().filter(|t| **t != IGNORE).count());
                assert_close(&out.dh.unwrap(), grads.get(&h).unwrap(), 1e-5);
                assert_close(&out.dw.unwrap(), grads.get(&head).unwrap(), 1e-5);
                assert_eq!(without(&h, &head, &targets, cap, chunk).unwrap(), sums);
                let got = token_log_probs(&h, head.as_tensor(), &targets, cap, chunk).unwrap();
                let kept: Vec<f32> = (0..n).filter(|i| targets[*i] != IGNORE).map(|i| got[i]).collect();
                let kept = Tensor::from_vec(kept, log_probs.dims(), &Device::Cpu).unwrap();
                assert_close(&kept, &log_probs, 1e-5);
                assert!((0..n).all(|i| targets[i] != IGNORE || got[i] == 0.0));
            }
        }
    }
}

#[test]
fn only_wanted_gradients() {
    let (h, head) = (random((6, 8), 1), random((9, 8), 2));
    let targets = targets(6, 9);
    let run = |need_dh, need_dw| {
        let options = CrossEntropyOptions {
            softcap: None,
            chunk: 3,
            scale: 1.0,
            need_dh,
            need_dw,
            weights: None,
            smoothing: 0.0,
        };
        let out = with_gradients(&h, &head, &targets, &options).0;
        (out.dh.map(|t| flat(&t)), out.dw.map(|t| flat(&t)))
    };
    let (dh, dw) = run(true, true);
    assert!(dh.is_some() && dw.is_some());
    assert_eq!(run(true, false), (dh, None));
    assert_eq!(run(false, true), (None, dw));
    assert_eq!(run(false, false), (None, None));
}

#[test]
fn counts_hits() {
    // Logits are the rows of h; the target is the maximum in rows 0 and 2, and one of two equal ones in row 3.
    let h = Tensor::new(
        &[[3f32, 1., 2.], [0., 1., 2.], [0., 0., 9.], [4., 4., 0.]],
        &Device::Cpu,
    )
    .unwrap();
    let eye = Tensor::eye(3, DType::F32, &Device::Cpu).unwrap();
    let (_, trained, correct) = without(&h, &eye, &[0, 0, 2, 1], None, 3).unwrap();
    assert_eq!((trained, correct), (4, 2));
    assert_eq!(without(&h, &eye, &[0, 0, 2, 0], None, 3).unwrap().2, 3);
}

#[test]
fn bf16_heads_are_used_as_they_are() {
    let (h, (head, wide)) = (random((20, 600), 1), bf16_pair((90, 600), 2));
    let targets = targets(20, 90);
    let options = CrossEntropyOptions {
        softcap: None,
        chunk: 7,
        scale: 1.0,
        need_dh: true,
        need_dw: true,
        weights: None,
        smoothing: 0.0,
    };
    let (out, (loss, ..)) = with_gradients(&h, &head, &targets, &options);
    // The reference uses an f32 head and rounds each operand as a product with a bf16 head does: hidden states, exponentials.
    let x = as_operand(&h);
    let want = composed(&x, &wide, &targets, None)
        .sum_all()
        .unwrap()
        .to_scalar::<f32>();
    let want = -f64::from(want.unwrap());
    assert!((loss - want).abs() < 1e-5 * want, "{loss} {want}");
    let logits = x.matmul(&wide.t().unwrap()).unwrap();
    let exp = logits
        .broadcast_sub(&logits.max_keepdim(D::Minus1).unwrap())
        .unwrap()
        .exp()
        .unwrap();
    let sums = exp.sum_keepdim(D::Minus1).unwrap();
    let trained: Vec<f32> = targets.iter().map(|t| (*t != IGNORE) as u32 as f32).collect();
    let factors = (Tensor::from_vec(trained, (20, 1), &Device::Cpu).unwrap() / &sums).unwrap();
    let is_target = targets
        .iter()
        .flat_map(|target| (0..90).map(move |v| (v == *target) as u32 as f32));
    let is_target = Tensor::from_vec(is_target.collect::<Vec<f32>>(), (20, 90), &Device::Cpu).unwrap();
    let others = (&exp * (1.0 - &is_target).unwrap()).unwrap();
    let own = (is_target * (exp.broadcast_mul(&factors).unwrap() - 1.0).unwrap()).unwrap();
    let dh = as_operand(&others)
        .matmul(&wide)
        .unwrap()
        .broadcast_mul(&factors)
        .unwrap();
    let dh = (dh + own.matmul(&wide).unwrap()).unwrap();
    assert_close(&out.dh.unwrap(), &dh, 1e-5);
    // The exponentials are kept in bf16; the factors apply to the hidden states, and the target is added in f32.
    let kept = others.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
    let factored = as_operand(&h.broadcast_mul(&factors).unwrap());
    let dw = (kept.t().unwrap().matmul(&factored).unwrap() + own.t().unwrap().matmul(&h).unwrap()).unwrap();
    assert_close(&out.dw.unwrap(), &dw, 1e-5);
}

/// Where p(target) is near 1 the terms of the gradient almost cancel: what is left has the relative error of its operands.
#[test]
fn the_gradient_of_a_sure_token_stays_exact() {
    let (n, d, v) = (24, 64, 300);
    let (head, wide) = bf16_pair((v, d), 2);
    let targets: Vec<u32> = (0..n as u32).map(|i| i * 11 % v as u32).collect();
    let wide = wide.to_vec2::<f32>().unwrap();
    // Hidden states along the row of the target: from unsure to p near 1.
    let h: Vec<f32> = (targets.iter().enumerate())
        .flat_map(|(i, t)| wide[*t as usize].iter().map(move |w| w * 0.018 * i as f32))
        .collect();
    let h = as_operand(&Tensor::from_vec(h, (n, d), &Device::Cpu).unwrap());
    let options = CrossEntropyOptions {
        need_dh: true,
        ..CrossEntropyOptions::losses(None, 7)
    };
    let got = with_gradients(&h, &head, &targets, &options).0.dh.unwrap();
    let (h, got) = (h.to_vec2::<f32>().unwrap(), got.to_vec2::<f32>().unwrap());
    let mut surest = 0f64;
    for (i, target) in targets.iter().enumerate() {
        let dot = |w: &[f32]| w.iter().zip(&h[i]).map(|(w, x)| *w as f64 * *x as f64).sum::<f64>();
        let logits: Vec<f64> = wide.iter().map(|w| dot(w)).collect();
        let max = logits.iter().copied().fold(f64::MIN, f64::max);
        let exp: Vec<f64> = logits.iter().map(|x| (x - max).exp()).collect();
        let sum: f64 = exp.iter().sum();
        let p = exp[*target as usize] / sum;
        surest = surest.max(p);
        let others: f64 = sum - exp[*target as usize];
        let mut want = vec![0f64; d];
        for (v, w) in wide.iter().enumerate() {
            let factor = if v == *target as usize {
                -others / sum
            } else {
                exp[v] / sum
            };
            want.iter_mut().zip(w).for_each(|(want, w)| *want += factor * *w as f64);
        }
        let norm = want.iter().map(|x| x * x).sum::<f64>().sqrt();
        let wrong = want
            .iter()
            .zip(&got[i])
            .map(|(x, y)| (x - *y as f64).powi(2))
            .sum::<f64>();
        // bf16 operands, and an f32 sum of about 1.
        let own = wide[*target as usize]
            .iter()
            .map(|w| (*w as f64).powi(2))
            .sum::<f64>()
            .sqrt();
        let bound = 4e-3 * norm + 3e-7 * own;
        assert!(
            wrong.sqrt() < bound,
            "token {i}: p {p}, {} of {norm}, {bound}",
            wrong.sqrt()
        );
    }
    assert!(surest > 0.999 && surest < 1.0, "{surest}");
}

#[test]
fn a_logit_that_is_not_finite_shows_in_the_loss() {
    let head = random((40, 4), 2);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38] {
        for cap in [None, Some(30.0)] {
            let mut data = flat(&random((3, 4), 1));
            data[5] = bad;
            let h = Tensor::from_vec(data, (3, 4), &Device::Cpu).unwrap();
            let (loss, ..) = without(&h, &(&head * 4.0).unwrap(), &[1, 2, 3], cap, 2).unwrap();
            assert!(!loss.is_finite(), "{bad} {cap:?}: {loss}");
            // The ignored row is not evaluated.
            assert!(without(&h, &head, &[1, IGNORE, 3], cap, 2).unwrap().0.is_finite());
        }
    }
}

#[test]
fn nothing_trained_and_targets_outside() {
    let (h, head) = (random((3, 4), 1), random((5, 4), 2));
    let options = CrossEntropyOptions {
        softcap: None,
        chunk: 2,
        scale: 1.0,
        need_dh: true,
        need_dw: true,
        weights: None,
        smoothing: 0.0,
    };
    let (out, sums) = with_gradients(&h, &head, &[IGNORE; 3], &options);
    assert_eq!(sums, (0.0, 0, 0));
    assert!(
        flat(&out.dh.unwrap())
            .iter()
            .chain(&flat(&out.dw.unwrap()))
            .all(|x| *x == 0.0)
    );
    let e = without(&h, &head, &[0, 5, 1], None, 2).unwrap_err();
    assert!(e.to_string().contains("token 1"), "{e}");
    assert!(without(&h, &head, &[0, 1], None, 2).is_err());
}

#[test]
fn bit_equal_on_any_number_of_threads() {
    for (n, d, v) in SHAPES {
        let (h, head) = (random((n, d), 1), bf16_pair((v, d), 2).0);
        let targets = targets(n, v);
        let options = CrossEntropyOptions {
            softcap: Some(9.0),
            chunk: 16,
            scale: 0.1,
            need_dh: true,
            need_dw: true,
            weights: None,
            smoothing: 0.0,
        };
        assert_same_on_any_threads(|| {
            let (out, (loss, ..)) = with_gradients(&h, &head, &targets, &options);
            let loss = Tensor::new(loss as f32, &Device::Cpu).unwrap();
            vec![loss, out.dh.unwrap(), out.dw.unwrap()]
        });
    }
}
