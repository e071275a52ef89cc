//! Routers of two levels: a softmax over groups of experts, times a softmax over the experts of a group (SMILE, arXiv
//! 2212.05191, section 3.2). With each group on a rank of its own, a token goes to the ranks of its groups only.
//!
//! Letters as in `routing`.

use super::super::cpu::storage::unwritten;
use super::Score;
use super::host::{HostRouting, softmax};
use rayon::prelude::*;

/// Gradients of the balance loss of a router of two levels.
#[derive(Debug, Clone, Default)]
pub struct TwoLevelLoss {
    /// Gradient of the score of each group, `[G]`, for every token.
    pub groups: Vec<f32>,
    /// Gradient of the score of each expert inside its group, `[E]`, for the tokens of the group.
    pub within: Vec<f32>,
}

/// Sums for the balance loss of a router of two levels.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TwoLevelSums {
    /// Tokens of each group, `[G]`.
    pub counts: Vec<u64>,
    /// Sum of the score of each group over all tokens, `[G]`.
    pub groups: Vec<f64>,
    /// Sum of the score of each expert inside its group over the tokens of the group, `[E]`.
    pub within: Vec<f64>,
}

/// Scores `[N, E]` of logits `[N, E+G]`.
pub(super) fn scores(logits: &[f32], (experts, groups): (usize, usize)) -> Vec<f32> {
    let mut scores = unwritten(logits.len() / (experts + groups) * experts);
    let rows = scores.par_chunks_mut(experts).zip(logits.par_chunks(experts + groups));
    rows.for_each(|(scores, logits)| {
        let (within, of_groups) = logits.split_at(experts);
        let mut of_groups = of_groups.to_vec();
        softmax(&mut of_groups);
        scores.copy_from_slice(within);
        for (scores, group) in scores.chunks_mut(experts / groups).zip(of_groups) {
            softmax(scores);
            scores.iter_mut().for_each(|p| *p *= group);
        }
    });
    scores
}

impl HostRouting {
    /// The groups of the router and the experts of one: G and M.
    fn groups(&self) -> (usize, usize) {
        let count = self.spec.groups.map_or(1, |g| g.count);
        (count, self.experts / count)
    }

    /// True for each group that has an expert of `chosen`.
    fn in_groups(&self, chosen: &[u32]) -> Vec<bool> {
        let (count, members) = self.groups();
        let mut reached = vec![false; count];
        chosen.iter().for_each(|&e| reached[e as usize / members] = true);
        reached
    }

    /// As `Routing::group_visits`.
    pub(super) fn group_visits(&self) -> Option<u64> {
        self.spec.groups.filter(|g| g.count > 1)?;
        let tokens = self.chosen.chunks(self.spec.top_k);
        let visits = tokens.map(|chosen| self.in_groups(chosen).into_iter().filter(|r| *r).count() as u64);
        Some(visits.sum())
    }

    /// As `Routing::two_level_sums`.
    pub(super) fn two_level_sums(&self) -> Option<TwoLevelSums> {
        if self.spec.score != Score::TwoLevel {
            return None;
        }
        let (count, members) = self.groups();
        let mut sums = TwoLevelSums {
            counts: vec![0; count],
            groups: vec![0.0; count],
            within: vec![0.0; self.experts],
        };
        let tokens = self
            .scores
            .chunks(self.experts)
            .zip(self.chosen.chunks(self.spec.top_k));
        for (scores, chosen) in tokens {
            let reached = self.in_groups(chosen);
            for (g, p) in scores.chunks(members).enumerate() {
                let sum: f64 = p.iter().map(|p| f64::from(*p)).sum();
                sums.groups[g] += sum;
                if reached[g] && sum > 0.0 {
                    sums.counts[g] += 1;
                    let to = sums.within[g * members..].iter_mut();
                    to.zip(p).for_each(|(to, p)| *to += f64::from(*p) / sum);
                }
            }
        }
        Some(sums)
    }

