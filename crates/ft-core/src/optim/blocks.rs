//! The block schedule: which block is active at a step. BAdam (Luo, Yu, Li 2024, arXiv 2404.02827, algorithm 1), and
//! LISA (Pan et al. 2024, arXiv 2403.17919, algorithm 1), which draws layers by their importance.
//!
//! Every block is active for exactly `switch_every` steps, and the schedule depends only on the step and the seed, so a
//! resumed run continues with the right block.

use super::config::{BlockConfig, BlockOrder, Partition};
use super::mask::UpdateMasks;
use super::partition::{expert_of, partition};
use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};
use crate::source::ParamInfo;
use std::collections::BTreeSet;

/// One block.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockPlan {
    /// Label in metrics and events: `model.layers.3`, `model.layers.0-1.mlp`, `embedding`, `lm_head`.
    pub label: String,
    /// Names of the parameters.
    pub params: Vec<String>,
    /// Total number of elements.
    pub elements: usize,
}

/// The blocks of a run, and which of them is active in each step.
#[derive(Debug, Clone)]
pub struct BlockSchedule {
    /// All blocks, in the order of the model.
    pub blocks: Vec<BlockPlan>,
    /// Steps that a block stays active.
    pub switch_every: u64,
    order: BlockOrder,
    start: usize,
    seed: u64,
    warmup: u64,
    /// Number of blocks that are drawn together (`BlockOrder::Importance`), and the importance of each block.
    together: usize,
    importance: Vec<f64>,
    /// Partition `ratio`: the active fraction of each parameter, and whether it is scattered.
    ratio: Option<(f64, bool)>,
    /// Parameters that are trained in every step.
    pub always: BTreeSet<String>,
}

impl BlockSchedule {
    /// A run resolves `switch_every` to a number first (`setup::defaults`); without known steps any number is valid.
    ///
    /// # Errors
    /// A partition without blocks, a first block beyond the last, a prefix that matches no parameter.
    pub fn new(config: &BlockConfig, params: &[ParamInfo], tied: bool, seed: u64) -> Result<Self> {
        let experts = || params.iter().any(|p| expert_of(&p.name).is_some());
        if config.partition == Partition::Experts && !experts() {
            return Err(Error::usage("the model has no experts, so it has no blocks of experts")
                .at("BlockConfig::partition")
                .expected("a mixture of experts, or another partition"));
        }
        let blocks = partition(config, params, tied);
        if blocks.is_empty() {
            return Err(Error::usage("the block partition has no blocks").at("BlockConfig::partition"));
        }
        if config.start_block >= blocks.len() {
            return Err(Error::usage("`BlockConfig::start_block` is beyond the last block")
                .found(config.start_block)
                .expected(format!("0 to {}", blocks.len() - 1)));
        }
        for prefix in &config.always_active {
            if !params.iter().any(|p| p.name.starts_with(prefix.as_str())) {
                return Err(Error::usage(format!(
                    "`{prefix}` in `BlockConfig::always_active` matches no parameter"
                ))
                .hint("write the start of a parameter name, for example `model.norm.` or `model.layers.0.`"));
            }
        }
        let always = params.iter().map(|p| p.name.to_string());
        let always = always.filter(|n| config.always_active.iter().any(|p| n.starts_with(p.as_str())));
        let together = match config.order {
            BlockOrder::Importance => config.layers_per_block,
            _ => 1,
        };
        if together > blocks.len() {
            return Err(
                Error::usage("`BlockConfig::layers_per_block` is larger than the number of blocks")
                    .found(together)
                    .expected(format!("at most {}", blocks.len())),
            );
        }
        Ok(Self {
            importance: importance(config, &blocks)?,
            switch_every: config.switch_every.unwrap_or(50).max(1) as u64,
            order: config.order,
            start: config.start_block,
            seed,
            warmup: config.warmup_after_switch as u64,
            together,
            ratio: (config.partition == Partition::Ratio).then_some((config.update_ratio, config.mask.scattered())),
            always: always.collect(),
            blocks,
        })
    }

