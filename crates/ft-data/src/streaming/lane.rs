//! The rows of some sources, epoch after epoch: of all sources, or of one if sources have weights.

use crate::order::StreamSpec;
use crate::read::Row;
use crate::source::{self, Source};
use ft_base::rng::{Rng, Stream};
use ft_base::{Error, Result, progress};
use std::sync::mpsc::{Receiver, sync_channel};

/// Rows that are read ahead of the window.
const AHEAD: usize = 512;
/// Separates the orders of files from those of rows.
const FILES: u64 = u64::MAX;

/// Sources that are read one after another, with its position.
pub(super) struct Lane {
    sources: Vec<Source>,
    /// Index of its first file over all sources.
    first: usize,
    /// Index of its source, if sources are read apart.
    source: Option<u64>,
    /// As in `Source::weight`; 1 if the source has none.
    pub weight: f64,
    pub epoch: u64,
    /// Rows of the epoch that were read.
    pub row: u64,
    reader: Option<Receiver<(usize, Result<Row>)>>,
}

/// One lane for all sources, or one for each if a source has a weight.
pub(super) fn lanes(sources: &[Source]) -> Vec<Lane> {
    let lane = |sources: &[Source], first, source: Option<usize>| Lane {
        weight: sources.first().and_then(|source| source.weight).unwrap_or(1.0),
        sources: sources.to_vec(),
        first,
        source: source.map(|source| source as u64),
        epoch: 0,
        row: 0,
        reader: None,
    };
    if sources.iter().all(|source| source.weight.is_none()) {
        return vec![lane(sources, 0, None)];
    }
    let mut first = 0;
    let of_source = |(at, source): (usize, &Source)| {
        let lane = lane(std::slice::from_ref(source), first, Some(at));
        first += source.files.len();
        lane
    };
    sources.iter().enumerate().map(of_source).collect()
}

impl Lane {
    /// Continues after `row` rows of an epoch.
    pub(super) fn go_to(&mut self, epoch: u64, row: u64) {
        (self.epoch, self.row, self.reader) = (epoch, row, None);
    }

    pub(super) fn name(&self) -> String {
        super::names(&self.sources)
    }

    /// The next row, with the index of its file over all sources. `None`: the epoch has ended, and the next one begins.
    ///
    /// Errors: an epoch without rows; a file or a row that cannot be read.
    pub(super) fn next(&mut self, order: StreamSpec) -> Result<Option<(usize, Row)>> {
        let (sources, epoch, skip) = (&self.sources, self.epoch, self.row);
        let keys = [epoch, FILES].into_iter().chain(self.source);
        let reader = self
            .reader
            .get_or_insert_with(|| read_ahead(sources.clone(), order, keys.collect(), skip));
        if let Ok((file, row)) = reader.recv() {
            self.row += 1;
            return Ok(Some((self.first + file, row?)));
        }
        if self.row == 0 {
            return Err(Error::format("the data has no rows").at(self.name()));
        }
        self.go_to(epoch + 1, 0);
        Ok(None)
    }
}

/// Reads an epoch in a thread of its own, after its first `skip` rows. The channel closes at the end.
fn read_ahead(sources: Vec<Source>, order: StreamSpec, keys: Vec<u64>, skip: u64) -> Receiver<(usize, Result<Row>)> {
    let (send, receive) = sync_channel(AHEAD);
    std::thread::spawn(move || {
        // The progress of the run stays in view.
        let _quiet = progress::quiet();
        let parts = parts(&sources);
        let order: Vec<usize> = if order.shuffle {
            Rng::new(order.seed, Stream::Shuffle, &keys).permutation(parts.len())
        } else {
            (0..parts.len()).collect()
        };
        let mut left = skip;
        for SourcePart { source, files, first } in order.into_iter().map(|part| &parts[part]) {
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
struct SourcePart<'a> {
    source: &'a Source,
    files: &'a [String],
    /// Index of the first file over all sources.
    first: usize,
}

fn parts(sources: &[Source]) -> Vec<SourcePart<'_>> {
    let mut out = Vec::new();
    let mut first = 0;
    for source in sources {
        let together = match source.limit {
            Some(_) => source.files.len().max(1),
            None => 1,
        };
        for files in source.files.chunks(together) {
            out.push(SourcePart { source, files, first });
            first += files.len();
        }
    }
    out
}
