//! `final/`: a Hugging Face model directory, or a PEFT adapter directory for LoRA.

use super::setup::Described;
use crate::base::{Result, files};
use crate::engine::Engine;
use crate::export::{self, ModelExport};
use crate::formats::adapter::{AdapterConfig, Targets};
use crate::formats::writer::Values;
use crate::ops::update;
use crate::peft::targets::Site;
use crate::recipe::Recipe;
use crate::source::Numbers;
use std::path::{Path, PathBuf};

/// The `adapter_config.json` of fresh adapters on `chosen` linears.
pub fn adapter_config(recipe: &Recipe, chosen: &[Site]) -> AdapterConfig {
    let lora = &recipe.tune.lora;
    let mut targets: Vec<String> = match lora.target_modules.is_empty() {
        false => lora.target_modules.clone(),
        true => chosen
            .iter()
            .filter_map(|s| s.module.rsplit('.').next())
            .map(str::to_string)
            .collect(),
    };
    targets.sort();
    targets.dedup();
    AdapterConfig {
        r: lora.r,
        lora_alpha: lora.lora_alpha,
        lora_dropout: lora.lora_dropout,
        target_modules: Targets::List(targets),
        use_rslora: lora.use_rslora,
        base_model_name_or_path: Some(recipe.model.path.clone()),
        ..AdapterConfig::default()
    }
}

/// Writes `final/`; it appears whole or not at all. The random weights of a shape are not worth a file.
pub fn export(
    run_dir: &Path,
    recipe: &Recipe,
    model: &Described,
    engine: &Engine,
    adapter: Option<&AdapterConfig>,
) -> Result<Option<PathBuf>> {
    if model.is_shape() {
        return Ok(None);
    }
    let out = run_dir.join("final");
    if let Some(config) = adapter {
        let base = export::fingerprint(&model.dir)?;
        let out = export::adapter(&out, config, &engine.network.adapters, &model.dir, &base)?;
        return with_template(recipe, out).map(Some);
    }
    let params = engine.network.source.params();
    let parts = ModelExport {
        out: &out,
        base_dir: &model.dir,
        config: model.config.raw.clone(),
        tied: model.spec.tied,
        dtype: recipe.model.dtype,
        params,
    };
    let source = &engine.network.source;
    let out = export::model(&parts, &mut |name, sink| {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        if let Some(lora) = engine.network.adapters.get(module) {
            // Adapters that corrected a block run become part of the weights: exact values first, one rounding last.
            let mut values = Vec::new();
            engine.exact(name, &mut |piece| {
                values.extend_from_slice(piece);
                Ok(())
            })?;
            let delta = update::to_f32_vec(&lora.delta()?)?;
            values.iter_mut().zip(delta).for_each(|(w, d)| *w += d);
            return sink(Values::F32(&values));
        }
        source.read(name, &mut |numbers| match numbers {
            Numbers::F32(values) => sink(Values::F32(values)),
            Numbers::Bf16(values, _) => sink(Values::Bf16(values)),
        })
    })?;
    with_template(recipe, out).map(Some)
}

/// The template that the rows were rendered with goes along.
fn with_template(recipe: &Recipe, out: PathBuf) -> Result<PathBuf> {
    if let Some(file) = &recipe.data.chat_template {
        export::set_chat_template(&out, &files::read_text(Path::new(file))?)?;
    }
    Ok(out)
}
