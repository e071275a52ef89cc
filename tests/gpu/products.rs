//! The linear: products, accumulation into existing values, gradients in f32.

use crate::support::{KINDS, Pair, assert_close, assert_same_bits, flat, gpu};
use candle_core::{DType, Device, Tensor};
use ft::ops::lora_pairs::{self, LoraPair};
use ft::ops::low_rank::LowRank;
use ft::ops::{adapters, linear, update};
use ft::quant::Weight;
use half::bf16;

/// (N, I, O): decoding, sizes not divisible by a tile, a LoRA pair, one large enough for split-k.
const SHAPES: [(usize, usize, usize); 7] = [
    (1, 40, 70),
    (3, 513, 33),
    (7, 1100, 16),
    (70, 16, 530),
    (130, 600, 250),
    (600, 96, 300),
    (1024, 896, 512),
];

#[test]
fn linear_matches_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (n, i, o) in SHAPES {
            let (x, dy) = (gpu.random((n, i), dtype, 1), gpu.random((n, o), dtype, 4));
            let (w, b) = (gpu.random((o, i), dtype, 2), gpu.random(o, dtype, 3));
            let (cpu_w, cpu_b) = (w.weight(), b.weight());

            let y = linear::forward(&x.gpu, &w.gpu, None).unwrap();
            let want = linear::forward(&x.cpu, &cpu_w, None).unwrap();
            assert_eq!(y.dtype(), dtype);
            assert_close(&y, &want, tolerance);
            let y = linear::forward(&x.gpu, &w.gpu, Some(&b.gpu)).unwrap();
            let want = linear::forward(&x.cpu, &cpu_w, Some(&cpu_b)).unwrap();
            assert_close(&y, &want, tolerance);

            let sum = gpu.random((n, o), dtype, 5);
            linear::forward_add(&sum.gpu, &x.gpu, &w.gpu).unwrap();
            linear::forward_add(&sum.cpu, &x.cpu, &cpu_w).unwrap();
            assert_close(&sum.gpu, &sum.cpu, tolerance);

            let dx = linear::backward_input(&dy.gpu, &w.gpu).unwrap();
            assert_close(&dx, &linear::backward_input(&dy.cpu, &cpu_w).unwrap(), tolerance);
            let sum = gpu.random((n, i), dtype, 6);
            linear::backward_input_add(&sum.gpu, &dy.gpu, &w.gpu).unwrap();
            linear::backward_input_add(&sum.cpu, &dy.cpu, &cpu_w).unwrap();
            assert_close(&sum.gpu, &sum.cpu, tolerance);

            // Weight gradients are f32, and the operands have the same values on both devices.
            let dw = linear::grad_weight(&dy.gpu, &x.gpu, dtype).unwrap();
            let want = linear::grad_weight(&dy.cpu, &x.cpu, DType::F32).unwrap();
            assert_eq!(dw.dtype(), DType::F32);
            assert_close(&dw, &want, 1e-4);
            assert_same_bits(&dw, &linear::grad_weight(&dy.gpu, &x.gpu, dtype).unwrap());
            let sum = gpu.random((o, i), DType::F32, 7);
            linear::grad_weight_add(&sum.gpu, &dy.gpu, &x.gpu, dtype).unwrap();
            linear::grad_weight_add(&sum.cpu, &dy.cpu, &x.cpu, DType::F32).unwrap();
            assert_close(&sum.gpu, &sum.cpu, 1e-4);
            let db = linear::grad_bias(&dy.gpu).unwrap();
            assert_eq!(db.dtype(), DType::F32);
            assert_close(&db, &linear::grad_bias(&dy.cpu).unwrap(), 1e-4);
        }
    }
}

