//! A few rows of activations and a bf16 weight: each row has the bits of the product of that row alone.

use super::*;
use crate::oracle::{flat, random};
use half::bf16;

#[test]
fn a_row_has_the_same_bits_alone_and_among_a_few() {
    for (n, k, stride) in [
        (1, 5, 5),
        (2, 32, 40),
        (3, 33, 33),
        (36, 77, 80),
        (37, 200, 200),
        (70, 96, 128),
    ] {
        let weight: Vec<bf16> = flat(&random((n, stride), 1)).into_iter().map(bf16::from_f32).collect();
        let weight = Matrix {
            stride,
            ..Matrix::k_inner(Operand::Bf16(&weight), k)
        };
        let bias = flat(&random(n, 3));
        for m in 1..=8 {
            let x = flat(&random((m, k), 2));
            for start in [CInit::Zero, CInit::Bias(&bias[..])] {
                for backend in testable() {
                    let run = |m, x: &[f32]| {
                        let mut c = vec![0f32; m * n];
                        let a = Matrix::k_inner(Operand::F32(x), k);
                        product_on(backend, (m, n, k), &mut c, start, a, weight, weight.rounding());
                        c
                    };
                    let all = run(m, &x);
                    for (row, all) in all.chunks_exact(n).enumerate() {
                        let alone = run(1, &x[row * k..][..k]);
                        // More than four rows take another path, except in f32 with AVX-512.
                        let most = if backend == CpuBackend::Avx512 || m <= 4 {
                            0.0
                        } else {
                            1e-2
                        };
                        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= most;
                        assert!(alone.iter().zip(all).all(near), "{backend:?} {n} {k} {m} {row}");
                        assert!(alone.iter().all(|y| y.abs() > 0.0), "{backend:?} {n} {k}");
                    }
                }
            }
        }
    }
}
