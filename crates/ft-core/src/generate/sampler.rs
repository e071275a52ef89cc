//! Samples a token from logits: temperature, then top-k, then top-p, in the order of transformers' warpers.

use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};
use crate::ops::sample::{self, SampledToken, SamplingRule};
use crate::ops::softmax::{self, sum};
use candle_core::Tensor;

/// The sampling parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    /// 0: takes the most likely token.
    pub temperature: f32,
    /// Keeps only the k most likely tokens (and those as likely as the last of them).
    pub top_k: Option<usize>,
    /// Keeps only the smallest set of most likely tokens whose probabilities reach p.
    pub top_p: Option<f32>,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Sampler {
    /// True if all tokens can be sampled.
    fn keeps_all(&self, vocab: usize) -> bool {
        self.top_k.is_none_or(|k| k == 0 || k >= vocab) && self.top_p.is_none_or(|p| p >= 1.0)
    }

    /// A smaller temperature has no finite inverse.
    fn is_greedy(&self) -> bool {
        self.temperature < f32::MIN_POSITIVE
    }

    fn uniform(&self, number: u64, position: usize) -> f64 {
        Rng::new(self.seed, Stream::Sampling, &[number]).uniform64(position as u64)
    }

    /// As `next`, for rows of logits `[R, V]` before the cap of the model, on a GPU; `places`: number and position of each
    /// row. `None`: the rows must be sampled on the host.
    ///
    /// # Errors
    /// As `next`.
    pub fn next_on_gpu(
        &self,
        logits: &Tensor,
        cap: Option<f32>,
        places: &[(u64, usize)],
    ) -> Result<Option<Vec<SampledToken>>> {
        if logits.device().is_cpu() || !(self.is_greedy() || self.keeps_all(logits.dim(1)?)) {
            return Ok(None);
        }
        let numbers: Vec<f64> = places.iter().map(|&(number, at)| self.uniform(number, at)).collect();
        let greedy = self.is_greedy();
        let rule = SamplingRule {
            cap,
            temperature: if greedy { 1.0 } else { self.temperature },
            uniform: (!greedy).then_some(&numbers[..]),
        };
        let rows = sample::draw(logits, &rule)?.into_iter();
        Ok(Some(rows.map(|row| row.ok_or_else(not_finite)).collect::<Result<_>>()?))
    }

    /// Samples the token after position `position` of request `number`. The result depends only on the logits `[V]` and
    /// on (seed, number, position), so the other rows of the batch do not matter.
    ///
    /// # Errors
    /// Logits that are NaN or infinite.
    pub fn next(&self, logits: &[f32], number: u64, position: usize) -> Result<SampledToken> {
        let highest = softmax::highest(logits);
        if !highest.is_finite() {
            return Err(not_finite());
        }
        let greedy = self.is_greedy();
        let mut weights = vec![0f32; logits.len()];
        let temperature = if greedy { 1.0 } else { self.temperature };
        softmax::weights(logits, highest, temperature, &mut weights);
        let all = sum(&weights);
        let drawn = |id: usize, total: f64| {
            let log_prob = |total: f64| ((logits[id] - highest) / temperature) - total.ln() as f32;
            SampledToken {
                id: id as u32,
                log_prob: log_prob(total),
                full_log_prob: log_prob(all),
            }
        };
        if greedy {
            // In a tie, the lowest id.
            let id = logits.iter().position(|x| *x == highest).unwrap_or(0);
            return Ok(drawn(id, all));
        }
        let uniform = self.uniform(number, position);
        if self.keeps_all(logits.len()) {
            return Ok(drawn(pick(&weights, uniform * all), all));
        }
        let kept = self.kept(logits, &weights);
        let weights: Vec<f32> = kept.iter().map(|&id| weights[id as usize]).collect();
        let total = sum(&weights);
        Ok(drawn(kept[pick(&weights, uniform * total)] as usize, total))
    }

    /// Returns the tokens that top-k and top-p keep, most likely first; at least one.
    fn kept(&self, logits: &[f32], weights: &[f32]) -> Vec<u32> {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        if let Some(k) = self.top_k.filter(|&k| k > 0 && k < order.len()) {
            let (_, &mut last, _) = order.select_nth_unstable_by(k - 1, by_logit);
            let lowest = logits[last as usize];
            order.retain(|&id| logits[id as usize] >= lowest);
        }
        let Some(p) = self.top_p.filter(|&p| p < 1.0) else {
            order.sort_unstable_by(by_logit);
            return order;
        };
        let of = |id: &u32| weights[*id as usize] as f64;
        let enough = p as f64 * order.iter().map(of).sum::<f64>();
        // Few tokens are likely: sorts only as many as needed.
        let mut first = 256.min(order.len());
        loop {
            if first < order.len() {
                order.select_nth_unstable_by(first - 1, by_logit);
            }
            order[..first].sort_unstable_by(by_logit);
            let mut sum = 0.0;
            // A token is kept if those before it have not reached p; the first is always kept.
            let stays = order[..first].iter().take_while(|id| {
                let stays = sum < enough;
                sum += of(id);
                stays
            });
            let stays = stays.count();
            if stays < first || first == order.len() {
                order.truncate(stays.max(1));
                return order;
            }
            first = (8 * first).min(order.len());
        }
    }
}

