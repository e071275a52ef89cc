//! Reads files to tokenized rows, and counts all rows that were truncated or dropped.

use super::batch::Example;
use super::codec::{ChatRender, TextCodec};
use super::encode::{Encoder, FittedRows, Question};
use super::examples::Examples;
use super::faults::BadRows;
use super::layout::{ColumnLayout, RenderRules, RowPurpose};
use super::load::{InMemoryRows, read_into};
use super::mixture::SourceShare;
use super::preference::PreferenceDocuments;
use super::read::Row;
use super::reading::ReadingReport;
use super::rows::{self, Sample};
use super::screen::Screen;
use super::source::{self, Source};
use super::tokens::{TokenCache, TokenRequest, hash_row};
use crate::{Long, Render, TrainOn};
use ft_base::rng::{Rng, Stream};
use ft_base::units::{count, counted};
use ft_base::{Error, Result, progress};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Receives a row with its layout and origin; bad rows are counted.
pub(super) type EachRow<'a> = dyn FnMut(Row, &Arc<ColumnLayout>, RowOrigin, &mut BadRows) -> Result<()> + 'a;

/// The sources to read, and the options. The default has no source, accepts every token id, and has the default
/// settings of the program `ft`.
#[derive(Debug, Clone)]
pub struct DatasetSpec<'a> {
    /// The files with their columns, in order.
    pub sources: &'a [Source],
    /// How conversations become text.
    pub render: Render,
    /// Longest row in tokens.
    pub max_length: usize,
    /// Treatment of longer rows.
    pub long: Long,
    /// Tokens that a piece of a split row repeats from the piece before it, from 1 to `max_length - 1`.
    pub overlap: usize,
    /// The parts of a conversation that are trained.
    pub train_on: TrainOn,
    /// Rows of the model's embedding: all ids must be smaller.
    pub embedding_rows: usize,
    /// Drops rows before they are tokenized.
    pub screen: Option<&'a Screen>,
}

impl Default for DatasetSpec<'_> {
    fn default() -> Self {
        Self {
            sources: &[],
            render: Render::Auto,
            max_length: 2048,
            long: Long::Auto,
            overlap: 1,
            train_on: TrainOn::Assistant,
            embedding_rows: usize::MAX,
            screen: None,
        }
    }
}

impl<'a> DatasetSpec<'a> {
    /// The encoder for these settings. `template`: the chat template of the model, if it has one.
    pub fn encoder<'b>(&self, codec: &'b dyn TextCodec, template: Option<&'b dyn ChatRender>) -> Encoder<'b> {
        Encoder {
            codec,
            template,
            train_on: self.train_on,
            max_length: self.max_length,
            embedding_rows: self.embedding_rows,
        }
    }

    /// Passes each row to `each` with its file's layout and its origin; broken rows go to `bad`. Returns how each file
    /// that has rows was read, with its index over all sources.
    ///
    /// Errors: a file that cannot be read, or whose first row gives no layout.
    pub(super) fn rows(
        &self,
        purpose: RowPurpose,
        encoder: &Encoder,
        bad: &mut BadRows,
        each: &mut EachRow<'_>,
    ) -> Result<Vec<(usize, ReadingReport)>> {
        source::rows(self.sources, purpose, &self.rules(encoder), self.screen, bad, each)
    }

    /// The paths of the files of all sources, in order.
    pub(super) fn files(&self) -> impl Iterator<Item = &'a str> {
        let sources = self.sources.iter();
        sources.flat_map(|source| source.files.iter().map(String::as_str))
    }

    /// Everything on which the tokens depend, except the files, as text for a fingerprint.
    pub(super) fn settings(&self) -> String {
        let settings = |source: &Source| Source {
            name: String::new(),
            files: vec![String::new(); source.files.len()],
            weight: None,
            ..source.clone()
        };
        let sources: Vec<Source> = self.sources.iter().map(settings).collect();
        let spec = DatasetSpec {
            sources: &sources,
            screen: None,
            ..self.clone()
        };
        format!("{spec:?}")
    }

    pub(super) fn rules<'b>(&self, encoder: &Encoder<'b>) -> RenderRules<'b> {
        RenderRules {
            render: self.render,
            template: encoder.template,
            codec: encoder.codec,
            answer: "",
        }
    }

    /// How the rows of file `index` (over all sources) are read, from its first row. Errors: as `rows`.
    pub(super) fn first_reading(
        &self,
        index: usize,
        purpose: RowPurpose,
        encoder: &Encoder,
    ) -> Result<Option<ReadingReport>> {
        source::first_reading(self.sources, index, purpose, &self.rules(encoder))
    }
}

