//! Masks inside a matrix: the `ratio` partition of BAdam (Luo, Yu, Li 2024, arXiv 2404.02827, and the ratio mode of its
//! reference implementation). A window of the elements of each parameter is active; each switch moves the window by its
//! own length, with wrap-around.

use crate::base::rng::{Permutation, Rng, Stream};
use crate::ops::index_subset::IndexSubset;
use std::collections::BTreeSet;

/// Parameters with fewer elements are active as a whole, as in the reference.
const WHOLE: usize = 100;

/// The masks of all parameters for one window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpdateMasks {
    /// Active fraction of each parameter in parts per million: an integer, so that masks can be compared.
    ratio: u64,
    scattered: bool,
    seed: u64,
    /// Number of moves of the window.
    window: u64,
    /// Parameters that are active as a whole, whatever their size.
    whole: BTreeSet<String>,
}

const MILLION: u64 = 1_000_000;

/// A hash that is the same on every machine: FNV-1a.
pub(super) fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl UpdateMasks {
    /// The masks of window number `window`. `ratio`: the active fraction of a parameter; `scattered`: the elements of a
    /// window are spread over the parameter; `whole`: parameters that are active as a whole.
    pub fn new(ratio: f64, scattered: bool, seed: u64, window: u64, whole: BTreeSet<String>) -> Self {
        Self {
            ratio: (ratio * MILLION as f64).round() as u64,
            scattered,
            seed,
            window,
            whole,
        }
    }

    /// Number of windows until every element was active.
    pub fn windows(ratio: f64) -> u64 {
        MILLION.div_ceil((ratio * MILLION as f64).round().max(1.0) as u64)
    }

    /// Number of active elements of a parameter with `n` elements.
    pub fn len(&self, name: &str, n: usize) -> usize {
        if n < WHOLE || self.ratio >= MILLION || self.whole.contains(name) {
            n
        } else {
            ((n as u128 * self.ratio as u128 / MILLION as u128) as usize).max(1)
        }
    }

    /// The active elements of a parameter with `n` elements; `None`: all of them.
    pub fn of(&self, name: &str, n: usize) -> Option<IndexSubset> {
        let len = self.len(name, n);
        let rng = || Rng::new(self.seed, Stream::Mask, &[hash(name)]);
        (len < n).then(|| IndexSubset {
            start: (self.window as u128 * len as u128 % n as u128) as usize,
            len,
            n,
            scattered: self.scattered.then(|| Permutation::new(rng(), n as u64)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_go_around_and_together_meet_every_element() {
        for (ratio, scattered) in [(0.1, false), (0.3, true), (0.07, true)] {
            let windows = UpdateMasks::windows(ratio);
            for n in [1000, 1024, 1237] {
                let mut met = vec![0; n];
                for window in 0..windows + 1 {
                    let masks = UpdateMasks::new(ratio, scattered, 9, window, BTreeSet::new());
                    let subset = masks.of("w", n).unwrap();
                    assert_eq!(subset.len, (n as f64 * ratio) as usize);
                    (0..subset.len).for_each(|i| met[subset.at(i)] += 1);
                }
                assert!(met.iter().all(|m| *m >= 1), "{ratio} {n}");
            }
        }
        let other = UpdateMasks::new(0.1, true, 9, 0, BTreeSet::from(["keep".to_string()]));
        let subset = |name: &str| {
            (0..100)
                .map(|i| other.of(name, 1000).unwrap().at(i))
                .collect::<Vec<_>>()
        };
        assert_ne!(subset("a"), subset("b"));
        assert!(other.of("keep", 1000).is_none() && other.of("small", 99).is_none());
    }
}
