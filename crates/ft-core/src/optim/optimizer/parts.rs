//! Updates of a part of a parameter: on several ranks each one has the moments of its part, updates it, and the others
//! copy the result. The bits are those of an update of the whole parameter.

use super::super::state::{self, ParamState};
use super::{Optimizer, UpdateTensors};
use crate::base::{Error, Result};
use crate::ops::step::{self, BLOCK, FoundInf, ParameterStep, Precision};
use crate::ops::update;
use crate::optim::config::{Master, OptimizerName};
use candle_core::{DType, Tensor};
use std::ops::Range;

/// The part of a parameter that this rank updates.
pub struct PartUpdate<'a> {
    /// Name of the parameter: the key of its state.
    pub name: &'a str,
    /// f32, bf16 or f16: the whole weight of n elements, of which only `range` is updated, or this range alone. In place.
    pub weight: &'a Tensor,
    /// Sizes of the dimensions of the whole weight.
    pub shape: &'a [usize],
    /// The elements. Begins at a multiple of `comm::QUANTUM`; may be empty.
    pub range: Range<usize>,
    /// f32, `[range.len()]`
    pub gradient: &'a Tensor,
}

/// The range of a moment's tensor (`SavedState::parts`) that belongs to a range of elements.
pub fn range_of_part(part: &str, elements: &Range<usize>) -> Range<usize> {
    if part.ends_with(".scales") {
        elements.start.div_ceil(BLOCK)..elements.end.div_ceil(BLOCK)
    } else {
        elements.clone()
    }
}

/// A view of some elements of a tensor, flat.
///
/// # Errors
/// The tensor is not contiguous.
pub(crate) fn view(tensor: &Tensor, name: &str, range: &Range<usize>) -> Result<Tensor> {
    if !tensor.is_contiguous() {
        return Err(Error::internal("a part of a weight needs a contiguous tensor").at(name));
    }
    Ok(tensor.flatten_all()?.narrow(0, range.start, range.len())?)
}

impl Optimizer {
    /// True if every element is updated by itself, so that a parameter can be updated in parts. The means of Adafactor
    /// are sums over the whole parameter.
    pub fn can_divide(&self) -> bool {
        self.settings.name != OptimizerName::Adafactor
    }

    /// Updates parts of parameters with their gradients times `coefficient`; `gate` can disable it. Every rank calls it for
    /// every parameter, also if its part is empty, so that the counts of updates are equal.
    ///
    /// # Errors
    /// A gradient of another size than its part (`Shape`); a state of another size; a weight that is neither f32 nor bf16.
    pub fn update_parts(&mut self, parts: &[PartUpdate], lr: f64, coefficient: f32, gate: FoundInf) -> Result<()> {
        let mut tensors = Vec::with_capacity(parts.len());
        for part in parts {
            tensors.push(self.own_tensors(part)?);
        }
        let mut items = Vec::with_capacity(parts.len());
        for (part, tensors) in parts.iter().zip(&tensors) {
            let Some(state) = self.states.get(part.name).filter(|_| !part.range.is_empty()) else {
                continue;
            };
            let vector = crate::source::is_vector(part.name, part.shape.len());
            items.push(ParameterStep {
                weight: &tensors.weight,
                precision: tensors.precision.as_ref(),
                gradient: part.gradient,
                first: state.first.as_ref(),
                second: state.second.as_ref(),
                lr: lr * self.rate(part.name),
                weight_decay: if vector { 0.0 } else { self.settings.weight_decay },
                step: state.step,
                begin: part.range.start,
            });
        }
        step::step_gated(state::rule(&self.settings), &items, coefficient, gate).map_err(|e| match parts {
            [one] => e.or_at(one.name),
            _ => e,
        })
    }

