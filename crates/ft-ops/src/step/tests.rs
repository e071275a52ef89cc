//! Every rule compared with a plain loop, 8-bit states, stochastic rounding.

use super::*;
use crate::master;
use crate::oracle::{assert_same_on_any_threads, flat, random};
use ft_base::rng::Stream;

const RULES: [UpdateRule; 6] = [
    UpdateRule::Adamw {
        betas: [0.9, 0.999],
        eps: 1e-8,
    },
    UpdateRule::Sgd { momentum: 0.0 },
    UpdateRule::Sgd { momentum: 0.9 },
    UpdateRule::Lion { betas: [0.9, 0.99] },
    UpdateRule::Adafactor,
    UpdateRule::Sign,
];

/// `[R, C]`: not a multiple of a block, more than one chunk.
const SHAPE: (usize, usize) = (67, 301);

#[derive(Clone, Copy, PartialEq)]
enum PrecisionCase {
    Whole,
    Master,
    Stochastic(u64),
}

/// Returns the moments of a rule for a weight of `SHAPE`.
fn moments(rule: UpdateRule, int8: bool) -> (Option<Moment>, Option<Moment>) {
    let (r, c) = SHAPE;
    let zeros = |n| Some(Moment::zeros(n, int8 && rule != UpdateRule::Adafactor, &Device::Cpu).unwrap());
    match rule {
        UpdateRule::Adamw { .. } => (zeros(r * c), zeros(r * c)),
        UpdateRule::Lion { .. } => (zeros(r * c), None),
        UpdateRule::Sgd { momentum } if momentum > 0.0 => (zeros(r * c), None),
        UpdateRule::Adafactor => (zeros(r), zeros(c)),
        _ => (None, None),
    }
}

/// Runs `steps` steps on one weight. Returns its exact values, and the weight in its storage type.
fn run(rule: UpdateRule, int8: bool, kind: PrecisionCase, steps: u64, lr: f64, decay: f64) -> (Vec<f32>, Tensor) {
    let start = random(SHAPE, 1);
    let (weight, low) = match kind {
        PrecisionCase::Whole => (start, None),
        _ => {
            let weight = start.to_dtype(DType::BF16).unwrap();
            (
                weight,
                Some(Tensor::zeros(start.elem_count(), DType::I16, &Device::Cpu).unwrap()),
            )
        }
    };
    let (first, second) = moments(rule, int8);
    for step_number in 1..=steps {
        let gradient = random(SHAPE, 100 + step_number);
        let precision = match (kind, &low) {
            (PrecisionCase::Master, Some(low)) => Precision::Master(low),
            (PrecisionCase::Stochastic(seed), _) => {
                Precision::Stochastic(Rng::new(seed, Stream::Rounding, &[step_number]))
            }
            _ => Precision::Whole,
        };
        let item = ParameterStep {
            weight: &weight,
            precision,
            gradient: &gradient,
            first: first.as_ref(),
            second: second.as_ref(),
            lr,
            weight_decay: decay,
            step: step_number,
            begin: 0,
        };
        step(rule, &[item], 0.7).unwrap();
    }
    let exact = match (kind, &low) {
        (PrecisionCase::Master, Some(low)) => join(&weight, low).unwrap(),
        _ => flat(&weight.to_dtype(DType::F32).unwrap()),
    };
    (exact, weight)
}