/// The file and row of an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RowOrigin {
    /// Index in the list of files.
    pub file: u32,
    /// Line or row, from 1.
    pub number: u64,
    /// True if `number` counts lines, false if it counts rows.
    pub is_line: bool,
}

/// Counts of a dataset. Dropped rows are counted in `rows` and `dropped_rows` only.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DatasetStats {
    /// Rows read.
    pub rows: usize,
    /// Tokens kept.
    pub tokens: u64,
    /// Tokens that are targets.
    pub trained_tokens: u64,
    /// Truncated rows: longer than `max_length`.
    pub truncated_rows: usize,
    /// Tokens removed from these rows.
    pub truncated_tokens: u64,
    /// Split rows: longer than `max_length`.
    pub split_rows: usize,
    /// Pieces of these rows.
    pub pieces: usize,
    /// Pieces without a trained token, which are left out.
    pub untrained_pieces: usize,
    /// Rows left out because they are longer than `max_length`.
    pub long_rows: usize,
    /// Tokens of these rows.
    pub long_tokens: u64,
    /// Dropped rows: no token is trained, or longer than `max_length`.
    pub dropped_rows: usize,
    /// Dropped rows whose trained part was beyond `max_length`.
    pub dropped_by_truncation: usize,
    /// Dropped pairs whose conversations differ before the answer.
    pub forked_rows: usize,
    /// Trained assistant turns that do not end with a special token.
    pub open_turns: usize,
    /// Tokens of the longest row before truncation.
    pub longest_written: usize,
    /// Tokens of the longest and of the shortest example.
    pub longest: usize,
    /// Tokens of the shortest example.
    pub shortest: usize,
}

impl DatasetStats {
    pub(super) fn add(&mut self, row: &FittedRows) {
        self.rows += 1;
        self.longest_written = self.longest_written.max(row.written);
        if row.cut > 0 {
            self.truncated_rows += 1;
            self.truncated_tokens += row.cut as u64;
        }
        let trained = row.pieces.iter().filter(|p| p.trained.contains(&true)).count();
        if row.pieces.len() > 1 {
            self.split_rows += 1;
            self.pieces += row.pieces.len();
            self.untrained_pieces += row.pieces.len() - trained;
        }
        if trained > 0 {
            self.open_turns += row.open_turns;
            return;
        }
        self.dropped_rows += 1;
        if row.pieces.is_empty() {
            self.long_rows += 1;
            self.long_tokens += row.written as u64;
        } else {
            self.dropped_by_truncation += usize::from(row.trained > 0);
        }
    }

    /// Sets the counts of `measure` to zero.
    fn forget_tokens(&mut self) {
        (self.tokens, self.trained_tokens) = (0, 0);
        (self.longest, self.shortest) = (0, 0);
    }

    /// Counts an example.
    pub(super) fn measure(&mut self, length: usize, trained: u64) {
        self.shortest = if self.tokens == 0 {
            length
        } else {
            self.shortest.min(length)
        };
        self.longest = self.longest.max(length);
        self.tokens += length as u64;
        self.trained_tokens += trained;
    }

