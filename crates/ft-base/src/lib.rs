//! Errors with hints, caught panics of libraries, atomic files, locks, counter-based random numbers, units, signals,
//! the message of a process that is aborted, the allocator, a simulated allocator, memory readings, progress, means for metrics, speed of the machine, confined processes, ends of connections, masks for secrets, disks that hang, suggestions for missing paths.
//! Independent of models and recipes. The only module that writes files.

#![warn(missing_docs, unreachable_pub)]
// Outside of tests only errors may end the program: clippy denies calls that panic. Nothing is printed.
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::unimplemented,
        clippy::print_stdout,
        clippy::print_stderr
    )
)]

pub mod aborted;
pub mod allocator;
pub mod cache;
mod catch_panic;
pub mod error;
pub mod files;
pub mod ledger;
pub mod lock;
pub mod means;
pub mod memory;
mod named;
pub mod partial;
pub mod paths;
pub mod progress;
pub mod rehearse;
pub mod rng;
pub mod secrets;
pub mod signal;
pub mod sockets;
pub mod speed;
pub mod staging;
pub mod stalled;
pub mod suggest;
pub mod sync;
#[cfg(target_os = "linux")]
mod syscalls;
pub mod threads;
pub mod units;
pub mod worker;

pub use catch_panic::{catch_panic, is_caught};
pub use error::{Error, ErrorKind, Result};
pub use named::NamedEnum;

/// The target of a position that is not trained, in batches and in losses.
pub const IGNORE: u32 = u32::MAX;