/// k and v, or gate and up: the weights lie in allocations of their own, in any order.
#[test]
fn two_weights_in_one_call_are_two_products() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        let x = gpu.random((33, 64), dtype, 1);
        let [a, b] = [2, 3].map(|seed| gpu.random((24, 64), dtype, seed));
        let [c, d] = [4, 5].map(|seed| gpu.random(24, dtype, seed));
        for (first, second) in [(&a, &b), (&b, &a)] {
            let ws = [&first.gpu, &second.gpu];
            assert!(linear::can_join(&x.gpu, ws));
            let want =
                |w: &Pair, bias: Option<&Pair>| linear::forward(&x.cpu, &w.weight(), bias.map(|b| &b.cpu)).unwrap();
            let [y, z] = linear::forward_two(&x.gpu, ws, None).unwrap();
            assert_eq!((y.dtype(), y.dims()), (dtype, &[33, 24][..]));
            assert_close(&y, &want(first, None), tolerance);
            assert_close(&z, &want(second, None), tolerance);
            let [y, z] = linear::forward_two(&x.gpu, ws, Some([&c.gpu, &d.gpu])).unwrap();
            assert_close(&y, &want(first, Some(&c)), tolerance);
            assert_close(&z, &want(second, Some(&d)), tolerance);
            linear::forward_add_two([&y, &z], &x.gpu, ws).unwrap();
            let twice = |w: &Pair, bias: &Pair| {
                let y = want(w, Some(bias));
                linear::forward_add(&y, &x.cpu, &w.weight()).unwrap();
                y
            };
            assert_close(&y, &twice(first, &c), tolerance);
            assert_close(&z, &twice(second, &d), tolerance);
            // Outputs in the other order are two calls.
            let [y, z] = linear::forward_two(&x.gpu, ws, None).unwrap();
            linear::forward_add_two([&z, &y], &x.gpu, ws).unwrap();
            let both = want(first, None);
            linear::forward_add(&both, &x.cpu, &second.weight()).unwrap();
            assert_close(&y, &both, tolerance);
            assert_close(&z, &both, tolerance);
        }
        // Not of one shape, of another type, too many rows, on a CPU.
        let other = gpu.random((16, 64), dtype, 6);
        assert!(!linear::can_join(&x.gpu, [&a.gpu, &other.gpu]));
        let wide = gpu.random((24, 64), if dtype == DType::F32 { DType::BF16 } else { DType::F32 }, 7);
        assert!(!linear::can_join(&x.gpu, [&a.gpu, &wide.gpu]));
        assert!(!linear::can_join(
            &gpu.random((1025, 64), dtype, 8).gpu,
            [&a.gpu, &b.gpu]
        ));
        assert!(!linear::can_join(&x.cpu, [&a.cpu, &b.cpu]));
    }
}

/// An adapter is f32 beside bf16 activations.
#[test]
fn weights_of_another_type_are_cast() {
    let Some(gpu) = gpu() else { return };
    for (activations, weights) in [(DType::BF16, DType::F32), (DType::F32, DType::BF16)] {
        let (x, dy) = (
            gpu.random((33, 64), activations, 1),
            gpu.random((33, 16), activations, 2),
        );
        let (w, b) = (gpu.random((16, 64), weights, 3), gpu.random(16, weights, 4));
        let y = linear::forward(&x.gpu, &w.gpu, Some(&b.gpu)).unwrap();
        assert_eq!(y.dtype(), activations);
        assert_close(&y, &linear::forward(&x.cpu, &w.cpu, Some(&b.cpu)).unwrap(), 1e-2);
        let dx = linear::backward_input(&dy.gpu, &w.gpu).unwrap();
        assert_eq!(dx.dtype(), activations);
        assert_close(&dx, &linear::backward_input(&dy.cpu, &w.cpu).unwrap(), 1e-2);
    }
}

#[test]
fn views_and_empty_batches() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        let (whole, w) = (gpu.random((9, 33), dtype, 1), gpu.random((7, 33), dtype, 2));
        let x = whole.rows(2, 5);
        let y = linear::forward(&x.gpu, &w.gpu, None).unwrap();
        assert_close(&y, &linear::forward(&x.cpu, &w.weight(), None).unwrap(), tolerance);
        let (none, no_dy) = (whole.rows(0, 0), gpu.random((0, 7), dtype, 3));
        assert_eq!(linear::forward(&none.gpu, &w.gpu, None).unwrap().dims(), [0, 7]);
        let dw = linear::grad_weight(&no_dy.gpu, &none.gpu, dtype).unwrap();
        assert_close(&dw, &linear::grad_weight(&no_dy.cpu, &none.cpu, dtype).unwrap(), 0.0);
        let db = linear::grad_bias(&no_dy.gpu).unwrap();
        assert_close(&db, &linear::grad_bias(&no_dy.cpu).unwrap(), 0.0);
        assert!(linear::forward(&w.gpu.t().unwrap(), &whole.gpu, None).is_err());
    }
}

