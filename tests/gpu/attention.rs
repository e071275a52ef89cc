//! Attention, forward and backward: the shapes of the CPU's own tests, and the head sizes of real models.

use crate::support::{Gpu, KINDS, assert_close, assert_same_bits, flat, gpu};
use candle_core::{DType, Tensor};
use ft::ops::attention::{AttentionGradInputs, AttentionSpec, backward, forward, sinks};

fn spec(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionSpec {
    AttentionSpec {
        heads,
        kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        softcap: None,
        window: None,
        bf16: false,
    }
}

fn windowed(spec: AttentionSpec, window: usize) -> AttentionSpec {
    AttentionSpec {
        window: Some(window),
        ..spec
    }
}

fn capped(spec: AttentionSpec, cap: f32) -> AttentionSpec {
    AttentionSpec {
        softcap: Some(cap),
        ..spec
    }
}

/// Attention specs with document lengths.
fn cases() -> Vec<(AttentionSpec, Vec<usize>)> {
    let both = AttentionSpec {
        scale: 0.7,
        ..windowed(capped(spec(10, 5, 6), 2.0), 3)
    };
    vec![
        (spec(2, 2, 16), vec![0, 1]),
        (spec(2, 2, 16), vec![0, 40]),
        (spec(6, 2, 8), vec![0, 3, 3, 70, 71, 200]),
        (spec(6, 2, 8), vec![0, 130]),
        (windowed(spec(4, 1, 12), 5), vec![0, 150, 153]),
        (windowed(spec(4, 1, 12), 5), vec![0, 64, 128]),
        (windowed(spec(2, 1, 8), 70), vec![0, 260]),
        (capped(spec(4, 2, 16), 1.5), vec![0, 65, 90]),
        (both, vec![0, 7, 80]),
        (spec(14, 2, 64), vec![0, 129, 300]),
        (spec(4, 4, 96), vec![0, 200]),
        (spec(8, 2, 128), vec![0, 63, 64, 257]),
        (windowed(spec(4, 1, 256), 33), vec![0, 100, 190]),
        (capped(windowed(spec(2, 1, 256), 128), 50.0), vec![0, 300]),
        (spec(2, 1, 80), vec![0, 90]),
        (windowed(spec(2, 1, 512), 20), vec![0, 9, 50]),
    ]
}

/// dq of a token with only one key is rounding error only.
fn grad_inputs([q, k, v, o, lse, dout]: [&Tensor; 6]) -> AttentionGradInputs<&Tensor> {
    AttentionGradInputs { q, k, v, o, lse, dout }
}

#[track_caller]
fn assert_gradient(got: &Tensor, want: &Tensor, tolerance: f32) {
    if flat(want).iter().all(|x| x.abs() < 1e-5) {
        assert!(flat(got).iter().all(|x| x.abs() < 10.0 * tolerance));
    } else {
        assert_close(got, want, tolerance);
    }
}

#[test]
fn forward_and_backward_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (spec, documents) in cases() {
            let n = documents[documents.len() - 1];
            let (wide, narrow) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
            let (q, dout) = (gpu.random((n, wide), dtype, 1), gpu.random((n, wide), dtype, 4));
            let (k, v) = (gpu.random((n, narrow), dtype, 2), gpu.random((n, narrow), dtype, 3));
            let (o, lse) = forward(&q.gpu, &k.gpu, &v.gpu, &spec, &documents, &documents).unwrap();
            let (want, want_lse) = forward(&q.cpu, &k.cpu, &v.cpu, &spec, &documents, &documents).unwrap();
            assert_eq!((o.dtype(), lse.dtype()), (dtype, DType::F32));
            assert_close(&o, &want, tolerance);
            assert_close(&lse, &want_lse, tolerance);
            let run = || {
                backward(
                    grad_inputs([&q.gpu, &k.gpu, &v.gpu, &o, &lse, &dout.gpu]),
                    &spec,
                    &documents,
                )
                .unwrap()
            };
            let (dq, dk, dv) = run();
            let (want_dq, want_dk, want_dv) = backward(
                grad_inputs([&q.cpu, &k.cpu, &v.cpu, &want, &want_lse, &dout.cpu]),
                &spec,
                &documents,
            )
            .unwrap();
            assert_gradient(&dq, &want_dq, tolerance);
            assert_gradient(&dk, &want_dk, tolerance);
            assert_gradient(&dv, &want_dv, tolerance);
            let (again_q, again_k, again_v) = run();
            assert_same_bits(&dq, &again_q);
            assert_same_bits(&dk, &again_k);
            assert_same_bits(&dv, &again_v);
        }
    }
}

