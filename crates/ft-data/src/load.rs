//! Reads rows in chunks and tokenizes a chunk on all cores.

use super::batch::Example;
use super::codec::{ChatRender, TextCodec};
use super::dataset::{Dataset, DatasetSpec, DatasetStats, RowOrigin};
use super::encode::{Encoder, FittedRows};
use super::faults::{BadRows, TrialState};
use super::layout::{ColumnLayout, RowPurpose};
use super::mixture::{self, SourceShare};
use super::preference::PreferenceDocuments;
use super::prepare;
use super::read::Row;
use super::reading::ReadingReport;
use super::rows::{self, Sample};
use super::screen::Screen;
use super::source;
use ft_base::{Error, Result, signal};
use rayon::prelude::*;
use std::sync::Arc;

/// Rows that are read before they are tokenized in parallel.
pub(super) const CHUNK_ROWS: usize = 512;
/// Text bytes of such a chunk; chunks of long rows have fewer rows.
pub(super) const CHUNK_BYTES: usize = 32 << 20;

/// Approximate bytes of the texts of a row.
pub(super) fn text_bytes(row: &Row) -> usize {
    let size = |v: &serde_json::Value| v.as_str().map_or(1024, str::len);
    row.fields.values().map(size).sum()
}

pub(super) fn nothing_to_train(spec: &DatasetSpec, stats: &DatasetStats) -> Error {
    let names: Vec<&str> = spec.sources.iter().map(|source| source.name.as_str()).collect();
    let files = names.join(", ");
    let screened = spec.screen.map(Screen::report).unwrap_or_default();
    if stats.rows == 0 && !screened.dropped.is_empty() {
        return Error::format("no row is left to train")
            .at(files)
            .found(screened.lines().join("; "));
    }
    if stats.rows == 0 {
        return Error::format("the data has no rows").at(files).found("0 rows");
    }
    let hint = if stats.forked_rows == stats.rows {
        "make the messages before the answers of `chosen` and `rejected` equal".to_string()
    } else if stats.dropped_by_truncation > 0 {
        format!(
            "raise `data::DatasetSpec::max_length`; the longest row has {} tokens",
            stats.longest_written
        )
    } else {
        "look at the encoded rows; check `data::DatasetSpec::train_on` and the assistant messages or completions"
            .to_string()
    };
    Error::format("nothing in the data would be trained")
        .at(files)
        .found(format!(
            "{} rows, {} without a token to train, {} of them because of max_length = {}",
            stats.rows, stats.dropped_rows, stats.dropped_by_truncation, spec.max_length
        ))
        .expected("at least one trained token")
        .hint(hint)
}

/// A tokenized row, or a part of one.
pub(super) struct TokenizedPart {
    pub example: Example,
    pub origin: RowOrigin,
    pub side: Option<PreferenceSide>,
}

/// The data of a row of preferences beside its tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PreferenceSide {
    pub preference: PreferenceDocuments,
    /// It is placed after all rows that are not: the two answers to a prompt are not adjacent.
    pub is_last: bool,
    pub has_margin: bool,
}

/// Receives tokenized rows in the order of the files.
pub(super) trait ExampleSink {
    fn stats(&mut self) -> &mut DatasetStats;

    /// Counts a row of a source.
    fn count(&mut self, origin: RowOrigin, truncated: bool);

    fn push(&mut self, row: TokenizedPart);

    /// Called after some rows. `read`: rows of the files up to here; `clean`: no row was bad.
    fn chunk(&mut self, read: u64, clean: bool) -> Result<()>;

    /// Whether the rows of preferences that it has received have a margin; `None`: there are none.
    fn margins(&self) -> Option<bool> {
        None
    }
}

/// Passes the pieces of a row that train a token to the sink, and counts the row.
pub(super) fn push(sink: &mut dyn ExampleSink, row: FittedRows, origin: RowOrigin) {
    sink.stats().add(&row);
    sink.count(origin, row.cut > 0);
    for example in row.pieces.into_iter().filter(|p| p.trained.contains(&true)) {
        let side = None;
        sink.push(TokenizedPart { example, origin, side });
    }
}

