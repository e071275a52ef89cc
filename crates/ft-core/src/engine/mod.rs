//! One optimizer step, for every method: forward, objective, backward, gradient sinks, clipping, update.
//! Depends on the four contracts and the optimizer. No file IO, no data formats.

pub mod active;
mod clipping;
mod config;
pub mod divided;
mod ema;
pub mod hook;
mod layer_graphs;
mod loss_scale;
mod outer;
mod own_state;
pub mod pass;
mod publish;
mod reduce;
pub mod sinks;
mod squares;
pub mod step;
mod strategy;
mod switch;
pub mod window;

pub use active::ActiveSet;
pub use config::{RankConfig, TrainConfig};
pub use divided::{MomentValues, SavedMoment};
pub use ema::{Ema, EmaConfig, ema_bytes};
pub use hook::StepHook;
pub use layer_graphs::LayerGraphs;
pub use loss_scale::{LossScale, LossScaleConfig};
pub use outer::{OuterConfig, outer_bytes};
pub use own_state::OwnState;
pub use pass::{GradientPass, Totals, evaluate};
pub use reduce::{GradientExchange, UpdateExchange, corrected_bytes, exchange_bytes, leaving_bytes, sent_bytes};
pub use step::{Engine, GradientStorage, QueuedStep, StepReport};
pub use strategy::StepStrategy;

#[cfg(test)]
mod expert_ranks_tests;
#[cfg(test)]
mod host_tests;
#[cfg(test)]
mod in_node_tests;
#[cfg(test)]
mod outer_tests;
#[cfg(test)]
mod own_state_tests;
#[cfg(test)]
mod ranks_tests;
#[cfg(test)]
mod sequence_tests;
#[cfg(test)]
mod sharded_tests;
#[cfg(test)]
mod shared_tests;
#[cfg(test)]
mod step_tests;