    /// From the gradient of the scores, the first E of `dz`, to that of the logits `[E+G]`: p = s·q with s the softmax of the
    /// groups and q that inside a group.
    pub(super) fn two_level_backward(
        &self,
        scores: &[f32],
        chosen: &[u32],
        loss: Option<&TwoLevelLoss>,
        dz: &mut [f32],
    ) {
        let (count, members) = self.groups();
        let reached = self.in_groups(chosen);
        let (within, of_groups) = dz.split_at_mut(self.experts);
        for (g, d) in within.chunks_mut(members).enumerate() {
            let p = &scores[g * members..][..members];
            let s: f32 = p.iter().sum();
            let q = |p: &f32| if s > 0.0 { p / s } else { 0.0 };
            // Of s: Σ q ∂p; of q: s ∂p, and what the loss adds.
            let of_s: f32 = d.iter().zip(p).map(|(d, p)| d * q(p)).sum();
            d.iter_mut().for_each(|d| *d *= s);
            if let Some(loss) = loss.filter(|_| reached[g]) {
                let more = &loss.within[g * members..][..members];
                d.iter_mut().zip(more).for_each(|(d, more)| *d += more);
            }
            let mean: f32 = d.iter().zip(p).map(|(d, p)| d * q(p)).sum();
            d.iter_mut().zip(p).for_each(|(d, p)| *d = q(p) * (*d - mean));
            of_groups[g] = of_s + loss.map_or(0.0, |loss| loss.groups[g]);
        }
        let s = |g: usize| scores[g * members..][..members].iter().sum::<f32>();
        let mean: f32 = (0..count).map(|g| of_groups[g] * s(g)).sum();
        (0..count).for_each(|g| of_groups[g] = s(g) * (of_groups[g] - mean));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ExpertGroups, GroupScore, LogitLoss, RouterSpec};
    use super::*;
    use crate::oracle::random;
    use crate::update::to_f32_vec;

    const EXPERTS: usize = 6;
    const GROUPS: usize = 3;
    const MEMBERS: usize = EXPERTS / GROUPS;

    fn spec(top_k: usize, chosen: usize, renormalize: bool) -> RouterSpec {
        RouterSpec {
            score: Score::TwoLevel,
            top_k,
            renormalize,
            scale: 1.5,
            groups: Some(ExpertGroups {
                count: GROUPS,
                chosen,
                score: GroupScore::Sum,
            }),
        }
    }

    fn softmax64(z: &[f64]) -> Vec<f64> {
        let sum: f64 = z.iter().map(|z| z.exp()).sum();
        z.iter().map(|z| z.exp() / sum).collect()
    }

    /// s `[G]` and q `[E]` of the logits of a token.
    fn levels(z: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let within = z[..EXPERTS].chunks(MEMBERS).flat_map(softmax64).collect();
        (softmax64(&z[EXPERTS..]), within)
    }

    #[test]
    fn a_group_is_chosen_first_then_its_experts() {
        let logits = random((50, EXPERTS + GROUPS), 3);
        let z: Vec<f64> = to_f32_vec(&logits).unwrap().iter().map(|x| f64::from(*x)).collect();
        let routing = spec(1, 1, false).route_on_host(&logits, None).unwrap();
        assert_eq!((routing.tokens(), routing.counts().len()), (50, EXPERTS));
        for (t, z) in z.chunks(EXPERTS + GROUPS).enumerate() {
            let (s, q) = levels(z);
            let best = |x: &[f64]| (0..x.len()).max_by(|a, b| x[*a].total_cmp(&x[*b])).unwrap();
            let g = best(&s);
            let e = g * MEMBERS + best(&q[g * MEMBERS..][..MEMBERS]);
            assert_eq!(routing.chosen[t] as usize, e, "token {t}");
            assert!((f64::from(routing.weights[t]) - 1.5 * s[g] * q[e]).abs() < 1e-6);
        }
        assert_eq!(routing.group_visits(), Some(50));
        let two = spec(2, 2, true).route_on_host(&logits, None).unwrap();
        assert!((50..=100).contains(&two.group_visits().unwrap()));
    }

