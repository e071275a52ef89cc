//! Packs rows into bins of at most `max_length` tokens, so that all micro-batches have about the same size.
//!
//! Best fit decreasing: each row goes to the bin with the least remaining space that is sufficient, longest rows first.
//! Documents are not split and stay separate (`Batch::documents`), so packing does not change the loss of a document.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Bins in order, each with its rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Bins {
    /// The rows of all bins.
    rows: Vec<u32>,
    /// The end of each bin in `rows`.
    ends: Vec<u32>,
}

impl Bins {
    /// Number of bins.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The rows of bins `first..end`.
    pub(crate) fn rows(&self, first: usize, end: usize) -> &[u32] {
        let at = |bin: usize| if bin == 0 { 0 } else { self.ends[bin - 1] as usize };
        &self.rows[at(first)..at(end)]
    }

    /// The rows of each bin.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u32]> {
        (0..self.len()).map(|bin| self.rows(bin, bin + 1))
    }
}

/// Packs rows of `lengths[row]` tokens, given in the order of the epoch. The time per row is logarithmic in `capacity`.
///
/// The bins, and the rows in a bin, keep that order as far as packing allows. Every row is in exactly one bin; a row
/// longer than `capacity` has its own bin. The number of bins does not depend on the order.
pub(crate) fn pack(order: &[u32], lengths: &[u32], capacity: usize) -> Bins {
    let length = |at: u32| lengths[order[at as usize] as usize] as usize;
    let mut longest_first: Vec<u32> = (0..order.len() as u32).collect();
    longest_first.sort_by_key(|&at| Reverse(length(at)));
    // By position in the epoch's order: the bin of a row. By remaining space: the bins that are not full.
    let mut bin_of = vec![0u32; order.len()];
    let mut room: BTreeMap<usize, BinaryHeap<Reverse<u32>>> = BTreeMap::new();
    let mut bins = 0;
    for at in longest_first {
        let length = length(at);
        let mut best = None;
        if let Some((&left, found)) = room.range_mut(length..).next() {
            best = found.pop().map(|Reverse(bin)| (left, bin));
            if found.is_empty() {
                room.remove(&left);
            }
        }
        let (left, bin) = best.unwrap_or_else(|| {
            bins += 1;
            (capacity.max(length), bins - 1)
        });
        bin_of[at as usize] = bin;
        if left > length {
            room.entry(left - length).or_default().push(Reverse(bin));
        }
    }
    in_epoch_order(order, &bin_of, bins as usize)
}

