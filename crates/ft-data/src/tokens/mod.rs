//! The token cache: tokenized rows in files, so that a dataset is tokenized once and needs little memory.
//!
//! A directory per dataset, named by a hash of everything on which the tokens depend (`key`):
//!
//! - `tokens`: for each token 4 bytes, little-endian: the id, and in bit 31 whether it is trained;
//! - `index`: for each row 32 bytes (`RowEntry`);
//! - `pairs`: for each row of preferences 16 bytes (`pairs`);
//! - `chunks.jsonl`: for each part of these files its end, the counts up to there, and a hash. The listed parts are
//!   complete, so that a stopped writer continues after the last part, and a damaged part is found;
//! - `rows.json`: counts, the fingerprint, and which rows were dropped before, written last;
//! - `used`: the time of the last use; locked while a process reads the files (`limit`).
//!
//! The lines of `chunks.jsonl`, and `rows.json`, have a hash of their own text (`seal`): every file of rows is checked with a
//! hash before it is used.
//!
//! Prompts (`prompts`), and what a caller computes from datasets (`made`), are directories with one file of bytes.
//!
//! The files are read with positioned reads and are not mapped: pages of a mapped file count as memory of the process,
//! and a run with a memory budget would stop because of them.

mod build;
mod key;
mod limit;
mod made;
mod pairs;
mod prompts;
mod seal;

pub(super) use build::hash_row;
pub(super) use key::RULES;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_sets;

use super::batch::Example;
use super::dataset::{Dataset, DatasetSpec, DatasetStats, RowOrigin};
use super::examples::{Examples, RowMeasure};
use super::layout::RowPurpose;
use super::load::{self, ExampleSink};
use super::preference::{self, PreferencePart};
use super::reading::ReadingReport;
use super::screen::ScreenCounts;
use super::source;
use super::{ChatRender, TextCodec};
use ft_base::lock::{LockWords, RunLock, UseMark};
use ft_base::{Error, Result, files, progress};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const TOKENS: &str = "tokens";
const INDEX: &str = "index";
const CHUNKS: &str = "chunks.jsonl";
const ROWS: &str = "rows.json";
/// Version of the files; another one is another key.
const FORMAT: &str = "ft token cache 3";
/// Marks a trained token.
const TRAINED: u32 = 1 << 31;
const TOKEN_BYTES: u64 = 4;
const ENTRY_BYTES: usize = 32;
const PAIRS: &str = "pairs";
const PAIR_BYTES: usize = 16;

/// Where token files are stored, and for which datasets.
#[derive(Clone, Copy)]
pub struct TokenCache<'a> {
    /// The directory of all datasets.
    pub dir: &'a Path,
    /// Data files of fewer bytes in all are tokenized at each start, in memory.
    pub least_bytes: u64,
    /// Most bytes of all datasets; beyond it those that were not used for the longest time are removed. `None`: half of
    /// the space that the directory and the free part of its disk have together.
    pub most_bytes: Option<u64>,
    /// False: if the directory cannot be made, rows are tokenized in memory, with a line for `note`.
    pub required: bool,
    /// Receives a line about a cache that cannot be used.
    pub note: &'a dyn Fn(&str),
}

/// The rows that are wanted: their files, how they are encoded, and for preferences the part of a row that is used.
pub(super) struct TokenRequest<'a> {
    pub spec: &'a DatasetSpec<'a>,
    pub codec: &'a dyn TextCodec,
    pub template: Option<&'a dyn ChatRender>,
    pub want: Option<PreferencePart>,
}

impl TokenRequest<'_> {
    /// Reads all rows, and tokenizes those after the first `skip`.
    fn read(&self, skip: u64, sink: &mut dyn ExampleSink) -> Result<Vec<(usize, ReadingReport)>> {
        let (spec, codec, template) = (self.spec, self.codec, self.template);
        match self.want {
            None => load::read_into(spec, codec, template, skip, sink),
            Some(want) => preference::read_into(spec, want, codec, template, skip, sink),
        }
    }
}

/// Position, sizes and origin of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowEntry {
    /// Index of its first token.
    pub first: u64,
    pub measure: RowMeasure,
    pub origin: RowOrigin,
}

impl RowEntry {
    fn bytes(&self) -> [u8; ENTRY_BYTES] {
        let mut out = [0; ENTRY_BYTES];
        out[..8].copy_from_slice(&self.first.to_le_bytes());
        out[8..12].copy_from_slice(&self.measure.length.to_le_bytes());
        out[12..16].copy_from_slice(&self.measure.trained.to_le_bytes());
        out[16..24].copy_from_slice(&self.origin.number.to_le_bytes());
        out[24..28].copy_from_slice(&self.origin.file.to_le_bytes());
        let last = u32::from(self.origin.is_line) | self.measure.answer << 1;
        out[28..].copy_from_slice(&last.to_le_bytes());
        out
    }

