//! Converts preference rows to examples: pairs of answers, and judged answers.
//!
//! An example of such a dataset is one unit of training: its concatenated documents, the chosen and the rejected
//! answer (each after the prompt), or one judged answer. So order, batches and lengths work as for other rows, and a
//! pair is never split.
//!
//! Tokenization as in TRL: the prompt alone (a conversation with the generation prompt), and prompt with answer (text
//! gets EOS); an answer begins at the first difference between the two, for both sides of a pair at the earlier position.
//! Answers that are judged alone have each their own. Rows longer than `max_length` are truncated at the end.

mod encode;
mod rows;

#[cfg(test)]
mod tests;

use super::batch::{Batch, Example};
use super::codec::{ChatRender, TextCodec};
use super::dataset::{Dataset, DatasetSpec, RowOrigin};
use super::examples::RowJoin;
use super::faults::{BadRows, TrialState};
use super::layout::{ColumnLayout, RowPurpose};
use super::load::{
    CHUNK_BYTES, CHUNK_ROWS, ExampleSink, InMemoryRows, PreferenceSide, TokenizedPart, kept, text_bytes, unless_stopped,
};
use super::prepare;
use super::read::Row;
use super::reading::ReadingReport;
use super::tokens::{TokenCache, TokenRequest};
use crate::{Long, RowFormat};
use encode::{Side, TokenizedRow};
use ft_base::rng::{Rng, Stream};
use ft_base::{Error, Result};
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// The part of a row that a stage uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreferencePart {
    /// Both answers; the tokens of the answers are trained.
    Pairs,
    /// Both answers; the prompt of the chosen one is trained too (ORPO).
    PairsAndPrompts,
    /// Both answers without truncation: longer rows are dropped (a reward model reads the end of a row).
    WholePairs,
    /// One labeled answer; a pair becomes two of them (KTO).
    Judged,
}

/// The documents of a preference example.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PreferenceDocuments {
    /// Tokens of the first document: the chosen side, or the judged answer. The rest is the rejected side, or the
    /// prompt with the answer of another row (`mismatched`).
    pub first: usize,
    /// Number of prompt tokens, the same in both documents of a pair.
    pub prompt: usize,
    /// Required reward margin of the chosen side; 0 if the row has none.
    pub margin: f32,
    /// True if a judged answer is desirable.
    pub label: bool,
}

impl PreferenceDocuments {
    pub(super) fn hash(&self, hasher: &mut blake3::Hasher) {
        hasher.update(&(self.first as u64).to_le_bytes());
        hasher.update(&(self.prompt as u64).to_le_bytes());
        hasher.update(&self.margin.to_le_bytes());
        hasher.update(&[self.label.into()]);
    }
}

/// Reads and tokenizes preference rows.
///
/// # Errors
/// A broken row, equal sides, a prompt that fills `max_length` (each with its place), margins in some rows only, no
/// rows, nothing to train, a signal that asks to stop.
pub fn load(
    spec: &DatasetSpec,
    want: PreferencePart,
    codec: &dyn TextCodec,
    template: Option<&dyn ChatRender>,
) -> Result<Dataset> {
    let mut rows = InMemoryRows::new(spec);
    let readings = read_into(spec, want, codec, template, 0, &mut rows)?;
    rows.dataset(spec, readings)
}

/// As `load`; a large dataset is tokenized once, to files in `cache`, and stays there.
///
/// # Errors
/// As for `load`; the cache cannot be written.
pub fn load_cached(
    spec: &DatasetSpec,
    want: PreferencePart,
    codec: &dyn TextCodec,
    template: Option<&dyn ChatRender>,
    cache: &TokenCache,
) -> Result<Dataset> {
    let request = TokenRequest {
        spec,
        codec,
        template,
        want: Some(want),
    };
    match cache.load(&request)? {
        Some(rows) => Ok(rows),
        None => load(spec, want, codec, template),
    }
}

/// Reads all rows, and tokenizes those after the first `skip`. Errors: as `load`, except that no rows are no error here.
pub(super) fn read_into(
    spec: &DatasetSpec,
    want: PreferencePart,
    codec: &dyn TextCodec,
    template: Option<&dyn ChatRender>,
    skip: u64,
    sink: &mut dyn ExampleSink,
) -> Result<Vec<(usize, ReadingReport)>> {
    let mut formats = spec.sources.iter().map(|source| source.format);
    if let Some(format) = formats.find(|format| !matches!(format, RowFormat::Auto | RowFormat::Preference)) {
        return Err(Error::usage("this stage trains on preference rows")
            .at("data::Source::format")
            .found(format!("`{}`", format.name()))
            .expected("`preference`, or no format"));
    }
    let mut loader = PairLoader {
        encoder: encode::PairEncoder {
            encoder: spec.encoder(codec, template),
            want,
            long: spec.long,
        },
        chunk: Vec::new(),
        bytes: 0,
        read: 0,
        margins: sink.margins(),
        sink,
    };
    let mut bad = BadRows::new();
    let encoder = spec.encoder(codec, template);
    let readings = spec.rows(
        RowPurpose::Prefer,
        &encoder,
        &mut bad,
        &mut |row, layout, origin, bad| {
            loader.read += 1;
            if loader.read <= skip {
                bad.good();
                return unless_stopped();
            }
            loader.bytes += text_bytes(&row);
            loader.chunk.push((row, layout.clone(), origin));
            if loader.chunk.len() >= CHUNK_ROWS || loader.bytes >= CHUNK_BYTES {
                loader.flush(bad)
            } else {
                Ok(())
            }
        },
    )?;
    loader.flush(&mut bad)?;
    bad.end()?;
    template.iter().for_each(|t| t.rest());
    Ok(readings)
}

