//! Ranks that train alone and are averaged after every H steps, so that almost nothing travels between: local SGD with an
//! outer optimizer (DiLoCo: Douillard et al. 2023, arXiv 2311.08105, algorithm 1). The outer gradient is the difference
//! between the weights at the last average and the mean of the weights of all ranks; the outer optimizer is SGD with
//! Nesterov momentum, as in `torch.optim.SGD`. With rate 1 and no momentum the mean is the result (FedAvg: McMahan et al.
//! 2017, arXiv 1602.05629). A proximal term keeps each rank near the last average (FedProx: Li et al. 2018, arXiv
//! 1812.06127, equation 2).
//!
//! Letters: W ranks, H steps between averages.

use super::active::ActiveSet;
use super::publish::{Publish, publish};
use super::reduce::{BUCKET, ReduceGradients};
use super::step::Engine;
use crate::base::{Error, Result};
use crate::comm::part_of;
use crate::model::Param;
use crate::ops::update;
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// When and how the ranks are averaged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OuterConfig {
    /// H: steps between two averages.
    pub every: u64,
    /// The last step of the run: the ranks are averaged after it too.
    pub last: u64,
    /// Rate of the outer optimizer.
    pub learning_rate: f64,
    /// Momentum of the outer optimizer; 0: none.
    pub momentum: f64,
    /// Nesterov's form of the momentum.
    pub nesterov: bool,
    /// Factor mu of the proximal term mu/2 |w - w at the last average|^2 of the loss of a rank; 0: none.
    pub proximal: f64,
}

/// The state of the outer optimizer.
pub(super) struct OuterState {
    config: OuterConfig,
    /// Steps since the last average.
    since: u64,
    /// The weights at the last average, f32: the part of this rank, or all of a parameter for the proximal term. Empty
    /// until the next step begins.
    start: BTreeMap<Arc<str>, Vec<f32>>,
    /// The momentum of the part of this rank, f32.
    momentum: BTreeMap<Arc<str>, Vec<f32>>,
}

/// The part of a saved tensor name that says whose moments it has.
const OF_RANK: &str = "rank-";
/// Name of the momentum of the outer optimizer beside the parts of a state.
pub(super) const OUTER: &str = "outer";

/// Bytes of the state of the outer optimizer on a rank, of a parameter of `n` elements.
pub fn outer_bytes(config: &OuterConfig, n: u64, ranks: u64) -> u64 {
    let own = crate::comm::share(n, ranks);
    let start = if config.proximal > 0.0 { n } else { own };
    let momentum = if config.momentum > 0.0 { own } else { 0 };
    4 * (start + momentum)
}

impl OuterState {
    /// The new values of the own part of a parameter, from the mean over all ranks.
    fn step(&mut self, name: &Arc<str>, start: &[f32], mean: Vec<f32>) -> Vec<f32> {
        let OuterConfig {
            learning_rate: rate,
            momentum,
            nesterov,
            ..
        } = self.config;
        if rate == 1.0 && momentum == 0.0 {
            return mean;
        }
        let (rate, factor) = (rate as f32, momentum as f32);
        let gradient: Vec<f32> = start.iter().zip(&mean).map(|(start, mean)| start - mean).collect();
        let descend = |gradient: &[f32]| start.iter().zip(gradient).map(|(w, g)| w - rate * g).collect();
        if momentum == 0.0 {
            return descend(&gradient);
        }
        // As torch: the first momentum is the gradient.
        let buffer = match self.momentum.remove(name) {
            Some(old) => old.iter().zip(&gradient).map(|(m, g)| factor * m + g).collect(),
            None => gradient.clone(),
        };
        let out = if nesterov {
            let ahead: Vec<f32> = gradient.iter().zip(&buffer).map(|(g, m)| g + factor * m).collect();
            descend(&ahead)
        } else {
            descend(&buffer)
        };
        self.momentum.insert(name.clone(), buffer);
        out
    }
}

/// The own parts of averaged weights, and the whole weights that come from all ranks.
struct AveragedWeights {
    own: Vec<Vec<f32>>,
    /// First element of each own part.
    first: Vec<usize>,
    whole: Vec<Vec<f32>>,
}

