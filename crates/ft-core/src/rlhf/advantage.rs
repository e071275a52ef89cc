//! Computes advantages from rewards.
//!
//! Letters: B completions of a rollout, G completions of one prompt (a group: consecutive), T tokens of a completion.
//! A NaN reward is missing: its completion is excluded from means, and its advantage is 0.

use ft_base::named;

named!(
    /// Divisor of an advantage.
    ScaleRewards {
        /// The standard deviation of the group.
        Group = "group",
        /// The standard deviation of all completions.
        Batch = "batch",
        /// Rewards are centered, not scaled.
        None = "none",
    }
);

/// Added to a standard deviation before the division.
const EPSILON: f64 = 1e-4;

/// Advantages `[B]`, and the fraction of the groups (or of the batch) whose rewards are all equal.
#[derive(Debug, Clone, PartialEq)]
pub struct Advantages {
    /// `[B]`: the advantage of each completion.
    pub values: Vec<f64>,
    /// Fraction of the groups with equal rewards.
    pub zero_std: f64,
}

/// Mean and sample standard deviation (divisor n - 1) of the values that are not NaN. NaN if there are too few.
pub fn moments(values: &[f64]) -> (f64, f64) {
    let known: Vec<f64> = values.iter().copied().filter(|x| !x.is_nan()).collect();
    let n = known.len() as f64;
    if known.is_empty() {
        return (f64::NAN, f64::NAN);
    }
    let mean = known.iter().sum::<f64>() / n;
    let squares = known.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>();
    let std = if known.len() > 1 {
        (squares / (n - 1.0)).sqrt()
    } else {
        f64::NAN
    };
    (mean, std)
}

fn is_zero(std: f64) -> bool {
    std.abs() <= 1e-8
}

/// GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2): reward minus the mean of its group, divided by a standard
/// deviation. Without the division: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783). `rewards` `[B]`, B a multiple of
/// `group`.
pub fn grouped(rewards: &[f64], group: usize, scale: ScaleRewards) -> Advantages {
    let group = group.max(1);
    let batch_std = moments(rewards).1;
    let (mut values, mut zero, mut groups) = (Vec::with_capacity(rewards.len()), 0usize, 0usize);
    for rewards in rewards.chunks(group) {
        let (mean, std) = moments(rewards);
        let std = if scale == ScaleRewards::Batch { batch_std } else { std };
        groups += 1;
        zero += usize::from(is_zero(std));
        let by = if scale == ScaleRewards::None {
            1.0
        } else {
            std + EPSILON
        };
        values.extend(rewards.iter().map(|r| known((r - mean) / by)));
    }
    Advantages {
        values,
        zero_std: zero as f64 / groups.max(1) as f64,
    }
}

/// RLOO (Ahmadian et al. 2024, arXiv 2402.14740, section 3.2): reward minus the mean of the other rewards of its group;
/// `normalize` scales all advantages to mean 0 and standard deviation 1.
pub fn leave_one_out(rewards: &[f64], group: usize, normalize: bool) -> Advantages {
    let (mut values, mut zero, mut groups) = (Vec::with_capacity(rewards.len()), 0usize, 0usize);
    for rewards in rewards.chunks(group.max(1)) {
        let count = rewards.iter().filter(|r| !r.is_nan()).count() as f64;
        let sum: f64 = rewards.iter().filter(|r| !r.is_nan()).sum();
        groups += 1;
        zero += usize::from(is_zero(moments(rewards).1));
        // A single reward has no others to compare with: 0/0 is NaN, and becomes 0 below.
        values.extend(rewards.iter().map(|r| r - (sum - r) / (count - 1.0)));
    }
    values.iter_mut().filter(|a| !a.is_finite()).for_each(|a| *a = f64::NAN);
    if normalize {
        let (mean, std) = moments(&values);
        values.iter_mut().for_each(|a| *a = (*a - mean) / (std + EPSILON));
    }
    values.iter_mut().for_each(|a| *a = known(*a));
    Advantages {
        values,
        zero_std: zero as f64 / groups.max(1) as f64,
    }
}

