//! The reference of the KL terms: the policy before its first step. It computes with the same weights in the same storage
//! as the policy then, so that both have the same log-probabilities.

use super::advantages::ReferenceModel;
use super::{PolicyStart, StageContext};
use crate::base::{Result, staging};
use crate::comm::{Collective, SingleRank};
use crate::engine::StepStrategy;
use crate::model::Network;
use crate::ops::update;
use crate::setup::prompts::{Reference, reference, starts_with_adapters};
use crate::setup::{self, active_schedule, adapters};
use crate::source::Placement;
use std::sync::Arc;

/// Returns the reference; `None`: there are no KL terms, or it would be a copy of the weights and this is not rank 0, which alone makes
/// rollouts. Errors: as loading the weights and the given adapter.
pub(super) fn open(setting: &StageContext, start: &PolicyStart) -> Result<Option<ReferenceModel>> {
    let recipe = setting.recipe;
    let mut network = match reference(recipe, setting.spec, start.schedule) {
        Reference::None => return Ok(None),
        Reference::WithoutAdapters => return Ok(Some(ReferenceModel::WithoutAdapters)),
        // The weights never change.
        Reference::StartAdapters => {
            let policy = start.network;
            let mut network = Network::new((*policy.spec).clone(), policy.source.clone(), policy.device.clone());
            start.strategy.apply(&mut network);
            network
        }
        // Other ranks take no part in it: rank 0 reads the weights by itself.
        Reference::Copy if !setting.is_root => return Ok(None),
        Reference::Copy => copy(setting, start)?,
    };
    if starts_with_adapters(recipe) {
        attach(setting, start.network, &mut network)?;
    }
    Ok(Some(ReferenceModel::Copy(Box::new(network))))
}

/// Loads the weights again, as the policy holds them before its first step, but all of them on the device of this rank.
fn copy(setting: &StageContext, start: &PolicyStart) -> Result<Network> {
    let (recipe, model) = (setting.recipe, setting.model);
    let strategy = StepStrategy {
        placement: Placement::Device,
        storage: start.schedule.start_storage(&start.strategy.storage),
        ..start.strategy.clone()
    };
    // For decoded weights of quantized files; those of the policy are in the same directory.
    let scratch = setting.run_dir.join(setup::DEQUANTIZED);
    if model.stored(recipe.model.init)?.is_dequantized(recipe.tune.method) {
        staging::scratch(&scratch)?;
    }
    let alone: Arc<dyn Collective> = Arc::new(SingleRank::default());
    let loaded = model.load_for(&strategy, recipe, &scratch, setting.device, &alone)?;
    Ok(loaded.network)
}

/// Gives `network` the adapters of the policy before its first step, with tensors of their own, and the modules and rows of
/// a given adapter.
fn attach(setting: &StageContext, policy: &Network, network: &mut Network) -> Result<()> {
    let recipe = setting.recipe;
    let mut set = adapters::of(recipe, setting.spec)?;
    set.attach(network)?;
    if recipe.tune.lora.adapter.is_none() {
        // Their values were computed in the policy.
        for (module, adapter) in &network.adapters {
            let computed = policy.adapters.get(module).map(|adapter| adapter.parts());
            for (own, computed) in adapter.parts().iter().zip(computed.unwrap_or_default()) {
                update::set(&own.tensor, &update::to_f32_vec(&computed.tensor)?)?;
            }
        }
    }
    // Rounds the values as the optimizer of the policy does.
    let mut optimizer = active_schedule::optimizer(recipe, setting.spec, &set);
    for (name, tensor) in &set.given {
        let (weight, values) = (network.param(name)?.tensor, update::to_f32_vec(tensor)?);
        optimizer.restore_weight(name, &weight, &values)?;
    }
    Ok(())
}
