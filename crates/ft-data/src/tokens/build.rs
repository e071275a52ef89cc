//! Writes the files of a data set, part by part; continues after the last complete part.

use super::{
    CHUNKS, Chunk, ENTRY_BYTES, Entry, FORMAT, FileReading, Finished, INDEX, ROWS, TOKEN_BYTES, TOKENS, TRAINED,
    TokenFile,
};
use super::{chunks, example, hash};
use crate::batch::Example;
use crate::dataset::{Origin, Spec};
use crate::encode::Fitted;
use crate::load::{self, Sink, nothing_to_train};
use crate::mixture::{Share, source_of};
use crate::source;
use crate::{ChatRender, TextCodec};
use ft_base::files::{self, AppendFile};
use ft_base::{Result, progress};
use std::path::Path;

/// Tokens of a part: its work is lost if the process ends.
const PART_TOKENS: usize = if cfg!(test) { 64 } else { 4 << 20 };

struct Builder {
    tokens: AppendFile,
    index: AppendFile,
    chunks: AppendFile,
    /// Bytes that are not in a complete part yet.
    new_tokens: Vec<u8>,
    new_index: Vec<u8>,
    end: Chunk,
    all: Vec<Chunk>,
    hasher: blake3::Hasher,
    shares: Vec<Share>,
    /// False after a bad row: the load will fail, and rows after it must be read again.
    clean: bool,
}

/// Tokenizes the rows. Errors: as `Dataset::load`; a file cannot be written.
pub(super) fn run(dir: &Path, spec: &Spec, codec: &dyn TextCodec, template: Option<&dyn ChatRender>) -> Result<()> {
    let mut builder = Builder::open(dir, spec)?;
    let skip = builder.end.read;
    let readings = load::read_into(spec, codec, template, skip, &mut builder)?;
    builder.finish_part()?;
    if builder.end.rows == 0 {
        return Err(nothing_to_train(spec, &builder.end.stats));
    }
    builder.tokens.sync()?;
    builder.index.sync()?;
    let finished = Finished {
        format: FORMAT.to_string(),
        fingerprint: builder.hasher.finalize().to_hex().to_string(),
        stats: builder.end.stats,
        readings: readings
            .into_iter()
            .map(|(file, reading)| FileReading {
                file,
                columns: reading.columns(),
                skipped: reading.skipped().to_vec(),
            })
            .collect(),
        chunks: builder.all,
    };
    let text = serde_json::to_vec(&finished).map_err(|e| ft_base::Error::internal("a number of the cache").cause(e))?;
    files::write_atomic(&dir.join(ROWS), &text)
}

/// Adds a row to a fingerprint of a data set.
pub(crate) fn hash_row(hasher: &mut blake3::Hasher, row: &Example, buffer: &mut Vec<u8>) {
    buffer.clear();
    buffer.extend((row.ids.len() as u64).to_le_bytes());
    buffer.extend(row.ids.iter().flat_map(|id| id.to_le_bytes()));
    buffer.extend(row.trained.iter().map(|&t| u8::from(t)));
    hasher.update(buffer);
}

impl Builder {
    fn open(dir: &Path, spec: &Spec) -> Result<Self> {
        let path = |name| dir.join(name);
        let rows = path(ROWS);
        let mut found = chunks(dir);
        if rows.exists() {
            files::remove_file(&rows)?;
        }
        let mut hasher = blake3::Hasher::new();
        let kept = match TokenFile::open(dir) {
            Ok(file) => {
                let kept = file.intact(&found);
                hash_again(&file, &found[..kept], &mut hasher)?;
                kept
            }
            Err(_) => 0,
        };
        found.truncate(kept);
        let mut end = found.last().cloned().unwrap_or_default();
        end.sources.resize(spec.sources.len(), (0, 0));
        let lines: u64 = found.iter().map(|c| line(c).len() as u64).sum();
        Ok(Self {
            tokens: AppendFile::continue_at(&path(TOKENS), end.tokens * TOKEN_BYTES)?,
            index: AppendFile::continue_at(&path(INDEX), end.rows * ENTRY_BYTES as u64)?,
            chunks: AppendFile::continue_at(&path(CHUNKS), lines)?,
            new_tokens: Vec::new(),
            new_index: Vec::new(),
            end,
            all: found,
            hasher,
            shares: source::shares(spec.sources),
            clean: true,
        })
    }

