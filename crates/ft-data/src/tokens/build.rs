//! Writes the files of a dataset, part by part; continues after the last complete part.

use super::{
    CHUNKS, CachePart, ENTRY_BYTES, FORMAT, FileReading, INDEX, PAIR_BYTES, PAIRS, PartEnd, ROWS, RowEntry, RowsFile,
    TOKEN_BYTES, TOKENS, TRAINED, TokenFile, TokenRequest,
};
use super::{chunks, example, hash, pairs, row_count, seal};
use crate::batch::Example;
use crate::dataset::{DatasetStats, RowOrigin};
use crate::examples::RowMeasure;
use crate::load::{ExampleSink, TokenizedPart, nothing_to_train};
use crate::mixture::{SourceShare, source_of};
use crate::screen::Screen;
use crate::source;
use ft_base::files::{self, AppendFile};
use ft_base::{Result, progress};
use std::path::Path;

/// Tokens of a part: its work is lost if the process ends.
const PART_TOKENS: usize = if cfg!(test) { 64 } else { 4 << 20 };

struct Builder {
    tokens: AppendFile,
    index: AppendFile,
    /// For preferences.
    pairs: Option<AppendFile>,
    chunks: AppendFile,
    /// Bytes that are not in a complete part yet.
    new: CachePart,
    end: PartEnd,
    all: Vec<PartEnd>,
    hasher: blake3::Hasher,
    shares: Vec<SourceShare>,
    margins: Option<bool>,
    /// False after a bad row: the load will fail, and rows after it must be read again.
    clean: bool,
}

/// Tokenizes the rows. Errors: as `Dataset::load`; a file cannot be written.
pub(super) fn run(dir: &Path, request: &TokenRequest) -> Result<()> {
    let mut builder = Builder::open(dir, request)?;
    let skip = builder.end.read;
    let readings = request.read(skip, &mut builder)?;
    builder.finish_part()?;
    if builder.end.rows == 0 {
        return Err(nothing_to_train(request.spec, &builder.end.stats));
    }
    builder.tokens.sync()?;
    builder.index.sync()?;
    if let Some(pairs) = &mut builder.pairs {
        pairs.sync()?;
        // The rows that are placed last, and what the rows have beside their tokens.
        let file = TokenFile::open(dir, true)?;
        let (order, first_last, preferences) = file.preferences(builder.end.rows)?;
        let mut buffer = Vec::new();
        for row in order.into_iter().flatten().skip(first_last) {
            hash_row(&mut builder.hasher, &file.example(row)?, &mut buffer);
        }
        preferences.iter().for_each(|p| p.hash(&mut builder.hasher));
    }
    let finished = RowsFile {
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
        screened: request.spec.screen.filter(|screen| screen.drops()).map(Screen::report),
    };
    let text =
        serde_json::to_string(&finished).map_err(|e| ft_base::Error::internal("a number of the cache").cause(e))?;
    files::write_atomic(&dir.join(ROWS), seal::sealed(&text).as_bytes())
}

/// Adds a row to a fingerprint of a dataset.
pub(crate) fn hash_row(hasher: &mut blake3::Hasher, row: &Example, buffer: &mut Vec<u8>) {
    buffer.clear();
    buffer.extend((row.ids.len() as u64).to_le_bytes());
    buffer.extend(row.ids.iter().flat_map(|id| id.to_le_bytes()));
    buffer.extend(row.trained.iter().map(|&t| u8::from(t)));
    hasher.update(buffer);
}

impl Builder {
    fn open(dir: &Path, request: &TokenRequest) -> Result<Self> {
        let path = |name| dir.join(name);
        let rows = path(ROWS);
        let mut found = chunks(dir);
        if rows.exists() {
            files::remove_file(&rows)?;
        }
        let mut hasher = blake3::Hasher::new();
        let (mut kept, mut margins) = (0, None);
        if let Ok(file) = TokenFile::open(dir, request.want.is_some()) {
            kept = file.intact(&found);
            margins = hash_again(&file, &found[..kept], &mut hasher)?;
        }
        found.truncate(kept);
        let mut end = found.last().cloned().unwrap_or_default();
        end.sources.resize(request.spec.sources.len(), (0, 0));
        let pairs = request
            .want
            .map(|_| AppendFile::continue_at(&path(PAIRS), end.rows * PAIR_BYTES as u64));
        let lines: u64 = found.iter().map(|c| line(c).len() as u64).sum();
        Ok(Self {
            tokens: AppendFile::continue_at(&path(TOKENS), end.tokens * TOKEN_BYTES)?,
            index: AppendFile::continue_at(&path(INDEX), end.rows * ENTRY_BYTES as u64)?,
            pairs: pairs.transpose()?,
            chunks: AppendFile::continue_at(&path(CHUNKS), lines)?,
            new: CachePart::default(),
            end,
            all: found,
            hasher,
            shares: source::shares(request.spec.sources),
            margins,
            clean: true,
        })
    }