    fn of(bytes: &[u8; ENTRY_BYTES]) -> Self {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Self {
            first: long(0),
            measure: RowMeasure {
                length: word(8),
                trained: word(12),
                answer: word(28) >> 1,
            },
            origin: RowOrigin {
                number: long(16),
                file: word(24),
                is_line: word(28) & 1 != 0,
            },
        }
    }
}

/// The end of a complete part of the files, and the hash of the part.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct PartEnd {
    /// Rows of the data files up to here.
    read: u64,
    /// Rows in the index up to here.
    rows: u64,
    /// Tokens up to here.
    tokens: u64,
    hash: String,
    /// Counts up to here.
    stats: DatasetStats,
    /// For each source: rows, and truncated rows, up to here.
    sources: Vec<(usize, usize)>,
}

/// The data about a file after all its rows were read.
#[derive(Debug, Serialize, Deserialize)]
struct FileReading {
    /// Index over the files of all sources.
    file: usize,
    /// Columns that are not null in at least one row.
    columns: Vec<String>,
    /// Rows that are not used, with the reason.
    skipped: Vec<(String, usize)>,
}

/// `rows.json`.
#[derive(Debug, Serialize, Deserialize)]
struct RowsFile {
    format: String,
    /// Of the dataset (`Dataset::fingerprint`).
    fingerprint: String,
    stats: DatasetStats,
    /// For each file that has rows.
    readings: Vec<FileReading>,
    chunks: Vec<PartEnd>,
    /// The rows that the screen dropped when this cache was written.
    screened: Option<ScreenCounts>,
}

/// Tokens and index of a dataset.
#[derive(Debug)]
pub(super) struct TokenFile {
    tokens: File,
    index: File,
    /// For preferences.
    pairs: Option<File>,
    dir: PathBuf,
    /// No other process removes the files.
    _used: Option<UseMark>,
}

/// The bytes of a part of the files: tokens, index, pairs.
type CachePart = [Vec<u8>; 3];

impl TokenFile {
    fn open(dir: &Path, has_pairs: bool) -> Result<Self> {
        let pairs = has_pairs.then(|| files::open(&dir.join(PAIRS)));
        Ok(Self {
            tokens: files::open(&dir.join(TOKENS))?,
            index: files::open(&dir.join(INDEX))?,
            pairs: pairs.transpose()?,
            dir: dir.to_path_buf(),
            _used: None,
        })
    }

    fn cannot_read(&self, e: std::io::Error) -> Error {
        Error::io("cannot read the token cache")
            .at_path(&self.dir)
            .cause(e)
            .hint("the next start finds the damaged part and writes it again")
    }

    pub(super) fn entry(&self, row: u32) -> Result<RowEntry> {
        let mut bytes = [0; ENTRY_BYTES];
        let at = u64::from(row) * ENTRY_BYTES as u64;
        self.index
            .read_exact_at(&mut bytes, at)
            .map_err(|e| self.cannot_read(e))?;
        Ok(RowEntry::of(&bytes))
    }

    pub(super) fn example(&self, row: u32) -> Result<Example> {
        let entry = self.entry(row)?;
        let mut bytes = vec![0; entry.measure.length as usize * TOKEN_BYTES as usize];
        self.tokens
            .read_exact_at(&mut bytes, entry.first.saturating_mul(TOKEN_BYTES))
            .map_err(|e| self.cannot_read(e))?;
        Ok(example(&bytes))
    }

    /// Calls `each` with the entries of these rows. Rows that are near each other are read at once.
    pub(super) fn entries_of(&self, rows: impl Iterator<Item = u32>, each: &mut dyn FnMut(RowEntry)) -> Result<()> {
        let size = self.index.metadata().map_err(|e| self.cannot_read(e))?.len();
        let (mut first, mut block) = (0, Vec::new());
        for row in rows {
            let at = u64::from(row) * ENTRY_BYTES as u64;
            let end = at + ENTRY_BYTES as u64;
            if at < first || end > first + block.len() as u64 {
                first = at;
                block.resize((size.saturating_sub(at) as usize).min(ENTRY_BYTES << 15), 0);
                let read = self.index.read_exact_at(&mut block, first);
                read.map_err(|e| self.cannot_read(e))?;
            }
            let entry = block[(at - first) as usize..].first_chunk();
            each(RowEntry::of(entry.unwrap_or(&[0; ENTRY_BYTES])));
        }
        Ok(())
    }

