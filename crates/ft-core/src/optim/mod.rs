//! Optimizers, learning-rate schedules and the block schedule, on named parameters and gradients.
//! Independent of layers and files. The arithmetic of the update rules is in `ops::step`.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use ft_core::optim::config::{OptimizerConfig, OptimizerName, ScheduleConfig, ScheduleName, StateDtype};
//! use ft_core::optim::{Optimizer, Schedule, Update};
//!
//! # fn main() -> ft_base::Result<()> {
//! // Lion with 8-bit states, 100 steps with a linear decay.
//! let mut optimizer = Optimizer::new(OptimizerConfig {
//!     name: OptimizerName::Lion,
//!     state: StateDtype::Int8,
//!     ..OptimizerConfig::default()
//! });
//! let schedule = Schedule::new(&ScheduleConfig { name: ScheduleName::Linear, ..ScheduleConfig::default() }, 100);
//!
//! // The weight changes in place.
//! let weight = Tensor::new(&[1f32, -1.0], &Device::Cpu)?;
//! let gradient = Tensor::new(&[0.5f32, 0.5], &Device::Cpu)?;
//! optimizer.begin(10);
//! let update = Update { name: "w", weight: &weight, gradient: &gradient, subset: None };
//! optimizer.update_all(&[update], 0.1 * schedule.multiplier(10), 1.0)?;
//! assert!(weight.to_vec1::<f32>()?[0] < 1.0);
//! # Ok(())
//! # }
//! ```

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
pub use mask::UpdateMasks;
pub(crate) use optimizer::part_view;
pub use optimizer::{Optimizer, PartUpdate, SavedState, Update, range_of_part};
pub use partition::partition;
pub use schedule::Schedule;
