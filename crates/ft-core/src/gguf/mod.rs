//! GGUF files for llama.cpp and the programs built on it: which architecture computes a family, names and order of
//! tensors, keys, number formats. Independent of training.

mod adapter;
mod arch;
mod keys;
mod model;
mod names;

pub use adapter::{AdapterFile, adapter};
pub use arch::families;
pub use model::{Fidelity, FileType, ModelFile, WrittenModel, model};

#[cfg(test)]
mod tests;
