//! Sums of gradients by parameter, for a parameter that gets more than one gradient.

use super::contracts::Param;
use crate::base::Result;
use crate::ops::update;
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One f32 sum per parameter, by name and in the order of the first gradients.
#[derive(Default)]
pub struct NamedSums {
    sums: BTreeMap<Arc<str>, (Param, Tensor)>,
    /// Stays as it is when a sum is removed.
    order: Vec<Arc<str>>,
}

impl NamedSums {
    /// Adds to the sum in place; the first gradient of a parameter becomes its sum.
    ///
    /// # Errors
    /// The gradient has not the shape of the sum.
    pub fn add(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        if let Some((_, sum)) = self.sums.get(&param.name) {
            return update::add_assign(sum, &gradient);
        }
        self.order.push(param.name.clone());
        self.sums.insert(param.name.clone(), (param.clone(), gradient));
        Ok(())
    }

    /// The sum of a parameter.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.sums.get(name).map(|(_, sum)| sum)
    }

    /// The names in the order of the first gradients.
    pub fn names(&self) -> &[Arc<str>] {
        &self.order
    }

    /// The sums in the order of the first gradients.
    pub fn in_order(&self) -> impl Iterator<Item = &Tensor> {
        self.order.iter().filter_map(|name| self.get(name))
    }

    /// The parameters and their sums, sorted by name.
    pub fn by_name(&self) -> impl Iterator<Item = (&Param, &Tensor)> {
        self.sums.values().map(|(param, sum)| (param, sum))
    }

    /// Removes the first sum by name.
    pub fn pop_first(&mut self) -> Option<(Param, Tensor)> {
        self.sums.pop_first().map(|(_, entry)| entry)
    }

    /// Passes the sums on in the order of the first gradients. Each is freed before the next one is returned, if the caller
    /// drops it.
    pub fn into_order(mut self) -> impl Iterator<Item = (Param, Tensor)> {
        let order = std::mem::take(&mut self.order);
        order.into_iter().filter_map(move |name| self.sums.remove(&name))
    }
}
