//! Products in integers: the same bits on every CPU, close to the products with the dequantized values.

use super::super::super::dequantize::tests::Random;
use super::super::*;
use super::{most_rows, most_rows_of_any};
use crate::oracle::{flat, random};
use crate::quantized::{QData, QMatrixView};

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
    all.filter(|view| most_rows(view, CpuBackend::Portable).is_some())
        .collect()
}

/// Most rows of a product in integers.
fn most(backend: CpuBackend, view: &QMatrixView<'_>) -> usize {
    let rounding = Matrix::k_inner(Operand::Quantized(*view), view.columns).rounding();
    most_rows(view, backend.for_rounding(rounding)).unwrap()
}

#[test]
fn rounded_rows_give_the_same_bits_everywhere_and_nearly_the_exact_product() {
    let mut compared = 0;
    // The last one has more columns than the integers of a lane can sum, with int8.
    for (o, i) in [(70, 128), (33, 640), (5, 9024)] {
        let codes = Random::new(o, i);
        let bias = flat(&random(o, 3));
        assert_eq!(views(&codes).len(), 8);
        for view in views(&codes) {
            let mut rows = vec![0f32; o * i];
            for (row, to) in rows.chunks_exact_mut(i).enumerate() {
                // The integers are not rounded to bf16.
                QMatrixView { bf16: false, ..view }.dequantize(row, 0, to);
            }
            for m in [1, 2, 3, 4, 5, 8] {
                let x = flat(&random((m, i), 1));
                for start in [CInit::Zero, CInit::C, CInit::Bias(&bias[..])] {
                    let one = run(CpuBackend::Portable, view, &x, start);
                    for backend in backends() {
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
                        // Half a unit of each value of the row.
                        let weight = sum(&|_, w| f64::from(w.abs()));
                        let bound = weight * f64::from(most) / 32768.0 * 1.05 + 1e-4;
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
    let more = flat(&random((most_rows_of_any(CpuBackend::Portable) + 1, 192), 1));
    assert_eq!(views(&codes).len(), 8);
    for view in views(&codes) {
        let all = run(CpuBackend::Portable, view, &x, CInit::Zero);
        for (row, all) in all.chunks_exact(40).enumerate() {
            assert!(run(CpuBackend::Portable, view, &x[row * 192..][..192], CInit::Zero) == all);
        }
        for backend in backends() {
            let most = most(backend, &view);
            let all = run(backend, view, &more[..most * 192], CInit::Zero);
            for row in [0, most / 2, most - 1] {
                let alone = run(CpuBackend::Portable, view, &more[row * 192..][..192], CInit::Zero);
                assert!(alone == all[row * 40..][..40], "{backend:?} {row}");
            }
            // One row more is a product with the dequantized weight.
            let exact = QMatrixView {
                rounds_rows: false,
                ..view
            };
            let more = &more[..(most + 1) * 192];
            assert!(run(backend, view, more, CInit::Zero) == run(backend, exact, more, CInit::Zero));
        }
    }
}

#[test]
fn rows_of_zeros_and_rows_that_are_not_finite() {
    let codes = Random::new(8, 128);
    assert_eq!(views(&codes).len(), 8);
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

/// A weight that allows rounded rows: of int8 codes, or of int4 codes if there are words.
fn weight<'a>(
    (rows, columns, stride, group): (usize, usize, usize, usize),
    codes: &'a [u8],
    scales: &'a [f32],
    words: &'a [u32],
) -> QMatrixView<'a> {
    let codes = if words.is_empty() {
        QData::Int8 {
            codes,
            stride,
            group,
            scales,
        }
    } else {
        QData::Int4 {
            codes,
            stride,
            group,
            scales: words,
        }
    };
    QMatrixView {
        rows,
        columns,
        codes,
        bf16: false,
        rounds_rows: true,
    }
}

#[test]
fn integers_of_the_largest_sums_do_not_overflow() {
    let k = 9024;
    let x: Vec<f32> = [1.0, -1.0].into_iter().flat_map(|x| [x; 9024]).collect();
    for backend in backends() {
        let (low, high) = (vec![0x80; 2 * k], vec![0xFF; k]);
        let int8 = weight((2, k, k, k), &low, &[0.5; 2], &[]);
        let want = -128.0 * 0.5 * k as f32;
        assert_eq!(
            run(backend, int8, &x, CInit::Zero),
            [want, want, -want, -want],
            "{backend:?}"
        );
        // (15 · 0.5 - 0.25) for each column.
        let word = (-0.25f32).to_bits() | 0.5f32.to_bits() >> 16;
        let words = [word; 2];
        let int4 = weight((2, k, k / 2, k), &high, &[], &words);
        let want = 7.25 * k as f32;
        let got = run(backend, int4, &x, CInit::Zero);
        let off = got
            .iter()
            .zip([want, want, -want, -want])
            .map(|(got, want)| (got - want).abs());
        assert!(off.into_iter().all(|off| off < 1e-6 * want), "{backend:?} {got:?}");
    }
}

/// Strides that are longer than a row, short groups at the end, groups of one step, groups longer than the row.
#[test]
fn every_shape_that_fits_is_computed_as_on_paper() {
    let sizes = [
        (192usize, 128usize),
        (64, 128),
        (320, 64),
        (448, 192),
        (384, 384),
        (96, 32),
        (160, 96),
        (96, 64),
    ];
    for (columns, group) in sizes {
        for nibbles in [false, true] {
            if nibbles && !(columns.is_multiple_of(64) && group.is_multiple_of(64)) {
                continue;
            }
            let groups = columns.div_ceil(group);
            // Blocks of 4, 2 and 1 rows of the weight and of 1 to 4 of the others.
            for (rows, m) in [(37, 1), (38, 2), (39, 3), (37, 4), (38, 7)] {
                shape_as_on_paper((rows, columns, groups, group), m, nibbles);
            }
        }
    }
}

fn shape_as_on_paper((rows, columns, groups, group): (usize, usize, usize, usize), m: usize, nibbles: bool) {
    let width = if nibbles { columns / 2 } else { columns };
    let stride = width + 48;
    let codes: Vec<u8> = (0..rows * stride).map(|i| (i * 167 % 251) as u8).collect();
    let words: Vec<u32> = (0..rows * groups)
        .map(|i| ((i % 7) as f32 - 3.0).to_bits() | (1.0 + (i % 5) as f32).to_bits() >> 16)
        .collect();
    let scales: Vec<f32> = (0..rows * groups).map(|i| 1.0 + (i % 5) as f32).collect();
    let view = weight(
        (rows, columns, stride, group),
        &codes,
        &scales,
        if nibbles { &words } else { &[] },
    );
    assert!(most_rows(&view, CpuBackend::Portable).is_some_and(|most| m <= most));
    // Whole numbers, the largest of which is rounded to itself: the result is exact.
    let x: Vec<f32> = (0..m * columns)
        .map(|i| {
            if i.is_multiple_of(columns) {
                16383.0
            } else {
                (i * 31 % 129) as f32 - 64.0
            }
        })
        .collect();
    let dequantized = |row: usize, column: usize| {
        let at = row * groups + column / group;
        if nibbles {
            let byte = codes[row * stride + column / 2];
            let code = if column.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
            f64::from(code) * f64::from(scales[at]) + f64::from((at % 7) as f32 - 3.0)
        } else {
            f64::from(codes[row * stride + column] as i8) * f64::from(scales[at])
        }
    };
    let want: Vec<f32> = (0..m * rows)
        .map(|n| {
            let x = &x[n / rows * columns..][..columns];
            let products = x
                .iter()
                .enumerate()
                .map(|(i, x)| f64::from(*x) * dequantized(n % rows, i));
            products.sum::<f64>() as f32
        })
        .collect();
    // Sums that are rounded, so that their order matters.
    let drawn = flat(&random((m, columns), 1));
    let portable = run(CpuBackend::Portable, view, &drawn, CInit::Zero);
    for backend in backends() {
        let got = run(backend, view, &x, CInit::Zero);
        let what = format!("{backend:?} {columns} {group} {nibbles} {rows} {m}");
        assert!(run(backend, view, &drawn, CInit::Zero) == portable, "{what}");
        let off = got
            .iter()
            .zip(&want)
            .map(|(got, want)| (got - want).abs() / want.abs().max(1.0));
        assert!(off.into_iter().all(|off| off < 1e-5), "{what}");
    }
}

/// More steps of a group than the integers can sum: with a step that is left after the last pair, and in groups of an odd number
/// of steps.
#[test]
fn long_groups_have_the_same_bits_everywhere() {
    for (columns, group, nibbles) in [
        (9056usize, 9056usize, false),
        (16_512, 8224, false),
        (16_448, 16_448, true),
    ] {
        let (rows, groups) = (3, columns.div_ceil(group));
        let stride = if nibbles { columns / 2 } else { columns };
        let codes: Vec<u8> = (0..rows * stride).map(|i| (i * 167 % 251) as u8).collect();
        let words = vec![0x3F40_3C00u32; rows * groups];
        let scales: Vec<f32> = (0..rows * groups).map(|i| 0.3 + i as f32).collect();
        let words = if nibbles { &words[..] } else { &[] };
        let view = weight((rows, columns, stride, group), &codes, &scales, words);
        assert!(most_rows(&view, CpuBackend::Portable).is_some());
        let x = flat(&random((2, columns), 1));
        let portable = run(CpuBackend::Portable, view, &x, CInit::Zero);
        for backend in backends() {
            assert!(
                run(backend, view, &x, CInit::Zero) == portable,
                "{backend:?} {columns} {group}"
            );
        }
    }
}

#[test]
fn scales_that_are_not_finite_give_results_that_are_not() {
    let (codes, x) = (vec![3u8; 4 * 128], vec![1f32; 128]);
    for scale in [f32::NAN, f32::INFINITY] {
        let scales = [0.5, scale, 0.5, 0.5, scale, 0.5, 0.5, 0.5];
        let view = weight((4, 128, 128, 64), &codes, &scales, &[]);
        for backend in backends() {
            let got = run(backend, view, &x, CInit::Zero);
            let finite: Vec<bool> = got.iter().map(|y| y.is_finite()).collect();
            assert_eq!(finite, [false, true, false, true], "{backend:?}");
        }
    }
}

#[test]
fn rows_of_the_smallest_and_the_largest_numbers() {
    let codes = vec![0x7Fu8; 4 * 64];
    let view = weight((4, 64, 64, 64), &codes, &[0.5; 4], &[]);
    for backend in backends() {
        for (x, most) in [(1e-40f32, 0.0), (1e-36, 1e-32), (1e-30, 1e-26)] {
            let got = run(backend, view, &[x; 64], CInit::Zero);
            let want = 64.0 * 63.5 * x;
            assert!(
                got.iter()
                    .all(|y| (0.0..=most).contains(y) && (*y == 0.0 && x < 1e-34 || (y / want - 1.0).abs() < 1e-3)),
                "{backend:?} {x} {got:?}"
            );
        }
        let mut x = [0f32; 64];
        x[3] = f32::MAX / 100.0;
        let got = run(backend, view, &x, CInit::Zero);
        assert!(
            got.iter().all(|y| (y / (63.5 * x[3]) - 1.0).abs() < 1e-4),
            "{backend:?} {got:?}"
        );
    }
}

#[test]
fn only_few_rows_and_whole_steps_are_rounded() {
    let (codes, scales, words) = (vec![0x35u8; 4 * 96], [0.5; 64], [0x3F00_3F00; 64]);
    let int8 = |columns, group| weight((4, columns, 96, group), &codes, &scales, &[]);
    let int4 = |columns, group| weight((4, columns, 96, group), &codes, &[], &words);
    let most = |view| most_rows(&view, CpuBackend::Avx512);
    assert_eq!([most(int8(96, 96)), most(int4(64, 64))], [Some(64), Some(8)]);
    let none = [int8(48, 48), int8(96, 48), int4(96, 96), int4(64, 32)];
    assert!(none.into_iter().all(|view| most(view).is_none()));
    assert_eq!(most_rows(&int8(96, 96), CpuBackend::Amx), Some(16));
    let exact = QMatrixView {
        rounds_rows: false,
        ..int8(96, 96)
    };
    assert!(most(exact).is_none());
}
