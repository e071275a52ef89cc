//! Writes `final/`: a Hugging Face model directory, or a PEFT adapter directory for LoRA and the other adapter kinds.

use crate::base::{Error, Result};
use crate::engine::Engine;
use crate::formats::adapter::AdapterConfig;
use crate::formats::tokenizer;
use crate::formats::writer::Values;
use crate::hf::{self, BaseHashes, ModelExport};
use crate::model::spec::{EMBEDDING, LM_HEAD};
use crate::model::{Adapters, TokenRows};
use crate::ops::{master, update};
use crate::peft::lora::scaling;
use crate::peft::rank_allocation;
use crate::peft::start::algebra::{self, CompressedPair};
use crate::peft::{Adapter, Lora};
use crate::recipe::{Dtype, ModelInit, Recipe, Stage};
use crate::rlhf::preference::reward;
use crate::setup::ModelDir;
use crate::source::{Group, ParamElements, ParamInfo, Sublayer};
use crate::train::stage::preference;
use crate::train::starts;
use candle_core::{DType, Device, Tensor};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The model and the adapters of a run after training.
pub struct TrainedModel<'a> {
    pub recipe: &'a Recipe,
    pub model: &'a ModelDir,
    pub engine: &'a Engine,
    pub adapter_set: &'a hf::AdapterSet,
    /// The fingerprint of the base weights.
    pub print: &'a BaseHashes,
}

impl<'a> TrainedModel<'a> {
    pub fn new(
        recipe: &'a Recipe,
        model: &'a ModelDir,
        engine: &'a Engine,
        adapter_set: &'a hf::AdapterSet,
        print: &'a BaseHashes,
    ) -> Self {
        Self {
            recipe,
            model,
            engine,
            adapter_set,
            print,
        }
    }
}

/// The mode of an export.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ExportMode {
    Write,
    /// All checks that need no values of weights, but one: nothing is written.
    Rehearse,
}

/// Writes `out` (`final/` of a run) atomically. A run on random weights of a shape writes nothing. `note` receives
/// notes for the user.
pub fn export(trained: &TrainedModel, out: &Path, note: &mut dyn FnMut(&str)) -> Result<Option<PathBuf>> {
    written(trained, out, note, ExportMode::Write)
}

/// Checks before the first step that `export` will be able to write `out`: names, shapes and formats of its tensors, the
/// config, and the files of the base model that it copies.
pub fn rehearse(trained: &TrainedModel, out: &Path) -> Result<()> {
    let model = trained.model;
    if written(trained, out, &mut |_| {}, ExportMode::Rehearse)?.is_some() {
        model.tokenizer.files_with_added(&model.dir)?;
        if model.turn_end.is_some() {
            hf::rehearse_stop_ids(&model.dir, &model.raw_config())?;
        }
    }
    Ok(())
}

fn written(trained: &TrainedModel, out: &Path, note: &mut dyn FnMut(&str), way: ExportMode) -> Result<Option<PathBuf>> {
    let TrainedModel {
        recipe, model, engine, ..
    } = *trained;
    if model.is_shape() {
        return Ok(None);
    }
    if let Some(out) = adapter(trained, out, note, way)? {
        return Ok(Some(out));
    }
    let dtype = recipe.model.dtype;
    let out = base(trained, out, true, dtype, note, way, &mut |name, sink| {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        if let Some(rows) = engine.network.tokens.iter().find(|rows| &*rows.table == name) {
            return with_rows(engine, rows, sink);
        }
        let Some(lora) = engine.network.adapters.get(module).and_then(|a| a.lora()) else {
            return as_stored(engine, name, sink);
        };
        // Merges the adapters that corrected a block run: adds in f32 to the exact values, then rounds once.
        let mut values = exact(engine, name)?;
        let delta = update::to_f32_vec(&lora.delta()?)?;
        values.iter_mut().zip(delta).for_each(|(w, d)| *w += d);
        sink(Values::F32(&values))
    })?;
    Ok(Some(out))
}

