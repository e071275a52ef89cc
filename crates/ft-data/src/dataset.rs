//! Reads files to tokenized rows, and counts all rows that were truncated or dropped.

use super::batch::Example;
use super::codec::{ChatRender, TextCodec};
use super::encode::{Encoded, Encoder, Question};
use super::faults::{BadRows, Tried};
use super::layout::{Layout, Purpose, Rules};
use super::preference::Preference;
use super::prepare;
use super::read::{self, Row};
use super::reading::Reading;
use super::rows::{self, Sample};
use super::screen::Screen;
use super::screen::waiting::{Placed, screened};
use crate::{Render, RowFormat, TrainOn};
use ft_base::rng::{Rng, Stream};
use ft_base::units::count;
use ft_base::{Error, Result, progress, signal};
use rayon::prelude::*;
use std::sync::Arc;

/// Receives a row with its layout and origin; bad rows are counted.
pub(super) type EachRow<'a> = dyn FnMut(Row, &Arc<Layout>, Origin, &mut BadRows) -> Result<()> + 'a;

/// Rows that are read before they are tokenized in parallel.
pub(super) const CHUNK_ROWS: usize = 512;
/// Text bytes of such a chunk; chunks of long rows have fewer rows.
const CHUNK_BYTES: usize = 32 << 20;

/// Files to read, and the options.
#[derive(Debug, Clone)]
pub struct Spec<'a> {
    /// Paths of the files, in order.
    pub files: &'a [String],
    /// Format of the rows; `Auto`: decided per file from its columns.
    pub format: RowFormat,
    /// How conversations become text.
    pub render: Render,
    /// Longest row in tokens.
    pub max_length: usize,
    /// The parts of a conversation that are trained.
    pub train_on: TrainOn,
    /// Rows of the model's embedding.
    pub embedding_rows: usize,
    /// Drops rows before they are tokenized.
    pub screen: Option<&'a Screen>,
}

impl<'a> Spec<'a> {
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

    /// Passes each row to `each` with its file's layout and its origin; broken rows go to `bad`.
    ///
    /// Errors: a file that cannot be read, or whose first row gives no layout.
    pub(super) fn rows(
        &self,
        purpose: Purpose,
        encoder: &Encoder,
        bad: &mut BadRows,
        each: &mut EachRow<'_>,
    ) -> Result<Vec<Reading>> {
        let rules = Rules {
            render: self.render,
            template: encoder.template,
            codec: encoder.codec,
            answer: "",
        };
        let mut readings = Vec::new();
        // Rows that wait for the screen, which handles many at a time.
        let (mut waiting, mut bytes): (Vec<(Row, Placed)>, usize) = (Vec::new(), 0);
        for (file, path) in self.files.iter().enumerate() {
            let mut found: Option<(Reading, Arc<Layout>)> = None;
            read::read_rows(path, &mut |row| {
                let row = match row {
                    Ok(row) => row,
                    Err(e) => return bad.add(e),
                };
                if found.is_none() {
                    let layout = Layout::find(&row, self.format, purpose, &rules)?;
                    let judged = self.screen.map_or(&[][..], Screen::columns);
                    found = Some((
                        Reading::new(path, layout.clone(), &row).judged_by(judged),
                        Arc::new(layout),
                    ));
                }
                let Some((reading, layout)) = &mut found else {
                    return Ok(());
                };
                reading.see(&row);
                let origin = Origin {
                    file: file as u32,
                    number: row.place.number,
                    is_line: row.place.is_line,
                };
                let Some(screen) = self.screen else {
                    return each(row, layout, origin, bad);
                };
                bytes += text_bytes(&row);
                waiting.push((row, Placed(layout.clone(), origin)));
                if waiting.len() >= CHUNK_ROWS || bytes >= CHUNK_BYTES {
                    bytes = 0;
                    screened(screen, &mut waiting, bad, each)?;
                }
                Ok(())
            })?;
            readings.extend(found.map(|(reading, _)| reading));
        }
        if let Some(screen) = self.screen {
            screened(screen, &mut waiting, bad, each)?;
        }
        Ok(readings)
    }
}

/// Approximate bytes of the texts of a row.
fn text_bytes(row: &Row) -> usize {
    let size = |v: &serde_json::Value| v.as_str().map_or(1024, str::len);
    row.fields.values().map(size).sum()
}

