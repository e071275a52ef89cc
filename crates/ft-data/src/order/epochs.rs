//! The units of each epoch. A mixture has other rows in each epoch, so with packing its number of bins varies; the
//! position of the stream is one number all the same: the units before an epoch follow from the epochs before it.

use super::BatchOrder;
use crate::mixture::Mixture;
use std::sync::Arc;

impl BatchOrder {
    /// How the rows of weighted sources are mixed.
    pub fn mixture(&self) -> Option<Arc<Mixture>> {
        self.mixture.clone()
    }

    /// True if every epoch has the same number of units.
    pub(super) fn is_even(&self) -> bool {
        self.mixture.is_none() || !self.spec.packing
    }

    /// Units before this epoch.
    pub(super) fn start(&self, epoch: u64) -> u64 {
        if self.is_even() {
            return epoch.saturating_mul(self.units);
        }
        let mut starts = self.starts.lock().unwrap_or_else(|e| e.into_inner());
        while starts.len() as u64 <= epoch {
            let last = starts.len() - 1;
            let next = starts[last] + self.epoch(last as u64).len();
            starts.push(next);
        }
        starts[epoch as usize]
    }

    /// The epoch of a unit.
    pub(super) fn epoch_of(&self, unit: u64) -> u64 {
        if self.is_even() {
            return unit / self.units;
        }
        // Epochs differ by a few bins: the search begins near the answer.
        let mut epoch = unit / (self.units + self.units / 8 + 1);
        while self.start(epoch) > unit {
            epoch -= 1;
        }
        while self.start(epoch + 1) <= unit {
            epoch += 1;
        }
        epoch
    }

    /// Units of this number of epochs.
    pub(super) fn units_of(&self, epochs: f64) -> u64 {
        let whole = epochs.floor();
        let (start, end) = (self.start(whole as u64), self.start(whole as u64 + 1));
        let part = ((epochs - whole) * (end - start) as f64 - 1e-6).ceil().max(0.0) as u64;
        (start + part).max(1)
    }

    /// Epochs that this number of units are.
    pub(super) fn epochs_of(&self, units: u64) -> f64 {
        let epoch = self.epoch_of(units);
        let (start, end) = (self.start(epoch), self.start(epoch + 1));
        epoch as f64 + (units - start) as f64 / (end - start) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::super::{RunLength, StreamSpec};
    use super::*;
    use crate::dataset::RowOrigin;
    use crate::mixture::{Mixture, SourceShare, rows_of};
    use std::sync::Arc;

    /// 40 long rows and 60 short ones, which fill half of each epoch.
    fn order(packing: bool, length: RunLength) -> BatchOrder {
        let spec = StreamSpec {
            batch_size: 3,
            accumulation: 2,
            packing,
            max_length: 32,
            shuffle: true,
            seed: 3,
            length,
        };
        let share = SourceShare {
            files: 1,
            weight: Some(1.0),
            ..SourceShare::default()
        };
        let origin = |i: usize| RowOrigin {
            file: u32::from(i >= 40),
            number: 1,
            is_line: true,
        };
        let origins: Vec<RowOrigin> = (0..100).map(origin).collect();
        let shares = [share.clone(), share];
        let mixture = Mixture::new(&shares, rows_of(&shares, &origins)).unwrap().map(Arc::new);
        let lengths: Vec<u32> = (0..100).map(|i| if i < 40 { 9 + i % 13 } else { 2 + i % 5 }).collect();
        BatchOrder::mixed(lengths, spec, mixture).unwrap()
    }

    #[test]
    fn a_packed_mixture_is_resumed_at_any_position() {
        let whole = order(true, RunLength::Epochs(20.0));
        assert_eq!(whole.steps(), whole.start(20).div_ceil(6));
        let sizes: Vec<u64> = (0..20).map(|e| whole.start(e + 1) - whole.start(e)).collect();
        assert!(sizes.iter().any(|n| *n != sizes[0]), "{sizes:?}");
        assert_eq!(whole.epoch_after(whole.steps()), 20.0);
        let mut used = vec![0; 100];
        for index in 0..whole.micro_batches() {
            // Another order that begins here.
            assert_eq!(whole.rows(index), order(true, RunLength::Epochs(20.0)).rows(index));
            whole.rows(index).into_iter().for_each(|row| used[row] += 1);
        }
        // 20 epochs of 50 rows from each source.
        assert!(used[..40].iter().all(|n| *n == 25), "{used:?}");
        assert!(used[40..].iter().all(|n| [16, 17].contains(n)), "{used:?}");
    }

    #[test]
    fn a_mixture_has_even_epochs_without_packing() {
        let order = order(false, RunLength::Epochs(2.5));
        assert_eq!((order.units_per_epoch(), order.steps()), (100, 250u64.div_ceil(6)));
        assert_eq!(order.epoch_after(50), 2.5);
        let mut rows: Vec<usize> = (0..order.micro_batches()).flat_map(|index| order.rows(index)).collect();
        rows.truncate(100);
        assert_eq!(rows.iter().filter(|row| **row < 40).count(), 50);
    }
}
