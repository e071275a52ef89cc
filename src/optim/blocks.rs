//! The block schedule of BAdam (Luo, Yu, Li 2024, arXiv 2404.02827, algorithm 1): which parameters are one
//! block, and which block is active at a step.
//!
//! Every block is active for exactly `switch_every` steps, and the schedule is a function of the step and
//! the seed alone, so a resumed run is in the right block by construction.

use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};
use crate::recipe::{self, BlockOrder, Partition};
use crate::source::{Group, ParamInfo, Part};

/// One block.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockPlan {
    /// What metrics and events call it: `model.layers.3`, `model.layers.0-1.mlp`, `embedding`, `lm_head`.
    pub label: String,
    pub params: Vec<String>,
}

#[derive(Debug, Clone)]
pub struct BlockSchedule {
    pub blocks: Vec<BlockPlan>,
    pub switch_every: u64,
    order: BlockOrder,
    start: usize,
    seed: u64,
    warmup: u64,
}

impl BlockSchedule {
    /// `rows` and `batch` (rows of one optimizer step) serve `switch_every = "auto"`:
    /// clamp(rows / (batch · blocks), 50, 100), the advice of the reference implementation.
    pub fn new(
        recipe: &recipe::Block,
        params: &[ParamInfo],
        tied: bool,
        rows: usize,
        batch: usize,
        seed: u64,
    ) -> Result<Self> {
        let blocks = partition(recipe, params, tied)?;
        if blocks.is_empty() {
            return Err(Error::usage("the block partition has no blocks").at("tune.block"));
        }
        if recipe.start_block >= blocks.len() {
            return Err(Error::usage("`tune.block.start_block` is beyond the last block")
                .found(recipe.start_block)
                .expected(format!("0 to {}", blocks.len() - 1)));
        }
        for prefix in &recipe.always_active {
            if !params.iter().any(|p| p.name.starts_with(prefix.as_str())) {
                return Err(
                    Error::usage(format!("`{prefix}` in `tune.block.always_active` matches no parameter"))
                        .hint("write the start of a parameter name, for example `model.norm.` or `model.layers.0.`"),
                );
            }
        }
        let switch_every = recipe
            .switch_every
            .unwrap_or_else(|| (rows / (batch * blocks.len()).max(1)).clamp(50, 100));
        Ok(Self {
            blocks,
            switch_every: switch_every.max(1) as u64,
            order: recipe.order,
            start: recipe.start_block,
            seed,
            warmup: recipe.warmup_after_switch as u64,
        })
    }

    /// The block that is active at optimizer step `step`, counted from 1.
    pub fn active(&self, step: u64) -> usize {
        let visit = (step.max(1) - 1) / self.switch_every;
        let d = self.blocks.len() as u64;
        let (epoch, place) = (visit / d, (visit % d) as usize);
        match self.order {
            BlockOrder::Ascending => place,
            BlockOrder::Descending => d as usize - 1 - place,
            BlockOrder::Fixed => self.start,
            BlockOrder::Random => Rng::new(self.seed, Stream::Blocks, &[epoch]).permutation(d as usize)[place],
        }
    }

    /// Does `step` start a new block? (A block that follows itself is not a switch.)
    pub fn switches_at(&self, step: u64) -> bool {
        step <= 1 || self.active(step) != self.active(step - 1)
    }

    /// Factor of the learning rate while a block warms up after its switch.
    pub fn warmup(&self, step: u64) -> f64 {
        let inside = (step.max(1) - 1) % self.switch_every;
        if inside >= self.warmup {
            1.0
        } else {
            (inside + 1) as f64 / (self.warmup + 1) as f64
        }
    }
}

