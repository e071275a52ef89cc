//! Updates of a part of a parameter: on several ranks each one has the moments of its part, updates it, and the others
//! copy the result. The bits are those of an update of the whole parameter.

use super::super::state::{self, State};
use super::{Optimizer, UpdateTensors};
use crate::base::{Error, Result};
use crate::ops::step::{self, BLOCK, ParameterStep};
use crate::ops::update;
use crate::optim::config::OptimizerName;
use candle_core::{DType, Tensor};
use std::ops::Range;

/// The part of a parameter that this rank updates.
pub struct PartUpdate<'a> {
    /// Name of the parameter: the key of its state.
    pub name: &'a str,
    /// The whole weight, f32 or bf16 of n elements; only `range` is updated, in place.
    pub weight: &'a Tensor,
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

/// A view of some elements of a tensor on the CPU, flat.
fn view(tensor: &Tensor, name: &str, range: &Range<usize>) -> Result<Tensor> {
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

    /// Updates a part of a parameter with its gradient times `coefficient`. Every rank calls it for every parameter, also
    /// if its part is empty, so that the counts of updates are equal.
    ///
    /// # Errors
    /// A gradient of another size than the part (`Shape`); a state of another size; a weight that is neither f32 nor bf16.
    pub fn update_part(&mut self, part: &PartUpdate, lr: f64, coefficient: f32) -> Result<()> {
        let PartUpdate {
            name,
            weight,
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
            let fresh = State::fresh_part(&self.settings, weight.dims(), range.len(), weight.device())?;
            self.states.insert(name.to_string(), fresh);
        }
        let whole = self.tensors_for(name, weight, None)?;
        let tensors = UpdateTensors {
            weight: view(&whole.weight, name, range)?,
            low: whole.low.as_ref().map(|low| view(low, name, range)).transpose()?,
            rounding: whole.rounding,
        };
        let (now, rate) = (self.now, self.rate(name));
        let Some(state) = self.states.get_mut(name) else {
            return Ok(());
        };
        (state.step, state.updated) = (state.step + 1, now);
        if range.is_empty() {
            return Ok(());
        }
        let vector = crate::source::is_vector(name, weight.rank());
        let item = ParameterStep {
            weight: &tensors.weight,
            precision: tensors.precision(),
            gradient,
            first: state.first.as_ref(),
            second: state.second.as_ref(),
            lr: lr * rate,
            weight_decay: if vector { 0.0 } else { self.settings.weight_decay },
            step: state.step,
        };
        step::step_part(state::rule(&self.settings), &item, range.start, coefficient).map_err(|e| e.or_at(name))
    }

    /// The exact f32 values of some elements of a trained weight.
    ///
    /// # Errors
    /// The weight is neither f32 nor bf16.
    pub fn exact_part(&self, name: &str, weight: &Tensor, range: &Range<usize>) -> Result<Vec<f32>> {
        let own = view(weight, name, range)?;
        match (weight.dtype(), self.low.get(name)) {
            (DType::BF16, Some(low)) => step::join(&own, &view(low, name, range)?),
            _ => update::to_f32_vec(&own),
        }
    }

    /// Sets some elements of a trained weight to exact values from another rank's `exact_part`.
    ///
    /// # Errors
    /// Another number of values.
    pub fn set_part(&self, name: &str, weight: &Tensor, range: &Range<usize>, values: &[f32]) -> Result<()> {
        let to = view(weight, name, range)?;
        match (weight.dtype(), self.low.get(name)) {
            (DType::BF16, Some(low)) => step::split(values, &to, &view(low, name, range)?),
            _ => update::set(&to, values),
        }
    }
}
