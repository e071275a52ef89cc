//! Rows that are read during training, for data that is too large to tokenize before it.
//!
//! The rows are read in order, in windows of a fixed number of rows. A window is tokenized, shuffled and packed, and
//! gives its units (rows, or bins) to the micro-batches. A window ends with its epoch. With shuffling, the files of an
//! epoch are in an order of their own. A position is (epoch, rows before the window, units of the window that are used):
//! a resumed run reads up to the window without tokenizing, and continues with the same batches.

use super::batch::{Batch, Example};
use super::codec::{ChatRender, TextCodec};
use super::dataset::{Dataset, Origin, Spec, Stats};
use super::encode::Fitted;
use super::faults::BadRows;
use super::layout::Purpose;
use super::load::{self, InMemory};
use super::order::{Length, StreamSpec};
use super::pack::pack;
use super::read::Row;
use super::source::{self, Files, Source};
use ft_base::rng::{Rng, Stream};
use ft_base::{Error, Result, files, progress};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};

/// Rows that are read ahead of the window.
const AHEAD: usize = 512;
/// Positions that are remembered: the window of the next step may have been requested before a checkpoint is written.
const POSITIONS: usize = 4;
/// Tells the orders of files and of windows apart from those of rows.
const FILES: u64 = u64::MAX;

/// Position of a stream: everything that a resumed run needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Position {
    epoch: u64,
    /// Rows of the epoch before the current window.
    row: u64,
    /// Units of the window that are used.
    unit: usize,
}

/// Micro-batches of rows that are read on demand; see the module documentation.
pub struct RowStream<'a> {
    files: Files,
    spec: Spec<'static>,
    codec: &'a dyn TextCodec,
    template: Option<&'a dyn ChatRender>,
    order: StreamSpec,
    /// Rows of a window.
    window: usize,
    position: Position,
    /// Rows in the current window, and its units that are not used yet.
    rows: u64,
    units: VecDeque<Vec<Example>>,
    /// Origins of the examples of the window, in the order of the files.
    origins: Vec<Origin>,
    reader: Option<Receiver<(usize, Result<Row>)>>,
    /// Positions before the steps that were requested last.
    before: VecDeque<(u64, Position)>,
    counts: Stats,
}

impl<'a> RowStream<'a> {
    /// The stream of these files, with `window` rows in a window. `order.length` must be a number of steps.
    ///
    /// # Errors
    /// A batch size, accumulation or window of zero, a run by epochs: the number of rows is unknown.
    pub fn new(
        spec: &Spec,
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
        if spec.screen.is_some() {
            return Err(
                Error::usage("a stream of rows cannot drop rows by comparison with others")
                    .found("settings that drop rows; the rows to compare with are not in memory")
                    .hint("load the rows before the run"),
            );
        }
        if let Some(source) = spec.sources.iter().find(|source| source.weight.is_some()) {
            return Err(Error::usage("a source of a stream of rows cannot have a weight")
                .at(&source.name)
                .found("a weight: its share of an epoch depends on its number of rows, which is not known")
                .hint("leave out the weights, or load the rows before the run"));
        }
        if !matches!(order.length, Length::Steps(_)) {
            return Err(
                Error::usage("the number of rows of a stream is not known before the run").expected("`Length::Steps`"),
            );
        }
        Ok(Self {
            files: Files::new(spec.sources),
            spec: Spec {
                sources: &[],
                screen: None,
                ..spec.clone()
            },
            codec,
            template,
            order,
            window,
            position: Position::default(),
            rows: 0,
            units: VecDeque::new(),
            origins: Vec::new(),
            reader: None,
            before: VecDeque::new(),
            counts: Stats::default(),
        })
    }

    /// The micro-batches of step `step`, from 0. Steps must be requested in order.
    ///
    /// # Errors
    /// A file that cannot be read, a broken row (with its place), an epoch without a row to train on.
    pub fn step(&mut self, step: u64) -> Result<Vec<Batch>> {
        self.before.push_back((step, self.position));
        if self.before.len() > POSITIONS {
            self.before.pop_front();
        }
        let mut out = Vec::with_capacity(self.order.accumulation);
        for _ in 0..self.order.accumulation {
            let mut rows = Vec::new();
            for _ in 0..self.order.batch_size {
                rows.extend(self.unit()?);
            }
            out.push(Batch::from_examples(&rows));
        }
        Ok(out)
    }

    /// Complete passes over the files.
    pub fn epoch(&self) -> u64 {
        self.position.epoch
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
            .map(|(_, position)| *position);
        let is_next = self.before.back().is_none_or(|(s, _)| s + 1 == step);
        let position = known.or(is_next.then_some(self.position));
        let position = position.ok_or_else(|| Error::internal("the position of a step is not known").found(step))?;
        serde_json::to_vec(&position).map_err(|e| Error::internal("a position is not text").cause(e))
    }

