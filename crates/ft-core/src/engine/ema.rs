//! Exponential moving averages of the trained weights, beside the step: the average of the first update is the weights after
//! it, as in `torch.optim.swa_utils.AveragedModel`; each later one is decay x average + (1 - decay) x weights. With a ramp
//! the decay of update t (from 1) is at most t / (9 + t), as in `EMAModel` of diffusers.
//!
//! Several ranks that divide the moments of a parameter divide its average too: each one averages its part, and sends it to
//! the others where the averages take the place of the weights. The bits are those of one rank.
//!
//! Only active parameters have an average. A block of parameters whose turn ends gets its average as its value: the solution
//! of a block's problem is the average of its iterates, and the next block trains beside that solution.

use super::active::ActiveSet;
use super::divided::{AVERAGE, MomentSink, MomentValues};
use super::publish::{Publish, publish};
use super::step::Engine;
use crate::base::{Error, Result};
use crate::comm::Patience;
use crate::ops::{step, update};
use crate::optim::Optimizer;
use crate::optim::config::Master;
use crate::optim::part_view;
use candle_core::{DType, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// How the trained weights are averaged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmaConfig {
    /// Highest part of the average that an update keeps, below 1.
    pub decay: f64,
    /// The decay grows with the updates.
    pub ramp: bool,
}

/// The averages of the trained weights.
pub struct Ema {
    config: EmaConfig,
    averages: BTreeMap<Arc<str>, Average>,
}

/// The average of one parameter.
struct Average {
    /// f32, in host memory: the whole, or the part of this rank. While the averages are in use: the weights.
    values: Vec<f32>,
    /// Number of weights in it.
    updates: u64,
    /// While the averages are in use: the weights, if they cannot be in the place of `values`.
    aside: Option<Vec<f32>>,
}

/// Bytes of the average of a parameter of `n` elements, in host memory. `exact`: its weight has the values of an f32 number.
pub fn ema_bytes(n: u64, exact: bool) -> u64 {
    if exact { 4 * n } else { 8 * n }
}

impl EmaConfig {
    /// The part of the average that update `t` (from 1) keeps.
    fn decay_of(&self, t: u64) -> f64 {
        match t {
            0 | 1 => 0.0,
            _ if self.ramp => self.decay.min(t as f64 / (9 + t) as f64),
            _ => self.decay,
        }
    }
}

impl Ema {
    /// No average yet.
    pub fn new(config: EmaConfig) -> Self {
        Self {
            config,
            averages: BTreeMap::new(),
        }
    }

    /// Names of the averages with the number of updates of each, for a checkpoint.
    pub fn saved(&self) -> impl Iterator<Item = (&str, u64)> {
        self.averages.iter().map(|(name, average)| (&**name, average.updates))
    }

    /// The values of an average that this rank has, f32.
    pub(super) fn values(&self, name: &str) -> Option<&[f32]> {
        self.averages.get(name).map(|average| &average.values[..])
    }

    fn insert(&mut self, name: &str, updates: u64, values: Vec<f32>) {
        let average = Average {
            values,
            updates,
            aside: None,
        };
        self.averages.insert(Arc::from(name), average);
    }
}

/// Sends the parts of weights as they are stored.
struct StoredParts<'a> {
    items: &'a [(Arc<str>, usize)],
    weights: Vec<Tensor>,
}

impl Publish for StoredParts<'_> {
    fn own(&mut self, item: usize, range: Range<usize>) -> Result<Vec<f32>> {
        Optimizer::stored_part(&self.items[item].0, &self.weights[item], &range)
    }

    fn put(&mut self, item: usize, range: Range<usize>, values: &[f32]) -> Result<()> {
        Optimizer::set_part(&self.items[item].0, &self.weights[item], &range, values)
    }

    fn is_bf16(&self, item: usize) -> bool {
        self.weights[item].dtype() == DType::BF16
    }
}

impl Engine {
    /// Adds the weights after a step to the averages.
    pub(super) fn add_to_averages(&mut self, names: &BTreeSet<String>) -> Result<()> {
        let Some(mut ema) = self.ema.take() else {
            return Ok(());
        };
        let config = ema.config;
        for name in names {
            let now = self.exact_own(name)?;
            match ema.averages.get_mut(&**name) {
                None => ema.insert(name, 1, now),
                Some(average) if average.values.len() == now.len() => {
                    average.updates += 1;
                    let part = 1.0 - config.decay_of(average.updates);
                    update::lerp(&mut average.values, &now, part as f32);
                }
                Some(_) => return Err(Error::shape("the average of a weight has a different size").at(name)),
            }
        }
        self.ema = Some(ema);
        Ok(())
    }

    /// Runs `work` with the averages in the place of the weights, for an evaluation or an export. After it the weights have
    /// the same bits as before. After an error of `work` on several ranks this rank cannot train any more: the averages stay.
    ///
    /// # Errors
    /// Those of `work`; an average that does not belong to a parameter of the model.
    pub fn with_averages<T>(&mut self, work: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        self.swap_averages()?;
        let done = work(self);
        // The ranks put the weights back together, and the others may not have this error.
        if done.is_err() && self.comm.world().size > 1 {
            return done;
        }
        let back = self.swap_averages();
        let done = done?;
        back.map(|()| done)
    }

