//! Fused linear and cross-entropy: loss, hits, gradients, log-probabilities.

use crate::support::{KINDS, Pair, assert_close, assert_same_bits, gpu, short};
use candle_core::{DType, Device, Tensor};
use ft::data::IGNORE;
use ft::ops::cross_entropy::{self, CrossEntropyOptions, CrossEntropyOutput, OutputPieces, PIECE};
use ft::ops::step_stats::{StepStats, StepSums};

const SHAPES: [(usize, usize, usize); 4] = [(1, 8, 5), (11, 16, 37), (70, 40, 300), (130, 128, 5003)];

fn targets(n: usize, v: usize) -> Vec<u32> {
    (0..n)
        .map(|i| if i % 3 == 1 { IGNORE } else { (i * 7 % v) as u32 })
        .collect()
}

fn run(h: &Tensor, head: &Tensor, targets: &[u32], options: &CrossEntropyOptions) -> (CrossEntropyOutput, StepSums) {
    let step_stats = StepStats::new(h.device()).unwrap();
    assert_eq!(step_stats.known().is_some(), h.device().is_cpu());
    let out = cross_entropy::forward_backward(h, head, targets, options, &step_stats).unwrap();
    (out, step_stats.read().unwrap())
}

fn compare(h: &Pair, head: &Pair, targets: &[u32], options: &CrossEntropyOptions, tolerance: f32) {
    let (got, sums) = run(&h.gpu, &head.gpu, targets, options);
    let (want, want_sums) = run(&h.cpu, &head.weight(), targets, options);
    let loss_tolerance = if h.gpu.dtype() == DType::F32 { 1e-4 } else { 1e-3 };
    let difference = (sums.loss - want_sums.loss).abs();
    assert!(
        difference <= loss_tolerance * want_sums.loss.abs(),
        "{} {}",
        sums.loss,
        want_sums.loss
    );
    assert_eq!((sums.correct, got.trained), (want_sums.correct, want.trained));
    let dh = got.dh.unwrap();
    assert_eq!(dh.dtype(), h.gpu.dtype());
    assert_close(&dh, &want.dh.unwrap(), tolerance);
    let dw = got.dw.unwrap();
    assert_eq!(dw.dtype(), DType::F32);
    assert_close(&dw, &want.dw.unwrap(), tolerance);

    let (again, _) = run(&h.gpu, &head.gpu, targets, options);
    assert_same_bits(&again.dh.unwrap(), &dh);
    assert_same_bits(&again.dw.unwrap(), &dw);

    let (cap, chunk) = (options.softcap, options.chunk);
    let step_stats = StepStats::new(h.gpu.device()).unwrap();
    let losses = CrossEntropyOptions {
        smoothing: options.smoothing,
        ..CrossEntropyOptions::losses(cap, chunk)
    };
    let trained = cross_entropy::forward_backward(&h.gpu, &head.gpu, targets, &losses, &step_stats).unwrap();
    assert_eq!((step_stats.read().unwrap(), trained.trained), (sums, want.trained));
    let got = cross_entropy::token_log_probs(&h.gpu, &head.gpu, targets, cap, chunk).unwrap();
    let want = cross_entropy::token_log_probs(&h.cpu, &head.weight(), targets, cap, chunk).unwrap();
    for (got, want) in got.iter().zip(&want) {
        assert!(
            (got - want).abs() <= loss_tolerance as f32 * want.abs().max(1.0),
            "{got} {want}"
        );
    }
}

#[test]
fn loss_and_gradients_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (n, d, v) in SHAPES {
            for softcap in [None, Some(2.5)] {
                for chunk in [1, 4, 64, 1000] {
                    let far = n * v > 100 * 1000 * chunk || softcap.is_some() && chunk != 4;
                    if short() && far {
                        continue;
                    }
                    let (h, head) = (gpu.random((n, d), dtype, 1), gpu.random((v, d), dtype, 2));
                    // Small logits: in the flat part of a softcap the argmax would depend on the last bit.
                    let head = gpu.pair(&(head.cpu * 0.2).unwrap(), dtype);
                    let options = CrossEntropyOptions {
                        softcap,
                        chunk,
                        scale: 0.25,
                        need_dh: true,
                        need_dw: true,
                        weights: None,
                        smoothing: 0.0,
                    };
                    compare(&h, &head, &targets(n, v), &options, tolerance);
                    // All tokens are trained, so rows are not gathered.
                    let all: Vec<u32> = (0..n).map(|i| (i * 11 % v) as u32).collect();
                    compare(&h, &head, &all, &options, tolerance);
                    let smoothed = CrossEntropyOptions {
                        smoothing: 0.2,
                        ..options.clone()
                    };
                    compare(&h, &head, &all, &smoothed, tolerance);
                    // A separate factor for each token's gradient, of any sign, some of them 0.
                    let factors: Vec<f32> = (0..n).map(|i| (i % 5) as f32 * 0.7 - 1.4).collect();
                    let options = CrossEntropyOptions {
                        weights: Some(&factors),
                        ..options
                    };
                    compare(&h, &head, &targets(n, v), &options, tolerance);
                    compare(&h, &head, &all, &options, tolerance);
                }
            }
        }
    }
}

