//! `ft distill cache`: stores the teacher's outputs for the trained tokens of all rows: the log-probabilities of the
//! top-k ids and the log-probability of all other ids together. Also reads them back.
//!
//! A directory has shards `rows-00000.safetensors`, each written atomically, and `cache.json`, written last. A document
//! is identified by a hash of its ids and of its trained positions, so order, packing and batches may differ.
//!
//! A shard holds, for M documents with T trained tokens in all: `documents` u8 `[M, 20]` (16 bytes of hash, 4 of the
//! number of trained tokens), `ids` u16 or u32 `[T, k]`, `log_probs` f16 `[T, k]`, `rest` f32 `[T]`.

mod place;
mod shard;
#[cfg(test)]
mod tests;

use crate::base::signal::{SignalReaction, Stop};
use crate::base::{Error, Result, files, paths, progress, signal, staging};
use crate::data::batch::Example;
use crate::data::{Batch, Dataset, IGNORE};
use crate::distill::{self, StoredOutputs};
use crate::ops::distill::TopK;
use crate::recipe::{DistillSection, Recipe};
use crate::report;
use crate::setup;
use crate::setup::ModelDir;
use crate::setup::rows::RecipeRows;
use crate::setup::teacher;
use crate::train::covariance;
use place::{CacheLock, check_place, holds};
use serde_json::{Value, json};
use shard::{CacheShard, Hash, REPAIR, damaged, hash, hash_of, shard_path, write_shard};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const MANIFEST: &str = "cache.json";
const FORMAT: &str = "ft teacher outputs 1";
/// Approximate number of trained tokens per shard.
const SHARD_TOKENS: usize = 1 << 16;

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
            "format": FORMAT, "key": self.key, "common": self.common, "k": self.k,
            "temperature": self.temperature, "data": self.data, "teacher": self.teacher,
        })
    }
}

/// `cache.json`. The key is a hash of the other settings, and the counts are those of the shards: a change of any of them
/// is found.
struct CacheManifest {
    facts: CacheKey,
    shards: usize,
    documents: usize,
    tokens: usize,
}

impl CacheManifest {
    fn write(&self, dir: &Path) -> Result<()> {
        let mut manifest = self.facts.json();
        manifest["shards"] = json!(self.shards);
        manifest["documents"] = json!(self.documents);
        manifest["tokens"] = json!(self.tokens);
        files::write_atomic(&dir.join(MANIFEST), format!("{manifest:#}\n").as_bytes())
    }

