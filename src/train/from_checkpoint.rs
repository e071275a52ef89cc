//! Writes the model or the adapter of a checkpoint, equal to `final/` at that step. Needs the base model and the
//! checkpoint; does not read the training rows.

use crate::base::staging::ScratchDirectory;
use crate::base::{Error, Result, files, memory};
use crate::checkpoint::{self, LoadedState};
use crate::data::Dataset;
use crate::engine::{ActiveSet, Engine, StepStrategy, TrainConfig};
use crate::hf;
use crate::model::Objective;
use crate::plan::resumed_choices::pin_resumed_choices;
use crate::recipe::{self, Method, ModelInit, ModelRef, Recipe, Stage};
use crate::rlhf::preference::RewardObjective;
use crate::setup::active_schedule;
use crate::setup::adapters;
use crate::setup::allocation;
use crate::setup::{ModelDir, vocabulary};
use crate::sft::CausalLm;
use crate::source::Placement;
use crate::source::StoragePolicy;
use crate::train::Resume;
use crate::train::finish::{self, TrainedModel};
use crate::train::ranks::RunRanks;
use crate::train::stage::preference;
use crate::train::starts::{self, AdapterInitContext};
use crate::train::state;
use crate::train::trained_names;
use candle_core::Device;
use std::path::Path;

/// The result of an export from a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointExport {
    pub adapter: bool,
    /// The step of the checkpoint.
    pub step: u64,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// Where the files are that the recipe of a checkpoint names.