    /// Continues at a position of `state`.
    ///
    /// # Errors
    /// Other bytes; a file that cannot be read.
    pub fn restore(&mut self, state: &[u8]) -> Result<()> {
        let position: Position = serde_json::from_slice(state)
            .map_err(|e| Error::format("the checkpoint has no position in the rows").cause(e))?;
        self.before.clear();
        self.reader = None;
        self.rows = 0;
        self.units.clear();
        self.position = Position { unit: 0, ..position };
        if position.unit > 0 {
            self.fill()?;
            if self.units.len() < position.unit {
                return Err(
                    Error::format("the data files have changed since the checkpoint was written")
                        .found(format!("{} units in a window", self.units.len()))
                        .expected(format!("more than {}", position.unit)),
                );
            }
            self.units.drain(..position.unit);
            self.position = position;
        }
        Ok(())
    }

    /// Counts of the rows that were read since the last call.
    pub fn take_counts(&mut self) -> Stats {
        std::mem::take(&mut self.counts)
    }

    fn unit(&mut self) -> Result<Vec<Example>> {
        loop {
            if let Some(unit) = self.units.pop_front() {
                self.position.unit += 1;
                return Ok(unit);
            }
            self.position.row += std::mem::take(&mut self.rows);
            self.position.unit = 0;
            self.fill()?;
        }
    }

    /// Reads the window at `position`, or the first one of the next epoch. It may have no units.
    fn fill(&mut self) -> Result<()> {
        let spec = self.spec.clone();
        let encoder = spec.encoder(self.codec, self.template);
        let rules = spec.rules(&encoder);
        let mut bad = BadRows::new();
        let mut chunk = Vec::new();
        // With the rows that are not used: a position counts them too.
        let mut read = 0;
        while read < self.window as u64 {
            let Position { epoch, row, .. } = self.position;
            let reader = match &mut self.reader {
                Some(reader) => reader,
                none => none.insert(read_ahead(self.files.sources().to_vec(), self.order, epoch, row)),
            };
            let Ok((file, row)) = reader.recv() else {
                // The end of the epoch.
                self.reader = None;
                if read > 0 {
                    break;
                }
                if row == 0 {
                    return Err(Error::format("the data has no rows").at(names(self.files.sources())));
                }
                self.position = Position {
                    epoch: epoch + 1,
                    ..Position::default()
                };
                continue;
            };
            read += 1;
            let Some((row, layout)) = self.files.row(file, row?, &rules)? else {
                continue;
            };
            let origin = Origin {
                file: file as u32,
                number: row.place.number,
                is_line: row.place.is_line,
            };
            chunk.push((row, layout, origin));
        }
        self.rows = read;
        let rows: Vec<Fitted> = load::encode(&spec, &encoder, &chunk, &mut bad)?;
        let mut found = InMemory::new(&spec);
        for (row, (_, _, origin)) in rows.into_iter().zip(chunk) {
            load::push(&mut found, row, origin);
        }
        self.origins = std::mem::take(&mut found.origins);
        add(&mut self.counts, &found.stats);
        let Position { epoch, row, .. } = self.position;
        let n = found.examples.len();
        let order: Vec<u32> = if self.order.shuffle {
            let rng = Rng::new(self.order.seed, Stream::Shuffle, &[epoch, row]);
            rng.permutation(n).into_iter().map(|i| i as u32).collect()
        } else {
            (0..n as u32).collect()
        };
        let unit = |rows: &[u32]| rows.iter().map(|&i| found.examples[i as usize].clone()).collect();
        self.units = if self.order.packing {
            let lengths: Vec<u32> = found.examples.iter().map(|e| e.ids.len() as u32).collect();
            pack(&order, &lengths, self.order.max_length).iter().map(unit).collect()
        } else {
            order.iter().map(|i| unit(std::slice::from_ref(i))).collect()
        };
        Ok(())
    }
}

/// The counts that a run reports.
fn add(to: &mut Stats, of: &Stats) {
    to.rows += of.rows;
    to.truncated_rows += of.truncated_rows;
    to.truncated_tokens += of.truncated_tokens;
    to.split_rows += of.split_rows;
    to.pieces += of.pieces;
    to.dropped_rows += of.dropped_rows;
}

