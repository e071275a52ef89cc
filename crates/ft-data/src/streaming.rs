//! Rows that are read during training, for data that is too large to tokenize before it.
//!
//! The rows are read in order, in windows of a fixed number of rows. A window is tokenized, shuffled and packed, and
//! gives its units (rows, or bins) to the micro-batches. A window ends with its epoch. With shuffling, the files of an
//! epoch are in an order of their own. A position is (epoch, rows before the window, units of the window that are used):
//! a resumed run reads up to the window without tokenizing, and continues with the same batches.
//!
//! If sources have weights, each source is read by itself (`lane`), and starts again when it ends. A window has so many
//! rows of each source as its weight says; the sums of all windows are exact up to one row.
//!
//! Rows are screened before they are tokenized. A row is compared with all rows that the run read before it. The row
//! that was kept first is kept in each epoch. To resume, the rows before the position are read and compared again.

mod lane;
#[cfg(test)]
mod tests;

use super::batch::{Batch, Example};
use super::codec::{ChatRender, TextCodec};
use super::content;
use super::dataset::{Dataset, DatasetSpec, DatasetStats, RowOrigin};
use super::encode::FittedRows;
use super::faults::BadRows;
use super::load::{self, InMemoryRows};
use super::order::{RunLength, StreamSpec};
use super::pack::pack;
use super::read::{self, Row};
use super::screen::Screen;
use super::screen::waiting::WaitingRow;
use super::source::{self, RowFiles, Source};
use super::tokens::RULES;
use ft_base::rng::{Rng, Stream};
use ft_base::{Error, Result};
use lane::{Lane, lanes};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::path::Path;

/// Positions that are remembered: the window of the next step may have been requested before a checkpoint is written.
const POSITIONS: usize = 4;

/// Greatest number in a position. No run reads so many rows, and the shares of the windows below it are exact.
const MOST: u64 = 1 << 40;

/// Position of a stream: everything that a resumed run needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Position {
    epoch: u64,
    /// Rows of the epoch before the current window; with weights the windows before it.
    row: u64,
    /// Units of the window that are used.
    unit: usize,
    /// With weights: epoch and row of each source.
    #[serde(default, skip_serializing_if = "no_sources")]
    sources: Vec<(u64, u64)>,
}

fn no_sources(sources: &[(u64, u64)]) -> bool {
    sources.is_empty()
}

/// Micro-batches of rows that are read on demand; see the module documentation.
pub struct RowStream<'a> {
    files: RowFiles,
    spec: DatasetSpec<'static>,
    codec: &'a dyn TextCodec,
    template: Option<&'a dyn ChatRender>,
    order: StreamSpec,
    /// Rows of a window.
    window: usize,
    lanes: Vec<Lane>,
    screen: Option<Screen>,
    position: Position,
    /// The position after the current window.
    next: Position,
    /// Units of the window that are not used yet.
    units: VecDeque<Unit>,
    /// Origins of the examples of the window, in the order of the files.
    origins: Vec<RowOrigin>,
    /// Positions before the steps that were requested last.
    before: VecDeque<(u64, Position)>,
    /// The rows of the micro-batches of these steps.
    used: VecDeque<(u64, Vec<Vec<RowOrigin>>)>,
    counts: DatasetStats,
}

/// Examples and their rows.
type Unit = Vec<(Example, RowOrigin)>;

