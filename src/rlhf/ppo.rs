//! The losses of PPO on tokens: clipped policy, clipped value.
//!
//! Letters: T tokens of a completion. Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7 and 9; on language models
//! as in Ziegler et al. 2019, arXiv 1909.08593: the value is read from the hidden state before each token, by a head on
//! the policy's own hidden states.

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// The ratio is clipped to 1 ± this.
    pub cliprange: f64,
    /// A value moves at most so far from that of the rollout.
    pub cliprange_value: f64,
    pub vf_coef: f64,
}

/// What is known of one completion, each `[T]`.
#[derive(Debug, Clone, Copy)]
pub struct Completion<'a> {
    /// Under the weights that train.
    pub log_probs: &'a [f32],
    pub values: &'a [f32],
    /// Under the weights that the rollout belongs to; `None`: the same as now.
    pub old: Option<&'a [f32]>,
    pub old_values: &'a [f32],
    pub advantages: &'a [f32],
    pub returns: &'a [f32],
    /// Factors for having sampled under other weights.
    pub ratios: Option<&'a [f32]>,
}

/// Sums over the tokens of one completion, before the division by the tokens of the window.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Part {
    pub policy_loss: f64,
    /// Not multiplied with `vf_coef`.
    pub value_loss: f64,
    /// `[T]`: gradients of `policy_loss + vf_coef value_loss`.
    pub by_log_prob: Vec<f64>,
    pub by_value: Vec<f64>,
    /// Tokens whose ratio or value is clipped.
    pub clipped: f64,
    pub clipped_values: f64,
}

impl Settings {
    pub fn part(&self, c: &Completion) -> Part {
        let mut part = Part::default();
        for t in 0..c.log_probs.len() {
            let log_prob = c.log_probs[t] as f64;
            let old = c.old.map_or(log_prob, |old| old[t] as f64);
            let factor = c.ratios.map_or(1.0, |r| r[t] as f64);
            let (ratio, advantage) = ((log_prob - old).exp(), c.advantages[t] as f64);
            let clipped = ratio.clamp(1.0 - self.cliprange, 1.0 + self.cliprange);
            let (free, bound) = (-advantage * ratio, -advantage * clipped);
            let outside = bound > free;
            part.policy_loss += factor * free.max(bound);
            part.by_log_prob.push(if outside { 0.0 } else { factor * free });
            part.clipped += f64::from(outside);

            let (value, old_value, target) = (c.values[t] as f64, c.old_values[t] as f64, c.returns[t] as f64);
            let near = value.clamp(old_value - self.cliprange_value, old_value + self.cliprange_value);
            let (free, bound) = ((value - target).powi(2), (near - target).powi(2));
            let outside = bound > free;
            part.value_loss += 0.5 * free.max(bound);
            let slope = match outside {
                true if near != value => 0.0,
                true => near - target,
                false => value - target,
            };
            part.by_value.push(self.vf_coef * slope);
            part.clipped_values += f64::from(outside);
        }
        part
    }
}
