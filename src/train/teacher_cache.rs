//! `ft distill cache`: stores the teacher's outputs for the trained tokens of all rows: the log-probabilities of the
//! top-k ids and the log-probability of all other ids together. Also reads them back.
//!
//! A directory has shards `rows-00000.safetensors`, each written atomically, and `cache.json`, written last. A document
//! is identified by a hash of its ids and of its trained positions, so order, packing and batches may differ.
//!
//! A shard holds, for M documents with T trained tokens in all: `documents` u8 `[M, 20]` (16 bytes of hash, 4 of the
//! number of trained tokens), `ids` u16 or u32 `[T, k]`, `log_probs` f16 `[T, k]`, `rest` f32 `[T]`.

use crate::base::signal::{SignalReaction, Stop};
use crate::base::{Error, Result, files, paths, progress, signal, staging};
use crate::data::batch::Example;
use crate::data::{Batch, Dataset, IGNORE};
use crate::distill::{self, StoredOutputs};
use crate::formats::dtype::StoredDtype;
use crate::formats::weights::Weights;
use crate::formats::writer::{self, TensorPlan, Values};
use crate::ops::distill::TopK;
use crate::recipe::{DistillSection, Recipe};
use crate::report;
use crate::setup;
use crate::setup::ModelDir;
use crate::setup::rows::RecipeRows;
use crate::setup::teacher;
use crate::train::inputs;
use half::f16;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const MANIFEST: &str = "cache.json";
/// Approximate number of trained tokens per shard.
const SHARD_TOKENS: usize = 1 << 16;
/// Bytes of a document's entry in `documents`.
const ENTRY: usize = 20;

type Hash = [u8; 16];

/// The result of `cache`.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheReport {
    pub out: PathBuf,
    pub documents: usize,
    pub tokens: usize,
    /// Shards from an earlier call.
    pub found: usize,
    pub shards: usize,
    pub bytes: u64,
    /// Mean probability mass of the stored top-k ids.
    pub top_k_mass: f64,
}

/// Hash of a document: its ids and its trained positions.
fn hash(ids: &[u32], trained: impl Iterator<Item = bool>) -> Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"ft teacher row 1");
    for id in ids {
        hasher.update(&id.to_le_bytes());
    }
    let mask: Vec<u8> = trained.map(u8::from).collect();
    hasher.update(&mask);
    let mut out = [0; 16];
    out.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    out
}

fn hash_of(e: &Example) -> Hash {
    hash(&e.ids, e.trained.iter().copied())
}

/// All properties on which the stored numbers depend.
struct CacheKey {
    key: String,
    common: usize,
    k: usize,
    temperature: f32,
    data: String,
    teacher: String,
}

impl CacheKey {
    fn name_teacher(&mut self, teacher: String) {
        (self.teacher, self.key) = (teacher, String::new());
        self.key = blake3::hash(self.json().to_string().as_bytes()).to_hex()[..32].to_string();
    }

    fn json(&self) -> Value {
        json!({
            "format": "ft teacher outputs 1", "key": self.key, "common": self.common, "k": self.k,
            "temperature": self.temperature, "data": self.data, "teacher": self.teacher,
        })
    }
}

/// Splits the rows of the recipe (their numbers) into shards; duplicate documents appear once.
fn shards(rows: &Dataset) -> Result<Vec<Vec<usize>>> {
    let mut seen = std::collections::HashSet::new();
    let (mut out, mut last, mut tokens): (Vec<Vec<usize>>, Vec<usize>, usize) = (Vec::new(), Vec::new(), 0);
    for (row, e) in rows.examples.iter().enumerate() {
        let e = e?;
        let trained = e.trained.iter().filter(|t| **t).count();
        if trained == 0 || !seen.insert(hash_of(&e)) {
            continue;
        }
        last.push(row);
        tokens += trained;
        if tokens >= SHARD_TOKENS {
            out.push(std::mem::take(&mut last));
            tokens = 0;
        }
    }
    if !last.is_empty() {
        out.push(last);
    }
    Ok(out)
}

fn shard_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("rows-{index:05}.safetensors"))
}

