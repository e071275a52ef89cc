//! One optimizer step, for every method there is: forward, objective, reverse vjp, sinks, clip, update.
//! Knows the four contracts and the optimizer. Does no file IO, knows no data formats.

pub mod active;
mod held;
pub mod pass;
pub mod sinks;
pub mod step;

pub use active::Active;
pub use pass::{Keeping, Totals, evaluate, window};
pub use step::{Engine, Gradients, StepReport};