/// The file and row of an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin {
    /// Index in the list of files.
    pub file: u32,
    /// Line or row, from 1.
    pub number: u64,
    /// True if `number` counts lines, false if it counts rows.
    pub is_line: bool,
}

/// Counts of a data set. Dropped rows are counted in `rows` and `dropped_rows` only.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
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
    /// Dropped rows: no token is trained.
    pub dropped_rows: usize,
    /// Dropped rows whose trained part was beyond `max_length`.
    pub dropped_by_truncation: usize,
    /// Trained assistant turns that do not end with a special token.
    pub open_turns: usize,
    /// Tokens of the longest row before truncation.
    pub longest_written: usize,
    /// Tokens of the longest and of the shortest example.
    pub longest: usize,
    /// Tokens of the shortest example.
    pub shortest: usize,
}

impl Stats {
    fn add(&mut self, row: &Encoded) {
        self.rows += 1;
        self.longest_written = self.longest_written.max(row.example.ids.len() + row.cut);
        if row.cut > 0 {
            self.truncated_rows += 1;
            self.truncated_tokens += row.cut as u64;
        }
        if row.example.trained.contains(&true) {
            self.open_turns += row.open_turns;
        } else {
            self.dropped_rows += 1;
            self.dropped_by_truncation += usize::from(row.trained_before_cut > 0);
        }
    }

    /// Computes the counts that depend on the examples only.
    fn measure(&mut self, examples: &[Example]) {
        let lengths = || examples.iter().map(|e| e.ids.len());
        self.tokens = lengths().sum::<usize>() as u64;
        self.longest = lengths().max().unwrap_or(0);
        self.shortest = lengths().min().unwrap_or(0);
        self.trained_tokens = examples.iter().flat_map(|e| &e.trained).filter(|&&t| t).count() as u64;
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
        if self.dropped_rows > 0 {
            out.push(format!(
                "{} of {} rows have no token to train and are skipped ({} because of max_length)",
                count(self.dropped_rows as u64),
                count(self.rows as u64),
                count(self.dropped_by_truncation as u64),
            ));
        }
        if self.open_turns > 0 {
            out.push(format!(
                "{} assistant turns do not end with a special token: the model cannot learn from them where an answer \
                 ends",
                count(self.open_turns as u64),
            ));
        }
        out
    }
}