    fn push(&mut self, row: &Example, origin: Origin) {
        let entry = Entry {
            first: self.end.tokens,
            length: row.ids.len() as u32,
            trained: row.trained.iter().filter(|t| **t).count() as u32,
            origin,
        };
        self.end.stats.measure(entry.length as usize, u64::from(entry.trained));
        self.new_index.extend(entry.bytes());
        let word = |(id, trained): (&u32, &bool)| (id | if *trained { TRAINED } else { 0 }).to_le_bytes();
        self.new_tokens.extend(row.ids.iter().zip(&row.trained).flat_map(word));
        self.end.tokens += u64::from(entry.length);
        self.end.rows += 1;
    }

    fn finish_part(&mut self) -> Result<()> {
        let from = self.all.last().cloned().unwrap_or_default();
        if !self.clean || self.end.read == from.read {
            return Ok(());
        }
        self.end.hash = hash(&self.new_tokens, &self.new_index);
        self.tokens.write(&self.new_tokens)?;
        self.index.write(&self.new_index)?;
        hash_part(&self.new_tokens, &self.new_index, from.tokens, &mut self.hasher);
        // The line comes after the bytes for which it vouches.
        self.chunks.write(line(&self.end).as_bytes())?;
        self.all.push(self.end.clone());
        self.new_tokens.clear();
        self.new_index.clear();
        Ok(())
    }
}

fn line(chunk: &Chunk) -> String {
    serde_json::to_string(chunk).unwrap_or_default() + "\n"
}

/// Adds the rows of a part, which starts at token `first`, to a fingerprint.
fn hash_part(tokens: &[u8], index: &[u8], first: u64, hasher: &mut blake3::Hasher) {
    let mut buffer = Vec::new();
    for entry in index.as_chunks().0.iter().map(Entry::of) {
        let from = ((entry.first - first) * TOKEN_BYTES) as usize;
        let bytes = &tokens[from..from + entry.length as usize * TOKEN_BYTES as usize];
        hash_row(hasher, &example(bytes), &mut buffer);
    }
}

fn hash_again(file: &TokenFile, chunks: &[Chunk], hasher: &mut blake3::Hasher) -> Result<()> {
    let phase = progress::phase("reading the token cache", chunks.len(), "parts");
    let mut from = Chunk::default();
    for chunk in chunks {
        let (tokens, index) = file.part(&from, chunk).map_err(|e| file.cannot_read(e))?;
        hash_part(&tokens, &index, from.tokens, hasher);
        from = chunk.clone();
        phase.advance(1)?;
    }
    Ok(())
}

impl Sink for Builder {
    fn row(&mut self, row: Fitted, origin: Origin) -> Result<()> {
        self.end.stats.add(&row);
        let source = source_of(&self.shares, origin);
        if let Some((rows, truncated)) = self.end.sources.get_mut(source) {
            *rows += 1;
            *truncated += usize::from(row.cut > 0);
        }
        for piece in row.pieces.iter().filter(|p| p.trained.contains(&true)) {
            self.push(piece, origin);
        }
        Ok(())
    }

    fn chunk(&mut self, rows: u64, clean: bool) -> Result<()> {
        self.clean &= clean;
        if !self.clean {
            // The load will fail: its rows are only checked.
            self.new_tokens.clear();
            self.new_index.clear();
            return Ok(());
        }
        self.end.read = rows;
        if self.new_tokens.len() as u64 >= PART_TOKENS as u64 * TOKEN_BYTES {
            self.finish_part()?;
        }
        Ok(())
    }
}
