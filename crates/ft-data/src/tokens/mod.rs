//! The token cache: tokenized rows in files, so that a data set is tokenized once and needs little memory.
//!
//! A directory per data set, named by a hash of everything on which the tokens depend (`key`):
//!
//! - `tokens`: for each token 4 bytes, little-endian: the id, and in bit 31 whether it is trained;
//! - `index`: for each row 32 bytes (`Entry`);
//! - `chunks.jsonl`: for each part of both files its end and a hash. What stands there is complete, so that a stopped
//!   writer continues after the last part, and a damaged part is found;
//! - `rows.json`: counts and the fingerprint, written last.
//!
//! The files are read with positioned reads and are not mapped: pages of a mapped file count as memory of the process,
//! and a run with a memory budget would stop because of them.

mod build;
mod key;

pub(super) use build::hash_row;

#[cfg(test)]
mod tests;

use super::batch::Example;
use super::dataset::{Dataset, Origin, Spec, Stats};
use super::examples::Examples;
use super::reading::Reading;
use super::source;
use super::{ChatRender, TextCodec};
use ft_base::{Error, Result, files, lock::RunLock, progress};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const TOKENS: &str = "tokens";
const INDEX: &str = "index";
const CHUNKS: &str = "chunks.jsonl";
const ROWS: &str = "rows.json";
/// Version of the files; another one is another key.
const FORMAT: &str = "ft token cache 1";
/// Marks a trained token.
const TRAINED: u32 = 1 << 31;
const TOKEN_BYTES: u64 = 4;
const ENTRY_BYTES: usize = 32;

/// Where token files are stored, and for which data sets.
#[derive(Clone, Copy)]
pub struct TokenCache<'a> {
    /// The directory of all data sets.
    pub dir: &'a Path,
    /// Data files of fewer bytes in all are tokenized at each start, in memory.
    pub least_bytes: u64,
    /// False: if the directory cannot be made, rows are tokenized in memory, with a line for `note`.
    pub required: bool,
    /// Receives a line about a cache that cannot be used.
    pub note: &'a dyn Fn(&str),
}

/// Position and origin of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// Index of its first token.
    pub first: u64,
    pub length: u32,
    pub trained: u32,
    pub origin: Origin,
}

impl Entry {
    fn bytes(&self) -> [u8; ENTRY_BYTES] {
        let mut out = [0; ENTRY_BYTES];
        out[..8].copy_from_slice(&self.first.to_le_bytes());
        out[8..12].copy_from_slice(&self.length.to_le_bytes());
        out[12..16].copy_from_slice(&self.trained.to_le_bytes());
        out[16..24].copy_from_slice(&self.origin.number.to_le_bytes());
        out[24..28].copy_from_slice(&self.origin.file.to_le_bytes());
        out[28..].copy_from_slice(&u32::from(self.origin.is_line).to_le_bytes());
        out
    }

    fn of(bytes: &[u8; ENTRY_BYTES]) -> Self {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Self {
            first: long(0),
            length: word(8),
            trained: word(12),
            origin: Origin {
                number: long(16),
                file: word(24),
                is_line: word(28) != 0,
            },
        }
    }
}

/// The end of a complete part of the files, and the hash of the part.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Chunk {
    /// Rows of the data files up to here.
    read: u64,
    /// Rows in the index up to here.
    rows: u64,
    /// Tokens up to here.
    tokens: u64,
    hash: String,
    /// Counts up to here.
    stats: Stats,
    /// For each source: rows, and truncated rows, up to here.
    sources: Vec<(usize, usize)>,
}

/// What is known of a data file after all its rows were read.
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
struct Finished {
    format: String,
    /// Of the data set (`Dataset::fingerprint`).
    fingerprint: String,
    stats: Stats,
    /// For each file that has rows.
    readings: Vec<FileReading>,
    chunks: Vec<Chunk>,
}

/// Tokens and index of a data set.
#[derive(Debug)]
pub(super) struct TokenFile {
    tokens: File,
    index: File,
    dir: PathBuf,
}

impl TokenFile {
    fn open(dir: &Path) -> Result<Self> {
        Ok(Self {
            tokens: files::open(&dir.join(TOKENS))?,
            index: files::open(&dir.join(INDEX))?,
            dir: dir.to_path_buf(),
        })
    }

