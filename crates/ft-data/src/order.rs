//! The infinite stream of micro-batches. Its position is one number: (seed, epoch, index) determines the rows, so
//! nothing else has to be saved to resume.
//!
//! A unit is a row, or a bin: the rows of a packed sequence. Each epoch is a new permutation of the units (grouped rows
//! keep their
//! order). Micro-batch m contains units m*B to (m+1)*B, across the end of an epoch if necessary; a window is the G
//! micro-batches of one optimizer step.

mod epochs;
#[cfg(test)]
mod tests;

use super::batch::{Batch, Example};
use super::dataset::Dataset;
use super::examples::Examples;
use super::mixture::Mixture;
use super::pack::{Bins, pack};
use ft_base::rng::{Rng, Stream};
use ft_base::{Error, Result, progress};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Length of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RunLength {
    /// This number of steps, with as many epochs as necessary.
    Steps(u64),
    /// This number of epochs; the last window may be short.
    Epochs(f64),
}

impl RunLength {
    /// `max_steps` steps; if it is negative, `num_epochs` epochs.
    pub fn new(max_steps: i64, num_epochs: f64) -> Self {
        match u64::try_from(max_steps) {
            Ok(steps) => RunLength::Steps(steps),
            Err(_) => RunLength::Epochs(num_epochs),
        }
    }
}

/// Settings of a stream. The default has the default settings of the program `ft`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamSpec {
    /// B: units per micro-batch.
    pub batch_size: usize,
    /// G: micro-batches per step.
    pub accumulation: usize,
    /// Fill bins of `max_length` tokens with several examples.
    pub packing: bool,
    /// Capacity of a bin in tokens.
    pub max_length: usize,
    /// A new order in each epoch; false: file order.
    pub shuffle: bool,
    /// Seed of the order.
    pub seed: u64,
    /// Length of the run.
    pub length: RunLength,
}

impl Default for StreamSpec {
    fn default() -> Self {
        Self {
            batch_size: 1,
            accumulation: 8,
            packing: true,
            max_length: 2048,
            shuffle: true,
            seed: 42,
            length: RunLength::Epochs(3.0),
        }
    }
}

/// The units of one epoch, in order.
#[derive(Debug)]
enum Units {
    Rows(Vec<u32>),
    Bins(Bins),
}

impl Units {
    fn len(&self) -> u64 {
        match self {
            Units::Rows(rows) => rows.len() as u64,
            Units::Bins(bins) => bins.len() as u64,
        }
    }
}

/// The rows of each micro-batch, computed from the row lengths only.
#[derive(Debug)]
pub struct BatchOrder {
    spec: StreamSpec,
    lengths: Arc<[u32]>,
    /// Units of the first epoch. With packing, a mixture can have another number of bins in each epoch; otherwise the
    /// number is the same in every epoch.
    units: u64,
    mixture: Option<Arc<Mixture>>,
    /// A mixture with packing: the number of units before each epoch, as far as it is known.
    starts: Mutex<Vec<u64>>,
    /// The most recent epochs: a micro-batch may extend into the next one.
    epochs: Mutex<VecDeque<(u64, Arc<Units>)>>,
}

/// Micro-batches of a dataset; see the module documentation.
#[derive(Debug)]
pub struct BatchStream<'a> {
    examples: &'a Examples,
    order: BatchOrder,
}

/// Size of the largest micro-batch of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LargestBatch {
    /// Tokens of the largest micro-batch.
    pub tokens: usize,
    /// Tokens of the longest row.
    pub longest: usize,
    /// Smallest number of rows in a micro-batch of about that size.
    pub documents: usize,
}

/// Largest number of rows (ordered, or packed) for which the largest micro-batch is computed exactly.
const ORDERED: u64 = 20_000_000;
const PACKED: u64 = 2_000_000;

impl std::ops::Deref for BatchStream<'_> {
    type Target = BatchOrder;

    fn deref(&self) -> &BatchOrder {
        &self.order
    }
}

impl<'a> BatchStream<'a> {
    /// The stream of a dataset.
    ///
    /// # Errors
    /// As `BatchOrder::new`.
    pub fn new(dataset: &'a Dataset, spec: StreamSpec) -> Result<Self> {
        let spec = StreamSpec {
            shuffle: spec.shuffle && !dataset.grouped,
            ..spec
        };
        Ok(Self {
            examples: &dataset.examples,
            order: BatchOrder::mixed(dataset.lengths(), spec, dataset.mixture()?.map(Arc::new))?,
        })
    }

    /// The examples in file order.
    pub fn examples(&self) -> &'a Examples {
        self.examples
    }

    /// The examples of micro-batch `index`, from 0.
    ///
    /// # Errors
    /// The token file cannot be read.
    pub fn micro_batch(&self, index: u64) -> Result<Vec<Cow<'a, Example>>> {
        self.rows(index).into_iter().map(|row| self.examples.get(row)).collect()
    }

    /// Micro-batch `index`, from 0.
    ///
    /// # Errors
    /// As for `micro_batch`.
    pub fn batch(&self, index: u64) -> Result<Batch> {
        Ok(Batch::from_examples(self.micro_batch(index)?))
    }

    /// The micro-batches of step `step`, from 0.
    ///
    /// # Errors
    /// As for `micro_batch`.
    pub fn window(&self, step: u64) -> Result<Vec<Batch>> {
        self.window_indices(step).map(|index| self.batch(index)).collect()
    }
}

