//! Packs rows into bins of at most `max_length` tokens, so that all micro-batches have about the same size.
//!
//! Best fit decreasing: each row goes to the bin with the least remaining space that is sufficient, longest rows first.
//! Documents are not split and stay separate (`Batch::documents`), so packing does not change the loss of a document.

use std::collections::BTreeSet;

/// One bin: indices of rows.
pub(crate) type Bin = Vec<usize>;

/// Packs rows of `lengths[row]` tokens, given in the order of the epoch.
///
/// The bins, and the rows in a bin, keep that order as far as packing allows. Every row is in exactly one bin; a row
/// longer than `capacity` has its own bin. The number of bins does not depend on the order.
pub(crate) fn pack(order: &[usize], lengths: &[usize], capacity: usize) -> Vec<Bin> {
    let mut longest_first: Vec<usize> = (0..order.len()).collect();
    longest_first.sort_by_key(|&at| std::cmp::Reverse(lengths[order[at]]));
    // Bins as positions in the epoch's order; (remaining space, bin) for those that are not full.
    let mut bins: Vec<Vec<usize>> = Vec::new();
    let mut room: BTreeSet<(usize, usize)> = BTreeSet::new();
    for at in longest_first {
        let length = lengths[order[at]];
        let (left, bin) = match room.range((length, 0)..).next().copied() {
            Some(best) => {
                room.remove(&best);
                best
            }
            None => {
                bins.push(Vec::new());
                (capacity.max(length), bins.len() - 1)
            }
        };
        bins[bin].push(at);
        if left > length {
            room.insert((left - length, bin));
        }
    }
    for bin in &mut bins {
        bin.sort_unstable();
    }
    // Best fit decreasing puts the long rows into the first bins: sort the bins by their first row in the epoch.
    bins.sort_by_key(|bin| bin.first().copied());
    bins.into_iter()
        .map(|bin| bin.into_iter().map(|at| order[at]).collect())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ft_base::rng::{Rng, Stream};

    fn lengths(n: usize, most: u64) -> Vec<usize> {
        let rng = Rng::new(5, Stream::Init, &[]);
        (0..n).map(|i| 1 + rng.below(i as u64, most) as usize).collect()
    }

    #[test]
    fn every_row_is_in_one_bin_and_no_bin_overflows() {
        let lengths = lengths(1000, 100);
        let order = Rng::new(1, Stream::Shuffle, &[0]).permutation(1000);
        let bins = pack(&order, &lengths, 128);
        let mut seen: Vec<usize> = bins.concat();
        seen.sort_unstable();
        assert_eq!(seen, (0..1000).collect::<Vec<_>>());
        for bin in &bins {
            assert!(bin.iter().map(|&r| lengths[r]).sum::<usize>() <= 128);
        }
        let density = lengths.iter().sum::<usize>() as f64 / (bins.len() * 128) as f64;
        assert!(density > 0.98, "density {density}");
    }

    #[test]
    fn the_number_of_bins_does_not_depend_on_the_order_and_the_same_order_gives_the_same_bins() {
        let lengths = lengths(300, 60);
        let orders: Vec<_> = (0..5)
            .map(|e| Rng::new(1, Stream::Shuffle, &[e]).permutation(300))
            .collect();
        let packed: Vec<_> = orders.iter().map(|o| pack(o, &lengths, 64)).collect();
        assert!(packed.iter().all(|p| p.len() == packed[0].len()));
        assert_ne!(packed[0], packed[1]);
        assert_eq!(packed[0], pack(&orders[0], &lengths, 64));
    }

    #[test]
    fn the_first_row_of_the_epoch_is_first_and_a_long_row_stands_alone() {
        assert_eq!(pack(&[2, 0, 1], &[3, 9, 2], 5), vec![vec![2, 0], vec![1]]);
        assert_eq!(pack(&[0, 1], &[5, 5], 5), vec![vec![0], vec![1]]);
        assert!(pack(&[], &[], 5).is_empty());
    }
}
