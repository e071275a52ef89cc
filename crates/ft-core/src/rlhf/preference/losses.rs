//! Pairwise preference losses on the log-probabilities of whole answers: loss and derivatives.
//!
//! - DPO: Rafailov et al. 2023, arXiv 2305.18290, equation 7, and its variants, each cited at its match arm.
//! - ORPO: Hong et al. 2024, arXiv 2403.07691, equations 6 and 7.
//! - SimPO: Meng et al. 2024, arXiv 2405.14734, equation 6.
//!
//! The loss of a batch is the sum over its pairs; TRL's is that sum divided by the number of pairs.

use super::config::{FDivergence, PairLoss};

/// ln σ(x).
pub fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

/// The logistic function.
pub fn sigmoid(x: f64) -> f64 {
    log_sigmoid(x).exp()
}

/// ln(1 - eˣ) for x < 0.
fn log_one_minus_exp(x: f64) -> f64 {
    if x < -std::f64::consts::LN_2 {
        (-x.exp()).ln_1p()
    } else {
        (-x.exp_m1()).ln()
    }
}

/// Inputs of the losses for one answer.
#[derive(Debug, Clone, Copy, Default)]
pub struct AnswerLogProbs {
    /// Sum of the log-probabilities of the answer's tokens; with `ld_alpha` a weighted sum.
    pub logp: f64,
    /// The same sum for the reference model.
    pub reference: f64,
    /// Number of tokens of the answer.
    pub length: f64,
    /// Number of predicted tokens of the answer: all but the first token of a row.
    pub predicted: f64,
    /// Sum of the log-probabilities of all trained tokens of the document, and their number; ORPO includes the prompt.
    pub text_logp: f64,
    /// Number of these tokens.
    pub text_tokens: f64,
}

/// One pair.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogProbPair {
    /// The preferred answer.
    pub chosen: AnswerLogProbs,
    /// The other answer.
    pub rejected: AnswerLogProbs,
}

/// Result of a loss for a batch of B pairs.
#[derive(Debug, Clone, Default)]
pub struct PreferenceTerms {
    /// Sum over the pairs.
    pub loss: f64,
    /// `[B]`: derivatives with respect to `chosen.logp` and `rejected.logp`.
    pub slopes: Vec<[f64; 2]>,
    /// Derivative with respect to the log-probability of every trained token of each chosen document.
    pub text_slope: f64,
    /// Additional means over the pairs, named as in TRL.
    pub metrics: Vec<(&'static str, f64)>,
    /// `[B]`: rewards of chosen and rejected.
    pub rewards: Vec<[f64; 2]>,
}

/// Type of a pairwise loss.
#[derive(Debug, Clone, PartialEq)]
pub enum PairwiseLoss {
    /// DPO and its variants: with a reference model.
    Dpo(DpoSettings),
    /// The odds ratio of the answers, beside the cross-entropy of the chosen one; no reference (Hong et al. 2024, arXiv
    /// 2403.07691).
    Orpo {
        /// Weight of the odds-ratio term.
        beta: f64,
    },
    /// Length-normalized rewards without a reference, a target margin `gamma`, and `nll` times the cross-entropy of the
    /// chosen answers (TRL's CPO with `loss_type = "simpo"` and its `cpo_alpha`).
    Simpo {
        /// Scale of the rewards.
        beta: f64,
        /// Target margin of the rewards.
        gamma: f64,
        /// Weight of the cross-entropy of the chosen answer.
        nll: f64,
        /// Probability that a label is wrong.
        label_smoothing: f64,
    },
}

/// Settings of DPO, named as in TRL.
#[derive(Debug, Clone, PartialEq)]
pub struct DpoSettings {
    /// The losses to add, with their weights.
    pub losses: Vec<(PairLoss, f64)>,
    /// Scale of the rewards.
    pub beta: f64,
    /// Probability that a label is wrong.
    pub label_smoothing: f64,
    /// The divergence from the reference.
    pub f_divergence: FDivergence,
    /// α of the α-divergence.
    pub f_alpha: f64,
    /// Temperature of the `discopop` loss.
    pub discopop_tau: f64,
}

impl PairwiseLoss {
    /// True if the loss uses a reference model.
    pub fn has_reference(&self) -> bool {
        matches!(self, PairwiseLoss::Dpo(_))
    }

