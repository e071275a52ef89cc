//! Every backend, compared with a plain loop in f64.

use super::*;
use crate::oracle::{flat, random};
use half::bf16;

const SIZES: [GemmSizes; 13] = [
    (1, 1, 1),
    (1, 40, 70),
    (3, 100, 9),
    (5, 33, 17),
    (7, 16, 1100),
    (13, 16, 17),
    (30, 70, 400),
    (64, 64, 64),
    (100, 20, 391),
    (30, 130, 600),
    (515, 40, 24),
    (16, 130, 70),
    (4200, 20, 33),
];

fn backends() -> Vec<CpuBackend> {
    testable()
}

/// One operand of `count` vectors of `k` elements in every storage: f32 or bf16, contiguous in k or across vectors.
struct Operand {
    wide: Vec<f32>,
    narrow: Vec<bf16>,
    count: usize,
    k: usize,
}

impl Operand {
    fn new(count: usize, k: usize, seed: u64) -> Self {
        let wide = flat(&random((count, k), seed));
        let narrow = wide.iter().map(|x| bf16::from_f32(*x)).collect();
        Self { wide, narrow, count, k }
    }

    fn matrix(&self, bf16: bool, k_contiguous: bool) -> Matrix<'_> {
        let values = if bf16 {
            StoredElements::Bf16(&self.narrow)
        } else {
            StoredElements::F32(&self.wide)
        };
        if k_contiguous {
            Matrix::k_inner(values, self.k)
        } else {
            Matrix::k_outer(values, self.count)
        }
    }

    /// Returns the operand of the product, `[count, k]`; `narrow`: rounded to bf16.
    fn all(&self, bf16: bool, k_contiguous: bool, narrow: bool) -> Vec<f64> {
        let of = |place: usize| match (self.at(bf16, k_contiguous, place / self.k, place % self.k), narrow) {
            (x, true) => bf16::from_f32(x as f32).to_f64(),
            (x, false) => x,
        };
        (0..self.count * self.k).map(of).collect()
    }

    fn at(&self, bf16: bool, k_contiguous: bool, i: usize, p: usize) -> f64 {
        let index = if k_contiguous {
            i * self.k + p
        } else {
            p * self.count + i
        };
        if bf16 {
            self.narrow[index].to_f64()
        } else {
            self.wide[index] as f64
        }
    }
}