    fn finish_part(&mut self) -> Result<()> {
        let from = self.all.last().cloned().unwrap_or_default();
        if !self.clean || self.end.read == from.read {
            return Ok(());
        }
        self.end.hash = hash(&self.new);
        self.tokens.write(&self.new[0])?;
        self.index.write(&self.new[1])?;
        if let Some(pairs) = &mut self.pairs {
            pairs.write(&self.new[2])?;
        }
        hash_part(&self.new, from.tokens, &mut self.hasher);
        // The line comes after the bytes for which it vouches.
        self.chunks.write(line(&self.end).as_bytes())?;
        self.all.push(self.end.clone());
        self.new = CachePart::default();
        Ok(())
    }
}

fn line(chunk: &PartEnd) -> String {
    seal::sealed(&serde_json::to_string(chunk).unwrap_or_default())
}

/// Adds the rows of a part, which starts at token `first`, to a fingerprint, except those that are placed last. Returns
/// whether its preferences have margins.
fn hash_part([tokens, index, sides]: &CachePart, first: u64, hasher: &mut blake3::Hasher) -> Option<bool> {
    let mut buffer = Vec::new();
    let mut sides = sides.as_chunks().0.iter().map(pairs::of);
    let mut margins = None;
    for entry in index.as_chunks().0.iter().map(RowEntry::of) {
        let side = sides.next();
        margins = side.map(|side| side.has_margin);
        if side.is_some_and(|side| side.is_last) {
            continue;
        }
        let from = ((entry.first - first) * TOKEN_BYTES) as usize;
        let bytes = &tokens[from..from + entry.measure.length as usize * TOKEN_BYTES as usize];
        hash_row(hasher, &example(bytes), &mut buffer);
    }
    margins
}

fn hash_again(file: &TokenFile, chunks: &[PartEnd], hasher: &mut blake3::Hasher) -> Result<Option<bool>> {
    let phase = progress::phase("reading the token cache", chunks.len(), "parts");
    let (mut from, mut margins) = (PartEnd::default(), None);
    for chunk in chunks {
        let part = file.part(&from, chunk).map_err(|e| file.cannot_read(e))?;
        margins = hash_part(&part, from.tokens, hasher).or(margins);
        from = chunk.clone();
        phase.advance(1)?;
    }
    Ok(margins)
}

impl ExampleSink for Builder {
    fn stats(&mut self) -> &mut DatasetStats {
        &mut self.end.stats
    }

    fn count(&mut self, origin: RowOrigin, truncated: bool) {
        let source = source_of(&self.shares, origin);
        if let Some((rows, cut)) = self.end.sources.get_mut(source) {
            *rows += 1;
            *cut += usize::from(truncated);
        }
    }

    fn push(&mut self, row: TokenizedPart) {
        let TokenizedPart { example, origin, side } = row;
        let entry = RowEntry {
            first: self.end.tokens,
            measure: RowMeasure::of(&example),
            origin,
        };
        let RowMeasure { length, trained, .. } = entry.measure;
        self.end.stats.measure(length as usize, trained.into());
        let word = |(id, trained): (&u32, &bool)| (id | if *trained { TRAINED } else { 0 }).to_le_bytes();
        self.new[0].extend(example.ids.iter().zip(&example.trained).flat_map(word));
        self.new[1].extend(entry.bytes());
        self.new[2].extend(side.iter().flat_map(pairs::bytes));
        self.end.tokens += u64::from(length);
        self.end.rows += 1;
    }

    fn chunk(&mut self, rows: u64, clean: bool) -> Result<()> {
        self.clean &= clean;
        if !self.clean {
            // The load will fail: its rows are only checked.
            self.new = CachePart::default();
            return Ok(());
        }
        // Before hours of work on rows that nothing could read.
        row_count(self.end.rows)?;
        self.end.read = rows;
        if self.new[0].len() as u64 >= PART_TOKENS as u64 * TOKEN_BYTES {
            self.finish_part()?;
        }
        Ok(())
    }

    fn margins(&self) -> Option<bool> {
        self.margins
    }
}