fn decode(gpu: &Gpu, spec: &AttentionSpec, dtype: DType, tolerance: f32, qd: &[usize], kd: &[usize]) {
    let (nq, nk) = (qd[qd.len() - 1], kd[kd.len() - 1]);
    let q = gpu.random((nq, spec.heads * spec.head_dim), dtype, 1);
    let (k, v) = (
        gpu.random((nk, spec.kv_heads * spec.head_dim), dtype, 2),
        gpu.random((nk, spec.kv_heads * spec.head_dim), dtype, 3),
    );
    let (o, lse) = forward(&q.gpu, &k.gpu, &v.gpu, spec, qd, kd).unwrap();
    let (want, want_lse) = forward(&q.cpu, &k.cpu, &v.cpu, spec, qd, kd).unwrap();
    assert_close(&o, &want, tolerance);
    assert_close(&lse, &want_lse, tolerance);
}

#[test]
fn queries_after_cached_keys_are_aligned_at_the_end() {
    let Some(gpu) = gpu() else { return };
    // A decoding step, a continued prompt, a document without queries, a complete document.
    let (qd, kd) = ([0, 1, 71, 71, 81], [0, 90, 190, 200, 210]);
    let specs = [
        spec(6, 2, 8),
        windowed(spec(6, 3, 8), 20),
        windowed(capped(spec(2, 1, 8), 1.0), 1),
        spec(14, 2, 64),
        spec(8, 2, 128),
    ];
    for (dtype, tolerance) in KINDS {
        for spec in &specs {
            decode(&gpu, spec, dtype, tolerance, &qd, &kd);
            // One query per row on long caches: the keys are split over blocks.
            decode(&gpu, spec, dtype, tolerance, &[0, 1, 2], &[0, 1500, 4097]);
        }
    }
}

#[test]
fn sinks_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (n, heads, size) in [(1, 2, 8), (130, 3, 64), (77, 5, 7)] {
            let (o, dout) = (
                gpu.random((n, heads * size), dtype, 1),
                gpu.random((n, heads * size), dtype, 2),
            );
            let lse = gpu.random((n, heads), DType::F32, 3);
            for (s, _) in KINDS {
                let s = gpu.random(heads, s, 4);
                let [here, there] = [&lse.cpu, &lse.gpu].map(|t| t.copy().unwrap());
                let [o_here, o_there] = [&o.cpu, &o.gpu].map(|t| t.copy().unwrap());
                sinks::apply(&o_here, &here, &s.cpu).unwrap();
                sinks::apply(&o_there, &there, &s.gpu).unwrap();
                assert_close(&o_there, &o_here, tolerance);
                assert_close(&there, &here, 1e-5);
                let want = sinks::backward(&o_here, &here, &dout.cpu, &s.cpu).unwrap();
                let run = || sinks::backward(&o_there, &there, &dout.gpu, &s.gpu).unwrap();
                assert_close(&run(), &want, tolerance);
                assert_same_bits(&run(), &run());
            }
        }
    }
}

#[test]
fn documents_do_not_see_each_other() {
    let Some(gpu) = gpu() else { return };
    let spec = spec(4, 2, 64);
    for (dtype, _) in KINDS {
        let run = |seed| {
            let rows = |width, s| {
                let (own, other) = (
                    gpu.random((30, width), dtype, s),
                    gpu.random((20, width), dtype, seed + s),
                );
                Tensor::cat(&[&own.gpu, &other.gpu], 0).unwrap()
            };
            let (q, k, v) = (rows(256, 1), rows(128, 2), rows(128, 3));
            let o = forward(&q, &k, &v, &spec, &[0, 30, 50], &[0, 30, 50]).unwrap().0;
            o.narrow(0, 0, 30).unwrap()
        };
        assert_same_bits(&run(10), &run(20));
    }
}

/// More lists of tiles than are cached: one is freed while kernels that read it are still queued.
#[test]
fn lists_of_tiles_live_until_they_are_read() {
    let Some(gpu) = gpu() else { return };
    let spec = spec(2, 1, 8);
    let documents: Vec<Vec<usize>> = (1..30).map(|first| vec![0, first, 30]).collect();
    let (q, k, v) = (
        gpu.random((30, 16), DType::F32, 1),
        gpu.random((30, 8), DType::F32, 2),
        gpu.random((30, 8), DType::F32, 3),
    );
    let run = |d: &Vec<usize>| forward(&q.gpu, &k.gpu, &v.gpu, &spec, d, d).unwrap().0;
    let got: Vec<Tensor> = documents.iter().map(run).collect();
    for (got, d) in got.iter().zip(&documents) {
        let (want, _) = forward(&q.cpu, &k.cpu, &v.cpu, &spec, d, d).unwrap();
        assert_close(got, &want, 1e-4);
    }
}
