//! Tests of the objective: pairs of layers, distances of hidden states and their gradients.

use super::hidden::{HiddenDistance, HiddenLoss, auto_map, check_map};
use super::*;
use crate::data::IGNORE;
use crate::model::ParamGradient;
use crate::ops::oracle::{assert_close, differences, random};
use candle_core::Device;
use std::collections::BTreeMap;

#[test]
fn layers_are_paired_by_their_part_of_the_depth() {
    assert_eq!(auto_map(4, 8), [(1, 2), (2, 4), (3, 6)]);
    assert_eq!(auto_map(3, 3), [(1, 1), (2, 2)]);
    assert_eq!(auto_map(4, 6), [(1, 2), (2, 3), (3, 5)]);
    assert!(auto_map(1, 9).is_empty());
    assert!(check_map(&[(0, 0), (3, 8)], 4, 8).is_ok());
    for bad in [&[][..], &[(4, 1)], &[(1, 9)], &[(1, 2), (1, 2)]] {
        let e = check_map(bad, 4, 8).unwrap_err().to_string();
        assert!(e.contains("hidden::check_map"), "{e}");
    }
}

fn need(scale: f64) -> ObjectiveNeeds {
    ObjectiveNeeds {
        scale,
        dh: true,
        dw: false,
    }
}

/// Loss, gradient at x and gradients of the projections against finite differences.
#[test]
fn hidden_states_have_the_gradient_of_their_distance() {
    let (n, targets) = (5, [3, IGNORE, 1, 0, IGNORE]);
    for (d, dt) in [(6, 6), (6, 9)] {
        for distance in [HiddenLoss::Mse, HiddenLoss::Cosine] {
            let pairs = [(1, 2), (1, 4), (2, 3)];
            let hidden = HiddenDistance::new(&pairs, d, dt, distance, 0.6, 7, &Device::Cpu).unwrap();
            let teacher: BTreeMap<usize, Tensor> = (0..5).map(|t| (t, random((n, dt), 10 + t as u64))).collect();
            let x = random((n, d), 1);
            let loss = |x: &Tensor| Ok(hidden.compare(1, x, &teacher, &targets, need(1.0))?.loss);
            let got = hidden.compare(1, &x, &teacher, &targets, need(0.5)).unwrap();
            let want = (differences(&x, 1e-2, loss) * 0.5).unwrap();
            assert_close(got.dx.as_ref().unwrap(), &want, 3e-3);
            assert_eq!(got.objective_params.len(), 2);
            for ParamGradient { param, gradient } in &got.objective_params {
                let values = crate::ops::update::to_f32_vec(&param.tensor).unwrap();
                let loss = |w: &Tensor| {
                    let w = crate::ops::update::to_f32_vec(w)?;
                    crate::ops::update::set(&param.tensor, &w)?;
                    Ok(hidden.compare(1, &x, &teacher, &targets, need(1.0))?.loss)
                };
                let start = Tensor::from_vec(values.clone(), (dt, d), &Device::Cpu).unwrap();
                let want = (differences(&start, 1e-2, loss) * 0.5).unwrap();
                crate::ops::update::set(&param.tensor, &values).unwrap();
                assert_close(gradient, &want, 3e-3);
            }
        }
    }
}

#[test]
fn equal_sizes_start_from_the_identity() {
    let hidden = HiddenDistance::new(&[(1, 1)], 4, 4, HiddenLoss::Mse, 1.0, 0, &Device::Cpu).unwrap();
    let x = random((3, 4), 1);
    let teacher = BTreeMap::from([(1, x.clone())]);
    let got = hidden.compare(1, &x, &teacher, &[1, 2, 3], need(1.0)).unwrap();
    assert!(got.loss.abs() < 1e-12);
    assert_eq!(&*hidden.params()[0].name, "objective.projection.1.1");
    assert_eq!(hidden.layers(), [1]);
}
