//! The linear: products, accumulation into existing values, gradients in f32.

use crate::support::{KINDS, assert_close, assert_same_bits, gpu};
use candle_core::DType;
use ft::ops::linear;

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