/// Writes the outputs of the recipe's teacher for all training rows to `out`; existing shards stay.
///
/// Errors: an invalid teacher or invalid rows; `out` holds something else, or outputs of another teacher, other rows or
/// other settings; a signal (finished shards stay, the next call continues).
pub fn cache(recipe: &Recipe, out: &Path, note: &mut dyn FnMut(&str)) -> Result<CacheReport> {
    signal::install()?;
    let model = ModelDir::of_recipe(recipe)?;
    teacher::refuse_alignment(recipe)?;
    let opened = teacher::open(recipe, &model)?;
    let rows = RecipeRows::read(recipe, &model)?.train;
    opened.check_rows(&rows, model.spec.vocab)?;
    let d = &recipe.distill;
    let common = opened.common(&model.spec);
    let mut facts = CacheKey {
        key: String::new(),
        common,
        k: d.top_k.min(common),
        temperature: d.temperature as f32,
        data: rows.fingerprint.clone(),
        teacher: String::new(),
    };
    let named = opened.fingerprint()?;
    // Shards of an older version use the old fingerprint: then the new shards use it too.
    facts.name_teacher(named.before);
    if !holds(out, &facts.key) {
        facts.name_teacher(named.now);
    }
    let shards = shards(&rows)?;
    if shards.is_empty() {
        return Err(Error::new("the rows have no trained tokens").hint("look at them with `ft data --recipe R`"));
    }
    check_place(out, &facts)?;
    files::create_dir_all(out)?;

    let mut network = None;
    let mut report = CacheReport {
        out: out.to_path_buf(),
        documents: 0,
        tokens: 0,
        found: 0,
        shards: shards.len(),
        bytes: 0,
        top_k_mass: 0.0,
    };
    let scratch = out.join(setup::TEACHER);
    let all = shards.iter().map(Vec::len).sum();
    let phase = progress::phase("computing the teacher's outputs", all, "rows");
    signal::conduct(SignalReaction::Stop(Stop {
        what: "stopping after this batch".into(),
        then: "; complete shards are kept, and the same command continues after them".into(),
        lost: "the incomplete shard".into(),
        finishes: None,
    }));
    for (index, documents) in shards.iter().enumerate() {
        let path = shard_path(out, index);
        report.documents += documents.len();
        let stored = if path.is_file() {
            Some(CacheShard::open(&path, &facts.key, facts.k)?)
        } else {
            None
        };
        if stored.as_ref().is_some_and(|s| s.is_whole() == Some(false)) {
            note(&format!("{} is damaged: its content is stored again", path.display()));
        } else if let Some(shard) = stored {
            report.found += 1;
            report.tokens += shard.tokens;
            report.top_k_mass += shard.top_k_mass()?;
            report.bytes += files::size(&path)?;
            phase.add(documents.len() as u64);
            continue;
        }
        let network = match &mut network {
            Some(network) => network,
            empty => empty.insert(opened.load(recipe, &scratch, &setup::device(&recipe.model.device)?)?),
        };
        let owned = documents.iter().map(|&row| Ok(rows.examples.get(row)?.into_owned()));
        let owned: Vec<Example> = owned.collect::<Result<_>>()?;
        let mut top: TopK = TopK {
            k: facts.k,
            ..TopK::default()
        };
        for batch in inputs::batches(&owned) {
            if let Some(s) = signal::received() {
                return Err(
                    Error::signal(s, "stopped before all of the teacher's outputs were stored")
                        .at_path(out)
                        .hint("the same command continues"),
                );
            }
            let part = distill::likeliest(network, &batch, common, facts.k, facts.temperature)?;
            phase.add(batch.documents.len().saturating_sub(1) as u64);
            if part.log_probs.iter().chain(&part.rest).any(|x| x.is_nan()) {
                return Err(Error::new("the teacher's outputs are not finite")
                    .at(DistillSection::teacher)
                    .hint("check its weights, or set `distill.teacher_weights = \"f32\"`"));
            }
            top.ids.extend(part.ids);
            top.log_probs.extend(part.log_probs);
            top.rest.extend(part.rest);
        }
        report.tokens += top.rest.len();
        report.top_k_mass += top.rest.iter().map(|r| 1.0 - (*r as f64).exp()).sum::<f64>();
        write_shard(&path, &owned, &top, &facts)?;
        report.bytes += files::size(&path)?;
        note(&format!("{} of {} shards", index + 1, shards.len()));
    }
    staging::remove_scratch(&scratch)?;
    report.top_k_mass /= report.tokens as f64;
    let mut manifest = facts.json();
    manifest["shards"] = json!(shards.len());
    manifest["documents"] = json!(report.documents);
    manifest["tokens"] = json!(report.tokens);
    files::write_atomic(&out.join(MANIFEST), format!("{manifest:#}\n").as_bytes())?;
    Ok(report)
}

fn is_manifest(path: &Path) -> bool {
    let text = files::read_text(path).unwrap_or_default();
    serde_json::from_str::<Value>(&text).is_ok_and(|m| m["format"] == "ft teacher outputs 1")
}

