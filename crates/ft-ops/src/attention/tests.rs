//! Attention on every backend, compared with full score matrices and candle's autograd.

use super::*;
use crate::cpu::product::testable;
use crate::oracle::{assert_close, assert_same_on_any_threads, flat, random};
use candle_core::{D, Device, Var};

fn spec(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionSpec {
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttentionSpec {
        heads,
        kv_heads,
        head_dim,
        scale,
        softcap: None,
        window: None,
        bf16: false,
    }
}

fn grad_inputs([q, k, v, o, lse, dout]: [&Tensor; 6]) -> AttentionGradInputs<&Tensor> {
    AttentionGradInputs { q, k, v, o, lse, dout }
}

/// Returns 0 if query i of `queries` attends to key j of `keys`, else a number far below every score.
fn mask(queries: usize, keys: usize, window: Option<usize>) -> Tensor {
    let data: Vec<f32> = (0..queries * keys)
        .map(|at| (at / keys + keys - queries, at % keys))
        .map(|(i, j)| {
            let seen = j <= i && window.is_none_or(|w| j + w > i);
            if seen { 0.0 } else { -1e30 }
        })
        .collect();
    Tensor::from_vec(data, (queries, keys), &Device::Cpu).unwrap()
}

/// Computes full score matrices, head by head: o `[Nq, H·E]` and lse `[Nq, H]`.
fn composed(q: &Tensor, k: &Tensor, v: &Tensor, spec: &AttentionSpec, qd: &[usize], kd: &[usize]) -> (Tensor, Tensor) {
    let e = spec.head_dim;
    let (mut outs, mut sums) = (Vec::new(), Vec::new());
    for d in 0..qd.len() - 1 {
        let (queries, keys) = (qd[d + 1] - qd[d], kd[d + 1] - kd[d]);
        if queries == 0 {
            continue;
        }
        let mask = mask(queries, keys, spec.window);
        let (mut out, mut sum) = (Vec::new(), Vec::new());
        for head in 0..spec.heads {
            let kv = head / (spec.heads / spec.kv_heads);
            let q = q.narrow(0, qd[d], queries).unwrap().narrow(1, head * e, e).unwrap();
            let k = k.narrow(0, kd[d], keys).unwrap().narrow(1, kv * e, e).unwrap();
            let v = v.narrow(0, kd[d], keys).unwrap().narrow(1, kv * e, e).unwrap();
            let (q, v) = (q.contiguous().unwrap(), v.contiguous().unwrap());
            let k = k.t().unwrap().contiguous().unwrap();
            let mut s = (q.matmul(&k).unwrap() * spec.scale as f64).unwrap();
            if let Some(cap) = spec.softcap {
                s = ((s / cap as f64).unwrap().tanh().unwrap() * cap as f64).unwrap();
            }
            let exp = (s + &mask).unwrap().exp().unwrap();
            let total = exp.sum_keepdim(D::Minus1).unwrap();
            out.push(exp.broadcast_div(&total).unwrap().matmul(&v).unwrap());
            sum.push(total.log().unwrap());
        }
        outs.push(Tensor::cat(&out, 1).unwrap());
        sums.push(Tensor::cat(&sum, 1).unwrap());
    }
    (Tensor::cat(&outs, 0).unwrap(), Tensor::cat(&sums, 0).unwrap())
}

fn cases() -> Vec<(AttentionSpec, Vec<usize>)> {
    let plain = spec(2, 2, 16);
    let grouped = spec(6, 2, 8);
    let window = AttentionSpec {
        window: Some(5),
        ..spec(4, 1, 12)
    };
    let wide_window = AttentionSpec {
        window: Some(70),
        ..spec(2, 1, 8)
    };
    let capped = AttentionSpec {
        softcap: Some(1.5),
        ..spec(4, 2, 16)
    };
    let both = AttentionSpec {
        softcap: Some(2.0),
        window: Some(3),
        scale: 0.7,
        ..spec(10, 5, 6)
    };
    vec![
        (plain.clone(), vec![0, 1]),
        (plain, vec![0, 40]),
        (grouped.clone(), vec![0, 3, 3, 70, 71, 200]),
        (grouped, vec![0, 130]),
        (window.clone(), vec![0, 150, 153]),
        (window, vec![0, 64, 128]),
        (wide_window, vec![0, 260]),
        (capped, vec![0, 65, 90]),
        (both, vec![0, 7, 80]),
        // Head sizes of real models; edges of tiles and of blocks, and more blocks than can share packed keys.
        (spec(4, 2, 64), vec![0, 65]),
        (spec(2, 1, 80), vec![0, 100, 133]),
        (
            AttentionSpec {
                window: Some(33),
                ..spec(2, 1, 96)
            },
            vec![0, 190, 191],
        ),
        (
            AttentionSpec {
                softcap: Some(3.0),
                ..spec(4, 2, 128)
            },
            vec![0, 70, 135],
        ),
        (spec(2, 1, 256), vec![0, 90]),
        (
            AttentionSpec {
                window: Some(100),
                ..spec(3, 1, 64)
            },
            vec![0, 20, 620],
        ),
        // Several parts of the keys; more query heads than visit a part together.
        (spec(9, 1, 16), vec![0, 1100]),
        // Enough documents that a task has all nine heads of its key head.
        (
            AttentionSpec {
                softcap: Some(2.0),
                ..spec(18, 2, 8)
            },
            vec![0, 1100, 1110, 1120, 1130],
        ),
        (
            AttentionSpec {
                window: Some(600),
                ..spec(2, 1, 32)
            },
            vec![0, 9, 1300],
        ),
    ]
}

/// Returns the allowed error, relative to the largest value: with AMX operands have eight bits.
fn tolerance(backend: CpuBackend, spec: &AttentionSpec) -> f32 {
    if backend.rounds(spec.rounding()) { 1e-2 } else { 1e-5 }
}

/// Returns every backend, with a model in f32 and one in bf16.
fn backends() -> impl Iterator<Item = (CpuBackend, bool)> {
    testable()
        .into_iter()
        .flat_map(|backend| [(backend, false), (backend, true)])
}

#[test]
fn matches_autograd() {
    for (spec, documents) in cases() {
        let n = documents[documents.len() - 1];
        let var = |width, seed| Var::from_tensor(&random((n, width), seed)).unwrap();
        let (q, k, v) = (
            var(spec.query_width(), 1),
            var(spec.key_width(), 2),
            var(spec.key_width(), 3),
        );
        let dout = random((n, spec.query_width()), 4);
        let (want, want_lse) = composed(&q, &k, &v, &spec, &documents, &documents);
        let grads = (&want * &dout).unwrap().sum_all().unwrap().backward().unwrap();
        for (backend, bf16) in backends() {
            let spec = AttentionSpec { bf16, ..spec.clone() };
            let tolerance = tolerance(backend, &spec);
            let (o, lse) = forward_on(backend, &q, &k, &v, &spec, &documents, &documents).unwrap();
            assert_close(&o, &want, tolerance);
            assert_close(&lse, &want_lse, tolerance);
            let (dq, dk, dv) = backward_on(
                backend,
                grad_inputs([&q, &k, &v, &o, &lse, &dout]),
                &spec,
                &documents,
                &documents,
            )
            .unwrap();
            assert_close(&dv, grads.get(&v).unwrap(), tolerance);
            if n > 1 {
                assert_close(&dq, grads.get(&q).unwrap(), tolerance);
                assert_close(&dk, grads.get(&k).unwrap(), tolerance);
            } else {
                // One key: the probability is 1 for any q and k; only rounding errors remain.
                assert!(flat(&dq).iter().chain(&flat(&dk)).all(|x| x.abs() < tolerance));
            }
        }
    }
}

#[test]
fn queries_after_cached_keys_are_aligned_at_the_end() {
    // A decoding step, a continued prompt, a document without queries, a whole document.
    let (qd, kd) = (vec![0, 1, 71, 71, 81], vec![0, 90, 190, 200, 210]);
    for spec in [
        spec(6, 2, 8),
        AttentionSpec {
            window: Some(20),
            ..spec(6, 3, 8)
        },
        AttentionSpec {
            softcap: Some(1.0),
            window: Some(1),
            ..spec(2, 1, 8)
        },
    ] {
        let var = |rows, width, seed| Var::from_tensor(&random((rows, width), seed)).unwrap();
        let q = var(81, spec.query_width(), 1);
        let (k, v) = (var(210, spec.key_width(), 2), var(210, spec.key_width(), 3));
        let dout = random((81, spec.query_width()), 4);
        let (want, want_lse) = composed(&q, &k, &v, &spec, &qd, &kd);
        let grads = (&want * &dout).unwrap().sum_all().unwrap().backward().unwrap();
        for (backend, bf16) in backends() {
            let spec = AttentionSpec { bf16, ..spec.clone() };
            let (o, lse) = forward_on(backend, &q, &k, &v, &spec, &qd, &kd).unwrap();
            assert_close(&o, &want, tolerance(backend, &spec));
            assert_close(&lse, &want_lse, tolerance(backend, &spec));
            let (dq, dk, dv) =
                backward_on(backend, grad_inputs([&q, &k, &v, &o, &lse, &dout]), &spec, &qd, &kd).unwrap();
            assert_close(&dv, grads.get(&v).unwrap(), tolerance(backend, &spec));
            for (found, var) in [(&dq, &q), (&dk, &k)] {
                if spec.window == Some(1) {
                    // The probability of the one key is 1 for any q and k; only rounding errors remain.
                    assert!(flat(found).iter().all(|x| x.abs() < tolerance(backend, &spec)));
                } else {
                    assert_close(found, grads.get(var).unwrap(), tolerance(backend, &spec));
                }
            }
        }
    }
}

#[test]
fn documents_do_not_see_each_other() {
    let spec = spec(4, 2, 8);
    let run = |seed| {
        let rows = |width, s| {
            let own = random((30, width), s);
            Tensor::cat(&[&own, &random((20, width), seed + s)], 0).unwrap()
        };
        let (q, k, v) = (rows(32, 1), rows(16, 2), rows(16, 3));
        forward(&q, &k, &v, &spec, &[0, 30, 50], &[0, 30, 50]).unwrap().0
    };
    let first = |t: Tensor| flat(&t.narrow(0, 0, 30).unwrap());
    assert_eq!(first(run(10)), first(run(20)));
}

#[test]
fn large_scores_stay_finite_and_nan_passes() {
    let spec = AttentionSpec {
        scale: 500.0,
        ..spec(1, 1, 4)
    };
    let (q, k, v) = (random((9, 4), 1), random((9, 4), 2), random((9, 4), 3));
    let (o, lse) = forward(&q, &k, &v, &spec, &[0, 9], &[0, 9]).unwrap();
    assert!(flat(&o).iter().chain(&flat(&lse)).all(|x| x.is_finite()));
    let mut bad = flat(&q);
    bad[8] = f32::NAN;
    let q = Tensor::from_vec(bad, (9, 4), &Device::Cpu).unwrap();
    let o = flat(&forward(&q, &k, &v, &spec, &[0, 9], &[0, 9]).unwrap().0);
    assert!(o[8..12].iter().all(|x| x.is_nan()) && o[12..].iter().all(|x| x.is_finite()));
}

#[test]
fn bit_equal_on_any_number_of_threads() {
    for (spec, documents) in cases() {
        let n = documents[documents.len() - 1];
        let (q, dout) = (random((n, spec.query_width()), 1), random((n, spec.query_width()), 4));
        let (k, v) = (random((n, spec.key_width()), 2), random((n, spec.key_width()), 3));
        for backend in testable() {
            let spec = AttentionSpec {
                bf16: true,
                ..spec.clone()
            };
            assert_same_on_any_threads(|| {
                let (o, lse) = forward_on(backend, &q, &k, &v, &spec, &documents, &documents).unwrap();
                let (dq, dk, dv) = backward_on(
                    backend,
                    grad_inputs([&q, &k, &v, &o, &lse, &dout]),
                    &spec,
                    &documents,
                    &documents,
                )
                .unwrap();
                vec![o, lse, dq, dk, dv]
            });
        }
    }
}

#[test]
fn a_query_has_the_same_bits_in_any_block() {
    let (n, compared) = (1200, 400);
    for (window, softcap) in [(None, None), (Some(30), Some(2.0)), (Some(700), None)] {
        let spec = AttentionSpec {
            window,
            softcap,
            ..spec(2, 1, 32)
        };
        let (q, k, v) = (random((n, 64), 1), random((n, 32), 2), random((n, 32), 3));
        for (backend, bf16) in backends() {
            let spec = AttentionSpec { bf16, ..spec.clone() };
            let last = |from: usize| {
                let rows = q.narrow(0, from, n - from).unwrap();
                let (o, lse) = forward_on(backend, &rows, &k, &v, &spec, &[0, n - from], &[0, n]).unwrap();
                [o, lse].map(|t| t.narrow(0, n - from - compared, compared).unwrap())
            };
            let whole = last(0);
            for from in [1, 63, 500, n - compared] {
                for (got, want) in last(from).iter().zip(&whole) {
                    if backend == CpuBackend::Portable {
                        // The order of the sums of the `gemm` crate depends on the sizes.
                        assert_close(got, want, 1e-6);
                        continue;
                    }
                    let bits = |t: &Tensor| flat(t).into_iter().map(f32::to_bits).collect::<Vec<_>>();
                    assert!(
                        bits(got) == bits(want),
                        "{backend:?}, bf16 {bf16}, window {window:?}, from {from}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let good = spec(4, 2, 8);
    let (q, k) = (random((5, 32), 1), random((5, 16), 2));
    let run = |spec: &AttentionSpec, qd: &[usize], kd: &[usize]| forward(&q, &k, &k, spec, qd, kd);
    assert!(run(&good, &[0, 5], &[0, 5]).is_ok());
    assert!(run(&good, &[0, 4], &[0, 5]).is_err());
    assert!(run(&good, &[0, 4, 2, 5], &[0, 2, 4, 5]).is_err());
    assert!(run(&good, &[0, 3, 5], &[0, 2, 5]).is_err());
    assert!(run(&good, &[0, 2, 5], &[0, 5]).is_err());
    assert!(
        run(
            &AttentionSpec {
                window: Some(0),
                ..good.clone()
            },
            &[0, 5],
            &[0, 5]
        )
        .is_err()
    );
    assert!(run(&spec(4, 3, 8), &[0, 5], &[0, 5]).is_err());
    assert!(run(&spec(8, 2, 8), &[0, 5], &[0, 5]).is_err());
}
