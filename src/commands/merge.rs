//! `ft merge`: merges a model and its adapters into one model directory, one tensor in memory at a time.

use crate::base::{Error, Result, files};
use crate::checkpoint;
use crate::commands::logits;
use crate::formats::StoredDtype;
use crate::formats::config::Config;
use crate::formats::index::stays_inside;
use crate::formats::tokenizer::{self, Tokenizer};
use crate::formats::weights::Weights;
use crate::formats::writer::{self, TensorPlan, Values};
use crate::hf::{self, OutputModel, TensorFill, WeightedAdapter};
use crate::model::spec::{EMBEDDING, LM_HEAD};
use crate::model::{Spec, families};
use crate::ops::update;
use crate::quant::Format;
use crate::recipe::Dtype;
use crate::report;
use crate::setup::{locate, vocabulary};
use crate::source::{ParamInfo, resident, stored};
use crate::train::stage::preference::pad_id;
use crate::train::verify;
use candle_core::Tensor;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// The result of a merge.
#[derive(Debug, Clone, PartialEq)]
pub struct MergeReport {
    pub out: PathBuf,
    pub tensors: usize,
    /// Tensors that the adapter changed.
    pub merged: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Types of the written tensors, with their safetensors names.
    pub dtypes: Vec<&'static str>,
    /// Error of rounding the merged weights to the stored type, relative to the change by the adapter (ratio of the
    /// root mean squares): 0 in f32; near 1 the rounding removes the effect of the adapter.
    pub rounding: f64,
    pub logits: logits::LogitDifference,
}