    /// The loss of each pair, with its gradients.
    pub fn evaluate(&self, pairs: &[LogProbPair]) -> PreferenceTerms {
        match self {
            PairwiseLoss::Dpo(dpo) => dpo.evaluate(pairs),
            PairwiseLoss::Orpo { beta } => orpo(*beta, pairs),
            PairwiseLoss::Simpo {
                beta,
                gamma,
                nll,
                label_smoothing,
            } => simpo(*beta, *gamma, *nll, *label_smoothing, pairs),
        }
    }
}

/// Cross-entropy of the chosen texts, averaged over the tokens of the batch, and its derivative for each token.
fn chosen_nll(pairs: &[LogProbPair]) -> (f64, f64) {
    let tokens: f64 = pairs.iter().map(|p| p.chosen.text_tokens).sum();
    let logp: f64 = pairs.iter().map(|p| p.chosen.text_logp).sum();
    (-logp / tokens.max(1.0), -1.0 / tokens.max(1.0))
}

impl DpoSettings {
    /// The score of a log-ratio: f'(π/π_ref) without its constant (f-DPO: Wang et al. 2023, arXiv 2309.16240,
    /// table 1), and its derivative.
    fn score(&self, ratio: f64) -> (f64, f64) {
        match self.f_divergence {
            FDivergence::ReverseKl => (ratio, 1.0),
            FDivergence::ForwardKl => (1.0 - (-ratio).exp(), (-ratio).exp()),
            FDivergence::JsDivergence => (std::f64::consts::LN_2 + log_sigmoid(ratio), sigmoid(-ratio)),
            FDivergence::AlphaDivergence => {
                let power = self.f_alpha - 1.0;
                let t = power * ratio;
                match () {
                    _ if power.abs() < 1e-6 => (ratio, 1.0),
                    // e^80 is close to the largest f32; TRL stops there too.
                    _ if t > 80.0 => ((80f64.exp() - 1.0) / power, 0.0),
                    _ => (t.exp_m1() / power, t.exp()),
                }
            }
        }
    }

    fn evaluate(&self, pairs: &[LogProbPair]) -> PreferenceTerms {
        let ratio = |s: &AnswerLogProbs| s.logp - s.reference;
        let ratios: Vec<[f64; 2]> = pairs.iter().map(|p| [ratio(&p.chosen), ratio(&p.rejected)]).collect();
        let mut out = PreferenceTerms {
            slopes: vec![[0.0; 2]; pairs.len()],
            rewards: ratios.iter().map(|r| r.map(|r| self.beta * r)).collect(),
            ..PreferenceTerms::default()
        };
        for &(kind, weight) in &self.losses {
            match kind {
                PairLoss::Sft => {
                    let (loss, slope) = chosen_nll(pairs);
                    // TRL adds the batch's loss to each of its pairs.
                    out.loss += weight * loss * pairs.len() as f64;
                    out.text_slope += weight * slope * pairs.len() as f64;
                }
                PairLoss::Aot => self.aot(pairs, &ratios, true, weight, &mut out),
                PairLoss::AotUnpaired => self.aot(pairs, &ratios, false, weight, &mut out),
                _ => {
                    for ((pair, ratios), slope) in pairs.iter().zip(&ratios).zip(&mut out.slopes) {
                        let (loss, slopes) = self.one(kind, pair, *ratios);
                        out.loss += weight * loss;
                        slope[0] += weight * slopes[0];
                        slope[1] += weight * slopes[1];
                    }
                }
            }
        }
        out
    }