    /// Number of switches before `step`.
    fn visit(&self, step: u64) -> u64 {
        (step.max(1) - 1) / self.switch_every
    }

    /// The blocks that are active at optimizer step `step`, counted from 1, in ascending order.
    pub fn active(&self, step: u64) -> Vec<usize> {
        let visit = self.visit(step);
        let d = self.blocks.len() as u64;
        let (epoch, place) = (visit / d, (visit % d) as usize);
        match self.order {
            BlockOrder::Ascending => vec![place],
            BlockOrder::Descending => vec![d as usize - 1 - place],
            BlockOrder::Fixed => vec![self.start],
            BlockOrder::Random => vec![self.order_of(epoch)[place]],
            BlockOrder::Importance => self.drawn(visit),
        }
    }

    /// The blocks of the first `count` turns, each as in `active`.
    pub fn turns(&self, count: u64) -> Vec<Vec<usize>> {
        let d = self.blocks.len() as u64;
        if self.order != BlockOrder::Random {
            return (0..count)
                .map(|turn| self.active(turn * self.switch_every + 1))
                .collect();
        }
        // One permutation gives all turns of an epoch.
        let epochs = (0..count.div_ceil(d)).flat_map(|epoch| self.order_of(epoch));
        epochs.take(count as usize).map(|block| vec![block]).collect()
    }

    /// The order of the blocks in an epoch of `BlockOrder::Random`.
    fn order_of(&self, epoch: u64) -> Vec<usize> {
        Rng::new(self.seed, Stream::Blocks, &[epoch]).permutation(self.blocks.len())
    }

    /// Draws `together` blocks without replacement, with probability proportional to importance (Efraimidis & Spirakis
    /// 2006, "Weighted random sampling with a reservoir", algorithm A: the largest u^(1/w)).
    fn drawn(&self, visit: u64) -> Vec<usize> {
        let rng = Rng::new(self.seed, Stream::Blocks, &[u64::MAX, visit]);
        let mut keys: Vec<(f64, usize)> = self
            .importance
            .iter()
            .enumerate()
            .map(|(i, w)| ((1.0 - rng.uniform64(i as u64)).ln() / w, i))
            .collect();
        keys.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut chosen: Vec<usize> = keys.into_iter().take(self.together).map(|(_, i)| i).collect();
        chosen.sort_unstable();
        chosen
    }

    /// True if the active block is the same in the whole run.
    pub fn is_fixed(&self) -> bool {
        self.order == BlockOrder::Fixed
    }

    /// The parameters that are trained at `step`.
    pub fn params(&self, step: u64) -> impl Iterator<Item = &String> {
        let active = self.active(step).into_iter();
        active.flat_map(|b| self.blocks[b].params.iter()).chain(&self.always)
    }

    /// Every set of blocks that can need the most memory: each block with the largest others that can be drawn with it.
    pub fn possible(&self) -> Vec<Vec<usize>> {
        if self.order == BlockOrder::Fixed {
            return vec![vec![self.start]];
        }
        let mut largest: Vec<usize> = (0..self.blocks.len()).collect();
        largest.sort_by_key(|o| std::cmp::Reverse(self.blocks[*o].elements));
        largest.truncate(self.together);
        (0..self.blocks.len())
            .map(|b| {
                let others = largest.iter().copied().filter(|o| *o != b).take(self.together - 1);
                others.chain([b]).collect()
            })
            .collect()
    }

    /// True if only a fraction of each parameter is active (partition `ratio`).
    pub fn is_masked(&self) -> bool {
        self.ratio.is_some()
    }

    /// The labels of the blocks that are active in this step.
    pub fn label(&self, step: u64) -> String {
        let labels: Vec<&str> = self
            .active(step)
            .into_iter()
            .map(|b| self.blocks[b].label.as_str())
            .collect();
        labels.join(" + ")
    }