impl Publish for AveragedWeights {
    fn own(&mut self, item: usize, range: Range<usize>) -> Result<Vec<f32>> {
        let at = range.start - self.first[item];
        let values = self.own[item][at..at + range.len()].to_vec();
        self.whole[item][range].copy_from_slice(&values);
        Ok(values)
    }

    fn put(&mut self, item: usize, range: Range<usize>, values: &[f32]) -> Result<()> {
        self.whole[item][range].copy_from_slice(values);
        Ok(())
    }
}

impl Engine {
    /// The ranks of `join` train alone between averages. Call it after `join`, before the first step.
    pub fn train_apart(&mut self, config: OuterConfig) {
        self.divided = false;
        self.outer = Some(OuterState {
            config,
            since: 0,
            start: BTreeMap::new(),
            momentum: BTreeMap::new(),
        });
    }

    /// True if every rank has the same weights: they are averaged, or are always the same.
    pub fn is_synchronized(&self) -> bool {
        self.outer.as_ref().is_none_or(|outer| outer.since == 0)
    }

    /// True if each rank has moments of its own (`train_apart`).
    pub fn trains_apart(&self) -> bool {
        self.outer.is_some()
    }

    /// The exact values of a weight of this rank.
    pub(super) fn exact_here(&self, name: &str) -> Result<Vec<f32>> {
        self.optimizer.exact(name, &self.network.param(name)?.tensor)
    }

    /// Keeps the weights before the first step after an average.
    pub(super) fn begin_apart(&mut self, active: &ActiveSet) -> Result<()> {
        let Some(mut outer) = self.outer.take() else {
            return Ok(());
        };
        if outer.since == 0 {
            // Only active parameters have an outer momentum, as they have moments.
            outer.momentum.retain(|name, _| active.contains(name));
            outer.start.clear();
            for name in active.names() {
                let mut values = self.exact_here(name)?;
                if outer.config.proximal == 0.0 {
                    values = values[self.part_here(name, values.len())].to_vec();
                }
                outer.start.insert(Arc::from(name), values);
            }
        }
        outer.since += 1;
        self.outer = Some(outer);
        Ok(())
    }

    /// The elements of a parameter of `n` elements that this rank averages.
    fn part_here(&self, name: &str, n: usize) -> Range<usize> {
        let world = self.comm.world();
        part_of(name, n, world.rank, world.size)
    }

    /// Averages the ranks if it is time after `step`. All ranks call it.
    ///
    /// # Errors
    /// Another rank has failed.
    pub(super) fn average(&mut self, step: u64) -> Result<()> {
        let Some(mut outer) = self.outer.take() else {
            return Ok(());
        };
        if step.is_multiple_of(outer.config.every) || step >= outer.config.last {
            let names: Vec<Arc<str>> = outer.start.keys().cloned().collect();
            let (mut group, mut elements) = (Vec::new(), 0);
            for (i, name) in names.iter().enumerate() {
                elements += self.elements(name)?;
                group.push(name.clone());
                // Parameters travel together, and few of them are in memory twice.
                if elements >= BUCKET || i + 1 == names.len() {
                    self.average_group(&mut outer, &std::mem::take(&mut group))?;
                    elements = 0;
                }
            }
            (outer.since, outer.start) = (0, BTreeMap::new());
        }
        self.outer = Some(outer);
        Ok(())
    }

