//! One optimizer step, for every method: forward, objective, backward, gradient sinks, clipping, update.
//! Depends on the four contracts and the optimizer. No file IO, no data formats.

pub mod active;
mod held;
pub mod pass;
pub mod sinks;
pub mod step;

pub use active::Active;
pub use pass::{Keeping, Totals, evaluate, window};
pub use step::{Engine, Gradients, StepReport};
