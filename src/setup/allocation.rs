//! AdaLoRA in a run: derives the rank schedule from the recipe and the number of steps.

use crate::base::{Error, Result};
use crate::engine::StepHook;
use crate::formats::adapter::{AdapterKind, RankAllocation};
use crate::hf::AdapterSet;
use crate::peft::Adapter;
use crate::peft::rank_allocation::{RankAllocator, RankSchedule};
use crate::recipe::{AdaloraKeys, Method, Recipe};

/// Writes the rank schedule into the config of `adapter_set`, in the form that PEFT reads.
///
/// Errors: settings that leave no step to reduce ranks; a given adapter that is not AdaLoRA, or whose ranks are already
/// reduced.
pub fn resolve(recipe: &Recipe, adapter_set: &mut AdapterSet, steps: u64) -> Result<()> {
    let lora = &recipe.tune.lora;
    let given = lora.adapter.is_some();
    let ranks = &lora.adalora;
    let Some(config) = adapter_set
        .config
        .as_mut()
        .filter(|_| recipe.tune.method == Method::Lora)
    else {
        return Ok(());
    };
    let r = config.r;
    let AdapterKind::Adalora(own) = &mut config.kind else {
        return if given && ranks.target_r > 0 {
            Err(
                Error::usage("the given adapter is not an AdaLoRA adapter: it has no ranks to allocate")
                    .at(AdaloraKeys::target_r)
                    .hint("remove the key, or start a new adapter with `tune.lora.peft_type = \"adalora\"`"),
            )
        } else {
            Ok(())
        };
    };
    let target = match (ranks.target_r, given) {
        (0, true) => {
            // The adapter keeps its ranks. With this schedule PEFT sees that no allocation is left.
            let kept = std::mem::take(&mut own.kept);
            *own = RankAllocation {
                target_r: own.target_r,
                orth_reg_weight: ranks.orth_reg_weight,
                kept,
                ..RankAllocation::default()
            };
            return Ok(());
        }
        (0, false) => (2 * r / 3).max(1),
        (target, _) => target,
    };
    if target > r {
        return Err(
            Error::usage("`tune.lora.adalora.target_r` is larger than the initial rank of the adapters")
                .found(target)
                .expected(format!("at most {r}"))
                .hint("raise `tune.lora.r`"),
        );
    }
    if !own.kept.is_empty() {
        return Err(
            Error::usage("the ranks of the given adapter are already reduced: they are not allocated again")
                .at(AdaloraKeys::target_r)
                .hint("remove the key: training continues with the current ranks of the adapter"),
        );
    }
    let (steps, tinit, tfinal) = (steps as usize, ranks.tinit, ranks.tfinal);
    if steps > 0 && tinit + tfinal >= steps {
        return Err(
            Error::usage("`tinit` and `tfinal` of AdaLoRA leave no step for the reduction of ranks")
                .at("tune.lora.adalora")
                .found(format!("{tinit} + {tfinal} of {steps} steps"))
                .expected("less than the steps of the run"),
        );
    }
    *own = RankAllocation {
        target_r: target,
        beta1: ranks.beta1,
        beta2: ranks.beta2,
        delta_t: ranks.delta_t,
        orth_reg_weight: ranks.orth_reg_weight,
        ..RankAllocation::default()
    };
    if steps > 0 {
        (own.tinit, own.tfinal, own.total_step) = (tinit, tfinal, steps);
    }
    Ok(())
}

/// Returns the allocator that changes the ranks of these adapters during training; `None` if they are not AdaLoRA.
pub fn of(recipe: &Recipe, adapter_set: &AdapterSet) -> Option<Box<dyn StepHook>> {
    let config = adapter_set.config.as_ref()?;
    let AdapterKind::Adalora(own) = &config.kind else {
        return None;
    };
    let adapters = adapter_set
        .adapters
        .iter()
        .filter_map(|(module, adapter)| match &**adapter {
            Adapter::Adalora(adalora) => Some((module, adalora)),
            _ => None,
        });
    let lora = &recipe.tune.lora;
    let stays = lora.adapter.is_some() && lora.adalora.target_r == 0;
    Some(Box::new(RankAllocator::new(
        adapters,
        RankSchedule {
            target_r: if stays { config.r } else { own.target_r },
            tinit: own.tinit as u64,
            tfinal: own.tfinal as u64,
            delta_t: own.delta_t as u64,
            beta1: own.beta1,
            beta2: own.beta2,
            orth_reg_weight: own.orth_reg_weight,
            total_steps: own.total_step as u64,
        },
    )))
}
