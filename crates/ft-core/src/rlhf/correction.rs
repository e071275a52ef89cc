//! Importance sampling correction for rollouts that were sampled with quantized instead of exact weights.
//!
//! Letters: T tokens of a completion.

use ft_base::named;

named!(
    /// Bound of the importance ratios (truncated importance sampling: Yao et al. 2025; masked: Zheng et al. 2025).
    RolloutCorrection {
        /// All ratios are 1.
        None = "none",
        /// One ratio per token, clipped to the bounds.
        TokenTruncate = "token_truncate",
        /// One ratio per token, 0 outside the bounds.
        TokenMask = "token_mask",
        /// The product over the completion, clipped to the bounds.
        SequenceTruncate = "sequence_truncate",
        /// The product over the completion, 0 outside the bounds.
        SequenceMask = "sequence_mask",
    }
);

/// How importance ratios of rollouts that other weights sampled enter the loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RatioCorrection {
    /// The treatment of a ratio.
    pub mode: RolloutCorrection,
    /// Smallest ratio; `None`: no bound.
    pub min: Option<f64>,
    /// Largest ratio; `None`: no bound.
    pub max: Option<f64>,
}

impl RatioCorrection {
    /// Ratios `[T]` of the exact weights to the sampling weights, from their log-probabilities `[T]`. A NaN sampling
    /// log-probability is unknown: its ratio is 1.
    pub fn ratios(&self, exact: &[f32], sampling: &[f32]) -> Vec<f32> {
        let difference = |(e, s): (&f32, &f32)| {
            let d = *e as f64 - *s as f64;
            if d.is_nan() { 0.0 } else { d }
        };
        let logs: Vec<f64> = exact.iter().zip(sampling).map(difference).collect();
        let logs = match self.mode {
            RolloutCorrection::None => vec![0.0; logs.len()],
            RolloutCorrection::TokenTruncate | RolloutCorrection::TokenMask => logs,
            RolloutCorrection::SequenceTruncate | RolloutCorrection::SequenceMask => {
                vec![logs.iter().sum(); logs.len()]
            }
        };
        logs.into_iter().map(|log| self.bound(log.exp()) as f32).collect()
    }

    fn bound(&self, ratio: f64) -> f64 {
        let (min, max) = (self.min.unwrap_or(0.0), self.max.unwrap_or(f64::INFINITY));
        match self.mode {
            RolloutCorrection::None => ratio,
            RolloutCorrection::TokenTruncate | RolloutCorrection::SequenceTruncate => ratio.clamp(min, max.max(min)),
            RolloutCorrection::TokenMask | RolloutCorrection::SequenceMask if ratio < min || ratio > max => 0.0,
            RolloutCorrection::TokenMask | RolloutCorrection::SequenceMask => ratio,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_cut_or_mask() {
        let (exact, sampling) = ([-1.0f32, -1.0, -2.0], [-1.0f32, -3.0, -1.0]);
        let ratios = |mode, min, max| RatioCorrection { mode, min, max }.ratios(&exact, &sampling);
        let close = |got: &[f32], want: [f64; 3]| {
            for (g, w) in got.iter().zip(want) {
                assert!((*g as f64 - w).abs() < 1e-5, "{got:?} {want:?}");
            }
        };
        let (up, down, all) = (2f64.exp(), (-1f64).exp(), 1f64.exp());
        close(
            &ratios(RolloutCorrection::TokenTruncate, None, Some(3.0)),
            [1.0, 3.0, down],
        );
        close(&ratios(RolloutCorrection::TokenMask, Some(0.5), None), [1.0, up, 0.0]);
        close(&ratios(RolloutCorrection::SequenceTruncate, None, Some(2.0)), [2.0; 3]);
        close(&ratios(RolloutCorrection::SequenceMask, None, Some(3.0)), [all; 3]);
        close(&ratios(RolloutCorrection::SequenceMask, None, Some(2.0)), [0.0; 3]);
        let unknown = RatioCorrection {
            mode: RolloutCorrection::TokenMask,
            min: None,
            max: Some(3.0),
        };
        assert_eq!(unknown.ratios(&[-1.0], &[f32::NAN]), [1.0]);
    }
}