#[derive(Debug, Clone, Copy)]
pub enum RecipePaths<'a> {
    /// As its recipe says.
    OfCheckpoint,
    /// The base model is here now.
    Base(&'a ModelRef),
    /// As in the recipe of the run that goes on with it: the same content may be at other places.
    OfRun(&'a Recipe),
}

/// Writes the equivalent of `final/` after the step of the checkpoint in `dir`.
///
/// Errors: the base model is not the one of the run; a trained value that would not be written; `out` cannot be written.
pub fn write(dir: &Path, out: &Path, paths: RecipePaths) -> Result<CheckpointExport> {
    write_or(dir, out, None, paths)
}

/// As `write`, but a whole model is written to `whole`, if that is given. An adapter with a base of its own names `out`.
pub fn write_or(dir: &Path, out: &Path, whole: Option<&Path>, paths: RecipePaths) -> Result<CheckpointExport> {
    let loaded = checkpoint::load(dir)?;
    let fingerprint = state::fingerprint(&loaded);
    let written = recipe::again(&fingerprint.recipe).map_err(|e| e.within(dir.display()))?;
    let mut recipe = pin_resumed_choices(&written.recipe, &Resume::From(dir.to_path_buf()))?;
    match paths {
        RecipePaths::OfCheckpoint => {}
        RecipePaths::Base(base) => (recipe.model.path, recipe.model.revision) = (base.clone(), "main".into()),
        RecipePaths::OfRun(run) => {
            (recipe.model.path, recipe.model.revision) = (run.model.path.clone(), run.model.revision.clone());
            recipe.tune.lora.adapter.clone_from(&run.tune.lora.adapter);
            recipe.data.chat_template = run.data.chat_template.clone();
        }
    }
    let recipe = &recipe;
    let device = Device::Cpu;
    let model = ModelDir::of_recipe(recipe).map_err(|e| {
        let first = e.hint_text().map_or(String::new(), |hint| format!("{hint}; "));
        e.after("the base model of the checkpoint is needed").hint(format!(
            "{first}if it was moved, name its directory with `ft export --base`"
        ))
    })?;
    let recipe = &vocabulary::with_new_rows(recipe, model.new_rows.as_ref(), &model.spec);
    if model.is_shape() {
        return Err(Error::new("a built-in shape has random weights: there is nothing to export").at_path(dir));
    }
    let print = match recipe.model.init {
        ModelInit::Pretrained => Some(model.fingerprint()?),
        ModelInit::Random => None,
    };
    if let Some(print) = &print
        && ![&print.exact, &print.sampled].contains(&&fingerprint.base)
    {
        return Err(Error::new("the base model differs from the model that was trained")
            .at_path(&model.dir)
            .hint(
                "a checkpoint contains only the trained weights; all other weights come from the base model of the run",
            ));
    }
    let base = print.as_ref().map(hf::Fingerprint::base).unwrap_or_default();
    let mut adapter_set = adapters::of(recipe, &model.spec)?;
    allocation::resolve(recipe, &mut adapter_set, steps_of_run(&loaded, recipe))?;
    let params = model.spec.params();
    let storage = if starts::requantizes_base(recipe) {
        StoragePolicy::new(&recipe.memory.storage_rules(), recipe.model.dtype, &params, |_| false)?
    } else {
        StoragePolicy::dense(recipe.model.dtype)
    };
    let bytes = storage.bytes(&params);
    let lora = &recipe.tune.lora;
    let moves_base = starts::requantizes_base(recipe) || lora.save_residual || recipe.model.init == ModelInit::Random;
    let fits = memory::available().is_none_or(|free| bytes < free / 10 * 8);
    let written = match recipe.tune.method {
        // A first product that is subtracted doubles the rank.
        Method::Lora if fits && !moves_base => {
            let elements: usize = adapter_set.adapters.values().map(|a| a.elements()).sum();
            8 * elements as u64
        }
        _ => bytes,
    };
    checkpoint::check_space(out, written)?;
    let scratch = ScratchDirectory::beside(out)?;
    let placement = if fits {
        Placement::Device
    } else {
        Placement::Disk { head_rows: None }
    };
    let strategy = StepStrategy {
        placement,
        storage,
        ..StepStrategy::new(recipe.model.dtype)
    };
    let mut loaded_model = model.load_for(&strategy, recipe, scratch.path(), &device, &RunRanks::default().0)?;
    let network = &mut loaded_model.network;
    adapter_set.attach(network)?;
    let config = TrainConfig {
        step_hook: allocation::of(recipe, &adapter_set),
        ..TrainConfig::default()
    };
    let sizes = state::sizes(&loaded)?;
    let ranks = starts::ranks_of(network, |name| sizes.get(name).copied());
    starts::resize(recipe, network, &mut adapter_set, &ranks)?;
    trained_names::check_exported(&sizes, &adapter_set, &model.spec).map_err(|e| e.or_at(dir.display()))?;
    if starts::requantizes_base(recipe) {
        let mut setting = AdapterInitContext {
            recipe,
            model: &model,
            objective: &CausalLm::new(model.spec.vocab),
            train: &Dataset::default(),
            base: &fingerprint.base,
            cache: scratch.path(),
            ranks: &RunRanks::default(),
            store: &*loaded_model.store,
            note: &mut |_| {},
        };
        starts::fill(&mut setting, network, &mut adapter_set)?;
    }
    let objective: Box<dyn Objective> = if recipe.train.stage == Stage::Reward {
        let pad = preference::pad_id(&model.tokenizer);
        Box::new(RewardObjective::new(model.spec.hidden, 0.0, pad, 0.0, 0, &device)?)
    } else {
        Box::new(CausalLm::new(model.spec.vocab))
    };
    let optimizer = active_schedule::optimizer(recipe, &model.spec, &adapter_set);
    let none = ActiveSet::new([]);
    let mut engine = Engine::with_config(loaded_model, objective, optimizer, strategy, &none, config)?;
    state::restore_weights(&loaded, &mut engine)?;
    let mut notes = Vec::new();
    let trained = TrainedModel {
        recipe,
        model: &model,
        engine: &engine,
        adapter_set: &adapter_set,
        print: &base,
    };
    let adapter = adapter_set.config.is_some();
    let to = whole.filter(|_| !adapter).unwrap_or(out);
    finish::export(&trained, to, &mut |line| notes.push(line.to_string()))?;
    Ok(CheckpointExport {
        adapter,
        step: loaded.step,
        notes,
    })
}

/// Planned number of steps of the run: the AdaLoRA schedule is saved with the adapter.
fn steps_of_run(loaded: &LoadedState, recipe: &Recipe) -> u64 {
    if let Ok(steps) = u64::try_from(recipe.train.max_steps) {
        return steps;
    }
    // Checkpoints of earlier versions do not have the number.
    if let Some(steps) = state::fingerprint(loaded).total_steps {
        return steps;
    }
    let events = loaded.path.parent().map(|run| run.join("events.jsonl"));
    let text = events.and_then(|file| files::read_text(&file).ok()).unwrap_or_default();
    let starts = text
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let mut steps = starts.filter_map(|event| event["steps"].as_u64());
    steps.next_back().unwrap_or(loaded.step)
}