/// Accepts only an empty directory, or one with the same outputs.
fn check_place(out: &Path, facts: &CacheKey) -> Result<()> {
    if !out.is_dir() {
        return Ok(());
    }
    for path in files::list(out)? {
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        if name.starts_with("rows-") && name.ends_with(".safetensors") {
            CacheShard::open(&path, &facts.key, facts.k)?;
        } else if !(name == MANIFEST && is_manifest(&path) || name == setup::TEACHER && staging::is_marked(&path)) {
            return Err(Error::usage("the directory contains other files")
                .at_path(&path)
                .hint("give `--out` a new directory"));
        }
    }
    Ok(())
}

/// True if one of the shards in `out` has this key.
fn holds(out: &Path, key: &str) -> bool {
    let shards = files::list(out).unwrap_or_default().into_iter();
    let mut shards = shards.filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("rows-")));
    shards.any(|p| Weights::open_file(&p).is_ok_and(|w| w.metadata().get("ft_key").is_some_and(|k| k == key)))
}

fn write_shard(path: &Path, documents: &[Example], top: &TopK, facts: &CacheKey) -> Result<()> {
    let (tokens, k) = (top.rest.len(), top.k);
    let plan = |name: &str, dtype, shape: Vec<usize>| TensorPlan {
        name: name.into(),
        dtype,
        shape,
    };
    let narrow = facts.common <= 1 << 16;
    let id_type = if narrow { StoredDtype::U16 } else { StoredDtype::U32 };
    let tensors = [
        plan("documents", StoredDtype::U8, vec![documents.len(), ENTRY]),
        plan("ids", id_type, vec![tokens, k]),
        plan("log_probs", StoredDtype::F16, vec![tokens, k]),
        plan("rest", StoredDtype::F32, vec![tokens]),
    ];
    let entry = |e: &Example| {
        let count = e.trained.iter().skip(1).filter(|t| **t).count() as u32;
        let mut bytes = hash_of(e).to_vec();
        bytes.extend(count.to_le_bytes());
        bytes
    };
    // Clamps to the range of f16; such a probability is practically 0.
    let short = |x: &f32| f16::from_f32(x.max(-60000.0)).to_le_bytes();
    // `rest` is -infinity if no probability is left, and a file may not hold it: clamps to the least f32.
    let left = |x: &f32| x.max(f32::MIN).to_le_bytes();
    let bytes: [Vec<u8>; 4] = [
        documents.iter().flat_map(entry).collect(),
        if narrow {
            top.ids.iter().flat_map(|id| (*id as u16).to_le_bytes()).collect()
        } else {
            top.ids.iter().flat_map(|id| id.to_le_bytes()).collect()
        },
        top.log_probs.iter().flat_map(short).collect(),
        top.rest.iter().flat_map(left).collect(),
    ];
    let mut hasher = blake3::Hasher::new();
    for (tensor, bytes) in tensors.iter().zip(&bytes) {
        hasher.update(tensor_head(&tensor.name, tensor.dtype, &tensor.shape).as_bytes());
        hasher.update(bytes);
    }
    let metadata = [
        ("ft_key".to_string(), facts.key.clone()),
        (HASH.to_string(), hasher.finalize().to_hex().to_string()),
    ];
    let mut next = bytes.iter();
    writer::write_file(path, &tensors, &metadata, |_, sink| {
        sink(Values::Raw(next.next().map_or(&[], Vec::as_slice)))
    })?;
    Ok(())
}

/// The metadata key for the hash of all tensors.
const HASH: &str = "ft_hash";

fn tensor_head(name: &str, dtype: StoredDtype, shape: &[usize]) -> String {
    format!("{name} {} {shape:?}\n", dtype.name())
}

/// An open shard.
struct CacheShard {
    weights: Weights,
    narrow: bool,
    k: usize,
    tokens: usize,
}

impl CacheShard {
    /// Errors: outputs of another teacher, other rows or other settings; an incomplete file.
    fn open(path: &Path, key: &str, k: usize) -> Result<Self> {
        let weights = Weights::open_file(path)?;
        if weights.metadata().get("ft_key").map(String::as_str) != Some(key) {
            return Err(
                Error::new("these outputs were stored with another teacher, other rows or other settings")
                    .at_path(path)
                    .hint("give `ft distill cache` a new `--out`"),
            );
        }
        let broken = || Error::new("a file of the teacher's outputs is not valid").at_path(path);
        let shape = |name: &str| weights.info(name).cloned().ok_or_else(broken);
        let (ids, rest) = (shape("ids")?, shape("rest")?);
        let tokens = rest.count();
        let narrow = ids.dtype == StoredDtype::U16;
        let right = ids.shape == [tokens, k] && (narrow || ids.dtype == StoredDtype::U32);
        let log_probs = shape("log_probs")?;
        if !right || log_probs.shape != [tokens, k] || log_probs.dtype != StoredDtype::F16 {
            return Err(broken());
        }
        Ok(Self {
            weights,
            narrow,
            k,
            tokens,
        })
    }

