//! Which parameters a method trains, at each step.

use super::adapters::Prepared;
use crate::base::{Error, Result};
use crate::engine::Active;
use crate::engine::active::{Corrected, group_of};
use crate::model::Spec;
use crate::optim::{BlockSchedule, Masks, Optimizer};
use crate::recipe::{self, Correction, CorrectionScope, Method, Recipe};
use crate::source::{Group, ParamInfo};
use std::collections::BTreeSet;

/// Turns that are looked at to see which blocks ever train.
const TURNS: usize = 10_000;

/// Full, freeze and LoRA train one set all the time; block changes it on schedule.
pub enum Tuning {
    Static(Active),
    Blocks(Box<Blocks>),
}

/// Blocks by turns, and what happens to the others (BREAD).
pub struct Blocks {
    schedule: BlockSchedule,
    correction: Correction,
    scope: CorrectionScope,
    scale: f64,
    /// Names of the matrices of `correction = "lora"`.
    adapters: Vec<String>,
}

impl Tuning {
    pub fn new(recipe: &Recipe, spec: &Spec, params: &[ParamInfo], prepared: &Prepared) -> Result<Self> {
        let tune = &recipe.tune;
        Ok(match tune.method {
            Method::Full => Self::Static(Active::new(params.iter().map(|p| p.name.to_string()))),
            Method::Freeze => Self::Static(frozen(recipe, spec, params)?),
            Method::Lora => Self::Static(Active::new(prepared.trained())),
            Method::Block => {
                let schedule = BlockSchedule::new(&tune.block, params, spec.tied, recipe.train.seed)?;
                let recipe::Block {
                    correction,
                    correction_scope: scope,
                    correction_scale: scale,
                    ..
                } = tune.block;
                Self::Blocks(Box::new(Blocks {
                    schedule,
                    correction,
                    scope,
                    scale,
                    adapters: prepared.trained().collect(),
                }))
            }
        })
    }

    /// Beside it, these parameters of the objective, all the time.
    pub fn with_own(mut self, names: impl Iterator<Item = String>) -> Self {
        match &mut self {
            Self::Static(active) => *active = Active::new(active.names().map(str::to_string).chain(names)),
            Self::Blocks(b) => b.schedule.always.extend(names),
        }
        self
    }

    /// What is trained at optimizer step `step`, from 1.
    pub fn active(&self, step: u64) -> Active {
        match self {
            Self::Static(active) => active.clone(),
            Self::Blocks(b) => b.set(&b.schedule.active(step), b.schedule.masks(step)),
        }
    }

    /// Every set that can be active, for the planner.
    pub fn possible(&self) -> Vec<Active> {
        match self {
            Self::Static(active) => vec![active.clone()],
            Self::Blocks(b) => match b.schedule.masks(1) {
                // All windows are alike.
                Some(masks) => vec![b.set(&[0], Some(masks))],
                None => b.schedule.possible().iter().map(|set| b.set(set, None)).collect(),
            },
        }
    }

    pub fn label(&self, step: u64) -> Option<String> {
        match self {
            Self::Static(_) => None,
            Self::Blocks(b) => Some(b.schedule.label(step)),
        }
    }

    /// Blocks that have a turn in `steps` steps, and all blocks; `None` where one set trains all the time. A step counts
    /// where `learns` says so.
    pub fn turns(&self, steps: u64, learns: impl Fn(u64) -> bool) -> Option<(usize, usize)> {
        let Self::Blocks(b) = self else { return None };
        let s = &b.schedule;
        if s.is_fixed() {
            return None;
        }
        let mut seen = BTreeSet::new();
        let mut first = 1;
        // Random draws may leave a block out for long.
        for _ in 0..TURNS {
            if first > steps || seen.len() == s.blocks.len() {
                break;
            }
            let last = steps.min(first.saturating_add(s.switch_every - 1));
            // A rate of 0 is followed by one above 0: two steps tell.
            if learns(first) || learns(last) {
                seen.extend(s.active(first));
            }
            first = first.saturating_add(s.switch_every);
        }
        Some((seen.len(), s.blocks.len()))
    }

    /// Does a block that was not active before start at `step`? Its state starts empty then.
    pub fn switches_at(&self, step: u64) -> bool {
        matches!(self, Self::Blocks(b) if b.schedule.switches_at(step))
    }

    /// Parameters whose optimizer state survives the switch at `step`. Adapters start anew, as in BREAD's reference.
    pub fn survives_switch(&self, name: &str, step: u64) -> bool {
        match self {
            Self::Static(_) => true,
            Self::Blocks(b) => b.schedule.survives(name, step),
        }
    }

    /// Do weights that are not active change before a step is complete?
    pub fn corrects_at_once(&self) -> bool {
        matches!(self, Self::Blocks(b) if matches!(b.correction, Correction::Sgd | Correction::Signsgd))
    }