/// Adds adapters to the weights of the model in `model_dir`, in f32. Each has its directory and weight (1: added in
/// full, -1: subtracted). Writes `out` with the stored type of each tensor, or with `dtype`. Tensors without an adapter
/// keep their bytes. Every change is relative to the original weights. The adapter of a reward model turns the model
/// into a sequence classifier: its score head replaces the output projection. A model that is one already keeps its head.
///
/// Errors: `out` is not empty; a file of the `final/` of a run is not as the run wrote it; an adapter does not fit, or was
/// trained on another base; a weight is missing, has another shape, or is not part of this model; not enough disk space. In these cases nothing is written.
pub fn merge(
    model_dir: &Path,
    adapter_dirs: &[(PathBuf, f32)],
    out: &Path,
    dtype: Option<Dtype>,
) -> Result<MergeReport> {
    refuse_existing(out)?;
    verify::check_result(model_dir)?;
    for (dir, _) in adapter_dirs {
        verify::check_result(dir)?;
    }
    let config = locate::model_config(model_dir, Config::load)?;
    let mut spec = families::read(&config)?;
    let mut weights = Weights::open(model_dir)?;
    let quantized = quantized_format(&spec, &weights)?;
    let is_classifier = hf::has_score(&spec, &weights, model_dir)?;
    refuse_others(&spec, &weights, is_classifier.then_some(hf::SCORE))?;
    if is_classifier && !spec.tied && weights.info(LM_HEAD).is_some() {
        report::warn(&format!(
            "{}: `{LM_HEAD}` is left out: a reward model has a score head in its place",
            model_dir.display()
        ));
    }
    // The score head is in the place of an output projection.
    spec.tied |= is_classifier;
    let dtype = dtype.or(quantized.map(|_| Dtype::Bf16));
    let base = hf::fingerprint_of(&spec, &weights)?.base();
    let dirs = adapter_dirs.iter().map(|(dir, _)| dir.clone()).collect();
    let new = vocabulary::of_adapters(model_dir, dirs, spec.vocab)?;
    if let Some((_, rows)) = &new {
        spec.vocab = rows.vocab;
        rows.place(&mut weights, spec.tied)?;
    }
    let tied = spec.clone();
    for (dir, _) in adapter_dirs {
        spec.tied &= !hf::unties(dir, &tied)?;
    }
    let untied = tied.tied && !spec.tied;
    if untied {
        weights = hf::untied_weights(weights)?;
    }
    let mut adapters = Vec::new();
    for (dir, weight) in adapter_dirs {
        if !weight.is_finite() {
            return Err(Error::usage("the weight of an adapter is not a finite number").at_path(dir));
        }
        hf::check_base(dir, &base)?;
        adapters.push(WeightedAdapter {
            adapter: hf::load_adapter(dir, &spec)?,
            weight: *weight,
        });
    }

    if untied {
        refuse_mixed_ties(adapter_dirs, &adapters, &tied)?;
    }
    let score = score_of(&adapters)?.cloned();
    let mut tensors = Vec::new();
    let mut params = spec.params();
    let has_score = is_classifier || score.is_some();
    params.retain(|p| !has_score || &*p.name != LM_HEAD);
    for p in &params {
        let of_file = match stored::find(&weights, &p.name)? {
            Some(_) => StoredDtype::Bf16,
            None => weights.require(&p.name, &p.shape)?.dtype,
        };
        tensors.push(TensorPlan {
            name: p.name.to_string(),
            dtype: dtype.map_or(of_file, hf::stored),
            shape: p.shape.clone(),
        });
    }
    let mut raw = config.raw.clone();
    if let Some(format) = quantized {
        hf::unquantized(&mut raw);
        report::warn(&format!(
            "the weights of this model are quantized ({format}): the merged model has their dequantized values"
        ));
    }
    if new.is_some() {
        hf::set_language_key(&mut raw, "vocab_size", &spec.vocab.into());
    }
    if untied {
        // transformers reads it at the top of a multimodal model.
        raw.insert("tie_word_embeddings".into(), false.into());
        hf::set_language_key(&mut raw, "tie_word_embeddings", &false.into());
    }
    if score.is_some() && !is_classifier {
        let tokenizer = Tokenizer::load(model_dir)?;
        hf::as_classifier(&mut raw, pad_id(&tokenizer));
    }
    if has_score {
        let of_others = tensors.first().map_or(StoredDtype::F32, |t: &TensorPlan| t.dtype);
        let of_file = weights.info(hf::SCORE).map_or(of_others, |info| info.dtype);
        tensors.push(TensorPlan {
            name: hf::SCORE.into(),
            dtype: dtype.map_or(of_file, hf::stored),
            shape: vec![1, spec.hidden],
        });
    }
    let bytes = tensors.iter().filter_map(TensorPlan::bytes).sum();
    if let Some(dtype) = dtype {
        hf::set_dtype(&mut raw, hf::stored(dtype));
    }
    // The adapter directory has the template of its training.
    let templates = adapter_dirs.iter().map(|(dir, _)| dir.join("chat_template.jinja"));
    let template = match templates.rev().find(|t| t.is_file()) {
        Some(template) => {
            stays_inside(&template)?;
            Some(files::read_text(&template)?)
        }
        None => None,
    };
    let directory = OutputModel {
        out,
        base_dir: model_dir,
        config: &raw,
        tensors: &tensors,
        shard_bytes: writer::SHARD_BYTES,
        chat_template: template.as_deref(),
    };
    checkpoint::check_space(out, directory.bytes()?)?;
    let settings = adapter_dirs
        .iter()
        .map(|(dir, _)| dir.join("generation_config.json"))
        .rfind(|f| f.is_file());
    settings.iter().try_for_each(|file| stays_inside(file))?;
    let own = OwnFiles {
        tokenizer: match &new {
            Some((tokenizer, _)) => tokenizer.files_with_added(model_dir)?,
            None => Vec::new(),
        },
        settings,
    };
    let mut rounding = RoundingErrors::default();
    // Experts that share a tensor are written in another order.
    let by_name: HashMap<&str, &ParamInfo> = params.iter().map(|p| (&*p.name, p)).collect();
    let out = own.write_with(
        &directory,
        &mut |plan, sink| match (by_name.get(plan.name.as_str()), &score) {
            (Some(param), _) => write_one(&weights, param, plan.dtype, &adapters, &mut rounding, sink),
            (None, Some(score)) => sink(Values::F32(&update::to_f32_vec(score)?)),
            (None, None) if is_classifier => match weights.info(hf::SCORE) {
                Some(info) if info.dtype == plan.dtype => sink(Values::Raw(&weights.read_bytes(hf::SCORE)?)),
                _ => sink(Values::F32(&weights.read_f32(hf::SCORE)?)),
            },
            (None, None) => Err(Error::new("no such parameter").at(&plan.name)),
        },
    )?;
    if let Some(note) = hf::config_note(&raw, model_dir) {
        report::note(&note);
    }

    let mut dtypes: Vec<_> = tensors.iter().map(|t| t.dtype.name()).collect();
    dtypes.sort_unstable();
    dtypes.dedup();
    Ok(MergeReport {
        tensors: tensors.len(),
        merged: params
            .iter()
            .filter(|p| adapters.iter().any(|a| a.changes(&p.name)))
            .count(),
        dtypes,
        rounding: rounding.ratio(),
        logits: logits::difference(model_dir, adapters, &out, untied, new.as_ref().map(|(_, rows)| rows))?,
        out,
        bytes,
    })
}