    /// The bytes between the ends of two parts.
    fn part(&self, from: &PartEnd, to: &PartEnd) -> std::io::Result<CachePart> {
        // `from` is not behind `to`.
        let read = |file: &File, from: u64, to: u64, size: u64| -> std::io::Result<Vec<u8>> {
            // Checked before memory is allocated for it.
            let length = file.metadata()?.len();
            if to.checked_mul(size).is_none_or(|end| end > length) {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let mut bytes = vec![0; ((to - from) * size) as usize];
            file.read_exact_at(&mut bytes, from * size)?;
            Ok(bytes)
        };
        let pairs = self.pairs.as_ref();
        let pairs = pairs.map(|pairs| read(pairs, from.rows, to.rows, PAIR_BYTES as u64));
        Ok([
            read(&self.tokens, from.tokens, to.tokens, TOKEN_BYTES)?,
            read(&self.index, from.rows, to.rows, ENTRY_BYTES as u64)?,
            pairs.transpose()?.unwrap_or_default(),
        ])
    }

    /// Number of parts, from the first, whose bytes have their hashes, and whose rows are in them.
    fn intact(&self, chunks: &[PartEnd]) -> usize {
        let bytes = chunks.last().map_or(0, |c| c.tokens.saturating_mul(TOKEN_BYTES));
        let phase = progress::bytes("checking the token cache", bytes);
        let good = |i: usize| {
            let (zero, to) = (PartEnd::default(), &chunks[i]);
            let from = if i == 0 { &zero } else { &chunks[i - 1] };
            let grows = from.tokens <= to.tokens && from.rows <= to.rows;
            let is_whole = |part: CachePart| hash(&part) == to.hash && has_its_rows(&part, from, to);
            let whole = grows && self.part(from, to).is_ok_and(is_whole);
            phase.add(to.tokens.saturating_sub(from.tokens).saturating_mul(TOKEN_BYTES));
            whole
        };
        let found: Vec<bool> = (0..chunks.len()).into_par_iter().map(good).collect();
        found.iter().take_while(|good| **good).count()
    }
}

/// True if the rows of a part follow each other up to its end, and the numbers of each row fit its tokens: a hash does
/// not say so, and what reads the files relies on it.
fn has_its_rows([_, index, sides]: &CachePart, from: &PartEnd, to: &PartEnd) -> bool {
    let mut next = from.tokens;
    let mut sides = sides.as_chunks().0.iter().map(pairs::of);
    for entry in index.as_chunks().0.iter().map(RowEntry::of) {
        let RowMeasure {
            length,
            trained,
            answer,
        } = entry.measure;
        let has_documents = sides.next().is_none_or(|side| {
            let documents = side.preference;
            documents.prompt <= documents.first && documents.first <= length as usize
        });
        if entry.first != next || trained > length || answer > length || !has_documents {
            return false;
        }
        next += u64::from(length);
    }
    next == to.tokens
}

/// The number of rows of a dataset: the place of a row is 32 bits, here and in the order of the rows.
fn row_count(rows: u64) -> Result<u32> {
    u32::try_from(rows).map_err(|_| {
        Error::unsupported("a dataset has too many rows")
            .found(rows)
            .expected(format!("at most {}", u32::MAX))
    })
}

fn example(bytes: &[u8]) -> Example {
    let words = || bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b));
    Example {
        ids: words().map(|w| w & !TRAINED).collect(),
        trained: words().map(|w| w & TRAINED != 0).collect(),
    }
}

fn hash(part: &CachePart) -> String {
    let mut hasher = blake3::Hasher::new();
    part.iter().for_each(|bytes| {
        hasher.update(bytes);
    });
    hasher.finalize().to_hex()[..32].to_string()
}

/// Reads `chunks.jsonl` up to the first line that is not complete, or is damaged.
fn chunks(dir: &Path) -> Vec<PartEnd> {
    let bytes = files::read(&dir.join(CHUNKS)).unwrap_or_default();
    let lines = bytes.split_inclusive(|b| *b == b'\n');
    lines
        .map_while(|line| serde_json::from_str(seal::content(line)?).ok())
        .collect()
}

/// `None`: there is no `rows.json`, or it is damaged.
fn finished(dir: &Path) -> Option<RowsFile> {
    let bytes = files::read(&dir.join(ROWS)).ok()?;
    let found: RowsFile = serde_json::from_str(seal::content(&bytes)?).ok()?;
    (found.format == FORMAT).then_some(found)
}