/// Writes a model directory with the run's parameters: the result of the run (`whole`; of a reward model with its head), or the
/// base model of an adapter.
fn base(
    trained: &TrainedModel,
    out: &Path,
    whole: bool,
    dtype: Dtype,
    note: &mut dyn FnMut(&str),
    way: ExportMode,
    fill: &mut hf::ParamFill,
) -> Result<PathBuf> {
    let TrainedModel {
        recipe, model, engine, ..
    } = *trained;
    let scores = whole && recipe.train.stage == Stage::Reward;
    let write = |parts: &ModelExport, fill: &mut hf::ParamFill| match way {
        ExportMode::Write => hf::model(parts, fill),
        ExportMode::Rehearse => hf::rehearse_model(parts, fill).map(|()| out.to_path_buf()),
    };
    let left_out = Cell::new(None::<String>);
    let more = |dir: &Path| -> Result<()> {
        left_out.set(write_text_files(recipe, model, dir)?);
        Ok(())
    };
    let mut parts = ModelExport {
        more: whole.then_some(&more as hf::WriteMore),
        out,
        base_dir: &model.dir,
        config: model.raw_config(),
        tied: model.spec.tied,
        dtype,
        params: engine.network.source.params(),
    };
    let mut say = |parts: &ModelExport| {
        let config = hf::config_note(&parts.config, parts.base_dir);
        config.iter().chain(&left_out.take()).for_each(|line| note(line));
    };
    if !scores {
        let written = write(&parts, fill)?;
        say(&parts);
        return Ok(written);
    }
    // A reward model has a score head instead of the output projection.
    let mut params: Vec<ParamInfo> = parts.params.iter().filter(|p| &*p.name != LM_HEAD).cloned().collect();
    params.push(ParamInfo {
        name: hf::SCORE.into(),
        shape: vec![1, model.spec.hidden],
        group: Group::Head,
        sublayer: Sublayer::Other,
    });
    parts.params = &params;
    hf::as_classifier(&mut parts.config, preference::pad_id(&model.tokenizer));
    let written = write(&parts, &mut |name, sink| match name {
        hf::SCORE => engine.exact(reward::SCORE, &mut |values| sink(Values::F32(values))),
        _ => fill(name, sink),
    })?;
    say(&parts);
    Ok(written)
}

