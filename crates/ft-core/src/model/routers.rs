//! The routers of a model in a training step: the losses that keep the load of their experts even, and the
//! metrics of the load.
//!
//! The balance loss is E · Σ_e f_e · p_e (Switch Transformer, arXiv 2101.03961, equation 4), as transformers computes it:
//! f_e is the number of tokens of expert e divided by that of all tokens, and p_e its mean score, both over the tokens of
//! all layers together. The z-loss is the mean of (log Σ e^z)² over the same tokens (ST-MoE, arXiv 2202.08906, equation 5).
//! A router of two levels (SMILE, arXiv 2212.05191) has a balance loss for each level: G · Σ_g f_g · p_g over its groups, and
//! M · Σ_e f_e · q_e over the M experts of each group, where f_e and q_e are those of the tokens of the group; the second is
//! the mean over the groups, weighted with their tokens. Each is 1 for an even load of one expert for a token.
//! So the gradients of a layer need the numbers of all layers: the forward pass collects them, the backward pass reads them.
//!
//! Letters: E experts, N tokens of a micro-batch, L layers with experts.

use crate::base::{Error, Result};
use crate::ops::routing::{LogitLoss, Routing, Score, TwoLevelLoss, TwoLevelSums};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::AddAssign;

/// Factors of the losses of the routers; 0: the loss is not used.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RouterLosses {
    /// Of the balance loss, which keeps the load of the experts even.
    pub balance: f64,
    /// Of the z-loss, which keeps the logits of the routers small.
    pub z: f64,
}

impl RouterLosses {
    /// True if a loss is used.
    pub fn any(&self) -> bool {
        self.balance != 0.0 || self.z != 0.0
    }

    /// Checks that the model has routers with these losses.
    ///
    /// # Errors
    /// The model has no experts, or the scores of its routers are not a softmax.
    pub fn check(&self, spec: &super::Spec) -> Result<()> {
        if !self.any() {
            return Ok(());
        }
        let routers: Vec<Score> = spec
            .layers
            .iter()
            .filter_map(|l| l.experts.map(|e| e.router.score))
            .collect();
        if routers.is_empty() {
            return Err(Error::unsupported("a loss of routers needs a model with experts")
                .found(format!("`{}` without experts", spec.model_type))
                .expected("a mixture of experts")
                .hint("set `RouterLosses::balance` and `RouterLosses::z` to 0"));
        }
        if self.z != 0.0 && routers.contains(&Score::TwoLevel) {
            return Err(
                Error::unsupported("the z-loss is defined for one softmax over all experts")
                    .found(format!("`{}`, whose router has two levels", spec.model_type))
                    .expected("a router with one level")
                    .hint("set `RouterLosses::z` to 0"),
            );
        }
        if routers.contains(&Score::Sigmoid) {
            return Err(
                Error::unsupported("the losses of routers are defined for softmax scores only")
                    .found(format!("`{}`, whose router uses the sigmoid", spec.model_type))
                    .expected("a router with softmax scores")
                    .hint("set `RouterLosses::balance` and `RouterLosses::z` to 0"),
            );
        }
        Ok(())
    }
}

/// Sums over the tokens of one layer.
#[derive(Debug, Clone, Default)]
struct LayerSums {
    /// Tokens of each expert, `[E]`.
    counts: Vec<u64>,
    /// Sum of the scores of each expert, `[E]`.
    scores: Vec<f64>,
    /// Sum of (log Σ e^z)².
    squares: f64,
    /// Sum of the entropies of the scores.
    entropy: f64,
    /// N
    tokens: u64,
    /// Of a router of two levels.
    two_level: Option<TwoLevelSums>,
    /// Sum of the number of groups of a token, if the router has groups.
    visits: Option<u64>,
}

impl LayerSums {
    /// Adds what the metrics of the load need.
    fn add_load(&mut self, more: &Self) {
        add_all(&mut self.counts, &more.counts);
        self.entropy += more.entropy;
        self.tokens += more.tokens;
        if let Some(visits) = more.visits {
            self.visits = Some(visits + self.visits.unwrap_or(0));
        }
    }
}

