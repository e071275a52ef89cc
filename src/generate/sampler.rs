//! From logits to one token: temperature, then top-k, then top-p, as transformers orders its warpers.

use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// Only the k most likely tokens (and those as likely as the last of them).
    pub top_k: Option<usize>,
    /// Only the fewest tokens, most likely first, whose probabilities reach p.
    pub top_p: Option<f32>,
    pub seed: u64,
}

/// A token that was chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drawn {
    pub id: u32,
    /// Natural log of its probability among the tokens that could be drawn; greedy: among all.
    pub log_prob: f32,
}

impl Sampler {
    /// The token after position `position` of the request with number `number`: a function of the logits `[V]` and
    /// of (seed, number, position) alone, so it does not matter which rows are decoded together.
    ///
    /// Errors: logits that are not numbers.
    pub fn next(&self, logits: &[f32], number: u64, position: usize) -> Result<Drawn> {
        if logits.is_empty() || logits.iter().any(|x| x.is_nan() || *x == f32::INFINITY) {
            return Err(Error::new("the model's output is not finite")
                .found("a logit that is not a number")
                .hint("check the weights, or use `--dtype f32`"));
        }
        if self.temperature <= 0.0 {
            let id = most_likely(logits);
            let highest = logits[id as usize];
            let total: f64 = logits.iter().map(|x| ((x - highest) as f64).exp()).sum();
            let log_prob = -total.ln() as f32;
            return Ok(Drawn { id, log_prob });
        }
        let candidates = self.candidates(logits);
        let total: f64 = candidates.iter().map(|(_, p)| p).sum();
        let rng = Rng::new(self.seed, Stream::Sampling, &[number]);
        let mut left = rng.uniform64(position as u64) * total;
        let of = |&(id, p): &(u32, f64)| Drawn {
            id,
            log_prob: (p / total).ln() as f32,
        };
        for candidate in &candidates {
            left -= candidate.1;
            if left < 0.0 {
                return Ok(of(candidate));
            }
        }
        // Rounding used up the last candidate that has a probability at all.
        candidates
            .iter()
            .rfind(|(_, p)| *p > 0.0)
            .map(of)
            .ok_or_else(|| Error::new("no token is left to draw from"))
    }

    /// Tokens that can be drawn, most likely first, with weights relative to the most likely one.
    fn candidates(&self, logits: &[f32]) -> Vec<(u32, f64)> {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        if let Some(k) = self.top_k.filter(|&k| k > 0 && k < order.len()) {
            let (_, &mut last, _) = order.select_nth_unstable_by(k - 1, by_logit);
            let lowest = logits[last as usize];
            order.retain(|&id| logits[id as usize] >= lowest);
        }
        order.sort_unstable_by(by_logit);
        let highest = logits[order[0] as usize];
        let weight = |id: u32| (((logits[id as usize] - highest) / self.temperature) as f64).exp();
        let mut candidates: Vec<(u32, f64)> = order.into_iter().map(|id| (id, weight(id))).collect();
        if let Some(p) = self.top_p.filter(|&p| p < 1.0) {
            let enough = p as f64 * candidates.iter().map(|(_, w)| w).sum::<f64>();
            let mut sum = 0.0;
            // A token stays if those before it have not reached p; the first always stays.
            let kept = candidates.iter().take_while(|(_, w)| {
                let stays = sum < enough;
                sum += w;
                stays
            });
            let kept = kept.count().max(1);
            candidates.truncate(kept);
        }
        candidates
    }
}

/// The highest logit; the lowest id where several are equal.
fn most_likely(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, x) in logits.iter().enumerate() {
        if *x > logits[best] {
            best = id;
        }
    }
    best as u32
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

    /// How often each id is drawn over many positions.
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
        // After top-k 2 the first has 4/7 > 0.55: it alone is left.
        assert_shares(&shares(&sampler(1.0, Some(2), Some(0.55)), &l), &[0.0, 1.0, 0.0, 0.0]);
        assert_shares(&shares(&sampler(1.0, None, Some(0.0)), &l), &[0.0, 1.0, 0.0, 0.0]);
        // Equal to the last of the k: kept as well.
        assert_shares(
            &shares(&sampler(1.0, Some(1), None), &logits(&[0.4, 0.4, 0.2])),
            &[0.5, 0.5, 0.0],
        );
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