/// Computes the rules in f64, element by element, as in the papers.
fn plain(rule: UpdateRule, steps: u64, lr: f64, decay: f64) -> Vec<f64> {
    let (r, c) = SHAPE;
    let mut w: Vec<f64> = flat(&random(SHAPE, 1)).iter().map(|x| *x as f64).collect();
    let (mut m, mut v) = (vec![0f64; r * c], vec![0f64; r * c]);
    let (mut rows, mut columns) = (vec![0f64; r], vec![0f64; c]);
    for t in 1..=steps {
        let g: Vec<f64> = flat(&random(SHAPE, 100 + t)).iter().map(|x| 0.7 * *x as f64).collect();
        let mut size = 1.0;
        let mut u = vec![0f64; r * c];
        if rule == UpdateRule::Adafactor {
            let b2 = 1.0 - (t as f64).powf(-0.8);
            for i in 0..r {
                let mean = (0..c).map(|j| g[i * c + j].powi(2) + 1e-30).sum::<f64>() / c as f64;
                rows[i] = b2 * rows[i] + (1.0 - b2) * mean;
            }
            for j in 0..c {
                let mean = (0..r).map(|i| g[i * c + j].powi(2) + 1e-30).sum::<f64>() / r as f64;
                columns[j] = b2 * columns[j] + (1.0 - b2) * mean;
            }
            let all = rows.iter().sum::<f64>() / r as f64;
            for i in 0..r * c {
                u[i] = g[i] / (rows[i / c] * columns[i % c] / all).sqrt();
            }
            size = (u.iter().map(|x| x * x).sum::<f64>() / (r * c) as f64).sqrt().max(1.0);
        }
        for i in 0..r * c {
            let (g, x) = (g[i], w[i]);
            w[i] = match rule {
                UpdateRule::Adamw { betas: [b1, b2], eps } => {
                    m[i] = b1 * m[i] + (1.0 - b1) * g;
                    v[i] = b2 * v[i] + (1.0 - b2) * g * g;
                    let (m, v) = (m[i] / (1.0 - b1.powf(t as f64)), v[i] / (1.0 - b2.powf(t as f64)));
                    x - lr * decay * x - lr * m / (v.sqrt() + eps)
                }
                UpdateRule::Sgd { momentum } => {
                    let g = g + decay * x;
                    m[i] = if t == 1 { g } else { momentum * m[i] + g };
                    x - lr * m[i]
                }
                UpdateRule::Lion { betas: [b1, b2] } => {
                    let c = b1 * m[i] + (1.0 - b1) * g;
                    m[i] = b2 * m[i] + (1.0 - b2) * g;
                    x - lr * decay * x - lr * c.signum()
                }
                UpdateRule::Adafactor => x - lr * decay * x - lr * u[i] / size,
                UpdateRule::Sign => x - lr * g.signum(),
            };
        }
    }
    w
}

fn distance(a: &[f32], b: &[f64]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (*a as f64 - b).powi(2))
        .sum::<f64>()
        .sqrt()
}

/// Returns the distance that a rule moved the weight, the scale for differences.
fn way(b: &[f64]) -> f64 {
    distance(&flat(&random(SHAPE, 1)), b)
}

#[test]
fn every_rule_is_that_of_its_paper() {
    for rule in RULES {
        for decay in [0.0, 0.1] {
            let decay = if rule == UpdateRule::Sign { 0.0 } else { decay };
            let want = plain(rule, 5, 0.01, decay);
            let (got, _) = run(rule, false, PrecisionCase::Whole, 5, 0.01, decay);
            let error = distance(&got, &want) / way(&want);
            assert!(error < 2e-5, "{rule:?} {error}");
        }
    }
}

