//! Routing against its definition in f64, and its gradient against differences.

use super::*;
use crate::oracle::random;
use crate::update::to_f32_vec;
use candle_core::Device;

const PLAIN: RouterSpec = RouterSpec {
    score: Score::Softmax,
    top_k: 2,
    renormalize: false,
    scale: 1.0,
    groups: None,
};

fn grouped(score: GroupScore) -> Option<ExpertGroups> {
    Some(ExpertGroups {
        count: 3,
        chosen: 2,
        score,
    })
}

fn specs() -> Vec<RouterSpec> {
    vec![
        PLAIN,
        RouterSpec {
            renormalize: true,
            ..PLAIN
        },
        RouterSpec {
            score: Score::Sigmoid,
            renormalize: true,
            scale: 2.5,
            groups: grouped(GroupScore::TwoLargest),
            ..PLAIN
        },
        RouterSpec {
            scale: 16.0,
            groups: grouped(GroupScore::Largest),
            top_k: 3,
            ..PLAIN
        },
    ]
}

/// Weights of all experts in f64 for given choices.
fn weights64(spec: &RouterSpec, z: &[f64], chosen: &[u32]) -> Vec<f64> {
    let scores: Vec<f64> = match spec.score {
        Score::Sigmoid => z.iter().map(|z| 1.0 / (1.0 + (-z).exp())).collect(),
        // `two_level` has tests of its own.
        Score::Softmax | Score::TwoLevel => {
            let sum: f64 = z.iter().map(|z| z.exp()).sum();
            z.iter().map(|z| z.exp() / sum).collect()
        }
    };
    let sum: f64 = chosen.iter().map(|&e| scores[e as usize]).sum();
    let divisor = if spec.renormalize { sum } else { 1.0 };
    chosen
        .iter()
        .map(|&e| scores[e as usize] / divisor * f64::from(spec.scale))
        .collect()
}

#[test]
fn the_best_experts_with_their_weights() {
    let (n, e) = (7, 6);
    let logits = random((n, e), 1);
    let z = to_f32_vec(&logits).unwrap();
    for spec in specs() {
        let routing = spec.route_on_host(&logits, None).unwrap();
        assert_eq!(routing.tokens(), n);
        assert_eq!(routing.counts().iter().sum::<usize>(), n * spec.top_k);
        for token in 0..n {
            let row: Vec<f64> = z[token * e..][..e].iter().map(|x| f64::from(*x)).collect();
            let chosen = &routing.chosen[token * spec.top_k..][..spec.top_k];
            // Every expert that was not chosen and could have been has a lower logit.
            let worst = chosen.iter().map(|&c| row[c as usize]).fold(f64::INFINITY, f64::min);
            let size = e / spec.groups.map_or(1, |g| g.count);
            let mut groups: Vec<usize> = chosen.iter().map(|c| *c as usize / size).collect();
            groups.sort_unstable();
            groups.dedup();
            assert!(groups.len() <= spec.groups.map_or(1, |g| g.chosen).max(1));
            for other in (0..e).filter(|o| !chosen.contains(&(*o as u32)) && groups.contains(&(o / size))) {
                assert!(row[other] <= worst);
            }
            let want = weights64(&spec, &row, chosen);
            for (got, want) in routing.weights[token * spec.top_k..].iter().zip(want) {
                assert!((f64::from(*got) - want).abs() < 1e-5 * want.max(1.0), "{got} {want}");
            }
        }
        let mut places: Vec<u32> = Vec::new();
        for expert in 0..e {
            let of = &routing.order[routing.starts[expert]..routing.starts[expert + 1]];
            assert!(of.is_sorted_by(|a, b| a < b));
            let all = of.iter().all(|p| routing.chosen[*p as usize] == expert as u32);
            assert!(all, "{of:?}");
            places.extend(of);
        }
        places.sort_unstable();
        assert_eq!(places, (0..(n * spec.top_k) as u32).collect::<Vec<_>>());
    }
}

#[test]
fn a_correction_changes_the_choice_only() {
    let spec = RouterSpec {
        score: Score::Sigmoid,
        top_k: 1,
        ..PLAIN
    };
    let logits = Tensor::new(&[[1.0f32, 0.0]], &Device::Cpu).unwrap();
    let correction = Tensor::new(&[0.0f32, 5.0], &Device::Cpu).unwrap();
    assert_eq!(spec.route_on_host(&logits, None).unwrap().chosen, [0]);
    let corrected = spec.route_on_host(&logits, Some(&correction)).unwrap();
    assert_eq!((corrected.chosen, corrected.weights), (vec![1], vec![0.5]));
}

#[test]
fn groups_are_rated_by_one_or_two_scores() {
    let choose = |score| {
        let spec = RouterSpec {
            score: Score::Sigmoid,
            top_k: 1,
            groups: Some(ExpertGroups {
                count: 2,
                chosen: 1,
                score,
            }),
            ..PLAIN
        };
        let logits = Tensor::new(&[[2.0f32, -9.0, 1.0, 1.0]], &Device::Cpu).unwrap();
        spec.route_on_host(&logits, None).unwrap().chosen
    };
    assert_eq!(choose(GroupScore::Largest), [0]);
    assert_eq!(choose(GroupScore::TwoLargest), [2]);
}

