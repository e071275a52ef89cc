//! Products in integers: the same bits on every CPU, close to the products with the dequantized values.

use super::super::dequantize::tests::Random;
use super::integer::fits;
use super::*;
use crate::oracle::{flat, random};
use crate::quantized::QMatrixView;

fn run(backend: CpuBackend, view: QMatrixView<'_>, x: &[f32], start: CInit<&[f32]>) -> Vec<f32> {
    let (o, i) = (view.rows, view.columns);
    let m = x.len() / i;
    let mut c = vec![0.25f32; m * o];
    let (a, b) = (
        Matrix::k_inner(Operand::F32(x), i),
        Matrix::k_inner(Operand::Quantized(view), i),
    );
    product_on(backend, (m, o, i), &mut c, start, a, b, b.rounding());
    c
}

fn backends() -> impl Iterator<Item = CpuBackend> {
    CpuBackend::ALL.into_iter().filter(|p| p.available())
}

/// The views of a random weight that allow rounded rows.
fn views(codes: &Random) -> Vec<QMatrixView<'_>> {
    let all = codes.views().into_iter().map(|view| QMatrixView {
        rounds_rows: true,
        ..view
    });
    all.filter(fits).collect()
}

#[test]
fn rounded_rows_give_the_same_bits_everywhere_and_nearly_the_exact_product() {
    let mut compared = 0;
    // The last one has more columns than the integers of a lane can sum.
    for (o, i) in [(70, 128), (33, 640), (5, 9024)] {
        let codes = Random::new(o, i);
        let bias = flat(&random(o, 3));
        for view in views(&codes) {
            let mut rows = vec![0f32; o * i];
            for (row, to) in rows.chunks_exact_mut(i).enumerate() {
                view.dequantize(row, 0, to);
            }
            for m in [1, 2, 3, 4, 5, 8] {
                let x = flat(&random((m, i), 1));
                for start in [CInit::Zero, CInit::C, CInit::Bias(&bias[..])] {
                    let one = run(CpuBackend::Portable, view, &x, start);
                    for backend in backends().filter(|b| !matches!(b, CpuBackend::Amx | CpuBackend::Avx512Bf16)) {
                        assert!(run(backend, view, &x, start) == one, "{backend:?} {m} {o} {i}");
                    }
                    for (n, got) in one.iter().enumerate() {
                        let (x, w) = (&x[n / o * i..][..i], &rows[n % o * i..][..i]);
                        let most = x.iter().fold(0f32, |most, x| most.max(x.abs()));
                        let sum = |f: &dyn Fn(f32, f32) -> f64| x.iter().zip(w).map(|(x, w)| f(*x, *w)).sum::<f64>();
                        let before = match start {
                            CInit::Zero => 0.0,
                            CInit::C => 0.25,
                            CInit::Bias(bias) => bias[n % o].into(),
                        };
                        let want = before + sum(&|x, w| f64::from(x) * f64::from(w));
                        // Half a unit of each value of the row, and the rounding of the weight to bf16 in the other product.
                        let weight = sum(&|_, w| f64::from(w.abs()));
                        let narrow = if view.bf16 {
                            sum(&|x, w| f64::from((x * w).abs())) / 256.0
                        } else {
                            0.0
                        };
                        let bound = weight * f64::from(most) / 32768.0 * 1.05 + narrow + 1e-4;
                        assert!(
                            (f64::from(*got) - want).abs() <= bound,
                            "{got} {want} {bound}: {m} {o} {i}"
                        );
                        compared += 1;
                    }
                }
            }
        }
    }
    assert!(compared > 10_000, "{compared}");
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    let codes = Random::new(40, 192);
    let x = flat(&random((7, 192), 1));
    for view in views(&codes) {
        let all = run(CpuBackend::Portable, view, &x, CInit::Zero);
        for (row, all) in all.chunks_exact(40).enumerate() {
            assert!(run(CpuBackend::Portable, view, &x[row * 192..][..192], CInit::Zero) == all);
        }
    }
}

#[test]
fn rows_of_zeros_and_rows_that_are_not_finite() {
    let codes = Random::new(8, 128);
    let mut x = vec![0f32; 3 * 128];
    (x[128 + 5], x[2 * 128 + 7]) = (f32::NAN, f32::INFINITY);
    for view in views(&codes) {
        for backend in backends() {
            let c = run(backend, view, &x, CInit::Zero);
            assert!(
                c[..8].iter().all(|y| *y == 0.0) && c[8..].iter().all(|y| !y.is_finite()),
                "{backend:?} {c:?}"
            );
        }
    }
}
