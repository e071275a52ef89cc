//! Routing on the CPU.

use super::super::cpu::storage::{dims2, expect_dims, tensor, unwritten};
use super::super::update;
use super::{GroupScore, LogitLoss, RouterSpec, Score, sigmoid, two_level};
use candle_core::Tensor;
use ft_base::{Error, Result};
use rayon::prelude::*;

/// The experts of each token, in host memory.
#[derive(Debug, Clone)]
pub(super) struct HostRouting {
    pub(super) spec: RouterSpec,
    /// E
    pub(super) experts: usize,
    /// `[N, E]`
    pub(super) scores: Vec<f32>,
    /// `[N, K]`
    pub(super) chosen: Vec<u32>,
    /// `[N, K]`
    pub(super) weights: Vec<f32>,
    /// The places in `chosen` in the order of the experts, then of the tokens.
    pub(super) order: Vec<u32>,
    /// Where an expert begins in `order`, `[E + 1]`.
    pub(super) starts: Vec<usize>,
    /// Softmax: log Σ e^z of each token, `[N]`.
    log_sums: Vec<f32>,
}

/// Softmax of a row, in place; returns the logarithm of the sum.
pub(super) fn softmax(row: &mut [f32]) -> f32 {
    let highest = row.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
    let mut sum = 0.0f32;
    for x in row.iter_mut() {
        *x = (*x - highest).exp();
        sum += *x;
    }
    row.iter_mut().for_each(|x| *x /= sum);
    highest + sum.ln()
}

/// Takes the `count` largest values for which `open` is true, the largest first; ties: the first.
fn largest(values: &[f32], count: usize, open: impl Fn(usize) -> bool, mut take: impl FnMut(usize)) {
    let mut best: Vec<(f32, usize)> = Vec::with_capacity(count + 1);
    for (i, &value) in values.iter().enumerate() {
        if !open(i) || best.len() == count && best.last().is_none_or(|last| value <= last.0) {
            continue;
        }
        let place = best.partition_point(|b| b.0 >= value);
        best.insert(place, (value, i));
        best.truncate(count);
    }
    best.into_iter().for_each(|(_, i)| take(i));
}

impl RouterSpec {
    /// Chooses the experts of one token. `choice`: the scores after the correction, `[E]`.
    fn choose(&self, choice: &[f32], to: &mut [u32]) {
        let mut open = vec![true; choice.len()];
        if let Some(groups) = self.groups {
            let size = choice.len() / groups.count;
            let rate = |group: &[f32]| {
                let mut sum = 0.0;
                let members = match groups.score {
                    GroupScore::Largest => 1,
                    GroupScore::TwoLargest => 2,
                    GroupScore::Sum => return group.iter().sum(),
                };
                largest(group, members, |_| true, |i| sum += group[i]);
                sum
            };
            let ratings: Vec<f32> = choice.chunks(size).map(rate).collect();
            open.fill(false);
            largest(
                &ratings,
                groups.chosen,
                |_| true,
                |g| {
                    open[g * size..(g + 1) * size].fill(true);
                },
            );
        }
        let mut next = to.iter_mut();
        largest(
            choice,
            self.top_k,
            |i| open[i],
            |i| {
                if let Some(to) = next.next() {
                    *to = i as u32;
                }
            },
        );
    }

    /// As `route`, on the CPU. `logits` `[N, E]` f32, of a router of two levels `[N, E+G]`; `correction` `[E]` f32:
    /// added to the scores for the choice.
    ///
    /// # Errors
    /// Shapes that do not fit; more experts for a token than there are; logits that are not finite.
    pub(super) fn route_on_host(&self, logits: &Tensor, correction: Option<&Tensor>) -> Result<HostRouting> {
        let (tokens, outputs) = dims2(logits, "the logits of a router")?;
        let experts = outputs.saturating_sub(self.group_logits());
        let correction = match correction {
            Some(c) => update::to_f32_vec(c)?,
            None => Vec::new(),
        };
        let mut scores = update::to_f32_vec(logits)?;
        if !scores
            .par_chunks(1 << 14)
            .all(|part| part.iter().all(|x| x.is_finite()))
        {
            return Err(Error::non_finite("the logits of a router are not finite"));
        }
        if let (Score::TwoLevel, Some(groups)) = (self.score, self.groups) {
            scores = two_level::scores(&scores, (experts, groups.count));
        }
        let k = self.top_k;
        let mut chosen = vec![0u32; tokens * k];
        let mut weights = vec![0f32; tokens * k];
        let mut log_sums = vec![0f32; tokens];
        let rows = scores.par_chunks_mut(experts).zip(&mut log_sums);
        let places = chosen.par_chunks_mut(k).zip(weights.par_chunks_mut(k));
        rows.zip(places).for_each(|((row, log_sum), (chosen, weights))| {
            match self.score {
                Score::Softmax => *log_sum = softmax(row),
                Score::Sigmoid => row.iter_mut().for_each(|x| *x = sigmoid(*x)),
                Score::TwoLevel => {}
            }
            if correction.is_empty() {
                self.choose(row, chosen);
            } else {
                let corrected: Vec<f32> = row.iter().zip(&correction).map(|(p, c)| p + c).collect();
                self.choose(&corrected, chosen);
            }
            let sum = self.divisor(row, chosen);
            for (weight, &expert) in weights.iter_mut().zip(&*chosen) {
                *weight = row[expert as usize] / sum * self.scale;
            }
        });
        let mut starts = vec![0usize; experts + 1];
        chosen.iter().for_each(|&e| starts[e as usize + 1] += 1);
        (0..experts).for_each(|e| starts[e + 1] += starts[e]);
        let mut next = starts.clone();
        let mut order = vec![0u32; chosen.len()];
        for (place, &e) in chosen.iter().enumerate() {
            order[next[e as usize]] = place as u32;
            next[e as usize] += 1;
        }
        Ok(HostRouting {
            spec: *self,
            experts,
            scores,
            chosen,
            weights,
            order,
            starts,
            log_sums,
        })
    }