/// Checks that every product is the sum of the products of its operands, rounded to bf16 if the backend rounds, for
/// all sizes. `bound(k)`: the largest error allowed for sums of k products of numbers of size 1.
fn check(backend: CpuBackend, rounding: Rounding, bound: impl Fn(f64) -> f64) {
    let narrow = backend.rounds(rounding);
    // Emulation is slow.
    let emulated = !backend.available();
    for sizes in SIZES.into_iter().filter(|(m, ..)| !emulated || *m < 100) {
        let (m, n, k) = sizes;
        let (a, b) = (Operand::new(m, k, 1), Operand::new(n, k, 2));
        let bias = flat(&random(n, 3));
        for kind in 0..16 {
            let (a16, ak, b16, bk) = (kind & 1 > 0, kind & 2 > 0, kind & 4 > 0, kind & 8 > 0);
            let (wide_a, wide_b) = (a.all(a16, ak, narrow), b.all(b16, bk, narrow));
            let rows = wide_a
                .chunks_exact(k)
                .flat_map(|a| wide_b.chunks_exact(k).map(move |b| (a, b)));
            let products: Vec<f64> = rows.map(|(a, b)| a.iter().zip(b).map(|(a, b)| a * b).sum()).collect();
            for (which, start) in [CInit::Zero, CInit::C, CInit::Bias(&bias[..])].into_iter().enumerate() {
                let mut c = vec![if which == 1 { 0.5 } else { f32::NAN }; m * n];
                product_on(
                    backend,
                    sizes,
                    &mut c,
                    start,
                    a.matrix(a16, ak),
                    b.matrix(b16, bk),
                    rounding,
                );
                for i in 0..m {
                    for j in 0..n {
                        let from = [0.0, 0.5, bias[j] as f64][which];
                        let want = from + products[i * n + j];
                        let got = c[i * n + j] as f64;
                        assert!(
                            (got - want).abs() <= bound(k as f64),
                            "{backend:?} {sizes:?} kind {kind} start {which} at {i}, {j}: {got} {want}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn every_backend_agrees_with_a_plain_loop() {
    for backend in backends() {
        for rounding in [Rounding::Exact, Rounding::Bf16] {
            // A sum of size √k, rounded k times by 2^-24.
            check(backend, rounding, |k| 1e-6 + 4e-7 * k);
        }
    }
}

#[test]
fn bit_equal_for_any_number_of_threads() {
    let sizes = (700, 330, 900);
    let (a, b) = (Operand::new(700, 900, 1), Operand::new(330, 900, 2));
    for backend in backends() {
        for rounding in [Rounding::Exact, Rounding::Bf16] {
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let mut c = vec![0f32; 700 * 330];
                pool.install(|| {
                    product_on(
                        backend,
                        sizes,
                        &mut c,
                        CInit::Zero,
                        a.matrix(false, true),
                        b.matrix(true, true),
                        rounding,
                    )
                });
                c.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            let one = run(1);
            assert!(one == run(2) && one == run(7), "{backend:?} {rounding:?}");
        }
    }
}

/// Rows of the same product do not change each other: generation with `same_bits` depends on this.
#[test]
fn a_row_has_the_same_bits_among_any_number_of_rows() {
    for (n, k) in [(16, 24), (24, 40), (90, 700)] {
        let (a, b) = (Operand::new(100, k, 1), Operand::new(n, k, 2));
        for backend in backends() {
            for rounding in [Rounding::Exact, Rounding::Bf16] {
                let run = |m: usize, bf16: bool| {
                    let mut c = vec![0f32; m * n];
                    let (a, b) = (a.matrix(false, true), b.matrix(bf16, true));
                    product_on(backend, (m, n, k), &mut c, CInit::Zero, a, b, rounding);
                    c.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
                };
                for bf16 in [false, true] {
                    let all = run(100, bf16);
                    for m in [9, 10, 15, 28, 40] {
                        assert!(
                            all[..m * n] == run(m, bf16),
                            "{backend:?} {rounding:?} bf16 {bf16}: {m} rows of {n}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn blocks_cover_c_exactly() {
    for (m, n) in [(1, 1), (512, 896), (2048, 4864), (16, 16), (5000, 33)] {
        for threads in [1, 2, 16] {
            let (down, across) = grid::grid(m, n, threads);
            let rows: usize = (0..down).map(|i| grid::part(m, down, i, 1).1).sum();
            let columns: usize = (0..across).map(|i| grid::part(n, across, i, 32).1).sum();
            assert_eq!((rows, columns), (m, n));
        }
    }
}

#[test]
fn fused_lora_agrees_on_every_backend() {
    for (m, n, k, rank) in [
        (3, 100, 40, 5),
        (30, 70, 400, 16),
        (100, 130, 600, 33),
        (40, 50, 60, 100),
    ] {
        let (a, b) = (Operand::new(m, k, 1), Operand::new(n, k, 2));
        let (down, up) = (Operand::new(rank, k, 3), Operand::new(n, rank, 4));
        let u_at = |i: usize, r: usize| -> f64 {
            let terms = (0..k).map(|p| a.at(false, true, i, p) * down.at(false, true, r, p));
            0.5 * terms.sum::<f64>()
        };
        for backend in backends() {
            let (mut c, mut u) = (vec![0.25f32; m * n], vec![f32::NAN; m * rank]);
            let fused_lora = FusedLora {
                rank,
                down: down.matrix(false, true),
                up: up.matrix(false, true),
                scale: 0.5,
                u: &mut u,
            };
            let operands = (a.matrix(false, true), b.matrix(true, true));
            product_with(
                backend,
                (m, n, k),
                &mut c,
                CInit::C,
                operands,
                Rounding::Exact,
                fused_lora,
            );
            for i in 0..m {
                let want_u: Vec<f64> = (0..rank).map(|r| u_at(i, r)).collect();
                for (r, want) in want_u.iter().enumerate() {
                    let got = u[i * rank + r] as f64;
                    assert!((got - want).abs() < 1e-4, "{backend:?} u at {i}, {r}: {got} {want}");
                }
                for j in 0..n {
                    let base: f64 = (0..k).map(|p| a.at(false, true, i, p) * b.at(true, true, j, p)).sum();
                    let added: f64 = (0..rank).map(|r| want_u[r] * up.at(false, true, j, r)).sum();
                    let (got, want) = (c[i * n + j] as f64, 0.25 + base + added);
                    assert!(
                        (got - want).abs() < 5e-4,
                        "{backend:?} {m} {n} {k} {rank} at {i}, {j}: {got} {want}"
                    );
                }
            }
        }
    }
}
