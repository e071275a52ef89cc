//! Tests of optimizer states: created, measured, saved, restored; masked weights; corrections.

use super::*;
use crate::optim::UpdateMasks;
use crate::optim::config::{OptimizerName, StateDtype};
use std::collections::BTreeSet;

/// The defaults, changed by words.
fn settings(words: &str) -> OptimizerConfig {
    let mut settings = OptimizerConfig::default();
    for word in words.split_whitespace() {
        match word {
            "momentum" => settings.momentum = 0.9,
            "betas" => settings.betas = [0.9, 0.99],
            "int8" => settings.state = StateDtype::Int8,
            _ => match (OptimizerName::parse(word), Master::parse(word)) {
                (Some(name), _) => settings.name = name,
                (_, Some(master)) => settings.master = master,
                _ => panic!("{word}"),
            },
        }
    }
    settings
}

fn tensor(shape: &[usize], seed: u64) -> Tensor {
    let rng = Rng::new(seed, Stream::Init, &[]);
    let n = shape.iter().product::<usize>() as u64;
    let values: Vec<f32> = (0..n).map(|i| rng.normal(i)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn values(t: &Tensor) -> Vec<f32> {
    update::to_f32_vec(t).unwrap()
}

fn update(o: &mut Optimizer, name: &str, weight: &Tensor, gradient: &Tensor, lr: f64, factor: f32) -> Result<()> {
    let update = Update {
        name,
        weight,
        gradient,
        subset: None,
    };
    o.update_all(&[update], lr, factor)
}

const KINDS: [&str; 8] = [
    "",
    "int8",
    "sgd",
    "sgd momentum",
    "sgd momentum int8",
    "lion betas",
    "lion int8",
    "adafactor",
];

#[test]
fn a_value_between_two_numbers_is_rounded_as_in_a_store() {
    // Halfway between 1 and the next bf16 number.
    let (x, up) = (1.0 + 2f32.powi(-8), 1.0 + 2f32.powi(-7));
    for (master, exact) in [("f32", x), ("stochastic", up)] {
        let weight = tensor(&[1], 1).to_dtype(DType::BF16).unwrap();
        let mut o = Optimizer::new(settings(master));
        o.restore_weight("w", &weight, &[x]).unwrap();
        assert_eq!(
            (values(&weight), o.exact("w", &weight).unwrap()),
            (vec![up], vec![exact])
        );
    }
}

#[test]
fn what_is_held_is_what_the_plan_says() {
    for lines in KINDS {
        for master in ["f32", "stochastic"] {
            let s = settings(&format!("{lines} {master}"));
            for shape in [vec![80, 100], vec![30, 40], vec![70], vec![5000]] {
                for dtype in [DType::F32, DType::BF16] {
                    let weight = tensor(&shape, 1).to_dtype(dtype).unwrap();
                    let mut o = Optimizer::new(s.clone());
                    update(&mut o, "w", &weight, &tensor(&shape, 2), 1e-3, 1.0).unwrap();
                    let n: usize = shape.iter().product();
                    let want = Optimizer::state_bytes(&s, &shape)
                        + n as u64 * Optimizer::master_bytes(&s, dtype == DType::BF16);
                    assert_eq!(o.bytes(), want, "{lines} {master} {shape:?}");
                }
            }
        }
    }
    // AdamW: 8 bytes per element; 8-bit: 2 bytes, and two scales per 256 elements.
    assert_eq!(Optimizer::state_bytes(&settings(""), &[64, 128]), 8 * 64 * 128);
    let int8 = Optimizer::state_bytes(&settings(KINDS[1]), &[64, 128]);
    assert_eq!(int8, 2 * 64 * 128 + 2 * 4 * 32);
    assert_eq!(Optimizer::state_bytes(&settings(KINDS[7]), &[64, 128]), 4 * (64 + 128));
}

#[test]
fn a_saved_state_goes_on_with_the_same_bits() {
    for lines in KINDS {
        for dtype in [DType::F32, DType::BF16] {
            for master in ["f32", "stochastic"] {
                let s = settings(&format!("{lines} {master}"));
                let weight = tensor(&[80, 100], 1).to_dtype(dtype).unwrap();
                let gradient = tensor(&[80, 100], 2);
                let mut o = Optimizer::new(s.clone()).with_seed(4);
                let step = |o: &mut Optimizer, weight: &Tensor, number: u64| {
                    o.begin(number);
                    update(o, "w", weight, &gradient, 1e-3, 0.5).unwrap();
                };
                (1..=3).for_each(|k| step(&mut o, &weight, k));

                let other = weight.zeros_like().unwrap();
                let mut p = Optimizer::new(s).with_seed(4);
                p.restore_weight("w", &other, &o.exact("w", &weight).unwrap()).unwrap();
                for saved in o.saved() {
                    let parts = saved
                        .parts
                        .iter()
                        .map(|(n, t)| (n.to_string(), t.copy().unwrap()))
                        .collect();
                    p.restore_state(saved.name, saved.step, parts, None).unwrap();
                }
                (4..=6).for_each(|k| {
                    step(&mut o, &weight, k);
                    step(&mut p, &other, k);
                });
                let (a, b) = (o.exact("w", &weight).unwrap(), p.exact("w", &other).unwrap());
                assert!(
                    a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{lines} {master}"
                );
            }
        }
    }
}

#[test]
fn a_state_that_is_not_whole_is_refused() {
    let mut o = Optimizer::new(settings(""));
    let codes = Tensor::zeros(300, DType::U8, &Device::Cpu).unwrap();
    let scales = |n: usize| Tensor::zeros(n, DType::F32, &Device::Cpu).unwrap();
    let mut restore = |parts: &[(&str, Tensor)]| {
        let parts = parts.iter().map(|(n, t)| (n.to_string(), t.clone())).collect();
        o.restore_state("w", 1, parts, None)
    };
    restore(&[("m.codes", codes.clone()), ("m.scales", scales(2)), ("v", scales(300))]).unwrap();
    assert!(restore(&[("m.codes", codes.clone())]).is_err());
    assert!(restore(&[("m.codes", codes.clone()), ("m.scales", scales(3))]).is_err());
    assert!(restore(&[("m", codes)]).is_err());
    assert!(restore(&[("x", scales(3))]).is_err());
    // A wrong size is an error when the state is used.
    restore(&[("m", scales(4)), ("v", scales(4))]).unwrap();
    assert!(update(&mut o, "w", &tensor(&[3], 1), &tensor(&[3], 2), 0.1, 1.0).is_err());
}

#[test]
fn a_masked_update_changes_its_part_and_no_more() {
    for (lines, scattered) in [("", false), (KINDS[1], true), (KINDS[7], true), (KINDS[5], false)] {
        for dtype in [DType::F32, DType::BF16] {
            let s = settings(lines);
            let shape = [300, 90];
            let n = 27_000;
            let masks = UpdateMasks::new(0.3, scattered, 1, 3, BTreeSet::new());
            let subset = masks.of("w", n).unwrap();
            let (weight, gradient) = (tensor(&shape, 1).to_dtype(dtype).unwrap(), tensor(&shape, 2));
            let before = values(&weight);
            let part = index_subset::gather(&gradient, &subset).unwrap();
            let small = index_subset::gather(&weight, &subset).unwrap();
            let mut o = Optimizer::new(s.clone());
            for number in 1..=2 {
                o.begin(number);
                let update = Update {
                    name: "w",
                    weight: &weight,
                    gradient: &part,
                    subset: Some(subset),
                };
                o.update_all(&[update], 1e-4, 1.0).unwrap();
            }
            assert_eq!(
                o.bytes(),
                Optimizer::state_bytes(&s, &[subset.len])
                    + n as u64 * Optimizer::master_bytes(&s, dtype == DType::BF16)
            );
            // Equal to an update of the active elements alone.
            let mut alone = Optimizer::new(s);
            (0..2).for_each(|_| update(&mut alone, "w", &small, &part, 1e-4, 1.0).unwrap());
            let want = alone.exact("w", &small).unwrap();
            let mut exact = o.exact("w", &weight).unwrap();
            for (i, w) in want.iter().enumerate() {
                assert_eq!(exact[subset.at(i)], *w);
                assert_ne!(exact[subset.at(i)], before[subset.at(i)]);
                exact[subset.at(i)] = before[subset.at(i)];
            }
            assert_eq!(exact, before);
        }
    }
}

#[test]
fn corrections_keep_no_state_and_lose_nothing_small() {
    for (sign, master) in [
        (false, "f32"),
        (true, "f32"),
        (false, "stochastic"),
        (true, "stochastic"),
    ] {
        let mut o = Optimizer::new(settings(master));
        let weight = tensor(&[200, 100], 1).to_dtype(DType::BF16).unwrap();
        let before = values(&weight);
        let gradient = tensor(&[200, 100], 2);
        let lr = 1e-5;
        for number in 1..=100 {
            o.begin(number);
            o.descend("w", &weight, &gradient, lr, sign, FoundInf::default())
                .unwrap();
        }
        assert_eq!(o.saved().count(), 0);
        let after = o.exact("w", &weight).unwrap();
        // The projection on the expected direction: all of it, though every step is below the last bit of bf16.
        let (mut along, mut whole) = (0f64, 0f64);
        for ((a, b), g) in after.iter().zip(&before).zip(values(&gradient)) {
            let want = -100.0 * lr * if sign { g.signum() as f64 } else { g as f64 };
            along += (a - b) as f64 * want;
            whole += want * want;
        }
        let part = along / whole;
        let tolerance = if master == "f32" { 5e-3 } else { 0.05 };
        assert!((part - 1.0).abs() < tolerance, "{sign} {master} {part}");
    }
}

#[test]
fn some_names_learn_faster() {
    let mut o = Optimizer::new(settings("sgd"));
    o.set_rate(".lora_B.weight", 4.0);
    let gradient = tensor(&[6, 5], 2);
    for (name, factor) in [("x.lora_A.weight", 1.0), ("x.lora_B.weight", 4.0)] {
        let weight = Tensor::zeros((6, 5), DType::F32, &Device::Cpu).unwrap();
        update(&mut o, name, &weight, &gradient, 0.5, 1.0).unwrap();
        for (w, g) in values(&weight).iter().zip(values(&gradient)) {
            assert_eq!(*w, -0.5 * factor * g);
        }
    }
}