fn add_all<T: AddAssign + Copy + Default>(sums: &mut Vec<T>, more: &[T]) {
    sums.resize(sums.len().max(more.len()), T::default());
    sums.iter_mut().zip(more).for_each(|(sum, x)| *sum += *x);
}

/// Sums over all layers, of which the losses are made.
#[derive(Debug, Clone, Default)]
struct LossSums {
    /// Tokens of each expert, `[E]`.
    counts: Vec<u64>,
    /// Sum of the scores of each expert, `[E]`.
    scores: Vec<f64>,
    /// Sum of (log Σ e^z)².
    squares: f64,
    /// L·N
    tokens: u64,
    /// Of routers of two levels.
    two_level: Option<TwoLevelSums>,
}

impl LossSums {
    /// Adds those of a layer, or of other tokens.
    fn add(&mut self, counts: &[u64], scores: &[f64], squares: f64, tokens: u64, two_level: Option<&TwoLevelSums>) {
        add_all(&mut self.counts, counts);
        add_all(&mut self.scores, scores);
        self.squares += squares;
        self.tokens += tokens;
        if let Some(more) = two_level {
            let sums = self.two_level.get_or_insert_default();
            add_all(&mut sums.counts, &more.counts);
            add_all(&mut sums.groups, &more.groups);
            add_all(&mut sums.within, &more.within);
        }
    }

    /// The gradient of the balance loss of two levels without its factor, and its value.
    fn two_level_loss(&self, sums: &TwoLevelSums) -> (TwoLevelLoss, f64) {
        let tokens = self.tokens as f64;
        let (groups, members) = (sums.counts.len(), self.counts.len() / sums.counts.len());
        let visits: u64 = sums.counts.iter().sum();
        let of_group = |n: &u64| groups as f64 * *n as f64 / (tokens * tokens);
        let of_groups: Vec<f64> = sums.counts.iter().map(of_group).collect();
        let of_expert = |(e, n): (usize, &u64)| match sums.counts[e / members] {
            0 => 0.0,
            of_group => members as f64 * *n as f64 / (visits as f64 * of_group as f64),
        };
        let within: Vec<f64> = self.counts.iter().enumerate().map(of_expert).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let value = dot(&of_groups, &sums.groups) + dot(&within, &sums.within);
        let narrow = |of: Vec<f64>| of.into_iter().map(|x| x as f32).collect();
        let gradient = TwoLevelLoss {
            groups: narrow(of_groups),
            within: narrow(within),
        };
        (gradient, value)
    }

    /// The balance loss and the z-loss, without their factors.
    fn values(&self) -> RouterLosses {
        let tokens = self.tokens as f64;
        if tokens == 0.0 {
            return RouterLosses::default();
        }
        if let Some(sums) = &self.two_level {
            return RouterLosses {
                balance: self.two_level_loss(sums).1,
                z: 0.0,
            };
        }
        let products: f64 = self.counts.iter().zip(&self.scores).map(|(n, p)| *n as f64 * p).sum();
        RouterLosses {
            balance: self.counts.len() as f64 * products / (tokens * tokens),
            z: self.squares / tokens,
        }
    }
}

/// What a rank says of a micro-batch, or of its tokens of one that several ranks share.
struct RouterReport {
    /// The part of the micro-batch in the losses of the step.
    share: f64,
    sums: LossSums,
    /// For the metrics of the load.
    layers: BTreeMap<usize, LayerSums>,
}

