//! The adapters of a LoRA run, and those that correct a block run.

use super::finish;
use crate::base::Result;
use crate::export;
use crate::formats::adapter::AdapterConfig;
use crate::model::{Adapters, Spec};
use crate::peft::{self, Lora, targets};
use crate::recipe::{self, Correction, Method, Recipe};
use std::path::Path;
use std::sync::Arc;

/// Fresh adapters, or those of `tune.lora.adapter`; none for other methods. The config is that of an adapter to be
/// saved: a block run merges its adapters at the end.
pub fn of(recipe: &Recipe, spec: &Spec) -> Result<(Adapters, Option<AdapterConfig>)> {
    match recipe.tune.method {
        Method::Lora => of_lora(recipe, spec),
        Method::Block if recipe.tune.block.correction == Correction::Lora => Ok((of_lora(recipe, spec)?.0, None)),
        _ => Ok((Adapters::new(), None)),
    }
}

fn of_lora(recipe: &Recipe, spec: &Spec) -> Result<(Adapters, Option<AdapterConfig>)> {
    let lora = &recipe.tune.lora;
    let all = spec.sites();
    if let Some(dir) = &lora.adapter {
        let (config, adapters) = export::load_adapter(Path::new(dir), &all)?;
        return Ok((adapters, Some(config)));
    }
    let chosen = targets::select(&all, &lora.target_modules)?;
    let mut adapters = Adapters::new();
    for site in &chosen {
        let index = all.iter().position(|s| s.module == site.module).unwrap_or(0) as u64;
        let gaussian = lora.init_lora_weights == recipe::LoraInit::Gaussian;
        let (a, b) = peft::lora::fresh(lora.r, site.input, site.output, gaussian, recipe.train.seed, index)?;
        let module = &site.module;
        let adapter = Lora {
            a,
            b,
            a_name: format!("{module}.lora_A.weight").into(),
            b_name: format!("{module}.lora_B.weight").into(),
            scale: peft::lora::scaling(lora.lora_alpha, lora.r, lora.use_rslora),
            dropout: lora.lora_dropout as f32,
            site: index,
        };
        adapters.insert(module.clone(), Arc::new(adapter));
    }
    let config = finish::adapter_config(recipe, &chosen);
    Ok((adapters, Some(config)))
}
