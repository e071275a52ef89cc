//! Exponential moving averages of the trained weights, beside the step: the average of the first update is the weights after
//! it, as in `torch.optim.swa_utils.AveragedModel`; each later one is decay x average + (1 - decay) x weights. With a ramp
//! the decay of update t (from 1) is at most t / (9 + t), as in `EMAModel` of diffusers.
//!
//! Only active parameters have an average. A block of parameters whose turn ends gets its average as its value: the solution
//! of a block's problem is the average of its iterates, and the next block trains beside that solution.

use super::active::Active;
use super::step::Engine;
use crate::base::{Error, Result};
use crate::optim::config::Master;
use candle_core::DType;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// How the trained weights are averaged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmaConfig {
    /// Highest part of the average that an update keeps, below 1.
    pub decay: f64,
    /// The decay grows with the updates.
    pub ramp: bool,
}

/// Elements that one task averages.
const CHUNK: usize = 1 << 16;

/// The averages of the trained weights.
pub struct Ema {
    config: EmaConfig,
    averages: BTreeMap<Arc<str>, Average>,
}

/// The average of one parameter.
struct Average {
    /// f32, in host memory. While the averages are in use: the weights.
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

/// As `torch.lerp`: from `average` to `now` by `part`.
fn lerp(average: &mut [f32], now: &[f32], part: f32) {
    let chunks = average.par_chunks_mut(CHUNK).zip(now.par_chunks(CHUNK));
    chunks.for_each(|(average, now)| {
        for (average, now) in average.iter_mut().zip(now) {
            let away = now - *average;
            *average = if part < 0.5 {
                *average + part * away
            } else {
                now - away * (1.0 - part)
            };
        }
    });
}

impl Ema {
    /// No average yet.
    pub fn new(config: EmaConfig) -> Self {
        Self {
            config,
            averages: BTreeMap::new(),
        }
    }

    /// Names of the averages with the number of updates and the values of each, for a checkpoint.
    pub fn saved(&self) -> impl Iterator<Item = (&str, u64, &[f32])> {
        self.averages.iter().map(|(n, a)| (&**n, a.updates, &a.values[..]))
    }

    /// The values of an average, f32.
    pub fn values(&self, name: &str) -> Option<&[f32]> {
        self.averages.get(name).map(|average| &average.values[..])
    }

    /// Restores an average from `saved`.
    pub fn restore(&mut self, name: &str, updates: u64, values: Vec<f32>) {
        let average = Average {
            values,
            updates,
            aside: None,
        };
        self.averages.insert(Arc::from(name), average);
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
            let now = self.exact_here(name)?;
            match ema.averages.get_mut(&**name) {
                None => ema.restore(name, 1, now),
                Some(average) if average.values.len() == now.len() => {
                    average.updates += 1;
                    let part = 1.0 - config.decay_of(average.updates);
                    lerp(&mut average.values, &now, part as f32);
                }
                Some(_) => return Err(Error::shape("the average of a weight has a different size").at(name)),
            }
        }
        self.ema = Some(ema);
        Ok(())
    }

    /// Runs `work` with the averages in the place of the weights, for an evaluation or an export. After it the weights have
    /// the same bits as before.
    ///
    /// # Errors
    /// Those of `work`; an average that does not belong to a parameter of the model.
    pub fn with_averages<T>(&mut self, work: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        self.swap_averages()?;
        let done = work(self);
        self.swap_averages()?;
        done
    }

    /// Puts the averages in the place of the weights; the next call puts the weights back.
    fn swap_averages(&mut self) -> Result<()> {
        let Some(mut ema) = self.ema.take() else {
            return Ok(());
        };
        for (name, average) in &mut ema.averages {
            let weight = self.network.param(name)?.tensor;
            if let Some(now) = average.aside.take() {
                self.optimizer.restore_weight(name, &weight, &now)?;
                continue;
            }
            let now = self.exact_here(name)?;
            self.optimizer.restore_weight(name, &weight, &average.values)?;
            if is_exact(weight.dtype(), self.optimizer.master()) {
                average.values = now;
            } else {
                average.aside = Some(now);
            }
        }
        self.ema = Some(ema);
        self.place_rows()
    }

    /// Gives the parameters outside `active` and those that do not survive a switch their averages as values.
    pub(super) fn settle_averages(&mut self, active: &Active, survives: &dyn Fn(&str) -> bool) -> Result<()> {
        let Some(mut ema) = self.ema.take() else {
            return Ok(());
        };
        let ended = |name: &Arc<str>, _: &mut Average| !(active.contains(name) && survives(name));
        for (name, average) in ema.averages.extract_if(.., ended) {
            let weight = self.network.param(&name)?.tensor;
            self.optimizer.restore_weight(&name, &weight, &average.values)?;
        }
        self.ema = Some(ema);
        self.place_rows()
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

    #[test]
    fn a_mean_is_that_of_torch() {
        // torch.lerp(tensor([1., -2.]), tensor([3., 6.]), weight)
        for (part, want) in [(0.25f32, [1.5f32, 0.0]), (0.75, [2.5, 4.0]), (1.0, [3.0, 6.0])] {
            let mut average = [1.0, -2.0];
            lerp(&mut average, &[3.0, 6.0], part);
            assert_eq!(average, want);
        }
    }
}
