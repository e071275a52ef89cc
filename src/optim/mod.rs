//! Optimizers, learning-rate schedules and the block schedule: named parameters and gradients in, update out.
//! Knows names, shapes and numbers. Knows no layers, no files.

pub mod adamw;
pub mod blocks;
pub mod optimizer;
pub mod schedule;
pub mod sgd;

pub use crate::ops::master;
pub use blocks::{BlockPlan, BlockSchedule};
pub use optimizer::{Optimizer, Saved, SavedState};
pub use schedule::Schedule;