    /// The tensors of a part during its update, which is counted.
    fn own_tensors(&mut self, part: &PartUpdate) -> Result<UpdateTensors> {
        let PartUpdate {
            name,
            weight,
            shape,
            range,
            gradient,
        } = part;
        let (name, weight) = (*name, *weight);
        if gradient.elem_count() != range.len() {
            return Err(Error::shape("the sizes of gradient and part differ")
                .at(name)
                .found(gradient.elem_count())
                .expected(range.len()));
        }
        if !self.states.contains_key(name) {
            let fresh = ParamState::fresh_part(&self.settings, shape, range.len(), weight.device())?;
            self.states.insert(name.to_string(), fresh);
        }
        // The part alone begins at its first element.
        let first = if weight.elem_count() == range.len() {
            0
        } else {
            range.start
        };
        let own = view(weight, name, &(first..first + range.len()))?;
        self.cut_low(name, range)?;
        let short = matches!(weight.dtype(), DType::BF16 | DType::F16);
        if short && self.settings.master == Master::F32 {
            let low = match self.low_parts.remove(name) {
                Some(low) => low.to_device(weight.device())?,
                None => update::zeros(range.len(), DType::I16, weight.device())?,
            };
            self.low_parts.insert(name.to_string(), low);
        }
        let tensors = match self.low_parts.get(name) {
            Some(low) => UpdateTensors {
                weight: own,
                precision: Precision::Master(low.clone()),
            },
            None => UpdateTensors {
                weight: own,
                ..self.tensors_for(name, weight, None)?
            },
        };
        let now = self.now;
        if let Some(state) = self.states.get_mut(name) {
            (state.step, state.updated) = (state.step + 1, now);
        }
        Ok(tensors)
    }

    /// Keeps the part of this rank of the low bits of a master.
    ///
    /// # Errors
    /// Low bits of another size.
    pub fn cut_low(&mut self, name: &str, range: &Range<usize>) -> Result<()> {
        if let Some(low) = self.low.remove(name) {
            // A copy, so that the rest is freed. A store in parts gives the part alone.
            let part = if low.elem_count() == range.len() {
                low
            } else if range.is_empty() {
                update::zeros(0, DType::I16, low.device())?
            } else {
                view(&low, name, range)?.force_contiguous()?
            };
            self.low_parts.insert(name.to_string(), part);
        }
        Ok(())
    }

    /// Takes the low bits of a master, or the part of this rank of them.
    pub(super) fn take_own_low(&mut self, name: &str) -> Option<Tensor> {
        self.low.remove(name).or_else(|| self.low_parts.remove(name))
    }

    /// The part of this rank of the low bits of a master, i16; `None`: the low bits are not in parts.
    pub fn low_part(&self, name: &str) -> Option<&Tensor> {
        self.low_parts.get(name)
    }

    /// The exact f32 values of the elements `range` of a weight. `first`: the first element of the part of this rank, which
    /// contains `range`; it says where the low bits of `range` are if this rank has only those of its part.
    ///
    /// # Errors
    /// The weight is neither f32, bf16 nor f16; it has fewer elements.
    pub fn exact_range(&self, name: &str, weight: &Tensor, range: &Range<usize>, first: usize) -> Result<Vec<f32>> {
        let of = |tensor: &Tensor, start: usize| tensor.flatten_all()?.narrow(0, start, range.len());
        let own = of(weight, range.start)?;
        let low = match self.low_parts.get(name) {
            Some(low) => Some(of(low, range.start - first)?),
            None => self.low.get(name).map(|low| of(low, range.start)).transpose()?,
        };
        match (own.dtype(), low) {
            (DType::BF16 | DType::F16, Some(low)) => step::join(&own, &low),
            _ => update::to_f32_vec(&own),
        }
    }

    /// Parameters with parts of low bits that `keep` rejects, sorted.
    pub fn low_parts_outside(&self, keep: impl Fn(&str) -> bool) -> Vec<String> {
        self.low_parts.keys().filter(|name| !keep(name)).cloned().collect()
    }

    /// Replaces the part of the low bits by all of them, i16 `[n]`.
    pub fn join_low(&mut self, name: &str, low: Tensor) {
        self.low_parts.remove(name);
        self.low.insert(name.to_string(), low);
    }

    /// Some elements of a weight as they are stored, for the other ranks.
    ///
    /// # Errors
    /// The weight is not f32, bf16 or f16.
    pub fn stored_part(name: &str, weight: &Tensor, range: &Range<usize>) -> Result<Vec<f32>> {
        update::to_f32_vec(&view(weight, name, range)?)
    }

    /// Sets some elements of a weight to another rank's `stored_part`.
    ///
    /// # Errors
    /// Another number of values.
    pub fn set_part(name: &str, weight: &Tensor, range: &Range<usize>, values: &[f32]) -> Result<()> {
        update::set(&view(weight, name, range)?, values)
    }
}