    /// The weights, and the balance loss with the choices held fixed.
    #[test]
    fn gradients_as_differences() {
        let (n, width) = (4, EXPERTS + GROUPS);
        for (spec, balanced) in [
            (spec(1, 1, false), true),
            (spec(2, 1, true), true),
            (spec(3, 2, true), false),
        ] {
            let logits = random((n, width), 5);
            let routing = spec.route_on_host(&logits, None).unwrap();
            let k = spec.top_k;
            let d_weights = to_f32_vec(&random((n, k), 6)).unwrap();
            let loss = TwoLevelLoss {
                groups: to_f32_vec(&random((1, GROUPS), 7)).unwrap(),
                within: to_f32_vec(&random((1, EXPERTS), 8)).unwrap(),
            };
            let extra = LogitLoss {
                two_level: balanced.then(|| loss.clone()),
                ..LogitLoss::default()
            };
            let value = |z: &[f64]| -> f64 {
                let of_token = |t: usize| {
                    let (s, q) = levels(&z[t * width..][..width]);
                    let chosen: Vec<usize> = routing.chosen[t * k..][..k].iter().map(|e| *e as usize).collect();
                    let p = |e: usize| s[e / MEMBERS] * q[e];
                    let sum: f64 = if spec.renormalize {
                        chosen.iter().map(|e| p(*e)).sum()
                    } else {
                        1.0
                    };
                    let d = &d_weights[t * k..];
                    let weights = chosen.iter().zip(d).map(|(e, d)| 1.5 * p(*e) / sum * f64::from(*d));
                    let mut total: f64 = weights.sum();
                    if balanced {
                        total += s.iter().zip(&loss.groups).map(|(s, l)| s * f64::from(*l)).sum::<f64>();
                        let own = |e: usize| chosen.iter().any(|c| c / MEMBERS == e / MEMBERS);
                        let of_expert = |e: usize| if own(e) { q[e] * f64::from(loss.within[e]) } else { 0.0 };
                        total += (0..EXPERTS).map(of_expert).sum::<f64>();
                    }
                    total
                };
                (0..n).map(of_token).sum()
            };
            let z: Vec<f64> = to_f32_vec(&logits).unwrap().iter().map(|x| f64::from(*x)).collect();
            let got = to_f32_vec(&routing.logits_backward(&d_weights, &extra).unwrap()).unwrap();
            for i in 0..z.len() {
                let at = |step: f64| {
                    let mut moved = z.clone();
                    moved[i] += step;
                    value(&moved)
                };
                let want = (at(1e-5) - at(-1e-5)) / 2e-5;
                let found = f64::from(got[i]);
                assert!(
                    (found - want).abs() < 1e-4 * want.abs().max(1.0),
                    "{spec:?} {i}: {found} {want}"
                );
            }
        }
    }

    #[test]
    fn sums_of_the_levels() {
        let logits = random((9, EXPERTS + GROUPS), 1);
        let routing = spec(2, 1, true).route_on_host(&logits, None).unwrap();
        let sums = routing.two_level_sums().unwrap();
        assert_eq!(sums.counts.iter().sum::<u64>(), 9);
        assert!((sums.groups.iter().sum::<f64>() - 9.0).abs() < 1e-5);
        for (g, n) in sums.counts.iter().enumerate() {
            let within: f64 = sums.within[g * MEMBERS..][..MEMBERS].iter().sum();
            assert!((within - *n as f64).abs() < 1e-5);
        }
        let none = RouterSpec {
            groups: None,
            ..spec(1, 1, false)
        };
        assert!(none.route(&logits, None).is_err());
    }
}