fn adapter(trained: &TrainedModel, out: &Path, note: &mut dyn FnMut(&str), way: ExportMode) -> Result<Option<PathBuf>> {
    let TrainedModel {
        recipe,
        model,
        engine,
        adapter_set,
        print,
    } = *trained;
    let Some(config) = &adapter_set.config else {
        return Ok(None);
    };
    let lora = &recipe.tune.lora;
    let network = &engine.network;
    let mut whole: BTreeMap<String, Tensor> = BTreeMap::new();
    for name in &adapter_set.whole {
        match network.param(name) {
            Ok(param) => whole.insert(name.clone(), param.tensor),
            // On the disk until the first step needs it.
            Err(_) if way == ExportMode::Rehearse && engine.elements(name).is_ok() => {
                return Ok(Some(out.to_path_buf()));
            }
            Err(e) => return Err(e),
        };
    }
    let mut config = config.clone();
    let is_head = |m: &String| m == LM_HEAD.trim_end_matches(".weight");
    if model.spec.tied && recipe.train.stage == Stage::Reward && !config.ensure_weight_tying {
        // A sequence classifier of transformers has no such module.
        config.modules_to_save.retain(|m| !is_head(m));
    } else if model.spec.tied
        && let Some(embedding) = whole.get(EMBEDDING).cloned()
    {
        // PEFT rejects a file without it, or gives the head the matrix of the base.
        whole.insert(LM_HEAD.into(), embedding);
    }
    if recipe.train.stage == Stage::Reward {
        whole.insert(hf::SCORE.into(), network.param(reward::SCORE)?.tensor);
        config.task_type = Some(hf::SEQUENCE_CLASSIFIER.into());
        config.modules_to_save.push("score".into());
    }
    let config = &config;
    for rows in &network.tokens {
        whole.insert(rows.param.name.to_string(), rows.param.tensor.clone());
    }
    let has_start = |a: &Arc<Adapter>| a.lora().is_some_and(|l| l.start.is_some());
    let moved = network.adapters.values().any(has_start);
    let random = recipe.model.init == ModelInit::Random;
    let residual = moved && lora.save_residual;
    let (config, adapters) = match (moved, residual, lora.save_rank) {
        (true, true, _) => (config.clone(), without_start(&network.adapters)),
        // The compression takes long; it can be computed for every LoRA.
        (true, false, rank) if rank > 0 && way == ExportMode::Write => {
            compressed(config, &network.adapters, rank, note)?
        }
        _ => hf::plain_lora(config, &network.adapters)?,
    };
    let state = engine.step_hook.as_ref().map(|hook| hook.state()).unwrap_or_default();
    let (mut config, adapters) = hf::pruned(&config, &adapters, &rank_allocation::kept(&state))?;
    let quantized = starts::requantizes_base(recipe);
    if way == ExportMode::Rehearse {
        hf::rehearse_adapter(out, &config, &adapters, &whole, &model.dir)?;
        return Ok(Some(out.to_path_buf()));
    }
    if !residual && !random && !quantized {
        let written = hf::adapter_over(out, &config, &adapters, &whole, &model.dir, &mut |dir| {
            write_text_files(recipe, model, dir)?.iter().for_each(|line| note(line));
            Ok(print.clone())
        });
        return written.map(Some);
    }
    // The base weights of this adapter exist nowhere else, so `base/` stores them.
    config.base_model_name_or_path = Some(format!("{}/base", out.display()));
    note(if quantized {
        "base/ contains the dequantized weights in f32: the adapter belongs to these weights"
    } else {
        "base/ contains the base weights of this adapter"
    });
    let dtype = if quantized { Dtype::F32 } else { recipe.model.dtype };
    hf::adapter_over(out, &config, &adapters, &whole, &model.dir, &mut |dir| {
        // The score head is part of the adapter directory.
        let path = dir.join("base");
        let written = base(trained, &path, false, dtype, note, way, &mut |name, sink| {
            if quantized && let Some(values) = dequantized(engine, name)? {
                return sink(Values::F32(&values));
            }
            let module = name.trim_end_matches(".weight");
            match network.adapters.get(module).filter(|_| residual) {
                Some(adapter) => sink(Values::F32(&residual_of(adapter, exact(engine, name)?)?)),
                None => as_stored(engine, name, sink),
            }
        })?;
        write_text_files(recipe, model, dir)?.iter().for_each(|line| note(line));
        Ok(hf::fingerprint(&written)?.base())
    })
    .map(Some)
}

/// Passes a matrix with its trained rows to `sink`: a copy on the host does not have them.
fn with_rows(engine: &Engine, rows: &TokenRows, sink: &mut dyn FnMut(Values) -> Result<()>) -> Result<()> {
    let mut values = exact(engine, &rows.table)?;
    let width = values.len() / engine.network.source.param(&rows.table)?.shape[0].max(1);
    let new = update::to_f32_vec(&rows.param.tensor)?;
    for (&id, row) in rows.ids.iter().zip(new.chunks_exact(width.max(1))) {
        values[id as usize * width..][..width].copy_from_slice(row);
    }
    sink(Values::F32(&values))
}

/// Returns the exact values of a weight.
fn exact(engine: &Engine, name: &str) -> Result<Vec<f32>> {
    let mut values = Vec::new();
    engine.exact(name, &mut |piece| {
        values.extend_from_slice(piece);
        Ok(())
    })?;
    Ok(values)
}

/// Returns the dequantized values of a weight; `None` if it is not quantized.
fn dequantized(engine: &Engine, name: &str) -> Result<Option<Vec<f32>>> {
    let source = &engine.network.source;
    let Ok(p) = source.param(name) else {
        return Ok(None);
    };
    let weight = source.fetch_with(p)?.weight(name)?.1;
    match weight.format() {
        None => Ok(None),
        Some(_) => Ok(Some(weight.rows(0, p.shape[0])?)),
    }
}

