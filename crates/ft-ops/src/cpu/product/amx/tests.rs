//! The AMX backend, compared with plain loops; AMX is emulated where it is missing.

use super::super::super::SharedSlice;
use super::super::super::storage::StoredElements;
use super::super::{
    CInit, CpuBackend, FusedLora, Matrix, Operand, ProductJob, Rounding, product_on, product_with, testable,
};
use super::unpacked_tiles::{MOST_ROWS, elements};
use crate::oracle::{flat, random};
use half::bf16;

fn rounded(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|x| bf16::from_f32(*x)).collect()
}

/// Returns the backends of this module that can be tested on this machine; AMX is emulated where it is missing.
fn backends() -> Vec<CpuBackend> {
    testable().into_iter().filter(|b| b.packs_bf16()).collect()
}

/// Checks that C, from operands in every storage, is the product of the operands rounded to bf16.
fn check(backend: CpuBackend, (m, n, k): (usize, usize, usize)) {
    let (a, b) = (flat(&random((m, k), 1)), flat(&random((n, k), 2)));
    let turned =
        |v: &[f32], count: usize| -> Vec<f32> { (0..count * k).map(|i| v[i % count * k + i / count]).collect() };
    let (at, bt) = (turned(&a, m), turned(&b, n));
    let bias = flat(&random(n, 3));
    let narrow = [&a, &at, &b, &bt].map(|v| rounded(v));
    let (wide_a, wide_b): (Vec<f64>, Vec<f64>) = (
        narrow[0].iter().map(|x| x.to_f64()).collect(),
        narrow[2].iter().map(|x| x.to_f64()).collect(),
    );
    for kind in 0..16 {
        let a = match kind & 3 {
            0 => Matrix::k_inner(StoredElements::F32(&a), k),
            1 => Matrix::k_outer(StoredElements::F32(&at), m),
            2 => Matrix::k_inner(StoredElements::Bf16(&narrow[0]), k),
            _ => Matrix::k_outer(StoredElements::Bf16(&narrow[1]), m),
        };
        let b = match kind >> 2 {
            0 => Matrix::k_inner(StoredElements::F32(&b), k),
            1 => Matrix::k_outer(StoredElements::F32(&bt), n),
            2 => Matrix::k_inner(StoredElements::Bf16(&narrow[2]), k),
            _ => Matrix::k_outer(StoredElements::Bf16(&narrow[3]), n),
        };
        let start = [CInit::Zero, CInit::C, CInit::Bias(&bias[..])][kind % 3];
        let mut c = vec![if kind % 3 == 1 { 0.25 } else { f32::NAN }; m * n];
        super::run(
            &ProductJob {
                sizes: (m, n, k),
                c: SharedSlice::new(&mut c),
                start,
                a,
                b,
                fused_lora: None,
            },
            backend,
        );
        for i in 0..m {
            for j in 0..n {
                let from = [0.0, 0.25, bias[j] as f64][kind % 3];
                let want: f64 = from + (0..k).map(|p| wide_a[i * k + p] * wide_b[j * k + p]).sum::<f64>();
                let got = c[i * n + j] as f64;
                assert!(
                    (got - want).abs() < 2e-6 * k as f64,
                    "{m} {n} {k} kind {kind} at {i}, {j}: {got} {want}"
                );
            }
        }
    }
}

#[test]
fn tiles_agree_with_plain_loops() {
    for backend in backends() {
        // Ragged edges; one step and several; k below and above the number of steps in which a finished tile is
        // written; more panels than a block or a group of them has.
        for sizes in [
            (1, 1, 1),
            (5, 3, 7),
            (9, 40, 33),
            (16, 16, 16),
            (33, 70, 50),
            (64, 96, 512),
            (70, 65, 545),
            (96, 64, 1100),
            (40, 64, 545),
            (33, 320, 33),
            (530, 300, 70),
            (40, 610, 1100),
        ] {
            check(backend, sizes);
        }
    }
}

/// Checks u and C of a fused LoRA product, rounded as the operands are. The activations of the last two are too large to be packed
/// at once; the weight of the last one is read where it lies (on AMX), in two parts of k.
#[test]
fn a_rider_is_a_few_steps_more() {
    backends().into_iter().for_each(fuses);
}