    fn average_group(&mut self, outer: &mut OuterState, names: &[Arc<str>]) -> Result<()> {
        let comm = self.comm.clone();
        let size = comm.world().size;
        let mut sum = ReduceGradients::new(&*comm, None, false);
        sum.begin_round(size);
        for name in names {
            let tensor = self.network.param(name)?.tensor;
            let values = Tensor::new(self.exact_here(name)?, &Device::Cpu)?;
            let name = name.clone();
            sum.take(&Param { name, tensor }, &values)?;
        }
        let mut averaged = AveragedWeights {
            own: Vec::new(),
            first: Vec::new(),
            whole: Vec::new(),
        };
        let (mut items, mut weights) = (Vec::new(), Vec::new());
        for sum in sum.own_sums()? {
            let (name, n) = (sum.param.name.clone(), sum.elements());
            let mut mean = update::to_f32_vec(&sum.sum)?;
            mean.iter_mut().for_each(|x| *x /= size as f32);
            let missing = || Error::internal("a weight at the last average is missing").at(&*name);
            let start = outer.start.remove(&name).ok_or_else(missing)?;
            let start = if outer.config.proximal > 0.0 {
                &start[sum.range.clone()]
            } else {
                &start
            };
            averaged.own.push(outer.step(&name, start, mean));
            averaged.first.push(sum.range.start);
            averaged.whole.push(vec![0.0; n]);
            items.push((name, n));
            weights.push(sum.param.tensor);
        }
        publish(&*comm, &items, &mut averaged)?;
        for (((name, _), weight), values) in items.iter().zip(&weights).zip(&averaged.whole) {
            self.optimizer.restore_weight(name, weight, values)?;
        }
        Ok(())
    }

    /// The gradients mu (w - w at the last average) of the proximal term, f32 of the shapes of the weights; none without it.
    pub(super) fn proximal(&self) -> Result<Vec<(Arc<str>, Tensor)>> {
        let Some(outer) = self.outer.as_ref().filter(|outer| outer.config.proximal > 0.0) else {
            return Ok(Vec::new());
        };
        let mu = outer.config.proximal as f32;
        let of = |(name, start): (&Arc<str>, &Vec<f32>)| {
            let weight = self.network.param(name)?.tensor;
            let now = self.exact_here(name)?;
            let pull: Vec<f32> = now.iter().zip(start).map(|(w, start)| mu * (w - start)).collect();
            Ok((name.clone(), Tensor::from_vec(pull, weight.dims(), weight.device())?))
        };
        outer.start.iter().map(of).collect()
    }

    /// The saved tensors of a state: those of rank 0, then those of the others, then the momentum of the outer optimizer.
    pub(super) fn moments_apart(&self, own: Vec<super::SavedMoment>) -> Vec<super::SavedMoment> {
        let Some(outer) = &self.outer else { return own };
        let mut all = Vec::new();
        for rank in 0..self.comm.world().size {
            all.extend(own.iter().map(|moment| super::SavedMoment {
                name: if rank == 0 {
                    moment.name.clone()
                } else {
                    format!("{OF_RANK}{rank}/{}", moment.name)
                },
                part: moment.part,
                dtype: moment.dtype,
                elements: moment.elements,
            }));
        }
        let momentum = outer.momentum.keys().map(|name| super::SavedMoment {
            name: name.to_string(),
            part: OUTER,
            dtype: candle_core::DType::F32,
            elements: self.elements(name).unwrap_or(0),
        });
        all.extend(momentum);
        all
    }

    /// The own part of the momentum of the outer optimizer.
    pub(super) fn outer_momentum(&self, name: &str) -> Option<&[f32]> {
        self.outer.as_ref()?.momentum.get(name).map(Vec::as_slice)
    }

    /// Restores a tensor of a state if it is of the outer optimizer or of another rank, and returns `None`; else the name of
    /// the parameter to which it belongs here.
    ///
    /// # Errors
    /// A tensor that is too short.
    pub fn restore_apart<'n>(&mut self, name: &'n str, part: &str, tensor: &Tensor) -> Result<Option<&'n str>> {
        let rank = self.comm.world().rank;
        let of = self.part_here(name, tensor.elem_count());
        let Some(outer) = &mut self.outer else {
            return Ok(Some(name));
        };
        if part == OUTER {
            let values = update::to_f32_vec(tensor)?[of].to_vec();
            outer.momentum.insert(Arc::from(name), values);
            return Ok(None);
        }
        let (owner, name) = rank_of(name);
        Ok((owner == rank).then_some(name))
    }
}

/// The rank whose moments have this name, and the name of the parameter.
pub(super) fn rank_of(name: &str) -> (usize, &str) {
    let of = || {
        let (rank, name) = name.strip_prefix(OF_RANK)?.split_once('/')?;
        Some((rank.parse().ok()?, name))
    };
    of().unwrap_or((0, name))
}
