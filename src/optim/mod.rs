//! Optimizers, learning-rate schedules and the block schedule, on named parameters and gradients.
//! Independent of layers and files. The arithmetic of the update rules is in `ops::step`.

pub mod blocks;
pub mod config;
pub mod mask;
pub mod optimizer;
mod partition;
pub mod schedule;
mod state;

pub use crate::ops::master;
pub use blocks::{BlockPlan, BlockSchedule};
pub use config::{BlockConfig, OptimizerConfig, ScheduleConfig};
pub use mask::Masks;
pub use optimizer::{Optimizer, SavedState, Update};
pub use partition::partition;
pub use schedule::Schedule;
