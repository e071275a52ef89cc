//! Means since they were read last.

use std::cell::RefCell;
use std::collections::BTreeMap;

/// Adds up numbers by name, each with a weight.
#[derive(Default)]
pub struct Meter(RefCell<BTreeMap<&'static str, (f64, f64)>>);

impl Meter {
    /// Adds a mean over `weight` things.
    pub fn add(&self, name: &'static str, mean: f64, weight: f64) {
        if weight > 0.0 {
            let mut sums = self.0.borrow_mut();
            let sum = sums.entry(name).or_default();
            *sum = (sum.0 + mean * weight, sum.1 + weight);
        }
    }

    /// The means so far; begins anew.
    pub fn take(&self) -> Vec<(&'static str, f64)> {
        let sums = std::mem::take(&mut *self.0.borrow_mut());
        sums.into_iter()
            .map(|(name, (sum, weight))| (name, sum / weight))
            .collect()
    }
}
