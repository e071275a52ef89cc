//! A training state on disk: either complete and verified, or absent.
//!
//! ```text
//! run_dir/checkpoint-<step>/
//!   weights.safetensors optimizer.safetensors ...   the caller's named tensors
//!   state.json                                       one JSON value: counters, positions, settings
//!   manifest.json                                    every file with its size and hash; written last
//! ```
//!
//! Everything is written under a temporary name, synced, and renamed at the end, so a process that is killed at any
//! moment leaves either the old state or the new one. On several ranks each one may write a part of the tensors (`parts`). Uses names, tensors and JSON; independent of models, optimizers
//! and recipes.

mod keep;
mod load;
mod manifest;
mod parts;
mod save;

pub use crate::formats::writer::{TensorPlan, Values};
pub use keep::{RotationReport, clean_leftovers, is_ours, list, remove, rotate, set_aside_later};
pub use load::{LoadedState, latest, latest_whole, load};
pub use manifest::{CheckpointManifest, ManifestEntry, hash, verify};
pub use parts::{DividedFile, check_shared, save_parts};
pub use save::{CheckpointFile, TensorSink, bring, check_space, save, space_needed};

/// Name of the JSON file.
pub const STATE: &str = "state.json";

#[cfg(test)]
mod kill_tests;
#[cfg(test)]
mod parts_tests;
#[cfg(test)]
mod tests;