impl RouterReport {
    /// As `RouterTally::to_wire` writes it.
    fn read(numbers: &[f64]) -> Option<Self> {
        let rest = &mut numbers.iter().copied();
        let (share, experts, squares, groups) =
            (rest.next()?, rest.next()? as usize, rest.next()?, rest.next()? as usize);
        let scores = list(rest, experts);
        let two_level = (groups > 0).then(|| TwoLevelSums {
            counts: whole(list(rest, groups)),
            groups: list(rest, groups),
            within: list(rest, experts),
        });
        let (mut layers, mut counts, mut tokens) = (BTreeMap::new(), Vec::<u64>::new(), 0);
        while let (Some(index), Some(experts)) = (rest.next(), rest.next()) {
            let layer = LayerSums {
                counts: whole(list(rest, experts as usize)),
                entropy: rest.next()?,
                tokens: rest.next()? as u64,
                // Negative: a router of one level.
                visits: rest.next().filter(|n| *n >= 0.0).map(|n| n as u64),
                ..LayerSums::default()
            };
            add_all(&mut counts, &layer.counts);
            tokens += layer.tokens;
            layers.insert(index as usize, layer);
        }
        let sums = LossSums {
            counts,
            scores,
            squares,
            tokens,
            two_level,
        };
        Some(Self { share, sums, layers })
    }

    /// Adds other tokens of the same micro-batch.
    fn add(&mut self, part: &Self) {
        let more = &part.sums;
        let two_level = more.two_level.as_ref();
        self.sums
            .add(&more.counts, &more.scores, more.squares, more.tokens, two_level);
        for (index, layer) in &part.layers {
            self.layers.entry(*index).or_default().add_load(layer);
        }
    }
}

fn list(numbers: &mut impl Iterator<Item = f64>, length: usize) -> Vec<f64> {
    numbers.take(length).collect()
}

fn whole(numbers: Vec<f64>) -> Vec<u64> {
    numbers.into_iter().map(|n| n as u64).collect()
}

/// The choices of the routers for a micro-batch.
#[derive(Debug, Clone)]
pub struct RouterTally {
    losses: RouterLosses,
    /// The part of this micro-batch in the losses of the step.
    share: f64,
    layers: BTreeMap<usize, LayerSums>,
    /// The forward pass is done: layers that are computed again are not counted.
    complete: bool,
}

impl RouterTally {
    /// An empty tally. `share`: the part of this micro-batch in the losses of the step.
    pub fn new(losses: RouterLosses, share: f64) -> Self {
        Self {
            losses,
            share,
            layers: BTreeMap::new(),
            complete: false,
        }
    }

    /// Counts the tokens of a layer, if the forward pass is not done.
    pub fn add(&mut self, layer: usize, routing: &Routing) {
        if self.complete {
            return;
        }
        let sums = LayerSums {
            counts: routing.counts().into_iter().map(|n| n as u64).collect(),
            scores: routing.score_sums(),
            squares: routing.log_sum_squares(),
            entropy: routing.entropy_sum(),
            tokens: routing.tokens() as u64,
            two_level: routing.two_level_sums(),
            visits: routing.group_visits(),
        };
        self.layers.insert(layer, sums);
    }

    /// Marks the end of the forward pass.
    pub fn end(&mut self) {
        self.complete = true;
    }

    fn sums(&self) -> LossSums {
        let mut sums = LossSums::default();
        for l in self.layers.values() {
            sums.add(&l.counts, &l.scores, l.squares, l.tokens, l.two_level.as_ref());
        }
        sums
    }

    /// The balance loss and the z-loss of this micro-batch, without their factors.
    pub fn values(&self) -> RouterLosses {
        self.sums().values()
    }

    /// The numbers for the metrics. First share, E, the squares, the number of groups (0: routers of one level), and the sums over the
    /// layers: the scores of each expert, then with groups their tokens and scores, and the scores of the experts inside them. Then for
    /// each layer its index, the number of its experts, their tokens, the entropy, N, and the visited groups (-1: a router of one level).
    pub fn to_wire(&self) -> Vec<f64> {
        let sums = self.sums();
        let groups = sums.two_level.as_ref().map_or(0, |levels| levels.counts.len());
        let mut out = vec![self.share, sums.scores.len() as f64, sums.squares, groups as f64];
        out.extend(&sums.scores);
        if let Some(levels) = &sums.two_level {
            out.extend(levels.counts.iter().map(|n| *n as f64));
            out.extend(levels.groups.iter().chain(&levels.within));
        }
        for (index, layer) in &self.layers {
            out.extend([*index as f64, layer.counts.len() as f64]);
            out.extend(layer.counts.iter().map(|n| *n as f64));
            out.extend([layer.entropy, layer.tokens as f64]);
            out.push(layer.visits.map_or(-1.0, |n| n as f64));
        }
        out
    }

