//! Norms, rotary positions, gated units, embedding rows and their noise.

use crate::support::{KINDS, assert_close, assert_same_bits, flat, gpu};
use candle_core::{DType, Tensor};
use ft::base::rng::{Rng, Stream};
use ft::ops::embedding::{self, NoiseRow};
use ft::ops::layer_norm::{self, LayerNorm};
use ft::ops::{glu, rms_norm, rope};

#[test]
fn rms_norm_matches_the_cpu() {
    let Some(gpu) = gpu() else { return };
    // (tokens, width of x, size of w): rows, heads, sizes not divisible by any vector length, many rows, long rows.
    let shapes = [
        (5, 64, 64),
        (7, 96, 24),
        (3, 37, 37),
        (1000, 12, 4),
        (301, 896, 896),
        (70, 2048, 128),
        (9, 8192, 8192),
        (1, 1, 1),
    ];
    for (dtype, tolerance) in KINDS {
        for (n, d, e) in shapes {
            for (eps, plus_one) in [(1e-6, false), (1e-1, true)] {
                for stored in [dtype, DType::F32] {
                    let (x, dy) = (gpu.random((n, d), dtype, 1), gpu.random((n, d), dtype, 3));
                    let w = gpu.random(e, stored, 2);
                    let y = rms_norm::forward(&x.gpu, &w.gpu, eps, plus_one).unwrap();
                    let want = rms_norm::forward(&x.cpu, &w.weight(), eps, plus_one).unwrap();
                    assert_eq!(y.dtype(), dtype);
                    assert_close(&y, &want, tolerance);
                    let run = |need| rms_norm::backward(&x.gpu, &w.gpu, &dy.gpu, eps, plus_one, need).unwrap();
                    let (dx, dw) = run(true);
                    let (want_dx, want_dw) =
                        rms_norm::backward(&x.cpu, &w.weight(), &dy.cpu, eps, plus_one, true).unwrap();
                    if e > 1 {
                        assert_close(&dx, &want_dx, tolerance);
                    }
                    let dw = dw.unwrap();
                    assert_eq!(dw.dtype(), DType::F32);
                    assert_close(&dw, &want_dw.unwrap(), 1e-4);
                    let (again, none) = run(false);
                    assert!(none.is_none());
                    assert_same_bits(&again, &dx);
                    assert_same_bits(&run(true).1.unwrap(), &dw);
                    let past = gpu.random((n, d), dtype, 4);
                    let y = rms_norm::forward_plus(&x.gpu, &w.gpu, eps, plus_one, Some(&past.gpu)).unwrap();
                    let want = rms_norm::forward_plus(&x.cpu, &w.weight(), eps, plus_one, Some(&past.cpu)).unwrap();
                    assert_close(&y, &want, tolerance);
                    let (dx, _) =
                        rms_norm::backward_plus(&x.gpu, &w.gpu, &dy.gpu, eps, plus_one, false, Some(&past.gpu))
                            .unwrap();
                    let (want_dx, _) =
                        rms_norm::backward_plus(&x.cpu, &w.weight(), &dy.cpu, eps, plus_one, false, Some(&past.cpu))
                            .unwrap();
                    assert_close(&dx, &want_dx, tolerance);
                }
            }
        }
    }
}

