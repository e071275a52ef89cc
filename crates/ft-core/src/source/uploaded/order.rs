//! Predicts the next layer: each step visits the layers up and down in the same order.

use std::collections::BTreeMap;

/// History of the fetched layers.
#[derive(Debug, Default)]
pub(in crate::source) struct FetchOrder {
    /// The last two layers.
    last: (Option<usize>, Option<usize>),
    /// The layer that followed a pair of consecutive layers the last time.
    after: BTreeMap<(Option<usize>, Option<usize>), usize>,
}

impl FetchOrder {
    /// Records that `layer` is fetched; predicts the next one (at first the neighbor in the current direction).
    pub(in crate::source) fn follow(&mut self, layer: usize) -> Option<usize> {
        self.after.insert(self.last, layer);
        let before = self.last.1;
        self.last = (before, Some(layer));
        let onward = || match before {
            Some(before) if before > layer => layer.checked_sub(1),
            _ => Some(layer + 1),
        };
        self.after.get(&self.last).copied().or_else(onward)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_that_was_gone_before_is_known() {
        // Two layers stay on the device: at a turn they are not fetched again.
        let round = [2, 3, 4, 2, 1, 0];
        let mut order = FetchOrder::default();
        let mut guesses = Vec::new();
        for layer in [0, 1].into_iter().chain(round).chain(round).chain(round) {
            guesses.push(order.follow(layer));
        }
        assert_eq!(guesses[..5], [1, 2, 3, 4, 5].map(Some));
        // From the second round on every prediction is right.
        let known: Vec<_> = round
            .iter()
            .cycle()
            .skip(1)
            .map(|l| Some(*l))
            .take(round.len())
            .collect();
        assert_eq!(guesses[2 + 6..2 + 12], known);
        assert_eq!(guesses[2 + 12..], known);
    }

    #[test]
    fn there_is_no_layer_below_the_first() {
        let mut order = FetchOrder::default();
        assert_eq!([1, 0].map(|l| order.follow(l)), [Some(2), None]);
    }
}
