//! Adapters on a linear: shapes, initialisation, forward, backward, merge.
//! Knows one matrix and its delta. Knows no layers, no optimizers, no files.

pub mod lora;
pub mod targets;

pub use lora::{Dropout, Lora, LoraGrads};
