//! Means for metrics, by name: sums and counts.

use crate::sync::lock;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

/// Sums and counts of metrics, by name.
#[derive(Debug, Default)]
pub struct NamedMeans(RefCell<BTreeMap<&'static str, (f64, f64)>>);

/// What was added under one name.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedSum {
    /// The name of the metric.
    pub name: String,
    /// The sum.
    pub sum: f64,
    /// The number of items.
    pub count: f64,
}

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

    /// The sums and counts since the last call, for `put_back`.
    pub fn take_sums(&self) -> Vec<NamedSum> {
        let all = self.0.take().into_iter();
        all.map(|(name, (sum, count))| NamedSum {
            name: name.to_string(),
            sum,
            count,
        })
        .collect()
    }

    /// Adds a sum that `take_sums` returned, here or in another process.
    pub fn put_back(&self, added: &NamedSum) {
        let name = &added.name[..];
        let known = self.0.borrow().get_key_value(name).map(|(name, _)| *name);
        let name = known.unwrap_or_else(|| lasting(name));
        let mut all = self.0.borrow_mut();
        let known = all.entry(name).or_default();
        *known = (known.0 + added.sum, known.1 + added.count);
    }
}

/// Names of metrics live until the program ends: each name is stored once.
fn lasting(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = lock(&NAMES);
    if let Some(known) = names.get(name) {
        return known;
    }
    let name: &'static str = Box::leak(name.to_string().into_boxed_str());
    names.insert(name);
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_that_were_taken_can_be_added_again() {
        let (all, part) = (NamedMeans::default(), NamedMeans::default());
        part.add("kl", 6.0, 2.0);
        part.add_sum("hidden", 1.0);
        let sums = part.take_sums();
        assert!(part.take().is_empty());
        let other = NamedSum {
            name: "kl".into(),
            sum: 1.0,
            count: 5.0,
        };
        sums.iter().chain([&other]).for_each(|sum| all.put_back(sum));
        assert_eq!(all.take(), [("kl", 1.0)]);
    }
}