struct PairLoader<'a> {
    encoder: encode::PairEncoder<'a>,
    chunk: Vec<(Row, Arc<ColumnLayout>, RowOrigin)>,
    bytes: usize,
    /// Rows read.
    read: u64,
    /// Whether rows have a margin.
    margins: Option<bool>,
    sink: &'a mut dyn ExampleSink,
}

impl PairLoader<'_> {
    fn flush(&mut self, bad: &mut BadRows) -> Result<()> {
        let encoder = &self.encoder;
        let chunk = std::mem::take(&mut self.chunk);
        self.bytes = 0;
        let tried = TrialState::new(bad);
        let units: Vec<Option<Result<TokenizedRow>>> = chunk
            .par_chunks(prepare::ROWS)
            .flat_map_iter(|group| encoder.encode_group(group, &tried))
            .collect();
        for (unit, (row, _, origin)) in units.into_iter().zip(chunk) {
            let Some(unit) = kept(unit, bad)? else { continue };
            if unit.sides.is_empty() {
                let stats = self.sink.stats();
                stats.rows += 1;
                stats.dropped_rows += 1;
                stats.forked_rows += 1;
                self.sink.count(origin, false);
                continue;
            }
            if *self.margins.get_or_insert(unit.margin.is_some()) != unit.margin.is_some() {
                bad.add(
                    Error::format("some rows have a `margin` and others have none")
                        .at(&row.place)
                        .expected("a number in every row, or in none"),
                )?;
                continue;
            }
            let stats = self.sink.stats();
            stats.rows += 1;
            let cut: usize = unit.sides.iter().map(|s| s.cut).sum();
            let longest = unit.sides.iter().map(|s| s.example.ids.len() + s.cut).max();
            stats.longest_written = stats.longest_written.max(longest.unwrap_or(0));
            self.sink.count(origin, cut > 0);
            let stats = self.sink.stats();
            if cut > 0 && self.encoder.long == Long::Drop {
                stats.dropped_rows += 1;
                stats.long_rows += 1;
                stats.long_tokens += unit.sides.iter().map(|s| s.example.ids.len() + s.cut).sum::<usize>() as u64;
                continue;
            }
            if cut > 0 && self.encoder.want == PreferencePart::WholePairs {
                stats.dropped_rows += 1;
                stats.dropped_by_truncation += 1;
                continue;
            }
            if cut > 0 {
                stats.truncated_rows += 1;
                stats.truncated_tokens += cut as u64;
            }
            if let [a, b] = &unit.sides[..]
                && a.example.ids == b.example.ids
                && self.encoder.want != PreferencePart::Judged
            {
                // Truncation removed the difference between the sides. Judged answers are rows of their own, as in TRL.
                stats.dropped_rows += 1;
                stats.dropped_by_truncation += 1;
                continue;
            }
            self.push(unit, origin);
        }
        self.sink.chunk(self.read, bad.is_clean())?;
        unless_stopped()
    }

    fn push(&mut self, unit: TokenizedRow, origin: RowOrigin) {
        let TokenizedRow { sides, margin, label } = unit;
        let side_of = |first, prompt, label, is_last| PreferenceSide {
            preference: PreferenceDocuments {
                first,
                prompt,
                margin: margin.unwrap_or(0.0),
                label,
            },
            is_last,
            has_margin: margin.is_some(),
        };
        let judged = self.encoder.want == PreferencePart::Judged;
        let paired = sides.len() == 2;
        let mut add = |example, side| {
            let side = Some(side);
            self.sink.push(TokenizedPart { example, origin, side });
        };
        if judged {
            for (at, Side { example, prompt, .. }) in sides.into_iter().enumerate() {
                let (rejected, n) = (paired && at == 1, example.ids.len());
                add(example, side_of(n, prompt, !rejected && (label || paired), rejected));
            }
            return;
        }
        let first = sides.first();
        let (first, prompt) = first.map_or((0, 0), |side| (side.example.ids.len(), side.prompt));
        let mut whole = Example {
            ids: Vec::new(),
            trained: Vec::new(),
        };
        for Side { example, .. } in sides {
            whole.ids.extend(example.ids);
            whole.trained.extend(example.trained);
        }
        add(whole, side_of(first, prompt, true, false));
    }
}

