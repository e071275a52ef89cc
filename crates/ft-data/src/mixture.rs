//! The rows of an epoch if sources have weights.
//!
//! An epoch has as many rows as the sources have together; each source gives its share of them. A source gives all its
//! rows, in a new order each time, before it gives one of them again; it continues in the next epoch where it stopped in
//! the last one. So each row of a source is used equally often, and the rows of an epoch are a function of (seed, epoch).

use super::dataset::{Dataset, RowOrigin};
use ft_base::rng::{Rng, Stream};
use ft_base::units::counted;
use ft_base::{Error, Result};

/// Separates the orders of the sources from the orders of epochs.
const OF_SOURCES: u64 = u64::MAX - 1;

/// The name of a source, and the share of its rows in an epoch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SourceShare {
    /// The name in reports.
    pub name: String,
    /// Number of files.
    pub files: usize,
    /// As `Source::weight`.
    pub weight: Option<f64>,
    /// Rows read, with those that are not used.
    pub rows: usize,
    /// Rows that are cut at the longest length.
    pub truncated: usize,
}

/// Counts a row of a source.
pub(crate) fn count(shares: &mut [SourceShare], origin: RowOrigin, truncated: bool) {
    let source = source_of(shares, origin);
    if let Some(share) = shares.get_mut(source) {
        share.rows += 1;
        share.truncated += usize::from(truncated);
    }
}

/// The index of the source of a row.
pub fn source_of(shares: &[SourceShare], origin: RowOrigin) -> usize {
    let mut end = 0;
    let is_in = |share: &SourceShare| {
        end += share.files;
        (origin.file as usize) < end
    };
    shares.iter().position(is_in).unwrap_or(0)
}

/// The rows of each source.
pub fn rows_of(shares: &[SourceShare], origins: &[RowOrigin]) -> Vec<Vec<u32>> {
    let mut rows = vec![Vec::new(); shares.len()];
    for (row, origin) in origins.iter().enumerate() {
        rows[source_of(shares, *origin)].push(row as u32);
    }
    rows
}

/// Sources with weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// The rows of each source.
    rows: Vec<Vec<u32>>,
    /// The number of rows that each source gives to an epoch.
    counts: Vec<usize>,
}

impl Mixture {
    /// The mixture of these rows of each source. `None`: no source has a weight, or there is only one source.
    ///
    /// # Errors
    /// A source without rows: it cannot have its share.
    pub fn new(shares: &[SourceShare], rows: Vec<Vec<u32>>) -> Result<Option<Self>> {
        if shares.len() < 2 || shares.iter().all(|share| share.weight.is_none()) {
            return Ok(None);
        }
        if let Some((share, _)) = shares.iter().zip(&rows).find(|(_, rows)| rows.is_empty()) {
            return Err(Error::format("no row of a source is left to train")
                .at(&share.name)
                .found(format!("{}, and none is used", counted(share.rows, "row")))
                .hint("remove the source, or look at why its rows are left out"));
        }
        let weights: Vec<f64> = shares.iter().map(|share| share.weight.unwrap_or(1.0)).collect();
        Ok(Some(Self {
            counts: counts(rows.iter().map(Vec::len).sum(), &weights),
            rows,
        }))
    }

    /// Rows of an epoch.
    pub fn len(&self) -> usize {
        self.counts.iter().sum()
    }

    /// True if an epoch has no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The rows of an epoch, in order. Without `shuffle` the sources are in file order, and evenly mixed.
    pub fn epoch(&self, seed: u64, epoch: u64, shuffle: bool) -> Vec<u32> {
        // Each row with its relative position (0 to 1) in its source's part of the epoch.
        let mut placed: Vec<(f64, u32)> = Vec::with_capacity(self.len());
        for (source, (rows, &count)) in self.rows.iter().zip(&self.counts).enumerate() {
            let n = rows.len() as u64;
            let mut cycle: Option<(u64, Vec<usize>)> = None;
            for i in 0..count as u64 {
                let unit = epoch * count as u64 + i;
                let at = (unit % n) as usize;
                let row = if !shuffle {
                    rows[at]
                } else {
                    let now = match cycle.take() {
                        Some((known, order)) if known == unit / n => (known, order),
                        _ => {
                            let keys = [OF_SOURCES, source as u64, unit / n];
                            (unit / n, Rng::new(seed, Stream::Shuffle, &keys).permutation(rows.len()))
                        }
                    };
                    let row = rows[now.1[at]];
                    cycle = Some(now);
                    row
                };
                placed.push(((i as f64 + 0.5) / count as f64, row));
            }
        }
        if shuffle {
            let order = Rng::new(seed, Stream::Shuffle, &[epoch]).permutation(placed.len());
            return order.into_iter().map(|at| placed[at].1).collect();
        }
        // Stable: equal places keep the order of the sources.
        placed.sort_by(|a, b| a.0.total_cmp(&b.0));
        placed.into_iter().map(|(_, row)| row).collect()
    }
}

