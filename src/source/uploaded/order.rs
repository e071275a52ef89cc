//! Which layer is asked for after which. A step goes up and down the layers in the same way each time.

use std::collections::BTreeMap;

/// The layers in the order in which they were asked for.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The last two.
    last: (Option<usize>, Option<usize>),
    /// What came after two in a row, the last time.
    after: BTreeMap<(Option<usize>, Option<usize>), usize>,
}

impl Order {
    /// `layer` is asked for now: which will be the next? At first the neighbour in the direction of travel.
    pub fn follow(&mut self, layer: usize) -> Option<usize> {
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
        // Two layers stay on the device: at a turn they are not asked for again.
        let round = [2, 3, 4, 2, 1, 0];
        let mut order = Order::default();
        let mut guesses = Vec::new();
        for layer in [0, 1].into_iter().chain(round).chain(round).chain(round) {
            guesses.push(order.follow(layer));
        }
        assert_eq!(guesses[..5], [1, 2, 3, 4, 5].map(Some));
        // From the second round on each guess is what comes.
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
        let mut order = Order::default();
        assert_eq!([1, 0].map(|l| order.follow(l)), [Some(2), None]);
    }
}