    /// Warnings to show once, before the run; empty if no row was changed.
    pub fn warnings(&self, max_length: usize) -> Vec<String> {
        let mut out = Vec::new();
        if self.truncated_rows > 0 {
            out.push(format!(
                "{} of {} rows are longer than max_length = {max_length} and are truncated by {} tokens in all \
                 (longest row: {} tokens)",
                count(self.truncated_rows as u64),
                count(self.rows as u64),
                count(self.truncated_tokens),
                count(self.longest_written as u64),
            ));
        }
        if self.split_rows > 0 {
            let left_out = match self.untrained_pieces {
                0 => String::new(),
                n => format!("; {} pieces have no token to train and are skipped", count(n as u64)),
            };
            out.push(format!(
                "{} of {} rows are longer than max_length = {max_length} and are split into {} pieces{left_out} \
                 (longest row: {} tokens)",
                count(self.split_rows as u64),
                count(self.rows as u64),
                count(self.pieces as u64),
                count(self.longest_written as u64),
            ));
        }
        if self.long_rows > 0 {
            out.push(format!(
                "{} of {} rows are longer than max_length = {max_length} and are left out, with {} tokens",
                count(self.long_rows as u64),
                count(self.rows as u64),
                count(self.long_tokens),
            ));
        }
        if self.forked_rows > 0 {
            out.push(format!(
                "{} of {} rows are skipped: the conversations of `chosen` and `rejected` differ before the answer",
                count(self.forked_rows as u64),
                count(self.rows as u64),
            ));
        }
        if self.dropped_rows > self.long_rows + self.forked_rows {
            out.push(format!(
                "{} of {} rows have no token to train and are skipped ({} because of max_length)",
                count((self.dropped_rows - self.long_rows - self.forked_rows) as u64),
                count(self.rows as u64),
                count(self.dropped_by_truncation as u64),
            ));
        }
        if self.open_turns > 0 {
            out.push(format!(
                "{} without a special token at the end: the model cannot learn from them where an answer ends",
                counted(self.open_turns, "assistant turn"),
            ));
        }
        out
    }
}

/// Tokenized rows in file order.
///
/// ```no_run
/// use ft_data::{Batch, ChatRender, Dataset, DatasetSpec, Source};
/// use ft_formats::{ChatTemplate, Tokenizer};
/// use std::path::Path;
///
/// # fn main() -> ft_base::Result<()> {
/// let dir = Path::new("model");
/// let tokenizer = Tokenizer::load(dir)?;
/// let template = ChatTemplate::from_dir(dir, &tokenizer)?;
/// let spec = DatasetSpec {
///     sources: &[Source::new(vec!["train.jsonl".to_string()])],
///     embedding_rows: tokenizer.vocab_size(),
///     ..DatasetSpec::default()
/// };
/// let rows = Dataset::load(&spec, &tokenizer, template.as_ref().map(|t| t as &dyn ChatRender))?;
/// let (train, eval) = rows.split(0.05, 0)?;
/// println!("{} rows, {} of them for evaluation", train.stats.rows, eval.stats.rows);
/// let batch = Batch::from_examples(train.examples.head(4)?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Dataset {
    /// The tokenized rows.
    pub examples: Examples,
    /// Origin of each example in memory; see `origin`.
    pub origins: Vec<RowOrigin>,
    /// Counts of rows and tokens.
    pub stats: DatasetStats,
    /// Description of how each file was read.
    pub readings: Vec<ReadingReport>,
    /// For preference rows: the documents of each example. Else empty.
    pub preferences: Vec<PreferenceDocuments>,
    /// The sources of the rows, in the order of their files.
    pub shares: Vec<SourceShare>,
    /// Consecutive rows belong together: no epoch shuffles them.
    pub grouped: bool,
    /// Hash of ids and masks: equal for equal rows, different after any change. If rows are read during training: hash of
    /// the content of their files (`content`).
    pub fingerprint: String,
    /// A fingerprint of earlier versions that means the same rows; empty: there is none. Streamed rows have none now:
    /// earlier versions read some rows by other rules, which their fingerprints do not contain.
    pub fingerprint_before: String,
}

impl Dataset {
    /// `rows` rows of `length` random ids below `vocab`, all trained: for benchmarks with model shapes.
    pub fn random(rows: usize, length: usize, vocab: usize, seed: u64) -> Self {
        let rng = Rng::new(seed, Stream::Init, &[length as u64]);
        let id = |at: usize| rng.below(at as u64, vocab as u64) as u32;
        let example = |row| Example {
            ids: (row * length..(row + 1) * length).map(id).collect(),
            trained: vec![true; length],
        };
        Self::from_examples((0..rows).map(example).collect())
    }

    /// Reads and tokenizes all rows. They stay in memory.
    ///
    /// # Errors
    /// A broken row (with its place), no rows, nothing to train, a signal that asks to stop.
    pub fn load(spec: &DatasetSpec, codec: &dyn TextCodec, template: Option<&dyn ChatRender>) -> Result<Self> {
        let mut rows = InMemoryRows::new(spec);
        let readings = read_into(spec, codec, template, 0, &mut rows)?;
        rows.dataset(spec, readings)
    }