/// Files of the result that differ from those of the base model.
struct OwnFiles {
    /// Names and contents.
    tokenizer: Vec<(&'static str, Vec<u8>)>,
    /// `generation_config.json` of an adapter.
    settings: Option<PathBuf>,
}

impl OwnFiles {
    /// Writes the directory with these files: it must not exist with the tokenizer of the base model, whose tokens do not fit
    /// the merged embedding.
    fn write_with(&self, directory: &OutputModel, fill: &mut TensorFill) -> Result<PathBuf> {
        let more = |dir: &Path| {
            tokenizer::write_files(dir, &self.tokenizer)?;
            match &self.settings {
                Some(settings) => files::copy_atomic(settings, &dir.join("generation_config.json")),
                None => Ok(()),
            }
        };
        directory.write_with(fill, Some(&more))
    }
}

/// Refuses a mix of adapters that untie embedding and head with adapters that change both at once: the sum is
/// undefined.
fn refuse_mixed_ties(dirs: &[(PathBuf, f32)], adapters: &[WeightedAdapter], tied: &Spec) -> Result<()> {
    for ((dir, _), a) in dirs.iter().zip(adapters) {
        if !hf::unties(dir, tied)? && (a.changes(EMBEDDING) || a.changes(LM_HEAD) || a.adapter.score.is_some()) {
            return Err(Error::usage(
                "the adapters handle the tied embedding and output head of the model differently",
            )
            .at_path(dir)
            .expected("adapters that all untie them, or that change neither of them")
            .hint("merge each adapter into a separate directory"));
        }
    }
    Ok(())
}

/// The score head of an adapter. Errors: two adapters have one.
fn score_of(adapters: &[WeightedAdapter]) -> Result<Option<&Tensor>> {
    let mut scores = adapters.iter().filter_map(|a| a.adapter.score.as_ref());
    match (scores.next(), scores.next()) {
        (_, Some(_)) => Err(Error::usage("two of the adapters belong to reward models")
            .hint("a model has one score head: merge each adapter into a separate directory")),
        (score, None) => Ok(score),
    }
}

fn write_one(
    weights: &Weights,
    param: &ParamInfo,
    dtype: StoredDtype,
    adapters: &[WeightedAdapter],
    rounding: &mut RoundingErrors,
    sink: &mut dyn FnMut(Values) -> Result<()>,
) -> Result<()> {
    let name = &param.name;
    let has_adapter = adapters.iter().any(|a| a.changes(name));
    let same = weights.info(name).is_some_and(|i| i.dtype == dtype);
    if has_adapter {
        let after = hf::merged(weights, param, adapters)?;
        rounding.add(&hf::merged(weights, param, &[])?, &after, dtype);
        sink(Values::F32(&after))
    } else if same && stored::find(weights, name)?.is_none() {
        sink(Values::Raw(&weights.read_bytes(name)?))
    } else {
        sink(Values::F32(&hf::merged(weights, param, &[])?))
    }
}

/// Sums of squares: changes by rounding, and changes by the adapter.
#[derive(Debug, Default)]
struct RoundingErrors {
    lost: f64,
    delta: f64,
}

impl RoundingErrors {
    fn add(&mut self, before: &[f32], after: &[f32], dtype: StoredDtype) {
        let dtype = match dtype {
            StoredDtype::Bf16 => Dtype::Bf16,
            StoredDtype::F16 => Dtype::F16,
            _ => Dtype::F32,
        };
        let [lost, delta] = update::squares_of_rounding(before, after, dtype);
        self.lost += lost;
        self.delta += delta;
    }

