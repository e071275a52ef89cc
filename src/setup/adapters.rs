//! The adapters of a run: which linears have one, its kind, and the other parameters that train with it. Also the
//! adapters that correct a block run.

use crate::base::{Error, Result};
use crate::formats::adapter::AdapterKind;
use crate::hf::{self, LoadedAdapter};
use crate::model::Spec;
use crate::model::spec::{EMBEDDING, LM_HEAD};
use crate::peft::Adapter;
use crate::recipe::{Correction, LoraKeys, Method, Recipe};
use crate::setup::locate;
use std::sync::Arc;

/// Returns new adapters, or those of `tune.lora.adapter`; none for other methods. A part that PEFT would leave out is in
/// `AdapterSet::left_out`: an error for a new run only.
///
/// Errors: targets that match nothing, sizes that the adapter kind does not allow, an adapter directory that does not
/// fit.
pub fn of(recipe: &Recipe, spec: &Spec) -> Result<hf::AdapterSet> {
    with(recipe, spec, AdapterValues::Drawn)
}

/// The values of fresh adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdapterValues {
    /// The initial ones.
    Drawn,
    /// None: a plan needs the shapes only.
    Shapes,
}

/// As `of`, with these values.
pub fn with(recipe: &Recipe, spec: &Spec, values: AdapterValues) -> Result<hf::AdapterSet> {
    match recipe.tune.method {
        Method::Lora => fresh_or_given(recipe, spec, values),
        // A block run merges its adapters at the end, so no config is saved.
        Method::Block if recipe.tune.block.correction == Correction::Lora => Ok(hf::AdapterSet {
            config: None,
            left_out: None,
            whole: Vec::new(),
            rows: rows(recipe, spec),
            ..fresh_or_given(recipe, spec, values)?
        }),
        _ => Ok(hf::AdapterSet {
            rows: rows(recipe, spec),
            ..hf::AdapterSet::default()
        }),
    }
}

/// The rows that train without adapters.
fn rows(recipe: &Recipe, spec: &Spec) -> Vec<hf::TrainedRows> {
    let ids = &recipe.tune.rows;
    let tables: &[&str] = if spec.tied { &[EMBEDDING] } else { &[EMBEDDING, LM_HEAD] };
    let tables = tables.iter().filter(|_| !ids.is_empty());
    tables
        .map(|table| hf::TrainedRows {
            table: table.to_string(),
            ids: ids.clone(),
            given: None,
        })
        .collect()
}

/// Errors: the recipe adds a token that the given adapter has no row for.
fn check_new_tokens(recipe: &Recipe, loaded: &LoadedAdapter) -> Result<()> {
    if !recipe.data.adds_tokens() || loaded.whole.contains_key(EMBEDDING) {
        return Ok(());
    }
    let has = |id: usize| {
        loaded
            .rows
            .values()
            .any(|(ids, _)| ids.iter().any(|own| *own as usize == id))
    };
    match recipe.tune.lora.trainable_token_indices.iter().find(|id| !has(**id)) {
        None => Ok(()),
        Some(id) => Err(
            Error::new("the adapter has no row for a new token, and a given adapter gets none")
                .at(LoraKeys::adapter)
                .found(format!("token {id}"))
                .hint("merge the adapter first (`ft merge`), and add the tokens to the merged model"),
        ),
    }
}

fn fresh_or_given(recipe: &Recipe, spec: &Spec, values: AdapterValues) -> Result<hf::AdapterSet> {
    if let Some(dir) = &recipe.tune.lora.adapter {
        let loaded = hf::load_adapter(&locate::adapter_directory(dir)?, spec)?;
        check_new_tokens(recipe, &loaded)?;
        let left_out = hf::check_saved_again(&loaded, spec).err();
        let warnings = other_dropout(recipe, &loaded).into_iter().collect();
        let LoadedAdapter {
            mut config,
            mut adapters,
            whole,
            rows,
            score,
            ..
        } = loaded;
        if score.is_some() {
            return Err(
                Error::new("the adapter belongs to a reward model and cannot be trained further")
                    .at(LoraKeys::adapter)
                    .found(dir)
                    .hint("start from a new adapter, or from the adapter of a language model"),
            );
        }
        config.base_model_name_or_path = Some(recipe.model.path.to_string());
        config.revision = base_revision(recipe);
        adapters.values_mut().for_each(|a| set_dropout(a, recipe));
        config.lora_dropout = recipe.tune.lora.lora_dropout;
        if !config.target_parameters.is_empty() && config.lora_dropout > 0.0 {
            return Err(
                Error::usage("the adapter is on parameters of experts: PEFT has no dropout for those")
                    .at(LoraKeys::lora_dropout)
                    .found(config.lora_dropout)
                    .hint("set `tune.lora.lora_dropout = 0.0`"),
            );
        }
        return Ok(hf::AdapterSet {
            adapters,
            config: Some(config),
            whole: whole.keys().cloned().collect(),
            given: whole,
            warnings,
            left_out: left_out.map(|e| e.at(LoraKeys::adapter)),
            rows: rows
                .into_iter()
                .map(|(table, (ids, values))| hf::TrainedRows {
                    table,
                    ids,
                    given: Some(values),
                })
                .collect(),
        });
    }
    let (lora, base) = (&recipe.tune.lora, Some(recipe.model.path.to_string()));
    let mut set = match values {
        AdapterValues::Drawn => hf::adapters_to_fill(lora, spec, base, recipe.train.seed)?,
        AdapterValues::Shapes => hf::adapter_shapes(lora, spec, base)?,
    };
    if let Some(config) = &mut set.config {
        config.revision = base_revision(recipe);
    }
    Ok(set)
}

/// The revision of a base model from the hub, if it is not the default one.
fn base_revision(recipe: &Recipe) -> Option<String> {
    let revision = &recipe.model.revision;
    (!recipe.model.path.is_local() && revision != "main").then(|| revision.clone())
}

/// A warning if the given adapter was trained with another dropout.
fn other_dropout(recipe: &Recipe, loaded: &LoadedAdapter) -> Option<String> {
    let (own, set) = (loaded.config.lora_dropout, recipe.tune.lora.lora_dropout);
    let drops = matches!(
        loaded.config.kind,
        AdapterKind::Lora | AdapterKind::Vera { .. } | AdapterKind::Adalora(_)
    );
    (drops && own != set).then(|| {
        format!(
            "the dropout of the given adapter, {own}, is replaced by that of the recipe: `{}` = {set}",
            LoraKeys::lora_dropout
        )
    })
}

/// Sets the dropout of a given adapter to the value of the recipe.
fn set_dropout(adapter: &mut Arc<Adapter>, recipe: &Recipe) {
    let p = recipe.tune.lora.lora_dropout as f32;
    let mut own = (**adapter).clone();
    match &mut own {
        Adapter::Lora(lora) => lora.mask.p = p,
        Adapter::Dora(dora) => dora.lora.mask.p = p,
        Adapter::Vera(vera) => vera.mask.p = p,
        Adapter::Adalora(adalora) => adalora.mask.p = p,
        Adapter::Ia3(_) | Adapter::Loha(_) | Adapter::Lokr(_) | Adapter::Oft(_) | Adapter::Experts(_) => return,
    }
    *adapter = Arc::new(own);
}