    /// The gradients of the losses with respect to the scores and logits of a token, the same in all layers.
    pub fn gradient(&self) -> LogitLoss {
        if !self.losses.any() {
            return LogitLoss::default();
        }
        let sums = self.sums();
        let tokens = sums.tokens as f64;
        if tokens == 0.0 {
            return LogitLoss::default();
        }
        if let Some(levels) = &sums.two_level {
            let mut loss = sums.two_level_loss(levels).0;
            let factor = (self.share * self.losses.balance) as f32;
            let both = loss.groups.iter_mut().chain(&mut loss.within);
            both.for_each(|x| *x *= factor);
            return LogitLoss {
                two_level: Some(loss),
                ..LogitLoss::default()
            };
        }
        let mut balance = Vec::new();
        if self.losses.balance != 0.0 {
            let factor = self.share * self.losses.balance * sums.counts.len() as f64 / (tokens * tokens);
            balance = sums.counts.iter().map(|n| (factor * *n as f64) as f32).collect();
        }
        LogitLoss {
            balance,
            z: (self.share * self.losses.z / tokens) as f32,
            two_level: None,
        }
    }
}

/// The losses of the routers in a run, and the load of the experts since the last metrics.
#[derive(Debug, Default)]
pub struct Routers {
    /// Factors of the losses.
    pub losses: RouterLosses,
    load: RefCell<ExpertLoad>,
}

/// Sums over micro-batches.
#[derive(Debug, Clone, Default)]
struct ExpertLoad {
    /// Of each layer.
    layers: BTreeMap<usize, LayerSums>,
    /// Sums of the values of the losses, weighted with `shares`.
    values: RouterLosses,
    shares: f64,
}

impl Routers {
    /// The routers of a run with these losses.
    pub fn new(losses: RouterLosses) -> Self {
        Self {
            losses,
            load: RefCell::default(),
        }
    }

    /// Adds a micro-batch.
    pub fn add(&self, tally: &RouterTally) {
        self.add_parts([&tally.to_wire()[..]]);
    }