#[test]
fn halves_are_the_master_bit_for_bit() {
    // A start value that bf16 represents exactly: then every step must be bit-equal to f32.
    for rule in RULES {
        for int8 in [false, true] {
            let start = random(SHAPE, 1).to_dtype(DType::BF16).unwrap();
            let wide = start.to_dtype(DType::F32).unwrap();
            let narrow = start.copy().unwrap();
            let low = Tensor::zeros(start.elem_count(), DType::I16, &Device::Cpu).unwrap();
            let (a, b) = (moments(rule, int8), moments(rule, int8));
            for number in 1..=3 {
                let gradient = random(SHAPE, 100 + number);
                let item = |weight, precision, state| {
                    let (first, second): &(Option<Moment>, Option<Moment>) = state;
                    ParameterStep {
                        weight,
                        precision,
                        gradient: &gradient,
                        first: first.as_ref(),
                        second: second.as_ref(),
                        lr: 1e-4,
                        weight_decay: 0.0,
                        step: number,
                        begin: 0,
                    }
                };
                // One list: parameters do not affect each other.
                let items = [
                    item(&wide, Precision::Whole, &a),
                    item(&narrow, Precision::Master(&low), &b),
                ];
                step(rule, &items, 1.0).unwrap();
                let (want, got) = (flat(&wide), join(&narrow, &low).unwrap());
                assert!(
                    want.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{rule:?}"
                );
                let stored = narrow.flatten_all().unwrap().to_vec1::<bf16>().unwrap();
                assert!(want.iter().zip(stored).all(|(x, h)| master::split(*x).0 == h));
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    for rule in RULES {
        for int8 in [false, true] {
            for kind in [
                PrecisionCase::Whole,
                PrecisionCase::Master,
                PrecisionCase::Stochastic(3),
            ] {
                assert_same_on_any_threads(|| {
                    let (exact, weight) = run(rule, int8, kind, 3, 0.01, 0.1);
                    let n = exact.len();
                    let weight = weight.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
                    vec![Tensor::from_vec(exact, n, &Device::Cpu).unwrap(), weight]
                });
            }
        }
    }
}

#[test]
fn eight_bits_stay_near_f32() {
    for (rule, most) in [(RULES[0], 0.03), (RULES[2], 0.03), (RULES[3], 0.25)] {
        let want: Vec<f64> = run(rule, false, PrecisionCase::Whole, 30, 0.01, 0.0)
            .0
            .iter()
            .map(|x| *x as f64)
            .collect();
        let (got, _) = run(rule, true, PrecisionCase::Whole, 30, 0.01, 0.0);
        let error = distance(&got, &want) / way(&want);
        assert!(error > 1e-6 && error < most, "{rule:?} {error}");
    }
}

#[test]
fn rounding_at_random_is_right_on_average() {
    // Steps far below the last bit of bf16: with rounding to nearest the weight would not change.
    let rule = UpdateRule::Sgd { momentum: 0.0 };
    let start: Vec<f64> = flat(
        &random(SHAPE, 1)
            .to_dtype(DType::BF16)
            .unwrap()
            .to_dtype(DType::F32)
            .unwrap(),
    )
    .iter()
    .map(|x| *x as f64)
    .collect();
    let gradients: Vec<f32> = flat(&random(SHAPE, 101));
    let lr = 1e-5;
    let draws = 200;
    let mut mean = vec![0f64; start.len()];
    let mut moved = 0;
    for seed in 0..draws {
        let (got, _) = run(rule, false, PrecisionCase::Stochastic(seed), 1, lr, 0.0);
        moved += got.iter().zip(&start).filter(|(a, b)| **a as f64 != **b).count();
        mean.iter_mut()
            .zip(got)
            .for_each(|(m, x)| *m += x as f64 / draws as f64);
    }
    assert!(moved > 0);
    // The sum over elements of (moved - wanted) · sign of wanted: its standard deviation follows from the variance
    // p(1 - p).
    let (mut excess, mut variance, mut wanted) = (0.0, 0.0, 0.0);
    for ((m, w), g) in mean.iter().zip(&start).zip(&gradients) {
        let want = -lr * 0.7 * *g as f64;
        let ulp = f32::from_bits((*w as f32).to_bits() & 0x7F80_0000) as f64 / 128.0;
        let p = (want.abs() / ulp).min(1.0);
        excess += (m - w - want) * want.signum();
        wanted += want.abs();
        variance += ulp * ulp * p * (1.0 - p) / draws as f64;
    }
    assert!(excess.abs() < 4.0 * variance.sqrt(), "{excess} {}", variance.sqrt());
    // The test can detect a bias of a tenth of the movement.
    assert!(4.0 * variance.sqrt() < 0.1 * wanted, "{} {wanted}", variance.sqrt());
}

#[test]
fn what_does_not_fit_is_refused() {
    let (weight, gradient) = (random((4, 8), 1), random((4, 8), 2));
    let moment = |n| Moment::zeros(n, false, &Device::Cpu).unwrap();
    let (right, wrong) = (moment(32), moment(31));
    let narrow = weight.to_dtype(DType::BF16).unwrap();
    let item = |weight, gradient, first| ParameterStep {
        weight,
        precision: Precision::Whole,
        gradient,
        first,
        second: None,
        lr: 0.1,
        weight_decay: 0.0,
        step: 1,
        begin: 0,
    };
    let rule = UpdateRule::Sgd { momentum: 0.9 };
    step(rule, &[item(&weight, &gradient, Some(&right))], 1.0).unwrap();
    let other = random((8, 4), 1);
    for bad in [
        item(&weight, &gradient, Some(&wrong)),
        item(&weight, &gradient, None),
        item(&weight, &other, Some(&right)),
        item(&narrow, &gradient, Some(&right)),
    ] {
        assert!(step(rule, &[bad], 1.0).is_err());
    }
}