impl<'a> RowStream<'a> {
    /// The stream of these files, with `window` rows in a window. `order.length` must be a number of steps.
    ///
    /// # Errors
    /// A batch size, accumulation or window of zero; a run by epochs: the number of rows is unknown; a file of the
    /// screen cannot be read.
    pub fn new(
        spec: &DatasetSpec,
        codec: &'a dyn TextCodec,
        template: Option<&'a dyn ChatRender>,
        order: StreamSpec,
        window: usize,
    ) -> Result<Self> {
        if order.batch_size == 0 || order.accumulation == 0 || window == 0 {
            return Err(Error::usage(
                "`StreamSpec::batch_size`, `StreamSpec::accumulation` and the window must be at least 1",
            ));
        }
        // Its own: the rows of an evaluation, or of a sample, are not compared with these.
        let screen = spec
            .screen
            .map(|screen| Screen::new(screen.spec().clone()))
            .transpose()?;
        if !matches!(order.length, RunLength::Steps(_)) {
            return Err(
                Error::usage("the number of rows of a stream is not known before the run")
                    .expected("`RunLength::Steps`"),
            );
        }
        let lanes = lanes(spec.sources);
        let start = start(&lanes);
        Ok(Self {
            files: RowFiles::new(spec.sources),
            spec: DatasetSpec {
                sources: &[],
                screen: None,
                ..spec.clone()
            },
            codec,
            template,
            order,
            window,
            lanes,
            screen: screen.flatten().map(Screen::rereading),
            position: start.clone(),
            next: start,
            units: VecDeque::new(),
            origins: Vec::new(),
            before: VecDeque::new(),
            used: VecDeque::new(),
            counts: DatasetStats::default(),
        })
    }

    /// The micro-batches of step `step`, from 0. Steps must be requested in order.
    ///
    /// # Errors
    /// A file that cannot be read, a broken row (with its place), an epoch without a row to train on.
    pub fn step(&mut self, step: u64) -> Result<Vec<Batch>> {
        self.before.push_back((step, self.position.clone()));
        if self.before.len() > POSITIONS {
            self.before.pop_front();
        }
        let mut out = Vec::with_capacity(self.order.accumulation);
        let mut used = Vec::with_capacity(self.order.accumulation);
        for _ in 0..self.order.accumulation {
            let mut rows = Vec::new();
            for _ in 0..self.order.batch_size {
                rows.extend(self.unit()?);
            }
            out.push(Batch::from_examples(rows.iter().map(|(example, _)| example)));
            used.push(rows.iter().map(|(_, origin)| *origin).collect());
        }
        self.used.push_back((step, used));
        if self.used.len() > POSITIONS {
            self.used.pop_front();
        }
        Ok(out)
    }

    /// The rows of the micro-batches of step `step`, from 0, if it is one of those that were requested last.
    pub fn used(&self, step: u64) -> Option<&[Vec<RowOrigin>]> {
        let used = self.used.iter().rev().find(|(of, _)| *of == step);
        used.map(|(_, rows)| rows.as_slice())
    }

    /// Complete passes over the files; with weights over those of the source that has the fewest.
    pub fn epoch(&self) -> u64 {
        let of_sources = self.position.sources.iter().map(|(epoch, _)| *epoch);
        of_sources.min().unwrap_or(self.position.epoch)
    }

    /// The position before step `step`, from 0, for `restore`.
    ///
    /// # Errors
    /// The step is not one of those that were requested last, or the next one.
    pub fn state(&self, step: u64) -> Result<Vec<u8>> {
        let known = self
            .before
            .iter()
            .find(|(s, _)| *s == step)
            .map(|(_, position)| position);
        let is_next = self.before.back().is_none_or(|(s, _)| s + 1 == step);
        let position = known.or(is_next.then_some(&self.position));
        let position = position.ok_or_else(|| Error::internal("the position of a step is not known").found(step))?;
        serde_json::to_vec(&position)
            .map_err(|e| Error::internal("the position in the rows cannot be written as JSON").cause(e))
    }