/// The product of a LoRA pair is below half a unit in the last place of most outputs. As much of it arrives as in PEFT,
/// which rounds both products to bf16 and then their sum. (cuBLAS does so too: with results in bf16, it rounds a product
/// before it adds it.)
#[test]
fn a_small_lora_product_arrives_as_in_peft() {
    let Some(gpu) = gpu() else { return };
    let (n, i, o, rank) = (64, 128, 96, 4);
    let (x, w) = (gpu.random((n, i), DType::BF16, 1), gpu.random((o, i), DType::BF16, 2));
    // Outputs of a magnitude of 11 have steps of 1/16; the pair adds 0.01 to each of them.
    let steady = gpu.pair(&Tensor::ones((n, 1), DType::F32, &Device::Cpu).unwrap(), DType::BF16);
    let x = gpu.pair(
        &Tensor::cat(&[&x.cpu.narrow(1, 1, i - 1).unwrap(), &steady.cpu], 1).unwrap(),
        DType::BF16,
    );
    let mut a = vec![0f32; rank * i];
    a[i - 1] = 0.1;
    let mut b = vec![0f32; o * rank];
    b.iter_mut().step_by(rank).for_each(|b| *b = 0.1);
    let a = Tensor::from_vec(a, (rank, i), &Device::Cpu).unwrap();
    let b = Tensor::from_vec(b, (o, rank), &Device::Cpu).unwrap();
    let there = |t: &Tensor| t.to_device(&gpu.device).unwrap();
    let (a_there, b_there) = (there(&a), there(&b));
    let low = LowRank {
        a: &a_there,
        b: &b_there,
        scale: 1.0,
    };
    let y = Weight::from(w.gpu.clone()).forward_with(&x.gpu, None, low).unwrap();
    let base = linear::forward(&x.cpu, &w.cpu, None).unwrap();
    let rounded = |x: f32| bf16::from_f32(x).to_f32();
    let (y, base) = (flat(&y), flat(&base));
    let peft: Vec<f32> = base
        .iter()
        .map(|&base| rounded(rounded(base) + rounded(0.01)))
        .collect();
    let mean = |of: &[f32]| of.iter().zip(&base).map(|(y, base)| f64::from(y - base)).sum::<f64>() / base.len() as f64;
    let (found, expected) = (mean(&y), mean(&peft));
    assert!(expected > 0.002, "{expected} of 0.01 arrives in PEFT");
    assert!((found - expected).abs() < 0.001, "{found} instead of {expected}");
    // The same for the gradient of the input.
    let dy = gpu.random((n, o), DType::BF16, 3);
    let (dx, _) = Weight::from(w.gpu.clone()).backward_with(&dy.gpu, None, low).unwrap();
    let want = linear::backward_input(&dy.cpu, &w.cpu).unwrap();
    assert_close(&dx, &want, 2e-2);
}

/// Three pairs on one input, of different ranks; one has another scale, one subtracts a start.
#[test]
fn stacked_pairs_are_plain_products() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (scales, started) in [([0.5; 3], false), ([0.5, 0.5, 0.7], false), ([0.5; 3], true)] {
            let (n, i) = (70, 96);
            let sizes = [(24, 8), (40, 3), (16, 5)];
            let x = gpu.random((n, i), dtype, 1);
            let random = |dims: (usize, usize), seed| gpu.random(dims, DType::F32, seed);
            let all: Vec<_> = (sizes.iter().zip(2..))
                .map(|(&(o, r), k)| {
                    let (a, b) = (random((r, i), 10 * k), random((o, r), 10 * k + 1));
                    // The pair has moved away from its start a little.
                    let moved = |from: &crate::support::Pair, seed| {
                        let step = random((from.cpu.dim(0).unwrap(), from.cpu.dim(1).unwrap()), seed);
                        gpu.pair(&(&from.cpu + (step.cpu * 1e-3).unwrap()).unwrap(), DType::F32)
                    };
                    let start = (moved(&a, 10 * k + 2), moved(&b, 10 * k + 3));
                    (a, b, started.then_some(start), gpu.random((n, o), dtype, 10 * k + 4))
                })
                .collect();
            let given: Vec<LoraPair> = (all.iter().zip(scales))
                .map(|((a, b, start, _), scale)| LoraPair {
                    matrices: (&a.gpu, &b.gpu),
                    start: start.as_ref().map(|(a, b)| (&a.gpu, &b.gpu)),
                    scale,
                })
                .collect();
            let stack = lora_pairs::stacks(&[given], dtype).unwrap().remove(0);
            let u = stack.down(&x.gpu).unwrap();
            let du = stack.columns(n).unwrap();
            let mut want_dx = Tensor::zeros((n, i), DType::F32, &Device::Cpu).unwrap();
            let mut wanted_a = Vec::new();
            for (k, ((a, b, start, dy), scale)) in all.iter().zip(scales).enumerate() {
                // W' = s (B A - B0 A0), in f32.
                let product = |a: &Tensor, b: &Tensor| b.matmul(a).unwrap();
                let mut w = product(&a.cpu, &b.cpu);
                if let Some((a0, b0)) = start {
                    w = (w - product(&a0.cpu, &b0.cpu)).unwrap();
                }
                let w = (w * f64::from(scale)).unwrap();
                let y = stack.up(k, &u, dtype).unwrap();
                assert_eq!(y.dtype(), dtype);
                assert_close(&y, &linear::forward(&x.cpu, &w, None).unwrap(), tolerance);
                stack.up_backward(k, &dy.gpu, &du).unwrap();
                want_dx = (want_dx + linear::backward_input(&dy.cpu, &w).unwrap()).unwrap();

                let u_plain = (linear::forward(&x.cpu, &a.cpu, None).unwrap() * f64::from(scale)).unwrap();
                let du_plain = (linear::backward_input(&dy.cpu, &b.cpu).unwrap() * f64::from(scale)).unwrap();
                let want_b = linear::grad_weight(&dy.cpu, &u_plain, DType::F32).unwrap();
                let want_a = linear::grad_weight(&du_plain, &x.cpu, DType::F32).unwrap();
                let grad_b = stack.grad_b(k, &dy.gpu, &u, None).unwrap();
                assert_close(&grad_b, &want_b, tolerance);
                let sum = gpu.random(want_b.dims(), DType::F32, 5);
                stack.grad_b(k, &dy.gpu, &u, Some(&sum.gpu)).unwrap();
                assert_close(&sum.gpu, &(&sum.cpu + &want_b).unwrap(), tolerance);
                let sum = gpu.random(want_a.dims(), DType::F32, 6);
                stack.grad_a(k, &du, &x.gpu, Some(&sum.gpu)).unwrap();
                assert_close(&sum.gpu, &(&sum.cpu + &want_a).unwrap(), tolerance);
                wanted_a.push(want_a);
            }
            assert_close(&stack.down_backward(&du).unwrap(), &want_dx, tolerance);
            let dx = stack.back_up_one(0, &du).unwrap();
            for k in 1..all.len() {
                update::add_assign(&dx, &stack.back_up_one(k, &du).unwrap()).unwrap();
            }
            assert_close(&dx, &want_dx, tolerance);
            for (got, want) in stack.grads_a(&du, &x.gpu).unwrap().iter().zip(&wanted_a) {
                assert_close(got, want, tolerance);
            }
        }
    }
}