    /// The divisor of the weights of a token.
    fn divisor(&self, scores: &[f32], chosen: &[u32]) -> f32 {
        let sum = || chosen.iter().map(|&e| scores[e as usize]).sum::<f32>();
        match (self.renormalize, self.score) {
            (false, _) => 1.0,
            (true, Score::Softmax | Score::TwoLevel) => sum(),
            // As the models: all sigmoids can be 0.
            (true, Score::Sigmoid) => sum() + 1e-20,
        }
    }
}
impl HostRouting {
    /// Number of tokens.
    pub(super) fn tokens(&self) -> usize {
        self.chosen.len() / self.spec.top_k
    }

    pub(super) fn counts(&self) -> Vec<usize> {
        self.starts.windows(2).map(|w| w[1] - w[0]).collect()
    }

    /// Sum of the scores of each expert over the tokens, `[E]`.
    pub(super) fn score_sums(&self) -> Vec<f64> {
        let mut sums = vec![0f64; self.experts];
        for row in self.scores.chunks(self.experts) {
            sums.iter_mut().zip(row).for_each(|(sum, p)| *sum += f64::from(*p));
        }
        sums
    }

    /// Sum over the tokens of (log Σ e^z)²; 0 for sigmoid scores.
    pub(super) fn log_sum_squares(&self) -> f64 {
        self.log_sums.iter().map(|z| f64::from(*z).powi(2)).sum()
    }

    /// Sum over the tokens of the entropy of their scores, in nats. Sigmoid scores are divided by their sum.
    pub(super) fn entropy_sum(&self) -> f64 {
        let of = |row: &[f32]| -> f64 {
            let sum: f64 = row.iter().map(|p| f64::from(*p)).sum();
            let part = |p: &f32| match f64::from(*p) / sum {
                p if p > 0.0 => -p * p.ln(),
                _ => 0.0,
            };
            row.iter().map(part).sum()
        };
        let rows: Vec<f64> = self.scores.par_chunks(self.experts).map(of).collect();
        rows.into_iter().sum()
    }

    /// The gradient of the logits, `[N, E]` f32 on the CPU, from that of the weights: N·K values, on any device, in the order
    /// of `ExpertAssignment`.
    ///
    /// # Errors
    /// Another number of values.
    pub(super) fn backward(&self, d_weights: &Tensor, extra: &LogitLoss) -> Result<Tensor> {
        expect_dims(d_weights, "the gradient of the weights of experts", &[self.order.len()])?;
        let mut by_token = vec![0f32; self.order.len()];
        for (place, d) in self.order.iter().zip(update::to_f32_vec(d_weights)?) {
            by_token[*place as usize] = d;
        }
        self.logits_backward(&by_token, extra)
    }

    /// As `backward`, from `[N, K]`.
    pub(super) fn logits_backward(&self, d_weights: &[f32], extra: &LogitLoss) -> Result<Tensor> {
        let (e, k) = (self.experts, self.spec.top_k);
        let outputs = self.spec.outputs(e);
        let mut dz = unwritten(self.tokens() * outputs);
        dz.par_chunks_mut(outputs).enumerate().for_each(|(token, dz)| {
            let scores = &self.scores[token * e..][..e];
            let chosen = &self.chosen[token * k..][..k];
            let d_weights = &d_weights[token * k..][..k];
            // The gradient of the scores.
            dz.fill(0.0);
            let sum = self.spec.divisor(scores, chosen);
            let shared: f32 = if self.spec.renormalize {
                let weights = &self.weights[token * k..][..k];
                d_weights.iter().zip(weights).map(|(d, w)| d * w).sum::<f32>() / sum
            } else {
                0.0
            };
            for (d, &expert) in d_weights.iter().zip(chosen) {
                dz[expert as usize] = d * self.spec.scale / sum - shared;
            }
            match self.spec.score {
                Score::Sigmoid => dz.iter_mut().zip(scores).for_each(|(d, p)| *d *= p * (1.0 - p)),
                Score::Softmax => {
                    dz.iter_mut().zip(&extra.balance).for_each(|(d, b)| *d += b);
                    let z = 2.0 * extra.z * self.log_sums[token];
                    let mean: f32 = dz.iter().zip(scores).map(|(d, p)| d * p).sum();
                    dz.iter_mut().zip(scores).for_each(|(d, p)| *d = p * (*d - mean + z));
                }
                Score::TwoLevel => self.two_level_backward(scores, chosen, extra.two_level.as_ref(), dz),
            }
        });
        tensor(dz, (self.tokens(), outputs))
    }
}