pub(super) struct InMemoryRows {
    pub examples: Vec<Example>,
    pub origins: Vec<RowOrigin>,
    pub stats: DatasetStats,
    pub shares: Vec<SourceShare>,
    preferences: Vec<PreferenceDocuments>,
    last: Vec<TokenizedPart>,
}

impl InMemoryRows {
    pub(super) fn new(spec: &DatasetSpec) -> Self {
        Self {
            examples: Vec::new(),
            origins: Vec::new(),
            stats: DatasetStats::default(),
            shares: source::shares(spec.sources),
            preferences: Vec::new(),
            last: Vec::new(),
        }
    }

    fn add(&mut self, row: TokenizedPart) {
        self.examples.push(row.example);
        self.origins.push(row.origin);
        self.preferences.extend(row.side.map(|side| side.preference));
    }

    /// Errors: nothing is trained.
    pub(super) fn dataset(mut self, spec: &DatasetSpec, readings: Vec<(usize, ReadingReport)>) -> Result<Dataset> {
        for row in std::mem::take(&mut self.last) {
            self.add(row);
        }
        let mut out = Dataset {
            examples: self.examples.into(),
            origins: self.origins,
            stats: self.stats,
            shares: self.shares,
            preferences: self.preferences,
            readings: source::readings(readings),
            ..Dataset::default()
        };
        out.finish();
        if out.examples.is_empty() {
            return Err(nothing_to_train(spec, &out.stats));
        }
        Ok(out)
    }
}

impl ExampleSink for InMemoryRows {
    fn stats(&mut self) -> &mut DatasetStats {
        &mut self.stats
    }

    fn count(&mut self, origin: RowOrigin, truncated: bool) {
        mixture::count(&mut self.shares, origin, truncated);
    }

    fn push(&mut self, row: TokenizedPart) {
        match row.side {
            Some(side) if side.is_last => self.last.push(row),
            _ => self.add(row),
        }
    }

    fn chunk(&mut self, _: u64, _: bool) -> Result<()> {
        Ok(())
    }
}

/// Reads all rows, and tokenizes those after the first `skip`.
///
/// Errors: as `Dataset::load`, except that rows without a target are no error here.
pub(super) fn read_into(
    spec: &DatasetSpec,
    codec: &dyn TextCodec,
    template: Option<&dyn ChatRender>,
    skip: u64,
    sink: &mut dyn ExampleSink,
) -> Result<Vec<(usize, ReadingReport)>> {
    if spec.max_length < 2 {
        return Err(Error::usage("rows of fewer than 2 tokens cannot be trained")
            .found(format!("max_length = {}", spec.max_length)));
    }
    let mut loader = SampleLoader {
        spec,
        encoder: spec.encoder(codec, template),
        chunk: Vec::new(),
        bytes: 0,
        read: 0,
        skip,
        sink,
    };
    let mut bad = BadRows::new();
    let encoder = spec.encoder(codec, template);
    let readings = spec.rows(
        RowPurpose::Learn,
        &encoder,
        &mut bad,
        &mut |row, layout, origin, bad| loader.push(row, layout, origin, bad),
    )?;
    loader.flush(&mut bad)?;
    bad.end()?;
    template.iter().for_each(|t| t.rest());
    Ok(readings)
}

/// Collects rows in chunks and tokenizes a chunk on all cores; keeps the order of the file.
struct SampleLoader<'a> {
    spec: &'a DatasetSpec<'a>,
    encoder: Encoder<'a>,
    chunk: Vec<(Row, Arc<ColumnLayout>, RowOrigin)>,
    bytes: usize,
    /// Rows read.
    read: u64,
    /// The first rows, which the sink has.
    skip: u64,
    sink: &'a mut dyn ExampleSink,
}

