//! `memory.goal`: memory for speed only where it pays.
//!
//! Saved activations are judged by one rule. Of two strategies the better one has the smaller
//! `seconds^EXCHANGE · peak`: 1 % of a step is worth `EXCHANGE` % of the peak, from wherever one starts. All numbers of saved
//! layers are planned.

use super::Plan;
use super::memory_plan::MemoryLimits;
use super::search::{PlanBase, PlanContext, PlannedStrategy};
use crate::base::Result;
use crate::base::units::bytes;
use crate::engine::StepStrategy;
use crate::recipe::{Memory, MemoryGoal, Recipe};
use crate::setup::defaults::Choice;

/// Percent of the peak that one percent of a step is worth.
const EXCHANGE: i32 = 4;
/// Below this peak nothing is saved: every machine that trains has so much memory.
const SMALL: u64 = 1 << 30;

/// The fastest strategy that fits, where another one was chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct FastStep {
    pub seconds: f64,
    pub peak_bytes: u64,
}

fn cost(seconds: f64, plan: &Plan) -> f64 {
    seconds.powi(EXCHANGE) * plan.peak_bytes.max(SMALL) as f64
}

impl PlanContext<'_> {
    /// True if memory is taken for speed only where it pays. `auto`: on a CPU, where a budget does not say how much
    /// memory there is to take.
    fn balances(&self, recipe: &Recipe) -> bool {
        match recipe.memory.goal {
            MemoryGoal::Auto => !self.on_gpu && recipe.memory.budget.is_none(),
            MemoryGoal::Balanced => true,
            MemoryGoal::Fast => false,
        }
    }

    /// Returns the best strategy by the rule of this file. `fastest` is the fastest one within `limits.goal`: placement and
    /// gradients are the same, and an MLP is cut into no smaller parts.
    pub(super) fn balanced(
        &self,
        recipe: &Recipe,
        base: &PlanBase,
        fastest: PlannedStrategy,
        limits: MemoryLimits,
    ) -> Result<PlannedStrategy> {
        if !self.balances(recipe) {
            return Ok(fastest);
        }
        let lossy = fastest.lossy;
        let fast = FastStep {
            seconds: fastest.seconds,
            peak_bytes: fastest.plan.peak_bytes,
        };
        let first = fastest.inputs.strategy.clone();
        let tokens = |s: &StepStrategy| s.mlp_tokens.unwrap_or(usize::MAX);
        let alike = |s: &StepStrategy| {
            s.placement == first.placement && s.gradients == first.gradients && tokens(s) >= tokens(&first)
        };
        let range = self.saved_layers(recipe)?;
        let mut best = fastest;
        for strategy in self.strategies(recipe, base)?.into_iter().filter(alike) {
            for saved_layers in range.clone() {
                let strategy = StepStrategy {
                    saved_layers,
                    ..strategy.clone()
                };
                let plan = self.plan(recipe, base, &strategy);
                let inputs = base.inputs(&strategy);
                let seconds = base.seconds(recipe, &inputs);
                let fits = super::search::fits(&plan, limits.goal, limits.host);
                if fits && cost(seconds, &plan) < cost(best.seconds, &best.plan) {
                    best = PlannedStrategy {
                        inputs,
                        lossy,
                        plan,
                        seconds,
                        fits: true,
                        fast: Some(fast),
                    };
                }
            }
        }
        Ok(best)
    }
}