/// Reads an epoch in a thread of its own, after its first `skip` rows. The channel closes at the end.
fn read_ahead(sources: Vec<Source>, order: StreamSpec, epoch: u64, skip: u64) -> Receiver<(usize, Result<Row>)> {
    let (send, receive) = sync_channel(AHEAD);
    std::thread::spawn(move || {
        // The progress of the run stays in view.
        let _quiet = progress::quiet();
        let parts = parts(&sources);
        let order: Vec<usize> = if order.shuffle {
            Rng::new(order.seed, Stream::Shuffle, &[epoch, FILES]).permutation(parts.len())
        } else {
            (0..parts.len()).collect()
        };
        let mut left = skip;
        for Part { source, files, first } in order.into_iter().map(|part| &parts[part]) {
            let mut file = *first;
            let read = source::limited(source, files, &mut |index, row| {
                file = first + index;
                if left > 0 {
                    left -= 1;
                    return Ok(());
                }
                // Without a receiver the reading ends, and its error too.
                let sent = send.send((file, row));
                sent.map_err(|_| Error::new("the stream has ended"))
            });
            if let Err(e) = read {
                let _ = send.send((file, Err(e)));
                return;
            }
        }
    });
    receive
}

/// Files that are read one after another: one file, or all files of a source with a limit.
struct Part<'a> {
    source: &'a Source,
    files: &'a [String],
    /// Index of the first file over all sources.
    first: usize,
}

fn parts(sources: &[Source]) -> Vec<Part<'_>> {
    let mut out = Vec::new();
    let mut first = 0;
    for source in sources {
        let together = match source.limit {
            Some(_) => source.files.len().max(1),
            None => 1,
        };
        for files in source.files.chunks(together) {
            out.push(Part { source, files, first });
            first += files.len();
        }
    }
    out
}

fn names(sources: &[Source]) -> String {
    let names: Vec<&str> = sources.iter().map(|source| source.name.as_str()).collect();
    names.join(", ")
}