    fn ratio(&self) -> f64 {
        if self.delta > 0.0 {
            (self.lost / self.delta).sqrt()
        } else {
            0.0
        }
    }
}

/// Errors: `out` or a part of its path is a file; the directory is not empty.
pub(super) fn refuse_existing(out: &Path) -> Result<()> {
    let wrong = |what: &str, at: &Path| {
        Err(Error::usage(what)
            .at_path(at)
            .hint("give the name of a directory that does not exist yet"))
    };
    if out.is_symlink() {
        return Err(Error::usage("the output is a link")
            .at_path(out)
            .hint("give the path of the directory itself"));
    }
    match out.ancestors().find(|path| path.symlink_metadata().is_ok()) {
        Some(path) if !path.is_dir() => wrong("the output must be a directory, but this path is a file", path),
        Some(path) if path == out && !files::list(out)?.is_empty() => wrong("output directory is not empty", out),
        _ => Ok(()),
    }
}

/// The format of one of the quantized weights, if there are any.
fn quantized_format(spec: &Spec, weights: &Weights) -> Result<Option<Format>> {
    for p in spec.params() {
        if let Some((_, format)) = stored::find(weights, &p.name)? {
            return Ok(Some(format));
        }
    }
    Ok(None)
}

/// Refuses quantized weights: what a first quantization lost is not known.
pub(super) fn refuse_quantized(spec: &Spec, weights: &Weights) -> Result<()> {
    for p in spec.params() {
        if let Some((_, format)) = stored::find(weights, &p.name)? {
            return Err(Error::new("the weights of this model are quantized")
                .at(&*p.name)
                .found(format)
                .expected("the original weights in 16 or 32 bits")
                .hint("give the unquantized model"));
        }
    }
    Ok(())
}

/// Refuses weights that this model does not have: they would be lost without notice. Those that no model uses may be lost.
pub(super) fn refuse_strangers(spec: &Spec, weights: &Weights) -> Result<()> {
    refuse_others(spec, weights, None)
}

/// As `refuse_strangers`, except the tensor `allowed`.
fn refuse_others(spec: &Spec, weights: &Weights, allowed: Option<&str>) -> Result<()> {
    let params = spec.params();
    let mut known: HashSet<&str> = params.iter().map(|p| &*p.name).chain(allowed).collect();
    let mut parts = Vec::new();
    for p in &params {
        if let (Some((layout, format)), &[rows, columns]) = (stored::find(weights, &p.name)?, p.shape.as_slice()) {
            parts.extend(stored::names(weights, layout, format, &p.name, (rows, columns)));
        }
    }
    known.extend(parts.iter().map(String::as_str));
    let harmless = |name: &str| {
        let tied = spec.tied && name == "lm_head.weight";
        name.ends_with("rotary_emb.inv_freq")
            || tied
            || resident::is_beside_quantized(weights, name)
            || resident::is_of_unused_keys(&known, name)
    };
    let unknown: Vec<&str> = weights.names().filter(|n| !known.contains(n) && !harmless(n)).collect();
    if unknown.is_empty() {
        return Ok(());
    }
    let shown: Vec<&str> = unknown.iter().take(8).copied().collect();
    let place = weights
        .files()
        .first()
        .map(|f| f.display().to_string())
        .unwrap_or_default();
    Err(
        Error::new("the weight files contain tensors that this model does not have")
            .at(place)
            .found(format!("{} such tensors: {}", unknown.len(), shown.join(", ")))
            .hint("check that config.json belongs to these weights"),
    )
}

#[cfg(test)]
mod tests;