#[test]
fn gradients_as_differences() {
    let (n, e) = (3, 6);
    for (spec, balanced) in specs().into_iter().map(|s| (s, s.score == Score::Softmax)) {
        let logits = random((n, e), 5);
        let routing = spec.route_on_host(&logits, None).unwrap();
        let d_weights = to_f32_vec(&random((n, spec.top_k), 6)).unwrap();
        let extra = LogitLoss {
            balance: if balanced {
                to_f32_vec(&random((1, e), 7)).unwrap()
            } else {
                Vec::new()
            },
            z: if balanced { 0.3 } else { 0.0 },
            two_level: None,
        };
        let loss = |z: &[f64]| -> f64 {
            let mut sum = 0.0;
            for token in 0..n {
                let row = &z[token * e..][..e];
                let chosen = &routing.chosen[token * spec.top_k..][..spec.top_k];
                let weights = weights64(&spec, row, chosen);
                let d = &d_weights[token * spec.top_k..];
                sum += weights.iter().zip(d).map(|(w, d)| w * f64::from(*d)).sum::<f64>();
                let total: f64 = row.iter().map(|z| z.exp()).sum();
                sum += row
                    .iter()
                    .zip(&extra.balance)
                    .map(|(z, b)| z.exp() / total * f64::from(*b))
                    .sum::<f64>();
                sum += f64::from(extra.z) * total.ln().powi(2);
            }
            sum
        };
        let z: Vec<f64> = to_f32_vec(&logits).unwrap().iter().map(|x| f64::from(*x)).collect();
        let got = to_f32_vec(&routing.logits_backward(&d_weights, &extra).unwrap()).unwrap();
        for i in 0..z.len() {
            let at = |step: f64| {
                let mut moved = z.clone();
                moved[i] += step;
                loss(&moved)
            };
            let want = (at(1e-5) - at(-1e-5)) / 2e-5;
            assert!(
                (f64::from(got[i]) - want).abs() < 1e-4 * want.abs().max(1.0),
                "{spec:?} {i}: {} {want}",
                got[i]
            );
        }
    }
}

#[test]
fn rows_to_an_expert_and_back() {
    let x = random((4, 3), 1);
    // Expert 1 has the tokens 1 and 3.
    let logits = Tensor::new(&[[1.0f32, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 2.0]], &Device::Cpu).unwrap();
    let routing = RouterSpec { top_k: 1, ..PLAIN }.route_on_host(&logits, None).unwrap();
    let assignment = routing.assign(&Device::Cpu, false).unwrap();
    let of = assignment.of(1..2).unwrap().unwrap();
    let part = of.gather(&x).unwrap();
    let (all, some) = (to_f32_vec(&x).unwrap(), to_f32_vec(&part).unwrap());
    assert_eq!(some, [&all[3..6], &all[9..]].concat());
    scale_rows(&part, &Tensor::new(&[2.0f32, -1.0], &Device::Cpu).unwrap()).unwrap();
    let numbers = assignment.numbers().unwrap();
    row_products(&part, &part, &of.part(&numbers).unwrap()).unwrap();
    let products = to_f32_vec(&numbers).unwrap();
    let square = |v: &[f32]| v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    assert_eq!(products[..2], [0.0, 0.0]);
    assert!((f64::from(products[2]) - 4.0 * square(&all[3..6])).abs() < 1e-5);
    row_products_add(&part, &part.narrow(0, 1, 1).unwrap(), &of.part(&numbers).unwrap()).unwrap();
    let more = to_f32_vec(&numbers).unwrap();
    assert!((f64::from(more[3]) - 2.0 * square(&all[9..])).abs() < 1e-5);
    of.add_to(&x, &part).unwrap();
    let sum = to_f32_vec(&x).unwrap();
    assert_eq!(sum[..3], all[..3]);
    assert!(sum[3..6].iter().zip(&all[3..6]).all(|(s, x)| *s == x + 2.0 * x));
    assert!(sum[9..].iter().all(|s| *s == 0.0));
    assert!(of.gather(&random((3, 3), 1)).is_err());
    assert!(assignment.of(2..3).is_err());
    assert_eq!(assignment.units(), [0..1, 1..2]);
}

#[test]
fn bad_input() {
    let logits = random((2, 6), 1);
    let many = RouterSpec { top_k: 7, ..PLAIN };
    assert!(many.route(&logits, None).is_err());
    let groups = RouterSpec {
        top_k: 5,
        groups: grouped(GroupScore::Largest),
        ..PLAIN
    };
    assert!(groups.route(&logits, None).is_err(), "two groups have four experts");
    let nan = Tensor::new(&[[f32::NAN, 0.0]], &Device::Cpu).unwrap();
    assert_eq!(
        PLAIN.route(&nan, None).unwrap_err().kind(),
        ft_base::ErrorKind::NonFinite
    );
}