impl BatchOrder {
    /// The order of rows of these lengths.
    ///
    /// # Errors
    /// No rows, a batch size or accumulation of zero, a number of epochs that is not positive.
    pub fn new(lengths: impl Into<Arc<[u32]>>, spec: StreamSpec) -> Result<Self> {
        Self::mixed(lengths, spec, None)
    }

    /// The order of rows of these lengths, from sources with weights.
    ///
    /// # Errors
    /// As for `new`.
    pub fn mixed(lengths: impl Into<Arc<[u32]>>, spec: StreamSpec, mixture: Option<Arc<Mixture>>) -> Result<Self> {
        let lengths = lengths.into();
        if lengths.is_empty() {
            return Err(Error::format("the data has no rows"));
        }
        if u32::try_from(lengths.len()).is_err() {
            return Err(Error::unsupported("a dataset has too many rows").found(lengths.len()));
        }
        if spec.batch_size == 0 || spec.accumulation == 0 {
            return Err(Error::usage(
                "`StreamSpec::batch_size` and `StreamSpec::accumulation` must be at least 1",
            ));
        }
        if let RunLength::Epochs(epochs) = spec.length
            && (!epochs.is_finite() || epochs <= 0.0)
        {
            return Err(Error::usage("`RunLength::Epochs` must be more than 0")
                .found(epochs)
                .hint("use a number above 0, or `RunLength::Steps`"));
        }
        let mut order = Self {
            spec,
            lengths,
            units: 0,
            mixture,
            starts: Mutex::new(vec![0]),
            epochs: Mutex::default(),
        };
        let _phase = progress::phase("ordering rows", 0, "");
        order.units = order.epoch(0).len();
        Ok(order)
    }

    /// The settings of the stream.
    pub fn spec(&self) -> StreamSpec {
        self.spec
    }

    /// Number of tokens of each row.
    pub fn lengths(&self) -> &[u32] {
        &self.lengths
    }

    /// The largest micro-batch of the run: exact, or, for runs that are too long to enumerate, the sum of the largest
    /// units of an epoch. The bins of all epochs are equally full.
    pub fn largest(&self) -> LargestBatch {
        let epochs = self.total_units().div_ceil(self.units);
        let rows = epochs.saturating_mul(self.lengths.len() as u64);
        let most = if self.spec.packing { PACKED } else { ORDERED };
        if rows <= most {
            return self.exactly_largest();
        }
        let units: Vec<(usize, usize)> = match &*self.epoch(0) {
            Units::Rows(rows) => rows.iter().map(|row| (self.length(*row), 1)).collect(),
            Units::Bins(bins) => bins.iter().map(|bin| (self.tokens_of(bin), bin.len())).collect(),
        };
        let count = self.spec.batch_size;
        let mut tokens: Vec<usize> = units.iter().map(|u| u.0).collect();
        tokens.sort_unstable_by(|a, b| b.cmp(a));
        let all: usize = tokens.iter().sum();
        let rest: usize = tokens.iter().take(count % tokens.len()).sum();
        let fewest = units.iter().map(|u| u.1).min().unwrap_or(1);
        LargestBatch {
            tokens: (count / tokens.len()).saturating_mul(all).saturating_add(rest),
            longest: self.lengths.iter().copied().max().unwrap_or(1) as usize,
            documents: count.saturating_mul(fewest),
        }
    }

    fn length(&self, row: u32) -> usize {
        self.lengths[row as usize] as usize
    }

    fn tokens_of(&self, rows: &[u32]) -> usize {
        rows.iter().map(|row| self.length(*row)).sum()
    }

    fn exactly_largest(&self) -> LargestBatch {
        let mut largest = LargestBatch {
            tokens: 1,
            longest: 1,
            documents: usize::MAX,
        };
        let mut sizes = Vec::new();
        for index in 0..self.micro_batches().max(1) {
            let rows = self.numbers(index);
            let tokens = self.tokens_of(&rows);
            largest.tokens = largest.tokens.max(tokens);
            let longest = rows.iter().map(|row| self.length(*row)).max();
            largest.longest = largest.longest.max(longest.unwrap_or(0));
            sizes.push((tokens, rows.len()));
        }
        // A short micro-batch at the end of a run does not count.
        let large = sizes.iter().filter(|(tokens, _)| tokens * 10 >= largest.tokens * 9);
        largest.documents = large.map(|(_, rows)| *rows).min().unwrap_or(1).max(1);
        largest
    }

    /// Units (rows or bins) per epoch.
    pub fn units_per_epoch(&self) -> u64 {
        self.units
    }

