//! Products of 8-bit operands: against the same products from codes that are quantized here, against the exact product, and
//! in whole runs.

use crate::support::{Gpu, KINDS, assert_same_bits, flat, gpu};
use crate::train::{close, number, train};
use candle_core::{DType, Tensor};
use ft::ops::quantized::Products;
use ft::quant::{Format, Weight, quantize};
use ft::recipe::Dtype;
use tempfile::TempDir;

/// The types that this GPU has.
fn types(gpu: &Gpu) -> Vec<Products> {
    let both = [Products::Int8, Products::Fp8].into_iter();
    both.filter(|products| products.check(&gpu.device).is_ok()).collect()
}

/// Values `[rows, columns]` as the operand of a product holds them.
fn quantized(values: &[f32], columns: usize, products: Products) -> Vec<f64> {
    let (most, table) = match products {
        Products::Fp8 => (448.0, e4m3()),
        _ => (127.0, (-127..=127).map(f64::from).collect()),
    };
    let row = |row: &[f32]| {
        let largest = row.iter().fold(0f32, |m, x| m.max(x.abs()));
        let (inverse, scale) = (most / largest, largest / most);
        row.iter()
            .map(|x| nearest(&table, f64::from(x * inverse)) * f64::from(scale))
            .collect::<Vec<_>>()
    };
    values.chunks(columns).flat_map(row).collect()
}

/// All values of e4m3, ascending.
fn e4m3() -> Vec<f64> {
    let size = |code: i32| match (code >> 3, code & 7) {
        (0, m) => f64::from(m) * 2f64.powi(-9),
        (e, m) => f64::from(8 + m) * 2f64.powi(e - 10),
    };
    let sizes: Vec<f64> = (0..=0x7e).map(size).collect();
    sizes[1..].iter().rev().map(|x| -x).chain(sizes.clone()).collect()
}

/// The nearest of the table; the one with an even place among the sizes on a tie.
fn nearest(table: &[f64], x: f64) -> f64 {
    let zero = table.len() / 2;
    let above = table.partition_point(|v| *v < x).min(table.len() - 1);
    let below = above.saturating_sub(1);
    let (low, high) = (x - table[below], table[above] - x);
    let take_low = low < high || low == high && below.abs_diff(zero) % 2 == 0;
    table[if take_low { below } else { above }]
}

/// `a [n, k] · bᵀ` for `b [m, k]`.
fn product(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum();
    a.chunks(k).flat_map(|x| b.chunks(k).map(move |y| dot(x, y))).collect()
}

fn transposed(values: &[f64], columns: usize) -> Vec<f64> {
    let column = |c: usize| values.iter().skip(c).step_by(columns).copied();
    (0..columns).flat_map(column).collect()
}

/// The norm of the difference, as a part of the norm of what is wanted.
fn error(got: &[f64], want: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut got.iter().zip(want).map(|(g, w)| g - w)) / norm(&mut want.iter().copied())
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| f64::from(*x)).collect()
}

/// A weight `[o, i]` in int8 on the GPU, its scaled codes, and the scales of its rows.
fn weight(gpu: &Gpu, (o, i): (usize, usize), dtype: DType) -> (Weight, Vec<f64>, Vec<f32>) {
    let values = flat(&gpu.random((o, i), DType::F32, 7).cpu);
    let dequantized_dtype = if dtype == DType::BF16 { Dtype::Bf16 } else { Dtype::F32 };
    let coded = |dequantized_dtype| quantize(&values, (o, i), Format::Int8 { group: 0 }, dequantized_dtype).unwrap();
    let scales = values
        .chunks(i)
        .map(|row| row.iter().fold(0f32, |m, x| m.max(x.abs())) / 127.0)
        .collect();
    let there = Weight::quantized_on(coded(dequantized_dtype), &gpu.device).unwrap();
    (there, wide(&coded(Dtype::F32).dequantize()), scales)
}

/// W as the product holds it: the codes, in e4m3 each rounded once more.
fn held(w: &[f64], scales: &[f32], columns: usize, products: Products) -> Vec<f64> {
    let table = e4m3();
    let row = |(row, scale): (&[f64], &f32)| {
        let scale = f64::from(*scale);
        let code = |x: &f64| match products {
            Products::Fp8 => nearest(&table, (x / scale).round()) * scale,
            _ => *x,
        };
        row.iter().map(code).collect::<Vec<_>>()
    };
    w.chunks(columns).zip(scales).flat_map(row).collect()
}