fn not_finite() -> Error {
    Error::non_finite("the model's output is not finite")
        .found("a logit that is not a number")
        .hint("check the weights, or load them as f32")
}

/// Returns the first index at which the cumulative weight exceeds `left`. If rounding prevents this, the last
/// weight that is not 0.
fn pick(weights: &[f32], mut left: f64) -> usize {
    for block in (0..weights.len()).step_by(1024) {
        let part = &weights[block..weights.len().min(block + 1024)];
        let total = sum(part);
        if total < left {
            left -= total;
            continue;
        }
        for (i, w) in part.iter().enumerate() {
            left -= *w as f64;
            if left < 0.0 {
                return block + i;
            }
        }
    }
    weights.iter().rposition(|w| *w > 0.0).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_k: Option<usize>, top_p: Option<f32>) -> Sampler {
        Sampler {
            temperature,
            top_k,
            top_p,
            seed: 5,
        }
    }

    /// Returns the frequency of each id over many positions.
    fn shares(s: &Sampler, logits: &[f32]) -> Vec<f64> {
        let n = 40_000;
        let mut counts = vec![0.0; logits.len()];
        for position in 0..n {
            counts[s.next(logits, 3, position).unwrap().id as usize] += 1.0 / n as f64;
        }
        counts
    }

    fn logits(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln() + 7.0).collect()
    }

    fn assert_shares(got: &[f64], want: &[f64]) {
        for (g, w) in got.iter().zip(want) {
            assert!((g - w).abs() < 0.01 && (*w > 0.0 || *g == 0.0), "{got:?} {want:?}");
        }
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        let s = sampler(0.0, Some(1), Some(0.1));
        assert_eq!(s.next(&[0.5, 2.0, -1.0, 2.0], 0, 0).unwrap().id, 1);
        assert_eq!(s.next(&[f32::NEG_INFINITY, -3.0], 0, 0).unwrap().id, 1);
        let nearly = sampler(1e-40, None, None);
        assert_eq!(nearly.next(&[0.5, 2.0, -1.0], 0, 0).unwrap().id, 1);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let l = logits(&[0.1, 0.4, 0.2, 0.3]);
        assert_shares(&shares(&sampler(1.0, None, None), &l), &[0.1, 0.4, 0.2, 0.3]);
        let flat: Vec<f64> = [0.1f64, 0.4, 0.2, 0.3].iter().map(|p| p.sqrt()).collect();
        let sum: f64 = flat.iter().sum();
        let want: Vec<f64> = flat.iter().map(|p| p / sum).collect();
        assert_shares(&shares(&sampler(2.0, None, None), &l), &want);
    }

    #[test]
    fn top_k_and_top_p_cut_in_this_order() {
        let l = logits(&[0.1, 0.4, 0.2, 0.3]);
        assert_shares(
            &shares(&sampler(1.0, Some(2), None), &l),
            &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0],
        );
        // 0.4 alone does not reach 0.6, with 0.3 it does.
        assert_shares(
            &shares(&sampler(1.0, None, Some(0.6)), &l),
            &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0],
        );
        // After top-k 2 the first has 4/7 > 0.55: only this one is kept.
        assert_shares(&shares(&sampler(1.0, Some(2), Some(0.55)), &l), &[0.0, 1.0, 0.0, 0.0]);
        assert_shares(&shares(&sampler(1.0, None, Some(0.0)), &l), &[0.0, 1.0, 0.0, 0.0]);
        // Equal to the k-th: kept as well.
        assert_shares(
            &shares(&sampler(1.0, Some(1), None), &logits(&[0.4, 0.4, 0.2])),
            &[0.5, 0.5, 0.0],
        );
    }

    #[test]
    fn the_probability_over_all_tokens_has_the_mass_that_is_cut_off() {
        let l = logits(&[0.1, 0.4, 0.2, 0.3]);
        for (s, kept) in [
            (sampler(1.0, Some(2), None), 0.7),
            (sampler(1.0, None, Some(0.6)), 0.7),
            (sampler(1.0, Some(1), None), 0.4),
            (sampler(1.0, None, None), 1.0),
        ] {
            for position in 0..8 {
                let drawn = s.next(&l, 3, position).unwrap();
                let p = [0.1f32, 0.4, 0.2, 0.3][drawn.id as usize];
                assert!((drawn.full_log_prob - p.ln()).abs() < 1e-5, "{drawn:?}");
                assert!((drawn.log_prob - (p / kept).ln()).abs() < 1e-5, "{drawn:?}");
            }
        }
    }

    #[test]
    fn a_draw_depends_on_seed_row_and_position_alone() {
        let l = logits(&[0.25; 4]);
        let s = sampler(1.0, None, None);
        let draw = |s: &Sampler, row| (0..64).map(|p| s.next(&l, row, p).unwrap().id).collect::<Vec<_>>();
        assert_eq!(draw(&s, 0), draw(&s, 0));
        assert_ne!(draw(&s, 0), draw(&s, 1));
        assert_ne!(draw(&s, 0), draw(&Sampler { seed: 6, ..s }, 0));
    }

    #[test]
    fn logits_that_are_not_numbers_are_refused() {
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(sampler(0.0, None, None).next(&[0.0, bad], 0, 0).is_err());
        }
    }
}
