//! Means for metrics, by name: sums and counts.

use std::cell::RefCell;
use std::collections::BTreeMap;

/// Sums and counts of metrics, by name.
#[derive(Debug, Default)]
pub struct NamedMeans(RefCell<BTreeMap<&'static str, (f64, f64)>>);

impl NamedMeans {
    /// Adds a sum over `count` items; ignored if `count` is 0.
    pub fn add(&self, name: &'static str, sum: f64, count: f64) {
        if count > 0.0 {
            let mut all = self.0.borrow_mut();
            let known = all.entry(name).or_default();
            *known = (known.0 + sum, known.1 + count);
        }
    }

    /// Adds to the sum of items that are counted elsewhere.
    pub fn add_sum(&self, name: &'static str, sum: f64) {
        self.0.borrow_mut().entry(name).or_default().0 += sum;
    }

    /// The means since the last call, in the order of their names; those without a count are left out.
    pub fn take(&self) -> Vec<(&'static str, f64)> {
        let all = self.0.take().into_iter().filter(|(_, (_, count))| *count > 0.0);
        all.map(|(name, (sum, count))| (name, sum / count)).collect()
    }
}
