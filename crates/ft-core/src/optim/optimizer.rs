//! Updates of named parameters, with state keyed by name.

use super::config::{Master, OptimizerConfig};
use super::mask;
use super::state::{self, ParamState};
use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};
use crate::ops::index_subset::{self, IndexSubset};
use crate::ops::step::{self, FoundInf, ParameterStep, Precision, UpdateRule};
use crate::ops::update;
use crate::source::MasterLowBits;
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;

/// Updates named parameters and stores their state: moments, and the low 16 bits of fp32 masters.
pub struct Optimizer {
    settings: OptimizerConfig,
    states: BTreeMap<String, ParamState>,
    /// Low 16 bits of the fp32 masters of bf16 weights, i16 `[n]`; kept when a block is deactivated.
    low: BTreeMap<String, Tensor>,
    /// The same of parameters that are updated in parts, i16 of the part of this rank.
    low_parts: BTreeMap<String, Tensor>,
    /// Learning-rate factors by name suffix.
    rates: Vec<(String, f64)>,
    seed: u64,
    /// The current optimizer step, and how often each weight was rounded in it.
    now: u64,
    rounded: BTreeMap<String, u64>,
}

/// One parameter and its gradient.
pub struct Update<'a> {
    /// Name of the parameter: the key of its state.
    pub name: &'a str,
    /// f32, bf16 or f16, updated in place.
    pub weight: &'a Tensor,
    /// f32; shape of the weight, or `[len]` of its active elements.
    pub gradient: &'a Tensor,
    /// The active elements of the weight; `None`: all of them.
    pub subset: Option<IndexSubset>,
}

/// State of one parameter in a checkpoint.
pub struct SavedState<'a> {
    /// Name of the parameter.
    pub name: &'a str,
    /// Number of its updates so far.
    pub step: u64,
    /// Tensors by part name: `m`, `v`; 8-bit states as `m.codes` (u8) and `m.scales`.
    pub parts: Vec<(&'static str, Tensor)>,
    /// Elements of the whole parameter, if `parts` are those of the part of this rank.
    pub part_of: Option<usize>,
}

/// The tensors of one parameter during its update.
struct UpdateTensors {
    /// The weight, or a copy of its active elements.
    weight: Tensor,
    precision: Precision<Tensor>,
}

impl Optimizer {
    /// An optimizer without states; they are created at the first update of a parameter.
    pub fn new(settings: OptimizerConfig) -> Self {
        Self {
            settings,
            states: BTreeMap::new(),
            low: BTreeMap::new(),
            low_parts: BTreeMap::new(),
            rates: Vec::new(),
            seed: 0,
            now: 0,
            rounded: BTreeMap::new(),
        }
    }

    /// How bf16 and f16 weights keep small updates.
    pub fn master(&self) -> Master {
        self.settings.master
    }

    /// Sets the seed of stochastic rounding.
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Parameters whose names end with `ending` use `factor` times the learning rate.
    pub fn set_rate(&mut self, ending: &str, factor: f64) {
        self.rates.push((ending.to_string(), factor));
    }

    /// Sets the next optimizer step (from 1): random numbers depend on it.
    pub fn begin(&mut self, step: u64) {
        self.now = step;
        self.rounded.clear();
    }

    /// Bytes of the moments of a parameter of this shape (`[len]` for a masked one).
    pub fn state_bytes(settings: &OptimizerConfig, shape: &[usize]) -> u64 {
        state::bytes(settings, shape)
    }

    /// Bytes per element that a weight needs beside itself once it was trained: the low 16 bits of its fp32 master.
    pub fn master_bytes(settings: &OptimizerConfig, bf16: bool) -> u64 {
        match settings.master {
            Master::F32 if bf16 => 2,
            _ => 0,
        }
    }

    /// Drops the moments of all parameters that `keep` rejects. The low bits of their fp32 masters are kept, and moved
    /// to the host if they are on a GPU.
    ///
    /// # Errors
    /// Not enough memory on the host.
    pub fn drop_moments_except(&mut self, keep: impl Fn(&str) -> bool) -> Result<()> {
        self.states.retain(|name, _| keep(name));
        let low = self.low.iter_mut().chain(self.low_parts.iter_mut());
        for (_, low) in low.filter(|(name, _)| !keep(name)) {
            *low = low.to_device(&Device::Cpu)?;
        }
        Ok(())
    }