#[test]
fn adapter_operations_are_plain_products() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (n, blocks, size) in [(5, 3, 7), (70, 6, 16)] {
            let c = blocks * size;
            let (x, dy) = (gpu.random((n, c), dtype, 1), gpu.random((n, c), dtype, 2));
            let (v, bias) = (gpu.random(c, DType::F32, 3), gpu.random(c, dtype, 4));
            let scaled = x.cpu.broadcast_mul(&v.cpu).unwrap();
            let y = adapters::scale_and_shift(&x.gpu, &v.gpu, None, dtype).unwrap();
            assert_close(&y, &scaled, tolerance);
            let y = adapters::scale_and_shift(&x.gpu, &v.gpu, Some(&bias.gpu), dtype).unwrap();
            assert_close(&y, &scaled.broadcast_add(&bias.cpu).unwrap(), tolerance);
            let sums = adapters::sum_products(&x.gpu, &dy.gpu).unwrap();
            assert_close(&sums, &(&x.cpu * &dy.cpu).unwrap().sum(0).unwrap(), 1e-4);

            let d = gpu.random((blocks, size, size), DType::F32, 5);
            let apart = |t: &Tensor| {
                let t = t.reshape((n, blocks, size)).unwrap();
                t.transpose(0, 1).unwrap().contiguous().unwrap()
            };
            let together = |t: Tensor| {
                t.transpose(0, 1)
                    .unwrap()
                    .contiguous()
                    .unwrap()
                    .reshape((n, c))
                    .unwrap()
            };
            for transposed in [false, true] {
                let y = gpu.random((n, c), dtype, 6);
                adapters::add_blocks(&y.gpu, &x.gpu, &d.gpu, transposed).unwrap();
                let d = if transposed {
                    d.cpu.transpose(1, 2).unwrap().contiguous().unwrap()
                } else {
                    d.cpu.clone()
                };
                let want = (&y.cpu + together(apart(&x.cpu).matmul(&d).unwrap())).unwrap();
                assert_close(&y.gpu, &want, tolerance);
            }
            let dr = adapters::blocks_gradient(&x.gpu, &dy.gpu, size).unwrap();
            let x_t = apart(&x.cpu).transpose(1, 2).unwrap().contiguous().unwrap();
            assert_close(&dr, &x_t.matmul(&apart(&dy.cpu)).unwrap(), 1e-4);

            let triangles = gpu.random((blocks, size * (size - 1) / 2), DType::F32, 7);
            let q = adapters::skew(&triangles.gpu, size).unwrap();
            assert_close(&q, &adapters::skew(&triangles.cpu, size).unwrap(), 0.0);
            let inverse = adapters::inverse_of_sum(&q).unwrap();
            let here = adapters::inverse_of_sum(&adapters::skew(&triangles.cpu, size).unwrap());
            assert_close(&inverse, &here.unwrap(), 1e-6);
            let back = adapters::skew_gradient(&d.gpu).unwrap();
            assert_close(&back, &adapters::skew_gradient(&d.cpu).unwrap(), 1e-6);
        }
    }
}
