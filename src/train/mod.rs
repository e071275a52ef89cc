//! `ft train`: the program, the stages that feed the engine, the start values of adapters, the training state, and the
//! run directory.

mod abort_message;
mod best;
mod budget;
pub mod checkpoint_size;
pub mod covariance;
pub mod directory;
mod ended;
pub mod finish;
pub mod from_checkpoint;
mod gpus;
pub mod header;
pub mod learning;
mod loftq;
mod next;
mod non_finite;
mod owner;
mod profile;
mod program;
pub mod ranks;
mod rehearsal;
pub mod resumed;
mod running;
pub mod samples;
mod saving;
pub mod side_inputs;
pub mod stage;
pub mod start_cache;
pub mod starts;
pub mod state;
mod step_metrics;
pub mod teacher_cache;
mod trained_names;
pub mod verify;

pub use crate::setup::defaults::Resume;
// For the fuzz targets.
#[doc(hidden)]
pub use best::best_again;
pub use ended::train;
pub use learning::RateSweep;
pub use program::{TrainOptions, TrainOutcome};