    /// True if the tensors match the stored hash. `None`: there is no hash, or the tensors cannot be read.
    fn is_whole(&self) -> Option<bool> {
        let stored = self.weights.metadata().get(HASH)?;
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0u8; 1 << 20];
        for name in ["documents", "ids", "log_probs", "rest"] {
            let info = self.weights.info(name)?;
            hasher.update(tensor_head(name, info.dtype, &info.shape).as_bytes());
            let total = info.bytes as usize;
            for first in (0..total).step_by(buffer.len()) {
                let piece = &mut buffer[..(total - first).min(1 << 20)];
                if self.weights.read_bytes_at(name, first, piece).is_err() {
                    return Some(false);
                }
                hasher.update(piece);
            }
        }
        Some(hasher.finalize().to_hex().as_str() == stored)
    }

    /// Sum over the tokens of the probability mass of the stored ids.
    fn top_k_mass(&self) -> Result<f64> {
        let rest = self.weights.read_f32("rest")?;
        Ok(rest.iter().map(|r| 1.0 - (*r as f64).exp()).sum())
    }

    /// Hash, first token and number of trained tokens of every document.
    fn documents(&self) -> Result<Vec<(Hash, usize, usize)>> {
        let bytes = self.weights.read_bytes("documents")?;
        let (mut out, mut first) = (Vec::new(), 0);
        for entry in bytes.chunks_exact(ENTRY) {
            let (mut hash, mut count) = ([0; 16], [0; 4]);
            hash.copy_from_slice(&entry[..16]);
            count.copy_from_slice(&entry[16..]);
            let count = u32::from_le_bytes(count) as usize;
            out.push((hash, first, count));
            first += count;
        }
        if first == self.tokens {
            Ok(out)
        } else {
            Err(Error::new("a file of the teacher's outputs is not valid")
                .found(format!("{first} tokens in its documents"))
                .expected(self.tokens))
        }
    }

    /// Adds the rows of `count` tokens from `first` on to `top`, each normalized to sum 1 again after the rounding.
    fn read(&self, first: usize, count: usize, top: &mut TopK) -> Result<()> {
        let n = count * self.k;
        let size = if self.narrow { 2 } else { 4 };
        let mut bytes = vec![0u8; n * size];
        self.weights.read_bytes_at("ids", first * self.k * size, &mut bytes)?;
        if self.narrow {
            top.ids
                .extend(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]) as u32))
        } else {
            top.ids.extend(
                bytes
                    .chunks_exact(4)
                    .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            )
        }
        let mut log_probs = vec![0f32; n];
        self.weights.read_f32_at("log_probs", first * self.k, &mut log_probs)?;
        let mut rest = vec![0f32; count];
        self.weights.read_f32_at("rest", first, &mut rest)?;
        for (row, rest) in log_probs.chunks_mut(self.k.max(1)).zip(&mut rest) {
            let left = if *rest == f32::MIN { 0.0 } else { (*rest as f64).exp() };
            let sum: f64 = row.iter().map(|x| (*x as f64).exp()).sum::<f64>() + left;
            let shift = sum.ln() as f32;
            row.iter_mut().for_each(|x| *x -= shift);
            *rest = if *rest == f32::MIN {
                f32::NEG_INFINITY
            } else {
                *rest - shift
            };
        }
        top.log_probs.extend(log_probs);
        top.rest.extend(rest);
        Ok(())
    }
}

/// Stored outputs for training.
pub struct TeacherCache {
    dir: PathBuf,
    key: String,
    common: usize,
    k: usize,
    shards: Vec<CacheShard>,
    /// For each document: shard, first token, number of trained tokens.
    places: HashMap<Hash, (usize, usize, usize)>,
}

