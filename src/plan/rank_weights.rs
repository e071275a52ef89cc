//! Whether the ranks of a run can divide the weights: in parts of every matrix, or by experts.

use super::search::{PlanContext, corrects_all};
use super::updates_in_parts;
use crate::base::{Error, Result};
use crate::recipe::{Method, RankWeights, Recipe, Tier};
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