    /// Continues at a position of `state`.
    ///
    /// # Errors
    /// Other bytes; a file that cannot be read.
    pub fn restore(&mut self, state: &[u8]) -> Result<()> {
        let position: Position = serde_json::from_slice(state)
            .map_err(|e| Error::format("the checkpoint has no valid data position").cause(e))?;
        let places = position.sources.iter().copied().chain([(position.epoch, position.row)]);
        let largest = places.map(|(epoch, row)| epoch.max(row)).max();
        if let Some(number) = largest.filter(|number| *number > MOST) {
            return Err(Error::format("the checkpoint has no valid data position")
                .found(number)
                .expected(format!("at most {MOST}")));
        }
        if position.sources.len() != start(&self.lanes).sources.len() {
            return Err(
                Error::format("the checkpoint was written with a different number of weighted sources")
                    .found(position.sources.len())
                    .expected(start(&self.lanes).sources.len())
                    .hint("set `weight` in the sources as in the run that wrote it"),
            );
        }
        self.before.clear();
        self.used.clear();
        self.units.clear();
        let window = Position {
            unit: 0,
            ..position.clone()
        };
        if self.screen.as_ref().is_some_and(Screen::compares) {
            self.go_to(start(&self.lanes));
            while self.next != window {
                let (next, end) = (&self.next, &window);
                if (next.epoch, next.row) > (end.epoch, end.row) {
                    return Err(changed("another end of a window", "the position of the checkpoint"));
                }
                self.position = next.clone();
                self.read_window()?;
                // A window that begins with the next epoch was read: comparing it again gives the same.
                if self.position == window {
                    self.go_to(window.clone());
                }
            }
            self.position = window;
        } else {
            self.go_to(window);
        }
        if position.unit > 0 {
            self.fill()?;
            // They were reported before the checkpoint.
            self.counts = DatasetStats::default();
            if self.units.len() < position.unit {
                return Err(changed(
                    &format!("{} units in a window", self.units.len()),
                    &format!("more than {}", position.unit),
                ));
            }
            self.units.drain(..position.unit);
            self.position = position;
        }
        Ok(())
    }

    fn go_to(&mut self, position: Position) {
        match &position.sources[..] {
            [] => self
                .lanes
                .iter_mut()
                .for_each(|lane| lane.go_to(position.epoch, position.row)),
            sources => {
                let lanes = self.lanes.iter_mut().zip(sources);
                lanes.for_each(|(lane, (epoch, row))| lane.go_to(*epoch, *row));
            }
        }
        self.next = position.clone();
        self.position = position;
    }

    /// Counts of the rows that were read since the last call.
    pub fn take_counts(&mut self) -> DatasetStats {
        std::mem::take(&mut self.counts)
    }

    fn unit(&mut self) -> Result<Unit> {
        loop {
            if let Some(unit) = self.units.pop_front() {
                self.position.unit += 1;
                return Ok(unit);
            }
            self.position = self.next.clone();
            self.fill()?;
        }
    }

    /// Reads the window at `position`, or the first one of the next epoch. It may have no rows.
    fn read_window(&mut self) -> Result<Vec<(Row, WaitingRow)>> {
        if let Some(screen) = &self.screen {
            screen.forget_dropped();
        }
        if self.lanes.len() > 1 {
            return self.read_weighted();
        }
        let mut rows = Vec::new();
        // With the rows that are not used: a position counts them too.
        let mut read = 0;
        while read < self.window {
            match self.lanes[0].next(self.order)? {
                Some((file, row)) => {
                    read += 1;
                    rows.extend(self.laid_out(file, row)?);
                }
                None if read > 0 => break,
                None => self.position = self.whole_position(),
            }
        }
        self.next = self.whole_position();
        self.screened(rows)
    }

    /// The position of the only lane.
    fn whole_position(&self) -> Position {
        Position {
            epoch: self.lanes[0].epoch,
            row: self.lanes[0].row,
            ..Position::default()
        }
    }

    /// A window of all sources, evenly mixed.
    fn read_weighted(&mut self) -> Result<Vec<(Row, WaitingRow)>> {
        let total: f64 = self.lanes.iter().map(|lane| lane.weight).sum();
        let before =
            |windows: u64, weight: f64| (windows as f64 * self.window as f64 * weight / total).round() as usize;
        let count = |lane: &Lane| before(self.position.row + 1, lane.weight) - before(self.position.row, lane.weight);
        let counts: Vec<usize> = self.lanes.iter().map(count).collect();
        let mut placed: Vec<(f64, (Row, WaitingRow))> = Vec::with_capacity(self.window);
        for (at, count) in counts.into_iter().enumerate() {
            // Rows that are not used are replaced by others.
            let (mut kept, mut ends) = (Vec::with_capacity(count), 0);
            while kept.len() < count {
                let mut rows = Vec::new();
                while rows.len() < count - kept.len() && ends < 2 {
                    match self.lanes[at].next(self.order)? {
                        Some((file, row)) => rows.extend(self.laid_out(file, row)?),
                        None => ends += 1,
                    }
                }
                kept.extend(self.screened(rows)?);
                if kept.is_empty() && ends == 2 {
                    return Err(Error::format("no row of a source is left to train").at(self.lanes[at].name()));
                }
                ends = if kept.is_empty() { ends } else { 0 };
            }
            let place = |i: usize| (i as f64 + 0.5) / count as f64;
            placed.extend(kept.into_iter().enumerate().map(|(i, row)| (place(i), row)));
        }
        // Stable: equal places keep the order of the sources.
        placed.sort_by(|a, b| a.0.total_cmp(&b.0));
        self.next = Position {
            row: self.position.row + 1,
            sources: self.lanes.iter().map(|lane| (lane.epoch, lane.row)).collect(),
            ..Position::default()
        };
        Ok(placed.into_iter().map(|(_, row)| row).collect())
    }

