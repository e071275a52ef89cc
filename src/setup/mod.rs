//! Everything that a recipe names, opened and checked: the model directory, the rows, the adapters, the teacher, the
//! rewards; values for `auto` keys; the parameters that are active in each step. Loads no weights of the trained model.

mod active_period;
pub mod active_schedule;
pub mod adapters;
pub mod alignment;
pub mod allocation;
pub mod defaults;
pub mod locate;
mod model;
pub mod prompts;
pub mod rewards;
pub mod row_sizes;
pub mod rows;
pub mod sources;
pub mod teacher;
pub mod vocabulary;

pub use active_period::{ActivePeriod, ElementBytes, InactiveElements};
pub use model::*;