/// Tokenized rows in file order.
///
/// ```no_run
/// use ft_data::{Batch, ChatRender, Dataset, Render, RowFormat, Spec, TrainOn};
/// use ft_formats::{ChatTemplate, Tokenizer};
/// use std::path::Path;
///
/// # fn main() -> ft_base::Result<()> {
/// let dir = Path::new("model");
/// let tokenizer = Tokenizer::load(dir)?;
/// let template = ChatTemplate::from_dir(dir, &tokenizer)?;
/// let spec = Spec {
///     files: &["train.jsonl".to_string()],
///     format: RowFormat::Auto,
///     render: Render::Auto,
///     max_length: 2048,
///     train_on: TrainOn::Assistant,
///     embedding_rows: tokenizer.vocab_size(),
///     screen: None,
/// };
/// let rows = Dataset::load(&spec, &tokenizer, template.as_ref().map(|t| t as &dyn ChatRender))?;
/// let (train, eval) = rows.split(0.05, 0)?;
/// println!("{} rows, {} of them for evaluation", train.stats.rows, eval.stats.rows);
/// let batch = Batch::from_examples(&train.examples[..4]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Dataset {
    /// The tokenized rows.
    pub examples: Vec<Example>,
    /// Origin of each example.
    pub origins: Vec<Origin>,
    /// Counts of rows and tokens.
    pub stats: Stats,
    /// Description of how each file was read.
    pub readings: Vec<Reading>,
    /// For preference rows: the documents of each example. Else empty.
    pub preferences: Vec<Preference>,
    /// Consecutive rows belong together: no epoch shuffles them.
    pub grouped: bool,
    /// Hash of ids and masks: equal for equal rows, different after any change.
    pub fingerprint: String,
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

    /// Reads and tokenizes all rows.
    ///
    /// # Errors
    /// A broken row (with its place), no rows, nothing to train, a signal that asks to stop.
    pub fn load(spec: &Spec, codec: &dyn TextCodec, template: Option<&dyn ChatRender>) -> Result<Self> {
        if spec.max_length < 2 {
            return Err(Error::usage("rows of fewer than 2 tokens cannot be trained")
                .found(format!("max_length = {}", spec.max_length)));
        }
        let mut loader = Loader {
            encoder: spec.encoder(codec, template),
            chunk: Vec::new(),
            bytes: 0,
            out: Dataset::default(),
        };
        let mut bad = BadRows::new();
        let encoder = spec.encoder(codec, template);
        let readings = spec.rows(Purpose::Learn, &encoder, &mut bad, &mut |row, layout, origin, bad| {
            loader.push(row, layout, origin, bad)
        })?;
        loader.flush(&mut bad)?;
        bad.end()?;
        template.iter().for_each(|t| t.rest());
        let mut out = loader.out;
        out.readings = readings;
        out.finish();
        if out.examples.is_empty() {
            Err(nothing_to_train(spec, &out.stats))
        } else {
            Ok(out)
        }
    }

    /// Number of tokens of each row.
    pub fn lengths(&self) -> Vec<usize> {
        self.examples.iter().map(|e| e.ids.len()).collect()
    }

    /// A data set of given examples.
    pub fn from_examples(examples: Vec<Example>) -> Self {
        let origin = |i| Origin {
            file: 0,
            number: i as u64 + 1,
            is_line: false,
        };
        let mut out = Self {
            origins: (0..examples.len()).map(origin).collect(),
            stats: Stats {
                rows: examples.len(),
                longest_written: examples.iter().map(|e| e.ids.len()).max().unwrap_or(0),
                ..Stats::default()
            },
            examples,
            ..Self::default()
        };
        out.finish();
        out
    }

    pub(super) fn finish(&mut self) {
        let _phase = progress::phase("counting tokens", 0, "");
        self.stats.measure(&self.examples);
        let mut hasher = blake3::Hasher::new();
        for e in &self.examples {
            hasher.update(&(e.ids.len() as u64).to_le_bytes());
            e.ids.iter().for_each(|id| {
                hasher.update(&id.to_le_bytes());
            });
            let mask: Vec<u8> = e.trained.iter().map(|&t| t.into()).collect();
            hasher.update(&mask);
        }
        self.preferences.iter().for_each(|p| p.hash(&mut hasher));
        self.fingerprint = hasher.finalize().to_hex().to_string();
    }

    /// Holds out `fraction` of the rows (at least one), chosen by the seed; both parts keep the file order. The
    /// examples of one row (two judged answers) stay together.
    ///
    /// # Errors
    /// The fraction is not between 0 and 1, or there are fewer than two rows.
    pub fn split(mut self, fraction: f64, seed: u64) -> Result<(Self, Self)> {
        let mut rows = self.origins.clone();
        rows.sort_unstable();
        rows.dedup();
        let is_eval = held_out(rows.len(), fraction, seed)?;
        let held_out = is_eval.iter().filter(|held| **held).count();
        let mut eval = Dataset {
            readings: self.readings.clone(),
            ..Dataset::default()
        };
        let mut train = Dataset {
            stats: self.stats.clone(),
            readings: std::mem::take(&mut self.readings),
            ..Dataset::default()
        };
        let mut preferences = self.preferences.drain(..);
        for (example, origin) in self.examples.drain(..).zip(self.origins.drain(..)) {
            let is_eval = rows.binary_search(&origin).is_ok_and(|row| is_eval[row]);
            let part = if is_eval { &mut eval } else { &mut train };
            part.examples.push(example);
            part.origins.push(origin);
            part.preferences.extend(preferences.next());
        }
        // The counts of truncated and dropped rows stay with the training part.
        train.stats.rows -= held_out;
        eval.stats.rows = held_out;
        eval.stats.longest_written = eval.examples.iter().map(|e| e.ids.len()).max().unwrap_or(0);
        train.finish();
        eval.finish();
        Ok((train, eval))
    }

    /// The first `limit` questions of this data set's rows, in file order, read from the files again.
    /// Rows without a text answer have none.
    ///
    /// # Errors
    /// A file cannot be read again, or a row cannot be encoded.
    pub fn questions(
        &self,
        spec: &Spec,
        codec: &dyn TextCodec,
        template: Option<&dyn ChatRender>,
        limit: usize,
    ) -> Result<Vec<Question>> {
        let encoder = spec.encoder(codec, template);
        // The origins name the rows that were kept.
        let spec = Spec {
            screen: None,
            ..spec.clone()
        };
        let mut origins = self.origins.iter().peekable();
        let mut out = Vec::new();
        let mut full = false;
        let mut bad = BadRows::new();
        let result = spec.rows(Purpose::Learn, &encoder, &mut bad, &mut |row, layout, origin, _| {
            if out.len() >= limit || origins.peek().is_none() {
                // Ends the reading; the error is discarded below.
                full = true;
                return Err(Error::new("enough questions"));
            }
            if origins.next_if(|&&o| o == origin).is_some() {
                let question = encoder.question(&rows::understand(&row, layout)?);
                out.extend(question.map_err(|e| e.within(&row.place))?);
            }
            Ok(())
        });
        if full { Ok(out) } else { result.map(|_| out) }
    }
}