impl Dataset {
    /// The first rows of the files, and the layout of each file: what is known of a stream before the run. The
    /// fingerprint identifies the files by names and sizes.
    ///
    /// # Errors
    /// As `load`, for these rows; a file whose first row has no layout.
    pub fn sample(spec: &Spec, codec: &dyn TextCodec, template: Option<&dyn ChatRender>, rows: usize) -> Result<Self> {
        let encoder = spec.encoder(codec, template);
        let mut hasher = blake3::Hasher::new();
        let mut text = |t: &str| {
            hasher.update(&(t.len() as u64).to_le_bytes());
            hasher.update(t.as_bytes());
        };
        text("ft row stream 1");
        text(&spec.settings());
        text(&codec.identity().unwrap_or_default());
        text(&template.and_then(|t| t.identity()).unwrap_or_default());
        let mut readings = Vec::new();
        for (index, path) in spec.files().enumerate() {
            readings.extend(spec.first_reading(index, Purpose::Learn, &encoder)?);
            let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy();
            text(&format!("{name} {}", files::size(Path::new(path))?));
        }
        let fingerprint = hasher.finalize().to_hex().to_string();
        let first = StreamSpec {
            batch_size: 1,
            accumulation: 1,
            packing: false,
            max_length: spec.max_length,
            shuffle: false,
            seed: 0,
            length: Length::Steps(1),
        };
        let mut stream = RowStream::new(spec, codec, template, first, rows)?;
        stream.fill()?;
        template.iter().for_each(|t| t.rest());
        let examples: Vec<Example> = stream.units.drain(..).flatten().collect();
        if examples.is_empty() {
            return Err(Error::format("nothing in the first rows of the data would be trained")
                .at(names(spec.sources))
                .found(format!("{} rows without a token to train", stream.rows))
                .hint(
                    "look at the encoded rows; check `data::Spec::train_on` and the assistant messages or completions",
                ));
        }
        let counts = stream.take_counts();
        let mut out = Dataset::from_examples(examples);
        out.origins = stream.origins;
        out.stats = Stats {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Files, files, real, short_rows as spec};

    fn rows(n: usize) -> Files {
        let row = |i: usize| format!("{{\"text\": \"row {i} {}\"}}\n", "and on ".repeat(i % 6));
        let (a, b): (String, String) = ((0..n / 4).map(row).collect(), (n / 4..n).map(row).collect());
        files(&[("a.jsonl", &a), ("b.jsonl", &b)])
    }

    fn order(packing: bool, shuffle: bool) -> StreamSpec {
        StreamSpec {
            batch_size: 2,
            accumulation: 2,
            packing,
            max_length: 16,
            shuffle,
            seed: 3,
            length: Length::Steps(100),
        }
    }

    /// The documents of a batch.
    fn documents(batch: &Batch) -> Vec<Vec<u32>> {
        let ends = batch.documents.windows(2);
        ends.map(|d| batch.ids[d[0]..d[1]].to_vec()).collect()
    }

    #[test]
    fn an_epoch_has_every_row_once_and_without_shuffling_it_has_the_order_of_the_files() {
        let (files, codec) = (rows(57), real());
        let all = Dataset::load(&spec(&files), &codec, None).unwrap();
        let mut all: Vec<Vec<u32>> = all
            .examples
            .in_memory()
            .unwrap()
            .iter()
            .map(|e| e.ids.clone())
            .collect();
        for (packing, shuffle) in [(false, false), (true, true), (false, true)] {
            let mut stream = RowStream::new(&spec(&files), &codec, None, order(packing, shuffle), 10).unwrap();
            let mut seen = Vec::new();
            for epoch in 0..2 {
                let mut found = Vec::new();
                while found.len() < all.len() {
                    found.extend(stream.unit().unwrap().into_iter().map(|e| e.ids));
                }
                assert_eq!(stream.epoch(), epoch);
                seen.push(found);
            }
            assert_eq!(seen[0] == all, !shuffle);
            assert_eq!(seen[0] == seen[1], !shuffle);
            for found in &mut seen {
                found.sort();
            }
            all.sort();
            assert_eq!((&seen[0], &seen[1]), (&all, &all));
            all = {
                let again = Dataset::load(&spec(&files), &codec, None).unwrap();
                again
                    .examples
                    .in_memory()
                    .unwrap()
                    .iter()
                    .map(|e| e.ids.clone())
                    .collect()
            };
            let counts = stream.take_counts();
            assert!(counts.rows >= 2 * 57 && counts.split_rows > 0);
        }
    }

    #[test]
    fn a_resumed_stream_gives_the_same_batches_from_every_step() {
        let (files, codec) = (rows(57), real());
        for (packing, shuffle) in [(false, false), (true, true)] {
            let new = || RowStream::new(&spec(&files), &codec, None, order(packing, shuffle), 10).unwrap();
            let mut whole = new();
            let (mut steps, mut states) = (Vec::new(), Vec::new());
            for step in 0..40 {
                states.push(whole.state(step).unwrap());
                steps.push(whole.step(step).unwrap());
                // Also after the step was requested.
                assert_eq!(whole.state(step).unwrap(), states[step as usize]);
            }
            assert!(whole.epoch() >= 1);
            for step in [0, 1, 7, 20, 39] {
                let mut resumed = new();
                resumed.restore(&states[step]).unwrap();
                for (later, wanted) in steps.iter().enumerate().skip(step) {
                    assert_eq!(&resumed.step(later as u64).unwrap(), wanted);
                }
            }
            assert_eq!(documents(&steps[0][0]).len() > 2, packing);
            assert!(whole.state(3).is_err());
        }
    }

    #[test]
    fn a_stream_has_the_columns_and_the_limits_of_its_sources() {
        let (mut files, codec) = (rows(57), real());
        let both = files.paths.clone();
        files.sources = vec![Source::new(both.clone()), Source::new(both[..1].to_vec())];
        files.sources[0].limit = Some(20);
        files.sources[1].mapping.columns = vec![(crate::ColumnRole::Text, "text".into())];
        let all = Dataset::load(&spec(&files), &codec, None).unwrap();
        assert_eq!(all.stats.rows, 20 + 14);
        let mut all: Vec<Vec<u32>> = all.examples.iter().map(|e| e.unwrap().ids.clone()).collect();
        all.sort();
        let mut stream = RowStream::new(&spec(&files), &codec, None, order(true, true), 10).unwrap();
        for _ in 0..2 {
            let mut found = Vec::new();
            while found.len() < all.len() {
                found.extend(stream.unit().unwrap().into_iter().map(|e| e.ids));
            }
            found.sort();
            assert_eq!(found, all);
        }
        files.sources[1].weight = Some(2.0);
        let refused = RowStream::new(&spec(&files), &codec, None, order(true, true), 10);
        assert!(refused.err().unwrap().to_string().contains("weight"));
    }

    #[test]
    fn a_sample_has_the_first_rows_and_a_broken_row_is_named_when_it_is_read() {
        let (files, codec) = (rows(57), real());
        let sample = Dataset::sample(&spec(&files), &codec, None, 10).unwrap();
        assert_eq!((sample.stats.rows, sample.readings.len()), (10, 2));
        assert_eq!(sample.origin(0).unwrap().number, 1);
        assert!(sample.origins.len() == sample.examples.len() && sample.origins.len() > 10);
        let text = files.paths[1].clone();
        let broken = ft_base::files::read_text(Path::new(&text)).unwrap() + "{\"other\": 1}\n";
        ft_base::files::write_atomic(Path::new(&text), broken.as_bytes()).unwrap();
        let again = Dataset::sample(&spec(&files), &codec, None, 10).unwrap();
        assert_ne!(sample.fingerprint, again.fingerprint);
        let mut stream = RowStream::new(&spec(&files), &codec, None, order(false, false), 10).unwrap();
        let error = (0..40).find_map(|step| stream.step(step).err()).unwrap().to_string();
        assert!(error.contains("b.jsonl:44"), "{error}");
        let epochs = StreamSpec {
            length: Length::Epochs(1.0),
            ..order(false, false)
        };
        assert!(RowStream::new(&spec(&files), &codec, None, epochs, 10).is_err());
    }
}
