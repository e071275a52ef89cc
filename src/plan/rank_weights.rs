//! Whether the ranks of a run can divide the weights: in parts of every matrix, or by experts.

use super::search::{PlanContext, corrects_all};
use super::updates_in_parts;
use crate::base::{Error, Result};
use crate::recipe::{DistributedSection, Method, RankWeights, Recipe, Tier};
use crate::source::sharded::is_in_parts;
use crate::source::{Placement, expert_of};

/// Why an update is not one of each element by itself.
fn not_by_element(recipe: &Recipe, masked: bool) -> String {
    if masked {
        "blocks of elements inside matrices".into()
    } else {
        format!("`optimizer.name = \"{}\"`", recipe.optimizer.name.name())
    }
}

impl PlanContext<'_> {
    /// Weights in parts on the ranks. Errors: an update that needs whole weights; a tier that holds none.
    pub(super) fn sharded(&self, recipe: &Recipe) -> Result<Placement> {
        let value = match recipe.distributed.weights {
            RankWeights::ShardedInNode => "sharded-in-node",
            _ => "sharded",
        };
        let refused = |why: &str, found: String| {
            Error::usage(format!("`distributed.weights = \"{value}\"` {why}"))
                .found(found)
                .hint("set `distributed.weights = \"replicated\"`")
        };
        if corrects_all(recipe) {
            let correction = recipe.tune.block.correction.name();
            return Err(refused(
                "has whole weights of no layer, and this correction changes all of them in each step",
                format!("`tune.block.correction = \"{correction}\"`"),
            ));
        }
        let masked = self.schedule.active(1).is_masked();
        if recipe.tune.method != Method::Lora && !updates_in_parts(recipe, masked) {
            return Err(refused(
                "needs an update of each element by itself",
                not_by_element(recipe, masked),
            ));
        }
        let mut whole = self.spec.params();
        whole.retain(is_in_parts);
        let turns = self.schedule.turns(u64::MAX, &self.policy(recipe, None)?);
        let mut trained = turns.iter().flat_map(|turn| turn.active.names());
        if recipe.tune.method == Method::Lora
            && let Some(name) = trained.find(|name| whole.iter().any(|p| &*p.name == *name))
        {
            let found = format!("`{name}` of `tune.lora.modules_to_save`");
            return Err(refused("trains no matrices of layers beside adapters", found));
        }
        // On a CPU the host's memory is the device's.
        let refuses = match recipe.memory.tier {
            Tier::Auto | Tier::Host => false,
            Tier::Device => self.on_gpu,
            Tier::Disk => true,
        };
        if refuses {
            return Err(refused(
                "divides weights in host memory, and this tier holds none there",
                format!("`memory.tier = \"{}\"`", recipe.memory.tier.name()),
            ));
        }
        Ok(if self.on_gpu {
            Placement::ShardedHost
        } else {
            Placement::Sharded
        })
    }

    /// Frozen weights in files that the ranks of a machine share. Errors: a tier without files; a correction of all weights.
    pub(super) fn shared_files(&self, recipe: &Recipe) -> Result<()> {
        let refused = |why: &str, found: String| {
            Error::usage(format!("`distributed.weights = \"host\"` {why}"))
                .at(DistributedSection::weights)
                .found(found)
        };
        let tier = recipe.memory.tier;
        if !matches!(tier, Tier::Auto | Tier::Disk) {
            return Err(refused(
                "reads frozen weights from files, and this tier has a copy of them for each rank",
                format!("`memory.tier = \"{}\"`", tier.name()),
            )
            .expected("`memory.tier` = `auto` or `disk`"));
        }
        if corrects_all(recipe) {
            let correction = recipe.tune.block.correction.name();
            return Err(refused(
                "shares weights that do not change, and this correction changes all of them in each step",
                format!("`tune.block.correction = \"{correction}\"`"),
            )
            .hint("set `distributed.weights = \"replicated\"`"));
        }
        Ok(())
    }

    /// Routed experts divided among the ranks. Errors: a model without experts; adapters on them; an update that needs
    /// more than the gradients of one rank; a tier that holds none.
    pub(super) fn expert_parallel(&self, recipe: &Recipe) -> Result<Placement> {
        let refused = |why: &str, found: String| {
            Error::usage(format!("`distributed.weights = \"expert-parallel\"` {why}"))
                .found(found)
                .hint("set `distributed.weights = \"replicated\"`")
        };
        if !self.spec.layers.iter().any(|layer| layer.experts.is_some()) {
            return Err(refused("needs routed experts", "a model without experts".into()));
        }
        let sites = self.spec.expert_linears();
        let adapted = |module: &String| {
            expert_of(&format!("{module}.")).is_some() || sites.iter().any(|(parameter, _)| parameter == module)
        };
        if let Some(module) = self.adapters.keys().find(|module| adapted(module)) {
            let found = format!("an adapter on `{module}`");
            return Err(refused("needs experts without adapters", found));
        }
        if corrects_all(recipe) {
            let correction = recipe.tune.block.correction.name();
            let found = format!("`tune.block.correction = \"{correction}\"`");
            return Err(refused(
                "cannot be used with a correction that changes all weights in each step",
                found,
            ));
        }
        let turns = self.schedule.turns(u64::MAX, &self.policy(recipe, None)?);
        let mut trained = turns.iter().flat_map(|turn| turn.active.names());
        if let Some(name) = trained.find(|name| expert_of(name).is_some()) {
            if recipe.tune.method == Method::Lora {
                let found = format!("`{name}` of `tune.lora.modules_to_save`");
                return Err(refused("trains no experts beside adapters", found));
            }
            if self
                .spec
                .layers
                .iter()
                .any(|layer| layer.experts.is_some_and(|sizes| sizes.bias))
            {
                let found = format!("a run that trains `{name}`, and biases of experts");
                return Err(refused("needs frozen experts if they have biases", found));
            }
            let masked = self.schedule.active(1).is_masked();
            if !updates_in_parts(recipe, masked) {
                return Err(refused(
                    "needs an update of each element by itself",
                    not_by_element(recipe, masked),
                ));
            }
        }
        if !matches!(recipe.memory.tier, Tier::Auto | Tier::Device) {
            return Err(refused(
                "divides experts in memory, and this tier holds none there",
                format!("`memory.tier = \"{}\"`", recipe.memory.tier.name()),
            ));
        }
        Ok(Placement::ExpertParallel)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{inputs, recipe, spec};
    use super::super::{PlanInputs, PlanModel, forecast, most_renewed, sent, weights};
    use super::*;
    use crate::comm::part_of;
    use crate::engine::{ActiveSet, GradientStorage};
    use crate::recipe::Dtype;
    use crate::source::Group;
    use crate::source::sharded::collections;

    /// `ranks` ranks on `machines` machines, which train all parameters.
    fn on(machines: usize, ranks: usize) -> PlanInputs {
        let all = spec().params().into_iter().map(|p| p.name.to_string());
        let mut inputs = inputs(ActiveSet::new(all), GradientStorage::Keep);
        inputs.strategy.placement = Placement::Sharded;
        (inputs.micro_batches, inputs.ranks, inputs.machines) = (ranks, ranks, machines);
        inputs
    }

    #[test]
    fn a_machine_has_all_weights_and_all_ranks_share_the_rest() {
        let mut recipe = recipe("[tune]\nmethod = \"full\"");
        recipe.model.dtype = Dtype::Bf16;
        let line = |inputs: &PlanInputs, key: &str| {
            let plan = forecast(&spec(), &recipe, inputs);
            plan.lines.iter().find(|line| line.key == key).unwrap().bytes
        };
        let (machine, all, both) = (on(1, 4), on(1, 8), on(2, 8));
        assert_eq!(line(&both, "weights"), line(&machine, "weights"));
        assert!(line(&both, "weights") > line(&all, "weights"));
        for key in ["optimizer", "gradients"] {
            assert_eq!(line(&both, key), line(&all, key), "{key}");
        }
        assert!(line(&both, "optimizer") < line(&machine, "optimizer"));
    }

    #[test]
    fn layers_are_sent_inside_of_a_machine_and_new_values_outside() {
        let mut recipe = recipe("[tune]\nmethod = \"full\"");
        recipe.model.dtype = Dtype::Bf16;
        let spec = spec();
        let (all, both) = (on(1, 8), on(2, 8));
        let model = PlanModel::new(&spec, &both.strategy.storage, &both.adapters);
        let params = spec.params();
        let matrices: Vec<_> = params.iter().filter(|p| is_in_parts(p)).collect();
        let counts = collections(spec.layers.len(), 0, 1, false, |_| true);
        let sum = |rank: usize, factor: &dyn Fn(usize) -> u64| -> u64 {
            let own = matrices.iter().map(|p| {
                let Group::Layer(layer) = p.group else { return 0 };
                2 * part_of(&p.name, p.elements(), rank, 8).len() as u64 * factor(layer)
            });
            own.sum()
        };
        let (bytes, collected) = (|rank| sum(rank, &|_| 1), |rank| sum(rank, &|layer| counts[layer]));
        let active = &both.turns[0].active;
        for rank in 0..8 {
            let near = (collected(rank) + collected((rank + 4) % 8)) * 3;
            assert_eq!(weights::renewed(&model, &both, 2, active, rank), bytes(rank));
            assert_eq!(weights::collected(&model, &both, 2, active, rank), near + bytes(rank));
            assert_eq!(weights::collected(&model, &all, 2, active, rank), collected(rank) * 7);
        }
        assert_eq!(most_renewed(&model, &recipe, &both), (0..8).map(bytes).max().unwrap());
        assert_eq!(most_renewed(&model, &recipe, &all), 0);
        assert!(sent(&model, &recipe, &both) > 0);
    }
}