/// Best fit decreasing puts the long rows into the first bins: sorts the bins by their first row in the epoch.
fn in_epoch_order(order: &[u32], bin_of: &[u32], bins: usize) -> Bins {
    const NEW: u32 = u32::MAX;
    let mut rank = vec![NEW; bins];
    let mut ends = vec![0u32; bins];
    let mut next = 0;
    for &bin in bin_of {
        let rank = &mut rank[bin as usize];
        if *rank == NEW {
            *rank = next;
            next += 1;
        }
        ends[*rank as usize] += 1;
    }
    let mut from = 0;
    for end in &mut ends {
        // For now the start of the bin; the rows that are placed move it to the end.
        (*end, from) = (from, from + *end);
    }
    let mut rows = vec![0u32; order.len()];
    for (row, &bin) in order.iter().zip(bin_of) {
        let at = &mut ends[rank[bin as usize] as usize];
        rows[*at as usize] = *row;
        *at += 1;
    }
    Bins { rows, ends }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ft_base::rng::{Rng, Stream};

    fn lengths(n: usize, most: u64) -> Vec<u32> {
        let rng = Rng::new(5, Stream::Init, &[]);
        (0..n).map(|i| 1 + rng.below(i as u64, most) as u32).collect()
    }

    fn order(seed: u64, epoch: u64, n: usize) -> Vec<u32> {
        let order = Rng::new(seed, Stream::Shuffle, &[epoch]).permutation(n);
        order.into_iter().map(|row| row as u32).collect()
    }

    /// The rows of each bin.
    fn packed(order: &[u32], lengths: &[u32], capacity: usize) -> Vec<Vec<u32>> {
        pack(order, lengths, capacity).iter().map(<[u32]>::to_vec).collect()
    }

    #[test]
    fn every_row_is_in_one_bin_and_no_bin_overflows() {
        let lengths = lengths(1000, 100);
        let order = order(1, 0, 1000);
        let bins = packed(&order, &lengths, 128);
        let mut seen: Vec<u32> = bins.concat();
        seen.sort_unstable();
        assert_eq!(seen, (0..1000).collect::<Vec<_>>());
        for bin in &bins {
            assert!(bin.iter().map(|&r| lengths[r as usize]).sum::<u32>() <= 128);
        }
        let density = lengths.iter().sum::<u32>() as f64 / (bins.len() * 128) as f64;
        assert!(density > 0.98, "density {density}");
    }

    #[test]
    fn the_number_of_bins_does_not_depend_on_the_order_and_the_same_order_gives_the_same_bins() {
        let lengths = lengths(300, 60);
        let orders: Vec<_> = (0..5).map(|e| order(1, e, 300)).collect();
        let all: Vec<_> = orders.iter().map(|o| packed(o, &lengths, 64)).collect();
        assert!(all.iter().all(|p| p.len() == all[0].len()));
        assert_ne!(all[0], all[1]);
        assert_eq!(all[0], packed(&orders[0], &lengths, 64));
    }

    #[test]
    fn the_first_row_of_the_epoch_is_first_and_a_long_row_stands_alone() {
        assert_eq!(packed(&[2, 0, 1], &[3, 9, 2], 5), vec![vec![2, 0], vec![1]]);
        assert_eq!(packed(&[0, 1], &[5, 5], 5), vec![vec![0], vec![1]]);
        assert!(packed(&[], &[], 5).is_empty());
    }

    /// Lengths as those of instruction data: log-normal, with a median of 200 tokens, cut at the capacity.
    #[test]
    fn realistic_lengths_fill_the_bins() {
        let (rng, n, capacity) = (Rng::new(9, Stream::Init, &[]), 20_000, 2048);
        let draw = |i: usize| (200.0 * f64::from(rng.normal(i as u64)).exp()).clamp(5.0, capacity as f64) as u32;
        let lengths: Vec<u32> = (0..n).map(draw).collect();
        let order: Vec<u32> = (0..n as u32).collect();
        let all = lengths.iter().map(|n| *n as usize).sum::<usize>() as f64;
        let fill = |bins: usize| all / (bins * capacity) as f64;
        let whole = fill(pack(&order, &lengths, capacity).len());
        let windows = order
            .chunks(10_000)
            .map(|rows| pack(rows, &lengths, capacity).len())
            .sum();
        // The next row in the last bin if it fits, else in a new one.
        let (mut bins, mut left) = (0, 0);
        for length in lengths.iter().map(|n| *n as usize) {
            if length > left {
                (bins, left) = (bins + 1, capacity);
            }
            left -= length;
        }
        println!(
            "fill {whole:.5}, windows {:.5}, next fit {:.4}",
            fill(windows),
            fill(bins)
        );
        assert!(whole > 0.999 && fill(windows) > 0.998 && fill(bins) < 0.93);
    }

    /// The definition, row by row: among the bins with enough space the one with the least, the first of them.
    #[test]
    fn the_bins_are_those_of_the_definition() {
        for (n, most, capacity) in [(400, 100, 128), (300, 7, 8), (200, 300, 100)] {
            let (lengths, order) = (lengths(n, most), order(3, 1, n));
            let mut by_length: Vec<usize> = (0..n).collect();
            by_length.sort_by_key(|&at| Reverse(lengths[order[at] as usize]));
            let mut bins: Vec<(usize, Vec<usize>)> = Vec::new();
            for at in by_length {
                let length = lengths[order[at] as usize] as usize;
                let fits = (0..bins.len()).filter(|&b| bins[b].0 >= length);
                let bin = fits.min_by_key(|&b| (bins[b].0, b)).unwrap_or_else(|| {
                    bins.push((capacity.max(length), Vec::new()));
                    bins.len() - 1
                });
                bins[bin].0 -= length;
                bins[bin].1.push(at);
            }
            bins.iter_mut().for_each(|bin| bin.1.sort_unstable());
            bins.sort_by_key(|bin| bin.1[0]);
            let wanted: Vec<Vec<u32>> = bins.iter().map(|b| b.1.iter().map(|&at| order[at]).collect()).collect();
            assert_eq!(packed(&order, &lengths, capacity), wanted);
        }
    }
}
