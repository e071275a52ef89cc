//! Errors with hints, atomic files, locks, counter-based random numbers, units, signals, memory readings.
//! Knows nothing of models or recipes. The only room that writes files.

pub mod error;
pub mod files;
pub mod lock;
pub mod memory;
pub mod partial;
pub mod rng;
pub mod signal;
pub mod staging;
pub mod units;

pub use error::{Error, ErrorKind, Result};
