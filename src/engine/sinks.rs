//! What happens to a gradient the moment it exists.

use super::active::Active;
use crate::base::{Error, Result};
use crate::model::{GradSink, Param};
use crate::ops::tally::Tally;
use crate::ops::update;
use crate::optim::Optimizer;
use candle_core::Tensor;
use std::collections::BTreeMap;

/// Adds gradients up over the micro-batches of a window.
pub struct Accumulate<'a> {
    active: &'a Active,
    /// By name: f32 sums with the weight they belong to.
    pub sums: BTreeMap<String, (Tensor, Tensor)>,
}

impl<'a> Accumulate<'a> {
    pub fn new(active: &'a Active) -> Self {
        Self {
            active,
            sums: BTreeMap::new(),
        }
    }

    /// Adds the squares of all gradients to `tally`.
    pub fn add_squares(&self, tally: &Tally) -> Result<()> {
        for (_, gradient) in self.sums.values() {
            tally.add_squares(gradient)?;
        }
        Ok(())
    }

    /// Names of gradients that are not finite.
    pub fn non_finite(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for (name, (_, gradient)) in &self.sums {
            if !update::all_finite(gradient)? {
                names.push(name.clone());
            }
        }
        Ok(names)
    }
}

impl GradSink for Accumulate<'_> {
    fn wants(&self, name: &str) -> bool {
        self.active.contains(name)
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        match self.sums.get(&*param.name) {
            Some((_, sum)) => update::add_assign(sum, &gradient),
            None => {
                self.sums
                    .insert(param.name.to_string(), (param.tensor.clone(), gradient));
                Ok(())
            }
        }
    }
}

/// Updates each weight at once: no gradient outlives its layer. Only for windows of one micro-batch.
pub struct Step<'a> {
    pub active: &'a Active,
    pub optimizer: &'a mut Optimizer,
    pub lr: f64,
    /// Clipping factor, known beforehand or 1.
    pub coefficient: f32,
    pub tally: &'a Tally,
}

impl GradSink for Step<'_> {
    fn wants(&self, name: &str) -> bool {
        self.active.contains(name)
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        self.tally.add_squares(&gradient)?;
        if self.tally.known().is_some_and(|sums| !sums.squares.is_finite()) {
            return Err(Error::new("gradient is not finite").at(&param.name));
        }
        let lr = self.lr * self.active.rate(&param.name);
        self.optimizer
            .update(&param.name, &param.tensor, &gradient, lr, self.coefficient)
    }
}

/// Only measures: the first of two passes where gradients cannot be kept but must be clipped (LOMO,
/// Lv et al. 2023, arXiv 2306.09782, section 3.3).
pub struct Norm<'a> {
    pub active: &'a Active,
    pub tally: &'a Tally,
}

impl GradSink for Norm<'_> {
    fn wants(&self, name: &str) -> bool {
        self.active.contains(name)
    }

    fn take(&mut self, _param: &Param, gradient: Tensor) -> Result<()> {
        self.tally.add_squares(&gradient)
    }
}

/// Keeps every gradient as it comes; for tests.
pub struct Collect<'a> {
    pub active: &'a Active,
    pub gradients: BTreeMap<String, Tensor>,
}

impl GradSink for Collect<'_> {
    fn wants(&self, name: &str) -> bool {
        self.active.contains(name)
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        match self.gradients.insert(param.name.to_string(), gradient) {
            None => Ok(()),
            Some(_) => Err(Error::new("one backward pass gave two gradients of one parameter").at(&param.name)),
        }
    }
}
