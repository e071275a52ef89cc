//! Tests of GRPO losses: derivatives against finite differences, and the correction of rollouts with quantized weights.

use super::*;
use crate::rlhf::correction::{RatioCorrection, RolloutCorrection};

const LOSSES: [GrpoLoss; 5] = [
    GrpoLoss::Grpo,
    GrpoLoss::Dapo,
    GrpoLoss::DrGrpo,
    GrpoLoss::Bnpo,
    GrpoLoss::Rloo,
];

fn settings(loss_type: GrpoLoss, level: ImportanceLevel) -> GrpoSettings {
    GrpoSettings {
        loss_type,
        level,
        epsilon: 0.2,
        epsilon_high: 0.28,
        delta: Some(1.6),
        beta: 0.3,
        kl_weighted: true,
        max_completion_length: 9,
    }
}

/// The gradient equals that of the loss, on either side of every bound.
#[test]
fn slopes_are_those_of_the_loss() {
    let old = [-1.0f32, -2.0, -0.5, -1.5];
    let reference = [-1.1f32, -1.7, -0.6, -1.0];
    let ratios = [0.5f32, 1.0, 2.0, 1.3];
    let steps = [0.07f32, 0.4, -0.4, 0.9];
    let mut beyond = 0;
    for loss_type in LOSSES {
        for level in [ImportanceLevel::Token, ImportanceLevel::Sequence] {
            for kl_weighted in [false, true] {
                for advantage in [1.3, -0.7] {
                    for shift in [-0.35f32, 0.0, 0.2] {
                        let settings = GrpoSettings {
                            kl_weighted,
                            ..settings(loss_type, level)
                        };
                        let log_probs: Vec<f32> = old.iter().zip(steps).map(|(o, s)| o + s + shift).collect();
                        let part = |log_probs: &[f32]| {
                            settings.part(&GrpoCompletion {
                                log_probs,
                                old: Some(&old),
                                reference: Some(&reference),
                                ratios: Some(&ratios),
                                advantage,
                            })
                        };
                        let here = part(&log_probs);
                        beyond += usize::from(here.clipped_low + here.clipped_high > 0.0);
                        for t in 0..4 {
                            let at = |by: f32| {
                                let mut moved = log_probs.clone();
                                moved[t] += by;
                                part(&moved).loss
                            };
                            let difference = (at(0.004) - at(-0.004)) / 0.008;
                            let found = here.gradient[t];
                            assert!(
                                (difference - found).abs() < 1e-3 * (1.0 + found.abs()),
                                "{settings:?} {advantage} {shift} {t}: {difference} {found}"
                            );
                        }
                    }
                }
            }
        }
    }
    assert!(beyond > 20, "clipping was met {beyond} times");
}

#[test]
fn without_old_log_probs_the_ratio_is_one() {
    for loss_type in LOSSES {
        let settings = GrpoSettings {
            beta: 0.0,
            ..settings(loss_type, ImportanceLevel::Token)
        };
        let log_probs = [-1.0f32, -2.0];
        let completion = GrpoCompletion {
            log_probs: &log_probs,
            old: None,
            reference: None,
            ratios: None,
            advantage: 2.0,
        };
        let same = settings.part(&GrpoCompletion {
            old: Some(&log_probs),
            ..completion
        });
        let part = settings.part(&completion);
        assert_eq!(part, same);
        assert!(part.gradient.iter().all(|g| *g < 0.0) && part.clipped_high == 0.0);
        assert_eq!(
            settings.part(&GrpoCompletion {
                log_probs: &[],
                ..completion
            }),
            CompletionLoss::default()
        );
    }
}

/// A policy of two steps with two tokens each, sampled from rounded weights (as quantized ones are): over all answers
/// the mean of the corrected gradient is the exact policy gradient; that of the uncorrected one is not.
#[test]
fn the_correction_of_coded_rollouts_is_unbiased() {
    // p(first token = 1), p(second = 1 | first): exact, and with an error like that of int8 rounding.
    let exact = |a: usize, b: usize| {
        let first: f64 = [0.3, 0.7][a];
        let second: f64 = [[0.6, 0.4], [0.15, 0.85]][a][b];
        (first, second)
    };
    let coarse = |a: usize, b: usize| {
        let first: f64 = [0.36, 0.64][a];
        let second: f64 = [[0.53, 0.47], [0.2, 0.8]][a][b];
        (first, second)
    };
    let reward = [[1.0, -0.5], [0.25, 2.0]];
    let correction = RatioCorrection {
        mode: RolloutCorrection::SequenceMask,
        min: None,
        max: Some(3.0),
    };
    // With respect to the log-probability of each token of each answer, summed with the sampling probability.
    let gradient = |loss_type: GrpoLoss, corrected: bool| {
        let settings = GrpoSettings {
            beta: 0.0,
            ..settings(loss_type, ImportanceLevel::Token)
        };
        let mut sums = [[[0f64; 2]; 2]; 2];
        for (a, b) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let (p, q) = (exact(a, b), coarse(a, b));
            let log_probs = [f64::ln(p.0) as f32, f64::ln(p.1) as f32];
            let sampling = [f64::ln(q.0) as f32, f64::ln(q.1) as f32];
            let ratios = correction.ratios(&log_probs, &sampling);
            let part = settings.part(&GrpoCompletion {
                log_probs: &log_probs,
                old: None,
                reference: None,
                ratios: corrected.then_some(&ratios[..]),
                advantage: reward[a][b],
            });
            for (sum, gradient) in sums[a][b].iter_mut().zip(&part.gradient) {
                *sum += q.0 * q.1 * gradient;
            }
        }
        sums
    };
    let error = |sums: [[[f64; 2]; 2]; 2]| {
        let mut worst = 0f64;
        for (a, b) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let p = exact(a, b);
            // Gradient of -E[R]: -p(answer) R, with respect to the log-probability of either token.
            let want = -p.0 * p.1 * reward[a][b];
            worst = sums[a][b].iter().fold(worst, |w, g| w.max((g - want).abs()));
        }
        worst
    };
    for loss_type in [GrpoLoss::Dapo, GrpoLoss::Rloo] {
        let (with, without) = (error(gradient(loss_type, true)), error(gradient(loss_type, false)));
        assert!(with < 1e-6 && without > 0.02, "{loss_type:?}: {with} {without}");
    }
}