#[test]
fn layer_norm_matches_the_cpu() {
    let Some(gpu) = gpu() else { return };
    // (tokens, width of x, heads with parameters, size)
    let shapes = [
        (5, 64, 1, 64),
        (7, 96, 4, 24),
        (3, 37, 1, 37),
        (301, 896, 1, 896),
        (70, 2048, 16, 128),
        (9, 8192, 1, 8192),
    ];
    for (dtype, tolerance) in KINDS {
        for (n, d, heads, size) in shapes {
            for stored in [dtype, DType::F32] {
                let (x, dy) = (gpu.random((n, d), dtype, 1), gpu.random((n, d), dtype, 3));
                let (w, b) = (
                    gpu.random((heads, size), stored, 2),
                    gpu.random((heads, size), stored, 4),
                );
                let (w_cpu, b_cpu) = (w.weight(), b.weight());
                for (kind, plus_one) in [(0, false), (1, true), (2, false)] {
                    let norm = |w, b| LayerNorm {
                        size,
                        weight: Some(w).filter(|_| kind < 2),
                        bias: Some(b).filter(|_| kind < 1),
                        eps: 1e-5,
                        plus_one,
                    };
                    let (on_gpu, on_cpu) = (norm(&w.gpu, &b.gpu), norm(&w_cpu, &b_cpu));
                    let y = layer_norm::forward(&x.gpu, &on_gpu).unwrap();
                    assert_eq!(y.dtype(), dtype);
                    assert_close(&y, &layer_norm::forward(&x.cpu, &on_cpu).unwrap(), tolerance);
                    let got = layer_norm::backward(&x.gpu, &on_gpu, &dy.gpu, [true; 2]).unwrap();
                    let want = layer_norm::backward(&x.cpu, &on_cpu, &dy.cpu, [true; 2]).unwrap();
                    assert_close(&got.dx, &want.dx, tolerance);
                    for (got, want) in [(got.dw, want.dw), (got.db, want.db)] {
                        assert_eq!(got.is_some(), want.is_some());
                        if let (Some(got), Some(want)) = (got, want) {
                            assert_eq!(got.dtype(), DType::F32);
                            // bf16 rounds the normalized x.
                            assert_close(&got, &want, if dtype == DType::BF16 { 4e-3 } else { 1e-4 });
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn rope_matches_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let shapes = [
        (5, 3, 8, 4),
        (9, 2, 10, 3),
        (300, 4, 64, 32),
        (2, 1, 6, 0),
        (17, 32, 128, 64),
        (3, 2, 96, 16),
    ];
    for (dtype, tolerance) in KINDS {
        for (n, heads, e, half) in shapes {
            let x = gpu.random((n, heads * e), dtype, 1);
            let (cos, sin) = (
                gpu.random((n, half), DType::F32, 2),
                gpu.random((n, half), DType::F32, 3),
            );
            for direction in [rope::RopeDirection::Forward, rope::RopeDirection::Backward] {
                for pairing in [rope::RopePairing::Halves, rope::RopePairing::Neighbors] {
                    let y = rope::apply(&x.gpu, (&cos.gpu, &sin.gpu), e, pairing, direction).unwrap();
                    let want = rope::apply(&x.cpu, (&cos.cpu, &sin.cpu), e, pairing, direction).unwrap();
                    assert_eq!(y.dtype(), dtype);
                    assert_close(&y, &want, tolerance);
                }
            }
        }
    }
}

#[test]
fn gated_units_match_the_cpu() {
    use glu::Activation::{Gelu, GeluTanh, Identity, Relu2, Sigmoid, Silu};
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for act in [Silu, GeluTanh, Gelu, Relu2, Sigmoid, Identity] {
            for shape in [(3, 7), (33, 1000), (1, 1), (1024, 4864)] {
                let (gate, up) = (gpu.random(shape, dtype, 1), gpu.random(shape, dtype, 2));
                let dy = gpu.random(shape, dtype, 3);
                let y = glu::forward(&gate.gpu, &up.gpu, act).unwrap();
                assert_close(&y, &glu::forward(&gate.cpu, &up.cpu, act).unwrap(), tolerance);
                let (dgate, dup) = glu::backward(&gate.gpu, &up.gpu, &dy.gpu, act).unwrap();
                let (want_gate, want_up) = glu::backward(&gate.cpu, &up.cpu, &dy.cpu, act).unwrap();
                assert_close(&dgate, &want_gate, tolerance);
                assert_close(&dup, &want_up, tolerance);
                let y = glu::activate(&gate.gpu, act).unwrap();
                assert_close(&y, &glu::activate(&gate.cpu, act).unwrap(), tolerance);
                let dx = glu::activate_backward(gate.gpu.clone(), &dy.gpu, act).unwrap();
                let want = glu::activate_backward(gate.cpu.copy().unwrap(), &dy.cpu, act).unwrap();
                assert_close(&dx, &want, tolerance);
            }
        }
        // A view whose start is not aligned to 16 bytes.
        let (gate, up) = (gpu.random((5, 7), dtype, 1), gpu.random((5, 7), dtype, 2));
        let (gate, up) = (gate.rows(1, 3), up.rows(1, 3));
        let y = glu::forward(&gate.gpu, &up.gpu, Silu).unwrap();
        assert_close(&y, &glu::forward(&gate.cpu, &up.cpu, Silu).unwrap(), tolerance);
    }
    let far = Tensor::new(&[[-200f32, 200.0, -1e30, f32::NAN]], &candle_core::Device::Cpu).unwrap();
    let far = gpu.pair(&far, DType::F32);
    let one = far.gpu.ones_like().unwrap();
    for act in [Silu, GeluTanh, Gelu] {
        let y = flat(&glu::forward(&far.gpu, &one, act).unwrap());
        assert!(
            y[0] == 0.0 && y[1] == 200.0 && y[2] == 0.0 && y[3].is_nan(),
            "{act:?} {y:?}"
        );
        let d = flat(&glu::backward(&far.gpu, &one, &one, act).unwrap().0);
        assert!(
            d[0] == 0.0 && d[1] == 1.0 && d[2] == 0.0 && d[3].is_nan(),
            "{act:?} {d:?}"
        );
    }
}

#[test]
fn embedding_matches_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let v = 70;
    // A few ids, each at many positions, in no order.
    let ids: Vec<u32> = (0..500u32).map(|i| i * i % 7 * (i % 3) * 5 % v).collect();
    for (dtype, _) in KINDS {
        for d in [1, 9, 300, 1096] {
            let table = gpu.random((v as usize, d), dtype, 1);
            let y = embedding::gather(&table.gpu, &ids, 1.5).unwrap();
            assert_eq!(y.dtype(), dtype);
            let want = embedding::gather(&table.cpu, &ids, 1.5).unwrap();
            assert_close(&y, &want, if dtype == DType::F32 { 0.0 } else { 1e-2 });

            let dx = gpu.random((ids.len(), d), dtype, 2);
            let dw = gpu.random((v as usize, d), DType::F32, 3);
            embedding::scatter_add(&dw.gpu, &ids, &dx.gpu, 0.3).unwrap();
            embedding::scatter_add(&dw.cpu, &ids, &dx.cpu, 0.3).unwrap();
            // The same order of sums and the same rounding as on the CPU.
            assert_close(&dw.gpu, &dw.cpu, 0.0);
        }
        let table = gpu.random((5, 8), dtype, 1);
        assert!(embedding::gather(&table.gpu, &[4, 5], 1.0).is_err());
        assert_eq!(embedding::gather(&table.gpu, &[], 1.0).unwrap().dims(), [0, 8]);
    }
}

#[test]
fn noise_has_the_bits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    // Documents of different lengths: a stream and a magnitude for each.
    let rows: Vec<NoiseRow> = (0..70u32)
        .map(|i| NoiseRow {
            rng: Rng::new(7, Stream::Noise, &[3, u64::from(i / 20)]),
            position: i % 20,
            magnitude: 0.25 * (1 + i / 20) as f32,
        })
        .collect();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for d in [1, 33, 300] {
            let x = gpu.random((rows.len(), d), dtype, 1);
            embedding::add_noise(&x.gpu, &rows).unwrap();
            embedding::add_noise(&x.cpu, &rows).unwrap();
            // The sum in f32, rounded once.
            let want = x.cpu.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
            assert_close(&x.gpu, &want, 0.0);
        }
    }
    let x = gpu.random((3, 8), DType::F32, 1);
    assert!(embedding::add_noise(&x.gpu, &rows).is_err());
}
