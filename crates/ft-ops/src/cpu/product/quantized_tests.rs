//! Products with quantized weights: on every backend bit-equal to those with the dequantized values.

use super::super::dequantize::tests::Random;
use super::*;
use crate::oracle::{flat, random};

/// (tokens, O, I): few rows, ragged edges, several chunks of k.
const SIZES: [GemmSizes; 11] = [
    (1, 70, 128),
    (2, 40, 1088),
    (4, 33, 192),
    (7, 33, 640),
    (1, 70, 130),
    (3, 33, 700),
    (8, 40, 64),
    (9, 40, 77),
    (30, 70, 600),
    (33, 300, 40),
    (100, 260, 391),
];

fn bits(c: &[f32]) -> Vec<u32> {
    c.iter().map(|x| x.to_bits()).collect()
}

/// Compares all products of a quantized weight with those of a dense weight that holds the dequantized values.
fn check(backend: CpuBackend, (tokens, o, i): GemmSizes) {
    let (x, dy) = (flat(&random((tokens, i), 1)), flat(&random((tokens, o), 2)));
    let codes = Random::new(o, i);
    for (which, view) in codes.views().into_iter().enumerate() {
        let mut dequantized = vec![0f32; o * i];
        for (row, to) in dequantized.chunks_exact_mut(i).enumerate() {
            view.dequantize(row, 0, to);
        }
        let narrow: Vec<bf16> = dequantized.iter().map(|v| bf16::from_f32(*v)).collect();
        let dense = if view.bf16 {
            Operand::Bf16(&narrow)
        } else {
            Operand::F32(&dequantized)
        };
        let bias = flat(&random(o.max(i), 3));
        for backward in [false, true] {
            let (sizes, a) = if backward {
                ((tokens, i, o), Matrix::k_inner(Operand::F32(&dy), o))
            } else {
                ((tokens, o, i), Matrix::k_inner(Operand::F32(&x), i))
            };
            let operand = |w| {
                if backward {
                    Matrix::k_outer(w, i)
                } else {
                    Matrix::k_inner(w, i)
                }
            };
            for start in [CInit::Zero, CInit::C, CInit::Bias(&bias[..sizes.1])] {
                let run = |w| {
                    let b: Matrix = operand(w);
                    let mut c = vec![0.25f32; tokens * sizes.1];
                    product_on(backend, sizes, &mut c, start, a, b, b.rounding());
                    c
                };
                let (got, want) = (run(Operand::Quantized(view)), run(dense));
                // If a quantized weight takes the GEMV kernel, or k is cut elsewhere, the order of the sum differs.
                let same_order = backend != CpuBackend::Portable
                    && (backward || tokens > 8 || tokens <= 4)
                    && !(matches!(start, CInit::C) && tokens <= 4 && !backward);
                let place = format!("{backend:?} view {which} {tokens} {o} {i} backward {backward}");
                if same_order {
                    assert!(bits(&got) == bits(&want), "{place}");
                }
                // A row has the same bits alone and among others.
                if let (CInit::Zero, false, CpuBackend::Avx512 | CpuBackend::Avx2) = (start, backward, backend) {
                    for (row, got) in got.chunks_exact(o).enumerate().take(8).filter(|_| tokens <= 8) {
                        let mut c = vec![0f32; o];
                        let a = Matrix::k_inner(Operand::F32(&x[row * i..][..i]), i);
                        let b = operand(Operand::Quantized(view));
                        product_on(backend, (1, o, i), &mut c, CInit::Zero, a, b, b.rounding());
                        assert!(bits(got) == bits(&c), "{place} row {row}");
                    }
                }
                let bound = 1e-6 * sizes.2 as f32 * dequantized.iter().fold(1f32, |m, x| m.max(x.abs()));
                for (got, want) in got.iter().zip(&want) {
                    assert!((got - want).abs() <= bound, "{place}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn products_with_codes_are_those_with_the_dequantized_values() {
    for backend in CpuBackend::ALL.into_iter().filter(|p| p.available()) {
        for sizes in SIZES {
            check(backend, sizes);
        }
    }
}

#[test]
fn bit_equal_on_any_number_of_threads() {
    let (tokens, o, i) = (70, 530, 640);
    let x = flat(&random((tokens, i), 1));
    let dy = flat(&random((tokens, o), 2));
    let codes = Random::new(o, i);
    for backend in CpuBackend::ALL.into_iter().filter(|p| p.available()) {
        for view in codes.views() {
            for rows in [2, tokens] {
                let run = |threads| {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    let (mut y, mut dx) = (vec![0f32; rows * o], vec![0f32; rows * i]);
                    pool.install(|| {
                        let (a, b) = (
                            Matrix::k_inner(Operand::F32(&x[..rows * i]), i),
                            Matrix::k_inner(Operand::Quantized(view), i),
                        );
                        product_on(backend, (rows, o, i), &mut y, CInit::Zero, a, b, b.rounding());
                        let (a, b) = (
                            Matrix::k_inner(Operand::F32(&dy[..rows * o]), o),
                            Matrix::k_outer(Operand::Quantized(view), i),
                        );
                        product_on(backend, (rows, i, o), &mut dx, CInit::Zero, a, b, b.rounding());
                    });
                    (bits(&y), bits(&dx))
                };
                let one = run(1);
                assert!(one == run(2) && one == run(7), "{backend:?} {rows}");
            }
        }
    }
}