    /// Updates all parameters of a list (no name twice) with their gradients times `coefficient`.
    ///
    /// # Errors
    /// A gradient of another shape than its weight (`Shape`); a weight that is not f32, bf16 or f16 (`Unsupported`).
    pub fn update_all(&mut self, updates: &[Update], lr: f64, coefficient: f32) -> Result<()> {
        self.update_gated(updates, lr, coefficient, FoundInf::default())
    }

    /// As `update_all`; `gate` can disable the update.
    ///
    /// # Errors
    /// As for `update_all`.
    pub fn update_gated(&mut self, updates: &[Update], lr: f64, coefficient: f32, gate: FoundInf) -> Result<()> {
        let mut tensors = Vec::with_capacity(updates.len());
        for u in updates {
            let shape = u.subset.map_or(u.weight.dims().to_vec(), |p| vec![p.len]);
            if shape != u.gradient.dims() {
                return Err(Error::shape("the shapes of gradient and weight differ")
                    .at(u.name)
                    .found(format!("{:?}", u.gradient.dims()))
                    .expected(format!("{shape:?}")));
            }
            if !self.states.contains_key(u.name) {
                let fresh = ParamState::fresh(&self.settings, &shape, u.weight.device())?;
                self.states.insert(u.name.to_string(), fresh);
            }
            tensors.push(self.tensors_for(u.name, u.weight, u.subset.as_ref())?);
        }
        let mut items = Vec::with_capacity(updates.len());
        for u in updates {
            if let Some(state) = self.states.get_mut(u.name) {
                state.step += 1;
                state.updated = self.now;
            }
        }
        for (u, tensors) in updates.iter().zip(&tensors) {
            let Some(state) = self.states.get(u.name) else { continue };
            let vector = crate::source::is_vector(u.name, u.weight.rank());
            items.push(ParameterStep {
                weight: &tensors.weight,
                precision: tensors.precision.as_ref(),
                gradient: u.gradient,
                first: state.first.as_ref(),
                second: state.second.as_ref(),
                lr: lr * self.rate(u.name),
                weight_decay: if vector { 0.0 } else { self.settings.weight_decay },
                step: state.step,
                begin: 0,
            });
        }
        step::step_gated(state::rule(&self.settings), &items, coefficient, gate).map_err(|e| match updates {
            [one] => e.or_at(one.name),
            _ => e,
        })?;
        for (u, tensors) in updates.iter().zip(&tensors) {
            self.put_back(u, tensors)?;
        }
        Ok(())
    }

    /// True if a parameter was updated in `step` or later, even if a gate held it back.
    pub fn has_updated(&self, step: u64) -> bool {
        self.states.values().any(|state| state.updated >= step)
    }

    /// Corrects the counts of updates after `gate` has disabled those of `step`.
    pub fn take_back(&mut self, step: u64) {
        for state in self.states.values_mut().filter(|state| state.updated == step) {
            (state.step, state.updated) = (state.step - 1, 0);
        }
    }

    /// A stateless update by `lr` against the gradient or its sign, without decay or clipping; `gate` can disable it. The
    /// gradient has the shape of the weight.
    ///
    /// # Errors
    /// The gradient has not the shape of the weight (`Shape`).
    pub fn descend(
        &mut self,
        name: &str,
        weight: &Tensor,
        gradient: &Tensor,
        lr: f64,
        sign: bool,
        gate: FoundInf,
    ) -> Result<()> {
        let tensors = self.tensors_for(name, weight, None)?;
        let item = ParameterStep {
            weight,
            precision: tensors.precision.as_ref(),
            gradient,
            first: None,
            second: None,
            lr,
            weight_decay: 0.0,
            step: 1,
            begin: 0,
        };
        let rule = if sign {
            UpdateRule::Sign
        } else {
            UpdateRule::Sgd { momentum: 0.0 }
        };
        step::step_gated(rule, &[item], 1.0, gate).map_err(|e| e.or_at(name))
    }

    fn rate(&self, name: &str) -> f64 {
        let factors = self.rates.iter().filter(|(ending, _)| name.ends_with(ending.as_str()));
        factors.map(|(_, factor)| factor).product()
    }

