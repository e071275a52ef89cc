//! Which parameters a method trains, at each step.

use super::adapters::Prepared;
use crate::base::{Error, Result};
use crate::engine::Active;
use crate::model::Spec;
use crate::optim::BlockSchedule;
use crate::recipe::{Method, Recipe};
use crate::source::{Group, ParamInfo};
use std::collections::BTreeSet;

/// Full, freeze and LoRA train one set all the time; block changes it on schedule.
pub enum Tuning {
    Static(Active),
    Blocks {
        schedule: BlockSchedule,
        always: BTreeSet<String>,
    },
}

impl Tuning {
    /// `rows` of training data serve `switch_every = "auto"`. 
    pub fn new(recipe: &Recipe, spec: &Spec, params: &[ParamInfo], prepared: &Prepared, rows: usize) -> Result<Self> {
        let tune = &recipe.tune;
        Ok(match tune.method {
            Method::Full => Self::Static(Active::new(params.iter().map(|p| p.name.to_string()))),
            Method::Freeze => Self::Static(frozen(recipe, spec, params)?),
            Method::Lora => Self::Static(Active::new(prepared.trained()).with_rates(prepared.rates(recipe))),
            Method::Block => {
                let batch = recipe.train.batch_size * recipe.train.gradient_accumulation_steps;
                let schedule = BlockSchedule::new(&tune.block, params, spec.tied, rows, batch, recipe.train.seed)?;
                let prefixes = &tune.block.always_active;
                let always = params.iter().map(|p| p.name.to_string());
                let always = always
                    .filter(|n| prefixes.iter().any(|p| n.starts_with(p.as_str())))
                    .collect();
                Self::Blocks { schedule, always }
            }
        })
    }

    /// What is trained at optimizer step `step`, from 1.
    pub fn active(&self, step: u64) -> Active {
        match self {
            Self::Static(active) => active.clone(),
            Self::Blocks { schedule, always } => {
                let block = &schedule.blocks[schedule.active(step)];
                Active::new(block.params.iter().chain(always).cloned())
            }
        }
    }

    /// Every set that can be active, for the planner.
    pub fn possible(&self) -> Vec<Active> {
        match self {
            Self::Static(active) => vec![active.clone()],
            Self::Blocks { schedule, always } => schedule
                .blocks
                .iter()
                .map(|b| Active::new(b.params.iter().chain(always).cloned()))
                .collect(),
        }
    }

    pub fn label(&self, step: u64) -> Option<String> {
        match self {
            Self::Static(_) => None,
            Self::Blocks { schedule, .. } => Some(schedule.blocks[schedule.active(step)].label.clone()),
        }
    }

    /// Does a block that was not active before start at `step`? Its state starts empty then.
    pub fn switches_at(&self, step: u64) -> bool {
        matches!(self, Self::Blocks { schedule, .. } if schedule.switches_at(step))
    }

    /// Parameters whose optimizer state survives a switch.
    pub fn survives_switch(&self, name: &str) -> bool {
        match self {
            Self::Static(_) => true,
            Self::Blocks { always, .. } => always.contains(name),
        }
    }

    /// Factor of the learning rate beside the schedule's.
    pub fn warmup(&self, step: u64) -> f64 {
        match self {
            Self::Static(_) => 1.0,
            Self::Blocks { schedule, .. } => schedule.warmup(step),
        }
    }

    /// Everything that steps 1 to `step` have trained: what a checkpoint must hold.
    pub fn trained_until(&self, step: u64) -> BTreeSet<String> {
        match self {
            Self::Static(active) => active.names().map(str::to_string).collect(),
            Self::Blocks { schedule, always } => {
                let mut names = always.clone();
                let mut seen = BTreeSet::new();
                let mut at = 1;
                while at <= step && seen.len() < schedule.blocks.len() {
                    if seen.insert(schedule.active(at)) {
                        names.extend(schedule.blocks[schedule.active(at)].params.iter().cloned());
                    }
                    at += schedule.switch_every;
                }
                names
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