fn fuses(backend: CpuBackend) {
    // A few rows and large ranks are computed as three products, with the same operands.
    for (m, n, k, rank) in [
        (1, 70, 50, 5),
        (4, 33, 600, 16),
        (9, 20, 40, 3),
        (3, 40, 90, 100),
        (40, 50, 60, 100),
        (33, 70, 50, 5),
        (64, 96, 512, 16),
        (70, 65, 545, 33),
        (40, 64, 1100, 64),
        (2048, 33, 4128, 7),
        (64, 33, 131_104, 7),
    ] {
        let sizes = [(m, k), (n, k), (rank, k), (n, rank)];
        let [a, b, down, up] = [1, 2, 3, 4].map(|i| flat(&random(sizes[i - 1], i as u64)));
        let [ra, rb, rdown, rup] = [&a, &b, &down, &up].map(|v| rounded(v));
        let (mut c, mut u) = (vec![0.25; m * n], vec![f32::NAN; m * rank]);
        let fused_lora = FusedLora {
            rank,
            down: Matrix::k_inner(StoredElements::F32(&down), k),
            up: Matrix::k_inner(StoredElements::F32(&up), rank),
            scale: 0.5,
            u: &mut u,
        };
        let operands = (
            Matrix::k_inner(StoredElements::F32(&a), k),
            Matrix::k_inner(StoredElements::Bf16(&rb), k),
        );
        product_with(
            backend,
            (m, n, k),
            &mut c,
            CInit::C,
            operands,
            Rounding::Bf16,
            fused_lora,
        );
        let ru = rounded(&u);
        let dot = |x: &[bf16], y: &[bf16]| -> f64 { x.iter().zip(y).map(|(x, y)| x.to_f64() * y.to_f64()).sum() };
        for i in (0..m).step_by((m / 30).max(1)) {
            let row = &ra[i * k..][..k];
            for r in 0..rank {
                let (got, want) = (u[i * rank + r] as f64, 0.5 * dot(row, &rdown[r * k..][..k]));
                assert!(
                    (got - want).abs() < 2e-6 * k as f64,
                    "{m} {n} {k} u at {i}, {r}: {got} {want}"
                );
            }
            for j in 0..n {
                let low_rank = dot(&ru[i * rank..][..rank], &rup[j * rank..][..rank]);
                let (got, want) = (c[i * n + j] as f64, 0.25 + dot(row, &rb[j * k..][..k]) + low_rank);
                assert!(
                    (got - want).abs() < 2e-6 * k as f64,
                    "{m} {n} {k} at {i}, {j}: {got} {want}"
                );
            }
        }
    }
}

#[test]
fn codes_give_the_bits_of_the_dequantized_values() {
    backends().into_iter().for_each(codes_on);
}

fn codes_on(backend: CpuBackend) {
    // More vectors and steps than are dequantized at a time.
    for (tokens, o, i) in [
        (40, 70, 545),
        (33, 300, 1100),
        (20, 1100, 90),
        (40, 70, 544),
        (33, 300, 1120),
        (20, 1100, 96),
    ] {
        let codes = crate::cpu::dequantize::tests::Random::new(o, i);
        for view in codes.views().into_iter().filter(|v| v.bf16) {
            let mut dense = vec![0f32; o * i];
            for (row, to) in dense.chunks_exact_mut(i).enumerate() {
                view.dequantize(row, 0, to);
            }
            let dense = rounded(&dense);
            let (x, dy) = (flat(&random((tokens, i), 1)), flat(&random((tokens, o), 2)));
            let run = |backward: bool, w: Operand| {
                let (n, k) = if backward { (i, o) } else { (o, i) };
                let mut c = vec![f32::NAN; tokens * n];
                super::run(
                    &ProductJob {
                        sizes: (tokens, n, k),
                        c: SharedSlice::new(&mut c),
                        start: CInit::Zero,
                        a: Matrix::k_inner(Operand::F32(if backward { &dy } else { &x }), k),
                        b: if backward {
                            Matrix::k_outer(w, i)
                        } else {
                            Matrix::k_inner(w, i)
                        },
                        fused_lora: None,
                    },
                    backend,
                );
                c.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            for backward in [false, true] {
                let (got, want) = (
                    run(backward, Operand::Quantized(view)),
                    run(backward, Operand::Bf16(&dense)),
                );
                assert!(got == want, "{tokens} {o} {i} backward {backward} {:?}", view.codes);
            }
        }
    }
}

#[test]
fn nan_infinity_and_ties_survive_the_rounding() {
    backends().into_iter().for_each(odd_numbers);
}

fn odd_numbers(backend: CpuBackend) {
    let mut a = vec![0f32; 32 * 32];
    let odd = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::from_bits(0x7FFF_FFFF),
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        -0.0,
        3e38,
    ];
    for (i, x) in odd.iter().enumerate() {
        a[i * 32 + i] = *x;
    }
    let identity: Vec<f32> = (0..32 * 32).map(|i| if i % 33 == 0 { 1.0 } else { 0.0 }).collect();
    let mut c = vec![0f32; 32 * 32];
    super::run(
        &ProductJob {
            sizes: (32, 32, 32),
            c: SharedSlice::new(&mut c),
            start: CInit::Zero,
            a: Matrix::k_inner(StoredElements::F32(&a), 32),
            b: Matrix::k_inner(StoredElements::F32(&identity), 32),
            fused_lora: None,
        },
        backend,
    );
    for (i, x) in odd.iter().enumerate() {
        let (got, want) = (c[i * 32 + i], bf16::from_f32(*x).to_f32());
        assert!(
            got == want || (got.is_nan() && (want.is_nan() || want.is_infinite())),
            "{x}: {got} {want}"
        );
    }
}