    /// The active elements of each parameter at `step` (partition `ratio`).
    pub fn masks(&self, step: u64) -> Option<UpdateMasks> {
        let (ratio, scattered) = self.ratio?;
        let round = match self.order {
            // The window continues where the last round ended, which need not be the parameter's end.
            BlockOrder::Fixed => 0,
            _ => self.visit(step) / self.blocks.len() as u64,
        };
        let window = round * self.blocks.len() as u64 + self.active(step).first().copied().unwrap_or(0) as u64;
        Some(UpdateMasks::new(
            ratio,
            scattered,
            self.seed,
            window,
            self.always.clone(),
        ))
    }

    /// True if `step` starts a new block. (The same block again is not a switch.)
    pub fn switches_at(&self, step: u64) -> bool {
        step <= 1 || self.active(step) != self.active(step - 1) || self.masks(step) != self.masks(step - 1)
    }

    /// True if the optimizer state of a parameter is kept when `step` starts a new block.
    pub fn survives(&self, name: &str, step: u64) -> bool {
        self.always.contains(name) || (self.ratio.is_none() && self.params(step).any(|n| n == name))
    }

    /// Factor of the learning rate while a block warms up after a switch.
    pub fn warmup(&self, step: u64) -> f64 {
        let step = step.max(1);
        let mut first = match self.order {
            BlockOrder::Fixed => 1,
            _ => self.visit(step) * self.switch_every + 1,
        };
        // The same blocks again: their warmup began in a turn before.
        while step - first < self.warmup && !self.switches_at(first) {
            first -= self.switch_every;
        }
        let inside = step - first;
        if inside >= self.warmup {
            1.0
        } else {
            (inside + 1) as f64 / (self.warmup + 1) as f64
        }
    }
}