/// The row whose answer makes the mismatched pair of row `i` of a group: the nearest one before it (after the first row
/// the search goes on at the last one) that is not the same row. A single row at the end uses the rows `before` its group.
/// The row itself if there is no other.
fn mismatch(before: &[usize], rows: &[usize], i: usize) -> usize {
    let (row, n) = (rows[i], rows.len());
    let in_group = (1..n).map(|back| rows[(i + n - back) % n]);
    let earlier = before.iter().rev().copied().filter(|_| n == 1);
    in_group.chain(earlier).find(|other| *other != row).unwrap_or(row)
}

impl Dataset {
    /// Ranges of the documents of an example.
    pub fn documents(&self, row: usize) -> Vec<Range<usize>> {
        let whole = self.examples.length(row);
        match self.preferences.get(row) {
            Some(p) if p.first < whole => vec![0..p.first, p.first..whole],
            _ => std::iter::once(0..whole).collect(),
        }
    }

    /// The documents of an example as separate examples.
    ///
    /// # Errors
    /// As `Examples::get`.
    pub fn parts(&self, row: usize) -> Result<Vec<Example>> {
        let e = self.examples.get(row)?;
        let part = |d: Range<usize>| Example {
            ids: e.ids[d.clone()].to_vec(),
            trained: e.trained[d].to_vec(),
        };
        Ok(self.documents(row).into_iter().map(part).collect())
    }

    /// A dataset with each document as an example, for code that does not handle pairs.
    ///
    /// # Errors
    /// As `Examples::get`.
    pub fn flat(&self) -> Result<Cow<'_, Dataset>> {
        if self.preferences.is_empty() {
            return Ok(Cow::Borrowed(self));
        }
        let mut parts = Vec::new();
        for row in 0..self.examples.len() {
            parts.extend(self.parts(row)?);
        }
        Ok(Cow::Owned(Dataset::from_examples(parts)))
    }

    /// The concatenated documents of these rows: the documents of a row are adjacent.
    ///
    /// # Errors
    /// As `Examples::get`.
    pub fn batch(&self, rows: &[usize]) -> Result<Batch> {
        let mut parts = Vec::new();
        for &row in rows {
            parts.extend(self.parts(row)?);
        }
        Ok(Batch::from_examples(&parts))
    }

    /// Judged answers, each followed by its prompt with the answer of the previous row in its group of `group` rows
    /// (the first row of a group takes the last answer): KTO estimates the KL to the reference from these. If a mixture
    /// repeats a row, its copies are passed over; a group of copies alone estimates with their own answer. With a
    /// `seed` the rows are shuffled first; this order is the same in every epoch, because the answers of a micro-batch
    /// and of its mismatched pairs should be the same.
    ///
    /// # Errors
    /// Groups of one row, or one row in all.
    pub fn mismatched(self, group: usize, max_length: usize, seed: Option<u64>) -> Result<Self> {
        const MANY: &str = "2 or more: KTO estimates the KL divergence from the reference with answers of other rows";
        let n = self.examples.len();
        if group < 2 {
            return Err(Error::usage("KTO needs at least two rows in a micro-batch")
                .found(format!("micro-batches of {group}, {n} rows"))
                .expected(MANY)
                .hint("raise `StreamSpec::batch_size`, or use `JudgedLoss::ApoZeroUnpaired`"));
        }
        if n < 2 {
            return Err(Error::usage("KTO needs at least two rows")
                .found(format!("a set of {n}"))
                .expected(MANY)
                .hint("add rows, or use `JudgedLoss::ApoZeroUnpaired`"));
        }
        let order: Vec<usize> = match (self.mixture()?, seed) {
            // The weights apply once: the answers of a group do not change from epoch to epoch.
            (Some(mixture), seed) => {
                let rows = mixture.epoch(seed.unwrap_or(0), 0, seed.is_some());
                rows.into_iter().map(|row| row as usize).collect()
            }
            (None, Some(seed)) => Rng::new(seed, Stream::Shuffle, &[u64::MAX]).permutation(n),
            (None, None) => (0..n).collect(),
        };
        let (mut joins, mut preferences, mut origins) = (Vec::new(), Vec::new(), Vec::new());
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.fingerprint.as_bytes());
        for first in (0..n).step_by(group) {
            let rows = &order[first..n.min(first + group)];
            for (i, &row) in rows.iter().enumerate() {
                let other = mismatch(&order[..first], rows, i);
                let (mine, theirs) = (self.preferences[row], self.preferences[other]);
                let answer = self.examples.length(other) - theirs.prompt;
                let join = RowJoin {
                    row: row as u32,
                    prompt: mine.prompt as u32,
                    other: other as u32,
                    answer: theirs.prompt as u32,
                    room: max_length.saturating_sub(mine.prompt).min(answer) as u32,
                };
                // The tokens are not read for it: they follow from the rows.
                for number in [join.row, join.other, join.room] {
                    hasher.update(&number.to_le_bytes());
                }
                joins.push(join);
                preferences.push(mine);
                origins.extend(self.origins.get(row));
            }
        }
        let mut out = Dataset {
            examples: self.examples.joined(joins),
            origins,
            stats: self.stats,
            readings: self.readings,
            preferences,
            grouped: true,
            fingerprint: hasher.finalize().to_hex().to_string(),
            ..Dataset::default()
        };
        out.measure_again()?;
        Ok(out)
    }
}