fn known(x: f64) -> f64 {
    if x.is_nan() { 0.0 } else { x }
}

/// Generalized advantage estimation of one completion (Schulman et al. 2016, arXiv 1506.02438, eq. 16): advantages
/// and returns `[T]` from rewards and values `[T]`; the episode ends after the last token.
pub fn gae(rewards: &[f64], values: &[f64], gamma: f64, lambda: f64) -> (Vec<f64>, Vec<f64>) {
    let mut advantages = vec![0.0; rewards.len()];
    let (mut next_value, mut next) = (0.0, 0.0);
    for t in (0..rewards.len()).rev() {
        let delta = rewards[t] + gamma * next_value - values[t];
        next = delta + gamma * lambda * next;
        advantages[t] = next;
        next_value = values[t];
    }
    let returns = advantages.iter().zip(values).map(|(a, v)| a + v).collect();
    (advantages, returns)
}

/// Scales all values of all rows to variance 1, and shifts them to mean 0 unless `keep_mean`.
pub fn whiten(rows: &mut [Vec<f64>], keep_mean: bool) {
    let all: Vec<f64> = rows.iter().flatten().copied().collect();
    let (mean, std) = moments(&all);
    if std.is_nan() {
        return;
    }
    let by = 1.0 / (std * std + 1e-8).sqrt();
    let back = if keep_mean { mean } else { 0.0 };
    for x in rows.iter_mut().flatten() {
        *x = (*x - mean) * by + back;
    }
}

named!(
    /// Estimator of a KL divergence from one sample (Schulman 2020, "Approximating KL Divergence").
    KlEstimator {
        /// log p - log q: unbiased, may be negative.
        K1 = "k1",
        /// q/p - 1 - log(q/p): unbiased, never negative.
        K3 = "k3",
    }
);

impl KlEstimator {
    /// KL of the policy to the reference, at one token.
    pub fn of(self, log_prob: f64, reference: f64) -> f64 {
        let log_ratio = reference - log_prob;
        match self {
            Self::K1 => -log_ratio,
            Self::K3 => log_ratio.exp() - log_ratio - 1.0,
        }
    }
}

/// Coefficient of the KL penalty in PPO's rewards: fixed, or adapted to a target (Ziegler et al. 2019, arXiv
/// 1909.08593, section 2.2).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KlControl {
    /// The current coefficient.
    pub coefficient: f64,
    /// Target KL per completion in nats, and the horizon in completions over which the coefficient changes by at most
    /// about a fifth; `None`: fixed.
    pub target: Option<(f64, f64)>,
}

impl KlControl {
    /// Updates the coefficient after `completions` completions with a mean KL per completion of `kl`.
    pub fn update(&mut self, kl: f64, completions: usize) {
        if let Some((target, horizon)) = self.target {
            let error = (kl / target - 1.0).clamp(-0.2, 0.2);
            self.coefficient *= 1.0 + error * completions as f64 / horizon;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert!((g - w).abs() < 1e-9, "{got:?} {want:?}");
        }
    }

    #[test]
    fn groups_of_equal_rewards_teach_nothing() {
        let rewards = [1.0, 0.0, 1.0, 1.0];
        let got = grouped(&rewards, 2, ScaleRewards::Group);
        let std = 0.5f64.sqrt();
        assert_close(&got.values, &[0.5 / (std + 1e-4), -0.5 / (std + 1e-4), 0.0, 0.0]);
        assert_eq!(got.zero_std, 0.5);
        assert_close(&grouped(&rewards, 2, ScaleRewards::None).values, &[0.5, -0.5, 0.0, 0.0]);
        // Standard deviation of all four: 0.5.
        let batch = grouped(&rewards, 2, ScaleRewards::Batch);
        assert_close(&batch.values, &[0.5 / 0.5001, -0.5 / 0.5001, 0.0, 0.0]);
        assert_eq!(batch.zero_std, 0.0);
    }