/// The importance of each block: 1, or the value in `BlockConfig::importance` for a prefix of its label.
fn importance(config: &BlockConfig, blocks: &[BlockPlan]) -> Result<Vec<f64>> {
    let mut weights = vec![1.0; blocks.len()];
    for text in &config.importance {
        let wrong = |what: String| {
            Err(Error::usage(what)
                .at("BlockConfig::importance")
                .found(text)
                .expected("the start of a block's name, `=`, and a number above 0, as in `model.layers.0=2`"))
        };
        let Some((prefix, weight)) = text.rsplit_once('=') else {
            return wrong("an item of `BlockConfig::importance` has no `=`".into());
        };
        let Some(weight) = weight.trim().parse::<f64>().ok().filter(|w| w.is_finite() && *w > 0.0) else {
            return wrong("an item of `BlockConfig::importance` has no number above 0".into());
        };
        let matching = |label: &str| {
            let rest = label.strip_prefix(prefix.trim());
            rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        let mut any = false;
        for (block, w) in blocks.iter().zip(&mut weights).filter(|(b, _)| matching(&b.label)) {
            (*w, any) = (weight, any || !block.params.is_empty());
        }
        if !any {
            return wrong("an item of `BlockConfig::importance` matches no block".into());
        }
    }
    Ok(weights)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::config::{Correction, CorrectionScope, MaskShape};
    use crate::source::{Group, Sublayer};

    fn config(partition: Partition, order: BlockOrder) -> BlockConfig {
        BlockConfig {
            partition,
            layers_per_block: 1,
            order,
            start_block: 0,
            switch_every: Some(3),
            include_embedding: false,
            include_lm_head: false,
            always_active: vec![],
            correction: Correction::None,
            correction_scope: CorrectionScope::All,
            warmup_after_switch: 0,
            correction_scale: 1.0,
            update_ratio: 0.1,
            mask: MaskShape::Adjacent,
            importance: vec![],
            experts_per_block: 8,
        }
    }

    fn params() -> Vec<ParamInfo> {
        let p = |name: String, rank: usize, group, sublayer| ParamInfo {
            name: name.into(),
            shape: vec![2; rank],
            group,
            sublayer,
        };
        let mut all = vec![p(
            "model.embed_tokens.weight".into(),
            2,
            Group::Embedding,
            Sublayer::Other,
        )];
        for l in 0..4 {
            let g = Group::Layer(l);
            all.push(p(
                format!("model.layers.{l}.self_attn.q_proj.weight"),
                2,
                g,
                Sublayer::Attention,
            ));
            all.push(p(
                format!("model.layers.{l}.self_attn.q_proj.bias"),
                1,
                g,
                Sublayer::Attention,
            ));
            all.push(p(format!("model.layers.{l}.mlp.up_proj.weight"), 2, g, Sublayer::Mlp));
            all.push(p(
                format!("model.layers.{l}.input_layernorm.weight"),
                1,
                g,
                Sublayer::Attention,
            ));
        }
        all.push(p("model.norm.weight".into(), 1, Group::Head, Sublayer::Other));
        all.push(p("lm_head.weight".into(), 2, Group::Head, Sublayer::Other));
        all
    }

    fn schedule(r: &BlockConfig) -> BlockSchedule {
        BlockSchedule::new(r, &params(), false, 7).unwrap()
    }

    #[test]
    fn every_block_gets_exactly_k_steps_in_every_order() {
        for order in [BlockOrder::Random, BlockOrder::Ascending, BlockOrder::Descending] {
            let s = schedule(&config(Partition::Layer, order));
            for epoch in 0..3 {
                let mut counts = [0; 4];
                for step in 1 + epoch * 12..=12 + epoch * 12 {
                    counts[s.active(step)[0]] += 1;
                }
                assert_eq!(counts, [3; 4], "{order:?}");
            }
        }
        let mut r = config(Partition::Layer, BlockOrder::Fixed);
        r.start_block = 2;
        assert_eq!(
            (schedule(&r).active(100), schedule(&r).possible()),
            (vec![2], vec![vec![2]])
        );
        let s = schedule(&config(Partition::Layer, BlockOrder::Descending));
        assert_eq!([1, 3, 4].map(|k| s.active(k)[0]), [3, 3, 2]);
        assert!(s.switches_at(1) && !s.switches_at(3) && s.switches_at(4));
    }

    #[test]
    fn partitions_cover_what_they_say() {
        let layer = schedule(&config(Partition::Layer, BlockOrder::Ascending));
        assert_eq!(layer.blocks.iter().map(|b| b.params.len()).collect::<Vec<_>>(), [4; 4]);
        let module = schedule(&config(Partition::Module, BlockOrder::Ascending));
        assert_eq!(module.blocks[0].label, "model.layers.0.self_attn");
        assert_eq!(
            (
                module.blocks.len(),
                module.blocks[0].params.len(),
                module.blocks[1].params.len()
            ),
            (8, 3, 1)
        );
        let matrix = schedule(&config(Partition::Matrix, BlockOrder::Ascending));
        assert_eq!(matrix.blocks[0].params.len(), 2);
        assert_eq!(matrix.blocks.len(), 8);
        let mut r = config(Partition::Layer, BlockOrder::Ascending);
        (r.layers_per_block, r.include_embedding, r.include_lm_head) = (3, true, true);
        let labels: Vec<_> = schedule(&r).blocks.into_iter().map(|b| b.label).collect();
        assert_eq!(labels, ["embedding", "model.layers.0-2", "model.layers.3", "lm_head"]);
    }

    #[test]
    fn blocks_of_experts() {
        let mut all = params();
        for expert in 0..5 {
            all.push(ParamInfo {
                name: format!("model.layers.1.mlp.experts.{expert}.up_proj.weight").into(),
                shape: vec![2, 2],
                group: Group::Layer(1),
                sublayer: Sublayer::Mlp,
            });
        }
        all.push(ParamInfo {
            name: "model.layers.1.mlp.gate.weight".into(),
            shape: vec![5, 2],
            group: Group::Layer(1),
            sublayer: Sublayer::Router,
        });
        let mut r = config(Partition::Experts, BlockOrder::Ascending);
        (r.experts_per_block, r.layers_per_block) = (2, 4);
        let s = BlockSchedule::new(&r, &all, false, 7).unwrap();
        let found: Vec<(&str, usize)> = s.blocks.iter().map(|b| (&*b.label, b.params.len())).collect();
        let wanted = [
            ("model.layers.0.self_attn", 3),
            ("model.layers.0.mlp", 1),
            ("model.layers.1.self_attn", 3),
            // The shared part: the router, and here an up_proj that belongs to no routed expert.
            ("model.layers.1.mlp", 2),
            ("model.layers.1.experts.0-1", 2),
            ("model.layers.1.experts.2-3", 2),
            ("model.layers.1.experts.4", 1),
            ("model.layers.2.self_attn", 3),
        ];
        assert_eq!(found[..8], wanted);
        let e = BlockSchedule::new(&r, &params(), false, 7).unwrap_err().to_string();
        assert!(e.contains("no experts"), "{e}");
    }

    #[test]
    fn unknown_prefixes_are_refused_and_a_block_warms_up() {
        let mut r = config(Partition::Layer, BlockOrder::Random);
        r.always_active = vec!["model.nrm".into()];
        assert!(BlockSchedule::new(&r, &params(), false, 0).is_err());
        let mut r = config(Partition::Layer, BlockOrder::Ascending);
        r.warmup_after_switch = 2;
        let s = schedule(&r);
        assert_eq!(
            [1, 2, 3, 4].map(|k| s.warmup(k)),
            [1.0 / 3.0, 2.0 / 3.0, 1.0, 1.0 / 3.0]
        );
        // A block that is never deactivated warms up once.
        let s = schedule(&BlockConfig {
            order: BlockOrder::Fixed,
            ..r
        });
        assert_eq!([1, 4].map(|k| s.warmup(k)), [1.0 / 3.0, 1.0]);
    }

    #[test]
    fn the_same_blocks_again_do_not_warm_up_again() {
        let mut r = config(Partition::Layer, BlockOrder::Ascending);
        (r.switch_every, r.warmup_after_switch) = (Some(2), 3);
        let factors = |s: &BlockSchedule, steps: u64| (1..=steps).map(|k| s.warmup(k)).collect::<Vec<_>>();
        let rising = [0.25, 0.5, 0.75, 1.0];
        // All layers are one block: the warmup is longer than a turn, and there is only one.
        r.layers_per_block = 4;
        assert_eq!(factors(&schedule(&r), 6), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
        // With every switch it begins anew; a turn of the ratio partition has another window each time.
        r.layers_per_block = 1;
        assert_eq!(factors(&schedule(&r), 4), [0.25, 0.5, 0.25, 0.5]);
        r.partition = Partition::Ratio;
        assert_eq!(factors(&schedule(&r), 4), [0.25, 0.5, 0.25, 0.5]);
        // Sets that are drawn, and the last block of an epoch that is the first one of the next.
        r.partition = Partition::Layer;
        for (order, together) in [(BlockOrder::Importance, 3), (BlockOrder::Random, 1)] {
            (r.order, r.layers_per_block) = (order, together);
            let s = schedule(&r);
            let (mut since, mut again) = (0, 0);
            for step in 1..=400 {
                since = if s.switches_at(step) { 0 } else { since + 1 };
                again += usize::from(step % 2 == 1 && since > 0);
                assert_eq!(s.warmup(step), rising[since.min(3)], "{order:?}, step {step}");
            }
            assert!(again > 0, "{order:?}: no set was drawn twice in succession");
        }
    }

    #[test]
    fn importance_draws_sets_in_proportion() {
        let mut r = config(Partition::Layer, BlockOrder::Importance);
        r.include_embedding = true;
        r.importance = vec!["embedding=2".into(), "model.layers.3=0.5".into()];
        let counts = |s: &BlockSchedule, visits: u64| {
            let mut counts = [0usize; 5];
            for visit in 0..visits {
                let drawn = s.active(1 + 3 * visit);
                assert_eq!(drawn.len(), s.together);
                assert!(drawn.windows(2).all(|w| w[0] < w[1]));
                assert_eq!(drawn, s.active(3 + 3 * visit));
                drawn.iter().for_each(|b| counts[*b] += 1);
            }
            counts
        };
        let one = counts(&schedule(&r), 11_000);
        for (count, weight) in one.iter().zip([2.0, 1.0, 1.0, 1.0, 0.5]) {
            let want = 11_000.0 * weight / 5.5;
            assert!((*count as f64 - want).abs() < 4.0 * want.sqrt(), "{one:?}");
        }
        r.layers_per_block = 2;
        let s = schedule(&r);
        let two = counts(&s, 1000);
        assert_eq!(two.iter().sum::<usize>(), 2000);
        assert!(two[0] > two[1] && two[4] < two[3], "{two:?}");
        let label = s.label(1);
        assert!(label.contains(" + "), "{label}");
        assert!(s.possible().iter().all(|set| set.len() == 2));
        // The two largest blocks can be drawn together, although each is only a matrix or two.
        let mut wide = params();
        let tables = wide.iter_mut().filter(|p| !matches!(p.group, Group::Layer(_)));
        tables.for_each(|p| p.shape[0] = 100);
        let both = BlockConfig {
            include_lm_head: true,
            ..r.clone()
        };
        let s = BlockSchedule::new(&both, &wide, false, 7).unwrap();
        assert!(s.possible().iter().any(|set| set.contains(&0) && set.contains(&5)));
        for wrong in [
            "embedding",
            "embedding=0",
            "embedding=x",
            "model.layer.9=2",
            "model.layers.9=1",
        ] {
            r.importance = vec![wrong.into()];
            assert!(BlockSchedule::new(&r, &params(), false, 0).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_window_of_the_ratio_partition_moves_with_each_switch() {
        let mut r = config(Partition::Ratio, BlockOrder::Ascending);
        r.update_ratio = 0.3;
        r.always_active = vec!["model.layers.0.mlp.".into()];
        let s = schedule(&r);
        assert_eq!((s.blocks.len(), s.blocks[0].params.len()), (4, 16));
        assert_eq!(s.label(4), "window 2 of 4");
        let start = |s: &BlockSchedule, step: u64| s.masks(step).unwrap().of("w", 1000).unwrap().start;
        assert_eq!([1, 3, 4, 7, 10, 13].map(|k| start(&s, k)), [0, 0, 300, 600, 900, 200]);
        assert!(s.switches_at(4) && !s.switches_at(3));
        assert!(
            s.survives("model.layers.0.mlp.up_proj.weight", 4) && !s.survives("model.layers.1.mlp.up_proj.weight", 4)
        );
        assert!(
            s.masks(1)
                .unwrap()
                .of("model.layers.0.mlp.up_proj.weight", 1000)
                .is_none()
        );
        r.order = BlockOrder::Descending;
        let s = schedule(&r);
        assert_eq!([1, 4, 7, 10, 13].map(|k| start(&s, k)), [900, 600, 300, 0, 100]);
        r.order = BlockOrder::Fixed;
        let s = schedule(&r);
        assert!([1, 40, 400].iter().all(|k| start(&s, *k) == 0) && !s.switches_at(400));
        r.order = BlockOrder::Random;
        let s = schedule(&r);
        let mut starts: Vec<usize> = [1, 4, 7, 10].iter().map(|k| start(&s, *k)).collect();
        starts.sort_unstable();
        assert_eq!(starts, [0, 300, 600, 900]);
    }
}