    fn cannot_read(&self, e: std::io::Error) -> Error {
        Error::io("cannot read the token cache")
            .at_path(&self.dir)
            .cause(e)
            .hint("the next start finds the damaged part and writes it again")
    }

    pub(super) fn entry(&self, row: u32) -> Result<Entry> {
        let mut bytes = [0; ENTRY_BYTES];
        let at = u64::from(row) * ENTRY_BYTES as u64;
        self.index
            .read_exact_at(&mut bytes, at)
            .map_err(|e| self.cannot_read(e))?;
        Ok(Entry::of(&bytes))
    }

    pub(super) fn example(&self, row: u32) -> Result<Example> {
        let entry = self.entry(row)?;
        let mut bytes = vec![0; entry.length as usize * TOKEN_BYTES as usize];
        self.tokens
            .read_exact_at(&mut bytes, entry.first * TOKEN_BYTES)
            .map_err(|e| self.cannot_read(e))?;
        Ok(example(&bytes))
    }

    /// Calls `each` with all entries, in order.
    pub(super) fn entries(&self, rows: u64, each: &mut dyn FnMut(Entry)) -> Result<()> {
        let mut from = 0;
        let mut bytes = vec![0; ENTRY_BYTES << 15];
        while from < rows {
            let n = (rows - from).min(1 << 15) as usize;
            let part = &mut bytes[..n * ENTRY_BYTES];
            self.index
                .read_exact_at(part, from * ENTRY_BYTES as u64)
                .map_err(|e| self.cannot_read(e))?;
            part.as_chunks().0.iter().for_each(|entry| each(Entry::of(entry)));
            from += n as u64;
        }
        Ok(())
    }

    /// The bytes between the ends of two parts: tokens, then index.
    fn part(&self, from: &Chunk, to: &Chunk) -> std::io::Result<(Vec<u8>, Vec<u8>)> {
        let mut tokens = vec![0; ((to.tokens - from.tokens) * TOKEN_BYTES) as usize];
        let mut index = vec![0; (to.rows - from.rows) as usize * ENTRY_BYTES];
        self.tokens.read_exact_at(&mut tokens, from.tokens * TOKEN_BYTES)?;
        self.index.read_exact_at(&mut index, from.rows * ENTRY_BYTES as u64)?;
        Ok((tokens, index))
    }

    /// Number of parts, from the first, whose bytes have their hashes.
    fn intact(&self, chunks: &[Chunk]) -> usize {
        let bytes = chunks.last().map_or(0, |c| c.tokens * TOKEN_BYTES);
        let phase = progress::bytes("checking the token cache", bytes);
        let good = |i: usize| {
            let (zero, to) = (Chunk::default(), &chunks[i]);
            let from = if i == 0 { &zero } else { &chunks[i - 1] };
            let grows = from.tokens <= to.tokens && from.rows <= to.rows;
            let whole = grows
                && self
                    .part(from, to)
                    .is_ok_and(|(tokens, index)| hash(&tokens, &index) == to.hash);
            phase.add((to.tokens.saturating_sub(from.tokens)) * TOKEN_BYTES);
            whole
        };
        let found: Vec<bool> = (0..chunks.len()).into_par_iter().map(good).collect();
        found.iter().take_while(|good| **good).count()
    }
}

fn example(bytes: &[u8]) -> Example {
    let words = || bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b));
    Example {
        ids: words().map(|w| w & !TRAINED).collect(),
        trained: words().map(|w| w & TRAINED != 0).collect(),
    }
}

fn hash(tokens: &[u8], index: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(tokens);
    hasher.update(index);
    hasher.finalize().to_hex()[..32].to_string()
}

/// Reads `chunks.jsonl` up to the first line that is not complete.
fn chunks(dir: &Path) -> Vec<Chunk> {
    let mut bytes = Vec::new();
    let read = files::open(&dir.join(CHUNKS)).map(|mut file| file.read_to_end(&mut bytes));
    if !matches!(read, Ok(Ok(_))) {
        return Vec::new();
    }
    let lines = bytes
        .split_inclusive(|b| *b == b'\n')
        .filter(|line| line.ends_with(b"\n"));
    lines.map_while(|line| serde_json::from_slice(line).ok()).collect()
}