impl SampleLoader<'_> {
    fn push(&mut self, row: Row, layout: &Arc<ColumnLayout>, origin: RowOrigin, bad: &mut BadRows) -> Result<()> {
        self.read += 1;
        if self.read <= self.skip {
            bad.good();
            return unless_stopped();
        }
        self.bytes += text_bytes(&row);
        self.chunk.push((row, layout.clone(), origin));
        if self.chunk.len() >= CHUNK_ROWS || self.bytes >= CHUNK_BYTES {
            self.flush(bad)?;
        }
        Ok(())
    }

    fn flush(&mut self, bad: &mut BadRows) -> Result<()> {
        let (spec, encoder) = (self.spec, &self.encoder);
        let encoded = encode_all(spec, encoder, &self.chunk, bad);
        for (row, (_, _, origin)) in encoded.into_iter().zip(self.chunk.drain(..)) {
            let Some(row) = kept(row, bad)? else { continue };
            push(self.sink, row, origin);
        }
        self.bytes = 0;
        self.sink.chunk(self.read, bad.is_clean())?;
        unless_stopped()
    }
}

/// Encodes rows on all cores. `None`: skipped, see `encode_group`.
fn encode_all(
    spec: &DatasetSpec,
    encoder: &Encoder,
    rows: &[(Row, Arc<ColumnLayout>, RowOrigin)],
    bad: &BadRows,
) -> Vec<Option<Result<FittedRows>>> {
    let tried = TrialState::new(bad);
    rows.par_chunks(prepare::ROWS)
        .flat_map_iter(|group| encode_group(spec, encoder, group, &tried))
        .collect()
}

/// Encodes rows on all cores. Errors: those of bad rows, all in one.
pub(super) fn encode(
    spec: &DatasetSpec,
    encoder: &Encoder,
    rows: &[(Row, Arc<ColumnLayout>, RowOrigin)],
    bad: &mut BadRows,
) -> Result<Vec<FittedRows>> {
    let mut out = Vec::with_capacity(rows.len());
    for row in encode_all(spec, encoder, rows, bad) {
        out.extend(kept(row, bad)?);
    }
    bad.end()?;
    Ok(out)
}

/// Returns an encoded row, or counts its error. Errors: no row is good.
pub(super) fn kept<T>(row: Option<Result<T>>, bad: &mut BadRows) -> Result<Option<T>> {
    match row {
        None => bad.end().map(|()| None),
        Some(Err(e)) => bad.add(e).map(|()| None),
        Some(Ok(row)) => {
            bad.good();
            Ok(Some(row))
        }
    }
}

/// Encodes a few rows that are rendered with one request. `None`: skipped, because no earlier row was good and the time
/// limit has passed.
fn encode_group(
    spec: &DatasetSpec,
    encoder: &Encoder,
    group: &[(Row, Arc<ColumnLayout>, RowOrigin)],
    tried: &TrialState,
) -> Vec<Option<Result<FittedRows>>> {
    if !tried.go_on() {
        return group.iter().map(|_| None).collect();
    }
    let samples: Vec<Result<Sample>> = group
        .iter()
        .map(|(row, layout, _)| rows::understand(row, layout))
        .collect();
    let prepared = encoder.template.map(|t| prepare::prepare(encoder, t, &samples));
    let one = |(i, (row, layout, _)): (usize, &(Row, Arc<ColumnLayout>, RowOrigin))| {
        if !tried.go_on() {
            return None;
        }
        let encoder = Encoder {
            template: prepared.as_ref().and_then(|p| p.get(i)).map(|p| p as &dyn ChatRender),
            ..*encoder
        };
        let fit = |sample: &Sample| encoder.fit(sample, spec.long, spec.overlap);
        let encoded = match &samples[i] {
            Ok(sample) => fit(sample).map_err(|e| e.within(&row.place)),
            // Errors are not cloneable: compute it again.
            Err(_) => rows::understand(row, layout).and_then(|sample| fit(&sample)),
        };
        tried.note(&encoded);
        Some(encoded)
    };
    group.iter().enumerate().map(one).collect()
}

/// Errors: a signal asks to stop.
pub(super) fn unless_stopped() -> Result<()> {
    let stopped = |s| Error::signal(s, "stopped during the reading of the data; nothing was trained yet");
    signal::received().map_or(Ok(()), |s| Err(stopped(s)))
}