#[test]
fn nothing_trained_wrong_targets_and_what_is_not_finite() {
    let Some(gpu) = gpu() else { return };
    for (dtype, _) in KINDS {
        let (h, head) = (gpu.random((3, 8), dtype, 1), gpu.random((5, 8), dtype, 2));
        let options = CrossEntropyOptions {
            softcap: None,
            chunk: 2,
            scale: 1.0,
            need_dh: true,
            need_dw: true,
            weights: None,
            smoothing: 0.0,
        };
        let (out, sums) = run(&h.gpu, &head.gpu, &[IGNORE; 3], &options);
        assert_eq!((out.trained, sums), (0, StepSums::default()));
        let zeros = |dims: (usize, usize)| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        assert_close(&out.dh.unwrap(), &zeros((3, 8)), 0.0);
        assert_close(&out.dw.unwrap(), &zeros((5, 8)), 0.0);
        let step_stats = StepStats::new(&gpu.device).unwrap();
        assert!(cross_entropy::forward_only(&h.gpu, &head.gpu, &[0, 5, 1], None, 2, &step_stats).is_err());

        for bad in [f32::NAN, f32::INFINITY] {
            let row = Tensor::full(bad, (1, 8), &Device::Cpu).unwrap();
            let rows = Tensor::cat(&[&h.cpu.narrow(0, 0, 2).unwrap(), &row], 0).unwrap();
            let rows = gpu.pair(&rows, dtype);
            let loss = |targets: &[u32]| {
                let step_stats = StepStats::new(&gpu.device).unwrap();
                cross_entropy::forward_only(&rows.gpu, &head.gpu, targets, None, 2, &step_stats).unwrap();
                step_stats.read().unwrap().loss
            };
            assert!(!loss(&[1, 2, 3]).is_finite());
            assert!(loss(&[1, 2, IGNORE]).is_finite());
        }
    }
}

/// A head in chunks gives the results of the whole head on the CPU; also for the entropies of both.
#[test]
fn a_head_in_parts_and_entropies_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (n, d, v) in [(1, 8, 5), (70, 40, PIECE + 3), (33, 24, 2 * PIECE + 777)] {
            let (h, head) = (gpu.random((n, d), dtype, 1), gpu.random((v, d), dtype, 2));
            let head = gpu.pair(&(head.cpu * 0.2).unwrap(), dtype);
            let factors: Vec<f32> = (0..n).map(|i| (i % 5) as f32 * 0.7 - 1.4).collect();
            let all: Vec<u32> = (0..n).map(|i| (i * 113 % v) as u32).collect();
            for (softcap, rows_of_part, weights) in [
                (None, PIECE, None),
                (Some(2.5), 2 * PIECE, Some(&factors[..])),
                (None, 3 * PIECE, None),
            ] {
                for targets in [&targets(n, v), &all] {
                    let options = CrossEntropyOptions {
                        softcap,
                        chunk: 16,
                        scale: 0.25,
                        need_dh: true,
                        need_dw: false,
                        weights,
                        smoothing: if weights.is_some() { 0.1 } else { 0.0 },
                    };
                    let (want, want_sums) = run(&h.cpu, &head.weight(), targets, &options);
                    let parts = OutputPieces {
                        rows: v,
                        width: d,
                        rows_of_part,
                        // Each chunk has its own memory, as in streaming.
                        part: &|first| Ok(head.gpu.narrow(0, first, rows_of_part.min(v - first))?.copy()?),
                    };
                    let step_stats = StepStats::new(&gpu.device).unwrap();
                    let got = cross_entropy::streamed(&h.gpu, &parts, targets, &options, &step_stats).unwrap();
                    let sums = step_stats.read().unwrap();
                    let close = if dtype == DType::F32 { 1e-4 } else { 1e-3 };
                    assert!((sums.loss - want_sums.loss).abs() <= close * want_sums.loss.abs());
                    assert_eq!((sums.correct, got.trained), (want_sums.correct, want.trained));
                    let dh = got.dh.unwrap();
                    assert_eq!(dh.dtype(), dtype);
                    assert_close(&dh, &want.dh.unwrap(), tolerance);
                    let again = cross_entropy::streamed(&h.gpu, &parts, targets, &options, &step_stats).unwrap();
                    assert_same_bits(&again.dh.unwrap(), &dh);

                    let alike = |got: Vec<f32>, want: &[f32]| {
                        assert_eq!(got.len(), want.len());
                        for (got, want) in got.iter().zip(want) {
                            assert!((got - want).abs() <= close as f32 * want.abs().max(1.0), "{got} {want}");
                        }
                    };
                    let want = cross_entropy::token_log_probs(&h.cpu, &head.weight(), targets, softcap, 16).unwrap();
                    alike(
                        cross_entropy::streamed_log_probs(&h.gpu, &parts, targets, softcap, 16).unwrap(),
                        &want,
                    );
                    let want = cross_entropy::token_entropies(&h.cpu, &head.weight(), targets, softcap, 16).unwrap();
                    alike(
                        cross_entropy::token_entropies(&h.gpu, &head.gpu, targets, softcap, 16).unwrap(),
                        &want,
                    );
                    alike(
                        cross_entropy::streamed_entropies(&h.gpu, &parts, targets, softcap, 16).unwrap(),
                        &want,
                    );
                }
            }
        }
    }
}