/// Opens the outputs in `dir` for the rows and settings of a recipe.
///
/// Errors: an incomplete directory; other rows, another temperature, more ids than the student has, or a different
/// teacher than that of the recipe.
pub fn open(dir: &Path, recipe: &Recipe, model: &ModelDir, rows: &Dataset) -> Result<TeacherCache> {
    let at = |e: Error| e.or_at(DistillSection::teacher_cache);
    let path = dir.join(MANIFEST);
    if let (false, Some(hint)) = (dir.exists(), paths::hint(dir)) {
        return Err(paths::missing("directory", dir).hint(hint));
    }
    if !path.is_file() {
        return Err(Error::new("the teacher's outputs are missing or incomplete")
            .at_path(dir)
            .hint("`ft distill cache --recipe R --out DIR` writes them, and continues where it was stopped"));
    }
    let text = files::read_text(&path)?;
    let manifest: Value =
        serde_json::from_str(&text).map_err(|e| Error::new("`cache.json` cannot be read").at_path(&path).cause(e))?;
    let word = |key: &str| manifest[key].as_str().unwrap_or_default().to_string();
    let number = |key: &str| manifest[key].as_u64().unwrap_or(0) as usize;
    let other = |what: &str, found: String, expected: String| {
        Err(Error::new(format!("the teacher's outputs were stored {what}"))
            .at_path(dir)
            .found(found)
            .expected(expected)
            .hint("store them again with `ft distill cache`, in a new directory"))
    };
    let (common, k) = (number("common"), number("k"));
    let temperature = manifest["temperature"].as_f64().unwrap_or(0.0) as f32;
    if word("format") != "ft teacher outputs 1" || common == 0 || k == 0 || k > common {
        return Err(at(
            Error::new("this directory does not contain outputs of a teacher").at_path(&path)
        ));
    }
    if word("data") != rows.fingerprint {
        let short = |t: &str| t.get(..12).unwrap_or(t).to_string();
        return other("for other rows", short(&word("data")), short(&rows.fingerprint));
    }
    if temperature != recipe.distill.temperature as f32 {
        return other(
            "at another temperature",
            temperature.to_string(),
            recipe.distill.temperature.to_string(),
        );
    }
    if common > model.spec.vocab {
        return other(
            "for another vocabulary",
            format!("{common} ids"),
            format!("at most {}", model.spec.vocab),
        );
    }
    if recipe.distill.teacher.is_some() {
        let named = teacher::open(recipe, model)?.fingerprint()?;
        if !named.is(&word("teacher")) {
            return other(
                "with another teacher than `distill.teacher`",
                word("teacher"),
                named.now,
            );
        }
    }
    let key = word("key");
    let (mut shards, mut places) = (Vec::new(), HashMap::new());
    let mut unknown = 0;
    for index in 0..number("shards") {
        let path = shard_path(dir, index);
        let shard = CacheShard::open(&path, &key, k)?;
        match shard.is_whole() {
            Some(true) => {}
            Some(false) => {
                return Err(Error::new("a file of the teacher's outputs is damaged")
                    .at_path(&path)
                    .found("values that do not match the stored hash")
                    .hint("`ft distill cache` with the same recipe and `--out` stores it again"));
            }
            None => unknown += 1,
        }
        for (hash, first, count) in shard.documents()? {
            places.insert(hash, (index, first, count));
        }
        shards.push(shard);
    }
    if unknown > 0 {
        report::warn(&format!(
            "{} was stored by an older version of ft without hashes: damage cannot be detected; store it again in a \
             new directory",
            dir.display()
        ));
    }
    Ok(TeacherCache {
        dir: dir.to_path_buf(),
        key,
        common,
        k,
        shards,
        places,
    })
}

impl TeacherCache {
    /// Hash of all properties on which the stored numbers depend.
    pub fn key(&self) -> &str {
        &self.key
    }
}

impl StoredOutputs for TeacherCache {
    fn of(&self, batch: &Batch) -> Result<TopK> {
        let mut top: TopK = TopK {
            k: self.k,
            ..TopK::default()
        };
        for range in batch.documents.windows(2).map(|w| w[0]..w[1]) {
            // The target of a position is the token after it.
            let targets = &batch.targets[range.clone()];
            let trained = std::iter::once(false).chain(targets.iter().map(|t| *t != IGNORE));
            let count = targets.iter().filter(|t| **t != IGNORE).count();
            if count == 0 {
                continue;
            }
            let hash = hash(&batch.ids[range.clone()], trained.take(range.len()));
            match self.places.get(&hash) {
                Some((shard, first, n)) if *n == count => self.shards[*shard].read(*first, count, &mut top)?,
                _ => {
                    return Err(Error::new("the stored outputs of the teacher lack a row of this run")
                        .at_path(&self.dir)
                        .hint("store them again with `ft distill cache`, in a new directory"));
                }
            }
        }
        Ok(top)
    }

    fn common(&self) -> usize {
        self.common
    }
}