fn partition(recipe: &recipe::Block, params: &[ParamInfo], tied: bool) -> Result<Vec<BlockPlan>> {
    let named = |label: String, wanted: &dyn Fn(&ParamInfo) -> bool| BlockPlan {
        label,
        params: params
            .iter()
            .filter(|p| wanted(p))
            .map(|p| p.name.to_string())
            .collect(),
    };
    let mut blocks = Vec::new();
    if recipe.include_embedding {
        blocks.push(named("embedding".into(), &|p| p.group == Group::Embedding));
    }
    let layers = params
        .iter()
        .filter_map(|p| {
            if let Group::Layer(l) = p.group {
                Some(l + 1)
            } else {
                None
            }
        })
        .max()
        .unwrap_or(0);
    for first in (0..layers).step_by(recipe.layers_per_block.max(1)) {
        let end = (first + recipe.layers_per_block.max(1)).min(layers);
        let inside = |p: &ParamInfo| matches!(p.group, Group::Layer(l) if (first..end).contains(&l));
        let label = if end == first + 1 {
            format!("model.layers.{first}")
        } else {
            format!("model.layers.{first}-{}", end - 1)
        };
        match recipe.partition {
            Partition::Layer => blocks.push(named(label, &inside)),
            Partition::Module => {
                for (name, part) in [("self_attn", Part::Attention), ("mlp", Part::Mlp)] {
                    blocks.push(named(format!("{label}.{name}"), &|p| inside(p) && p.part == part));
                }
            }
            Partition::Matrix => {
                let below = |p: &ParamInfo| {
                    let rest = p.name.strip_prefix("model.layers.")?;
                    let rest = &rest[rest.find('.')? + 1..];
                    rest.rsplit_once('.').map(|(module, _)| module.to_string())
                };
                let mut modules: Vec<String> = Vec::new();
                for p in params.iter().filter(|p| inside(p) && !p.is_vector()) {
                    modules.extend(below(p).filter(|m| !modules.contains(m)));
                }
                for module in modules {
                    let same = |p: &ParamInfo| inside(p) && below(p).as_deref() == Some(module.as_str());
                    blocks.push(named(format!("{label}.{module}"), &same));
                }
            }
            Partition::Ratio => {
                return Err(Error::usage("partition `ratio` is not built yet").at("tune.block.partition"));
            }
        }
    }
    if recipe.include_lm_head {
        // The reference's last block: the output layer and what belongs to no layer. A tied head is the
        // embedding, trained here unless it has a block of its own.
        let with_embedding = tied && !recipe.include_embedding;
        blocks.push(named("lm_head".into(), &|p| {
            p.group == Group::Head || (with_embedding && p.group == Group::Embedding)
        }));
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{Correction, CorrectionScope};

    fn recipe(partition: Partition, order: BlockOrder) -> recipe::Block {
        recipe::Block {
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
        }
    }

    fn params() -> Vec<ParamInfo> {
        let p = |name: String, rank: usize, group, part| ParamInfo {
            name: name.into(),
            shape: vec![2; rank],
            group,
            part,
        };
        let mut all = vec![p("model.embed_tokens.weight".into(), 2, Group::Embedding, Part::Other)];
        for l in 0..4 {
            let g = Group::Layer(l);
            all.push(p(
                format!("model.layers.{l}.self_attn.q_proj.weight"),
                2,
                g,
                Part::Attention,
            ));
            all.push(p(
                format!("model.layers.{l}.self_attn.q_proj.bias"),
                1,
                g,
                Part::Attention,
            ));
            all.push(p(format!("model.layers.{l}.mlp.up_proj.weight"), 2, g, Part::Mlp));
            all.push(p(
                format!("model.layers.{l}.input_layernorm.weight"),
                1,
                g,
                Part::Attention,
            ));
        }
        all.push(p("model.norm.weight".into(), 1, Group::Head, Part::Other));
        all.push(p("lm_head.weight".into(), 2, Group::Head, Part::Other));
        all
    }

    fn schedule(r: &recipe::Block) -> BlockSchedule {
        BlockSchedule::new(r, &params(), false, 1000, 4, 7).unwrap()
    }

    #[test]
    fn every_block_gets_exactly_k_steps_in_every_order() {
        for order in [BlockOrder::Random, BlockOrder::Ascending, BlockOrder::Descending] {
            let s = schedule(&recipe(Partition::Layer, order));
            for epoch in 0..3 {
                let mut counts = [0; 4];
                for step in 1 + epoch * 12..=12 + epoch * 12 {
                    counts[s.active(step)] += 1;
                }
                assert_eq!(counts, [3; 4], "{order:?}");
            }
        }
        let s = schedule(&recipe(Partition::Layer, BlockOrder::Descending));
        assert_eq!((s.active(1), s.active(3), s.active(4)), (3, 3, 2));
        assert!(s.switches_at(1) && !s.switches_at(3) && s.switches_at(4));
    }

    #[test]
    fn partitions_cover_what_they_say() {
        let layer = schedule(&recipe(Partition::Layer, BlockOrder::Ascending));
        assert_eq!(layer.blocks.iter().map(|b| b.params.len()).collect::<Vec<_>>(), [4; 4]);
        let module = schedule(&recipe(Partition::Module, BlockOrder::Ascending));
        assert_eq!(module.blocks[0].label, "model.layers.0.self_attn");
        assert_eq!(
            (
                module.blocks.len(),
                module.blocks[0].params.len(),
                module.blocks[1].params.len()
            ),
            (8, 3, 1)
        );
        let matrix = schedule(&recipe(Partition::Matrix, BlockOrder::Ascending));
        assert_eq!(matrix.blocks[0].params.len(), 2);
        assert_eq!(matrix.blocks.len(), 8);
        let mut r = recipe(Partition::Layer, BlockOrder::Ascending);
        (r.layers_per_block, r.include_embedding, r.include_lm_head) = (3, true, true);
        let labels: Vec<_> = schedule(&r).blocks.into_iter().map(|b| b.label).collect();
        assert_eq!(labels, ["embedding", "model.layers.0-2", "model.layers.3", "lm_head"]);
    }

    #[test]
    fn auto_switch_is_clamped_and_unknown_prefixes_are_refused() {
        let mut r = recipe(Partition::Layer, BlockOrder::Random);
        r.switch_every = None;
        assert_eq!(schedule(&r).switch_every, 62);
        r.always_active = vec!["model.nrm".into()];
        assert!(BlockSchedule::new(&r, &params(), false, 10, 1, 0).is_err());
        let mut r = recipe(Partition::Layer, BlockOrder::Ascending);
        r.warmup_after_switch = 2;
        let s = schedule(&r);
        assert_eq!(
            [1, 2, 3, 4].map(|k| s.warmup(k)),
            [1.0 / 3.0, 2.0 / 3.0, 1.0, 1.0 / 3.0]
        );
    }
}
