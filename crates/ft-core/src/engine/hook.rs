//! Code of an adaptation method that runs around the update of a step.

use crate::base::Result;
use crate::peft::rank_allocation::{RankAllocator, StepGradients};
use std::collections::BTreeMap;

/// Runs before and after the update of each step, on the accumulated gradients of all parameters. With a hook the engine
/// stores the gradients until the update (`GradientStorage::Keep`).
pub trait StepHook {
    /// May change `gradients` in place: they are complete, f32, and not clipped.
    ///
    /// # Errors
    /// A gradient of another shape (`Shape`); not enough memory on the device (`OutOfMemory`).
    fn before_update(&mut self, gradients: &StepGradients) -> Result<()>;

    /// Runs after the update of `step` (from 1) with `gradients` times `coefficient`, the clipping factor.
    ///
    /// # Errors
    /// A gradient or a weight of another type (`Shape`); not enough memory on the device (`OutOfMemory`).
    fn after_update(&mut self, step: u64, gradients: &StepGradients, coefficient: f32) -> Result<()>;

    /// The state for a checkpoint, by name.
    fn state(&self) -> BTreeMap<String, Vec<f32>>;

    /// Restores one entry of `state`.
    ///
    /// # Errors
    /// A name or a size that does not belong to this hook.
    fn restore(&mut self, name: &str, values: Vec<f32>) -> Result<()>;
}

/// AdaLoRA.
impl StepHook for RankAllocator {
    fn before_update(&mut self, gradients: &StepGradients) -> Result<()> {
        self.regularize(gradients)
    }

    fn after_update(&mut self, step: u64, gradients: &StepGradients, coefficient: f32) -> Result<()> {
        self.after(step, gradients, coefficient)
    }

    fn state(&self) -> BTreeMap<String, Vec<f32>> {
        self.saved()
    }

    fn restore(&mut self, name: &str, values: Vec<f32>) -> Result<()> {
        RankAllocator::restore(self, name, values)
    }
}