    /// The loss of one pair, and its derivatives with respect to the log-probabilities of chosen and rejected.
    fn one(&self, kind: PairLoss, pair: &LogProbPair, [chosen, rejected]: [f64; 2]) -> (f64, [f64; 2]) {
        let (beta, smooth) = (self.beta, self.label_smoothing);
        let ((sc, gc), (sr, gr)) = (self.score(chosen), self.score(rejected));
        // For a loss of x = β (score of chosen - score of rejected).
        let of_difference = |loss: f64, slope: f64| (loss, [beta * slope * gc, -beta * slope * gr]);
        let x = beta * (sc - sr);
        let lengths = [pair.chosen.length.max(1.0), pair.rejected.length.max(1.0)];
        match kind {
            PairLoss::Sigmoid => of_difference(-log_sigmoid(x), -sigmoid(-x)),
            // Zhao et al. 2023, arXiv 2305.10425 (SLiC), equation 1
            PairLoss::Hinge => of_difference((1.0 - x).max(0.0), if x < 1.0 { -1.0 } else { 0.0 }),
            // Azar et al. 2023, arXiv 2310.12036, equation 17; means over tokens
            PairLoss::Ipo => {
                let error = sc / lengths[0] - sr / lengths[1] - 0.5 / beta;
                (
                    error * error,
                    [2.0 * error * gc / lengths[0], -2.0 * error * gr / lengths[1]],
                )
            }
            // Ji et al. 2024, arXiv 2402.00856, equation 16
            PairLoss::ExoPair => {
                let (win, lose) = (sigmoid(x), sigmoid(-x));
                let chosen = log_sigmoid(x) - (-smooth).ln_1p();
                let rejected = log_sigmoid(-x) - smooth.ln();
                of_difference(win * chosen + lose * rejected, win * lose * (chosen - rejected))
            }
            // Chen et al. 2024, arXiv 2402.05369 (NCA)
            PairLoss::NcaPair => {
                let (c, r) = (beta * chosen, beta * rejected);
                let loss = -log_sigmoid(c) - 0.5 * (log_sigmoid(-c) + log_sigmoid(-r));
                (loss, [beta * (0.5 * sigmoid(c) - sigmoid(-c)), beta * 0.5 * sigmoid(r)])
            }
            // Chowdhury et al. 2024, arXiv 2403.00409, equation 12
            PairLoss::Robust => {
                let loss = -(1.0 - smooth) * log_sigmoid(x) + smooth * log_sigmoid(-x);
                let slope = -(1.0 - smooth) * sigmoid(-x) - smooth * sigmoid(x);
                of_difference(loss / (1.0 - 2.0 * smooth), slope / (1.0 - 2.0 * smooth))
            }
            // Jung et al. 2024, arXiv 2404.04656 (BCO), on pairs
            PairLoss::BcoPair => {
                let (c, r) = (beta * chosen, beta * rejected);
                let loss = -log_sigmoid(c) - log_sigmoid(-r);
                (loss, [-beta * sigmoid(-c), beta * sigmoid(r)])
            }
            // Wu et al. 2024, arXiv 2405.00675, equation 4.7 with certain preferences
            PairLoss::SppoHard => {
                let (c, r) = (chosen - 0.5 / beta, rejected + 0.5 / beta);
                (c * c + r * r, [2.0 * c, 2.0 * r])
            }
            // D'Oosterlinck et al. 2024, arXiv 2408.06266, equation 7
            PairLoss::ApoZero => {
                let (c, r) = (sigmoid(beta * chosen), sigmoid(beta * rejected));
                (1.0 - c + r, [-beta * c * (1.0 - c), beta * r * (1.0 - r)])
            }
            // The same, equation 8
            PairLoss::ApoDown => {
                let (c, d) = (sigmoid(beta * chosen), sigmoid(beta * (chosen - rejected)));
                let (gc, gd) = (beta * c * (1.0 - c), beta * d * (1.0 - d));
                (c + 1.0 - d, [gc - gd, gd])
            }
            // Lu et al. 2024, arXiv 2406.08414, equation 5
            PairLoss::Discopop => {
                let mix = sigmoid(x / self.discopop_tau);
                let mix_slope = mix * (1.0 - mix) / self.discopop_tau;
                let (logistic, exponential) = (-log_sigmoid(x), (-x).exp());
                let slope = -sigmoid(-x) * (1.0 - mix) - exponential * mix + mix_slope * (exponential - logistic);
                of_difference(logistic * (1.0 - mix) + exponential * mix, slope)
            }
            // DPO with means over tokens instead of sums (as in Tulu 3, arXiv 2411.15124, section 5.1)
            PairLoss::SigmoidNorm => {
                let x = beta * (sc / lengths[0] - sr / lengths[1]);
                let slope = -beta * sigmoid(-x);
                (-log_sigmoid(x), [slope * gc / lengths[0], -slope * gr / lengths[1]])
            }
            // These losses need the whole batch: see `evaluate`.
            PairLoss::Sft | PairLoss::Aot | PairLoss::AotUnpaired => (0.0, [0.0; 2]),
        }
    }