#[test]
fn products_are_those_of_the_codes() {
    let Some(gpu) = gpu() else { return };
    for products in types(&gpu) {
        for (dtype, tolerance) in KINDS {
            for (n, o, i) in [(9, 48, 32), (130, 256, 608), (33, 16, 1040)] {
                let (dense, values, scales) = weight(&gpu, (o, i), dtype);
                let w = dense.with_products(products);
                let (x, dy) = (gpu.random((n, i), dtype, 1), gpu.random((n, o), dtype, 2));
                // Tensor cores of Hopper add products of fp8 with about 14 bits.
                let tolerance = match products {
                    Products::Fp8 => tolerance.max(5e-4),
                    _ => tolerance,
                };
                let check = |got: &Tensor, want: &[f64], what: &str| {
                    assert_eq!(got.dtype(), dtype);
                    let got = wide(&flat(got));
                    let largest = want.iter().fold(0f64, |m, x| m.max(x.abs()));
                    for (g, w) in got.iter().zip(want) {
                        let most = f64::from(tolerance) * largest;
                        assert!(
                            (g - w).abs() <= most,
                            "{what} {products:?} {dtype:?}: got {g}, want {w}"
                        );
                    }
                };
                let held = held(&values, &scales, i, products);
                let y = product(&quantized(&flat(&x.cpu), i, products), &held, i);
                check(&w.forward(&x.gpu, None).unwrap(), &y, "y");
                assert_same_bits(&w.forward(&x.gpu, None).unwrap(), &w.forward(&x.gpu, None).unwrap());
                // Added to what is there, and to a bias.
                let bias = gpu.random(o, dtype, 3);
                let added: Vec<f64> = y
                    .iter()
                    .zip(wide(&flat(&bias.cpu)).iter().cycle())
                    .map(|(y, b)| y + b)
                    .collect();
                check(&w.forward(&x.gpu, Some(&bias.gpu)).unwrap(), &added, "y + b");
                // The scales of the rows of W are factors of dy, and the codes have none.
                let factors = flat(&dy.cpu)
                    .iter()
                    .zip(scales.iter().cycle())
                    .map(|(x, s)| x * s)
                    .collect::<Vec<_>>();
                let codes: Vec<f64> = (held.chunks(i).zip(&scales))
                    .flat_map(|(row, s)| row.iter().map(move |x| x / f64::from(*s)))
                    .collect();
                let dx = product(&quantized(&factors, o, products), &transposed(&codes, i), o);
                check(&w.backward_input(&dy.gpu).unwrap(), &dx, "dx");
                let sum = gpu.random((n, i), dtype, 4);
                let added: Vec<f64> = dx.iter().zip(wide(&flat(&sum.cpu))).map(|(x, s)| x + s).collect();
                w.backward_input_add(&sum.gpu, &dy.gpu).unwrap();
                check(&sum.gpu, &added, "dx +");
            }
        }
    }
}

/// The bounds of docs/quantization.md.
#[test]
fn errors_of_products_are_bounded() {
    let Some(gpu) = gpu() else { return };
    let (n, o, i) = (64, 256, 512);
    for products in types(&gpu) {
        let (dense, values, _) = weight(&gpu, (o, i), DType::F32);
        let w = dense.with_products(products);
        let (x, dy) = (gpu.random((n, i), DType::F32, 1), gpu.random((n, o), DType::F32, 2));
        let y = product(&wide(&flat(&x.cpu)), &values, i);
        let dx = product(&wide(&flat(&dy.cpu)), &transposed(&values, i), o);
        let most = if products == Products::Int8 { 0.015 } else { 0.045 };
        for (got, want) in [
            (w.forward(&x.gpu, None).unwrap(), y),
            (w.backward_input(&dy.gpu).unwrap(), dx),
        ] {
            let error = error(&wide(&flat(&got)), &want);
            assert!(error <= most, "{products:?}: {error}");
        }
    }
}

#[test]
fn some_products_stay_exact() {
    let Some(gpu) = gpu() else { return };
    for products in types(&gpu) {
        // A few tokens, which a kernel dequantizes in registers; sizes that are not aligned.
        for (n, o, i) in [(8, 64, 64), (20, 40, 64), (20, 64, 72)] {
            let (dense, ..) = weight(&gpu, (o, i), DType::BF16);
            let x = gpu.random((n, i), DType::BF16, 1).gpu;
            let y = dense.forward(&x, None).unwrap();
            assert_same_bits(&dense.clone().with_products(products).forward(&x, None).unwrap(), &y);
        }
        // Groups of columns.
        let values = flat(&gpu.random((64, 256), DType::F32, 7).cpu);
        let coded = quantize(&values, (64, 256), Format::Int8 { group: 128 }, Dtype::Bf16).unwrap();
        let dense = Weight::quantized_on(coded, &gpu.device).unwrap();
        let x = gpu.random((20, 256), DType::BF16, 1).gpu;
        let y = dense.forward(&x, None).unwrap();
        assert_same_bits(&dense.clone().with_products(products).forward(&x, None).unwrap(), &y);
    }
}

/// A guard on the device stops a step that is not finite; it must see such a number through the codes.
#[test]
fn what_is_not_finite_stays_so() {
    let Some(gpu) = gpu() else { return };
    for products in types(&gpu) {
        let w = weight(&gpu, (32, 64), DType::F32).0.with_products(products);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut values = flat(&gpu.random((16, 64), DType::F32, 1).cpu);
            values[64 * 3 + 5] = bad;
            let x = Tensor::from_vec(values, (16, 64), &gpu.device).unwrap();
            let y = flat(&w.forward(&x, None).unwrap());
            for (row, y) in y.chunks(32).enumerate() {
                assert!(y.iter().all(|y| y.is_nan() == (row == 3)), "row {row}: {y:?}");
            }
        }
    }
}

#[test]
fn losses_of_runs_stay_close() {
    let Some(gpu) = gpu() else { return };
    let types = types(&gpu);
    drop(gpu);
    let losses = |products: Products| {
        let dir = TempDir::new().unwrap();
        let key = format!("memory.frozen_products={}", products.name());
        let settings = [
            "tune.method=lora",
            "optimizer.learning_rate=1e-3",
            "memory.frozen_weights=int8",
            &key,
        ];
        let lines = train("cuda:0", &settings, &dir.path().join("out"));
        lines.iter().map(|line| number(line, "loss")).collect::<Vec<_>>()
    };
    let exact = losses(Products::Dequantized);
    for products in types {
        let found = losses(products);
        assert!(found != exact, "{products:?} has no effect");
        for (step, (a, b)) in exact.iter().zip(&found).enumerate() {
            close(*a, *b, 0.02, &format!("{products:?}, step {step}"));
        }
    }
}