    #[test]
    fn a_completion_without_a_reward_is_left_out() {
        let got = grouped(&[1.0, f64::NAN, 0.0, f64::NAN], 4, ScaleRewards::None);
        assert_close(&got.values, &[0.5, 0.0, -0.5, 0.0]);
        assert_close(&grouped(&[f64::NAN; 2], 2, ScaleRewards::Group).values, &[0.0; 2]);
        let got = leave_one_out(&[1.0, f64::NAN, 0.0, 5.0, f64::NAN, f64::NAN], 3, false);
        assert_close(&got.values, &[1.0, 0.0, -1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn leave_one_out_is_a_scaled_group_mean() {
        // r - mean of the others = G/(G-1) (r - mean).
        let rewards = [3.0, 1.0, 0.5, 0.0];
        let plain = grouped(&rewards, 4, ScaleRewards::None).values;
        let want: Vec<f64> = plain.iter().map(|a| a * 4.0 / 3.0).collect();
        assert_close(&leave_one_out(&rewards, 4, false).values, &want);
        let normal = leave_one_out(&rewards, 4, true).values;
        let (mean, std) = moments(&normal);
        assert!(mean.abs() < 1e-9 && (std - 1.0).abs() < 1e-3);
    }

    #[test]
    fn gae_has_its_two_ends() {
        let (rewards, values) = ([0.0, -0.1, 1.0], [0.3, 0.2, 0.6]);
        // lambda = 1: the advantage is the discounted sum of rewards minus the value.
        let (a, returns) = gae(&rewards, &values, 0.9, 1.0);
        let sums = [0.9 * -0.1 + 0.81 * 1.0, -0.1 + 0.9, 1.0];
        assert_close(&returns, &sums);
        assert_close(&a, &[sums[0] - 0.3, sums[1] - 0.2, sums[2] - 0.6]);
        // lambda = 0: one-step estimate.
        let (a, _) = gae(&rewards, &values, 0.9, 0.0);
        assert_close(&a, &[0.9 * 0.2 - 0.3, -0.1 + 0.9 * 0.6 - 0.2, 1.0 - 0.6]);
    }

    #[test]
    fn whitened_numbers_have_variance_one() {
        let mut rows = vec![vec![1.0, 2.0], vec![4.0]];
        whiten(&mut rows, false);
        let (mean, std) = moments(&rows.concat());
        assert!(mean.abs() < 1e-9 && (std - 1.0).abs() < 1e-6);
        let mut rows = vec![vec![1.0, 2.0], vec![4.0]];
        whiten(&mut rows, true);
        assert!((moments(&rows.concat()).0 - 7.0 / 3.0).abs() < 1e-9);
        let mut one = vec![vec![3.0]];
        whiten(&mut one, false);
        assert_eq!(one, [[3.0]]);
    }

    #[test]
    fn both_estimators_have_the_divergence_as_their_mean() {
        let (p, q) = ([0.7f64, 0.2, 0.1], [0.5f64, 0.3, 0.2]);
        let exact: f64 = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum();
        for kl in [KlEstimator::K1, KlEstimator::K3] {
            let mean: f64 = p.iter().zip(&q).map(|(p, q)| p * kl.of(p.ln(), q.ln())).sum();
            assert!((mean - exact).abs() < 1e-12);
        }
    }

    #[test]
    fn the_penalty_is_led_to_its_target() {
        let mut fixed = KlControl {
            coefficient: 0.1,
            target: None,
        };
        fixed.update(50.0, 10);
        assert_eq!(fixed.coefficient, 0.1);
        let mut led = KlControl {
            coefficient: 0.1,
            target: Some((6.0, 100.0)),
        };
        led.update(60.0, 50);
        assert!((led.coefficient - 0.11).abs() < 1e-12);
        led.update(5.7, 100);
        assert!((led.coefficient - 0.11 * 0.95).abs() < 1e-12);
    }
}
