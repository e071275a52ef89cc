//! Forward and every gradient against a token-by-token reference with autograd.

use super::*;
use crate::oracle::{assert_close, assert_same_on_any_threads, flat, random};
use candle_core::{D, DType, Device, Var};

fn heads(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> DeltaHeads {
    DeltaHeads {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
    }
}

/// qkv, a, b, A_log, dt_bias.
fn vars(heads: &DeltaHeads, tokens: usize) -> [Var; 5] {
    let v = heads.value_heads;
    let var = |t: Tensor| Var::from_tensor(&t).unwrap();
    [
        var(random((tokens, heads.channels()), 1)),
        var(random((tokens, v), 2)),
        var(random((tokens, v), 3)),
        var((random(v, 4) - 1.0).unwrap()),
        var(random(v, 5)),
    ]
}

fn inputs([qkv, a, b, a_log, dt_bias]: &[Var; 5]) -> DeltaInputs<'_> {
    DeltaInputs {
        qkv,
        a,
        b,
        a_log,
        dt_bias,
    }
}

/// The recurrence of the module's comment, token by token.
fn composed(x: &DeltaInputs, heads: &DeltaHeads, documents: &[usize]) -> Tensor {
    let DeltaHeads {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
    } = *heads;
    let n = x.qkv.dim(0).unwrap();
    let group = value_heads / key_heads;
    let keys = |first: usize| {
        let part = x.qkv.narrow(1, first, key_heads * key_dim).unwrap();
        let part = part.reshape((n, key_heads, 1, key_dim)).unwrap();
        let part = part.broadcast_as((n, key_heads, group, key_dim)).unwrap();
        let part = part.contiguous().unwrap().reshape((n, value_heads, key_dim)).unwrap();
        let length = (part.sqr().unwrap().sum_keepdim(D::Minus1).unwrap() + 1e-6).unwrap();
        part.broadcast_div(&length.sqrt().unwrap()).unwrap()
    };
    let (q, k) = (keys(0), keys(key_heads * key_dim));
    let q = (q / (key_dim as f64).sqrt()).unwrap();
    let v = x
        .qkv
        .narrow(1, 2 * key_heads * key_dim, value_heads * value_dim)
        .unwrap();
    let v = v.reshape((n, value_heads, value_dim)).unwrap();
    let sum = x.a.broadcast_add(x.dt_bias).unwrap();
    let softplus = (sum.exp().unwrap() + 1.0).unwrap().log().unwrap();
    let g = softplus.broadcast_mul(&x.a_log.exp().unwrap()).unwrap().neg().unwrap();
    let one = (x.b.neg().unwrap().exp().unwrap() + 1.0).unwrap();
    let beta = one.recip().unwrap();
    let mut rows = Vec::new();
    for d in documents.windows(2) {
        let mut state = Tensor::zeros((value_heads, key_dim, value_dim), x.a.dtype(), x.a.device()).unwrap();
        for t in d[0]..d[1] {
            let at = |x: &Tensor| x.get(t).unwrap();
            let decay = at(&g).exp().unwrap().reshape((value_heads, 1, 1)).unwrap();
            state = state.broadcast_mul(&decay).unwrap();
            let k = at(&k).unsqueeze(2).unwrap();
            let read = state.broadcast_mul(&k).unwrap().sum(1).unwrap();
            let beta = at(&beta).unsqueeze(1).unwrap();
            let delta = (at(&v) - read).unwrap().broadcast_mul(&beta).unwrap();
            state = (state + k.broadcast_mul(&delta.unsqueeze(1).unwrap()).unwrap()).unwrap();
            let o = state
                .broadcast_mul(&at(&q).unsqueeze(2).unwrap())
                .unwrap()
                .sum(1)
                .unwrap();
            rows.push(o.reshape((1, value_heads * value_dim)).unwrap());
        }
    }
    Tensor::cat(&rows, 0).unwrap()
}

#[test]
fn matches_the_recurrence_and_its_autograd() {
    for (heads, documents) in [
        (heads(1, 1, 4, 3), vec![0, 5]),
        (heads(2, 4, 8, 16), vec![0, 1, 1, 40, 105]),
        (heads(2, 2, 16, 8), vec![0, 64, 192, 195]),
        (heads(1, 3, 32, 32), vec![0, 130]),
    ] {
        let tokens = *documents.last().unwrap();
        let vars = vars(&heads, tokens);
        let x = inputs(&vars);
        // The reference computes in f64.
        let exact = vars
            .each_ref()
            .map(|v| Var::from_tensor(&v.to_dtype(DType::F64).unwrap()).unwrap());
        let narrow = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
        let want = composed(&inputs(&exact), &heads, &documents);
        assert_close(&forward(&x, &heads, &documents).unwrap(), &narrow(&want), 1e-5);
        let d_o = random((tokens, heads.value_heads * heads.value_dim), 6);
        let product = (&want * d_o.to_dtype(DType::F64).unwrap()).unwrap();
        let grads = product.sum_all().unwrap().backward().unwrap();
        let got = backward(&x, &heads, &documents, &d_o).unwrap();
        let all = [&got.qkv, &got.a, &got.b, &got.a_log, &got.dt_bias];
        for (got, var) in all.into_iter().zip(&exact) {
            assert_close(got, &narrow(grads.get(var).unwrap()), 1e-5);
        }
        assert_same_on_any_threads(|| {
            let got = backward(&x, &heads, &documents, &d_o).unwrap();
            let o = forward(&x, &heads, &documents).unwrap();
            vec![o, got.qkv, got.a, got.b, got.a_log, got.dt_bias]
        });
    }
}

