//! The memory budget of a run on the CPU, and when a run is above it.

use crate::base::memory;
use crate::base::units::bytes;
use crate::recipe::Recipe;
use candle_core::Device;

/// The memory budget of a recipe for a run on the CPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Budget {
    pub bytes: u64,
    /// Peak memory of the process before the model was loaded, for example while reading the rows.
    before: u64,
}

impl Budget {
    /// `None`: the memory of the process has no limit (without a budget, or on a GPU, whose memory the budget limits).
    pub fn of(recipe: &Recipe, device: &Device) -> Option<Self> {
        let bytes = recipe.memory.budget.filter(|_| device.is_cpu())?;
        let before = memory::peak_resident();
        Some(Self { bytes, before })
    }

    /// A forecast has an error of up to 10 %, so a run within its budget may use 10 % more.
    pub fn most(self) -> u64 {
        self.bytes.saturating_add(self.bytes / 10)
    }

    /// The peak memory of the process so far, `peak`, if training used more than the budget; else 0. On several ranks each one
    /// compares its own peak: the memory before the training differs between them.
    pub fn excessive(self, peak: u64) -> u64 {
        if peak > self.most().max(self.before) { peak } else { 0 }
    }

    /// Returns the warning before the run if the process exceeded the budget already.
    pub fn warning(self) -> Option<String> {
        (self.before > self.most()).then(|| {
            format!(
                "reading the model files and the rows used {}, more than `memory.budget` ({})",
                bytes(self.before),
                bytes(self.bytes)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_passed_by_a_tenth_and_only_by_the_training() {
        let budget = Budget {
            bytes: 1000,
            before: 400,
        };
        assert_eq!([1100, 1101].map(|peak| budget.excessive(peak)), [0, 1101]);
        assert_eq!(budget.warning(), None);
        // Reading the rows exceeded the budget already: only a higher peak is caused by training.
        let before = Budget { before: 3000, ..budget };
        assert_eq!([3000, 3001].map(|peak| before.excessive(peak)), [0, 3001]);
        assert!(before.warning().is_some_and(|w| w.contains("2.9 KiB")));
    }

    #[test]
    fn each_rank_compares_its_peak_with_its_own_memory_before_the_training() {
        let rank = |before, peak| Budget { bytes: 1000, before }.excessive(peak);
        // Rank 1 read more rows, and training used no more than that.
        assert_eq!([rank(400, 900), rank(3000, 3000)].into_iter().max(), Some(0));
        // The peak of the rank that passed its limit, not the highest one.
        assert_eq!([rank(400, 1200), rank(3000, 3000)].into_iter().max(), Some(1200));
    }
}
