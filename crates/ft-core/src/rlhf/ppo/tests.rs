//! Tests of PPO losses: derivatives against finite differences, and the value head.

use super::*;

const SETTINGS: PpoSettings = PpoSettings {
    cliprange: 0.2,
    cliprange_value: 0.3,
    vf_coef: 0.5,
};

#[test]
fn slopes_are_those_of_the_loss() {
    let old = [-1.0f32, -2.0, -0.5, -1.5, -0.7, -0.9];
    let log_probs = [-0.95f32, -1.5, -0.9, -1.0, -1.3, -0.85];
    let old_values = [0.1f32, 0.2, 0.3, -0.4, 0.0, 0.5];
    let values = [0.15f32, 0.9, -0.3, -0.35, 0.6, 0.1];
    let returns = [0.5f32, 1.5, 0.4, -0.9, -0.5, 0.45];
    let advantages = [1.0f32, 0.7, 0.9, -1.2, -0.4, -0.8];
    let ratios = [1.0f32, 0.5, 2.0, 1.5, 1.0, 0.7];
    let part = |log_probs: &[f32], values: &[f32]| {
        SETTINGS.part(&PpoCompletion {
            log_probs,
            values,
            old: Some(&old),
            old_values: &old_values,
            advantages: &advantages,
            returns: &returns,
            ratios: Some(&ratios),
        })
    };
    let loss = |p: &CompletionSums| p.policy_loss + SETTINGS.vf_coef * p.value_loss;
    let here = part(&log_probs, &values);
    assert!(here.clipped >= 2.0 && here.clipped_values >= 1.0 && here.clipped < 6.0);
    for t in 0..6 {
        for (of_value, found) in [(false, here.by_log_prob[t]), (true, here.by_value[t])] {
            let at = |by: f32| {
                let (mut l, mut v) = (log_probs, values);
                *(if of_value { &mut v[t] } else { &mut l[t] }) += by;
                loss(&part(&l, &v))
            };
            let difference = (at(0.004) - at(-0.004)) / 0.008;
            assert!(
                (difference - found).abs() < 1e-3,
                "{t} {of_value}: {difference} {found}"
            );
        }
    }
}

#[test]
fn the_value_head_and_its_gradients() {
    let head = ValueHead::new(2, &Device::Cpu).unwrap();
    let h = Tensor::new(&[[1f32, 2.0], [3.0, -1.0]], &Device::Cpu).unwrap();
    assert_eq!(head.values(&h).unwrap(), [0.0, 0.0]);
    update::with_slice_mut(&head.weight.tensor, |w| w.copy_from_slice(&[0.5, -1.0])).unwrap();
    update::with_slice_mut(&head.bias.tensor, |b| b[0] = 0.25).unwrap();
    assert_eq!(head.values(&h).unwrap(), [-1.25, 2.75]);
    let mut out = LossGradients {
        dh: Some(Tensor::zeros((2, 2), DType::F32, &Device::Cpu).unwrap()),
        ..LossGradients::default()
    };
    head.backward(&h, &[2.0, -1.0], &mut out).unwrap();
    let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(flat(&out.dh.unwrap()), [1.0, -2.0, -0.5, 1.0]);
    assert_eq!(flat(&out.objective_params[0].gradient), [-1.0, 5.0]);
    assert_eq!(
        (
            flat(&out.objective_params[1].gradient),
            &*out.objective_params[1].param.name
        ),
        (vec![1.0], "objective.value.bias")
    );
    assert_eq!(
        ValueHead::of(&[head.weight.clone(), head.bias]).unwrap().weight.name,
        head.weight.name
    );
    assert!(ValueHead::of(&[head.weight]).is_err());
}