    /// Adds a micro-batch of which each part has some tokens, as `RouterTally::to_wire` describes it; nothing if there are no numbers.
    pub fn add_parts<'n>(&self, parts: impl IntoIterator<Item = &'n [f64]>) {
        let mut parts = parts.into_iter().filter_map(RouterReport::read);
        let Some(mut micro_batch) = parts.next() else { return };
        parts.for_each(|part| micro_batch.add(&part));
        let RouterReport { share, sums, layers } = micro_batch;
        let values = sums.values();
        let mut load = self.load.borrow_mut();
        load.values.balance += share * values.balance;
        load.values.z += share * values.z;
        load.shares += share;
        for (index, layer) in &layers {
            load.layers.entry(*index).or_default().add_load(layer);
        }
    }

    /// Tokens of each expert since the last call of `metrics`, by layer.
    pub fn loads(&self) -> Vec<(usize, Vec<u64>)> {
        let load = self.load.borrow();
        load.layers
            .iter()
            .map(|(layer, sums)| (*layer, sums.counts.clone()))
            .collect()
    }

    /// Means since the last call, by their names in `metrics.jsonl`; empty for a model without experts. The largest load
    /// is that of an expert divided by the mean of its layer; the entropy is in nats.
    pub fn metrics(&self) -> Vec<(&'static str, f64)> {
        let load = self.load.take();
        let tokens: u64 = load.layers.values().map(|l| l.tokens).sum();
        if tokens == 0 {
            return Vec::new();
        }
        let largest = |l: &LayerSums| {
            let sum: u64 = l.counts.iter().sum();
            let most = l.counts.iter().max().copied().unwrap_or(0);
            most as f64 * l.counts.len() as f64 / sum.max(1) as f64
        };
        let idle = load
            .layers
            .values()
            .flat_map(|l| &l.counts)
            .filter(|n| **n == 0)
            .count();
        let entropy: f64 = load.layers.values().map(|l| l.entropy).sum();
        let mut metrics = vec![
            ("router_aux_loss", load.values.balance / load.shares),
            ("router_z_loss", load.values.z / load.shares),
            ("router_max_load", load.layers.values().map(largest).fold(0.0, f64::max)),
            ("router_idle_experts", idle as f64),
            ("router_entropy", entropy / tokens as f64),
        ];
        let visits: Vec<u64> = load.layers.values().filter_map(|l| l.visits).collect();
        if !visits.is_empty() {
            metrics.push(("router_groups", visits.iter().sum::<u64>() as f64 / tokens as f64));
        }
        metrics
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::routing::RouterSpec;
    use candle_core::{Device, Tensor};

    fn route(logits: &[[f32; 3]]) -> Routing {
        let spec = RouterSpec {
            score: Score::Softmax,
            top_k: 1,
            renormalize: false,
            scale: 1.0,
            groups: None,
        };
        let flat: Vec<f32> = logits.concat();
        let logits = Tensor::from_vec(flat, (logits.len(), 3), &Device::Cpu).unwrap();
        spec.route(&logits, None).unwrap()
    }

    /// Two groups of two experts: two tokens in each group, all at its first expert, and equal scores.
    #[test]
    fn the_balance_loss_of_two_levels() {
        let spec = RouterSpec {
            score: Score::TwoLevel,
            top_k: 1,
            renormalize: false,
            scale: 1.0,
            groups: Some(crate::ops::routing::ExpertGroups {
                count: 2,
                chosen: 1,
                score: crate::ops::routing::GroupScore::Sum,
            }),
        };
        // The last two logits are those of the groups: 0.8 and 0.2, or 0.2 and 0.8.
        let four = 4f32.ln();
        let rows = [[0.0, 0.0, 0.0, 0.0, four, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, four]];
        let flat: Vec<f32> = [rows[0], rows[1], rows[0], rows[1]].concat();
        let logits = Tensor::from_vec(flat, (4, 6), &Device::Cpu).unwrap();
        let routing = spec.route(&logits, None).unwrap();
        let mut tally = RouterTally::new(RouterLosses { balance: 0.5, z: 0.0 }, 1.0);
        tally.add(0, &routing);
        tally.add(1, &routing);
        tally.end();
        // Groups: 2 · (0.5 · 0.5 + 0.5 · 0.5). Experts of a group: 2 · (1 · 0.5 + 0 · 0.5).
        assert!((tally.values().balance - 2.0).abs() < 1e-6, "{:?}", tally.values());
        let loss = tally.gradient().two_level.unwrap();
        // 0.5 · G · n_g / T² with 4 of 8 tokens, and 0.5 · M · n_e / (T · n_g).
        let close = |got: &[f32], want: &[f32]| got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-6);
        assert!(close(&loss.groups, &[0.0625, 0.0625]), "{loss:?}");
        assert!(close(&loss.within, &[0.125, 0.0, 0.125, 0.0]), "{loss:?}");
        let routers = Routers::new(RouterLosses::default());
        routers.add(&tally);
        let found: BTreeMap<&str, f64> = routers.metrics().into_iter().collect();
        assert_eq!(found["router_groups"], 1.0);
    }

    /// The balance loss is a product of means, so the mean of the losses of the parts would be another number.
    #[test]
    fn parts_of_a_micro_batch_have_the_metrics_of_the_whole() {
        let rows = [
            [0.0, 2.0, 0.0],
            [3.0, 0.0, 0.0],
            [0.0, 1.0, 0.5],
            [0.0, 0.0, 4.0],
            [0.0, 1.5, 0.0],
        ];
        let tally = |rows: &[[f32; 3]]| {
            let mut tally = RouterTally::new(RouterLosses::default(), 0.5);
            let other: Vec<[f32; 3]> = rows.iter().map(|[a, b, c]| [*b, *c, 2.0 * *a]).collect();
            tally.add(1, &route(rows));
            tally.add(3, &route(&other));
            tally.end();
            tally.to_wire()
        };
        let of = |parts: &[Vec<f64>]| {
            let routers = Routers::new(RouterLosses::default());
            // A micro-batch before, so that the shares are those of micro-batches.
            routers.add_parts([&tally(&rows[..2])[..]]);
            routers.add_parts(parts.iter().map(|part| &part[..]));
            (routers.loads(), routers.metrics())
        };
        let (whole, parts) = (of(&[tally(&rows)]), of(&[tally(&rows[..1]), tally(&rows[1..])]));
        assert_eq!(whole.0, parts.0);
        assert_eq!(whole.1.len(), parts.1.len());
        for ((name, want), (_, found)) in whole.1.iter().zip(&parts.1) {
            assert!((want - found).abs() < 1e-9, "{name}: {found} {want}");
        }
        let of_parts =
            [tally(&rows[..1]), tally(&rows[1..])].map(|part| RouterReport::read(&part).unwrap().sums.values());
        let whole = RouterReport::read(&tally(&rows)).unwrap().sums.values();
        assert!((of_parts[0].balance / 2.0 + of_parts[1].balance / 2.0 - whole.balance).abs() > 0.01);
        assert!((of_parts[0].z / 2.0 + of_parts[1].z / 2.0 - whole.z).abs() > 0.01);
    }

    /// Equal logits choose the first expert; all scores are 1/3.
    #[test]
    fn values_of_known_routings() {
        let mut tally = RouterTally::new(RouterLosses { balance: 0.5, z: 0.1 }, 1.0);
        tally.add(0, &route(&[[0.0; 3], [0.0; 3]]));
        tally.add(2, &route(&[[0.0, 9.0, 0.0], [0.0; 3]]));
        tally.end();
        tally.add(2, &route(&[[0.0, 0.0, 50.0]]));
        let values = tally.values();
        let p = 9f64.exp() / (9f64.exp() + 2.0);
        let shares = [(3.0 / 4.0, 3.0 / 3.0 + (1.0 - p) / 2.0), (1.0 / 4.0, 1.0 + p)];
        let want: f64 = 3.0 * shares.iter().map(|(f, sum)| f * sum / 4.0).sum::<f64>();
        assert!((values.balance - want).abs() < 1e-6, "{values:?} {want}");
        let z = (3.0 * 3f64.ln().powi(2) + (9f64.exp() + 2.0).ln().powi(2)) / 4.0;
        assert!((values.z - z).abs() < 1e-5, "{values:?} {z}");
        let gradient = tally.gradient();
        let want = [0.5 * 3.0 * 3.0 / 16.0, 0.5 * 3.0 / 16.0, 0.0];
        assert!(
            gradient
                .balance
                .iter()
                .zip(want)
                .all(|(g, w)| (f64::from(*g) - w).abs() < 1e-6)
        );
        assert!((gradient.z - 0.025).abs() < 1e-7);

        let routers = Routers::new(RouterLosses::default());
        routers.add(&tally);
        assert_eq!(routers.loads(), [(0, vec![2, 0, 0]), (2, vec![1, 1, 0])]);
        let found: BTreeMap<&str, f64> = routers.metrics().into_iter().collect();
        // The first layer has all tokens at one of three experts; two experts of it and one of the other are idle.
        assert_eq!((found["router_max_load"], found["router_idle_experts"]), (3.0, 3.0));
        assert!(found["router_entropy"] < 3f64.ln() && found["router_entropy"] > 0.75 * 3f64.ln());
        assert!(routers.metrics().is_empty(), "nothing since the last call");
    }
}