    /// Alignment by optimal transport: compares sorted values (Melnyk et al. 2024, arXiv 2406.05882).
    fn aot(&self, pairs: &[LogProbPair], ratios: &[[f64; 2]], paired: bool, weight: f64, out: &mut PreferenceTerms) {
        let sorted = |value: &dyn Fn(usize) -> f64| {
            let mut order: Vec<usize> = (0..pairs.len()).collect();
            order.sort_by(|&a, &b| value(a).total_cmp(&value(b)));
            order
        };
        // The two sides of each comparison: the upper and the lower one.
        let above = |i: usize| {
            if paired {
                pairs[i].chosen.logp - pairs[i].rejected.logp
            } else {
                ratios[i][0]
            }
        };
        let below = |i: usize| {
            if paired {
                pairs[i].chosen.reference - pairs[i].rejected.reference
            } else {
                ratios[i][1]
            }
        };
        for (a, b) in sorted(&above).into_iter().zip(sorted(&below)) {
            let x = self.beta * (above(a) - below(b));
            let (loss, slope) = smoothed(x, self.label_smoothing);
            out.loss += weight * loss;
            let slope = weight * self.beta * slope;
            out.slopes[a][0] += slope;
            if paired {
                out.slopes[a][1] -= slope
            } else {
                out.slopes[b][1] -= slope
            }
        }
    }
}

/// -ln σ(x) with label smoothing, and its derivative.
fn smoothed(x: f64, label_smoothing: f64) -> (f64, f64) {
    (
        -log_sigmoid(x) * (1.0 - label_smoothing) - log_sigmoid(-x) * label_smoothing,
        -sigmoid(-x) * (1.0 - label_smoothing) + sigmoid(x) * label_smoothing,
    )
}

/// Mean log-probabilities of a pair.
fn means(pair: &LogProbPair) -> [f64; 2] {
    [pair.chosen, pair.rejected].map(|s| s.logp / s.predicted.max(1.0))
}

fn orpo(beta: f64, pairs: &[LogProbPair]) -> PreferenceTerms {
    let count = pairs.len() as f64;
    let (nll, slope) = chosen_nll(pairs);
    let mut out = PreferenceTerms {
        loss: nll * count,
        text_slope: slope * count,
        ..PreferenceTerms::default()
    };
    let (mut odds_sum, mut ratio_sum) = (0.0, 0.0);
    for pair in pairs {
        // A mean of exactly 0 has infinite odds; the nearest f32 below 0 does not.
        let [c, r] = means(pair).map(|m| m.min(-f64::from(f32::EPSILON)));
        let odds = (c - r) - (log_one_minus_exp(c) - log_one_minus_exp(r));
        out.loss -= beta * log_sigmoid(odds);
        let slope = -beta * sigmoid(-odds);
        out.slopes.push([
            slope / -c.exp_m1() / pair.chosen.predicted.max(1.0),
            slope / r.exp_m1() / pair.rejected.predicted.max(1.0),
        ]);
        out.rewards.push([beta * c, beta * r]);
        odds_sum += odds;
        ratio_sum += log_sigmoid(odds);
    }
    out.metrics = vec![
        ("nll_loss", nll),
        ("log_odds_ratio", ratio_sum / count),
        ("log_odds_chosen", odds_sum / count),
    ];
    out
}

fn simpo(beta: f64, gamma: f64, nll_weight: f64, label_smoothing: f64, pairs: &[LogProbPair]) -> PreferenceTerms {
    let count = pairs.len() as f64;
    let (nll, slope) = chosen_nll(pairs);
    let mut out = PreferenceTerms {
        loss: nll_weight * nll * count,
        text_slope: nll_weight * slope * count,
        ..PreferenceTerms::default()
    };
    for pair in pairs {
        let [c, r] = means(pair);
        let (loss, slope) = smoothed(beta * (c - r) - gamma, label_smoothing);
        out.loss += loss;
        out.slopes.push([
            beta * slope / pair.chosen.predicted.max(1.0),
            -beta * slope / pair.rejected.predicted.max(1.0),
        ]);
        out.rewards.push([beta * c, beta * r]);
    }
    if nll_weight != 0.0 {
        out.metrics.push(("nll_loss", nll));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(logp: f64, reference: f64, tokens: f64) -> AnswerLogProbs {
        AnswerLogProbs {
            logp,
            reference,
            length: tokens,
            predicted: tokens,
            text_logp: logp,
            text_tokens: tokens,
        }
    }

    fn pairs() -> Vec<LogProbPair> {
        [
            (-3.0, -3.4, 4.0, -5.0, -4.2, 6.0),
            (-9.1, -8.0, 7.0, -2.0, -2.5, 2.0),
            (-4.0, -4.1, 3.0, -4.5, -4.6, 3.0),
        ]
        .map(|(c, cr, cn, r, rr, rn)| LogProbPair {
            chosen: side(c, cr, cn),
            rejected: side(r, rr, rn),
        })
        .to_vec()
    }

    fn dpo(kind: PairLoss, f_divergence: FDivergence) -> PairwiseLoss {
        PairwiseLoss::Dpo(DpoSettings {
            losses: vec![(kind, 0.7)],
            beta: 0.3,
            label_smoothing: 0.1,
            f_divergence,
            f_alpha: 0.4,
            discopop_tau: 0.2,
        })
    }

    fn every() -> Vec<PairwiseLoss> {
        let names = PairLoss::NAMES.iter().filter_map(|n| PairLoss::parse(n));
        let mut all: Vec<PairwiseLoss> = names.map(|kind| dpo(kind, FDivergence::ReverseKl)).collect();
        all.extend(
            FDivergence::NAMES
                .iter()
                .filter_map(|n| FDivergence::parse(n))
                .map(|f| dpo(PairLoss::Sigmoid, f)),
        );
        all.push(PairwiseLoss::Orpo { beta: 0.3 });
        all.push(PairwiseLoss::Simpo {
            beta: 2.0,
            gamma: 0.5,
            nll: 0.3,
            label_smoothing: 0.1,
        });
        all
    }

    #[test]
    fn slopes_are_those_of_the_losses() {
        for loss in every() {
            let terms = loss.evaluate(&pairs());
            assert_eq!(terms.rewards.len(), 3);
            for (i, chosen) in [(0, true), (0, false), (1, true), (1, false), (2, true), (2, false)] {
                let moved = |by: f64| {
                    let mut all = pairs();
                    let pair = &mut all[i];
                    let side = if chosen { &mut pair.chosen } else { &mut pair.rejected };
                    side.logp += by;
                    side.text_logp += by;
                    loss.evaluate(&all).loss
                };
                let want = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                let got = terms.slopes[i][usize::from(!chosen)] + if chosen { terms.text_slope } else { 0.0 };
                assert!(
                    (got - want).abs() < 1e-6 * (1.0 + want.abs()),
                    "{loss:?} {i} {chosen}: {got} {want}"
                );
            }
        }
    }

    #[test]
    fn at_the_reference_dpo_is_ln_2_and_far_values_stay_finite() {
        let same = LogProbPair {
            chosen: side(-3.0, -3.0, 2.0),
            rejected: side(-5.0, -5.0, 2.0),
        };
        let terms = dpo(PairLoss::Sigmoid, FDivergence::ReverseKl).evaluate(&[same; 4]);
        assert!((terms.loss - 4.0 * 0.7 * std::f64::consts::LN_2).abs() < 1e-12);
        assert_eq!(terms.slopes[0], [-0.7 * 0.3 * 0.5, 0.7 * 0.3 * 0.5]);
        for loss in [1e4, -1e4].map(|x| (log_sigmoid(x), sigmoid(x))) {
            assert!(loss.0.is_finite() && (0.0..=1.0).contains(&loss.1));
        }
        // Certain answers: mean log-probability 0.
        let certain = LogProbPair {
            chosen: side(0.0, 0.0, 2.0),
            rejected: side(0.0, 0.0, 2.0),
        };
        let terms = PairwiseLoss::Orpo { beta: 0.1 }.evaluate(&[certain]);
        assert!(terms.loss.is_finite() && terms.slopes[0].iter().all(|s| s.is_finite()));
    }
}
