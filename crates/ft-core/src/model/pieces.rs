//! Splits the tokens into pieces for the parts without attention, and accumulates the gradients of the pieces.

use super::contracts::{GradSink, GradSinkMemory, Param};
use super::named_sums::NamedSums;
use crate::base::Result;
use crate::base::ledger::{Allocation, Ledger};
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::ops::Range;

/// Splits `tokens` into ordered pieces of nearly equal size, at most `most`; one piece if there is no limit.
pub fn pieces(tokens: usize, most: Option<usize>) -> Vec<Range<usize>> {
    let count = most.map_or(1, |most| tokens.div_ceil(most.max(1))).max(1);
    let edge = |i: usize| tokens * i / count;
    (0..count).map(|i| edge(i)..edge(i + 1)).collect()
}

/// The rows of a piece, `[N, C]` to `[n, C]`; a view without a copy.
///
/// # Errors
/// The piece is not inside of `x`.
pub fn rows(x: &Tensor, piece: &Range<usize>) -> Result<Tensor> {
    Ok(x.narrow(0, piece.start, piece.len())?)
}

/// Accumulates gradients over the pieces; `finish` passes the sums on.
pub struct GradientSums<'a> {
    sink: &'a mut dyn GradSink,
    sums: NamedSums,
}

impl<'a> GradientSums<'a> {
    /// No sums yet; `sink` gets each whole gradient in `finish`.
    pub fn new(sink: &'a mut dyn GradSink) -> Self {
        Self {
            sink,
            sums: NamedSums::default(),
        }
    }

    /// Passes the sums to `sink` in the order of the first piece. No weight is used after this.
    ///
    /// # Errors
    /// Any error of the sink.
    pub fn finish(self) -> Result<()> {
        let mut sums = self.sums.into_order();
        sums.try_for_each(|(param, sum)| self.sink.take(&param, sum))
    }
}

impl GradSink for GradientSums<'_> {
    fn wants(&self, name: &str) -> bool {
        self.sink.wants(name)
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        self.sums.add(param, gradient)
    }

    fn sum(&self, name: &str) -> Option<Tensor> {
        self.sums.get(name).cloned()
    }
}

/// Simulates the memory of `GradientSums`.
pub(super) struct GradientSumsMemory<'a> {
    sink: &'a mut dyn GradSinkMemory,
    sums: BTreeMap<String, Allocation>,
}

impl<'a> GradientSumsMemory<'a> {
    pub(super) fn new(sink: &'a mut dyn GradSinkMemory) -> Self {
        Self {
            sink,
            sums: BTreeMap::new(),
        }
    }

    pub(super) fn finish(self, l: &mut Ledger) {
        for (name, sum) in self.sums {
            self.sink.take(l, &name, sum);
        }
    }
}

impl GradSinkMemory for GradientSumsMemory<'_> {
    fn wants(&self, name: &str) -> bool {
        self.sink.wants(name)
    }

    fn elements(&self, name: &str) -> u64 {
        self.sink.elements(name)
    }

    fn take(&mut self, l: &mut Ledger, name: &str, gradient: Allocation) {
        if self.has_sum(name) {
            l.free(gradient);
        } else {
            self.sums.insert(name.to_string(), gradient);
        }
    }

    fn has_sum(&self, name: &str) -> bool {
        self.sums.contains_key(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_tokens_and_are_nearly_alike() {
        let edges = |tokens, most| -> Vec<(usize, usize)> {
            pieces(tokens, most).into_iter().map(|p| (p.start, p.end)).collect()
        };
        assert_eq!(edges(10, None), [(0, 10)]);
        assert_eq!(edges(10, Some(10)), [(0, 10)]);
        assert_eq!(edges(10, Some(4)), [(0, 3), (3, 6), (6, 10)]);
        assert_eq!(edges(0, Some(4)), [(0, 0)]);
        for (tokens, most) in [(2050, 256), (16385, 256), (1, 1), (7, 100)] {
            let all = pieces(tokens, Some(most));
            assert!(all.iter().all(|p| p.len() <= most && 2 * p.len() >= most.min(tokens)));
            assert_eq!(all.iter().map(|p| p.len()).sum::<usize>(), tokens);
        }
    }
}