    /// Packing density: tokens in the bins of an epoch divided by their capacity; 1 without packing.
    pub fn density(&self) -> f64 {
        if self.spec.packing {
            let tokens: usize = match &*self.epoch(0) {
                Units::Bins(bins) => bins.iter().map(|bin| self.tokens_of(bin)).sum(),
                Units::Rows(rows) => self.tokens_of(rows),
            };
            tokens as f64 / (self.units as f64 * self.spec.max_length as f64)
        } else {
            1.0
        }
    }

    /// Units per optimizer step.
    pub fn units_per_window(&self) -> u64 {
        self.spec.batch_size as u64 * self.spec.accumulation as u64
    }

    /// Units of the whole run; the last window of a run by epochs may be short.
    fn total_units(&self) -> u64 {
        match self.spec.length {
            RunLength::Steps(steps) => steps.saturating_mul(self.units_per_window()),
            // 0.1 * 30 is slightly above 3 in floating point: it must not become a fourth row.
            RunLength::Epochs(epochs) if self.is_even() => (epochs * self.units as f64 - 1e-6).ceil().max(1.0) as u64,
            RunLength::Epochs(epochs) => self.units_of(epochs),
        }
    }

    /// Number of optimizer steps of the run.
    pub fn steps(&self) -> u64 {
        self.total_units().div_ceil(self.units_per_window())
    }

    /// Number of micro-batches of the run.
    pub fn micro_batches(&self) -> u64 {
        self.total_units().div_ceil(self.spec.batch_size as u64)
    }

    /// Epochs done after `steps` steps, e.g. 1.5. A step larger than the data counts as several epochs.
    pub fn epoch_after(&self, steps: u64) -> f64 {
        let seen = steps.saturating_mul(self.units_per_window()).min(self.total_units());
        if self.is_even() {
            seen as f64 / self.units as f64
        } else {
            self.epochs_of(seen)
        }
    }

    /// Rows of micro-batch `index` (from 0), in order. Fewer than B units only at the end of a run by epochs; after
    /// that end the stream continues with full micro-batches.
    pub fn rows(&self, index: u64) -> Vec<usize> {
        self.numbers(index).into_iter().map(|row| row as usize).collect()
    }

    fn numbers(&self, index: u64) -> Vec<u32> {
        let b = self.spec.batch_size as u64;
        let first = index * b;
        let end = match self.total_units() {
            total if first < total => total.min(first + b),
            _ => first + b,
        };
        let mut out = Vec::new();
        let mut unit = first;
        while unit < end {
            let epoch = self.epoch_of(unit);
            let from = (unit - self.start(epoch)) as usize;
            let epoch = self.epoch(epoch);
            let n = (end - unit).min(epoch.len() - from as u64) as usize;
            match &*epoch {
                Units::Rows(rows) => out.extend_from_slice(&rows[from..from + n]),
                Units::Bins(bins) => out.extend_from_slice(bins.rows(from, from + n)),
            }
            unit += n as u64;
        }
        out
    }

    /// Indices of the micro-batches of step `step`, from 0.
    pub fn window_indices(&self, step: u64) -> Range<u64> {
        let g = self.spec.accumulation as u64;
        let end = match self.micro_batches() {
            total if step * g < total => total.min((step + 1) * g),
            _ => (step + 1) * g,
        };
        step * g..end
    }

    /// The order of an epoch: depends only on (seed, epoch); the two most recent epochs are cached.
    fn epoch(&self, epoch: u64) -> Arc<Units> {
        // The cache contains only complete values, so a panic in another thread cannot have corrupted it.
        let mut cache = self.epochs.lock().unwrap_or_else(|e| e.into_inner());
        if let Some((_, units)) = cache.iter().find(|(e, _)| *e == epoch) {
            return units.clone();
        }
        let n = self.lengths.len();
        let order: Vec<u32> = if let Some(mixture) = &self.mixture {
            mixture.epoch(self.spec.seed, epoch, self.spec.shuffle)
        } else if self.spec.shuffle {
            let shuffled = Rng::new(self.spec.seed, Stream::Shuffle, &[epoch]).permutation(n);
            shuffled.into_iter().map(|row| row as u32).collect()
        } else {
            (0..n as u32).collect()
        };
        let units = Arc::new(if self.spec.packing {
            Units::Bins(pack(&order, &self.lengths, self.spec.max_length))
        } else {
            Units::Rows(order)
        });
        cache.push_front((epoch, units.clone()));
        cache.truncate(2);
        units
    }
}

/// Batches for an evaluation: rows in file order, at most `max_tokens` per batch (a longer row is a batch alone). An
/// error is that of `Examples::get`.
pub fn eval_batches(dataset: &Dataset, max_tokens: usize) -> impl Iterator<Item = Result<Batch>> + '_ {
    let lengths = dataset.lengths();
    let mut from = 0;
    std::iter::from_fn(move || {
        let mut tokens = 0;
        let fits = lengths[from..].iter().take_while(|n| {
            tokens += **n as usize;
            tokens <= max_tokens
        });
        let n = fits.count().max(1).min(lengths.len() - from);
        let rows = from..from + n;
        from += n;
        let rows = || rows.map(|row| dataset.examples.get(row)).collect::<Result<Vec<_>>>();
        (n > 0).then(|| rows().map(Batch::from_examples))
    })
}
