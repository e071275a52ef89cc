//! KTO: answers judged one by one (Ethayarajh et al. 2024, arXiv 2402.01306, equations 7 and 8), and TRL's variant
//! `apo_zero_unpaired` without the KL term.
//!
//! The KL to the reference is estimated from mismatched pairs: each prompt of the micro-batch with the answer of
//! another row. The mean of their log-ratios, at least zero, shifts the reference point between better and worse
//! answers; no gradient flows through it.

use super::config::JudgedLoss;
use super::losses::sigmoid;

/// Settings, named as in TRL.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KtoSettings {
    /// The loss.
    pub loss: JudgedLoss,
    /// Scale of the rewards.
    pub beta: f64,
    /// Weight of desirable answers.
    pub desirable_weight: f64,
    /// Weight of undesirable answers.
    pub undesirable_weight: f64,
}

/// A judged answer.
#[derive(Debug, Clone, Copy)]
pub struct JudgedAnswer {
    /// log π - log π_ref of the answer.
    pub ratio: f64,
    /// True if the answer is desirable.
    pub desirable: bool,
}

/// The loss of judged answers.
#[derive(Debug, Clone, PartialEq)]
pub struct KtoTerms {
    /// Sum over the answers.
    pub loss: f64,
    /// The derivative of the sum for the ratio of each answer.
    pub slopes: Vec<f64>,
    /// The estimate of the KL divergence.
    pub kl: f64,
}

/// The loss of these answers. `mismatched`: log-ratios of mismatched pairs.
pub fn evaluate(kto: &KtoSettings, answers: &[JudgedAnswer], mismatched: &[f64]) -> KtoTerms {
    let kl = match kto.loss {
        JudgedLoss::Kto => (mismatched.iter().sum::<f64>() / mismatched.len().max(1) as f64).max(0.0),
        JudgedLoss::ApoZeroUnpaired => 0.0,
    };
    let mut loss = 0.0;
    let slopes = answers.iter().map(|a| {
        let (sign, weight) = if a.desirable {
            (1.0, kto.desirable_weight)
        } else {
            (-1.0, kto.undesirable_weight)
        };
        let value = sigmoid(sign * kto.beta * (a.ratio - kl));
        loss += weight * (1.0 - value);
        -weight * sign * kto.beta * value * (1.0 - value)
    });
    let slopes = slopes.collect();
    KtoTerms { loss, slopes, kl }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_those_of_the_losses_and_the_kl_is_not_negative() {
        for loss in [JudgedLoss::Kto, JudgedLoss::ApoZeroUnpaired] {
            let kto = KtoSettings {
                loss,
                beta: 0.4,
                desirable_weight: 1.0,
                undesirable_weight: 1.3,
            };
            let answers = |by: f64, at: usize| -> Vec<JudgedAnswer> {
                [(0.5, true), (-1.0, false), (2.0, false)]
                    .iter()
                    .enumerate()
                    .map(|(i, &(ratio, desirable))| JudgedAnswer {
                        ratio: ratio + if i == at { by } else { 0.0 },
                        desirable,
                    })
                    .collect()
            };
            for mismatched in [[0.3, 0.5], [-0.3, -0.5]] {
                let KtoTerms { slopes, kl, .. } = evaluate(&kto, &answers(0.0, 0), &mismatched);
                let want = if loss == JudgedLoss::Kto && mismatched[0] > 0.0 {
                    0.4
                } else {
                    0.0
                };
                assert!((kl - want).abs() < 1e-12);
                for (at, slope) in slopes.iter().enumerate() {
                    let moved = |by| evaluate(&kto, &answers(by, at), &mismatched).loss;
                    let want = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                    assert!((slope - want).abs() < 1e-8, "{slope} {want}");
                }
            }
        }
    }
}