    /// A row with its layout. `None`: it is not used.
    fn laid_out(&mut self, file: usize, row: Row) -> Result<Option<(Row, WaitingRow)>> {
        let encoder = self.spec.encoder(self.codec, self.template);
        let found = self.files.row(file, row, &self.spec.rules(&encoder))?;
        Ok(found.map(|(row, layout)| {
            let origin = RowOrigin {
                file: file as u32,
                number: row.place.number,
                is_line: row.place.is_line,
            };
            (row, WaitingRow(layout, origin))
        }))
    }

    /// The rows that the screen keeps.
    fn screened(&self, rows: Vec<(Row, WaitingRow)>) -> Result<Vec<(Row, WaitingRow)>> {
        let Some(screen) = &self.screen else { return Ok(rows) };
        let mut out = Vec::with_capacity(rows.len());
        for (keep, row) in screen.keep(&rows).into_iter().zip(rows) {
            out.extend(keep?.then_some(row));
        }
        Ok(out)
    }

    /// Tokenizes the window at `position`. It may have no units.
    fn fill(&mut self) -> Result<()> {
        let window = self.read_window()?;
        let chunk: Vec<_> = window
            .into_iter()
            .map(|(row, WaitingRow(layout, origin))| (row, layout, origin))
            .collect();
        let spec = self.spec.clone();
        let encoder = spec.encoder(self.codec, self.template);
        let mut bad = BadRows::new();
        let rows: Vec<FittedRows> = load::encode(&spec, &encoder, &chunk, &mut bad)?;
        let mut found = InMemoryRows::new(&spec);
        for (row, (_, _, origin)) in rows.into_iter().zip(chunk) {
            load::push(&mut found, row, origin);
        }
        self.origins = std::mem::take(&mut found.origins);
        add_rows(&mut self.counts, &found.stats);
        let (epoch, row) = (self.position.epoch, self.position.row);
        let n = found.examples.len();
        let order: Vec<u32> = if self.order.shuffle {
            let rng = Rng::new(self.order.seed, Stream::Shuffle, &[epoch, row]);
            rng.permutation(n).into_iter().map(|i| i as u32).collect()
        } else {
            (0..n as u32).collect()
        };
        let of = |i: usize| (found.examples[i].clone(), self.origins[i]);
        let unit = |rows: &[u32]| rows.iter().map(|&i| of(i as usize)).collect();
        self.units = if self.order.packing {
            let lengths: Vec<u32> = found.examples.iter().map(|e| e.ids.len() as u32).collect();
            pack(&order, &lengths, self.order.max_length).iter().map(unit).collect()
        } else {
            order.iter().map(|i| unit(std::slice::from_ref(i))).collect()
        };
        Ok(())
    }
}

/// The position before the first row.
fn start(lanes: &[Lane]) -> Position {
    let is_weighted = lanes.len() > 1;
    Position {
        sources: lanes.iter().filter(|_| is_weighted).map(|_| (0, 0)).collect(),
        ..Position::default()
    }
}

fn changed(found: &str, expected: &str) -> Error {
    Error::format("the data files have changed since the checkpoint was written")
        .found(found)
        .expected(expected)
}