    /// Puts the averages in the place of the weights; the next call puts the weights back.
    fn swap_averages(&mut self) -> Result<()> {
        let Some(mut ema) = self.ema.take() else {
            return Ok(());
        };
        for (name, average) in &mut ema.averages {
            if let Some(now) = average.aside.take() {
                self.set_own(name, &now)?;
                continue;
            }
            let now = self.exact_own(name)?;
            self.set_own(name, &average.values)?;
            if is_exact(self.own_weight(name)?.dtype(), self.optimizer.master()) {
                average.values = now;
            } else {
                average.aside = Some(now);
            }
        }
        self.share(ema.averages.keys())?;
        self.ema = Some(ema);
        self.place_rows()
    }

    /// Gives the parameters outside `active` and those that do not survive a switch their averages as values.
    pub(super) fn settle_averages(&mut self, active: &ActiveSet, survives: &dyn Fn(&str) -> bool) -> Result<()> {
        let Some(mut ema) = self.ema.take() else {
            return Ok(());
        };
        let ended = |name: &Arc<str>, _: &mut Average| !(active.contains(name) && survives(name));
        let ended: BTreeMap<Arc<str>, Average> = ema.averages.extract_if(.., ended).collect();
        for (name, average) in &ended {
            self.set_own(name, &average.values)?;
        }
        self.share(ended.keys())?;
        self.ema = Some(ema);
        self.place_rows()
    }

    /// The elements of a weight that this rank averages, in place: its part of them if moments are divided, else all.
    fn own_weight(&self, name: &str) -> Result<Tensor> {
        if let Some(own) = self.store.sharded().and_then(|store| store.own(name)) {
            return Ok(own);
        }
        let weight = self.network.param(name)?.tensor;
        match self.own_part(name, weight.elem_count()) {
            Some(own) => part_view(&weight, name, &own),
            None => Ok(weight),
        }
    }

    /// The exact values of `own_weight`.
    fn exact_own(&self, name: &str) -> Result<Vec<f32>> {
        let own = self.own_weight(name)?;
        match self.optimizer.low_part(name) {
            Some(low) => step::join(&own, low),
            None => self.optimizer.exact(name, &own),
        }
    }

    /// Sets `own_weight` to exact values or to an average.
    fn set_own(&mut self, name: &str, values: &[f32]) -> Result<()> {
        let own = self.own_weight(name)?;
        self.optimizer.restore_weight(name, &own, values)?;
        match self.own_part(name, self.elements(name)?) {
            Some(range) => self.optimizer.cut_low(name, &range),
            None => Ok(()),
        }
    }

    /// Sends the own parts of these weights to the other ranks, if the ranks have parts. Weights in parts are collected
    /// again before their next use.
    fn share<'n>(&self, names: impl Iterator<Item = &'n Arc<str>>) -> Result<()> {
        if !self.divided {
            return Ok(());
        }
        let (in_parts, whole): (Vec<_>, Vec<_>) = names.partition(|name| self.is_in_parts(name));
        self.store.updated(&|name| in_parts.iter().any(|own| &***own == name))?;
        let (mut items, mut weights) = (Vec::new(), Vec::new());
        for name in whole {
            items.push((name.clone(), self.elements(name)?));
            weights.push(self.network.param(name)?.tensor);
        }
        let mut stored = StoredParts { items: &items, weights };
        publish(&*self.comm, &items, &mut stored)
    }

    /// Passes the values of an average to `sink`, with the elements of all ranks. For rank 0 within `by_root`.
    ///
    /// # Errors
    /// There is no such average; another rank has failed; any error of `sink`.
    pub fn average_values(&self, name: &str, sink: &mut super::switch::ExactSink) -> Result<()> {
        if !self.divided {
            let values = self.ema.as_ref().and_then(|ema| ema.values(name));
            return sink(values.ok_or_else(|| Error::internal("an average is missing").at(name))?);
        }
        let asked = format!("{name}\n{AVERAGE}");
        self.comm.all_gather_bytes(asked.into_bytes(), Patience::Step)?;
        let sink: &mut MomentSink = &mut |values| match values {
            MomentValues::F32(values) => sink(values),
            MomentValues::U8(_) => Ok(()),
        };
        self.answer(name, AVERAGE, sink)
    }

    /// Restores an average from the values that `average_values` gave.
    ///
    /// # Errors
    /// The model has no such parameter (`NotFound`), or its size differs (`Shape`).
    pub fn restore_average(&mut self, name: &str, updates: u64, mut values: Vec<f32>) -> Result<()> {
        let n = self.elements(name)?;
        if values.len() != n {
            return Err(Error::shape("the saved average of a weight has a different size").at(name));
        }
        if let Some(own) = self.own_part(name, n) {
            values = values[own].to_vec();
        }
        if let Some(ema) = &mut self.ema {
            ema.insert(name, updates, values);
        }
        Ok(())
    }

    /// Copies trained rows to the tables that have them.
    pub(super) fn place_rows(&self) -> Result<()> {
        self.network
            .tokens
            .iter()
            .try_for_each(|rows| rows.place(&self.network))
    }
}

/// True if a weight of this type can have every f32 value.
fn is_exact(dtype: DType, master: Master) -> bool {
    dtype == DType::F32 || dtype == DType::BF16 && master == Master::F32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_decay_grows_to_its_value() {
        let config = EmaConfig { decay: 0.9, ramp: true };
        let decays = [1, 2, 3, 80, 81, 1000].map(|t| config.decay_of(t));
        assert_eq!(decays, [0.0, 2.0 / 11.0, 0.25, 80.0 / 89.0, 0.9, 0.9]);
        let constant = EmaConfig { ramp: false, ..config };
        assert_eq!([1, 2, 3].map(|t| constant.decay_of(t)), [0.0, 0.9, 0.9]);
    }
}