fn finished(dir: &Path) -> Option<Finished> {
    let text = files::read_text(&dir.join(ROWS)).ok()?;
    let found: Finished = serde_json::from_str(&text).ok()?;
    (found.format == FORMAT).then_some(found)
}

impl TokenCache<'_> {
    /// The rows of a data set: from its files in the cache, which are written if they are missing, stopped or damaged.
    /// `None`: the data set is not cached, because it is small or cannot be identified.
    ///
    /// # Errors
    /// As `Dataset::load`; the cache cannot be written.
    pub(super) fn load(
        &self,
        spec: &Spec,
        codec: &dyn TextCodec,
        template: Option<&dyn ChatRender>,
    ) -> Result<Option<Dataset>> {
        // Which rows the screen dropped, and why, is reported at each start.
        if spec.screen.is_some() || key::bytes(spec)? < self.least_bytes {
            return Ok(None);
        }
        let Some(key) = key::of(spec, codec, template)? else {
            return Ok(None);
        };
        let dir = self.dir.join(key);
        match files::create_dir_all(&dir) {
            Err(e) if !self.required => {
                (self.note)(&format!("no token cache: {}", e.line()));
                return Ok(None);
            }
            made => made?,
        }
        if let Some(found) = finished(&dir) {
            if let Some(rows) = self.open(&dir, &found, spec, codec, template)? {
                return Ok(Some(rows));
            }
            (self.note)(&format!(
                "the token cache {} is damaged: its rows are tokenized again",
                dir.display()
            ));
        }
        let _lock = wait(&dir)?;
        // Another run may have finished it.
        if let Some(found) = finished(&dir)
            && let Some(rows) = self.open(&dir, &found, spec, codec, template)?
        {
            return Ok(Some(rows));
        }
        build::run(&dir, spec, codec, template)?;
        let found = finished(&dir).ok_or_else(|| Error::io("the token cache cannot be read").at_path(&dir))?;
        self.open(&dir, &found, spec, codec, template)?
            .ok_or_else(|| {
                Error::io("the token cache does not have the bytes that were written")
                    .at_path(&dir)
                    .hint("check the disk, or name another directory in `TokenCache::dir`")
            })
            .map(Some)
    }

    /// `None`: the files are damaged.
    fn open(
        &self,
        dir: &Path,
        found: &Finished,
        spec: &Spec,
        codec: &dyn TextCodec,
        template: Option<&dyn ChatRender>,
    ) -> Result<Option<Dataset>> {
        let Ok(file) = TokenFile::open(dir) else {
            return Ok(None);
        };
        if file.intact(&found.chunks) < found.chunks.len() {
            return Ok(None);
        }
        let mut lengths = Vec::new();
        file.entries(found.chunks.last().map_or(0, |c| c.rows), &mut |entry| {
            lengths.push(entry.length)
        })?;
        let encoder = spec.encoder(codec, template);
        let mut readings = Vec::new();
        for of_file in &found.readings {
            let reading: Option<Reading> = spec.first_reading(of_file.file, &encoder)?;
            readings.extend(reading.map(|reading| reading.with(&of_file.columns, &of_file.skipped)));
        }
        let counts = found.chunks.last().map_or(&[][..], |c| &c.sources);
        let mut shares = source::shares(spec.sources);
        for (share, (rows, truncated)) in shares.iter_mut().zip(counts) {
            (share.rows, share.truncated) = (*rows, *truncated);
        }
        Ok(Some(Dataset {
            examples: Examples::of_file(file, lengths),
            stats: found.stats.clone(),
            fingerprint: found.fingerprint.clone(),
            readings,
            shares,
            ..Dataset::default()
        }))
    }
}

/// Locks a directory of the cache, and waits while another process writes it.
fn wait(dir: &Path) -> Result<RunLock> {
    let mut phase = None;
    loop {
        match RunLock::acquire(dir) {
            Ok(lock) => return Ok(lock),
            Err(e) if e.what().starts_with("another run is in progress") => {
                let waiting = || progress::phase("waiting for another run that tokenizes the same rows", 0, "");
                phase.get_or_insert_with(waiting).unless_stopped()?;
                std::thread::sleep(std::time::Duration::from_millis(200));
            }
            Err(e) => return Err(e),
        }
    }
}