#[test]
fn bit_equal_for_any_number_of_threads() {
    backends().into_iter().for_each(threads_on);
}

fn threads_on(backend: CpuBackend) {
    let (m, n, k, rank) = (130, 330, 1100, 16);
    let operand = |rows: usize, columns: usize, seed| flat(&random((rows, columns), seed));
    let (a, b) = (operand(m, k, 1), operand(n, k, 2));
    let (down, up, narrow) = (operand(rank, k, 3), operand(n, rank, 4), rounded(&b));
    let weights = [
        Matrix::k_inner(Operand::F32(&b), k),
        Matrix::k_inner(Operand::Bf16(&narrow), k),
        Matrix::k_outer(Operand::Bf16(&narrow), n),
    ];
    for weight in weights {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let (mut c, mut u) = (vec![0f32; m * n], vec![0f32; m * rank]);
            pool.install(|| {
                let fused_lora = FusedLora {
                    rank,
                    down: Matrix::k_inner(Operand::F32(&down), k),
                    up: Matrix::k_inner(Operand::F32(&up), rank),
                    scale: 0.5,
                    u: &mut u,
                };
                let operands = (Matrix::k_inner(Operand::F32(&a), k), weight);
                product_with(
                    backend,
                    (m, n, k),
                    &mut c,
                    CInit::Zero,
                    operands,
                    Rounding::Bf16,
                    fused_lora,
                )
            });
            c.into_iter().chain(u).map(f32::to_bits).collect::<Vec<_>>()
        };
        let one = run(1);
        assert!(one == run(2) && one == run(5));
    }
}

/// On AMX tiles of a bf16 weight are loaded from where it lies if C has few rows.
#[test]
fn a_few_rows_have_the_bits_of_many() {
    backends().into_iter().for_each(few_rows_on);
}

#[test]
fn only_few_rows_of_bf16_are_read_where_they_lie() {
    let (wide, narrow) = ([0f32; 64], [bf16::ZERO; 64]);
    let inner = Matrix::k_inner(Operand::Bf16(&narrow), 8);
    assert!(elements(&inner, MOST_ROWS).is_some() && elements(&inner, MOST_ROWS + 1).is_none());
    assert!(elements(&Matrix::k_outer(Operand::Bf16(&narrow), 8), 5).is_none());
    assert!(elements(&Matrix::k_inner(Operand::F32(&wide), 8), 5).is_none());
}

fn few_rows_on(backend: CpuBackend) {
    let most = MOST_ROWS + 1;
    // Whole and incomplete steps and panels of the weight, one chunk of k and more, with and without LoRA rank.
    for (n, k, rank) in [(64, 64, 0), (70, 50, 5), (33, 1100, 16), (640, 96, 0), (96, 2080, 40)] {
        let operand = |rows: usize, columns: usize, seed| flat(&random((rows, columns), seed));
        let (many, b) = (operand(most, k, 1), rounded(&operand(n, k, 2)));
        let (down, up, bias) = (operand(rank, k, 3), operand(n, rank, 4), flat(&random(n, 5)));
        let run = |m: usize| {
            let (mut c, mut u) = (vec![0.5; m * n], vec![f32::NAN; m * rank]);
            let operands = (
                Matrix::k_inner(Operand::F32(&many[..m * k]), k),
                Matrix::k_inner(Operand::Bf16(&b), k),
            );
            let start = match k {
                50 => CInit::C,
                64 | 96 => CInit::Zero,
                _ => CInit::Bias(&bias[..]),
            };
            if rank == 0 {
                product_on(
                    backend,
                    (m, n, k),
                    &mut c,
                    start,
                    operands.0,
                    operands.1,
                    Rounding::Bf16,
                );
            } else {
                let fused_lora = FusedLora {
                    rank,
                    down: Matrix::k_inner(Operand::F32(&down), k),
                    up: Matrix::k_inner(Operand::F32(&up), rank),
                    scale: 0.5,
                    u: &mut u,
                };
                product_with(backend, (m, n, k), &mut c, start, operands, Rounding::Bf16, fused_lora);
            }
            c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let want = run(most);
        for m in [5, 8, 16, 17, 32, 41, MOST_ROWS] {
            assert!(run(m) == want[..m * n], "{m} x {n} x {k}, rank {rank}");
        }
    }
}
