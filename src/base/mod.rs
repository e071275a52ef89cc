//! Errors with hints, caught panics of libraries, atomic files, locks, counter-based random numbers, units, signals,
//! the allocator, memory readings, progress, speed of the machine, confined processes, suggestions for missing paths.
//! Independent of models and recipes. The only module that writes files.

pub mod cache;
mod caught;
pub mod error;
pub mod files;
pub mod heap;
pub mod lock;
pub mod memory;
pub mod partial;
pub mod paths;
pub mod progress;
pub mod rng;
pub mod signal;
pub mod speed;
pub mod staging;
#[cfg(target_os = "linux")]
mod syscalls;
pub mod units;
pub mod worker;

pub use caught::{caught, is_expected};
pub use error::{Error, ErrorKind, Result};
