//! Means for the metrics, by name: sums and counts.

use std::cell::RefCell;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub struct Means(RefCell<BTreeMap<&'static str, (f64, f64)>>);

impl Means {
    /// Adds a sum over `count` items; ignored if `count` is 0.
    pub fn add(&self, name: &'static str, sum: f64, count: f64) {
        if count > 0.0 {
            let mut all = self.0.borrow_mut();
            let known = all.entry(name).or_default();
            *known = (known.0 + sum, known.1 + count);
        }
    }

    /// The means since the last call.
    pub fn take(&self) -> Vec<(&'static str, f64)> {
        let all = self.0.take();
        all.into_iter()
            .map(|(name, (sum, count))| (name, sum / count))
            .collect()
    }
}