    /// Errors: the file is damaged, or does not belong to outputs of a teacher.
    fn read(path: &Path) -> Result<Self> {
        let manifest: Value = serde_json::from_slice(&files::read(path)?).map_err(|e| damaged(path).cause(e))?;
        let word = |key: &str| manifest[key].as_str().unwrap_or_default().to_string();
        let number = |key: &str| manifest[key].as_u64().unwrap_or(0) as usize;
        if word("format") != FORMAT {
            return Err(Error::format(
                "this directory does not contain outputs of a teacher, or their list is damaged",
            )
            .at_path(path)
            .found(format!("the format {:?}", word("format")))
            .expected(format!("{FORMAT:?}"))
            .hint("give a directory that `ft distill cache` has written; the same command repairs it"));
        }
        let mut facts = CacheKey {
            key: String::new(),
            common: number("common"),
            k: number("k"),
            temperature: manifest["temperature"].as_f64().unwrap_or(0.0) as f32,
            data: word("data"),
            teacher: String::new(),
        };
        facts.name_teacher(word("teacher"));
        if facts.key != word("key") || facts.k == 0 || facts.k > facts.common {
            return Err(damaged(path).found("settings that do not match the stored key"));
        }
        Ok(Self {
            facts,
            shards: number("shards"),
            documents: number("documents"),
            tokens: number("tokens"),
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

/// Writes the outputs of the recipe's teacher for all training rows to `out`; existing shards stay.
///
/// Errors: an invalid teacher or invalid rows; `out` holds something else, or outputs of another teacher, other rows or
/// other settings; another process works in `out`; a signal (finished shards stay, the next call continues).
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
    let shards = shards(&rows)?;
    if shards.is_empty() {
        return Err(Error::new("the rows have no trained tokens").hint("look at them with `ft data --recipe R`"));
    }
    let _lock = CacheLock::acquire(out)?;
    // Shards of an older version use the old fingerprint: then the new shards use it too.
    facts.name_teacher(named.before);
    if !holds(out, &facts.key) {
        facts.name_teacher(named.now);
    }
    check_place(out, &facts)?;

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
        if path.is_file() {
            if let Some(shard) = CacheShard::if_whole(&path, &facts.key, facts.k)? {
                report.found += 1;
                report.tokens += shard.tokens;
                report.top_k_mass += shard.top_k_mass()?;
                report.bytes += files::size(&path)?;
                phase.add(documents.len() as u64);
                continue;
            }
            note(&format!("{} is damaged: its content is stored again", path.display()));
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
        for batch in covariance::batches(&owned) {
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
    let manifest = CacheManifest {
        facts,
        shards: shards.len(),
        documents: report.documents,
        tokens: report.tokens,
    };
    manifest.write(out)?;
    Ok(report)
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
/// Errors: an incomplete directory; a damaged file; other rows, another temperature, more ids than the student has, or a
/// different teacher than that of the recipe.
pub fn open(dir: &Path, recipe: &Recipe, model: &ModelDir, rows: &Dataset) -> Result<TeacherCache> {
    let path = dir.join(MANIFEST);
    if let (false, Some(hint)) = (dir.exists(), paths::hint(dir)) {
        return Err(paths::missing("directory", dir).hint(hint));
    }
    if !path.is_file() {
        return Err(Error::new("the teacher's outputs are missing or incomplete")
            .at_path(dir)
            .found(format!("no `{MANIFEST}`"))
            .hint("`ft distill cache --recipe R --out DIR` writes them, and continues where it was stopped"));
    }
    let manifest = CacheManifest::read(&path)?;
    let facts = &manifest.facts;
    let other = |what: &str, found: String, expected: String| {
        Err(Error::new(format!("the teacher's outputs were stored {what}"))
            .at_path(dir)
            .found(found)
            .expected(expected)
            .hint("store them again with `ft distill cache`, in a new directory"))
    };
    if facts.data != rows.fingerprint {
        let short = |t: &str| t.get(..12).unwrap_or(t).to_string();
        return other("for other rows", short(&facts.data), short(&rows.fingerprint));
    }
    if facts.temperature != recipe.distill.temperature as f32 {
        return other(
            "at another temperature",
            facts.temperature.to_string(),
            recipe.distill.temperature.to_string(),
        );
    }
    if facts.common > model.spec.vocab {
        return other(
            "for another vocabulary",
            format!("{} ids", facts.common),
            format!("at most {}", model.spec.vocab),
        );
    }
    if recipe.distill.teacher.is_some() {
        let named = teacher::open(recipe, model)?.fingerprint()?;
        if !named.is(&facts.teacher) {
            return other(
                "with another teacher than `distill.teacher`",
                facts.teacher.clone(),
                named.now,
            );
        }
    }
    TeacherCache::read(dir, manifest)
}

/// Reads stored outputs without the rows and settings of a recipe: for the fuzz targets.
///
/// Errors: a file is missing, damaged, or of other outputs.
#[doc(hidden)]
pub fn check(dir: &Path) -> Result<TeacherCache> {
    TeacherCache::read(dir, CacheManifest::read(&dir.join(MANIFEST))?)
}

impl TeacherCache {
    /// Errors: a file is missing, damaged, or of other outputs.
    fn read(dir: &Path, manifest: CacheManifest) -> Result<Self> {
        let CacheKey { key, common, k, .. } = manifest.facts;
        let (mut shards, mut places) = (Vec::new(), HashMap::new());
        let (mut documents, mut tokens, mut unknown) = (0, 0, 0);
        for index in 0..manifest.shards {
            let path = shard_path(dir, index);
            if !path.is_file() {
                return Err(Error::not_found("a file of the teacher's outputs is missing")
                    .at_path(&path)
                    .hint(REPAIR));
            }
            let shard = CacheShard::open(&path, &key, k)?;
            match shard.is_whole() {
                Some(true) => {}
                Some(false) => return Err(damaged(&path).found("values that do not match the stored hash")),
                None => unknown += 1,
            }
            let of_shard = shard.documents().map_err(|e| e.or_at(path.display()))?;
            (documents, tokens) = (documents + of_shard.len(), tokens + shard.tokens);
            for (hash, first, count) in of_shard {
                places.insert(hash, (index, first, count));
            }
            shards.push(shard);
        }
        let counts = |documents: usize, tokens: usize| format!("{documents} rows and {tokens} tokens");
        if (documents, tokens) != (manifest.documents, manifest.tokens) {
            return Err(damaged(&dir.join(MANIFEST))
                .found(counts(manifest.documents, manifest.tokens))
                .expected(counts(documents, tokens)));
        }
        if unknown > 0 {
            report::warn(&format!(
                "{} was stored by an older version of ft without hashes: damage cannot be detected; store it again in a \
                 new directory",
                dir.display()
            ));
        }
        Ok(Self {
            dir: dir.to_path_buf(),
            key,
            common,
            k,
            shards,
            places,
        })
    }

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