impl TokenCache<'_> {
    /// The rows of a dataset: from its files in the cache, which are written if they are missing, stopped or damaged.
    /// `None`: the dataset is not cached, because it is small or cannot be identified.
    ///
    /// # Errors
    /// As `Dataset::load`; the cache cannot be written.
    pub(super) fn load(&self, request: &TokenRequest) -> Result<Option<Dataset>> {
        if key::bytes(request.spec)? < self.least_bytes {
            return Ok(None);
        }
        let Some(key) = key::of(request)? else {
            return Ok(None);
        };
        let dir = self.dir.join(key);
        let Some(used) = self.mark(&dir)? else {
            return Ok(None);
        };
        // Without this file the cache was never complete: no message.
        if dir.join(ROWS).is_file() {
            if let Some(rows) = self.stored(&dir, request)? {
                return Ok(Some(rows.in_use(used)));
            }
            (self.note)(&format!(
                "the token cache {} is damaged: its rows are tokenized again",
                dir.display()
            ));
        }
        let _lock = wait(&dir)?;
        // Another run may have finished it.
        if let Some(rows) = self.stored(&dir, request)? {
            return Ok(Some(rows.in_use(used)));
        }
        build::run(&dir, request)?;
        limit::remove_old(self);
        let rows = self.stored(&dir, request)?.ok_or_else(|| {
            Error::io("the token cache does not have the bytes that were written")
                .at_path(&dir)
                .hint("check the disk, or name another directory in `TokenCache::dir`")
        })?;
        Ok(Some(rows.in_use(used)))
    }

    /// The rows in `dir`. `None`: they are not complete, or damaged.
    fn stored(&self, dir: &Path, request: &TokenRequest) -> Result<Option<CachedDataset>> {
        match finished(dir) {
            Some(found) => self.open(dir, &found, request),
            None => Ok(None),
        }
    }

    /// `None`: the files are damaged.
    fn open(&self, dir: &Path, found: &RowsFile, request: &TokenRequest) -> Result<Option<CachedDataset>> {
        let spec = request.spec;
        let Ok(file) = TokenFile::open(dir, request.want.is_some()) else {
            return Ok(None);
        };
        if file.intact(&found.chunks) < found.chunks.len() {
            return Ok(None);
        }
        let rows = found.chunks.last().map_or(0, |c| c.rows);
        let mut lengths = Vec::new();
        file.entries_of(0..row_count(rows)?, &mut |entry| lengths.push(entry.measure.length))?;
        let (order, preferences) = match request.want {
            Some(_) => {
                let (order, _, preferences) = file.preferences(rows)?;
                (order, preferences)
            }
            None => (None, Vec::new()),
        };
        if let Some(order) = &order {
            lengths = order.iter().map(|row| lengths[*row as usize]).collect();
        }
        let encoder = spec.encoder(request.codec, request.template);
        let purpose = request.want.map_or(RowPurpose::Learn, |_| RowPurpose::Prefer);
        let mut readings = Vec::new();
        for of_file in &found.readings {
            let reading: Option<ReadingReport> = spec.first_reading(of_file.file, purpose, &encoder)?;
            readings.extend(reading.map(|reading| reading.with(&of_file.columns, &of_file.skipped)));
        }
        if let (Some(screen), Some(screened)) = (spec.screen, &found.screened) {
            readings
                .iter_mut()
                .for_each(|reading| reading.set_judges(screen.columns()));
            screen.restore(screened.clone());
        }
        let counts = found.chunks.last().map_or(&[][..], |c| &c.sources);
        let mut shares = source::shares(spec.sources);
        for (share, (rows, truncated)) in shares.iter_mut().zip(counts) {
            (share.rows, share.truncated) = (*rows, *truncated);
        }
        let rows = Dataset {
            stats: found.stats.clone(),
            fingerprint: found.fingerprint.clone(),
            readings,
            shares,
            preferences,
            ..Dataset::default()
        };
        Ok(Some(CachedDataset {
            file,
            order,
            lengths,
            rows,
        }))
    }
}

/// A dataset of the cache, without its examples.
struct CachedDataset {
    file: TokenFile,
    order: Option<Vec<u32>>,
    lengths: Vec<u32>,
    rows: Dataset,
}

impl CachedDataset {
    /// The dataset; its files are not removed while it lives.
    fn in_use(self, used: UseMark) -> Dataset {
        let file = TokenFile {
            _used: Some(used),
            ..self.file
        };
        Dataset {
            examples: Examples::of_file(file, self.order, self.lengths),
            ..self.rows
        }
    }
}

/// Locks a directory of the cache, and waits while another process writes it.
fn wait(dir: &Path) -> Result<RunLock> {
    const WORDS: LockWords = LockWords {
        busy: "another run tokenizes the same rows",
        instead: "use another directory for the token cache",
    };
    let mut phase = None;
    loop {
        match RunLock::acquire_as(dir, WORDS) {
            Ok(lock) => return Ok(lock),
            Err(e) if e.what().starts_with(WORDS.busy) => {
                let waiting = || progress::phase("waiting for another run that tokenizes the same rows", 0, "");
                phase.get_or_insert_with(waiting).unless_stopped()?;
                std::thread::sleep(std::time::Duration::from_millis(200));
            }
            Err(e) => return Err(e),
        }
    }
}