/// Splits `n` in proportion to the weights: exact up to one, and at least one for each (if there are so many).
fn counts(n: usize, weights: &[f64]) -> Vec<usize> {
    let total: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|w| n as f64 * w / total).collect();
    let mut counts: Vec<usize> = exact.iter().map(|x| (x.floor() as usize).max(1)).collect();
    let mut by_rest: Vec<usize> = (0..weights.len()).collect();
    by_rest.sort_by(|&a, &b| (exact[b] - exact[b].floor()).total_cmp(&(exact[a] - exact[a].floor())));
    let mut next = by_rest.iter().cycle();
    while counts.iter().sum::<usize>() < n {
        if let Some(&source) = next.next() {
            counts[source] += 1;
        }
    }
    while counts.iter().sum::<usize>() > n.max(weights.len()) {
        let largest = counts.iter_mut().max();
        if let Some(largest) = largest {
            *largest -= 1;
        }
    }
    counts
}

impl Dataset {
    /// How the rows of weighted sources are mixed; `None`: each row once in an epoch.
    ///
    /// # Errors
    /// The token file cannot be read; as `Mixture::new`.
    pub fn mixture(&self) -> Result<Option<Mixture>> {
        if self.grouped || self.shares.iter().all(|share| share.weight.is_none()) {
            return Ok(None);
        }
        Mixture::new(&self.shares, rows_of(&self.shares, &self.all_origins()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sources of these numbers of rows; the first one has two files.
    fn mixture(rows: [usize; 2], weights: [f64; 2]) -> Mixture {
        let share = |files, weight| SourceShare {
            files,
            weight: Some(weight),
            ..SourceShare::default()
        };
        let origin = |file| RowOrigin {
            file,
            number: 1,
            is_line: true,
        };
        let first = (0..rows[0]).map(|i| origin((i % 2) as u32));
        let origins: Vec<RowOrigin> = first.chain((0..rows[1]).map(|_| origin(2))).collect();
        let shares = [share(2, weights[0]), share(1, weights[1])];
        Mixture::new(&shares, rows_of(&shares, &origins)).unwrap().unwrap()
    }

    #[test]
    fn counts_are_in_proportion_and_complete() {
        assert_eq!(counts(10, &[1.0, 1.0]), [5, 5]);
        assert_eq!(counts(10, &[0.7, 0.3]), [7, 3]);
        assert_eq!(counts(10, &[1.0, 1.0, 1.0]).iter().sum::<usize>(), 10);
        assert_eq!(counts(10, &[1e9, 1e-9]), [9, 1]);
        assert_eq!(counts(7, &[3.0, 2.0, 1.0]).iter().sum::<usize>(), 7);
    }

    #[test]
    fn every_row_of_a_source_is_used_equally_often() {
        for shuffle in [true, false] {
            let mixture = mixture([90, 10], [1.0, 1.0]);
            assert_eq!(mixture.len(), 100);
            let mut used = vec![0; 100];
            for epoch in 0..9 {
                let rows = mixture.epoch(7, epoch, shuffle);
                assert_eq!(rows.iter().filter(|row| **row < 90).count(), 50);
                rows.iter().for_each(|row| used[*row as usize] += 1);
                // A function of seed and epoch only.
                assert_eq!(rows, mixture.epoch(7, epoch, shuffle));
            }
            assert!(
                used[..90].iter().all(|n| *n == 5) && used[90..].iter().all(|n| *n == 45),
                "{used:?}"
            );
        }
        let rows = mixture([4, 2], [2.0, 1.0]).epoch(0, 0, false);
        assert_eq!(rows, [0, 4, 1, 2, 5, 3]);
    }

    #[test]
    fn without_weights_there_is_no_mixture() {
        let share = SourceShare {
            files: 1,
            ..SourceShare::default()
        };
        let origin = RowOrigin {
            file: 0,
            number: 1,
            is_line: true,
        };
        let origins = [origin, RowOrigin { file: 1, ..origin }];
        let shares = [share.clone(), share];
        assert_eq!(Mixture::new(&shares, rows_of(&shares, &origins)).unwrap(), None);
    }

    /// Its share would be that of the others, without a word.
    #[test]
    fn a_source_without_rows_has_no_share() {
        let share = |name: &str| SourceShare {
            name: name.to_string(),
            files: 1,
            weight: Some(1.0),
            rows: 3,
            ..SourceShare::default()
        };
        let e = Mixture::new(&[share("a.jsonl"), share("b.jsonl")], vec![vec![0, 1], Vec::new()]);
        let e = e.unwrap_err().to_string();
        assert!(
            e.contains("no row of a source is left to train") && e.contains("b.jsonl"),
            "{e}"
        );
        assert!(e.contains("3 rows, and none is used"), "{e}");
    }
}