    /// As `load`; a large dataset is tokenized once, to files in `cache`, and stays there.
    ///
    /// # Errors
    /// As for `load`; the cache cannot be written.
    pub fn load_cached(
        spec: &DatasetSpec,
        codec: &dyn TextCodec,
        template: Option<&dyn ChatRender>,
        cache: &TokenCache,
    ) -> Result<Self> {
        let request = TokenRequest {
            spec,
            codec,
            template,
            want: None,
        };
        match cache.load(&request)? {
            Some(rows) => Ok(rows),
            None => Self::load(spec, codec, template),
        }
    }

    /// The file and row of an example.
    ///
    /// # Errors
    /// The token file cannot be read.
    pub fn origin(&self, row: usize) -> Result<RowOrigin> {
        Ok(self.examples.origin(row)?.unwrap_or_else(|| self.origins[row]))
    }

    /// The file and row of each example.
    ///
    /// # Errors
    /// The token file cannot be read.
    pub fn all_origins(&self) -> Result<Cow<'_, [RowOrigin]>> {
        let in_file = self.examples.origins()?;
        Ok(in_file.map_or(Cow::Borrowed(&self.origins), Cow::Owned))
    }

    /// Number of tokens of each row.
    pub fn lengths(&self) -> Arc<[u32]> {
        self.examples.lengths()
    }

    /// A dataset of given examples.
    pub fn from_examples(examples: Vec<Example>) -> Self {
        let origin = |i| RowOrigin {
            file: 0,
            number: i as u64 + 1,
            is_line: false,
        };
        let mut out = Self {
            origins: (0..examples.len()).map(origin).collect(),
            stats: DatasetStats {
                rows: examples.len(),
                longest_written: examples.iter().map(|e| e.ids.len()).max().unwrap_or(0),
                ..DatasetStats::default()
            },
            examples: examples.into(),
            ..Self::default()
        };
        out.finish();
        out
    }

    /// Counts the tokens of rows in memory, and computes the fingerprint.
    pub(super) fn finish(&mut self) {
        let _phase = progress::phase("counting tokens", 0, "");
        self.stats.forget_tokens();
        let mut hasher = blake3::Hasher::new();
        let mut buffer = Vec::new();
        for e in self.examples.in_memory().unwrap_or_default() {
            let trained = e.trained.iter().filter(|&&t| t).count();
            self.stats.measure(e.ids.len(), trained as u64);
            hash_row(&mut hasher, e, &mut buffer);
        }
        self.preferences.iter().for_each(|p| p.hash(&mut hasher));
        self.fingerprint = hasher.finalize().to_hex().to_string();
    }

    /// Counts the tokens; those of a token file are not read.
    pub(super) fn measure_again(&mut self) -> Result<()> {
        self.stats.forget_tokens();
        for row in self.examples.measures()? {
            self.stats.measure(row.length as usize, row.trained.into());
        }
        Ok(())
    }

    /// Holds out `fraction` of the rows (at least one), chosen by the seed; both parts keep the file order. The
    /// examples of one row (two judged answers) stay together.
    ///
    /// # Errors
    /// The fraction is not between 0 and 1, or there are fewer than two rows.
    pub fn split(self, fraction: f64, seed: u64) -> Result<(Self, Self)> {
        let mut rows = self.all_origins()?.into_owned();
        rows.sort_unstable();
        rows.dedup();
        let is_eval = held_out(rows.len(), fraction, seed)?;
        self.split_by(&|origin| rows.binary_search(origin).is_ok_and(|row| is_eval[row]))
    }

    /// The rows at these places, in file order; places without a row are ignored.
    ///
    /// # Errors
    /// The token file cannot be read.
    pub fn at(self, places: &BTreeSet<RowOrigin>) -> Result<Self> {
        Ok(self.split_by(&|origin| places.contains(origin))?.1)
    }

    /// The rows that are not held out, and the others.
    fn split_by(mut self, of_eval: &dyn Fn(&RowOrigin) -> bool) -> Result<(Self, Self)> {
        let origins = self.all_origins()?.into_owned();
        let held_out: BTreeSet<&RowOrigin> = origins.iter().filter(|&origin| of_eval(origin)).collect();
        let held_out = held_out.len();
        let examples = std::mem::take(&mut self.examples);
        let [train, eval] = examples.split(&|row| of_eval(&origins[row]));
        let part = |eval: bool, examples: Examples| -> Result<Dataset> {
            let rows = (0..origins.len()).filter(|&row| of_eval(&origins[row]) == eval);
            let rows: Vec<usize> = rows.collect();
            let mut out = Dataset {
                readings: self.readings.clone(),
                shares: self.shares.clone(),
                preferences: match &self.preferences[..] {
                    [] => Vec::new(),
                    all => rows.iter().map(|&row| all[row]).collect(),
                },
                origins: match examples.file() {
                    Some(_) => Vec::new(),
                    None => rows.iter().map(|&row| origins[row]).collect(),
                },
                examples,
                ..Dataset::default()
            };
            // The counts of truncated and dropped rows stay with the training part.
            if eval {
                out.stats.rows = held_out;
                let longest = out.examples.lengths().iter().max().copied();
                out.stats.longest_written = longest.unwrap_or(0) as usize;
            } else {
                out.stats = DatasetStats {
                    rows: self.stats.rows - held_out,
                    ..self.stats.clone()
                };
            }
            out.measure_again()?;
            // The tokens are not read for it: the rows are those of the whole set with these numbers.
            let mut hasher = blake3::Hasher::new();
            hasher.update(self.fingerprint.as_bytes());
            rows.iter().for_each(|row| {
                hasher.update(&(*row as u64).to_le_bytes());
            });
            out.fingerprint = hasher.finalize().to_hex().to_string();
            Ok(out)
        };
        Ok((part(false, train)?, part(true, eval)?))
    }

    /// The first `limit` questions of this dataset's rows, in file order, read from the files again.
    /// Rows without a text answer have none.
    ///
    /// # Errors
    /// A file cannot be read again, or a row cannot be encoded.
    pub fn questions(
        &self,
        spec: &DatasetSpec,
        codec: &dyn TextCodec,
        template: Option<&dyn ChatRender>,
        limit: usize,
    ) -> Result<Vec<Question>> {
        let encoder = spec.encoder(codec, template);
        // The origins name the rows that were kept.
        let spec = DatasetSpec {
            screen: None,
            ..spec.clone()
        };
        let mut next = 0;
        let mut out = Vec::new();
        let mut full = false;
        let mut bad = BadRows::new();
        let result = spec.rows(RowPurpose::Learn, &encoder, &mut bad, &mut |row, layout, origin, _| {
            if out.len() >= limit || next >= self.examples.len() {
                // Ends the reading; the error is discarded below.
                full = true;
                return Err(Error::new("enough questions"));
            }
            let first = next;
            // The pieces of a split row have the same origin.
            while next < self.examples.len() && self.origin(next)? == origin {
                next += 1;
            }
            if next > first {
                let sample = rows::understand(&row, layout)?;
                // An answer that the row excludes is no reference.
                if !matches!(&sample, Sample::Chat(chat) if chat.ends_untrained()) {
                    let question = encoder.question(&sample);
                    out.extend(question.map_err(|e| e.within(&row.place))?);
                }
            }
            Ok(())
        });
        if full { Ok(out) } else { result.map(|_| out) }
    }
}

/// Selects the held-out rows among `n`, by the seed: at least one, and not all.
///
/// # Errors
/// The fraction is not between 0 and 1, or there are fewer than two rows.
pub fn held_out(n: usize, fraction: f64, seed: u64) -> Result<Vec<bool>> {
    if !(fraction > 0.0 && fraction < 1.0) {
        return Err(Error::usage("the fraction of held-out rows must be between 0 and 1")
            .at("Dataset::split")
            .found(fraction));
    }
    if n < 2 {
        return Err(Error::format("too few rows for held-out evaluation rows")
            .found(format!("{n} rows"))
            .expected("at least 2")
            .hint("load evaluation rows from a file, or leave out `Dataset::split`"));
    }
    let count = ((n as f64 * fraction).round() as usize).clamp(1, n - 1);
    let mut held = vec![false; n];
    for row in &Rng::new(seed, Stream::Split, &[]).permutation(n)[..count] {
        held[*row] = true;
    }
    Ok(held)
}