/// The gain and the cost of `memory.goal = "fast"`, if it would choose something else.
pub(super) fn choice(chosen: &PlannedStrategy) -> Option<Choice> {
    let fast = chosen.fast?;
    let more = fast.peak_bytes.saturating_sub(chosen.plan.peak_bytes);
    Some(Choice {
        key: Memory::goal,
        value: MemoryGoal::Balanced.name().into(),
        why: format!(
            "`fast`: an estimated {:.0} % less time for a step, {} more memory (+{:.0} %)",
            100.0 * (1.0 - fast.seconds / chosen.seconds),
            bytes(more),
            100.0 * more as f64 / chosen.plan.peak_bytes.max(1) as f64
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{families, shapes};
    use crate::plan::gpu_time::GPUS;
    use crate::plan::memory_plan::ProcessState;
    use crate::recipe;
    use crate::setup::StoredWeights;
    use crate::setup::active_schedule::ActiveSchedule;
    use crate::setup::adapters;
    use std::sync::Arc;

    /// The chosen strategy of a run of 0.5B on a machine with `free` bytes, and the costs of all strategies that fit, in the
    /// order of their seconds.
    fn chosen(settings: &str, free: u64) -> (PlannedStrategy, Vec<(f64, f64)>) {
        let text = format!("[model]\npath = \"shape:qwen2.5-0.5b\"\n{settings}");
        let recipe = recipe::parse(&text, "r.toml", &[]).unwrap().recipe;
        let spec = families::read(&shapes::config("shape:qwen2.5-0.5b").unwrap().unwrap()).unwrap();
        let adapters = adapters::with(&recipe, &spec, adapters::AdapterValues::Shapes).unwrap();
        let schedule = ActiveSchedule::new(&recipe, &spec, &spec.params(), &adapters).unwrap();
        let context = PlanContext {
            spec: &spec,
            adapters: &adapters.adapters,
            schedule: &schedule,
            rows: None,
            stored: &StoredWeights::default(),
            on_gpu: false,
            gpu_rates: &GPUS[0],
            graphs: false,
            teacher: None,
            judges: &Arc::default(),
            process: ProcessState {
                available: Some(free),
                resident: 0,
                threads: 2,
                ranks: 1,
                machines: 1,
            },
        };
        let limits = MemoryLimits {
            goal: Some(free),
            most: Some(free),
            host: None,
        };
        let found = context.choose(&recipe, limits).unwrap();
        let base = context.base(&recipe, None).unwrap();
        let mut all = Vec::new();
        for strategy in context.strategies(&recipe, &base).unwrap() {
            let first = &found.inputs.strategy;
            if (strategy.placement, strategy.gradients, strategy.mlp_tokens)
                != (first.placement, first.gradients, first.mlp_tokens)
            {
                continue;
            }
            for saved_layers in 0..=spec.layers.len() {
                let strategy = StepStrategy {
                    saved_layers,
                    ..strategy.clone()
                };
                let plan = context.plan(&recipe, &base, &strategy);
                if plan.peak_bytes <= free {
                    let seconds = base.seconds(&recipe, &base.inputs(&strategy));
                    all.push((seconds, cost(seconds, &plan)));
                }
            }
        }
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        (found, all)
    }

    #[test]
    fn the_best_of_all_strategies_is_chosen_and_fast_is_the_fastest() {
        const MANY: &str = "[train]\nbatch_size = 16\n[data]\nmax_length = 512\npacking = false\n";
        const FEW: &str = "[train]\nbatch_size = 1\n[data]\nmax_length = 512\npacking = false\n";
        for (rows, method) in [(MANY, "lora"), (MANY, "full"), (FEW, "lora"), (FEW, "block")] {
            for gib in [3, 64] {
                let with = |goal: &str| {
                    let settings = format!("{rows}[tune]\nmethod = \"{method}\"\n[memory]\ngoal = \"{goal}\"\n");
                    chosen(&settings, gib << 30)
                };
                let (found, all) = with("balanced");
                if !found.fits {
                    continue;
                }
                let best = all.iter().map(|c| c.1).fold(f64::MAX, f64::min);
                let got = cost(found.seconds, &found.plan);
                assert!(got <= best * (1.0 + 1e-9), "{rows}{method} {gib}: {got} {best}");
                let (fast, all) = with("fast");
                assert_eq!(fast.seconds, all[0].0, "{rows}{method} {gib}");
                assert_eq!(fast.fast, None);
                // The plan states the true numbers of `fast`.
                if let Some(named) = found.fast {
                    assert_eq!((named.seconds, named.peak_bytes), (fast.seconds, fast.plan.peak_bytes));
                    assert!(choice(&found).unwrap().why.starts_with("`fast`: an estimated"));
                } else {
                    assert_eq!(found.seconds, fast.seconds);
                }
            }
        }
    }

    #[test]
    fn much_memory_for_little_time_is_not_taken_and_a_budget_says_that_it_may_be() {
        let settings = "[train]\nbatch_size = 32\n[data]\nmax_length = 512\npacking = false\n[tune]\nmethod = \"lora\"\n[memory]\n";
        let layers = 24;
        let saved = |more: &str| {
            chosen(&format!("{settings}{more}"), 64 << 30)
                .0
                .inputs
                .strategy
                .saved_layers
        };
        assert!(saved("") < layers);
        assert_eq!(saved("goal = \"fast\"\n"), layers);
        assert_eq!(saved("budget = \"64GiB\"\n"), layers);
        assert_eq!(saved("goal = \"balanced\"\nbudget = \"64GiB\"\n"), saved(""));
        // A setting of the recipe is not judged.
        assert_eq!(saved("activations = \"keep\"\n"), layers);
    }
}