/// Passes the values of a weight to `sink` in the type in which they are stored.
fn as_stored(engine: &Engine, name: &str, sink: &mut dyn FnMut(Values) -> Result<()>) -> Result<()> {
    let sharded = engine.store.sharded();
    if let Some(store) = sharded.filter(|store| store.in_parts(name) && store.own(name).is_none()) {
        // It is quantized now, so the owners of its parts have the exact values.
        let values = exact(engine, name)?.into_iter();
        return match store.exact_part(name)?.0.dtype() {
            DType::BF16 => sink(Values::Bf16(&values.map(|x| master::split(x).0).collect::<Vec<_>>())),
            DType::F16 => sink(Values::F16(&values.map(|x| master::split_f16(x).0).collect::<Vec<_>>())),
            _ => sink(Values::F32(&values.collect::<Vec<_>>())),
        };
    }
    engine.store.read(name, &mut |numbers| match numbers {
        ParamElements::F32(values) => sink(Values::F32(values)),
        ParamElements::Bf16(values, _) => sink(Values::Bf16(values)),
        ParamElements::F16(values, _) => sink(Values::F16(values)),
    })
}

/// W - s·B₀·A₀, where (A₀, B₀) is the initial pair.
fn residual_of(adapter: &Adapter, mut values: Vec<f32>) -> Result<Vec<f32>> {
    let Some(lora) = adapter.lora() else { return Ok(values) };
    if let Some(pair) = &lora.start {
        let start = Lora::new("", pair.clone(), lora.scale, lora.mask);
        for (w, d) in values.iter_mut().zip(update::to_f32_vec(&start.delta()?)?) {
            *w -= d;
        }
    }
    Ok(values)
}

/// The adapters without `Lora::start`: for weights from which the first product was subtracted.
fn without_start(adapters: &Adapters) -> Adapters {
    let plain = |a: &Arc<Adapter>| match &**a {
        Adapter::Lora(lora) => Arc::new(Adapter::Lora(Lora {
            start: None,
            ..lora.clone()
        })),
        _ => a.clone(),
    };
    adapters.iter().map(|(m, a)| (m.clone(), plain(a))).collect()
}

/// Returns the best approximation of rank `rank` as plain LoRA over the original weights; the scale stays alpha / rank.
fn compressed(
    config: &AdapterConfig,
    adapters: &Adapters,
    rank: usize,
    note: &mut dyn FnMut(&str),
) -> Result<(AdapterConfig, Adapters)> {
    let mut config = config.clone();
    config.r = rank;
    config.rank_pattern.clear();
    config.alpha_pattern.clear();
    let scale = scaling(config.lora_alpha, rank, config.use_rslora);
    let mut plain = Adapters::new();
    let mut most = (0.0, "");
    for (module, adapter) in adapters {
        let Some(lora) = adapter.lora() else {
            return Err(Error::new("only a LoRA adapter can be compressed").at(module));
        };
        let CompressedPair { a, b, error } = algebra::compressed(lora, rank, scale)?;
        if error > most.0 {
            most = (error, module);
        }
        let pair = (
            Tensor::from_vec(a, (rank, lora.a.dim(1)?), &Device::Cpu)?,
            Tensor::from_vec(b, (lora.b.dim(0)?, rank), &Device::Cpu)?,
        );
        plain.insert(
            module.clone(),
            Arc::new(Adapter::Lora(Lora::new(module, pair, scale, lora.mask))),
        );
    }
    note(&format!(
        "the adapter is compressed to rank {rank}: the relative error of one layer's update is at most {:.2e} ({})",
        most.0, most.1
    ));
    Ok((config, plain))
}

/// Writes what the recipe changes beside the weights: chat template, new tokens, the end of a turn. Returns a note for the user
/// about settings that are left out.
fn write_text_files(recipe: &Recipe, model: &ModelDir, out: &Path) -> Result<Option<String>> {
    if let Some(template) = &model.template
        && (recipe.data.chat_template.given().is_some() || template.has_kwargs())
    {
        hf::set_chat_template(out, &template.source_with_kwargs())?;
        if let Some(tools) = template.tools_source_with_kwargs() {
            hf::set_tools_template(out, &tools)?;
        }
    }
    for dir in [out.to_path_buf(), out.join("base")] {
        if dir.is_dir() {
            tokenizer::write_files(&dir, &model.tokenizer.files_with_added(&model.dir)?)?;
        }
    }
    if model.turn_end.is_none() {
        return Ok(None);
    }
    let left_out = hf::set_stop_ids(out, &model.raw_config(), model.tokenizer.stop_ids())?;
    Ok(hf::left_out_note("generation_config.json", &left_out))
}