    /// Factor of the learning rate beside the schedule's.
    pub fn warmup(&self, step: u64) -> f64 {
        match self {
            Self::Static(_) => 1.0,
            Self::Blocks(b) => b.schedule.warmup(step),
        }
    }

    /// Everything that steps 1 to `step` have trained: what a checkpoint must hold.
    pub fn trained_until(&self, step: u64) -> BTreeSet<String> {
        match self {
            Self::Static(active) => active.names().map(str::to_string).collect(),
            Self::Blocks(b) => {
                let mut names: BTreeSet<String> = b.schedule.always.clone();
                let mut seen = BTreeSet::new();
                let mut at = 1;
                while at <= step && seen.len() < b.schedule.blocks.len() {
                    let set = b.schedule.active(at);
                    if !set.iter().all(|block| seen.contains(block)) {
                        let active = b.set(&set, None);
                        names.extend(active.names().chain(active.corrected()).map(str::to_string));
                        seen.extend(set);
                    }
                    at += b.schedule.switch_every;
                }
                names
            }
        }
    }
}

/// The optimizer of a run, with learning rates of their own for some parameters.
pub fn optimizer(recipe: &Recipe) -> Optimizer {
    let mut optimizer = Optimizer::new(recipe.optimizer.clone()).with_seed(recipe.train.seed);
    let block = &recipe.tune.block;
    if recipe.tune.method == Method::Block && block.correction == recipe::Correction::Lora {
        optimizer.set_rate(".lora_A.weight", block.correction_scale);
        optimizer.set_rate(".lora_B.weight", block.correction_scale);
    }
    // LoRA+ (Hayou et al. 2024, arXiv 2402.12354): B moves faster than A, and in PEFT's groups the vectors go with B.
    let ratio = recipe.tune.lora.loraplus_lr_ratio;
    if recipe.tune.method == Method::Lora && ratio != 1.0 {
        optimizer.set_rate(".lora_B.weight", ratio);
        optimizer.set_rate(".lora_magnitude_vector", ratio);
    }
    optimizer
}

impl Blocks {
    /// What trains, and what is corrected, while these blocks are active.
    fn set(&self, active: &[usize], masks: Option<Masks>) -> Active {
        let s = &self.schedule;
        let names: BTreeSet<String> = active
            .iter()
            .flat_map(|b| &s.blocks[*b].params)
            .chain(&s.always)
            .cloned()
            .collect();
        let first = active.iter().min().copied().unwrap_or(0);
        let partial = self.scope == CorrectionScope::Partial;
        match self.correction {
            Correction::None => Active::new(names).masked(masks),
            Correction::Sgd | Correction::Signsgd => {
                // Blocks are in the order of the model: those after the first active one lie above it.
                let others = s.blocks.iter().enumerate();
                let others = others.filter(|(i, _)| !active.contains(i) && (!partial || *i > first));
                let others = others.flat_map(|(_, b)| b.params.iter());
                let corrected = Corrected {
                    names: others.filter(|n| !names.contains(*n)).cloned().collect(),
                    scale: self.scale,
                    sign: self.correction == Correction::Signsgd,
                };
                Active::new(names).correcting(Some(corrected))
            }
            Correction::Lora => {
                let lowest = s.blocks[first].params.iter().map(|n| group_of(n)).min();
                let inside = |n: &&String| !partial || lowest.is_none_or(|l| group_of(n) >= l);
                let adapters = self.adapters.iter().filter(inside).cloned();
                Active::new(names.into_iter().chain(adapters))
            }
        }
    }
}

fn frozen(recipe: &Recipe, spec: &Spec, params: &[ParamInfo]) -> Result<Active> {
    let freeze = &recipe.tune.freeze;
    let layers = spec.layers.len();
    if freeze.trainable_layers > layers {
        return Err(
            Error::usage("`tune.freeze.trainable_layers` is more than the model has")
                .found(freeze.trainable_layers)
                .expected(format!("at most {layers}")),
        );
    }
    for prefix in &freeze.trainable {
        if !params.iter().any(|p| p.name.starts_with(prefix.as_str())) {
            return Err(
                Error::usage(format!("`{prefix}` in `tune.freeze.trainable` matches no parameter"))
                    .hint("write the start of a parameter name, for example `lm_head.` or `model.layers.0.`"),
            );
        }
    }
    let first = layers - freeze.trainable_layers;
    let chosen: Vec<String> = params
        .iter()
        .filter(|p| {
            matches!(p.group, Group::Layer(l) if l >= first)
                || freeze
                    .trainable
                    .iter()
                    .any(|prefix| p.name.starts_with(prefix.as_str()))
        })
        .map(|p| p.name.to_string())
        .collect();
    if chosen.is_empty() {
        return Err(Error::usage("method `freeze` trains nothing")
            .hint("set `tune.freeze.trainable_layers` or name parameters in `tune.freeze.trainable`"));
    }
    Ok(Active::new(chosen))
}