pub(super) fn nothing_to_train(spec: &Spec, stats: &Stats) -> Error {
    let files = spec.files.join(", ");
    let screened = spec.screen.map(Screen::report).unwrap_or_default();
    if stats.rows == 0 && !screened.dropped.is_empty() {
        return Error::format("no row is left to train")
            .at(files)
            .found(screened.lines().join("; "));
    }
    if stats.rows == 0 {
        return Error::format("the data has no rows").at(files).found("0 rows");
    }
    let hint = if stats.dropped_by_truncation > 0 {
        format!(
            "raise `data::Spec::max_length`; the longest row has {} tokens",
            stats.longest_written
        )
    } else {
        "look at the encoded rows; check `data::Spec::train_on` and the assistant messages or completions".to_string()
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

/// Collects rows in chunks and tokenizes a chunk on all cores; keeps the order of the file.
struct Loader<'a> {
    encoder: Encoder<'a>,
    chunk: Vec<(Row, Arc<Layout>, Origin)>,
    bytes: usize,
    out: Dataset,
}

impl Loader<'_> {
    fn push(&mut self, row: Row, layout: &Arc<Layout>, origin: Origin, bad: &mut BadRows) -> Result<()> {
        self.bytes += text_bytes(&row);
        self.chunk.push((row, layout.clone(), origin));
        if self.chunk.len() >= CHUNK_ROWS || self.bytes >= CHUNK_BYTES {
            self.flush(bad)?;
        }
        Ok(())
    }

    fn flush(&mut self, bad: &mut BadRows) -> Result<()> {
        let encoder = &self.encoder;
        let tried = Tried::new(bad);
        let encoded: Vec<Option<Result<Encoded>>> = self
            .chunk
            .par_chunks(prepare::ROWS)
            .flat_map_iter(|group| encode_group(encoder, group, &tried))
            .collect();
        for (row, (_, _, origin)) in encoded.into_iter().zip(self.chunk.drain(..)) {
            let Some(row) = kept(row, bad)? else { continue };
            self.out.stats.add(&row);
            if row.example.trained.contains(&true) {
                self.out.examples.push(row.example);
                self.out.origins.push(origin);
            }
        }
        self.bytes = 0;
        unless_stopped()
    }
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
    encoder: &Encoder,
    group: &[(Row, Arc<Layout>, Origin)],
    tried: &Tried,
) -> Vec<Option<Result<Encoded>>> {
    if !tried.go_on() {
        return group.iter().map(|_| None).collect();
    }
    let samples: Vec<Result<Sample>> = group
        .iter()
        .map(|(row, layout, _)| rows::understand(row, layout))
        .collect();
    let prepared = encoder.template.map(|t| prepare::prepare(encoder, t, &samples));
    let one = |(i, (row, layout, _)): (usize, &(Row, Arc<Layout>, Origin))| {
        if !tried.go_on() {
            return None;
        }
        let encoder = Encoder {
            template: prepared.as_ref().and_then(|p| p.get(i)).map(|p| p as &dyn ChatRender),
            ..*encoder
        };
        let encoded = match &samples[i] {
            Ok(sample) => encoder.encode(sample).map_err(|e| e.within(&row.place)),
            // Errors are not cloneable: compute it again.
            Err(_) => rows::understand(row, layout).and_then(|sample| encoder.encode(&sample)),
        };
        tried.note(&encoded);
        Some(encoded)
    };
    group.iter().enumerate().map(one).collect()
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

/// Errors: a signal asks to stop.
pub(super) fn unless_stopped() -> Result<()> {
    let stopped = |s| Error::signal(s, "stopped during the reading of the data; nothing was trained yet");
    signal::received().map_or(Ok(()), |s| Err(stopped(s)))
}