#[test]
fn goes_on_from_a_state() {
    let heads = heads(2, 4, 16, 8);
    let vars = vars(&heads, 150);
    let whole = forward(&inputs(&vars), &heads, &[0, 100, 150]).unwrap();
    let mut states = Tensor::zeros((2, heads.state()), DType::F32, &Device::Cpu).unwrap();
    // The two documents in steps: 70 and 1 tokens, then the rest.
    let mut outputs = [Vec::new(), Vec::new()];
    for (a, b) in [(0..70, 100..101), (70..71, 101..120), (71..100, 120..150)] {
        let parts: Vec<Tensor> = vars
            .iter()
            .take(3)
            .map(|t| {
                let rows = |r: &std::ops::Range<usize>| t.narrow(0, r.start, r.len()).unwrap();
                Tensor::cat(&[rows(&a), rows(&b)], 0).unwrap()
            })
            .collect();
        let x = DeltaInputs {
            qkv: &parts[0],
            a: &parts[1],
            b: &parts[2],
            a_log: &vars[3],
            dt_bias: &vars[4],
        };
        let (o, after) = forward_from(&x, &heads, &[0, a.len(), a.len() + b.len()], &states).unwrap();
        states = after;
        outputs[0].push(o.narrow(0, 0, a.len()).unwrap());
        outputs[1].push(o.narrow(0, a.len(), b.len()).unwrap());
    }
    let got = Tensor::cat(&outputs.concat(), 0).unwrap();
    assert_close(&got, &whole, 1e-5);
}

#[test]
fn strong_decay_stays_finite() {
    let heads = heads(1, 1, 8, 8);
    let tokens = 200;
    let vars = vars(&heads, tokens);
    let fast = Tensor::full(5f32, 1, &Device::Cpu).unwrap();
    let a = (vars[1].as_tensor() * 30.0).unwrap();
    let x = DeltaInputs {
        a: &a,
        a_log: &fast,
        ..inputs(&vars)
    };
    let o = forward(&x, &heads, &[0, tokens]).unwrap();
    let got = backward(&x, &heads, &[0, tokens], &o).unwrap();
    for t in [&o, &got.qkv, &got.a, &got.b, &got.a_log, &got.dt_bias] {
        assert!(flat(t).iter().all(|x| x.is_finite()));
    }
}

#[test]
fn wrong_shapes_are_errors() {
    let good = heads(2, 4, 4, 4);
    let vars = vars(&good, 6);
    let x = inputs(&vars);
    assert!(forward(&x, &good, &[0, 5]).is_err());
    assert!(forward(&x, &heads(3, 4, 4, 4), &[0, 6]).is_err());
    assert!(forward(&x, &heads(2, 4, 8, 4), &[0, 6]).is_err());
    assert!(
        forward(
            &DeltaInputs {
                a: &random((6, 3), 1),
                ..x
            },
            &good,
            &[0, 6]
        )
        .is_err()
    );
    assert!(backward(&x, &good, &[0, 6], &random((6, 8), 1)).is_err());
    let states = random((1, 3), 1);
    assert!(forward_from(&x, &good, &[0, 6], &states).is_err());
}

#[test]
fn a_gpu_computes_as_many_key_heads_at_once_as_have_room() {
    let large = heads(16, 32, 128, 128);
    // 2 value heads of 129 chunks, their triangles and factors, their states and deltas, and the gradients of both: 42 MiB.
    let prepared = 4 * 2 * 129 * (2 * 32 * 32 + 4 * 32 + 4);
    let each = 8 * 2 * 128 * (129 * 128 + 4096) + prepared;
    assert_eq!(large.key_heads_at_once(4096, 1), DEVICE_STATES / each);
    let states = large.device_bytes(4096, 1) - 4 * 4096 * 32;
    assert_eq!(states, (large.key_heads_at_once(4096, 1) * each) as u64);
    assert_eq!(large.device_bytes_forward(4096, 1), 16 * prepared as u64);
    assert_eq!(large.key_heads_at_once(100, 1), 16);
    assert_eq!(large.key_heads_at_once(2048, 1), 16);
    assert_eq!(large.key_heads_prepared_at_once(1 << 20, 1), 1);
    assert_eq!(large.key_heads_at_once(1 << 20, 1), 1);
}