/// Adds the counts of the rows of a window; those of its examples stay.
fn add_rows(to: &mut DatasetStats, of: &DatasetStats) {
    to.rows += of.rows;
    to.truncated_rows += of.truncated_rows;
    to.truncated_tokens += of.truncated_tokens;
    to.split_rows += of.split_rows;
    to.pieces += of.pieces;
    to.untrained_pieces += of.untrained_pieces;
    to.long_rows += of.long_rows;
    to.long_tokens += of.long_tokens;
    to.dropped_rows += of.dropped_rows;
    to.dropped_by_truncation += of.dropped_by_truncation;
    to.open_turns += of.open_turns;
    to.longest_written = to.longest_written.max(of.longest_written);
}

fn names(sources: &[Source]) -> String {
    let names: Vec<&str> = sources.iter().map(|source| source.name.as_str()).collect();
    names.join(", ")
}

/// The fingerprint of a stream from the content of its files, and from the rules by which rows are read and tokenized:
/// the rows themselves are not known yet.
fn fingerprint(
    spec: &DatasetSpec,
    codec: &dyn TextCodec,
    template: Option<&dyn ChatRender>,
    rules: &str,
) -> Result<String> {
    let mut contents = blake3::Hasher::new();
    content::put(&mut contents, "ft row stream 1");
    content::put(&mut contents, rules);
    content::put(&mut contents, &spec.settings());
    content::put(&mut contents, &codec.identity().unwrap_or_default());
    content::put(&mut contents, &template.and_then(|t| t.identity()).unwrap_or_default());
    let paths: Vec<&str> = spec.files().collect();
    for (path, hash) in paths.iter().zip(content::hashes(&paths)?) {
        content::put(&mut contents, &format!("{} {hash}", read::reader_of(Path::new(path))));
    }
    // Which rows are dropped depends on these files too.
    let evaluation = spec.screen.map_or(&[][..], |screen| &screen.spec().evaluation);
    for hash in content::hashes(evaluation)? {
        content::put(&mut contents, &hash);
    }
    Ok(content::named(&contents))
}

impl Dataset {
    /// The first rows of the files, and the layout of each file: what is known of a stream before the run. The
    /// fingerprint identifies the files by their content (`content::hashes`): it is that of other names, but not of
    /// another kind of file.
    ///
    /// # Errors
    /// As `load`, for these rows; a file whose first row has no layout.
    pub fn sample(
        spec: &DatasetSpec,
        codec: &dyn TextCodec,
        template: Option<&dyn ChatRender>,
        rows: usize,
    ) -> Result<Self> {
        let fingerprint = fingerprint(spec, codec, template, RULES)?;
        let first = StreamSpec {
            batch_size: 1,
            accumulation: 1,
            packing: false,
            max_length: spec.max_length,
            shuffle: false,
            seed: 0,
            length: RunLength::Steps(1),
        };
        let mut stream = RowStream::new(spec, codec, template, first, rows)?;
        stream.fill()?;
        // As the run does it: a window whose rows are all left out is followed by the next one.
        while stream.units.is_empty() && stream.lanes.iter().any(|lane| lane.epoch == 0) {
            stream.position = stream.next.clone();
            stream.fill()?;
        }
        let readings = stream.files.readings(&spec.rules(&spec.encoder(codec, template)))?;
        if let (Some(screen), Some(own)) = (spec.screen, &stream.screen) {
            screen.restore(own.report());
        }
        template.iter().for_each(|t| t.rest());
        let units = stream.units.drain(..).flatten();
        let examples: Vec<Example> = units.map(|(example, _)| example).collect();
        if examples.is_empty() {
            return Err(Error::format("nothing in the first rows of the data would be trained")
                .at(names(spec.sources))
                .found(format!("{} rows without a token to train", stream.counts.rows))
                .hint(
                    "look at the encoded rows; check `data::DatasetSpec::train_on` and the assistant messages or \
                     completions",
                ));
        }
        let counts = stream.take_counts();
        let mut out = Dataset::from_examples(examples);
        out.origins = stream.origins;
        out.stats = DatasetStats {
            tokens: out.stats.tokens,
            trained_tokens: out.stats.trained_tokens,
            longest: out.stats.longest,
            shortest: out.stats.shortest,
            ..counts
        };
        out.readings = readings;
        out.shares = source::shares(spec.sources);
        out.fingerprint = fingerprint;
        Ok(out)
    }
}