    /// Returns the weight (or a copy of its active elements) and the values that its update needs.
    fn tensors_for(&mut self, name: &str, weight: &Tensor, subset: Option<&IndexSubset>) -> Result<UpdateTensors> {
        let take = |t: &Tensor| match subset {
            Some(subset) => index_subset::gather(t, subset),
            None => Ok(t.clone()),
        };
        let precision = match (weight.dtype(), self.settings.master) {
            (DType::F32, _) => Precision::Whole,
            (DType::BF16 | DType::F16, Master::Stochastic) => {
                // A weight that is updated twice in a step (a correction in two micro-batches) uses new random numbers.
                let times = self.rounded.entry(name.to_string()).or_insert(0);
                *times += 1;
                let key = [self.now, *times, mask::hash(name)];
                Precision::Stochastic(Rng::new(self.seed, Stream::Rounding, &key))
            }
            (DType::BF16 | DType::F16, Master::F32) => {
                let low = match self.low.remove(name) {
                    Some(low) => low.to_device(weight.device())?,
                    None => update::zeros(weight.elem_count(), DType::I16, weight.device())?,
                };
                let part = take(&low)?;
                self.low.insert(name.to_string(), low);
                Precision::Master(part)
            }
            (other, _) => {
                return Err(Error::unsupported("weight type cannot be trained")
                    .at(name)
                    .found(format!("{other:?}")));
            }
        };
        Ok(UpdateTensors {
            weight: take(weight)?,
            precision,
        })
    }

    fn put_back(&self, u: &Update, tensors: &UpdateTensors) -> Result<()> {
        let Some(subset) = &u.subset else { return Ok(()) };
        index_subset::scatter(u.weight, &tensors.weight, subset)?;
        match (self.low.get(u.name), &tensors.precision) {
            (Some(whole), Precision::Master(low)) => index_subset::scatter(whole, low, subset),
            _ => Ok(()),
        }
    }

    /// The exact f32 values of a trained weight, in row-major order.
    ///
    /// # Errors
    /// The weight is neither f32, bf16 nor f16.
    pub fn exact(&self, name: &str, weight: &Tensor) -> Result<Vec<f32>> {
        match (weight.dtype(), self.low.get(name)) {
            (DType::BF16 | DType::F16, Some(low)) => step::join(weight, low),
            _ => update::to_f32_vec(weight),
        }
    }

    /// Sets a weight to exact f32 values from `exact`, or to an average of such values.
    ///
    /// # Errors
    /// Another number of values than the weight has elements (`Shape`).
    pub fn restore_weight(&mut self, name: &str, weight: &Tensor, values: &[f32]) -> Result<()> {
        if values.len() != weight.elem_count() {
            return Err(Error::shape("the saved weight has a different size").at(name));
        }
        match weight.dtype() {
            DType::BF16 | DType::F16 => {
                // Rounds as the stores do, also between two numbers: an export of a checkpoint has the bits of `final/`.
                let low = update::zeros(values.len(), DType::I16, weight.device())?;
                step::split(values, weight, &low)?;
                self.put_low(name, low);
                Ok(())
            }
            _ => update::set(weight, values),
        }
    }

    /// The states of all parameters, sorted by name.
    pub fn saved(&self) -> impl Iterator<Item = SavedState<'_>> {
        self.states.iter().map(|(name, state)| saved(name, state))
    }

    /// The state of one parameter, if it has one.
    pub fn saved_of(&self, name: &str) -> Option<SavedState<'_>> {
        self.states.get_key_value(name).map(|(name, state)| saved(name, state))
    }

    /// Restores the state of a parameter from `saved`. `part_of` as there.
    ///
    /// # Errors
    /// The parts of a state are incomplete, or one of them is unknown (`Format`).
    pub fn restore_state(
        &mut self,
        name: &str,
        step: u64,
        parts: BTreeMap<String, Tensor>,
        part_of: Option<usize>,
    ) -> Result<()> {
        let state = ParamState::from_parts(step, parts).map_err(|e| e.or_at(name))?;
        self.states.insert(name.to_string(), ParamState { part_of, ..state });
        Ok(())
    }

    /// Bytes of the current state.
    pub fn bytes(&self) -> u64 {
        let states: u64 = self.states.values().map(ParamState::bytes).sum();
        let low = self.low.values().chain(self.low_parts.values());
        let low: usize = low.map(|l| 2 * l.elem_count()).sum();
        states + low as u64
    }
}

fn saved<'a>(name: &'a str, state: &ParamState) -> SavedState<'a> {
    SavedState {
        name,
        step: state.step,
        parts: state.parts(),
        part_of: state.part_of,
    }
}

impl MasterLowBits for Optimizer {
    fn put_low(&mut self, name: &str, low: Tensor) {
        // Without fp32 masters there are no low bits.
        if self.settings.master == Master::F32 {
            self.low.insert(name.to_string(), low);
        }
    }

    fn take_low(&mut self, name: &str) -> Option<Tensor> {
        self.take_own_low(name)
    }
}

mod parts;

pub(crate) use parts::view as part_view;
pub use parts::{PartUpdate, range_of_part};

#[cfg(test)]
mod tests;
